"""Where an assignment loads: every runtime, or why it does not, what to do about it, and what that costs.

`{runtime: None}` where a checkpoint is written for it as it is assigned, else `{runtime: {reason, do, price}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from moeq.artifacts.sized import Sized
from moeq.artifacts.targets import (
    CODES,
    NESTED,
    Grid,
    Target,
    make_others,
    refusal,
    refuse_layers,
    refuse_matrix,
    refuse_shape,
    targets,
)
from moeq.errors import FormatError
from moeq.runtimes import NATIVE
from moeq_kernels.widths import Encoding, EncodingKeys

if TYPE_CHECKING:
    from moeq.artifacts.assignment import Width
    from moeq.artifacts.manifest import PlacedModule

UNKNOWN = "no setting helps: it does not know this model"
MANY = 9.0  # a price that is told as times the loss, not in percent
TABLES = ("embeddings", "head")  # classes of modules that are vectors of words
LoadsIn = dict[str, dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed module beside the experts, of one of the classes of `others`."""

    kind: str
    rows: int
    inputs: int
    bits: int
    encoding: Encoding
    name: str = ""


def loads_in(
    widths: Sequence[Sequence[Width]],
    *,
    names: Sequence[str] = (),
    layers: Sequence[Sized] = (),
    others: Sequence[Packed | PlacedModule] = (),
    check: Callable[[str], None] = lambda _: None,
    refuse_other: Callable[[str, Packed | PlacedModule], str | None] = lambda _, __: None,
    **encoding: Unpack[EncodingKeys],
) -> LoadsIn:
    """For widths of every layer's experts.

    layers: the model's, with the shapes of their matrices, or, where they are not known, the layers' names; others:
    the modules beside the experts that are packed; check: FormatError where the model is none that a runtime knows;
    refuse_other: why a runtime has no place for one of `others`, whatever its grid; encoding: `vars` of that of the
    codes.
    """
    own, found = Encoding(**encoding), LoadsIn()
    for name, target in targets().items():
        reason, do = _unknown(check, name), UNKNOWN
        if reason is not None:
            found[name] = {"reason": reason, "do": do, "price": None}
            continue
        do = f"`--for {name}` assigns what it loads"
        if layers:
            refused = refuse_layers(name, layers, widths, **encoding)
            reason = None if refused is None else refused[0]
        else:
            reason = refusal(target, widths, names, symmetric=own.symmetric, group_size=own.group_size)
        if own.codes not in target.codes:
            reason, do = CODES[own.codes], make_others(target)
        elif reason is not None:
            unfit = next((why.partition(";")[0] for layer in layers if (why := _unfit(target, layer))), None)
            reason = (
                unfit
                or _short(target, widths, own.symmetric, own.nested)
                or reason.rpartition(": ")[2].partition(";")[0]
            )
        else:
            reason, do = in_the_way(target, others, partial(refuse_other, name))
        found[name] = None if reason is None else {"reason": reason, "do": do, "price": None}
    return found


def in_the_way(
    target: Target,
    others: Sequence[Packed | PlacedModule],
    refuse_other: Callable[[Packed | PlacedModule], str | None],
) -> tuple[str | None, str]:
    """Why a runtime does not load what is packed beside the experts, None where it does, and what to do."""
    if others and not target.others:
        return "packed modules beside the experts", "run without `others`"
    if not target.tables and any(module.kind in TABLES for module in others):
        return "packed embeddings and heads", "leave embeddings and head out of `others`"
    for one in others:
        grid = Grid(rows=one.rows, inputs=one.inputs, bits=one.bits, **vars(one.encoding))
        refused = refuse_matrix(target, grid)
        why = refuse_other(one) if refused is None else refused[0].partition(";")[0]
        if why is not None:
            return f"{one.kind}: {why}", f"leave {one.kind} out of `others`"
    return None, ""


def by_widths(why: Mapping[str, Any]) -> bool:
    """Whether a runtime that does not load an assignment may load another one."""
    return why["do"] != UNKNOWN and "`others`" not in why["do"]


def _unknown(check: Callable[[str], None], name: str) -> str | None:
    """Why a runtime knows no such model; None where it does."""
    try:
        check(name)
    except FormatError as error:
        return error.what.partition(";")[0]
    return None


def _unfit(target: Target, layer: Sized) -> str | None:
    """Why a target packs none of a layer's matrices of some shape, at whatever width."""
    shapes = (layer.shape(projection) for projection in layer.projections)
    return next((why for shape in shapes if (why := refuse_shape(target, *shape)) is not None), None)


def _short(target: Target, widths: Sequence[Sequence[Width]], symmetric: bool, nested: bool) -> str | None:
    """What is in a target's way, in a few words, as far as the widths and the kind of grid say."""
    from moeq.artifacts.assignment import matrix_widths

    matrices = [[set(matrix_widths(width)) for width in experts] for experts in widths]
    layers = [set().union(*experts) for experts in matrices]
    used = set().union(*layers)
    foreign = sorted(used - set(target.widths))
    if foreign:
        return " and ".join(f"{bits}-bit" for bits in foreign)
    if target.symmetric_only and not symmetric:
        return "zero points"
    if nested and not target.nested and used & set(NESTED):
        return "codes that lead wider ones"
    if target.granularity == "model" and len(used) > 1:
        return "mixed widths"
    if target.granularity == "layer" and any(len(layer) > 1 for layer in layers):
        return "mixed widths in a layer"
    if target.granularity == "expert" and any(len(expert) > 1 for layer in matrices for expert in layer):
        return "mixed widths in an expert"
    return None


def called(name: str) -> str:
    """A runtime in words: the native format's is not called as what loads it."""
    return f"{name} (transformers with moeq)" if name == NATIVE else name


def told(found: LoadsIn) -> LoadsIn:
    """Without a runtime's stricter target where the one that rounds scales loads it."""
    loads = {name for name, why in found.items() if why is None}
    return {name: why for name, why in found.items() if name in loads or targets()[name].rounded not in loads}


def line(found: LoadsIn) -> str:
    """As a summary ends with it: where it loads, and for other runtimes why not and what it costs there."""
    found = dict(sorted(told(found).items()))
    there = [called(name) for name, refused in found.items() if refused is None]
    why: dict[str, list[str]] = {}
    for name, refused in found.items():
        if refused is not None:
            why.setdefault(_why(refused), []).append(name)
    absent = [f"{', '.join(names)} ({reason})" for reason, names in why.items()]
    text = f"loads in: {', '.join(there) or 'no runtime'}"
    return f"{text}; not in {', '.join(absent)}" if absent else text


def _why(refused: Mapping[str, Any]) -> str:
    price, reason = refused["price"], refused["reason"]
    if price is None:
        return str(reason)
    if price < MANY:
        return f"{reason}; {100 * price:+.1f} % loss"
    times = float(f"{1 + price:.3g}")
    return f"{reason}; {times:,.0f} times the loss" if times >= 100 else f"{reason}; {times:g} times the loss"
