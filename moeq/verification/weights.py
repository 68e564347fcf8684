"""A checkpoint's tensors beside those of what it was made of: nothing is loaded or run.

Read and compared expert by expert and parameter by parameter: a layer is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType

import torch
from torch import Tensor

from moeq.artifacts.assignment import MIXED
from moeq.artifacts.files import CHUNK_BYTES
from moeq.artifacts.tensor_files import torch_dtype
from moeq.exporters.foreign import OTHERS_FILE
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.packed_source import Matrices, PackedSource
from moeq.exporters.readers.foreign import Foreign, packed_others
from moeq.exporters.readers.gguf import Gguf
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.loading import skeleton, source_dtype
from moeq.models.non_experts import find_others
from moeq.models.parameters import ParameterReader
from moeq.models.single import ExpertReader
from moeq.models.source import ModelSource
from moeq.models.weights import plain_chunks, plain_header, plain_tensor
from moeq.numerics.matrix_error import UNRELATED, is_equal, is_recorded, most_error, relative_error, unlike_rows
from moeq.progress import Reporter
from moeq.verification.reference import values
from moeq_kernels.freed import return_memory
from moeq_kernels.packed import PackedWeight

STATED = 1e-6  # of an error that is written down as a float32
NEAR = 0.5  # of 3 bits and more, whose rows too are near their weights; those of 1 bit may not be
Errors = Mapping[str, float]  # {projection: relative error} as it is written down


@dataclass(kw_only=True)
class Weights:
    """What was found: problems, one line each; the relative errors of the experts' matrices; how many tensors beside
    them are equal, and the names of those that are not; recorded, unrecorded: packed matrices whose error is written
    down, and those of which it is not."""

    problems: list[str] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    equal: int = 0
    changed: list[str] = field(default_factory=list)
    recorded: int = 0
    unrecorded: int = 0

    def judge(self, where: str, matrix: PackedWeight | Tensor, exact: Tensor, stated: float | None) -> float:
        """Hold a matrix against the weights [N, K] that it was made of, and the error that is written down of it.

        A right one has that error. Whatever is written down, it is no further from them than a quantizer of its width
        comes; where nothing is, and the matrix as a whole is near them, no row is further than zeros are.
        """
        error = relative_error(matrix, exact)
        unlike = unlike_rows(matrix, exact) if stated is None and error < NEAR else []
        width, most = "unpacked", UNRELATED
        if isinstance(matrix, PackedWeight):
            most = most_error(exact, matrix)
            width = f"{matrix.bits} bits come within {most:.2g}"
            self.recorded += stated is not None
            self.unrecorded += stated is None
        if not error <= most or unlike:
            rows = f", the first such row is {unlike[0]}" if 0 < len(unlike) < len(exact) else ""
            self.problems.append(f"{where}: no rounding of these weights ({error:.2g} relative, {width}{rows})")
        elif stated is not None and not is_recorded(error, stated, exact.numel()):
            self.problems.append(
                f"{where}: its error is {error:.9g}, {stated:.9g} is written down: codes or scales changed"
            )
        return error


def differences(
    made_of: PackedSource, packed: PackedSource, reporter: Reporter, trust_remote_code: bool = False
) -> list[str]:
    """What of a checkpoint's values is not as in the packed one that it was made of, whose values it must have."""
    found = compare_packed(made_of, packed, reporter, trust_remote_code)
    return found.problems + [f"{key} is not as in {made_of.source.name}" for key in found.changed]


def compare_weights(source: ModelSource, packed: PackedSource, reporter: Reporter, trust_remote_code: bool) -> Weights:
    """Compare a checkpoint with the model that it was made of."""
    found = Weights()
    _experts(source, packed, found, reporter, trust_remote_code)
    reader = ParameterReader(source, trust_remote_code)
    stated = (
        {module.name: module.error for module in packed.manifest.others} if isinstance(packed, NativeReader) else {}
    )
    for name, read in packed_others(packed).items():
        exact = reader.read(f"{name}.weight")
        if exact is None:
            found.problems.append(f"{name}: {source.name} has no such weights")
        else:
            found.judge(name, read(), exact, stated.get(name))
    _tensors(source, packed, found, reader, trust_remote_code, _unpacked(source, packed, trust_remote_code))
    if found.recorded and found.unrecorded:
        found.problems.append(f"the errors of {found.unrecorded} matrices are not written down, those of others are")
    return found


