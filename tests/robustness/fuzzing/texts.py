"""Targets: corpora, and images with their labels."""

from __future__ import annotations

import gzip
import io
import json
import random
from typing import Any, ClassVar

import pyarrow as pa
import torch
from robustness.fuzzing.mutations import parquet_bytes, table_bytes, text_bytes
from robustness.fuzzing.target import BytesTarget, JsonTarget, Place, Target, TensorsTarget

from moeq.artifacts.tensor_files import write_tensors
from moeq.evaluation.task_files import files_of
from moeq.models.corpus.documents import of_local
from moeq.models.corpus.fields import Fields
from moeq.models.corpus.images import image_of, opened
from moeq.models.corpus.labelled import PREPROCESSOR, ImageTask, open_image_sets
from moeq.models.corpus.places import _cut
from moeq.models.corpus.rows import held_bytes, rows
from moeq.models.corpus.sources import LocalFile
from moeq.models.corpus.streams import size_up_to

LINES = b"""{"text": "Es war einmal", "domain": "tales"}
{"messages": [{"role": "user", "content": "Who?"}, {"from": "gpt", "value": "I"}]}
{"prompt": "Why?", "response": "So."}
{"text": "", "image": ["a.png"]}
"""
TEXT = "Es war einmal\nein König,\r\nder hatte.\n".encode()
TASK = b"""task: mine
include: common.yaml
doc_to_text: !function code.text
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl, more: [a.txt, none.jsonl]}}
"""
FIELDS = Fields(chat="auto", image="image")


class Speaker:
    """A tokenizer whose chat template puts turns one after another."""

    chat_template, bos_token, eos_token = "x", None, None

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool) -> str:
        return "".join(str(turn.get("content")) for turn in messages)


class TaskFiles(BytesTarget):
    """An lm-eval task of one's own: the files that it is made of are there."""

    name, data = "task_files", TASK
    per_byte, spare, refuses = 400, 8 << 20, False  # a name may stand for many files

    def prepare(self, place: Place) -> None:
        self.file("rows.jsonl", LINES)

    def read(self, data: bytes) -> None:
        self.file("mine.yaml", data)
        for path in files_of(self.folder).values():
            assert path.is_file()


class _Corpus(BytesTarget):
    """A file of text: documents are text that can be written."""

    filename: ClassVar[str]
    per_byte, spare = 12, 3 << 20  # of buffers of a MiB; a row is held as it is parsed

    def prepare(self, place: Place) -> None:
        self.file("a.png", b"")

    def read(self, data: bytes) -> None:
        path = self.file(self.filename, data)
        size_up_to(path, 1 << 20)
        source = LocalFile(path=path, name=str(path))
        for unread in of_local(source, FIELDS, Speaker()):
            document = unread.made()
            assert isinstance(document.text, str)
            document.text.encode()
            document.domain.encode()


class Text(_Corpus):
    name, filename, data = "text", "corpus.txt", TEXT


class PartOfText(BytesTarget):
    """Some bytes of a plain text, as whole characters."""

    name, data = "part_of_text", TEXT
    per_byte, spare = 8, 3 << 20  # of as many bytes as are asked for

    def read(self, data: bytes) -> None:
        path = self.file("part.txt", data)
        for start, size in ((0, 7), (5, 20), (16, 3), (3, 1 << 20)):
            text = _cut(path, start, size)
            assert "\r" not in text
            assert len(text.encode()) <= size


class Lines(_Corpus):
    name, filename, data = "jsonl", "corpus.jsonl", LINES

    def mutated(self, chance: random.Random) -> bytes:
        rows = LINES.decode().splitlines()
        at = chance.randrange(len(rows))
        whole = {str(number): json.loads(row) for number, row in enumerate(rows)}
        if chance.random() < 0.4:
            return text_bytes(self.data, chance)
        from robustness.fuzzing.mutations import mutate_json

        value: Any = whole[str(at)]
        for _ in range(chance.randrange(1, 4)):
            value = mutate_json(value, chance) if isinstance(value, (dict, list)) else value
        rows[at] = json.dumps(value)
        return "\n".join(rows).encode("utf-8", "surrogatepass")


