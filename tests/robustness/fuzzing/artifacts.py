"""Targets: artifacts in JSON. What is read is written again and read as the same, its numbers finite."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from robustness.fuzzing.target import BytesTarget, Check, JsonTarget, Place

from moeq.artifacts import (
    bench,
    coactivation,
    digests,
    dynamic_log,
    effects,
    evaluation,
    expert_effects,
    gates,
    low_precision,
    non_experts,
    replica_store,
    replicas,
)
from moeq.artifacts.assignment import Assignment, ExpertChoice, read_assignment
from moeq.artifacts.files import canonical_json
from moeq.artifacts.manifest import NAME, manifest_json, read_manifest
from moeq.artifacts.stage import RECORD, read_record
from moeq.artifacts.stage import read_model as read_artifact
from moeq.evaluation import result_file
from moeq.integers.artifacts import integer_report, reparam
from moeq.stages import estimate, quantize, refine
from moeq_kernels import measured

PLAIN: dict[Any, Any] = {int: 2, float: 0.5, str: "a", bool: True, Any: 1, NoneType: None}


def example(kind: Any) -> Any:
    """A small value of a type, as JSON has it."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Annotated, Union, UnionType):
        return example(parts[0])
    if origin is Literal:
        return parts[0]
    if origin is tuple:
        return [example(part) for part in parts if part is not ...]
    if origin is dict:
        return {example(parts[0]): example(parts[1])}
    if origin is list:
        return [example(parts[0])]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: _field(name, field) for name, field in kind.model_fields.items()}
    return PLAIN[kind]


def _field(name: str, field: Any) -> Any:
    return field.default if name == "schema_version" else example(field.annotation)


class Artifact(JsonTarget):
    """An artifact of one model of pydantic's; file: its name; changed: what the example has otherwise."""

    model: ClassVar[type[BaseModel]]
    filename: ClassVar[str]
    changed: ClassVar[dict[str, Any]] = {}

    def prepare(self, place: Place) -> None:
        self.value = example(self.model) | self.changed

    def of(self, path: Path) -> Any:
        """What the reader gives."""
        raise NotImplementedError

    def read(self, data: bytes) -> Check | None:
        found = self.of(self.file(self.filename, data))
        return lambda: _written_again(found)


def _written_again(found: BaseModel) -> None:
    """AssertionError unless what was read can be written, and says the same when it is read again."""
    text = canonical_json(found.model_dump(mode="json"))
    assert canonical_json(type(found).model_validate(json.loads(text)).model_dump(mode="json")) == text


def valid_assignment() -> Any:
    """Of one layer with an expert in full precision, and one whose matrices differ."""
    plain = example(ExpertChoice) | {"projections": None}
    choices = [plain | {"bits": 16}, plain | {"projections": {"up_proj": 2, "down_proj": 1}}]
    return example(Assignment) | {"layers": [{"name": "layers.0", "experts": choices}]}


class AssignmentFile(Artifact):
    name, filename, model = "assignment", "assignment.json", Assignment

    def prepare(self, place: Place) -> None:
        self.value = valid_assignment()

    def of(self, path: Path) -> Any:
        return read_assignment(path)


class Evaluation(Artifact):
    name, filename, model = "evaluation", evaluation.NAME, evaluation.EvalReport

    def prepare(self, place: Place) -> None:
        row = example(evaluation.EvalRow) | {"assignment": None}
        self.value = example(evaluation.EvalReport) | {"rows": [row]}

    def of(self, path: Path) -> Any:
        return evaluation.read_eval(path)


class LayerEffects(Artifact):
    name, filename, model = "effects", effects.NAME, effects.LayerEffects

    def of(self, path: Path) -> Any:
        return effects.read_effects(path.parent)


class ExpertEffects(Artifact):
    name, filename, model = "expert_effects", expert_effects.NAME, expert_effects.ExpertEffects

    def of(self, path: Path) -> Any:
        return expert_effects.read_effects(path.parent)


class MeasuredExperts(Artifact):
    name, filename, model = "measured_experts", expert_effects.MEASURED, expert_effects.Measured
    refuses = False  # what is damaged is measured again

    def of(self, path: Path) -> Any:
        return expert_effects.read_measured(path.parent, "a")


class Gates(Artifact):
    name, filename, model = "gates", gates.NAME, gates.Gates

    def of(self, path: Path) -> Any:
        return gates.Gates(gates=gates.read_gates(path))


class Bench(Artifact):
    name, filename, model = "bench", bench.NAME, bench.Bench
    changed: ClassVar = {"schema_version": bench.SCHEMA_VERSION}

    def of(self, path: Path) -> Any:
        return bench.read_bench(path)


class LowPrecision(Artifact):
    name, filename, model = "low_precision", low_precision.NAME, low_precision.LowPrecisionReport

    def of(self, path: Path) -> Any:
        return low_precision.read_sweeps(path)