def compare_packed(
    made_of: PackedSource, packed: PackedSource, reporter: Reporter, trust_remote_code: bool = False
) -> Weights:
    """Compare a checkpoint with a packed one, whose values every expert and packed module must have, or be as far from
    them as it says itself (GGUF with rounded scales)."""
    found = Weights()
    _equal_experts(made_of, packed, found, reporter)
    _equal_others(made_of, packed, found, trust_remote_code)
    _tensors(_plain(made_of), packed, found)  # without what stands guard over others, which is no weight
    return found


def _experts(source: ModelSource, packed: PackedSource, found: Weights, reporter: Reporter, trust: bool) -> None:
    """Every matrix of every replica, against the model's own."""
    reader = ExpertReader(source, skeleton(source, source_dtype(source), trust))
    with reporter.bar("weights", len(packed.layers)) as advance:
        for place, layer in enumerate(packed.layers):
            for expert in range(layer.num_experts):
                exact, biases = reader.read(layer, expert)
                if isinstance(packed, NativeReader) and packed.is_dropped(layer, expert):
                    found.errors += [1.0] * len(exact)
                for what, matrices, own, stated in _replicas(packed, layer, expert):
                    for projection, matrix in matrices.items():
                        said = f"{layer.name}, expert {expert}, {what}{projection}"
                        where = _where(packed, said, place, expert)
                        wanted = exact[projection].float()
                        error = found.judge(where, matrix, wanted, stated.get(projection))
                        found.errors += [] if what else [error]
                        dense = isinstance(packed, NativeReader) and isinstance(matrix, Tensor)
                        if dense and not is_equal(matrix, wanted, matrix.dtype):  # type: ignore[union-attr]
                            found.problems.append(f"{where}: 16 bits, and not as in {source.name}")
                    for projection, bias in own.items():
                        if not torch.equal(bias.float(), biases[projection].to(bias.dtype).float()):
                            where = _where(packed, f"{layer.name}, expert {expert}, {what}{projection}", place, expert)
                            found.problems.append(f"{where}: its bias is not as in {source.name}")
            return_memory()  # or gaps between what is read pile up, layer by layer
            advance()


def _replicas(
    packed: PackedSource, layer: ExpertLayer, expert: int
) -> Iterator[tuple[str, Matrices, dict[str, Tensor], Errors]]:
    """The placed replica of an expert, unless it is dropped, and all others: what each is called, its matrices, biases
    and stated errors."""
    if not isinstance(packed, NativeReader):
        yield ("", *packed.expert(layer, expert), {})
        return
    replicas = packed.replicas(layer, expert)
    if MIXED in replicas:
        yield ("", *packed.expert(layer, expert), replicas[MIXED].errors or {})
    for bits, replica in replicas.items():
        if not replica.placed:
            yield (f"{bits} bits, ", *packed.replica(layer, expert, bits), replica.errors or {})


def _equal_experts(other: PackedSource, packed: PackedSource, found: Weights, reporter: Reporter) -> None:
    """Every placed matrix against that of a packed checkpoint, rounded to the type of those that are not packed."""
    with reporter.bar("weights", len(packed.layers)) as advance:
        for place, layer in enumerate(packed.layers):
            for expert in range(layer.num_experts):
                theirs = other.expert(other.layers[place], expert)[0]
                for projection, matrix in packed.expert(layer, expert)[0].items():
                    wanted = _written(packed, theirs[projection])
                    if isinstance(matrix, Tensor):
                        wanted = values(wanted).to(matrix.dtype)
                    error = relative_error(matrix, wanted)
                    found.errors.append(error)
                    stated = packed.refit_error(layer, expert, projection) if isinstance(packed, Gguf) else None
                    if abs(error - (stated or 0.0)) > STATED * (stated or 0.0):
                        where = _where(packed, f"{layer.name}, expert {expert}, {projection}", place, expert)
                        more = f", {stated:.2g} is written down" if stated else ""
                        found.problems.append(f"{where}: its values differ by {error:.2g} relative{more}")
            return_memory()
            advance()


def _written(packed: PackedSource, matrix: PackedWeight | Tensor) -> PackedWeight | Tensor:
    """What a checkpoint must hold of a matrix that it was made of."""
    return packed.written(matrix) if isinstance(packed, Foreign) else matrix


