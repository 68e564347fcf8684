"""Run by a peer's interpreter: loads checkpoints with the peer's own loader and writes their logits. Knows no moeq.

Arguments: a JSON file with a list of {loader, checkpoint, ids, logits}; an error is written as {logits}.error.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def transformers_model(checkpoint, **options):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", output_loading_info=True, **options)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        print(problem, sorted(map(str, info.get(problem) or []))[:6])
    return model


def auto_round_model(checkpoint):
    import auto_round  # noqa: F401

    return transformers_model(checkpoint)


def gptqmodel_model(checkpoint):
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(checkpoint, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16).model


def exl3_model(checkpoint):
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(checkpoint, device="cpu", backend=BACKEND.EXL3_TORCH, dtype=torch.float16).model


def llama_logits(checkpoint, ids):
    """llama.cpp's own, which has no model of torch's; on a CPU with tiles its form for them (libggml 0.3.36) ends
    small matrices of 8 bits by a segmentation fault, and is left out."""
    import llama_cpp
    from llama_cpp import Llama

    usual = llama_cpp.llama_model_default_params()
    usual.use_extra_bufts = False
    llama_cpp.llama_model_default_params = llama_cpp.llama_cpp.llama_model_default_params = lambda: usual
    model = Llama(f"{checkpoint}/model.gguf", n_ctx=ids.shape[1], logits_all=True, type_k=0, type_v=0, verbose=False)
    found = []
    for row in ids.tolist():
        model.reset()
        model.eval(row)
        found.append(torch.tensor(model.scores[: len(row)].tolist()))
    model.close()
    return torch.stack(found)


def mlx_logits(checkpoint, ids):
    """mlx-lm's own, in float32."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(checkpoint))
    model.set_dtype(mx.float32)
    return torch.stack([torch.tensor(model(mx.array([row]))[0].tolist()) for row in ids.tolist()])


LOADERS = {
    "transformers": transformers_model,
    "auto-round": auto_round_model,
    "gptqmodel": gptqmodel_model,
    "gptqmodel-exl3": exl3_model,
}


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        out = Path(job["logits"])
        try:
            ids = load_file(job["ids"])["ids"]
            if job["loader"] == "llama.cpp":
                logits = llama_logits(job["checkpoint"], ids)
            elif job["loader"] == "mlx":
                logits = mlx_logits(job["checkpoint"], ids)
            else:
                model = torch.nn.Module.float(LOADERS[job["loader"]](job["checkpoint"])).eval()
                with torch.no_grad():
                    logits = model(input_ids=ids).logits.float()
            save_file({"logits": logits.contiguous()}, out)
        except Exception:
            Path(f"{out}.error").write_text(traceback.format_exc())


main()
