"""Every family of transformers: streamed, quantized, exported and loaded, and the record of it.

The record (models/families.json) is what `moeq families` prints and docs/families.md shows. The families in REQUIRED
are measured in every run of the tests, the others in the long sweeps, which make the report of each too (its drawings
take a fifth of a run's time); MOEQ_RECORD=1 writes what is measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import family_models
import pytest
import torch
from tiny_models import FULL

from moeq import inspection, pipeline
from moeq.errors import ModelError
from moeq.models import loading
from moeq.models.disk_names import DiskNames
from moeq.models.experts import find_expert_layers
from moeq.models.forward import forward
from moeq.models.streaming import StreamedModel
from moeq.models.support import IN_MEMORY, RECORD, Support, families
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.checkpoint import load_checkpoint
from moeq.stages import evaluate
from moeq.stages.context import Context

CPU = torch.device("cpu")
REQUIRED = {
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss",
    "phimoe", "granitemoe", "llama4", "llama4_text", "ernie4_5_moe", "jamba", "qwen3_vl_moe", "switch_transformers",
    "dbrx", "jetmoe", "nemotron_h", "aria", "longcat_flash", "minimax_m3_vl", "muse_spark", "dots3_note", "doge",
    "moe_vit",
}  # fmt: skip
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.group_size=16", "losses.bits=[1,2,3,4]",
    "assign.code_bits=2", "eval.compare=[]", "eval.tasks=[]", "estimate.grid.inputs=[128]",
)  # fmt: skip
OF_TEXT = ("eval.perplexity.sequences=4", "eval.perplexity.sequence_length=48")
SETTINGS = {"openai_privacy_filter": ("eval.perplexity=null",), "moe_vit": ("eval.images.images=8",)}
REMARKS = {
    "openai_privacy_filter": "a token classifier: without perplexity",
    "dots3_note": "experts of the vision tower stay as they are",
    "inkling_mm_model": "save_pretrained of a packed one is refused",
    **dict.fromkeys(family_models.LOOPED, "a looped layer is calibrated on what it is given at all its visits"),
    "moe_vit": "an image classifier that moeq brings: calibrated on labelled images, without perplexity",
    "jetmoe": "experts of the attention stay as they are",
    "switch_transformers": "encoder-decoder: calibrated on the same text on both sides",
}

USUAL = {"since": "", "matrices": IN_MEMORY}  # what the record leaves out
SINCE = dict.fromkeys(("hy_v4_vl", "inkling2_loop", "inkling2_loop_text", "lara_mini"), "5.24")


def context_of(family: str, folder: Path) -> Context:
    recipe = load_recipe(None, [*SMALL, *SETTINGS.get(family, OF_TEXT)])
    return Context(recipe=recipe, model_name=str(folder / "model"), out=folder / "run", reporter=Reporter(quiet=True))


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(20, family_models.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return forward(model, ids).logits


def streams(family: str, context: Context) -> bool:
    whole = loading.load_model(context.model.source, torch.float32, CPU)
    streamed = StreamedModel(context.model.source, torch.float32, CPU).model
    with torch.no_grad():
        one, other = (model(**family_models.inputs(family)).logits for model in (streamed, whole))
    return torch.equal(one, other)


def check_export(context: Context, folder: Path) -> None:
    """The export loads right, survives save_pretrained, and does not load where moeq is not known."""
    export = context.directory("export")
    assert evaluate.load(context).export_logit_error < 2e-6
    assert inspection.inspect(export)["check"].startswith("every size")
    packed = load_checkpoint(export, torch.float32, CPU)
    places = [export, folder / "again"]
    if context.model.source.config["model_type"] == "inkling_mm_model":
        with pytest.raises(ValueError, match="not serializable"):
            packed.save_pretrained(places.pop())
    else:
        packed.save_pretrained(folder / "again")
        again = load_checkpoint(folder / "again", torch.float32, CPU).state_dict()
        assert set(again) == set(packed.state_dict())
        assert all(torch.equal(again[name], tensor) for name, tensor in packed.state_dict().items())
    for place in places:
        config = json.loads((place / "config.json").read_text("utf-8"))
        del config["quantization_config"]
        (place / "config.json").write_text(json.dumps(config))
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            type(packed).from_pretrained(place)


def measure(family: str, folder: Path) -> Support:
    family_models.save(family, folder / "model")
    context = context_of(family, folder)
    model = loading.skeleton(context.model.source, torch.float32)
    row = Support(
        model_type=context.model.source.config["model_type"],
        model=type(model).__name__,
        experts="",
        streamed=streams(family, context),
        quantized=False,
        separate=False,
        remark=REMARKS.get(family, ""),
        since=SINCE.get(family, ""),
    )
    try:
        layers = find_expert_layers(model)
    except ModelError as refusal:
        with pytest.raises(ModelError):
            pipeline.run(context)
        assert not context.out.exists()
        reason = str(refusal).partition("are not supported: ")[2].partition(";")[0]
        return dataclasses.replace(row, experts="refused", remark=reason)
    names = DiskNames(model)
    separate = all(not layer.biased and names.experts(layer) is not None for layer in layers)
    called = family_models.matrices_on_disk(model, layers) if separate else IN_MEMORY
    words = [layers[0].kind.name, *layers[0].kind.remarks(model.get_submodule(layers[0].name))]
    pipeline.run(context, tuple(name for name in pipeline.BY_NAME if FULL or name != "report"))
    check_export(context, folder)
    return dataclasses.replace(
        row, experts=", ".join(dict.fromkeys(words)), quantized=True, separate=separate, matrices=called
    )


def record(row: Support) -> None:
    rows = [] if not RECORD.is_file() else [one for one in families() if one.model != row.model]
    ordered = sorted([*rows, row], key=lambda one: (one.model_type, one.model))
    said = [{k: v for k, v in dataclasses.asdict(one).items() if v != USUAL.get(k)} for one in ordered]
    RECORD.write_text(json.dumps(said, indent=1) + "\n")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "family", [f if f in REQUIRED else pytest.param(f, marks=pytest.mark.full) for f in sorted(family_models.FAMILIES)]
)
def test_the_record_is_what_is_measured(family: str, tmp_path: Path) -> None:
    row = measure(family, tmp_path)
    if os.environ.get("MOEQ_RECORD") == "1":
        record(row)
    assert row in families()
    shutil.rmtree(tmp_path)


def test_the_record_has_every_family_and_no_other() -> None:
    classes = {family.model for family in family_models.FAMILIES.values()}
    assert {row.model for row in families() if row.is_here} == classes
    assert sum(row.streamed for row in families()) >= 55
    assert all(row.remark for row in families() if not row.quantized)
