"""How size and quality trade, and every variant beside the exported one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from moeq.artifacts.evaluation import Change, EvalRow
from moeq.reporting import formats
from moeq.reporting.charts import Variant, dominated, size_chart
from moeq.reporting.decided import kl_text
from moeq.reporting.html import Raw, Row, Section, element, figure, join, lead, paragraph, plain, table
from moeq.reporting.inputs import ReportInputs
from moeq.reporting.names import domain_label
from moeq.reporting.speed import over, speedups_text
from moeq.tables import effective, human_size, p_value, too_few


def variants(inputs: ReportInputs) -> Section:
    """The exported checkpoint and every variant beside it."""
    parts = [_comparison(inputs)]
    if _is_compared(inputs):
        parts.append(_divergence(inputs))
    domains = sorted({name for row in inputs.evaluation.rows for name in row.perplexity_by_domain})
    if domains:
        parts.append(_by_domain(inputs, domains))
    tasks = sorted({name for row in inputs.evaluation.rows for name in row.tasks})
    if len(tasks) > 1:
        parts.append(_by_task(inputs, tasks))
    measures = list(dict.fromkeys(name for row in inputs.evaluation.rows for name in row.changes))
    if measures:
        parts.append(_changes(inputs, measures))
    if inputs.exported is not None:
        parts.append(
            lead(
                "The exported row was measured on the packed checkpoint itself, loaded as a user would load it; its "
                "logits differ from those of the dequantized weights by "
                f"{inputs.evaluation.export_logit_error:.1e} relative. The other rows put dequantized weights into the "
                "original model."
            )
        )
    return Section("variants", "Every variant", parts)


def _size(size: int | None, original: int | None) -> str:
    """Bytes, and what part of the original's they are."""
    return _with_note(_bytes(size), "" if size is None or not original else formats.percent(size / original))


def _with_note(figure: str, note: str) -> Raw:
    """A figure and, muted, how it compares with another; nothing more where there is none."""
    return join([figure, element("span", f" {note}", class_="over")]) if note else Raw(figure)


def _bytes(size: int | None) -> str:
    return formats.MISSING if size is None else human_size(size)


def _comparison(inputs: ReportInputs) -> Raw:
    rows = [_marked(inputs, row, _figures(inputs, row)) for row in inputs.evaluation.rows]
    head = ("assignment", "bits of the experts' weights", "expert bytes, of original", "whole checkpoint, of original",
            "bits of all weights", *_quality_heads(inputs), *(["accuracy"] if _has_tasks(inputs) else []),
            *(["decode speed-up, estimated"] if inputs.speed.tells else []))  # fmt: skip
    lower = "logit error" if inputs.classifies else "perplexity"
    without = " but other replicas" if inputs.manifest.totals.other_replica_bytes else ""
    return table(
        f"Each row is one assignment of the same model: smaller bytes and lower {lower} are better. Bits are what "
        "is stored for a weight, scales and zero points counted as in the bytes; those of all weights are of all "
        f"tensors{without} over the checkpoint's {inputs.weights:,} weights. The whole checkpoint is every file of "
        f"its directory, as assign.size limits it.{_how_fast(inputs)}",
        head,
        rows,
    )


def _how_fast(inputs: ReportInputs) -> str:
    """What the speed-ups are, where there are any."""
    if not inputs.speed.tells:
        return ""
    return f" Speed-ups are estimates of the decode step over {over()}; the latter is the harder to beat."


def _figures(inputs: ReportInputs, row: EvalRow) -> list[str]:
    old = inputs.original
    speed = inputs.speed.decode_speedups.get(row.name) if row.assignment is not None else None
    return [
        formats.bits(row.bits_per_weight),
        _size(row.expert_bytes, old.expert_bytes if old else None),
        _size(row.whole_bytes, old.whole_bytes if old else None),
        formats.bits(row.stored_bits(inputs.weights)),
        *_quality(inputs, row, old),
        *([formats.percent(row.accuracy)] if _has_tasks(inputs) else []),
        *([formats.MISSING if speed is None else speedups_text(speed)] if inputs.speed.tells else []),
    ]


def _is_compared(inputs: ReportInputs) -> bool:
    """Whether distributions of the next token were compared with the original's."""
    return any(row.divergence is not None for row in inputs.evaluation.rows)


