"""Which class a model card names."""

from __future__ import annotations

import pytest

from moeq.models.auto_names import auto_name


@pytest.mark.parametrize(
    ("model_type", "architecture", "name"),
    [
        ("mixtral", "MixtralForCausalLM", "AutoModelForCausalLM"),
        ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "AutoModelForImageTextToText"),
        ("switch_transformers", "SwitchTransformersForConditionalGeneration", "AutoModelForSeq2SeqLM"),
        ("moe_vit", "MoeViTForImageClassification", "AutoModelForImageClassification"),
        ("openai_privacy_filter", "OpenAIPrivacyFilterForTokenClassification", "AutoModelForTokenClassification"),
        ("strange", "StrangeModel", "AutoModelForCausalLM"),
    ],
)
def test_it_is_the_one_that_knows_the_architecture(model_type: str, architecture: str, name: str) -> None:
    assert auto_name({"model_type": model_type, "architectures": [architecture]}) == name


def test_code_of_its_own_names_its_class() -> None:
    own = {"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoModelForSeq2SeqLM": "modeling.Mine"}}
    assert auto_name(own) == "AutoModelForSeq2SeqLM"
    assert auto_name({}) == "AutoModelForCausalLM"
