"""moeq verify: what loads right passes, and every way of loading wrongly, and every damage, is found and named."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exporters import handmade
from family_models import save
from fork_server import ForkServer
from safetensors.torch import load_file, save_file
from strangers import changed
from tiny_models import save_tiny
from torch import nn

from moeq import pipeline
from moeq.artifacts.stage import RECORD
from moeq.artifacts.sums import NAME as SUMS
from moeq.errors import ArtifactError, EvaluationError, MissingError, RecipeError, StorageError
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.registry import EXPORTERS
from moeq.stages.context import Context
from moeq.verification import launch, probe, reference
from moeq.verification.launch import NotInstalledError
from moeq.verification.verify import Options, Verdict, require, verify

QUIET = Reporter(quiet=True)
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.group_size=16",
    "assign.code_bits=5/2", "eval.perplexity=null", "eval.compare=[]",
)  # fmt: skip
STAGES = ("profile", "losses", "assign", "quantize", "export")


def check(path: Path, **options: Any) -> Verdict:
    return verify(path, Options(**options), QUIET)


def context(model: Path, out: Path, *more: str, quiet: bool = True) -> Context:
    recipe = load_recipe(None, [*SMALL, *more])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=quiet))


@pytest.fixture(scope="module")
def run(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run up to its export."""
    out = tmp_path_factory.mktemp("run")
    pipeline.run(context(tiny_mixtral, out, "export.verify=false"), STAGES)
    return out


