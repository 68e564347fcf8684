"""Which class makes a model, and that whatever does not fit is one clear line."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_models import inputs, save
from safetensors.torch import load_file, save_file

from moeq.errors import MissingError, ModelError
from moeq.models import loading
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel, blocks_of

CPU = torch.device("cpu")


def changed(folder: Path, out: Path, **config: Any) -> Path:
    """A copy of a model directory with another config.json; None removes a key."""
    shutil.copytree(folder, out)
    data = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return out


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("family", "architectures", "wanted"),
    [
        ("mixtral", ["MixtralForCausalLM"], "MixtralForCausalLM"),
        ("mixtral", ["MixtralForTokenClassification"], "MixtralForTokenClassification"),
        ("mixtral", None, "MixtralForCausalLM"),
        ("mixtral", ["MixtralModel"], "MixtralForCausalLM"),  # the bare model gives no logits
        ("mixtral", ["Qwen2MoeForCausalLM"], "MixtralForCausalLM"),  # not of this configuration
        ("mixtral", ["NoSuchForCausalLM"], "MixtralForCausalLM"),
        ("qwen3_5_moe", ["Qwen3_5MoeForConditionalGeneration"], "Qwen3_5MoeForConditionalGeneration"),
        ("aria", None, "AriaForConditionalGeneration"),
        ("mistral4", None, "Mistral4ForCausalLM"),
        ("switch_transformers", None, "SwitchTransformersForConditionalGeneration"),
        ("qwen3_omni_moe_thinker", None, "Qwen3OmniMoeThinkerForConditionalGeneration"),
    ],
)
def test_the_class_that_makes_the_model(
    family: str, architectures: list[str] | None, wanted: str, tmp_path: Path
) -> None:
    folder = changed(save(family, tmp_path / "made"), tmp_path / "model", architectures=architectures)
    source = open_source(str(folder))
    assert loading.model_class(source, loading.load_config(source)) is getattr(transformers, wanted)
    assert type(loading.skeleton(source)).__name__ == wanted


def test_what_is_no_language_model_is_refused_in_one_line(tmp_path: Path, tiny_mixtral: Path) -> None:
    folder = changed(tiny_mixtral, tmp_path / "model", model_type="encodec", architectures=["EncodecModel"])
    with pytest.raises(ModelError, match="no language model or image classifier of type encodec") as caught:
        loading.skeleton(open_source(str(folder)))
    assert "\n" not in str(caught.value)


def test_a_text_config_of_a_family_without_parts_is_named(tmp_path: Path, tiny_mixtral: Path) -> None:
    """As of a quantization that was put where multimodal models have it; transformers ends with an AttributeError."""
    nested = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    folder = changed(tiny_mixtral, tmp_path / "model", text_config=nested)
    for build in (lambda source: loading.describe(source, packed=True), loading.load_config):
        with pytest.raises(ModelError, match=r"config\.json: text_config is no part of mixtral.*; move what it says"):
            build(open_source(str(folder)))


def test_unexpected_and_missing_tensors_are_named_streamed_or_not(tmp_path: Path, tiny_mixtral: Path) -> None:
    for change, match in (("add", r"1 unexpected keys, the first: spare\.weight"), ("drop", "1 missing keys.*lm_head")):
        folder = tmp_path / change
        shutil.copytree(tiny_mixtral, folder)
        tensors = load_file(folder / "model.safetensors")
        if change == "add":
            tensors["spare.weight"] = torch.ones(2)
        else:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        source = open_source(str(folder))
        for load in (loading.load_model, StreamedModel):
            with pytest.raises(ModelError, match=match):
                load(source, torch.float32, CPU)


def test_threads_load_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, transformers makes models whose head, which is their embeddings, has no weights."""
    source, usual = open_source("bundled:tiny-mixtral"), transformers.MixtralForCausalLM.from_pretrained
    inside, most = threading.Semaphore(0), []

    def from_pretrained(*given: Any, **more: Any) -> Any:
        inside.release()
        most.append(inside._value)
        time.sleep(0.05)
        found = usual(*given, **more)
        inside.acquire()
        return found

    monkeypatch.setattr(transformers.MixtralForCausalLM, "from_pretrained", from_pretrained)
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(loading.load_model, source, torch.float32, CPU) for _ in range(3)]
    assert not any(one.result().lm_head.weight.is_meta for one in loads)
    assert most == [1, 1, 1]


def test_a_directory_that_goes_while_it_is_loaded_is_missing(
    tmp_path: Path, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes the name of a directory that is gone for one on the hub."""
    source = open_source(str(changed(tiny_mixtral, tmp_path / "model")))
    whole = loading.load_config

    def gone(*given: Any) -> Any:
        config = whole(*given)
        shutil.rmtree(tmp_path / "model")
        return config

    monkeypatch.setattr(loading, "load_config", gone)
    with pytest.raises(MissingError, match=r"model: no such file or directory; download or make it again"):
        loading.load_model(source, torch.float32, CPU)


def test_a_stored_buffer_of_a_block_must_be_there(tmp_path: Path) -> None:
    folder = save("deepseek_v3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    streamed = StreamedModel(open_source(str(folder)), torch.float32, CPU)
    with pytest.raises(ModelError, match=r"1 missing keys, the first: .*layers\.1\.mlp\.gate\.e_score_correction_bias"):
        streamed.model(**inputs("deepseek_v3"))


@pytest.mark.parametrize("family", ["doge", "switch_transformers"])
def test_families_whose_experts_are_not_stacked_stream_all_the_same(family: str, tmp_path: Path) -> None:
    streamed = StreamedModel(open_source(str(save(family, tmp_path / "model"))), torch.float32, CPU)
    with torch.no_grad():
        assert torch.isfinite(streamed.model(**inputs(family)).logits).all()


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("mixtral", {"model.layers"}),
        ("longcat_flash", {"model.layers"}),  # not the lists of two attentions within a layer
        ("nllb-moe", {"model.encoder.layers", "model.decoder.layers"}),
        ("qwen3_vl_moe", {"model.language_model.layers", "model.visual.blocks"}),
        ("dots3_note", {"model.language_model.layers", "model.vision_tower.blocks", "model.audio_tower.layers"}),
    ],
)
def test_blocks_are_found_by_structure(family: str, wanted: set[str], tmp_path: Path) -> None:
    model = loading.skeleton(open_source(str(save(family, tmp_path / "model"))))
    assert {path.rpartition(".")[0] for path in blocks_of(model)} == wanted


def test_a_package_that_transformers_lacks_is_told_to_be_installed(tmp_path: Path) -> None:
    """Whole though the directory is."""
    config = json.loads((save("mixtral", tmp_path) / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelError, match=r"cannot load it \(ImportError: .*\); install what is missing$"):
        loading.load_model(open_source(str(tmp_path)), torch.float32, torch.device("cpu"))
