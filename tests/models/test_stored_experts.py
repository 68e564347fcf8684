"""Experts by names and shapes of tensors; every family of the record is compared in test_every_family.py."""

from __future__ import annotations

from typing import Any

import pytest

from moeq.errors import ModelError
from moeq.models.stored_experts import Shape, StoredLayer, checked_layers, stored_layers, text_config, without_drafts

H, INNER = 8, 4
CONFIG = {"num_hidden_layers": 2, "num_experts": 3}


def layer(name: str, experts: int = 3) -> dict[str, Shape]:
    """Experts one by one."""
    shapes = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}
    return {f"{name}.{e}.{part}.weight": shape for e in range(experts) for part, shape in shapes.items()}


def sizes(found: list[StoredLayer]) -> list[tuple[str, int, int, int, int]]:
    return [(one.name, one.num_experts, one.hidden_size, one.intermediate_size, one.matrices) for one in found]


def test_drafts_towers_and_shared_experts_are_none() -> None:
    """Layers in the order of their numbers; what is beyond the configuration's, or sees no text, is left out."""
    names = [f"model.layers.{number}.mlp.experts" for number in (10, 2, 0)]
    shapes = {key: shape for name in names for key, shape in layer(name).items()}
    shapes |= layer("mtp.layers.0.mlp.experts") | layer("model.visual.layers.0.mlp.experts")
    shapes |= {
        "model.layers.0.mlp.shared_experts.down_proj.weight": (H, INNER),
        "model.layers.0.mlp.gate.weight": (3, H),
    }
    config = {"num_hidden_layers": 10, "num_experts": 3}
    found = stored_layers(shapes, config, "here")
    assert sizes(found) == [(name, 3, H, INNER, 3) for name in sorted(names[1:])]
    assert "model.visual.layers.0.mlp.experts.0.up_proj.weight" in without_drafts(shapes, config)


def test_stacks_whichever_way_they_lie() -> None:
    both = {(3, 2 * INNER, H): (3, H, INNER), (3, H, 2 * INNER): (3, INNER, H)}
    for first, down in both.items():
        shapes = {"a.experts.gate_up_proj": first, "a.experts.down_proj": down, "a.experts.down_proj_bias": (3, H)}
        assert sizes(stored_layers(shapes, CONFIG, "here")) == [("a.experts", 3, H, INNER, 3)]
    blocks = {"a.experts.gate_up_proj_blocks": (3, 128, 1, 16), "a.experts.down_proj_blocks": (3, 32, 2, 16)}
    assert sizes(stored_layers(blocks, CONFIG, "here")) == [("a.experts", 3, 32, 64, 3)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m.experts.1.up_proj.weight": (INNER, H + 1)}, r"m\.experts\.1\.up_proj is \[4, 9\], the first expert's is"),
        ({"m.experts.1.up_proj.weight": None}, r"m\.experts\.1\.up_proj is missing, the first expert's is \[4, 8\]"),
        ({"m.experts.1.down_proj.weight": None}, "expert 1 is missing, or a part of it"),
        ({"m.experts.2.down_proj.weight": None}, "holds 2 experts, the configuration wants 3"),
        ({"n.experts.gate_up_proj": (3, 7, 5), "n.experts.down_proj": (3, H, INNER)}, "stacks of"),
        ({"n.experts.gate_up_proj": (3, 8, 8)}, "no matrix that ends an expert"),
    ],
)
def test_experts_that_are_not_alike_are_named(change: dict[str, Shape | None], words: str) -> None:
    shapes = {key: shape for key, shape in (layer("m.experts") | change).items() if shape is not None}
    with pytest.raises(ModelError, match=words):
        stored_layers(shapes, CONFIG, "here")


def test_experts_are_as_wide_as_the_configuration_has_it() -> None:
    for stated in ({"hidden_size": H}, {"d_model": H + 1, "moe_latent_size": H}, {"text_config": {"hidden_size": H}}):
        assert sizes(stored_layers(layer("m.experts"), CONFIG | stated, "here")) == [("m.experts", 3, H, INNER, 3)]
    with pytest.raises(ModelError, match=rf"here: m\.experts holds experts of {H} inputs, the configuration wants 16"):
        stored_layers(layer("m.experts"), CONFIG | {"hidden_size": 16}, "here")


@pytest.mark.parametrize("config", [CONFIG, {"text_config": CONFIG}])
def test_layers_and_vocabulary_are_those_of_the_configuration(config: dict[str, Any]) -> None:
    """Fewer layers are drafts; those of a tower, and its embeddings, are none of the text's."""
    text = config.get("text_config", config)
    experts = layer("model.layers.1.mlp.experts")
    more = {"model.embed_tokens.weight": (7, H), "audio_tower.embed_tokens.weight": (9, H), "vision.layers.8.a": (2,)}

    def checked(**stated: int | str) -> int:
        told = text | {"vocab_size": 7, "num_hidden_layers": 2} | stated
        return len(checked_layers(experts | more, config | told if text is config else {"text_config": told}, "here"))

    assert checked() == 1
    assert checked(num_hidden_layers=1) == 0
    with pytest.raises(ModelError, match="here: the layers end with 1, the configuration wants 3 of them"):
        checked(num_hidden_layers=3)
    with pytest.raises(ModelError, match=rf"embed_tokens.weight is \[7, {H}\], the configuration wants 8 rows"):
        checked(vocab_size=8)
    assert checked(moe_intermediate_size=INNER, intermediate_size=INNER + 2, model_type="mixtral") == 1
    assert checked(intermediate_size=INNER + 2, model_type="qwen3_moe") == 1
    with pytest.raises(ModelError, match=rf"experts of {INNER} inner rows, the configuration wants 5"):
        checked(moe_intermediate_size=5)
    with pytest.raises(ModelError, match=rf"experts of {INNER} inner rows, the configuration wants 5"):
        checked(model_type="mixtral", intermediate_size=5)


def test_the_part_of_the_language_model() -> None:
    assert text_config({"text_config": {"num_experts": 2}, "num_experts": 3}) == {"num_experts": 2}
    assert text_config({"num_experts": 3}) == {"num_experts": 3}
