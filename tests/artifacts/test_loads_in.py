"""Where an assignment loads, in a line: the reason is what stands in the way, in a few words."""

from __future__ import annotations

import pytest

from moeq.artifacts.loads_in import UNKNOWN, LoadsIn, Packed, line, loads_in, told
from moeq.artifacts.targets import in_words
from moeq.errors import FormatError
from moeq.terminal import print_summary
from moeq_kernels.widths import Encoding


class Layer:
    projections = ("gate_proj", "down_proj")

    def __init__(self, name: str, inputs: int = 256) -> None:
        self.name, self.inputs = name, inputs

    def shape(self, projection: str) -> tuple[int, int]:
        return 256, self.inputs


def beside(kind: str, inputs: int = 256) -> Packed:
    return Packed(kind=kind, rows=64, inputs=inputs, bits=4, encoding=Encoding(group_size=128, symmetric=True))


PACKED = "packed modules beside the experts"
VLLM = ("vllm", "vllm-cuda", "vllm-gptq", "humming")


def found(widths: list[list[int]], inputs: int = 256, **more: object) -> LoadsIn:
    layers = [Layer(f"layers.{number}", inputs) for number in range(len(widths))]
    return loads_in(widths, **({"group_size": 128, "symmetric": True, "layers": layers} | more))  # type: ignore[arg-type]


def reasons(where: LoadsIn) -> dict[str, str]:
    """Of all runtimes but exl3, which reads no grids."""
    assert where["exl3"] is not None
    assert where["exl3"]["reason"] == "grids"
    return {name: why["reason"] for name, why in where.items() if why is not None and name != "exl3"}


@pytest.mark.parametrize(
    ("widths", "more", "wanted"),
    [
        ([[4, 4], [4, 4]], {}, {}),
        (
            [[4, 4], [8, 8]],
            {},
            {"transformers": "mixed widths"} | dict.fromkeys(("vllm", "vllm-gptq"), "8-bit"),
        ),
        (
            [[4, 8], [4, 4]],
            {},
            {"transformers": "mixed widths"} | dict.fromkeys(("vllm", "vllm-gptq"), "8-bit")
            | dict.fromkeys(("vllm-cuda", "humming", "mlx", "llama.cpp", "llama.cpp-refit"), "mixed widths in a layer"),
        ),
        (
            [[4, 4], [4, 4]],
            {"symmetric": False},
            dict.fromkeys(("transformers", *VLLM), "zero points")
            | {"llama.cpp": "4 bits with zero points of 256 inputs in groups of 128"},
        ),
        ([[4, 4]], {"others": [beside("attention")]}, dict.fromkeys(("transformers", *VLLM), PACKED)),
        (
            [[4, 4]],
            {"others": [beside("attention"), beside("head")]},
            dict.fromkeys(("transformers", *VLLM), PACKED)
            | dict.fromkeys(("auto-round", "gptqmodel"), "packed embeddings and heads"),
        ),
        (
            [[4, 4]],
            {"others": [beside("dense", inputs=40)]},
            dict.fromkeys(("transformers", *VLLM), PACKED)
            | dict.fromkeys(("gptqmodel", "auto-round", "mlx"), "dense: 40 inputs")
            | dict.fromkeys(("llama.cpp", "llama.cpp-refit"), "dense: 4 bits of 40 inputs in groups of 40"),
        ),
        ([[4, 4]], {"group_size": 256}, dict.fromkeys((*VLLM, "mlx"), "groups of 256")),
        ([[4, 4]], {"inputs": 40}, {}),
    ],
)  # fmt: skip
def test_a_reason_says_what_is_in_the_way(
    widths: list[list[int]], more: dict[str, object], wanted: dict[str, str]
) -> None:
    where = found(widths, **more)  # type: ignore[arg-type]
    if more.get("inputs") == 40:
        assert where["native"] is None
        assert {"auto-round", "gptqmodel", "vllm"} <= set(reasons(where)), "multiples of 32"
        return
    assert reasons(where) == wanted
    assert all(why is None or (why["do"] and why["price"] is None) for why in where.values())


