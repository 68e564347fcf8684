"""A generated Qwen3-MoE and its packed checkpoints for benchmarks/decode.py: nothing is quantized, nothing profiled.

Codes, scales and zero points are random; the bf16 model has the values that they stand for, so that both decode alike.
Experts have grids of --bits, or trellis codes of that width with --state-bits, all else grids of 4 bits; with
--symmetric-groups all grids are symmetric, in groups of so many inputs, as llama.cpp has them. Everything is written a
layer at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moeq_kernels import trellis
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.packing import pack
from moeq_kernels.widths import Encoding

GROUP, BITS = 128, 4
# settings of benchmarks with these models
CODES: dict[str, Any] = {"bits": BITS, "other_bits": BITS, "state_bits": 0, "symmetric_groups": 0}
METADATA = {"format": "pt"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD = "lm_head"
SHAPE = ("layers", "experts", "vocabulary", *CODES)  # options that make a model what it is
VARIANTS = ("experts", "all")  # what is packed: experts alone, or attention and head as well
PARTS_FOLDER = "parts"  # packed tensors, which both checkpoints link


def configuration(options: argparse.Namespace) -> Any:
    """Qwen3-30B-A3B's but for the number of layers, and with --quick, of experts and tokens."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=options.layers,
        num_experts=options.experts, num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=options.vocabulary, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        tie_word_embeddings=False, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


class _Drawn:
    """Random weights, packed or dense, the same at every run; grid: of what is packed, if nothing else is said."""

    def __init__(self, grid: Encoding) -> None:
        self.generator, self.grid = torch.Generator().manual_seed(0), grid

    def packed(self, rows: int, inputs: int, bits: int = BITS, given: Encoding | None = None) -> PackedWeight:
        """Values of variance 1 / inputs and of mean 0, by zero points around the middle of all codes or by codes on
        both sides of it: otherwise one direction would win in every layer, and all tokens would be routed alike."""
        encoding = given or self.grid
        shapes = packed_shapes(rows, inputs, bits, encoding)
        parts = {"codes": torch.randint(0, 256, shapes["codes"][0], generator=self.generator, dtype=torch.uint8)}
        scales = torch.rand(shapes["scales"][0], generator=self.generator) * 0.5 + 0.75
        middle, spread = 2 ** (bits - 1), ((4**bits - 1) / 12 + 0.25) ** 0.5  # of a code from its zero point
        if encoding.state_bits:
            spread = float(trellis.values(bits, encoding.state_bits).std())
        elif encoding.symmetric:
            codes = torch.randint(1, 2**bits, (rows, inputs), generator=self.generator, dtype=torch.uint8)
            parts["codes"] = pack(codes, bits)
        else:
            zeros = torch.randint(middle - 1, middle + 1, (rows, shapes["scales"][0][1]), generator=self.generator)
            parts["zeros"] = pack(zeros, bits)
        parts["scales"] = (scales / spread * inputs**-0.5).half()
        return PackedWeight.of(parts, bits, inputs, encoding)

    def dense(self, rows: int, inputs: int, variance: float) -> Tensor:
        return (torch.randn(rows, inputs, generator=self.generator) * variance**0.5).bfloat16()


def _matrices(config: Any) -> dict[str, tuple[int, int]]:
    """Rows and inputs of an expert's matrices."""
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def _attention(config: Any) -> dict[str, tuple[int, int]]:
    """Rows and inputs of a layer's attention."""
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return dict(zip(ATTENTION, [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)], strict=True))


def grid(options: argparse.Namespace) -> Encoding:
    """That of all that has no trellis codes."""
    return Encoding(group_size=options.symmetric_groups or GROUP, symmetric=bool(options.symmetric_groups))


def encoding(options: argparse.Namespace) -> Encoding:
    """That of the experts."""
    return Encoding.trellis(options.state_bits) if options.state_bits else grid(options)


def make(folder: Path, options: argparse.Namespace) -> None:
    """`model`, and a checkpoint for each of VARIANTS, in a folder, unless they are there; SystemExit where it holds
    others."""
    done, asked = folder / "made", json.dumps([getattr(options, name) for name in SHAPE])
    if done.exists():
        if done.read_text("utf-8") != asked:
            sys.exit(f"{folder}: holds another model ({', '.join(SHAPE)}: {done.read_text('utf-8')}); remove it")
        return
    from transformers import AutoTokenizer

    from moeq.bundled import bundled_path
    from moeq.exporters.plain import write_index
    from moeq.models.source import read_header
    from moeq.runtime.packed_modules import GUARD_SHAPE

    config, drawn = configuration(options), _Drawn(grid(options))
    model, parts = folder / "model", folder / PARTS_FOLDER
    parts.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(model)
    AutoTokenizer.from_pretrained(bundled_path("tiny-mixtral")).save_pretrained(model)
    for number in range(config.num_hidden_layers):
        _make_layer(number, config, drawn, model, parts, options)
        print(f"layer {number} written", flush=True)
    head = drawn.packed(config.vocab_size, config.hidden_size, options.other_bits)
    stored = {f"{HEAD}.{part}": tensor for part, tensor in head.parts().items()}
    stored[f"{HEAD}.weight"] = torch.zeros(GUARD_SHAPE, dtype=torch.float16)
    save_file(stored, parts / f"others-{config.num_hidden_layers:03d}.safetensors", METADATA)
    rest = {
        f"{HEAD}.weight": head.dequantize(torch.bfloat16),
        "model.embed_tokens.weight": drawn.dense(config.vocab_size, config.hidden_size, 1.0),
        "model.norm.weight": torch.ones(config.hidden_size, dtype=torch.bfloat16),
    }
    save_file(rest, model / "model-rest.safetensors", METADATA)
    write_index(model, {key: path.name for path in model.glob("*.safetensors") for key in read_header(path)})
    for variant in VARIANTS:
        export(folder, variant, options)
    done.write_text(asked, "utf-8")


