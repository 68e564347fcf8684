"""Rows to documents: text, conversations through the tokenizer's chat template, images with their text."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import digest_of
from moeq.errors import CorpusError, PlanError
from moeq.models.corpus.chat import conversation, rendered
from moeq.models.corpus.fields import Fields
from moeq.models.corpus.images import ImageRow, image_row
from moeq.models.corpus.rows import kind_of, rows
from moeq.models.corpus.sources import HubDataset, LocalFile, Source
from moeq.models.corpus.streams import Advance, Bar, pieces, shown
from moeq.tables import human_bytes

SHUFFLED_AT_ONCE = 4096  # rows of a hub dataset
ENCODED_AT_ONCE = 1 << 16  # characters, of each of which a tokenizer holds some 150 bytes meanwhile
ROOM = 256 << 20  # bytes of addresses that a tokenizer's threads may take, and everything after it does


@dataclass(frozen=True, kw_only=True)
class Document:
    """Text and its domain; rendered: the chat template has set its special tokens; image: shown with it.

    begins, ends: whether a document's first and last words are in it; a long text comes in pieces.
    """

    text: str
    domain: str
    rendered: bool = False
    image: ImageRow | None = None
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A document before the chat template has made text of it; size: characters, those of its turns where it will."""

    document: Document
    size: int
    render: Callable[[], str] | None = None

    def made(self) -> Document:
        """The document itself; CorpusError where the template refuses it."""
        return self.document if self.render is None else replace(self.document, text=self.render())

    def cut(self, low: int, high: int) -> Document:
        """What stands at some of its `size` characters."""
        whole = self.made()
        scale = len(whole.text) / self.size  # 1, but where the chat template added to the turns
        low, high = int(low * scale), int(high * scale)
        begins, ends = whole.begins and low == 0, whole.ends and high >= len(whole.text)
        return replace(whole, text=whole.text[low:high], begins=begins, ends=ends)


@dataclass(frozen=True, kw_only=True)
class Need:
    """How much of a hub dataset is read: `sequences` of `length` tokens, packed or one a document."""

    sequences: int
    length: int
    packed: bool = True


def documents_of(
    source: Source,
    fields: Fields,
    tokenizer: Any,
    need: Need | None = None,
    seed: int | None = None,
    advance: Advance | None = None,
) -> Iterator[Document]:
    """The documents of a source, one by one where no seed decides their order: of a file all, of a hub dataset enough.

    need: what is enough; seed: draws their order, which is else the file's. Raises CorpusError naming file and row.
    """
    if not isinstance(source, LocalFile):
        yield from _enough(_of_dataset(source, fields, tokenizer, seed), source, tokenizer, need)
        return
    documents = _made(of_local(source, fields, tokenizer, advance))
    if seed is None or kind_of(source.path.name) == ".txt":  # which is one document, whatever its pieces
        yield from documents
        return
    shuffled = list(documents)
    Random(seed).shuffle(shuffled)
    yield from shuffled


def _made(unread: Iterable[Unread]) -> Iterator[Document]:
    """The documents that are not blank; of one that comes in pieces all of them."""
    made = map(Unread.made, unread)
    return (doc for doc in made if doc.text.strip() or doc.image is not None or not (doc.begins and doc.ends))


def images_digest(sources: Sequence[Source], fields: Fields, bar: Bar | None = None) -> str | None:
    """Digest of the image files that rows of files name, in their order; None where no row has an image.

    Images inside Parquet belong to the digest of their source. Nothing is tokenized or rendered.
    """
    if fields.image is None:
        return None
    files = [source for source in sources if isinstance(source, LocalFile) and kind_of(source.path.name) != ".txt"]
    rows, digests = 0, []
    with shown(bar, "looking for images", sum(source.path.stat().st_size for source in files)) as advance:
        for source in files:
            for unread in of_local(source, fields, None, advance, naming=fields.image):
                if (row := unread.document.image) is not None:
                    rows += 1
                    digests += [digest_of_file(image) for image in row.images if isinstance(image, Path)]
    return digest_of(digests) if rows else None