def _equal_others(made_of: PackedSource, packed: PackedSource, found: Weights, trust_remote_code: bool) -> None:
    """Packed modules outside of the experts; where the checkpoint has them as plain tensors, rounded to their type."""
    theirs, mine = packed_others(made_of), packed_others(packed)
    for name, read in mine.items():
        if name not in theirs or not is_equal(read(), _written(packed, theirs[name]())):
            found.problems.append(f"{name}: its values differ")
    unpacked = [name for name in theirs if name not in mine and packed.source.read is None]
    if not unpacked:
        return
    plain = ParameterReader(_plain(packed), trust_remote_code)
    for name in unpacked:
        value, dtype = _read(plain, f"{name}.weight", packed)
        if value is None or not is_equal(value, theirs[name](), dtype):
            found.problems.append(f"{name}: its values differ")


def _read(mine: ParameterReader, name: str, packed: PackedSource) -> tuple[Tensor | None, torch.dtype]:
    """A parameter of a checkpoint, and the type that it has there; float32 where it is made of several."""
    dtypes = {packed.source.tensors[key].dtype for key in mine.keys(name)}
    return mine.read(name), torch_dtype(dtypes.pop()) if len(dtypes) == 1 else torch.float32


def _unpacked(source: ModelSource, packed: PackedSource, trust_remote_code: bool) -> dict[str, list[str]]:
    """The parameters beside the experts that `moeq convert` unpacked, as the name of their file says, and the tensors
    that each is made of: of modules that can be packed alone, among which are no routers."""
    keys = {key for key in packed.rest() if packed.source.tensors[key].file.name == OTHERS_FILE}
    if not keys:
        return {}
    model = skeleton(source, source_dtype(source), trust_remote_code)
    modules = find_others(model, find_expert_layers(model), source).modules
    reader = ParameterReader(_plain(packed), trust_remote_code)
    names = set(reader.made_of(keys)) & {module.weight for module in modules}
    return {name: reader.keys(name) for name in sorted(names)}


def _where(packed: PackedSource, what: str, layer: int, expert: int) -> str:
    return f"{what}, {packed.file_of(packed.layers[layer], expert)}" if isinstance(packed, Foreign) else what


def _tensors(
    source: ModelSource,
    packed: PackedSource,
    found: Weights,
    reader: ParameterReader | None = None,
    trust_remote_code: bool = False,
    unpacked: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Tensors beside experts and packed modules: those of the same name and type byte for byte; others, where a reader
    of the original is given, by the parameters that they make, rounded to the type that the checkpoint has.

    unpacked: parameters whose values were packed, and are judged as those of the experts are, with their tensors."""
    apart, rounded = set(), {key for keys in unpacked.values() for key in keys}
    for key in packed.rest():
        header = packed.source.tensors[key]
        if isinstance(packed, Gguf) and packed.is_changed(key) and key in source.tensors:
            same = packed.holds(key, plain_tensor(source, key))
            found.equal += same
            found.changed += [] if same else [key]
            continue
        theirs = plain_header(source, key) if key in source.tensors else None
        if theirs is None or theirs[0] != header.dtype:
            apart.add(key)
            continue
        chunks = zip_longest(*(_pieces(plain_chunks(each, key)) for each in (packed.source, source)))
        same = theirs[1] == header.shape and all(first == second for first, second in chunks)
        found.equal += same
        if not same:
            apart.add(key) if key in rounded else found.changed.append(key)
    if reader is None or not apart:
        return
    mine = ParameterReader(_plain(packed), trust_remote_code)
    for name in sorted(mine.made_of(apart)):
        (value, dtype), wanted = _read(mine, name, packed), reader.read(name)
        if value is None or wanted is None:
            found.changed.append(name)
        elif is_equal(value, wanted, dtype):
            found.equal += 1
        elif (packed.source.read is None and name not in unpacked) or value.dim() < 2:
            found.changed.append(name)
        else:  # of a file whose matrices are packed by its own types, or unpacked
            found.judge(name, value, wanted.to(dtype).float(), None)


def _plain(packed: PackedSource) -> ModelSource:
    """What is not packed of a checkpoint, as a model's source."""
    tensors = {key: packed.source.tensors[key] for key in packed.rest()}
    return replace(packed.source, config=packed.config, tensors=tensors)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, CHUNK_BYTES at a time, as they come from a file; a tensor that came whole is cut."""
    for chunk in chunks:
        yield from (chunk[start : start + CHUNK_BYTES] for start in range(0, len(chunk), CHUNK_BYTES))
