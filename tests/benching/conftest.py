"""A packed checkpoint of mixed widths and the model that it was made of, once for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import family_models
import pytest

from moeq import pipeline
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=4", "corpus.sequence_length=32", "losses.group_size=16", "losses.bits=[2,4]",
    "losses.methods=[rtn]", "assign={method: optimal, code_bits: 3, gpu_experts: 1, quantizer: rtn}", "eval.compare=[]",
)  # fmt: skip


def exported(model: Path, run: Path) -> Path:
    """The run directory after its export."""
    context = Context(recipe=load_recipe(None, SMALL), model_name=str(model), out=run, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return run


@pytest.fixture(scope="session")
def packed_run(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tiny_mixtral, tmp_path_factory.mktemp("bench") / "run")


@pytest.fixture(scope="session")
def packed_switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of an encoder-decoder."""
    folder = tmp_path_factory.mktemp("bench-switch")
    family_models.save("switch_transformers", folder / "model")
    return exported(folder / "model", folder / "run") / "checkpoint"
