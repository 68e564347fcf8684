"""Each runtime loads what the table says that it loads, with its own loader in a process of its own, and computes what
the dequantized model does; what the table refuses fails, or computes something else, when it is written all the same.

Skipped where the runtimes are not installed, see `peers`. Models are saved in bfloat16 and run in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from made_sources import FAMILIES, IDS, Choose, MadeSource, quantization_of, reference_logits, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeq.artifacts.targets import loaded_by
from moeq.exporters import compressed_tensors, foreign, gptq_layout, schemes, write
from moeq.exporters.foreign import WriteOptions
from moeq.numerics.layouts import row_words
from moeq_kernels.packing import pack, unpack

RIGHT = 0.002
WRONG = 0.02
PROJECTIONS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}


def by_expert(layer: int, expert: int, projection: str) -> int:
    return (2, 3, 4, 8, 16, 4)[(layer + expert) % 6]


def by_projection(layer: int, expert: int, projection: str) -> int:
    return ((2, 3, 4), (8, 4, 2), (4, 16, 8))[expert % 3][PROJECTIONS[projection]]


def odd_widths(layer: int, expert: int, projection: str) -> int:
    return (5, 6, 7)[expert % 3]


def uniform(bits: int) -> Choose:
    return lambda layer, expert, projection: bits


MIXED: dict[str, tuple[Choose, bool]] = {
    "experts": (by_expert, True),
    "projections": (by_projection, False),
}
UNIFORM: dict[str, tuple[Choose, bool]] = {f"{bits} bits": (uniform(bits), True) for bits in range(2, 9)}
OF_ONE = ("2 bits", "5 bits", "6 bits", "7 bits", "8 bits")  # mixes that one family shows
OTHERS = {"model.layers.0.self_attn.o_proj": 4, "model.layers.1.self_attn.o_proj": 8}
ODD: dict[str, tuple[Choose, bool]] = {"odd": (odd_widths, False)}
CARRIED = {
    "auto-round": ("auto-round", "auto-round", MIXED | ODD),
    "gptqmodel": ("gptqmodel", "gptqmodel", MIXED),
    "transformers": ("compressed-tensors", "transformers", UNIFORM),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: save_model(folder / family, family) for family in FAMILIES}


def logits_of(package: str, loader: str, checkpoints: list[Path], folder: Path) -> list[Any]:
    save_file({"ids": IDS}, folder / "ids.safetensors")
    return peers.load(package, loader, checkpoints, folder / "ids.safetensors")


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", list(CARRIED))
def test_the_table_has_what_is_loaded_here(name: str) -> None:
    """Every width, and both grids where zero points are read."""
    target, mixes = loaded_by(name), CARRIED[name][2].values()
    assert target is not None
    places = [(0, expert, projection) for expert in range(6) for projection in PROJECTIONS]
    assert {choose(*place) for choose, _ in mixes for place in places} == set(target.widths)
    assert {symmetric for _, symmetric in mixes} == ({True} if target.symmetric_only else {True, False})


@pytest.mark.full
@pytest.mark.parametrize(("name", "mix"), [(name, mix) for name in CARRIED for mix in CARRIED[name][2]])
def test_what_the_table_carries_loads_right(name: str, mix: str, models: dict[str, Path], tmp_path: Path) -> None:
    package, loader, mixes = CARRIED[name]
    peers.interpreter(package)
    wanted = {}
    choose, symmetric = mixes[mix]
    for family, model in {"olmoe": models["olmoe"]}.items() if mix in OF_ONE else models.items():
        others = OTHERS if mix == "projections" and family != "deepseek_v3" else None
        source = MadeSource(model, choose, symmetric=symmetric, others=others)
        out = tmp_path / f"{family}-{mix}"
        write(name, source, out, WriteOptions())
        wanted[out] = reference_logits(source)
    found = logits_of(package, loader, list(wanted), tmp_path)
    measured = {
        out.name: logits if isinstance(logits, str) else difference(logits, wanted[out])
        for out, logits in zip(wanted, found, strict=True)
    }
    wrong = {which: value for which, value in measured.items() if isinstance(value, str) or value > RIGHT}
    assert not wrong, measured


def test_widened_codes_load_right(models: dict[str, Path], tmp_path: Path) -> None:
    """One, two and three bits with zero points in the 4-bit symmetric grid that transformers takes."""
    peers.interpreter("compressed-tensors")
    choose: Choose = lambda layer, expert, projection: 1 + expert % 3  # noqa: E731
    source = MadeSource(models["olmoe"], choose, symmetric=False)
    write("transformers", source, tmp_path / "out", WriteOptions(widen=True))
    found = logits_of("compressed-tensors", "transformers", [tmp_path / "out"], tmp_path)[0]
    assert not isinstance(found, str), found
    assert difference(found, reference_logits(source)) < RIGHT


def test_gptqmodel_does_not_find_experts_by_the_familys_names(tmp_path: Path) -> None:
    """Why its checkpoints have names of their own, and vLLM's others. Notices when it gets better."""
    peers.interpreter("gptqmodel")
    source = MadeSource(save_model(tmp_path / "model", "mixtral", intermediate_size=128), uniform(4), group_size=64)
    for name in ("gptqmodel", "vllm-gptq"):
        write(name, source, tmp_path / name, WriteOptions())
    own, familys = logits_of("gptqmodel", "gptqmodel", [tmp_path / "gptqmodel", tmp_path / "vllm-gptq"], tmp_path)
    assert difference(own, reference_logits(source)) < RIGHT
    assert isinstance(familys, str)
    assert "Missing required quantized weights" in familys


