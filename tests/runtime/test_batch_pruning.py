"""Finished sequences reach no expert, and what the others get does not change: greedy and beams, every kind of experts.

Sequences end where the test wants: the end token is impossible before and certain there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_models import build
from torch import Tensor

from moeq.errors import EvaluationError, ModelError
from moeq.models.experts import find_expert_layers
from moeq.runtime.batch_pruning import pruning
from moeq.runtime.packed_experts import FULL, PACKED
from moeq_kernels.widths import Encoding

EOS, PAD, PROMPT, CERTAIN = 1, 2, 5, 1e4
ENDS = (2, 6, 3, 8)  # new tokens of every sequence
OWN = ("mixtral", "gpt_oss", "dbrx", "jetmoe", "llama4_text", "longcat_flash", "switch_transformers", "nllb-moe")
AS_PACKED = ("mixtral", "gpt_oss", "dbrx", "jetmoe", "llama4_text", "longcat_flash", "switch_transformers")


def packed(model: Any) -> Any:
    """The model with its experts in packed modules, all of them dense."""
    for layer in find_expert_layers(model):
        original = model.get_submodule(layer.name)
        experts = PACKED[layer.kind.name](
            layer,
            [FULL] * layer.num_experts,
            encoding=Encoding(group_size=16, symmetric=False),
            original=original,
            dtype=torch.float32,
        )
        weights, biases = (of(original, slice(None)) for of in (layer.kind.weights, layer.kind.biases))
        for expert in range(layer.num_experts):
            for projection in layer.projections:
                linear = experts.get_submodule(f"{expert}.{projection}")
                linear.get_buffer("dense").copy_(weights[projection][expert])
                if layer.biased:
                    linear.get_buffer("bias").copy_(biases[projection][expert])
        model.set_submodule(layer.name, experts)
    return model


def ending(beams: int, prompt: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A logits processor by which sequence i ends with its ENDS[i]-th new token."""

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        ends = torch.tensor(ENDS).repeat_interleave(beams)
        scores[:, EOS] = torch.where(ids.shape[1] - prompt + 1 == ends, CERTAIN, -CERTAIN)
        return scores

    return process


def generated(model: Any, beams: int, early: bool = True) -> Any:
    """Tokens and, without beams, the logits of every step."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 1000, (len(ENDS), PROMPT), generator=generator)
    prompt = 1 if model.config.is_encoder_decoder else PROMPT
    with torch.no_grad():
        return model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=beams, max_new_tokens=12,
            early_stopping=early if beams > 1 else None, eos_token_id=EOS, pad_token_id=PAD,
            logits_processor=[ending(beams, prompt)], return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip


def compared(model: Any, beams: int, early: bool = True) -> Any:
    """What pruning saved; the tokens are the same, and so are the logits of what still runs."""
    whole = generated(model, beams, early)
    with pruning(model) as rows:
        again = generated(model, beams, early)
    assert torch.equal(whole.sequences, again.sequences)
    assert len(whole.logits) == len(again.logits) == max(ENDS)
    for step, (wanted, found) in enumerate(zip(whole.logits, again.logits, strict=True)):
        live = torch.tensor([end > step for end in ENDS]).repeat_interleave(beams)
        torch.testing.assert_close(found[live], wanted[live], rtol=1e-4, atol=1e-4)
    return rows


@pytest.mark.cases(4)
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(("family", "way"), [*((f, "own") for f in OWN), *((f, "packed") for f in AS_PACKED)])
def test_finished_sequences_reach_no_expert(family: str, way: str, beams: int) -> None:
    """Every step routes exactly the sequences that are not finished; the first one, the prompt, is whole."""
    model = build(family) if way == "own" else packed(build(family))
    rows = compared(model, beams)
    finished = sum(max(ENDS) - end for end in ENDS) * beams  # rows times steps in which somebody else goes on
    assert rows.left_out > 0
    assert rows.left_out % finished == 0
    layers = rows.left_out // finished  # every MoE layer of the decoder
    assert 1 <= layers <= 4
    in_steps = (max(ENDS) - 1) * len(ENDS) * beams * layers
    assert rows.tokens > in_steps
    assert rows.live is None, "the next batch starts whole"


def test_experts_are_given_live_rows_alone() -> None:
    """The module itself sees fewer rows in every later step, none of them of a finished sequence."""
    model = build("mixtral")
    seen: list[int] = []
    with pruning(model):
        hook = model.get_submodule(find_expert_layers(model)[0].name).register_forward_pre_hook(
            lambda _, given: seen.append(len(given[0]))
        )
        generated(model, 1)
        hook.remove()
    assert seen == [len(ENDS) * PROMPT, *(sum(end > step for end in ENDS) for step in range(1, max(ENDS)))]
    assert "_get_stopping_criteria" not in vars(model), "nothing is left behind"


def test_beams_without_early_stopping_are_pruned_when_nothing_can_improve() -> None:
    rows = compared(build("switch_transformers"), 3, early=False)
    assert rows.left_out > 0


def test_a_second_batch_starts_whole() -> None:
    """Also its encoder, which runs before transformers makes the criteria."""
    model = build("switch_transformers")
    whole = generated(model, 2).sequences
    with pruning(model) as rows:
        first = generated(model, 2).sequences
        left_out = rows.left_out
        second = generated(model, 2).sequences
    assert torch.equal(first, whole)
    assert torch.equal(second, whole)
    assert rows.left_out == 2 * left_out


def test_a_capacity_that_rows_share_is_refused() -> None:
    """In NLLB what a token takes of an expert's capacity another one of the batch has not."""
    model = build("nllb-moe", moe_eval_capacity_token_fraction=0.5)
    with pytest.raises(EvaluationError, match="share a capacity among the rows"), pruning(model):
        pass
    assert "_get_stopping_criteria" not in vars(model)
    with pytest.raises(ModelError):
        find_expert_layers(model)  # its rows can be left out all the same


def test_stop_strings_end_a_row_too() -> None:
    """Any criterion counts, not the end token alone."""
    model = build("mixtral")

    def third(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.arange(len(ids)) < (1 if ids.shape[1] >= PROMPT + 3 else 0)

    ids = torch.randint(3, 1000, (3, PROMPT), generator=torch.Generator().manual_seed(6))
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": PAD, "stopping_criteria": [third]}
    options["logits_processor"] = [ending_never]
    whole = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    with pruning(model) as rows:
        again = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(whole, again)
    assert rows.left_out == 3 * len(find_expert_layers(model))  # of steps 4, 5 and 6


def ending_never(ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, EOS] = -CERTAIN
    return scores