class Coactivation(Artifact):
    name, filename, model = "coactivation", coactivation.NAME, coactivation.CoactivationTable
    changed: ClassVar[dict[str, Any]] = {
        "layers": [{"name": "one", "num_experts": 2}, {"name": "two", "num_experts": 3}],
        "shares": ["AAD//wAAAAAAAP//"],
    }

    def of(self, path: Path) -> Any:
        found = coactivation.read_coactivation(path.parent)
        assert found is not None
        assert all(0 <= share.min() <= share.max() <= 1 for share in found.follows())
        return found


class Others(Artifact):
    name, filename, model = "others", non_experts.NAME, non_experts.OtherTable

    def of(self, path: Path) -> Any:
        return non_experts.read_table(path.parent)


class OtherReplicas(Artifact):
    name, filename, model = "others_replicas", non_experts.INDEX, non_experts.OtherIndex

    def prepare(self, place: Place) -> None:
        made = [{"method": "gptq", "bits": 3, "entry": "gptq.3.x", "rows": "gptq.3.x", "kind": "attention"}]
        self.value = {"schema_version": 2, "set": "0" * 64, "made": made, "layers": [{"gptq.3.x": "0"}]}

    def of(self, path: Path) -> Any:
        return non_experts.read_index(path.parent)


class Replicas(Artifact):
    name, filename, model = "replicas", replicas.INDEX, replicas.ReplicaIndex

    def prepare(self, place: Place) -> None:
        made = [{"method": "gptq", "bits": 3, "entry": "gptq.3.x", "rows": "gptq.3.x"}]
        self.value = {"schema_version": 2, "set": "0" * 64, "made": made, "layers": [{"gptq.3.x": "0"}]}

    def of(self, path: Path) -> Any:
        index = replicas.read_index(path.parent)
        for name in (index.set, *index.entries()):
            assert (self.folder / name).parent == self.folder
        return index


class EstimateFile(Artifact):
    name, filename, model = "estimate", estimate.NAME, estimate.EstimateReport

    def of(self, path: Path) -> Any:
        return read_artifact(path, estimate.EstimateReport, estimate.SCHEMA_VERSION, remedy=estimate.REMEDY)


class Reparam(Artifact):
    name, filename, model = "reparam", reparam.NAME, reparam.ReparamReport

    def of(self, path: Path) -> Any:
        return reparam.read_reparam(path.parent)


class IntegerFigures(Artifact):
    name, filename, model = "integer_report", integer_report.NAME, integer_report.IntegerReport

    def of(self, path: Path) -> Any:
        return integer_report.read_report(path.parent)


class Manifest(JsonTarget):
    """placement.json: the files that it names lie in its folder."""

    name, per_byte = "manifest", 2

    def prepare(self, place: Place) -> None:
        whole = read_manifest(place.checkpoint)
        first = whole.layers[0].model_copy(update={"experts": whole.layers[0].experts[:2], "num_experts": 2})
        self.value = manifest_json(whole.model_copy(update={"layers": (first,)}))

    def read(self, data: bytes) -> None:
        self.file(NAME, data)
        for name in read_manifest(self.folder).files():
            assert (self.folder / name).parent == self.folder


class Record(JsonTarget):
    """stage.json: the files that it names lie below its folder."""

    name, per_byte = "record", 2

    def prepare(self, place: Place) -> None:
        self.value = json.loads((place.checkpoint / RECORD).read_text("utf-8"))

    def read(self, data: bytes) -> None:
        self.file(RECORD, data)
        for name in read_record(self.folder, "export").files:
            assert (self.folder / name).resolve().is_relative_to(self.folder.resolve())


class Results(JsonTarget):
    """What `moeq eval --out` wrote: a table can be made of it again, as `moeq inspect` and later evaluations do."""

    name = "results"

    def prepare(self, place: Place) -> None:
        items = {"logprob": [-3.0, -4.0], "tokens": [2, 3], "documents": [["a", 1], ["b", 1]]}
        text = {"perplexity": 9.0, "perplexity_stderr": 0.5, "items": items, "window": 4, "stride": 4, "text": "t"}
        samples = [
            {"doc_id": number, "doc_hash": "x", "target": "0", "acc": score} for number, score in ((0, 1), (1, 0))
        ]
        results = {
            "results": {"x": {"acc,none": 0.5, "acc_stderr,none": 0.1}, "g": {"acc,none": 0.5}},
            "samples": {"x": [one | {"filter": "none"} for one in samples]},
            "group_subtasks": {"g": ["x"]},
        }
        row = {
            "name": "a",
            "perplexity": text | {"unit": "window"},
            "lm_eval": results,
            "of": {"context_aware": {"gpu_experts": 1}},
        }
        self.value = {"kind": result_file.KIND, "schema_version": 1, "settings": {}, "rows": [row, row | {"name": "b"}]}

    def read(self, data: bytes) -> None:
        result_file.summary(self.file("results.json", data))


