"""Arithmetic that chips do: fixed point, integer norms, logarithms to the base of root two, folded quantizers."""
