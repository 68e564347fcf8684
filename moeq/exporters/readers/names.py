"""Which expert's matrix a tensor on disk is, whoever named it.

Packed matrices are looked up as if each were one tensor, `MODULE.weight`: transformers' own rules for the family then
say which parameter it becomes. Peers write experts under other names than the family's own (Mixtral's w1, w3 and w2 as
gate_proj, up_proj and down_proj, or the other way round); where the rules know no such name, the other is tried.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moeq.errors import ArtifactError
from moeq.models.declared import quantization_of
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer
from moeq.models.loading import tied
from moeq.models.messages import damaged
from moeq.models.source import ModelSource, TensorHeader
from moeq.models.weights import WeightReader

WEIGHT = ".weight"
PROJECTIONS = {
    "gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
}  # fmt: skip
_OTHER_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
OTHER_NAMES = _OTHER_NAMES | {short: long for long, short in _OTHER_NAMES.items()}
_EXPERT = re.compile(r"\.(\d+)\.([^.]+)\.weight$")
_OF_EXPERT = re.compile(r"\.(\d+)\.([^.]+)\.(?:weight|bias)$")

Place = tuple[int, int, str]  # layer, expert, projection


@dataclass(kw_only=True)
class Names:
    """What every weight on disk is. `experts`: by place; `whole`: experts in stacks, by layer; `others`: in memory;
    `apart`: parameters in memory of which the disk has experts one by one, though the family's own rules know no such;
    `biases`: of these experts, by place.

    All are keys of weights: `MODULE.weight` of packed ones. reader: the index by the family's own rules.
    """

    reader: WeightReader
    renamed: dict[str, str]  # key that the rules know -> key on disk
    experts: dict[Place, str] = field(default_factory=dict)
    stacked: dict[int, list[str]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    apart: set[str] = field(default_factory=set)
    biases: dict[Place, str] = field(default_factory=dict)

    def check(self, path: Path, but: Collection[str] = ()) -> None:
        """ModelError for tensors of no part of the model, for parts that have none, and for one of another shape."""
        reader = self.reader
        reader.check_unexpected(but)
        there, ties, state = {*reader.origins, *self.apart}, tied(reader.model), reader.model.state_dict()
        reader.check_missing(name for name in reader.names - there if there.isdisjoint(ties.get(name, ())))
        for name, (origin, *more) in reader.origins.items():
            header, wanted = reader.source.tensors[origin.key], tuple(state[name].shape)
            if header is not _STAND_IN and origin.pattern is None and not more and header.shape != wanted:
                raise damaged(path, f"{self.renamed[origin.key]} is {list(header.shape)}, not {list(wanted)}")


def sort_names(
    source: ModelSource, modules: Iterable[str], parts: set[str], model: Any, layers: list[ExpertLayer]
) -> Names:
    """Sort the tensors of a checkpoint; modules: packed matrices, whose tensors on disk are `parts`.

    Raises ArtifactError for a packed matrix that is no part of the model, or that is one of a stack on disk.
    """
    weights = {f"{module}{WEIGHT}" for module in modules}
    whole = {key: header for key, header in source.tensors.items() if key not in parts}
    headers = whole | dict.fromkeys(sorted(weights), _STAND_IN)
    reader, renamed = _index(source, headers, model)
    names = Names(reader=reader, renamed=renamed)
    by_parameter = {f"{layer.name}.{part}": layer for layer in layers for part in layer.parameters}
    for parameter, origins in reader.origins.items():
        layer = by_parameter.get(parameter)
        most = 0 if layer is None else max(layer.num_experts, _experts_held(model, parameter))
        for origin in origins:
            key = renamed[origin.key]
            if layer is not None:
                _take(names, source, layer, origin.key, key, packed=key in weights, most=most)
            elif key in weights:
                if origin.pattern is not None:
                    raise _refused(source, key, "it is packed, and a part of one matrix in memory")
                names.others[parameter.removesuffix(WEIGHT)] = key
    _take_apart(names, source, layers)
    lost = [renamed[key] for key in reader.unexpected if renamed[key] in weights]
    if lost:
        raise _refused(source, sorted(lost)[0], f"{len(lost)} packed matrices are no part of the model")
    return names


STACKED = 3  # dimensions of a parameter of all experts
_STAND_IN = TensorHeader(file=None, dtype="BF16", shape=(), offset=0, bytes=0)  # type: ignore[arg-type]


def _index(source: ModelSource, headers: dict[str, TensorHeader], model: Any) -> tuple[WeightReader, dict[str, str]]:
    """The family's index, and what each of its keys is called on disk."""
    renamed = {key: key for key in headers}
    reader = _reader(source, headers, model)
    for key in reader.unexpected:
        other = _other_name(key)
        if other is not None and other not in headers:
            del renamed[key]
            renamed[other] = key
    if all(key == own for key, own in renamed.items()):
        return reader, renamed
    return _reader(source, {key: headers[own] for key, own in renamed.items()}, model), renamed


