"""One module for each way in which transformers keeps, calls and computes routed experts."""

from moeq.models.kinds.base import GATED, NON_GATED, Gate, Kind, Tap
from moeq.models.kinds.dbrx import Dbrx
from moeq.models.kinds.jetmoe import JetMoe
from moeq.models.kinds.llama4 import Llama4
from moeq.models.kinds.numbered import Numbered
from moeq.models.kinds.refused import reason_to_refuse
from moeq.models.kinds.stacked import Stacked

KINDS: tuple[Kind, ...] = (Llama4(), Dbrx(), JetMoe(), Numbered(), Stacked())  # the first that holds

__all__ = ["GATED", "KINDS", "NON_GATED", "Gate", "Kind", "Stacked", "Tap", "reason_to_refuse"]
