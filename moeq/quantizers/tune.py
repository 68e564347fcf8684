"""Tuning: the scales of all quantized experts trained at once on what the whole model answers, their codes fixed.

The loss is the divergence of the model's next tokens from the original's, KL(original || quantized). What is trained is
each scale's relative change; the model computes with the scales rounded to float16, as they are stored, and gradients
pass the rounding unchanged (straight through). A weight is unit * scale, `unit` what its code stands for at scale 1,
so that a scale's gradient is the sum of its weights' gradients times their units: any grid and any trellis alike.

Adam (Kingma and Ba, arXiv 1412.6980) with a warm-up and a cosine to 0. Text that is not trained on decides which of the
states on the way is taken, and whether it is: only one that beats the start beyond chance is.

Letters: N output rows, K inputs, G groups of inputs, S scales of the model, W held-out sequences.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from moeq.models.experts import ExpertLayer
from moeq.recipe import TuneSection
from moeq_kernels.grids import SCALE_DTYPE
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import resolved_group_size

BETAS = 0.9, 0.95
EPSILON = 1e-8
WARM_UP = 0.1  # of the steps
MEASURED = 8  # times that the held-out text is, beside the start
PATIENCE = 3  # of these without a better one, after which training ends
CONFIDENCE = 0.975  # one-sided, that the best is better than the start: it is chosen among MEASURED
TENSORS = ("change", "first", "second", "best")  # of a state
LARGEST = float(torch.finfo(SCALE_DTYPE).max)
UNIT_DTYPE = torch.float16  # of what codes stand for at scale 1, where it holds them exactly


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a matrix lies in the model."""

    layer: ExpertLayer
    expert: int
    projection: str


@dataclass(frozen=True, kw_only=True)
class _Matrix:
    """One quantized matrix: units [N, K], its scales [N, G] as they were, its view in the model and where its scales
    lie among all."""

    units: Tensor
    start: Tensor
    group_size: int
    view: Tensor
    scales: slice

    def write(self, scales: Tensor) -> None:
        """Put units times scales [N, G] into the model."""
        inputs = self.units.shape[1]
        whole = scales if scales.shape[1] == 1 else scales.repeat_interleave(self.group_size, 1)[:, :inputs]
        self.view.copy_(self.units.float() * whole)

    def gathered(self, gradient: Tensor) -> Tensor:
        """The gradient of the scales [N * G] from the weights' [N, K]."""
        products = gradient.float() * self.units
        if self.start.shape[1] == 1:
            return products.sum(1)
        more = -products.shape[1] % self.group_size
        products = nn.functional.pad(products, (0, more)) if more else products
        sums: Tensor = products.unflatten(1, (-1, self.group_size)).sum(2).flatten()
        return sums


class TunedScales:
    """The quantized experts of a model, whose scales are trained: `change` [S], the relative change of each.

    The model's experts are overwritten; its other weights get no gradients.
    """

    def __init__(self, model: nn.Module, experts: Iterable[tuple[Place, PackedWeight]], device: torch.device) -> None:
        """experts: every quantized matrix with its place; of each the units are kept, not the codes."""
        self.model = model
        self.places: list[Place] = []
        self._matrices: list[_Matrix] = []
        count = 0
        for place, packed in experts:
            start = packed.scales.float().to(device)
            views = place.layer.kind.views(model.get_submodule(place.layer.name), place.expert)
            self._matrices.append(
                _Matrix(
                    units=units_of(packed).to(device),
                    start=start,
                    group_size=resolved_group_size(packed.inputs, packed.group_size),
                    view=views[place.projection].detach(),
                    scales=slice(count, count + start.numel()),
                )
            )
            self.places.append(place)
            count += start.numel()
        self.change = torch.zeros(count, device=device)
        self.gradient = torch.zeros(count, device=device)

    def _scales(self, matrix: _Matrix) -> Tensor:
        """A matrix's scales [N, G] as they are stored, in float32."""
        changed: Tensor = matrix.start * (1 + self.change[matrix.scales].view_as(matrix.start))
        rounded: Tensor = changed.clamp(-LARGEST, LARGEST).to(SCALE_DTYPE).float()
        return rounded

    @torch.no_grad()
    def write(self, change: Tensor) -> None:
        """Change the scales [S], and have the model compute with them as they would be stored."""
        self.change = change.clone()
        for matrix in self._matrices:
            matrix.write(self._scales(matrix))

    def stored(self) -> dict[Place, Tensor]:
        """The scales as they are now, float16 [N, G] on the CPU."""
        pairs = zip(self.places, self._matrices, strict=True)
        return {place: self._scales(matrix).to(SCALE_DTYPE).cpu() for place, matrix in pairs}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Add up the scales' gradients of every backward pass in `gradient`; those of weights are let go at once."""
        parameters = self._parameters()
        before = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
        for parameter in before:
            parameter.requires_grad_(parameter in parameters)
        handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(matrices))
            for parameter, matrices in parameters.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, wanted in before.items():
                parameter.requires_grad_(wanted)

    def _parameters(self) -> dict[nn.Parameter, list[_Matrix]]:
        """The parameters that matrices are views of."""
        spans = sorted(((each.data_ptr(), each) for each in self.model.parameters()), key=lambda span: span[0])
        starts = [first for first, _ in spans]
        found: dict[nn.Parameter, list[_Matrix]] = {}
        for matrix in self._matrices:
            parameter = spans[bisect_right(starts, matrix.view.data_ptr()) - 1][1]
            found.setdefault(parameter, []).append(matrix)
        return found

    def _hook(self, matrices: Sequence[_Matrix]) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient, parameter.grad = parameter.grad, None
            if gradient.stride() != parameter.stride():
                gradient = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
                ).copy_(gradient)
            for matrix in matrices:
                offset = matrix.view.storage_offset() - parameter.storage_offset() + gradient.storage_offset()
                own = gradient.as_strided(matrix.view.shape, matrix.view.stride(), offset)
                self.gradient[matrix.scales] += matrix.gathered(own) * matrix.start.flatten()

        return add


