"""What every assigner is given, and the importance of paper 000.

Letters: L layers, E experts of a layer, P matrices of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from moeq.artifacts.assignment import (
    DROPPED,
    FULL,
    Assignment,
    ExpertChoice,
    LayerAssignment,
    Width,
    join_widths,
    matrix_widths,
    width_of,
)
from moeq.errors import AssignmentError
from moeq.recipe import BEST, AssignSection, MethodSettings

if TYPE_CHECKING:  # recipes are checked without the packages that read these
    from moeq.artifacts.effects import LayerEffects
    from moeq.artifacts.expert_effects import ExpertEffects
    from moeq.artifacts.losses import LossTable
    from moeq.artifacts.profile import ExpertProfile

Loaded = tuple[tuple[tuple[int, ...], ...], ...]
Settings = TypeVar("Settings", bound=MethodSettings)
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class AssignInputs:
    """The recipe's section, the profile, the loss table (None where none is needed) and the grid of the replicas.

    bytes: of one expert at every width, a layer; weights: of one expert, biases among them, a layer; matrix_bytes:
    of each of its matrices, {projection: {width: bytes}}, biases included, where matrices are decided;
    record_bytes: what the checkpoint's files say of each matrix beside its own tensors, and other_bytes: all of the
    checkpoint that no width decides, where `size` limits it; traces: the Hessian trace of the Frobenius norm of
    every expert, [E] a layer; effects, expert_effects: what quantizing a layer alone, and an expert alone, does to
    the output; ndp_seconds: of one token of one expert on the NDP at every width, a layer, where a hardware was
    named; tokens_given: what each expert is given for one token of the model, [E] a layer, where that is not the
    profile's; loaded: of every matrix of every layer the widths, rising, at which the section's target loads it, none
    where that is all of them or no target is named; droppable: whether an expert that is dropped answers nothing, as
    one with biases would not; memo: what was computed of these inputs, which others of other times must not share.
    """

    name: str
    config: AssignSection
    profile: ExpertProfile
    losses: LossTable | None
    group_size: int
    symmetric: bool
    nested: bool = False
    state_bits: int = 0
    codebook: str = ""
    bytes: tuple[dict[int, int], ...] = ()
    weights: tuple[int, ...] = ()
    matrix_bytes: tuple[dict[str, dict[int, int]], ...] = ()
    record_bytes: tuple[dict[str, dict[int, int]], ...] = ()
    other_bytes: int = 0
    traces: Callable[[], list[np.ndarray]] | None = None
    effects: LayerEffects | None = None
    expert_effects: ExpertEffects | None = None
    ndp_seconds: tuple[dict[int, float], ...] = ()
    tokens_given: tuple[np.ndarray, ...] = ()
    loaded: Loaded = ()
    droppable: bool = True
    memo: dict[Any, Any] = field(default_factory=dict)

    def settings(self, kind: type[Settings]) -> Settings:
        """The method's own keys."""
        assert isinstance(self.config.settings, kind), f"{self.config.method} has other settings"
        return self.config.settings

    def measured(self, *more: int) -> tuple[int, ...]:
        """Widths of the loss table and others, rising."""
        return tuple(sorted({*(self.losses.bits() if self.losses is not None else ()), *more}))

    def decided_among(self, *more: int) -> tuple[int, ...]:
        """As `measured`, and DROPPED where experts may be dropped: those of no layer that has biases."""
        return self.measured(*more, *((DROPPED,) if self.config.drop and self.droppable else ()))

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What a function makes of these inputs, made once."""
        if key not in self.memo:
            self.memo[key] = make()
        made: Made = self.memo[key]
        return made

    def bytes_of(self, layer: int) -> dict[int, int]:
        """{width: bytes of one expert} of a layer; AssignmentError when they were not given."""
        if not self.bytes:
            raise AssignmentError("the sizes of the experts are not known", do="give AssignInputs.bytes")
        return self.bytes[layer]

    def weights_of(self, layer: int) -> int:
        """How many weights one expert of a layer has; AssignmentError when they were not given."""
        if not self.weights:
            raise AssignmentError("the numbers of the experts' weights are not known", do="give AssignInputs.weights")
        return self.weights[layer]

    def matrix_bytes_of(self, layer: int) -> dict[str, dict[int, int]]:
        """{projection: {width: bytes}} of a layer's experts; AssignmentError when they were not given."""
        if not self.matrix_bytes:
            raise AssignmentError(
                "the sizes of the experts' matrices are not known", do="give AssignInputs.matrix_bytes"
            )
        return self.matrix_bytes[layer]

    def in_the_checkpoint(self) -> AssignInputs:
        """The same with sizes as they are in the checkpoint's files, records counted."""
        if not self.record_bytes:
            return self
        matrices = tuple(
            {
                name: {bits: size + records[name][bits] for bits, size in sizes.items()}
                for name, sizes in self.matrix_bytes_of(layer).items()
            }
            for layer, records in enumerate(self.record_bytes)
        )
        experts = tuple(
            {bits: size + sum(of[bits] for of in records.values()) for bits, size in self.bytes_of(layer).items()}
            for layer, records in enumerate(self.record_bytes)
        )
        return replace(self, bytes=experts, matrix_bytes=matrices)

    def stored(self, layer: int, widths: Width) -> int:
        """Bytes of one expert of a layer at its width or widths."""
        if isinstance(widths, int):
            return self.bytes_of(layer)[widths]
        return sum(sizes[width_of(widths, name)] for name, sizes in self.matrix_bytes_of(layer).items())

    def tokens(self) -> int:
        """Tokens that the statistics count."""
        totals = self.profile.tokens.sum(0)
        return int({"prefill": totals[0], "decode": totals[1], "all": totals.sum()}[self.config.statistics])

    def phase(self) -> str | None:
        return None if self.config.statistics == "all" else self.config.statistics


