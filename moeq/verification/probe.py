"""Loads a checkpoint as its target does and writes down what every MoE layer and the model give back.

A program of its own: it runs in the interpreter of the target (which need not have moeq), in a fresh process. It is
given a JSON file (see `launch.py`) and writes ANSWER beside it, and the tensors in TENSORS:

logits               [B, S, V]; of an image classifier [B, V]
LAYER.call.0, 1, 2   what the layer's experts were called with: hidden [T, H], experts [T, k], weights [T, k]
LAYER.self.0         or, where experts are called with one tensor, that tensor
LAYER.block.0        or, where they are called one by one, what the block around them was called with [B, S, H]
LAYER.output         what came back
LAYER.rows           rows [t, H] that every expert was given alone
LAYER.alone          what each gave back [E, t, H]; absent where experts cannot be called one by one

B sequences, S positions, T = B*S tokens, V vocabulary, H hidden size, k experts a token, E experts.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

ANSWER, TENSORS = "answer.json", "tensors.safetensors"
TILES = "amx_tile"  # what Linux calls those of a CPU
PARENT = "MOEQ_VERIFY_PARENT"  # in the environment: the process that waits for the answer
PR_SET_PDEATHSIG = 1  # of Linux's prctl
PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors")


class Recorder:
    """What one layer's experts, or the block around them, were called with first, and what they gave back."""

    def __init__(self, experts: Any, block: Any) -> None:
        self.experts, self.block = experts, block
        self.seen: dict[str, Any] = {}
        self.handles = [experts.register_forward_hook(self._called, with_kwargs=True)]
        if block is not None:
            self.handles.append(block.register_forward_hook(self._around, with_kwargs=True))

    def _called(self, module: Any, arguments: Any, named: Any, output: Any) -> None:
        given = [*arguments, *(named or {}).values()]
        if self.seen or isinstance(output, tuple):
            return
        if is_call(given):
            self._keep("call", given[:3], output)
        elif is_single(given, output):
            self._keep("self", given, output)

    def _around(self, module: Any, arguments: Any, named: Any, output: Any) -> None:
        given = [*arguments, *(named or {}).values()]
        first = output[0] if isinstance(output, tuple) else output
        if not self.seen and is_single(given, first):
            self._keep("block", given, first)

    def _keep(self, how: str, given: list[Any], output: Any) -> None:
        self.seen = {f"{how}.{place}": part.detach().clone() for place, part in enumerate(given)}
        self.seen["output"] = output.detach().clone()

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()


def is_call(given: list[Any]) -> bool:
    """Whether experts are called with hidden [T, H], experts [T, k] and weights [T, k]."""
    if len(given) < 3 or any(getattr(part, "ndim", 0) != 2 for part in given[:3]):
        return False
    hidden, chosen, weights = given[:3]
    return bool(chosen.shape == weights.shape and len(hidden) == len(chosen) and not chosen.is_floating_point())


def is_single(given: list[Any], output: Any) -> bool:
    """Whether a module is called with one tensor and gives back one of its shape."""
    return len(given) == 1 and getattr(given[0], "shape", None) == getattr(output, "shape", ())


def alone(recorder: Recorder, rows: Any, expert: int) -> Any:
    """One expert's output for rows [t, H]; None where experts cannot be called one by one."""
    import torch

    if "self.0" in recorder.seen:
        return None
    if "call.1" in recorder.seen:
        shape = (len(rows), recorder.seen["call.1"].shape[1])
        chosen = torch.full(shape, expert, dtype=recorder.seen["call.1"].dtype, device=rows.device)
        weights = torch.zeros(shape, dtype=recorder.seen["call.2"].dtype, device=rows.device)
        weights[:, 0] = 1
        return recorder.experts(rows, chosen, weights)
    child = getattr(recorder.experts, "_modules", {}).get(str(expert))
    if child is None or type(child).forward is torch.nn.Module.forward:
        return None
    output = child(rows)
    return output[0] if isinstance(output, tuple) else output