class Compressed(_Corpus):
    """Decompressed on the way; the bytes of the file, or of what it holds, are others."""

    name, filename, data = "compressed", "corpus.jsonl.gz", gzip.compress(LINES, mtime=0)
    per_byte = 0  # of pyarrow

    def mutated(self, chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return text_bytes(self.data, chance)
        return gzip.compress(text_bytes(LINES, chance), compresslevel=1, mtime=0)


class JsonList(_Corpus):
    """A list of rows, as datasets on the hub have it."""

    name, filename, data = "json_list", "corpus.json", b'[{"text": "a"}, {"text": "b", "domain": "x"}]'

    def read(self, data: bytes) -> None:
        for number, _ in rows(self.file(self.filename, data)):
            assert number >= 1


class CorpusTable(Target):
    """Parquet with text and domains."""

    name, per_byte = "corpus_parquet", 0  # of pyarrow

    def prepare(self, place: Place) -> None:
        self.table = pa.table({"text": ["Es war einmal", "b", None], "domain": ["x", "y", "z"], "n": [1, 2, 3]})

    def valid(self) -> bytes:
        return table_bytes(self.table.slice(0, 2))

    def mutated(self, chance: random.Random) -> bytes:
        return parquet_bytes(self.table, chance)

    def read(self, data: bytes) -> None:
        path = self.file("corpus.parquet", data)
        assert held_bytes(path) >= 0
        for unread in of_local(LocalFile(path=path, name=str(path)), FIELDS, Speaker()):
            unread.made().text.encode()


def image_task(**changed: Any) -> ImageTask:
    """One grey channel, 4 x 4, 3 labels."""
    settings = {"shape": (1, 4, 4), "positions": 4, "labels": 3, "scale": 1 / 255}
    return ImageTask(**settings | {"mean": torch.zeros(1, 1, 1), "deviation": torch.ones(1, 1, 1)} | changed)


class Images(TensorsTarget):
    """Images with labels that the model has, in parts that do not overlap."""

    name, per_byte = "labelled_images", 0  # of torch

    def prepare(self, place: Place) -> None:
        tensors = {
            "images": torch.arange(64, dtype=torch.uint8).reshape(4, 4, 4), "labels": torch.tensor([0, 1, 2, 0]),
            "train": torch.tensor([0, 1]), "test": torch.tensor([2, 3]),
        }  # fmt: skip
        write_tensors(self.folder / "valid.safetensors", tensors)
        self.data = (self.folder / "valid.safetensors").read_bytes()

    def read(self, data: bytes) -> None:
        task = image_task()
        (found,) = open_image_sets(str(self.file("images.safetensors", data)), task)
        assert found.images.shape[1:] == task.shape
        assert found.labels.shape == (len(found.images),)
        assert not len(found.labels) or bool(((found.labels >= 0) & (found.labels < task.labels)).all())
        for part in ("train", "test"):
            task.pixels(found.images[found.part(part)])


class Preprocessor(JsonTarget):
    """preprocessor_config.json: pixels stay finite numbers."""

    name, per_byte = "preprocessor", 0  # of torch
    value: ClassVar[Any] = {
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5], "image_std": [0.25],
    }  # fmt: skip

    def prepare(self, place: Place) -> None:
        from integer_models import made

        self.model = made("vit")
        config = self.model.config
        self.images = torch.full((1, config.num_channels, config.image_size, config.image_size), 7, dtype=torch.uint8)

    def read(self, data: bytes) -> None:
        self.file(PREPROCESSOR, data)
        task = ImageTask.of(self.model, self.folder)
        pixels = task.pixels(self.images)
        assert pixels.shape == self.images.shape
        assert bool(torch.isfinite(pixels).all())


class Picture(BytesTarget):
    """An image file within a row: a picture of three colours."""

    name, per_byte = "picture", 0  # of Pillow

    def prepare(self, place: Place) -> None:
        from PIL import Image

        stream = io.BytesIO()
        Image.new("RGB", (8, 8), (1, 2, 3)).save(stream, "PNG")
        self.data = stream.getvalue()

    def read(self, data: bytes) -> None:
        image = image_of({"bytes": data, "path": None}, "row 1", self.folder)
        assert opened(image, "row 1").mode == "RGB"
