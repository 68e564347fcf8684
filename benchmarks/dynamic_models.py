"""A generated Qwen3-MoE for benchmarks/dynamic.py, in memory: no file is written, all layers have the same experts.

Codes of 4 bits and their grids are random; the version of 2 bits is their leading bits.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import decode_models  # isort: skip

from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.runtime.dynamic.forms import form_of
from moeq.runtime.dynamic.model import DynamicMoE, DynamicSettings
from moeq.runtime.dynamic.pools import Budget
from moeq.runtime.experts_by_row import moved
from moeq.runtime.packed_experts import PACKED
from moeq_kernels import choice
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.widths import Encoding

WIDE, NARROW = 4, 2
ENCODING = Encoding(group_size=128, symmetric=False, nested=True)
SPREAD, SAME = 4.61, 8  # the standard deviation of a code; experts that are drawn, which the others repeat


class RandomReplicas:
    """A source of replicas of 4 and 2 bits."""

    def __init__(self, layer: ExpertLayer) -> None:
        generator = torch.Generator().manual_seed(0)
        self._wide = [{name: _drawn(*layer.shape(name), generator) for name in layer.projections} for _ in range(SAME)]
        self._narrow = [{name: one.leading(NARROW) for name, one in expert.items()} for expert in self._wide]

    def widths(self) -> frozenset[int]:
        return frozenset({NARROW, WIDE})

    def expert(
        self, layer: ExpertLayer, expert: int, key: int
    ) -> tuple[dict[str, PackedWeight | Tensor], dict[str, Tensor]]:
        return dict((self._wide if key == WIDE else self._narrow)[expert % SAME]), {}


def _drawn(rows: int, inputs: int, generator: torch.Generator) -> PackedWeight:
    shapes = packed_shapes(rows, inputs, WIDE, ENCODING)
    codes = torch.randint(0, 256, shapes["codes"][0], generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shapes["scales"][0], generator=generator) * 0.5 + 0.75) / SPREAD * inputs**-0.5
    low, high = torch.randint(7, 9, (2, *shapes["zeros"][0]), generator=generator, dtype=torch.uint8)
    parts = {"codes": codes, "scales": scales.half(), "zeros": low + 16 * high}
    return PackedWeight.of(parts, WIDE, inputs, ENCODING)


class Generated:
    """Models that share all weights but their experts'; hidden, inner: other sizes than Qwen3-30B-A3B's; device: where
    they lie."""

    def __init__(self, options: argparse.Namespace, hidden: int = 2048, inner: int = 768, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.config = decode_models.configuration(options)
        if hidden != self.config.hidden_size:
            self.config.hidden_size, self.config.moe_intermediate_size = hidden, inner
            self.config.num_attention_heads, self.config.num_key_value_heads = 4, 2
        self._weights: dict[str, nn.Parameter] = {}
        self.layers = find_expert_layers(self._model())
        self.source = RandomReplicas(self.layers[0])

    def _model(self) -> Any:
        """The model, its experts without memory, the rest drawn once."""
        from transformers import Qwen3MoeForCausalLM

        with torch.device("meta"):
            model: Any = Qwen3MoeForCausalLM(self.config).bfloat16().eval()
        generator = torch.Generator().manual_seed(1)
        for name, parameter in list(model.named_parameters()):
            if ".experts." in name:
                continue
            if name not in self._weights:
                drawn = torch.ones(parameter.shape, dtype=torch.bfloat16)
                if parameter.dim() > 1:
                    drawn.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
                self._weights[name] = nn.Parameter(drawn.to(self.device), requires_grad=False)
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_parameter(leaf, self._weights[name])
        model.model.rotary_emb = type(model.model.rotary_emb)(self.config).to(self.device)
        return model

    def static(self, places: int) -> Any:
        """A packed model, the first experts of every layer in high precision, in its kernels."""
        model = self._model()
        with choice.choosing("fixed"):
            for layer in self.layers:
                widths = [WIDE if expert < places else NARROW for expert in range(layer.num_experts)]
                original = model.get_submodule(layer.name)
                packed = PACKED[layer.kind.name](
                    layer, widths, encoding=ENCODING, original=original, dtype=torch.bfloat16
                )
                for expert, projection, linear in packed.linears():
                    matrix: Any = self.source.expert(layer, expert, widths[expert])[0][projection]
                    linear._buffers.update(moved(matrix, self.device).parts())
                model.set_submodule(layer.name, packed.eval())
                packed.prepare()
                assert packed.prepared is not None, packed.refused
        return model

    def dynamic(self, places: int, **given: Any) -> DynamicMoE:
        """A dynamic model that begins with the same experts in high precision."""
        settings = {"high": WIDE, "low": NARROW, **given}
        model = self._model()
        needed = self._bytes(places, settings.get("transient", 4))
        return DynamicMoE(
            model, self.layers, self.source, DynamicSettings(memory_bytes=needed, **settings), policy="fixed"
        )

    def _bytes(self, places: int, transient: int) -> int:
        """Of pools with so many experts of a layer in high precision."""
        form, experts = form_of(self.device), [layer.num_experts for layer in self.layers]
        example = [self.source.expert(self.layers[0], 0, width)[0] for width in (NARROW, WIDE)]
        sizes = dict(zip((NARROW, WIDE), [form.block(matrices).nbytes for matrices in example], strict=True))
        beside = form.beside([example] * len(experts), [{}] * len(experts), experts)
        budget = Budget(
            low_bytes=sizes[NARROW],
            high_bytes=sizes[WIDE],
            layers=experts,
            transient=transient,
            memory_bytes=0,
            other_bytes={},
        )
        return beside + budget.least_bytes + places * len(self.layers) * (sizes[WIDE] - sizes[NARROW])