def _of_dataset(source: HubDataset, fields: Fields, tokenizer: Any, seed: int | None) -> Iterator[Document]:
    for where, path in source.paths(seed):
        documents = _made(_of_file(path, where, source.domain, fields.of(source.own), tokenizer))
        yield from documents if seed is None or kind_of(path.name) == ".txt" else _shuffled(documents, seed)


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
    enough: list[Document] = []
    tokens = whole = 0
    for document in documents:
        enough.append(document)
        if document.image is not None:
            whole += 1
        else:
            ids = encode([document], tokenizer)[0]
            tokens += len(ids)
            whole += not need.packed and len(ids) >= 2 and document.begins
        if whole + (tokens // need.length if need.packed else 0) >= need.sequences:
            break
    return enough


def encode(documents: Sequence[Document], tokenizer: Any) -> list[list[int]]:
    """Token ids of documents, between bos and eos where the tokenizer has them and no template has set them; PlanError
    where the process may have no more memory."""
    if not documents:
        return []
    _check_room()
    texts = [document.text for document in documents]
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [
        ids if document.rendered else [*(begin if document.begins else []), *ids, *(end if document.ends else [])]
        for document, ids in zip(documents, rows, strict=True)
    ]


def _check_room() -> None:
    """PlanError where a limit of addresses leaves little: a tokenizer that gets none ends the process at once."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    taken = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    if limit - taken < ROOM:
        what = f"out of memory: {human_bytes(taken)} of {human_bytes(limit)} are taken where text is read"
        raise PlanError(what, where="ulimit -v", do="raise the limit; `moeq plan` says what every stage takes")


def encoded(documents: Iterable[Document], tokenizer: Any) -> Iterator[tuple[Document, list[int]]]:
    """Documents in their order with their token ids, none where there is an image; held are those of one lot."""

    def some() -> Iterator[tuple[Document, list[int]]]:
        ids = iter(encode([document for document in lot if document.image is None], tokenizer))
        return ((document, next(ids) if document.image is None else []) for document in lot)

    lot: list[Document] = []
    size = 0
    for document in documents:
        if lot and size + len(document.text) > ENCODED_AT_ONCE:
            yield from some()
            lot, size = [], 0
        lot.append(document)
        size += len(document.text)
    yield from some()


def of_local(
    source: LocalFile, fields: Fields, tokenizer: Any, advance: Advance | None = None, *, naming: str | None = None
) -> Iterator[Unread]:
    """What a local file's documents are made of, blank ones left out; their domains are as rows say, or the source's.

    naming: only rows in which this field may be.
    """
    path, own = source.path, fields.of(source.own)
    return _of_file(path, str(path), source.domain, own, tokenizer, advance, folder=path.parent, naming=naming)


def _of_file(
    path: Path,
    name: str,
    domain: str,
    fields: Fields,
    tokenizer: Any,
    advance: Advance | None = None,
    *,
    folder: Path | None = None,
    naming: str | None = None,
) -> Iterator[Unread]:
    """folder: where images of its rows lie, which may then name domains, too; None: of a hub dataset."""
    if kind_of(path.name) == ".txt":
        for text, begins, ends in pieces(path, advance):
            if text.strip() or not (begins and ends):
                yield Unread(document=Document(text=text, domain=domain, begins=begins, ends=ends), size=len(text))
        return
    for number, row in rows(path, advance, naming=naming):
        unread = _unread(row, f"{name}, row {number}", fields, tokenizer, folder)
        if unread.size or unread.document.image is not None:
            named = domain if folder is None else str(row.get("domain", domain))
            yield replace(unread, document=replace(unread.document, domain=named))


def _unread(row: Any, where: str, fields: Fields, tokenizer: Any, folder: Path | None) -> Unread:
    """One row's document, without its domain. CorpusError when it holds nothing that the fields name."""
    row = row if isinstance(row, dict) else {}
    text = None if fields.chat is True else fields.text_of(row, where)
    messages = None
    if text is None and fields.chat is not False:
        messages = conversation(row, fields.messages, (fields.prompt, fields.response), where)
    if text is None and messages is None:
        raise _nothing(row, fields, where)
    pictures = row.get(fields.image) if fields.image is not None else None
    if pictures is not None and pictures != []:
        image = image_row(pictures, text, messages, where=where, folder=folder, plain=fields.chat is False)
        return Unread(document=Document(text=text or "", domain="", image=image), size=len(text or ""))
    if messages is None:
        text = text or ""
        return Unread(document=Document(text=text, domain=""), size=len(text) if text.strip() else 0)
    return Unread(
        document=Document(text="", domain="", rendered=True),
        size=max(1, sum(len(str(turn.get("content", ""))) for turn in messages)),
        render=partial(rendered, tokenizer, messages, where),
    )


def _nothing(row: dict[str, Any], fields: Fields, where: str) -> CorpusError:
    keys = ", ".join(row) or "no fields"
    chat = f"no conversation in {fields.messages!r}, no {fields.prompt!r} with {fields.response!r}"
    if fields.chat is True:
        return CorpusError(f"{chat} (there are: {keys})", where=where, do="set messages_field, or chat_template: auto")
    more = f", {chat}" if fields.chat == "auto" else ""
    if fields.text in row:
        found = "null" if row[fields.text] is None else type(row[fields.text]).__name__
        what = f"field {fields.text!r} is {found}, no text{more} (there are: {keys})"
        return CorpusError(what, where=where, do="drop the row, or set text_field")
    return CorpusError(f"no text field {fields.text!r}{more} (there are: {keys})", where=where, do="set text_field")
