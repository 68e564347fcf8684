"""SGLang serves moeq's checkpoints: the method `moeq`, which their config.json names, as a plug-in.

SGLang calls `register` in every one of its processes before a model is read; a checkpoint asks for the method by its
`quantization_config`. Experts stay packed, each matrix in its own width, and are multiplied by the kernels of
moeq-kernels.
"""

from __future__ import annotations

__version__ = "0.1.0"
LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader.load_model"
ARCHITECTURE = "sglang.srt.model_loader.utils.get_model_architecture"
TABLES = "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding.__init__"
WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights"


def register() -> None:
    """Make the method known to SGLang; once or more often."""
    from sglang.srt.layers import quantization
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moeq_kernels.widths import METHOD
    from moeq_sglang.config import MoeqConfig, build_table, checked
    from moeq_sglang.names import fused, weights

    for known in (
        quantization.BASE_QUANTIZATION_METHODS,
        quantization.CPU_QUANTIZATION_METHODS,
        quantization.QUANTIZATION_METHODS,
    ):
        known[METHOD] = MoeqConfig
    for place, hook in ((LOADER, checked), (ARCHITECTURE, fused), (TABLES, build_table), (WEIGHTS, weights)):
        if place not in HookRegistry._hooks:
            HookRegistry.register(place, hook, HookType.AROUND)
