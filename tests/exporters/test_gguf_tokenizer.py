"""Tokenizers in GGUF: llama.cpp cuts a text into the tokens that transformers does; others are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers
import pytest
from made_sources import MadeSource, save_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from moeq.errors import FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf_parameters import CASED
from moeq.exporters.gguf_tokenizer import DIGITS, NAMES, tokenizer
from moeq.models.source import open_source

TEXTS = (
    "Hello world! The 3 foxes don't jump 12345 times: naïve café, 東京.",
    "  leading and  double   spaces\n\n\ttabs and\r\nlines ",
    "x = foo_bar(1234, 'abc'); // COMMENT's END I'LL",
    "emoji 🦊 and ünïcödé — dashes…",
    "<bos> a special token, and plain <eos>",
)
SCRIPTS = (  # capitals, marks, spaces and numbers of others than English
    "ÉCOLE ÜBER Straße ГОРОД Город HTTPServer iPhone camelCase",
    "नमस्ते हिन्दी ကမ္ဘာ e\u0301cole",
    "a  b\n \n c//d\r\n\r\n/e",
    "I'VE you'Re l'ÉTÉ",
    "北京 2024年 ﷺ ﬀ ǅ ª º Ⅷ ½",
)
SPECIAL = ["<unk>", "<bos>", "<eos>", "<pad>"]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 3, "don't won't can't 2024 1999 100"] * 5
SIZE = 600


def byte_level(splits: tuple[str, ...], corpus: Sequence[str] = CORPUS, size: int = SIZE) -> Tokenizer:
    """Byte-level BPE whose text is split by patterns first."""
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    steps = [digits if cut == DIGITS else pre_tokenizers.Split(Regex(cut), "isolated") for cut in splits]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits in ((), (DIGITS,)))
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if splits else last
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    return made


def of_characters(*, prepend: bool = True) -> Tokenizer:
    """BPE over characters as converted sentencepiece models are: bytes to fall back on, U+2581 for spaces."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *steps] if prepend else steps)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = [f"<0x{number:02X}>" for number in range(256)]
    # cut before spaces while training only, as sentencepiece does
    made.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    made.train_from_iterator(CORPUS[5:], trainers.BpeTrainer(vocab_size=SIZE, special_tokens=[*SPECIAL, *pieces]))
    made.pre_tokenizer = None
    data = json.loads(made.to_str())
    data["added_tokens"] = [one for one in data["added_tokens"] if one["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(data))


def of_lines() -> Tokenizer:
    """As Gemma 4's: merges of characters by their ranks, of which several make one token; runs of line ends."""
    made = of_characters(prepend=False)
    data = json.loads(made.to_str())
    vocabulary = data["model"]["vocab"]
    merges = [pair for pair in data["model"]["merges"] if "\n" not in "".join(pair)]
    for number in range(2, 5):
        vocabulary.setdefault("\n" * number, len(vocabulary))
        merges.append(["\n" * (number - 1), "\n"])
    for whole in [token for token in vocabulary if len(token) == 4 and "\n" not in token and token not in SPECIAL]:
        merges += [[whole[:cut], whole[cut:]] for cut in (1, 2, 3) if {whole[:cut], whole[cut:]} <= vocabulary.keys()]
    data["model"]["merges"] = [list(pair) for pair in dict.fromkeys(map(tuple, merges))]
    data["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
    }  # fmt: skip
    found = Tokenizer.from_str(json.dumps(data))
    found.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return found


KINDS: dict[str, Any] = {name: lambda splits=splits: byte_level(splits) for splits, name in NAMES.items()}
KINDS |= {"llama": of_characters, "llama without a first space": lambda: of_characters(prepend=False)}
KINDS |= {"gemma4": of_lines}


def with_tokenizer(folder: Path, made: Tokenizer | None, **settings: Any) -> Path:
    """A tiny model with a tokenizer, or without."""
    save_model(folder, "mixtral", sliding_window=None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    if made is not None:
        made.save(str(folder / "tokenizer.json"))
        tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        stated = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(stated), "utf-8")
    return folder


def exported(model: Path, out: Path) -> Path:
    peers.module("gguf")
    write("llama.cpp", MadeSource(model, lambda layer, expert, projection: 4), out, WriteOptions())
    return out


def by_llama(out: Path, text: str, folder: Path) -> Any:
    job = {"model": str(out / "model.gguf"), "text": text, "tokens": 0}
    (folder / "job.json").write_text(json.dumps(job))
    return json.loads(peers.run("llama-cpp-python", Path(__file__).parent / "peer_llama.py", folder / "job.json"))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("template", [False, True])
def test_llama_cpp_cuts_texts_alike(kind: str, template: bool, tmp_path: Path) -> None:
    peers.interpreter("llama-cpp-python")
    made = KINDS[kind]()
    if template:
        made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    out = exported(with_tokenizer(tmp_path / "model", made), tmp_path / "out")
    for text in (*TEXTS, "a\n\nline\n\n\n\n\n\nand  \n one"):
        found, wanted = by_llama(out, text, tmp_path), made.encode(text).ids
        assert found["ids"] == wanted, (text, made.encode(text).tokens)


@pytest.mark.parametrize("splits", [own for own, name in NAMES.items() if name != CASED], ids=str)
def test_llama_cpp_cuts_other_scripts_alike(splits: tuple[str, ...], tmp_path: Path) -> None:
    """With tokens of whole words, so that every cut is seen."""
    peers.interpreter("llama-cpp-python")
    made = byte_level(splits, SCRIPTS * 8, 1200)
    out = exported(with_tokenizer(tmp_path / "model", made), tmp_path / "out")
    for text in SCRIPTS:
        assert by_llama(out, text, tmp_path)["ids"] == made.encode(text).ids, text


def test_what_llama_cpp_cuts_otherwise_is_told(tmp_path: Path) -> None:
    """Patterns that know the case of every script: llama.cpp's gpt-4o does not. Other texts are cut alike."""
    (splits,) = [own for own, name in NAMES.items() if name == CASED]
    made = byte_level(splits, SCRIPTS * 8, 1200)
    out = exported(with_tokenizer(tmp_path / "model", made), tmp_path / "out")
    assert "cuts words with capitals beyond A to Z, or with marks" in (out / "README.md").read_text("utf-8")
    peers.interpreter("llama-cpp-python")
    wrong = [text for text in SCRIPTS if by_llama(out, text, tmp_path)["ids"] != made.encode(text).ids]
    assert wrong == [*SCRIPTS[:2]]


def with_unmade_tokens(splits: tuple[str, ...], *, whole: bool) -> Tokenizer:
    """Byte-level BPE without the last of its merges; whole: words that are tokens are taken whole all the same."""
    data = json.loads(byte_level(splits).to_str())
    data["model"] |= {"merges": data["model"]["merges"][:150], "ignore_merges": whole}
    return Tokenizer.from_str(json.dumps(data))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", list(NAMES.values()))
def test_words_that_are_tokens_are_cut_alike_or_refused(kind: str, whole: bool, tmp_path: Path) -> None:
    (splits,) = (splits for splits, name in NAMES.items() if name == kind)
    made = with_unmade_tokens(splits, whole=whole)
    model = with_tokenizer(tmp_path / "model", made)
    if whole and kind != "llama-bpe":
        with pytest.raises(FormatError, match="tokens that no merges make"):
            tokenizer(open_source(str(model)), 2048)
        return
    peers.interpreter("llama-cpp-python")
    other = with_unmade_tokens(splits, whole=not whole)
    assert any(made.encode(text).ids != other.encode(text).ids for text in TEXTS)
    out = exported(model, tmp_path / "out")
    for text in TEXTS:
        assert by_llama(out, text, tmp_path)["ids"] == made.encode(text).ids, text


def test_what_is_written_of_a_tokenizer(tmp_path: Path) -> None:
    made = byte_level(())
    made.add_tokens([AddedToken("<|tool|>", special=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    made.normalizer = normalizers.Sequence([])
    model = with_tokenizer(tmp_path / "model", made, chat_template="{{ messages }}")
    found = tokenizer(open_source(str(model)), 2048)
    tokens, kinds = found["ggml.tokens"], found["ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    assert (len(tokens), len(kinds)) == (2048, 2048)
    size = made.get_vocab_size()
    assert [tokens[1], tokens[size - 1], tokens[size]] == ["<bos>", "<|tool|>", f"[PAD{size}]"]
    assert [kinds[1], kinds[10], kinds[size - 1], kinds[size]] == [3, 1, 4, 5]
    assert (found["ggml.model"], found["ggml.pre"]) == ("gpt2", "gpt-2")
    assert (found["ggml.bos_token_id"], found["ggml.eos_token_id"], found["ggml.padding_token_id"]) == (1, 2, 3)
    assert (found["ggml.add_bos_token"], found["ggml.add_eos_token"]) == (True, True)
    assert found["chat_template"] == "{{ messages }}"
    (model / "chat_template.jinja").write_text("{{ other }}")
    assert tokenizer(open_source(str(model)), 2048)["chat_template"] == "{{ other }}"


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    gguf = peers.module("gguf")
    out = exported(with_tokenizer(tmp_path / "model", None), tmp_path / "out")
    fields = gguf.GGUFReader(out / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "none"
    assert fields["llama.vocab_size"].contents() == 2048
    assert "tokenizer.ggml.tokens" not in fields


def changed(part: str, value: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        data[part] = value

    return change


REFUSED: dict[str, tuple[Any, str]] = {
    "words": (changed("model", {"type": "WordLevel", "vocab": {}}), "of type WordLevel, not BPE"),
    "normalizer": (changed("normalizer", {"type": "Lowercase"}), "normalized by Lowercase"),
    "pattern": (
        changed("pre_tokenizer", {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}),
        "no name of llama.cpp's",
    ),
    "no bytes": (changed("pre_tokenizer", {"type": "Whitespace"}), "does not end in bytes"),
    "first space": (
        changed("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        "does not end in bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_other_tokenizers_are_refused(case: str, tmp_path: Path) -> None:
    change, why = REFUSED[case]
    model = with_tokenizer(tmp_path / "model", byte_level(()))
    data = json.loads((model / "tokenizer.json").read_text("utf-8"))
    change(data)
    (model / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    with pytest.raises(FormatError, match=why) as error:
        tokenizer(open_source(str(model)), 2048)
    assert "without its tokenizer files" in str(error.value)


def test_tokenizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made = byte_level(())
    model, size = with_tokenizer(tmp_path / "model", made), made.get_vocab_size()
    assert len(tokenizer(open_source(str(model)), size)["ggml.tokens"]) == size  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=f"{size} tokens, the embeddings have {size - 1}"):
        tokenizer(open_source(str(model)), size - 1)
    whole = (model / "tokenizer.json").read_text("utf-8")
    for part, value in (("added_tokens", [{}]), ("pre_tokenizer", 3), ("post_processor", {"type": "TemplateProcessing",
                        "single": 1})):  # fmt: skip
        (model / "tokenizer.json").write_text(json.dumps(json.loads(whole) | {part: value}), "utf-8")
        with pytest.raises(FormatError, match="is not one of a tokenizer"):
            tokenizer(open_source(str(model)), 2048)
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    with pytest.raises(FormatError, match=r"tokenizer\.model without tokenizer\.json; save it with"):
        tokenizer(open_source(str(model)), 2048)
    (model / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(FormatError, match="cannot be read"):
        tokenizer(open_source(str(model)), 2048)


@pytest.mark.parametrize("part", ["replace", "prepend", "suffix"])
def test_rules_of_pieces_that_llama_cpp_does_not_have_are_refused(part: str, tmp_path: Path) -> None:
    data = json.loads(of_characters().to_str())
    prepend, replace = data["normalizer"]["normalizers"]
    if part == "replace":
        data["normalizer"]["normalizers"] = [{**replace, "pattern": {"String": "a"}, "content": "b"}, prepend, replace]
    elif part == "prepend":
        prepend["prepend"] = "_"
    else:
        data["model"]["end_of_word_suffix"] = "</w>"
    folder = with_tokenizer(tmp_path / "model", None)
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), "utf-8")
    with pytest.raises(
        FormatError, match={"replace": "'a' becomes 'b'", "prepend": "begin with '_'"}.get(part, "</w>")
    ):
        tokenizer(open_source(str(folder)), SIZE)


def test_what_gemma_s_tokenizer_does_otherwise_in_llama_cpp_is_refused(tmp_path: Path) -> None:
    """It always puts a token before a text, and cuts it at line ends, which no merge may cross."""
    made = json.loads(of_lines().to_str())
    for name, change, why in (
        ("bare", {"post_processor": None}, "puts no token before a text"),
        (
            "across",
            {"model": made["model"] | {"merges": [*made["model"]["merges"], ["a", "\n"]]}},
            "a merge .* of line",
        ),
    ):
        if name == "across":
            change["model"]["vocab"] = change["model"]["vocab"] | {"a\n": len(made["model"]["vocab"])}
        source = open_source(str(with_tokenizer(tmp_path / name, Tokenizer.from_str(json.dumps(made | change)))))
        with pytest.raises(FormatError, match=why):
            tokenizer(source, 2048)
