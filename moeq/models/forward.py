"""Running a model on tokens, whether it is a decoder or an encoder and a decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def forward(model: Any, input_ids: Tensor, mask: Tensor | None = None, **extra: Any) -> Any:
    """The model's output on tokens [B, S]; mask [B, S] is None without pads, `extra` is what images add.

    An encoder-decoder is given the same tokens on both sides, the decoder's shifted right by its start token, so that
    logits [B, S, V] at t predict token t: `ahead(model)` is then 0 instead of 1.
    """
    if mask is not None and model.config.is_encoder_decoder:
        extra["decoder_attention_mask"] = mask
    return model(**token_inputs(model, input_ids), attention_mask=mask, use_cache=False, **extra)


def token_inputs(model: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """Tokens [B, S] by the names of the arguments that a model takes them as."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": input_ids}
    return {"input_ids": input_ids, "decoder_input_ids": _shifted_right(model, input_ids)}


def ahead(model: Any) -> int:
    """How far a position's logits look ahead in input_ids: 1 for a decoder, 0 for an encoder-decoder."""
    return 0 if model.config.is_encoder_decoder else 1


def _shifted_right(model: Any, input_ids: Tensor) -> Tensor:
    """As generate starts: with decoder_start_token_id where there is one, else with the padding token."""
    places = (model.config, getattr(model, "generation_config", None))
    starts = [getattr(place, key, None) for key in ("decoder_start_token_id", "pad_token_id") for place in places]
    first = torch.full_like(input_ids[:, :1], next((start for start in starts if start is not None), 0))
    return torch.cat([first, input_ids[:, :-1]], 1)
