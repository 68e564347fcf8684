"""What is this file? Checkpoints, run directories, models, and every artifact that moeq writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from moeq.artifacts import dynamic_log, gguf_file, provenance, replica_store, replicas
from moeq.artifacts.assignment import Width, count_matrices, count_widths, read_assignment
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import read_json
from moeq.artifacts.loads_in import loads_in
from moeq.artifacts.manifest import NAME as MANIFEST
from moeq.artifacts.manifest import PlacementManifest
from moeq.artifacts.run import DIRECTORIES, EDITABLE, STAGES, store_folder
from moeq.artifacts.sealed import is_sealed
from moeq.artifacts.stage import RECORD, StageRecord, check_files, edited_files, of_earlier_codes, read_record
from moeq.artifacts.sums import SIGNATURE
from moeq.artifacts.trace import NAME as TRACE
from moeq.artifacts.trace import is_trace, read_trace
from moeq.errors import ArtifactError, ModelError
from moeq.folders import has_recipe
from moeq.integers.artifacts.integer import NAME as INTEGER
from moeq.integers.artifacts.integer import SCHEMA as INTEGER_SCHEMA
from moeq.models.configuration import check_top_k
from moeq.models.declared import main_dtype
from moeq.models.drafts import left_drafts
from moeq.models.source import CONFIG, ModelSource, open_source, read_header
from moeq.models.stored_experts import checked_layers
from moeq.models.support import NO_EXPERTS, USE_ANOTHER, answer
from moeq.preflight import check_folder
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtimes import formats, of_method, runtimes
from moeq.tables import human_bytes
from moeq_kernels.iq_types import SETS
from moeq_kernels.widths import Encoding

QUIET = Reporter(quiet=True)
TABLE = "sensitivities.parquet"  # of `moeq.artifacts.sensitivities`, whose module imports pyarrow


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint that is not opened: by its config.json an exporter says whose code loads it."""

    source: ModelSource


def inspect(path: Path, reporter: Reporter = QUIET, trust_remote_code: bool = False) -> dict[str, Any]:
    """Describe a path, a checkpoint checked byte for byte against its manifest; ArtifactError (or the error of the kind
    that it turns out to be) for what is damaged or unknown."""
    check_folder(path)
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return check_checkpoint(path, reporter)
        if (path / INTEGER).is_file() and (path / INTEGER_SCHEMA).is_file():
            return _integer(path)
        if has_recipe(path):
            return _run_directory(path, reporter)
        if (path / replica_store.MARKER).is_file():
            return _store(path, reporter)
        if (path / RECORD).is_file():
            return _stage(path, reporter, trust_remote_code)
        if (path / "config.json").is_file():
            return _weights(path, reporter, trust_remote_code)
        raise ArtifactError("neither a checkpoint, a run, a stage nor a model", where=str(path), do="give another path")
    return _file(path, reporter)


def _weights(path: Path, reporter: Reporter, trust_remote_code: bool) -> dict[str, Any]:
    """Describe a directory of weights: packed ones in a format of the registry, or a model's."""
    from moeq.exporters.exporter import read_by
    from moeq.exporters.readers import check_read, file_format, format_of
    from moeq.exporters.readers import described as reading
    from moeq.exporters.readers.w8a8 import Int8Checkpoint, is_w8a8
    from moeq.models.declared import quantization_of

    exporter = file_format(path)
    if exporter is not None and exporter.described is not None:
        described = exporter.described(path, trust_remote_code)
    else:
        source = open_source(str(path))
        if is_w8a8(source.config):
            return Int8Checkpoint(source).described() | _files(path, reporter)
        exporter = of_method(format_of(source)) if quantization_of(source.config) else None
        if exporter is None or exporter.layout is None:
            try:
                return _model(source, reporter)
            except ModelError:
                check_read(source)
                raise
        described = reading.packed(path, exporter.called(format_of(source)), trust_remote_code)  # or refuses settings
        described["loads_in"] = read_by(exporter, Stored(source=source))
    where = {"loads_in": described.pop("loads_in")} if "loads_in" in described else {}
    return described | _files(path, reporter) | where


