"""Many runs in one process, as a service or a notebook makes them: its memory does not grow with their number."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from fork_server import ForkServer

RUNS, WARM = 6, 2  # of which the first fill what a process keeps for good
MOST_MIB = 3.0  # a run: 10 with what tokenizers keep, 0.4 without, give or take what the allocator does
PROGRAM = """
import ctypes, gc, resource, shutil, sys
from pathlib import Path

from moeq import pipeline
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.bits=[1,2,3,4]", "losses.methods=[rtn]",
    "assign.quantizer=rtn", "export.verify=false", "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=32",
    "eval.compare=[]", "eval.tasks=[]", "estimate.geometry=[mixtral-8x7b]", "estimate.grid.inputs=[128]",
    "estimate.grid.outputs=[128]", "losses.layer_effects=null", "assign.layer_weighting=null", "quantize.refine=null",
    "quantize.tune=null",
)
recipe, out, runs = sys.argv[1:]
for number in range(int(runs)):
    folder = Path(out) / str(number)
    settings = load_recipe(Path(recipe), list(SMALL))
    context = Context(recipe=settings, model_name=settings.model, out=folder, reporter=Reporter(quiet=True))
    pipeline.run(context)
    assert (folder / "report" / "report.html").is_file()
    shutil.rmtree(folder)
    del context
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back is no growth
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    print("RESIDENT", pages * resource.getpagesize() / 2**20, flush=True)
"""


@pytest.mark.full
def test_a_process_does_not_grow_with_every_run(moeq: ForkServer, tmp_path: Path) -> None:
    """The median of the growth between any two runs, so that one page more or less decides nothing."""
    program = tmp_path / "runs.py"
    program.write_text(PROGRAM)
    recipe = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    done = moeq.run(str(recipe), str(tmp_path), str(RUNS), program=program, cwd=tmp_path)
    lines = [line.split() for line in done.stdout.splitlines()]
    resident = [float(line[1]) for line in lines if line[:1] == ["RESIDENT"]][WARM:]
    assert len(resident) == RUNS - WARM, done.stderr[-2000:]
    pairs = [(first, last) for first in range(len(resident)) for last in range(first + 1, len(resident))]
    growth = median((resident[last] - resident[first]) / (last - first) for first, last in pairs)
    assert growth < MOST_MIB, resident