@pytest.fixture
def checkpoint(run: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged, without the digests of whole files."""
    shutil.copytree(run / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / RECORD).unlink()
    (tmp_path / "checkpoint" / SUMS).unlink()
    return tmp_path / "checkpoint"


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_a_native_checkpoint(run: Path, tiny_mixtral: Path) -> None:
    verdict = check(run / "checkpoint", against=str(tiny_mixtral))
    assert not verdict.problems
    count = len((run / "checkpoint" / "SHA256SUMS").read_text("utf-8").splitlines())
    assert verdict.files == (
        f"every size, sum and SHA-256 equals the manifest; SHA-256 of {count} files as in SHA256SUMS"
    )
    assert [layer.how for layer in verdict.layers] == ["experts", "experts"]
    assert all(layer.worst < 1e-6 and len(layer.expert_errors or ()) == 5 for layer in verdict.layers)
    assert verdict.logits_error < 1e-6
    assert verdict.loading is not None
    assert not any(verdict.loading.values())
    assert verdict.distance is not None
    assert verdict.distance.kl > 0
    assert 0.01 < verdict.distance.weights_error < 0.7
    assert verdict.distance.equal == len(
        [key for key in load_file(tiny_mixtral / "model.safetensors") if "exp" not in key]
    )


def test_experts_of_the_reference_one_at_a_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "GROUP_BYTES", 1)
    verdict = check(run / "checkpoint")
    assert not verdict.problems
    assert all(layer.worst < 1e-5 and len(layer.expert_errors or ()) == 5 for layer in verdict.layers)


@pytest.mark.full
def test_the_command(moeq: ForkServer, run: Path) -> None:
    """The program in a process of its own, which starts the target's."""
    done = moeq.run("verify", run / "checkpoint", "--json", fresh_probe=True)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["right"]
    assert found["target"] == "native"
    assert all(layer["worst"] < 1e-6 for layer in found["layers"])
    assert set(found["versions"]) == {"transformers", "moeq"}


def test_text_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from moeq.terminal import print_verdict

    print_verdict(check(run / "checkpoint"))
    text = " ".join(capsys.readouterr().out.split())
    assert "no key missing or unexpected" in text
    assert "loads right with native; 2 of 2 layers compared." in text


FAMILIES = (
    "mixtral", "gpt_oss", "deepseek_v3", "llama4", "longcat_flash", "dbrx", "jetmoe", "switch_transformers",
    "gemma4_text", "muse_spark", "aria",
)  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    verdict = check(save(family, tmp_path / "model", with_tokenizer=False))
    assert not verdict.problems
    assert all(layer.error is not None and layer.worst < 1e-5 for layer in verdict.layers)


def lie(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> None:
    """Have the target's loader give back a model that is not what the checkpoint says."""
    honest = probe.load

    def load(request: dict[str, Any]) -> Any:
        model, loading = honest(request)
        with torch.no_grad():
            change(model)
        return model, loading

    monkeypatch.setattr(probe, "load", load)


def swap(model: Any) -> None:
    experts = model.get_submodule("model.layers.1.mlp.experts")
    for stack in (experts.gate_up_proj, experts.down_proj):
        stack.data[[0, 2]] = stack.data[[2, 0]].clone()


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptq")
    model = handmade.model(folder / "model", "qwen3_moe")
    values = handmade.write(model, folder / "packed", handmade.gptq_config(), handmade.gptq_parts)
    handmade.twin(model, folder / "plain", values)
    return folder


def loads_plain(monkeypatch: pytest.MonkeyPatch, plain: Path) -> None:
    """Have the target load a plain checkpoint with the same values instead: no peer is needed."""
    honest = probe.load
    monkeypatch.setattr(probe, "load", lambda request: honest(request | {"checkpoint": str(plain)}))


def test_a_packed_checkpoint_of_another_tool(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads_plain(monkeypatch, gptq / "plain")
    verdict = check(gptq / "packed", target="transformers")
    assert not verdict.problems
    assert all(layer.worst < 1e-6 for layer in verdict.layers)
    again = check(gptq / "packed", target="transformers", against=str(gptq / "packed"))
    assert not again.problems
    assert again.distance is not None
    assert again.distance.weights_error == 0
    assert again.distance.kl == pytest.approx(0, abs=1e-9)


def test_swapped_experts_are_named(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads_plain(monkeypatch, gptq / "plain")
    lie(monkeypatch, swap)
    verdict = check(gptq / "packed", target="transformers")
    assert len(verdict.problems) == 2
    assert verdict.problems[0].startswith("model.layers.1.mlp.experts, expert ")
    assert "model.safetensors" in verdict.problems[0]
    assert "(2 of its experts are off)" in verdict.problems[0]
    errors = verdict.layers[1].expert_errors
    assert errors is not None
    assert [error > 0.1 for error in errors] == [True, False, True]
    assert verdict.layers[0].worst < 1e-6
    with pytest.raises(EvaluationError, match="and 1 more"):
        require(verdict)


@pytest.mark.parametrize("factor", [1.01, float("nan"), 0.0])
def test_small_and_not_finite_differences(gptq: Path, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    loads_plain(monkeypatch, gptq / "plain")
    lie(monkeypatch, lambda model: model.get_submodule("model.layers.0.mlp.experts").down_proj.data[1].mul_(factor))
    verdict = check(gptq / "packed", target="transformers")
    assert verdict.problems[0].startswith("model.layers.0.mlp.experts, expert 1, model.safetensors: off by")
    text = json.dumps(verdict.as_json())
    assert "NaN" not in text
    assert "Infinity" not in text


def test_other_layers_are_judged_by_the_logits(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is given what the target gave it: an attention that is off leaves them equal."""
    loads_plain(monkeypatch, gptq / "plain")
    lie(monkeypatch, lambda model: model.get_submodule("model.layers.0.self_attn.o_proj").weight.data.mul_(2))
    verdict = check(gptq / "packed", target="transformers")
    assert all(layer.worst < 1e-6 for layer in verdict.layers)
    assert len(verdict.problems) == 1
    assert verdict.problems[0].startswith("logits are off")


def test_missing_and_unexpected_keys(tmp_path: Path) -> None:
    model = handmade.model(tmp_path / "model", "qwen3_moe")
    edit(model / "model.safetensors", lambda tensors: tensors.pop("model.layers.0.self_attn.q_norm.weight"))
    with pytest.raises(Exception, match="q_norm"):
        check(model)


def test_what_the_loader_says_is_reported(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads_plain(monkeypatch, gptq / "plain")
    honest = probe.load
    said = {"missing_keys": ["a.weight", "b.weight"], "unexpected_keys": []}
    monkeypatch.setattr(probe, "load", lambda request: (honest(request)[0], said))
    assert check(gptq / "packed", target="transformers").problems == ("2 missing keys, the first: a.weight",)


def experts_file(checkpoint: Path) -> Path:
    return checkpoint / "experts-layer-001.safetensors"


def flip(checkpoint: Path) -> None:
    edit(
        experts_file(checkpoint),
        lambda tensors: tensors["model.layers.1.mlp.experts.3.down_proj.codes"][0, 0].bitwise_xor_(4),
    )


def test_a_flipped_bit(checkpoint: Path) -> None:
    flip(checkpoint)
    with pytest.raises(ArtifactError, match=r"experts-layer-001.*model\.layers\.1\.mlp\.experts, expert 3.*SHA-256"):
        check(checkpoint)


def test_a_missing_tensor(checkpoint: Path) -> None:
    edit(experts_file(checkpoint), lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.scales"))
    with pytest.raises(Exception, match=r"model\.layers\.1\.mlp\.experts\.2\.up_proj\.scales"):
        check(checkpoint)


def test_a_wrong_shape(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.scales"
    edit(experts_file(checkpoint), lambda tensors: tensors.update({name: torch.ones(3, 3).half()}))
    with pytest.raises(ArtifactError, match=r"expert 2"):
        check(checkpoint)


def test_a_wrong_digest(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "placement.json").read_text("utf-8"))
    manifest["layers"][0]["experts"][4]["replicas"][0]["sha256"] = "0" * 64
    (checkpoint / "placement.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(ArtifactError, match=r"model\.layers\.0\.mlp\.experts, expert 4.*SHA-256"):
        check(checkpoint)


def test_a_configuration_that_lies_about_widths(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    widths = config["quantization_config"]["experts"]["model.layers.0.mlp.experts"]
    widths[0] = 2 if widths[0] != 2 else 4
    (checkpoint / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(EvaluationError, match=r"cannot be loaded|mismatched"):
        require(check(checkpoint))


def test_against_finds_flipped_bits_of_a_conversion(
    gptq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints without digests: both sides read the flipped bit, the checkpoint that it was made of has another."""
    shutil.copytree(gptq / "packed", tmp_path / "packed")
    name = "model.layers.1.mlp.experts.2.up_proj.qweight"
    edit(tmp_path / "packed" / "model.safetensors", lambda tensors: tensors[name][3, 5].bitwise_xor_(1))
    loads_plain(monkeypatch, gptq / "plain")
    verdict = check(tmp_path / "packed", target="transformers", against=str(gptq / "packed"))
    where = "model.layers.1.mlp.experts, expert 2, up_proj, model.safetensors: its values differ"
    assert any(problem.startswith(where) for problem in verdict.problems)


def test_against_finds_swapped_experts(gptq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(tensors: dict[str, Any]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            one, other = (f"model.layers.0.mlp.experts.{expert}.gate_proj.{part}" for expert in (0, 1))
            tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()

    shutil.copytree(gptq / "packed", tmp_path / "packed")
    edit(tmp_path / "packed" / "model.safetensors", exchange)
    loads_plain(monkeypatch, gptq / "plain")
    verdict = check(tmp_path / "packed", target="transformers", against=str(gptq / "model"))
    named = [problem for problem in verdict.problems if "no rounding of these weights" in problem]
    assert [problem.split(":")[0] for problem in named] == [
        f"model.layers.0.mlp.experts, expert {expert}, gate_proj, model.safetensors" for expert in (0, 1)
    ]


def test_another_model_is_refused_before_anything_is_loaded(gptq: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    words = save_tiny(tmp_path / "words", "mixtral", vocab_size=2000)
    for path, other, why in (
        (gptq / "packed", tiny_mixtral, "another model: "),
        (tiny_mixtral, gptq / "packed", "another model: "),
        (tiny_mixtral, words, "another model: words 2000, of the checkpoint 2048; give the model that it was made of"),
    ):
        with pytest.raises(EvaluationError, match=f"{other}: {why}"):
            check(path, against=str(other))


def test_what_is_not_there(gptq: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="none: no such file or directory"):
        check(tmp_path / "none")
    with pytest.raises(RecipeError, match="unknown runtime 'vlm'; did you mean 'vllm'"):
        check(gptq / "packed", target="vlm")
    with pytest.raises(RecipeError, match="vllm cannot be imported there"):
        check(gptq / "packed", target="vllm")


def test_a_target_that_is_not_installed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = replace(EXPORTERS.get("moeq").loaders[0], packages={"no_such_package": "pip install it"})
    changed(monkeypatch, EXPORTERS, "moeq", loaders=(loader,))
    with pytest.raises(NotInstalledError, match=r"no_such_package cannot be imported.*pip install it.*--python"):
        check(run / "checkpoint")


def test_a_format_whose_package_is_not_installed(gptq: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own ImportError would be taken for a checkpoint that does not load."""
    changed(monkeypatch, EXPORTERS, "gptq", needs={"no_such_package": "pip install it"})
    with pytest.raises(NotInstalledError, match="no_such_package cannot be imported"):
        check(gptq / "packed", target="transformers")


@pytest.mark.full
def test_an_export_whose_target_is_not_installed_says_so(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = replace(EXPORTERS.get("moeq").loaders[0], packages={"no_such_package": "pip install it"})
    changed(monkeypatch, EXPORTERS, "moeq", loaders=(loader,))
    pipeline.run(context(tiny_mixtral, tmp_path / "run", quiet=False), STAGES)
    assert "not verified: target native" in " ".join(capsys.readouterr().err.split())


@pytest.mark.fresh_process
def test_an_interpreter_that_is_none(gptq: Path) -> None:
    for named, said in (("/no/python", "no such file.*--python"), ("s3://a/python", "an address, where a path is")):
        with pytest.raises(MissingError, match=f"^{named}: {said}"):
            check(gptq / "packed", python=named)


@pytest.mark.fresh_process
def test_a_process_that_dies(gptq: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory\nexit 7\n")
    python.chmod(0o755)
    with pytest.raises(EvaluationError, match="its process ended with 7: out of memory"):
        check(gptq / "packed", python=str(python))


@pytest.mark.fresh_process
def test_what_is_no_python(gptq: Path) -> None:
    wanted = "target gptqmodel, /bin/false: its process ended with 1; name with --python the interpreter"
    with pytest.raises(EvaluationError, match=wanted):
        check(gptq / "packed", python="/bin/false")


@pytest.mark.parametrize("most", [100, 20_000])  # bytes: too few for what is asked, and for what is answered
def test_a_folder_for_temporary_files_that_is_full(run: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the size of files stands in for a full disk."""
    started, before = launch.started, resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def limited(*asked: Any) -> Iterator[Any]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            with started(*asked) as process:
                yield process
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(launch, "started", limited)
    with pytest.raises(StorageError, match=r"cannot write: .*; free some space there, or set TMPDIR"):
        check(run / "checkpoint")


@pytest.mark.fresh_process
def test_export_verifies(tiny_mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.run(context(tiny_mixtral, tmp_path / "run", quiet=False), STAGES)
    assert re.search(r"verified with native: layers within (0|\d+e-0[789]), logits within", capsys.readouterr().err)


def test_an_export_that_loads_wrongly_is_no_export(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def damage(model: nn.Module) -> None:
        model.get_submodule("model.layers.0.mlp.experts").put_back()  # type: ignore[operator]
        model.get_submodule("model.layers.0.mlp.experts.1.up_proj").scales.mul_(1.5)  # type: ignore[union-attr, operator]

    with monkeypatch.context() as patch:
        lie(patch, damage)
        with pytest.raises(EvaluationError, match=r"model\.layers\.0\.mlp\.experts, expert 1: off by"):
            pipeline.run(context(tiny_mixtral, run), STAGES)
    assert not (run / "checkpoint" / RECORD).exists()
    outcomes = pipeline.run(context(tiny_mixtral, run), STAGES)
    assert [outcome.skipped for outcome in outcomes] == [True, True, True, True, False]
