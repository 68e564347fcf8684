"""Which of transformers' classes loads a model, by its configuration alone: what a model card says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CAUSAL = "AutoModelForCausalLM"
_TABLES = (
    (CAUSAL, "CAUSAL_LM"),
    ("AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT"),
    ("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("AutoModelForMultimodalLM", "MULTIMODAL_LM"),
    ("AutoModelForImageClassification", "IMAGE_CLASSIFICATION"),
    ("AutoModelForTokenClassification", "TOKEN_CLASSIFICATION"),
)


def auto_name(config: Mapping[str, Any]) -> str:
    """The Auto class for a configuration's first architecture, that of its own code where it brings some; the
    architecture itself where transformers has it and no Auto class is known to."""
    import transformers
    from transformers.models.auto import modeling_auto

    architecture = next(iter(config.get("architectures") or ()), None)
    own = config.get("auto_map") or {}
    for name, table in _TABLES:
        known = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).get(config.get("model_type"), ())
        if name in own or (
            architecture is not None and architecture in ((known,) if isinstance(known, str) else known)
        ):
            return name
    if architecture is not None and architecture.endswith("ForImageClassification"):
        return "AutoModelForImageClassification"  # of a model that moeq brings
    return architecture if architecture is not None and hasattr(transformers, architecture) else CAUSAL
