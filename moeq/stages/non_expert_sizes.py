"""What the recipe makes of modules outside of the experts, before anything is measured: shapes, files and work."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moeq.artifacts import non_experts as artifact
from moeq.artifacts import replicas
from moeq.artifacts.files import canonical_json
from moeq.artifacts.manifest import PlacedModule, TensorStamp
from moeq.artifacts.non_experts import MadeOthers, OtherIndex, OtherRow, OtherTable
from moeq.artifacts.targets import Grid
from moeq.artifacts.tensor_files import dtype_name, safetensors_bytes
from moeq.exporters.native_writer import others_name
from moeq.exporters.plain import METADATA
from moeq.models.non_experts import OtherModule, by_block
from moeq.runtime.packed_experts import GUARD_DTYPE
from moeq.runtime.packed_modules import GUARD_SHAPE, guard_name
from moeq.stages import non_experts as stage
from moeq.stages.context import Context
from moeq_kernels.packed import packed_shapes

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
DIGEST = "1" * 64  # of a set in the store, unlike that of the experts'
TYPICAL = 0.0123456789012345
LONGEST_ERROR = 1.23456789e-05  # of a matrix against its weights
COMPARED = 4 + 2  # bytes a weight: its value and the original's


class Others:
    """The packed modules of one recipe on one model; empty where the recipe packs nothing but experts."""

    def __init__(self, context: Context) -> None:
        self.context, self.recipe = context, context.recipe
        self.modules = stage.chosen(context)
        self.heads = stage.tied_heads(context)
        self.keys = stage.replaced_keys(context)
        self.disk = sum(context.model.source.tensors[key].bytes for key in self.keys)

    @property
    def asked(self) -> bool:
        """Whether the recipe gives any class a width."""
        return bool(self.recipe.others.widths())

    @property
    def parameters(self) -> int:
        """Weights of the modules that are packed."""
        return sum(module.rows * module.inputs for module in self.modules)

    @property
    def packed(self) -> int:
        """Bytes of their codes, scales and zero points."""
        return sum(stage.packed_weight_bytes(self.recipe, module) for module in self.modules)

    def grids(self) -> tuple[Grid, ...]:
        """How each of them is stored."""
        made = ((module, stage.grid(self.recipe, module.kind)) for module in self.modules)
        return tuple(
            Grid(rows=m.rows, inputs=m.inputs, bits=how.bits, group_size=how.group_size, symmetric=how.symmetric)
            for m, how in made
        )

    @cached_property
    def blocks(self) -> dict[str, int]:
        return stage.block_numbers(self.context)

    @cached_property
    def by_block(self) -> dict[str, list[OtherModule]]:
        return by_block(self.modules)

    def compared(self) -> int:
        """Bytes of the largest module while its packed values are held against the original's."""
        most = 0
        for modules in self.by_block.values():
            packed = sum(stage.packed_weight_bytes(self.recipe, module) for module in modules)
            most = max(most, packed + COMPARED * max(module.rows * module.inputs for module in modules))
        return most

    def unpacked(self, width: int) -> int:
        """Bytes of the largest module, packed and with values of `width` bytes."""
        each = (stage.packed_weight_bytes(self.recipe, m) + width * m.rows * m.inputs for m in self.modules)
        return max(each, default=0)

    def sums(self) -> int:
        """Bytes of the sums over inputs of the decoder layer (or of the head) that has most of them.

        Of linears of the same width under one module, two are taken to share their input.
        """
        most = 0
        for modules in self.by_block.values():
            inputs: dict[tuple[str, int], int] = {}
            for module in modules:
                if not module.lookup:
                    at = (module.name.rpartition(".")[0], module.inputs)
                    inputs[at] = inputs.get(at, 0) + 1
            most = max(most, sum(-(-count // 2) * 2 * 4 * width**2 for (_, width), count in inputs.items()))
        return most

    def operations(self, tokens: int) -> float:
        """Floating-point operations: sums over inputs, factors, column loops."""
        return sum(
            2.0 * tokens * m.inputs**2 + m.inputs**3 + 4.0 * m.rows * m.inputs**2
            for m in self.modules if not m.lookup
        )  # fmt: skip

    def _shapes(self, module: OtherModule) -> Shapes:
        how = stage.grid(self.recipe, module.kind)
        parts = packed_shapes(module.rows, module.inputs, how.bits, how.encoding)
        return {part: (dtype, shape) for part, (shape, dtype) in parts.items()}

    def written(self) -> dict[str, int]:
        """Files that quantize writes."""
        files = {}
        for block, modules in self.by_block.items():
            shapes: Shapes = {f"{m.name}.{part}": shape for m in modules for part, shape in self._shapes(m).items()}
            shapes |= {guard_name(m.name): (GUARD_DTYPE, GUARD_SHAPE) for m in modules}
            files[others_name(self.blocks[block])] = safetensors_bytes(shapes, METADATA)
        return files

    def where(self) -> dict[str, str]:
        """{tensor: file} of what quantize writes."""
        return {
            name: others_name(self.blocks[module.block])
            for module in self.modules
            for name in (guard_name(module.name), *(f"{module.name}.{part}" for part in self._shapes(module)))
        }

    def guards(self) -> dict[str, str]:
        """{guard: file} of what quantize writes."""
        return {guard_name(module.name): others_name(self.blocks[module.block]) for module in self.modules}

    def store(self) -> dict[str, int]:
        """Files in the store."""
        entries = stage.entries(self.recipe, self.modules)
        files: dict[str, int] = {}
        for block, modules in self.by_block.items():
            files |= self._store_block(self.blocks[block], modules, entries)
        return files

    def _store_block(self, number: int, modules: list[OtherModule], entries: tuple[MadeOthers, ...]) -> dict[str, int]:
        folder, shapes, stamps, files = Path(DIGEST), {}, {}, {}
        for made in entries:
            of_class = [module for module in modules if module.kind == made.kind]
            if not of_class:
                continue
            entry = str(made.entry)
            how = stage.grid(self.recipe, made.kind)
            for m in of_class:
                for part, (dtype, shape) in self._shapes(m).items():
                    shapes[f"{entry}.{m.name}.{part}"] = (dtype, (1, *shape))
            settings: dict[str, Any] = {"group_size": how.group_size, "symmetric": how.symmetric}
            described = {m.name: {"inputs": m.inputs, **settings} for m in of_class}
            stamps[entry] = replicas.described(entry, DIGEST, described)
            rows = [self._row(module).model_dump(mode="json") for module in of_class]
            files[replicas.rows_file(folder, number, entry).as_posix()] = len(replicas.rows_text(rows))
        name = replicas.layer_file(folder, number).as_posix()
        return files | {name: safetensors_bytes(shapes, replicas.layer_metadata(number, stamps))}

    def _row(self, module: OtherModule) -> OtherRow:
        how = stage.grid(self.recipe, module.kind)
        return OtherRow(
            module=module.name, kind=module.kind, bits=how.bits, method=how.method, group_size=how.group_size,
            symmetric=how.symmetric, rows=module.rows, inputs=module.inputs, relative_error=TYPICAL,
            calibration_rows=10_000, heldout_rows=1_000, fallback="none",
            bytes=stage.packed_weight_bytes(self.recipe, module), tied=self.heads.get(module.name),
        )  # fmt: skip

    def table(self) -> OtherTable:
        """others.json with made-up errors."""
        return OtherTable(modules=tuple(self._row(module) for module in self.modules))

    def index(self) -> OtherIndex:
        entries = stage.entries(self.recipe, self.modules)
        layers = []
        for block in self.blocks:
            kinds = {module.kind for module in self.by_block.get(block, ())}
            layers.append({str(made.entry): DIGEST for made in entries if made.kind in kinds})
        return OtherIndex(set=DIGEST, made=entries, layers=tuple(layers))

    def artifacts(self) -> dict[str, int]:
        """Files that losses leaves in its own directory."""
        if not self.asked:
            return {}
        documents = {artifact.NAME: self.table(), artifact.INDEX: self.index()}
        return {name: len(canonical_json(each.model_dump(mode="json")).encode()) for name, each in documents.items()}

    def placed(self) -> tuple[PlacedModule, ...]:
        """The modules as the manifest names them."""
        placed = []
        for module, row in zip(self.modules, self.table().modules, strict=True):
            stamps = tuple(
                TensorStamp(name=part, dtype=dtype_name(dtype), shape=shape)
                for part, (dtype, shape) in self._shapes(module).items()
            )
            shown = row.model_dump(
                include={"kind", "bits", "group_size", "symmetric", "rows", "inputs", "tied", "bytes"}
            )
            placed.append(
                PlacedModule(
                    name=module.name, quantizer=row.method, file=others_name(self.blocks[module.block]),
                    key_prefix=f"{module.name}.", tensors=stamps, sha256=DIGEST, error=LONGEST_ERROR, **shown,
                )
            )  # fmt: skip
        return tuple(placed)
