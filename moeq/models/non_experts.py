"""Finding what is not a routed expert and can be quantized, by structure, and the class that each module belongs to.

attention: the token mixers of decoder layers (attention, linear attention, Mamba, short convolutions' projections);
dense: the feed-forward part of layers without experts; shared: what every token passes in layers with experts (shared
experts, a dense part beside the experts, projections before and after them); embeddings and head: the tables of tokens.

Only exact `nn.Linear` and `nn.Embedding` are taken. Routers, gates of shared experts, norms, convolutions, towers of
images and sound, and whatever is neither of the above stay as they are.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from moeq.artifacts.digests import digest_of_chunks
from moeq.models.experts import ExpertLayer
from moeq.models.loading import tied
from moeq.models.source import ModelSource
from moeq.models.stored_experts import LEFT_ALONE
from moeq.models.streaming import blocks_of
from moeq.models.weights import WeightReader, plain_chunks, plain_header

ATTENTION, DENSE, SHARED, EMBEDDINGS, HEAD = "attention", "dense", "shared", "embeddings", "head"
_MIXER = re.compile(r"attn|attention|mamba|mixer|conv|delta", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)
_ROUTER = re.compile(r"router|gating|^gate$", re.IGNORECASE)
_OWN_CODE = ("torch.", "transformers.modeling_utils", "transformers.generation", "transformers.integrations")
READS_WEIGHT = "the family's code reads its weight without calling it"
OTHER_FILES = "on disk its weight is one tensor with weights of other modules"
OTHER_TIES = "its weight is also that of another module"
OWN_CLASS = "the family has a class of its own for it"


@dataclass(frozen=True, kw_only=True)
class OtherModule:
    """One module outside of the routed experts: a linear [rows, inputs], or an embedding of `rows` vectors.

    block: the decoder layer that it lies in, empty for none; tied: the module whose weight it shares.
    """

    name: str
    kind: str
    block: str
    rows: int
    inputs: int
    biased: bool = False
    lookup: bool = False
    tied: str | None = None

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return f"{self.name}.weight"


@dataclass(frozen=True, kw_only=True)
class OtherModules:
    """What can be quantized; left: {name: (class, reason)} of what belongs to a class and stays as it is."""

    modules: tuple[OtherModule, ...]
    left: dict[str, tuple[str, str]]

    def of(self, kinds: Iterable[str]) -> list[OtherModule]:
        """The modules of some classes."""
        wanted = set(kinds)
        return [module for module in self.modules if module.kind in wanted]


def by_block(modules: Iterable[OtherModule]) -> dict[str, list[OtherModule]]:
    """Modules by the decoder layer that they lie in, "" for none."""
    blocks: dict[str, list[OtherModule]] = {}
    for module in modules:
        blocks.setdefault(module.block, []).append(module)
    return blocks


def find_others(model: nn.Module, layers: list[ExpertLayer], source: ModelSource | None = None) -> OtherModules:
    """The modules that can be quantized, in the structure of a model, which may lie on the meta device.

    source: the checkpoint, where modules whose weights it keeps in one tensor with others are to be left as they are.
    """
    modules = {module.weight: module for module in (*_resident(model), *_in_layers(model, layers))}
    left = dict.fromkeys(_own_tables(model), (EMBEDDINGS, OWN_CLASS))
    kept = []
    ties = tied(model) if source is None else _stored_ties(model, source)
    for module in modules.values():
        others = ties.get(module.weight, [])
        pair = _pair(module, others, modules)
        if others and pair is None:
            left[module.name] = (module.kind, OTHER_TIES)
        elif _reads_weight(model, module.name) or (pair is not None and _reads_weight(model, pair.name)):
            left[module.name] = (module.kind, READS_WEIGHT)
        else:
            kept.append(replace(module, tied=pair.name) if pair is not None and module.kind == HEAD else module)
    if source is not None:
        strays = _on_disk_with_others(model, source, kept)
        left |= {module.name: (module.kind, OTHER_FILES) for module in kept if module.name in strays}
        kept = [module for module in kept if module.name not in strays]
    return OtherModules(modules=tuple(kept), left=left)


def _stored_ties(model: Any, source: ModelSource) -> dict[str, list[str]]:
    """`tied` without what the disk has twice with other values, which transformers does not tie; nothing is known of
    files that are still to be fetched."""
    ties = tied(model)
    if not ties:
        return ties
    reader = WeightReader(source, model, torch.float32, torch.device("cpu"))
    keys = {name: reader.keys([name]) for name in ties}
    here = {key for key, header in source.tensors.items() if source.name_of(header.file) not in source.to_fetch}
    there = {name for name, own in keys.items() if own and here.issuperset(own)}
    stored = {
        name: [(*plain_header(source, key)[:2], digest_of_chunks(plain_chunks(source, key))) for key in keys[name]]
        for name in there
        if there.intersection(ties[name])
    }
    return {
        name: [other for other in others if not {name, other} <= there or stored[name] == stored[other]]
        for name, others in ties.items()
    }


def _pair(module: OtherModule, others: list[str], modules: dict[str, OtherModule]) -> OtherModule | None:
    """The other one of a tied pair of embeddings and head, None for no pair; modules: {weight: module}."""
    other = modules.get(others[0]) if len(others) == 1 else None
    return other if other is not None and {module.kind, other.kind} == {EMBEDDINGS, HEAD} else None


def _resident(model: Any) -> Iterator[OtherModule]:
    """The table of input tokens and the head."""
    names = {id(module): name for name, module in model.named_modules()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(table) is nn.Embedding:
        yield _other(names[id(table)], table, EMBEDDINGS, "")
    if type(head) is nn.Linear:
        yield _other(names[id(head)], head, HEAD, "")


def _own_tables(model: Any) -> list[str]:
    """The table of input tokens where it is more than an nn.Embedding: one that scales or norms what it looks up."""
    table = model.get_input_embeddings()
    owns = isinstance(table, nn.Embedding) and type(table) is not nn.Embedding
    return [name for name, module in model.named_modules() if module is table] if owns else []


def _other(name: str, module: nn.Linear | nn.Embedding, kind: str, block: str) -> OtherModule:
    (rows, inputs), lookup = module.weight.shape, isinstance(module, nn.Embedding)
    biased = getattr(module, "bias", None) is not None
    return OtherModule(name=name, kind=kind, block=block, rows=rows, inputs=inputs, biased=biased, lookup=lookup)


def _in_layers(model: nn.Module, layers: list[ExpertLayer]) -> Iterator[OtherModule]:
    """The linears of decoder layers: of the entries of lists that hold layers with experts, of a dense model of all."""
    blocks = blocks_of(model)
    with_experts = [path for path in blocks if any(layer.name.startswith(f"{path}.") for layer in layers)]
    lists = {path.rpartition(".")[0] for path in (with_experts if layers else blocks)}
    of_experts = {f"{layer.name}.{name}" for layer in layers for name in layer.parameters}
    for path in blocks:
        if path.rpartition(".")[0] not in lists or any(part.startswith(LEFT_ALONE) for part in path.split(".")):
            continue
        here = [layer for layer in layers if layer.name.startswith(f"{path}.")]
        block = model.get_submodule(path)
        for below, module in block.named_modules():
            name = f"{path}.{below}"
            if type(module) is nn.Linear and f"{name}.weight" not in of_experts:
                kind = _class_of(block, below, [layer.name.removeprefix(f"{path}.") for layer in here])
                is_gate = module.out_features in {1, *(layer.num_experts for layer in here)}
                if kind is not None and not (kind in (SHARED, DENSE) and is_gate):
                    yield _other(name, module, kind, path)


def _class_of(block: nn.Module, path: str, experts: list[str]) -> str | None:
    """The class of a linear at `path` in a decoder layer, None for what is neither mixer nor feed-forward.

    experts: paths of the layer's experts modules. The slot is the child of the layer that the linear lies in; of a list
    of unlike parts, the part's own child.
    """
    parts = path.split(".")
    chain = [".".join(parts[:end]) for end in range(1, len(parts))]  # modules between the layer and the linear
    for name, at in zip(parts, [*chain, path], strict=True):
        kind = type(block.get_submodule(at)).__name__
        if _ROUTER.search(name) or _ROUTER.search(kind) or ("Norm" in kind and not _MIXER.search(kind)):
            return None
    slot = _slot(block, chain)
    if slot is None:
        return None
    inner = block.get_submodule(slot)
    first = inner[0] if isinstance(inner, nn.ModuleList) else inner
    feed_forward: str = SHARED if experts else DENSE
    if any(name == slot or name.startswith(f"{slot}.") for name in experts):
        return feed_forward
    for word in (type(first).__name__, slot.rpartition(".")[2]):
        if "connection" in word.lower():
            return None
        if _MIXER.search(word):
            return ATTENTION
        if _FEED_FORWARD.search(word):
            return feed_forward
    return None


def _slot(block: nn.Module, chain: list[str]) -> str | None:
    """The child of a layer that a chain of modules begins with, None for a linear that is a child itself."""
    if not chain:
        return None
    first = block.get_submodule(chain[0])
    if isinstance(first, nn.ModuleList) and len({type(entry) for entry in first}) > 1:
        return chain[2] if len(chain) > 2 else None
    return chain[0]


def _reads_weight(model: nn.Module, name: str) -> bool:
    """Whether code of a module around `name` reads its weight by attribute: `self.NAME.weight`."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]
    return any(parts[-1] in _read_names(kind) for module in around for kind in type(module).__mro__)


