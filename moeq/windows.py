"""Tables in windows that are too narrow for them: lines broken between words, or rows one below the other."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

LONGEST_WORD = 20  # columns from which a name, such as a path, may be broken within a word


def fitted(table: Table, room: int) -> RenderableType:
    """The table, its columns as wide as lets it break lines only between words; where that is not possible, its rows
    one below the other: a row's name, with its number, above its other cells with their titles."""
    widths = _widths(table.columns, room)
    if widths is None:
        return _one_by_one(table)
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    return table


def _widths(columns: Sequence[Column], room: int) -> list[int] | None:
    """Widths of columns, the widest ones made narrower first; None where words or what must not wrap would break."""
    widths = [max(map(cell_len, _texts(column))) for column in columns]
    least = [width if column.no_wrap else _longest_word(column) for width, column in zip(widths, columns, strict=True)]
    over = sum(widths) + len(widths) - 1 - room
    for _ in range(over):
        widest = max(range(len(widths)), key=lambda index: (widths[index] > least[index], widths[index]))
        if widths[widest] <= least[widest]:
            return None
        widths[widest] -= 1
    return widths


def _texts(column: Column) -> list[str]:
    return [_plain(column.header), *map(_plain, column.cells)]


def _plain(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _longest_word(column: Column) -> int:
    words = [(text, word) for text in _texts(column) for word in text.split()]
    longest = max((cell_len(word) + _indent(text) for text, word in words), default=1)
    return longest if column.justify == "right" else min(longest, LONGEST_WORD)


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _one_by_one(table: Table) -> Group:
    titles, *rows = zip(*map(_texts, table.columns), strict=True)
    names = 2 if not titles[0] and all(row[0].isdigit() for row in rows) else 1  # a number before each name
    lines = []
    for row, style in zip(rows, (row.style or "" for row in table.rows), strict=True):
        name = f"{titles[0]} {row[0]}" if row[0][:1].isdigit() and names == 1 else " ".join(row[:names])
        within = _indent(name)
        cells = [f"{title}: {cell}" if title else cell for title, cell in zip(titles, row, strict=True)]
        told = [cell for cell, text in zip(cells[names:], row[names:], strict=True) if text not in {"", "-"}]
        head = Text(name.strip(), style)
        head.stylize("bold")
        lines.append(Padding(head, (0, 0, 0, within)))
        lines += [Padding(Text("; ".join(told), style), (0, 0, 0, within + 2))] if told else []
    return Group(*lines)
