"""`moeq profile --imatrix`: llama.cpp's importance matrix from a run's calibration text, in one pass of its own.

The text is what the profile counted, held-out sequences included, pads taken out. An expert's first matrices share what
they are given, the tokens that the router sends there; down_proj is given what these and the gate make of them.

Letters: T tokens, E experts, H hidden size, I intermediate size, K inputs of a linear.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.errors import ModelError, NotFiniteError
from moeq.exporters import imatrix
from moeq.exporters.gguf_families import stack_name
from moeq.exporters.imatrix import Squares
from moeq.models.experts import DOWN, expert_math, stacked_biases, stacked_weights
from moeq.models.non_experts import OtherModule
from moeq.models.walk import LayerInputs, current_batch, end_batch
from moeq.quantizers.layer_data import part_rows
from moeq.quantizers.non_experts import split_rows
from moeq.stages.context import Context
from moeq.stages.finite import naming_the_file, say_left_out

NOT_FINITE = "inputs of a matrix are not finite"


def write(context: Context, path: Path) -> dict[str, Any]:
    """Write the file; returns what it holds, for the terminal.

    Raises FormatError for a family whose names are not known in GGUF, ModelError for a linear that is not given one row
    a token, NotFiniteError where inputs are not finite.
    """
    config: Any = context.model.skeleton.config
    imatrix.check(config)
    names = {module.name: imatrix.matrix_of(config, module) for module in context.model.others.modules}
    named = {module: name for module, name in names.items() if name is not None}
    sequences = context.text.grown_calibration
    matrices: dict[str, Squares] = {}
    with torch.no_grad(), naming_the_file(context):
        linears = _collect(context, [one for one in context.model.others.modules if one.name in named], matrices)
    matrices |= {named[module]: squares for module, squares in linears.items()}
    for name, squares in matrices.items():
        if not bool(torch.isfinite(squares.sums.float()).all()):
            raise NotFiniteError(NOT_FINITE, where=name, do="use dtype: float32, or check the checkpoint's weights")
    size = int(sequences.ids.shape[1])
    imatrix.write(path, matrices, datasets=context.text.corpus_names, chunks=len(sequences), chunk_size=size)
    unseen = sum(int((squares.counts == 0).sum()) for name, squares in matrices.items() if "ffn_down_exps" in name)
    without = sum(name is None and "kv_b_proj" in module for module, name in names.items())
    return {
        "for": "llama-quantize --imatrix",
        "path": str(path),
        "matrices": len(matrices),
        "tokens": int(sequences.mask.sum()),
        "experts_without_tokens": unseen,
    } | ({"kv_b_proj_left_out": without} if without else {})


def _collect(context: Context, modules: list[OtherModule], matrices: dict[str, Squares]) -> dict[str, Squares]:
    """Walk over the text: the stacks of experts into `matrices`, {module: its squares} of the linears."""
    model: Any = context.model.module
    sequences = context.text.grown_calibration
    linears = LinearSquares(model, modules, len(sequences))
    head = model.get_output_embeddings()
    stop = None if head is None else head.register_forward_pre_hook(lambda *_: end_batch())
    try:
        with context.reporter.bar("imatrix", len(context.model.layers)) as advance:
            batches = sequences.batches(context.recipe.corpus.batch_size)
            for inputs in context.model.walk(batches, finish=lambda *_: None):
                say_left_out(context, inputs)
                matrices |= {stack_name(inputs.layer, name): made for name, made in squares_of(model, inputs).items()}
                advance()
                del inputs  # before the next layer's are gathered
    finally:
        linears.remove()
        if stop is not None:
            stop.remove()
    return linears.found()


def squares_of(model: nn.Module, inputs: LayerInputs) -> dict[str, Squares]:
    """Sums [E, K] and counts [E] of the stacks of one layer, {projection: squares}."""
    layer, math = inputs.layer, expert_math(model, inputs.layer)
    device = inputs.hidden.device
    sizes = (layer.hidden_size, layer.intermediate_size)
    first, down = (torch.zeros(layer.num_experts, size, dtype=torch.float64, device=device) for size in sizes)
    counts = torch.zeros(layer.num_experts, dtype=torch.int64, device=device)
    for expert in range(layer.num_experts):
        rows = (inputs.experts == expert).any(1).nonzero().squeeze(1)
        counts[expert] = len(rows)
        if not len(rows):
            continue
        only = slice(expert, expert + 1)
        weights = {name: stack[0].float() for name, stack in stacked_weights(model, layer, only).items()}
        biases = {name: stack[0].float() for name, stack in stacked_biases(model, layer, only).items()}
        for part in rows.split(part_rows(layer.intermediate_size)):
            hidden = inputs.hidden[part].float()
            first[expert] += _squared(hidden)
            down[expert] += _squared(math.intermediate(hidden, weights, biases))
    return {name: Squares(sums=down if name == DOWN else first, counts=counts) for name in layer.projections}


def _squared(rows: Tensor) -> Tensor:
    """Sum of the squares [K] of rows [T, K]."""
    return rows.square().sum(0, dtype=torch.float64)


class LinearSquares:
    """Hooks that sum up the squares of what linears are given during a walk."""

    def __init__(self, model: nn.Module, modules: Iterable[OtherModule], sequences: int) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._none_held_out = torch.zeros(sequences, dtype=torch.bool)
        self._hooks = [
            model.get_submodule(module.name).register_forward_pre_hook(
                lambda _, given, at=module.name: self._see(at, given[0].detach())
            )
            for module in modules
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def found(self) -> dict[str, Squares]:
        """{module: sums [1, K] and counts [1]} of all that were given something."""
        return {
            name: Squares(sums=sums.unsqueeze(0), counts=torch.tensor([self._counts[name]]))
            for name, sums in self._sums.items()
        }

    def _see(self, name: str, inputs: Tensor) -> None:
        """Add one call's inputs."""
        rows = split_rows(inputs, current_batch(), self._none_held_out)
        if rows is None:
            what = f"inputs of shape {list(inputs.shape)}, not one row a token"
            raise ModelError(what, where=name, do="report the model's family")
        squared = _squared(rows[0].float())
        self._sums[name] = self._sums[name] + squared if name in self._sums else squared
        self._counts[name] = self._counts.get(name, 0) + len(rows[0])
