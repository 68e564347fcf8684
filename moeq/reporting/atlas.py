"""Every map of layers x experts of a run: the page draws them, and `moeq report --maps` writes each as SVG and CSV.

Measures of what an expert is worth (paper 003, Figures 2 to 4, and what moeq measures beside them), and the widths that
every assignment of the run gives (its Figures 5 to 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.evaluation import EvalRow
from moeq.papers import CONTEXT_AWARE, MOPEQ
from moeq.quantizers.quantizer import label
from moeq.recipe import BUDGETS, DEFAULT_QUANTIZER
from moeq.recipe.earlier import shown_parameters
from moeq.recipe.used import used_parameters
from moeq.registry import ALLOCATORS
from moeq.reporting import formats, maps, svg
from moeq.reporting.html import Drawing, Raw, details, element, figure, plain
from moeq.reporting.inputs import ReportInputs
from moeq.reporting.maps import LOSS_MAP, Quantity, Scale, scale_of, value_map, width_map
from moeq.reporting.names import keys_of
from moeq.tables import human_size

MAP_BITS = 2  # the width whose losses are shown first, where the table has it
MEANS = " Cells: the mean of the expert's matrices."
TELLING = ("scope", "granularity", *BUDGETS, "widths")  # of the keys that methods share
OPEN_CELLS = 3000  # maps with more cells together are behind a click


@dataclass(frozen=True, kw_only=True)
class ExpertMap:
    """One value of every expert. key: its id and file name; reading: how to read it; values: one array [E] a layer.

    quantity: None where the values are widths, means where an expert's matrices differ; hot: of widths, which experts
    are on the GPU; present: all widths that occur; scale: the colour scale of several maps, None for its own;
    layers: the model's names of them.
    """

    key: str
    title: str
    reading: str
    values: Sequence[np.ndarray]
    quantity: Quantity | None = None
    hot: Sequence[np.ndarray] = ()
    present: Sequence[int] = ()
    scale: Scale | None = None
    layers: Sequence[str] = ()

    @property
    def known(self) -> bool:
        """Whether there is any value."""
        return any(np.isfinite(row).any() for row in self.values)

    def draw(self, room: int = maps.WHOLE) -> Drawing:
        layers, experts = len(self.values), max(map(len, self.values))
        size = f"{formats.count(layers, 'layer')} by {formats.count(experts, 'expert')}"
        label = f"{self.title}: map of {size}. {self._range()}"
        if self.quantity is None:
            return width_map(self.key, label, self.values, self.hot, self.title, room, self.present, self.layers)
        return value_map(self.key, label, self.values, self.quantity, self.title, room, self.scale, self.layers)

    def caption(self) -> str:
        """How to read it, and what its colours leave out."""
        return f"{self.reading} {self._outliers()}".rstrip()

    def csv(self) -> str:
        """layer, expert, value: a line for every expert; the value is empty where none is known."""
        lines = [
            f"{layer},{expert},{'' if np.isnan(value) else repr(value).removesuffix('.0')}\n"
            for layer, row in enumerate(self.values)
            for expert, value in enumerate(row.tolist())
        ]
        return "".join(["layer,expert,value\n", *lines])

    def svg(self) -> str:
        """A file of its own, in the colours of paper."""
        return svg.printed(self.draw())

    def _range(self) -> str:
        if self.quantity is None:
            widths, counts = np.unique(np.concatenate(list(self.values)), return_counts=True)
            each = zip(widths.tolist(), counts.tolist(), strict=True)
            return ", ".join(f"{count:,} at {width:.3g}" for width, count in each) + "."
        if not self.known:
            return "Nothing known."
        scale = scale_of(self.values, self.quantity)
        return f"{self.quantity.name} from {formats.span([scale.least, scale.largest], self.quantity.form)}."

    def _outliers(self) -> str:
        if self.quantity is None:
            return ""
        if self.scale is not None:
            return "Equal colours are equal values in all of these maps."
        scale = scale_of(self.values, self.quantity)
        if not scale.below + scale.above:
            return ""
        form = self.quantity.form
        return (
            f"Beyond the scale, in the colours of its ends: {formats.count(scale.below + scale.above, 'expert')} more "
            f"than {maps.FENCE} interquartile ranges from the quartiles; all lie between {form(scale.least)} and "
            f"{form(scale.largest)}."
        )


def sensitivity_maps(inputs: ReportInputs) -> list[ExpertMap]:
    """Routing, Hessian traces and their product, known or not."""
    table = inputs.sensitivities
    counted_on = inputs.assignment.parameters.get("statistics", "all")
    part = "" if counted_on == "all" else f" Counted on the {counted_on} positions alone."
    even = formats.share(1 / max(table.experts()))
    share = Quantity(name="share of the layer's activations", form=formats.share, from_zero=True, zero_is_grey=True)
    weight = Quantity(name="share of the layer's routing weight", form=formats.share, from_zero=True, zero_is_grey=True)
    norm = Quantity(name="trace, 1 / unit of weight", form=formats.number)
    product = Quantity(name="normalized to 0 to 1, no unit", form=formats.number, from_zero=True)
    inner = Quantity(name="trace, squared activations (logarithmic)", form=formats.number, log=True)
    measures = [
        ("activation-frequency", "Activation frequency", share, "activation_frequency",
         f"How often the router chose an expert; an even router would give each {even}. Grey: never.{part} ("
         f"{CONTEXT_AWARE.short}, Figure 2; {MOPEQ.short}, Figure 2.)"),
        ("routing-mass", "Routing mass", weight, "routing_mass",
         f"What part of the layer's output an expert has: what routers weighted it with, summed. Grey: none.{part}"),
        ("hessian-trace", "Hessian trace", norm, "frobenius_hessian_trace",
         "Of the Frobenius norm of the expert's matrices: (n\N{MINUS SIGN}1)/norm of n weights, summed; what "
         f"{MOPEQ.short} samples (Figure 3), in closed form. It needs no calibration, and knows nothing of it."),
        ("hybrid-importance", "Hybrid importance", product, "hybrid_importance",
         "Activations times Hessian trace, each brought to 0 to 1 by the least and largest of the model, as "
         f"{MOPEQ.short} normalizes them (Figure 4).{part}"),
        ("calibration-hessian-trace", "Trace of the calibration Hessian", inner, "calibration_hessian_trace",
         "Mean squared length of what the expert's matrices are given, summed: the Hessians that GPTQ rounds with. "
         "Grey: none, or not known."),
    ]  # fmt: skip
    return [
        ExpertMap(
            key=key,
            title=title,
            quantity=quantity,
            values=table.column(column),
            reading=reading,
            layers=inputs.profile.layers,
        )
        for key, title, quantity, column, reading in measures
    ]


def loss_maps(inputs: ReportInputs) -> list[ExpertMap]:
    """The measured relative loss at every width, the most telling one first."""
    method = main_method(inputs)
    table = inputs.losses.matrix(method, "relative_loss")
    quantity = Quantity(
        name="relative loss (logarithmic)", form=partial(formats.share, digits=2), log=True, colours=LOSS_MAP
    )
    widths = inputs.losses.bits()
    first = MAP_BITS if MAP_BITS in widths else widths[0]
    drawn = []
    for bits in [first, *(width for width in widths if width != first)]:
        width = formats.width(bits)
        unknown = [np.full(count, np.nan) for count in inputs.sensitivities.experts()]
        values = [layer.get(bits, nothing) for layer, nothing in zip(table, unknown, strict=True)]
        reading = f"Measured with {label(method)}."
        if bits == first:
            reading = (
                f"Squared error of a {width} expert's output ({label(method)}) over the output's energy. Bright: "
                "suffers most, and is worth more bits if it is also chosen often. Grey: no loss, or not known."
            )
        key, title = f"relative-loss-{bits}", f"{width} loss"
        drawn.append(
            ExpertMap(
                key=key, title=title, quantity=quantity, values=values, reading=reading, layers=inputs.profile.layers
            )
        )
    return drawn


def main_method(inputs: ReportInputs) -> str:
    """The method that the assignment was made with, else the default one, else the first."""
    wanted, there = (str(inputs.assignment.parameters.get("quantizer")), DEFAULT_QUANTIZER), inputs.losses.methods()
    return next((method for method in wanted if method in there), there[0])


def own_widths(inputs: ReportInputs) -> ExpertMap:
    """The widths of the recipe's own assignment."""
    return _width_maps(inputs)[0]


