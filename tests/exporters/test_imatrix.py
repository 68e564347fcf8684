"""The importance matrix: sums of squares as transformers' own forward has them, the file to the byte, and what
llama.cpp's own quantizer makes of it.

Skipped where gguf, or llama-cpp-python, is not installed.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf_made
import peers
import pytest
import torch
from made_sources import MadeSource, save_model
from safetensors.torch import save_file
from tiny_models import save_tiny
from torch import Tensor
from typer.testing import CliRunner

from moeq.bundled import bundled_path
from moeq.cli import app
from moeq.errors import FormatError, NotFiniteError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf import FILE
from moeq.exporters.gguf_families import stack_shapes
from moeq.exporters.imatrix import check, matrix_of
from moeq.models.non_experts import find_others
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import imatrix
from moeq.stages.context import Context

SMALL = ("corpus.sequences=8", "corpus.sequence_length=16", "corpus.batch_size=3")


def context(model: Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def read(path: Path) -> dict[str, Any]:
    """The file as gguf's own reader has it: {matrix: (sums [E, K], counts [E])}, and its keys under ""."""
    reader = peers.module("gguf").GGUFReader(path)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    found: dict[str, Any] = {name: (tensors[f"{name}.in_sum2"], tensors[f"{name}.counts"][:, 0]) for name in names}
    assert len(tensors) == 2 * len(names)
    return found | {"": {key: field.contents() for key, field in reader.fields.items()}}


