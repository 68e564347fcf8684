"""Checkpoints as somebody else leaves them: changed tensors and settings, and every digest written anew."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeq.artifacts.provenance import NO_SUBJECTS
from moeq.artifacts.sums import NAME as SUMS
from moeq.artifacts.sums import write_sums
from moeq.artifacts.tensor_files import dtype_name, tensor_bytes

Change = Callable[[dict[str, Tensor]], object]


def edit(file: Path, change: Change) -> None:
    """Change the tensors of a file."""
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def holder(folder: Path, key: str) -> Path:
    """The file of a checkpoint that holds a tensor."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            if key in stored.keys():  # noqa: SIM118
                return file
    raise KeyError(key)


def edit_tensor(folder: Path, key: str, change: Callable[[Tensor], Tensor]) -> None:
    """Put what is made of a tensor in its place."""
    edit(holder(folder, key), lambda tensors: tensors.update({key: change(tensors[key])}))


def swap(folder: Path, first: str, second: str) -> None:
    """Exchange the bytes of all tensors below one prefix with those below another."""
    for file in sorted(folder.glob("*.safetensors")):

        def exchange(tensors: dict[str, Tensor]) -> None:
            for name in [name for name in tensors if name.startswith(first)]:
                other = second + name.removeprefix(first)
                tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()

        edit(file, exchange)


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a JSON file holds."""
    data = json.loads(file.read_text("utf-8"))
    change(data)
    file.write_text(json.dumps(data), "utf-8")


def write_digests(folder: Path) -> None:
    """Have every digest, size and shape of a checkpoint be that of what lies there, as its own writer would have it."""
    if (folder / "placement.json").is_file():
        edit_json(folder / "placement.json", lambda manifest: _describe(folder, manifest))
    if (folder / "provenance.json").is_file():
        edit_json(folder / "provenance.json", lambda statement: _restate(folder, statement))
    if (folder / SUMS).is_file():
        write_sums(folder)


def _describe(folder: Path, manifest: dict[str, Any]) -> None:
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    experts = [expert for layer in manifest["layers"] for expert in layer["experts"]]
    places = [replica for expert in experts for replica in expert["replicas"]] + manifest.get("others", [])
    packed = set()
    for place in places:
        there = files[place["file"]]
        place["tensors"] = [stamp for stamp in place["tensors"] if place["key_prefix"] + stamp["name"] in there]
        held = [there[place["key_prefix"] + stamp["name"]] for stamp in place["tensors"]]
        packed |= {(place["file"], place["key_prefix"] + stamp["name"]) for stamp in place["tensors"]}
        for stamp, tensor in zip(place["tensors"], held, strict=True):
            stamp |= {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        place["bytes"] = sum(tensor.nbytes for tensor in held)
        place["sha256"] = hashlib.sha256(b"".join(map(tensor_bytes, held))).hexdigest()
    manifest["tensors"] = [
        {
            "name": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "file": file,
            "sha256": hashlib.sha256(tensor_bytes(tensor)).hexdigest(),
        }
        for file, tensors in files.items()
        for name, tensor in tensors.items()
        if (file, name) not in packed
    ]
    every = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    totals = manifest["totals"]
    totals["placed_expert_bytes"] = sum(
        replica["bytes"] for expert in experts for replica in expert["replicas"] if replica["placed"]
    )
    kept = totals["placed_expert_bytes"] + totals["other_replica_bytes"] + totals["guard_bytes"]
    totals["non_expert_bytes"] = every - kept
    totals["bytes_by_tier"] = {
        tier: sum(r["bytes"] for e in experts if e["tier"] == tier for r in e["replicas"] if r["placed"])
        for tier in totals["bytes_by_tier"]
    }
    weights = {name: file for file, tensors in files.items() if not file.startswith("replicas-") for name in tensors}
    edit_json(folder / "model.safetensors.index.json", lambda index: index.update(weight_map=weights))


def _restate(folder: Path, statement: dict[str, Any]) -> None:
    files = sorted(file for file in folder.iterdir() if file.name not in NO_SUBJECTS)
    statement["subject"] = [
        {"name": file.name, "digest": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}} for file in files
    ]
