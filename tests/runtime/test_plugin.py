"""What users of transformers do with a packed checkpoint beside loading it: device maps, dtypes, saving, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import inputs, save
from made_sources import MadeSource
from torch._dynamo.utils import counters
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CompileConfig,
    pipeline,
)
from transformers.distributed import DistributedConfig

from moeq.errors import ArtifactError, ModelError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.runtime.arranged import OFFLOADED
from moeq.runtime.packed_experts import PackedExperts
from moeq.runtimes import NATIVE

Exported = Callable[[str], Path]
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss", "cohere2_moe")
STORED = ("codes", "scales", "zeros")


def load(folder: Path, of: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Loaded clean, in float32 unless told otherwise."""
    model, info = of.from_pretrained(folder, output_loading_info=True, **{"dtype": torch.float32} | options)
    assert not any(info.values())
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 27).reshape(2, 12)).logits


def stored(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(STORED)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """A kernel's logits and those of experts that are computed with as they are stored."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-4)


def layers_apart(model: Any) -> dict[str, str]:
    """A device map: the last decoder layer on the disk, all else on the CPU."""
    names = [name for name, _ in model.named_children() if name != "model"]
    names += [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    layers = [f"model.layers.{number}" for number in range(len(model.model.layers))]
    return dict.fromkeys([*names, *layers[:-1]], "cpu") | {layers[-1]: "disk"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_device_maps_and_offload_change_nothing(family: str, exported: Exported, tmp_path: Path) -> None:
    folder = exported(family)
    model = load(folder)
    wanted = logits(model)
    for options in ({"device_map": "auto"}, {"device_map": {"": "cpu"}}, {"low_cpu_mem_usage": True}):
        assert torch.equal(logits(load(folder, **options)), wanted)
    places = layers_apart(model)
    with pytest.warns(UserWarning, match=r"device map says disk, but its experts are kept on cpu; .*offload_buffers"):
        held = load(folder, device_map=places, offload_folder=tmp_path / "a")
    assert torch.equal(logits(held), wanted)
    away = load(folder, device_map=places, offload_folder=tmp_path / "b", offload_buffers=True)
    experts = [module for module in away.modules() if isinstance(module, PackedExperts)]
    assert {tensor.device.type for tensor in experts[-1].get_submodule("0").buffers()} == {"meta"}
    assert close(logits(away), wanted)
    assert [module.reason for module in experts if module.reason is not None] == [OFFLOADED]


def test_a_shared_head_works_when_the_embeddings_are_on_the_disk(exported: Exported, tmp_path: Path) -> None:
    folder = exported("cohere2_moe")
    wanted = logits(load(folder))
    places = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.rotary_emb": "cpu"}
    model = load(folder, device_map=places, offload_folder=tmp_path, offload_buffers=True)
    assert model.get_submodule("model.embed_tokens").codes.device.type == "meta"
    assert close(logits(model), wanted)
    assert model.get_submodule("model.embed_tokens").reason == OFFLOADED


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_dtype_leaves_what_is_stored(family: str, exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_KERNEL", "reference")  # in bf16 other last bits may choose another expert
    folder = exported(family)
    model = load(folder)
    before = stored(model)
    assert {tensor.dtype for tensor in before.values()} == {torch.uint8, torch.float16}
    wanted = logits(load(folder, dtype=torch.bfloat16))
    model.to(torch.bfloat16)
    assert same(before, stored(model))
    assert same(before, stored(model.to(torch.float64)))
    model.to(torch.bfloat16)
    assert logits(model).dtype == torch.bfloat16
    torch.testing.assert_close(logits(model), wanted, rtol=0.1, atol=0.1 * float(wanted.abs().max()))
    with pytest.raises(ValueError, match="not supported for quantized"):
        model.half()


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_in_shards_and_loaded_again_it_is_the_same(
    family: str, dtype: torch.dtype, exported: Exported, tmp_path: Path
) -> None:
    model = load(exported(family), dtype=dtype)
    with pytest.raises(ArtifactError, match=r"the checkpoint that this model was loaded from.*into another directory"):
        model.save_pretrained(exported(family))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = load(tmp_path, dtype="auto")
    assert same(model.state_dict(), again.state_dict())
    assert torch.equal(logits(again), logits(model))


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_or_another_head_loads_and_saves_what_is_packed(
    family: str, exported: Exported, tmp_path: Path
) -> None:
    """cohere2_moe has a packed head that shares the embeddings', which neither has; the saved one has no prefix."""
    folder, ids = exported(family), torch.arange(3, 27).reshape(2, 12)
    causal = load(folder)
    with torch.no_grad():
        wanted = causal.model(ids).last_hidden_state
        model, info = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        assert torch.equal(model(ids).last_hidden_state, wanted)
        model.save_pretrained(tmp_path)
        assert torch.equal(load(tmp_path, of=AutoModel)(ids).last_hidden_state, wanted)
        if family != "cohere2_moe":  # which has no classifier
            classifier: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
            assert torch.equal(classifier.model(ids).last_hidden_state, wanted)


def test_a_saved_base_model_has_its_tied_head_again(exported: Exported, tmp_path: Path) -> None:
    """As an unpacked one has: it got a head of random weights, with nothing but transformers' remark on new weights."""
    folder, ids = exported("cohere2_moe"), torch.arange(3, 27).reshape(2, 12)
    AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(ids).logits, load(folder)(ids).logits)


