"""What experts whose precision follows the text keep of a trained model, for benchmarks/dynamic.py.

A step is a window of 256 tokens here: a decision is made after every PERIOD of them, between two windows, so that the
same windows give the same figures.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import figures  # isort: skip
import quality  # isort: skip

from moeq import pipeline
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.native_replicas import CheckpointReplicas
from moeq.models.experts import find_expert_layers
from moeq.models.loading import load_model
from moeq.models.source import open_source
from moeq.runtime.dynamic.model import DynamicMoE, DynamicSettings
from moeq.runtime.dynamic.pools import Budget
from moeq.runtime.routing_counts import counting
from moeq_kernels.cpu.versions import Block

DOMAINS = ("wiki", "python", "math")
HIGH, LOW, TRANSIENT, PERIOD, EMA = 4, 2, 2, 1, 0.6
SHARE_HIGH = 4  # one expert in so many is in high precision
NEVER = 1 << 30
SHARES, SEEDS = (0.0, 0.25, 0.5, 0.75, 1.0), 3
SETTINGS = (
    "losses.group_size=64", f"losses.bits=[{LOW},{HIGH}]", "losses.methods=[gptq]", "losses.clip=mse",
    "losses.per_projection=false", f"assign={{method: uniform, bits: {HIGH}, quantizer: gptq}}",
    "quantize.replicas=all", "dtype=float32", "stream=never", "eval.compare=[]", "export.verify=false",
    "profile.trace=true",
)  # fmt: skip


@dataclass
class Kept:
    """Sums over tokens of a domain: negative log-likelihood, KL divergence to the original, and how many they are."""

    nll: float = 0.0
    divergence: float = 0.0
    tokens: int = 0

    def add(self, other: Kept) -> Kept:
        return Kept(self.nll + other.nll, self.divergence + other.divergence, self.tokens + other.tokens)

    def cells(self) -> list[str]:
        return [f"{math.exp(self.nll / self.tokens):.2f}", f"{self.divergence / self.tokens:.4f}"]


@dataclass
class Subject:
    """One trained model, its exported replicas, and windows [n, 256] of every domain."""

    model: Any
    source: CheckpointReplicas
    windows: dict[str, Tensor]
    text: dict[str, Tensor]
    exact: dict[str, list[Tensor]] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    follows: list[np.ndarray] | None = None

    @classmethod
    def of(cls, model: Path, script: Any, out: Path, count: int) -> Subject:
        context = figures.context(model, out, SETTINGS)
        found = quality.Windows.of(script, context.model.tokenizer)
        context.text.__dict__["calibration"] = quality.sequences({"": found.calibration})
        pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
        tokenizer = context.model.tokenizer
        streams = {domain: script.token_stream(tokenizer, domain, "heldout") for domain in DOMAINS}
        training = {domain: script.token_stream(tokenizer, domain, "train") for domain in DOMAINS}
        return cls(
            model=load_model(open_source(str(model)), torch.float32, torch.device("cpu")),
            source=CheckpointReplicas(NativeReader(context.directory("export"))),
            windows={domain: script.windows(stream, 256, count) for domain, stream in streams.items()},
            text={domain: script.windows(stream, 256, 16) for domain, stream in training.items()},
        )

    @torch.no_grad()
    def weigh(self) -> None:
        """Note the routing weight of every expert on each domain's training text, of the original."""
        layers = find_expert_layers(self.model)
        for domain in DOMAINS:
            with counting(self.model, layers) as routing:
                self.model(input_ids=self.text[domain])
            self.scores[domain] = routing.scores

    def masses(self, domains: Sequence[str]) -> np.ndarray:
        """[L, E]: routing weight of every expert on some domains' training text."""
        return np.sum([self.scores[domain] for domain in domains], axis=0)

    @torch.no_grad()
    def run(self, domains: Sequence[str] = DOMAINS) -> dict[str, Kept]:
        """The model as it is now over the windows, one after the other; the first run is the original's."""
        found = {}
        for domain in domains:
            kept, known = Kept(), self.exact.setdefault(domain, [])
            for number, window in enumerate(self.windows[domain]):
                logits = self.model(input_ids=window[None]).logits[0, :-1].float()
                scores = torch.log_softmax(logits, -1)
                if number == len(known):
                    known.append(scores.half())
                exact = known[number].float()
                divergence = float((exact.exp() * (exact - scores)).sum())
                nll = -float(scores.gather(1, window[1:, None]).sum())
                kept = kept.add(Kept(nll, divergence, len(scores)))
            found[domain] = kept
        return found

    def dynamic(self, places: int, importance: np.ndarray, **given: Any) -> DynamicMoE:
        layers = self.source.reader.layers
        sizes = [Block(self.source.expert(layers[0], 0, width)[0]).nbytes for width in (LOW, HIGH)]
        experts = [layer.num_experts for layer in layers]
        budget = Budget(
            low_bytes=sizes[0], high_bytes=sizes[1], layers=experts, transient=TRANSIENT, memory_bytes=0, other_bytes={}
        )
        memory = budget.least_bytes + places * len(layers) * (sizes[1] - sizes[0])
        usual = {"ema": EMA, "period": PERIOD, "threshold": 0.0, "certainty": 0.5, "background": False}
        settings = DynamicSettings(high=HIGH, low=LOW, memory_bytes=memory, transient=TRANSIENT, **{**usual, **given})
        known: dict[str, Any] = {"importance": importance, "follows": self.follows, "policy": "fixed"}
        return DynamicMoE(self.model, layers, self.source, settings, **known)