def normalized(values: np.ndarray, how: str) -> np.ndarray:
    """Values [E] divided by their sum or their maximum; zeros stay zeros."""
    divisor = values.sum() if how == "sum" else values.max(initial=0)
    return values / divisor if divisor > 0 else np.zeros_like(values, dtype=float)


def importance(inputs: AssignInputs, layer: int) -> np.ndarray:
    """S = alpha*P~ + (1-alpha)*W~ of each expert of a layer, [E] (paper 000, section 4.1)."""
    counts, scores = inputs.profile.total(layer, inputs.phase())
    alpha, how = inputs.config.alpha, inputs.config.normalization
    return alpha * normalized(counts.astype(float), how) + (1 - alpha) * normalized(scores, how)


def routing_mass(inputs: AssignInputs, layer: int) -> np.ndarray:
    """Share of the layer's routing weight that each expert was given, [E]."""
    return normalized(inputs.profile.total(layer, inputs.phase())[1], "sum")


def activation_rate(inputs: AssignInputs, layer: int) -> np.ndarray:
    """Tokens that each expert of a layer is given for one token of the model, [E]: top_k in all, at each visit."""
    counts, _ = inputs.profile.total(layer, inputs.phase())
    return np.asarray(counts / max(1, inputs.tokens()))


def ranking(scores: np.ndarray) -> np.ndarray:
    """Experts by falling importance; equal ones by their number, so that the order is always the same."""
    return np.argsort(-scores, kind="stable")


def hot_experts(inputs: AssignInputs, scores: np.ndarray, layer: int) -> np.ndarray:
    """Bool [E]: the top K of a layer, which go to the GPU in full precision (Algorithm 1, line 16).

    Raises AssignmentError when K is more than the layer's experts.
    """
    count = inputs.config.gpu_experts
    if count > len(scores):
        raise AssignmentError(
            f"gpu_experts is {count}, the layer has {len(scores)} experts",
            where=inputs.profile.layers[layer],
            do="lower assign.gpu_experts",
        )
    hot = np.zeros(len(scores), bool)
    hot[ranking(scores)[:count]] = True
    return hot


