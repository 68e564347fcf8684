"""Replicas and losses of all experts of one layer, in memory-bounded batches of experts.

Letters: T tokens, E experts, e experts of one batch, H hidden size, I intermediate size, B bit widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.losses import WHOLE
from moeq.errors import QuantizationError
from moeq.models.experts import PROJECTIONS, ExpertLayer
from moeq.models.walk import LayerInputs
from moeq.numerics import gptq
from moeq.numerics.grids import decode
from moeq.numerics.packed import PackedWeight, packed_bytes
from moeq.recipe import LossesSection

SAMPLE_TOKENS = 1024  # of a layer's tokens, run through every expert for what a rarely routed one borrows
GPTQ, RTN = "gptq", "rtn"


@dataclass(frozen=True, kw_only=True)
class LayerResult:
    """Rows of the loss table and the packed GPTQ replicas {projection: {bits: stack over experts}}."""

    rows: list[dict[str, Any]]
    replicas: dict[str, dict[int, PackedWeight]]


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """One layer's tokens: calibration and held-out rows, samples of both, and their routing."""

    hidden: Tensor  # [T, H] float32
    experts: Tensor  # [T, k]
    heldout: Tensor  # [T] bool
    sample: Tensor  # [<= SAMPLE_TOKENS, H] of the calibration rows
    heldout_sample: Tensor

    def routed(self, expert: int, heldout: bool) -> Tensor:
        mine = (self.experts == expert).any(1) & (self.heldout if heldout else ~self.heldout)
        return self.hidden[mine]


def heldout_stride(fraction: float) -> int:
    """Every how-many-th sequence is kept for measuring."""
    return max(2, round(1 / fraction))


