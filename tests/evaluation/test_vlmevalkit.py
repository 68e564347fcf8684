"""The hand-over to VLMEvalKit: a checkpoint answers as its model does, and is registered with a kit's run.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import TEMPLATE, save_image, vision_model, vision_processor

from moeq.errors import CorpusError, EvaluationError
from moeq.evaluation import vlmevalkit
from moeq.evaluation.vlmevalkit import KitModel, main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "vision"
    processor = vision_processor()
    vision_model().save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def given_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family's own needs torchvision for videos."""
    monkeypatch.setattr(vlmevalkit, "load_processor", lambda *_: vision_processor(TEMPLATE))


def test_it_answers_as_the_model_does(saved: Path, tmp_path: Path) -> None:
    from PIL import Image

    image = save_image(tmp_path / "a.png", 0)
    kit = KitModel(saved, max_new_tokens=6, device="cpu", verbose=True)
    found = kit.generate([{"type": "image", "value": str(image)}, {"type": "text", "value": "What?"}], dataset="MME")
    processor, model = vision_processor(), vision_model()
    text = "<user><|vision_start|><|image_pad|><|vision_end|>What?"
    inputs = processor(text=[text], images=[Image.open(image).convert("RGB")], return_tensors="pt")
    with torch.no_grad():
        whole = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=2)
    assert found == processor.tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert found
    assert kit.generate("What?") != found
    assert kit.use_custom_prompt("MME") is False


def test_what_it_cannot_take(saved: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="takes text only"):
        KitModel(tiny_mixtral)
    kit = KitModel(saved, device="cpu")
    with pytest.raises(EvaluationError, match=r"VLMEvalKit, MVBench: a part of type 'video'; use tasks of text and im"):
        kit.generate([{"type": "video", "value": "a.mp4"}], dataset="MVBench")
    with pytest.raises(CorpusError, match=r"none\.png cannot be read"):
        kit.generate([{"type": "image", "value": str(tmp_path / "none.png")}])


RUN = """
import sys
from vlmeval.config import supported_VLM
name, data = sys.argv[sys.argv.index('--model') + 1], sys.argv[sys.argv.index('--data') + 1]
model = supported_VLM[name]()
open('answer.txt', 'w').write(data + ': ' + model.generate(message='Hello', dataset=data))
"""


def test_a_kit_finds_the_checkpoint_under_its_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = [str(saved), "--kit", "kit", "--name", "mine", "--max-new-tokens", "4", "--", "--data", "MME"]
    assert main(arguments) == EvaluationError.exit_code
    assert "error: kit: no run.py: not a checkout of VLMEvalKit; git clone" in capsys.readouterr().err
    (tmp_path / "kit" / "vlmeval").mkdir(parents=True)
    (tmp_path / "kit" / "run.py").write_text(RUN)
    (tmp_path / "kit" / "vlmeval" / "config.py").write_text("supported_VLM = {}\n")
    assert main(arguments) == 0
    expected: Any = KitModel(saved, max_new_tokens=4).generate("Hello")
    assert (tmp_path / "kit" / "answer.txt").read_text() == f"MME: {expected}"
    for name in ("vlmeval", "vlmeval.config"):
        monkeypatch.delitem(sys.modules, name)
