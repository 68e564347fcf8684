"""A whole model in one program, for benchmarks/whole_model.py: takes jobs as lines of JSON, answers each with a line.

    python whole_model_worker.py transformers CHECKPOINT THREADS
    python whole_model_worker.py llama.cpp FILE.gguf THREADS

A job is {batch, prompt, tokens}: so many sequences of so many random tokens are read, then each goes on by its
likeliest token so often; answered are seconds of reading and the median of those of a step. Runs in the program's own
environment.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

CHUNK = 512  # tokens that llama.cpp is given at once, as it is by default
Step = Callable[[list[int]], list[int]]


class Transformers:
    """By `from_pretrained`, and `forward` with its cache, as `generate` calls it."""

    def __init__(self, checkpoint: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        import moeq  # noqa: F401  registers the format; before torch

        torch.set_num_threads(threads)
        self.torch: Any = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()

    def begin(self, prompts: list[list[int]], tokens: int) -> tuple[list[int], Step]:
        torch, model = self.torch, self.model

        def forward(ids: Any, cache: Any) -> tuple[list[int], Any]:
            with torch.inference_mode():
                made = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                return made.logits[:, -1].argmax(-1).tolist(), made.past_key_values

        first, cache = forward(torch.tensor(prompts), None)
        return first, lambda last: forward(torch.tensor(last)[:, None], cache)[0]


class LlamaCpp:
    """By `llama_decode` of libllama, which llama-cpp-python brings."""

    def __init__(self, file: str, threads: int) -> None:
        import llama_cpp

        self.lib, self.threads, self.context = llama_cpp, threads, None
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            sys.exit(f"{file}: llama.cpp does not load it")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def begin(self, prompts: list[list[int]], tokens: int) -> tuple[list[int], Step]:
        lib, length = self.lib, len(prompts[0])
        if self.context is not None:
            lib.llama_free(self.context)
        asked = lib.llama_context_default_params()
        asked.n_ctx, asked.n_seq_max = len(prompts) * -(-(length + tokens + 1) // 256) * 256, len(prompts)
        asked.n_batch = asked.n_ubatch = CHUNK
        asked.n_threads = asked.n_threads_batch = self.threads
        self.context = lib.llama_init_from_model(self.model, asked)
        every = [(token, at, which) for which, one in enumerate(prompts) for at, token in enumerate(one)]
        found: dict[int, int] = {}
        for start in range(0, len(every), CHUNK):
            found |= self._decode(every[start : start + CHUNK], length - 1)
        at = [length]

        def step(last: list[int]) -> list[int]:
            made = self._decode([(token, at[0], which) for which, token in enumerate(last)], at[0])
            at[0] += 1
            return [made[which] for which in range(len(last))]

        return [found[which] for which in range(len(prompts))], step

    def _decode(self, given: list[tuple[int, int, int]], last: int) -> dict[int, int]:
        """The likeliest token after each sequence whose token of that place is among those given."""
        import numpy as np

        lib, batch = self.lib, self.lib.llama_batch_init(len(given), 0, 1)
        batch.n_tokens = len(given)
        for row, (token, at, which) in enumerate(given):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0] = token, at, 1, which
            batch.logits[row] = at == last
        if lib.llama_decode(self.context, batch) != 0:
            sys.exit("llama.cpp does not decode")
        found = {}
        for row, (_, at, which) in enumerate(given):
            if at == last:
                logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, row), shape=(self.vocabulary,))
                found[which] = int(logits.argmax())
        lib.llama_batch_free(batch)
        return found


def answer(program: Any, batch: int, prompt: int, tokens: int) -> dict[str, float]:
    draw = random.Random(batch)
    prompts = [draw.choices(range(3, 4096), k=prompt) for _ in range(batch)]
    began = time.perf_counter()
    last, step = program.begin(prompts, tokens)
    taken, seconds = time.perf_counter() - began, []
    for _ in range(tokens):
        began = time.perf_counter()
        last = step(last)
        seconds.append(time.perf_counter() - began)
    return {"prompt": taken, "step": statistics.median(seconds)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the programs print must not be taken for an answer
    kind = {"transformers": Transformers, "llama.cpp": LlamaCpp}[sys.argv[1]]
    program = kind(sys.argv[2], int(sys.argv[3]))
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(program, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
