"""Images with text on a tiny Qwen3-VL-MoE: the model's own inputs, no pads in the statistics, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from corpora import read_documents
from tiny_vision import save_image, vision_model, vision_processor

from moeq.errors import CorpusError
from moeq.models import corpus
from moeq.models.experts import find_expert_layers
from moeq.models.walk import walk
from moeq.stages.profile import count_routing

CPU = torch.device("cpu")
FIELDS = corpus.Fields(chat="auto", image="image")


@pytest.fixture(scope="module")
def processor() -> Any:
    return vision_processor()


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_model()


def read(path: Path, processor: Any, fields: corpus.Fields = FIELDS) -> list[corpus.Document]:
    return read_documents(corpus.open_sources(str(path), "calibration"), fields, processor.tokenizer)


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sequences(documents: list[corpus.Document], processor: Any, length: int = 64) -> corpus.Sequences:
    pool = corpus.Pool(documents, processor.tokenizer, length=length, packed=False)
    pool.encode_with(corpus.Encoder(processor, length))
    return pool.take(None)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two captions of images of two sizes, a text of its own, and a conversation about two images."""
    for number, size in enumerate([(40, 24), (24, 40), (16, 16)]):
        save_image(tmp_path / f"{number}.png", number, size)
    parts = [
        {"type": "text", "text": "Compare "},
        {"type": "image"},
        {"type": "text", "text": " and "},
        {"type": "image"},
    ]
    return write(tmp_path, [
        {"image": "0.png", "text": "a cat on a mat"},
        {"text": "words without an image"},
        {"image": "1.png", "text": "another"},
        {"image": ["0.png", "2.png"], "messages": [{"role": "user", "content": parts}]},
    ])  # fmt: skip


def test_the_model_is_given_what_its_processor_makes(mixed: Path, processor: Any, model: Any) -> None:
    """Counts of the walk equal the routers' choices in plain forwards on the processor's own output."""
    from PIL import Image

    found = sequences(read(mixed, processor), processor)
    batches = found.batches(4)
    assert [len(batch.input_ids) for batch in batches] == [1, 1, 1, 1]
    assert [sorted(batch.extra) for batch in batches].count([]) == 1
    assert all(bool(batch.mask.all()) for batch in batches if batch.extra), "no pads where there are images"
    texts = [
        ("<user><|vision_start|><|image_pad|><|vision_end|>a cat on a mat", ["0.png"]),
        ("<user><|vision_start|><|image_pad|><|vision_end|>another", ["1.png"]),
        ("<user>Compare <|vision_start|><|image_pad|><|vision_end|> and <|vision_start|><|image_pad|><|vision_end|>",
         ["0.png", "2.png"]),
    ]  # fmt: skip
    layers = find_expert_layers(model)
    assert [layer.num_experts for layer in layers] == [7, 7]
    long = torch.full((len(found),), 1000)
    counted = [count_routing(inputs, len(found), long)[0].sum(1) for inputs in walk(model, layers, batches, CPU)]
    with_images = [index for index in range(len(found)) if found.extra is not None and found.extra[index]]
    for index, (text, names) in zip(with_images, texts, strict=True):
        images = [Image.open(mixed.parent / name).convert("RGB") for name in names]
        inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        assert found.ids[index, : int(found.mask[index].sum())].tolist() == inputs["input_ids"][0].tolist()
        chosen: dict[str, torch.Tensor] = {}
        hooks = [
            model.get_submodule(layer.name).register_forward_pre_hook(
                lambda _, arguments, at=layer.name, to=chosen: to.__setitem__(at, arguments[1])
            )
            for layer in layers
        ]
        with torch.no_grad():
            model(**inputs, use_cache=False)
        for hook in hooks:
            hook.remove()
        for layer, mine in zip(layers, counted, strict=True):
            wanted = torch.bincount(chosen[layer.name].flatten(), minlength=7)
            assert mine[index].tolist() == wanted.tolist()
            assert wanted.sum() == 3 * inputs["input_ids"].shape[1], "image tokens are counted, too"


