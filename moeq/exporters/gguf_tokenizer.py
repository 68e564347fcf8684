"""A tokenizer as llama.cpp wants it: the tokens, what each is, the merges or scores, and where the text is cut first.

Read from tokenizer.json. Two kinds are known: byte-level BPE (`gpt2`), whose pre-tokenizer llama.cpp knows by a name,
and BPE over characters with bytes to fall back on (`llama`, which merges what has the highest score: here that of the
earliest merge). A checkpoint without a tokenizer is written without one (`none`): llama.cpp then takes numbers only.
"""

from __future__ import annotations

import re
from typing import Any

from moeq.artifacts.reading import read_json_file
from moeq.errors import FormatError
from moeq.exporters.gguf_parameters import CASED, Value
from moeq.models.source import VOCABULARIES, ModelSource

FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
WITHOUT = "convert a copy of the checkpoint without its tokenizer files, and give llama.cpp numbers"
LAST_SCORE = -1e9  # of tokens that no merge makes

_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CASED_WORDS = (  # llama.cpp's gpt-4o knows the case of a to z alone, and no marks
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
DIGITS = "digits"  # not a pattern: each is cut off, and the rest as of bytes alone
NAMES = {  # the patterns that a text is split by before its bytes, and what llama.cpp calls them
    (): "gpt-2",
    (_CONTRACTED + r"\p{N}" + _REST,): "qwen2",
    (_CONTRACTED + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_CASED_WORDS,): CASED,
    (_MARKED,): "qwen35",
    (_EXAONE,): "exaone-moe",
    _DEEPSEEK: "deepseek-v3",
    (DIGITS,): "refact",
}
WHOLE, MERGED = "llama-bpe", "dbrx"  # of one pattern: words that are tokens are taken whole, and only by merges
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer(source: ModelSource, vocabulary: int) -> dict[str, Value]:
    """Keys and values below `tokenizer.`; vocabulary: the rows of the embeddings, which tokens are filled up to.

    Raises FormatError for a tokenizer that llama.cpp does not have, or that moeq does not know how to write.
    """
    there = sorted(name for name in VOCABULARIES if (source.path / name).is_file())
    if not there:
        return {"ggml.model": "none"}
    if FILE not in there:
        do = f"save it with AutoTokenizer.from_pretrained(...).save_pretrained(...), or {WITHOUT}"
        raise _refused(source, f"{there[0]} without {FILE}", do)
    data = _read(source, FILE)
    settings = _read(source, SETTINGS) if (source.path / SETTINGS).is_file() else {}
    try:
        return _parsed(source, data, settings, vocabulary)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _refused(source, f"{FILE} is not one of a tokenizer ({error!r})", "download it again") from None


def _parsed(source: ModelSource, data: dict[str, Any], settings: dict[str, Any], vocabulary: int) -> dict[str, Value]:
    """`tokenizer` of what the files hold."""
    model = data.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise _refused(source, f"a tokenizer of type {(model or {}).get('type')}, not BPE")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise _refused(source, f"BPE with {key} {model[key]!r}")
    added = {int(token["id"]): token for token in data.get("added_tokens") or ()}
    tokens = {int(number): text for text, number in model["vocab"].items()} | {
        number: token["content"] for number, token in added.items()
    }
    if max(tokens, default=-1) >= vocabulary:
        raise _refused(source, f"{max(tokens) + 1} tokens, the embeddings have {vocabulary}")
    if not all(isinstance(text, str) for text in tokens.values()) or min(tokens, default=0) < 0:
        raise ValueError("a token that is no text, or has no number")
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
    if not all(len(pair) == 2 and isinstance(pair, list) for pair in merges):
        raise ValueError("a merge that is not of two texts")
    values: dict[str, Value] = {
        "ggml.tokens": [tokens.get(number, f"[PAD{number}]") for number in range(vocabulary)],
        "ggml.token_type": [_kind(number, tokens, added, model) for number in range(vocabulary)],
    }
    if model.get("byte_fallback"):
        values |= _pieces(source, data, values["ggml.tokens"], merges)
    else:
        values |= _bytes(source, data, merges)
    values |= _special(source, settings, data, tokens) | _template(source, settings)
    if values["ggml.model"] == LINES and not values["ggml.add_bos_token"]:  # llama.cpp does not ask
        raise _refused(source, "a tokenizer like Gemma 4's that puts no token before a text")
    return values


def _read(source: ModelSource, name: str) -> dict[str, Any]:
    try:
        data = read_json_file(source.path / name)
    except (OSError, ValueError) as error:
        raise _refused(source, f"{name} cannot be read ({error})", "download it again") from None
    if not isinstance(data, dict):
        raise _refused(source, f"{name} is no object", "download it again")
    return data


def _refused(source: ModelSource, what: str, do: str = WITHOUT) -> FormatError:
    return FormatError(what, where=f"for llama.cpp: {source.path}", do=do)


def _kind(number: int, tokens: dict[int, str], added: dict[int, Any], model: dict[str, Any]) -> int:
    text = tokens.get(number)
    if text is None:
        return UNUSED
    if model.get("unk_token") == text:
        return UNKNOWN
    if number in added:
        return CONTROL if added[number].get("special") and text not in SHOWN else USER_DEFINED
    return BYTE if model.get("byte_fallback") and _BYTE.fullmatch(text) else NORMAL


def _bytes(source: ModelSource, data: dict[str, Any], merges: list[list[str]]) -> dict[str, Value]:
    """Byte-level BPE."""
    for step in _steps(data.get("normalizer"), "normalizers"):
        if step.get("type") != "NFC":  # which llama.cpp leaves out: few texts are written otherwise
            raise _refused(source, f"text normalized by {step.get('type')}")
    steps = _steps(data.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise _refused(source, f"a pre-tokenizer {[step.get('type') for step in steps]} that does not end in bytes")
    *splits, last = steps
    patterns = tuple(_pattern(step) for step in splits)
    known = {tuple(map(_plain, own)): name for own, name in NAMES.items()}
    whole = not set(patterns) - {DIGITS}
    name = known.get(patterns) if bool(last.get("use_regex", True)) == whole else None
    if name is None:
        raise _refused(source, "a pre-tokenizer that moeq knows no name of llama.cpp's for")
    model = data["model"]
    if bool(model.get("ignore_merges")) != (name == WHOLE) and _has_unmade(model, merges):
        if name != WHOLE:
            raise _refused(source, f"tokens that no merges make (ignore_merges), which llama.cpp has of {WHOLE} alone")
        name = MERGED
    return {"ggml.model": "gpt2", "ggml.pre": name, "ggml.merges": [" ".join(pair) for pair in merges]}


def _pattern(step: dict[str, Any]) -> str:
    """What a step cuts out; nothing for one of another kind."""
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return DIGITS
    alone = step.get("type") == "Split" and step.get("behavior") == "Isolated"
    return _plain((step.get("pattern") or {}).get("Regex", "")) if alone else ""


def _has_unmade(model: dict[str, Any], merges: list[list[str]]) -> bool:
    """Whether a word can be a token that its merges do not make."""
    from tokenizers import models, pre_tokenizers

    vocabulary, alphabet = model["vocab"], set(pre_tokenizers.ByteLevel.alphabet())
    try:
        merged = models.BPE(vocab=vocabulary, merges=[(first, second) for first, second in merges])
    except Exception as error:  # the library raises no other
        raise ValueError(str(error)) from None
    return any(len(merged.tokenize(token)) != 1 for token in vocabulary if token and alphabet.issuperset(token))


def _plain(pattern: str) -> str:
    """A pattern with its line ends as themselves, which are written either way."""
    return pattern.replace(r"\r", "\r").replace(r"\n", "\n")


LINES = "gemma4"
SHOWN = frozenset(  # of Gemma 4's special tokens those that a chat's parser is to see
    ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
)
SPACE = "\u2581"  # as pieces have it


def _pieces(source: ModelSource, data: dict[str, Any], tokens: Any, merges: list[list[str]]) -> dict[str, Value]:
    """BPE over characters, bytes where there are none; spaces are U+2581."""
    steps = [*_steps(data.get("normalizer"), "normalizers"), *_steps(data.get("pre_tokenizer"), "pretokenizers")]
    cut = [step for step in steps if step.get("type") == "Split" and step.get("pattern") == {"String": " "}]
    steps = [step for step in steps if step not in cut]  # no space is left to cut a text at
    known = {"Prepend", "Replace", "Metaspace"}
    if not steps or any(step.get("type") not in known for step in steps):
        raise _refused(source, f"text prepared by {[step.get('type') for step in steps]}")
    for step in steps:
        taken = (step.get("pattern") or {}).get("String", step.get("pattern"))
        if step["type"] == "Replace" and (taken, step.get("content")) != (" ", SPACE):
            raise _refused(source, f"text in which {taken!r} becomes {step.get('content')!r}")
        if step["type"] != "Replace" and step.get("prepend", step.get("replacement", SPACE)) != SPACE:
            raise _refused(source, f"words that begin with {step.get('prepend', step.get('replacement'))!r}")
    prefix = any(
        step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    if cut and not prefix:
        return _lines(source, tokens, merges)
    ranks = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(merges)))}
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.scores": [ranks.get(token, LAST_SCORE) for token in tokens],
        "ggml.add_space_prefix": prefix,
    }


