"""Run by an interpreter with sglang, moeq-kernels and moeq-sglang, and no moeq: loads native checkpoints into SGLang's
own models on the CPU, and computes their experts and linears. Its attention and its server do not run without the
kernels of a device, or of its own build for CPUs.

Arguments: a JSON file with a list of {checkpoint, given, out}. given: hidden [T, H], weights and ids [T, k], tokens
[T], and wide [T, N] for what takes an attention's output. Written are the outputs of every layer's experts and
attention's linears, of embeddings and head, and the bytes that kernels hold; an error is written as {out}.error.
"""

import json
import socket
import sys
import traceback
from pathlib import Path

import torch

# ruff: noqa: E402
beside = torch.library.Library("torchvision", "DEF")  # its own build for CPUs is on no index of packages: names alone
for name in ("nms", "qnms"):
    beside.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from safetensors.torch import load_file, save_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs


def loaded(checkpoint):
    """SGLang's model, by nothing but the path."""
    args = ServerArgs(
        model_path=checkpoint, device="cpu", attention_backend="triton", dtype="float32", disable_cuda_graph=True
    )
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    initialize_moe_config()
    if not torch.distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=where)
        initialize_model_parallel()
    config = ModelConfig.from_server_args(args)
    config.hf_config.dtype = config.dtype  # where GPT-OSS's model looks for it
    return get_model_loader(LoadConfig(), config).load_model(model_config=config, device_config=DeviceConfig("cpu"))


def computed(model, given):
    found, held = {}, 0
    routed = StandardTopKOutput(given["weights"], given["ids"], torch.empty(0))
    for number, layer in enumerate(model.model.layers):
        block = getattr(layer, "mlp", None) or layer.block_sparse_moe
        found[f"{number}.experts"] = block.experts(given["hidden"], routed)
        found[f"{number}.qkv"] = layer.self_attn.qkv_proj(given["hidden"])[0]
        found[f"{number}.o"] = layer.self_attn.o_proj(given["wide"])[0]
        for module in layer.modules():
            prepared = getattr(getattr(module, "quant_method", None), "prepared", ())
            held += sum(one.nbytes for one in (prepared if isinstance(prepared, tuple) else (prepared,)))
    processor = model.logits_processor
    return found | {
        "embeddings": model.model.embed_tokens(given["tokens"]),
        "logits": processor._compute_lm_head(given["hidden"], model.lm_head)[:, : model.config.vocab_size],
        "bytes": torch.tensor([held]),
    }


load_plugins()
for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        with torch.no_grad():
            outputs = computed(loaded(job["checkpoint"]), load_file(job["given"]))
        save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, job["out"])
    except Exception:
        Path(f"{job['out']}.error").write_text(traceback.format_exc())
