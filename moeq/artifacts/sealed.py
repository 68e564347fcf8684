"""The digest that a Parquet file has of its own bytes: checked without pyarrow, which takes longer to import.

It stands in the file's metadata (Thrift's compact protocol: a key, a type, a length, a value), where zeros are hashed
in its place. One that is not as written may still be readable: pyarrow's reader says what is wrong.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

KEY = b"moeq_bytes_sha256_2"  # 2: the schema version of the table; another's is left to its reader
BLANK = b"0" * 64  # the digest's value until the rest of the file is known
_SEAL = re.compile(re.escape(KEY) + rb"\x18\x40([0-9a-f]{64})")  # a text of 64 bytes


def seal(path: Path) -> None:
    """Put the digest of a file just written, with KEY: BLANK in its metadata, in place of BLANK."""
    written = path.read_bytes()
    (found,) = _SEAL.finditer(written)
    with path.open("r+b") as file:
        file.seek(found.start(1))
        file.write(hashlib.sha256(written).hexdigest().encode())


def is_sealed(path: Path) -> bool | None:
    """Whether a file is as `seal` left it; None where none can be found: pyarrow's reader has to look."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    seals = list(_SEAL.finditer(content))
    if len(seals) != 1:
        return None
    first, last = seals[0].span(1)
    return hashlib.sha256(content[:first] + BLANK + content[last:]).hexdigest().encode() == seals[0][1]