def _lines(source: ModelSource, tokens: Any, merges: list[list[str]]) -> dict[str, Value]:
    """As Gemma 4 has it: merges by their ranks, within a line or a run of line ends."""
    for pair in merges:
        if 0 < "".join(pair).count("\n") < len("".join(pair)):
            raise _refused(source, f"a merge {pair} of line ends with others")
    return {
        "ggml.model": LINES,
        "ggml.scores": [0.0] * len(tokens),
        "ggml.merges": [" ".join(pair) for pair in merges],
        "ggml.add_space_prefix": False,
    }


def _steps(part: Any, below: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer: itself, or those of a sequence."""
    if part is None:
        return []
    return [*part.get(below, ())] if part.get("type") == "Sequence" else [part]


def _special(
    source: ModelSource, settings: dict[str, Any], data: dict[str, Any], tokens: dict[int, str]
) -> dict[str, Value]:
    """Numbers of the special tokens, and whether the tokenizer adds them to a text."""
    numbers = {text: number for number, text in tokens.items()}
    values: dict[str, Value] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        number = numbers.get(text) if isinstance(text, str) else source.config.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and number in tokens:
            values[f"ggml.{key}_token_id"] = number
    steps = _steps(data.get("post_processor"), "processors")
    around = next((step.get("single") or [] for step in steps if step.get("type") == "TemplateProcessing"), [])
    values["ggml.add_bos_token"] = bool(around) and "SpecialToken" in around[0]
    values["ggml.add_eos_token"] = bool(around) and "SpecialToken" in around[-1]
    return values


def _template(source: ModelSource, settings: dict[str, Any]) -> dict[str, Value]:
    file, stated = source.path / TEMPLATE, settings.get("chat_template")
    if file.is_file():
        return {"chat_template": file.read_text("utf-8")}
    return {"chat_template": stated} if isinstance(stated, str) else {}
