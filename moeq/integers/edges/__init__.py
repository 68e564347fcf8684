"""Which linears are fed by which norm, found by structure and by following data."""

from moeq.integers.edges.find import Consumer, Edge, Edges, find_edges
from moeq.integers.edges.norms import Norm, find_norms

__all__ = ["Consumer", "Edge", "Edges", "Norm", "find_edges", "find_norms"]
