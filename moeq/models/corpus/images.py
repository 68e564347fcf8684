"""Rows with images: what the model's own processor makes of them, each a sequence of its own.

Image tokens are tokens like any other: the experts of the language part see them, so the statistics count them.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.errors import CorpusError, first_line
from moeq.models.corpus.chat import rendered
from moeq.models.merge_cache import drop_merge_cache
from moeq.models.source import PROCESSOR_FILES

INSTALL = "pip install 'moeq[vision]'"
TOKEN_SETTINGS = (
    "image_token_id", "image_token_index", "video_token_id", "video_token_index", "media_placeholder_token_id",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """Images (files or bytes), the text that goes with them, and the row that they stand in.

    messages: a conversation whose contents are lists of parts, images among them; text: what to put after the images
    when there is no chat template, None when there must be one.
    """

    images: tuple[Path | bytes, ...]
    messages: list[dict[str, Any]]
    text: str | None
    plain: bool
    where: str


def image_tokens(config: Any) -> frozenset[int]:
    """Token ids that stand for parts of images or videos; none where the model's configuration names none."""
    settings = (getattr(config, name, None) for name in TOKEN_SETTINGS)
    return frozenset(token for token in settings if isinstance(token, int))


def image_row(
    value: Any,
    text: str | None,
    messages: list[dict[str, Any]] | None,
    *,
    where: str,
    folder: Path | None,
    plain: bool = False,
) -> ImageRow:
    """A row's images with its text or conversation; images that the conversation does not place come first.

    value: a path relative to `folder` (None: there is none, as on the hub), {bytes, path}, or a list of them. plain: no
    chat template. Raises CorpusError.
    """
    images = tuple(image_of(image, where, folder) for image in (value if isinstance(value, list) else [value]))
    turns: list[dict[str, Any]] = messages or [{"role": "user", "content": text or ""}]
    turns = [turn | {"content": _parts(turn.get("content"))} for turn in turns]
    placed = sum(part.get("type") == "image" for turn in turns for part in turn["content"])
    if placed == 0:
        first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        first["content"] = [{"type": "image"} for _ in images] + first["content"]
    elif placed != len(images):
        raise CorpusError(
            f"{placed} places for {len(images)} images",
            where=where,
            do="give one place for every image in the text, or none",
        )
    return ImageRow(images=images, messages=turns, text=text, plain=plain, where=where)


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return [{"type": "text", "text": "" if content is None else str(content)}]
    return [{key: value for key, value in part.items() if value is not None} for part in content]


def image_of(value: Any, where: str, folder: Path | None) -> Path | bytes:
    """The image that a field of a row names or holds; CorpusError where it is none."""
    inside = value.get("bytes") if isinstance(value, dict) else None
    if isinstance(inside, bytes):
        return inside
    name = value.get("path") if isinstance(value, dict) else value
    if not isinstance(name, str):
        raise CorpusError(
            f"an image of type {type(value).__name__}",
            where=where,
            do="give a path or {bytes, path}, or set corpus.image_field: null to read text only",
        )
    if folder is None:
        what = f"the image is a path ({name}), not part of the row"
        raise CorpusError(what, where=where, do="use a dataset whose Parquet files hold the images, or local files")
    path = folder / name
    try:
        there = path.is_file()
    except OSError:  # a name that no file has
        there = False
    if not there:
        raise CorpusError(f"no such image: {path}", where=where, do="give a path relative to the file of the rows")
    return path


def has_processor(model: Path) -> bool:
    """Whether the model in a directory brings a processor for more than text."""
    return any((model / name).is_file() for name in PROCESSOR_FILES)


