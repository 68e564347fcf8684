"""Streamed models: bit-equal to loaded ones, one read of the disk a walk, one layer in memory at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from counted_bars import Bars
from family_models import save

from moeq import pipeline
from moeq.errors import ModelError
from moeq.evaluation.perplexity import perplexity
from moeq.models import loading
from moeq.models.corpus import Sequences
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel
from moeq.models.walk import walk
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

CPU = torch.device("cpu")
IDS = torch.randint(3, 2048, (4, 24), generator=torch.Generator().manual_seed(5))
ROWS = Sequences(ids=IDS, mask=torch.ones_like(IDS, dtype=torch.bool), domains=("x",) * 4)


def on_meta(module: torch.nn.Module) -> set[bool]:
    return {parameter.device.type == "meta" for parameter in module.parameters()}


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "deepseek_v3", "jamba", "gpt_oss", "Mixtral", "Qwen3-MoE"])
def test_logits_and_generation_are_bit_equal(family: str, tmp_path: Path, tiny_mixtral: Path, tiny_qwen: Path) -> None:
    made = {"Mixtral": tiny_mixtral, "Qwen3-MoE": tiny_qwen}
    folder = made[family] if family in made else save(family, tmp_path / "model")
    source = open_source(str(folder))
    streamed, whole = StreamedModel(source, torch.float32, CPU), loading.load_model(source, torch.float32, CPU)
    with torch.no_grad():
        assert torch.equal(streamed.model(input_ids=IDS).logits, whole(input_ids=IDS).logits)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2}
        assert torch.equal(streamed.model.generate(IDS[:1], **options), whole.generate(IDS[:1], **options))
    assert all(on_meta(streamed.model.get_submodule(block)) == {True} for block in streamed.blocks)


def test_a_walk_reads_the_disk_once_and_holds_one_block(tiny_qwen: Path) -> None:
    source = open_source(str(tiny_qwen))
    streamed = StreamedModel(source, torch.float32, CPU)
    whole = loading.load_model(source, torch.float32, CPU)
    resident = streamed.bytes_read
    plain = list(walk(whole, streamed.layers, ROWS.batches(1), CPU))
    for found, wanted in zip(
        walk(streamed.model, streamed.layers, ROWS.batches(1), CPU, streamed=streamed), plain, strict=True
    ):
        assert torch.equal(found.hidden, wanted.hidden)
        assert torch.equal(found.experts, wanted.experts)
        assert len(streamed.loaded) == 1
    assert not streamed.loaded
    assert streamed.bytes_read == sum(header.bytes for header in source.tensors.values())
    assert resident < streamed.bytes_read
    bars = Bars(), Bars()
    scores = [
        perplexity(model, ROWS, 1, CPU, lambda: None, streamed=one, bar=bar)
        for model, one, bar in ((streamed.model, streamed, bars[0]), (whole, None, bars[1]))
    ]
    assert scores[0] == scores[1]
    assert bars[0].found == {"layers": (len(streamed.blocks), len(streamed.blocks))}
    assert not bars[1].found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "overrides", [(), ("quantize.replicas=all",), ("assign.quantizer=rtn", "assign.gpu_experts=1")]
)
def test_a_streamed_run_has_the_same_digests(overrides: tuple[str, ...], tiny_mixtral: Path, tmp_path: Path) -> None:
    digests = []
    for stream in ("always", "never"):
        recipe = load_recipe(
            None,
            [
                f"stream={stream}", "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16",
                "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=32", "eval.tasks=[moeq_continuation]",
                "eval.limit=2", "eval.compare=[{name: u2, method: uniform, bits: 2}]", *overrides,
            ],
        )  # fmt: skip
        context = Context(
            recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path / stream, reporter=Reporter(quiet=True)
        )
        outcomes = pipeline.run(context)
        assert (context.model.streamed is not None) == (stream == "always")
        digests.append({outcome.stage: outcome.record.digest for outcome in outcomes if outcome.stage != "report"})
    assert digests[0] == digests[1]


def test_a_layer_without_weights_is_named(tiny_mixtral: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_mixtral, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    streamed = StreamedModel(open_source(str(tmp_path / "model")), torch.float32, CPU)
    with pytest.raises(ModelError, match=r"1 missing keys, the first: model\.layers\.1\.self_attn\.q_proj\.weight"):
        streamed.model(input_ids=IDS)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "switch_transformers"])
def test_what_overlays_write_is_not_read_again(family: str, tmp_path: Path) -> None:
    """Stacks that the disk has as the model has them are read without a copy."""
    streamed = StreamedModel(open_source(str(save(family, tmp_path / "model"))), torch.float32, CPU)
    layer = streamed.layers[-1]
    block = streamed.block_of(layer.name)

    def first(doubled: bool) -> list[torch.Tensor]:
        streamed.overlay = double if doubled else None
        streamed.load(block)
        matrices = [view.clone() for view in layer.kind.views(streamed.model.get_submodule(layer.name), 0).values()]
        streamed.drop(block)
        return matrices

    def double(model: torch.nn.Module, of: object) -> None:
        if of == layer:
            for view in layer.kind.views(model.get_submodule(layer.name), 0).values():
                with torch.no_grad():
                    view.mul_(2)

    before, changed, after = first(False), first(True), first(False)
    assert block not in streamed.loaded
    for one, two, three in zip(before, changed, after, strict=True):
        assert torch.equal(2 * one, two)
        assert torch.equal(one, three)
