"""A part of a packed weight's inputs is the same part of its values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.numerics.gptq import quantize
from moeq.numerics.nested import quantize as nested_quantize
from moeq.numerics.storing import packed_of
from moeq_kernels.packed import PackedWeight, row_range, some_inputs
from moeq_kernels.reference import some_rows, values
from moeq_kernels.widths import NESTED_BITS, SUPPORTED_BITS, Encoding, resolved_group_size


@given(data=st.data())
@settings(deadline=None)
def test_whole_groups_and_parts_of_one_have_the_same_values(data: st.DataObject) -> None:
    bits, symmetric = data.draw(st.sampled_from(SUPPORTED_BITS)), data.draw(st.booleans())
    rows, inputs, group_size = (
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 70)),
        data.draw(st.sampled_from([-1, 3, 8, 16])),
    )
    values = torch.randn(1, rows, inputs, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    made = quantize(values, None, bits=[bits], group_size=group_size, symmetric=symmetric)
    weight = packed_of(made, bits, symmetric).map(lambda part: part[0])
    size = resolved_group_size(inputs, group_size)
    bounds = [*range(0, inputs, size), inputs]
    start = data.draw(st.sampled_from(bounds[:-1]))
    ends = data.draw(st.sampled_from([bounds, range(start, min(start + size, inputs) + 1), range(inputs + 1)]))
    first, last = sorted(data.draw(st.lists(st.sampled_from(ends), min_size=2, max_size=2, unique=True)))
    if {first, last} <= set(bounds) or first // size == (last - 1) // size:
        part = some_inputs(weight, first, last - first)
        part.check()
        assert torch.equal(part.dequantize(), weight.dequantize()[:, first:last])
    else:
        with pytest.raises(ValueError, match=r"no whole groups of"):
            some_inputs(weight, first, last - first)


@pytest.mark.parametrize("encoding", [Encoding(group_size=16, symmetric=True), Encoding.trellis(8), Encoding.exl3()])
def test_parts_of_a_dropped_matrix_are_zeros_of_their_shape(encoding: Encoding) -> None:
    """Whatever its codes were: nothing hangs together of what is not there."""
    dropped = PackedWeight.dropped(96, 64, encoding)
    part = some_inputs(row_range(dropped, 3, 40), 5, 20)
    part.check()
    assert torch.equal(part.dequantize(), torch.zeros(40, 20))
    assert torch.equal(values(some_rows(dropped, torch.tensor([95, 0, 7])), torch.float32), torch.zeros(3, 64))


@pytest.mark.parametrize("bits", NESTED_BITS)
def test_nested_weights_keep_their_grid(bits: int) -> None:
    values = torch.randn(1, 4, 48, generator=torch.Generator().manual_seed(0))
    made = nested_quantize(values, None, group_size=16, symmetric=False)
    weight = packed_of(made, bits, False, nested=True).map(lambda part: part[0])
    assert torch.equal(some_inputs(weight, 16, 32).dequantize(), weight.dequantize()[:, 16:])
