"""Tables and summaries on standard output, readable in narrow windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moeq import final_table
from moeq.artifacts import loads_in
from moeq.final_table import empty_table, figure
from moeq.folders import bytes_in
from moeq.progress import PlainConsole
from moeq.tables import NATS, counted, human_bytes, human_seconds, human_size, kl_notes, p_value, rounded, too_few

if TYPE_CHECKING:
    from moeq.models.support import Support
    from moeq.pipeline import Outcome
    from moeq.planning.result import Plan
    from moeq.verification.verify import Verdict

WIDE = 130  # columns from which the table of families shows everything
SIGNIFICANT = 0.05  # p below which a difference is bold
TOO_FEW = "too few"


def print_families(rows: list[Support]) -> None:
    """Families as a table; in a narrow window without the class and the way in which experts are kept."""
    console = PlainConsole()
    wide = console.width >= WIDE
    table = empty_table("model_type", no_wrap=True)
    for title in ("class", "experts") if wide else ():
        table.add_column(title, overflow="fold")
    for title in ("streams", "quantizes"):
        table.add_column(title)
    table.add_column("remark", overflow="fold")
    mark = {True: "yes", False: "no"}
    for row in rows:
        more = [row.model, row.experts] if wide else []
        cells = [row.model_type, *more, mark[row.streamed], mark[row.quantized], row.told]
        table.add_row(*cells, style=None if row.quantized else "dim")
    console.print(table)
    good = sum(row.quantized for row in rows)
    console.print(
        f"{good} of {len(rows)} quantize, export and load; measured on tiny random models by moeq's own tests.",
        style="dim",
    )


def print_verdict(verdict: Verdict) -> None:
    """What verify found: the layers, the worst first, the logits, what is wrong, and one line that says it all."""
    console = PlainConsole()
    table = empty_table("layer", overflow="fold")
    for title in ("compared", "error", "worst expert"):
        table.add_column(title, justify="left" if title == "compared" else "right", overflow="fold")
    for check in sorted(verdict.layers, key=lambda check: -check.worst):
        error = "" if check.error is None else f"{check.error:.2g}"
        alone = check.expert_errors
        expert = "" if alone is None else f"{alone.index(max(alone))}: {max(alone):.2g}"
        table.add_row(check.name, check.how, error, expert, style="red" if check.worst > verdict.tolerance else None)
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in verdict.versions.items())
    complaints = [
        f"{len(keys)} {problem.replace('_', ' ')}" for problem, keys in (verdict.loading or {}).items() if keys
    ]
    keys = "says nothing of keys" if verdict.loading is None else "no key missing or unexpected"
    console.print(f"files    {verdict.files}")
    console.print(f"made     {verdict.provenance}")
    if verdict.signature is not None:
        console.print(f"signed   {verdict.signature}")
    console.print(f"loader   {versions}: {', '.join(complaints) or keys}")
    how = "median position, activations of 8 bits" if verdict.rounds else verdict.dtype
    tied = f"; routers chose the other of two equals {verdict.ties} times" if verdict.ties else ""
    console.print(
        f"logits   {verdict.logits_error:.2g} relative, tolerance {verdict.tolerance:g} ({how}), "
        f"KL {verdict.kl:.2g} nats a token{tied}"
    )
    if (distance := verdict.distance) is not None:
        as_recorded = f"; {distance.recorded} matrices as far from the weights as is written down"
        console.print(
            f"against  {distance.model}: KL {distance.kl:.3g} nats a token, logits {distance.logits_error:.2g}, "
            f"experts' weights {distance.weights_error:.2g} relative; {distance.equal} other tensors equal byte for "
            f"byte, {len(distance.changed)} not{as_recorded if distance.recorded else ''}; configuration and "
            f"{distance.files - 1} files compared",
        )
        for note in distance.notes:
            console.print(f"note     {note}")
    for problem in verdict.problems:
        console.print(f"wrong    {problem}", style="red")
    judged = f"{sum(check.error is not None for check in verdict.layers)} of {len(verdict.layers)} layers compared"
    how = "loads right" if not verdict.problems else "does not load right"
    console.print(f"{verdict.checkpoint} {how} with {verdict.target}; {judged}.")


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """One stage's outcome for --json."""
    record = outcome.record
    return {
        "stage": outcome.stage,
        "skipped": outcome.skipped,
        **({"edited": list(outcome.edited)} if outcome.edited else {}),
        "seconds": round(outcome.seconds, 3),
        "digest": record.digest,
        "summary": record.summary,
    }


