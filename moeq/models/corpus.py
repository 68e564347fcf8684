"""Text to token sequences: the bundled corpus or local .txt, .jsonl and .parquet files.

The same files, tokenizer and settings always give the same tokens. Domains are kept apart where the files name them:
sequences are drawn in equal shares from every domain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.files import digest_of, sha256_file
from moeq.bundled import bundled_path
from moeq.errors import CorpusError
from moeq.models.walk import Batch

BUNDLED = "bundled"
SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Document:
    text: str
    domain: str


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Token sequences: ids [S, T] int64, mask [S, T] bool (False where padded), the domain of each."""

    ids: Tensor
    mask: Tensor
    domains: tuple[str, ...]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def batches(self, size: int) -> list[Batch]:
        """Batches of at most `size` sequences, in order."""
        rows = torch.arange(len(self))
        parts = zip(self.ids.split(size), self.mask.split(size), rows.split(size), strict=True)
        return [Batch(input_ids=ids, mask=mask, sequences=row) for ids, mask, row in parts]

    def digest(self) -> str:
        """Digest of tokens, mask and domains."""
        return digest_of([self.ids.tolist(), self.mask.sum(1).tolist(), list(self.domains)])


def corpus_files(source: str | Sequence[str], part: str) -> list[Path]:
    """The files of a corpus; `bundled` means the bundled calibration or evaluation part."""
    names = [source] if isinstance(source, str) else list(source)
    files = []
    for name in names:
        path = bundled_path(f"corpus/{part}.jsonl") if name == BUNDLED else Path(name).expanduser()
        if path.suffix not in SUFFIXES:
            raise CorpusError(f"not a text file (one of {', '.join(SUFFIXES)})", where=name, do="convert it")
        if not path.is_file():
            raise CorpusError("no such file", where=name, do="give the path of a text file, or bundled")
        files.append(path)
    return files


def files_digest(files: Sequence[Path]) -> str:
    return digest_of([sha256_file(path) for path in files])


def read_documents(files: Sequence[Path], text_field: str) -> list[Document]:
    """All documents of the files; CorpusError naming file and row for what cannot be read."""
    documents: list[Document] = []
    for path in files:
        if path.suffix == ".txt":
            try:
                documents.append(Document(text=path.read_text("utf-8"), domain=path.stem))
            except (OSError, UnicodeDecodeError) as error:
                raise CorpusError(f"cannot be read as UTF-8 ({error})", where=str(path), do="convert it") from None
            continue
        for number, row in _rows(path):
            text = row.get(text_field) if isinstance(row, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(row) if isinstance(row, dict) else "no fields"
                raise CorpusError(
                    f"no text field {text_field!r} (there are: {keys})",
                    where=f"{path}, row {number}",
                    do="set text_field",
                )
            documents.append(Document(text=text, domain=str(row.get("domain", path.stem))))
    return [document for document in documents if document.text.strip()]


def _rows(path: Path) -> list[tuple[int, Any]]:
    """(row number, row), numbered as an editor does."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return list(enumerate(pq.read_table(path).to_pylist(), 1))
        except (OSError, pa.ArrowException) as error:
            raise CorpusError(f"not a Parquet file ({error})", where=str(path), do="check the file") from None
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot be read as UTF-8 ({error})", where=str(path), do="convert it") from None
    return [(number, _json_row(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]


def _json_row(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        where = f"{path}, row {number}"
        raise CorpusError(f"not JSON lines ({error})", where=where, do="check the file") from None


def make_sequences(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    length: int,
    count: int | None,
    packed: bool = True,
    where: str = "corpus",
) -> Sequences:
    """Tokenize and cut into `count` sequences of `length` tokens (None: all of the text), in equal shares a domain.

    packed: each domain's documents, between bos and eos where the tokenizer has them, are joined and cut without pads;
    otherwise every document is one sequence, cut or padded on the right. Raises CorpusError when there is no text or
    too little of it.
    """
    if not documents:
        raise CorpusError("no text in it", where=where, do="give files with text")
    rows: dict[str, list[list[int]]] = {}
    for domain in dict.fromkeys(document.domain for document in documents):
        texts = [document.text for document in documents if document.domain == domain]
        ids = [
            _wrap(tokenizer, piece) for piece in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        ]
        if packed:
            stream = [token for piece in ids for token in piece]
            rows[domain] = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
        else:
            rows[domain] = [piece[:length] for piece in ids if len(piece) >= 2]
    available = sum(map(len, rows.values()))
    if count is None:
        chosen = [(domain, row) for domain, mine in rows.items() for row in mine]
    else:
        if available < count:
            raise CorpusError(
                f"too short: {available} sequences of {length} tokens, {count} are wanted",
                where=where,
                do="give more text, or lower sequences or sequence_length",
            )
        shares = _shares({domain: len(mine) for domain, mine in rows.items()}, count)
        chosen = [(domain, row) for domain, mine in rows.items() for row in _thin(mine, shares[domain])]
    if not chosen:
        raise CorpusError(
            f"too short: not one sequence of {length} tokens", where=where, do="give more text or lower sequence_length"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    width = max(len(row) for _, row in chosen)
    ids_tensor = torch.full((len(chosen), width), pad, dtype=torch.long)
    mask = torch.zeros((len(chosen), width), dtype=torch.bool)
    for index, (_, row) in enumerate(chosen):
        ids_tensor[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = True
    return Sequences(ids=ids_tensor, mask=mask, domains=tuple(domain for domain, _ in chosen))


def _wrap(tokenizer: Any, ids: list[int]) -> list[int]:
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*begin, *ids, *end]


def _shares(available: dict[str, int], count: int) -> dict[str, int]:
    """Equal shares of `count`, none above what is available; what is left goes to the domains that have more."""
    shares = dict.fromkeys(available, 0)
    left = count
    while left:
        open_domains = [domain for domain in available if shares[domain] < available[domain]]
        for index, domain in enumerate(open_domains):
            step = min(-(-left // (len(open_domains) - index)), available[domain] - shares[domain])
            shares[domain] += step
            left -= step
    return shares


def _thin(rows: list[list[int]], count: int) -> list[list[int]]:
    """`count` rows, evenly spaced."""
    return [rows[index * len(rows) // count] for index in range(count)]
