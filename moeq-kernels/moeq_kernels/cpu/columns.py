"""Columns of the tables that compiled code reads: of matrices and of tiles."""

from __future__ import annotations

LANES = 16  # rows of a block
# columns of a table of matrices [E, C, COLUMNS]; work: of a block, as many bytes of 4 bits a code take as long
(BITS, OFFSET, STRIDE, ROWS, SLOT, SCALES_AT, ZEROS_AT, ZERO_STRIDE, GROUPS, GROUP, LAST, UNITS, LAST_UNITS, UNIT,
 BIAS, FILLED, ALIKE, WORK) = range(18)  # fmt: skip
COLUMNS = 18
# columns of tiles [S, 5]; size: the number of rows that is compiled, `PLACE` its place among those
EXPERT, FIRST, COUNT, SIZE, PLACE = range(5)
