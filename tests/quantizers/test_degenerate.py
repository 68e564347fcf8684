"""Whatever weights and tokens a layer has: finite grids and losses, and the table says what stood in for what."""

from __future__ import annotations

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError
from moeq.models.experts import ExpertLayer, ExpertMath
from moeq.models.kinds import GATED
from moeq.models.kinds.base import ActThenMultiply
from moeq.models.walk import LayerInputs
from moeq.numerics.storing import packed_of
from moeq.quantizers import rtn
from moeq.quantizers.layer import LayerResult, quantize_layer
from moeq.recipe import LossesSection

LAYER = ExpertLayer(index=0, name="layers.0.experts", num_experts=3, hidden_size=20, intermediate_size=12)
SILU = ExpertMath(gate=ActThenMultiply(nn.SiLU()))
TOKENS, SEQUENCES = 12, 8
FALLBACKS = {
    "none",
    "borrowed_hessian",
    "left_out_tokens",
    "raised_damping",
    "float64",
    "rounded",
    "scale_underflow",
    "scale_overflow",
}
BITS = [1, 2, 3, 4, 8]


def tokens(hidden: Tensor, experts: Tensor, left_out: int = 0) -> LayerInputs:
    """hidden [T, H] and the expert of each token [T], in sequences of TOKENS."""
    index = torch.arange(len(hidden))
    return LayerInputs(
        layer=LAYER, hidden=hidden, experts=experts.unsqueeze(1), weights=torch.ones(len(hidden), 1),
        sequence=index // TOKENS, position=index % TOKENS, left_out=left_out,
    )  # fmt: skip


def random_hidden(generator: torch.Generator) -> Tensor:
    return torch.randn(TOKENS * SEQUENCES, LAYER.hidden_size, generator=generator)


def random_weights(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: 0.1 * torch.randn(LAYER.num_experts, *LAYER.shape(name), generator=generator) for name in GATED}


def spoil_weights(kind: str, weights: dict[str, Tensor]) -> None:
    for stack in weights.values():
        if kind == "zero expert":
            stack[1] = 0
        elif kind == "zero row":
            stack[:, 2] = 0
        elif kind == "zero column":
            stack[:, :, 3] = 0
        elif kind == "same rows":
            stack[:, 1:] = stack[:, :1]
        elif kind == "constant":
            stack[:] = 0.25
        elif kind == "one outlier":
            stack[0, 0, 0] = 3e4
        elif kind == "tiny":
            stack *= 1e-9


def spoil_tokens(kind: str, hidden: Tensor, experts: Tensor) -> None:
    if kind == "all the same":
        hidden[:] = hidden[0].clone()
    elif kind == "constant columns":
        hidden[:, ::2] = 1.0
    elif kind == "same columns":
        hidden[:, 1:] = hidden[:, :1]
    elif kind == "zeros":
        hidden[:] = 0
    elif kind == "dead columns":
        hidden[:, :5] = 0
    elif kind == "one outlier":
        hidden[0, 0] = 1e5
    elif kind == "no token":
        experts[experts == 2] = 0
    elif kind == "one token":
        experts[experts == 2] = 0
        experts[0] = 2


def check(result: LayerResult, weights: dict[str, Tensor]) -> None:
    for name, widths in result.replicas.items():
        for bits, packed in widths.items():
            assert torch.isfinite(packed.scales).all(), (name, bits)
            assert torch.isfinite(packed.dequantize()).all(), (name, bits)
            nothing = (weights[name] == 0).all(2)
            assert (packed.dequantize()[nothing] == 0).all(), (name, bits)
    for row in result.rows:
        assert row["loss"] >= 0
        assert row["relative_loss"] >= 0
        assert row["loss"] < float("inf")
        assert set(row["fallback"].split("+")) <= FALLBACKS


