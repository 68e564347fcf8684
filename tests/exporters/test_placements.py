"""Where experts live, as other runtimes are told it, and as sixty lines of torch in the documentation read it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from documents import ROOT, blocks
from made_sources import MadeSource, save_model
from typer.testing import CliRunner

from moeq.artifacts.gguf_file import read_gguf
from moeq.artifacts.manifest import PlacementManifest, manifest_json, read_manifest
from moeq.cli import app
from moeq.errors import FormatError, RecipeError
from moeq.exporters import placements, write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf import FILE
from moeq.exporters.native_reader import NativeReader
from moeq.numerics.storing import packed_of
from moeq_kernels.packed import PackedWeight


def placed(checkpoint: Path, tiers: list[list[str]]) -> PlacementManifest:
    """A checkpoint's manifest with the experts of its layers on these tiers, the later the more important."""
    data = manifest_json(read_manifest(checkpoint))
    for layer, names in zip(data["layers"], tiers, strict=True):
        for expert, tier in zip(layer["experts"], names, strict=True):
            expert |= {"tier": tier, "importance": float(expert["expert"])}
    (checkpoint / "placement.json").write_text(json.dumps(data), "utf-8")
    (checkpoint / "SHA256SUMS").unlink(missing_ok=True)  # which has the digest of the one before
    return read_manifest(checkpoint)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six experts in two layers: every width, widths by matrix, dense matrices."""
    folder = tmp_path_factory.mktemp("native")
    model = save_model(folder / "model", "mixtral", sliding_window=None)
    widths = (1, 2, 3, 4, 8, 16)
    source = MadeSource(
        model,
        lambda layer, expert, projection: widths[(layer * (projection == "up_proj") + expert) % 6],
        group_size=64,
        symmetric=False,
    )
    write("native", source, folder / "checkpoint", WriteOptions())
    placed(folder / "checkpoint", [["gpu"] * 6, ["gpu", "host", "gpu", "ndp", "disk", "gpu"]])
    return folder / "checkpoint"


def the_readers_code() -> str:
    (block,) = [block for block in blocks(ROOT / "docs" / "formats.md") if "def place(" in block.text]
    return block.text


def test_the_documented_reader_places_every_expert_and_reads_it(native: Path, tmp_path: Path) -> None:
    text = the_readers_code()
    assert len(text.splitlines()) <= 60
    assert "moeq" not in text
    found: dict[str, Any] = {}
    exec(text.replace('"run/checkpoint", DEVICES', repr(str(native)) + ', {"gpu": "meta"}'), found)
    reader = NativeReader(native)
    devices = {
        layer: [next(iter(expert["up_proj"].parts.values())).device.type for expert in experts]
        for layer, experts in found["experts"].items()
    }
    assert [*devices.values()] == [["meta"] * 6, ["meta", "cpu", "meta", "cpu", "cpu", "meta"]]
    here = found["place"](native, {})
    for layer in reader.layers:
        for expert, matrices in enumerate(here[layer.name]):
            assert set(matrices) == set(layer.projections)
            for name, weight in reader.expert(layer, expert)[0].items():
                wanted = weight.dequantize() if isinstance(weight, PackedWeight) else weight.float()
                assert torch.equal(matrices[name].values(), wanted), (layer.name, expert, name)
    gone = {"name": "moe", "hidden_size": 64, "intermediate_size": 64, "experts": [{"tier": "ndp", "replicas": []}]}
    (tmp_path / "placement.json").write_text(json.dumps({"layers": [gone]}), "utf-8")
    assert found["place"](tmp_path, {}) == {"moe": [{}]}  # of a dropped expert nothing is stored
    with pytest.raises(NotImplementedError, match="no grids"):
        found["Matrix"]({"codes": None, "scales": None}, 2, 64, {"group_size": -1, "state_bits": 8}).values()


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_documented_reader_reads_nested_grids(symmetric: bool) -> None:
    from moeq.numerics.nested import quantize

    weight = torch.randn(1, 6, 40, generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}
    exec(the_readers_code().rpartition("\n\n")[0], found)
    made = quantize(weight, None, group_size=16, symmetric=symmetric)
    for bits in (2, 3, 4):
        packed = packed_of(made, bits, symmetric, nested=True).map(lambda part: part[0])
        layout = {"group_size": 16, "symmetric": symmetric, "nested": True}
        assert torch.equal(found["Matrix"](packed.parts(), bits, 40, layout).values(), packed.dequantize())


def matches(arguments: str, names: list[str]) -> set[str]:
    """The tensors that llama.cpp would put elsewhere: patterns are searched for, up to the first equals sign."""
    words = shlex.split(arguments)
    if "-ot" not in words:
        return set()
    each = words[words.index("-ot") + 1].split(",")
    patterns = [one.partition("=")[0] for one in each]
    assert {one.partition("=")[2] for one in each} == {"CPU"}
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


@pytest.mark.full
def test_llama_cpp_keeps_the_stacks_in_memory_that_are_not_all_on_the_gpu(tmp_path: Path) -> None:
    peers.module("gguf")
    model = save_model(tmp_path / "model", "mixtral", num_hidden_layers=12, sliding_window=None)
    source = MadeSource(model, lambda *_: 4)
    write("llama.cpp", source, tmp_path / "gguf", WriteOptions())
    names = [*read_gguf(tmp_path / "gguf" / FILE).tensors]
    write("native", source, tmp_path / "native", WriteOptions())
    tiers = [["gpu"] * 6 for _ in range(12)]
    tiers[1][2] = tiers[11][0] = "host"
    placed(tmp_path / "native", tiers)
    told = placements.told(tmp_path / "native", "llama.cpp", None)
    stacks = {f"blk.{block}.ffn_{name}_exps.weight" for block in (1, 11) for name in ("gate", "up", "down")}
    assert matches(told["arguments"], names) == stacks
    assert stacks <= set(names)
    assert (told["experts_on_the_gpu"], told["experts_that_stay_in_memory_instead"]) == (60, 10)
    placed(tmp_path / "native", [["gpu"] * 6] * 12)
    assert matches(placements.told(tmp_path / "native", "llama.cpp", None)["arguments"], names) == set()
    placed(tmp_path / "native", [["host"] * 6] * 12)
    everywhere = {name for name in names if "_exps" in name}
    assert matches(placements.told(tmp_path / "native", "llama.cpp", None)["arguments"], names) == everywhere


def as_ktransformers_does(file: Path, share: float, layers: int, experts: int) -> torch.Tensor:
    """Which experts its strategy `frequency` puts on the GPU, bool [L, E]: those of the highest counts in all."""
    counts = torch.load(file, weights_only=True)["logical_count"]
    assert counts.shape == (1, layers, experts)
    scores = counts.sum(0).flatten()
    mask = torch.zeros(layers * experts, dtype=torch.bool)
    mask[scores.topk(int(layers * experts * share)).indices] = True
    return mask.view(layers, experts)


@pytest.mark.parametrize("wanted", [[0, 0], [6, 6], [5, 2], [1, 0]])
def test_ktransformers_gets_exactly_those(wanted: list[int], native: Path, tmp_path: Path) -> None:
    before = (native / "placement.json").read_bytes()
    placed(native, [["gpu"] * count + ["host"] * (6 - count) for count in wanted])
    told = placements.told(native, "ktransformers", tmp_path / "map.pt")
    (native / "placement.json").write_bytes(before)
    words = shlex.split(told["arguments"])
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--kt-expert-placement-strategy"] == "frequency"
    assert given["--init-expert-location"] == str(tmp_path / "map.pt")
    mask = as_ktransformers_does(tmp_path / "map.pt", float(given["--kt-gpu-experts-ratio"]), 2, 6)
    assert mask.tolist() == [[True] * count + [False] * (6 - count) for count in wanted]
    assert told["experts_on_the_gpu"] == sum(wanted)


def test_sglang_gets_equally_many_of_every_layer_the_most_important_first(native: Path, tmp_path: Path) -> None:
    before = (native / "placement.json").read_bytes()
    placed(native, [["gpu", "host", "gpu", "host", "gpu", "gpu"], ["host", "gpu", "host", "host", "gpu", "disk"]])
    told = placements.told(native, "sglang", tmp_path / "map.json")
    (native / "placement.json").write_bytes(before)
    order = json.loads((tmp_path / "map.json").read_text("utf-8"))["physical_to_logical_map"]
    assert order == [[5, 4, 2, 0, 1, 3], [4, 1, 0, 2, 3, 5]]
    assert shlex.split(told["arguments"])[:2] == ["--kt-num-gpu-experts", "2"]
    assert (told["experts_on_the_gpu"], told["experts_that_stay_in_memory_instead"]) == (4, 2)


def test_layers_of_several_counts_have_no_map(native: Path) -> None:
    manifest = read_manifest(native)
    first = manifest.layers[0]
    shorter = first.model_copy(update={"num_experts": 5, "experts": first.experts[:5]})
    odd = manifest.model_copy(update={"layers": (shorter, *manifest.layers[1:])})
    with pytest.raises(FormatError, match="layers of 5 and 6 experts"):
        placements.for_sglang(odd, 2)


def test_the_command(native: Path, tmp_path: Path) -> None:
    out = tmp_path / "experts.json"
    words = ["inspect", str(native), "--placement-for", "sglang", "--out", str(out), "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["path"] == str(out)
    assert out.is_file()
    run = CliRunner().invoke(app, ["inspect", str(native.parent), "--placement-for", "llama.cpp", "--json"])
    assert json.loads(run.stdout)["arguments"] == placements.told(native, "llama.cpp", None)["arguments"]
    with pytest.raises(RecipeError, match="is there already"):
        placements.told(native, "sglang", out)