def expert_widths(inputs: AssignInputs, bits: Sequence[np.ndarray], hot: Sequence[np.ndarray]) -> list[list[Width]]:
    """Widths [E] of experts, or [E, P] of their matrices, a layer, as an assignment names them; 16 on the GPU."""
    named: list[list[Width]] = []
    for layer, (widths, mask) in enumerate(zip(bits, hot, strict=True)):
        experts: list[Width] = widths.tolist()
        if widths.ndim > 1:
            names = list(inputs.matrix_bytes_of(layer))
            experts = [join_widths(dict(zip(names, row, strict=True))) for row in widths.tolist()]
        named.append([FULL if on_gpu else expert for expert, on_gpu in zip(experts, mask, strict=True)])
    return named


def decided(choices: Iterable[Iterable[Width]], hot: Iterable[np.ndarray]) -> Iterator[tuple[int, Width]]:
    """Layer and width, or widths, of every expert that is not on the GPU; choices: of every expert of every layer."""
    for layer, (widths, mask) in enumerate(zip(choices, hot, strict=True)):
        for width, on_gpu in zip(widths, mask, strict=True):
            if not on_gpu:
                yield layer, width


def quantizers(inputs: AssignInputs, bits: list[np.ndarray]) -> list[list[str | None]]:
    """Whose replica every expert takes at its width, None at 16 bits.

    Raises AssignmentError when the best method is asked for and the loss table is missing or lacks a width.
    """
    wanted = inputs.config.quantizer
    if wanted != BEST:
        return [[None if width in (DROPPED, FULL) else wanted for width in widths] for widths in bits]
    if inputs.losses is None:
        raise AssignmentError("quantizer best needs the loss table", do="run `moeq losses` first")
    methods: list[list[str | None]] = []
    for name, widths, best in zip(inputs.profile.layers, bits, inputs.losses.best(), strict=True):
        missing = sorted({int(width) for width in widths} - {DROPPED, FULL, *best})
        if missing:
            raise AssignmentError(f"the loss table lacks {missing} bits", where=name, do="add them to losses.bits")
        methods.append([None if w in (DROPPED, FULL) else str(best[int(w)][expert]) for expert, w in enumerate(widths)])
    return methods


def _parameters(config: AssignSection) -> dict[str, Any]:
    """A section's keys; of a hardware file without the folder, since checkpoints carry them."""
    keys = config.model_dump(mode="json", exclude={"name", "method"}, exclude_none=True)
    return keys | ({"hardware": PurePath(config.hardware).name} if config.hardware is not None else {})


def hot_masks(inputs: AssignInputs) -> list[np.ndarray]:
    """`hot_experts` of every layer."""
    layers = range(len(inputs.profile.layers))
    return [hot_experts(inputs, importance(inputs, layer), layer) for layer in layers]


def build(inputs: AssignInputs, bits: list[np.ndarray], hot: list[np.ndarray]) -> Assignment:
    """The Assignment of given widths [E], or [E, P] of matrices, and GPU masks [E] a layer; GPU experts are left in
    full precision."""
    widths = expert_widths(inputs, bits, hot)
    methods = quantizers(inputs, [np.array([max(matrix_widths(own)) for own in of], int) for of in widths])
    layers = []
    for index, name in enumerate(inputs.profile.layers):
        scores = importance(inputs, index)
        experts = tuple(
            ExpertChoice(
                tier="gpu" if hot[index][expert] else "ndp",
                bits=max(matrix_widths(own)),
                projections=None if isinstance(own, int) else dict(own),
                quantizer=methods[index][expert],
                importance=float(scores[expert]),
            )
            for expert, own in enumerate(widths[index])
        )
        layers.append(LayerAssignment(name=name, experts=experts))
    return Assignment(
        name=inputs.name,
        method=inputs.config.method,
        parameters=_parameters(inputs.config),
        group_size=inputs.group_size,
        symmetric=inputs.symmetric,
        nested=inputs.nested,
        state_bits=inputs.state_bits,
        codebook=inputs.codebook,
        layers=tuple(layers),
    )
