"""Targets: checkpoints, moeq's own and those of other tools, and what lies beside their weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import torch
from exporters import handmade
from robustness.fuzzing.mutations import text_bytes
from robustness.fuzzing.settings import VALUE_BYTES
from robustness.fuzzing.target import BytesTarget, Check, JsonTarget, Place, TensorsTarget
from safetensors.torch import load_file

from moeq.artifacts.tensor_files import write_tensors
from moeq.errors import ArtifactError
from moeq.exporters.front_matter import MOST_VALUES, NAME_CHARACTERS, read_origin
from moeq.exporters.gguf_tokenizer import FILE, SETTINGS, TEMPLATE, tokenizer
from moeq.exporters.readers import layout_of
from moeq.exporters.readers.described import AGAIN, packed, shapes_of
from moeq.exporters.readers.mlx import unstacked
from moeq.exporters.readers.w8a8 import Int8Checkpoint, is_w8a8
from moeq.models.corpus.hub_datasets import choose_files
from moeq.models.source import INDEX, open_source
from moeq.runtime.hf_quantizer import MoeqConfig


class _Model(JsonTarget):
    """One of a directory with two tensors."""

    def prepare(self, place: Place) -> None:
        tensors = {"a.weight": torch.arange(24.0).reshape(4, 6), "b": torch.zeros(3, dtype=torch.uint8)}
        path = self.folder / "model.safetensors"
        write_tensors(path, tensors, {"format": "pt"})
        self.beside = path.stat().st_size
        self.file("config.json", b'{"model_type": "mixtral"}')


class Index(_Model):
    """The index of shards: they lie in its folder."""

    name, per_byte = "index", 2

    def prepare(self, place: Place) -> None:
        super().prepare(place)
        self.value = {"metadata": {}, "weight_map": dict.fromkeys(("a.weight", "b"), "model.safetensors")}

    def read(self, data: bytes) -> None:
        self.file(INDEX, data)
        for header in open_source(str(self.folder)).tensors.values():
            assert header.file.parent == self.folder


class Config(_Model):
    """config.json of a model, and what it says of packed weights."""

    name = "config"

    def prepare(self, place: Place) -> None:
        super().prepare(place)
        self.value = json.loads((place.checkpoint / "config.json").read_text("utf-8"))
        others = {"bits": {"lm_head": 4}, "group_size": 16, "symmetric": False}
        self.value["quantization_config"] |= {"others": others}

    def read(self, data: bytes) -> None:
        self.file("config.json", data)
        source = open_source(str(self.folder))
        source.stamp()
        block = source.config.get("quantization_config")
        if isinstance(block, dict) and all(isinstance(key, str) for key in block):
            MoeqConfig(**block)


class _Foreign(JsonTarget):
    """quantization_config of another tool: every packed matrix has the shape and type that it says.

    declared: what is valid; parts: how a matrix lies; sides: of the model, hidden and intermediate.
    """

    declared: ClassVar[dict[str, Any]]
    sides: ClassVar[tuple[int, int]] = (64, 32)
    spare = 8 << 20  # where a model has to be made, of its names

    def parts(self, weight: Any) -> dict[str, torch.Tensor]:
        return handmade.gptq_parts(weight)

    def prepare(self, place: Place) -> None:
        write_foreign(self.folder, self.parts, *self.sides)
        self.beside = (self.folder / "model.safetensors").stat().st_size
        self.value = config_of(*self.sides) | {"quantization_config": self.declared}

    def read(self, data: bytes) -> None:
        self.file("config.json", data)
        source = open_source(str(self.folder))
        if layout_of(source) is None:
            raise ArtifactError("no packed checkpoint", where=str(self.folder), do="as its readers do")
        described = packed(self.folder, "fuzzed")
        assert described["packed_bytes"] + described["plain_bytes"] <= self.beside


class Gptq(_Foreign):
    name, declared = "gptq", handmade.gptq_config()


class Awq(_Foreign):
    name, declared = "awq", handmade.awq_config()

    def parts(self, weight: Any) -> dict[str, torch.Tensor]:
        return handmade.awq_parts(weight)


class AutoRound(_Foreign):
    name, declared = "auto_round", handmade.auto_round_config()


class CompressedTensors(_Foreign):
    name, declared = "compressed_tensors", handmade.compressed_config()

    def parts(self, weight: Any) -> dict[str, torch.Tensor]:
        return handmade.compressed_parts(weight)


class CompressedFloats(_Foreign):
    name, declared = "compressed_floats", handmade.float_config()

    def parts(self, weight: Any) -> dict[str, torch.Tensor]:
        return handmade.float_parts(weight)


class Humming(_Foreign):
    name, declared = "humming", handmade.humming_config()

    def parts(self, weight: Any) -> dict[str, torch.Tensor]:
        return handmade.humming_parts(weight)


class Mlx(_Foreign):
    name, declared = "mlx", handmade.mlx_config()

    def parts(self, weight: Any) -> dict[str, torch.Tensor]:
        return handmade.mlx_parts(weight)


class Exl3(_Foreign):
    name, declared, sides = "exl3", handmade.exl3_config(), (128, 128)

    def parts(self, weight: Any) -> dict[str, torch.Tensor]:
        return handmade.exl3_parts(weight)


CONFIG = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2,
    "num_experts_per_tok": 1, "vocab_size": 16, "torch_dtype": "float32",
}  # fmt: skip


def config_of(hidden: int, inner: int) -> dict[str, Any]:
    """config.json of what `write_foreign` writes."""
    return CONFIG | {"hidden_size": hidden, "intermediate_size": inner}


def write_foreign(folder: Path, parts: Any, hidden: int = 64, inner: int = 32) -> None:
    """One layer of two experts, their matrices packed, and a router."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.layers.0.block_sparse_moe.gate.weight": torch.randn(2, hidden, generator=generator)}
    for expert in range(2):
        for name, shape in {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}.items():
            weight = handmade.rounded(torch.randn(shape, generator=generator), 4)
            module = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts(weight).items()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


