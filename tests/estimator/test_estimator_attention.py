"""What models keep of a text: published figures, and what the caches of transformers hold after a text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_models import build, save
from transformers import DeepseekV32Config

from moeq.errors import EstimateError
from moeq.estimation.subject import read_model
from moeq.estimator import Hardware, geometry_from_config, known_geometries, load_geometry
from moeq.estimator.attention import Attention, attention_of, says_all
from moeq.estimator.geometry import ModelGeometry, preset_of
from moeq.estimator.placement import weights_of_a_scale
from moeq.estimator.terms import t_dense
from moeq.models.experts import find_expert_layers
from moeq.stages.geometry import config_values, first_geometry

PUBLISHED = {  # parameters in billions, all and of a token: model cards and reports
    "deepseek-v3": (671, 37), "deepseek-r1": (671, 37), "kimi-k2": (1026, 32), "qwen3-235b-a22b": (235, 22),
    "qwen3-next-80b-a3b": (80, 3.9), "gpt-oss-120b": (116.8, 5.7), "glm-4.5": (353, 33), "llama-4-scout": (108, 17),
    "llama-4-maverick": (400, 17), "mixtral-8x7b": (46.7, 12.9), "qwen3-30b-a3b": (30.5, 3.3),
    "mixtral-8x22b": (141, 39), "deepseek-v2-lite": (15.7, 2.66),
}  # fmt: skip


def test_sizes_are_the_published_ones() -> None:
    """With embeddings, without layers that draft: gpt-oss states 5.1 and Qwen3-Next 3 billion without these."""
    assert set(known_geometries()) == set(PUBLISHED)
    for name, (whole, active) in PUBLISHED.items():
        model = load_geometry(name)
        experts = model.num_layers * model.expert_parameters
        assert model.non_expert_parameters + model.num_experts * experts == pytest.approx(1e9 * whole, rel=0.01), name
        assert model.non_expert_parameters + model.top_k * experts == pytest.approx(1e9 * active, rel=0.03), name


@pytest.mark.parametrize(
    ("name", "token", "text", "tokens"),
    [
        ("deepseek-v3", 70_272, 70_272 * 33_792, 33_792),  # 2412.19437: 576 numbers a layer and token
        ("kimi-k2", 70_272, 70_272, 1),
        ("glm-4.5", 376_832, 376_832, 1),  # dense layers too
        ("qwen3-next-80b-a3b", 24_576, 12 * 2048 * 1000 + 36 * 2_162_688, 1000),  # 12 of 48 layers
        ("gpt-oss-120b", 36_864, 18 * 2048 * (5000 + 128), 5000),  # half of them look back 128 tokens
        ("llama-4-maverick", 49_152, 4096 * (12 * 100_000 + 36 * 8192), 100_000),
        ("mixtral-8x7b", 131_072, 131_072 * 77, 77),
    ],
)
def test_published_keys_and_values(name: str, token: int, text: int, tokens: int) -> None:
    model = load_geometry(name)
    assert float(model.kv_bytes(1 << 20) - model.kv_bytes((1 << 20) - 1)) == token
    assert float(model.kv_bytes(tokens)) == text
    assert float(model.kv_bytes(tokens, 3)) == 3 * text
    read = text - sum(4096 * kind.layers * (8192 - tokens % 8192) for kind in model.kept if kind.chunked)
    assert float(model.kv_bytes_per_layer(tokens)) == pytest.approx(read / model.num_layers)
    room = float(model.kv_bytes(tokens, 3))
    assert model.longest_context(room, 3) == tokens
    assert model.longest_context(float(model.kv_bytes(0)) - 1, 1) == 0


def test_models_of_the_hub_whose_sizes_are_known() -> None:
    """Each id stands for one geometry, whatever its letters' size; others for none."""
    for name in known_geometries():
        assert preset_of(name) == name
    named = {
        "deepseek-ai/DeepSeek-V3": "deepseek-v3", "deepseek-ai/deepseek-r1": "deepseek-r1",
        "moonshotai/Kimi-K2-Instruct": "kimi-k2", "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
        "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b", "openai/gpt-oss-120b": "gpt-oss-120b",
        "zai-org/GLM-4.5": "glm-4.5", "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
        "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "llama-4-maverick",
        "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    }  # fmt: skip
    assert {name: preset_of(name) for name in named} == named
    assert preset_of("Qwen/Qwen3-0.6B") is None


def geometry(family: str, **settings: Any) -> tuple[ModelGeometry, Any]:
    model = build(family, **settings)
    return first_geometry(model, find_expert_layers(model)), model


def cached_elements(value: Any) -> int:
    """Elements of all tensors in a cache."""
    if isinstance(value, torch.Tensor):
        return value.numel() if value.is_floating_point() else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    parts = vars(value).values() if parts is None and hasattr(value, "__dict__") else parts
    return sum(map(cached_elements, parts)) if parts is not None else 0


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {"sliding_window": None}), ("qwen3_moe", {}), ("ernie4_5_moe", {}),
        ("glm4_moe", {}), ("granitemoe", {}),
        ("llama4_text", {"attention_chunk_size": 64}), ("gpt_oss", {"sliding_window": 64}),
        ("gemma4_text", {"sliding_window": 64}), ("mimo_v2_flash", {"sliding_window": 64}),
        ("dots3_note_text", {"sliding_window": 64}), ("inkling_text", {"sliding_window_size": 64}),
        ("inkling2_text", {"sliding_window_size": 64, "swa_num_key_value_heads": 4, "swa_head_dim": 6}),
        ("axk2", {}), ("deepseek_v32", {}), ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared"]}),
        ("hy_v4", {}), ("mistral_large4", {}),
        ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}),
    ],
)  # fmt: skip
def test_a_cache_of_transformers_holds_as_much(family: str, settings: dict[str, Any]) -> None:
    """Every layer's, dense ones too, of which the second family has one."""
    found, model = geometry(family, **settings)
    with torch.no_grad():
        cache = model(input_ids=torch.arange(3, 15)[None], use_cache=True).past_key_values
    assert 2 * cached_elements(cache.layers) == float(found.kv_bytes(12))