def test_the_pixels_are_part_of_the_digest(mixed: Path, processor: Any) -> None:
    first = read(mixed, processor)
    sources = corpus.open_sources(str(mixed), "calibration")
    digests = {sequences(first, processor).digest(), corpus.images_digest(sources, FIELDS)}
    save_image(mixed.parent / "1.png", 9, (24, 40))
    again = read(mixed, processor)
    digests |= {sequences(again, processor).digest(), corpus.images_digest(sources, FIELDS)}
    assert len(digests) == 4
    assert torch.equal(sequences(first, processor).ids, sequences(again, processor).ids)


def test_parquet_holds_images_as_the_hub_writes_them(mixed: Path, tmp_path: Path, processor: Any) -> None:
    data = (tmp_path / "0.png").read_bytes()
    rows = {"image": [{"bytes": data, "path": "cat.png"}], "text": ["a cat on a mat"]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    (inside,) = read(tmp_path / "rows.parquet", processor)
    one, other = sequences([inside], processor), sequences(read(mixed, processor)[:1], processor)
    assert torch.equal(one.ids, other.ids)
    assert one.extra is not None
    assert other.extra is not None
    assert torch.equal(one.extra[0]["pixel_values"], other.extra[0]["pixel_values"])


def test_text_is_cut_and_images_are_not(mixed: Path, tmp_path: Path, processor: Any, model: Any) -> None:
    path = write(tmp_path, [{"image": "0.png", "text": "word " * 100}])
    found = sequences(read(path, processor), processor, length=40)
    (batch,) = found.batches(1)
    assert batch.input_ids.shape == batch.extra["mm_token_type_ids"].shape == (1, 40)
    inputs = next(iter(walk(model, find_expert_layers(model), [batch], CPU)))
    assert len(inputs.hidden) == 40
    with pytest.raises(
        CorpusError, match=r"row 1: \d+ tokens with its image, sequences have 10; raise corpus.sequence_l"
    ):
        sequences(read(path, processor), processor, length=10)


def test_without_a_template_the_image_comes_before_the_text(mixed: Path) -> None:
    plain = vision_processor(None)
    found = sequences(read(mixed, plain)[:1], plain)
    tokens = plain.tokenizer.convert_ids_to_tokens(found.ids[0].tolist())
    assert tokens[0] == plain.tokenizer.bos_token
    assert tokens[1] == plain.image_token
    assert tokens[-1] == plain.tokenizer.eos_token
    with pytest.raises(CorpusError, match="row 4: a conversation, but the tokenizer has no chat template"):
        sequences(read(mixed, plain), plain)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "none.png", "text": "x"}, r"no such image: .*none\.png"),
        ({"image": "rows.jsonl", "text": "x"}, r"the image .*rows\.jsonl cannot be read"),
        ({"image": 5, "text": "x"}, r"an image of type int; .*set corpus.image_field: null"),
        ({"image": "0.png"}, "no text field 'text'"),
        ({"image": "0.png", "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]},
         "2 places for 1 images"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_read(mixed: Path, processor: Any, row: dict[str, Any], message: str) -> None:
    path = write(mixed.parent, [{"text": "fine"}, row])
    with pytest.raises(CorpusError, match=rf"rows\.jsonl, row 2: .*{message}"):
        sequences(read(path, processor), processor)


def test_images_can_be_left_out(tmp_path: Path, processor: Any) -> None:
    path = write(tmp_path, [{"image": "nowhere.png", "text": "only the text"}])
    (document,) = read(path, processor, corpus.Fields(image=None))
    assert (document.text, document.image) == ("only the text", None)
    assert sequences([document], processor).extra is None


def test_a_model_without_a_processor_and_one_that_needs_more(tiny_mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CorpusError, match=r"the model has no image processor; use a vision-language model, or set corpus.im"
    ):
        corpus.load_processor(tiny_mixtral)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(CorpusError, match="its processor cannot be loaded"):
        corpus.load_processor(tmp_path)


def test_a_processor_is_loaded_from_the_models_directory(mixed: Path, tmp_path: Path) -> None:
    """Llava's needs nothing but Pillow."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = vision_processor().tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    whole = LlavaProcessor(images, tokenizer, patch_size=4, vision_feature_select_strategy="full")
    whole.save_pretrained(tmp_path / "model")
    loaded = corpus.load_processor(tmp_path / "model")
    found = sequences(read(mixed, loaded)[:1], loaded)
    assert found.extra is not None
    assert found.extra[0]["pixel_values"].shape == (1, 3, 8, 8)
    assert int((found.ids == loaded.image_token_id).sum()) == 4
