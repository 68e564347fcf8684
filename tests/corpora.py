"""Texts as lists of documents and as sequences, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeq.models import corpus


def read_documents(
    sources: Sequence[corpus.Source],
    fields: corpus.Fields,
    tokenizer: Any,
    *,
    need: corpus.Need | None = None,
    seed: int | None = None,
) -> list[corpus.Document]:
    """The documents of the sources, as `corpus.documents_of` gives them."""
    return [document for source in sources for document in corpus.documents_of(source, fields, tokenizer, need, seed)]


def make_sequences(
    documents: Sequence[corpus.Document], tokenizer: Any, *, count: int | None, **options: Any
) -> corpus.Sequences:
    """`count` sequences (None: all) of what `corpus.Pool` makes of the documents."""
    return corpus.Pool(documents, tokenizer, **options).take(count)
