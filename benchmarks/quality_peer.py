"""One peer on one checkpoint, run by benchmarks/quality.py in the peer's own environment; knows nothing of moeq.

    python quality_peer.py PEER MODEL WINDOWS BITS GROUP ITERATIONS

WINDOWS: safetensors with `calibration` [S, T] and `heldout.DOMAIN` [n, T]. Prints what `measured` finds, "seconds" and
"processor" (seconds of quantizing) as its last line. Only routed experts are quantized: asymmetric by gptqmodel,
symmetric by auto-round.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


def logits(model: Any, ids: Tensor) -> Tensor:
    """Logarithms of the next token's probabilities, [S, T, V]."""
    with torch.no_grad():
        return torch.cat([model(input_ids=batch).logits.float().log_softmax(-1) for batch in ids.split(16)])


def measured(found: Tensor, exact: Tensor, ids: Tensor, domains: list[int]) -> dict[str, float]:
    """Perplexity (the mean over domains, each of so many windows), KL with its standard error over windows, and the
    share of tokens whose likeliest is the original's."""
    losses = -found[:, :-1].gather(-1, ids[:, 1:, None]).mean((1, 2))
    means = [float(part.mean()) for part in losses.split(domains)]
    divergence = (exact.exp() * (exact - found)).sum(-1).mean(-1)
    return {
        "perplexity": math.exp(sum(means) / len(means)),
        "kl": float(divergence.mean()),
        "stderr": float(divergence.std()) / math.sqrt(len(divergence)),
        "same": float((exact.argmax(-1) == found.argmax(-1)).double().mean()),
    }


def original(folder: str, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids)


def auto_round(folder: str, calibration: Tensor, bits: int, group: int, iterations: int) -> Any:
    from auto_round import AutoRound
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in calibration]
    kept = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and ".experts." not in n]
    routers = [name for name, _ in model.named_modules() if name.endswith("mlp.gate")]
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(folder),
        bits=bits,
        group_size=group,
        sym=True,
        iters=iterations,
        nsamples=len(calibration),
        seqlen=calibration.shape[1],
        batch_size=8,
        dataset=DataLoader(rows, batch_size=8),  # type: ignore[arg-type]
        layer_config={name: {"bits": 16, "data_type": "float"} for name in [*kept, *routers]},
        device_map="cpu",
        enable_torch_compile=False,
    )
    return rounding.quantize()[0]


def gptqmodel(folder: str, calibration: Tensor, bits: int, group: int, iterations: int) -> Any:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(
        bits=bits, group_size=group, sym=False, dynamic={r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}}
    )
    model = GPTQModel.load(folder, config)
    rows = [{"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)} for ids in calibration]
    model.quantize(rows, batch_size=8)
    with tempfile.TemporaryDirectory() as saved:
        model.save(saved)
        loaded = GPTQModel.load(saved, backend=BACKEND.TORCH, device="cpu").model
        unpack(loaded)
        loaded.float()
        return loaded


def unpack(model: nn.Module) -> None:
    """Packed matrices as plain ones of the same values: dequantizing them in every forward takes minutes."""
    packed = {name: module for name, module in model.named_modules() if hasattr(module, "dequantize_weight")}
    for name, module in packed.items():
        weight = module.dequantize_weight().T.float().contiguous()  # type: ignore[operator]
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        plain.weight.data.copy_(weight)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, plain)


def main() -> None:
    peer, folder, windows, bits, group, iterations = sys.argv[1:]
    tensors = load_file(windows)
    held = [rows.long() for name, rows in tensors.items() if name.startswith("heldout.")]
    ids, domains = torch.cat(held), [len(rows) for rows in held]
    exact = original(folder, ids)
    started, used = time.monotonic(), time.process_time()
    make = {"auto-round": auto_round, "gptqmodel": gptqmodel}[peer]
    model = make(folder, tensors["calibration"].long(), int(bits), int(group), int(iterations))
    took = {"seconds": time.monotonic() - started, "processor": time.process_time() - used}
    print(json.dumps(measured(logits(model, ids), exact, ids, domains) | took))


if __name__ == "__main__":
    main()