def record(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Run the model on the tokens, and every expert alone on a few rows."""
    import torch

    recorders = {}
    for name in request["layers"]:
        parent = name.rpartition(".")[0]
        recorders[name] = Recorder(model.get_submodule(name), model.get_submodule(parent))
    inputs = {name: torch.tensor(value) for name, value in request["inputs"].items()}
    floats = getattr(torch, request["dtype"])
    inputs = {name: value.to(floats) if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.no_grad():
        tensors = {"logits": model(**inputs, use_cache=False).logits.float()}
        for name, experts in request["layers"].items():
            recorder = recorders[name]
            recorder.stop()
            if not recorder.seen:
                continue
            tensors |= {f"{name}.{part}": value.contiguous() for part, value in recorder.seen.items()}
            first = next(recorder.seen[part] for part in ("call.0", "self.0", "block.0") if part in recorder.seen)
            rows = first.reshape(-1, first.shape[-1])[: request["rows"]]
            if rows.shape[-1] != request["hidden"][name]:
                continue
            outputs: list[Any] = [alone(recorder, rows, expert) for expert in range(experts)]
            if not any(output is None for output in outputs):
                tensors |= {f"{name}.rows": rows.clone(), f"{name}.alone": torch.stack(outputs).float()}
    return tensors


def llama_logits(request: dict[str, Any]) -> tuple[Any, None]:
    """The logits that llama.cpp computes, sequence by sequence; it shows nothing of its layers.

    On a CPU with tiles its form for them ends by a segmentation fault at the first matrix of 4 or 8 bits that is given
    more than one token (llama-cpp-python 0.3.36, whoever wrote the file; ggml-org/llama.cpp issue 20824), and is left
    out, which the versions say.
    """
    import llama_cpp
    import torch
    from llama_cpp import Llama

    if TILES in _flags():
        usual = llama_cpp.llama_model_default_params()
        usual.use_extra_bufts = False
        llama_cpp.llama_model_default_params = llama_cpp.llama_cpp.llama_model_default_params = lambda: usual
        request["versions"] = {"llama_cpp": f"{llama_cpp.__version__} without its form for AMX"}
    rows = request["inputs"]["input_ids"]
    path = os.path.join(request["checkpoint"], request["loading"]["gguf_file"])
    float32 = 0  # ggml's number of the type, of the cache
    model = Llama(path, n_ctx=max(map(len, rows)), logits_all=True, type_k=float32, type_v=float32, verbose=False)
    logits = []
    for row in rows:
        model.reset()
        model.eval(row)
        logits.append(torch.tensor(model.scores[: len(row)].tolist()))
    model.close()
    return torch.stack(logits), None


def _flags() -> list[str]:
    """What the first CPU can do, as Linux calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8", "replace").splitlines() if info.is_file() else []
    return next((line.split() for line in lines if line.startswith("flags")), [])


def mlx_logits(request: dict[str, Any]) -> tuple[Any, None]:
    """The logits that mlx-lm computes, in the wanted type; it shows nothing of its layers."""
    import mlx.core as mx
    import torch
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(request["checkpoint"]))
    model.set_dtype(getattr(mx, request["dtype"]))
    logits = [model(mx.array([row])).astype(mx.float32)[0].tolist() for row in request["inputs"]["input_ids"]]
    return torch.tensor(logits), None


def vllm_logits(request: dict[str, Any]) -> tuple[Any, None]:
    """The logarithms of the probabilities that vLLM computes; it shows nothing of its layers."""
    from vllm import LLM, SamplingParams

    rows = request["inputs"]["input_ids"]
    longest = max(map(len, rows)) + 1
    model = LLM(
        model=request["checkpoint"],
        dtype=request["dtype"],
        trust_remote_code=request["trust_remote_code"],
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=len(rows),
        max_num_batched_tokens=max(512, longest),
        gpu_memory_utilization=0.1,
        max_logprobs=-1,  # all
    )
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    outputs = model.generate([{"prompt_token_ids": row} for row in rows], asked, use_tqdm=False)
    found = [[*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]] for output in outputs]
    each = ([{token: one.logprob for token, one in place.items()} for place in row] for row in found)
    return whole_distributions(each), None


def sglang_logits(request: dict[str, Any]) -> tuple[Any, None]:
    """The logarithms of the probabilities that SGLang computes; it shows nothing of its layers."""
    import sglang

    rows = request["inputs"]["input_ids"]
    config = json.loads(Path(request["checkpoint"], "config.json").read_text("utf-8"))
    engine = sglang.Engine(
        model_path=request["checkpoint"],
        dtype=request["dtype"],
        trust_remote_code=request["trust_remote_code"],
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_radix_cache=True,
    )
    try:
        outputs = engine.generate(
            input_ids=rows,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=config["vocab_size"],
        )
    finally:
        engine.shutdown()
    said = [output["meta_info"] for output in outputs]
    found = [[*one["input_top_logprobs"][1:], one["output_top_logprobs"][0]] for one in said]
    return whole_distributions([{token: value for value, token, *_ in place} for place in row] for row in found), None


def whole_distributions(rows: Any) -> Any:
    """[B, S, V] of {token: value} of every position; ValueError where one lacks some of the V tokens."""
    import torch

    rows = list(rows)
    size = len(rows[0][0])
    for row in rows:
        for place in row:
            if sorted(place) != list(range(size)):
                raise ValueError(f"{len(place)} tokens have a probability at a position, {size} at the first one")
    return torch.tensor([[[place[token] for token in range(size)] for place in row] for row in rows])


