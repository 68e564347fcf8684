"""Errors that a user can act on: one line that says what, where and what to do.

moeq, which has more of them, ends with their exit codes (moeq/errors.py).
"""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class MoeqError(Exception):
    """Base of every error that moeq raises on purpose; `str(error)` is one line for the user."""

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, do: str | None = None) -> None:
        """`what` went wrong, `where` (file, key, layer, expert, tensor), and what to `do` about it."""
        self.what, self.where, self.do = what, where, do
        text = f"{where}: {what}" if where else what
        line = " ".join((f"{text}; {do}" if do else text).split())
        super().__init__(CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", line))  # a terminal would obey them

    def rename(self, old: str, new: str) -> None:
        """Name a place by another name: an unfinished directory by that which it was to have."""
        what, where, do = (part and part.replace(old, new) for part in (self.what, self.where, self.do))
        MoeqError.__init__(self, str(what), where=where, do=do)

    def put_into(self, place: str) -> None:
        """Name what the place lies in: a section of a recipe that has several alike."""
        MoeqError.__init__(self, self.what, where=place if self.where is None else f"{place}, {self.where}", do=self.do)


class ModelError(MoeqError):
    """The model, or a kernel that is asked for and that this machine has not."""

    exit_code = 3


class ArtifactError(MoeqError):
    """A missing, damaged or foreign checkpoint."""

    exit_code = 7
