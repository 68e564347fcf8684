"""A bench as tables of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from moeq.final_table import empty_table
from moeq.progress import PlainConsole
from moeq.tables import counted, human_bytes, rounded

TIMES = "first, a step: ms to the first token and of a decode step;"


def print_bench(found: dict[str, Any], out: Path | None = None) -> None:
    """What was measured on what, and the tables; out: the directory that was written."""
    console = PlainConsole()
    for line in head(found):
        console.print(line)
    for title, table, notes in tables(found):
        console.print(f"\n{title}", style="bold")
        console.print(table)
        for note in notes:
            console.print(note, style="dim")
    if out is not None:
        console.print(f"\nwritten    {out}")


def head(found: dict[str, Any]) -> Iterator[str]:
    """Machine, kernel, bandwidth and what every model takes."""
    machine, width, settings = found["machine"], found["bandwidth"], found["settings"]
    threads = counted(machine["threads"], "thread")
    yield f"machine    {machine['name']} ({machine['device']}, {threads}), torch {machine['torch']}"
    yield f"kernel     MOEQ_KERNEL={found['kernel']}" if found["kernel"] else "kernel     MOEQ_KERNEL is not set"
    yield f"bandwidth  {width['bytes_per_second'] / 1e9:.1f} GB/s ({width['how']})"
    yield (
        f"requests   {settings['prompt_tokens']} prompt tokens, {settings['new_tokens']} new ones; "
        f"medians of {settings['repeat']}"
    )
    for model in found["models"]:
        kind = "packed" if model["packed"] else "dense"
        memory = f"{human_bytes(model['resident_bytes'])} resident, tensors {human_bytes(model['tensor_bytes'])}"
        yield f"{kind:<10} {model['model']}"
        yield f"{'':<10} {model['bits_per_weight']:.3g} bits a weight in {model['compute_dtype']}; {memory}"
        for how, layers in model["kernels"].items():
            yield f"{'':<10} experts of {counted(layers, 'layer')} by {how}"


def tables(found: dict[str, Any]) -> Iterator[tuple[str, Table, list[str]]]:
    """Title, table and notes of everything that was measured."""
    if "grid" in found:
        yield _grid(found["grid"])
        return
    if "dynamic" in found:
        yield from _dynamic(found["dynamic"])
        return
    for model in found["models"]:
        yield _points(model)
    if found["ratios"]:
        yield _ratios(found["ratios"])
    if "one_expert" in found:
        yield _one_expert(found["one_expert"], found["llama_bench"])


def _points(model: dict[str, Any]) -> tuple[str, Table, list[str]]:
    table = empty_table("batch", ("first", "a step", "prefill", "decode", "experts", "a token", "read", "exp. read"))
    for one in model["points"]:
        table.add_row(
            f"{one['batch']}", _milliseconds(one["first_token_seconds"]), _milliseconds(one["token_seconds"]),
            _rate(one["prefill_tokens_per_second"]), _rate(one["decode_tokens_per_second"]),
            f"{one['expert_share_of_step']:.0%}", human_bytes(one["bytes_per_token"]),
            f"{one['bandwidth_share']:.1%}", _share(one["expert_bandwidth_share"]),
        )  # fmt: skip
    title = f"Requests, {'packed' if model['packed'] else 'dense'}"
    notes = [
        TIMES,
        "prefill, decode: tokens/s; experts: share of a step;",
        "a token: bytes moved; read: share of the bandwidth;",
        "exp. read: the same, within the experts.",
    ]
    return title, table, notes


def _ratios(rows: list[dict[str, Any]]) -> tuple[str, Table, list[str]]:
    names = {"first_token": "first", "token": "a step", "experts_prefill": "experts, prefill", "experts": "experts"}
    table = empty_table("batch", names.values())
    for row in rows:
        table.add_row(f"{row['batch']}", *(f"{row[name]:.2f}" for name in names))
    return "Dense over packed", table, ["Ratios of medians of the same run; above 1 the packed one is faster."]


def _one_expert(found: dict[str, Any], llama: dict[str, Any]) -> tuple[str, Table, list[str]]:
    tokens = [row["tokens"] for row in found["points"]]
    table = empty_table("kernel", [counted(count, "token") for count in tokens])
    for peer in found["peers"]:
        if peer["refusal"] is None:
            times = (row["seconds"][peer["name"]] for row in found["points"])
            table.add_row(peer["name"], *(f"{seconds * 1e6:.0f}" for seconds in times))
    shapes = ", ".join(f"{rows} x {inputs}" for rows, inputs in dict.fromkeys(map(tuple, found["shapes"])))
    notes = [f"{found['experts_in_turn']} experts of {shapes} in turn; the libraries' have 4 bits."]
    notes += [f"{peer['name']}: {peer['refusal']}" for peer in found["peers"] if peer["refusal"] is not None]
    if llama["refusal"] is not None:
        notes.append(f"llama.cpp: {llama['refusal']}")
    else:
        prefill, decode = (_rate(llama[f"{phase}_tokens_per_second"]) for phase in ("prefill", "decode"))
        notes.append(f"llama.cpp on {llama['model']}, batch 1: prefill {prefill}, decode {decode} tokens/s")
    return "One expert alone, us", table, notes


def _grid(found: dict[str, Any]) -> tuple[str, Table, list[str]]:
    table = empty_table("batch", ("beams", "tokens/s", "pruned", "speed-up", "left out", "same"))
    for row in found["points"]:
        table.add_row(
            f"{row['batch']}", f"{row['beams']}", _rate(row["input_tokens_per_second"]),
            _rate(row["pruned_input_tokens_per_second"]), f"{row['speed_up']:.2f}", f"{row['rows_left_out']:.0%}",
            "yes" if row["same_tokens"] else "no",
        )  # fmt: skip
    paper = found["paper"]
    notes = [
        f"speed-up by batch pruning: {found['mean_speed_up']:.3f} in the geometric mean, at most "
        f"{found['largest_speed_up']:.2f};",
        f"{paper['speed_up']} {paper['what']}.",
        "tokens/s: of input;",
        "left out: rows, prompts' too, that no expert saw;",
        "same: both gave the same tokens.",
        f"Sentences' ends are {found['ends']}.",
    ]
    return "Batches by beams (paper 002, Table 3)", table, notes


def _dynamic(found: dict[str, Any]) -> Iterator[tuple[str, Table, list[str]]]:
    """Paper 001's Figure 5, a table a batch size."""
    summary = found["summary"]
    for number, one in enumerate(found["ways"][0]["points"]):
        table = empty_table("", ("first", "a step", "prefill", "decode", "of low", "experts"))
        for way in found["ways"]:
            point = way["points"][number]
            table.add_row(
                way["name"], _milliseconds(point["first_token_seconds"]), _milliseconds(point["token_seconds"]),
                _rate(point["prefill_tokens_per_second"]), _rate(point["decode_tokens_per_second"]),
                f"{point['decode_of_low']:.2f}", human_bytes(way["expert_bytes"]),
            )  # fmt: skip
        dynamic = found["ways"][-1]["points"][number]
        moved = f"{dynamic['promotions']} promotions, {dynamic['demotions']} demotions, "
        notes = [f"dynamic: {moved}{human_bytes(dynamic['copied_bytes'])} moved in these requests."]
        if number == len(found["ways"][0]["points"]) - 1:
            notes += [
                f"{summary['high_experts_a_layer']} experts of every layer at {summary['high_bits']} bits, the others "
                f"at {summary['low_bits']};",
                "mixed: always the same ones.",
                TIMES,
                "prefill, decode: tokens/s; of low: decode over that of",
                "static low; experts: bytes in memory.",
            ]
        yield f"Batch {one['batch']} (paper 001, Figure 5)", table, notes


def _milliseconds(seconds: float) -> str:
    return rounded(seconds * 1e3, 3)


def _rate(value: float | None) -> str:
    return "-" if value is None else rounded(value, 3)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