def print_final(rows: Sequence[dict[str, Any]], paths: Mapping[str, Path], outcomes: Sequence[Outcome]) -> None:
    """The table at the end of a run or of its evaluation, two in windows that cannot hold it, and where things are."""
    console = PlainConsole()
    for number, shown in enumerate(final_table.tables(rows, console.width)):
        if number:
            console.print()
        console.print(shown)
    found = {outcome.stage: outcome.record.summary for outcome in outcomes}
    replicas = found.get("export", {}).get("other_replica_bytes", 0)
    edited = any(outcome.edited for outcome in outcomes if outcome.stage == "assign")
    caption = final_table.caption(rows, found.get("estimate"), console.width, replicas, edited=edited)
    console.print(caption, style="dim")
    for term, meaning in final_table.explanations(rows, caption):
        console.print(f"{term}: {meaning}", style="dim")
    for line in _translation_lines(outcomes):
        console.print(line, soft_wrap=True)
    for line in named_lines({name: _sized(path, name, outcomes) for name, path in paths.items()}):
        console.print(line, soft_wrap=True)


def _sized(path: Path, name: str, outcomes: Sequence[Outcome]) -> str:
    """Where something is and, of a checkpoint, its bytes; of one for a runtime with blocks of its own those of its
    experts, too."""
    if not path.is_dir():
        return str(path)
    assigned = next((outcome.record.summary for outcome in outcomes if outcome.stage == "assign"), {})
    bits = assigned.get("bits_per_weight_for", {}).get(name.removeprefix("checkpoint for "))
    more = "" if bits is None else f", {bits:.3g} bits a weight of the experts"
    return f"{path} ({human_size(bytes_in(path))}{more})"


def named_lines(given: Mapping[str, object]) -> list[str]:
    """A line for each, what it is called before it, in a column as wide as the longest name."""
    width = max(map(len, given), default=0) + 1
    return [f"{name:{width}}{value}" for name, value in given.items()]


def _translation_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """BLEU and chrF of every variant with the change against the original; none where nothing was translated."""
    summaries: dict[str, dict[str, Any]] = {outcome.stage: outcome.record.summary for outcome in outcomes}
    lines = []
    for name, scores in summaries.get("eval", {}).get("translation", {}).items():
        figures = []
        for metric, title in (("bleu", "BLEU"), ("chrf", "chrF")):
            difference = scores.get(f"{metric}_difference")
            change = "" if difference is None else f" ({difference:+.3f})"
            figures.append(f"{title} {scores[metric]:.2f}{change}")
        lines.append(f"{name}: {', '.join(figures)}")
    return lines