def _files(directory: Path, reporter: Reporter) -> dict[str, Any]:
    """What was compared with SHA256SUMS, and what the provenance names; nothing where there are no sums."""
    sums, statement = provenance.check_listed(directory, reporter)
    made = {} if statement is None else {"provenance": provenance.words(statement)}
    return ({} if sums is None else {"checked_files": sums.text}) | made | _signature(directory)


def _signature(directory: Path) -> dict[str, str]:
    """That there is a signature, which only a key can judge."""
    there = (directory / SIGNATURE).exists()
    return {"signature": f"{SIGNATURE}, not looked at: `moeq verify --signature` does"} if there else {}


def _integer(path: Path) -> dict[str, Any]:
    from moeq.integers.forward.replay import replay

    return replay(path)


def check_checkpoint(directory: Path, reporter: Reporter = QUIET) -> dict[str, Any]:
    """Describe a checkpoint that moeq exported; ArtifactError when a file is not as the manifest says."""
    from moeq.verification.manifest_files import check_code, check_native

    checked = check_native(directory, reporter)
    manifest = checked.manifest
    code = check_code(directory, manifest)
    widths = [expert.widths for layer in manifest.layers for expert in layer.experts]
    return {
        "kind": "moeq checkpoint",
        "model": manifest.model.name,
        "assignment": manifest.assignment["name"],
        "method": manifest.assignment["method"],
        "layers": len(manifest.layers),
        "experts": len(widths),
        "bits_per_weight": manifest.bits_per_weight,
        **_by_bits(widths),
        **_codes(manifest.encoding),
        "group_size": manifest.layout["group_size"],
        "placed_expert_bytes": manifest.totals.placed_expert_bytes,
        "other_replica_bytes": manifest.totals.other_replica_bytes,
        "non_expert_bytes": manifest.totals.non_expert_bytes,
        **_packed_modules(manifest),
        "bytes_by_tier": {f"{tier}_bytes": size for tier, size in manifest.totals.bytes_by_tier.items()},
        "tensor_bytes_on_disk": checked.tensor_bytes,
        **({"code": code} if code else {}),
        "check": "every size, sum and SHA-256 equals the manifest",
        "checked_files": checked.files,
        "provenance": checked.provenance,
        **_signature(directory),
        "loads_in": loads_in(
            [[expert.widths for expert in layer.experts] for layer in manifest.layers],
            **vars(manifest.encoding),
            layers=manifest.layers,
            others=manifest.others,
        ),
    }


def _codes(encoding: Encoding) -> dict[str, Any]:
    """Of what kind codes are that are no grid's."""
    if encoding.floats:
        return {"float_codes": encoding.codebook}
    if encoding.codes == "iq":
        return {"iq_types": [*SETS[encoding.codebook].values()]}
    if encoding.codebook:
        return {"exl3_codebook": encoding.codebook}
    return {"trellis_states": 1 << encoding.state_bits} if encoding.state_bits else {}


def _by_bits(widths: Sequence[Width]) -> dict[str, Any]:
    """How many experts have which width, and how many matrices of those whose matrices differ."""
    matrices = count_matrices(widths)
    mixed = {"mixed_experts_matrices_by_code_bits": matrices} if matrices else {}
    return {"experts_by_code_bits": count_widths(widths), **mixed}


def _packed_modules(manifest: PlacementManifest) -> dict[str, Any]:
    """Packed modules outside of the experts by class; nothing where there are none."""
    if not manifest.others:
        return {}
    classes: dict[str, str] = {}
    for kind in dict.fromkeys(module.kind for module in manifest.others):
        modules = [module for module in manifest.others if module.kind == kind]
        size = human_bytes(sum(module.bytes for module in modules))
        classes[kind] = f"{len(modules)} at {modules[0].bits} code bits, {size}"
    return {"packed_module_bytes": manifest.totals.packed_module_bytes, "packed_modules": classes}