def _reader(source: ModelSource, headers: dict[str, TensorHeader], model: Any) -> WeightReader:
    return WeightReader(replace(source, tensors=headers), model, torch.float32, torch.device("cpu"))


def _other_name(key: str) -> str | None:
    parts = _EXPERT.search(key)
    if parts is None or parts[2] not in OTHER_NAMES:
        return None
    return f"{key[: parts.start(2)]}{OTHER_NAMES[parts[2]]}{WEIGHT}"


def _experts_held(model: Any, parameter: str) -> int:
    """How many experts a parameter of all of them holds, LongCat's first matrices those of zero ones, too; else 0."""
    shape = model.get_parameter(parameter).shape
    return int(shape[0]) if len(shape) == STACKED else 0


def _take(
    names: Names, source: ModelSource, layer: ExpertLayer, known: str, key: str, *, packed: bool, most: int
) -> None:
    """Note a tensor of a layer's experts, of which there are so many at most."""
    parts = _EXPERT.search(known)
    if parts is None or parts[2] not in PROJECTIONS:
        if packed:
            raise _refused(source, key, "it is packed, and not one matrix of one expert")
        names.stacked.setdefault(layer.index, []).append(key)
        return
    if int(parts[1]) >= most:
        what = f"expert {parts[1]}, and config.json says that there are {layer.num_experts}"
        raise ArtifactError(what, where=f"{source.path}, {key}", do="make or download the checkpoint again")
    names.experts[layer.index, int(parts[1]), PROJECTIONS[parts[2]]] = key


def _take_apart(names: Names, source: ModelSource, layers: list[ExpertLayer]) -> None:
    """Take experts one by one of layers that the family keeps in stacks [E, ...]: peers pack every matrix on its own,
    `EXPERTS.3.gate_proj`, which is then neither transposed nor interleaved."""
    disk = DiskNames(names.reader.model)
    by_name = {disk.renamed(layer.name): layer for layer in layers}
    for key in sorted(names.reader.unexpected, key=lambda key: not key.endswith(WEIGHT)):
        parts = _OF_EXPERT.search(key)
        layer = None if parts is None else by_name.get(key[: parts.start()])
        if parts is None or layer is None or PROJECTIONS.get(parts[2]) not in layer.projections:
            continue
        if not _by_meaning(source, names.reader.model, layer):
            what = "experts one by one, of stacks that hold gate and up in turns: tools split these differently"
            raise ArtifactError(what, where=f"{source.path}, {layer.name}", do="give the original model to quantize it")
        if key.endswith(WEIGHT):
            _take(names, source, layer, key, names.renamed[key], packed=True, most=layer.num_experts)
        elif layer.biased and (place := (layer.index, int(parts[1]), PROJECTIONS[parts[2]])) in names.experts:
            names.biases[place] = key
        else:
            continue
        names.apart |= {f"{layer.name}.{part}" for part in layer.parameters}
        names.reader.unexpected.remove(key)


def _by_meaning(source: ModelSource, model: Any, layer: ExpertLayer) -> bool:
    """Whether what is called gate_proj is the gate: GPTQModel calls the first half of rows so that hold both in turns,
    which shows in nothing; auto-round, compressed-tensors and mlx-lm take them apart."""
    declared = quantization_of(source.config)
    method, by_auto_round = declared.get("quant_method"), "autoround_version" in declared
    apart = by_auto_round or method in ("auto-round", "compressed-tensors", "mlx")
    return apart or "interleaved" not in layer.kind.remarks(model.get_submodule(layer.name))


def _refused(source: ModelSource, key: str, why: str) -> ArtifactError:
    return ArtifactError(
        why,
        where=f"{source.path}, {key.removesuffix(WEIGHT)}",
        do="moeq reads one packed matrix an expert and projection",
    )
