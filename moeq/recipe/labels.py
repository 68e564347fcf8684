"""What people read instead of a recipe's names: "uniform 2-bit", "4 experts in FP16 + 2-bit", "as trained".

Files and JSON stay keyed by the recipe's names. "2.3 bits" counts all that is stored for a weight, scales and zero
points too, "2 code bits" the codes alone; "2-bit" is the width of the codes that all experts have.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from moeq.recipe.assign import DEFAULT_QUANTIZER, AssignSection
from moeq.recipe.choices import BEST
from moeq.recipe.recipe import Recipe
from moeq.registry import QUANTIZERS
from moeq.tables import human_size

ORIGINAL, AS_TRAINED = "original", "as trained"  # the row that no section is of: its name, its label
UNIFORM = "uniform"
GRANULARITIES = {"projection": "by matrix", "layer": "by layer"}


def labels(recipe: Recipe, full: str = "FP16") -> dict[str, str]:
    """The label of every row of a recipe's evaluation by its name; where two read alike, each with its name behind.

    full: what experts in full precision are kept in. A quantizer is named only where the rows differ in it.
    """
    sections = {recipe.name: recipe.assign} | {section.name: section for section in recipe.eval.compare}
    alike = len({section.quantizer for section in sections.values()}) == 1
    made = {ORIGINAL: AS_TRAINED}
    for name, section in sections.items():
        own = name == recipe.name
        refined, tuned = (own and part is not None for part in (recipe.quantize.refine, recipe.quantize.tune))
        made[name] = label(section, refined=refined, tuned=tuned, quantizer=not alike, full=full)
    times = Counter(made.values())
    return {name: text if times[text] == 1 else f"{text} ({name})" for name, text in made.items()}


def label(
    section: AssignSection,
    *,
    refined: bool = False,
    tuned: bool = False,
    quantizer: bool = True,
    full: str = "FP16",
) -> str:
    """What an assignment is called; refined, tuned: its experts were trained after it (quantize.refine, .tune)."""
    width = _one_width(section)
    parts = [f"{UNIFORM} {width}-bit" if width is not None else _method(section)]
    if width is None:
        parts += _own(section)
        budget = _budget(section)
        parts += [] if budget is None else [budget]
        parts += ["losses as printed"] if section.loss_weighting == "none" and section.selector else []
    if section.target is not None:
        parts.append(f"for {section.target}")
    if quantizer and section.quantizer != DEFAULT_QUANTIZER and not (refined and section.quantizer == BEST):
        parts.append(_quantizer(section.quantizer))
    if refined:
        parts.append("refined")
    if tuned:
        parts.append("tuned")
    text = ", ".join(parts)
    if section.gpu_experts == 0:
        return text
    experts = "1 expert" if section.gpu_experts == 1 else f"{section.gpu_experts} experts"
    return f"{experts} in {full} + {text.removeprefix(f'{UNIFORM} ')}"


def _one_width(section: AssignSection) -> str | int | None:
    """The width that all experts off the GPU have, where the section says so."""
    if not section.selector:
        return section.code_bits
    bits: int | None = getattr(section.settings, "bits", None) if section.method == UNIFORM else None
    return bits


def _method(section: AssignSection) -> str:
    how = GRANULARITIES.get(section.granularity or "")
    name = section.allocator.label or section.method
    return name if how is None else f"{name} {how}"


def _own(section: AssignSection) -> list[str]:
    """What is given of the method's own words and whole numbers, and of widths and scope."""
    given = section.settings.model_dump(exclude_unset=True, exclude_none=True)
    told = [
        value if isinstance(value, str) else _setting(key, value)
        for key, value in given.items()
        if isinstance(value, str | int)
    ]
    if section.widths is not None:
        told.append(f"of {'/'.join(map(str, section.widths))}")
    if section.scope is not None and section.scope != section.allocator.implied.get("scope"):
        told.append({"layer": "within layers", "model": "over the model"}[section.scope])
    return told


def _setting(key: str, value: int) -> str:
    """A whole number of a method's: "hot 4-bit", "iterations 3"."""
    words = key.replace("_", " ")
    return f"{words.removesuffix(' bits')} {value}-bit" if words.endswith(" bits") else f"{words} {value}"


def _budget(section: AssignSection) -> str | None:
    """What may be spent, as it is given."""
    if section.bits_per_weight is not None:
        return _bits(section.bits_per_weight)
    if section.code_bits is not None:
        return _bits(section.code_bits, "code bit")
    if section.expert_bytes is not None:
        return f"experts in {human_size(section.expert_bytes)}"
    return None if section.size is None else f"all in {human_size(section.size)}"


def _bits(count: str | int, unit: str = "bit") -> str:
    value = float(Fraction(count))
    return f"{value:.4g} {unit}" if value == 1 else f"{value:.4g} {unit}s"


def _quantizer(name: str) -> str:
    """As reports call it; its name where the package that brought it is gone."""
    if name == BEST:
        return "best replicas"
    found = QUANTIZERS.find(name)
    return name if found is None else str(found.label)
