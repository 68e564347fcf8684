"""Tables of `moeq estimate --kernels`: designs side by side, then one of them in all its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moeq.estimator.sheets import Cell, Row, Table

if TYPE_CHECKING:
    from moeq.integers.hardware.design import Design
    from moeq.integers.hardware.registers import Registers

NOTES = (
    "queries x lanes: queries that the attention kernel holds (N_PE) by channels of a key a cycle; units x in x out: "
    "compute units of the linear kernel (N_L) by the tile of weights that all of them share.",
    "sums: bits of the widest accumulator of a block's linears; value sums: of one output of attention.",
    "DSPs: multiplier slices of 27 x 18 bits, narrow products packed; parity: those of sqrt2 among them. Adders, "
    "shifts and registers are logic, which is not counted. Block RAMs: of 36 Kibit.",
    "ms: an image alone, block after block; images/s: several under way, each kernel at another one.",
)


OF_OTHERS = (
    "there: what the FPGA has; GB/s: from off-chip memory; ends: outputs of attention that are divided a cycle; norm: "
    "channels of a LayerNorm a cycle."
)
LIMITS: dict[str, Callable[[Design], Cell]] = {  # that the title states where all designs share them
    "DSPs there": lambda one: one.device.dsps,
    "block RAMs there": lambda one: one.device.block_rams,
    "MHz": lambda one: one.device.clock_hertz / 1e6,
}
OTHERS: dict[str, Callable[[Design], Cell]] = {
    "GB/s": lambda one: one.device.bytes_per_second / 1e9,
    "weights": lambda one: one.weights,
    "denominator": lambda one: one.arithmetic.denominator,
    "ends": lambda one: one.at.ends,
    "norm": lambda one: one.at.norm,
}


def side_by_side(designs: Sequence[Design], refused: Sequence[str]) -> Table:
    """Every design in a row, with what differs among them."""
    first = designs[0]
    differs = {
        name: value for name, value in (LIMITS | OTHERS).items() if any(value(one) != value(first) for one in designs)
    }
    rows: list[Row] = []
    for one in designs:
        at, arithmetic = one.at, one.arithmetic
        parity = sum(part.slices for part in one.multipliers if part.what.startswith("parity"))
        rows.append(
            (
                arithmetic.text,
                arithmetic.softmax,
                f"{at.queries}x{at.lanes}",
                f"{at.units}x{at.inputs}x{at.outputs}",
                *(value(one) for value in differs.values()),
                _sum_bits(one),
                one.attention.accumulator_bits,
                one.dsps,
                parity,
                one.block_rams,
                one.cycles,
                1e3 * one.seconds,
                one.images_per_second,
                "yes" if one.shortage is None else f"no: {one.shortage}",
            )
        )
    shared = [
        f"{value(first):,.10g} {name.removesuffix(' there')}" for name, value in LIMITS.items() if name not in differs
    ]
    limits = f" ({', '.join(shared)})" if shared else ""
    return Table(
        title=f"{first.sizes.name} on {first.device.name}{limits}",
        columns=("W/A/Attn", "softmax", "queries x lanes", "units x in x out", *differs, "sums", "value sums", "DSPs",
                 "parity", "block RAMs", "cycles", "ms", "images/s", "fits"),
        rows=tuple(rows),
        notes=(*NOTES, *([OF_OTHERS] if differs else []), *(f"left out, {line}" for line in refused)),
    )  # fmt: skip


def _sum_bits(design: Design) -> int:
    """Bits of the widest accumulator of the blocks' linears, whose weights have the kernel's width."""
    at = design.arithmetic
    return max(
        one.accumulators.bits
        for one in design.linear.linears
        if (one.weight_bits, one.input_bits) == (at.weights, at.activations)
    )


def of_one(design: Design, own: Mapping[str, Registers] | None = None) -> list[Table]:
    """Layers, multipliers, memories and registers of a design; own: registers of an integer forward's operations."""
    return [_layers(design), _multipliers(design), _memories(design), _registers(design, own)]


