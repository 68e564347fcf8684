"""What the hub's client has to say offline, known without importing it: that takes as long as all else of a refusal."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants

from moeq.folders import expanded


def is_set() -> bool:
    """Whether the hub may not be asked."""
    return bool(constants.is_offline_mode())


def cache_folder() -> Path:
    """Where the hub's client keeps what it has downloaded."""
    return expanded(constants.HF_HUB_CACHE)


def has_nothing(name: str) -> bool:
    """Whether the hub may not be asked and its cache has nothing of a model."""
    folder = constants.REPO_ID_SEPARATOR.join(("models", *name.split("/")))
    return is_set() and not (cache_folder() / folder).is_dir()


def explain(revision: str | None) -> tuple[str, str]:
    """What went wrong where the cache lacks what is asked for, and what to do about it."""
    at = f" at revision {revision}" if revision else ""
    return (
        f"neither here nor to be had from the hub: not in the cache{at}, or not whole, and HF_HUB_OFFLINE is set",
        "check the name, unset HF_HUB_OFFLINE, or download it where there is a network",
    )
