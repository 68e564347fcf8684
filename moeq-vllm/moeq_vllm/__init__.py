"""vLLM serves moeq's checkpoints: the method `moeq`, which their config.json names, as a plug-in.

vLLM calls `register` in every one of its processes; a checkpoint asks for it by its `quantization_config`, nothing else
is needed. Experts stay packed, each matrix in its own width, and are multiplied by the kernels of moeq-kernels.
"""

from __future__ import annotations

__version__ = "0.1.0"


def register() -> None:
    """Make the method known to vLLM; once or more often."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    from moeq_kernels.widths import METHOD
    from moeq_vllm import llvm
    from moeq_vllm.config import MoeqConfig, build_table

    llvm.hide()
    register_quantization_config(METHOD)(MoeqConfig)
    VocabParallelEmbedding.__init__ = build_table