def print_plan(plan: Plan) -> None:
    """The model, what every stage needs beside what there is, and the verdict of each."""
    console = PlainConsole()
    model = plan.model
    how = "streamed" if model["streamed"] else "loaded whole"
    experts = "/".join(map(str, model["experts_a_layer"]))
    of_experts = f"{experts} experts {', '.join(model['expert_shape'])}, top {model['top_k']}"
    layers = f"{model['decoder_layers']} layers"
    console.print(
        f"{model['name']} ({model['kind']}): {layers}, {model['moe_layers']} of them with "
        f"{of_experts if experts else 'experts'}; {model['dtype']}, computes in {model['compute_dtype']} on "
        f"{model['device']}, {how}",
    )
    packed = f" (packed: {human_bytes(model['placed_other_bytes'])})" if "placed_other_bytes" in model else ""
    console.print(
        f"{human_bytes(model['bytes'])}: experts {human_bytes(model['expert_bytes'])} (placed: "
        f"{human_bytes(model['placed_expert_bytes'])}), the rest {human_bytes(model['other_bytes'])}{packed}; largest "
        f"layer {human_bytes(model['largest_decoder_layer_bytes'])}, outside the layers "
        f"{human_bytes(model['resident_bytes'])}"
    )
    console.print(_plan_table(plan))
    there = plan.machine
    gpu = "" if there.gpu is None else f", {human_bytes(there.gpu)} of GPU memory"
    console.print(
        f"here: {human_bytes(there.ram)} of memory{gpu}, {human_bytes(there.disk)} on the disk of {there.disk_path}; "
        f"the run leaves {human_bytes(sum(need.written for need in plan.stages))} there",
    )
    if (rates := plan.rates) is not None:
        console.print(
            f"measured: products {rounded(rates['matrix_flops'] / 1e9, 3)} GFLOP/s, "
            f"losses {rounded(rates['losses_flops'] / 1e9, 3)} GFLOP/s, "
            f"unpacking {rounded(rates['dequantized_weights'] / 1e6, 3)} M weights/s, disk reads "
            f"{human_bytes(rates['read_bytes'])}/s, writes {human_bytes(rates['write_bytes'])}/s",
            style="dim",
        )
    for note in plan.notes:
        console.print(f"note: {note}", style="dim")
    if plan.fits:
        console.print(f"it fits: {_all_in_all(plan)}", style="bold")


def _all_in_all(plan: Plan) -> str:
    """What a whole run takes."""
    needs = plan.stages
    seconds = [need.seconds for need in needs if need.seconds is not None]
    parts = [
        *([f"about {human_seconds(sum(seconds))}"] if seconds else []),
        f"{human_bytes(max(need.ram for need in needs))} of memory at most",
        *([f"{human_bytes(max(need.gpu for need in needs))} of GPU memory"] if plan.machine.gpu is not None else []),
        f"{human_bytes(sum(need.read for need in needs))} read",
        f"{human_bytes(sum(need.written for need in needs))} written",
    ]
    return ", ".join(parts)


def _plan_table(plan: Plan) -> Table:
    gpu, timed = plan.machine.gpu is not None, plan.rates is not None
    titles = ["memory", *(["GPU"] if gpu else []), "reads", "writes", "temp", *(["time"] if timed else [])]
    table = empty_table("stage", titles)
    table.add_column("", no_wrap=True)
    short: dict[str, list[str]] = {}
    for shortage in plan.shortages:
        short.setdefault(shortage.stage, []).append(shortage.resource.removesuffix(" memory"))
    for need in plan.stages:
        lacking = short.get(need.stage, [])
        table.add_row(
            need.stage,
            human_bytes(need.ram),
            *([human_bytes(need.gpu)] if gpu else []),
            human_bytes(need.read),
            human_bytes(need.written),
            human_bytes(need.temporary) if need.temporary else "-",
            *([human_seconds(need.seconds or 0.0)] if timed else []),
            f"short: {' '.join(lacking)}" if lacking else "fits",
            style="bold red" if lacking else None,
        )
    return table


def print_prices(prices: list[dict[str, Any]]) -> None:
    """What the restriction of every target costs in objective, and below why some load nothing, or not all, of it."""
    console = PlainConsole()
    table = empty_table("target", ("bits", "experts", "objective", "times"), no_wrap=True)
    refused: dict[str, list[str]] = {}
    for row in prices:
        if reason := row["refusal"] or row["beside"]:
            refused.setdefault(reason, []).append(row["target"])
        table.add_row(
            row["target"],
            figure(row["bits_per_weight"], "{:.3g}"),
            "-" if row["expert_bytes"] is None else human_size(row["expert_bytes"]),
            figure(row["objective"], "{:.4g}"),
            figure(row["ratio"], "{:.3f}" if (row["ratio"] or 0) < 100 else "{:,.0f}"),
            style="dim" if row["refusal"] else None,
        )
    console.print(table)
    for reason, names in refused.items():
        console.print(f"{', '.join(names)}: {reason}")
    console.print(
        "bits: stored for a weight of the experts. times: the least objective within the target, of the experts alone, "
        "over that of any mix on the same budget.",
        style="dim",
    )


