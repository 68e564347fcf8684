"""What every process that computes with packed weights has: the compiler, compiled code, and what is measured once."""

from __future__ import annotations


def warm_up() -> None:
    import torch

    from moeq_kernels import choice
    from moeq_kernels.measured import expert_of, matrix_of

    cpu, row = torch.device("cpu"), torch.zeros(1, 2048, dtype=torch.bfloat16)
    prepared, why = choice.prepared_linear(matrix_of(), None, cpu, "measured")
    assert prepared is not None, why
    prepared(row)
    layer, why = choice.prepared_layer(expert_of(), cpu, "measured")
    assert layer is not None, why
    layer(row, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bfloat16))