def test_packed_embeddings_keep_their_rows(exported: Exported) -> None:
    """Scripts that train resize to the tokenizer's length, most often the one that is there; it was a TypeError."""
    model = copy.deepcopy(load(exported("cohere2_moe")))
    rows = model.config.vocab_size
    table = model.get_input_embeddings()
    assert model.resize_token_embeddings(rows) is model.resize_token_embeddings() is table
    with pytest.raises(ModelError, match=rf"{rows} rows cannot be given {rows + 8}; make .*others.embeddings: null"):
        model.resize_token_embeddings(rows + 8)


def test_the_text_of_a_model_of_images_loads_alone(tmp_path: Path) -> None:
    """As transformers has it load: language_model lies at another place then."""
    save("qwen3_5_moe", tmp_path / "model")
    source = MadeSource(tmp_path / "model", lambda layer, expert, _: (2, 4, 16)[expert % 3], group_size=8)
    write(NATIVE, source, tmp_path / "packed", WriteOptions())
    whole: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert torch.equal(logits(load(tmp_path / "packed")), logits(whole))


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_and_state_dicts_are_whole(family: str, exported: Exported) -> None:
    model, other = load(exported(family)), load(exported(family))
    wanted = logits(model)
    copied = copy.deepcopy(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in (*other.state_dict().values(), *model.state_dict().values()):
        tensor.zero_()
    assert torch.equal(logits(copied), wanted)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(logits(other), wanted)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_batches_with_left_padding_generate_what_rows_alone_do(family: str, exported: Exported) -> None:
    folder = exported(family)
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    texts, options = ["def main", "import os\nclass A(object):\n"], {"max_new_tokens": 5, "do_sample": False}
    batch = {
        name: part for name, part in tokenizer(texts, return_tensors="pt", padding=True).items() if "type" not in name
    }
    assert not batch["attention_mask"].bool().all()
    together = model.generate(**batch, **options)
    assert torch.equal(together, model.generate(**batch, use_cache=False, **options))
    for row, text in zip(together, texts, strict=True):
        alone = tokenizer(text, return_tensors="pt")["input_ids"]
        assert torch.equal(model.generate(alone, **options)[0, alone.shape[1] :], row[-5:])


def test_a_pipeline_runs_it(exported: Exported) -> None:
    generator: Any = pipeline("text-generation", model=str(exported("mixtral")))
    found = generator("def main", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert found.startswith("def main")
    assert len(found) > len("def main")


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_generate_compiles_decoding_without_a_break(family: str, exported: Exported) -> None:
    """As on a GPU, where it does so by itself."""
    model, graphs = load(exported(family)), []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    ids = torch.arange(3, 15)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    wanted = model.generate(ids, **options)
    torch.compiler.reset()
    compiled = CompileConfig(backend=counted, mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    assert torch.equal(model.generate(ids, compile_config=compiled, **options), wanted)
    assert any(node.target is torch.ops.moeq.packed for node in graphs[-1].graph.nodes)


@pytest.mark.cuda
def test_generate_compiles_decoding_on_a_gpu(exported: Exported) -> None:
    """By itself, where the cache has a fixed size; calls of packed modules stay outside of CUDA graphs."""
    model, ids = load(exported("mixtral"), device_map="cuda"), torch.arange(3, 15, device="cuda")[None]
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    wanted = model.generate(ids, disable_compile=True, **options)
    torch.compiler.reset()
    counters.clear()
    assert torch.equal(model.generate(ids, **options), wanted)
    assert counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_gradients_pass_through_packed_experts(family: str, exported: Exported) -> None:
    """The gradient of the inputs is what finite differences say; nothing packed asks for one."""
    model = load(exported(family)).to(torch.float64)
    assert model.hf_quantizer.is_trainable
    layer = next(module for module in model.modules() if isinstance(module, PackedExperts))
    rows = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    chosen, weights = torch.tensor([[0, 1], [2, 1], [5, 3]]), torch.full((3, 2), 0.5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda hidden: layer(hidden, chosen, weights), rows)
    model.train()
    model(**inputs(family)).logits.square().mean().backward()
    assert model.get_submodule("model.layers.0.input_layernorm").weight.grad.abs().sum() > 0
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_packed_weights_are_not_divided_among_devices(exported: Exported) -> None:
    """Which transformers would do by the family's plan: its experts' sum was added up over devices that each had it
    whole. The configuration says it where from_pretrained is given a DistributedConfig, or tp_plan."""
    folder = exported("mixtral")
    config = AutoConfig.from_pretrained(folder)
    config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(ModelError, match=r"does not divide packed weights among devices .*; load it with device_map"):
        load(folder, config=config)


def test_what_cannot_be_unpacked_says_so(exported: Exported) -> None:
    with pytest.raises(
        ArtifactError, match=r"cannot be unpacked in memory; load the original, or what `moeq convert .* --to deq"
    ):
        load(exported("mixtral")).dequantize()