def thin(rows: Tensor, count: int) -> Tensor:
    """At most `count` rows, evenly spaced."""
    if len(rows) <= count:
        return rows
    return rows[torch.arange(count, device=rows.device) * len(rows) // count]


def quantize_layer(
    inputs: LayerInputs, weights: dict[str, Tensor], act_fn: nn.Module, config: LossesSection
) -> LayerResult:
    """Replicas of every expert at every width and what each one loses on held-out tokens.

    weights: gate_proj, up_proj [E, I, H], down_proj [E, H, I]. Raises QuantizationError naming layer and expert
    when a loss is not a number.
    """
    layer = inputs.layer
    hidden = inputs.hidden.float()
    stride = heldout_stride(config.heldout_fraction)
    heldout = (inputs.sequence % stride == stride - 1).to(hidden.device)
    tokens = _Tokens(
        hidden=hidden,
        experts=inputs.experts,
        heldout=heldout,
        sample=thin(hidden[~heldout], SAMPLE_TOKENS),
        heldout_sample=thin(hidden[heldout], SAMPLE_TOKENS),
    )
    calibration = hidden[~heldout]
    shared = calibration.T @ calibration / len(calibration)
    rows: list[dict[str, Any]] = []
    stacks: dict[str, dict[int, list[PackedWeight]]] = {p: {b: [] for b in config.bits} for p in PROJECTIONS}
    for experts in expert_batches(layer, config):
        batch = {name: stack[experts].float() for name, stack in weights.items()}
        notes = [
            {"calibration_tokens": len(tokens.routed(e, heldout=False))} for e in range(experts.start, experts.stop)
        ]
        candidates: dict[str, dict[str, gptq.Quantized]] = {}
        if GPTQ in config.methods:
            candidates[GPTQ] = _gptq_batch(tokens, batch, experts, shared, act_fn, config, notes)
            for projection, result in candidates[GPTQ].items():
                for bits in config.bits:
                    stacks[projection][bits].append(PackedWeight.of(result, bits, config.symmetric))
        if RTN in config.methods:
            candidates[RTN] = rtn_batch(batch, config)
        for index, expert in enumerate(range(experts.start, experts.stop)):
            rows += _measure(tokens, batch, candidates, index, expert, notes[index], act_fn, layer, config)
    replicas = {p: {b: _join(parts) for b, parts in widths.items() if parts} for p, widths in stacks.items()}
    return LayerResult(rows=rows, replicas=replicas)


def expert_batches(layer: ExpertLayer, config: LossesSection) -> Iterator[slice]:
    """Slices of experts whose Hessians, residuals and codes fit into the working memory (at least one expert)."""
    hidden, inter, widths = layer.hidden_size, layer.intermediate_size, len(config.bits)
    hessians = 4 * 3 * (hidden**2 + inter**2)
    results = 3 * hidden * inter * (4 + widths * (4 + 1 + 1 + 4))
    step = max(1, config.working_memory // (hessians + results))
    for start in range(0, layer.num_experts, step):
        yield slice(start, min(start + step, layer.num_experts))


def rtn_batch(
    batch: dict[str, Tensor], config: LossesSection, bits: Sequence[int] | None = None
) -> dict[str, gptq.Quantized]:
    """Min-max rounding of a batch of experts, at `bits` or at all of the section's widths."""
    options: dict[str, Any] = {
        "bits": bits or config.bits,
        "group_size": config.group_size,
        "symmetric": config.symmetric,
    }
    return {projection: gptq.quantize(weight, None, **options) for projection, weight in batch.items()}


def intermediate(hidden: Tensor, gate: Tensor, up: Tensor, act_fn: nn.Module) -> Tensor:
    """act(gate x) * (up x): [T, I]."""
    result: Tensor = act_fn(hidden @ gate.mT) * (hidden @ up.mT)
    return result


def _gptq_batch(
    tokens: _Tokens,
    batch: dict[str, Tensor],
    experts: slice,
    shared: Tensor,
    act_fn: nn.Module,
    config: LossesSection,
    notes: list[dict[str, Any]],
) -> dict[str, gptq.Quantized]:
    """GPTQ of a batch of experts: gate and up share one Hessian, down has its own; fills the notes' fallbacks.

    H_e <- (n_e*H_e + lambda*H_layer) / (n_e + lambda), H as means over tokens; for down, H_layer runs a sample of the
    layer's tokens through the expert itself.
    """
    first, second = [], []
    lend = config.borrow_tokens
    for index, expert in enumerate(range(experts.start, experts.stop)):
        mine = tokens.routed(expert, heldout=False)
        gate, up = batch["gate_proj"][index], batch["up_proj"][index]
        own, borrowed = (intermediate(rows, gate, up, act_fn) for rows in (mine, tokens.sample))
        total = max(len(mine) + lend, 1e-9)
        first.append((mine.T @ mine + lend * shared) / total)
        second.append((own.T @ own + lend * (borrowed.T @ borrowed) / len(borrowed)) / total)
        notes[index]["fallback"] = ["borrowed_hessian"] if len(mine) < config.min_tokens else []
    options: dict[str, Any] = {"bits": config.bits, "group_size": config.group_size, "symmetric": config.symmetric}
    factor = gptq.factorize(torch.stack(first), config.damping)
    _note(notes, factor, config.damping)
    both = gptq.quantize(torch.cat([batch["gate_proj"], batch["up_proj"]], 1), factor.unit_upper, **options)
    factor = gptq.factorize(torch.stack(second), config.damping)
    _note(notes, factor, config.damping)
    down = gptq.quantize(batch["down_proj"], factor.unit_upper, **options)
    rows = batch["gate_proj"].shape[1]
    return {"gate_proj": _rows(both, slice(0, rows)), "up_proj": _rows(both, slice(rows, None)), "down_proj": down}


def _note(notes: list[dict[str, Any]], factor: gptq.Factor, damping: float) -> None:
    """Record what the factorization of each expert fell back to."""
    for index, note in enumerate(notes):
        found = {
            "rounded": bool(factor.failed[index]),
            "raised_damping": float(factor.damping[index]) > damping and not bool(factor.failed[index]),
            "float64": bool(factor.float64[index]),
        }
        note["fallback"] += [name for name, here in found.items() if here and name not in note["fallback"]]


def _rows(quantized: gptq.Quantized, rows: slice) -> gptq.Quantized:
    return gptq.Quantized(
        codes=quantized.codes[:, :, rows],
        scale=quantized.scale[:, :, rows],
        zero=quantized.zero[:, :, rows],
        bits=quantized.bits,
        group_size=quantized.group_size,
    )


def _join(parts: list[PackedWeight]) -> PackedWeight:
    first = parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return PackedWeight(
        codes=torch.cat([part.codes for part in parts]).cpu(),
        scales=torch.cat([part.scales for part in parts]).cpu(),
        zeros=torch.cat(zeros).cpu() if zeros else None,
        bits=first.bits,
        group_size=first.group_size,
        inputs=first.inputs,
        symmetric=first.symmetric,
    )


def _measure(
    tokens: _Tokens,
    batch: dict[str, Tensor],
    candidates: dict[str, dict[str, gptq.Quantized]],
    index: int,
    expert: int,
    note: dict[str, Any],
    act_fn: nn.Module,
    layer: ExpertLayer,
    config: LossesSection,
) -> list[dict[str, Any]]:
    """Rows of one expert: its output error with each projection, and all of them, replaced."""
    own = tokens.routed(expert, heldout=True)
    enough = len(own) >= config.min_tokens
    rows = thin(own if enough else tokens.heldout_sample, config.max_measured_tokens)
    exact = {name: batch[name][index] for name in PROJECTIONS}
    gate, up = act_fn(rows @ exact["gate_proj"].mT), rows @ exact["up_proj"].mT
    target = (gate * up) @ exact["down_proj"].mT
    energy = float(target.square().mean())
    common = {
        "layer": layer.index,
        "layer_name": layer.name,
        "expert": expert,
        "group_size": config.group_size,
        "symmetric": config.symmetric,
        "calibration_tokens": note["calibration_tokens"],
        "heldout_tokens": len(own),
        "measured_on": "heldout" if enough else "borrowed",
    }
    found: list[dict[str, Any]] = []
    for method, quantized in candidates.items():
        fallback = "+".join(note["fallback"]) if method == GPTQ and note["fallback"] else "none"
        for bits in config.bits:
            values = {name: _values(quantized[name], index, bits) for name in PROJECTIONS}
            gate_q, up_q = act_fn(rows @ values["gate_proj"].mT), rows @ values["up_proj"].mT
            outputs = {WHOLE: (gate_q * up_q) @ values["down_proj"].mT}
            if config.per_projection:
                outputs |= {
                    "gate_proj": (gate_q * up) @ exact["down_proj"].mT,
                    "up_proj": (gate * up_q) @ exact["down_proj"].mT,
                    "down_proj": (gate * up) @ values["down_proj"].mT,
                }
            for projection, output in outputs.items():
                loss = float((output - target).square().mean())
                if loss != loss:
                    raise QuantizationError(
                        f"the {bits}-bit {method} loss is not a number",
                        where=f"{layer.name}, expert {expert}, {projection}",
                        do="use dtype: float32 or raise losses.damping",
                    )
                names = PROJECTIONS if projection == WHOLE else (projection,)
                stored = (packed_bytes(*layer.shape(n), bits, config.group_size, config.symmetric) for n in names)
                found.append(
                    common
                    | {
                        "projection": projection,
                        "method": method,
                        "bits": bits,
                        "loss": loss,
                        "relative_loss": loss / energy if energy > 0 else 0.0,
                        "fallback": fallback,
                        "bytes": sum(stored),
                    }
                )
    return found


def _values(quantized: gptq.Quantized, index: int, bits: int) -> Tensor:
    """Dequantized values of one expert's matrix, exactly as they will be stored."""
    width = quantized.bits.index(bits)
    return decode(
        quantized.codes[index, width], quantized.scale[index, width], quantized.zero[index, width], quantized.group_size
    )