def _run_directory(path: Path, reporter: Reporter) -> dict[str, Any]:
    """Describe a run, every file read; ArtifactError for the first that is not what its stage wrote.

    Files that may be edited may have been, but must be valid.
    """
    recipe = load_recipe(path / "recipe.yaml")
    about: dict[str, Any] = {"kind": "moeq run", "recipe": recipe.name}
    for name in STAGES:
        directory = path / DIRECTORIES.get(name, name)
        if not (directory / RECORD).is_file():
            about[name] = "not run"
            continue
        record = read_record(directory, name)
        edited = _checked_stage(directory, record, reporter)
        about[name] = f"{record.digest[:16]}, {edited} edited by hand since" if edited else record.digest[:16]
        if name == "losses":
            _check_replicas(directory, store_folder(recipe, path), reporter)
    earlier = of_earlier_codes(path)
    for directory in sorted(path.glob("checkpoint-*")):
        if (directory / RECORD).is_file():
            sums, _ = provenance.check_listed(directory, reporter)
            check_files(directory, read_record(directory, "export"), {} if sums is None else sums.files, reporter)
            said = "there are no digests" if sums is None else sums.text
            about[directory.name] = f"of an earlier assignment; {said}" if directory in earlier else said
    return about


def _checked_stage(directory: Path, record: StageRecord, reporter: Reporter) -> str:
    """Names of the files of a stage that were edited by hand, as they may be; ArtifactError for any other change."""
    editable = EDITABLE.get(record.stage, frozenset())
    check_files(directory, record, reporter=reporter, editable=editable)
    if (directory / TRACE).is_file():
        read_trace(directory / TRACE)  # which has digests of its own
    edited = edited_files(directory, record.stage, editable)
    for name in edited:
        read_assignment(directory / name)  # the one kind of file that people edit
    table = directory / TABLE  # no record has its digest
    if table.is_file() and not is_sealed(table):  # an earlier moeq wrote it, or its reader says what is wrong
        from moeq.artifacts.sensitivities import read_sensitivities

        read_sensitivities(table)
    return ", ".join(edited)


def _check_replicas(directory: Path, store: Path, reporter: Reporter) -> None:
    """ArtifactError unless a run's replicas are in the store as they were written."""
    index = replicas.read_index(directory)
    with reporter.bar("checking the store", len(index.layers)) as advance:
        for layer, wanted in enumerate(index.layers):
            if wanted:
                replicas.LayerReplicas(store / index.set, layer).check(wanted)
            advance()


def _store(path: Path, reporter: Reporter) -> dict[str, Any]:
    """Describe a replica store; ArtifactError naming the first file whose replicas or rows are not as written."""
    replica_store.check_store(path)
    files = sorted(path.glob("*/layer-*.safetensors"))
    entries: set[str] = set()
    with reporter.bar("checking", len(files)) as advance:
        for file in files:
            there = replicas.LayerReplicas(file.parent, replicas.layer_number(file))
            for entry in there.entries:
                if not there.is_sound(entry):
                    raise ArtifactError(f"replicas {entry} are damaged", where=str(file), do=replicas.REMEDY)
                entries.add(".".join(entry.split(".")[:2]))
            advance()
    for file in sorted(path.glob(f"*/{replicas.ROWS}/layer-*.json")):
        replicas.check_rows(file)
    return {
        "kind": "moeq replica store",
        "sets": len({file.parent for file in files}),
        "layers": len(files),
        "replicas": sorted(entries),
        "bytes": sum(file.stat().st_size for file in files),
        "runs_elsewhere": [str(run) for run in replica_store.noted_runs(path).values()],
        "check": "every SHA-256 equals what the files state",
    }


