"""What somebody may do to a checkpoint, and what finds it: digests, or where these are written anew, the original.

Every case is tried twice. As it is, a digest (or a header) names it. With SHA256SUMS, the provenance and the manifest's
digests written anew it is what it says that it is, and its loader, or `--against` the model, names it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from verification.tampering import edit, edit_json, edit_tensor, holder, swap, write_digests

from moeq import pipeline
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.gguf_file import read_gguf
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.provenance import check_listed
from moeq.artifacts.stage import RECORD
from moeq.artifacts.sums import write_sums
from moeq.conversion import convert
from moeq.errors import ArtifactError, EvaluationError, MoeqError
from moeq.estimation.subject import read_model
from moeq.exporters.gguf import FILE
from moeq.exporters.readers import open_packed
from moeq.inspection import inspect
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context
from moeq.verification.manifest_files import check_native
from moeq.verification.settings import compare_settings
from moeq.verification.verify import Options, require, verify
from moeq.verification.weights import compare_packed, compare_weights

QUIET = Reporter(quiet=True)
RECIPE = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.group_size=16", "losses.bits=[1,2,3,4,8]",
    "assign={method: uniform, bits: 4}", "quantize.replicas=all", "others={attention: 4, group_size: 8}",
    "eval.perplexity=null", "eval.compare=[]", "export.verify=false",
)  # fmt: skip
LAYER = "model.layers.{}.mlp.experts"
EXPERT = LAYER.format(1) + ".2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "qwen", "qwen3_moe", num_experts=4)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint with all replicas and packed attention."""
    out = tmp_path_factory.mktemp("run")
    recipe = load_recipe(None, list(RECIPE))
    context = Context(recipe=recipe, model_name=str(model), out=out, reporter=QUIET)
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    (out / "checkpoint" / RECORD).unlink()
    return out / "checkpoint"


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "checkpoint"))


@pytest.mark.full
def test_the_checkpoint_as_it_is(made: Path, model: Path) -> None:
    verdict = verify(made, Options(against=str(model)), QUIET)
    assert not verdict.problems
    assert verdict.distance is not None
    replicas = 2 * 4 * 3 * 5  # layers, experts, matrices, widths
    assert verdict.distance.recorded == replicas + 2 * 4  # and projections of attention
    assert not verdict.distance.notes
    assert verdict.distance.files == 4


def test_every_digest_written_anew_is_right_again(checkpoint: Path, model: Path) -> None:
    """What the other tests rely on: writing digests changes nothing that is looked at."""
    write_digests(checkpoint)
    assert not found_against(checkpoint, model)


@dataclass(frozen=True)
class Case:
    """change: what is done to a checkpoint; digest: what is said of it as it is; against: and once the digests are
    written anew."""

    change: Callable[[Path], object]
    digest: str
    against: str


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor * factor


def flipped(bit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.bitwise_xor(torch.full_like(tensor, bit))


def first_code(codes: torch.Tensor) -> torch.Tensor:
    changed = codes.clone()
    changed[3, 5] ^= 1
    return changed


def exchanged(tensor: torch.Tensor) -> torch.Tensor:
    """With its first two rows exchanged."""
    return tensor[[1, 0, *range(2, len(tensor))]]


def of_expert(matrix: str, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return lambda folder: edit_tensor(folder, f"{EXPERT}.{matrix}.{part}", change)


def of_rows(folder: Path) -> None:
    for part in ("codes", "scales", "zeros"):
        edit_tensor(folder, f"{EXPERT}.up_proj.{part}", exchanged)


def of_tensor(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return lambda folder: edit_tensor(folder, key, change)


def of_config(**changed: Any) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(changed))


def of_file(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / name, change)


def drop(key: str) -> Callable[[Path], object]:
    return lambda folder: edit(holder(folder, key), lambda tensors: tensors.pop(key))


def rename(key: str, name: str) -> Callable[[Path], object]:
    return lambda folder: edit(holder(folder, key), lambda tensors: tensors.update({name: tensors.pop(key)}))


def add(beside: str, name: str) -> Callable[[Path], object]:
    return lambda folder: edit(holder(folder, beside), lambda tensors: tensors.update({name: torch.ones(3)}))


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-5])


