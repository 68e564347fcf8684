"""What the quality balanced takes beside fast on a part of a layer of Qwen3-30B-A3B's shape, in processor seconds.

    python benchmarks/qualities.py [--sequences 8] [--rounds 1]

A generated Qwen3-MoE of one layer of that model's sizes (2048 x 768, 8 experts a token, 32 heads), random weights in
bfloat16, with 8 of its 128 experts and 8 of the presets' 128 sequences of 512 tokens: an expert is given 4,096 tokens,
as many as there on average, and the whole layer takes 16 times as long in every part, Hessians, codes and losses by the
expert, attention and routing by the token. The text is the bundled one, the vocabulary its 2,048 tokens. Each preset
from profile to export, in a fresh process; seconds of all threads, the median of --rounds. A small model before it, not
counted, has everything compiled.

The effects of layers are measured apart, on one sequence and on two: what a pass over this layer takes, and putting its
replicas in; and an output of that model's 151,936 tokens with its comparison. They are counted for as many sequences
and passes as the preset takes: for this layer alone, whose 2,048 tokens cost next to nothing, and as a layer's share in
a model of 48, with its outputs.

Goal: balanced takes at most twice the processor time of fast, on this layer alone and in a model of 48.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
from decode_models import configuration  # isort: skip
from memory import copy_tokenizer  # isort: skip
from plan import processor_seconds  # isort: skip

SHARE, EXPERTS, LAYERS, CALIBRATION = 1 / 16, 8, 48, 128
STAGES = ("profile", "losses", "assign", "quantize", "export")
PASS, PUT, OUTPUT = "a pass", "replicas put in", "an output"  # of the effects; the first and last of a sequence
VOCABULARY, HIDDEN = 151936, 2048
QUALITIES = ("fast", "balanced")
GOAL = 2.0
SMALL = {"hidden_size": 512, "moe_intermediate_size": 512}  # with which everything is compiled


def make(folder: Path, **sizes: int) -> Path:
    """A model with random weights and the bundled tokenizer; sizes: other than Qwen3-30B-A3B's."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = configuration(argparse.Namespace(layers=1, experts=EXPERTS, vocabulary=2048))
    config.update(sizes)
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def measure(model: Path, quality: str, sequences: int, out: Path) -> dict[str, float]:
    """In this process: processor seconds of every stage of a preset, without the effects of layers, and their parts."""
    from moeq import pipeline
    from moeq.bundled.preset_files import preset_path
    from moeq.recipe import load_recipe
    from moeq.stages import effects

    preset = preset_path(quality)
    section = load_recipe(preset, []).losses.layer_effects
    given = [f"corpus.sequences={sequences}"]
    given += [] if section is None else ["losses.layer_effects=null", "assign.layer_weighting=null"]
    context, taken = figures.context(model, out, given, preset), {}
    for stage in STAGES:
        taken[stage] = seconds_of(lambda stage=stage: pipeline.run(context, (stage,)))
    taken |= dict.fromkeys((PASS, PUT, OUTPUT), 0.0)
    if section is not None:
        counts = (section.model_copy(update={"sequences": count}) for count in (1, 2))
        one, two = (seconds_of(lambda at=at: effects.measure(context, at)) for at in counts)
        passes = effects.passes(1)
        taken[PASS] = (two - one) / passes
        taken[PUT] = max(0.0, one - passes * taken[PASS]) / 2  # it was done twice: to carry it, and to compare
        taken[OUTPUT] = output_seconds()
    return taken


def seconds_of(work: Callable[[], object]) -> float:
    began = processor_seconds()
    work()
    return float(processor_seconds() - began)


def output_seconds() -> float:
    """Processor seconds of the output of 512 tokens, and of comparing it."""
    import torch

    from moeq.stages.effects import divergence

    hidden, head = torch.randn(512, HIDDEN).bfloat16(), torch.randn(VOCABULARY, HIDDEN).bfloat16()
    exact = torch.randn(512, VOCABULARY).log_softmax(-1)

    def compare() -> None:
        logits = torch.nn.functional.linear(hidden, head)
        divergence(exact, logits.float().log_softmax(-1), "here")

    return seconds_of(compare)


def whole(seconds: dict[str, float], layers: int) -> float:
    """Processor seconds of a sixteenth of a layer in a model of so many."""
    from moeq.recipe import load_recipe
    from moeq.stages import effects

    section = load_recipe(None, ["losses.layer_effects={}"]).losses.layer_effects
    count = effects.sequence_count(section, layers, CALIBRATION) * SHARE
    outputs = (layers + 2) / layers if layers > 1 else 0.0
    effect = effects.passes(layers) * seconds[PASS] + outputs * seconds[OUTPUT]
    return sum(seconds[stage] for stage in STAGES) + count * effect + seconds[PUT]


def main() -> int:
    parser = figures.parser(__doc__, sequences=(8, 4), rounds=1)
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "QUALITY", "COUNT", "OUT"), help="measure in this process")
    options = figures.parsed(parser)
    if options.one:
        model, quality, count, out = options.one
        print(json.dumps(measure(Path(model), quality, int(count), Path(out))))
        return 0
    results = figures.Figures(options)
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        small, model = make(Path(folder, "small"), **SMALL), make(Path(folder, "model"))

        def run(path: Path, quality: str, count: int, out: str) -> dict[str, float]:
            words = str(path), quality, str(count), str(Path(folder, out))
            taken: dict[str, float] = figures.in_fresh_process(__file__, "--one", *words)
            return taken

        results.table(["quality", *(f"{part}, s" for part in (*STAGES, PASS, PUT, OUTPUT))])
        for quality in QUALITIES:
            run(small, quality, 4, f"small-{quality}")
            runs = [run(model, quality, options.sequences, f"{quality}-{count}") for count in range(options.rounds)]
            seconds[quality] = {part: statistics.median(each[part] for each in runs) for part in runs[0]}
            results.row(quality, *(f"{taken:.1f}" for taken in seconds[quality].values()))
    for layers in (1, LAYERS):
        fast, balanced = (whole(seconds[quality], layers) for quality in QUALITIES)
        goal = {} if options.quick else {"at_most": GOAL}
        where = "one layer" if layers == 1 else f"a layer of {layers}"
        results.add(f"processor seconds of balanced, of fast's, {where}", balanced / fast, **goal)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
