"""What is fuzzed: every entry point that reads what others may have written, and how valid inputs are mutated.

`TARGETS` maps a name to a function of bytes; each returns when moeq refused with one of its own errors or read the
input soundly, and raises otherwise. Hypothesis (test_fuzz.py) and atheris (fuzz_atheris.py) run the same ones.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml
from gguf_made import gguf_bytes
from safetensors import SafetensorError, safe_open

from moeq.artifacts.gguf_file import read_gguf
from moeq.artifacts.manifest import NAME, manifest_json, read_manifest
from moeq.artifacts.reading import ELEMENT_BITS
from moeq.artifacts.replicas import INDEX as REPLICAS
from moeq.artifacts.replicas import LayerReplicas, add_replicas, layer_file, read_index
from moeq.artifacts.stage import RECORD, read_record
from moeq.artifacts.sums import NAME as SUMS
from moeq.artifacts.sums import check_sums
from moeq.artifacts.tensor_files import write_tensors
from moeq.artifacts.trace import HEADER, RoutingTrace, read_trace, write_trace
from moeq.bounded import YAML_DEPTH, YamlError, parse_yaml
from moeq.errors import ArtifactError, MoeqError
from moeq.models.source import INDEX, open_source, read_header
from moeq.numerics import layouts
from moeq.numerics.packed import PackedWeight, packed_shapes
from moeq.numerics.packing import SUPPORTED_BITS, pack, packed_row_bytes, unpack
from moeq.recipe import load_recipe
from moeq.runtime.hf_quantizer import MoeqConfig

SECONDS = 5.0  # of one input, on a machine that does other things too
SPARE_BYTES = 192 << 10  # what reading takes whatever the file: buffers, messages, tracebacks
VALUE_BYTES = 200  # of YAML: a value of a byte with its line and its path
SCHEMA_BYTES = 4 << 20  # of recipes
RECIPE = b"""name: fuzz
model: bundled:tiny-mixtral
seed: 0x10
corpus: {source: [bundled, "a b.txt"], sequences: 1_000, until_covered: {share: 0.9}}
losses:
  bits: [1, 2, 3, 4]
  damping: 1.0e-2
assign: {method: optimal, code_bits: 5/2, widths: [2, 4]}
export: {max_shard: 5 GB, verify: no}
eval:
  compare:
  - name: 'uniform'
    method: uniform
    bits: 4
  num_fewshot: ~
