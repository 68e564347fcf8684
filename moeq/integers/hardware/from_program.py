"""A finished integer forward as the two kernels see it: its sizes and widths, and registers of its own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from moeq.integers.arithmetic.log_sqrt2 import Logarithm, Widths
from moeq.integers.artifacts.integer import Operation
from moeq.integers.forward.program import Program
from moeq.integers.hardware import registers
from moeq.integers.hardware.interval import Interval, symmetric
from moeq.integers.hardware.parts import Arithmetic
from moeq.integers.hardware.registers import Register, Registers, of_role
from moeq.integers.hardware.vision import Mixture, VisionSizes
from moeq.recipe import Denominator, Softmax


def _held(program: Program, name: str) -> Interval:
    return Interval(*program.values[name].ends)


def _whole(tensor: Tensor) -> Interval:
    return Interval(int(tensor.min()), int(tensor.max()))


def sums(weight: Tensor, bias: Tensor, x: Interval) -> Interval:
    """What the accumulators of rows [..., O, I] with bias [..., O] can reach, every input at the worse of its ends."""
    up, down = weight.clamp(min=0).sum(-1), weight.clamp(max=0).sum(-1)
    high, low = up * x.high + down * x.low + bias, up * x.low + down * x.high + bias
    return Interval(int(low.min()), int(high.max()))


def _linear(program: Program, operation: Operation, x: Interval, out: str, prefix: str = "") -> Registers:
    weight, bias = (program.constants[operation.tensors[f"{prefix}{role}"]] for role in ("weight", "bias"))
    bits = program.values[out].bits
    return registers.linear(x, _whole(weight), sums(weight, bias, x), bits, tight=True)


def _attention(program: Program, operation: Operation, positions: int) -> Registers:
    query = program.values[operation.inputs["query"]]
    weight = program.constants[f"{operation.inputs['query']}.weight"]
    head, attention = len(weight) // operation.number("heads"), operation.number("attention_bits")
    reciprocal = operation.number("reciprocal_bits")
    if operation.kind == "uniform_attention":
        return registers.uniform_attention(
            activations=query.bits, attention=attention, head=head, keys=positions, reciprocal_bits=reciprocal
        )
    kind: Logarithm = "log2" if operation.attributes["softmax"] == "log2" else "log-sqrt2"
    return registers.log_attention(
        activations=query.bits,
        attention=attention,
        kind=kind,
        head=head,
        keys=positions,
        held=Widths(left=operation.number("left"), dropped_from=None, reciprocal_bits=reciprocal),
        exact=operation.attributes["denominator"] == "exact",
    )


def _norm(program: Program, operation: Operation) -> Registers:
    gain, bias = (program.constants[operation.tensors[role]] for role in ("gain", "bias"))
    return registers.layer_norm(
        len(gain),
        program.values[operation.inputs["x"]].bits,
        operation.number("bits"),
        epsilon=operation.number("epsilon"),
        gain=int(gain.abs().max()),
        bias=int(bias.abs().max()),
    )


def _experts(program: Program, operation: Operation, top_k: int) -> Registers:
    x, active = _held(program, operation.inputs["x"]), _held(program, operation.outputs["active"])
    found: list[Register] = []
    for prefix, given, out in (("up_", x, "hidden"), ("down_", active, "outputs")):
        part = _linear(program, operation, given, operation.outputs[out], prefix)
        names = {"accumulators": f"{prefix}accumulators", "out": out}
        found += [
            Register(role=names.get(one.role, f"{prefix}{one.role}"), interval=one.interval, reached=one.reached)
            for one in part
            if one.role != "out" or out == "hidden"
        ]
    return (*found, *registers.combined(operation.number("bits"), top_k))


def of_program(program: Program) -> dict[str, Registers]:
    """Registers of every operation of a program that computes, by its name, in order.

    Roles that are outputs of INTEGER.md's operations have their names there. ArtifactError as a manifest gives it.
    """
    found: dict[str, Registers] = {}
    positions, top_k = 0, 1
    for operation in program.operations:
        name, bits = operation.name, operation.attributes.get("bits")
        if operation.kind == "tokens":
            held = (program.constants[operation.tensors[role]] for role in ("prefix", "position"))
            positions = sum(len(tensor) for tensor in held)
            found[name] = registers.added(operation.number("bits"))
        elif operation.kind == "linear":
            found[name] = _linear(program, operation, _held(program, operation.inputs["x"]), name)
        elif operation.kind == "layer_norm":
            found[name] = _norm(program, operation)
        elif operation.kind in ("log_attention", "uniform_attention"):
            found[name] = _attention(program, operation, positions)
        elif operation.kind == "router":
            top_k = operation.number("top_k")
            x = _held(program, operation.inputs["x"])
            made = _linear(program, operation, x, operation.outputs["logits"])
            experts = len(program.constants[operation.tensors["bias"]])
            found[name] = registers.router(made, top_k, experts, over_all=operation.attributes["over"] == "all")
        elif operation.kind == "experts":
            found[name] = _experts(program, operation, top_k)
        elif operation.kind == "add":
            found[name] = registers.added(operation.number("bits"))
        elif operation.kind == "mean_tokens":
            held_bits = program.values[operation.inputs["x"]].bits
            found[name] = registers.mean(held_bits, positions - operation.number("prefix"))
        else:  # patches, table and first_token only move numbers
            assert bits is None, f"{name}: an operation of kind {operation.kind} computes"
    return found


LAYERS = {  # what the kernel calls the linears of INTEGER.md's names, by the last word
    "embedding": "patch embedding",
    "query": "query, key, value",
    "key": "query, key, value",
    "value": "query, key, value",
    "proj": "projection",
    "up": "MLP up",
    "down": "MLP down",
    "router": "router",
    "logits": "head",
}


@dataclass(frozen=True, kw_only=True)
class Known:
    """Sizes and widths of a program; sums: what accumulators of its linears hold, by the kernel's name of them."""

    sizes: VisionSizes
    arithmetic: Arithmetic
    sums: dict[str, Interval]
    registers: dict[str, Registers]


