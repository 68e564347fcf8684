"""What a finished run amounts to: the rows of its final table, from eval.json and estimate.json."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from moeq.folders import as_word
from moeq.models.side_files import HOOK_FILE
from moeq.runtimes import runtimes
from moeq.stages import estimate, evaluate, export
from moeq.stages import non_experts as others
from moeq.stages.context import Context


def final_rows(context: Context, *, speeds: bool = True) -> list[dict[str, Any]]:
    """One row a variant, largest first: its label (as people read it), bytes, perplexity, KL to the original in nats a
    token with its standard error, share of tokens whose likeliest is the same, accuracy, estimated decode speed-ups
    over MoNDE (none of a model so small that the estimate tells nothing of it, nor where no speeds are wanted, which
    needs no estimate); of image classifiers cross_entropy and logit_error too.

    bits_per_weight: stored for a weight of the experts; stored_bits: of all tensors; code_bits: of the experts'
    codes alone; expert_bytes, total_bytes: of the experts' tensors, and of all; checkpoint_bytes: of all files of
    the checkpoint, as `assign.size` limits them; expert_share, total_share, checkpoint_share: of the original's
    bytes.
    """
    report, weights = evaluate.load(context), others.weights(context)
    estimates = estimate.load(context) if speeds else None
    original, named = report.row(evaluate.ORIGINAL), context.labels
    rows = []
    for row in sorted(report.rows, key=lambda row: -row.expert_bytes):
        estimated = estimates.of(row.name) if estimates is not None and estimates.tells_speed else None
        speed = {} if estimated is None else estimate.decode_speedups(estimated)
        change = None
        if row.perplexity is not None and original is not None and original.perplexity:
            change = row.perplexity / original.perplexity - 1
        rows.append(
            {
                "name": row.name,
                "label": named.get(row.name, row.name),
                "exported": row.exported,
                "bits_per_weight": row.bits_per_weight,
                "code_bits": row.code_bits,
                "expert_bytes": row.expert_bytes,
                "total_bytes": row.total_bytes,
                "checkpoint_bytes": row.whole_bytes,
                "stored_bits": row.stored_bits(weights),
                "expert_share": None if original is None else _share(row.expert_bytes, original.expert_bytes),
                "total_share": None if original is None else _share(row.total_bytes, original.total_bytes),
                "checkpoint_share": None if original is None else _share(row.whole_bytes, original.whole_bytes),
                "perplexity": row.perplexity,
                "perplexity_change": change,
                "accuracy": row.accuracy,
                "accuracy_stderr": row.accuracy_stderr,
                **row.divergence_figures(),
                **row.image_figures(),
                "speedup_over_monde_bandwidth_rule": speed.get("monde_bwrule"),
                "speedup_over_monde_cost_optimal": speed.get("monde_opt"),
            }
        )
    return rows


def next_steps(context: Context) -> dict[str, str]:
    """What follows a run: {what for: command}, `from Python` a line of that; all of it can be copied as it stands."""
    checkpoint = context.directory("export")
    there, out = as_word(checkpoint), as_word(context.out)
    trust = " --trust-remote-code" if context.recipe.trust_remote_code else ""
    plain = as_word(context.out / "dequantized")
    of_text = {
        "measure again": f"moeq eval {as_word(context.model_name)} {there}{trust}",
        "try it": f'moeq generate {there} "Once upon a time"{trust}',
    }
    if (checkpoint / HOOK_FILE).exists():
        of_text["serve it"] = f"transformers serve {there} --trust-remote-code"  # which runs the hook
    made = {
        f"check {name}": f"moeq verify {as_word(export.format_directory(context.out, name))}{trust}"
        for name in context.recipe.export.formats
        if any(loader.load is not None for loader in runtimes()[name].exporter.loaders)  # else nothing here runs it
    }
    elsewhere = {"elsewhere": f"moeq convert {there} --to dequantized --out {plain}{trust}"}
    bits = context.recipe.assign.bits_per_weight
    more = {} if bits is None else {"another size": f"moeq run {out} --bits {float(Fraction(bits)) + 0.5:g}"}
    return (of_text if _continues_text(context) else {}) | {
        "check it": f"moeq verify {there}{trust}",
        **(made or elsewhere),
        "from Python": f"import moeq; model = moeq.load({str(checkpoint)!r})",
        **more,
    }


def _continues_text(context: Context) -> bool:
    """Whether the model is a decoder with a head: no classifier and no encoder-decoder."""
    if context.model.takes_images or context.text.perplexity is None:
        return False
    return not context.model.source.config.get("is_encoder_decoder", False)


def _share(size: int | None, whole: int | None) -> float | None:
    return None if size is None or not whole else size / whole