def print_frontier(frontier: dict[str, Any], plot: Path) -> None:
    """Objective and bytes of every method; dominated points are dim."""
    console = PlainConsole()
    table = empty_table("method", ("bits", "experts", "objective"), overflow="fold")
    table.add_column("")
    for point in sorted(frontier["points"], key=itemgetter("expert_bytes", "objective")):
        table.add_row(
            point["method"],
            f"{point['bits_per_weight']:.3g}",
            human_size(point["expert_bytes"]),
            f"{point['objective']:.4g}",
            "dominated" if point["dominated"] else "",
            style="dim" if point["dominated"] else None,
        )
    console.print(table)
    console.print("bits: stored for a weight of the experts, scales and zero points counted.", style="dim")
    console.print(f"plot       {plot}", soft_wrap=True)


def print_comparison(results: dict[str, Any]) -> None:
    """Every measure of every evaluated subject, with its paired difference from the first one; p below 0.05 is bold."""
    console = PlainConsole()
    narrow = console.width < final_table.NARROW  # the interval follows from the difference and its p
    of_differences = ("difference", *(() if narrow else ("95 %",)), "p", "n") if len(results["table"]) > 1 else ()
    figures = ("value", *of_differences)
    table = empty_table("", figures, overflow="fold")
    flipped = False
    _add_sizes(table, results["rows"])
    for measure in dict.fromkeys(name for row in results["table"] for name in row["cells"]):
        rows = [(row["name"], row["cells"][measure]) for row in results["table"] if measure in row["cells"]]
        metric = rows[0][1]["metric"]
        items = next((f"{cell['change']['items']:,}" for _, cell in rows if cell["change"] is not None), "")
        empty = [""] * (len(figures) - 1)
        table.add_row(measure if metric == measure else f"{measure}, {metric}", *empty, items, style="bold")
        for name, cell in rows:
            table.add_row(f"  {name}", *_measured(cell, interval=not narrow))
        flips = [(name, cell["flips"]) for name, cell in rows if cell["flips"]]
        if flips:
            flipped = True
            table.add_row(f"{measure}, flips of {flips[0][1]['items']:,}", style="bold")
        for name, found in flips:
            table.add_row(f"  {name}", f"-{found['lost']:,} +{found['gained']:,}")
    console.print(table)
    if narrow:
        for why in dict.fromkeys(_too_few(results["table"])):
            console.print(f"{TOO_FEW} items for an interval: {why}", style="dim")
    said, how = "value \u00b1 standard error.", results["differences"]
    if len(results["rows"]) > 1:
        items = "n: items, and how many independent ones say as much"
        said = f"differences from {how['from']}: {how['how']}; {items}; {said}"
    console.print(said, style="dim")
    if flipped:
        console.print("flips: answers that went wrong (-) and right (+).", style="dim")
    for row in results["rows"]:
        if label := (row.get("of") or {}).get("label"):
            console.print(f"{row['name']}: {label}")
    notes: dict[str, list[str]] = {}
    for row in results["rows"]:
        for note in _notes(row):
            notes.setdefault(note, []).append(row["name"])
    for note, names in notes.items():
        console.print(f"{note} ({', '.join(names)})", style="dim")


