"""Whether a refusal of a recipe is said in moeq's own words."""

from __future__ import annotations

import re

from moeq.errors import RecipeError

LONGEST = 1000  # characters of a line, whatever stood in the file
FOREIGN = re.compile(
    r"Input should|Extra inputs|Field required|Value error|Assertion failed"
    r"|valid (dictionary|string|integer|list|number)|instance of|\w+Section\b|pydantic"
    r"|unable to parse|another value|mend the"
)
TYPES = re.compile(r"\.((str|int|float|bool)\b|list\[|dict\[|literal\[|function-|lax-or-strict|constrained|tagged)")


def check_words(error: RecipeError, key: str) -> None:
    """One line of our own words that names no key twice and gives advice."""
    line = str(error)
    assert not FOREIGN.search(line), line
    assert not TYPES.search(line.partition(" is ")[0]), line
    assert error.do, line
    assert len(line) < LONGEST
    assert "\n" not in line
    name = re.escape(key)
    assert not re.search(rf"(^|[\s:]){name}[: ]+{name}($|[\s:.])", line), line
    section = re.escape(key.split(".")[0])
    assert not re.search(rf"(^|[\s:]){section}: {section}\.", line), line