def units_of(packed: PackedWeight) -> Tensor:
    """What the codes stand for at scale 1, [N, K]: in float16 where that is exact, else in float32."""
    units = replace(packed, scales=torch.ones_like(packed.scales)).dequantize()
    short = units.to(UNIT_DTYPE)
    return short if torch.equal(short.float(), units) else units


@dataclass(kw_only=True)
class State:
    """What training goes on with: change [S], Adam's moments, steps taken; the best change by held-out divergence, and
    the divergences of every held-out sequence [W] after some numbers of steps, those of the start first."""

    change: Tensor
    first: Tensor
    second: Tensor
    best: Tensor
    steps: int = 0
    after: list[int] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)

    @classmethod
    def begun(cls, like: Tensor) -> State:
        """Nothing is changed yet; like: any tensor [S]."""
        change, first, second, best = (torch.zeros_like(like) for _ in TENSORS)
        return cls(change=change, first=first, second=second, best=best)

    @property
    def means(self) -> list[float]:
        """The mean divergence at each time; infinite where it is not a number."""
        means = [float(each.mean()) for each in self.divergences]
        return [mean if math.isfinite(mean) else math.inf for mean in means]

    @property
    def chosen(self) -> int:
        """Which of the times had the least divergence, the first of equals."""
        return self.means.index(min(self.means))

    def note(self, divergences: Tensor) -> None:
        """What the held-out sequences came to now, [W] float64."""
        self.after.append(self.steps)
        self.divergences.append(divergences)
        if self.chosen == len(self.after) - 1:
            self.best = self.change.clone()

    def gain(self) -> tuple[float, float]:
        """By how much the best lies below the start, and the least of it that 95 % of such differences leave: by
        Student's t over the held-out sequences, which are compared one by one."""
        differences = (self.divergences[0] - self.divergences[self.chosen]).double()
        count, mean = len(differences), float(differences.mean())
        if count < 2 or not math.isfinite(mean):
            return 0.0, 0.0
        return mean, mean - float(stdtrit(count - 1, CONFIDENCE)) * float(differences.std()) / math.sqrt(count)

    @property
    def is_better(self) -> bool:
        """Whether the best is better than the start beyond chance."""
        return self.chosen > 0 and self.gain()[1] > 0

    def adam(self, gradient: Tensor, learning_rate: float) -> None:
        """A step of Adam against a gradient [S]."""
        self.steps += 1
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.lerp_(gradient.square(), 1 - BETAS[1])
        fast, slow = (1 - beta**self.steps for beta in BETAS)
        self.change -= learning_rate * (self.first / fast) / ((self.second / slow).sqrt() + EPSILON)


def train(
    scales: TunedScales,
    state: State,
    section: TuneSection,
    *,
    backward: Callable[[int], float],
    heldout: Callable[[], Tensor],
    save: Callable[[], None],
) -> None:
    """Train on from a state until the steps are taken, the held-out divergence has risen PATIENCE times in a row, or
    something is not finite.

    backward(step): the loss of a step's batch, whose gradients are left to the scales; heldout(): the divergence of
    every held-out sequence [W]; save(): called after it was measured.
    """
    every = measured_every(section)
    if not state.after:
        scales.write(state.change)
        state.note(heldout())
    while state.steps < section.steps and len(state.after) - 1 - state.chosen < PATIENCE:
        scales.write(state.change)
        scales.gradient.zero_()
        with scales.listening():
            loss = backward(state.steps)
        if not math.isfinite(loss) or not bool(torch.isfinite(scales.gradient).all()):
            return
        state.adam(scales.gradient, rate(state.steps, section.steps, section.learning_rate))
        if state.steps % every == 0 or state.steps == section.steps:
            scales.write(state.change)
            state.note(heldout())
            save()


def measured_every(section: TuneSection) -> int:
    """Steps after which the held-out text is measured again."""
    return -(-section.steps // MEASURED)


def rate(step: int, steps: int, learning_rate: float) -> float:
    """The learning rate of a step, counted from 0: a warm-up, then a cosine to 0."""
    warm = max(1, round(WARM_UP * steps))
    return learning_rate * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))
