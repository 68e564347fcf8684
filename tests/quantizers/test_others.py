"""Modules outside of the experts against oracles that keep every row: sums, codes, errors, fallbacks."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moeq.errors import QuantizationError
from moeq.models import walk
from moeq.models.non_experts import OtherModule
from moeq.models.walk import Batch
from moeq.numerics import gptq
from moeq.numerics.factor import factorize
from moeq.numerics.storing import packed_of
from moeq.quantizers import non_experts as others
from moeq.quantizers.non_experts import Grid, InputSums, Listener, quantize_embedding, quantize_linears, split_rows

HELDOUT = torch.tensor([False, True, False, False])


def batch(rows: int = 4, length: int = 6, pads: int = 0) -> Batch:
    mask = torch.ones(rows, length, dtype=torch.long)
    if pads:
        mask[-1, -pads:] = 0
    return Batch(input_ids=torch.zeros(rows, length, dtype=torch.long), mask=mask, sequences=torch.arange(rows))


def running(of: Batch, act: Callable[[], object]) -> None:
    """What a hook of a walk sees."""
    context = copy_context()
    context.run(walk._running.set, of)
    context.run(act)


class Block(nn.Module):
    """q, k and v of one tensor, o of another; `late` is given a second tensor as well, `lone` none."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, rows, inputs in (
            ("q", 12, 40),
            ("k", 6, 40),
            ("v", 6, 40),
            ("late", 5, 40),
            ("o", 9, 12),
            ("lone", 4, 40),
        ):
            linear = nn.Linear(inputs, rows, bias=False)
            linear.weight.data.normal_(generator=generator)
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        self.k(x), self.v(x), self.late(x)
        self.late(torch.zeros_like(x) + 0.5)
        return self.o(q)  # type: ignore[no-any-return]


def described(block: Block) -> list[OtherModule]:
    return [
        OtherModule(name=name, kind="attention", block="", rows=one.out_features, inputs=one.in_features)
        for name, one in block.named_children()
    ]


def listened(block: Block, inputs: list[Tensor], of: Batch) -> dict[str, InputSums]:
    listener = Listener(block, described(block), HELDOUT)
    with torch.no_grad():
        for x in inputs:
            running(of, lambda x=x: block(x))  # type: ignore[misc]
    listener.remove()
    return listener.take("")


@pytest.fixture
def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 6, 40, generator=generator) for _ in range(2)]


def calibration_rows(inputs: list[Tensor]) -> Tensor:
    return torch.cat([x[~HELDOUT].reshape(-1, 40) for x in inputs])


def test_linears_of_one_tensor_share_sums_and_others_do_not(inputs: list[Tensor]) -> None:
    sums = listened(Block(), inputs, batch())
    assert sums["q"] is sums["k"] is sums["v"]
    assert sums["late"] is not sums["q"]
    assert "lone" not in sums
    rows = calibration_rows(inputs)
    torch.testing.assert_close(sums["q"].calibration, rows.T @ rows)
    held = torch.cat([x[HELDOUT].reshape(-1, 40) for x in inputs])
    torch.testing.assert_close(sums["q"].heldout, held.T @ held)
    assert (sums["q"].calibration_rows, sums["q"].heldout_rows) == (36, 12)
    more = torch.cat([rows, torch.full((36, 40), 0.5)])
    torch.testing.assert_close(sums["late"].calibration, more.T @ more)
    assert not any(one.problem for one in sums.values())


