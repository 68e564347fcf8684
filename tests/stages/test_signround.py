"""SignRound as a method of the losses stage: measured, stored, chosen where it is best, exported."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from moeq import inspection, pipeline
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.replicas import LayerReplicas
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import evaluate
from moeq.stages.context import Context
from moeq.stages.replicas import load_index, load_losses

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "losses.bits=[1,2,3,4]",
    "losses.clip=minmax", "losses.methods=[gptq,rtn,signround]", "losses.signround_iterations=30",
    "assign.quantizer=best",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=48", "eval.compare=[]", "eval.tasks=[]",
    "estimate.grid.inputs=[128]",
)  # fmt: skip


@pytest.mark.full
def test_the_seed_decides_the_rows_that_are_drawn(tiny_mixtral: Path, tmp_path: Path) -> None:
    """In one directory: what another seed draws is made anew beside what is there, which is found again."""
    more = ["losses.methods=[gptq,signround]", "losses.signround_iterations=20", "losses.bits=[2]"]
    made = []
    for seed in (0, 5, 0):
        recipe = load_recipe(None, [*SMALL, *more, "assign.quantizer=signround", f"seed={seed}"])
        context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path, reporter=Reporter(quiet=True))
        pipeline.run(context, ("profile", "losses"))
        index, layer = load_index(context), context.model.layers[0]
        stored = LayerReplicas(context.store / index.set, 0)
        places = list(product(layer.projections, range(layer.num_experts)))
        names = [str(one.entry) for one in index.made]
        made.append([torch.cat([stored.expert(name, *place).codes.flatten() for place in places]) for name in names])
    assert [torch.equal(first, other) for first, other in zip(*made[:2], strict=True)] == [True, False]
    assert [torch.equal(first, again) for first, again in zip(*made[::2], strict=True)] == [True, True]


@pytest.mark.full
def test_best_takes_signround_where_it_loses_least(tiny_mixtral: Path, tmp_path: Path) -> None:
    recipe = load_recipe(None, SMALL)
    context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path, reporter=Reporter(quiet=True))
    pipeline.run(context)
    table = load_losses(context)
    assert table.methods() == ["gptq", "rtn", "signround"]
    mean = {
        method: np.mean([layer[2].mean() for layer in table.matrix(method, "relative_loss")])
        for method in table.methods()
    }
    assert mean["signround"] < mean["gptq"] < mean["rtn"]
    assert evaluate.load(context).export_logit_error < 1e-5
    assert inspection.inspect(context.directory("export"))["check"].startswith("every size")
    best = table.best()
    manifest = read_manifest(context.directory("export"))
    made = [
        (replica.quantizer, str(best[index][expert.bits][expert.expert]))
        for index, layer in enumerate(manifest.layers)
        for expert in layer.experts
        for replica in expert.replicas
        if replica.bits < 16
    ]
    assert all(one == two for one, two in made)
    assert "signround" in {one for one, _ in made}
