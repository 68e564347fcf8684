"""Products of 16-bit floats in single precision, as CPUs without instructions for them make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny
from torch import Tensor

from moeq.models import half_products
from moeq.models.half_products import LEAST, using
from moeq.models.loading import load_model, skeleton
from moeq.models.source import open_source

HALVES = (torch.bfloat16, torch.float16)
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place, of a number


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0, turned: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    made = torch.randn(shape, generator=generator).to(dtype)
    return made.transpose(-2, -1) if turned else made


def check(found: Tensor, wanted: Tensor, size: Tensor, dtype: torch.dtype) -> None:
    """Rounded once, where the product is moeq's; size: the sum of magnitudes, of which float32's sums lack a part."""
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    steps = 1.01 if min(found.shape[-2:]) >= LEAST else 3.0  # of few rows it is torch's
    assert ((found.double() - wanted).abs() <= STEP[dtype] * wanted.abs() * steps + 1e-5 * size + 1e-7).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(0, 40), inner=st.integers(0, 50), columns=st.integers(0, 40), dtype=st.sampled_from(HALVES),
    turned=st.tuples(st.booleans(), st.booleans()), block=st.sampled_from([64, 1 << 10, 1 << 24]),
)  # fmt: skip
def test_products_are_rounded_once(
    rows: int, inner: int, columns: int, dtype: torch.dtype, turned: tuple[bool, bool], block: int
) -> None:
    left = numbers(rows, inner, dtype=dtype, turned=turned[0])
    right = numbers(inner, columns, dtype=dtype, seed=1, turned=turned[1])
    wanted, size = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    stacks = torch.stack([left, left * 2]), torch.stack([right, right])
    with pytest.MonkeyPatch.context() as patch, using(frozenset(HALVES)):
        patch.setattr(half_products, "BLOCK_BYTES", block)
        check(left @ right, wanted, size, dtype)
        into = torch.full((rows, columns), float("nan"), dtype=dtype)
        assert torch.mm(left, right, out=into) is into
        check(into, wanted, size, dtype)
        together = torch.bmm(*stacks)
        check(together[0], wanted, size, dtype)
        check(together[1], wanted * 2, size * 2, dtype)
        for added in (numbers(columns, dtype=dtype, seed=2), numbers(rows, columns, dtype=dtype, seed=2)):
            found = torch.addmm(added, left, right, beta=0.5, alpha=2)
            check(found, 0.5 * added.double() + 2 * wanted, 2 * size + added.double().abs(), dtype)
            linear = torch.nn.functional.linear(left, right.T, numbers(columns, dtype=dtype, seed=2))
            check(linear, wanted + numbers(columns, dtype=dtype, seed=2).double(), size + 4, dtype)


def test_other_types_and_few_rows_have_the_same_bits() -> None:
    cases = [(torch.float32, 20), (torch.float64, 20), (torch.int64, 20), *((half, LEAST - 1) for half in HALVES)]
    made = [
        (
            numbers(rows, 30, dtype=torch.float32).mul(9).to(dtype),
            numbers(30, 20, dtype=torch.float32, seed=1).to(dtype),
        )
        for dtype, rows in cases
    ]

    def products() -> list[Tensor]:
        found = []
        for left, right in made:
            stacks = torch.stack([left, left]), torch.stack([right, right])
            found += [left @ right, torch.addmm(right[0], left, right), torch.bmm(*stacks)]
        return found

    wanted = products()
    with using(frozenset(HALVES)):
        found = products()
    after = products()
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(after, wanted, strict=True))


def test_gradients_are_those_of_single_precision() -> None:
    left, right = (numbers(24, 24, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (0, 1))
    with using(frozenset(HALVES)):
        (left @ right).float().square().sum().backward()
    outer = 2 * (left.detach() @ right.detach()).double()
    assert left.grad is not None
    assert right.grad is not None
    torch.testing.assert_close(left.grad.double(), outer @ right.detach().double().T, rtol=0.02, atol=0.3)
    torch.testing.assert_close(right.grad.double(), left.detach().double().T @ outer, rtol=0.02, atol=0.3)


@pytest.mark.parametrize("dtype", HALVES)
def test_shapes_and_types_that_do_not_fit_are_refused(dtype: torch.dtype) -> None:
    left = numbers(16, 16, dtype=dtype)
    products: list[Callable[[Tensor, Tensor], Tensor]] = [
        torch.mm, lambda a, b: torch.bmm(a[None], b[None]), lambda a, b: torch.addmm(a[0], a, b),
    ]  # fmt: skip
    with using(frozenset(HALVES)):
        for right in (numbers(17, 16, dtype=dtype), numbers(16, 16, dtype=torch.float32)):
            for product in products:
                with pytest.raises(RuntimeError):
                    product(left, right)


def test_models_of_slow_types_have_them_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(half_products, "slow_types", lambda: frozenset({torch.bfloat16}))
    monkeypatch.setattr(half_products, "_use", lambda: used.append("used"))
    source = open_source(str(save_tiny(tmp_path, "mixtral", torch.bfloat16)))
    for load in (lambda dtype: load_model(source, dtype, torch.device("cpu")), lambda dtype: skeleton(source, dtype)):
        load(torch.float32)
        assert not used
        load(torch.bfloat16)
        assert used.pop()
