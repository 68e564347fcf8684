"""Hardware files: YAML in which every constant is written as `{value: "512 GB/s", source: "..."}`.

Sections `gpu`, `link` and `ndp` must name all their constants (a memory of `dataflow: none`, which only holds experts,
has no arrays and no clock); `gpus` (several of them), `disk` and `energy` name all of their own where they are there,
`energy` without the others: what exchanges and disks take is not known. `policies` may set parameters of a policy.
A new hardware file in `hardware/` beside this module is found by itself; users pass the path of their own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from moeq.bounded import YAML_BYTES, YamlError, parse_yaml, read_bounded, shortened, shown
from moeq.errors import EstimateError, missing, nearest
from moeq.estimator.devices import OPTIONAL_SECTIONS, SECTIONS, Constant, Hardware, Unit, file_key
from moeq.estimator.units import parse_quantity
from moeq.folders import expanded
from moeq.recipe.wording import refusal_of
from moeq.registry import POLICIES

_FOLDER = Path(__file__).with_name("hardware")
_TOP_LEVEL = ("name", "description", *SECTIONS, *OPTIONAL_SECTIONS, "policies")


def known_hardware() -> list[str]:
    """Names of the hardware files that come with moeq, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Hardware by the name of a bundled file or the path of a YAML file, in SI units.

    Raises EstimateError, naming file and key, for a file that is missing or no YAML, an unknown or missing key, a
    constant without unit or source, a wrong dimension, or a value out of bounds.
    """
    path = _find(name_or_path)
    try:
        text = read_bounded(path, YAML_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what, do = f"cannot read the hardware file: {reason}", "give a readable YAML file"
        raise EstimateError(what, where=str(path), do=do) from error
    return _parse(text, path)


def own_hardware(name: str) -> Path | None:
    """The file that a name of hardware stands for; None for one that comes with moeq, whatever else is called so."""
    return None if name in known_hardware() else expanded(name)


def _find(name_or_path: str | Path) -> Path:
    given = str(name_or_path)
    path = own_hardware(given)
    if path is None:
        return _FOLDER / f"{given}.yaml"
    with contextlib.suppress(OSError):  # a name that is too long for a file
        if path.exists():
            return path
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise missing(given, f"give the path of a YAML file, or one of {', '.join(known_hardware())}")
    close = nearest(given, known_hardware())
    hint = f"did you mean {close!r}? known: " if close else "known: "
    do = f"{hint}{', '.join(known_hardware())}, or give the path of a YAML file"
    raise EstimateError(f"unknown hardware {shown(given)}", do=do)


@cache
def _parse(text: bytes, path: Path) -> Hardware:
    try:
        tree = parse_yaml(text).value
    except YamlError as error:
        raise EstimateError(f"not valid YAML: {error}", where=error.at(str(path)), do="correct the syntax") from error
    if not isinstance(tree, Mapping):
        raise EstimateError("not a mapping of sections", where=str(path), do=f"write {', '.join(SECTIONS)}")
    _keys(tree, path, "", known=_TOP_LEVEL, required=tuple(SECTIONS))
    for section, what in (("gpus", "several GPUs"), ("disk", "a disk")):
        if {section, "energy"} <= set(tree):
            do = f"leave out one of `{section}` and `energy`"
            raise EstimateError(f"energy of {what} is not worked out", where=str(path), do=do)
    constants: list[Constant] = []
    models = {**SECTIONS, **{name: model for name, model in OPTIONAL_SECTIONS.items() if name in tree}}
    sections = {name: _section(name, model, tree[name], path, constants) for name, model in models.items()}
    return Hardware(
        name=str(tree.get("name", path.stem)),
        description=str(tree.get("description", "")),
        file=str(path),
        policies=_policy_parameters(tree.get("policies") or {}, path, constants),
        constants=tuple(constants),
        **sections,
    )


def _section(name: str, model: type[BaseModel], tree: object, path: Path, constants: list[Constant]) -> Any:
    fields = {file_key(field): (field, info) for field, info in model.model_fields.items()}
    match tree:
        case {"dataflow": {"value": "none"}}:  # it only holds experts
            known = tuple(key for key, (_, info) in fields.items() if info.is_required())
        case _:
            known = tuple(fields)
    entries, values = _keys(tree, path, name, known=known, required=known), {}
    for key in known:
        field, info = fields[key]
        value = _value(entries[key], path, f"{name}.{key}", constants)
        values[field] = _in_unit(value, info, f"{path}: {name}.{key}")
    try:
        return model(**values)
    except ValidationError as error:
        found = refusal_of(error, values)
        where = f"{path}: {name}.{file_key(str(found.path[0]))}"
        raise EstimateError(found.what, where=where, do=found.do) from error


def _policy_parameters(tree: object, path: Path, constants: list[Constant]) -> dict[str, dict[str, float | str]]:
    values: dict[str, dict[str, float | str]] = {}
    for policy, given in _keys(tree, path, "policies", known=POLICIES.names()).items():
        name, known = f"policies.{policy}", POLICIES.get(policy, EstimateError).parameters
        values[policy] = {}
        for key, entry in _keys(given, path, name, known=tuple(known)).items():
            value = _value(entry, path, f"{name}.{key}", constants)
            if problem := known[key].problem_with(value):
                raise EstimateError(problem, where=f"{path}: {name}.{key}", do="correct the value")
            values[policy][key] = value
    return values


def _keys(
    tree: object, path: Path, name: str, *, known: tuple[str, ...], required: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """A mapping of known keys, all that are required among them."""
    if not isinstance(tree, Mapping):
        raise EstimateError("not a mapping of keys", where=f"{path}: {name}", do="indent its keys below it")
    prefix = f"{name}." if name else ""
    for key in tree:
        if key not in known:
            close = nearest(str(key), known)
            do = f"did you mean '{prefix}{close}'?" if close else f"known here: {', '.join(known)}"
            raise EstimateError(f"unknown key '{prefix}{shortened(str(key))}'", where=str(path), do=do)
    for key in required:
        if key not in tree:
            raise EstimateError(f"missing key '{prefix}{key}'", where=str(path), do="add it with a value and a source")
    return tree


def _value(entry: object, path: Path, name: str, constants: list[Constant]) -> Any:
    """The value of a constant, which is noted with its source."""
    where, form = f"{path}: {name}", 'write {value: ..., source: "..."}'
    if not isinstance(entry, Mapping):
        raise EstimateError(f"{shown(entry)} is not a constant with a source", where=where, do=form)
    for key in entry:
        if key not in ("value", "source"):
            close = nearest(str(key), ("value", "source"))
            do = f"did you mean {close!r}?" if close else form
            raise EstimateError(f"unknown key {shown(key)}", where=where, do=do)
    value, source = entry.get("value"), entry.get("source")
    if value is None:
        raise EstimateError("the constant has no value", where=where, do=form)
    if not isinstance(source, str) or not source.strip():
        raise EstimateError("the constant has no source", where=where, do="say where the value comes from")
    constants.append(Constant(key=name, text=str(value), source=" ".join(source.split())))
    return value


def _in_unit(value: Any, info: FieldInfo, where: str) -> Any:
    unit = next((note for note in info.metadata if isinstance(note, Unit)), None)
    if unit is None:
        if isinstance(value, bool):
            raise EstimateError(f"{shown(value)} is not a number", where=where, do="write a plain number")
        return value
    do = f"write a number with a unit, such as '{unit.example}'"
    if not isinstance(value, str):
        raise EstimateError(f"{shown(value)} has no unit", where=where, do=do)
    try:
        number = parse_quantity(value, unit.name)
    except ValueError as error:
        raise EstimateError(str(error), where=where, do=do) from error
    if not math.isfinite(number):
        raise EstimateError(f"{value!r} is not finite", where=where, do=do)
    return number