def compared_widths(inputs: ReportInputs) -> list[ExpertMap]:
    """The widths of every other assignment that was evaluated."""
    return _width_maps(inputs)[1:]


def _width_maps(inputs: ReportInputs) -> list[ExpertMap]:
    """The widths of every assignment, the recipe's own first."""
    own, rows = inputs.assignment, inputs.evaluation.rows
    others = [(row.assignment, row) for row in rows if row.name != own.name and row.assignment is not None]
    every = [(own, inputs.evaluation.row(own.name)), *others]
    keys = keys_of([assignment.name for assignment, _ in every])
    return [_widths(inputs, key, *one) for key, one in zip(keys, every, strict=True)]


def _widths(inputs: ReportInputs, key: str, assignment: Assignment, row: EvalRow | None) -> ExpertMap:
    if row is not None:
        figures = [f"{formats.bits(row.bits_per_weight)} bits", human_size(row.expert_bytes)]
    else:
        codes = assignment.code_bits()
        figures = [f"{formats.bits(None if codes is None else float(codes))} code bits"]
    return ExpertMap(
        key=f"widths-{key}",
        title=f"{plain(inputs.label(assignment.name))}: {', '.join(figures)}",
        values=assignment.mean_bits(),
        hot=assignment.hot(),
        present=assignment.widths(),
        layers=[layer.name for layer in assignment.layers],
        reading=f"{_described(assignment)}. {placement(assignment)}{MEANS if assignment.is_mixed else ''}",
    )