def _stage(path: Path, reporter: Reporter, trust_remote_code: bool) -> dict[str, Any]:
    record = read_record(path, path.name)
    edited = _checked_stage(path, record, reporter)
    if for_runtime := _written_for(record):
        return _weights(path, reporter, trust_remote_code) | for_runtime
    return {
        "kind": f"artifact of moeq {record.stage}",
        "model": record.model.name,
        "moeq_version": record.moeq_version,
        "digest": record.digest,
        "files": {name: human_bytes(stamp.bytes) for name, stamp in record.files.items()},
        "summary": record.summary,
        "check": "every SHA-256 equals the record" + (f", but of {edited}, which was edited" if edited else ""),
        **_files(path, reporter),
    }


def _written_for(record: StageRecord) -> dict[str, Any]:
    """The runtime that a run's checkpoint was written for, which its record names, or names by its format."""
    stage, _, name = record.stage.partition("-")
    name = formats().get(name, name)
    return {"loads_in": {name: None}} if stage == "export" and name in runtimes() else {}


def _model(source: ModelSource, reporter: Reporter) -> dict[str, Any]:
    """Describe a model by its configuration and the headers of its weights; nothing is made of it.

    ModelError for one of which moeq knows that there is nothing to quantize, or whose experts are not alike.
    """
    found = answer(source.config)
    if found.refused:
        raise ModelError(found.line, where=str(source.path), do=found.do)
    files = _files(source.path, reporter)
    shapes = {key: header.shape for key, header in source.tensors.items()}
    layers = checked_layers(shapes, source.config, str(source.path))
    if not layers:
        raise ModelError(NO_EXPERTS, where=str(source.path), do=USE_ANOTHER)
    check_top_k(source.config, max(layer.num_experts for layer in layers), source.path / CONFIG)
    expert_bytes = sum(source.tensors[key].bytes for layer in layers for key in layer.keys)
    drafts = left_drafts(source.drafts)
    return {
        "kind": f"transformers model ({source.config['model_type']})",
        "support": found.line,
        "moe_layers": len(layers),
        "experts_a_layer": sorted({layer.num_experts for layer in layers}),
        "expert_shape": sorted({f"{layer.hidden_size} x {layer.intermediate_size}" for layer in layers}),
        "dtype": main_dtype(source),
        "expert_bytes": expert_bytes,
        "non_expert_bytes": sum(header.bytes for header in source.tensors.values()) - expert_bytes,
        **({} if drafts is None else {"left_out": drafts.removeprefix("left out: ")}),
        "digest": source.stamp(source.file_digests(cached="checked_files" in files, reporter=reporter)).digest,
        **files,
        **_own_code(source.path),
    }


def _own_code(path: Path) -> dict[str, Any]:
    """Python files of a model, which loading it with trust runs; nothing where there are none."""
    hashes = {file.name: f"SHA-256 {digest_of_file(file)}" for file in sorted(path.glob("*.py"))}
    return {"code": hashes} if hashes else {}


def _trace(path: Path) -> dict[str, Any]:
    trace = read_trace(path)
    return {
        "kind": "routing trace",
        "model": trace.model.name if trace.model is not None else None,
        "layers": trace.num_layers,
        "experts_a_layer": sorted(set(trace.num_experts)),
        "experts_a_token": trace.top_k,
        "sequences": trace.num_sequences,
        "sequences_by_domain": dict(Counter(trace.domains)),
        "tokens": trace.num_tokens,
        "prefill_tokens": int(trace.prefill.sum()),
        **({} if trace.images is None else {"image_tokens": int(trace.images.sum())}),
        "routing_weights": trace.weights is not None,
        "check": "every SHA-256 equals the header",
    }


def _integer_figures(path: Path) -> dict[str, Any]:
    """What was measured of integer forwards."""
    from moeq.integers.artifacts import integer_report

    report = integer_report.read_report(path.parent).model_dump(mode="json")
    return {"kind": "integer forward of a vision transformer, measured", **report["tasks"]}