@cache
def _read_names(kind: type) -> frozenset[str]:
    """The attributes X of which a class reads X.weight while it runs, but for its device.

    Branches for training, and what gives weights their first values, do not count.
    """
    if kind.__module__.startswith(_OWN_CODE) or kind.__module__ == "builtins":
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    return frozenset(_weights_read(tree))


def _weights_read(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef) and node.name == "_init_weights":
        return
    if isinstance(node, ast.If) and "self.training" in ast.unparse(node.test):
        for statement in node.orelse:
            yield from _weights_read(statement)
        return
    if isinstance(node, ast.Attribute):
        if node.attr == "device" and isinstance(node.value, ast.Attribute) and node.value.attr == "weight":
            return
        if node.attr == "weight" and isinstance(node.value, ast.Attribute):
            yield node.value.attr
    for child in ast.iter_child_nodes(node):
        yield from _weights_read(child)


def weight_keys(source: ModelSource, model: nn.Module, modules: Iterable[OtherModule]) -> set[str]:
    """The tensors on disk that hold the modules' weights."""
    names = [module.weight for module in modules]
    return set(WeightReader(source, model, torch.float32, torch.device("cpu")).keys(names)) if names else set()


def _on_disk_with_others(model: Any, source: ModelSource, modules: list[OtherModule]) -> set[str]:
    """Modules whose weight shares a tensor on disk with a parameter that is not among them."""
    reader = WeightReader(source, model, torch.float32, torch.device("cpu"))
    names = {module.weight: module.name for module in modules}
    return {
        name
        for weight, name in names.items()
        for origin in reader.origins.get(weight, ())
        if any(target not in names for target in origin.targets)
    }