def _too_few(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How many items the measures without an interval would take."""
    for entry in entries:
        for cell in entry["cells"].values():
            if (change := cell["change"]) is not None and change["p"] is None:
                yield too_few(change["items"], change["fewest_items"]).removeprefix(f"{TOO_FEW}: ")


def _add_sizes(table: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """What every checkpoint takes, and how much less than the first one's; results of before say nothing of it."""
    sizes = {row["name"]: size for row in rows if isinstance(size := row.get("bytes"), int) and size > 0}
    if not sizes:
        return
    table.add_row("whole checkpoint", style="bold")
    first = sizes.get(rows[0]["name"])
    for name, size in sizes.items():
        share = () if first is None or name == rows[0]["name"] else (f"{size / first - 1:+.1%}",)
        table.add_row(f"  {name}", human_size(size), *share)


def _notes(row: dict[str, Any]) -> list[str]:
    """What must be known of how a row was measured."""
    text, cut = row["perplexity"], row["cut_requests"]
    notes = [f"{count:,} requests ({kind}) were cut from the left" for kind, count in cut.items()]
    if text is None:
        return notes
    return [
        f"perplexity of {text['tokens']:,} tokens of {counted(text['documents'], 'document')}, "
        f"window {text['window']}, stride {text['stride']}, counted: {text['counted']}",
        *kl_notes(row),
        *notes,
    ]


def _measured(cell: dict[str, Any], *, interval: bool) -> list[str | Text]:
    """Value, difference, interval where it is shown, p and effective n of one measure, as text."""
    form, of_error = (".3g", ".1g") if cell["metric"] == NATS else (".4f", ".4f")  # KL can be far below .0001
    error = "" if cell["stderr"] is None else f" \u00b1 {cell['stderr']:{of_error}}"
    value = f"{cell['value']:{form}}{error}"
    change = cell["change"]
    if change is None:
        return [value]
    difference = f"{change['difference']:+.4f}"
    if change["p"] is None:
        return [value, difference, too_few(change["items"], change["fewest_items"]) if interval else TOO_FEW]
    p = p_value(change["adjusted_p"]).removeprefix("= ")
    return [
        value,
        difference,
        *([f"{change['low']:+.4f} to {change['high']:+.4f}"] if interval else []),
        Text(p, "bold") if change["adjusted_p"] < SIGNIFICANT else p,
        f"{change['effective_items']:,.0f}",
    ]


def print_freed(cleaned: dict[str, Any]) -> None:
    """What `moeq gc` dropped, or would drop."""
    console = PlainConsole()
    for item in cleaned["freed"]:
        console.print(f"{item['path']}: {item['what']}, {human_bytes(item['bytes'])}", soft_wrap=True)
    freed = f"{'would free' if cleaned['dry_run'] else 'freed'} {human_bytes(cleaned['freed_bytes'])}"
    console.print(f"{freed}, {human_bytes(cleaned['kept_bytes'])} of replicas stay", style="bold")


def print_summary(summary: dict[str, Any], indent: int = 0, of: str = "") -> None:
    """Nested figures as indented lines; of: the key that they stand under, whose unit they have."""
    console = PlainConsole()
    for key, value in summary.items():
        label = f"{' ' * indent}{str(key) if '.' in str(key) else str(key).replace('_', ' ')}"  # a file's name stays
        if key == "loads_in":
            line = loads_in.line(value)
            within = Padding(Text(line), (0, 0, 0, indent), expand=False) if console.wraps else f"{'':{indent}}{line}"
            console.print(within)
        elif isinstance(value, dict) and value:
            console.print(label)
            print_summary(value, indent + 2, str(key))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            console.print(label)
            _print_entries(console, value, indent + 2)
        else:
            console.print(f"{label}: {_plain(f'{of} {key}' if of else str(key), value)}", soft_wrap=True)


def _print_entries(console: Console, entries: list[dict[str, Any]], indent: int) -> None:
    """Entries with the same figures as a table; others, and those too wide for the window, a line each."""
    keys = list(entries[0])
    rows = [[_plain(key, value) for key, value in entry.items()] for entry in entries]
    heads = [key.replace("_", " ") for key in keys]
    least = [
        max(len(text) for text in (*head.split(), *column))
        for head, column in zip(heads, zip(*rows, strict=False), strict=False)
    ]
    if all(list(entry) == keys for entry in entries) and indent + sum(least) + 2 * len(keys) <= console.width:
        table = empty_table(heads[0], min_width=least[0])
        for head, width in zip(heads[1:], least[1:], strict=True):
            table.add_column(head, min_width=width, justify="right")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(Padding(table, (0, 0, 0, indent), expand=False))
        return
    for entry in entries:
        line = ", ".join(f"{key.replace('_', ' ')} {_plain(key, value)}" for key, value in entry.items())
        console.print(f"{' ' * indent}{line}", soft_wrap=True)


def _plain(key: str, value: Any) -> str:
    if value == {} or value == []:
        return "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if key == "group_size" and value == -1:
        return "all of a row"
    if isinstance(value, int) and "bytes" in key:
        return f"{value:,} ({human_size(value)})" if value >= 1024 else f"{value}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