"""
HOSTILE: list[Any] = [
    0, 1, -1, 3, 2**31, 2**40, 10**12, 2**63, 2**64, 10**400, -(10**12), True, False, None, 0.5, -0.0, 1e308, "", ".",
    "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "\ud800", "x" * 300, "F4", "U8", "F32", [], {}, [[]], [2**40],
    [2**32, 2**32], [-1], [0, 2**62], [1] * 70, [0, 8], [8, 0], {"a": 1}, {"dtype": "U8"}, "model.safetensors",
]  # fmt: skip
SNIPPETS = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"[" * 5000, b'{"a":' * 3000, b"9" * 5000, b"[]," * 400, b"\\ud800",
    b"\xff", b'"a":1,"a":2,', b"{", b"}", b'"', b"\0", b" " * 64, b"&a", b"*a", b"- " * 40, b"? ", b": ", b"<<: ",
    b"!!python/name:os.system ", b"!!int ", b"---\n", b"2001-99-99", b"0x_", b"1:2:3", b".inf", b"|\n", b"\n  ",
]  # fmt: skip


def mutate_json(value: Any, chance: random.Random) -> Any:
    """A copy with one place changed: another value, none at all, one of another place."""
    copy = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []
    parts = [copy]
    while parts:
        part = parts.pop()
        for key in part if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], (dict, list)):
                parts.append(part[key])
    if not places:
        return chance.choice(HOSTILE)
    part, key = chance.choice(places)
    action = chance.randrange(5)
    if action == 0:
        del part[key]
    elif action == 1:
        other, name = chance.choice(places)
        part[key] = json.loads(json.dumps(other[name])) if name in other or isinstance(other, list) else None
    elif action == 2 and isinstance(part[key], int):
        part[key] += chance.choice([-1, 1, 8, -8])
    elif isinstance(part, dict) and action == 3:
        part[chance.choice(["..", "", "__metadata__", "extra", "schema_version"])] = part.pop(key)
    else:
        part[key] = chance.choice(HOSTILE)
    return copy


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """A copy with some bytes flipped, cut out, put twice, or a snippet put in."""
    at = chance.randrange(len(data) + 1)
    action = chance.randrange(4)
    if action == 0:
        return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    if action == 1:
        return data[:at]
    if action == 2:
        return data[:at] + data[at : at + chance.randrange(64)] + data[at:]
    return data[:at] + chance.choice(SNIPPETS) + data[at:]


class Fuzzed:
    """A folder with valid files of every kind, their texts, and the entry points that read mutated ones."""

    refused: ClassVar[set[str]] = set()  # targets of which an input was refused in this process

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        """checkpoint: one that moeq exported; its manifest, index and configuration are the valid inputs."""
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir(parents=True)
        tensors = {"a.weight": torch.arange(24.0).reshape(4, 6), "b": torch.zeros(3, dtype=torch.uint8)}
        write_tensors(self.model / "model.safetensors", tensors, {"format": "pt"})
        self.store = folder / "store"
        add_replicas(self.store, 0, {"gptq.3.x": {"up_proj": _weight(3), "down_proj": _weight(3)}})
        write_trace(folder / "trace.safetensors", _trace())
        self.gguf = gguf_bytes(
            {"general.architecture": "llama", "llama.block_count": 2, "tokens": ["a", "b"], "sizes": [1, 2, 3]},
            {"a": (2, (2, 64), bytes(72)), "b": (0, (3,), bytes(12))},
        )
        self.tensors = {
            "header": (self.model / "model.safetensors").read_bytes(),
            "store": layer_file(self.store, 0).read_bytes(),
            "trace": (folder / "trace.safetensors").read_bytes(),
        }
        whole = read_manifest(checkpoint)
        first = whole.layers[0].model_copy(update={"experts": whole.layers[0].experts[:2], "num_experts": 2})
        small = whole.model_copy(update={"layers": (first,)})
        self.manifest = manifest_json(small)
        config = json.loads((checkpoint / "config.json").read_text("utf-8"))
        self.config = config
        self.index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
        self.record = json.loads((checkpoint / RECORD).read_text("utf-8"))
        made = {"method": "gptq", "bits": 3, "entry": "gptq.3.x", "rows": "gptq.3.x"}
        self.replicas = {"schema_version": 2, "set": "0" * 64, "made": [made], "layers": [{"gptq.3.x": "0"}]}
        self.others: dict[str, Any] = {
            "manifest": self.manifest, "config": config, "index": self.index, "record": self.record,
            "replicas": self.replicas, "recipe": yaml.safe_load(RECIPE),
        }  # fmt: skip

    def valid(self, target: str) -> bytes:
        """The input of a target before it is mutated."""
        if target == "sums":
            return "".join(f"{hashlib.sha256(b'').hexdigest()}  {name}\n" for name in "ab").encode()
        if target == "gguf":
            return self.gguf
        if target == "yaml":
            return RECIPE
        if target in self.tensors:
            return self.tensors[target]
        if target in self.others:
            return json.dumps(self.others[target]).encode()
        return bytes(range(64))

    def mutated(self, target: str, seed: int) -> bytes:
        """An input of a target: a valid one changed in one to three places of its structure or its bytes."""
        chance = random.Random(seed)
        if target in NUMBERS:
            return chance.randbytes(chance.randrange(1, 64))
        data, rounds = self.valid(target), chance.randrange(1, 4)
        if target in ("sums", "gguf", "yaml"):
            return functools.reduce(lambda text, _: mutate_bytes(text, chance), range(rounds), data)
        if target in self.tensors:
            length = int.from_bytes(data[:8], "little")
            head, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
            if target == "trace" and chance.random() < 0.5:
                said = self._changed(json.loads(head["__metadata__"][HEADER]), rounds, chance)
                head["__metadata__"][HEADER], rounds = said.decode("utf-8", "replace"), 0
            text = self._changed(head, rounds, chance)
            stated = len(text) if chance.random() < 0.9 else chance.choice([0, 2**31, 2**63, 10**8 + 1])
            return stated.to_bytes(8, "little") + text + rest
        return self._changed(self.others[target], rounds, chance)

    @staticmethod
    def _changed(value: Any, rounds: int, chance: random.Random) -> bytes:
        raw = chance.random() < 0.3
        for _ in range(0 if raw else rounds):
            value = mutate_json(value, chance) if isinstance(value, (dict, list)) else value
        text = json.dumps(value).encode()
        for _ in range(rounds if raw else 0):
            text = mutate_bytes(text, chance)
        return text

    def run(self, target: str, data: bytes) -> str:
        """`refused` or `read`; AssertionError for too much time or memory, and whatever else reading raises."""
        act = getattr(self, f"_{target}")
        if target in FILES and target not in self.refused:
            self.refused.add(target)
            with contextlib.suppress(MoeqError):  # the first refusal compiles patterns that later ones find
                act(b"{}")
        tracemalloc.start()
        began = time.perf_counter()
        try:
            check = act(data)
            outcome, told = "read", True
        except MoeqError as error:
            check, outcome = None, "refused"
            told = "\n" not in str(error) and error.where and error.do
        finally:
            seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert told, "not one line that says where and what to do"
        assert seconds < SECONDS, f"{seconds:.1f} s"
        if target not in NUMBERS:
            assert peak <= 2 * self.size + SPARE_BYTES, f"{peak} bytes for {self.size}"
        if check is not None:
            check()
        return outcome

    def _write(self, path: Path, data: bytes, *beside: Path) -> None:
        path.write_bytes(data)
        self.size = len(data) + sum(one.stat().st_size for one in beside)

    def _header(self, data: bytes) -> Callable[[], None]:
        path = self.folder / "fuzzed.safetensors"
        self._write(path, data)
        found = read_header(path)
        return lambda: _is_sound(path, found, len(data))

    def _store(self, data: bytes) -> None:
        self._write(layer_file(self.store, 0), data)
        replicas = LayerReplicas(self.store, 0)
        for entry, said in replicas.entries.items():
            for projection in said["projections"]:
                replicas.expert(entry, projection, 1).dequantize()

    def _trace(self, data: bytes) -> None:
        self._write(self.folder / "fuzzed-trace.safetensors", data)
        found = read_trace(self.folder / "fuzzed-trace.safetensors")
        assert found.num_tokens == int(found.lengths.sum()) == len(found.sequence)
        assert (found.experts < np.array(found.num_experts)[:, None]).all()

    def _gguf(self, data: bytes) -> None:
        path = self.folder / "fuzzed.gguf"
        self._write(path, data)
        try:
            found = read_gguf(path)
        except ValueError as error:
            raise ArtifactError(str(error), where=str(path), do="as its readers do") from None
        for tensor in found.tensors.values():
            assert 0 < tensor.offset <= tensor.offset + tensor.bytes <= len(data)

    def _yaml(self, data: bytes) -> Callable[[], None]:
        """What is read is within the bounds; a value of a few bytes takes some hundred in memory."""
        self.size = VALUE_BYTES * len(data)
        try:
            read = parse_yaml(data)
        except YamlError as error:
            raise ArtifactError(str(error), where=error.at("fuzzed"), do="as its readers do") from None
        return lambda: _is_plain(read.value, YAML_DEPTH)

    def _recipe(self, data: bytes) -> Callable[[], None]:
        """The schema is made where a key is unknown, which takes what it takes."""
        path = self.folder / "recipe.yaml"
        self._write(path, data)
        self.size += SCHEMA_BYTES + VALUE_BYTES * len(data)
        recipe = load_recipe(path)
        return lambda: _is_plain(recipe.model_dump(), YAML_DEPTH)

    def _index(self, data: bytes) -> None:
        (self.model / "config.json").write_text('{"model_type": "mixtral"}')
        self._write(self.model / INDEX, data, self.model / "model.safetensors")
        for header in open_source(str(self.model)).tensors.values():
            assert header.file.parent == self.model

    def _config(self, data: bytes) -> None:
        (self.model / INDEX).unlink(missing_ok=True)
        self._write(self.model / "config.json", data, self.model / "model.safetensors")
        source = open_source(str(self.model))
        source.stamp()
        block = source.config.get("quantization_config")
        if isinstance(block, dict) and all(isinstance(key, str) for key in block):
            MoeqConfig(**block)

    def _manifest(self, data: bytes) -> None:
        self._write(self.folder / NAME, data)
        for name in read_manifest(self.folder).files():
            assert (self.folder / name).parent == self.folder

    def _record(self, data: bytes) -> None:
        self._write(self.folder / RECORD, data)
        for name in read_record(self.folder, "export").files:
            assert (self.folder / name).resolve().is_relative_to(self.folder.resolve())

    def _sums(self, data: bytes) -> None:
        for name in "ab":
            (self.folder / name).write_bytes(b"")
        self._write(self.folder / SUMS, data)
        check_sums(self.folder)

    def _replicas(self, data: bytes) -> None:
        self._write(self.folder / REPLICAS, data)
        index = read_index(self.folder)
        for name in (index.set, *index.entries()):
            assert (self.folder / name).parent == self.folder

    def _unpack(self, data: bytes) -> None:
        """bits, length, then the bytes: codes of the grid and back again, or ValueError."""
        chance = random.Random(data)
        bits = chance.choice([*SUPPORTED_BITS, 0, 9, -1, 10**12])
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        length = chance.choice([len(data) * 8 // max(1, min(bits, 8)), len(data), -1, 2**40, 10**30])
        rows = chance.choice([rows, rows[None], rows.to(torch.int32), rows[0]])
        try:
            codes = unpack(rows, bits, length)
        except ValueError:
            return
        assert codes.shape == (*rows.shape[:-1], length)
        assert not codes.numel() or int(codes.max()) < 2**bits
        assert unpack(pack(codes, bits), bits, length).equal(codes)

    def _packed(self, data: bytes) -> None:
        """A packed weight with one part or setting changed: refused, or it has the values of its shape."""
        chance = random.Random(data)
        weight = _weight(chance.choice(SUPPORTED_BITS[:4]))
        settings: dict[str, Any] = {name: getattr(weight, name) for name in weight.__dataclass_fields__}
        for _ in range(chance.randrange(1, 3)):
            name = chance.choice(list(settings))
            value = settings[name]
            if isinstance(value, torch.Tensor):
                settings[name] = chance.choice([value[..., :-1], value[0], value.to(torch.int64), value[:, :1], value])
            else:
                settings[name] = None if name == "zeros" else chance.choice([0, 1, 2, 3, 4, 5, 7, -1, 2**40, True])
        try:
            values = PackedWeight(**settings).dequantize()
        except ValueError:
            return
        assert values.shape == (*settings["codes"].shape[:-1], settings["inputs"])

    def _layouts(self, data: bytes) -> None:
        """Words of other runtimes: refused, or codes of the grid."""
        chance = random.Random(data)
        bits, length = chance.choice([*SUPPORTED_BITS, 0, 33]), chance.choice([8, 16, 31, 32, 64, -1, 2**40])
        words = torch.randint(-(2**31), 2**31, (chance.randrange(1, 4), chance.randrange(1, 17)), dtype=torch.int32)
        words = chance.choice([words, words.mT, words.to(torch.int64), words[0], words[0, 0]])
        for read in (layouts.row_stream, layouts.column_stream, layouts.zeros_of):
            try:
                found = read(words, bits, length)
            except ValueError:
                continue
            if read is layouts.zeros_of:
                assert int(found.max()) < 2**bits
            else:
                assert found.shape[-1] == packed_row_bytes(length, bits)


FILES = (
    "header",
    "store",
    "trace",
    "index",
    "config",
    "manifest",
    "record",
    "replicas",
    "sums",
    "gguf",
    "yaml",
    "recipe",
)
NUMBERS = ("unpack", "packed", "layouts")
TARGETS = (*FILES, *NUMBERS)


def _is_plain(value: Any, depth: int) -> None:
    """AssertionError for what plain YAML within the bounds cannot hold."""
    if isinstance(value, (dict, list)):
        assert depth > 0
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            _is_plain(part, depth - 1)
    elif isinstance(value, str):
        assert value.isprintable() or not set(value) & set(map(chr, (*range(9), 27, 127)))
        value.encode()
    elif isinstance(value, int):
        assert abs(value) < 2**63
    else:
        assert value is None or math.isfinite(value)


def _trace() -> RoutingTrace:
    """Two sequences of three tokens, two layers of five experts."""
    return RoutingTrace(
        layers=("layers.0", "layers.1"), num_experts=(5, 5), top_k=2,
        experts=np.arange(24, dtype=np.int16).reshape(6, 2, 2) % 5,
        weights=np.full((6, 2, 2), 0.5, dtype=np.float16), images=np.arange(6, dtype=np.uint8) % 2,
        lengths=np.array([3, 3], dtype=np.int32), prefill=np.array([1, 2], dtype=np.int32),
        domains=("a", "b"), text="0" * 64,
    )  # fmt: skip


def _weight(bits: int) -> PackedWeight:
    """A stack of two small weights [2, 4, 20] in groups of 8."""
    generator = torch.Generator().manual_seed(bits)
    parts = {
        name: torch.randint(0, 200, (2, *shape), generator=generator, dtype=torch.uint8).to(dtype)
        for name, (shape, dtype) in packed_shapes(4, 20, bits, 8, False).items()
    }
    return PackedWeight(
        codes=parts["codes"], scales=parts["scales"], zeros=parts.get("zeros"), bits=bits, group_size=8, inputs=20,
        symmetric=False,
    )  # fmt: skip


def _is_sound(path: Path, found: dict[str, Any], size: int) -> None:
    """What was read lies in the file, and safetensors itself reads it alike."""
    for header in found.values():
        elements = 1
        for axis in header.shape:
            elements *= axis
        assert elements * ELEMENT_BITS[header.dtype] == 8 * header.bytes
        assert 8 <= header.offset <= header.offset + header.bytes <= size
    try:
        with safe_open(path, "np") as handle:
            for key in handle.keys():  # noqa: SIM118
                assert tuple(handle.get_slice(key).get_shape()) == found[key].shape
    except SafetensorError as error:
        raise AssertionError(f"safetensors refuses it: {error}") from None