def _has_tasks(inputs: ReportInputs) -> bool:
    """Whether any row has the accuracy of a task."""
    return any(row.accuracy is not None for row in inputs.evaluation.rows)


def _quality_heads(inputs: ReportInputs) -> tuple[str, ...]:
    if inputs.classifies:
        return ("cross-entropy, over original", "logit error")
    return ("perplexity, over original", *(["KL from original", "equal top-1"] if _is_compared(inputs) else []))


def _quality(inputs: ReportInputs, row: EvalRow, old: EvalRow | None) -> list[str]:
    """Cells under `_quality_heads`."""
    if not inputs.classifies:
        change = "" if row is old else formats.change(row.perplexity, old.perplexity if old else None)
        found = row.divergence
        near = [formats.kl(found.kl if found else None), formats.percent(found.same_top if found else None)]
        return [_with_note(formats.perplexity(row.perplexity), change), *(near if _is_compared(inputs) else [])]
    change = "" if row is old else formats.change(row.cross_entropy, old.cross_entropy if old else None)
    return [_with_note(formats.cross_entropy(row.cross_entropy), change), formats.share(row.logit_error)]


def _marked(inputs: ReportInputs, row: EvalRow, cells: Sequence[str]) -> Row:
    """A row whose name says whether it is the exported one."""
    label = inputs.label(row.name)
    name = join([label, element("span", "exported", class_="tag")]) if row.exported else label
    return Row(cells=(name, *cells), kind="exported" if row.exported else "other")


def _divergence(inputs: ReportInputs) -> Raw:
    """How far the distributions of the next token are from the original's."""
    found = [(row, row.divergence) for row in inputs.evaluation.rows if row.divergence is not None]
    head = ("assignment", "KL, mean", "median", "99 %", "99.9 %", "largest", "equal top-1", "overlap of top 5",
            "RMS change of p", "its points, 1 % to 99 %")  # fmt: skip
    rows = []
    for row, one in found:
        kls, changes = one.kl_percentiles, one.change_percentiles
        cells = [kl_text(one), *(formats.kl(kls[name]) for name in ("50", "99", "99.9", "100"))]
        cells += [formats.percent(one.same_top), formats.percent(one.top5_overlap), formats.percent(one.rms_change)]
        cells.append(" to ".join(formats.points(changes[name], 0.0).removesuffix(" points") for name in ("1", "99")))
        rows.append(_marked(inputs, row, cells))
    first = found[0][1]
    bound = ""
    if first.kept is not None:
        most = ", ".join(f"{inputs.label(row.name)} {formats.kl(one.kl_most)}" for row, one in found)
        bound = (
            f" Of every token the {first.kept:,} largest logits of the original were kept, and of the rest, "
            f"{formats.share(first.rest)} of the probability, the sum: the divergences are lower bounds. The means are "
            f"at most: {most}."
        )
    return table(
        "Kullback-Leibler divergence of the next token's distribution from the original's, in nats, over "
        f"{first.tokens:,} tokens; the share of tokens whose likeliest is the same; how many of the five likeliest "
        "are; and the change of the true token's probability p. The figures of llama.cpp's --kl-divergence, over all "
        f"tokens that count for perplexity.{bound}",
        head,
        rows,
    )


def _by_domain(inputs: ReportInputs, domains: Sequence[str]) -> Raw:
    def cell(row: EvalRow, domain: str) -> str:
        value = row.perplexity_by_domain.get(domain)
        reference = inputs.original.perplexity_by_domain.get(domain) if inputs.original else None
        change = "" if row is inputs.original else formats.change(value, reference)
        return _with_note(formats.perplexity(value), change)

    return _by("Perplexity by domain, with the change against the original: an assignment that calibrated on the wrong "
               "text shows here as one domain much worse than the others.", inputs, domains, cell,
               inputs.domains)  # fmt: skip


def _by_task(inputs: ReportInputs, tasks: Sequence[str]) -> Raw:
    def cell(row: EvalRow, task: str) -> str:
        scores = row.tasks.get(task, {})
        return formats.percent(scores.get("acc", scores.get("acc_norm")))

    return _by("Accuracy by task; the table above has their mean.", inputs, tasks, cell)