def forced(name: str, source: MadeSource, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write what would be refused."""
    with monkeypatch.context() as patch:
        patch.setattr(foreign, "refuse_matrix", lambda target, grid: None)
        patch.setattr(schemes.Scheme, "check", lambda self, name, matrix: None)
        write(name, source, out, WriteOptions())


def edit(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the quantization_config of a checkpoint."""
    config = json.loads((out / "config.json").read_text("utf-8"))
    change(config["quantization_config"])
    (out / "config.json").write_text(json.dumps(config))


def one_bit(name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSource:
    source = MadeSource(model, lambda layer, expert, projection: 1 if expert == 2 else 4)
    forced(name, source, out, monkeypatch)
    return source


def five_bits(name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSource:
    """gptqmodel has kernels for 5 bits, with codes packed otherwise."""
    source = MadeSource(model, uniform(5))
    forced(name, source, out, monkeypatch)
    return source


def odd_sizes(name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSource:
    """Matrices of 72 rows, or inputs, which are whole words but no multiples of 32."""
    save_model(out.parent / "odd", "olmoe", intermediate_size=72)
    source = MadeSource(out.parent / "odd", uniform(4), group_size=8)
    forced(name, source, out, monkeypatch)
    return source


def short_groups(name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSource:
    source = MadeSource(model, uniform(4), group_size=64)  # down_proj of mixtral and olmoe has 96 inputs
    forced(name, source, out, monkeypatch)
    return source


def zero_points_less_one(name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSource:
    """Zero points of 0 (no weight is negative) in the first format, that of symmetric grids."""
    source = MadeSource(model, uniform(4), symmetric=False, positive=True)
    original = gptq_layout.linear_tensors
    with monkeypatch.context() as patch:
        patch.setattr(gptq_layout, "ZeroPoints", _Never)
        patch.setattr(gptq_layout, "linear_tensors", lambda weight, **how: _with_zeros(original, weight, **how))
        forced(name, source, out, monkeypatch)
    return source


class _Never(Exception):
    pass


def _with_zeros(original: Any, weight: Any, *, less_one: bool, ordered: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = original(weight, less_one=False, ordered=ordered)
    if less_one and weight.zeros is not None:
        zeros = unpack(weight.zeros, weight.bits, weight.scales.shape[-1])
        found["qzeros"] = gptq_layout.zero_words(zeros, weight.bits, less_one=True)
    return found


def several_widths(name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSource:
    """A group of config.json for every width, as compressed-tensors itself would have it."""
    source = MadeSource(model, lambda layer, expert, projection: 8 if expert % 2 else 4)
    forced(name, source, out, monkeypatch)

    def change(declared: dict[str, Any]) -> None:
        first = declared["config_groups"]["group_0"]
        second = json.loads(json.dumps(first))
        first["targets"] = [r"re:.*\.experts\.[024]\..*$"]
        second["targets"] = [r"re:.*\.experts\.[135]\..*$"]
        second["weights"]["num_bits"] = 8
        declared["config_groups"] = {"group_0": first, "group_1": second}

    edit(out, change)
    return source


def several_layers(name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSource:
    """A group of config.json for every layer."""
    source = MadeSource(model, lambda layer, expert, projection: 8 if layer else 4)
    forced(name, source, out, monkeypatch)

    def change(declared: dict[str, Any]) -> None:
        first = declared["config_groups"]["group_0"]
        second = json.loads(json.dumps(first))
        first["targets"], second["targets"] = [r"re:.*layers\.0\..*experts.*"], [r"re:.*layers\.1\..*experts.*"]
        second["weights"]["num_bits"] = 8
        declared["config_groups"] = {"group_0": first, "group_1": second}

    edit(out, change)
    return source


def zero_points(name: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSource:
    """compressed-tensors' own tensor of zero points, and symmetric: false."""
    source = MadeSource(model, uniform(4), symmetric=False)
    original = compressed_tensors.linear_tensors

    def with_zeros(weight: Any) -> dict[str, Tensor]:
        zeros = unpack(weight.zeros, weight.bits, weight.scales.shape[-1])
        return original(weight) | {"weight_zero_point": row_words(pack(zeros.mT, weight.bits)).mT.contiguous()}

    with monkeypatch.context() as patch:
        patch.setattr(compressed_tensors, "linear_tensors", with_zeros)
        forced(name, source, out, monkeypatch)
    edit(out, lambda declared: declared["config_groups"]["group_0"]["weights"].update(symmetric=False))
    return source


FORCED = {
    "auto-round": (one_bit, short_groups, odd_sizes, zero_points_less_one),
    "gptqmodel": (one_bit, five_bits, odd_sizes, zero_points_less_one),
    "transformers": (several_widths, several_layers, zero_points, short_groups),
}


@pytest.mark.full
@pytest.mark.parametrize("name", list(FORCED))
def test_what_the_table_refuses_fails_or_lies(
    name: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notices when a runtime gets better: the row may then be widened."""
    package, loader, _ = CARRIED[name]
    peers.interpreter(package)
    wanted = {}
    for force in FORCED[name]:
        out = tmp_path / force.__name__
        source = force(name, models["olmoe"], out, monkeypatch)
        wanted[out] = reference_logits(source)
    found = logits_of(package, loader, list(wanted), tmp_path)
    measured = {
        out.name: logits if isinstance(logits, str) else difference(logits, wanted[out])
        for out, logits in zip(wanted, found, strict=True)
    }
    right = {which: value for which, value in measured.items() if not isinstance(value, str) and value < WRONG}
    assert not right, measured


def test_files_hold_what_config_says(models: dict[str, Path], tmp_path: Path) -> None:
    source = MadeSource(models["olmoe"], by_expert)
    write("auto-round", source, tmp_path / "out", WriteOptions())
    declared = quantization_of(tmp_path / "out")
    assert declared["block_name_to_quantize"] == "model.layers"
    tensors = load_file(tmp_path / "out" / "model-experts-000.safetensors")
    assert tensors["model.layers.0.mlp.experts.4.up_proj.weight"].dtype == torch.bfloat16
    text = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "auto-round 0.16.1" in text
    assert "at 3 code bits" in text
