PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-full bench drills wheel peers docs lint clean

demo: $(INSTALLED)
	$(BIN)/moeq run recipes/demo.yaml --out demo-out

test: $(INSTALLED) lint
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-full: $(INSTALLED) lint
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} MOEQ_FULL=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
	$(MAKE) bench

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench.py

drills: $(INSTALLED)
	$(BIN)/python benchmarks/drills.py --json build/bench/drills.json

wheel: $(INSTALLED)
	rm -rf dist build *.egg-info
	$(BIN)/python -m build --outdir dist

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python tests/update_docs.py
	$(BIN)/python -m mkdocs build --strict

peers: $(INSTALLED) .peers/gptqmodel/.installed .peers/llama-cpp-python/.installed
	MOEQ_PEERS=$(CURDIR)/.peers $(BIN)/python -m pytest -rs -k "gptq or gguf" tests/exporters/test_peers.py tests/verification/test_peers.py tests/exporters/test_gguf.py tests/exporters/test_gguf_tokenizer.py

.peers/gptqmodel/.installed: constraints.txt
	$(PYTHON) -m venv .peers/gptqmodel
	grep '^torch==' constraints.txt > .peers/torch.txt
	.peers/gptqmodel/bin/python -m pip install --quiet -c .peers/torch.txt torch setuptools wheel numpy packaging ninja
	.peers/gptqmodel/bin/python -m pip install --quiet -c .peers/torch.txt --no-build-isolation gptqmodel==7.6.0
	touch $@

.peers/llama-cpp-python/.installed: constraints.txt
	$(PYTHON) -m venv .peers/llama-cpp-python
	.peers/llama-cpp-python/bin/python -m pip install --quiet -c constraints.txt torch safetensors
	CMAKE_ARGS=-DLLAVA_BUILD=OFF .peers/llama-cpp-python/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'moeq needs Python 3.11 or later: make PYTHON=python3.11')"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,peers]'
	touch $@

clean:
	rm -rf .venv .peers demo-out build dist *.egg-info
