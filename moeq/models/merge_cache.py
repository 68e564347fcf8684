"""Tokenizers without the memory that they would never give back."""

from __future__ import annotations

from typing import Any


def drop_merge_cache(tokenizer: Any) -> None:
    """Have a tokenizer keep no longer how it split every word that it met.

    The Rust library keeps these (up to 10,000 a model) for every thread that tokenizes, and frees them when the thread
    ends, not when the tokenizer goes: 3 to 4 MB for each tokenizer that a process loads, again with every run.
    Splitting every word anew takes a third longer, at 2 to 3 MB of text a second. Tokenizers of pure Python, and models
    of the library's without such a cache (word pieces, whole words), stay as they are.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    resize = getattr(model, "_resize_cache", None)
    if resize is not None:
        resize(0)
