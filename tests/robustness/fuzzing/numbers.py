"""Targets: packed numbers; what is refused is a ValueError, the rest lies on its grid."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from robustness.fuzzing.target import Target
from robustness.fuzzing.tensors import made_weight

from moeq.errors import ArtifactError
from moeq.numerics import layouts
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import SUPPORTED_BITS, pack, packed_row_bytes, unpack


class NumbersTarget(Target):
    """One whose inputs seed the choice of arguments; tensors are torch's own memory."""

    per_byte, refuses = 0, False

    def valid(self) -> bytes:
        return bytes(range(64))

    def mutated(self, chance: random.Random) -> bytes:
        return chance.randbytes(chance.randrange(1, 64))


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ArtifactError(str(error), where="tensor", do="as its readers do") from None


class Unpack(NumbersTarget):
    """bits, length, then the bytes: codes of the grid and back again."""

    name = "unpack"

    def valid(self) -> bytes:
        return next(data for data in map(random.Random(0).randbytes, [16] * 1000) if self._fits(data))

    def _fits(self, data: bytes) -> bool:
        try:
            self.read(data)
        except ArtifactError:
            return False
        return True

    def read(self, data: bytes) -> None:
        chance = random.Random(data)
        bits = chance.choice([*SUPPORTED_BITS, 0, 9, -1, 10**12])
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        length = chance.choice([len(data) * 8 // max(1, min(bits, 8)), len(data), -1, 2**40, 10**30])
        rows = chance.choice([rows, rows[None], rows.to(torch.int32), rows[0]])
        with _refusing():
            codes = unpack(rows, bits, length)
        assert codes.shape == (*rows.shape[:-1], length)
        assert not codes.numel() or int(codes.max()) < 2**bits
        assert unpack(pack(codes, bits), bits, length).equal(codes)


class Packed(Unpack):
    """A packed weight with one part or setting changed: refused, or it has the values of its shape."""

    name = "packed"

    def read(self, data: bytes) -> None:
        chance = random.Random(data)
        weight = made_weight(chance.choice(SUPPORTED_BITS[:4]))
        settings: dict[str, Any] = {name: getattr(weight, name) for name in weight.__dataclass_fields__}
        for _ in range(chance.randrange(1, 3)):
            name = chance.choice(list(settings))
            value = settings[name]
            if isinstance(value, torch.Tensor):
                settings[name] = chance.choice([value[..., :-1], value[0], value.to(torch.int64), value[:, :1], value])
            elif isinstance(value, str):
                settings[name] = chance.choice(["", "mul1", "nvfp4", "mxfp4", "iq-s", "other"])
            elif value is not None:
                settings[name] = chance.choice([0, 1, 2, 3, 4, 5, 7, -1, 2**40, True])
        with _refusing():
            values = PackedWeight(**settings).dequantize()
        assert values.shape == (*settings["codes"].shape[:-1], settings["inputs"])


class Layouts(NumbersTarget):
    """Words of other runtimes: refused, or codes of the grid."""

    name = "layouts"

    def read(self, data: bytes) -> None:
        chance = random.Random(data)
        bits, length = chance.choice([*SUPPORTED_BITS, 0, 33]), chance.choice([8, 16, 31, 32, 64, -1, 2**40])
        words = torch.randint(-(2**31), 2**31, (chance.randrange(1, 4), chance.randrange(1, 17)), dtype=torch.int32)
        words = chance.choice([words, words.mT, words.to(torch.int64), words[0], words[0, 0]])
        for read in (layouts.row_stream, layouts.column_stream, layouts.zeros_of):
            try:
                found = read(words, bits, length)
            except ValueError:
                continue
            if read is layouts.zeros_of:
                assert int(found.max()) < 2**bits
            else:
                assert found.shape[-1] == packed_row_bytes(length, bits)