def load_processor(model: Path, trust_remote_code: bool = False, *, images_alone: bool = False) -> Any:
    """The processor of the model in a directory, which may run code of its own only where that is allowed.

    images_alone: of a model that takes no text.
    Raises CorpusError when it has none or it cannot run here.
    """
    if not has_processor(model):
        raise CorpusError(
            "rows have images, but the model has no image processor",
            where=str(model),
            do="use a vision-language model, or set corpus.image_field: null to read text only",
        )
    from transformers import AutoImageProcessor, AutoProcessor

    kind = AutoImageProcessor if images_alone else AutoProcessor
    try:
        processor = kind.from_pretrained(model, trust_remote_code=trust_remote_code)
    except ImportError as error:
        needs = "torchvision" if "orchvision" in str(error) else "Pillow" if "PIL" in str(error) else str(error)
        raise CorpusError(f"its image processor needs {needs}", where=str(model), do=INSTALL) from error
    except Exception as error:  # OSError, ValueError, and what a processor's own code raises
        what = f"its processor cannot be loaded ({type(error).__name__}: {first_line(error, '')})"
        raise CorpusError(what, where=str(model), do="copy the model's processor files again") from error
    drop_merge_cache(getattr(processor, "tokenizer", None))
    return processor


class Encoder:
    """Rows with images to token ids and whatever else the model is given with them."""

    def __init__(self, processor: Any, length: int) -> None:
        """length: most tokens of a sequence."""
        self.processor, self.length = processor, length

    def __call__(self, row: ImageRow) -> tuple[list[int], dict[str, Tensor]]:
        """Ids, and tensors as model.forward takes them for a batch of one.

        What follows the last image is cut at `length`. Raises CorpusError when the images alone are longer.
        """
        text = self._text(row)
        images = [opened(image, row.where) for image in row.images]
        try:
            encoded = self.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # a processor raises what it likes
            what = f"the model's processor does not take it ({type(error).__name__}: {first_line(error, '')})"
            raise CorpusError(what, where=row.where, do="drop the row, or put another image there") from error
        extra = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
        ids: Tensor = extra.pop("input_ids")
        extra.pop("attention_mask", None)
        if ids.shape[1] > self.length:
            self._check_cut(ids[0], row.where)
            extra = {name: _cut(value, ids.shape, self.length) for name, value in extra.items()}
        return ids[0, : self.length].tolist(), extra

    def _text(self, row: ImageRow) -> str:
        tokenizer = self.processor.tokenizer
        speaker = self.processor if getattr(self.processor, "chat_template", None) else tokenizer
        if row.text is None or (not row.plain and getattr(speaker, "chat_template", None)):
            return rendered(speaker, row.messages, row.where)
        token = getattr(self.processor, "image_token", None)
        if not isinstance(token, str):
            what = "the model's processor has neither a chat template nor an image token"
            raise CorpusError(what, where=row.where, do="put chat_template.jinja into the model's directory")
        return f"{tokenizer.bos_token or ''}{token * len(row.images)}{row.text}{tokenizer.eos_token or ''}"

    def _check_cut(self, ids: Tensor, where: str) -> None:
        """CorpusError when cutting at the length would cut an image, or when that cannot be told."""
        token = getattr(self.processor, "image_token_id", None)
        if token is None or bool((ids[self.length :] == token).any()):
            what = f"{len(ids)} tokens with its image, sequences have {self.length}"
            raise CorpusError(what, where=where, do="raise corpus.sequence_length, or use smaller images")


def _cut(value: Tensor, shape: torch.Size, length: int) -> Tensor:
    """A tensor that goes with the ids token by token, cut as they are."""
    return value[:, :length] if value.shape[:2] == shape and not value.is_floating_point() else value


def opened(image: Path | bytes, where: str, channels: int = 3) -> Any:
    """A picture of three colours, or of grey levels alone; CorpusError where it cannot be read."""
    try:
        from PIL import Image
    except ImportError:
        raise CorpusError("images need Pillow", where=where, do=INSTALL) from None
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as picture:
            return picture.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # of whatever kind the decoder that met the damage raises
        named = "" if isinstance(image, bytes) else f" {image}"
        raise CorpusError(
            f"the image{named} cannot be read ({error})",
            where=where,
            do="save it again as PNG or JPEG, or drop the row",
        ) from None