def _changes(inputs: ReportInputs, measures: Sequence[str]) -> Raw:
    """How sure the differences from the original are."""

    def cell(row: EvalRow, measure: str) -> str:
        change = row.changes.get(measure)
        if change is None:
            return formats.MISSING
        notes = [_sure(change)]
        if (flips := row.flips.get(measure)) is not None:
            notes.append(f"answers: {flips.lost:,} lost, {flips.gained:,} gained")
        below = (element("span", note, class_="over below") for note in notes)
        return join([formats.difference(change.difference), *below])

    return _by(_how(inputs), inputs, measures, cell)


def _sure(change: Change) -> str:
    """Interval, p and effective n of a difference."""
    if change.low is None or change.high is None or change.shown_p is None:
        return too_few(change.items, change.fewest_items)
    count = effective(change.items, change.effective_items)
    return f"{formats.interval(change.low, change.high)}, p {p_value(change.shown_p)}, n = {count}"


def _how(inputs: ReportInputs) -> str:
    """How intervals and p values of the differences were made."""
    first = next(change for row in inputs.evaluation.rows for change in row.changes.values())
    if first.resamples is not None:
        how = (
            "the 95 % interval and the two-sided p value of a paired bootstrap of independent items "
            f"({first.resamples:,} resamples, seed {first.seed}; neighbouring windows are not independent: `moeq eval` "
            "of this version is more careful)"
        )
    else:
        how = (
            "the 95 % interval of Student's t (of a text over its documents, or over windows as dependent ones, by "
            "domain), the two-sided p value after Holm over the rows of a column, and the number n of independent "
            "items that say as much"
        )
    return (
        f"Difference from the original on the same items, with {how}: a p value above 0.05 is no evidence of any "
        "difference."
    )


def _by(
    caption: str,
    inputs: ReportInputs,
    names: Sequence[str],
    cell: Callable[[EvalRow, str], str],
    labels: Mapping[str, str] | None = None,
) -> Raw:
    """A column a name; labels: what pages call some of them."""
    rows = [_marked(inputs, row, [cell(row, name) for name in names]) for row in inputs.evaluation.rows]
    return table(caption, ("assignment", *(domain_label(name, labels or {}) for name in names)), rows)


def size_against_quality(inputs: ReportInputs) -> Section:
    """The trade-off, with the points that another one beats on both sides hollow; the original has no logit error and
    no divergence."""
    measure = "logit error" if inputs.classifies else "perplexity"
    rows = inputs.evaluation.rows
    if inputs.classifies:
        costs = [(row, row.logit_error) for row in rows if row.logit_error]
    else:
        costs = [(row, row.perplexity) for row in rows if row.perplexity is not None]
    kls = [(row, row.divergence.kl) for row in rows if row.divergence is not None and row.divergence.kl > 0]
    drawings = [_against(inputs, "size", measure, costs)]
    if kls:
        drawings.append(_against(inputs, "size-kl", "KL from the original, nats a token", kls))
    shown = [drawing for drawing in drawings if drawing is not None]
    if not shown:
        shown = [paragraph("No perplexity was measured (eval.perplexity is null), so there is nothing to draw.")]
    title = f"Size against {measure}{' and KL' if kls else ''}"
    return Section("size", title, [element("div", *shown, class_="figures")])


def _against(inputs: ReportInputs, name: str, measure: str, costs: Sequence[tuple[EvalRow, float]]) -> Raw | None:
    """Rows by their bytes and what should be small; None where there is no row."""
    points = [
        Variant(
            name=plain(inputs.label(row.name)),
            size_bytes=row.expert_bytes,
            cost=cost,
            exported=row.exported,
        )
        for row, cost in costs
        if row.expert_bytes > 0
    ]
    if not points:
        return None
    best = ", ".join(p.name for p, out in zip(points, dominated(points), strict=True) if not out)
    label = f"Scatter chart of expert bytes against {measure}. Not dominated: {best}."
    caption = (
        "Lower left is better. Hollow points are dominated: another one is no larger and no worse, and better in one "
        "of both. The ringed point is the exported checkpoint."
    )
    return figure(size_chart(name, label, points, measure), caption)
