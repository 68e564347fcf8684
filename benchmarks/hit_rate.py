"""Context-aware against static placement: which share of the decode's expert tokens finds its expert on the GPU.

    python benchmarks/hit_rate.py [--model DIR ...] [--source FILE ...] [--sequences 120] [--length 512]
                                  [--prefill 0.25] [--share 0.25 0.5]

Records a trace of every model with `moeq profile` (profile.trace: true) on text of several domains and prints hit rates
by domain. Without arguments: the trained models and the texts beside the repository (../shared), or the bundled model
and corpus where these are not there. Static placements learn from every other sequence of each domain; all are measured
on the others. Goal: with the same number of experts on the GPU, the context-aware placement serves more than the static
one in every domain.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import figures

from moeq import pipeline
from moeq.artifacts.trace import NAME, RoutingTrace, read_trace
from moeq.bundled import bundled_path
from moeq.estimator.hit_rates import PLACEMENTS, HitRates, hit_rates

MODELS = ("tiny-mixtral", "tiny-qwen3-moe")
TEXTS = ("wikitext2/valid.txt", "shakespeare.txt", "gsm8k_test.jsonl", "python.txt", "c4_sample.txt")


def record(model: Path, sources: list[str], sequences: int, length: int, prefill: float) -> RoutingTrace:
    """The routing trace of a model on texts; of rows without a text, the question."""
    overrides = [
        f"corpus.source={sources}", f"corpus.sequences={sequences}", f"corpus.sequence_length={length}",
        "corpus.prompt_field=question", "corpus.response_field=answer", "profile.trace=true",
        f"profile.prefill_fraction={prefill}", "device=cpu", "dtype=float32",
    ]  # fmt: skip
    if any(source.endswith("gsm8k_test.jsonl") for source in sources):
        overrides.append("corpus.text_field=question")
    with tempfile.TemporaryDirectory(prefix="moeq-hit-rate-") as folder:
        context = figures.context(model, Path(folder), overrides)
        pipeline.run(context, ("profile",))
        return read_trace(context.directory("profile") / NAME)


def show(rates: HitRates, trace: RoutingTrace) -> bool:
    """Print a table; whether the context-aware placement serves more than the static one in every domain."""
    experts = trace.num_experts[0]
    print(f"  {rates.gpu_experts[0]} of {experts} experts of a layer on the GPU, alpha {rates.alpha:g}")
    print(f"    {'domain':14}{'sequences':>10}{'tokens':>10}", *(f"{name:>{len(name) + 1}}" for name in PLACEMENTS))
    for row in rates.rows:
        shares = (f"{row.rates[name]:>{len(name) + 1}.1%}" for name in PLACEMENTS)
        print(f"    {row.domain:14}{row.sequences:>10}{row.expert_tokens:>10}", *shares)
    return all(row.gain > 0 for row in rates.rows)


def main() -> int:
    parser = figures.parser(__doc__, sequences=120, length=512, prefill=0.25, share=[0.25, 0.5])
    parser.add_argument("--model", nargs="*", type=Path)
    parser.add_argument("--source", nargs="*")
    asked = figures.parsed(parser)
    models, sources = [bundled_path("tiny-mixtral")], ["bundled"]
    if (figures.SHARED / "models").is_dir():
        models = [figures.SHARED / "models" / name for name in MODELS]
        sources = [str(figures.SHARED / "data" / name) for name in TEXTS]
    elif asked.quick and not asked.model:
        return figures.skipped(asked, f"no trained models in {figures.SHARED}")
    models, sources = asked.model or models, asked.source or sources
    better, gains = [], []
    for model in models:
        trace = record(model, sources, asked.sequences, asked.length, asked.prefill)
        print(f"{model.name}: {trace.num_sequences} sequences of {asked.length} tokens, {trace.num_layers} layers, "
              f"top-{trace.top_k}, the first {asked.prefill:.0%} of each is the prompt")  # fmt: skip
        for share in asked.share:
            rates = hit_rates(trace, max(1, round(share * trace.num_experts[0])))
            better.append(show(rates, trace))
            gains.append(rates.overall.gain)
    report = figures.Figures(asked)
    report.add("context-aware over static, least gain of expert tokens", 100 * min(gains), "points", at_least=0)
    report.add("cases where it is better in every domain, of all", sum(better) / len(better), at_least=1)
    return report.report()


if __name__ == "__main__":
    sys.exit(main())