def load(request: dict[str, Any]) -> tuple[Any, dict[str, list[str]] | None]:
    """The model in the wanted type, or its logits, and what its loader complained about (None: it does not say)."""
    module, _, name = request["load"].rpartition(":")
    loader = getattr(importlib.import_module(module), name) if module else globals()[name]
    return loader(request)  # type: ignore[no-any-return]


def gptqmodel_model(request: dict[str, Any]) -> tuple[Any, None]:
    """With gptqmodel's kernels in torch."""
    import torch
    from gptqmodel import BACKEND, GPTQModel

    kernel = {"exl3": "EXL3_TORCH", "awq": "AWQ_TORCH"}.get(request["method"], "GPTQ_TORCH")
    backend = getattr(BACKEND, kernel, None) or BACKEND.TORCH
    path, trust = request["checkpoint"], request["trust_remote_code"]
    half = torch.float16  # the scales' type; its kernels take no float32
    wrapped = GPTQModel.load(path, device="cpu", backend=backend, dtype=half, trust_remote_code=trust)
    return wrapped.model.to(getattr(torch, request["dtype"])), None


def auto_round_model(request: dict[str, Any]) -> tuple[Any, dict[str, list[str]]]:
    """In the type of most weights, since what is asked for in float32 is rounded to float16."""
    import transformers

    more = {"quantization_config": transformers.AutoRoundConfig()} if request["method"] == "gptq" else {}
    return transformers_model(request, dtype=request["stored"], **more)


def transformers_model(
    request: dict[str, Any], dtype: str | None = None, **more: Any
) -> tuple[Any, dict[str, list[str]]]:
    """As from_pretrained of the model's own class loads it, in a type: the one that it is then brought to, if none."""
    import torch
    import transformers

    trust = {"trust_remote_code": True} if request["trust_remote_code"] else {}
    config = transformers.AutoConfig.from_pretrained(request["checkpoint"], **trust)
    kind = transformers.AutoModelForCausalLM
    classifiers = transformers.AutoModelForImageClassification
    if type(config) not in kind._model_mapping and type(config) in classifiers._model_mapping:
        kind = classifiers  # also of models that moeq brings
    named = getattr(transformers, request["architecture"], None)
    if named is not None and kind._model_mapping.get(type(config), None) is not named:
        kind = named  # a model of text and images is not loaded by its language model's class
    if request["loading"]:  # the header of such a file lacks some of the configuration
        more |= {**request["loading"], "config": config}
    wanted = getattr(torch, request["dtype"])
    model, said = kind.from_pretrained(
        request["checkpoint"],
        dtype=getattr(torch, dtype or request["dtype"]),
        output_loading_info=True,
        **trust,
        **more,
    )
    return model.to(wanted), {problem: sorted(map(str, said.get(problem) or ())) for problem in PROBLEMS}


def installed(package: str) -> str:
    """The version that was installed of a package that does not say its own."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main(folder: Path) -> None:
    """Read request.json, write the tensors, then the answer: what went wrong, or what the loader said."""
    request = json.loads((folder / "request.json").read_text("utf-8"))
    answer: dict[str, Any] = {"error": None, "absent": None, "unwritten": None, "loading": None, "versions": {}}
    try:
        for package in request["packages"]:
            answer["absent"] = package
            module = importlib.import_module(package)
            answer["versions"][package] = str(getattr(module, "__version__", None) or installed(package))
        answer["absent"] = None
        model, answer["loading"] = load(request)
        answer["versions"] |= request.get("versions", {})
        tensors = {"logits": model} if request["logits_only"] else record(model.eval(), request)
        answer["unwritten"] = unwritten(tensors, folder / TENSORS)
    except Exception as error:
        text = str(error).strip().splitlines()
        answer["error"] = f"{type(error).__name__}: {text[0] if text else 'no message'}"
        if not isinstance(error, ImportError):
            answer["absent"] = None
    partial = folder / f"{ANSWER}.partial"
    partial.write_text(json.dumps(answer), "utf-8")
    os.replace(partial, folder / ANSWER)


def unwritten(tensors: dict[str, Any], path: Path) -> str | None:
    """Write tensors to a file; what the disk says where it refuses them, of which it then has nothing."""
    from safetensors.torch import save_file

    try:
        save_file({name: value.cpu() for name, value in tensors.items()}, path)
    except Exception as error:  # safetensors has one of its own
        path.unlink(missing_ok=True)
        return str(error)
    return None


def die_with(parent: int) -> None:
    """Have this process be killed when the one that waits for its answer dies; on Linux, elsewhere nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(parent, 0)
    except ProcessLookupError:  # it died before
        os._exit(1)


if __name__ == "__main__":
    if PARENT in os.environ:
        die_with(int(os.environ[PARENT]))
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != own]  # modules beside it are moeq's
    main(Path(sys.argv[1]))
