"""Keys by the names that they had: recipes written with them load, and runs made with them go on.

`assign.code_bits` was called average_bits, when there was no `assign.bits_per_weight`; `export.formats` named formats,
and `assign.target` the native one as its format. Runs from before `losses.hessian_weighting` weighted nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from moeq.errors import RecipeError
from moeq.registry import NATIVE_FORMAT
from moeq.runtimes import NATIVE, formats, runtimes

RECORDED = "# The recipe as it was run, defaults filled in."  # the first line of a run's own copy
EARLIER, CODE_BITS, LATER = "average_bits", "code_bits", "bits_per_weight"
SPEED, DROP = "speed", "drop"  # keys that came later
OF_METHODS = {"trellis": "trellis_states", "iq": "iq_set"}  # likewise, of losses.methods
SHOWN = {EARLIER: CODE_BITS, "bits": CODE_BITS, "hot_bits": "hot_code_bits", "cold_bits": "cold_code_bits"}


def read_earlier(recipe: dict[str, Any], where: str) -> None:
    """Give keys of a raw recipe the names that they have; RecipeError where one is there under both."""
    for section in _sections(recipe):
        if EARLIER in section and CODE_BITS in section:
            what = f"{EARLIER} is what {CODE_BITS} was called, and both are given"
            raise RecipeError(what, where=where, do=f"leave {EARLIER} out")
        if EARLIER in section:
            section[CODE_BITS] = section.pop(EARLIER)


def as_called_today(recipe: Any) -> None:
    """Give the runtimes of a run's own copy, which nobody wrote, the names that they have, without a word."""
    if not isinstance(recipe, dict):
        return
    now, export, losses = formats(), recipe.get("export"), recipe.get("losses")
    if isinstance(losses, dict):
        losses.setdefault("hessian_weighting", "none")  # the default was another one before it had a key
    reparam = recipe.get("reparam")
    if isinstance(reparam, dict) and isinstance(reparam.get("integer"), dict):
        reparam["integer"].setdefault("dropping", "printed")  # likewise
    for section in _sections(recipe):
        if isinstance(section.get("target"), str):
            section["target"] = now.get(section["target"], section["target"])
    if isinstance(export, dict):
        if isinstance(export.get("format"), str):
            export["format"] = now.get(export["format"], export["format"])
        if isinstance(export.get("formats"), list):
            export["formats"] = [now.get(name, name) if isinstance(name, str) else name for name in export["formats"]]


def key_now(key: str) -> str:
    """A dotted key by the name that it has."""
    return f"assign.{CODE_BITS}" if key == f"assign.{EARLIER}" else key


def shown_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of an assignment as they are shown: by the names that they have, widths as the code bits that they
    are, averages with a point."""
    named = {SHOWN.get(name, name): value for name, value in parameters.items()}
    averages = {name: named[name] for name in (LATER, CODE_BITS) if isinstance(named.get(name), str)}
    return named | {name: f"{float(Fraction(value)):.4g}" for name, value in averages.items()}


def as_in_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe, all keys filled in, as the keys of stages hold it: as it was written when names were the earlier ones.

    A stage that was made then has the key that it would have now.
    """
    for section in _sections(recipe):
        section[EARLIER] = section.pop(CODE_BITS)
        for key in (LATER, SPEED, DROP):
            if section[key] is None:
                del section[key]
        if section["target"] == NATIVE:
            section["target"] = NATIVE_FORMAT
    known = runtimes()
    recipe["losses"] = losses_in_keys(recipe["losses"])
    recipe["quantize"] = quantize_in_keys(recipe["quantize"])
    if not recipe["eval"]["dynamic"]:  # which came later
        del recipe["eval"]["dynamic"]
    if not recipe["export"]["onnx"]:  # likewise
        del recipe["export"]["onnx"]
    recipe["export"]["format"] = NATIVE_FORMAT
    recipe["export"]["formats"] = [known[name].before for name in recipe["export"]["formats"]]
    return recipe


def losses_in_keys(losses: dict[str, Any]) -> dict[str, Any]:
    """The section `losses`, all keys filled in, without those that came later and are as if they were not there."""
    absent = {"hessian_weighting"} if losses.get("hessian_weighting") == "none" else set()
    absent |= {key for method, key in OF_METHODS.items() if method not in losses.get("methods", ())}
    return {name: value for name, value in losses.items() if name not in absent}


def reparam_in_keys(reparam: dict[str, Any]) -> dict[str, Any]:
    """The section `reparam`, all keys filled in, without `w8a8` where it is off, which came later, and without
    `integer.dropping` where it is what it was without a key."""
    reparam = {name: value for name, value in reparam.items() if name != "w8a8" or value is not None}
    integer = reparam.get("integer")
    if not isinstance(integer, dict) or integer.get("dropping") != "printed":
        return reparam
    return reparam | {"integer": {name: value for name, value in integer.items() if name != "dropping"}}


def quantize_in_keys(quantize: dict[str, Any]) -> dict[str, Any]:
    """The section `quantize`, all keys filled in, without `tune` where it is off, which came later."""
    return {name: value for name, value in quantize.items() if name != "tune" or value is not None}


def _sections(recipe: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`assign` and the entries of eval.compare, as far as they are mappings."""
    evaluation = recipe.get("eval")
    compared = evaluation.get("compare") if isinstance(evaluation, dict) else None
    every = [recipe.get("assign"), *(compared if isinstance(compared, list) else [])]
    yield from (section for section in every if isinstance(section, dict))