def known(program: Program, name: str) -> Known:
    """A program as a model of the two kernels; the widest of all blocks counts."""
    found = of_program(program)
    by_kind = {kind: [one for one in program.operations if one.kind == kind] for kind in
               ("patches", "tokens", "experts", "router")}  # fmt: skip
    attention = [one for one in program.operations if one.kind in ("log_attention", "uniform_attention")]
    held = program.constants
    front, rest = (held[by_kind["tokens"][0].tensors[role]] for role in ("prefix", "position"))
    mixture = None
    if by_kind["experts"]:
        up = held[by_kind["experts"][0].tensors["up_weight"]]
        top_k = by_kind["router"][0].number("top_k")
        blocks = len(by_kind["experts"])
        mixture = Mixture(num_experts=len(up), top_k=top_k, inner=up.shape[1], blocks=blocks)
    dense = [one for one in program.operations if one.kind == "linear" and one.name.endswith(".up")]
    inner = [len(held[one.tensors["bias"]]) for one in dense]
    hidden = rest.shape[-1]
    side = by_kind["patches"][0].number("patch_size")
    sizes = VisionSizes(
        name=name,
        hidden=hidden,
        blocks=len(attention),
        heads=attention[0].number("heads"),
        intermediate=max(inner, default=hidden),
        positions=len(front) + len(rest),
        patch_inputs=program.image_shape[0] * side**2,
        prefix=len(front),
        classes=len(held["logits.bias"]),
        mixture=mixture,
    )
    return Known(sizes=sizes, arithmetic=_arithmetic(program, attention[0]), sums=_sums(found), registers=found)


def _arithmetic(program: Program, attention: Operation) -> Arithmetic:
    """Widths of a program: of its weights as the widest code of the blocks needs."""
    names = [name for name in program.constants if name.startswith("blocks.") and name.endswith("weight")]
    names = [name for name in names if not name.endswith("router.weight")]
    largest = max(int(program.constants[name].abs().max()) for name in names)
    uniform = attention.kind == "uniform_attention"
    attributes = attention.attributes
    return Arithmetic(
        weights=max(2, symmetric(max(1, largest)).bits),
        activations=program.values[attention.inputs["query"]].bits,
        attention=attention.number("attention_bits"),
        softmax="uniform" if uniform else cast(Softmax, attributes["softmax"]),
        denominator="quantized" if uniform else cast(Denominator, attributes["denominator"]),
    )


def _sums(found: dict[str, Registers]) -> dict[str, Interval]:
    sums: dict[str, Interval] = {}
    for name, held in found.items():
        roles = {one.role for one in held}
        for role, layer in (("accumulators", LAYERS.get(name.rsplit(".", 1)[-1])), ("up_accumulators", "experts up"),
                            ("down_accumulators", "experts down")):  # fmt: skip
            if role in roles and layer is not None:
                widest = of_role(held, role)
                sums[layer] = sums[layer] | widest if layer in sums else widest
    return sums
