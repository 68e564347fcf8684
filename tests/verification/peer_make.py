"""Run by a peer's interpreter: quantizes a model with the peer's own code. Arguments: PEER MODEL OUT. Knows no moeq."""

import multiprocessing
import sys

GROUP, BITS = 32, 4


def auto_round(model: str, out: str, kind: str = "auto_round", symmetric: bool = True) -> None:
    """Its workers are forked, where it would start fresh processes that import everything again."""
    import torch
    from auto_round import AutoRound

    torch.set_num_threads(1)  # a forked process has none of the threads that computed before
    forked = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forked
    made = AutoRound(model, bits=BITS, group_size=GROUP, sym=symmetric, iters=0, disable_opt_rtn=True)
    made.quantize_and_save(out, format=kind)


def awq(model: str, out: str) -> None:
    auto_round(model, out, "auto_awq", symmetric=False)


def gptqmodel(model: str, out: str) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    rows = [{"input_ids": [(7 * place + row) % 120 + 3 for place in range(64)], "attention_mask": [1] * 64}
            for row in range(8)]  # fmt: skip
    made = GPTQModel.load(model, QuantizeConfig(bits=BITS, group_size=GROUP), device="cpu")
    made.quantize(rows, batch_size=2)
    made.save(out)


def compressed_tensors(model: str, out: str) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    weights = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head", "re:.*gate$", "re:.*router.*"])
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    oneshot(model=loaded, recipe=recipe)
    loaded.save_pretrained(out, save_compressed=True)


if __name__ == "__main__":  # peers start processes that import this file
    makers = {"auto-round": auto_round, "awq": awq, "gptqmodel": gptqmodel, "compressed-tensors": compressed_tensors}
    makers[sys.argv[1]](*sys.argv[2:])