def _layers(design: Design) -> Table:
    total = design.cycles
    worst = design.worst_cycles
    notes = [
        f"An image: {total:,} cycles. Accumulator: bits of the sums. Weight block RAMs: of that layer's weights alone. "
        "Fetch: its weights from off-chip memory, where they are streamed; the slower of both counts."
    ]
    if worst > total:
        notes.append(
            f"Experts get their patches in equal shares; by the worst routing an image takes {worst:,} cycles at most."
        )
    rows = tuple(
        (
            layer.name,
            layer.kernel,
            layer.count,
            f"{layer.tokens}x{layer.inputs}x{layer.outputs}",
            f"{layer.left_bits}x{layer.right_bits}",
            layer.accumulator_bits,
            layer.slices,
            layer.block_rams,
            layer.compute_cycles,
            layer.fetch_cycles,
            layer.count * layer.cycles / total,
        )
        for layer in design.layers
    )
    columns = ("layer", "kernel", "times", "tokens x in x out", "operands", "accumulator", "DSPs", "weight block RAMs",
               "cycles", "fetch", "share")  # fmt: skip
    return Table(title="Layers, each once", columns=columns, rows=rows, notes=tuple(notes))


def _multipliers(design: Design) -> Table:
    rows = tuple(
        (one.kernel, one.what, one.count, f"{one.left_bits}x{one.right_bits}", one.packed, one.slices)
        for one in design.multipliers
    )
    columns = ("kernel", "product", "a cycle", "operands", "in a DSP", "DSPs")
    return Table(title=f"Multipliers: {design.dsps:,} DSPs", columns=columns, rows=rows)


def _memories(design: Design) -> Table:
    rows = tuple((one.kernel, one.what, one.width, one.depth, one.copies, one.block_rams) for one in design.memories)
    columns = ("kernel", "memory", "word (bits)", "words", "banks", "block RAMs")
    note = "Memories of at most 64 words lie in logic, weights excepted. UltraRAM is not counted."
    return Table(title=f"Memories: {design.block_rams:,g} block RAMs", columns=columns, rows=rows, notes=(note,))


def _registers(design: Design, own: Mapping[str, Registers] | None) -> Table:
    """Widths of datapaths: of all of an integer forward's operations, or of the kernels, of their widest linear."""
    widest = max(design.linear.linears, key=lambda one: one.accumulators.bits).name
    paths = own or {name: design.registers[name] for name in ("attention", "norm", widest, "residual")}
    rows = tuple(
        (name, one.role, one.bits, str(one.interval.low), str(one.interval.high), "yes" if one.reached else "at most")
        for name, held in paths.items()
        for one in held
    )
    reached = "reached: inputs exist that need every bit; at most: a bound"
    sizes = (
        f"{reached}. Weights are as large as their bits allow, biases no larger than what they are added to; --model "
        "with the folder of an integer forward takes its own. --json has every linear's."
    )
    return Table(
        title="Widths of the datapaths, by interval arithmetic over INTEGER.md",
        columns=("operation", "register", "bits", "from", "to", "reached"),
        rows=rows,
        notes=(sizes if own is None else f"{reached}, with weights and biases of this forward.",),
    )


def of_paper(runs: Sequence[tuple[Any, Design]]) -> Table:
    """Paper 004's runs: printed latency beside the fastest design within what Table 3 prints."""
    return Table(
        title="Paper 004: printed latency, and the fastest design within the DSPs and block RAMs of Table 3",
        columns=("row", "MHz", "printed DSPs", "DSPs", "printed block RAMs", "block RAMs", "printed ms",
                 "printed cycles", "cycles", "ms", "printed over it"),
        rows=tuple(_run_rows(runs)),
        notes=(
            "The paper does not print its parallelism, so that its latency, DSPs and block RAMs cannot be worked out: "
            "these are bounds. A ratio under 1 would say that the printed latency is out of reach.",
            "Block RAMs are taken as of 36 Kibit: Table 3 has halves of them on the U280.",
        ),
    )  # fmt: skip


def _run_rows(runs: Sequence[tuple[Any, Design]]) -> Iterator[Row]:
    for run, design in runs:
        printed = run.row.seconds * run.clock_hertz
        yield (
            run.row.name, run.clock_hertz / 1e6, run.used_dsps, design.dsps, design.device.block_rams,
            design.block_rams, run.row.latency_ms, printed, design.cycles, 1e3 * design.seconds,
            printed / design.cycles,
        )  # fmt: skip