def test_a_linear_in_a_loop_shares_sums_with_those_that_share_its_inputs_at_every_visit(inputs: list[Tensor]) -> None:
    class Visited(Block):
        def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
            other = x if other is None else other
            self.k(other), self.v(other)
            return self.o(self.q(x))  # type: ignore[no-any-return]

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Visited()

        def forward(self, x: Tensor) -> None:
            self.layer(x)
            self.layer(x + 1, x + 2)

    loop = Loop()
    modules = [replace(one, name=f"layer.{one.name}", block="layer") for one in described(loop.layer)]
    listener = Listener(loop, modules, HELDOUT)
    for x in inputs:
        running(batch(), lambda x=x: loop(x))  # type: ignore[misc]
    listener.remove()
    sums = listener.take("layer")
    rows = calibration_rows(inputs)
    for name, others_own in (("layer.q", 1), ("layer.k", 2)):
        both = torch.cat([rows, rows + others_own])
        torch.testing.assert_close(sums[name].calibration, both.T @ both)
    assert sums["layer.k"] is sums["layer.v"]
    assert (sums["layer.q"].calibration_rows, sums["layer.q"].heldout_rows) == (72, 24)
    assert not any(one.problem for one in sums.values())
    assert not any(layer._forward_pre_hooks for layer in loop.modules())


def test_a_linear_that_misses_what_it_shares_is_rounded(inputs: list[Tensor]) -> None:
    class Sometimes(Block):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            if x is inputs[0]:
                self.k(x)
            return q  # type: ignore[no-any-return]

    block = Sometimes()
    sums = listened(block, inputs, batch())
    assert (sums["q"].problem, sums["k"].problem) == ("", others.UNEVEN)
    results = made(block, sums)
    assert results["q"].row["fallback"] == "none"
    assert results["k"].row["fallback"] == "rounded+inputs_vary"
    assert results["k"].row["relative_error"] is None


def made(block: Block, sums: dict[str, InputSums], method: str = "gptq", bits: int = 3) -> dict[str, others.Result]:
    grid = Grid(method=method, bits=bits, group_size=16, symmetric=False, damping=0.01)
    modules = [(module, grid) for module in described(block)]
    found = quantize_linears(modules, sums, lambda name: block.get_submodule(name).get_parameter("weight"))
    return {module.name: result for module, result in found}


@pytest.mark.parametrize("rows_at_once", [4096, 5])
def test_codes_are_those_of_the_numerics(
    inputs: list[Tensor], rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "ROWS_AT_ONCE", rows_at_once)
    block = Block()
    results = made(block, listened(block, inputs, batch()))
    rows = calibration_rows(inputs)
    hessian = (rows.T @ rows / len(rows)).unsqueeze(0)
    held = torch.cat([x[HELDOUT].reshape(-1, 40) for x in inputs])
    for name in ("q", "k", "v"):
        weight = block.get_submodule(name).get_parameter("weight").detach()
        factor = factorize(hessian.clone(), 0.01).unit_upper
        wanted = packed_of(gptq.quantize(weight.unsqueeze(0), factor, bits=[3], group_size=16), 3, symmetric=False)
        for part, tensor in results[name].packed.parts().items():
            assert torch.equal(tensor, wanted.parts()[part]), (name, part)
        off = held @ (wanted.dequantize()[0] - weight).T
        exact = held @ weight.T
        error = float(off.square().mean() / exact.square().mean())
        assert results[name].row["relative_error"] == pytest.approx(error, rel=1e-4)
        assert results[name].row["fallback"] == "none"
        assert (results[name].row["calibration_rows"], results[name].row["heldout_rows"]) == (36, 12)


def test_what_no_row_comes_to_is_rounded_and_says_so(inputs: list[Tensor]) -> None:
    block = Block()
    results = made(block, listened(block, inputs, batch()))
    rounded = made(block, {}, method="rtn")
    assert results["lone"].row["fallback"] == "rounded+no_tokens"
    assert rounded["lone"].row["fallback"] == "none"
    assert torch.equal(results["lone"].packed.codes, rounded["lone"].packed.codes)


def test_gptq_loses_less_than_rounding(inputs: list[Tensor]) -> None:
    block = Block()
    correlated = [x @ torch.randn(40, 40, generator=torch.Generator().manual_seed(1)).cumsum(1) for x in inputs]
    sums = listened(block, correlated, batch())
    exact, rounded = made(block, sums), made(block, sums, method="rtn")
    for name in ("q", "k", "v"):
        assert exact[name].row["relative_error"] < 0.8 * rounded[name].row["relative_error"]


