"""What every stage reads from the disk and leaves on it, file by file.

Exact where a file's size follows from shapes (replica store, packed experts, weights that are copied, routing counts,
index, configuration). Tables and JSON hold figures that nobody knows yet: there, artifacts of the same shape with
made-up figures are written into a temporary directory, or into memory, and their size taken.
report.html is an estimate.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moeq.artifacts import effects, evaluation, expert_effects, losses, profile, replicas, trace
from moeq.artifacts.assignment import FULL, MIXED, Assignment, Width, width_of
from moeq.artifacts.evaluation import Change, EvalReport, EvalRow
from moeq.artifacts.files import canonical_json
from moeq.artifacts.sensitivities import NAME as SENSITIVITIES
from moeq.artifacts.sensitivities import write_sensitivities
from moeq.artifacts.stage import RECORD, FileStamp, ModelStamp, StageRecord
from moeq.artifacts.targets import grids_of
from moeq.artifacts.tensor_files import safetensors_layout
from moeq.estimator import load_hardware
from moeq.evaluation import result_file as samples
from moeq.evaluation.harness import guessed_results
from moeq.evaluation.paired import RESAMPLES, SEED
from moeq.exporters.exporter import ExportSizes
from moeq.exporters.native_writer import extra_name, layer_name
from moeq.exporters.plain import METADATA
from moeq.models.experts import ExpertLayer
from moeq.numerics.packed import packed_shapes
from moeq.numerics.widths import NESTED_BITS
from moeq.planning.batch import store_bytes
from moeq.planning.memory import loss_rows, read_share
from moeq.planning.placed import TYPICAL, expert_bytes, methods, placed_bytes, stand_in, widths
from moeq.planning.sizes import ModelSizes, Work
from moeq.recipe import AssignSection, Recipe
from moeq.registry import EXPORTERS, QUANTIZERS
from moeq.reporting import formats
from moeq.reporting.maps import Quantity, value_map, width_map
from moeq.runtime.packed_experts import GUARD_DTYPE, guard_shapes
from moeq.stages import assign, quantize, refine, report
from moeq.stages import estimate as estimate_stage
from moeq.stages import profile as profile_stage
from moeq.stages.checkpoint_size import replica_shapes, stored_widths
from moeq.stages.context import Context
from moeq.stages.order import BY_NAME, Stage
from moeq.stages.recorded import MODEL_FILES
from moeq.stages.replicas import REFINED, entries

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
DIGEST = "0" * 64
SAMPLE_ROWS = 20_000  # of the loss table: of a larger one, this many rows are written and the size scaled
SUMMARIES = {  # bytes of what a record says about its stage, of which for every assignment
    "profile": (160, 0), "losses": (560, 0), "assign": (390, 0), "quantize": (70, 0), "export": (320, 0),
    "eval": (200, 140), "estimate": (220, 145), "report": (40, 0),
}  # fmt: skip
REPORT = 62_100  # bytes of the page without its maps
MEASURES, CAPTION = 5, 400  # maps beside those of losses and widths; bytes of what is written around one
REPORT_LAYER = 1_000  # of the charts and tables, a layer
REPORT_ASSIGNMENT = 1_000
CHANGE = Change(
    difference=TYPICAL, low=TYPICAL, high=TYPICAL, p=TYPICAL, stderr=TYPICAL, items=400, resamples=RESAMPLES, seed=SEED
)


class Disk:
    """Files of every stage of one run."""

    def __init__(self, context: Context, sizes: ModelSizes, work: Work) -> None:
        self.context, self.sizes, self.work, self.recipe = context, sizes, work, context.recipe
        self.sections = [(self.recipe.name, self.recipe.assign), *((c.name, c) for c in self.recipe.eval.compare)]
        self.own = stand_in(sizes, self.recipe.assign, self.recipe, self.recipe.name)
        source = context.model.source
        self.stamp = ModelStamp(name=source.name, revision=source.revision, digest=DIGEST)
        self.estimating = 0.0  # seconds that the estimate of one assignment took
        self._files: dict[str, dict[str, int]] = {}
        self._cache: dict[tuple[Any, ...], int] = {}
        self._stored: dict[str, int] = {}

    def lasting(self, stage: str) -> dict[str, int]:
        """Bytes of the files that a stage leaves, by name, its record among them."""
        if stage not in self._files:
            files: dict[str, int] = getattr(self, f"_{stage}")()
            self._files[stage] = files | {RECORD: self._record(stage, files)} | self._formats(stage)
        return self._files[stage]

    def _formats(self, stage: str) -> dict[str, int]:
        """Bytes of the checkpoints in other formats, as one file each."""
        names = self.recipe.export.formats if stage == "export" else []
        sizes = self._export_sizes() if names else None
        return {f"../checkpoint-{name}": EXPORTERS.get(name).size(sizes) for name in names}

    def _export_sizes(self) -> ExportSizes:
        """What the sizes of the checkpoints in other formats follow from."""
        losses, stacks = self.recipe.losses, []
        for layer, experts in zip(self.sizes.layers, self.own.expert_widths(), strict=True):
            for projection in layer.projections:
                used = sorted({width_of(one, projection) for one in experts})
                rows, inputs = layer.shape(projection)
                grids = grids_of(layer, projection, used, group_size=losses.group_size, symmetric=losses.symmetric)
                stacks.append((layer.num_experts * rows * inputs, tuple(grids), FULL in used))
        return ExportSizes(
            plain=self.sizes.disk,
            rest=self.sizes.disk - self.sizes.experts_disk - self.sizes.others.disk,
            packed=self.sizes.others.packed,
            experts=placed_bytes(self.sizes, self.recipe.assign, self.recipe),
            stacks=tuple(stacks),
            widen=self.recipe.export.widen,
        )

    def linked(self, stage: str) -> int:
        """Bytes of files that are hard links to an earlier stage's: packed experts in the checkpoint."""
        return sum(self._packed().values()) if stage == "export" else 0

    def temporary(self, stage: str) -> int:
        """Bytes that are gone when the stage ends: a layer's file in a store that is there, written anew beside it."""
        if stage != "losses" or not (self.context.store / replicas.MARKER).is_file():
            return 0
        return max(self.store().values())

    def store(self) -> dict[str, int]:
        """Bytes of the files that `losses` leaves in an empty replica store, by name."""
        if not self._stored:
            with tempfile.TemporaryDirectory(prefix="moeq-plan-") as folder:
                replicas.open_store(Path(folder), None if self.context.owns_store else self.context.out)
                found = [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size]
                self._stored = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
            for layer in self.sizes.layers:
                self._stored |= self._store_layer(layer)
            self._stored |= self.sizes.others.store()
        return self._stored

    def read(self, stage: str) -> int:
        """Bytes that a stage reads, hashing what it wrote included."""
        files = self.lasting(stage)
        own = sum(files.values())
        streams, disk = self.context.model.streams, self.sizes.disk
        if stage == "profile":
            return own + disk
        if stage == "losses":
            return own + (disk if streams else 0)
        if stage == "assign":
            return own + self.sizes.experts_disk  # for the Hessian traces
        if stage == "quantize":
            walked = disk if streams and self.recipe.quantize.refine is not None else 0
            experts = int(self.sizes.experts_disk * read_share(self.sizes, self.recipe))
            return own + walked + experts + self._replicas(self.recipe.assign) + self.sizes.others.packed
        if stage == "export":
            rest = self.sizes.disk - self.sizes.experts_disk - self.sizes.others.disk
            return own + rest + sum(self._packed().values())
        if stage == "eval":
            passes = self._passes() * (1 + len(self.recipe.eval.compare)) + 1 if streams else 2 + len(self.sections)
            stores = sum(self._replicas(section) + self.sizes.others.packed for _, section in self.sections)
            return int(own + disk * passes) + stores + sum(self.lasting("export").values())
        return own

    def _passes(self) -> float:
        """How often a streamed model is read for one assignment: once for the perplexity, once a batch of requests."""
        tasks = self.work.tasks
        once = 0 if self.work.evaluation is None else 1
        return once + (0 if tasks is None else tasks.batches * tasks.steps)

    def _replicas(self, section: AssignSection) -> int:
        """Bytes that are read from the store for one assignment."""
        if not any(QUANTIZERS.get(method).stored for method in methods(section, self.recipe)):
            return 0
        if section is self.recipe.assign and self.recipe.quantize.replicas == "all":
            return sum(store_bytes(layer, self.recipe) for layer in self.sizes.layers)
        full = self.sizes.source_dtype.itemsize
        dense = section.gpu_experts * sum(layer.parameters_per_expert for layer in self.sizes.layers) * full
        return placed_bytes(self.sizes, section, self.recipe) - dense

    def _record(self, stage: str, files: dict[str, int]) -> int:
        source = self.context.model.source
        record = StageRecord(
            stage=stage,
            model=self.stamp,
            seed=self.recipe.seed,
            key=DIGEST,
            inputs=dict.fromkeys(_inputs(BY_NAME[stage], self.recipe), DIGEST),
            files={name: FileStamp(bytes=size, sha256=DIGEST) for name, size in files.items()},
            digest=DIGEST,
            volatile={
                "created": "2026-01-01T00:00:00+00:00",
                "seconds": 1.234,
                "hashed_bytes": self.sizes.disk,
                "hashing_seconds": 1.234,
                MODEL_FILES: {path.name: DIGEST for path in (*source.side_files(), *source.files)},
            },
        )
        summary, each = SUMMARIES[stage]
        return len(canonical_json(record.model_dump(mode="json"))) + summary + each * len(self.sections)

    def _profile(self) -> dict[str, int]:
        sequences = self.work.calibration.sequences
        shapes: Shapes = {"tokens": (torch.int64, (sequences, 2))}
        for layer in self.sizes.layers:
            shapes[f"layer.{layer.index}.counts"] = (torch.int64, (sequences, 2, layer.num_experts))
            shapes[f"layer.{layer.index}.scores"] = (torch.float64, (sequences, 2, layer.num_experts))
        generator = np.random.default_rng(0)
        counts = [generator.integers(10_000, 99_999, (2, 2, layer.num_experts)) for layer in self.sizes.layers]
        made = profile.ExpertProfile(
            layers=tuple(layer.name for layer in self.sizes.layers),
            top_k=(self.sizes.top_k,) * len(counts),
            counts=tuple(counts),
            scores=tuple(count.astype(float) for count in counts),
            tokens=np.full((2, 2), self.work.calibration.tokens // 2),
            text=DIGEST,
            corpus=tuple(source.public_name for source in self.context.text.calibration_sources),
        )
        coverage = made.coverage(**profile_stage.coverage_settings(self.context))
        written = _written(lambda folder: profile.write_profile(folder, made, coverage))
        own = {"profile.safetensors": _file(shapes), "profile.json": written["profile.json"]}
        return own | ({trace.NAME: self._trace()} if self.recipe.profile.trace else {})

    def _trace(self) -> int:
        """Bytes of the routing trace: one of a single token, and what every other token and sequence adds."""
        text, top_k = self.work.calibration, self.sizes.top_k
        shape = (1, len(self.sizes.layers), top_k)
        one = trace.RoutingTrace(
            layers=tuple(layer.name for layer in self.sizes.layers),
            num_experts=tuple(layer.num_experts for layer in self.sizes.layers),
            top_k=top_k,
            experts=np.zeros(shape, dtype=np.int16),
            weights=np.zeros(shape, dtype=np.float16),
            lengths=np.ones(1, dtype=np.int32),
            prefill=np.ones(1, dtype=np.int32),
            domains=(self.context.text.calibration_sources[0].domain,),
            model=self.stamp,
            text=DIGEST,
        )
        written = _written(lambda folder: trace.write_trace(folder / trace.NAME, one))[trace.NAME]
        a_token = trace.BYTES_PER_CHOICE * len(self.sizes.layers) * top_k
        return written + (text.tokens - 1) * a_token + (text.sequences - 1) * trace.BYTES_PER_SEQUENCE

    def _losses(self) -> dict[str, int]:
        rows = loss_rows(self.sizes, self.recipe)
        made = list(_loss_rows(self.sizes, self.recipe, min(rows, SAMPLE_ROWS)))
        size = _written(lambda folder: losses.write_losses(folder / losses.NAME, [made]))[losses.NAME]
        index = len(canonical_json(self._index()).encode())
        own = {losses.NAME: size * rows // len(made), replicas.INDEX: index}
        return own | self._effects() | self.sizes.others.artifacts()

    def _effects(self) -> dict[str, int]:
        return self._layer_effects() | self._expert_effects()

    def _expert_effects(self) -> dict[str, int]:
        section = self.recipe.losses.expert_effects
        if section is None:
            return {}
        counts = [layer.num_experts for layer in self.sizes.layers]
        measured = sum(counts) if section.experts is None else min(section.experts, sum(counts))
        made = expert_effects.ExpertEffects(
            bits=section.bits,
            method=self.recipe.losses.methods[0],
            sequences=section.sequences,
            tokens=self.work.calibration.length * section.sequences,
            measured=measured,
            divergence=tuple((TYPICAL,) * count for count in counts),
            is_measured=tuple((True,) * count for count in counts),
            fit=(TYPICAL,) * len(counts),
        )
        note = expert_effects.Measured(inputs=DIGEST, seconds=TYPICAL, divergence=(TYPICAL,) * measured)

        def write(folder: Path) -> None:
            expert_effects.write_effects(folder, made)
            expert_effects.write_measured(folder, note)

        return _written(write)

    def _layer_effects(self) -> dict[str, int]:
        section = self.recipe.losses.layer_effects
        if section is None:
            return {}
        made = effects.LayerEffects(
            bits=section.bits,
            method=self.recipe.losses.methods[0],
            sequences=section.sequences,
            tokens=self.work.calibration.length * section.sequences,
            divergence=(TYPICAL,) * len(self.sizes.layers),
        )
        return _written(lambda folder: effects.write_effects(folder, made))

    def _index(self) -> dict[str, Any]:
        made = entries(self.recipe.losses)
        index = replicas.ReplicaIndex(set=DIGEST, made=made)
        one = dict.fromkeys(index.entries(), DIGEST)
        return index.model_copy(update={"layers": (one,) * len(self.sizes.layers)}).model_dump(mode="json")

    def _store_layer(self, layer: ExpertLayer) -> dict[str, int]:
        """Files of one layer in the store: its replicas and the rows of each method and width."""
        folder, made = Path(DIGEST), entries(self.recipe.losses)
        shape = (layer.num_experts, layer.hidden_size, layer.intermediate_size, len(layer.name))
        rows = self._cached(("rows", *shape), lambda: self._rows(layer))
        found = {replicas.rows_file(folder, layer.index, one.rows).as_posix(): rows for one in made}
        if any(one.entry is not None for one in made):
            name = replicas.layer_file(folder, layer.index).as_posix()
            found[name] = self._cached(("store", *shape, len(str(layer.index))), lambda: self._replica_file(layer))
        return found

    def _rows(self, layer: ExpertLayer) -> int:
        """Bytes of one method's rows of one layer at one width."""
        each = 1 + len(layer.projections) if self.recipe.losses.per_projection else 1
        some = list(islice(_layer_rows(layer, self.sizes, self.recipe), SAMPLE_ROWS))
        return len(replicas.rows_text(some)) * layer.num_experts * each // len(some)

    def _replica_file(self, layer: ExpertLayer) -> int:
        section = self.recipe.losses
        shapes: Shapes = {}
        kept = [one for one in entries(section) if one.entry is not None]
        for one in kept:
            for projection in layer.projections:
                parts = packed_shapes(
                    *layer.shape(projection), one.bits, section.group_size, section.symmetric, section.nested
                )
                for part, (shape, dtype) in parts.items():
                    shapes[f"{one.entry}.{projection}.{part}"] = (dtype, (layer.num_experts, *shape))
        described = {
            projection: {
                "inputs": layer.shape(projection)[1],
                "group_size": section.group_size,
                "symmetric": section.symmetric,
            }
            for projection in layer.projections
        }
        inside = {name: one | {"nested": True} for name, one in described.items()}
        stamps = {
            str(one.entry): replicas.described(
                str(one.entry), DIGEST, inside if section.nested and one.bits in NESTED_BITS else described
            )
            for one in kept
        }
        return _file(shapes, replicas.layer_metadata(layer.index, stamps))

    def _assign(self) -> dict[str, int]:
        text = canonical_json(self.own.model_dump(mode="json"))
        schema = canonical_json(Assignment.model_json_schema())
        return {
            assign.NAME: len(text.encode()),
            "assignment.schema.json": len(schema.encode()),
            SENSITIVITIES: self._sensitivities(),
        }

    def _sensitivities(self) -> int:
        """Bytes of the table of sensitivities, from one with made-up figures."""
        experts = sum(layer.num_experts for layer in self.sizes.layers)
        count = min(experts, SAMPLE_ROWS)
        chosen = [(layer, expert) for layer in self.sizes.layers for expert in range(layer.num_experts)][:count]
        generator = np.random.default_rng(0)
        known = QUANTIZERS.get(self.recipe.losses.methods[0]).knows_hessians
        shares = ("activation_frequency", "routing_mass", "importance")
        columns: dict[str, Any] = {
            "layer": [layer.index for layer, _ in chosen],
            "layer_name": [layer.name for layer, _ in chosen],
            "expert": [expert for _, expert in chosen],
            "activations": generator.integers(0, 9_999, count),
            **{name: generator.random(count) for name in shares},
            "calibration_hessian_trace": generator.random(count) if known else [None] * count,
            "frobenius_hessian_trace": generator.random(count),
            "hybrid_importance": generator.random(count),
        }
        if self.recipe.assign.trace not in (None, "closed"):
            columns["sampled_hessian_trace"] = generator.random(count)
        full = self.sizes.source_dtype.itemsize
        for bits in sorted(self.recipe.losses.bits):
            columns |= {f"{name}_{bits}": generator.random(count) for name in ("loss", "objective")}
            columns[f"bytes_{bits}"] = [expert_bytes(layer, bits, self.recipe, full) for layer, _ in chosen]
        written = _written(lambda folder: write_sensitivities(folder / SENSITIVITIES, columns, DIGEST))
        return written[SENSITIVITIES] * experts // count

    def _quantize(self) -> dict[str, int]:
        files: dict[str, int] = {}
        for layer, mine in zip(self.sizes.layers, widths(self.sizes, self.recipe.assign, self.recipe), strict=True):
            key = (layer.num_experts, layer.hidden_size, layer.intermediate_size, len(layer.name), repr(mine))
            files[layer_name(layer.index)] = self._cached(
                ("placed", *key),
                lambda layer=layer, mine=mine: self._placed(layer, mine),  # type: ignore[misc]
            )
            if self.recipe.quantize.replicas == "all":
                files[extra_name(layer.index)] = self._cached(
                    ("extra", *key),
                    lambda layer=layer, mine=mine: self._extra(layer, mine),  # type: ignore[misc]
                )
        made = {layer.name: self._made_by(layer.index) for layer in self.sizes.layers}
        text = canonical_json({"schema_version": quantize.SCHEMA_VERSION, "layers": made})
        if self.recipe.quantize.refine is not None:
            done = canonical_json({"key": DIGEST, "files": dict.fromkeys(files, DIGEST)})
            files[refine.PROGRESS] = len(done.encode())
        return files | {quantize.NAME: len(text.encode())} | self.sizes.others.written()

    def _made_by(self, layer: int) -> list[dict[str, str]]:
        """{bits, or MIXED: method} of the replicas of every expert of a layer."""
        method = methods(self.recipe.assign, self.recipe)[0]
        more = self.recipe.losses.bits if self.recipe.quantize.replicas == "all" else ()
        placed = self._placed_by()
        return [
            {str(bits): placed if bits == one.key else method for bits in {one.key, *more} - {FULL}}
            for one in self.own.layers[layer].experts
        ]

    def _placed_by(self) -> str:
        """Who makes the placed replicas."""
        refined = self.recipe.quantize.refine is not None
        return methods(self.recipe.assign, self.recipe)[0] + (REFINED if refined else "")

    def _placed(self, layer: ExpertLayer, mine: list[Width]) -> int:
        shapes: Shapes = {f"{layer.name}.{name}": (GUARD_DTYPE, shape) for name, shape in guard_shapes(layer).items()}
        for expert, bits in enumerate(mine):
            shapes |= self._replica(layer, bits, f"{layer.name}.{expert}")
        return _file(shapes, METADATA)

    def _extra(self, layer: ExpertLayer, mine: list[Width]) -> int:
        shapes: Shapes = {}
        for expert, one in enumerate(mine):
            section = self.recipe.losses
            placed = one if isinstance(one, int) else MIXED
            for width in stored_widths(placed, [*section.bits, FULL], section.nested):
                if width != placed:
                    shapes |= self._replica(layer, width, f"{layer.name}.{expert}.bits{width}")
        return _file(shapes, METADATA)

    def _replica(self, layer: ExpertLayer, own: Width, prefix: str) -> Shapes:
        return replica_shapes(self.recipe, layer, layer.projections, own, self.sizes.source_dtype, prefix)

    def _packed(self) -> dict[str, int]:
        """The files of packed experts, which quantize writes and export takes over."""
        return {name: size for name, size in self.lasting("quantize").items() if name.endswith(".safetensors")}

    def _export(self) -> dict[str, int]:
        """The checkpoint's files as `assign.size` counts them; those of packed experts exactly."""
        files = self.sizes.checkpoint.files(self.own.expert_widths()) | self._packed()
        return {name: size for name, size in files.items() if name != RECORD}

    def _eval(self) -> dict[str, int]:
        rows = []
        scores = {
            task: dict.fromkeys(("acc", "acc_norm", "acc_norm_stderr", "acc_stderr"), TYPICAL)
            for task in self.recipe.eval.tasks
        }
        for name, section in [("original", None), *self.sections]:
            rows.append(
                EvalRow(
                    name=name,
                    exported=name == self.recipe.name,
                    assignment=None if section is None else stand_in(self.sizes, section, self.recipe, name),
                    expert_bytes=self.sizes.experts_disk,
                    other_bytes=self.sizes.disk - self.sizes.experts_disk,
                    average_bits=2.5,
                    perplexity=12.345678901234567,
                    perplexity_by_domain=dict.fromkeys(("math", "prose", "python"), 12.345678901234567),
                    accuracy=TYPICAL,
                    accuracy_stderr=TYPICAL,
                    tasks=scores,
                    changes={} if section is None else dict.fromkeys(self._measures(), CHANGE),
                )
            )
        report = EvalReport(rows=tuple(rows), tokens=10**6, export_logit_error=1.2345678901234567e-07)
        found = {evaluation.NAME: report.model_dump(mode="json")}
        if not self.context.model.takes_images:
            found[evaluation.SAMPLES] = self._samples(rows)
        return {name: len(canonical_json(one).encode()) for name, one in found.items()}

    def _measures(self) -> list[str]:
        """What eval compares with the original, item by item, of every assignment."""
        if self.context.model.takes_images:
            return []
        tasks = self.recipe.eval.tasks
        return [*tasks, *(["average"] if len(tasks) > 1 else []), *(["perplexity"] if self.work.evaluation else [])]

    def _samples(self, rows: Sequence[EvalRow]) -> dict[str, Any]:
        """Every item of every assignment, of a model that answers at random."""
        section, text = self.recipe.eval, self.work.evaluation
        results = None
        if section.tasks:
            manager = self.context.text.task_manager
            results = guessed_results(
                section.tasks,
                manager,
                limit=section.limit,
                num_fewshot=section.num_fewshot,
                chat_template=section.chat_template,
            )
        measured = None
        if text is not None:
            generator = np.random.default_rng(0)
            length = text.length
            measured = {
                "perplexity": 12.345678901234567, "perplexity_stderr": TYPICAL, "documents": text.sequences,
                "text": "0" * 64,
                "window": length, "stride": length, "tokens": text.tokens, "unit": "sequence",
                "counted": "all tokens but the first of each sequence",
                "by_domain": dict.fromkeys(("math", "prose", "python"), 12.345678901234567),
                "items": {"logprob": (-300 - generator.random(text.sequences)).tolist(),
                          "tokens": [length - 1] * text.sequences},
            }  # fmt: skip
        made = [{"name": row.name, "lm_eval": results, "perplexity": measured, "cut_requests": {}} for row in rows]
        return samples.document(made, section.how_tasks_are_asked())

    def _estimate(self) -> dict[str, int]:
        """One estimate of the recipe's own assignment: the others' take as many bytes."""
        geometry, is_own = estimate_stage.chosen_geometry(self.context)
        load_hardware(self.recipe.estimate.hardware)  # the first time, units are read
        started = time.perf_counter()
        made = estimate_stage.of_assignment(self.context, geometry, self.own, {})
        self.estimating = time.perf_counter() - started
        report = estimate_stage.report_on(self.context, geometry, is_own, [made])
        none = estimate_stage.report_on(self.context, geometry, is_own, [])
        one, empty = (len(canonical_json(some.model_dump(mode="json")).encode()) for some in (report, none))
        return {estimate_stage.NAME: empty + (one - empty) * len(self.sections)}

    def _report(self) -> dict[str, int]:
        """An estimate: a map of each kind is drawn with made-up figures, the rest goes by layers and assignments."""
        values, widths = self._maps()
        size = REPORT + REPORT_LAYER * len(self.sizes.layers) + REPORT_ASSIGNMENT * len(self.sections)
        size += (MEASURES + len(self.recipe.losses.bits)) * values + len(self.sections) * widths
        return {report.NAME: size}

    def _maps(self) -> tuple[int, int]:
        """Bytes of a map of values and of one of widths, with their captions."""
        generator = np.random.default_rng(0)
        rows = [generator.lognormal(size=layer.num_experts) for layer in self.sizes.layers]
        quantity = Quantity(name="relative loss (logarithmic)", form=formats.share, log=True)
        own = self.own
        placed = width_map("m", "", own.mean_bits(), own.hot(), "m", present=own.widths())
        drawn = (value_map("m", "", rows, quantity, "m"), placed)
        values, widths = (len(drawing.svg.encode()) + CAPTION for drawing in drawn)
        return values, widths

    def _cached(self, key: tuple[Any, ...], make: Callable[[], int]) -> int:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def _file(shapes: Shapes, metadata: dict[str, str] | None = None) -> int:
    """Bytes of a safetensors file."""
    _, header, size = safetensors_layout(shapes, metadata)
    return len(header) + size


def _inputs(stage: Stage, recipe: Recipe) -> list[str]:
    """Names of the digests in a stage's record."""
    more = [name for name, there in (("compute", stage.computes), ("extra", stage.extra is not None)) if there]
    return ["model", "recipe", *stage.text, *more, *stage.needs(recipe)]


def _written(write: Callable[[Path], None]) -> dict[str, int]:
    """Sizes of the files that `write` puts into a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="moeq-plan-") as folder:
        write(Path(folder))
        return {path.name: path.stat().st_size for path in Path(folder).iterdir()}


def _loss_rows(sizes: ModelSizes, recipe: Recipe, count: int) -> Iterator[dict[str, Any]]:
    """The first `count` rows of a loss table with made-up losses."""
    section = recipe.losses
    generator = np.random.default_rng(0)
    order = (
        (layer, expert, method, bits, projection)
        for layer in sizes.layers
        for expert in range(layer.num_experts)
        for method in section.methods
        for bits in section.bits
        for projection in (losses.WHOLE, *(layer.projections if section.per_projection else ()))
    )
    for layer, expert, method, bits, projection in islice(order, count):
        yield _loss_row(layer, expert, method, bits, projection, sizes, recipe) | {
            name: float(value)
            for name, value in zip(("loss", "relative_loss", "weighted_loss"), generator.random(3), strict=True)
        }


def _layer_rows(layer: ExpertLayer, sizes: ModelSizes, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Rows of one layer by the first method at the first width."""
    section = recipe.losses
    for expert in range(layer.num_experts):
        for projection in (losses.WHOLE, *(layer.projections if section.per_projection else ())):
            yield _loss_row(layer, expert, section.methods[0], section.bits[0], projection, sizes, recipe)


def _loss_row(
    layer: ExpertLayer, expert: int, method: str, bits: int, projection: str, sizes: ModelSizes, recipe: Recipe
) -> dict[str, Any]:
    """A row of the loss table with made-up figures."""
    section = recipe.losses
    return {
        "layer": layer.index, "layer_name": layer.name, "expert": expert, "projection": projection,
        "method": method, "bits": bits, "group_size": section.group_size, "symmetric": section.symmetric,
        "loss": TYPICAL / 1000, "relative_loss": TYPICAL, "calibration_tokens": 3 * expert, "heldout_tokens": expert,
        "fallback": "none", "measured_on": "heldout",
        "bytes": expert_bytes(layer, bits, recipe, sizes.source_dtype.itemsize),
        "weighted_loss": TYPICAL / 1000,
        "hessian_trace": 123 * TYPICAL if QUANTIZERS.get(method).knows_hessians else None,
    }  # fmt: skip
