"""What `moeq bench` measured of the checkpoint on a machine that exists."""

from __future__ import annotations

from moeq.artifacts.bench import Bench, Measured
from moeq.reporting import formats
from moeq.reporting.html import Section, lead, table
from moeq.tables import human_bytes, rounded

HEAD = ("batch", "first token, ms", "a step, ms", "prefill, tokens/s", "decode, tokens/s", "experts", "a token", "read")
READING = (
    "Medians of {repeat} requests of {prompt} prompt tokens and {new} new ones. Experts: their share of a step; "
    "a token: bytes moved; read: their share of the bandwidth."
)


def measured(bench: Bench) -> Section:
    """Requests of every model that was timed in the same run, the checkpoint first."""
    machine, settings = bench.machine, bench.settings
    kernel = "" if bench.kernel is None else f" MOEQ_KERNEL was {bench.kernel}."
    threads = formats.count(machine.threads, "thread")
    text = (
        f"Measured on {machine.name} ({machine.device}, {threads}, torch {machine.torch}), which reads "
        f"{bench.bandwidth.bytes_per_second / 1e9:.1f} GB/s ({bench.bandwidth.how}).{kernel}"
    )
    reading = READING.format(repeat=settings.repeat, prompt=settings.prompt_tokens, new=settings.new_tokens)
    parts = [table(f"{_model(one)} {reading}", HEAD, _rows(one)) for one in bench.models]
    return Section("measured", "Measured speed", [lead(text), *parts])


def _model(one: Measured) -> str:
    kind = "The checkpoint" if one.packed else f"{one.model}, dense"
    memory = f"{human_bytes(one.tensor_bytes)} of tensors, {human_bytes(one.resident_bytes)} resident"
    return f"{kind}: {one.bits_per_weight:.3g} bits a weight of its experts, {memory}."


def _rows(one: Measured) -> list[tuple[str, ...]]:
    return [
        (
            f"{point.batch}", rounded(point.first_token_seconds * 1e3, 3), rounded(point.token_seconds * 1e3, 3),
            rounded(point.prefill_tokens_per_second, 3), rounded(point.decode_tokens_per_second, 3),
            f"{point.expert_share_of_step:.0%}", human_bytes(point.bytes_per_token), f"{point.bandwidth_share:.1%}",
        )
        for point in one.points
    ]  # fmt: skip
