"""A model whose layers stay on disk: each is read when it is about to run and dropped after it.

The structure lies on the meta device; what is not in a layer (embeddings, norms, head) is resident. Layers are found by
structure: decoder and encoder layers, of text and of images. A layer is read lazily from safetensors through
transformers' own conversion code, so that renaming, fusing and transposing stay the library's. `model.forward` is
untouched: rotary embeddings, masks and caches are the family's own, and anything that calls the model (generate,
lm-eval) works on a streamed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.loading import share, share_copies, skeleton, tied
from moeq.models.source import ModelSource
from moeq.models.visits import visits
from moeq.models.weights import WeightReader, owner
from moeq.progress import Bar
from moeq_kernels.freed import return_memory

META = torch.device("meta")
Overlay = Callable[[nn.Module, ExpertLayer], None]  # changes a layer's experts right after it was read


def blocks_of(model: nn.Module) -> list[str]:
    """Paths of all entries of the module lists that hold layers, in order of execution; lists within are not looked at.

    A layer is a module that transformers checkpoints or does not split across devices, or is called Layer or Block.
    """
    unsplit = set(getattr(model, "_no_split_modules", None) or ())

    def is_layer(module: nn.Module) -> bool:
        kind = type(module).__name__
        return isinstance(module, GradientCheckpointingLayer) or kind in unsplit or kind.endswith(("Layer", "Block"))

    blocks: list[str] = []
    within: tuple[str, ...] = ()
    for path, module in model.named_modules():
        layers = isinstance(module, nn.ModuleList) and len(module) > 0 and all(is_layer(entry) for entry in module)
        if layers and not path.startswith(within):
            blocks += [f"{path}.{name}" for name, _ in module.named_children()]
            within = (*within, f"{path}.")
    return blocks


class StreamedModel:
    """The model, its blocks, and how they are read; `bytes_read` counts what was asked of the disk.

    names: parameters and stored buffers of every block; those of no block, which are resident, under the empty name.
    """

    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
        supplied: frozenset[str] = frozenset(),
    ) -> None:
        """Read what is resident. Raises ModelError when a weight is missing, unexpected or of another shape.

        supplied: parameters that the overlays fill, which are not read; resident ones are filled by the caller.
        """
        self.source, self.device, self.supplied = source, device, supplied
        self.model: Any = skeleton(source, dtype, trust_remote_code)
        self.reader = WeightReader(source, self.model, dtype, device)
        self.reader.check_unexpected()
        self.blocks = blocks_of(self.model)
        self.overlay: Overlay | None = None
        self.block_overlay: Callable[[nn.Module, str], None] | None = None  # changes a block right after it was read
        self.loaded: set[str] = set()
        self.entered: Callable[[], None] = lambda: None  # is called when all batches have come to a block
        self._pause: Callable[[str], None] | None = None
        self._block_set = frozenset(self.blocks)
        self.names: dict[str, list[str]] = {"": [], **{path: [] for path in self.blocks}}
        for name in self.model.state_dict():
            self.names[self.block_of(name)].append(name)
        self._tied = tied(self.model)
        self._pinned: set[str] = set()
        self._read(self.names[""])
        self._to_device()
        self._pin()
        for path in self.blocks:
            block = self.model.get_submodule(path)
            block.register_forward_pre_hook(lambda _, __, at=path: self._enter(at))
            block.register_forward_hook(lambda _, __, ___, at=path: self._leave(at))

    @cached_property
    def layers(self) -> list[ExpertLayer]:
        """The MoE layers, none of a dense model; ModelError when the family's experts are not supported."""
        return find_expert_layers(self.model, needed=False)

    @property
    def bytes_read(self) -> int:
        return self.reader.bytes_read

    def block_of(self, name: str) -> str:
        """The block that holds a module, parameter or buffer; empty when it is resident."""
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((path for path in paths if path in self._block_set), "")

    def _read(self, names: list[str]) -> None:
        """Read parameters; what the disk lacks is taken from what it is tied to."""
        missing = self.reader.read(names)
        share_copies(self.model, self._tied, set(names) - missing)
        for name in missing & self.supplied:
            self._empty(name, self.device)
        missing -= self.supplied
        there = self.reader.origins.keys() | self.supplied
        for name in sorted(missing):
            if (other := next((tie for tie in self._tied.get(name, ()) if tie in there), None)) is not None:
                self._take(name, other)
                missing.discard(name)
        self.reader.check_missing(missing)

    def _take(self, name: str, other: str) -> None:
        """Let a parameter be one that lies elsewhere; what is read for it alone does not stay there."""
        held = self.model.get_parameter_or_buffer(other).device.type != "meta"
        if not held:
            self.reader.read([other])
        share(self.model, name, other)
        if not held and self.block_of(other) not in ("", *self.loaded):
            self._empty(other, META)

    def _pin(self) -> None:
        """Parameters of blocks that are tied to resident ones are resident."""
        for name, others in self._tied.items():
            resident = next((other for other in others if not self.block_of(other)), None)
            if self.block_of(name) and resident is not None and name not in self.reader.origins:
                share(self.model, name, resident)
                self._pinned.add(name)

    def _empty(self, name: str, device: torch.device) -> None:
        """Have a parameter without values on a device; buffers stay as they are."""
        module, leaf = owner(self.model, name)
        if leaf in module._parameters:
            empty = torch.empty_like(module._parameters[leaf], device=device)
            module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)

    def _to_device(self) -> None:
        """Buffers made with the structure (rotary frequencies and the like) go where the weights go."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(self.device)

    def load(self, block: str) -> None:
        """Read a block's weights; ModelError when one is missing or of another shape."""
        if block in self.loaded:
            return
        self._read([name for name in self.names[block] if name not in self._pinned])
        self.loaded.add(block)
        self._prefetch_after(block)
        return_memory()  # the tensors on disk that its parameters were put together from
        if self.block_overlay is not None:
            self.block_overlay(self.model, block)
        if self.overlay is not None:
            for layer in self.layers:
                if layer.name.startswith(f"{block}."):
                    self._detach(layer)
                    self.overlay(self.model, layer)

    def _prefetch_after(self, block: str) -> None:
        """Begin to fetch the next block's tensors where they lie in an object store."""
        following = self.blocks[self.blocks.index(block) + 1 :][:1] or self.blocks[:1]
        for name in following:
            keys = self.reader.keys([name for name in self.names[name] if name not in self._pinned])
            self.reader.prefetch(keys)

    def _detach(self, layer: ExpertLayer) -> None:
        """Copies of a layer's experts: stacks that are read whole are the memory through which they are read again."""
        for name in layer.parameters:
            if f"{layer.name}.{name}" not in self.supplied:
                parameter = self.model.get_parameter(f"{layer.name}.{name}")
                parameter.data = parameter.data.clone()

    def read_again(self, parameters: list[str]) -> None:
        """Have resident parameters, and those tied to them, as the checkpoint has them."""
        partners = [other for name in parameters for other in self._tied.get(name, ()) if not self.block_of(other)]
        self._read([*parameters, *partners])

    def only(self, block: str) -> None:
        """Have this block read and no other."""
        for other in self.loaded - {block}:
            self.drop(other)
        self.load(block)
        self.entered()

    @contextmanager
    def counted(self, bar: Bar) -> Iterator[None]:
        """Show how many blocks batches that go together have come to."""
        before = self.entered
        try:
            with bar("layers", sum(visits(self.model, block) for block in self.blocks)) as self.entered:
                yield
        finally:
            self.entered = before

    def drop(self, block: str) -> None:
        """Put a block's weights back on the meta device."""
        for name in self.names[block]:
            if name not in self._pinned:
                self._empty(name, META)
        self.loaded.discard(block)
        return_memory()

    @contextmanager
    def lockstep(self, pause: Callable[[str], None]) -> Iterator[None]:
        """Within the block, `pause(block)` is called instead of reading and dropping: the caller does both."""
        self._pause = pause
        try:
            yield
        finally:
            self._pause = None
            for block in list(self.loaded):
                self.drop(block)

    def _enter(self, block: str) -> None:
        if self._pause is not None:
            self._pause(block)
        else:
            self.load(block)

    def _leave(self, block: str) -> None:
        if self._pause is None:
            self.drop(block)
