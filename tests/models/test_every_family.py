"""Every MoE family of transformers: the streamed model computes what the loaded one does, bit for bit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_models import (
    ENCODER_DECODERS,
    FAMILIES,
    LOOPED,
    NOT_BUILT,
    SEEING,
    inputs,
    inputs_with_image,
    matrices_on_disk,
    of_name,
    save,
)
from greenlet import getcurrent, greenlet

from moeq.errors import ModelError
from moeq.estimation import subject
from moeq.models import loading
from moeq.models.disk_names import DiskNames
from moeq.models.experts import find_expert_layers
from moeq.models.source import ModelSource, open_source
from moeq.models.stored_experts import checked_layers
from moeq.models.streaming import StreamedModel
from moeq.models.support import answer

CPU = torch.device("cpu")
NOT_BY_HEADERS = {  # config.json leaves some of their sizes to transformers, or which of their layers keep what
    "axk2", "dbrx", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "glm4_moe_lite", "glm5_next",
    "glm_moe_dsa", "hy_v4", "hy_v4_vl", "inkling2_loop", "inkling2_loop_text", "jamba", "jetmoe", "longcat_flash",
    "minimax_m3_vl", "minimax_m3_vl_text",
    "mistral_large4", "mixtral", "moe_vit", "openai_privacy_filter", "phimoe", "qwen3_omni_moe_thinker", "qwen4_exp",
    "qwen4_exp_text", "switch_transformers",
}  # fmt: skip


def tensors_in(output: Any) -> list[torch.Tensor]:
    return [value for value in output.values() if isinstance(value, torch.Tensor)]


def same(found: Any, wanted: Any) -> bool:
    pairs = zip(tensors_in(found), tensors_in(wanted), strict=True)
    return bool(torch.isfinite(wanted.logits).all()) and all(torch.equal(one, two) for one, two in pairs)


def in_lockstep(streamed: StreamedModel, calls: list[dict[str, Any]]) -> tuple[list[Any], list[str]]:
    """The outputs of several calls that advance together, and the blocks in the order in which they were read."""
    main = getcurrent()
    results: list[Any] = [None] * len(calls)

    def forward(index: int) -> None:
        results[index] = streamed.model(**calls[index])

    runs = [greenlet(lambda index=index: forward(index)) for index in range(len(calls))]
    read = []
    with torch.no_grad(), streamed.lockstep(main.switch):
        while True:
            events = [run.switch() for run in runs]
            if all(run.dead for run in runs):
                return results, read
            assert len(set(events)) == 1
            assert not any(run.dead for run in runs)
            if events[0] not in streamed.loaded:
                read.append(events[0])
            streamed.only(events[0])


def check_headers(source: ModelSource, model: Any) -> None:
    """What names and shapes of tensors say of the experts is what the family's own rules say; so are its sizes."""
    shapes = {key: header.shape for key, header in source.tensors.items()}
    known = answer(source.config)
    assert known.family is not None
    if known.verdict == "refused":
        with pytest.raises(ModelError, match=re.escape(f"are not supported: {known.family.remark};")):
            find_expert_layers(model)
        return
    layers = find_expert_layers(model)
    stored = checked_layers(shapes, source.config, "here")
    assert (known.verdict, known.experts) == ("works", layers[0].num_experts)
    assert {key for layer in stored for key in layer.keys} == loading.expert_keys(source, model, layers)
    assert Counter(
        (one.num_experts, one.hidden_size, one.intermediate_size, one.matrices) for one in stored
    ) == Counter(
        (layer.num_experts, layer.hidden_size, layer.intermediate_size, len(layer.projections)) for layer in layers
    )
    names = DiskNames(model)
    assert known.family.separate == all(not one.biased and names.experts(one) is not None for one in layers)
    assert not known.family.separate or known.family.matrices == matrices_on_disk(model, layers)
    found = subject.stored_geometry(source)
    if found is not None:  # a router's correction, a number an expert, may count as parameters or not
        wanted = subject.made_geometry(source)
        difference = found.non_expert_parameters - wanted.non_expert_parameters
        same = replace(found, non_expert_parameters=wanted.non_expert_parameters, max_positions=wanted.max_positions)
        assert same == wanted
        assert abs(difference) <= (layers[0].num_experts + 1) * len(layers)
    assert (found is None) == (source.config["model_type"] in NOT_BY_HEADERS)


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_equals_loaded(family: str, tmp_path: Path) -> None:
    source = open_source(str(save(family, tmp_path / "model", with_tokenizer=False)))
    whole, streamed = loading.load_model(source, torch.float32, CPU), StreamedModel(source, torch.float32, CPU)
    assert type(streamed.model) is type(whole) is of_name(FAMILIES[family].model)
    check_headers(source, whole)
    resident = streamed.bytes_read
    calls = [inputs(family), inputs(family, rows=1, length=9)]
    with torch.no_grad():
        wanted = [whole(**call) for call in calls]
        assert same(streamed.model(**calls[0]), wanted[0])
    once = streamed.bytes_read - resident
    weights = [weight for block in streamed.blocks for weight in streamed.model.get_submodule(block).parameters()]
    assert all(weight.device.type == "meta" for weight in weights)
    assert 0 < resident < sum(header.bytes for header in source.tensors.values())

    found, read = in_lockstep(streamed, calls)
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    assert len(read) == len(set(read)) or family in LOOPED
    assert streamed.bytes_read - resident == 2 * once
    if family not in ENCODER_DECODERS + LOOPED:
        layers = [block for block in read if "audio" not in block]
        assert layers == sorted(layers, key=streamed.blocks.index)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", SEEING)
def test_images_pass_through_streamed_vision_blocks(family: str, tmp_path: Path) -> None:
    source = open_source(str(save(family, tmp_path / "model", with_tokenizer=False)))
    whole, streamed = loading.load_model(source, torch.float32, CPU), StreamedModel(source, torch.float32, CPU)
    call = inputs_with_image(family)
    with torch.no_grad():
        wanted = whole(**call)
        assert same(streamed.model(**call), wanted)
        other = whole(**call | {"pixel_values": call["pixel_values"] + 1})
    assert not torch.equal(other.logits, wanted.logits)
    assert streamed.bytes_read >= sum(header.bytes for header in source.tensors.values())


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "granitemoehybrid", "gemma4_text", "zaya", "qwen3_5_moe"])
def test_bfloat16_and_generation(family: str, tmp_path: Path) -> None:
    source = open_source(str(save(family, tmp_path / "model", with_tokenizer=False)))
    whole, streamed = (make(source, torch.bfloat16, CPU) for make in (loading.load_model, StreamedModel))
    ids = inputs(family)["input_ids"][:1]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2}
    with torch.no_grad():
        assert same(streamed.model(input_ids=ids), whole(input_ids=ids))
        assert torch.equal(streamed.model.generate(ids, **options), whole.generate(ids, **options))


def test_the_table_holds_every_family() -> None:
    """Each package of transformers that has an experts implementation, or mixes experts without, is in it."""
    assert len(FAMILIES) >= 55
    root = Path(transformers.__file__).parent / "models"
    packages = {
        path.parent.name for path in root.glob("*/modeling_*.py") if "use_experts_implementation" in path.read_text()
    }
    packages |= {"dbrx", "doge", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7", "switch_transformers"}
    classes = [of_name(family.model) for family in FAMILIES.values()]
    assert packages <= {kind.__module__.split(".")[-2] for kind in classes}
    assert not set(NOT_BUILT) & set(FAMILIES)
    assert all(NOT_BUILT.values())
