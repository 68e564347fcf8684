"""The model card of an exported checkpoint: what it is, how it was made, its bits and its figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

from moeq.artifacts.assignment import DROPPED_NAME, EDITED, MIXED_NAME, count_matrices, count_widths
from moeq.artifacts.manifest import PlacementManifest
from moeq.artifacts.targets import in_words
from moeq.exporters.front_matter import Origin, code_lines, front_matter, markdown
from moeq.models.auto_names import CAUSAL, auto_name
from moeq.models.declared import quantization_of
from moeq.recipe.used import parameters_text
from moeq.tables import human_size

SERVED = (
    "",
    "Served, with the API of OpenAI, where moeq and `transformers[serving]` are installed:",
    "",
    "```bash",
    "transformers serve THIS_DIRECTORY --trust-remote-code",
    "```",
)


def render(
    manifest: PlacementManifest,
    config: dict[str, Any],
    figures: list[dict[str, Any]],
    origin: Origin,
    *,
    converted: bool = False,
    edited: bool = False,
) -> str:
    """Markdown with the front matter that the hub reads; origin: what the model's own card says of it; converted: it is
    that of a packed checkpoint; edited: the assignment was, by hand.

    figures: rows name, bits_per_weight, expert_bytes, perplexity, accuracy, kl and same_top (against the original); of
    image classifiers cross_entropy and logit_error too.
    """
    loader = auto_name(config)
    totals, assignment = manifest.totals, manifest.assignment
    widths = [expert.widths for layer in manifest.layers for expert in layer.experts]
    tiers = Counter(expert.tier for layer in manifest.layers for expert in layer.experts)
    name = markdown(manifest.model.name)
    parameters = parameters_text(assignment["method"], assignment["parameters"])
    made = f"{markdown(assignment['name'])}: {markdown(assignment['method'])} ({markdown(parameters)})"
    lines = [
        *front_matter(manifest.model.name, "transformers", origin, converted=converted),
        f"# {name}, experts packed by moeq {manifest.moeq_version}",
        "",
        f"Routed experts of {markdown(config.get('model_type'))} quantized one by one; {_rest(manifest, config)}.",
        "",
        "```python",
        "import moeq  # registers the format with transformers",
        *_snippet(loader),
        "```",
        *(SERVED if loader == CAUSAL and any(code.origin == "moeq" for code in manifest.code) else ()),
        "",
        "| | |",
        "|---|---|",
        f"| original | {name}, revision {markdown(manifest.model.revision or 'local')}, "
        f"digest {manifest.model.digest[:16]} |",
        f"| assignment | {made} |",
        *[f"| edited | {EDITED} |"] * edited,
        f"| codes | {in_words(manifest.encoding)} |",
        f"| bits of an expert weight, scales and zero points counted | {manifest.bits_per_weight:.2f} |",
        f"| experts by code bits | {_counts(count_widths(widths))} |",
        *(f"| {part} of mixed experts by code bits | {_counts(of)} |" for part, of in count_matrices(widths).items()),
        f"| experts by tier | {', '.join(f'{count} on {tier}' for tier, count in sorted(tiers.items()))} |",
        f"| expert bytes, scales and zero points counted | {human_size(totals.placed_expert_bytes)} |",
        f"| other replicas | {human_size(totals.other_replica_bytes)} |",
        f"| everything else | {human_size(totals.non_expert_bytes)} |",
        *_modules(manifest),
        *(f"| code | {code.file}, moeq's own hook: two lines |" for code in manifest.code if code.origin == "moeq"),
        *code_lines({code.file: code.sha256 for code in manifest.code if code.origin == "model"}),
        "",
        "Where every expert should live, and how its bytes are laid out: `placement.json`.",
        "",
    ]
    if figures:
        lines += [*figures_table(figures), ""]
    return "\n".join(lines)


def _snippet(loader: str) -> list[str]:
    """How transformers loads the checkpoint and, of a model of text, continues a prompt."""
    load = [f"from transformers import {loader}", f'model = {loader}.from_pretrained("THIS_DIRECTORY")']
    if loader != CAUSAL:
        return load
    return [
        f"from transformers import {loader}, AutoTokenizer",
        load[1],
        'tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")',
        'inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
    ]


def figures_table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the table of what was measured."""
    forms = {"perplexity": "{:.3f}", "cross_entropy": "{:.4f}", "logit_error": "{:.2%}", "accuracy": "{:.1%}"}
    forms |= {"kl": "{:.3g}", "same_top": "{:.1%}"}
    classified = any(row.get("logit_error") is not None for row in rows)
    measured = ["cross_entropy", "logit_error"] if classified else ["perplexity"]
    if any(row.get("kl") is not None for row in rows):
        measured += ["kl", "same_top"]
    columns = [*measured, "accuracy"]
    titles = {"cross_entropy": "cross-entropy", "kl": "KL from the original, nats a token", "same_top": "equal top-1"}
    heads = " | ".join(titles.get(name, name.replace("_", " ")) for name in columns)
    lines = [f"| assignment | bits | expert bytes | {heads} |", f"|---|---:|---:|{'---:|' * len(columns)}"]
    for row in rows:
        cells = ["" if row.get(name) is None else forms[name].format(row[name]).replace("%", " %") for name in columns]
        bits = f"{row['bits_per_weight']:.2f}"
        lines.append(f"| {markdown(row['name'])} | {bits} | {human_size(row['expert_bytes'])} | {' | '.join(cells)} |")
    return lines


def _counts(by_bits: dict[str, int]) -> str:
    return ", ".join(
        f"{count} {bits}" if bits in (DROPPED_NAME, MIXED_NAME) else f"{count} at {bits}"
        for bits, count in by_bits.items()
    )


def _rest(manifest: PlacementManifest, config: dict[str, Any]) -> str:
    """What was done to everything else."""
    if not manifest.others:
        if quantization_of(config).get("quant_method") != "fp8":
            return "everything else is untouched"
        return "everything else is dequantized, of which the original keeps some in FP8"
    kinds = ", ".join(dict.fromkeys(module.kind for module in manifest.others))
    return f"of the rest, {kinds} are quantized too, routers and norms are untouched"


def _modules(manifest: PlacementManifest) -> list[str]:
    """A line for each class of packed modules outside of the experts."""
    lines = []
    for kind in dict.fromkeys(module.kind for module in manifest.others):
        modules = [module for module in manifest.others if module.kind == kind]
        first, size = modules[0], human_size(sum(module.bytes for module in modules))
        lines.append(f"| of it {kind} | {len(modules)} at {first.bits} code bits, {in_words(first.encoding)}: {size} |")
    return lines