class ForeignTensors(TensorsTarget):
    """Packed matrices of another tool: refused, or values of the matrix's shape."""

    name, per_byte = "foreign_tensors", 0  # tensors are torch's own
    sides: ClassVar[tuple[int, int]] = (64, 32)
    declared: ClassVar[dict[str, Any]] = handmade.gptq_config()
    parts = staticmethod(handmade.gptq_parts)

    def prepare(self, place: Place) -> None:
        write_foreign(self.folder, self.parts, *self.sides)
        self.data = (self.folder / "model.safetensors").read_bytes()
        config = config_of(*self.sides) | {"quantization_config": self.declared}
        self.file("config.json", json.dumps(config).encode())

    def read(self, data: bytes) -> None:
        path = self.file("model.safetensors", data)
        source = open_source(str(self.folder))
        layout, shapes = layout_of(source), shapes_of(source)
        assert layout is not None
        tensors = self.one_by_one(load_file(path))
        for key in tensors:
            if key.endswith(f".{layout.anchor}"):
                module = key.removesuffix(f".{layout.anchor}")
                own = {part: tensors[f"{module}.{part}"] for part in layout.parts if f"{module}.{part}" in tensors}
                grid, (rows, inputs) = layout.grid([module]), shapes[f"{module}.weight"]
                assert grid is not None
                try:
                    values = layout.read(own, grid, rows, inputs).values()
                except ValueError as error:
                    raise ArtifactError(str(error), where=str(path), do=AGAIN) from None
                assert values.shape == (rows, inputs)

    def one_by_one(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors with those of every expert apart."""
        return tensors


class AwqFile(ForeignTensors):
    name = "awq_file"
    declared: ClassVar[dict[str, Any]] = handmade.awq_config()
    parts = staticmethod(handmade.awq_parts)


class CompressedTensorsFile(ForeignTensors):
    name = "compressed_tensors_file"
    declared: ClassVar[dict[str, Any]] = handmade.compressed_config()
    parts = staticmethod(handmade.compressed_parts)


class CompressedFloatsFile(ForeignTensors):
    name = "compressed_floats_file"
    declared: ClassVar[dict[str, Any]] = handmade.float_config()
    parts = staticmethod(handmade.float_parts)


class HummingFile(ForeignTensors):
    name = "humming_file"
    declared: ClassVar[dict[str, Any]] = handmade.humming_config()
    parts = staticmethod(handmade.humming_parts)


class MlxFile(ForeignTensors):
    """Experts in stacks."""

    name = "mlx_file"
    declared: ClassVar[dict[str, Any]] = handmade.mlx_config()
    parts = staticmethod(handmade.mlx_parts)

    def prepare(self, place: Place) -> None:
        super().prepare(place)
        path = self.folder / "model.safetensors"
        tensors, stacks = load_file(path), dict[str, list[torch.Tensor]]()
        called = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        for key in [key for key in tensors if ".experts." in key]:
            before, _, after = key.partition(".experts.")
            _, name, part = after.split(".")
            stacks.setdefault(f"{before}.switch_mlp.{called[name]}.{part}", []).append(tensors.pop(key))
        write_tensors(path, tensors | {key: torch.stack(each) for key, each in stacks.items()}, {"format": "pt"})
        self.data = path.read_bytes()

    def one_by_one(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        places = unstacked(open_source(str(self.folder)))[1]
        apart = {key: tensors[stack][number] for key, (stack, number) in places.items()}
        return apart | {key: tensor for key, tensor in tensors.items() if ".switch_mlp." not in key}


EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": EIGHT | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT | {"strategy": "tensor", "dynamic": False},
        },
        "group_1": {
            "targets": [r"re:.*\.experts\..*"], "weights": EIGHT | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT | {"strategy": "token", "dynamic": True},
        },
    },
}  # fmt: skip


def write_int8(folder: Path) -> None:
    """A linear with a static scale for its inputs, an expert's matrix without, and a norm."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.norm.weight": torch.ones(64), "q_proj.input_scale": torch.tensor([0.25])}
    for module in ("q_proj", "experts.0.w1"):
        tensors[f"{module}.weight"] = torch.randint(-127, 128, (32, 64), generator=generator, dtype=torch.int8)
        tensors[f"{module}.weight_scale"] = torch.rand(32, 1, generator=generator) + 0.5
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def read_int8(folder: Path) -> None:
    """Int8 matrices as the headers have them, or a refusal."""
    found = Int8Checkpoint(open_source(str(folder)))
    for module in found.modules:
        matrix = found.read(module)
        assert matrix.codes.dtype == torch.int8
        assert matrix.scale.shape == (len(matrix.codes), 1)
        assert bool((matrix.scale > 0).all())
        assert matrix.input_scale is None or float(matrix.input_scale) > 0


class Int8Config(JsonTarget):
    """quantization_config of W8A8: refused, or what the headers hold."""

    name, spare = "w8a8", 1 << 20

    def prepare(self, place: Place) -> None:
        write_int8(self.folder)
        self.beside = (self.folder / "model.safetensors").stat().st_size
        self.value = CONFIG | {"quantization_config": W8A8}

    def read(self, data: bytes) -> None:
        self.file("config.json", data)
        if not is_w8a8(open_source(str(self.folder)).config):
            raise ArtifactError("no W8A8", where=str(self.folder), do="as its readers do")
        read_int8(self.folder)


class Int8File(TensorsTarget):
    """Int8 matrices of safetensors."""

    name, per_byte = "w8a8_file", 0  # tensors are torch's own

    def prepare(self, place: Place) -> None:
        write_int8(self.folder)
        self.data = (self.folder / "model.safetensors").read_bytes()
        self.file("config.json", json.dumps(CONFIG | {"quantization_config": W8A8}).encode())

    def read(self, data: bytes) -> None:
        self.file("model.safetensors", data)
        read_int8(self.folder)


class Exl3File(ForeignTensors):
    name, sides = "exl3_file", (128, 128)
    declared: ClassVar[dict[str, Any]] = handmade.exl3_config()
    parts = staticmethod(handmade.exl3_parts)


TOKENIZER = {
    "added_tokens": [{"id": 0, "content": "<s>", "special": True}, {"id": 5, "content": "<x>"}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {}}]},
    "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "<unk>": 4}, "merges": ["a b", ["b", "a"]],
              "unk_token": "<unk>", "byte_fallback": False},
}  # fmt: skip


