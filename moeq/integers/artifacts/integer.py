"""manifest.json of an integer forward: every operation in order, every constant, every value of the test vectors.

A hardware team reads this file, `weights.safetensors` and `vectors.safetensors`; moeq/INTEGER.md defines every kind of
operation. What the kinds need stands in KINDS, and a manifest that lacks some of it is refused as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from moeq.artifacts.files import write_json
from moeq.artifacts.reading import PlainName
from moeq.artifacts.stage import FileStamp, Frozen, ModelStamp, read_model
from moeq.version import __version__
from moeq_kernels.widths import EXACT_BITS, MAX_SHIFT, MULTIPLIER_BITS, ROUNDING

SCHEMA_VERSION = 1
FORMAT = "moeq-integer"
NAME, SCHEMA, WEIGHTS, VECTORS = "manifest.json", "manifest.schema.json", "weights.safetensors", "vectors.safetensors"
REMEDY = "write the integer forward again"
MOST_BITS = 63
Attribute = int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a kind of operation has: role -> layout of inputs, tensors and outputs; names of its attributes."""

    inputs: dict[str, str]
    outputs: dict[str, str]
    tensors: dict[str, str] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()


HIDDEN, SLOTS = "[images, positions, channels]", "[images, positions, slots, channels]"
PAIRS, QUERIES, MIXED = (
    "[images, heads, queries, keys]",
    "[images, heads, queries]",
    "[images, heads, queries, channels of a head]",
)
ROWS = {"weight": "[outputs, inputs]", "bias": "[outputs]", "multiplier": "[outputs]", "shift": "[outputs]"}
TABLE = {"power_table": "[256]"}
ATTENTION = {"query": HIDDEN, "key": HIDDEN, "value": HIDDEN}
ATTENDED = {"scores": PAIRS, "codes": PAIRS, "denominator": QUERIES, "row": QUERIES, "out": HIDDEN}
SLOT_VALUES = ("up_accumulators", "hidden", "active", "down_accumulators", "outputs")
SCALED = ("multiplier", "shift")