def test_a_failed_factorization_is_recorded() -> None:
    block = Block()
    sums = InputSums.of(40, torch.device("cpu"))
    sums.add((torch.ones(3, 40), torch.ones(2, 40)))
    sums.calibration[0, 0] = -5.0
    sums.calibration[3, 3] = -1000.0
    results = made(block, {"q": sums})
    assert results["q"].row["fallback"] in ("raised_damping+float64", "rounded+float64")


def test_weights_and_inputs_that_are_not_finite_are_named(inputs: list[Tensor]) -> None:
    block = Block()
    sums = listened(block, inputs, batch())
    block.get_submodule("v").get_parameter("weight").data[0, 0] = torch.inf
    with pytest.raises(QuantizationError, match="v: weights are not finite"):
        made(block, sums)
    sums["o"].calibration[0, 0] = torch.nan
    block.get_submodule("v").get_parameter("weight").data[0, 0] = 0
    with pytest.raises(QuantizationError, match="o: inputs are not finite"):
        made(block, sums)


@pytest.mark.parametrize("shape", ["B S K", "B*S K", "B S n K", "B*S n K", "B n S K"])
@pytest.mark.parametrize("pads", [0, 2])
def test_rows_are_told_apart_by_sequence_and_pads_taken_out(shape: str, pads: int) -> None:
    of = batch(pads=pads)
    tags = torch.arange(24, dtype=torch.float32).view(4, 6)  # the place of every token
    x = tags.view(4, 6, 1).expand(4, 6, 7)
    x = x.unsqueeze(2).expand(4, 6, 3, 7) if "n" in shape else x
    x = x.transpose(1, 2) if shape == "B n S K" else x
    x = x.flatten(0, 1) if "*" in shape else x
    found = split_rows(x, of, HELDOUT)
    assert found is not None
    real = of.mask.bool()
    for rows, side in zip(found, (~HELDOUT, HELDOUT), strict=True):
        wanted = tags[real & side.unsqueeze(1)]
        wanted = wanted.repeat_interleave(3) if "n" in shape else wanted
        assert rows[:, 0].tolist() == wanted.tolist()


def test_rows_of_other_shapes_belong_to_sequences_or_to_nobody() -> None:
    chunks = torch.arange(4.0).view(4, 1, 1).expand(4, 2, 7)
    found = split_rows(chunks, batch(), HELDOUT)
    assert found is not None
    assert [rows[:, 0].tolist() for rows in found] == [[0, 0, 2, 2, 3, 3], [1, 1]]
    assert split_rows(chunks, batch(pads=2), HELDOUT) is None
    assert split_rows(torch.zeros(6, 4, 7), batch(), HELDOUT) is None
    sums = InputSums.of(7, torch.device("cpu"))
    sums.add(None)
    assert sums.problem == others.NOT_ROWS


@pytest.mark.parametrize("rows_at_once", [4096, 7])
def test_embeddings_are_rounded_row_by_row(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "ROWS_AT_ONCE", rows_at_once)
    weight = torch.randn(30, 40, generator=torch.Generator().manual_seed(2))
    times = torch.randint(0, 4, (30,), generator=torch.Generator().manual_seed(4))
    grid = Grid(method="rtn", bits=4, group_size=16, symmetric=True, damping=0.01)
    result = quantize_embedding("table", weight, times, grid)
    wanted = gptq.quantize(weight.unsqueeze(0), None, bits=[4], group_size=16, symmetric=True)
    assert torch.equal(result.packed.codes, packed_of(wanted, 4, symmetric=True).codes)
    assert result.packed.zeros is None
    looked = torch.arange(30).repeat_interleave(times)
    off = (result.packed.dequantize()[0] - weight)[looked]
    assert result.row["relative_error"] == pytest.approx(float(off.square().sum() / weight[looked].square().sum()))
    assert result.row["heldout_rows"] == len(looked)
