"""The page's first section: what was decided, what it costs, and where it loads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from moeq.artifacts.assignment import DROPPED, EDITED, FULL, Assignment
from moeq.artifacts.evaluation import Divergence, EvalRow
from moeq.artifacts.loads_in import called
from moeq.artifacts.targets import in_words
from moeq.recipe import BUDGETS
from moeq.recipe.used import used_parameters
from moeq.registry import ALLOCATORS
from moeq.reporting import formats
from moeq.reporting.html import Raw, Section, element, join, table
from moeq.reporting.inputs import Loads, ReportInputs
from moeq.reporting.speed import over, speedups_text
from moeq.tables import human_size


def decided(inputs: ReportInputs) -> Section:
    """The figures of the exported checkpoint, then the decision behind them."""
    facts = [(name, value) for name, value in _facts(inputs) if value]
    reading = f"How {inputs.manifest.model.name} was made small."
    parts = [element("div", *_tiles(inputs), class_="tiles"), table(reading, ("what", "decided"), facts, texts=2)]
    return Section("summary", "What was decided", parts)


def _facts(inputs: ReportInputs) -> list[tuple[str, str]]:
    assignment, evaluation = inputs.assignment, inputs.evaluation
    on = f"{evaluation.images:,} images" if inputs.classifies else f"{evaluation.tokens:,} tokens"
    counted, sequences = int(inputs.profile.tokens.sum()), len(inputs.profile.tokens)
    seen = f"{counted:,} tokens in {formats.count(sequences, 'sequence')}"
    return [
        ("model", inputs.manifest.model.name),
        ("assignment", inputs.label(assignment.name)),
        ("method", method_text(assignment)),
        ("budget", budget_text(assignment)),
        ("edited", EDITED if inputs.edited else ""),
        ("quantized", f"{_widths(assignment)}; {in_words(assignment.encoding)}"),
        ("refined", _refined(inputs)),
        ("tuned", "" if inputs.tuned is None else inputs.tuned.told()),
        ("on the GPU", _on_gpu(assignment)),
        ("loads in", loads_text(inputs.loads)),
        ("gates", _gates(inputs)),
        ("calibrated on", formats.count(sequences, "image") if inputs.classifies else seen),
        ("measured on", on if evaluation.tokens or evaluation.images else "nothing"),
    ]


def method_text(assignment: Assignment) -> str:
    """The method and those of its settings that had a say, the budget left out."""
    used = used_parameters(assignment.method, assignment.parameters)
    told = ", ".join(_setting(name, value) for name, value in sorted(used.items()) if name not in BUDGETS)
    allocator = ALLOCATORS.find(assignment.method)
    method = assignment.method if allocator is None else f"{assignment.method}: {allocator.help}"
    return f"{method} ({told})" if told else method


def _setting(name: str, value: object) -> str:
    """One setting in words."""
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{words} {'/'.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def budget_text(assignment: Assignment) -> str:
    """What might be spent, in words."""
    used = used_parameters(assignment.method, assignment.parameters)
    of, told = "the experts off the GPU" if used.get("gpu_experts") else "the experts", []
    if (bits := used.get("bits_per_weight")) is not None:
        told.append(f"{bits} bits stored for a weight of {of}, scales and zero points counted")
    codes = used.get("code_bits")
    named = assignment.method == "uniform" and codes is not None  # of all experts: no budget
    if codes is not None and not named:
        told.append(f"{codes} code bits for a weight of {of}")
    if (size := used.get("expert_bytes")) is not None:
        told.append(f"{human_size(size)} for all experts")
    if (size := used.get("size")) is not None:
        told.append(f"{human_size(size)} for the whole checkpoint")
    return " and ".join(told) or f"none: {'one width is named' if named else 'the method decides by itself'}"


def _widths(assignment: Assignment) -> str:
    """How many experts have which width."""
    counts = assignment.expert_widths()
    flat = [widths if isinstance(widths, int) else "mixed" for widths in chain.from_iterable(counts)]
    return ", ".join(
        f"{formats.count(flat.count(width), 'expert')} {'of several widths' if width == 'mixed' else _width(width)}"
        for width in sorted(set(flat), key=lambda width: (isinstance(width, str), width))
    )


def _width(width: int | str) -> str:
    if width == DROPPED:
        return "dropped"
    return "of full precision" if width == FULL else f"of {width} code bit{'s' if width != 1 else ''}"


def _refined(inputs: ReportInputs) -> str:
    """What training did to the placed experts."""
    refined = inputs.refined
    if refined is None:
        return ""
    return (
        f"every layer's placed experts trained together, {formats.count(refined.iterations, 'step')} a layer; "
        f"it changed {refined.changed:,} of {refined.quantized:,}"
    )


def _on_gpu(assignment: Assignment) -> str:
    hot = assignment.hot()
    number, total = sum(int(mask.sum()) for mask in hot), sum(map(len, hot))
    return f"{number:,} of {total:,} experts, in full precision" if number else ""


def loads_text(loads: Sequence[Loads]) -> str:
    """Where the checkpoint loads as it is, and why not elsewhere."""
    there = ", ".join(called(one.name) for one in loads if one.reason is None)
    names: dict[str, list[str]] = {}  # by reason
    for one in loads:
        if one.reason is not None:
            names.setdefault(re.sub(r"(?<=\d) bits\b", " code bits", one.reason), []).append(one.name)
    others = "; ".join(f"{', '.join(every)} ({reason})" for reason, every in names.items())
    return f"{there}{'; not in ' if others else ''}{others}"


def _gates(inputs: ReportInputs) -> Raw:
    """What the run had to hold, a line each."""
    lines = (join([element("b", "held" if gate.holds else "failed"), f" {gate.text()}"]) for gate in inputs.gates)
    return join(element("div", line) for line in lines)


def _arrow(old: str, new: str) -> str:
    return f"{old} → {new}" if old != formats.MISSING else new


def _tiles(inputs: ReportInputs) -> list[Raw]:
    old, new = inputs.original, inputs.exported
    if new is None:
        return [_tile("exported checkpoint", "not evaluated", "eval.json has no exported row")]
    accuracy = _arrow(formats.percent(old.accuracy if old else None), formats.percent(new.accuracy))
    return [
        _bits_tile(inputs, new),
        *([] if new.whole_bytes is None else [_whole_tile(inputs, old, new)]),
        _experts_tile(old, new),
        *([] if new.divergence is None else _divergence_tiles(new.divergence)),
        _logits_tile(inputs, old, new) if inputs.classifies else _perplexity_tile(inputs, old, new),
        *([] if new.accuracy is None else [_tile("accuracy", accuracy, _accuracy_note(old, new))]),
        *_speed_tile(inputs),
    ]


def _tile(title: str, value: str, note: str) -> Raw:
    return element("div", element("span", title), element("b", value), element("span", note), class_="tile")


def _bits_tile(inputs: ReportInputs, new: EvalRow) -> Raw:
    whole = new.stored_bits(inputs.weights)
    without = ", other replicas left out" if inputs.manifest.totals.other_replica_bytes else ""
    note = "" if whole is None else f"; {formats.bits(whole)} of a weight of the whole checkpoint{without}"
    counted = f"scales and zero points counted{note}"
    return _tile("bits of an expert's weight", formats.bits(new.bits_per_weight), counted)


def _experts_tile(old: EvalRow | None, new: EvalRow) -> Raw:
    size = _arrow(formats.MISSING if old is None else human_size(old.expert_bytes), human_size(new.expert_bytes))
    smaller = f"{_times(old.expert_bytes, new.expert_bytes)}, " if old and old.expert_bytes and new.expert_bytes else ""
    return _tile("bytes of all experts", size, f"{smaller}scales and zero points counted")


def _times(before: int, after: int) -> str:
    """How a size compares with the one before."""
    return (
        f"{formats.ratio(before / after)} smaller" if after <= before else f"{formats.ratio(after / before)} as large"
    )


def _whole_tile(inputs: ReportInputs, old: EvalRow | None, new: EvalRow) -> Raw:
    """The whole checkpoint."""
    before, after = old.whole_bytes if old else None, new.whole_bytes
    assert after is not None
    size = _arrow(formats.MISSING if before is None else human_size(before), human_size(after))
    replicas = inputs.manifest.totals.other_replica_bytes
    notes = [_times(before, after)] if before and after else []
    notes += [f"{human_size(replicas)} of other replicas among them"] if replicas else []
    return _tile("bytes of the whole checkpoint", size, "; ".join(notes))


def _perplexity_tile(inputs: ReportInputs, old: EvalRow | None, new: EvalRow) -> Raw:
    before = old.perplexity if old else None
    value = _arrow(formats.perplexity(before), formats.perplexity(new.perplexity))
    cost = formats.change(new.perplexity, before)
    return _tile(
        "perplexity (lower is better)",
        value if new.perplexity is not None else "not measured",
        f"{cost} on {inputs.evaluation.tokens:,} tokens" if cost else "",
    )


def _divergence_tiles(found: Divergence) -> list[Raw]:
    equal = formats.with_error(
        formats.percent(found.same_top), None if found.same_top_stderr is None else f"{100 * found.same_top_stderr:.1g}"
    )
    return [
        _tile("KL from the original (lower is better)", kl_text(found), "nats a token, mean"),
        _tile("equal top-1", equal, "tokens whose likeliest is that of the original"),
    ]


def kl_text(found: Divergence) -> str:
    """The mean with its error."""
    return formats.with_error(formats.kl(found.kl), None if found.kl_stderr is None else f"{found.kl_stderr:.1g}")


def _logits_tile(inputs: ReportInputs, old: EvalRow | None, new: EvalRow) -> Raw:
    entropy = _arrow(
        formats.cross_entropy(old.cross_entropy if old else None), formats.cross_entropy(new.cross_entropy)
    )
    note = f"of the original's, relative; cross-entropy {entropy} on {inputs.evaluation.images:,} images"
    return _tile("error of the logits (lower is better)", formats.share(new.logit_error), note)


def _accuracy_note(old: EvalRow | None, new: EvalRow) -> str:
    parts = [
        formats.points(new.accuracy, old.accuracy if old else None),
        formats.standard_error(new.accuracy_stderr),
        ", ".join(sorted(new.tasks)),
    ]
    return "; ".join(part for part in parts if part)


def _speed_tile(inputs: ReportInputs) -> list[Raw]:
    speed = inputs.speed.decode_speedups.get(inputs.assignment.name)
    if speed is None or not inputs.speed.tells:
        return []
    note = f"over {over()}"
    if not inputs.speed.geometry_is_the_models:
        note += f"; for {inputs.speed.geometry['name']} with this bit mix, not this model"
    return [_tile("decode speed-up, estimated", speedups_text(speed), note)]