class TokenizerFile(_Model):
    """tokenizer.json for llama.cpp: a token, and its kind, for every row of the embeddings."""

    name = "tokenizer"
    filename = FILE

    def prepare(self, place: Place) -> None:
        super().prepare(place)
        self.file(FILE, json.dumps(TOKENIZER).encode())
        self.file(SETTINGS, json.dumps(self.settings).encode())
        self.source = open_source(str(self.folder))
        self.value = TOKENIZER if self.filename == FILE else self.settings

    settings: ClassVar[dict[str, Any]] = {"bos_token": "<s>", "eos_token": {"content": "<x>"}, "chat_template": "{{x}}"}

    def read(self, data: bytes) -> None:
        self.file(self.filename, data)
        found = tokenizer(self.source, 8)
        assert len(found["ggml.tokens"]) == len(found["ggml.token_type"]) == 8
        assert all(isinstance(token, str) for token in found["ggml.tokens"])
        assert all(isinstance(merge, str) for merge in found.get("ggml.merges", []))
        for name, value in found.items():
            assert not name.endswith("token_id") or 0 <= value < 8
            assert name != "chat_template" or isinstance(value, str)


class TokenizerSettings(TokenizerFile):
    name, filename = "tokenizer_config", SETTINGS


class Template(TokenizerFile):
    """chat_template.jinja beside the tokenizer."""

    name, filename = "chat_template", TEMPLATE

    def valid(self) -> bytes:
        return b"{% for m in messages %}{{ m }}{% endfor %}"

    def mutated(self, chance: random.Random) -> bytes:
        return text_bytes(self.valid(), chance)