def test_one_bit_is_only_native() -> None:
    where = found([[1, 4], [1, 4]])
    told = reasons(where)
    assert told.pop("llama.cpp") == told.pop("llama.cpp-refit") == "mixed widths in a layer"
    assert told == dict.fromkeys(("auto-round", "transformers", *VLLM, "gptqmodel", "mlx"), "1-bit")
    assert where["gptqmodel"] is not None
    where["gptqmodel"]["price"] = 0.042
    text = line(where)
    assert text.startswith("loads in: native (transformers with moeq); not in auto-round, humming, mlx, transformers, ")
    assert "gptqmodel (1-bit; +4.2 % loss)" in text
    where["gptqmodel"]["price"] = 23882.51
    assert "gptqmodel (1-bit; 23,900 times the loss)" in line(where)
    where["gptqmodel"]["price"] = 9.46
    assert "gptqmodel (1-bit; 10.5 times the loss)" in line(where)
    assert line(found([[4, 4]])).endswith("; not in exl3 (grids)")


def test_a_narrow_window_breaks_it_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    where = found([[1, 4], [1, 4]])
    print_summary({"loads_in": where}, indent=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert all(one.startswith("  ") and len(one) <= 40 for one in lines)
    assert " ".join(" ".join(lines).split()) == line(where)


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        (Encoding(group_size=64, symmetric=False), "groups of 64 weights, with zero points"),
        (Encoding(group_size=-1, symmetric=True), "one group a row, symmetric"),
        (Encoding.trellis(10), "trellis codes of 1,024 states, one group a row"),
        (Encoding.exl3("mcg"), "EXL3's codes (mcg), one group a row"),
        (Encoding.floating("nvfp4"), "NVFP4 (groups of 16 weights) at 4 bits, FP8 (one scale a row) at 8"),
    ],
)
def test_codes_in_words(encoding: Encoding, words: str) -> None:
    assert in_words(encoding) == words


def test_a_row_that_shares_one_scale_is_no_group_of_minus_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary({"group_size": -1})
    assert capsys.readouterr().out == "group size: all of a row\n"


def test_names_of_files_are_told_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary({"checked_files": {"configuration_moeq.py": "moeq's own hook"}})
    assert capsys.readouterr().out == "checked files\n  configuration_moeq.py: moeq's own hook\n"


def test_without_shapes_the_widths_speak() -> None:
    where = loads_in([[2, 4]], group_size=128, symmetric=True, names=["layers.0"])
    assert reasons(where)["vllm-cuda"] == "mixed widths in a layer"
    assert reasons(where)["vllm"] == "2-bit"
    assert where["auto-round"] is None


def test_a_model_that_a_runtime_does_not_know_is_told() -> None:
    def check(name: str) -> None:
        if name == "llama.cpp":
            raise FormatError("model_type strange is none that it knows; see its list")

    assert reasons(found([[4, 4]], check=check)) == {"llama.cpp": "model_type strange is none that it knows"}
    mixed = found([[1, 4]], check=check)["llama.cpp"]
    assert mixed is not None
    assert mixed["reason"] == "model_type strange is none that it knows", "whatever the widths"
    assert mixed["do"] == UNKNOWN


def test_a_runtime_that_loads_it_rounded_is_not_named_as_one_that_does_not() -> None:
    where = found([[3, 3]], symmetric=True, group_size=32)
    assert where["llama.cpp-refit"] is None
    assert where["llama.cpp"] is not None, "blocks of 256 have one scale"
    assert "llama.cpp" not in told(where)
    assert "llama.cpp (" not in line(where)
    assert "llama.cpp" in told(found([[1, 4], [1, 4]])), "neither loads it"
