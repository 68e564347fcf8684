"""Does a checkpoint load right? Its files, its loader's complaints, every layer's outputs and the logits.

The target's own loader runs in a fresh process and records what the experts of every layer were given and gave back.
The same inputs then run through the dequantized weights, layer by layer, so that errors do not add up: those of what
the checkpoint was made of, where that is known, whose values it must hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.provenance import check_listed, words
from moeq.artifacts.sums import SIGNATURE
from moeq.artifacts.tensor_files import torch_dtype
from moeq.errors import EvaluationError, RecipeError, missing
from moeq.exporters.exporter import TRANSFORMERS, loaders
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.packed_source import Checkable, PackedSource
from moeq.exporters.readers import PLAIN, format_of, open_packed
from moeq.exporters.readers.foreign import Foreign
from moeq.models.experts import ExpertLayer
from moeq.models.forward import drawn_inputs
from moeq.models.loading import skeleton
from moeq.models.source import ModelSource
from moeq.models.streaming import StreamedModel
from moeq.progress import Reporter
from moeq.runtimes import NATIVE, named, of_method
from moeq.verification import launch
from moeq.verification.against import Distance, check_alike, compare_with, first_of
from moeq.verification.logits import compare_logits
from moeq.verification.manifest_files import check_native
from moeq.verification.reference import after_experts, relative, run_alone, run_recorded, streamed
from moeq.verification.routing import Routing
from moeq.verification.weights import differences

TOLERANCE = {"float32": 2e-3, "float16": 1e-2, "bfloat16": 3e-2}  # of a layer's outputs, relative
LOGITS_FACTOR = {"float32": 1, "float16": 3, "bfloat16": 3}  # errors of all layers, in types that round
BATCH, LENGTH, ROWS = 2, 24, 4
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Options:
    """target: None takes the one that the format is for; python: the target's interpreter, None: this one; signature:
    what was found of it before, None: it was not looked at."""

    target: str | None = None
    python: str | None = None
    against: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False
    signature: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerCheck:
    """One MoE layer. error: of its outputs, relative; None where it was not compared, for the reason in `how`.

    expert_errors: of every expert alone, [E]; None where experts cannot be run one by one.
    """

    name: str
    how: str
    error: float | None
    expert_errors: tuple[float, ...] | None = None

    @property
    def worst(self) -> float:
        return max(self.error or 0.0, *(self.expert_errors or (0.0,)))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found; problems: one line each, empty when the checkpoint loads right.

    provenance: what it names; signature: whose is right, None where there is none; both in words. logits_error, kl,
    most_kl: see `logits.Logits`; ties: choices of routers that were the other of two equals.
    """

    checkpoint: str
    format: str
    target: str
    dtype: str
    tolerance: float
    versions: dict[str, str]
    files: str
    provenance: str
    signature: str | None
    loading: dict[str, list[str]] | None
    layers: tuple[LayerCheck, ...]
    logits_error: float
    kl: float
    most_kl: float
    ties: int
    distance: Distance | None = None
    problems: tuple[str, ...] = ()

    @property
    def rounds(self) -> bool:
        """Whether the target rounds activations, and the error of the logits is that of the median position."""
        return loaders()[self.target].rounding is not None

    def as_json(self) -> dict[str, Any]:
        """For --json: figures that are not finite are null."""
        figures = vars(self) | {
            "layers": [vars(layer) | {"worst": layer.worst} for layer in self.layers],
            "distance": None if self.distance is None else vars(self.distance),
            "right": not self.problems,
        }
        return _finite(figures)  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verify(path: Path, options: Options, reporter: Reporter, made_of: PackedSource | None = None) -> Verdict:
    """Check one checkpoint; what is wrong with how it loads stands in the verdict.

    made_of: what its values must be, and those of the reference; None: it is compared with itself. Raises ArtifactError
    for damaged files, RecipeError for a target that is not installed, EvaluationError where the target cannot load it
    at all.
    """
    if not path.exists():
        raise missing(path, "give a checkpoint's directory")
    packed = open_packed(path, trust_remote_code=options.trust_remote_code, as_values=True)
    if options.against is not None:
        check_alike(options.against, packed, options.trust_remote_code)
    method = format_of(packed.source)
    request = _request(path, packed, method, options)
    with launch.started(request, options.python) as process:
        files, provenance = _check_files(path, packed, reporter)
        stored = None if made_of is None else _stored_as(packed)
        reference = streamed(made_of or packed, torch.float32, options.trust_remote_code, stored)
        reporter.say(f"  loading with {request.target} in a process of its own")
        answer = launch.answer(process, request)
        rounding = loaders()[request.target].rounding
        tolerance = TOLERANCE[options.dtype] if rounding is None else rounding
        given = request.inputs.get("input_ids", next(iter(request.inputs.values())))
        routing = Routing(reference, packed.layers, answer, given, tolerance)
        layers, wanted = _compare(reference, packed, answer, request, reporter)
        routing.finish()
        logits = answer.logits()
    if loaders()[request.target].normalized:
        logits = as_logits(logits, wanted)
    found = compare_logits(logits, wanted, routing.clean, tolerance * _factor(request.target, options.dtype))
    distance = None
    if options.against is not None:
        inputs = dict(request.inputs)
        distance = compare_with(options.against, packed, inputs, logits, reporter, options.trust_remote_code)
    differing = () if made_of is None else differences(made_of, packed, reporter, options.trust_remote_code)
    verdict = Verdict(
        checkpoint=str(path),
        format=method,
        target=request.target,
        dtype=options.dtype,
        tolerance=tolerance,
        versions=answer.versions,
        files=files,
        provenance=provenance,
        signature=_signature(path, options),
        loading=answer.loading,
        layers=layers,
        logits_error=found.error,
        kl=found.kl,
        most_kl=found.most,
        ties=routing.ties,
        distance=distance,
    )
    return replace(verdict, problems=(*differing, *_problems(packed, verdict, routing.wrong)))


