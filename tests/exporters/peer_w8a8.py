"""Run by an interpreter with compressed-tensors: the perplexity of checkpoints in W8A8. Knows no moeq.

Arguments: a JSON file with a list of {checkpoint, twin, ids, found}. twin: null, and transformers loads the checkpoint
as it says of itself; or a checkpoint with the same names whose weights are the values of the codes, which transformers
loads, and in which compressed-tensors' linears then round what they are given, and experts token by token. Each is
written as {perplexity, quantized}: how many linears round.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def tensors(checkpoint):
    found = {}
    for path in Path(checkpoint).glob("*.safetensors"):
        found |= load_file(path)
    return found


def quantized(twin, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    declared = json.loads((Path(checkpoint) / "config.json").read_text())["quantization_config"]
    apply_quantization_config(model, QuantizationConfig.model_validate(declared), run_compressed=False)
    scales = tensors(checkpoint)
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.input_scale.data = scales[f"{name}.input_scale"]
            module.quantization_status = QuantizationStatus.DECOMPRESSED
    if len(declared["config_groups"]) > 1:
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.forward = forward_of(module)
    return model


def by_token(values):
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
    return (values / scale).round() * scale


def forward_of(experts):
    def forward(hidden, chosen, weights):
        out = torch.zeros_like(hidden)
        for expert in range(len(experts.gate_up_proj)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (by_token(hidden[token]) @ experts.gate_up_proj[expert].T).chunk(2, -1)
            given = by_token(experts.act_fn(gate) * up) @ experts.down_proj[expert].T
            out.index_add_(0, token, given * weights[token, place, None])
        return out

    return forward


def perplexity(model, ids):
    with torch.no_grad():
        logits = torch.cat([model(input_ids=rows).logits[:, :-1] for rows in ids.split(4)])
    return torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), ids[:, 1:].flatten()).exp().item()


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if job["twin"] is None:
            model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32)
        else:
            model = quantized(job["twin"], job["checkpoint"])
        count = sum(getattr(module, "quantization_scheme", None) is not None for module in model.modules())
        found = {"perplexity": perplexity(model.eval(), load_file(job["ids"])["ids"]), "quantized": count}
        Path(job["found"]).write_text(json.dumps(found))


main()
