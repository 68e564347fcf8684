"""Where the target's routers chose other experts than the reference's, and whether float arithmetic explains it.

Of two experts whose scores are equal but for the last digits, the order in which sums are taken decides. Such a token's
output is another one, and so is that of every later token that attends to it: these say nothing of whether a checkpoint
is loaded right, and all others must be equal. A choice is taken for such a tie where the reference makes it too once
noise that is smaller than the tolerance is added to what its router is given and, for experts whose scores are equal
whatever it is given, a much smaller one to its weights.

Letters: B sequences, S positions, T = B*S tokens, H hidden size, k experts a token, R tokens whose choice differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from moeq.models.experts import ExpertLayer
from moeq.models.streaming import StreamedModel
from moeq.verification.launch import Answer
from moeq.verification.probe import is_call

HALVINGS, DRAWS = 8, 4  # of the tolerance, and draws of noise of each size; the weights' is half the smallest


class _ChosenError(Exception):
    """Ends a block's forward as soon as its router has chosen."""


class Routing:
    """Watches the reference's experts being called, each layer's for the first time.

    clean: the tokens [B, S] that no such choice has touched; None: not every layer's choices are known. ties: how many
    choices were explained; wrong: layers whose choices were not, a line each.
    """

    def __init__(
        self, reference: StreamedModel, layers: list[ExpertLayer], answer: Answer, tokens: Tensor, tolerance: float
    ) -> None:
        """tokens: what the model is given [B, S, ...]."""
        self.reference, self.answer, self.tolerance = reference, answer, tolerance
        self.clean: Tensor | None = torch.ones(tokens.shape[:2], dtype=torch.bool)
        self.ties, self.wrong = 0, list[str]()
        self._causal = tokens.dim() == 2 and not getattr(reference.model.config, "is_encoder_decoder", False)
        self._asked: list[Tensor] | None = None
        self._handles: dict[str, Any] = {}
        for layer in layers:
            module: Any = reference.model.get_submodule(layer.name)
            self._handles[layer.name] = module.register_forward_pre_hook(
                lambda _, given, named, layer=layer: self._called(layer, [*given, *named.values()]), with_kwargs=True
            )

    def finish(self) -> None:
        """Stop watching; of layers that were not called nothing is known."""
        for handle in self._handles.values():
            handle.remove()
            self.clean = None

    def _called(self, layer: ExpertLayer, given: list[Any]) -> None:
        if self._asked is not None:
            self._asked += [given[1]] if is_call(given) else []
            raise _ChosenError
        inputs, theirs = (self.answer.part(layer.name, part) for part in ("call.0", "call.1"))
        known = inputs is not None and theirs is not None and is_call(given) and theirs.shape == given[1].shape
        if self.clean is None or not known or inputs.shape != given[0].shape:  # type: ignore[union-attr]
            self.clean = None
        else:
            alike = (inputs - given[0]).norm(dim=-1) <= self.tolerance * given[0].norm(dim=-1)  # type: ignore[operator]
            self._compare(layer, given[0], alike, _sets(given[1]), _sets(theirs))  # type: ignore[arg-type]
        self._handles.pop(layer.name).remove()

    def _compare(self, layer: ExpertLayer, hidden: Tensor, alike: Tensor, ours: Tensor, theirs: Tensor) -> None:
        """Look at the tokens whose inputs [T, H] are alike; what they touch from here on is not clean."""
        assert self.clean is not None
        rows = len(ours) == self.clean.numel()
        same_inputs = alike & (self.clean.flatten() if rows else self.clean.all().expand(len(ours)))
        flipped = ((ours != theirs).any(-1) & same_inputs).nonzero()[:, 0]
        if not len(flipped):
            return
        explained = self._explained(layer, hidden[flipped], theirs[flipped])
        if explained is None:
            self.clean = None
            return
        self.ties += explained
        if explained < len(flipped):
            self.wrong.append(
                f"{layer.name}: its router chooses other experts for {len(flipped) - explained} of "
                f"{int(same_inputs.sum())} tokens"
            )
        if not rows or not self._causal:
            self.clean[:] = False
            return
        for row in flipped.tolist():
            self.clean[row // self.clean.shape[1], row % self.clean.shape[1] :] = False

    def _explained(self, layer: ExpertLayer, hidden: Tensor, theirs: Tensor) -> int | None:
        """How many of the choices [R, k] the reference makes of inputs [R, H] with noise below the tolerance; None
        where the block around the experts is not one that is given these inputs alone."""
        path = layer.name.rpartition(".")[0]
        if not path or path in self.reference.blocks:
            return None
        generator = torch.Generator().manual_seed(0)
        sizes = self.tolerance * 2.0 ** -torch.arange(1 + HALVINGS)
        block: Any = self.reference.model.get_submodule(path)
        experts = {id(value) for value in self.reference.model.get_submodule(layer.name).parameters()}
        weights = [value for value in block.parameters() if value.is_floating_point() and id(value) not in experts]
        made = torch.zeros(len(theirs), dtype=torch.bool)
        for draw in range(DRAWS):
            noise = torch.randn(HALVINGS, *hidden.shape, generator=generator).clamp(-1, 1)
            given = (hidden * (1 + sizes[:-1, None, None] * noise)).flatten(0, 1)[None]
            with _nudged(weights, float(sizes[-1]), draw):
                asked = self._ask(block, given)
            if len(asked) != 1 or asked[0].shape != (HALVINGS * len(theirs), theirs.shape[1]):
                return None
            made |= (_sets(asked[0]).view(HALVINGS, *theirs.shape) == theirs).all(-1).any(0)
        return int(made.sum())

    def _ask(self, block: Any, hidden: Tensor) -> list[Tensor]:
        """What a block's experts are called with: choices for inputs [1, T, H]."""
        self._asked = []
        with suppress(Exception):  # what ends it, or a block that is called otherwise
            block(hidden)
        asked, self._asked = self._asked, None
        return asked


@contextmanager
def _nudged(weights: list[Tensor], size: float, draw: int) -> Iterator[None]:
    """Weights with relative noise; every second draw is the one before it, negated, so that a tie of two goes both
    ways."""
    before = [weight.clone() for weight in weights]
    generator = torch.Generator().manual_seed(draw // 2)
    try:
        with torch.no_grad():
            for weight in weights:
                noise = torch.randn(weight.shape, generator=generator) * (size if draw % 2 else -size)
                weight.mul_((1 + noise).to(weight))
        yield
    finally:
        with torch.no_grad():
            for weight, exact in zip(weights, before, strict=True):
                weight.copy_(exact)


def _sets(chosen: Tensor) -> Tensor:
    """Choices [T, k] in the order of the experts' numbers."""
    return chosen.long().sort(-1).values
