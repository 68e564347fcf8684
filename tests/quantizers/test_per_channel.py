"""Symmetric per-channel int8 and int4 (Who Says Elephants Can't Run, 3.4): scales [E, 1, N], codes stored unsigned."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from manifest_reader import read_expert
from pydantic import ValidationError
from torch import Tensor

from moeq import pipeline
from moeq.models.experts import stacked_weights
from moeq.models.kinds import GATED
from moeq.models.loading import DTYPES, describe, load_model
from moeq.models.source import open_source
from moeq.numerics.storing import packed_of
from moeq.progress import Reporter
from moeq.quantizers import rtn
from moeq.recipe import LossesSection, load_recipe
from moeq.stages.context import Context
from moeq_kernels.packing import unpack

SETTINGS = {"methods": ["rtn"], "bits": [4, 8], "group_size": -1, "symmetric": True, "clip": "minmax"}
REACH = {("narrow", 8): 127, ("narrow", 4): 7, ("full", 8): 128, ("full", 4): 8}
LEAST = {("narrow", 8): -127, ("narrow", 4): -7, ("full", 8): -128, ("full", 4): -8}
MOST = {8: 127, 4: 7}
UNSIGNED = {8: 128, 4: 8}  # what is added to the integers to store them, 3.4.1


def quantize(weight: Tensor, bits: int, kept: str) -> tuple[Tensor, Tensor]:
    """Range-based symmetric per-channel integers of W (E, M, N) and the FP16 scales (E, 1, N)."""
    scales = (weight.double().abs().amax(1, keepdim=True) / REACH[kept, bits]).half()
    integers = (weight.double() / scales.double()).round().clamp(LEAST[kept, bits], MOST[bits])
    return torch.where(scales > 0, integers, 0.0), scales


def dequantize(integers: Tensor, scales: Tensor) -> Tensor:
    """Algorithm 1: W_dq[e, m, n] = IntToFloat(W[e, m, n]) * S[e, n]."""
    found = torch.empty_like(integers)
    for e in range(integers.shape[0]):
        for n in range(integers.shape[2]):
            found[e, :, n] = integers[e, :, n] * scales[e, 0, n].double()
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kept", ["narrow", "full"])
def test_codes_scales_and_values_are_the_papers(kept: str, bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = 0.1 * torch.randn(3, 50, 30, generator=generator)  # (E, M, N): M inputs, N outputs
    weight[1, :, 4] = 0
    weight[2, 7] *= 20
    config = LossesSection.model_validate(SETTINGS | {"symmetric_range": kept})
    packed = packed_of(rtn.quantize({"up_proj": weight.mT}, None, config)["up_proj"], bits, symmetric=True)
    integers, scales = quantize(weight, bits, kept)
    assert packed.zeros is None
    assert torch.equal(packed.scales.mT, scales)
    assert torch.equal(unpack(packed.codes, bits, 50).mT.double(), integers + UNSIGNED[bits])
    assert torch.equal(packed.dequantize(torch.float64).mT, dequantize(integers, scales))
    extreme = integers.abs().amax(1)[scales[:, 0] > 0]
    assert (extreme >= MOST[bits]).all()
    assert integers.min() == LEAST[kept, bits]


def test_the_default_range_is_another() -> None:
    weight = torch.linspace(-1, 1, 33).view(1, 1, 33)
    even, narrow = (
        rtn.quantize({"x": weight}, None, LossesSection.model_validate(SETTINGS | {"symmetric_range": kept}))["x"]
        for kept in ("even", "narrow")
    )
    assert even.scale.flatten().tolist() == pytest.approx([1 / 7.5, 1 / 127.5], rel=1e-3)
    assert narrow.scale.flatten().tolist() == pytest.approx([1 / 7, 1 / 127], rel=1e-3)


def test_a_range_without_symmetry_is_refused() -> None:
    with pytest.raises(ValidationError, match="symmetric_range: narrow needs symmetric: true"):
        LossesSection.model_validate({"symmetric_range": "narrow"})


def test_a_run_stores_them_exactly(tiny_mixtral: Path, tmp_path: Path) -> None:
    recipe = load_recipe(None, [
        "corpus.sequences=8", "corpus.sequence_length=32", "losses.methods=[rtn]", "losses.bits=[4, 8]",
        "losses.group_size=-1", "losses.symmetric=true", "losses.symmetric_range=narrow", "losses.clip=minmax",
        "assign={method: uniform, bits: 4, quantizer: rtn}", "quantize.replicas=all", "eval.perplexity=null",
        "eval.compare=[]",
    ])  # fmt: skip
    context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    folder = context.directory("export")
    manifest = json.loads((folder / "placement.json").read_text("utf-8"))
    source = open_source(str(tiny_mixtral))
    model = load_model(source, DTYPES["float32"], torch.device("cpu"))
    for layer, found in zip(manifest["layers"], describe(source)[1], strict=True):
        exact = stacked_weights(model, found, slice(None))
        for expert in layer["experts"]:
            for replica in expert["replicas"]:
                if replica["bits"] == 16:
                    continue
                values = read_expert(folder, layer, replica, manifest["layout"])
                for name in GATED:
                    one = exact[name][expert["expert"]][None].mT
                    wanted = dequantize(*quantize(one, replica["bits"], "narrow"))[0].T
                    np.testing.assert_array_equal(values[name], wanted.numpy())
