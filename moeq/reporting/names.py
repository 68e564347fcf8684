"""What pages call layers and the sources of text: the model's own names, and words that say something."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moeq.artifacts.profile import ExpertProfile


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Layers as an axis names them: a label each, and a title with N for what the labels are."""

    labels: tuple[str, ...]
    title: str


def layer_names(names: Sequence[str]) -> LayerNames:
    """Numbers where the names differ by one number alone ("model.layers.N.mlp"), else the names themselves."""
    parts = [re.split(r"(\d+)", name) for name in names]
    if len({len(part) for part in parts}) == 1:
        varying = [place for place, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1]
        if not varying and len(parts[0]) > 1:
            varying = [1]
        if len(varying) == 1 and varying[0] % 2:
            (place,) = varying
            title = "".join([*parts[0][:place], "N", *parts[0][place + 1 :]])
            return LayerNames(labels=tuple(part[place] for part in parts), title=title)
    return LayerNames(labels=tuple(names), title="MoE layer")


def expert_name(layer: str, expert: int) -> str:
    """One expert, by the model's name of its layer."""
    return f"{layer}, expert {expert}"


def never_chosen(profile: ExpertProfile, most: int) -> tuple[int, str]:
    """How many experts calibration never chose, and the names of so many of them."""
    names = [
        expert_name(name, expert)
        for layer, name in enumerate(profile.layers)
        for expert in np.flatnonzero(profile.total(layer)[0] == 0).tolist()
    ]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return len(names), "; ".join(names[:most]) + more


def domain_label(domain: str, names: Mapping[str, str]) -> str:
    """What pages call a domain."""
    return names.get(domain, domain)


def keys_of(names: Sequence[str]) -> list[str]:
    """Names as parts of ids and file names, each another one."""
    keys = [re.sub(r"[^A-Za-z0-9_.+-]+", "_", name).strip("_") for name in names]
    found: list[str] = []
    for index, key in enumerate(keys):
        own = key
        if not key or keys.count(key) > 1:
            own = f"{key}-{index}"
            while own in keys or own in found:
                own += "-"
        found.append(own)
    return found