def table(subject: Subject, name: str, results: figures.Figures) -> None:
    """Perplexity and KL of every way at one budget."""
    experts = subject.source.reader.layers[0].num_experts
    places = experts // SHARE_HIGH
    subject.weigh()
    everything, wiki = subject.masses(DOMAINS), subject.masses(DOMAINS[:1])
    rows = {"original": subject.run()}
    ways: dict[str, tuple[int, np.ndarray, dict[str, Any]]] = {
        "static low": (0, everything, {"period": NEVER}),
        "static high": (experts, everything, {"period": NEVER}),
        "static mixed, by all domains": (places, everything, {"period": NEVER}),
        "static mixed, by wiki": (places, wiki, {"period": NEVER}),
        "dynamic, from wiki's": (places, wiki, {}),
        "dynamic, from all domains'": (places, everything, {}),
    }
    told = {}
    for way, (count, importance, given) in ways.items():
        with subject.dynamic(count, importance, **given) as dynamic:
            rows[way], told[way] = subject.run(), dynamic.summary()
    columns = [f"{domain} {what}" for domain in (*DOMAINS, "all") for what in ("PPL", "KL")]
    own = {}
    for domain in DOMAINS:
        with subject.dynamic(places, subject.masses([domain]), period=NEVER):
            own |= subject.run([domain])
    rows["static mixed, each by its own"] = own
    results.table([f"{name}, {places} of {experts} high", *columns])
    whole = {}
    for way, found in rows.items():
        total = Kept()
        for kept in found.values():
            total = total.add(kept)
        whole[way] = total.divergence / total.tokens
        results.row(way, *(cell for kept in (*found.values(), total) for cell in kept.cells()))
    for start, static in (("wiki's", "wiki"), ("all domains'", "all domains")):
        ratio = whole[f"dynamic, from {start}"] / whole[f"static mixed, by {static}"]
        results.add(f"{name}: KL of dynamic, of the static mix's by {static}", ratio, digits=3)
    results.add(f"{name}: promotions of dynamic from wiki's", told["dynamic, from wiki's"]["promotions"], digits=0)


def figure_4(subject: Subject, name: str, results: figures.Figures) -> None:
    """Perplexity of wiki against the share of low experts, by hotness and at random."""
    mass = subject.masses(DOMAINS[:1])
    experts = mass.shape[1]
    results.table([f"{name}, Figure 4: low experts", "coldest first", f"random, mean of {SEEDS}"])
    middle = []
    for share in SHARES:
        places = experts - round(share * experts)
        orders = [mass, *(np.random.default_rng(seed).random(mass.shape) for seed in range(SEEDS))]
        found = []
        for order in orders if 0 < places < experts else orders[:1]:
            with subject.dynamic(places, order, period=NEVER):
                kept = subject.run(DOMAINS[:1])[DOMAINS[0]]
            found.append(math.exp(kept.nll / kept.tokens))
        other = float(np.mean(found[1:])) if len(found) > 1 else found[0]
        results.row(f"{share:.0%}", f"{found[0]:.2f}", f"{other:.2f}")
        middle += [(found[0], other)] if len(found) > 1 else []
    ends = [float(row[1]) for row in (results.tables[-1]["rows"][0], results.tables[-1]["rows"][-1])]
    rise = [sum(value - ends[0] for value in values) for values in zip(*middle, strict=True)]
    results.add(f"{name}: rise of perplexity by hotness, of that in random order", rise[0] / rise[1], at_most=1)


def run(options: argparse.Namespace, folder: Path, results: figures.Figures) -> None:
    """All of it for every model that is there."""
    import dynamic_ahead  # which takes this file's subject

    models = figures.SHARED / "models"
    if not (models / "train_tiny.py").is_file():
        results.left_out("quality", f"no trained checkpoints in {models}")
        return
    script = figures.script(models / "train_tiny.py")
    for name in options.names:
        subject = Subject.of(models / name, script, folder / f"quality-{name}", options.windows)
        if "quality" in options.parts:
            table(subject, name, results)
            figure_4(subject, name, results)
        if "prefetch" in options.parts:
            if "quality" not in options.parts:
                subject.weigh()
            dynamic_ahead.table(subject, name, folder / f"quality-{name}" / "checkpoint", results)