@settings(max_examples=examples(40), deadline=None)
@given(
    weight_kind=st.sampled_from(
        ["plain", "zero expert", "zero row", "zero column", "same rows", "constant", "one outlier", "tiny"]
    ),
    token_kind=st.sampled_from(
        ["plain", "all the same", "constant columns", "same columns", "zeros", "dead columns", "one outlier",
         "no token", "one token"]
    ),
    clip=st.sampled_from(["minmax", "mse"]),
    variant=st.sampled_from([{}, {"act_order": True}, {"nested": True}]),
    symmetric=st.booleans(),
    borrow=st.sampled_from([0, 64]),
    group_size=st.sampled_from([-1, 8]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_any_layer_gives_finite_grids_and_losses(
    weight_kind: str, token_kind: str, clip: str, variant: dict[str, bool], symmetric: bool, borrow: int,
    group_size: int, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    weights, hidden = random_weights(generator), random_hidden(generator)
    experts = torch.randint(LAYER.num_experts, (len(hidden),), generator=generator)
    spoil_weights(weight_kind, weights)
    spoil_tokens(token_kind, hidden, experts)
    config = LossesSection.model_validate(
        {"bits": BITS, "clip": clip, **variant, "symmetric": symmetric, "borrow_tokens": borrow,
         "group_size": group_size, "min_tokens": 4}
    )  # fmt: skip
    result = quantize_layer(tokens(hidden, experts), weights, SILU, config)
    check(result, weights)
    found = {row["fallback"] for row in result.rows if row["expert"] == 2 and row["method"] == "gptq"}
    if token_kind in {"no token", "one token"}:
        assert all("borrowed_hessian" in fallback for fallback in found)


def one_row(result: LayerResult, **wanted: object) -> dict[str, object]:
    (found,) = (row for row in result.rows if all(row[key] == value for key, value in wanted.items()))
    return found


@pytest.mark.parametrize("clip", ["minmax", "mse"])
def test_without_tokens_or_borrowing_gptq_is_rounding(clip: str) -> None:
    generator = torch.Generator().manual_seed(4)
    weights, hidden = random_weights(generator), random_hidden(generator)
    experts = torch.arange(len(hidden)) % 2
    config = LossesSection.model_validate({"bits": BITS, "group_size": 8, "borrow_tokens": 0, "clip": clip})
    result = quantize_layer(tokens(hidden, experts), weights, SILU, config)
    rounded = rtn.quantize(weights, None, config)
    for name in GATED:
        for bits in BITS:
            same = packed_of(rounded[name], bits, symmetric=False)
            assert torch.equal(same.codes[2], result.replicas[name][bits].codes[2])
            assert torch.equal(same.scales[2], result.replicas[name][bits].scales[2])


def test_a_singular_hessian_is_recorded() -> None:
    """All tokens the same and next to no damping: what the factorization fell back to stands in the table."""
    generator = torch.Generator().manual_seed(5)
    weights, hidden = random_weights(generator), random_hidden(generator)
    hidden[:] = hidden[0].clone()
    config = LossesSection.model_validate({"bits": BITS, "group_size": 8, "damping": 1e-12, "borrow_tokens": 0})
    experts = torch.arange(len(hidden)) % 3
    result = quantize_layer(tokens(hidden, experts), weights, SILU, config)
    check(result, weights)
    fallback = str(one_row(result, expert=0, method="gptq", bits=2, projection=WHOLE)["fallback"])
    assert {"float64", "raised_damping"} & set(fallback.split("+"))
    assert one_row(result, expert=0, method="rtn", bits=2, projection=WHOLE)["fallback"] == "none"


def test_tokens_that_were_left_out_are_recorded() -> None:
    generator = torch.Generator().manual_seed(6)
    weights, hidden = random_weights(generator), random_hidden(generator)
    experts = torch.arange(len(hidden)) % 3
    config = LossesSection(bits=[2], group_size=8, min_tokens=4)
    result = quantize_layer(tokens(hidden, experts, left_out=7), weights, SILU, config)
    assert one_row(result, expert=1, method="gptq", bits=2, projection=WHOLE)["fallback"] == "left_out_tokens"


@pytest.mark.parametrize(("kept", "side"), [(slice(0, 36), "held-out"), (slice(36, 48), "calibration")])
def test_a_side_without_tokens_is_an_error_that_names_the_layer(kept: slice, side: str) -> None:
    generator = torch.Generator().manual_seed(7)
    whole = tokens(random_hidden(generator), torch.arange(TOKENS * SEQUENCES) % 3)
    parts = {name: getattr(whole, name)[kept] for name in ("hidden", "experts", "weights", "sequence", "position")}
    inputs = LayerInputs(layer=LAYER, left_out=60, **parts)
    with pytest.raises(QuantizationError, match=rf"layers\.0\.experts: no {side} tokens"):
        quantize_layer(inputs, random_weights(generator), SILU, LossesSection(group_size=8))


def test_numbers_beyond_float32_are_an_error_that_names_the_expert() -> None:
    generator = torch.Generator().manual_seed(8)
    hidden = random_hidden(generator)
    hidden[:] *= 1e25
    inputs = tokens(hidden, torch.arange(len(hidden)) % 3)
    with pytest.raises(QuantizationError, match=r"layers\.0\.experts, expert 0, expert: the 1-bit gptq loss"):
        quantize_layer(inputs, random_weights(generator), SILU, LossesSection(group_size=8))