def _folded_norms(path: Path) -> dict[str, Any]:
    from moeq.integers.artifacts import reparam

    report = reparam.read_reparam(path.parent)
    shown = report.model_dump(mode="json", exclude={"schema_version", "norms", "left", "float32", "stored"})
    return {
        "kind": "folded norms",
        **shown,
        "float32_error": report.float32.error,
        "stored_error": report.stored.error,
        "sequences_left_out": report.float32.left_out,
        "norms": [
            {"norm": norm.path, "mode": norm.mode, "weights": len(norm.consumers), "scale": norm.scale}
            for norm in report.norms
        ],
        "left": report.left,
    }


def _file(path: Path, reporter: Reporter) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        if path.name == TRACE or is_trace(path):
            return _trace(path)
        headers = read_header(path)
        return {"kind": "safetensors", "tensors": len(headers), "tensor_bytes": sum(h.bytes for h in headers.values())}
    if path.suffix == ".gguf":
        return gguf_file.described(path)
    if path.suffix == ".parquet":
        from moeq.artifacts import losses, sensitivities

        if path.name == sensitivities.NAME:
            table = sensitivities.read_sensitivities(path).table
            return {"kind": "table of sensitivities", "experts": table.num_rows, "columns": table.column_names}
        return {"kind": "loss table", **losses.summarize(losses.read_losses(path))}
    if path.suffix in {".yaml", ".yml"}:
        told = load_recipe(path).model_dump(mode="json", include={"name", "model", "assign"}, exclude_none=True)
        return {"kind": "recipe", **told}
    if path.name == MANIFEST:
        return check_checkpoint(path.parent, reporter)
    if path.name == INTEGER:
        return _integer(path.parent)
    if path.name == provenance.NAME:
        return provenance.described(path)
    if dynamic_log.is_log(path):
        return dynamic_log.described(dynamic_log.read_log(path))
    found = _json_file(path) if path.suffix == ".json" else None
    if found is not None:
        return found
    raise ArtifactError("not a file that moeq knows", where=str(path), do="give a checkpoint, a run or an artifact")


def _json_file(path: Path) -> dict[str, Any] | None:
    """Describe a JSON file by what it holds, or by its name; None for one that moeq does not know."""
    from moeq.artifacts import evaluation
    from moeq.integers.artifacts import integer_report, reparam

    data = read_json(path)
    if not isinstance(data, dict):
        return None
    if {"layers", "method"} <= set(data):
        return _assignment(path)
    if path.name == integer_report.NAME:
        return _integer_figures(path)
    if path.name == reparam.NAME:
        return _folded_norms(path)
    if path.name == evaluation.NAME:
        columns = {"name", "bits_per_weight", "code_bits", "expert_bytes", "perplexity", "accuracy"}
        rows = evaluation.read_eval(path).rows
        told = [row.model_dump(include=columns) | row.divergence_figures() | row.image_figures() for row in rows]
        return {"kind": "evaluation", "rows": told}
    if "kind" in data:
        from moeq.evaluation import result_file

        if data["kind"] == result_file.KIND:
            return result_file.summary(path)
    if "schema_version" in data:
        return {"kind": f"moeq {path.stem}", "file_schema_version": data["schema_version"], "keys": sorted(data)}
    return None


def _assignment(path: Path) -> dict[str, Any]:
    assignment = read_assignment(path)
    average, names = assignment.code_bits(), [layer.name for layer in assignment.layers]
    return {
        "kind": "assignment",
        "name": assignment.name,
        "method": assignment.method,
        "layers": len(assignment.layers),
        "code_bits": None if average is None else float(average),
        **_by_bits(list(chain.from_iterable(assignment.expert_widths()))),
        "loads_in": loads_in(assignment.expert_widths(), **vars(assignment.encoding), names=names),
    }
