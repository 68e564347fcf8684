"""What losses made, for who reads it: its tables, and the replicas of a layer's experts as an assignment names them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.markup import escape
from torch import Tensor, nn

from moeq.artifacts import expert_effects, replicas
from moeq.artifacts.assignment import DROPPED, FULL, MIXED, Assignment, Width, matrix_widths, width_of
from moeq.artifacts.effects import LayerEffects, read_effects
from moeq.artifacts.files import digest_of
from moeq.artifacts.losses import NAME, LossTable, read_losses
from moeq.artifacts.replicas import LayerReplicas, Made, MadeType, ReplicaIndex
from moeq.artifacts.targets import in_words
from moeq.errors import ArtifactError
from moeq.models.experts import ExpertLayer, stacked_biases, stacked_weights
from moeq.models.loading import source_dtype
from moeq.numerics.matrix_error import recorded, relative_error
from moeq.quantizers.layer import made_on_demand
from moeq.recipe import BEST, DEFAULT_QUANTIZER, LossesSection
from moeq.recipe.earlier import losses_in_keys
from moeq.registry import QUANTIZERS
from moeq.runtime.swapping import Replacement
from moeq.stages.context import Context
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

REVISION = 4  # raised when the same inputs give other replicas: also for what lies in stores
ROWS_REVISION = 2  # raised when the same replicas give other rows
CHOICES = frozenset(
    {"bits", "methods", "working_memory", "layer_effects", "expert_effects"}
)  # settings that name entries, or decide nothing
MEASURING = frozenset({"min_tokens", "max_measured_tokens", "per_projection"})  # that decide rows, not replicas
REFINED = "+refined"  # after the method that made the start, where a placed replica was trained further
TUNED = "+tuned"  # and after that, where its scales were tuned with the whole model
Best = list[dict[int, np.ndarray]]  # of every layer: {bits: name of the best method [E]}
Experts = Mapping[int, Mapping[str, PackedWeight]]  # {expert: {projection: matrix}}


def is_trained(method: str) -> bool:
    """Whether a placed replica, by what is said of who made it, is not the one of the store."""
    return method.endswith((REFINED, TUNED))


def first_made_by(method: str) -> str:
    """The method that made a replica before it was trained further."""
    return method.removesuffix(TUNED).removesuffix(REFINED)


def planned(context: Context, tokens: str) -> ReplicaIndex:
    """What the recipe asks for, by the names under which the store keeps it. tokens: digest of the sequences."""
    own = {name for quantizer in QUANTIZERS for name in quantizer.settings.model_fields}
    common = losses_in_keys(context.recipe.losses.model_dump(mode="json", exclude={*CHOICES, *MEASURING, *own}))
    key = [REVISION, replicas.SCHEMA_VERSION, context.model.stamp.digest, common, tokens, context.model.compute()]
    made = entries(context.recipe.losses, drops=context.recipe.drops, seed=context.recipe.seed)
    return ReplicaIndex(set=digest_of(key), made=made)


def entries(config: LossesSection, *, drops: bool = False, seed: int = 0) -> tuple[Made, ...]:
    """The methods at the widths that a section asks for, by their names in a set; drops: the rows must say what experts
    answer, as those that stores were given before do not; seed: of what methods draw, 0 in names of before."""
    whole = config.model_dump(mode="json")
    measuring = {name: whole[name] for name in MEASURING} | ({"energies": True} if drops else {})
    made = []
    for method in config.methods:
        quantizer = QUANTIZERS.get(method)
        settings = {name: whole[name] for name in quantizer.settings.model_fields}
        settings |= {"seed": seed} if seed and quantizer.hangs_on_seed else {}
        own = [settings, *quantizer.origins] if quantizer.origins else settings
        for bits in config.bits:
            entry = f"{method}.{bits}.{digest_of(own)[: replicas.SHORT]}"
            rows = f"{method}.{bits}.{digest_of([entry, measuring, ROWS_REVISION])[: replicas.SHORT]}"
            made.append(Made(method=method, bits=bits, entry=entry if quantizer.stored else None, rows=rows))
    return tuple(made)


def load_losses(context: Context) -> LossTable:
    return read_losses(context.directory("losses") / NAME)


def load_effects(context: Context) -> LayerEffects | None:
    """What each layer alone does to the output, None where the recipe did not ask for it."""
    return read_effects(context.directory("losses"))


def load_expert_effects(context: Context) -> expert_effects.ExpertEffects | None:
    """What each expert alone does to the output, None where the recipe did not ask for it."""
    return expert_effects.read_effects(context.directory("losses"))


def load_index(context: Context) -> ReplicaIndex:
    """What the run has in the store; ArtifactError when losses was not run, or by an older moeq."""
    return replicas.read_index(context.directory("losses"))


def lacking(context: Context, set_name: str, layer: int, made: Iterable[MadeType]) -> list[MadeType]:
    """What the store lacks of a layer in one of its sets; files that are damaged are said, and lacking."""

    def damaged(path: Path) -> None:
        context.reporter.say(f"  [yellow]{escape(str(path))}: damaged, made again[/yellow]")

    return replicas.lacking(context.store / set_name, layer, made, damaged, cached=not context.check)


def open_layer(context: Context, index: ReplicaIndex, layer: int) -> LayerReplicas:
    """One layer's replicas as the index names them; ArtifactError when they are missing or others.

    Those of which an expert is asked for are read, and checked again, then.
    """
    if layer >= len(index.layers):
        raise ArtifactError("not finished", where=str(context.directory("losses")), do=replicas.REMEDY)
    stored = LayerReplicas(context.store / index.set, layer)
    stored.check(index.layers[layer], cached=True)
    return stored


def nothing(layer: ExpertLayer) -> dict[str, PackedWeight]:
    """What stands for an expert of a layer that is dropped: its matrices, all zero."""
    encoding = Encoding(group_size=-1, symmetric=True)
    return {name: PackedWeight.dropped(*layer.shape(name), encoding) for name in layer.projections}


class Replicas:
    """Replicas of one layer's experts: from the store, made now (rtn), or the checkpoint's own weights (16).

    model: where weights are taken from; without it experts are read from the checkpoint one by one. best: the best
    methods of all layers, where the caller has them; they are looked up when they are needed. refined: placed replicas
    that were trained further, which stand in for those of the store; marks: {expert: what is said of that}, where it is
    not REFINED.

    A replica goes by its width; one whose matrices differ, which only a placed one does, by MIXED. Of an expert that is
    dropped none is placed: all that stands for it is zero.

    errors: {expert: {replica: {projection: relative error}}} of the packed matrices that `tensors` gave.
    """

    def __init__(
        self,
        context: Context,
        assignment: Assignment,
        layer: ExpertLayer,
        model: nn.Module | None = None,
        best: Best | None = None,
        refined: Experts | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self.context, self.layer, self.model = context, layer, model
        self.refined: Experts = refined or {}
        self.marks: Mapping[int, str] = marks or {}
        self.errors: dict[int, dict[str, dict[str, float]]] = {}
        self.assignment, self.choices = assignment, assignment.layers[layer.index].experts
        self.quantizer = str(assignment.parameters.get("quantizer", DEFAULT_QUANTIZER))
        self._best = best
        self._last: tuple[int, dict[str, Tensor], dict[str, Tensor]] | None = None

    def keys(self) -> list[list[int]]:
        """The replicas that the checkpoint has of each expert, the placed one first (DROPPED: it has none)."""
        more = (*self.context.recipe.losses.bits, FULL) if self.context.recipe.quantize.replicas == "all" else ()
        return [[choice.key, *(width for width in more if width != choice.key)] for choice in self.choices]

    def widths(self, expert: int, key: int) -> Width:
        """The width of one of an expert's replicas, or those of its matrices."""
        return self.choices[expert].widths if key == MIXED else key

    def method(self, expert: int, bits: int) -> str:
        """Who makes an expert's replica at a width below 16: as the assignment says, or the best method."""
        choice = self.choices[expert]
        if choice.bits == bits and choice.quantizer is not None:
            return choice.quantizer
        if self.quantizer != BEST:
            return self.quantizer
        if self._best is None:
            self._best = load_losses(self.context).best()
        return str(self._best[self.layer.index][bits][expert])

    def made_by(self) -> list[dict[str, str]]:
        """{bits: method} of every expert's replicas that the checkpoint has."""
        return [
            {str(key): self._maker(expert, key) for key in keys if key not in (DROPPED, FULL)}
            for expert, keys in enumerate(self.keys())
        ]

    def _maker(self, expert: int, key: int) -> str:
        """The method that made a replica, or those of its matrices, and how it was trained further."""
        used = [bits for bits in matrix_widths(self.widths(expert, key)) if bits != FULL]
        methods = dict.fromkeys(self.method(expert, bits) for bits in used)
        refined = expert in self.refined and key == self.choices[expert].key
        return ",".join(methods) + (self.marks.get(expert, REFINED) if refined else "")

    @cached_property
    def index(self) -> ReplicaIndex:
        return load_index(self.context)

    @cached_property
    def store(self) -> LayerReplicas:
        return open_layer(self.context, self.index, self.layer.index)

    def placed(self, expert: int) -> dict[str, PackedWeight]:
        """The matrices of one expert's placed replica that are below 16 bits."""
        return self.packed(expert, self.choices[expert].key)

    def replacement(self, expert: int, refined_in: str = "") -> Replacement:
        """One expert's placed replica, dequantized when it is needed; refined_in: where it was refined."""

        def make() -> dict[str, Tensor]:
            return {name: packed.dequantize() for name, packed in self.placed(expert).items()}

        return Replacement(key=self.identity(expert, refined_in), make=make)

    def identity(self, expert: int, refined_in: str = "") -> str:
        """What tells an expert's placed replica from others of the same model; refined_in: where it was refined."""
        choice = self.choices[expert]
        used = {*matrix_widths(choice.widths)} - {DROPPED, FULL}
        methods = {bits: self.method(expert, bits) for bits in used}
        stored = {bits for bits, method in methods.items() if QUANTIZERS.get(method).stored}
        made = {bits: self.index.entry(own, bits) if bits in stored else own for bits, own in methods.items()}
        dtype = "" if len(stored) == len(used) else str(self.context.model.dtype)  # of weights that are rounded anew
        section = self.context.recipe.losses
        grid = [section.encoding.describe(), section.symmetry(), section.clip]
        stored_in = self.index.set if stored else ""
        return digest_of([str(self.context.store), stored_in, grid, dtype, choice.widths, made, refined_in])

    def packed(self, expert: int, key: int) -> dict[str, PackedWeight]:
        """The matrices of one of an expert's replicas that are below 16 bits."""
        if expert in self.refined and key == self.choices[expert].key:
            return dict(self.refined[expert])
        if key == DROPPED:
            return nothing(self.layer)
        widths = self.widths(expert, key)
        matrices: dict[str, PackedWeight] = {}
        for bits in dict.fromkeys(matrix_widths(widths)):
            if bits != FULL:
                names = [name for name in self.layer.projections if width_of(widths, name) == bits]
                matrices |= self._at(expert, bits, names)
        for matrix in matrices.values():
            self._check_encoding(matrix.encoding, self.assignment.encoding.at(matrix.bits))
        return {name: matrices[name] for name in self.layer.projections if name in matrices}

    def _check_encoding(self, made: Encoding, named: Encoding) -> None:
        """ArtifactError where replicas, of losses that were made again alone, have not the codes that the assignment is
        of: sizes, and what a checkpoint says of its tensors, would be others."""
        if made != named:
            again = "losses" if self.assignment.encoding == self.context.recipe.losses.encoding else "assign"
            what = f"replicas are {in_words(made)}; the assignment {self.assignment.name} is of {in_words(named)}"
            raise ArtifactError(what, where=str(self.context.directory("losses")), do=f"run `moeq {again}` again")

    def _at(self, expert: int, bits: int, projections: Sequence[str]) -> dict[str, PackedWeight]:
        """Some matrices of an expert's replica of one width."""
        method = self.method(expert, bits)
        if QUANTIZERS.get(method).stored:
            entry = self.index.entry(method, bits)
            return {projection: self.store.expert(entry, projection, expert) for projection in projections}
        section = self.context.recipe.losses
        weights, _ = self.original(expert)
        as_computed = {name: weights[name].to(self.context.model.dtype).float() for name in projections}
        made = made_on_demand(method, as_computed, section, bits, layer=self.layer, expert=expert)
        return {name: packed.map(Tensor.cpu) for name, packed in made.items()}

    def original(self, expert: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Matrices and biases of one expert in the checkpoint's own type."""
        if self.model is not None:
            dtype, which = source_dtype(self.context.model.source), slice(expert, expert + 1)
            weights, biases = (
                {name: stack[0].to(dtype).cpu() for name, stack in stacked(self.model, self.layer, which).items()}
                for stacked in (stacked_weights, stacked_biases)
            )
            return weights, biases
        if self._last is None or self._last[0] != expert:
            self._last = (expert, *self.context.model.expert_reader.read(self.layer, expert))
        return self._last[1], self._last[2]

    def tensors(self, expert: int, key: int, prefix: str) -> dict[str, Tensor]:
        """One replica's tensors under their final names; their errors are measured on the way."""
        if key == DROPPED:
            self.errors.setdefault(expert, {})
            return {}
        widths = self.widths(expert, key)
        dense = [name for name in self.layer.projections if width_of(widths, name) == FULL]
        weights, biases = self.original(expert)
        tensors = {f"{prefix}.{name}.bias": bias for name, bias in biases.items()}
        tensors |= {f"{prefix}.{name}.dense": weights[name] for name in dense}
        errors = self.errors.setdefault(expert, {}).setdefault(str(key), {})
        for name, packed in self.packed(expert, key).items():
            tensors |= {f"{prefix}.{name}.{part}": tensor for part, tensor in packed.parts().items()}
            error = relative_error(packed.dequantize(), weights[name])
            errors |= {name: recorded(error)} if math.isfinite(error) else {}
        return tensors