COMPRESSED = {
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "sliding_window": 64,
}


def test_compressed_keys_are_one_of_so_many_tokens() -> None:
    """DeepSeek-V4: nothing waits after 24 tokens; transformers has one of the window's tokens less, and beside each
    compressed layer the last of what the next entry overlaps with."""
    found, model = geometry("deepseek_v4", **COMPRESSED)
    with torch.no_grad():
        layers = model(input_ids=torch.arange(3, 27)[None], use_cache=True).past_key_values.layers
    kept = [[layer.keys, *getattr(layer, "compressed_kv", {}).values()] for layer in layers]
    assert 2 * cached_elements(kept) == float(found.kv_bytes(24))
    assert found.all_layers == 3
    read = float(found.kv_bytes_per_layer(240)) * found.num_layers
    width, index = 2 * model.config.head_dim, 2 * model.config.index_head_dim
    chosen = min(model.config.index_topk, 240 // 4)
    assert read == 3 * 64 * width + (240 // 8 + chosen) * width + 240 // 4 * index


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"])
@pytest.mark.parametrize("context", [5, 30])
def test_sparse_attention_reads_what_its_indexer_selects(family: str, context: int) -> None:
    """As many keys as the family's own indexer gives back, and all of the indexer's; the text is read by 4 heads."""
    found, model = geometry(family)
    selected: list[int] = []
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    for module in indexers:
        module.register_forward_hook(lambda _module, _inputs, output: selected.append(output.shape[-1]))
    with torch.no_grad():
        model(input_ids=torch.arange(3, 3 + context)[None])
    latent, width = 20 + 8, model.config.index_head_dim
    assert set(selected) == {min(context, model.config.index_topk)}
    read = 2 * (3 * latent * selected[0] + len(indexers) * width * context)
    assert float(found.kv_bytes_per_layer(context)) * found.num_layers == read
    scored = len(indexers) * model.config.index_n_heads * width * context
    attended = 3 * 4 * (2 * 20 + 8) * selected[0]
    assert float(found.attention_macs(context)) * found.num_layers == scored + attended


def test_deepseek_v32_in_full() -> None:
    """61 layers: 576 numbers of 2,048 tokens, and 128 of an indexer of 64 heads of all."""
    values = config_values(SimpleNamespace(config=DeepseekV32Config()), None)
    model = geometry_from_config(
        values, num_moe_layers=58, num_experts=256, expert_intermediate_size=2048, non_expert_parameters=1
    )
    assert model.all_layers == 61
    assert float(model.kv_bytes(100_000)) == 61 * 2 * (576 + 128) * 100_000
    assert float(model.kv_bytes_per_layer(100_000)) * 58 == pytest.approx(61 * 2 * (576 * 2048 + 128 * 100_000))
    macs = 128 * (2 * 512 + 64) * 2048 + 64 * 128 * 100_000
    assert float(model.attention_macs(100_000)) * 58 == pytest.approx(61 * macs)
    seen = 2048 - 2048**2 / (2 * 100_000)
    macs = 128 * (2 * 512 + 64) * seen + 64 * 128 * 50_000
    assert float(model.attention_macs(100_000, prompt=True)) * 58 == pytest.approx(61 * macs)


def test_keys_of_another_layer_are_read_there_too() -> None:
    """Mistral Large 4: the last of three layers takes the second one's, and what that selected."""
    found, model = geometry("mistral_large4")
    index = 2 * 2 * model.config.get_text_config().index_head_dim * 30
    assert float(found.kv_bytes(30)) == 2 * 2 * (20 + 8) * 30 + index
    assert float(found.kv_bytes_per_layer(30)) * found.num_layers == 3 * 2 * (20 + 8) * 8 + index


def test_several_gpus_share_out_the_heads_that_a_layer_has() -> None:
    """MiMo-V2: two of keys in a whole layer, four in one of a window, which eight GPUs hold four times and twice."""
    found, _ = geometry("mimo_v2_flash", sliding_window=64)
    whole, near = 2 * 2 * (8 + 11), 2 * 4 * (8 + 11)
    assert [kind.parts for kind in found.kept] == [None, 4]
    assert float(found.across(8).kv_bytes(10)) == 10 * (4 * whole + 2 * 2 * near)


def test_lightning_attention_keeps_a_state() -> None:
    found, model = geometry("minimax")
    with torch.no_grad():
        cache = model(input_ids=torch.arange(3, 15)[None], use_cache=True).past_key_values
    states = cached_elements(cache.linear_cache)
    assert states == 4 * 8 * 8
    assert float(found.kv_bytes(12)) == 2 * cached_elements(cache.layers) + 4 * states


@pytest.mark.parametrize("window", [None, 1, 5, 8, 11, 40])
def test_a_prompts_tokens_attend_to_those_before_them(window: int | None) -> None:
    """Counted token by token, each half with itself."""
    kind = Attention(layers=1, token_bytes=1.0, token_macs=1.0, window=window)
    for prompt in (1, 5, 11, 16):
        seen = [place + 0.5 if window is None or place < window else window for place in range(prompt)]
        assert float(kind.tokens_before(prompt)) == pytest.approx(np.mean(seen))


@pytest.mark.parametrize("chunk", [1, 5, 8, 11, 40])
def test_a_token_of_a_chunk_attends_to_its_chunk(chunk: int) -> None:
    """Counted in the mask of transformers' models, each token half with itself; kept is no more than a chunk."""
    kind = Attention(layers=1, token_bytes=1.0, token_macs=1.0, window=chunk, chunked=True)
    for prompt in (1, 5, 8, 11, 16, 17):
        places = np.arange(prompt + 1)
        mask = (places[:, None] // chunk == places // chunk) & (places[:, None] >= places)
        seen = mask.sum(axis=1) - 1
        assert float(kind.tokens_seen(prompt)) == seen[-1]
        assert float(kind.tokens_before(prompt)) == pytest.approx(np.mean(seen[:-1] + 0.5))
        assert float(kind.tokens(prompt)) == min(prompt, chunk)


@pytest.mark.parametrize("prompt", [False, True])
def test_a_model_of_chunks_reads_and_multiplies_what_is_in_them(prompt: bool, preset: Hardware) -> None:
    """Llama 4 Maverick: 36 of 48 layers in chunks of 8,192 tokens; 40 heads of 128, two products each."""
    model, context = load_geometry("llama-4-maverick"), 20_000
    tokens = context if prompt else 1
    found = t_dense(model, tokens=tokens, sequences=1, context=context, hardware=preset, prompt=prompt)
    rest = context - 2 * 8192
    seen = (2 * 8192**2 + rest**2) / (2 * context) if prompt else rest
    whole = context / 2 if prompt else context
    share, attended = model.non_expert_parameters / model.num_layers, (36 * seen + 12 * whole) / model.num_layers
    assert float(found.macs) == pytest.approx(tokens * (share + 2 * 40 * 128 * attended))
    assert float(found.bytes) == pytest.approx(2 * share + 4096 * attended)


def test_a_prefill_of_windows_counts_what_is_in_them(preset: Hardware) -> None:
    """gpt-oss: 18 of 36 layers see 128 tokens, whatever the prompt; 64 heads of 64, two products each."""
    model, prompt = load_geometry("gpt-oss-120b"), 16_384
    found = t_dense(model, tokens=prompt, sequences=1, context=prompt, hardware=preset, prompt=True)
    attended = (prompt / 2 + 128 - 128**2 / (2 * prompt)) / 2
    share = model.non_expert_parameters / model.num_layers
    assert float(found.macs) == pytest.approx(prompt * (share + 2 * 64 * 64 * attended))


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gpt_oss", {"sliding_window": 8}), ("llama4_text", {"attention_chunk_size": 8, "num_hidden_layers": 4})],
)
def test_a_window_is_no_longer_than_it_says(family: str, settings: dict[str, Any]) -> None:
    """transformers keeps one token less of a window, which the next one fills."""
    found, model = geometry(family, **settings)
    with torch.no_grad():
        cache = model(input_ids=torch.arange(3, 43)[None], use_cache=True).past_key_values
    lengths = sorted({layer.keys.shape[2] for layer in cache.layers})
    assert lengths in ([7, 40], [8, 40])
    windows = [kind for kind in found.kept if kind.window is not None]
    assert [kind.chunked for kind in windows] == ["attention_chunk_size" in settings]
    assert [kind.window for kind in windows] == [8]
    assert sum(kind.layers for kind in windows) == sum(layer.keys.shape[2] < 40 for layer in cache.layers)


def test_states_of_linear_attention() -> None:
    found, model = geometry("qwen3_next")
    with torch.no_grad():
        cache = model(input_ids=torch.arange(3, 15)[None], use_cache=True).past_key_values
    linear = next(kind for kind in found.kept if kind.state_bytes)
    assert linear.layers == 2
    kept = [cached_elements(layer) for layer in cache.layers]
    heads, keys, values, channels = 4, 6, 9, 2 * 2 * 6 + 4 * 9
    width = model.config.linear_conv_kernel_dim
    assert linear.state_bytes == 4 * heads * keys * values + 2 * channels * width
    assert kept[0] == heads * keys * values + channels * width
    assert float(found.kv_bytes(12)) == 2 * linear.state_bytes + 2 * kept[1]


@pytest.mark.parametrize(
    ("family", "linear"),
    [
        ("jamba", 2), ("nemotron_h", 1), ("granitemoehybrid", 2), ("kimi_linear", 2), ("bailing_hybrid", 2),
        ("longcat_flash", 0), ("glm5_next", 2),
    ],
)  # fmt: skip
def test_kinds_of_layers_that_the_family_works_out(family: str, linear: int, tmp_path: Path) -> None:
    """Each by what its cache holds after two texts; of LongCat each layer has two attentions."""
    found, model = geometry(family)
    assert sum(kind.layers for kind in found.kept if kind.state_bytes) == linear
    with torch.no_grad():
        shorter, longer = (
            cached_elements(model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=True).past_key_values.layers)
            for tokens in (16, 17)
        )
    assert float(found.kv_bytes(17) - found.kv_bytes(16)) == 2 * (longer - shorter)
    states, rest = float(found.kv_bytes(0)), shorter - 16 * (longer - shorter)  # in float32, but what is convolved
    assert 2 * rest <= states <= 4 * rest
    assert read_model(str(save(family, tmp_path))).geometry.kept == found.kept


def test_latent_keys_count_once() -> None:
    """What runtimes keep of DeepSeek-V3; transformers keeps keys and values that were made of them."""
    found, _ = geometry("deepseek_v3")
    assert found.kept == (Attention(layers=3, token_bytes=2 * (20 + 8), token_macs=4 * (2 * 20 + 8), parts=1),)
    assert found.num_layers == 2
    assert found.all_layers == 3


def test_what_config_json_does_not_tell() -> None:
    plain = {"num_hidden_layers": 2, "num_attention_heads": 4}
    assert says_all(plain)
    assert says_all(plain | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]})
    assert not says_all(plain | {"sliding_window": 8})
    assert not says_all(plain | {"full_attention_interval": 4})
    assert not says_all(plain | {"index_topk": 8, "layer_types": ["indexed_attention"] * 2})
    assert not says_all(plain | {"global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]})
    assert attention_of({}, 4, 2, 8) is None
    assert attention_of(plain | {"is_encoder_decoder": True}, 4, 2, 8) is None
    kinds = attention_of(plain | {"layer_types": ["moe", "something new"]}, 4, 2, 8)
    assert kinds is not None
    assert [(kind.layers, kind.token_bytes) for kind in kinds] == [(1, 0), (1, 64)]


@pytest.mark.parametrize("family", ["nemotron_h", "muse_spark", "mixtral"])
def test_experts_of_fewer_numbers_than_the_model_has(family: str) -> None:
    """What experts are given is projected to 28 of 40 numbers before, in the first two."""
    found, model = geometry(family)
    layer = find_expert_layers(model)[0]
    assert found.expert_parameters == layer.parameters_per_expert
    assert found.hidden_size == 40
    assert found.sizes().get("expert_hidden_size", 40) == layer.hidden_size == found.expert_inputs
    assert weights_of_a_scale(-1, found) == layer.hidden_size


@pytest.mark.parametrize(("family", "encoder"), [("switch_transformers", 2), ("qwen3_moe", 0)])
def test_layers_of_an_encoder(family: str, encoder: int, tmp_path: Path) -> None:
    found, _ = geometry(family)
    assert found.encoder_layers == found.sizes().get("encoder_layers", 0) == encoder
    assert read_model(str(save(family, tmp_path))).geometry.encoder_layers == encoder


def test_a_usual_model_says_nothing_of_it() -> None:
    values = config_values(build("mixtral", sliding_window=None), None)
    made = geometry_from_config(
        values, num_moe_layers=3, num_experts=6, expert_intermediate_size=24, non_expert_parameters=1
    )
    assert made.attention is None
    assert "attention" not in made.sizes()
    with pytest.raises(EstimateError, match="num_layers is 0"):
        ModelGeometry(**(made.sizes() | {"num_layers": 0}))
