"""How far a checkpoint is from the model that it was made of, and what must be equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from moeq.artifacts.files import CHUNK_BYTES
from moeq.artifacts.tensor_files import stored_chunks
from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers import PLAIN, format_of, open_packed
from moeq.exporters.readers.foreign import Foreign
from moeq.models.declared import is_dequantized
from moeq.models.loading import load_config, skeleton
from moeq.models.single import ExpertReader
from moeq.models.source import ModelSource, open_source
from moeq.models.streaming import StreamedModel
from moeq.numerics.divergence import kl_divergence
from moeq.numerics.slab import return_memory
from moeq.progress import Reporter
from moeq.verification.reference import packed_others, relative, streamed, values

UNLIKE = 1.0  # relative error of a matrix beyond which it is no rounding of the original: 1 bit stays below 0.7


@dataclass(frozen=True, kw_only=True)
class Distance:
    """kl: of the next token's probabilities, nats a token; logits_error: relative; weights_error: mean relative error
    of the experts' matrices; equal, changed: tensors that are not packed, and problems: what must not be."""

    model: str
    kl: float
    logits_error: float
    weights_error: float
    equal: int
    changed: tuple[str, ...]
    problems: tuple[str, ...]


def compare_with(
    name: str,
    packed: PackedSource,
    inputs: dict[str, Tensor],
    logits: Tensor,
    reporter: Reporter,
    trust_remote_code: bool,
) -> Distance:
    """Compare a checkpoint, and the logits of its runtime, with a model, or with a packed checkpoint of it.

    Of a packed checkpoint every expert's values must be equal (rounded to the type of those that are not packed), of a
    model they must be roundings of its matrices.
    """
    source = open_source(name)
    exact = format_of(source) != PLAIN and not is_dequantized(source)
    other = open_packed(source.path, trust_remote_code=trust_remote_code, as_values=True) if exact else None
    model = _model(source, other, trust_remote_code)
    with torch.no_grad():
        wanted = model.model(**inputs, use_cache=False).logits.float()
    del model
    problems, errors = _experts(source, packed, other, reporter, trust_remote_code)
    equal, changed = _tensors(source, packed)
    problems += [f"{key} is not as in {source.name}" for key in changed]
    return Distance(
        model=source.name,
        kl=float(kl_divergence(*(part.double().log_softmax(-1) for part in (wanted, logits))).mean()),
        logits_error=relative(logits, wanted),
        weights_error=sum(errors) / max(len(errors), 1),
        equal=equal,
        changed=tuple(changed),
        problems=tuple(problems),
    )


def differences(made_of: PackedSource, packed: PackedSource, reporter: Reporter) -> list[str]:
    """What of a checkpoint's values is not as in what it was made of; nothing is loaded or run.

    Read and compared expert by expert: a layer is never in memory.
    """
    problems, _ = _experts(made_of.source, packed, made_of, reporter, False)
    theirs = packed_others(made_of)
    for name, read in packed_others(packed).items():
        if name not in theirs or not torch.equal(values(read()), values(theirs[name]())):
            problems.append(f"{name}: its values differ")
    return problems + [f"{key} is not as in {made_of.source.name}" for key in _tensors(made_of.source, packed)[1]]


def first_of(problems: Sequence[str]) -> str:
    """The first problem, and how many more there are."""
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def _model(source: ModelSource, other: PackedSource | None, trust: bool) -> StreamedModel:
    if other is not None:
        return streamed(other, torch.float32, trust)
    load_config(source, trust)
    return StreamedModel(source, torch.float32, torch.device("cpu"), trust)


def _experts(
    source: ModelSource, packed: PackedSource, other: PackedSource | None, reporter: Reporter, trust: bool
) -> tuple[list[str], list[float]]:
    """Matrices that are not what they should be, and the relative error of all."""
    reader = ExpertReader(source, skeleton(source, torch.float32, trust)) if other is None else None
    problems: list[str] = []
    errors: list[float] = []
    with reporter.bar("weights", len(packed.layers)) as advance:
        for place, layer in enumerate(packed.layers):
            for expert in range(layer.num_experts):
                matrices = packed.expert(layer, expert)[0]
                if reader is not None:
                    exact = reader.read(layer, expert)[0]
                else:
                    assert other is not None
                    theirs = other.expert(other.layers[place], expert)[0]
                    exact = {name: values(matrix) for name, matrix in theirs.items()}
                for projection, matrix in matrices.items():
                    wanted = exact[projection].float()
                    if other is not None and isinstance(matrix, Tensor):
                        wanted = wanted.to(matrix.dtype).float()
                    errors.append(float((values(matrix) - wanted).norm() / wanted.norm().clamp(min=1e-30)))
                    where = _where(packed, f"{layer.name}, expert {expert}, {projection}", place, expert)
                    if other is not None and errors[-1] > 0:
                        problems.append(f"{where}: its values differ by {errors[-1]:.2g} relative")
                    elif not errors[-1] <= UNLIKE:
                        problems.append(f"{where}: no rounding of this expert's weights ({errors[-1]:.2g} relative)")
            return_memory()  # or gaps between what is read pile up, layer by layer
            advance()
    return problems, errors


def _chunks(source: ModelSource, key: str) -> Iterator[bytes]:
    """The bytes of a tensor as it is stored, or as its source reads it, a few megabytes at a time."""
    if source.read is None:
        yield from stored_chunks(source.tensors[key])
        return
    data = source.read(key).contiguous().reshape(-1).view(torch.uint8)
    yield from (part.numpy().tobytes() for part in data.split(CHUNK_BYTES))


def _where(packed: PackedSource, what: str, layer: int, expert: int) -> str:
    return f"{what}, {packed.file_of(packed.layers[layer], expert)}" if isinstance(packed, Foreign) else what


def _tensors(source: ModelSource, packed: PackedSource) -> tuple[int, list[str]]:
    """How many tensors beside the experts are equal byte for byte, and those of the same type that are not.

    Tensors that one of the two lacks, or has in another type, are left out.
    """
    equal, changed = 0, []
    for key in packed.rest():
        header, theirs = packed.source.tensors[key], source.tensors.get(key)
        if theirs is None or header.dtype != theirs.dtype:
            continue
        same = header.shape == theirs.shape and all(
            first == second for first, second in zip_longest(_chunks(packed.source, key), _chunks(source, key))
        )
        equal += same
        if not same:
            changed.append(key)
    return equal, changed
