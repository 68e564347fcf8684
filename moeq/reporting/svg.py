"""Drawings: matplotlib figures laid out in points, written as small SVG that follows the page's colours.

Colours named here are marks that become CSS variables, so that one drawing serves the light and the dark page. Text
stays text, in the page's font. Matplotlib's defaults are set again for every drawing, since the user's own settings
would change the bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unicodedata import east_asian_width

from moeq.reporting.html import Drawing, escape

INK, MUTED, FAINT, PAPER = "#0a01f0", "#0a01f1", "#0a01f2", "#0a01f3"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
SERIES = ("#0a01f4", "#0a01f5", "#0a01f6", "#0a01f7")
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    FAINT: "var(--faint)",
    PAPER: "var(--paper)",
    **{mark: f"var(--series-{index + 1})" for index, mark in enumerate(SERIES)},
}
ON_PAPER = {  # colours of the page's variables where it is printed
    "ink": "#000", "muted": "#444", "faint": "#ccc", "paper": "#fff",
    "series-1": "#0067a8", "series-2": "#c4500a", "series-3": "#00805c", "series-4": "#a84c86",
}  # fmt: skip
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
TEXT_SIZE = 11
LETTER_WIDTH = 0.6  # of the text size: generous for the sans-serif fonts of today's systems
WIDE_LETTER = 1.0  # of Chinese, Japanese and Korean ones

_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moeq",
    "text.parse_math": False,  # a "$" in a name is a "$"
    "axes.formatter.use_mathtext": False,
    "axes.formatter.useoffset": False,  # values as they are, not what they are above another in a corner
    "font.size": TEXT_SIZE,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.labelsize": TEXT_SIZE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "figure.facecolor": "none",
    "legend.frameon": False,
}


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the browser has the glyphs that our layout font lacks
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def draw(
    name: str, label: str, width: float, height: float, fill: Callable[[Any], None], *, shrinks: bool = True
) -> Drawing:
    """SVG of a figure of width x height points that `fill` draws on.

    name makes its ids unique on the page; shrinks: whether a narrow page may draw it a fifth smaller.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with _settings():
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        fill(figure)
        stream = io.StringIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    smallest = round(0.8 * width) if shrinks else round(width)
    root = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}" '
        f'style="width:100%;min-width:{smallest}px;max-width:{width:g}px">'
    )
    return Drawing(svg=root + _small(stream.getvalue(), name), width=width)


def printed(drawing: Drawing) -> str:
    """The drawing as a file of its own: its size in points, in the colours of paper, on no ground."""
    size = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', drawing.svg)
    assert size is not None
    text = re.sub(r' style="width:100%[^"]*"', f' width="{size[1]}" height="{size[2]}" {_FONT}', drawing.svg, count=1)
    for variable, colour in ON_PAPER.items():
        text = text.replace(f"var(--{variable})", colour)
    return f"{text}\n"


def axes(figure: Any, left: float, bottom: float, width: float, height: float) -> Any:
    """Axes at a place given in points."""
    whole_width, whole_height = figure.get_size_inches() * 72
    return figure.add_axes((left / whole_width, bottom / whole_height, width / whole_width, height / whole_height))


def text_width(text: str) -> float:
    """Points that a text takes at most, about."""
    return TEXT_SIZE * sum(WIDE_LETTER if east_asian_width(letter) in "WF" else LETTER_WIDTH for letter in text)


def _small(svg: str, name: str) -> str:
    """What follows the opening tag, without what a browser does not need; unique ids; marks become CSS variables."""
    svg = svg.split("<svg", 1)[1].split(">", 1)[1]
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", svg)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    prefix = escape(name)
    svg = re.sub(r'(id="|href="#|url\(#)(?=[mpch][0-9a-f]{10})', lambda match: f"{match[1]}{prefix}-", svg)
    for mark, variable in _VARIABLES.items():
        svg = svg.replace(mark, variable)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()
