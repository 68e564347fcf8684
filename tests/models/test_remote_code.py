"""Checkpoints that bring their own Python code: one clear line without the flag, ordinary models with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import build, save
from safetensors.torch import save_file
from typer.testing import CliRunner

from moeq.cli import app
from moeq.errors import ModelError
from moeq.models import loading
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel
from moeq.stages.context import Context

CPU = torch.device("cpu")
IDS = torch.randint(3, 2048, (2, 12), generator=torch.Generator().manual_seed(5))
RAN = "MOEQ_TEST_REMOTE_CODE_RAN"
CONFIGURATION = f"""
import os
from transformers import MixtralConfig

os.environ["{RAN}"] = "1"


class OwnMoeConfig(MixtralConfig):
    model_type = "own_moe"
"""
MODELING = """
from transformers import MixtralForCausalLM

from .configuration_own_moe import OwnMoeConfig


class OwnMoeForCausalLM(MixtralForCausalLM):
    config_class = OwnMoeConfig
"""


@pytest.fixture
def own_code(modules_apart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Mixtral under another name, with its code in the directory."""
    monkeypatch.delenv(RAN, raising=False)
    folder = save("mixtral", tmp_path / "model")
    save_file(dict(build("mixtral").state_dict()), folder / "model.safetensors", {"format": "pt"})
    (folder / "configuration_own_moe.py").write_text(CONFIGURATION)
    (folder / "modeling_own_moe.py").write_text(MODELING)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own_moe",
        "architectures": ["OwnMoeForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own_moe.OwnMoeConfig",
            "AutoModelForCausalLM": "modeling_own_moe.OwnMoeForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_the_flag_no_code_runs(own_code: Path) -> None:
    source = open_source(str(own_code))
    for attempt in (
        lambda: loading.describe(source),
        lambda: loading.load_model(source, torch.float32, CPU),
        lambda: StreamedModel(source, torch.float32, CPU),
    ):
        with pytest.raises(ModelError, match=r"own_moe is not part .* --trust-remote-code") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert RAN not in os.environ


def test_with_the_flag_the_code_makes_the_model(own_code: Path) -> None:
    source = open_source(str(own_code))
    whole = loading.load_model(source, torch.float32, CPU, trust_remote_code=True)
    streamed = StreamedModel(source, torch.float32, CPU, trust_remote_code=True)
    assert type(whole).__name__ == type(streamed.model).__name__ == "OwnMoeForCausalLM"
    with torch.no_grad():
        wanted = build("mixtral")(input_ids=IDS).logits
        assert torch.equal(whole(input_ids=IDS).logits, wanted)
        assert torch.equal(streamed.model(input_ids=IDS).logits, wanted)
    assert len(loading.describe(source, trust_remote_code=True)[1]) == 3
    assert loading.load_tokenizer(source, trust_remote_code=True).vocab_size
    assert os.environ.pop(RAN) == "1"


VOCABULARY = """
from pathlib import Path
from transformers import PreTrainedTokenizer


class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **settings):
        self.words = Path(vocab_file).read_text().split()
        super().__init__(**settings)

    vocab_size = property(lambda self: len(self.words))

    def get_vocab(self):
        return {word: index for index, word in enumerate(self.words)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.words.index(token) if token in self.words else 0

    def _convert_id_to_token(self, index):
        return self.words[index]
"""


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
def test_a_vocabulary_that_transformers_does_not_read_alone(own_code: Path, name: str) -> None:
    for path in own_code.glob("tokenizer*"):
        path.unlink()
    (own_code / name).write_text("? a b c")
    source = open_source(str(own_code))
    assert own_code / name in source.side_files(), "what it holds is part of the model's digest"
    with pytest.raises(ModelError, match=rf"put its tokenizer\.json beside {name}: AutoTokenizer") as caught:
        loading.load_tokenizer(source)
    assert "\n" not in str(caught.value)
    (own_code / "tokenization_own_moe.py").write_text(VOCABULARY.replace("tiktoken.model", name))
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own_moe.OwnTokenizer", None]}}
    (own_code / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"brings its own Python code: .* pass --trust-remote-code"):
        loading.load_tokenizer(source)
    assert loading.load_tokenizer(source, trust_remote_code=True)("cab").input_ids == [3, 1, 2]


@pytest.mark.full
def test_a_whole_run_from_the_command_line(own_code: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = (
        "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "eval.perplexity.sequences=2",
        "eval.perplexity.sequence_length=32", "eval.compare=[]", "assign.code_bits=2",
    )  # fmt: skip
    run = ["run", "--model", str(own_code), "--out", str(out), "--quiet", *(f"--set={setting}" for setting in small)]
    generate = ["generate", str(out / "checkpoint"), "hello", "--max-new-tokens=2"]
    looked = CliRunner().invoke(app, ["inspect", str(own_code)])
    assert looked.exit_code == 0, "it runs none of the code"
    assert "modeling own moe.py: SHA-256" in looked.stdout
    for arguments in (run, generate):
        refused = CliRunner().invoke(app, arguments)
        assert isinstance(refused.exception, ModelError)
        assert "pass --trust-remote-code" in str(refused.exception)
        done = CliRunner().invoke(app, [*arguments, "--trust-remote-code"])
        assert done.exit_code == 0, done.exception
    assert (out / "checkpoint" / "modeling_own_moe.py").is_file()


@pytest.mark.parametrize("stream", ["always", "never"])
def test_the_recipe_passes_it_on(stream: str, own_code: Path, tmp_path: Path) -> None:
    from moeq.recipe import load_recipe

    recipe = load_recipe(None, ["trust_remote_code=true", f"stream={stream}"])
    context = Context(recipe=recipe, model_name=str(own_code), out=tmp_path / "run")
    assert type(context.model.module).__name__ == "OwnMoeForCausalLM"
