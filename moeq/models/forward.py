"""Running a model on tokens or on images: a decoder, an encoder and a decoder, or an image classifier."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.errors import ModelError
from moeq.models.source import VOCABULARIES

PIXELS = "pixel_values"
LEFT_TO_CALLERS = (  # settings of generation_config.json that change what comes back, or only how fast it does
    "return_dict_in_generate", "num_return_sequences", "max_new_tokens", "max_time", "use_cache",
    "cache_implementation", "prompt_lookup_num_tokens",
)  # fmt: skip


def takes_images(model: Any) -> bool:
    """Whether a model is given images and no tokens: an image classifier."""
    return getattr(model, "main_input_name", "input_ids") == PIXELS


def forward(model: Any, input_ids: Tensor, mask: Tensor | None = None, **extra: Any) -> Any:
    """The model's output on tokens [B, S] int64; mask [B, S] is None without pads, `extra` is what images add.

    An encoder-decoder is given the same tokens on both sides, the decoder's shifted right by its start token, so that
    logits [B, S, V] at t predict token t: `ahead(model)` is then 0 instead of 1. An image classifier is given `extra`
    alone, its tokens only stand for its positions. ModelError for tokens beyond the vocabulary.
    """
    if takes_images(model):
        return model(**extra)
    if not extra:  # what stands for an image may be beyond the vocabulary
        check_tokens(model, input_ids)
    if mask is not None and model.config.is_encoder_decoder:
        extra["decoder_attention_mask"] = mask
    return model(**token_inputs(model, input_ids), attention_mask=mask, use_cache=False, **extra)


def vocabulary(model: Any) -> int:
    """Rows of the input embeddings; the weight of packed ones is a guard of another shape."""
    embeddings = model.get_input_embeddings()
    rows = getattr(embeddings, "num_embeddings", None)
    return int(embeddings.weight.shape[0] if rows is None else rows)


def check_tokens(model: Any, input_ids: Tensor) -> None:
    """ModelError naming the tokenizer for tokens [B, S] that the model has no embedding of."""
    rows = vocabulary(model)
    largest = int(input_ids.max()) if input_ids.numel() else 0
    if largest >= rows:
        folder = Path(getattr(model.config, "_name_or_path", "") or ".")
        file = next((folder / name for name in sorted(VOCABULARIES) if (folder / name).is_file()), folder)
        what = f"token {largest} is beyond the model's vocabulary of {rows}"
        raise ModelError(what, where=str(file), do="copy the tokenizer files of this model into its directory")


def token_inputs(model: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """Tokens [B, S] by the names of the arguments that a model takes them as."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": input_ids}
    return {"input_ids": input_ids, "decoder_input_ids": _shifted_right(model, input_ids)}


def cache_name(model: Any) -> str:
    """What a model's forward and its output call keys and values: `cache` from transformers 5.24 on; before, and in
    code of checkpoints that is older, `past_key_values`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def drawn_inputs(model: Any, count: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random inputs by the names of a model's arguments: tokens [count, length], or as many images, pixels in 0..1.

    The model may lie on the meta device.
    """
    generator = torch.Generator().manual_seed(seed)
    if takes_images(model):
        return {PIXELS: torch.rand(count, *image_shape(model.config), generator=generator)}
    return token_inputs(model, torch.randint(vocabulary(model), (count, length), generator=generator))


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, rows and columns of the images that a classifier takes."""
    size = config.image_size
    rows, columns = (size, size) if isinstance(size, int) else size
    return config.num_channels, rows, columns


def image_positions(model: Any) -> int:
    """How many positions the blocks of an image classifier see of one image, special tokens included.

    ModelError for one without a table of them, whose blocks see windows of an image, or relative positions.
    """
    names = ("pos_embed", "position_embeddings")
    found = next((int(weight.shape[1]) for name, weight in model.named_parameters() if name.endswith(names)), None)
    if found is None:
        raise ModelError(
            f"{type(model).__name__} has no table of positions: it is no plain vision transformer",
            do="take ViT, DeiT, DINOv2 or moe_vit",
        )
    return found


def ahead(model: Any) -> int:
    """How far a position's logits look ahead in input_ids: 1 for a decoder, 0 for an encoder-decoder."""
    return 0 if model.config.is_encoder_decoder else 1


def _shifted_right(model: Any, input_ids: Tensor) -> Tensor:
    """As generate starts: with decoder_start_token_id where there is one, else with the padding token."""
    places = (model.config, getattr(model, "generation_config", None))
    starts = [getattr(place, key, None) for key in ("decoder_start_token_id", "pad_token_id") for place in places]
    first = torch.full_like(input_ids[:, :1], next((start for start in starts if start is not None), 0))
    return torch.cat([first, input_ids[:, :-1]], 1)


def choose_as_asked(model: Any) -> None:
    """Leave of a model's generation_config.json what it says of tokens that begin and end a text: who asks the model
    for text says how they are chosen, and what comes back."""
    from transformers import GenerationConfig

    for name, usual in vars(GenerationConfig()).items():
        if not name.startswith("_") and not name.endswith("_token_id"):
            setattr(model.generation_config, name, usual)


@contextmanager
def one_answer_each(model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Options of `generate` with which it returns tokens [B, T] within: one answer to every prompt, as long as the
    caller says, whatever the model's generation_config.json says of that. How tokens are chosen, and the strings that
    end a text, are left to it.
    """
    said = model.generation_config
    before = {name: getattr(said, name) for name in LEFT_TO_CALLERS}
    try:
        for name in LEFT_TO_CALLERS:
            setattr(said, name, None)  # transformers' own default
        yield {"tokenizer": tokenizer}
    finally:
        for name, value in before.items():
            setattr(said, name, value)