def placement(assignment: Assignment) -> str:
    """How many experts are on the GPU."""
    hot = assignment.hot()
    on_gpu, total = int(sum(mask.sum() for mask in hot)), sum(map(len, hot))
    if not on_gpu:
        return "No expert is placed on the GPU."
    return f"{on_gpu:,} of {total:,} experts are placed on the GPU (outlined)."


def _described(assignment: Assignment) -> str:
    """The method and what tells it from others of its kind."""
    method = assignment.method
    given = used_parameters(method, assignment.parameters)
    told = {name: given[name] for name in TELLING if given.get(name) is not None}
    if (allocator := ALLOCATORS.find(method)) is not None:
        method = allocator.label or method
        own = {name: given.get(name, field.default) for name, field in allocator.settings.model_fields.items()}
        spans = {"scope": allocator.implied["scope"]} if "scope" in allocator.implied else {}
        told = {name: value for name, value in own.items() if value is not None} | spans | told
    parts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown_parameters(told).items())
    return f"{method} ({parts})" if parts else method


def atlas(inputs: ReportInputs) -> list[ExpertMap]:
    """All maps of a run; a measure that is known of no expert has none."""
    every = [*sensitivity_maps(inputs), *loss_maps(inputs), own_widths(inputs), *compared_widths(inputs)]
    return [expert_map for expert_map in every if expert_map.known]


def figures(drawn: Sequence[ExpertMap]) -> Raw:
    """Maps side by side, two in a row where cells of 2 points allow it."""
    halves = (figure(expert_map.draw(maps.HALF), expert_map.caption()) for expert_map in drawn)
    return element("div", *halves, class_="figures")


def gallery(summary: str, drawn: Sequence[ExpertMap]) -> list[Raw]:
    """Maps that can be folded away; they are where together they have many cells. Nothing where there are none."""
    cells = sum(len(row) for expert_map in drawn for row in expert_map.values)
    shown = {} if cells > OPEN_CELLS else {"open": "open"}
    return [details(summary, figures(drawn), **shown)] if drawn else []