CARD = b"""---
license: other
license_name: x
license_link: https://example.org/licence
language: [de, no]
base_model:
- a/b
tags: [x]
---
# A model
"""


class Card(BytesTarget):
    """The front matter of a model's card: short texts of one line."""

    name, data = "card", CARD
    per_byte, refuses = VALUE_BYTES, False  # a card that cannot be read is said, and not carried over

    def read(self, data: bytes) -> None:
        self.file("README.md", data)
        found = read_origin(self.folder)
        for names in (found.base_model, found.language):
            assert len(names) <= MOST_VALUES
            assert all(len(name) <= NAME_CHARACTERS and len(name.splitlines()) == 1 for name in names)
        said = found.said()
        assert said is None or len(said.splitlines()) == 1


HUB_CARD = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/*.parquet
  - split: test
    path: ["en/test-*"]
- config_name: de
  data_dir: de
  default: true
---
"""
HUB_FILES = ["README.md", "en/train-0.parquet", "en/test-0.parquet", "de/train.jsonl", "de/validation.jsonl"]


class DatasetCard(BytesTarget):
    """The card of a dataset on the hub: the files that it chooses are the dataset's."""

    name, data = "dataset_card", HUB_CARD
    per_byte = 2 * VALUE_BYTES

    def read(self, data: bytes) -> Check:
        chosen = choose_files(HUB_FILES, data.decode("utf-8", "replace"), "en", None, "calibration", where="hub:a/b")

        def check() -> None:
            assert chosen.files
            assert set(chosen.files) <= set(HUB_FILES)

        return check