class DynamicLog(BytesTarget):
    """What `--dynamic-log` wrote: experts and layers that there are, steps that rise, sums that are counts."""

    name, per_byte = "dynamic_log", 200

    def prepare(self, place: Place) -> None:
        head = dynamic_log.Head(
            moeq_version="1",
            settings={"high": 4, "low": 2},
            other_bytes={"all but the experts": 9},
            pool_bytes=99,
            layers=("l.0", "l.1"),
            experts=(8, 8),
            places=2,
            high=("3", "c"),
        )
        switch = {"layer": 1, "expert": 7, "version": 1}
        decision = {"step": 4, "high": ["3", "c"], "switches": [switch], "promotions": 0, "copied_bytes": 12}
        end = {"end": True, "step": 6, "high": ["3", "88"], "promotions": 1, "failures": 1, "said": ["a disk"]}
        lines = (head.model_dump(mode="json"), decision, end)
        self.data = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def read(self, data: bytes) -> Check:
        log = dynamic_log.read_log(self.file("log.jsonl", data))

        def check() -> None:
            described = dynamic_log.described(log)
            assert described["forward_passes"] >= 0
            assert all(len(sets) == len(log.head.layers) for _, sets in log.sets)
            steps = [step for step, _ in log.sets]
            assert steps == sorted(steps)
            json.dumps(described, allow_nan=False)

        return check


class Quantizers(JsonTarget):
    """quantizers.json: names of methods by width."""

    name = "quantizers"
    value: ClassVar[Any] = {"schema_version": quantize.SCHEMA_VERSION, "layers": {"l.0": [{"4": "gptq"}, {"2": "rtn"}]}}

    def read(self, data: bytes) -> None:
        self.file(quantize.NAME, data)
        for experts in quantize.quantizers(self.folder).values():
            assert all(
                isinstance(bits, int) and isinstance(name, str) for made in experts for bits, name in made.items()
            )


class RefineProgress(JsonTarget):
    """What refining has finished: damaged progress is none, and names stay in the folder."""

    name, refuses = "refine_progress", False
    value: ClassVar[Any] = {"key": "k", "files": {"a.safetensors": "0" * 64}}

    def read(self, data: bytes) -> None:
        found = refine.finished(self.file(refine.PROGRESS, data), "k")
        assert all((self.folder / name).is_file() for name in found)


class StoreMarker(JsonTarget):
    name = "store_marker"
    value: ClassVar[Any] = {"kind": "moeq replica store", "schema_version": replicas.SCHEMA_VERSION}

    def read(self, data: bytes) -> None:
        self.file(replica_store.MARKER, data)
        assert replica_store.is_marked(self.folder) in (True, False)
        replica_store.check_store(self.folder)


class StoreNote(JsonTarget):
    """A run that uses a store: an absolute path."""

    name = "store_note"
    value: ClassVar[Any] = {"run": "/a/run"}

    def prepare(self, place: Place) -> None:
        (self.folder / replica_store.RUNS).mkdir()

    def read(self, data: bytes) -> None:
        self.file(f"{replica_store.RUNS}/a.json", data)
        for run in replica_store.noted_runs(self.folder).values():
            assert run.is_absolute()
            run.exists()


class LossRows(JsonTarget):
    """Loss rows of the store: damaged ones count as missing."""

    name, refuses = "loss_rows", False

    def prepare(self, place: Place) -> None:
        self.value = json.loads(replicas.rows_text([{"expert": 0, "loss": 0.5}, {"expert": 1, "loss": 0.25}]))
        self.path = replicas.rows_file(self.folder, 0, "x")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def read(self, data: bytes) -> None:
        self.path.write_bytes(data)
        rows = replicas.read_rows(self.folder, 0, "x")
        assert rows is None or rows == self.value["rows"]


class DigestCache(JsonTarget):
    """The cache of digests: what is damaged is not believed."""

    name, refuses = "digest_cache", False
    value: ClassVar[Any] = {"1-2-3-4-5:a": "0" * 64, "1-2-3-4-6": "f" * 64}

    def read(self, data: bytes) -> None:
        for name, digest in digests._read_shard(self.file("00.json", data)).items():
            assert isinstance(name, str)
            assert len(bytes.fromhex(digest)) == 32


class KernelCache(JsonTarget):
    """What was measured of kernels: what is damaged is measured again."""

    name, refuses = "kernel_cache", False
    value: ClassVar[Any] = {"a CPU, 2 threads": ["avx2", 64], "another, 8 threads": ["avx512", 512]}

    def read(self, data: bytes) -> None:
        for name, found in measured._read(self.file(measured.NAME, data)).items():
            assert isinstance(name, str)
            assert not measured._is_found(found, ("avx2", "avx512")) or found[1] > 0
