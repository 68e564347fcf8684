"""Drawings one by one: maps, labels, charts, figures as text."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from moeq.reporting import formats
from moeq.reporting.charts import HEIGHT, WIDTH, Variant, dominated, mark_bytes, plane_of, size_chart
from moeq.reporting.html import Drawing, escape, plain
from moeq.reporting.labels import Box, place
from moeq.reporting.maps import (
    ABSENT,
    FENCE,
    OUTLINE,
    SHARPNESS,
    WHOLE,
    Grid,
    Quantity,
    paint,
    scale_of,
    ticks,
    value_map,
    width_map,
)  # fmt: skip
from moeq.reporting.names import keys_of
from moeq.reporting.svg import TEXT_SIZE, draw, text_width
from moeq.tables import p_value

LARGE = (94, 128)
SHARE = Quantity(name="share", form=formats.share, from_zero=True, zero_is_grey=True)
LOSS = Quantity(name="loss", form=formats.share, log=True)
PLAIN = Quantity(name="trace", form=formats.number)


def picture(drawing: Drawing) -> np.ndarray:
    """The first embedded picture, [height, width, 4]."""
    data = re.search(r"base64,([A-Za-z0-9+/=\s]+)", drawing.svg)
    assert data is not None
    return np.asarray(imread(io.BytesIO(base64.b64decode(data[1]))))


def test_names_in_wide_letters_have_room() -> None:
    assert text_width("混合专家モデル") >= 7 * TEXT_SIZE
    assert text_width("Mixture") == pytest.approx(7 * 0.6 * TEXT_SIZE)
    (box,) = place([(50.0, 50.0)], ["混合专家モデル"], Box(0, 0, 400, 100))
    assert box.right - box.left >= 7 * TEXT_SIZE


@pytest.mark.parametrize("names", [["a b", "a_b", "a_b-1"], ["a", "a ", "a-0", "a-0_"], ["", "?", "-1"], ["a", "b"]])
def test_files_of_names_that_are_written_alike_are_apart(names: list[str]) -> None:
    found = keys_of(names)
    assert len({*found}) == len(names)
    assert names != ["a", "b"] or found == names


def test_a_cell_has_its_own_colour_and_gpu_experts_an_outline() -> None:
    bits = [np.array([1, 2, 3]), np.array([4, 8, 16])]
    hot = [np.array([False, False, False]), np.array([False, False, True])]
    grid = Grid(layers=2, experts=3, room=WHOLE)
    image = picture(width_map("m", "label", bits, hot))
    height, width = grid.cell_height * SHARPNESS, grid.cell_width * SHARPNESS
    assert image.shape == (2 * height, 3 * width, 4)
    middles = image[height // 2 :: height, width // 2 :: width].reshape(6, 4)
    assert len({tuple(colour) for colour in middles}) == 6
    edge = image[height + 3, 2 * width + width // 2]
    np.testing.assert_allclose(edge, OUTLINE, atol=0.01)
    assert not np.allclose(image[3, width // 2], OUTLINE, atol=0.01)


def test_a_mean_width_is_drawn_between_and_written_with_a_digit() -> None:
    drawing = width_map("m", "label", [np.array([2.0, 7 / 3, 3.0])], [np.zeros(3, bool)], present=(1, 2, 3, 4))
    image, grid = picture(drawing), Grid(layers=1, experts=3, room=WHOLE)
    width = grid.cell_width * SHARPNESS
    two, between, three = image[grid.cell_height * SHARPNESS // 2, width // 4 :: width].astype(float)[:, :3]
    np.testing.assert_allclose(between, two + (three - two) / 3, atol=0.01)
    assert [drawing.svg.count(f">{text}</text>") for text in ("2.3", "3")] == [1, 1]
    assert [drawing.svg.count(f">{width}-bit</text>") for width in (1, 2, 3, 4)] == [1] * 4


@pytest.mark.cases(2)
@pytest.mark.parametrize("shape", [(1, 1), (4, 8), (3, 60), (61, 256), (48, 512), LARGE])
def test_maps_of_any_size(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    bits = list(generator.choice([1, 2, 3, 4, 8, 16], shape))
    hot = list(generator.random(shape) < 0.5)  # scattered: the worst case for outlines
    values = list(generator.random(shape))
    for drawing in (
        width_map("a", "label", bits, hot),
        value_map("b", "label", values, SHARE, "a title"),
        value_map("c", "label", values, LOSS),
    ):
        ElementTree.fromstring(drawing.svg)
        assert len(drawing.svg.encode()) < 150_000
        assert drawing.svg.count("<path") < 40
    assert drawing.width <= 1100


def test_cells_are_written_only_where_they_fit() -> None:
    small = width_map("a", "label", [np.array([3, 3])], [np.zeros(2, bool)]).svg
    assert small.count(">3</text>") == 2
    large = width_map("a", "label", [np.full(128, 3)] * 94, [np.zeros(128, bool)] * 94).svg
    assert large.count("<text") < 80


def test_layers_may_have_unequal_numbers_of_experts() -> None:
    image = picture(value_map("a", "label", [np.array([0.5, 0.5, 0.0]), np.array([1.0])], SHARE))
    height, width = image.shape[0] // 2, image.shape[1] // 3
    np.testing.assert_allclose(image[height // 2, 2 * width + width // 2], ABSENT, atol=0.01)  # never chosen
    assert image[height + height // 2, width + width // 2, 3] == 0  # no such expert


@pytest.mark.parametrize("values", [np.zeros((2, 3)), np.full((2, 3), np.nan), np.full((2, 3), 0.5)])
def test_maps_without_contrast(values: np.ndarray) -> None:
    for quantity in (SHARE, LOSS, PLAIN):
        drawing = value_map("a", "label", list(values), quantity)
        assert ElementTree.fromstring(drawing.svg).tag.endswith("svg")
        known = np.isfinite(values[0, 0]) and (values[0, 0] > 0 or quantity is PLAIN)
        assert np.allclose(picture(drawing)[20, 20], ABSENT, atol=0.01) == (not known)


def test_a_scale_runs_from_least_to_largest() -> None:
    rows = [np.array([3.0, 5.0]), np.array([4.0, np.nan])]
    scale = scale_of(rows, PLAIN)
    assert (scale.low, scale.high, scale.below, scale.above) == (3, 5, 0, 0)
    np.testing.assert_allclose(scale.parts(np.array([3.0, 4.0, 5.0])), [0, 0.5, 1])
    assert scale.at(0.5) == 4
    assert scale_of(rows, SHARE).low == 0
    logs = scale_of([np.array([1.0, 100.0, 0.0, -1.0])], LOSS)
    assert (logs.low, logs.high) == pytest.approx((1, 100))
    np.testing.assert_allclose(logs.parts(np.array([10.0, 0.0])), [0.5, np.nan])


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60), st.sampled_from([SHARE, LOSS, PLAIN]))
def test_outliers_are_those_beyond_the_fences(values: list[float], quantity: Quantity) -> None:
    scale = scale_of([np.array(values)], quantity)
    shown = np.log10(values) if quantity.log else np.array(values)
    first, third = np.quantile(shown, (0.25, 0.75))
    reach = FENCE * (third - first) if third > first else np.inf
    assert scale.above == int((shown > third + reach).sum())
    assert scale.below == (0 if quantity.from_zero else int((shown < first - reach).sum()))
    parts = scale.parts(np.array(values))
    assert ((parts >= 0) & (parts <= 1)).all()
    assert scale.least == pytest.approx(min(values))
    assert scale.largest == pytest.approx(max(values))


def test_one_outlier_does_not_hide_the_others() -> None:
    rows = [np.array([1.0, 2.0, 3.0, 4.0, 1e6])]
    drawing = value_map("a", "label", rows, PLAIN)
    assert "≥ 4<" in drawing.svg
    image = picture(drawing)
    width = image.shape[1] // 5
    colours = [tuple(image[20, width // 2 + width * expert]) for expert in range(5)]
    assert len(set(colours)) == 4
    assert colours[3] == colours[4]


def test_small_cells_are_one_pixel_each() -> None:
    generator = np.random.default_rng(0)
    assert picture(value_map("a", "label", list(generator.random(LARGE)), PLAIN)).shape == (*LARGE, 4)


def test_paint_leaves_its_input_alone() -> None:
    colours = np.full((2, 2, 4), 0.5)
    paint(colours, Grid(layers=2, experts=2, room=WHOLE), np.ones((2, 2), bool))
    assert (colours == 0.5).all()


@given(count=st.integers(1, 2000), cell=st.floats(1, 60))
def test_ticks_are_within_range_and_apart(count: int, cell: float) -> None:
    found = ticks(count, cell, 30)
    assert found[0] == 0
    assert found[-1] < count
    assert all((b - a) * cell >= 30 for a, b in pairwise(found))


def variants(*points: tuple[int, float]) -> list[Variant]:
    return [Variant(name=f"v{i}", size_bytes=s, cost=p, exported=i == 0) for i, (s, p) in enumerate(points)]


def test_dominated_means_no_smaller_and_no_better() -> None:
    assert dominated(variants((1, 9.0), (2, 8.0), (2, 9.0), (3, 8.0))) == [False, False, True, True]
    assert dominated(variants((1, 9.0), (1, 9.0))) == [False, False]  # equal points do not dominate each other


@pytest.mark.parametrize(
    "points", [[(1000, 9.0)], [(1000, 9.0), (1000, 9.0)], [(10, 5.0), (10**12, 5.1)], [(900, 5.0), (901, 500.0)]]
)
def test_size_charts_of_awkward_points(points: list[tuple[int, float]]) -> None:
    assert ElementTree.fromstring(size_chart("s", "label", variants(*points), "perplexity").svg).tag.endswith("svg")


def test_perplexities_that_hardly_differ_stand_at_the_axis_as_they_are() -> None:
    """Not as what they have above another, which stands in a corner."""
    svg = size_chart("s", "label", variants((1000, 2091.656), (2000, 2091.4), (3000, 2091.634)), "perplexity").svg
    labels = [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]
    marks = [float(label) for label in labels if re.fullmatch(r"[0-9.]+", label)]
    assert len(marks) > 2
    assert 2091.3 < min(marks) < max(marks) < 2091.7, labels


@pytest.mark.parametrize("ratio", [1.02, 1.3, 2.0, 2.4, 9.0, 1e3, 1e9])
@pytest.mark.parametrize("low", [424 * 2**10, 808 * 2**10, 3 * 10**9])
def test_round_sizes_are_at_every_axis_of_bytes(low: int, ratio: float) -> None:
    labels: list[str] = []

    def fill(figure: Any) -> None:
        plane = plane_of(figure)
        plane.set(xscale="log", xlim=(low, low * ratio))
        mark_bytes(plane)
        assert all(low <= mark <= low * ratio for mark in plane.get_xticks())
        labels.extend(label.get_text() for label in plane.get_xticklabels())

    draw("axis", "label", WIDTH, HEIGHT, fill)
    assert (1 if ratio < 1.2 else 3) <= len(labels) <= 8
    assert len(set(labels)) == len(labels)


@given(
    st.lists(st.tuples(st.floats(60, 540), st.floats(60, 340)), min_size=1, max_size=6, unique=True),
)
def test_names_do_not_cover_each_other(spots: list[tuple[float, float]]) -> None:
    boxes = place(spots, ["a name"] * len(spots), Box(0, 0, 600, 400))
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.perplexity(None), "\N{EN DASH}"),
        (p_value(0.0004), "< 0.001"),
        (p_value(0.0123), "= 0.012"),
        (formats.perplexity(5.3214), "5.321"),
        (formats.perplexity(33.389), "33.39"),
        (formats.perplexity(123456.0), "1.235e+05"),
        (formats.change(33.5, 33.389), "+0.33 %"),
        (formats.change(30.0, 33.0), "\N{MINUS SIGN}9.1 %"),
        (formats.change(33.0, 33.0), "±0.00 %"),
        (formats.change(None, 33.0), ""),
        (formats.points(0.593, 0.613), "\N{MINUS SIGN}2.0 points"),
        (formats.share(0.125), "12.5 %"),
        (formats.share(1.4986e-05), "0.0015 %"),
        (formats.share(1e-9), "1.0e-07 %"),
        (formats.share(float("nan")), "\N{EN DASH}"),
        (formats.number(12_617.4), "12,617"),
        (formats.number(0.13921), "0.1392"),
        (formats.number(287.46), "287.5"),
        (formats.number(0.0), "0"),
        (formats.number(12_345.6, 3), "12,346"),
        (formats.number(999.7, 3), "1,000"),
        (formats.number(99.96, 3), "100"),
        (formats.number(3.2e8), "3.20e+08"),
        (formats.span([4.061, 4.062], formats.ratio), "4.06\N{MULTIPLICATION SIGN}"),
        (formats.count(1, "expert"), "1 expert"),
        (formats.count(1234, "expert"), "1,234 experts"),
    ],
)
def test_figures_as_text(text: str, expected: str) -> None:
    assert text.replace(formats.NARROW_SPACE, " ") == expected


@settings(max_examples=examples(40))
@given(st.text())
def test_escaped_text_is_xml(text: str) -> None:
    root = ElementTree.fromstring(f'<a b="{escape(text)}">{escape(text)}</a>')
    assert (root.text or "") == plain(text)
