"""RoutingTrace: which experts every token chose in every layer, in the order in which the tokens came.

On disk one file, trace.safetensors: `experts` int16 [N, L, k], `weights` float16 [N, L, k] (where they were kept),
`lengths` and `prefill` int32 [S], `domain` int32 [S]. Its metadata holds, below the key `moeq_trace`, a JSON object:
schema_version, moeq_version, model, text_digest, layers [{name, num_experts}], domains [names].

Letters: N tokens of all sequences, S sequences, L MoE layers, k experts a token at most, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeq.errors import ArtifactError

NONE = -1  # in `experts`: no expert, of a token that chose fewer or was left out in this layer
MOST_EXPERTS = 32767  # that int16 can number


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """A recorded trace: tokens stand sequence after sequence, each in the order of its steps.

    experts: int16 [N, L, k], -1 for none; weights: float16 [N, L, k] routing weights, or None; lengths: int32 [S]
    tokens of every sequence, N in all; prefill: int32 [S] how many of them, from the front, are its prompt;
    domains: what kind of text each of the S sequences is; layers: names of the L MoE layers; num_experts: E of each;
    top_k: k; model, model_digest: the model's name and the digest of its files; text: digest of the sequences.

    Raises ArtifactError where these do not fit together or an expert is out of range.
    """

    layers: tuple[str, ...]
    num_experts: tuple[int, ...]
    top_k: int
    experts: NDArray[np.int16]
    weights: NDArray[np.float16] | None = None
    lengths: NDArray[np.int32]
    prefill: NDArray[np.int32]
    domains: tuple[str, ...]
    model: str = ""
    model_digest: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        problem = _problem_with(self)
        if problem is not None:
            raise ArtifactError(problem, where=f"routing trace of {self.model or 'a model'}", do="record it again")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.experts)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Row [S] of every sequence's first token."""
        return np.asarray(np.cumsum(self.lengths, dtype=np.int64) - self.lengths, dtype=np.int64)

    @cached_property
    def sequence(self) -> NDArray[np.int32]:
        """Sequence [N] of every token."""
        return np.repeat(np.arange(self.num_sequences, dtype=np.int32), self.lengths)

    @cached_property
    def step(self) -> NDArray[np.int32]:
        """Place [N] of every token in its sequence, 0 the first."""
        return np.asarray(np.arange(self.num_tokens) - self.starts[self.sequence], dtype=np.int32)

    @cached_property
    def is_prefill(self) -> NDArray[np.bool_]:
        """Whether every token [N] belongs to its sequence's prompt."""
        return np.asarray(self.step < self.prefill[self.sequence], dtype=np.bool_)


def _problem_with(trace: RoutingTrace) -> str | None:
    """What does not fit together in a trace, or None."""
    shape = (int(trace.lengths.sum()) if trace.lengths.ndim == 1 else -1, len(trace.layers), trace.top_k)
    arrays: Mapping[str, tuple[NDArray[Any] | None, type, tuple[int, ...]]] = {
        "experts": (trace.experts, np.int16, shape),
        "weights": (trace.weights, np.float16, shape),
        "lengths": (trace.lengths, np.int32, (len(trace.domains),)),
        "prefill": (trace.prefill, np.int32, (len(trace.domains),)),
    }
    for name, (array, dtype, wanted) in arrays.items():
        if array is not None and (array.dtype != dtype or array.shape != wanted):
            return f"{name} are {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} {list(wanted)}"
    if trace.num_tokens == 0 or trace.top_k < 1 or not trace.layers:
        return f"{trace.num_tokens} tokens, {len(trace.layers)} layers, {trace.top_k} experts a token: nothing in it"
    if len(trace.num_experts) != len(trace.layers):
        return f"numbers of experts for {len(trace.num_experts)} layers, {len(trace.layers)} are named"
    if not all(trace.top_k <= experts <= MOST_EXPERTS for experts in trace.num_experts):
        return f"layers of {sorted(set(trace.num_experts))} experts, {trace.top_k} a token"
    if (trace.lengths < 1).any() or (trace.prefill < 0).any() or (trace.prefill > trace.lengths).any():
        return "a sequence without tokens, or with a longer prefill than it has tokens"
    bounds = np.array(trace.num_experts)
    highest, lowest = trace.experts.max(axis=(0, 2)), trace.experts.min(axis=(0, 2))
    wrong = np.flatnonzero((highest >= bounds) | (lowest < NONE))
    if len(wrong):
        layer = int(wrong[0])
        value = highest[layer] if highest[layer] >= bounds[layer] else lowest[layer]
        return f"expert {value} in layer {trace.layers[layer]}, which has {bounds[layer]}"
    return None
