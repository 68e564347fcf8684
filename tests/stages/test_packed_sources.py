"""Checkpoints in FP8 blocks and MXFP4 through the whole run; their exports equal the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packed_models import save_fp8, save_mxfp4

from moeq import inspection, pipeline
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import evaluate
from moeq.stages.context import Context

SMALL = (
    "dtype=float32", "corpus.sequences=8", "corpus.sequence_length=48", "losses.group_size=16", "eval.compare=[]",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=48", "estimate.grid.inputs=[128]",
    "assign.code_bits=2",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "llama4_text"])
def test_runs_and_loads_back(kind: str, tmp_path: Path) -> None:
    made = save_mxfp4(tmp_path, torch.bfloat16) if kind == "gpt_oss" else save_fp8(tmp_path, kind, torch.bfloat16)
    recipe = load_recipe(None, [*SMALL, f"stream={'always' if kind == 'gpt_oss' else 'never'}"])
    context = Context(recipe=recipe, model_name=str(made[1]), out=tmp_path / "run", reporter=Reporter(quiet=True))
    pipeline.run(context)
    assert evaluate.load(context).export_logit_error < 1e-5
    export = context.directory("export")
    assert inspection.inspect(export)["check"].startswith("every size")
    stored = {header.dtype for header in open_source(str(export)).tensors.values()}
    assert "F8_E4M3" not in stored