def _stored_as(packed: PackedSource) -> torch.dtype | None:
    """The type in which a checkpoint stores its experts' values; None for one that packs some."""
    if not packed.layers:
        return None
    matrices = list(packed.expert(packed.layers[0], 0)[0].values())
    plain = [matrix.dtype for matrix in matrices if isinstance(matrix, Tensor)]
    return plain[0] if len(plain) == len(matrices) and format_of(packed.source) == PLAIN else None


def require(verdict: Verdict) -> None:
    """EvaluationError with the first problem, where there is one."""
    if verdict.problems:
        raise error_of(verdict)


def error_of(verdict: Verdict) -> EvaluationError:
    """The problems of a verdict as one line."""
    return EvaluationError(
        first_of(verdict.problems),
        where=f"{verdict.checkpoint}, target {verdict.target}",
        do="do not use it with this target; `moeq verify --json` lists everything",
    )


def resident_bytes(packed: PackedSource) -> int:
    """About what the target's process takes: packed tensors as they are, all others in float32."""
    tensors = packed.source.tensors
    whole: int = sum(tensors[key].bytes // torch_dtype(tensors[key].dtype).itemsize for key in packed.rest())
    return sum(header.bytes for header in tensors.values()) + 4 * whole


def as_logits(normalized: Tensor, wanted: Tensor) -> Tensor:
    """Logarithms of probabilities [..., V] as logits: the constant that each position lacks is the wanted ones'."""
    return normalized - (normalized.mean(-1, keepdim=True) - wanted.mean(-1, keepdim=True))


def _request(path: Path, packed: PackedSource, method: str, options: Options) -> launch.Request:
    exporter, known = of_method(method), loaders()
    usual = TRANSFORMERS if exporter is None else exporter.usual(packed)
    model = skeleton_of(packed, options.trust_remote_code)
    if usual == TRANSFORMERS and type(model).__module__.startswith("moeq."):
        usual = known[NATIVE]  # which brings the model
    loader = usual if options.target is None else known[named(options.target, known, "--target")]
    if options.dtype not in TOLERANCE:
        raise RecipeError(f"no such type {options.dtype!r}", where="--dtype", do=f"use {', '.join(TOLERANCE)}")
    if loader.load is None:
        what, do = f"moeq cannot run {loader.name} itself", f"load it there, with {loader.name}'s own command"
        raise launch.NotInstalledError(what, do=do)
    needs = {} if exporter is None or loader.logits_only else exporter.needs
    return launch.Request(
        checkpoint=path,
        target=loader.name,
        packages={**loader.packages, **needs},
        load=loader.load,
        environment=loader.environment,
        logits_only=loader.logits_only,
        loading={} if exporter is None else exporter.loading,
        method=method,
        architecture=type(model).__name__,
        dtype=options.dtype,
        stored=stored_type(packed.source, packed.rest()),
        inputs=drawn_inputs(model, BATCH, LENGTH, SEED),
        layers={layer.name: layer.num_experts for layer in packed.layers},
        hidden={layer.name: layer.hidden_size for layer in packed.layers},
        rows=ROWS,
        trust_remote_code=options.trust_remote_code,
    )


def skeleton_of(packed: PackedSource, trust_remote_code: bool) -> Any:
    """The structure of the model, without weights."""
    return skeleton(replace(packed.source, config=packed.config), trust_remote_code=trust_remote_code)


def stored_type(source: ModelSource, keys: list[str]) -> str:
    """The type of most weights among these tensors, as torch calls it."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    sizes = dict.fromkeys(names, 0)
    for key in keys:
        header = source.tensors[key]
        if header.dtype in sizes:
            sizes[header.dtype] += header.bytes
    return names[max(sizes, key=lambda name: sizes[name])]


def _signature(path: Path, options: Options) -> str | None:
    """What is known of a checkpoint's signature; None where it has none."""
    there = path.is_dir() and (path / SIGNATURE).exists()
    return options.signature or (f"{SIGNATURE} was not looked at: give --signature and a key" if there else None)


def _check_files(path: Path, packed: PackedSource, reporter: Reporter) -> tuple[str, str]:
    """What the files were compared with, and what the provenance names."""
    if isinstance(packed, Checkable):
        packed.check()
        shapes = "every tensor has the shape and type that config.json says"
        sums, statement = check_listed(path, reporter)
        return f"{shapes}; {'there are no digests' if sums is None else sums.text}", words(statement)
    manifest = packed.manifest if isinstance(packed, NativeReader) else None
    checked = check_native(path, reporter, manifest)
    return f"every size, sum and SHA-256 equals the manifest; {checked.covered}", checked.provenance


def _compare(
    reference: StreamedModel,
    packed: PackedSource,
    answer: launch.Answer,
    request: launch.Request,
    reporter: Reporter,
) -> tuple[tuple[LayerCheck, ...], Tensor]:
    """Every layer against the reference, and the reference's logits: one pass over the checkpoint."""
    checks: dict[str, LayerCheck] = {}
    with reporter.bar("comparing", len(packed.layers)) as advance, torch.no_grad():

        def see(layer: ExpertLayer) -> None:
            checks[layer.name] = _layer(reference.model, layer, answer.layer(layer.name))
            advance()

        after_experts(reference, packed.layers, see)
        logits = reference.model(**request.inputs, use_cache=False).logits.float()
    absent = LayerCheck(name="", how="the reference did not run it", error=None)
    return tuple(checks.get(layer.name, absent) for layer in packed.layers), logits


def _layer(model: nn.Module, layer: ExpertLayer, recorded: dict[str, Tensor]) -> LayerCheck:
    if "output" not in recorded:
        return LayerCheck(name=layer.name, how="its experts are not called alone; only the logits say", error=None)
    given = {name: part.float() if part.is_floating_point() else part for name, part in recorded.items()}
    error = relative(given["output"], run_recorded(model, layer, given))
    alone: tuple[float, ...] | None = None
    if "alone" in given and layer.kind.name == "stacked":
        top_k = given["call.1"].shape[1] if "call.1" in given else 2
        wanted = run_alone(model, layer, given["rows"], top_k)
        alone = tuple(relative(*pair) for pair in zip(given["alone"], wanted, strict=True))
    how = "block" if "block.0" in recorded else "experts"
    return LayerCheck(name=layer.name, how=how, error=error, expert_errors=alone)


def _factor(target: str, dtype: str) -> float:
    """How much larger errors of logits may be than those of a layer."""
    return 1 if loaders()[target].rounding is not None else LOGITS_FACTOR[dtype]


def _problems(packed: PackedSource, verdict: Verdict, routing: list[str]) -> list[str]:
    """All that is wrong: what the loader says, then layers, the worst first, then routers and the logits."""
    complaints = (verdict.loading or {}).items()
    problems = [f"{len(keys)} {what.replace('_', ' ')}, the first: {keys[0]}" for what, keys in complaints if keys]
    worst_first = sorted(verdict.layers, key=lambda check: -check.worst)
    wrong = [check for check in worst_first if check.error is not None and check.worst > verdict.tolerance]
    problems += [_wrong_layer(packed, check, verdict.tolerance) for check in wrong]
    problems += routing
    off = f"logits are off the dequantized weights' by {verdict.logits_error:.2g} relative"
    if verdict.logits_error > verdict.tolerance * _factor(verdict.target, verdict.dtype):
        problems.append(off)
    elif verdict.kl > verdict.most_kl:
        problems.append(f"{off}, their probabilities by {verdict.kl:.2g} nats a token (at most {verdict.most_kl:.2g})")
    return [*problems, *(verdict.distance.problems if verdict.distance is not None else ())]


def _wrong_layer(packed: PackedSource, check: LayerCheck, tolerance: float) -> str:
    """One line for a layer that is off: its worst expert, and where that lies."""
    errors = check.expert_errors or ()
    wrong = [number for number, error in enumerate(errors) if error > tolerance]
    if not wrong:
        return f"{check.name}: its outputs are off by {check.error:.2g} relative"
    worst = max(wrong, key=lambda number: errors[number])
    layer = next(layer for layer in packed.layers if layer.name == check.name)
    file = f", {packed.file_of(layer, worst)}" if isinstance(packed, Foreign) else ""
    return (
        f"{check.name}, expert {worst}{file}: off by {errors[worst]:.2g} relative ({len(wrong)} of its experts are off)"
    )
