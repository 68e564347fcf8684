"""QONNX's Quant in the graph of an integer forward: operands of products with their bits, as FINN and hls4ml read them.

Quant (domain qonnx.custom_op.general, version 1) takes a tensor of float32, a scale, a zero point and a bit width; with
scale 1 and zero point 0 whole numbers pass it unchanged, and what reads the graph learns their width. Products of
operands that passed it are MatMul of float32, which is exact up to 2^24: products whose sums can pass that are refused.
The file holds Quant as a function of its own, too, so that onnxruntime and onnx's reference run it without QONNX.
"""

from __future__ import annotations

from onnx import AttributeProto, FunctionProto, NodeProto, helper

from moeq.integers.artifacts.integer import Value

DOMAIN, VERSION = "qonnx.custom_op.general", 1
QUANT = "Quant"
EXACT_SUMS = 1 << 24  # whole numbers up to here are exact in float32, QONNX's carrier
ATTRIBUTES = ("signed", "narrow", "rounding_mode")


def annotation(value: Value) -> str:
    """The name of a register's datatype in QONNX."""
    return f"{'' if value.signed else 'U'}INT{value.bits}"


def quant_function(opset: int) -> FunctionProto:
    """Quant of QONNX in standard operators, halves to even: rounding_mode ROUND, the only one that is used here."""
    one = helper.make_tensor("one", 1, [], [1.0])
    two = helper.make_tensor("two", 1, [], [2.0])

    def attribute(name: str) -> list[NodeProto]:
        constant = helper.make_node("Constant", [], [f"{name}_int"])
        constant.attribute.append(AttributeProto(name="value_int", type=AttributeProto.INT, ref_attr_name=name))
        return [constant, helper.make_node("Cast", [f"{name}_int"], [name], to=1)]

    def node(kind: str, *names: str) -> NodeProto:
        return helper.make_node(kind, list(names[:-1]), [names[-1]])

    body = [
        helper.make_node("Constant", [], ["one"], value=one),
        helper.make_node("Constant", [], ["two"], value=two),
        *attribute("signed"),
        *attribute("narrow"),
        node("Sub", "one", "signed", "unsigned"),
        node("Sub", "bits", "signed", "free"),  # bits without the sign
        node("Pow", "two", "free", "power"),
        node("Sub", "power", "one", "most"),
        node("Mul", "unsigned", "narrow", "less"),
        node("Sub", "most", "less", "high"),
        node("Sub", "narrow", "power", "lowest"),
        node("Mul", "signed", "lowest", "low"),
        node("Div", "x", "scale", "divided"),
        node("Add", "divided", "zero", "moved"),
        node("Max", "moved", "low", "above"),
        node("Min", "above", "high", "within"),
        node("Round", "within", "whole"),
        node("Sub", "whole", "zero", "back"),
        node("Mul", "back", "scale", "y"),
    ]
    return helper.make_function(
        DOMAIN,
        QUANT,
        inputs=["x", "scale", "zero", "bits"],
        outputs=["y"],
        nodes=body,
        opset_imports=[helper.make_opsetid("", opset)],
        attributes=list(ATTRIBUTES),
    )
