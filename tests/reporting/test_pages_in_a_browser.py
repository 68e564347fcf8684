"""The report and the estimate page in headless Chromium: wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from browser import CHROMIUM, LOOKED_FOR, SCHEMES, WIDTHS, looked_at

from moeq.estimator import load_geometry, load_hardware, uniform_placement
from moeq.estimator.capacity import plan_capacity
from moeq.estimator.cases import Case, EstimateDocument
from moeq.estimator.search import Search, Setting
from moeq.reporting import estimate_page, search_page
from moeq.reporting.inputs import ReportInputs, TradeOff
from moeq.reporting.page import render

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _chromium() -> None:
    """The full tests are not whole without it."""
    assert CHROMIUM is not None, "no Chromium here: install Debian's package chromium"


@pytest.fixture(scope="module")
def pages(make: Callable[..., ReportInputs], traded: list[TradeOff]) -> dict[str, str]:
    """A report of a small and of a large model, an estimate past the model's positions, and a search."""
    inputs = make()
    geometry = load_geometry("mixtral-8x7b")
    placement = uniform_placement(geometry, bits=3, hot_experts=1)
    plan = plan_capacity(
        geometry, load_hardware("paper-ctxmoe"), placement, batch=1, context=576, group_size=128, zero_points=False
    )
    own = inputs.speed.estimates[0].model_copy(update={"context": 40_000})
    case = Case(name="a case with a long name, of 3 code bits", geometry=asdict(geometry), estimate=own, capacity=plan)
    document = EstimateDocument(
        name="mixtral-8x7b on paper-ctxmoe", hardware="paper-ctxmoe", routing="uniform", cases=(case,)
    )
    systems = [load_hardware(name) for name in ("paper-ctxmoe", "h100-ndp-cxl", "a100-host-pcie4")]
    asked = Setting(gpu_experts=4, gpu_bits=16, bits=3)
    found = Search(
        geometry=geometry, hardware=systems, speed=20, asked=asked, dollars_per_hour={"paper-ctxmoe": 3}
    ).run()
    return {
        "report": render(replace(inputs, trade_offs=traded)),
        "large": render(make(layers=48, experts=128)),
        "estimate": estimate_page.render(document),
        "search": search_page.render("a search", [found], ["a case with a long name, of 3 code bits"]),
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_can_be_read_wide_and_narrow(pages: dict[str, str], scheme: str, tmp_path: Path) -> None:
    looked = looked_at(pages, tmp_path, scheme)
    wrong = [
        (one["name"], one["width"], what, one[what]) for one in looked for what in (*LOOKED_FOR, "console") if one[what]
    ]
    assert not wrong
    assert [(one["name"], one["width"]) for one in looked] == [(name, width) for name in pages for width in WIDTHS]


PLANTED = {
    "sideways": '<div style="width: 1500px">wide</div>',
    "cut": '<svg role="img" aria-label="cut" width="40" height="20"><text x="30" y="15">far too long</text></svg>',
    "unnamed": '<svg role="img" width="40" height="20"></svg>',
    "unreadable": '<p style="color: #888; background: #999">grey on grey</p>',
    "twice": '<p id="summary">twice</p>',
    "console": "<script>1</script>",
}
PICTURE = '<img alt="" src="http://127.0.0.1:9/x.png">'


def test_what_is_looked_for_is_found(pages: dict[str, str], tmp_path: Path) -> None:
    """Each fault alone, planted into a page that has none."""
    planted = {what: pages["report"].replace("</main>", f"{text}</main>") for what, text in PLANTED.items()}
    for one in looked_at(planted, tmp_path, "light", widths=(400,)):
        assert one["console"], "the script was refused, and that was said"
        found = [what for what in LOOKED_FOR if one[what]]
        assert found == [one["name"]] if one["name"] in LOOKED_FOR else found == []
    free = (
        pages["report"]
        .replace("default-src 'none'", "default-src *")
        .replace("</main>", '<img alt="" src="x.png"></main>')
    )
    unnamed = pages["report"].replace('aria-label="Chart of relative loss', 'data-label="Chart of relative loss')
    asks, nameless = looked_at({"asked": free, "unnamed": unnamed}, tmp_path, "light", widths=(400,))
    assert asks["asked"], "a request that the page's policy would allow"
    assert len(nameless["unnamed"]) == 1