NORM, HEAD = "model.layers.1.post_attention_layernorm.weight", "lm_head.weight"
ROUTER, EMBEDDINGS = "model.layers.1.mlp.gate.weight", "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj"
SHA = "SHA-256 (of the tensor )?differs from the manifest"
CHANGED = "changed since SHA256SUMS was written"
UNLIKE, ERROR = "no rounding of these weights", "codes or scales changed"
GENERATION = "generation_config.json"


def wider(config: dict[str, Any]) -> None:
    config["quantization_config"]["experts"][LAYER.format(0)][1] = 8


CASES = {
    "two experts swapped": Case(lambda folder: swap(folder, f"{EXPERT}.", f"{LAYER.format(1)}.0."), SHA, UNLIKE),
    "two layers swapped": Case(lambda folder: swap_layers(folder), SHA, UNLIKE),
    "gate and up swapped": Case(lambda folder: swap(folder, f"{EXPERT}.gate_proj.", f"{EXPERT}.up_proj."), SHA, UNLIKE),
    "two rows swapped": Case(of_rows, SHA, f"expert 2, up_proj: ({UNLIKE}|.*{ERROR})"),
    "scales negated": Case(of_expert("gate_proj", "scales", times(-1)), SHA, UNLIKE),
    "scales 5 % larger": Case(of_expert("gate_proj", "scales", times(1.05)), SHA, f"gate_proj: .*{ERROR}"),
    "zero points shifted": Case(of_expert("down_proj", "zeros", flipped(0x11)), SHA, f"down_proj: {UNLIKE}"),
    "one code changed": Case(of_expert("up_proj", "codes", first_code), SHA, f"expert 2, up_proj: .*{ERROR}"),
    "one code of another replica": Case(
        of_tensor(f"{EXPERT}.bits2.up_proj.codes", first_code), SHA, f"expert 2, 2 bits, up_proj: .*{ERROR}"
    ),
    "one code of attention": Case(of_tensor(f"{QUERY}.codes", first_code), SHA, f"{QUERY}: .*{ERROR}"),
    "router": Case(of_tensor(ROUTER, exchanged), SHA, f"{ROUTER} is not as in qwen"),
    "norm": Case(of_tensor(NORM, times(1.001)), SHA, f"{NORM} is not as in qwen"),
    "embeddings": Case(of_tensor(EMBEDDINGS, exchanged), SHA, f"{EMBEDDINGS} is not as in qwen"),
    "head": Case(of_tensor(HEAD, exchanged), SHA, f"{HEAD} is not as in qwen"),
    "rope_theta": Case(
        of_file("config.json", lambda config: config["rope_parameters"].update(rope_theta=5e5)), CHANGED, "rope_theta"
    ),
    "num_experts_per_tok": Case(of_config(num_experts_per_tok=1), CHANGED, "chooses 3 experts, config.json 1"),
    "norm_topk_prob": Case(of_config(norm_topk_prob=False), CHANGED, "norm_topk_prob is False, in qwen True"),
    "rms_norm_eps": Case(of_config(rms_norm_eps=1e-3), CHANGED, r"rms_norm_eps is 0\.001, in qwen 1e-06"),
    "end of text": Case(of_file(GENERATION, lambda config: config.update(eos_token_id=7)), CHANGED, "eos_token_id"),
    "sampling": Case(of_file(GENERATION, lambda config: config.update(temperature=9.0)), CHANGED, "temperature"),
    "tokenizer": Case(
        of_file("tokenizer.json", lambda tokens: tokens.update(normalizer={"type": "Lowercase"})), CHANGED, "normalizer"
    ),
    "tokenizer's settings": Case(
        of_file("tokenizer_config.json", lambda settings: settings.update(add_bos_token=True)), CHANGED, "add_bos_token"
    ),
    "chat template": Case(
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        "not listed: chat_template.jinja",
        "chat_template.jinja is there, qwen has none",
    ),
    "no tokenizer": Case(lambda folder: (folder / "tokenizer.json").unlink(), "missing", "tokenizer.json is not there"),
    "norm dropped": Case(drop(NORM), "tensor is missing", f"missing keys.*{NORM}"),
    "scales dropped": Case(drop(f"{EXPERT}.up_proj.scales"), "not as the manifest says", r"up_proj\.scales"),
    "norm renamed": Case(rename(NORM, f"{NORM}s"), "tensor is missing", NORM),
    "tensor added": Case(add(NORM, "model.extra"), "the manifest does not list this tensor", "model.extra"),
    "file cut off": Case(cut("experts-layer-001.safetensors"), "truncated", "experts-layer-001"),
    "widths": Case(of_file("config.json", wider), CHANGED, "experts"),
}  # fmt: skip


