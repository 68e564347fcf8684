"""Which method a runtime's vocabulary tables are built with, and what a model passed over; of no one runtime."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeq_kernels.checkpoint import Others, Stored
from moeq_kernels.method import Method
from moeq_kernels.widths import Encoding

GRID = Encoding(group_size=16, symmetric=False)


class Runtime(Method):
    """As the plug-ins of runtimes have it."""

    runtime = "Runtime"
    packed_modules_mapping = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}  # noqa: RUF012


class Table(torch.nn.Module):
    """A runtime's: the method and the name with which it was built."""

    def __init__(self, rows: int, inputs: int, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.built = (quant_config, prefix)


def method(*packed: str) -> Runtime:
    others = Others(bits=dict.fromkeys(packed, 8), encoding=GRID) if packed else None
    return Runtime(Stored(experts={"model.layers.0.mlp.experts": [4, 4]}, encoding=GRID, others=others))


def built(chosen: Runtime, head: bool, **named: Any) -> tuple[Any, str]:
    table = Table.__new__(Table)
    chosen.build_table(Table.__init__, table, head, 64, 32, **named)
    return table.built


def test_a_table_without_a_method_or_a_name_gets_both() -> None:
    chosen = method("model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj")
    assert built(chosen, False) == (chosen, "model.embed_tokens")
    assert built(chosen, True, prefix="lm_head") == (chosen, "lm_head")
    assert built(method("lm_head"), False)[1] == ""


def test_a_second_model_which_drafts_has_its_own_tables() -> None:
    chosen = method("model.embed_tokens")
    built(chosen, False, quant_config=chosen, prefix="model.embed_tokens")
    assert built(chosen, False, prefix="model.embed_tokens") == (None, "model.embed_tokens")
    other = object()
    assert built(method("model.embed_tokens"), False, quant_config=other, prefix="embed") == (other, "embed")


def test_a_table_without_a_name_that_could_be_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"moeq: .*which of model.embed_tokens, model.words it builds"):
        built(method("model.embed_tokens", "model.words"), False)


def test_what_a_model_passed_over_is_said() -> None:
    chosen = method("model.layers.0.self_attn.q_proj", "lm_head", "model.layers.0.mixer.in_proj")
    with pytest.raises(ValueError, match=r"Runtime's model does not take the experts of layer 0 and 3 more packed"):
        chosen.check()
    assert list(chosen.widths_in("model.layers.0.mlp.experts") or ()) == [4, 4]
    assert chosen.widths_in("model.layers.1.mlp.experts") is None
    assert chosen.packed_in("model.layers.0.self_attn.qkv_proj") == {
        "model.layers.0.self_attn.q_proj": 8, "model.layers.0.self_attn.k_proj": 16,
        "model.layers.0.self_attn.v_proj": 16,
    }  # fmt: skip
    assert chosen.packed_in("lm_head") == {"lm_head": 8}
    with pytest.raises(ValueError, match=r"does not take model.layers.0.mixer.in_proj packed; quantize with --set"):
        chosen.check()
    chosen.packed_in("model.layers.0.mixer.in_proj")
    chosen.check()


def test_tensors_of_experts_go_to_the_layers_that_are_built_here() -> None:
    chosen, came = method(), list[tuple[Any, ...]]()
    name = "model.layers.0.mlp.experts.3.up_proj.scales"
    assert not chosen.take(name, torch.ones(1))  # the layer is another process's
    chosen.layers[0] = SimpleNamespace(parts=SimpleNamespace(take=lambda *given: came.append(given)))
    for other in (
        "model.layers.1.mlp.experts.3.up_proj.scales", "model.layers.0.mlp.shared_experts.3.up_proj.scales",
        "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.up_proj.scales", "lm_head.scales",
    ):  # fmt: skip
        assert not chosen.take(other, torch.ones(1))
    assert chosen.take(name, torch.ones(1))
    assert chosen.take(name.removeprefix("model.").replace("scales", "bias"), torch.ones(1))
    assert [given[:3] for given in came] == [(3, "up_proj", "scales"), (3, "up_proj", "bias")]
