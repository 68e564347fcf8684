"""Which functions of moeq open or parse something, and which target, or what else, reaches each of them.

A function that calls one of PRIMITIVES, or whose name says that it reads, stands in BY_TARGET or ELSEWHERE; a new one
fails a test (test_fuzz.py) until it has its line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import moeq
import moeq_kernels

ROOTS = [Path(package.__file__).parent for package in (moeq, moeq_kernels) if package.__file__ is not None]
PRIMITIVES = {  # names of functions and methods that read files, text or standard input
    "read_json", "read_json_file", "read_bounded", "read_yaml", "parse_yaml", "parse_json", "parse_record",
    "safetensors_header", "read_header", "read_parquet", "read_gguf", "read_text", "read_bytes", "safe_open",
    "load_file", "fromfile", "frombuffer", "loads", "reader", "ParquetFile", "read_table", "mmap", "stdin",
    "CompressedInputStream", "pread", "model_validate_json", "parse_units", "read_model",
}  # fmt: skip
NAMED = re.compile(r"(read|parse)(_\w+)?")  # of functions that say that they read
BY_TARGET: dict[str, tuple[str, ...]] = {  # {function: targets that reach it}
    "moeq.artifacts.bench.read_bench": ("bench",),
    "moeq.artifacts.assignment.read_assignment": ("assignment", "inspected"),
    "moeq.artifacts.coactivation.CoactivationTable.follows": ("coactivation",),
    "moeq.artifacts.coactivation.read_coactivation": ("coactivation",),
    "moeq.artifacts.dynamic_log._line": ("dynamic_log",),
    "moeq.artifacts.dynamic_log.is_log": ("inspected",),
    "moeq.artifacts.dynamic_log.read_log": ("dynamic_log",),
    "moeq.artifacts.digests._read_shard": ("digest_cache",),
    "moeq.artifacts.effects.read_effects": ("effects",),
    "moeq.artifacts.evaluation.read_eval": ("evaluation",),
    "moeq.artifacts.expert_effects.read_effects": ("expert_effects",),
    "moeq.artifacts.expert_effects.read_measured": ("measured_experts",),
    "moeq.artifacts.files.read_json": ("record", "store_marker"),
    "moeq.artifacts.gates.read_gates": ("gates",),
    "moeq.artifacts.gguf_file.described": ("gguf",),
    "moeq.artifacts.gguf_file.read_gguf": ("gguf",),
    "moeq.artifacts.losses.read_losses": ("losses",),
    "moeq.artifacts.losses.read_parquet": ("losses", "sensitivities"),
    "moeq.artifacts.replica_store.is_marked": ("store_marker",),
    "moeq.artifacts.low_precision.read_sweeps": ("low_precision",),
    "moeq.artifacts.manifest.read_manifest": ("manifest",),
    "moeq.artifacts.non_experts.read_index": ("others_replicas",),
    "moeq.artifacts.non_experts.read_table": ("others",),
    "moeq.artifacts.profile.read_profile": ("profile", "profile_tensors"),
    "moeq.artifacts.provenance.read_provenance": ("provenance",),
    "moeq.artifacts.mirror.Mirror._read_list": ("mirror",),
    "moeq.artifacts.mirror.Mirror.record": ("mirrored_record",),
    "moeq.artifacts.status.parse_status": ("status",),
    "moeq.artifacts.reading.parse_json": ("record", "trace", "signature"),
    "moeq.artifacts.reading.parse_record": ("jsonl", "pairs_jsonl"),
    "moeq.artifacts.reading.read_json_file": ("record", "index", "results"),
    "moeq.artifacts.reading.safetensors_header": ("header",),
    "moeq.artifacts.replicas.LayerReplicas.expert": ("store",),
    "moeq.artifacts.replicas._entries": ("store",),
    "moeq.artifacts.replica_store._noted_run": ("store_note",),
    "moeq.artifacts.replicas._read_header": ("store",),
    "moeq.artifacts.replicas.read_index": ("replicas",),
    "moeq.artifacts.replicas.read_rows": ("loss_rows",),
    "moeq.artifacts.sealed.is_sealed": ("sensitivities",),
    "moeq.artifacts.sensitivities.read_sensitivities": ("sensitivities",),
    "moeq.artifacts.signature.read_signed": ("signature",),
    "moeq.artifacts.stage.read_model": ("assignment", "record"),
    "moeq.artifacts.stage.read_record": ("record",),
    "moeq.artifacts.sums._read_sums": ("sums",),
    "moeq.artifacts.trace._array": ("trace",),
    "moeq.artifacts.trace._read_header": ("trace",),
    "moeq.artifacts.trace.is_trace": ("trace",),
    "moeq.artifacts.trace.read_trace": ("trace",),
    "moeq.bounded.parse_yaml": ("yaml",),
    "moeq.bounded.read_bounded": ("recipe", "hardware", "measured"),
    "moeq.bounded.read_yaml": ("recipe",),
    "moeq.cli.checkpoints._standard_input": ("prompt",),
    "moeq.comparison.subjects._of_json": ("subject",),
    "moeq.estimation.grids.parse_grid": ("grid",),
    "moeq.estimation.grids.parse_replicas": ("replicas_option",),
    "moeq.estimation.kernels.parse_design": ("design_option",),
    "moeq.estimator.hardware._parse": ("hardware",),
    "moeq.estimator.hardware.load_hardware": ("hardware",),
    "moeq.estimator.measured.read_points": ("measured",),
    "moeq_kernels.measured._read": ("kernel_cache",),
    "moeq.estimator.units._by_pint": ("quantity",),
    "moeq.estimator.units.parse_quantity": ("quantity",),
    "moeq.evaluation.result_file.read_rows": ("results",),
    "moeq.evaluation.task_files._named": ("task_files",),
    "moeq.evaluation.translation._record": ("pairs_jsonl",),
    "moeq.evaluation.translation._rows": ("pairs_tsv", "pairs_jsonl"),
    "moeq.evaluation.translation._text": ("pairs_tsv",),
    "moeq.evaluation.translation.read_pairs": ("pairs_tsv", "pairs_jsonl"),
    "moeq.exporters.front_matter.read_origin": ("card",),
    "moeq.exporters.gguf_tokenizer._read": ("tokenizer", "tokenizer_config"),
    "moeq.exporters.gguf_tokenizer._template": ("chat_template",),
    "moeq.exporters.readers.awq._Interleaved.read": ("awq_file",),
    "moeq.exporters.readers.compressed.CompressedTensors.read": ("compressed_tensors_file", "compressed_floats_file"),
    "moeq.exporters.readers.exl3.Exl3.read": ("exl3_file",),
    "moeq.exporters.readers.gptq.Gptq.read": ("foreign_tensors",),
    "moeq.exporters.readers.humming.Humming.read": ("humming_file",),
    "moeq.exporters.readers.mlx.Mlx.read": ("mlx_file",),
    "moeq.exporters.readers.layout.Layout.read": ("foreign_tensors",),
    "moeq.exporters.readers.layout.read_back": (
        "foreign_tensors",
        "compressed_tensors_file",
        "humming_file",
        "mlx_file",
    ),
    "moeq.exporters.readers.w8a8.Int8Checkpoint.read": ("w8a8", "w8a8_file"),
    "moeq.inspection._file": ("inspected",),
    "moeq.inspection._json_file": ("inspected",),
    "moeq.integers.artifacts.integer.read_manifest": ("integer_manifest",),
    "moeq.integers.artifacts.integer_report.read_report": ("integer_report",),
    "moeq.integers.artifacts.reparam.read_reparam": ("reparam",),
    "moeq.integers.forward.saved._read": ("replay", "integer_weights"),
    "moeq.integers.forward.saved.read": ("replay", "integer_vectors"),
    "moeq.models.configuration.read_settings": ("config",),
    "moeq.models.corpus.hub_datasets._from_card": ("dataset_card",),
    "moeq.models.corpus.images.opened": ("picture",),
    "moeq.models.corpus.labelled.ImageTask.of": ("preprocessor",),
    "moeq.models.corpus.labelled._file": ("labelled_images",),
    "moeq.models.corpus.places._cut": ("part_of_text",),
    "moeq.models.corpus.rows._parquet_file": ("corpus_parquet",),
    "moeq.models.corpus.rows.rows": ("json_list", "jsonl", "corpus_parquet"),
    "moeq.models.corpus.sources._hub_dataset": ("dataset_card",),
    "moeq.models.corpus.streams.Bytes.__init__": ("text", "compressed"),
    "moeq.models.corpus.streams.read_text": ("json_list",),
    "moeq.models.source._read_headers": ("index",),
    "moeq.models.source._weight_map": ("index",),
    "moeq.models.source.read_config": ("config",),
    "moeq.models.source.read_header": ("header",),
    "moeq.recipe.earlier.read_earlier": ("recipe_of_run", "set"),
    "moeq.recipe.one_line.OneLine.parse": ("context_option", "dynamic_option"),
    "moeq.recipe.agreement._meant": ("set",),
    "moeq.recipe.reading._apply": ("set",),
    "moeq.recipe.reading._is_recorded": ("recipe_of_run",),
    "moeq.recipe.reading._read": ("recipe",),
    "moeq.recipe.reading.load_recipe": ("recipe", "preset", "set"),
    "moeq.recipe.reading.parse_recipe": ("yaml", "recipe"),
    "moeq.runtime.dynamic.options.DynamicOptions.parse": ("dynamic_option",),
    "moeq.stages.estimate.load": ("estimate",),
    "moeq.stages.quantize.read_made": ("quantizers",),
    "moeq.stages.refine.finished": ("refine_progress",),
}
HEADERS = "tensors of a file whose header was checked as it was opened: target header"
WRITTEN = "reads what the same command has just written, or holds open"
PACKAGE = "reads a file of the package"
STAGE = "tensors of a stage's own files, whose digests its record has: target record"
CHECKED = "tensors of a file whose SHA-256 was checked just before: target refine_progress"
SUMMED = "files of a checkpoint that was just checked against SHA256SUMS: target sums"
BYTES = "takes bytes, or whether they can be read, and makes nothing of them"
GGUF = "compares shapes with those of the family's model after target gguf has read the header (tests/exporters)"
OWN = "what processes of one run hand each other, in a folder and pipes of theirs alone (tests/engine)"
LOCK = "opens a file to lock it, and reads nothing of it"
MARKED = "compares JSON with what moeq writes there, and takes anything else for none (tests/stages/test_store.py)"
KEYS = "keys and certificates: read by the package cryptography (tests/test_signing.py)"
PROCESSOR = "targets picture, jsonl and corpus_parquet, then transformers' image processor"
SYSTEM = "reads what the kernel says of this machine"
PROGRAM = "what a program of the user's prints: any other shape is told in a line (tests/benching/test_peers.py)"
COMPILED = "compiled code in numba's own cache folders, as trusted as the package beside it (tests/kernels/cpu)"
NO_FILE = "reads no file: what it is given was read by others"
ELSEWHERE: dict[str, str] = {  # {function: why it has no target}
    "moeq_kernels.trellis_tables.table": "reads moeq's own constants",
    "moeq.artifacts.remote.Store._ask": WRITTEN,
    "moeq.artifacts.mirror.here": SYSTEM,
    "moeq.artifacts.status._status": SYSTEM,
    "moeq.artifacts.status.began": SYSTEM,
    "moeq.artifacts.status.read_status": "opens a file whose bytes parse_status reads: target status",
    "moeq.artifacts.remote.Store.read": BYTES,
    "moeq.artifacts.tensor_files.stored_chunks": HEADERS,
    "moeq.engine.arrays.Encoded.write": WRITTEN,
    "moeq.engine.arrays.decode": OWN,
    "moeq.engine.processes.ProcessEngine._take": OWN,
    "moeq.engine.spool.read": OWN,
    "moeq.engine.worker._done": OWN,
    "moeq.engine.worker._work": OWN,
    "moeq.models.remote_source.RemoteTensor.__getitem__": HEADERS,
    "moeq.models.remote_source.tensor_of": HEADERS,
    "moeq.scratch.remove_stale": LOCK,
    "moeq.exporters.native_reader.NativeReader._tensor": HEADERS,
    "moeq.exporters.native_replicas.CopyingReader._copied": HEADERS,
    "moeq.exporters.readers.blamed.BlamedLayout.read": "hands on to another package's layout, whose reading is its own",
    "moeq.exporters.readers.foreign.Foreign._tensor": HEADERS,
    "moeq.models.kinds.base.ReadsParts.read_expert": HEADERS,
    "moeq.models.parameters.ParameterReader.read": HEADERS,
    "moeq.models.kinds.base.ReadsParts.read_rows": HEADERS,
    "moeq.models.single.ExpertReader.read": HEADERS,
    "moeq.models.single.ExpertReader.read_expert": HEADERS,
    "moeq.models.single.ExpertReader.read_rows": HEADERS,
    "moeq.models.source._sampled": HEADERS,
    "moeq.models.streaming.StreamedModel.read_again": HEADERS,
    "moeq.models.weights.WeightReader._stored": HEADERS,
    "moeq.models.weights.WeightReader.read": HEADERS,
    "moeq.runtime.hf_quantizer._check_files": HEADERS,
    "moeq.verification.manifest_files.check_native": HEADERS,
    "moeq.artifacts.files.building": WRITTEN,
    "moeq.artifacts.files.copy_file": WRITTEN,
    "moeq.artifacts.files.read_back": WRITTEN,
    "moeq.artifacts.files.sync": WRITTEN,
    "moeq.artifacts.sealed.seal": WRITTEN,
    "moeq.evaluation.reference_logits.ReferenceLogits.read": WRITTEN,
    "moeq.evaluation.reference_logits.ReferenceLogits.again": WRITTEN,
    "moeq.exporters.gguf_writer.Writer._header": WRITTEN,
    "moeq.exporters.native_conversion.write": WRITTEN,
    "moeq.exporters.native_writer.export": WRITTEN,
    "moeq.exporters.plain.write_index": WRITTEN,
    "moeq.models.corpus.sequences.Pool.__init__": WRITTEN,
    "moeq.pipeline._put_back": WRITTEN,
    "moeq.pipeline._recipe_written": WRITTEN,
    "moeq.planning.probe._reading": WRITTEN,
    "moeq.signing._check_canonical": WRITTEN,
    "moeq.stages.export.write_card": WRITTEN,
    "moeq.stages.report.collect": WRITTEN,
    "moeq.verification.launch.answer": WRITTEN,
    "moeq.verification.probe.main": WRITTEN,
    "moeq.verification.probe.sglang_logits": WRITTEN,
    "moeq.stages.as_quantized.AsQuantized._open": STAGE,
    "moeq.stages.refine.read": STAGE,
    "moeq.stages.tune.StateFiles.read": CHECKED,
    "moeq.stages.refine.read_trained": STAGE,
    "moeq.publishing._card": SUMMED,
    "moeq.publishing._contents": SUMMED,
    "moeq.publishing._sent": SUMMED,
    "moeq.publishing._signed": SUMMED,
    "moeq.bundled.continuation_dataset.load": PACKAGE,
    "moeq.cli.recipes._recipe_text": PACKAGE,
    "moeq.estimator.geometry._written": PACKAGE,
    "moeq.estimator.sheets.printed": PACKAGE,
    "moeq.models.corpus.labelled._digits": PACKAGE,
    "moeq.models.support.dense_types": PACKAGE,
    "moeq.models.support.families": PACKAGE,
    "moeq.recipe.editing.with_values": PACKAGE,
    "moeq.registry.Registry.own": PACKAGE,
    "moeq.stages.text_sizes.tasks": PACKAGE,
    "moeq.planning.machine._cgroup_room": SYSTEM,
    "moeq.planning.machine._file_cache": SYSTEM,
    "moeq.planning.machine.available_ram": SYSTEM,
    "moeq.benching.bandwidth.last_cache_bytes": SYSTEM,
    "moeq.benching.bandwidth.read_bandwidth": SYSTEM,
    "moeq.benching.measure._processor": SYSTEM,
    "moeq.models.corpus.documents._check_room": SYSTEM,
    "moeq_kernels.measured.cpu_model": SYSTEM,
    "moeq.verification.probe._flags": SYSTEM,
    "moeq_kernels.cpu.kept_code._Files.load": COMPILED,
    "moeq_kernels.cpu.kept_code._source": PACKAGE,
    "moeq_kernels.gpu.settings.tuned": PACKAGE,
    "moeq.benching.subject.memory": SYSTEM,
    "moeq.benching.llama_bench.llama_bench": PROGRAM,
    "moeq.artifacts.replicas.LayerReplicas.is_sound.read": NO_FILE,
    "moeq.assigners.limits.widths_within": NO_FILE,
    "moeq.assigners.report._none_of": NO_FILE,
    "moeq.assigners.report._price": NO_FILE,
    "moeq.cli.ending._drop": NO_FILE,
    "moeq.cli.usage.Command.parse_args": NO_FILE,
    "moeq.comparison.side_by_side._measure": NO_FILE,
    "moeq.estimation.kernels.read_vision": NO_FILE,
    "moeq.estimation.questions._subject": NO_FILE,
    "moeq.estimation.subject.read_model": NO_FILE,
    "moeq.estimation.subject.read_placed": NO_FILE,
    "moeq.evaluation.strided.read_text": NO_FILE,
    "moeq.exporters.exporter.read_by": NO_FILE,
    "moeq.models.corpus.streams.shown.read": NO_FILE,
    "moeq.recipe.choices._named.read": NO_FILE,
    "moeq.numerics.panels._solve.read": NO_FILE,
    "moeq.stages.non_experts.table": NO_FILE,
    "moeq.artifacts.bench.manifest_digest": BYTES,
    "moeq.artifacts.digests.digest_of_file": BYTES,
    "moeq.evaluation.harness._check_files": BYTES,
    "moeq.models.loading._damaged_json": BYTES,
    "moeq.stages.report.is_intact": BYTES,
    "moeq.stages.report.own_inputs": BYTES,
    "moeq.exporters.readers.described.gguf_headers": GGUF,
    "moeq.exporters.readers.gguf.Gguf._bytes": GGUF,
    "moeq.exporters.readers.gguf.Gguf.read": GGUF,
    "moeq.artifacts.files._open_lock": LOCK,
    "moeq.preflight._check_kind": MARKED,
    "moeq.reproduction.again._run_directory": MARKED,
    "moeq.reproduction.differences._tensor": HEADERS,
    "moeq.reproduction.differences._within": HEADERS,
    "moeq.signing._certified": KEYS,
    "moeq.signing._passphrase": KEYS,
    "moeq.signing.sign": KEYS,
    "moeq.models.corpus.image_files.ImageFiles.read": PROCESSOR,
}


def found() -> Iterator[str]:
    """The functions of moeq that call one of PRIMITIVES, or open a file to read it, by their dotted names."""
    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            module = ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
            yield from _of(ast.parse(path.read_text("utf-8")), module)


def _of(tree: ast.AST, name: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inner = f"{name}.{node.name}"
            named = NAMED.fullmatch(node.name) is not None
            if isinstance(node, ast.FunctionDef) and (named or any(map(_reads, ast.walk(node)))):
                yield inner
            else:
                yield from _of(node, inner)
        else:
            yield from _of(node, name)


def _reads(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "stdin":
        return True
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called != "open":
        return called in PRIMITIVES
    modes = [one.value for one in (*node.args, *(key.value for key in node.keywords)) if isinstance(one, ast.Constant)]
    return not any(isinstance(mode, str) and set(mode) & set("wax") and set(mode) <= set("wax+bt") for mode in modes)
