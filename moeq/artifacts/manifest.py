"""PlacementManifest: where every expert should live and how to read each of its replicas (placement.json).

A runtime that has never heard of moeq can place every expert from this file and the safetensors alone. Every replica
names its file, the prefix of its tensors' keys, each tensor's shape and type, its bytes and the SHA-256 of the
tensors' bytes, concatenated in the order of `tensors`. The layout is described in `layout`; the JSON Schema lies
beside the file.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from moeq.artifacts.assignment import DROPPED, WIDTHS, Tier, Width
from moeq.artifacts.files import write_json
from moeq.artifacts.places import MANIFEST
from moeq.artifacts.reading import PlainName, inside, tensor_bytes
from moeq.artifacts.stage import Frozen, ModelStamp, read_model
from moeq.bounded import shown
from moeq.errors import ArtifactError
from moeq.version import __version__
from moeq_kernels.iq_types import SETS
from moeq_kernels.widths import CODEBOOKS, LAYOUT, STATE_BITS, TRELLIS_BITS, Encoding

SCHEMA_VERSION = 1
NAME = MANIFEST
REMEDY = "export the checkpoint again"
LEFT_OUT = "give the checkpoint as moeq wrote it (save_pretrained leaves this out), or export it again"
LAYOUT_KEYS = ("name", "version", "group_size", "symmetric")

NESTED_TEXT = (
    " Nested: `scales` and `zeros` of replicas of 2, 3 and 4 bits are those of the 4-bit grid (zeros packed at 4 bits; "
    "symmetric: zero = 8), and with k = 2^(4-bits), value = (code*k + (k-1)/2 - zero) * scale. A replica with "
    "`leading_bits_of` has no tensors of its own: its codes are the leading `bits` bits of those of the replica of "
    "that width, whose tensors it names."
)
TRELLIS_TEXT = (
    "Trellis codes: tiles of 16 x 16 weights, row after row of a tile the steps of one walk, its stream of `bits` bits "
    "a step, least significant bit first, a ring; a state is the `state_bits` bits that end with a step's; weight = "
    "value(state) / 32 * scale of the row, value(state) as `values` lists them for every width: int8, base64. Rows and "
    "inputs are filled up to whole tiles. `codes` uint8 [ceil(rows/16), ceil(inputs/16)*32*bits], tile by tile; "
    "`scales` float16 [rows, 1]. `dense` and `bias` are in the checkpoint's type."
)
EXL3_TEXT = (
    "EXL3's codes: x [inputs] gives y [rows] = ((x * signs) H) V H * signs * `scales` / 128, H: Hadamard matrices of "
    "order 128 (-1 where the numbers of row and column have an odd number of bits in common, else 1) along inputs and"
    " rows, block by block; signs: -1 where bit i % 128 of 0x243F6A8885A308D313198A2E03707344 is 1, else 1. V "
    "[inputs, rows] lies in tiles of 16 x 16, as rings of 256 steps of `bits` bits, most significant first in little-"
    "endian words of 32 bits. Step 8t + s of a tile is its input t%4*2 + s%2 + s//2%2*8 and row t//4 + s//4*8; its "
    "value is that of the 16 bits w that end with it: with h(b) the float16 of bits b, float16 of (1024 + the sum of "
    "the four bytes of w * 0x83DCD12D mod 2^32) * h(0x1EEE) + h(0xC931). `codes` uint8 [rows/16, inputs/16*32*bits], "
    "tile by tile; `scales` float16 [rows, 1]. `dense` and `bias` are in the checkpoint's type."
)
IQ_TEXT = (
    "llama.cpp's i-quants: a matrix [rows, inputs] has the type of ggml that `types` names for its width; `codes` "
    "uint8 [rows, blocks*(size-2)] are the blocks of a row as ggml/src/ggml-common.h has them, each without its first "
    "two bytes, the float16 d, which is in `scales` float16 [rows, blocks]. Blocks are of 256 weights, of Q8_0 of 32. "
    "`dense` and `bias` are in the checkpoint's type."
)
FLOAT_TEXT = (
    "A matrix [rows, inputs] is a bitstream of codes a row, least significant bit first, each a floating-point number. "
    "4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 (codes 0 to 7), and these below 0 (8 to 15). nvfp4: every 16 inputs of a row "
    "share a scale, e4m3, and weight = number * (scale * `unit`); mxfp4: every 32 inputs share a scale, e8m0, byte b "
    "being 2^(b - 127), and weight = number * scale. 8 bits: weight = number * scale, numbers e4m3, a scale a row. "
    "`codes` uint8 [rows, ceil(inputs*bits/8)]; `scales` uint8 [rows, groups] at 4 bits, float16 [rows, 1] at 8; `unit`"
    " float32 [1, 1]. `dense` and `bias` are in the checkpoint's type."
)
MIXED_TEXT = (
    " The matrices of a replica with `projections` have the widths that it names, each read at its own; `bits` is the "
    "widest of them."
)
DROPPED_TEXT = (
    " An expert of 0 bits is dropped: it has no placed replica, and whatever is routed to it, it adds nothing; routing "
    "weights are as they are without that."
)
LAYOUT_TEXT = (
    "Weights are [rows, inputs] per matrix: gate_proj and up_proj [intermediate, hidden], down_proj [hidden, "
    "intermediate], whatever the family's own order in memory; a layer's `projections` says which it has. "
    "Value = (code - zero) * scale of the group of `group_size` consecutive inputs (the last group may be shorter; "
    "-1: one group a row). `codes` uint8 [rows, ceil(inputs*bits/8)]: each row is a little-endian bit stream, code k "
    "in bits [k*bits, (k+1)*bits), least significant bit first, bit i of the stream is bit i%8 of byte i//8. `scales` "
    "float16 [rows, groups]. `zeros` uint8 [rows, ceil(groups*bits/8)], packed like codes; absent for 1 bit "
    "(zero = 0.5) and for symmetric grids (zero = 2^(bits-1)). `dense`: the weights themselves, in the checkpoint's "
    "type, shown as 16 bits. `bias`: [rows], in the checkpoint's type, where the family has biases. Modules outside of "
    "the experts (`others`) are packed alike, each with its own group size and grid; their biases lie with the other "
    "weights, under the names that the checkpoint gives them."
)


Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TensorStamp(Frozen):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @model_validator(mode="after")
    def _can_be(self) -> TensorStamp:
        tensor_bytes(self.dtype, self.shape)
        return self


def _check_sum(tensors: tuple[TensorStamp, ...], stated: int) -> None:
    """ValueError unless the tensors have the bytes that their replica states."""
    counted = sum(tensor_bytes(stamp.dtype, stamp.shape) for stamp in tensors)
    if not tensors or counted != stated:
        raise ValueError(f"tensors of {counted} bytes, stated are {stated}")


class Replica(Frozen):
    """One stored copy of an expert. `index`: position of the expert on the tensors' first axis, None when its own.

    projections: the widths of its matrices where they differ, which only a placed replica's do; `bits` is the widest.
    quantizer: the method that made it, or those of its matrices (and `+refined`: trained further with its layer;
    `+tuned`: its scales trained with the whole model); None: the checkpoint's own weights, or made before moeq wrote it
    down.
    loss: mean squared error of the expert's output on held-out tokens (before it was refined), where all replicas are
    stored; None: the checkpoint's own weights, matrices of several widths, or not written down.
    leading_bits_of: the width of the stored replica whose tensors this one reads, None when it has its own; `bytes` and
    `sha256` are then that one's.
    errors: {projection: relative error of its packed matrix against the model's own weights, refined or not}, which
    whoever has the model can measure again; None: it has no tensors of its own, or not written down.
    """

    bits: int
    projections: dict[str, int] | None = None
    placed: bool
    quantizer: str | None = None
    loss: float | None = Field(None, ge=0, allow_inf_nan=False)
    errors: dict[str, Error] | None = None
    file: PlainName
    key_prefix: str
    index: int | None = None
    leading_bits_of: int | None = None
    tensors: tuple[TensorStamp, ...]
    bytes: int
    sha256: str

    @model_validator(mode="after")
    def _adds_up(self) -> Replica:
        _check_sum(self.tensors, self.bytes)
        return self

    @property
    def widths(self) -> Width:
        """One width for all matrices, or that of each."""
        return self.bits if self.projections is None else self.projections


class PlacedExpert(Frozen):
    """bits: of the placed replica, of its widest matrix where they differ; 0: it is dropped, and has none."""

    expert: int
    tier: Tier
    bits: int
    importance: float
    replicas: tuple[Replica, ...]

    @model_validator(mode="after")
    def _is_placed(self) -> PlacedExpert:
        placed = sum(replica.placed for replica in self.replicas)
        if placed != (self.bits != DROPPED):
            raise ValueError(f"expert {self.expert} of {self.bits} bits has {placed} placed replicas")
        widths = [replica.bits for replica in self.replicas if replica.projections is None]
        if len(set(widths)) != len(widths):
            raise ValueError(f"expert {self.expert} has two replicas of one width")
        for replica in self.replicas:
            widest = replica.bits if replica.projections is None else max(replica.projections.values(), default=0)
            if replica.bits != widest or (replica.placed and replica.bits != self.bits):
                raise ValueError(f"expert {self.expert} of {self.bits} bits has a replica of {replica.bits}")
        return self

    @property
    def widths(self) -> Width:
        """The width of the placed replica, or those of its matrices."""
        return next((replica.widths for replica in self.replicas if replica.placed), self.bits)


DOWN = "down_proj"  # the matrix whose rows are the hidden size's


class PlacedLayer(Frozen):
    """One MoE layer. `kind`: how the family keeps and calls its experts (llama4: the routing weight multiplies an
    expert's input; all others: its output)."""

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    projections: tuple[str, ...]
    biased: bool
    kind: str
    top_k: int
    experts: tuple[PlacedExpert, ...]

    @property
    def weights(self) -> int:
        """Weights of all experts, biases among them."""
        matrices = len(self.projections) * self.hidden_size * self.intermediate_size
        rows = sum(self.hidden_size if name == DOWN else self.intermediate_size for name in self.projections)
        return self.num_experts * (matrices + self.biased * rows)

    def shape(self, projection: str) -> tuple[int, int]:
        """Rows and inputs of one matrix of an expert."""
        shape = self.intermediate_size, self.hidden_size
        return shape[::-1] if projection == DOWN else shape

    @model_validator(mode="after")
    def _has_its_experts(self) -> PlacedLayer:
        numbers = tuple(placed.expert for placed in self.experts)
        if len(numbers) != self.num_experts or numbers != tuple(range(len(numbers))):
            raise ValueError(f"num_experts is {self.num_experts}, {len(numbers)} experts follow")
        if self.biased and any(placed.bits == DROPPED for placed in self.experts):
            raise ValueError("an expert with biases cannot be dropped")
        for replica in (replica for placed in self.experts for replica in placed.replicas):
            if not {replica.bits, *(replica.projections or {}).values()} <= set(WIDTHS):
                raise ValueError(f"bits of a replica must be one of {WIDTHS}")
        return self


class PlacedModule(Frozen):
    """A packed module outside of the experts: a linear, or an embedding of `rows` vectors, with a grid of its own.

    kind: attention, dense, shared, embeddings or head; tied: a head that uses the same tensors; error: as a replica's
    `errors`.
    """

    name: str
    kind: str
    bits: int
    group_size: int
    symmetric: bool
    quantizer: str
    rows: int
    inputs: int
    tied: str | None = None
    error: Error | None = None
    file: PlainName
    key_prefix: str
    tensors: tuple[TensorStamp, ...]
    bytes: int
    sha256: str

    @property
    def encoding(self) -> Encoding:
        """How its codes stand for values."""
        return Encoding(group_size=self.group_size, symmetric=self.symmetric)

    @model_validator(mode="after")
    def _adds_up(self) -> PlacedModule:
        _check_sum(self.tensors, self.bytes)
        return self


class Totals(Frozen):
    """Bytes of tensors (safetensors headers apart). `packed_module_bytes`: of non_expert_bytes, the packed modules."""

    placed_expert_bytes: int
    other_replica_bytes: int
    non_expert_bytes: int
    guard_bytes: int
    packed_module_bytes: int = 0
    bytes_by_tier: dict[str, int]


class CodeFile(Frozen):
    """A Python file of the checkpoint, which `trust_remote_code=True` runs. origin: `moeq` is the hook that brings moeq
    in; `model` is code of the original model's own, which whoever made the checkpoint trusted."""

    file: PlainName
    sha256: str
    origin: Literal["moeq", "model"]


class StoredTensor(TensorStamp):
    """A tensor that is neither of an expert nor of a packed module, or a guard; sha256: of its bytes."""

    file: PlainName
    sha256: str


class PlacementManifest(Frozen):
    """tensors: every one that is no expert's and no packed module's; code: every Python file of the checkpoint; both
    empty in those made before moeq wrote them down."""

    schema_version: int = SCHEMA_VERSION
    moeq_version: str = __version__
    model: ModelStamp
    assignment: dict[str, Any]
    layout: dict[str, Any]
    layers: tuple[PlacedLayer, ...]
    others: tuple[PlacedModule, ...] = ()
    tensors: tuple[StoredTensor, ...] = ()
    totals: Totals
    inputs: dict[str, str]
    code: tuple[CodeFile, ...] = ()

    @model_validator(mode="after")
    def _is_described(self) -> PlacementManifest:
        missing = [f"layout.{key}" for key in LAYOUT_KEYS if key not in self.layout]
        missing += [f"assignment.{key}" for key in ("name", "method") if key not in self.assignment]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        group_size = self.layout["group_size"]
        if not isinstance(group_size, int) or group_size == 0 or group_size < -1:
            raise ValueError("layout.group_size is no size of a group")
        state_bits = self.layout.get("state_bits", 0)
        if type(state_bits) is not int or state_bits not in (0, *STATE_BITS):
            raise ValueError("layout.state_bits is no trellis code's")
        if self.layout.get("codebook", "") not in CODEBOOKS:
            raise ValueError("layout.codebook is no code's")
        return self

    @property
    def encoding(self) -> Encoding:
        """How the codes of packed experts stand for values."""
        return Encoding.described(self.layout)

    @property
    def widths_there(self) -> frozenset[int]:
        """The widths that every expert has a replica of, all of whose matrices have it."""
        each = [
            {replica.bits for replica in expert.replicas if replica.projections is None}
            for layer in self.layers
            for expert in layer.experts
        ]
        return frozenset(set.intersection(*each)) if each else frozenset()

    @property
    def bits_per_weight(self) -> float:
        """Bits that the placed replicas store for a weight of the experts."""
        return 8 * self.totals.placed_expert_bytes / max(1, sum(layer.weights for layer in self.layers))

    def files(self) -> set[str]:
        """Names of the files that hold experts, packed modules and code."""
        experts = (expert for layer in self.layers for expert in layer.experts)
        of_experts = {replica.file for expert in experts for replica in expert.replicas}
        return of_experts | {module.file for module in self.others} | {code.file for code in self.code}


def trellis_values(encoding: Encoding) -> dict[str, str]:
    """{width: values of the 2**L states in units of 1/32, int8 in base64}."""
    from moeq_kernels.trellis import integer_values  # with torch

    every = {str(bits): integer_values(bits, encoding.state_bits) for bits in TRELLIS_BITS}
    return {bits: b64encode(values.numpy().tobytes()).decode() for bits, values in every.items()}


def _described(encoding: Encoding, mixed: bool, drops: bool) -> str:
    """How weights are stored, in words."""
    grid = LAYOUT_TEXT + (NESTED_TEXT if encoding.nested else "")
    kind = {"grid": grid, "trellis": TRELLIS_TEXT, "exl3": EXL3_TEXT, "iq": IQ_TEXT}.get(encoding.codes, FLOAT_TEXT)
    return kind + (MIXED_TEXT if mixed else "") + (DROPPED_TEXT if drops else "")


def layout(encoding: Encoding, mixed: bool = False, drops: bool = False) -> dict[str, Any]:
    """The layout block of a manifest; mixed: whether some expert's matrices differ in width; drops: whether some expert
    is dropped."""
    return {
        "name": LAYOUT,
        "version": encoding.layout_version,
        **encoding.describe(),
        **({"values": trellis_values(encoding)} if encoding.codes == "trellis" else {}),
        **(
            {"types": {str(bits): name for bits, name in SETS[encoding.codebook].items()}}
            if encoding.codes == "iq"
            else {}
        ),
        "description": _described(encoding, mixed, drops),
    }


def write_manifest(directory: Path, manifest: PlacementManifest) -> None:
    """Write placement.json and placement.schema.json."""
    write_json(directory / "placement.schema.json", PlacementManifest.model_json_schema())
    write_json(directory / NAME, manifest_json(manifest))


def manifest_json(manifest: PlacementManifest) -> dict[str, Any]:
    """What placement.json holds; without what is empty (packed modules outside of the experts, other tensors, code), as
    older versions write and read it."""
    written = manifest.model_dump(mode="json", exclude_none=True)
    if not manifest.others:
        del written["others"], written["totals"]["packed_module_bytes"]
    for name in ("tensors", "code"):
        if not written[name]:
            del written[name]
    return written


def read_manifest(directory: Path) -> PlacementManifest:
    """Read and validate a checkpoint's manifest; ArtifactError also where it names files outside of the directory, and
    for a layout that this moeq does not read."""
    remedy = REMEDY if (directory / NAME).exists() else LEFT_OUT
    manifest = read_model(directory / NAME, PlacementManifest, SCHEMA_VERSION, remedy=remedy)
    stated = (manifest.layout["name"], manifest.layout["version"])
    known = (LAYOUT, manifest.encoding.layout_version)
    if stated != known:
        what = f"layout {shown(stated[0])} {shown(stated[1])}, this moeq ({__version__}) reads {known[0]} {known[1]}"
        raise ArtifactError(what, where=str(directory / NAME), do="install the moeq that wrote it, or export again")
    if manifest.encoding.codes == "trellis" and manifest.layout.get("values") != trellis_values(manifest.encoding):
        what = "its states stand for other values than this moeq's"
        raise ArtifactError(what, where=f"{directory / NAME}: layout.values", do="install the moeq that wrote it")
    try:
        for name in sorted(manifest.files() | {tensor.file for tensor in manifest.tensors}):
            inside(directory, name)
    except ValueError as error:
        raise ArtifactError(str(error), where=str(directory / NAME), do=REMEDY) from None
    return manifest


def totals(layers: Iterable[PlacedLayer], others: Iterable[PlacedModule], everything: int, guard_bytes: int) -> Totals:
    """Sums over what is placed. everything: bytes of all tensors; guard_bytes: of those that stand for packed ones."""
    by_tier, other = Counter[str](), 0
    for expert in (expert for layer in layers for expert in layer.experts):
        by_tier[expert.tier] += sum(replica.bytes for replica in expert.replicas if replica.placed)
        waiting = (replica for replica in expert.replicas if not replica.placed)
        other += sum(replica.bytes for replica in waiting if replica.leading_bits_of is None)
    placed = by_tier.total()
    return Totals(
        placed_expert_bytes=placed,
        other_replica_bytes=other,
        non_expert_bytes=everything - placed - other - guard_bytes,
        guard_bytes=guard_bytes,
        packed_module_bytes=sum(module.bytes for module in others),
        bytes_by_tier=dict(sorted(by_tier.items())),
    )
