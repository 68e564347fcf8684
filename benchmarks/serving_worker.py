"""A model in vLLM, for benchmarks/serving.py: takes jobs as lines of JSON, answers each with a line.

    python serving_worker.py CHECKPOINT [--eager] [--length TOKENS]

Runs in vLLM's own environment, in one process, so that its model can be looked at. The first line tells what was
loaded: bytes of the model's tensors and of what kernels arranged, but for what oneDNN keeps; by how much memory of the
process's own (RssAnon) and pages of mapped files (RssFile) have grown by it, and what both were before. A job is
{batch, tokens, prompt: tokens of it, 32 if it is not there}: answered are seconds of reading the prompts, of a decode
step, and of the experts of one layer in it (0 where the model is compiled, and no call of them is seen).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import time
from functools import wraps
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
PROMPT, MOST, LENGTH = 32, 16, 256  # tokens of a prompt, prompts at once, tokens of a sequence at most
calls: list[float] = []  # seconds of each call of a layer's experts
numbers = itertools.count()  # of requests


def held(model: Any) -> int:
    """Bytes of a model's tensors, each once, and of what kernels have arranged."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    methods = {id(one.quant_method): one.quant_method for one in model.modules() if hasattr(one, "quant_method")}
    prepared = [getattr(method, "prepared", None) or () for method in methods.values()]
    arranged = [one for some in prepared for one in (some if isinstance(some, tuple) else (some,))]
    return sum(storages.values()) + sum(one.nbytes for one in arranged)


def load(checkpoint: str, eager: bool, length: int = LENGTH) -> tuple[Any, dict[str, int]]:
    """The engine, and what loading its model took."""
    import torch
    from figures import resident
    from vllm import LLM
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from warm import warm_up

    from moeq_kernels.freed import return_memory

    warm_up()
    found: dict[str, int] = {}
    loading = CPUModelRunner.load_model

    @wraps(loading)
    def watched(runner: Any, *given: Any, **named: Any) -> None:
        get_model_cls(runner.model_config)  # imports the model's code
        before = resident()
        loading(runner, *given, **named)
        for tensor in [*runner.model.parameters(), *runner.model.buffers()]:  # some may only be mapped
            if tensor.numel():
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[::4096].sum()
        return_memory()
        after = resident()
        found.update(
            held=held(runner.model), own=after["RssAnon"] - before["RssAnon"],
            mapped=after["RssFile"] - before["RssFile"], before=sum(before.values()),
        )  # fmt: skip
        for module in runner.model.modules() if eager else ():
            if type(module).__name__ == "RoutedExperts":
                module.quant_method.apply = timed(module.quant_method.apply)

    CPUModelRunner.load_model = watched
    engine = LLM(
        checkpoint, dtype="bfloat16", enforce_eager=eager, skip_tokenizer_init=True, max_model_len=length,
        max_num_seqs=MOST, enable_prefix_caching=False, gpu_memory_utilization=0.1,
    )  # fmt: skip
    return engine, found


def timed(apply: Any) -> Any:
    @wraps(apply)
    def measured(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        output = apply(*given, **named)
        calls.append(time.perf_counter() - began)
        return output

    return measured


def step(engine: Any, batch: int, tokens: int, prompt: int = PROMPT) -> dict[str, float]:
    """Seconds of reading the prompts, and of a decode step, the median of those after them."""
    from vllm import SamplingParams, TokensPrompt

    draw, running = random.Random(batch), engine.llm_engine
    params = SamplingParams(temperature=0, max_tokens=1 + tokens, ignore_eos=True, detokenize=False)
    for number in itertools.islice(numbers, batch):
        given = TokensPrompt(prompt_token_ids=draw.choices(range(3, 4096), k=prompt))
        running.add_request(str(number), given, params)
    steps = []
    while running.has_unfinished_requests():
        seen, began = len(calls), time.perf_counter()
        running.step()
        steps.append((time.perf_counter() - began, calls[seen:]))
    first, last = steps[:-tokens], steps[-tokens:]
    experts = [seconds for _, several in last for seconds in several]
    return {
        "prompt": sum(seconds for seconds, _ in first),
        "step": statistics.median(seconds for seconds, _ in last),
        "experts": statistics.median(experts) if experts else 0.0,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not be taken for an answer
    length = int(sys.argv[sys.argv.index("--length") + 1]) if "--length" in sys.argv else LENGTH
    engine, found = load(sys.argv[1], "--eager" in sys.argv, length)
    print(json.dumps(found), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(step(engine, **json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