def _make_layer(number: int, config: Any, drawn: _Drawn, model: Path, parts: Path, options: argparse.Namespace) -> None:
    """A decoder layer: its bf16 weights, and its packed experts and attention."""
    from moeq.exporters.native_writer import layer_name, others_name
    from moeq.runtime.packed_modules import GUARD_SHAPE

    path, hidden = f"model.layers.{number}", config.hidden_size
    dense: dict[str, Tensor] = {f"{path}.mlp.gate.weight": drawn.dense(config.num_experts, hidden, 1 / hidden)}
    for name, size in {"input_layernorm": hidden, "post_attention_layernorm": hidden,
                       "self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}.items():  # fmt: skip
        dense[f"{path}.{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    stored = {
        f"{path}.mlp.experts.{name}": torch.zeros(1, 2, 1) if name == "gate_up_proj" else torch.zeros(1, 1, 1)
        for name in ("gate_up_proj", "down_proj")
    }
    stored = {name: guard.half() for name, guard in stored.items()}
    for expert in range(config.num_experts):
        for projection, shape in _matrices(config).items():
            name = f"{path}.mlp.experts.{expert}.{projection}"
            weight = drawn.packed(*shape, options.bits, encoding(options))
            stored |= {f"{name}.{part}": tensor for part, tensor in weight.parts().items()}
            dense[f"{name}.weight"] = weight.dequantize(torch.bfloat16)
    save_file(stored, parts / layer_name(number), METADATA)
    others = {}
    for projection, shape in _attention(config).items():
        name, weight = f"{path}.self_attn.{projection}", drawn.packed(*shape, options.other_bits)
        others |= {f"{name}.{part}": tensor for part, tensor in weight.parts().items()}
        others[f"{name}.weight"] = torch.zeros(GUARD_SHAPE, dtype=torch.float16)
        dense[f"{name}.weight"] = weight.dequantize(torch.bfloat16)
    save_file(others, parts / others_name(number), METADATA)
    save_file(dense, model / f"model-layer-{number:03d}.safetensors", METADATA)


def _packed_others(config: Any) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Module, class and shape of what VARIANTS[1] packs beside the experts."""
    for number in range(config.num_hidden_layers):
        for projection, shape in _attention(config).items():
            yield f"model.layers.{number}.self_attn.{projection}", "attention", shape
    yield HEAD, "head", (config.vocab_size, config.hidden_size)


def export(folder: Path, variant: str, options: argparse.Namespace) -> None:
    """The packed checkpoint of a variant, by moeq's own writer."""
    from moeq.artifacts.assignment import Assignment, ExpertChoice, LayerAssignment
    from moeq.artifacts.non_experts import OtherRow, OtherTable
    from moeq.exporters.native_writer import ExportInputs
    from moeq.exporters.native_writer import export as write
    from moeq.models.loading import describe, expert_keys
    from moeq.models.source import open_source

    source = open_source(str(folder / "model"))
    model, layers = describe(source)
    config, whole, of_others = model.config, variant == "all", grid(options)
    choices = tuple(ExpertChoice(tier="gpu", bits=options.bits, importance=1.0) for _ in range(config.num_experts))
    rows = tuple(
        OtherRow(
            module=name, kind=kind, bits=options.other_bits, method="rtn", group_size=of_others.group_size,
            symmetric=of_others.symmetric, rows=shape[0], inputs=shape[1], relative_error=None, calibration_rows=0,
            heldout_rows=0, fallback="", bytes=shape[0] * shape[1] * options.other_bits // 8,
        )
        for name, kind, shape in _packed_others(config)
    )  # fmt: skip
    inputs = ExportInputs(
        source=source,
        layers=layers,
        top_k=(config.num_experts_per_tok,) * len(layers),
        assignment=Assignment(
            name="random", method="uniform", **vars(encoding(options)),
            layers=tuple(LayerAssignment(name=layer.name, experts=choices) for layer in layers),
        ),
        expert_keys=expert_keys(source, model, layers),
        expert_files=sorted((folder / PARTS_FOLDER).glob("*" if whole else "experts-*")),
        quantizers={layer.name: [{options.bits: "rtn"}] * layer.num_experts for layer in layers},
        max_shard_bytes=1 << 40,
        stamp=source.stamp({}),
        digests={},
        others=OtherTable(modules=rows) if whole else None,
        other_keys=frozenset(f"{row.module}.weight" for row in rows) if whole else frozenset(),
    )  # fmt: skip
    write(inputs, folder / variant)
