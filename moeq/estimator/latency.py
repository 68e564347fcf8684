"""What one expert takes on the near-data side: the time that an assignment can be held to."""

from __future__ import annotations

from numpy.typing import ArrayLike

from moeq.errors import EstimateError
from moeq.estimator.devices import Hardware
from moeq.estimator.geometry import effective_bits
from moeq.estimator.terms import FloatArray, t_ndp


def expert_seconds(
    parameters: int, bits: ArrayLike, hardware: Hardware, *, group_size: int, zero_points: bool
) -> FloatArray:
    """Seconds that the NDP takes for one token of one expert at every width (16: FP16), of the shape of `bits`.

    `terms.t_ndp` for one token: the longer of reading the weights, scales and zero points, and of computing, where the
    fill of the arrays counts as the hardware's dataflow has it. Raises EstimateError for a memory that only holds.
    """
    if not hardware.ndp.computes:
        raise EstimateError("experts do not compute beside this memory", where=hardware.file, do="give other hardware")
    return t_ndp(parameters, effective_bits(bits, group_size, zero_points), 1, hardware.ndp).seconds