def _factors(*prefixes: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{part}" for prefix in prefixes for part in SCALED)


ATTENTION_NUMBERS = ("heads", "attention_bits", "reciprocal_bits", "bits", *_factors("code_", "power_", "out_"))
KINDS: dict[str, Kind] = {
    "patches": Kind(
        inputs={"x": "[images, channels, rows, columns]"},
        outputs={"out": "[images, patches, channels * rows * columns of a patch]"},
        attributes=("patch_size",),
    ),
    "linear": Kind(
        inputs={"x": "[..., inputs]"},
        tensors=ROWS,
        outputs={"accumulators": "[..., outputs]", "out": "[..., outputs]"},
        attributes=("bits",),
    ),
    "tokens": Kind(
        inputs={"x": "[images, patches, channels]"},
        tensors={"prefix": "[tokens in front, channels]", "position": "[patches, channels]"},
        outputs={"out": HIDDEN},
        attributes=("bits",),
    ),
    "layer_norm": Kind(
        inputs={"x": HIDDEN},
        tensors={"gain": "[channels]", "bias": "[channels]"},
        outputs={"rows": HIDDEN, "out": HIDDEN},
        attributes=("epsilon", "gain_bits", "bits"),
    ),
    "log_attention": Kind(
        inputs=ATTENTION,
        tensors=TABLE,
        outputs=ATTENDED | {"even": MIXED, "odd": MIXED},
        attributes=(*ATTENTION_NUMBERS, "softmax", "denominator", "left", "dropped_from", "unit_bits"),
    ),
    "uniform_attention": Kind(
        inputs=ATTENTION,
        tensors=TABLE,
        outputs=ATTENDED | {"numerators": PAIRS, "accumulators": MIXED},
        attributes=ATTENTION_NUMBERS,
    ),
    "table": Kind(inputs={"x": HIDDEN}, tensors={"table": "[2**bits of x]"}, outputs={"out": HIDDEN}),
    "add": Kind(inputs={"x": HIDDEN, "y": HIDDEN}, outputs={"out": HIDDEN}, attributes=("bits",)),
    "router": Kind(
        inputs={"x": HIDDEN},
        tensors=ROWS | TABLE,
        outputs={
            "accumulators": "[images, positions, experts]",
            "logits": "[images, positions, experts]",
            "index": "[images, positions, slots]",
            "weights": "[images, positions, slots]",
        },
        attributes=("bits", "top_k", "over", "reciprocal_bits", *_factors("power_")),
    ),
    "experts": Kind(
        inputs={"x": HIDDEN, "index": "[images, positions, slots]", "weights": "[images, positions, slots]"},
        tensors={
            f"{side}_{role}": f"[experts, {layout[1:]}" for side in ("up", "down") for role, layout in ROWS.items()
        }
        | {"table": "[2**hidden_bits]"},
        outputs=dict.fromkeys(SLOT_VALUES, SLOTS) | {"out": HIDDEN},
        attributes=("hidden_bits", "bits", "unit_bits"),
    ),
    "first_token": Kind(inputs={"x": HIDDEN}, outputs={"out": "[images, channels]"}),
    "mean_tokens": Kind(
        inputs={"x": HIDDEN}, outputs={"out": "[images, channels]"}, attributes=("prefix", "bits", *SCALED)
    ),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "softmax": ("log-sqrt2", "log2"),
    "denominator": ("quantized", "exact"),
    "over": ("chosen", "all"),
}


class Operation(Frozen):
    """One step. inputs, outputs: role -> name of a value; tensors: role -> name of a constant."""

    name: str
    kind: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    tensors: dict[str, str] = Field({})
    attributes: dict[str, Attribute] = Field({})

    @model_validator(mode="after")
    def _is_complete(self) -> Operation:
        kind = KINDS.get(self.kind)
        if kind is None:
            raise ValueError(f"operation {self.name} is of no known kind: {self.kind!r}")
        for what in ("inputs", "outputs", "tensors", "attributes"):
            other = set(getattr(self, what)) ^ set(getattr(kind, what))
            if other:
                raise ValueError(f"{what} of {self.name} differ from those of its kind: {sorted(other)}")
        for key, value in self.attributes.items():
            self._check(key, value)
        return self

    def _check(self, key: str, value: Attribute) -> None:
        """ValueError for an attribute that no register holds."""
        if key in CHOICES:
            right = value in CHOICES[key]
        elif key == "dropped_from" and value is None:
            right = True
        else:
            least, most = (0, MAX_SHIFT) if key.endswith(("shift", "bits", "left")) else (0, 2**EXACT_BITS)
            if key.endswith("multiplier"):
                most = 2**MULTIPLIER_BITS - 1
            elif key in {"heads", "patch_size", "top_k", "epsilon", "bits", "dropped_from"}:
                least = 1
            right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if not right:
            raise ValueError(f"{key} of {self.name} is {value!r}")

    def number(self, name: str) -> int:
        """An attribute that is a whole number."""
        number = self.attributes[name]
        assert isinstance(number, int)
        return number


class Value(Frozen):
    """A tensor between operations. bits: the register that holds it; scale: what 1 stands for, None where a row or an
    element has its own."""

    bits: int = Field(ge=1, le=MOST_BITS)
    signed: bool = True
    scale: float | None = None

    @property
    def known_scale(self) -> float:
        """The scale of a value that has one."""
        assert self.scale is not None
        return self.scale

    @property
    def ends(self) -> tuple[int, int]:
        """The least and the largest whole number that the register holds."""
        return (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1) if self.signed else (0, 2**self.bits - 1)

    @property
    def dtype(self) -> str:
        """The narrowest type of safetensors that holds it, as this format writes it."""
        if not self.signed and self.bits == 8:
            return "U8"
        needed = self.bits if self.signed else self.bits + 1
        return next(f"I{width}" for width in (8, 16, 32, 64) if needed <= width)


class StoredTensor(Frozen):
    """Where a tensor lies. shape: of a value without the images' axis; sha256: of its bytes in the file."""

    name: str
    file: PlainName
    key: str
    dtype: Literal["U8", "I8", "I16", "I32", "I64"]
    shape: tuple[int, ...]
    layout: str
    sha256: str


class StoredValue(StoredTensor):
    """A value of the test vectors, one row an image."""

    bits: int = Field(ge=1, le=MOST_BITS)
    signed: bool
    scale: float | None


class IntegerManifest(Frozen):
    """settings: as the recipe has them; vectors: the number of images; files: the digests of the other files."""

    schema_version: int = SCHEMA_VERSION
    format: Literal["moeq-integer"] = "moeq-integer"
    moeq_version: str = __version__
    model: ModelStamp | None
    settings: dict[str, Any]
    rounding: Literal["half_up"] = ROUNDING
    image_shape: tuple[int, int, int]
    vectors: int = Field(ge=1)
    operations: tuple[Operation, ...] = Field(min_length=1)
    tensors: tuple[StoredTensor, ...]
    values: tuple[StoredValue, ...]
    files: dict[PlainName, FileStamp]

    @model_validator(mode="after")
    def _is_in_order(self) -> IntegerManifest:
        """Every name is there once, and made before it is used."""
        constants = [stored.name for stored in self.tensors]
        made = ["pixels"]
        for operation in self.operations:
            for what, names, known in (
                ("value", list(operation.inputs.values()), made),
                ("tensor", list(operation.tensors.values()), constants),
            ):
                unknown = next((name for name in names if name not in known), None)
                if unknown is not None:
                    raise ValueError(f"operation {operation.name} uses {what} {unknown!r}, which is not there before")
            made += operation.outputs.values()
        values = [stored.name for stored in self.values]
        for what, names in (("values", made), ("tensors", constants)):
            if len(set(names)) != len(names):
                raise ValueError(f"two {what} have one name")
        if sorted(values) != sorted(made):
            raise ValueError(f"values differ from what the operations make: {sorted(set(values) ^ set(made))[:3]}")
        return self


def write_manifest(directory: Path, manifest: IntegerManifest) -> None:
    """Write manifest.json and its JSON Schema."""
    write_json(directory / SCHEMA, IntegerManifest.model_json_schema())
    write_json(directory / NAME, manifest.model_dump(mode="json"))


def read_manifest(directory: Path) -> IntegerManifest:
    """Read and validate; ArtifactError naming the place."""
    return read_model(directory / NAME, IntegerManifest, SCHEMA_VERSION, remedy=REMEDY)
