"""placement.json as other runtimes take it: which experts live on the GPU, in options and files of theirs.

What a runtime cannot say exactly stays in memory: the GPU never holds more than the manifest places there.

Letters: L layers of the model, E experts a layer.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from moeq.artifacts.files import write_bytes, write_json
from moeq.artifacts.manifest import PlacedLayer, PlacementManifest, read_manifest
from moeq.errors import FormatError, RecipeError
from moeq.folders import checkpoint_of
from moeq.models.source import CONFIG, read_config
from moeq.models.stored_experts import LAYER, LAYERS, stated

GPU = "gpu"
STACKS = r"ffn_(gate|up|down)_exps\.weight"  # what llama.cpp calls the matrices of all experts of a layer


@dataclass(frozen=True, kw_only=True)
class Told:
    """How a runtime is told. arguments: of its command line, FILE among them where it reads one; contents: of that
    file; left: experts of the GPU's tier that stay in memory."""

    arguments: tuple[str, ...]
    contents: Any = None
    left: int = 0


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one runtime is told. suffix: of the file that it reads, None: it reads none."""

    suffix: str | None
    tell: Callable[[PlacementManifest, int], Told]


FILE = "FILE"


def on_gpu(layer: PlacedLayer) -> list[int]:
    """The experts of a layer that live on the GPU, the most important first."""
    placed = [expert for expert in layer.experts if expert.tier == GPU]
    return [expert.expert for expert in sorted(placed, key=lambda expert: -expert.importance)]


def numbered(manifest: PlacementManifest) -> Iterator[tuple[int, PlacedLayer]]:
    """The layers with the number of the decoder layer that each lies in; FormatError for one that is in none."""
    for layer in manifest.layers:
        found = LAYER.search(layer.name)
        if found is None:
            raise FormatError("experts are in no numbered layer", where=layer.name, do="place them by placement.json")
        yield int(found[1]), layer


def for_llama_cpp(manifest: PlacementManifest, layers: int) -> Told:
    """-ot: a pattern of the stacks that stay in memory. A stack is in one place: on the GPU where all of it is."""
    away = {number: layer for number, layer in numbered(manifest) if len(on_gpu(layer)) < layer.num_experts}
    arguments = ["--n-gpu-layers", "999"]
    if away:
        arguments += ["-ot", rf"^blk\.({'|'.join(map(str, sorted(away)))})\.{STACKS}$=CPU"]
    return Told(arguments=tuple(arguments), left=sum(len(on_gpu(layer)) for layer in away.values()))


def for_ktransformers(manifest: PlacementManifest, layers: int) -> Told:
    """Its strategy `frequency` takes as many experts as it is told to, those with the highest counts [1, L, E]."""
    counts = [[0.0] * _experts(manifest) for _ in range(layers)]
    for number, layer in numbered(manifest):
        for expert in on_gpu(layer):
            counts[number][expert] = 1.0
    placed, every = sum(map(sum, counts)), sum(layer.num_experts for layer in manifest.layers)
    share = min(1.0, (placed + 0.5) / every)  # times all experts, rounded down: exactly those
    arguments = ("--kt-gpu-experts-ratio", repr(share), "--kt-expert-placement-strategy", "frequency")
    return Told(arguments=(*arguments, "--init-expert-location", FILE), contents={"logical_count": [counts]})


def for_sglang(manifest: PlacementManifest, layers: int) -> Told:
    """The first N experts of every layer are on the GPU: N is the number of the layer that has fewest there."""
    order = [[*range(_experts(manifest))] for _ in range(layers)]
    counts = []
    for number, layer in numbered(manifest):
        first = on_gpu(layer)
        order[number] = [*first, *(expert for expert in order[number] if expert not in first)]
        counts.append(len(first))
    least = min(counts)
    arguments = ("--kt-num-gpu-experts", str(least), "--init-expert-location", FILE)
    return Told(
        arguments=arguments, contents={"physical_to_logical_map": order}, left=sum(counts) - least * len(counts)
    )


def _experts(manifest: PlacementManifest) -> int:
    """How many experts every layer has; FormatError where they have not equally many."""
    counts = {layer.num_experts for layer in manifest.layers}
    if len(counts) != 1:
        what = f"layers of {' and '.join(map(str, sorted(counts)))} experts, and a map has equally many of each"
        raise FormatError(what, do="place them by placement.json")
    return counts.pop()


WAYS = {
    "llama.cpp": Way(suffix=None, tell=for_llama_cpp),
    "ktransformers": Way(suffix=".pt", tell=for_ktransformers),
    "sglang": Way(suffix=".json", tell=for_sglang),
}


def check_file(runtime: str, out: Path | None) -> None:
    """RecipeError unless a file is named where, and as, the runtime wants one, and is not there yet."""
    suffix = WAYS[runtime].suffix
    if suffix is None and out is not None:
        raise RecipeError(f"{runtime} reads no file: it is told by options alone", where="--out", do="leave it out")
    if suffix is not None and (out is None or out.suffix != suffix):
        raise RecipeError(f"{runtime} reads the map from a file that ends in {suffix}", where="--out", do="name one")
    if out is not None and out.exists():
        raise RecipeError("is there already", where=f"--out {out}", do="name another, or remove it")


def told(path: Path, runtime: str, out: Path | None) -> dict[str, Any]:
    """What a runtime's command line needs for a checkpoint or a run's, in one line, and what stays in memory; the file
    is written."""
    check_file(runtime, out)
    checkpoint = checkpoint_of(path)
    manifest = read_manifest(checkpoint)
    layers = stated(read_config(checkpoint / CONFIG), LAYERS)
    numbers = [number for number, _ in numbered(manifest)]
    found = WAYS[runtime].tell(manifest, max([layers or 0, *(number + 1 for number in numbers)]))
    if out is not None:
        _write(out, found.contents)
    words = [str(out) if word == FILE else word for word in found.arguments]
    placed = sum(len(on_gpu(layer)) for layer in manifest.layers)
    return {
        "for": runtime,
        "arguments": shlex.join(words),
        "experts_on_the_gpu": placed - found.left,
        "experts_that_stay_in_memory_instead": found.left,
    } | ({} if out is None else {"path": str(out)})


def _write(out: Path, contents: dict[str, Any]) -> None:
    if out.suffix == ".json":
        write_json(out, contents)
        return
    import torch

    data = BytesIO()
    torch.save({name: torch.tensor(values) for name, values in contents.items()}, data)
    write_bytes(out, data.getvalue())
