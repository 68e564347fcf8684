"""What the native checkpoint takes on disk, every file of its directory counted, from shapes alone.

This is what `assign.size` limits and what the column `whole` shows, one sum for both: what no expert's width decides,
and for every matrix its tensors with all that headers, index, configuration and manifest say of them at its width. What
is of unknown length before it is written (places in a file, importance, who made a replica) counts at its longest, and
every expert as if its matrices differed in width: a checkpoint is never larger than was said, and smaller by at most
400 bytes an expert and 4096 of all files (settings of an assigner, figures of the card).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, get_args

import torch

from moeq.artifacts import coactivation, manifest, provenance
from moeq.artifacts.assignment import DROPPED, FULL, MIXED, WIDTHS, Assignment, Tier, Width, matrix_widths, width_of
from moeq.artifacts.files import canonical_json
from moeq.artifacts.making import THREADS
from moeq.artifacts.stage import RECORD, FileStamp, ModelStamp, StageRecord
from moeq.artifacts.sums import LINE_BYTES, UNLISTED
from moeq.artifacts.sums import NAME as SUMS
from moeq.artifacts.tensor_files import dtype_name, safetensors_bytes, torch_dtype
from moeq.exporters.native_writer import extra_name, layer_name, listed_code, quantization
from moeq.exporters.plain import METADATA, shards
from moeq.models.experts import ExpertLayer
from moeq.models.loading import source_dtype
from moeq.models.source import CONFIG, INDEX, ModelSource
from moeq.models.weights import plain_header
from moeq.recipe import BEST, DEFAULT_QUANTIZER, AssignSection, Recipe
from moeq.recipe.recipe import MOST_THREADS
from moeq.registry import ALLOCATORS
from moeq.runtime.checkpoint import CARD
from moeq.runtime.hook import HOOK_FILE, HOOK_TEXT, has_own_code, hooked
from moeq.runtime.packed_experts import GUARD_DTYPE, guard_shapes
from moeq.runtime.packed_modules import GUARD_SHAPE
from moeq.stages import making, model_card
from moeq.stages import non_experts as others
from moeq.stages.context import Context
from moeq.stages.non_expert_sizes import LONGEST_ERROR, Others
from moeq.stages.recorded import MODEL_FILES
from moeq_kernels.packed import packed_shapes
from moeq_kernels.widths import NESTED_BITS

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
DIGEST = "0" * 64
LONGEST = 1.2345678901234567e-05  # a figure of full length
PARAMETERS = "p" * 1024  # of the longest settings of an assigner
SCHEMA = "placement.schema.json"


class CheckpointSize:
    """Bytes of the checkpoint that a recipe's assignments come to, by file."""

    def __init__(self, context: Context) -> None:
        self.context, self.recipe, self.model = context, context.recipe, context.model
        self.source, self.layers = context.model.source, context.model.layers
        self.dtype = source_dtype(self.source)
        self._others = Others(context)
        self._matrices: dict[tuple[Any, ...], Counter[str]] = {}

    def files(self, widths: Sequence[Sequence[Width]]) -> dict[str, int]:
        """Bytes of every file, by name; widths: of every layer's experts, as placed."""
        files = Counter(self.fixed)
        for layer, placed in zip(self.layers, widths, strict=True):
            for key, count in Counter(map(width_key, placed)).items():
                width = key if isinstance(key, int) else dict(key)
                of_expert = self._others_of(layer, width)
                for projection in layer.projections:
                    of_expert += self._matrix(layer, projection, width_of(width, projection))
                for name, size in of_expert.items():
                    files[name] += count * size
        return dict(files)

    def total(self, assignment: Assignment) -> int:
        """Bytes of the directory."""
        return sum(self.files(assignment.expert_widths()).values())

    def of(self, assignment: Assignment | None) -> int:
        """Bytes of an assignment's checkpoint; of None those of the model's own files."""
        return original_bytes(self.source) if assignment is None else self.total(assignment)

    @property
    def other_bytes(self) -> int:
        """Bytes that no width decides."""
        return sum(self.fixed.values())

    def matrix_bytes(self, layer: ExpertLayer, projection: str, bits: int) -> int:
        """Bytes of one matrix of an expert, with all that files say of it."""
        return sum(self._matrix(layer, projection, bits).values())

    def _matrix(self, layer: ExpertLayer, projection: str, bits: int) -> Counter[str]:
        key = (layer.index, projection, bits)
        if key not in self._matrices:
            prefix = f"{layer.name}.{layer.num_experts - 1}"
            shapes = replica_shapes(self.recipe, layer, [projection], bits, self.dtype, prefix)
            file, most = layer_name(layer.index), self._largest(layer)
            self._matrices[key] = Counter(
                {
                    file: _in_file(shapes, most),
                    INDEX: _within(dict.fromkeys(shapes, file), 2),
                    CONFIG: _within({projection: bits}, 5),
                    manifest.NAME: _within({projection: bits}, 8) + _within(_stamps(shapes, prefix), 8),
                }
            )
            if bits != FULL:
                self._matrices[key][manifest.NAME] += _within({projection: LONGEST_ERROR}, 8)
        return self._matrices[key]

    def _largest(self, layer: ExpertLayer) -> int:
        """Bytes of all of a layer's experts in full precision: no placed tensor lies behind them."""
        return layer.num_experts * (layer.parameters_per_expert + layer.biases_per_expert) * self.dtype.itemsize

    def _others_of(self, layer: ExpertLayer, placed: Width) -> Counter[str]:
        """With quantize.replicas all: one expert's other replicas in their file and in the manifest."""
        files: Counter[str] = Counter()
        if self.recipe.quantize.replicas != "all":
            return files
        section = self.recipe.losses
        key = placed if isinstance(placed, int) else MIXED
        every = [width for width in (*section.bits, FULL) if width != key]
        stored = stored_widths(key, every, section.nested)
        for width in every:
            prefix = f"{layer.name}.{layer.num_experts - 1}.bits{width}"
            shapes = replica_shapes(self.recipe, layer, layer.projections, width, self.dtype, prefix)
            files[manifest.NAME] += self._replica_record(layer, shapes, prefix, width, extra_name(layer.index))
            if width in stored:
                files[extra_name(layer.index)] += _in_file(shapes, len(WIDTHS) * self._largest(layer))
        return files

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Bytes that no width decides, by file."""
        plain = shards(self.source, others.kept_keys(self.context), self.recipe.export.max_shard)
        where = {key: name for name, keys in plain.items() for key in keys}
        files = {
            name: safetensors_bytes({key: self._plain_shape(key) for key in keys}, METADATA)
            for name, keys in plain.items()
        }
        for layer in self.layers:
            guards: Shapes = {
                f"{layer.name}.{name}": (GUARD_DTYPE, shape) for name, shape in guard_shapes(layer).items()
            }
            files[layer_name(layer.index)] = safetensors_bytes(guards, METADATA) + 8  # what fills a header up
            where |= dict.fromkeys(guards, layer_name(layer.index))
            if self.recipe.quantize.replicas == "all":
                files[extra_name(layer.index)] = safetensors_bytes({}, METADATA) + 8
        where |= self._others.where()
        files |= self._others.written()
        index = {"metadata": {"total_size": 10**16}, "weight_map": where}
        files[INDEX] = len(canonical_json(index).encode())
        files[CONFIG] = self._config()
        files |= self.model.side_files.sizes()
        files |= {} if self._own_code else {HOOK_FILE: len(HOOK_TEXT)}
        files |= self._manifest(self._stored(plain))
        if self.recipe.says_what_follows:
            files[coactivation.NAME] = coactivation.most_bytes([(one.name, one.num_experts) for one in self.layers])
        files[provenance.NAME] = making.largest(self.context, list(files))
        files[SUMS] = sum(LINE_BYTES + len(name.encode()) for name in files if name not in UNLISTED)
        return files | {RECORD: self._record(files)}

    def _record(self, files: dict[str, int]) -> int:
        """Bytes of the stage's record."""
        stamp, most = FileStamp(bytes=10**15, sha256=DIGEST), 10**15
        counted = (*manifest.Totals.model_fields, "original_expert_bytes")
        record = StageRecord(
            stage="export",
            model=self._stamp,
            seed=self.recipe.seed,
            key=DIGEST,
            inputs=dict.fromkeys(("model", "recipe", "profile", "losses", "assign", "quantize"), DIGEST),
            files=dict.fromkeys(files, stamp),
            digest=DIGEST,
            summary=dict.fromkeys(counted, most) | {"bytes_by_tier": dict.fromkeys(get_args(Tier), most)},
            volatile={
                "created": "2026-01-01T00:00:00+00:00",
                "seconds": 123456.789,
                "hashed_bytes": most,
                "hashing_seconds": 123456.789,
                THREADS: MOST_THREADS,
                MODEL_FILES: dict.fromkeys(self.source.named_files(), DIGEST),
            },
        )
        return len(canonical_json(record.model_dump(mode="json")).encode())

    @property
    def _stamp(self) -> ModelStamp:
        return ModelStamp(name=self.source.name, revision=self.source.revision, digest=DIGEST)

    def _plain_shape(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        name, shape, _ = plain_header(self.source, key)
        return torch_dtype(name), shape

    @property
    def _own_code(self) -> bool:
        return has_own_code(self.model.skeleton)

    def _config(self) -> int:
        """config.json with every expert's widths but for what `_matrix` counts."""
        table = self._others.table() if self._others.modules else None
        block = quantization(self.recipe.losses.encoding, True, table)
        plain = self.model.side_files.config(self.source.config)
        base = plain if self._own_code else hooked(plain)
        experts: dict[str, list[dict[str, int]]] = {layer.name: [{}] * layer.num_experts for layer in self.layers}
        text = canonical_json(base | {"quantization_config": block | {"experts": experts}})
        count = sum(layer.num_experts for layer in self.layers)
        return len(text.encode()) + 6 * count  # of braces around widths: a line of their own

    def _stored(self, plain: dict[str, list[str]]) -> tuple[manifest.StoredTensor, ...]:
        """What the manifest says of tensors that are no expert's and no packed module's; plain: {file: keys}."""
        shapes = {key: (file, *self._plain_shape(key)) for file, keys in plain.items() for key in keys}
        for layer in self.layers:
            for name, shape in guard_shapes(layer).items():
                shapes[f"{layer.name}.{name}"] = (layer_name(layer.index), GUARD_DTYPE, shape)
        shapes |= {name: (file, GUARD_DTYPE, GUARD_SHAPE) for name, file in self._others.guards().items()}
        return tuple(
            manifest.StoredTensor(name=name, file=file, dtype=dtype_name(dtype), shape=shape, sha256=DIGEST)
            for name, (file, dtype, shape) in shapes.items()
        )

    def _manifest(self, stored: tuple[manifest.StoredTensor, ...]) -> dict[str, int]:
        """placement.json but for what `_matrix` counts, its schema, and the card with its figures."""
        section, rest = self.recipe.losses, others.non_expert_bytes(self.context)[1]
        most = max(rest, sum(layer.num_experts * layer.parameters_per_expert for layer in self.layers) * 4)
        made = manifest.PlacementManifest.model_construct(
            model=self._stamp,
            assignment={
                "name": self._longest_name,
                "method": max(ALLOCATORS.names(), key=len),
                "parameters": {"all": PARAMETERS},
            },
            layout=manifest.layout(section.encoding, mixed=True, drops=self._drops),
            layers=tuple(self._placed_layer(layer, ()) for layer in self.layers),
            others=self._others.placed(),
            tensors=stored,
            totals=manifest.Totals(
                placed_expert_bytes=most,
                other_replica_bytes=most,
                non_expert_bytes=most,
                guard_bytes=most,
                packed_module_bytes=most,
                bytes_by_tier=dict.fromkeys(get_args(Tier), most),
            ),
            inputs={"assign": DIGEST, "quantize": DIGEST},
            code=listed_code(self.model.side_files, self._own_code),
        )
        size = len(canonical_json(manifest.manifest_json(made)).encode())
        size += sum(layer.num_experts * self._expert_record(layer) + 8 for layer in self.layers)
        schema = canonical_json(manifest.PlacementManifest.model_json_schema())
        return {manifest.NAME: size, SCHEMA: len(schema.encode()), CARD: self._card(made)}

    @property
    def sections(self) -> list[tuple[str, AssignSection]]:
        return [(self.recipe.name, self.recipe.assign), *((other.name, other) for other in self.recipe.eval.compare)]

    @property
    def _drops(self) -> bool:
        """Whether some assignment may drop experts."""
        return self.recipe.drops

    @property
    def _longest_name(self) -> str:
        return max((name for name, _ in self.sections), key=lambda name: len(name.encode()))

    def _card(self, made: manifest.PlacementManifest) -> int:
        """The card of experts of all widths, alone and mixed, with a row of figures for every assignment."""
        layer = self.layers[0]
        mixes: list[Width] = [
            *WIDTHS,
            *({**dict.fromkeys(layer.projections, 1), layer.projections[0]: w} for w in WIDTHS),
        ]
        placed = tuple(self._placed(layer, layer_name(0), {}, mix) for mix in mixes)
        if self._drops:
            nothing = {"bits": DROPPED, "replicas": ()}
            placed += (placed[0].model_copy(update=nothing),)
        of = made.model_copy(update={"layers": (self._placed_layer(layer, placed),)})
        images = {"cross_entropy": 12.3456, "logit_error": 1.5}
        measured = images if self.model.takes_images else {"kl": -1.23e-15, "same_top": 0.5}
        sizes = {"bits_per_weight": 16.0, "expert_bytes": 10**6 + 1}
        figures = [
            {"name": name, **sizes, "perplexity": 123456.789, "accuracy": 0.5, **measured}
            for name in self.context.labels.values()
        ]
        return len(model_card.render(of, self.source.config, figures, self.model.origin).encode())

    def _placed_layer(self, layer: ExpertLayer, experts: tuple[manifest.PlacedExpert, ...]) -> manifest.PlacedLayer:
        return manifest.PlacedLayer.model_construct(
            name=layer.name,
            num_experts=layer.num_experts,
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            projections=layer.projections,
            biased=layer.biased,
            kind=layer.kind.name,
            top_k=layer.num_experts,
            experts=experts,
        )

    def _expert_record(self, layer: ExpertLayer) -> int:
        """Bytes of an expert in the manifest but for its matrices' widths and tensors."""
        projection = layer.projections[0]
        prefix = f"{layer.name}.{layer.num_experts - 1}"
        shapes = replica_shapes(self.recipe, layer, [projection], FULL, self.dtype, prefix)
        placed = self._placed(layer, layer_name(layer.index), shapes, {projection: FULL}, prefix)
        counted = _within({projection: FULL}, 8) + _within(_stamps(shapes, prefix), 8)
        counted += _within({projection: LONGEST_ERROR}, 8)
        return _within([placed.model_dump(mode="json", exclude_none=True)], 4) - counted + 2

    def _placed(
        self, layer: ExpertLayer, file: str, shapes: Shapes, widths: Width, prefix: str = ""
    ) -> manifest.PlacedExpert:
        replica = self._replica(layer, shapes, prefix, max(matrix_widths(widths)), file)
        mixed = None if isinstance(widths, int) else dict(widths)
        errors = None if mixed is None else dict.fromkeys(list(mixed), LONGEST_ERROR)
        replica = replica.model_copy(update={"placed": True, "projections": mixed, "loss": None, "errors": errors})
        return manifest.PlacedExpert.model_construct(
            expert=layer.num_experts - 1, tier="host", bits=FULL, importance=LONGEST, replicas=(replica,)
        )

    def _replica_record(self, layer: ExpertLayer, shapes: Shapes, prefix: str, bits: int, file: str) -> int:
        """Bytes of a replica of one width in the manifest."""
        replica = self._replica(layer, shapes, prefix, bits, file)
        return _within([replica.model_dump(mode="json", exclude_none=True)], 6)

    def _replica(self, layer: ExpertLayer, shapes: Shapes, prefix: str, bits: int, file: str) -> manifest.Replica:
        leads = self.recipe.losses.nested and bits in NESTED_BITS
        return manifest.Replica.model_construct(
            bits=bits,
            placed=False,
            quantizer=self._maker,
            loss=LONGEST if bits != FULL and self.recipe.quantize.replicas == "all" else None,
            errors=None if bits == FULL else dict.fromkeys(layer.projections, LONGEST_ERROR),
            file=file,
            key_prefix=f"{prefix}.",
            leading_bits_of=max(NESTED_BITS) if leads else None,
            tensors=tuple(manifest.TensorStamp(**stamp) for stamp in _stamps(shapes, prefix)),
            bytes=self._largest(layer) // layer.num_experts,
            sha256=DIGEST,
        )

    @cached_property
    def _maker(self) -> str:
        """The longest that may stand where a manifest says who made a replica."""
        each = [
            ",".join(self.recipe.losses.methods) if section.quantizer == BEST else section.quantizer
            for _, section in self.sections
        ]
        section = self.recipe.quantize
        trained = ("" if section.refine is None else "+refined") + ("" if section.tune is None else "+tuned")
        return max(each, key=len) + trained


def original_bytes(source: ModelSource) -> int:
    """Bytes of the model's own files: weights, configuration, index, tokenizer and whatever an export takes along."""
    beside = [path for name in (CONFIG, INDEX) if (path := source.path / name).is_file()]
    return sum(path.stat().st_size for path in {*source.files, *beside, *source.side_files()})


def replica_shapes(
    recipe: Recipe, layer: ExpertLayer, projections: Iterable[str], widths: Width, dense: torch.dtype, prefix: str
) -> Shapes:
    """Types and shapes of the tensors of some matrices of one expert, by name; dense: the type of full precision."""
    section = recipe.losses
    shapes: Shapes = {}
    for projection in projections:
        bits = width_of(widths, projection)
        if layer.biased:
            shapes[f"{prefix}.{projection}.bias"] = (dense, (layer.shape(projection)[0],))
        if bits == FULL:
            shapes[f"{prefix}.{projection}.dense"] = (dense, layer.shape(projection))
            continue
        parts = packed_shapes(*layer.shape(projection), bits, section.encoding)
        shapes |= {f"{prefix}.{projection}.{part}": (dtype, shape) for part, (shape, dtype) in parts.items()}
    return shapes


def stored_widths(
    placed: int, others: Sequence[int], nested: bool, method: Callable[[int], str] = lambda bits: DEFAULT_QUANTIZER
) -> list[int]:
    """The widths of an expert that are stored, the placed one (or MIXED) first; method(bits): who makes its nested
    replicas.

    Beside the placed one, of nested widths by the same method only the widest: the others are its leading bits.
    """
    stored = [width for width in others if width != placed]
    if nested:
        widest = {method(width): width for width in sorted({placed, *stored} & set(NESTED_BITS))}
        stored = [width for width in stored if width not in NESTED_BITS or width == widest[method(width)]]
    return [placed, *stored]


def _in_file(shapes: Shapes, most: int) -> int:
    """Bytes of tensors in a file, with what its header says of them; most: the last place where one can lie."""
    entries = {
        name: {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [most, most]}
        for name, (dtype, shape) in shapes.items()
    }
    said = len(json.dumps(entries, separators=(",", ":"))) - 1  # a comma stands for two braces
    return said + sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values())


def _stamps(shapes: Shapes, prefix: str) -> list[dict[str, Any]]:
    """Tensors of a replica as the manifest names them."""
    return [
        {"name": name.removeprefix(f"{prefix}."), "dtype": dtype_name(dtype), "shape": list(shape)}
        for name, (dtype, shape) in shapes.items()
    ]


def _within(items: Any, depth: int) -> int:
    """Bytes that the items of a list or dictionary add to canonical JSON in which they stand at a depth."""
    if not items:
        return 0
    text = canonical_json(items)
    lines = text.count("\n") - 2
    return len(text.encode()) - len("{\n}\n") + (depth - 1) * lines + 1  # and the comma behind the last one


def width_key(width: Width) -> int | tuple[tuple[str, int], ...]:
    """A width, or those of an expert's matrices, as a key."""
    return width if isinstance(width, int) else tuple(width.items())
