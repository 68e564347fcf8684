"""Exports of tiny models, made once for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import family_models
import pytest

from moeq import pipeline
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=4", "corpus.sequence_length=32", "losses.group_size=16", "losses.bits=[1,2,3,4]",
    "losses.methods=[rtn]", "assign={method: optimal, code_bits: 3, gpu_experts: 1, quantizer: rtn}",
    "eval.compare=[]",
)  # fmt: skip
OTHERS = {"deepseek_v3": ("others={attention: 4}",), "cohere2_moe": ("others={embeddings: 8, head: 8}",)}


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint directory of a family: mixed widths, one expert of a layer in tier gpu; others as OTHERS says."""

    @cache
    def of(family: str) -> Path:
        folder = tmp_path_factory.mktemp("exports") / family
        family_models.save(family, folder / "model")
        recipe = load_recipe(None, [*SMALL, *OTHERS.get(family, ())])
        context = Context(
            recipe=recipe, model_name=str(folder / "model"), out=folder / "run", reporter=Reporter(quiet=True)
        )
        pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
        return context.directory("export")

    return of
