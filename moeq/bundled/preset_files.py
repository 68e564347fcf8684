"""Presets: complete recipes that come with moeq (moeq/bundled/presets), each a file that a user may copy and change."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from moeq.bundled import bundled_path
from moeq.errors import RecipeError, hint

DEFAULT = "balanced"  # what a command without a recipe starts from
QUALITIES = ("fast", "balanced", "best")  # presets that differ in time and in what is lost, from the quickest


@cache
def preset_names() -> tuple[str, ...]:
    """The qualities, then the papers."""
    found = sorted(path.stem for path in bundled_path("presets").glob("*.yaml"))
    return (*QUALITIES, *(name for name in found if name not in QUALITIES))


def preset_path(name: str) -> Path:
    """The file of a preset; RecipeError with the nearest name for one that there is not."""
    if name not in preset_names():
        raise RecipeError(f"no preset {name!r}", where="--preset", do=hint(name, preset_names()))
    return bundled_path("presets") / f"{name}.yaml"


def preset_of(path: Path) -> str | None:
    """The preset whose file this is."""
    return path.stem if path.parent == bundled_path("presets") else None


def chosen_preset(preset: str | None, quality: str | None) -> str | None:
    """The preset that is named, by itself or as a quality; None where neither is. RecipeError for both, or unknown."""
    if preset is not None and quality is not None:
        raise RecipeError("--preset goes without --quality", do="give one of them: a quality is a preset")
    if quality is not None and quality not in QUALITIES:
        raise RecipeError(f"no quality {quality!r}", where="--quality", do=hint(quality, QUALITIES))
    name = preset or quality
    if name is not None:
        preset_path(name)
    return name