MANIFEST_CASES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an expert's width": (
        lambda layer: layer["experts"][2].update(bits=layer["experts"][2]["bits"] + 1), "expert 2 of 5 bits",
    ),
    "a replica's width": (
        lambda layer: layer["experts"][1]["replicas"][1].update(bits=3), "two replicas of one width",
    ),
    "projections": (lambda layer: layer["projections"].pop(), "config.json and the manifest differ"),
    "biases": (lambda layer: layer.update(biased=True), "config.json and the manifest differ"),
    "experts a token": (lambda layer: layer.update(top_k=1), "a token chooses 1 experts, config.json 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFEST_CASES)
def test_a_manifest_that_says_otherwise_than_its_tensors_is_refused(case: str, checkpoint: Path, model: Path) -> None:
    """Even where the digests of all files are those of what lies there."""
    change, message = MANIFEST_CASES[case]
    edit_json(checkpoint / "placement.json", lambda manifest: change(manifest["layers"][1]))
    write_sums(checkpoint)
    with pytest.raises(ArtifactError, match=message):
        found_against(checkpoint, model)


def test_a_checkpoint_without_a_manifest_is_called_that(checkpoint: Path) -> None:
    """As `save_pretrained` writes one."""
    for name in ("placement.json", "SHA256SUMS"):
        (checkpoint / name).unlink()
    for read in (inspect, lambda folder: read_model(str(folder))):
        with pytest.raises(ArtifactError, match=r"packed by moeq, and without placement\.json"):
            read(checkpoint)
    with pytest.raises(ArtifactError, match=r"placement\.json: no such file; give the checkpoint as moeq wrote it"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("part", ["name", "revision"])
def test_a_manifest_of_another_model_than_its_provenance_names_is_refused(part: str, checkpoint: Path) -> None:
    """Even where the digests of all files are those of what lies there."""
    edit_json(checkpoint / "placement.json", lambda manifest: manifest["model"].update({part: "another"}))
    sha256 = digest_of_file(checkpoint / "placement.json")

    def name_it(statement: dict[str, Any]) -> None:
        (subject,) = (one for one in statement["subject"] if one["name"] == "placement.json")
        subject["digest"]["sha256"] = sha256

    edit_json(checkpoint / "provenance.json", name_it)
    write_sums(checkpoint)
    with pytest.raises(ArtifactError, match=r"placement\.json: of the model .*another.*, provenance\.json says"):
        verify(checkpoint, Options(), QUIET)


def swap_layers(folder: Path) -> None:
    """Exchange all experts of the two layers."""
    for first, second in (("experts-layer-000", "experts-layer-001"), ("replicas-layer-000", "replicas-layer-001")):
        files = [folder / f"{name}.safetensors" for name in (first, second)]
        there = [load_file(file) for file in files]
        for file, tensors, own, other in ((files[0], there[1], 1, 0), (files[1], there[0], 0, 1)):
            renamed = {n.replace(LAYER.format(own), LAYER.format(other)): tensor for n, tensor in tensors.items()}
            save_file(renamed, file, {"format": "pt"})


def found_against(checkpoint: Path, original: Path) -> list[str]:
    """What `verify --against` finds without running anything."""
    packed, source = open_packed(checkpoint, as_values=True), open_source(str(original))
    settings = compare_settings(packed, source, False)
    if (original / "placement.json").is_file():
        weights = compare_packed(open_packed(original, as_values=True), packed, QUIET)
    else:
        weights = compare_weights(source, packed, QUIET, False)
    return [*weights.problems, *(f"{key} is not as in {source.name}" for key in weights.changed), *settings.problems]


@pytest.mark.cases(25)
@pytest.mark.parametrize("name", CASES)
def test_digests_find(name: str, checkpoint: Path) -> None:
    CASES[name].change(checkpoint)
    with pytest.raises(MoeqError, match=CASES[name].digest):
        raise ArtifactError(check_native(checkpoint).files)  # what is not listed is named


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_with_digests_written_anew_the_original_finds(name: str, checkpoint: Path, model: Path) -> None:
    CASES[name].change(checkpoint)
    if name != "file cut off":
        write_digests(checkpoint)
    with pytest.raises(MoeqError, match=CASES[name].against):
        looked_at(checkpoint, model)


def looked_at(checkpoint: Path, model: Path) -> None:
    """EvaluationError with what the comparison with the model finds, or where it finds nothing the loader."""
    problems = found_against(checkpoint, model)
    if problems:
        raise EvaluationError("; ".join(problems))
    require(verify(checkpoint, Options(), QUIET))


def test_the_command_finds_what_the_comparison_finds(checkpoint: Path, model: Path) -> None:
    """Nothing of it without the model: loader and reference read the same wrong configuration and codes."""
    CASES["rope_theta"].change(checkpoint)
    CASES["one code changed"].change(checkpoint)
    write_digests(checkpoint)
    assert not verify(checkpoint, Options(), QUIET).problems
    verdict = verify(checkpoint, Options(against=str(model)), QUIET)
    assert [bool(re.search("rope_theta|written down", problem)) for problem in verdict.problems] == [True, True]


def test_errors_that_are_taken_out_of_the_manifest(checkpoint: Path, model: Path) -> None:
    def take_out(manifest: dict[str, Any]) -> None:
        del manifest["layers"][0]["experts"][1]["replicas"][0]["errors"]

    edit_json(checkpoint / "placement.json", take_out)
    write_digests(checkpoint)
    assert found_against(checkpoint, model) == ["the errors of 3 matrices are not written down, those of others are"]


def test_a_manifest_of_an_older_moeq_is_right_and_says_what_it_lacks(checkpoint: Path, model: Path) -> None:
    def older(manifest: dict[str, Any]) -> None:
        manifest.pop("tensors", None)
        for layer in manifest["layers"]:
            for expert in layer["experts"]:
                for replica in expert["replicas"]:
                    replica.pop("errors", None)
        for module in manifest["others"]:
            module.pop("error", None)

    edit_json(checkpoint / "placement.json", older)
    (checkpoint / "provenance.json").unlink()
    write_sums(checkpoint)
    verdict = verify(checkpoint, Options(against=str(model)), QUIET)
    assert not verdict.problems
    assert verdict.files.endswith("no digests of tensors outside of the experts: an older moeq made it")
    assert verdict.distance is not None
    assert [note.endswith("an older moeq made it") for note in verdict.distance.notes] == [True]
    edit_tensor(checkpoint, f"{EXPERT}.gate_proj.scales", times(-1))
    write_digests(checkpoint)
    edit_json(checkpoint / "placement.json", older)
    write_sums(checkpoint)
    assert any(UNLIKE in problem for problem in found_against(checkpoint, model))


FORMATS = ("gptq", "auto-round", "compressed-tensors", "humming", "mlx", "dequantized", "gguf")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes that every format holds."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    return save_tiny(tmp_path_factory.mktemp("wide") / "qwen", "qwen3_moe", **sizes)


@pytest.fixture(scope="module")
def native(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("native")
    wide = ("losses={group_size: 32, symmetric: true, bits: [4], methods: [rtn]}", "assign.quantizer=rtn")
    recipe = load_recipe(None, [*RECIPE[:2], RECIPE[4], *RECIPE[-3:], *wide])
    context = Context(recipe=recipe, model_name=str(wide_model), out=out, reporter=QUIET)
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return out / "checkpoint"


@pytest.fixture(scope="module", params=FORMATS)
def converted(request: pytest.FixtureRequest, native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / str(request.param)
    convert(native, request.param, out)
    return out


@pytest.mark.cases(1)
def test_a_conversion_is_right(converted: Path, native: Path, wide_model: Path) -> None:
    assert not found_against(converted, wide_model)
    assert not found_against(converted, native)


def change_expert(folder: Path, code: bool) -> None:
    """Change one code of an expert, or negate the scales of one of its matrices."""
    if (folder / FILE).is_file():
        stack = read_gguf(folder / FILE).tensors["blk.1.ffn_up_exps.weight"]
        data = bytearray((folder / FILE).read_bytes())
        block = 18  # bytes of Q4_0: a scale of 2, and 32 codes
        start, size = stack.offset + stack.bytes // 3, stack.bytes // 3  # of the second expert
        if code:
            data[start + 2] ^= 1
        else:
            for at in range(start, start + size, block):
                data[at + 1] ^= 0x80
        (folder / FILE).write_bytes(data)
        return
    if folder.joinpath("config.json").read_text("utf-8").count("switch_mlp"):
        change = some_code if code else times(-1)
        for part in ("weight",) if code else ("scales", "biases"):

            def changed(stack: torch.Tensor) -> torch.Tensor:
                words = stack.view(torch.int32) if code else stack
                words[1] = change(words[1])
                return stack

            edit_tensor(folder, f"model.layers.1.mlp.switch_mlp.up_proj.{part}", changed)
        return
    prefix = "model.layers.1.mlp.experts.1.up_proj."
    keys = {name for file in folder.glob("*.safetensors") for name in load_file(file) if name.startswith(prefix)}
    wanted = ("qweight", "weight_packed", "weight") if code else ("scales", "weight_scale", "weight")
    key = next(prefix + part for part in wanted if prefix + part in keys)
    edit_tensor(folder, key, some_code if code else times(-1))


def some_code(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[2, 3] = changed[2, 3] * 2 if tensor.is_floating_point() else changed[2, 3] ^ 1
    return changed


@pytest.mark.cases(3)
@pytest.mark.parametrize("code", [True, False], ids=["one code", "scales negated"])
def test_a_conversion_that_was_changed(
    code: bool, converted: Path, native: Path, wide_model: Path, tmp_path: Path
) -> None:
    """A single code is within what rounding does: what it was converted from tells."""
    folder = Path(shutil.copytree(converted, tmp_path / "changed"))
    change_expert(folder, code)
    with pytest.raises(ArtifactError, match=CHANGED):
        check_listed(folder)
    write_digests(folder)
    where = "model.layers.1.mlp.experts, expert 1, up_proj"
    found = found_against(folder, native)
    assert [problem.startswith(where) and "its values differ" in problem for problem in found] == [True]
    found = found_against(folder, wide_model)
    assert [problem.startswith(where) and UNLIKE in problem for problem in found] == [True] * (not code)


@pytest.mark.cases(4)
def test_settings_of_a_conversion_that_were_changed(converted: Path, wide_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "changed"))
    changed: dict[str, Any] = {"num_experts_per_tok": 1, "rms_norm_eps": 1e-3}
    if (folder / FILE).is_file():  # whose header says these, too
        config = (folder / "config.json").read_bytes()
        for key in changed:
            edit_json(folder / "config.json", lambda config, key=key: config.update({key: changed[key]}))
            write_digests(folder)
            with pytest.raises(ArtifactError, match=r"config\.json says"):
                found_against(folder, wide_model)
            (folder / "config.json").write_bytes(config)
        changed = {}
    edit_json(folder / "config.json", lambda config: config.update(changed))
    edit_json(folder / "tokenizer_config.json", lambda settings: settings.update(bos_token="<other>"))
    (folder / GENERATION).unlink()
    write_digests(folder)
    found = found_against(folder, wide_model)
    keys = (*changed, GENERATION, "bos_token")
    assert [[key for key in keys if key in problem] for problem in found] == [[key] for key in keys]
