"""Rows to documents: text, conversations through the tokenizer's chat template, images with their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import digest_of
from moeq.errors import CorpusError
from moeq.models.corpus.chat import conversation, rendered
from moeq.models.corpus.images import ImageRow, image_row
from moeq.models.corpus.rows import kind_of, read_text, rows, stem_of
from moeq.models.corpus.sources import HubDataset, LocalFile, Source

SHUFFLED_AT_ONCE = 4096  # rows of a hub dataset


@dataclass(frozen=True, kw_only=True)
class Document:
    """Text and its domain; rendered: the chat template has set its special tokens; image: shown with it."""

    text: str
    domain: str
    rendered: bool = False
    image: ImageRow | None = None


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Which fields of a row hold what, and whether rows are conversations."""

    text: str = "text"
    messages: str = "messages"
    prompt: str = "prompt"
    response: str = "response"
    image: str | None = None
    chat: bool | Literal["auto"] = False


@dataclass(frozen=True, kw_only=True)
class Need:
    """How much of a hub dataset is read: `sequences` of `length` tokens, packed or one a document."""

    sequences: int
    length: int
    packed: bool = True


def read_documents(
    sources: Sequence[Source], fields: Fields, tokenizer: Any, *, need: Need | None = None, seed: int | None = None
) -> list[Document]:
    """The documents of the sources: of files all, of a hub dataset as many as `need` takes.

    seed: draw documents in an order that it decides, instead of that of the files. Raises CorpusError naming file and
    row for what cannot be read.
    """
    found: list[Document] = []
    for source in sources:
        if isinstance(source, LocalFile):
            mine = list(_of_file(source.path, str(source.path), None, fields, tokenizer))
            if seed is not None:
                Random(seed).shuffle(mine)
            found += mine
        else:
            found += _enough(_of_dataset(source, fields, tokenizer, seed), source, tokenizer, need)
    return found


def images_digest(documents: Sequence[Document]) -> str:
    """Digest of the image files that documents name; images inside Parquet belong to the digest of their source."""
    images = [image for document in documents if document.image is not None for image in document.image.images]
    return digest_of([digest_of_file(image) for image in images if isinstance(image, Path)])


def _of_dataset(source: HubDataset, fields: Fields, tokenizer: Any, seed: int | None) -> Iterator[Document]:
    for where, path in source.paths(seed):
        documents = _of_file(path, where, source.domain, fields, tokenizer)
        yield from documents if seed is None else _shuffled(documents, seed)


def _shuffled(documents: Iterator[Document], seed: int) -> Iterator[Document]:
    """Blocks of documents, each in an order of its own: a file need not be read to its end."""
    random = Random(seed)
    block: list[Document] = []
    for document in documents:
        block.append(document)
        if len(block) == SHUFFLED_AT_ONCE:
            random.shuffle(block)
            yield from block
            block = []
    random.shuffle(block)
    yield from block


def _enough(documents: Iterable[Document], source: HubDataset, tokenizer: Any, need: Need | None) -> list[Document]:
    """Documents from the front until there are as many sequences in them as are needed."""
    if need is None:
        raise CorpusError("a hub dataset may have no end", where=source.name, do="say how many sequences are wanted")
    found: list[Document] = []
    tokens = whole = 0
    for document in documents:
        found.append(document)
        if document.image is not None:
            whole += 1
        else:
            ids = encode([document], tokenizer)[0]
            tokens += len(ids)
            whole += not need.packed and len(ids) >= 2
        if whole + (tokens // need.length if need.packed else 0) >= need.sequences:
            break
    return found


def encode(documents: Sequence[Document], tokenizer: Any) -> list[list[int]]:
    """Token ids of documents, between bos and eos where the tokenizer has them and no template has set them."""
    if not documents:
        return []
    texts = [document.text for document in documents]
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [ids if document.rendered else [*begin, *ids, *end] for document, ids in zip(documents, found, strict=True)]


def _of_file(path: Path, name: str, domain: str | None, fields: Fields, tokenizer: Any) -> Iterator[Document]:
    """Documents of one file that are not blank; domain None: as the rows say, or else the file's name."""
    own = stem_of(path.name) if domain is None else domain
    if kind_of(path.name) == ".txt":
        text = read_text(path)
        if text.strip():
            yield Document(text=text, domain=own)
        return
    folder = path.parent if domain is None else None
    for number, row in rows(path):
        document = _document(row, f"{name}, row {number}", fields, tokenizer, folder)
        if document.text.strip() or document.image is not None:
            named = str(row.get("domain", own)) if domain is None else own
            yield replace(document, domain=named)


def _document(row: Any, where: str, fields: Fields, tokenizer: Any, folder: Path | None) -> Document:
    """One row's document, without its domain. CorpusError when it holds nothing that the fields name."""
    row = row if isinstance(row, dict) else {}
    text = row.get(fields.text)
    text = text if isinstance(text, str) and fields.chat is not True else None
    messages = (
        None
        if text is not None or fields.chat is False
        else conversation(row, fields.messages, (fields.prompt, fields.response), where)
    )
    if text is None and messages is None:
        raise _nothing(row, fields, where)
    pictures = row.get(fields.image) if fields.image is not None else None
    if pictures is not None and pictures != []:
        image = image_row(pictures, text, messages, where=where, folder=folder, plain=fields.chat is False)
        return Document(text=text or "", domain="", image=image)
    if messages is None:
        return Document(text=text or "", domain="")
    render = lambda: tokenizer.apply_chat_template(messages, tokenize=False)  # noqa: E731
    return Document(text=rendered(tokenizer, render, where), domain="", rendered=True)


def _nothing(row: dict[str, Any], fields: Fields, where: str) -> CorpusError:
    keys = ", ".join(row) or "no fields"
    chat = f"no conversation in {fields.messages!r}, no {fields.prompt!r} with {fields.response!r}"
    if fields.chat is True:
        return CorpusError(f"{chat} (there are: {keys})", where=where, do="set messages_field, or chat_template: auto")
    more = f", {chat}" if fields.chat == "auto" else ""
    return CorpusError(f"no text field {fields.text!r}{more} (there are: {keys})", where=where, do="set text_field")
