"""EXL3's stored form as gptqmodel's torch backend reads it, which shares no code with moeq."""

from __future__ import annotations

from pathlib import Path

import peers
import pytest
import torch
from made_sources import IDS, MadeSource, reference_logits, save_model
from safetensors.torch import load_file, save_file

from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.numerics import exl3_ldlq
from moeq_kernels.exl3 import CODEBOOKS, Exl3Weight, weight_of

SCRIPT = Path(__file__).parent / "peer_exl3.py"


@pytest.mark.parametrize("package", ["gptqmodel"])
def test_what_moeq_codes_is_what_the_peer_reads(package: str, tmp_path: Path) -> None:
    """What lies between the transforms bit for bit; the weight and the output but for sums in float32."""
    peers.interpreter(package)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 256, 128, generator=generator) * 0.02
    factor, made = exl3_ldlq.factorize_turned(torch.eye(128)[None], 0.01), dict[str, Exl3Weight]()
    for codebook in CODEBOOKS:
        for bits in (2, 3) if codebook == "mul1" else (2,):
            (one,) = exl3_ldlq.quantize(weight, factor, torch.eye(128)[None], [bits], codebook)
            made[f"{codebook}.{bits}"] = weight_of(one.codes[0], one.scales[0, :, 0], bits, 128, codebook)
    x = torch.randn(5, 128, generator=generator)
    tensors = {name: tensor for module, one in made.items() for name, tensor in one.tensors(module).items()}
    save_file({"x": x, **tensors}, tmp_path / "given.safetensors")
    peers.run(package, SCRIPT, tmp_path / "given.safetensors", tmp_path / "found.safetensors")
    found = load_file(tmp_path / "found.safetensors")
    for module, one in made.items():
        whole = one.dequantize()
        assert torch.equal(found[f"{module}.inner"], one.inner())
        # it keeps values of codebooks in float32, which the kernels round to float16
        torch.testing.assert_close(found[f"{module}.weight"].T, whole, rtol=0, atol=2**-10 * float(whole.abs().max()))
        error = (found[f"{module}.output"] - x @ whole.T).norm() / (x @ whole.T).norm()
        assert float(error) < 1e-3


def test_a_model_is_loaded_by_the_peer(tmp_path: Path) -> None:
    """A layer of another width for each matrix, and one in 16 bits."""
    peers.interpreter("gptqmodel")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4}
    path, widths = save_model(tmp_path / "model", "qwen3_moe", **sizes), {"gate_proj": 2, "up_proj": 3, "down_proj": 4}
    source = MadeSource(path, lambda layer, expert, name: widths[name] if layer else 16, exl3=True)
    write("exl3", source, tmp_path / "out", WriteOptions())
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    (found,) = peers.load("gptqmodel", "gptqmodel-exl3", [tmp_path / "out"], tmp_path / "ids.safetensors")
    wanted = reference_logits(source)
    assert isinstance(found, torch.Tensor), found
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
