"""Checkpoints with layers that draft later tokens: the rest is made small, and what is left behind is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from family_models import save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from moeq import cli
from moeq.errors import ModelError
from moeq.models import loading
from moeq.models.drafts import draft_keys, left_drafts, without_drafting
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel

QUICK = ["corpus.sequences=4", "corpus.sequence_length=32", "eval.perplexity=null", "eval.compare=[]"]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 with a layer more, as its authors store it."""
    folder = save("deepseek_v3", tmp_path_factory.mktemp("drafting") / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key in [key for key in tensors if key.startswith("model.layers.2.")]:
        tensors[key.replace("layers.2.", "layers.3.")] = tensors[key].clone()
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(40, 80)
    tensors["model.layers.3.shared_head.head.weight"] = torch.ones(2048, 40)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def test_it_loads_as_without_them(drafting: Path, tmp_path: Path) -> None:
    plain = loading.load_model(open_source(str(save("deepseek_v3", tmp_path))), torch.float32, torch.device("cpu"))
    source, ids = open_source(str(drafting)), torch.arange(3, 15)[None]
    wanted = plain(input_ids=ids).logits
    assert torch.equal(loading.load_model(source, torch.float32, torch.device("cpu"))(input_ids=ids).logits, wanted)
    streamed = StreamedModel(source, torch.float32, torch.device("cpu"))
    assert torch.equal(streamed.model(input_ids=ids).logits, wanted)


@pytest.mark.full
def test_a_run_says_what_it_leaves_behind(drafting: Path, tmp_path: Path) -> None:
    """Terminal and report name it; the checkpoint has no such tensor and states no such layer."""
    sets = [word for setting in QUICK for word in ("--set", setting)]
    done = CliRunner().invoke(
        cli.app, ["run", str(drafting), "--quality", "fast", "--bits", "3.5", "--out", str(tmp_path / "run"), *sets]
    )
    assert done.exit_code == 0, done.output
    told = left_drafts(open_source(str(drafting)).drafts)
    assert told is not None
    assert told.startswith("left out: layers that draft later tokens (multi-token prediction), 34 tensors, ")
    assert told in " ".join(done.output.split())
    made = tmp_path / "run" / "checkpoint"
    stored = [key for path in made.glob("*.safetensors") for key in load_file(path)]
    assert stored
    assert not [key for key in stored if "layers.3." in key]
    assert json.loads((made / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert left_drafts(open_source(str(made)).drafts) is None
    assert "draft later tokens" in (tmp_path / "run" / "report" / "report.html").read_text("utf-8")
    shown = CliRunner().invoke(cli.app, ["inspect", str(drafting), "--json"])
    assert json.loads(shown.output)["left_out"] == told.removeprefix("left out: ")
    assert "left_out" not in CliRunner().invoke(cli.app, ["inspect", str(made), "--json"]).output
    model = AutoModelForCausalLM.from_pretrained(made)
    assert torch.isfinite(model(input_ids=torch.arange(3, 15)[None]).logits).all()


@pytest.mark.parametrize("stated", [0, None])
def test_layers_that_nothing_states_are_refused(drafting: Path, tmp_path: Path, stated: int | None) -> None:
    """A configuration that was cut off is no reason to cut off the model."""
    config = json.loads((drafting / "config.json").read_text()) | {"num_nextn_predict_layers": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(drafting / name, tmp_path / name)
    with pytest.raises(ModelError, match=r"\d+ unexpected keys, the first: model\.layers\.3"):
        loading.load_model(open_source(str(tmp_path)), torch.float32, torch.device("cpu"))


def test_which_tensors_are_drafts() -> None:
    config = {"text_config": {"num_hidden_layers": 4, "num_nextn_predict_layers": 2}}
    keys = ["model.layers.3.a", "model.layers.4.a", "model.layers.5.a", "model.layers.6.a", "mtp.layers.0.a"]
    assert draft_keys([*keys, "visual.mtp.a"], config) == [keys[1], keys[2], keys[4]]
    assert draft_keys(keys, {"num_hidden_layers": 4}) == [keys[4]]


def test_a_configuration_states_none_afterwards() -> None:
    config = {"a": 1, "num_mtp_layers": None, "text_config": {"num_nextn_predict_layers": 3, "b": [2]}}
    assert without_drafting(config) == config | {"text_config": {"num_nextn_predict_layers": 0, "b": [2]}}
