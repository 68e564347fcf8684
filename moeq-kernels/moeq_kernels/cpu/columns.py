"""Columns of the tables that compiled code reads: of matrices and of tiles."""

from __future__ import annotations

LANES = 16  # rows of a block
# columns of a table of matrices [E, C, COLUMNS]
(BITS, OFFSET, STRIDE, ROWS, SLOT, SCALES_AT, ZEROS_AT, ZERO_STRIDE, GROUPS, GROUP, LAST, UNITS, LAST_UNITS, UNIT,
 BIAS, FILLED, ALIKE) = range(17)  # fmt: skip
COLUMNS = 17
# columns of tiles [S, 5]; size: the number of rows that is compiled, `PLACE` its place among those
EXPERT, FIRST, COUNT, SIZE, PLACE = range(5)