def wanted(one: Context, path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts of every matrix, from each call of torch's linear in transformers' own forward."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()
    sums: dict[int, Any] = defaultdict(float)
    counts: dict[int, int] = defaultdict(int)
    linear = torch.nn.functional.linear

    def counting(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        sums[weight.data_ptr()] += rows.double().square().sum(0)
        counts[weight.data_ptr()] += len(rows)
        return linear(inputs, weight, bias)

    text = one.text.grown_calibration
    with patch("torch.nn.functional.linear", counting), torch.no_grad():
        for ids, mask in zip(text.ids, text.mask, strict=True):
            model(input_ids=ids[mask.bool()].unsqueeze(0))

    def of(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros(weights[0].shape[-1], dtype=torch.float64)
        places = [weight.data_ptr() for weight in weights]
        return torch.stack([nothing + sums[place] for place in places]), torch.tensor([counts[one] for one in places])

    found = {}
    for number, layer in enumerate(model.model.layers):
        for name, stem in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "output")):
            found[f"blk.{number}.attn_{stem}.weight"] = of([getattr(layer.self_attn, name).weight])
        if not hasattr(layer.mlp, "experts"):
            for stem in ("gate", "up", "down"):
                found[f"blk.{number}.ffn_{stem}.weight"] = of([getattr(layer.mlp, f"{stem}_proj").weight])
            continue
        experts = layer.mlp.experts
        for stem in ("gate", "up"):
            found[f"blk.{number}.ffn_{stem}_exps.weight"] = of(list(experts.gate_up_proj))
        found[f"blk.{number}.ffn_down_exps.weight"] = of(list(experts.down_proj))
    return found | {"output.weight": of([model.lm_head.weight])}


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("stream", ["never", "always"])
def test_sums_are_those_of_transformers_forward(family: str, stream: str, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "model", family)
    one = context(path, tmp_path / "run", f"stream={stream}")
    summary = imatrix.write(one, tmp_path / "imatrix.gguf")
    found, right = read(tmp_path / "imatrix.gguf"), wanted(one, path)
    keys = found.pop("")
    assert found.keys() == right.keys()
    for name, (sums, counts) in right.items():
        assert torch.equal(found[name][1].long(), counts), name
        torch.testing.assert_close(found[name][0], sums.float(), rtol=1e-4, atol=1e-6 * float(sums.max()), msg=name)
    assert keys["imatrix.chunk_count"] == 8
    tokens = int(one.text.grown_calibration.mask.sum())
    assert summary["tokens"] == tokens == int(found["blk.0.attn_q.weight"][1])
    assert keys["imatrix.datasets"] == list(one.text.corpus_names)


def test_pads_count_for_nothing_and_so_do_experts_without_tokens(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3_moe", num_experts=64)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in ("a b c", "one two three four five six")))
    one = context(model, tmp_path / "run", f"corpus.source={text}", "corpus.sequences=2", "corpus.packed=false")
    summary = imatrix.write(one, tmp_path / "imatrix.gguf")
    found, right = read(tmp_path / "imatrix.gguf"), wanted(one, model)
    counts = found["blk.0.ffn_down_exps.weight"][1]
    assert not bool(one.text.grown_calibration.mask.all())
    assert torch.equal(counts.long(), right["blk.0.ffn_down_exps.weight"][1])
    unseen = counts == 0
    assert not bool(found["blk.0.ffn_down_exps.weight"][0][unseen].any())
    assert summary["experts_without_tokens"] >= int(unseen.sum()) > 0


def test_the_file_is_that_of_the_format_to_the_byte(tmp_path: Path) -> None:
    peers.module("gguf")
    one = context(save_tiny(tmp_path / "model", "mixtral"), tmp_path / "run")
    imatrix.write(one, tmp_path / "imatrix.gguf")
    found = read(tmp_path / "imatrix.gguf")
    found.pop("")
    tensors = {}
    for name in sorted(found):
        for ending, values in (("in_sum2", found[name][0]), ("counts", found[name][1].unsqueeze(1))):
            flat = values.flatten().tolist()
            tensors[f"{name}.{ending}"] = (0, tuple(values.shape), struct.pack(f"<{len(flat)}f", *flat))
    fields = {
        "general.type": "imatrix",
        "imatrix.datasets": list(one.text.corpus_names),
        "imatrix.chunk_count": 8,
        "imatrix.chunk_size": 16,
    }
    assert (tmp_path / "imatrix.gguf").read_bytes() == gguf_made.gguf_bytes(fields, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imatrix.gguf", "model"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_every_matrix_of_the_file_has_a_name(family: str, tmp_path: Path) -> None:
    gguf = peers.module("gguf")
    settings: dict[str, Any] = {"mixtral": {"sliding_window": None}, "qwen3_moe": {"norm_topk_prob": True}}.get(
        family, {"norm_topk_prob": False}
    )
    settings |= {"num_key_value_heads": 4} if family == "olmoe" else {}
    settings |= {"mlp_only_layers": []} if family.startswith("qwen") else {}
    settings |= {"n_group": 2, "topk_group": 1} if family == "deepseek_v3" else {}
    source = MadeSource(save_model(tmp_path / "model", family, **settings), lambda *place: 16)
    write("llama.cpp", source, tmp_path / "plain", WriteOptions())
    there = {
        tensor.name: tensor.shape.tolist()
        for tensor in gguf.GGUFReader(tmp_path / "plain" / FILE).tensors
        if len(tensor.shape) > 1 and "_inp" not in tensor.name and "_exps" not in tensor.name
    }
    others = find_others(source.model, source.layers, source.source)
    named = {matrix_of(source.model.config, module): module for module in others.modules}
    named.pop(None)
    lacking = {name for name in there if not name.endswith(("attn_k_b.weight", "attn_v_b.weight"))} - {*named}
    assert lacking == {"token_embd.weight"}
    for name, module in named.items():
        assert there[str(name)] == [module.inputs, module.rows]
    summary = imatrix.write(context(tmp_path / "model", tmp_path / "run"), tmp_path / "imatrix.gguf")
    stacks = {*stack_shapes(source.layers)}
    assert read(tmp_path / "imatrix.gguf").keys() == {*named, *stacks, ""}
    assert summary.get("kv_b_proj_left_out") == (3 if family == "deepseek_v3" else None)


def test_the_command(tmp_path: Path) -> None:
    peers.module("gguf")
    model, out = save_tiny(tmp_path / "model", "mixtral"), tmp_path / "imatrix.gguf"
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["profile", "--model", str(model), "--out", str(tmp_path / "run"), *settings]
    done = CliRunner().invoke(app, [*words, "--imatrix", str(out), "--json"], catch_exceptions=False)
    told = json.loads(done.stdout)
    assert told["imatrix"]["path"] == str(out)
    assert told["imatrix"]["matrices"] == 2 * 7 + 1 == len(read(out)) - 1
    assert told["summary"]["tokens"] == told["imatrix"]["tokens"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    peers.module("gguf")
    model = save_tiny(tmp_path / "model", "mixtral")
    one = context(model, tmp_path / "run")
    head = one.model.module.get_submodule("lm_head")
    head.register_forward_pre_hook(lambda _, given: (given[0] * float("inf"),))
    with pytest.raises(NotFiniteError, match=r"output\.weight: inputs of a matrix are not finite"):
        imatrix.write(one, tmp_path / "imatrix.gguf")
    assert not list(tmp_path.glob("imatrix*"))
    config: Any = one.model.skeleton.config
    config.model_type = "jetmoe"
    with pytest.raises(FormatError, match="moeq knows no names of its tensors in GGUF"):
        check(config)


TEXTS = 12
TYPES = {"Q4_0": "Q2_K", "Q5_0": "IQ3_S"}  # of gate and up, whose rows are no blocks of 256; of down


def quantized(folder: Path, source: Path, first: str, down: str, means: dict[str, list[float]]) -> Path:
    """What llama.cpp's own quantizer makes of a file; only experts, since its AMX code dies of Q8_0 as small."""
    gguf = peers.module("gguf")
    folder.mkdir()
    kinds = {"attn_|token_embd": "F16", "ffn_(gate|up)_exps": first, "ffn_down_exps": down}
    job = {
        "source": str(source),
        "out": str(folder / FILE),
        "types": {pattern: int(gguf.GGMLQuantizationType[kind]) for pattern, kind in kinds.items()},
        "ftype": int(gguf.LlamaFileType.MOSTLY_Q8_0),
        "imatrix": means,
    }
    (folder / "job.json").write_text(json.dumps(job))
    peers.run("llama-cpp-python", Path(__file__).parent / "peer_quantize.py", folder / "job.json")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The bundled model, which was trained, as GGUF, and what llama-quantize makes of its importance matrix."""
    peers.interpreter("llama-cpp-python")
    folder = tmp_path_factory.mktemp("trained")
    write("llama.cpp", MadeSource(bundled_path("tiny-mixtral"), lambda *place: 16), folder / "plain", WriteOptions())
    recipe = load_recipe(None, ["corpus.sequences=32"])
    one = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=folder / "run", reporter=Reporter(quiet=True))
    imatrix.write(one, folder / "imatrix.gguf")
    found = read(folder / "imatrix.gguf")
    found.pop("")
    means = {
        name: torch.where(counts.unsqueeze(1) > 0, sums / counts.unsqueeze(1), 1.0).flatten().tolist()
        for name, (sums, counts) in found.items()
    }
    return folder / "plain", means


def divergences(plain: Path, made: list[Path], folder: Path) -> list[float]:
    """Mean KL divergence of llama.cpp's predictions on held-out text from those of the file in full precision."""
    from transformers import AutoTokenizer

    lines = (bundled_path("corpus/evaluation.jsonl")).read_text("utf-8").splitlines()
    tokenizer = AutoTokenizer.from_pretrained(bundled_path("tiny-mixtral"))
    texts = [tokenizer(json.loads(line)["text"])["input_ids"][:96] for line in lines[: TEXTS * 4]]
    ids = torch.tensor([text for text in texts if len(text) == 96][:TEXTS])
    assert len(ids) == TEXTS
    save_file({"ids": ids}, folder / "ids.safetensors")
    logits = peers.load("llama-cpp-python", "llama.cpp", [plain, *made], folder / "ids.safetensors")
    assert not [one for one in logits if isinstance(one, str)]
    exact, *others = [one.log_softmax(-1) for one in logits]
    return [float((exact.exp() * (exact - other)).sum(-1).mean()) for other in others]


def test_llama_cpps_quantizer_loses_less_with_it(trained: tuple[Path, dict[str, list[float]]], tmp_path: Path) -> None:
    plain, means = trained
    made = [
        quantized(tmp_path / f"{down}-{len(known)}", plain / FILE, first, down, known)
        for first, down in TYPES.items()
        for known in ({}, means)
    ]
    without, with_it = (divergences(plain, made, tmp_path)[start::2] for start in (0, 1))
    print(f"KL without {without}, with {with_it}")
    assert all(less < more for less, more in zip(with_it, without, strict=True)), (with_it, without)


def test_types_that_need_it(trained: tuple[Path, dict[str, list[float]]], tmp_path: Path) -> None:
    plain, means = trained
    with pytest.raises(AssertionError, match="requires an imatrix"):
        quantized(tmp_path / "without", plain / FILE, "Q8_0", "IQ2_XS", {})
    made = quantized(tmp_path / "with", plain / FILE, "Q8_0", "IQ2_XS", means)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in peers.module("gguf").GGUFReader(made / FILE).tensors}
    assert {kinds[f"blk.{layer}.ffn_down_exps.weight"] for layer in range(4)} == {"IQ2_XS"}
    (found,) = divergences(plain, [made], tmp_path)
    assert found < 0.1
    job = {"model": str(made / FILE), "text": "Once there was", "tokens": 12}
    (tmp_path / "job.json").write_text(json.dumps(job))
    said = json.loads(peers.run("llama-cpp-python", Path(__file__).parent / "peer_llama.py", tmp_path / "job.json"))
    assert len(said["generated"]) == 12
