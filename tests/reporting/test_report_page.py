"""The page as a whole: well formed, complete, escaped, the same every time, self-contained."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from moeq.artifacts.assignment import Assignment, ExpertChoice
from moeq.artifacts.evaluation import Change, Divergence, EvalRow, Flips
from moeq.artifacts.gates import bounded
from moeq.artifacts.non_experts import OtherRow, OtherTable
from moeq.artifacts.sensitivities import SensitivityTable
from moeq.assigners.report import THIS, UNIFORM, Point
from moeq.papers import CONTEXT_AWARE, named
from moeq.recipe import domain_names
from moeq.reporting.atlas import atlas, own_widths
from moeq.reporting.cautions import cautions
from moeq.reporting.inputs import Loads, Refined, ReportInputs, TradeOff
from moeq.reporting.names import LayerNames, layer_names
from moeq.reporting.page import render
from moeq.reporting.style import CSS
from moeq.stages import model_card
from moeq.stages.report import card_figures

Make = Callable[..., ReportInputs]
ANCHORS = [
    "summary", "size", "warnings", "variants", "activation", "losses", "sensitivity", "bits", "estimate", "provenance",
]  # fmt: skip
VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = "<script>alert('$x$ & \"y\"')</script>"


class Balanced(HTMLParser):
    """Fails on a closing tag that does not match; keeps what the tests ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Balanced:
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def page(make: Make) -> str:
    """The page of the default run."""
    return render(make())


def drawings(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)


def test_all_sections_are_there_in_order_and_linked(page: str) -> None:
    found = parsed(page)
    assert [attributes["id"] for tag, attributes in found.tags if tag == "section"] == ANCHORS
    links = [attributes["href"] for tag, attributes in found.tags if tag == "a"]
    assert links[: 1 + len(ANCHORS)] == ["#warnings", *(f"#{anchor}" for anchor in ANCHORS)]


def test_every_drawing_is_xml_with_a_label_and_a_caption(page: str) -> None:
    found = drawings(page)
    assert len(found) == 2 + 5 + 4 + 3 + 1  # similarity, loss curve; measures; losses by width; bits, bars, other; size
    for drawing in found:
        root = ElementTree.fromstring(drawing)
        assert root.attrib["role"] == "img"
        assert len(root.attrib["aria-label"]) > 20
    assert page.count("<figure") == page.count("<figcaption>") == len(found)


def test_ids_are_unique_and_every_reference_has_its_id(page: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


@pytest.mark.full
def test_two_renders_give_the_same_bytes(page: str, make: Make) -> None:
    assert render(make()) == page


@pytest.mark.full
def test_the_users_matplotlib_settings_change_nothing(page: str, make: Make) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.grid": True}):
        assert render(make()) == page
        assert matplotlib.rcParams["font.size"] == 30


def test_names_are_escaped(make: Make) -> None:
    inputs = replace(make(name=HOSTILE), recipe_text=HOSTILE, digests={HOSTILE: HOSTILE})
    page = render(inputs)
    found = parsed(page)
    assert "script" not in {tag for tag, _ in found.tags}
    assert "alert('$x$ & \"y\"')" in found.text
    for drawing in drawings(page):
        ElementTree.fromstring(drawing)


@pytest.mark.full
def test_control_characters_do_not_break_the_drawings(make: Make) -> None:
    page = render(make(name="a\x00b\x1bc"))
    assert "\x00" not in page
    assert "\x1b" not in page
    for drawing in drawings(page):
        ElementTree.fromstring(drawing)


def test_nothing_is_asked_of_the_network(page: str) -> None:
    followed = r'<a href="https://arxiv.org/abs/[0-9.]+" rel="noreferrer">'  # by a reader who wants to
    assert re.search(followed, page)
    quiet = re.sub(rf'xmlns(:\w+)?="[^"]*"|{followed}', "", _without_pictures(page))
    assert not re.search(r"(?:https?:)?//\w", quiet)
    assert "@import" not in page
    assert "<script" not in page
    assert not re.search(r'\s(?:src|action|srcset)="', page)


def test_a_browser_may_run_nothing_and_fetch_nothing(page: str) -> None:
    """The policy comes before all that it holds for, and allows what the page has: one sheet, data images, styles."""
    found = parsed(page)
    policies = [
        place for place, (tag, attributes) in enumerate(found.tags)
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    (place,) = policies
    assert [tag for tag, _ in found.tags[:place]] == ["html", "head", "meta"]
    rules = dict(rule.split(" ", 1) for rule in str(found.tags[place][1]["content"]).split("; "))
    (sheet,) = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    digest = b64encode(sha256(sheet.encode()).digest()).decode()
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": "'unsafe-inline'",
        "style-src-elem": f"'sha256-{digest}'",
        "style-src-attr": "'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    links = {str(attributes["href"]) for tag, attributes in found.tags if tag == "image"}
    assert links
    assert all(link.startswith("data:image/png;base64,") for link in links)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_the_page_and_runs_nothing_that_got_in(page: str, tmp_path: Path) -> None:
    injected = """<script>document.title = "RAN"</script><img src="x" onerror="document.title = 'RAN'">
    <style>h1 { display: none }</style>"""
    shown, refused = opened(page, tmp_path / "page.html")
    assert "moeq report</title>" in shown
    assert refused == [], "nothing of the page's own is refused"
    shown, refused = opened(page.replace("</body>", f"{injected}</body>"), tmp_path / "injected.html")
    assert "moeq report</title>" in shown
    assert len(refused) == 4, "the script, the image, its event handler, the sheet"


def opened(page: str, file: Path) -> tuple[str, list[str]]:
    """What a browser makes of a page, and what the page's policy refused."""
    file.write_text(page, "utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
            *("--virtual-time-budget=2000", f"--user-data-dir={file.parent / 'profile'}", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "Content Security Policy" in line]


def _without_pictures(page: str) -> str:
    return re.sub(r"data:image/png;base64,[A-Za-z0-9+/=\s]*", "", page)


def test_the_headline_names_original_and_exported(page: str) -> None:
    text = parsed(page).text
    assert "5.73 MiB → 879 KiB" in text
    assert "6.67× smaller" in text
    assert "30.00 → 32.00" in text
    assert "+6.7\N{NARROW NO-BREAK SPACE}% on 1,234 tokens" in text


def test_a_checkpoint_that_grew_is_not_called_smaller(make: Make, with_rows: Make) -> None:
    """As one does that has all replicas of its experts."""
    inputs = make()
    old, new, *others = inputs.evaluation.rows
    assert old.whole_bytes is not None
    grown = new.model_copy(update={"expert_bytes": 2 * old.expert_bytes, "checkpoint_bytes": 5 * old.whole_bytes // 2})
    text = parsed(render(with_rows(inputs, (old, grown, *others)))).text
    assert "2.00× as large, scales and zero points counted" in text
    assert "2.50× as large" in text
    assert "× smaller" not in text


@pytest.mark.full
def test_differences_from_the_original_stand_with_their_intervals(make: Make, with_rows: Make) -> None:
    def shown(**change: Any) -> str:
        given = Change(**{"difference": -0.02, "low": -0.05, "high": 0.01, "p": 0.113, "stderr": 0.02} | change)
        rows = make().evaluation.rows
        rows = (rows[0], *(row.model_copy(update={"changes": {"arc": given}}) for row in rows[1:]))
        return parsed(render(with_rows(make(), rows))).text

    text = shown(adjusted_p=0.213, items=400, effective_items=310.4)
    assert "after Holm over the rows of a column" in text
    assert "\N{MINUS SIGN}0.0200\N{MINUS SIGN}0.0500 to +0.0100, p = 0.213, n = 310 of 400" in text
    few = shown(low=None, high=None, p=None, items=4, fewest_items=8)
    assert "\N{MINUS SIGN}0.0200too few: it takes 8" in few
    before = shown(items=400, resamples=2000, seed=7)
    assert "(2,000 resamples, seed 7; neighbouring windows are not independent" in before
    assert "p = 0.113, n = 400" in before
    assert "Student" not in parsed(render(make())).text, "where nothing was compared"


def divergence_of(kl: float, **more: object) -> Divergence:
    kls = {name: kl * float(name) / 50 for name in ("0", "50", "99", "99.9", "100")}
    figures = {
        "base": "original", "tokens": 500, "kl": kl, "kl_stderr": 0.0021, "kl_percentiles": kls, "same_top": 0.913,
        "same_top_stderr": 0.01, "top5_overlap": 0.87, "top5_overlap_stderr": 0.01, "change": -0.01,
        "change_stderr": 0.001, "rms_change": 0.052, "rms_change_stderr": 0.002,
        "change_percentiles": {"1": -0.21, "99": 0.12},
    }  # fmt: skip
    return Divergence.model_validate(figures | more)


@pytest.mark.full
def test_divergences_stand_beside_perplexity_and_in_a_table(make: Make, with_rows: Make) -> None:
    rows = make().evaluation.rows
    found = (divergence_of(0.0512), divergence_of(0.131))
    flips = {"arc": Flips(items=400, lost=13, gained=5)}
    change = Change(difference=-0.02, low=-0.05, high=0.01, p=0.213, stderr=0.02, items=400, resamples=2000, seed=7)
    rows = (
        rows[0],
        *(
            row.model_copy(update={"divergence": one, "flips": flips, "changes": {"arc": change}})
            for row, one in zip(rows[1:], found, strict=True)
        ),
    )
    page = render(with_rows(make(), rows))
    text = parsed(page).text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert "0.0512 ± 0.002" in text
    assert "equal top-191.3 % ± 1tokens whose likeliest is that of the original" in text
    assert "over 500 tokens" in text
    assert "\N{MINUS SIGN}21.0 to +12.0" in text
    assert "p = 0.213, n = 400answers: 13 lost, 5 gained" in text
    assert "lower bounds" not in text
    assert page.count("Scatter chart of expert bytes against KL") == 1
    bounded = [
        row.model_copy(update={"divergence": divergence_of(0.05, kept=300, rest=0.004, kl_most=0.0631)})
        for row in rows[1:]
    ]
    text = parsed(render(with_rows(make(), [rows[0], *bounded]))).text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert "the 300 largest logits of the original were kept, and of the rest, 0.4 % of the probability" in text
    assert "at most: mixed 0.0631, uniform-4 0.0631." in text


def test_the_card_has_divergences_where_they_were_measured(make: Make, with_rows: Make) -> None:
    inputs = make()
    rows = [row.model_copy(update={"divergence": divergence_of(0.0512)}) for row in inputs.evaluation.rows[1:]]
    measured_too = with_rows(inputs, [inputs.evaluation.rows[0], *rows]).evaluation
    lines = model_card.figures_table(card_figures(measured_too, {}))
    measured = "perplexity | KL from the original, nats a token | equal top-1 | accuracy"
    assert lines[0] == f"| assignment | bits | expert bytes | {measured} |"
    assert lines[2].endswith("| 30.000 |  |  | 60.0 % |")
    assert lines[4].endswith("| 32.000 | 0.0512 | 91.3 % | 60.0 % |")
    before = model_card.figures_table(card_figures(inputs.evaluation, {}))
    assert before[0] == "| assignment | bits | expert bytes | perplexity | accuracy |", "as of runs made before"


@pytest.mark.cases(1)
@pytest.mark.parametrize("missing", [{"perplexity": None, "perplexity_by_domain": {}}, {"accuracy": None, "tasks": {}}])
def test_what_was_not_measured_is_said(make: Make, with_rows: Make, missing: dict[str, object]) -> None:
    inputs = make()
    rows = [row.model_copy(update=missing) for row in inputs.evaluation.rows]
    found = parsed(render(with_rows(inputs, rows)))
    assert "not measured" in found.text
    assert [attributes["id"] for tag, attributes in found.tags if tag == "section"] == ANCHORS


@pytest.mark.full
@pytest.mark.parametrize("kept", [[0], [1], [2], []])
def test_few_evaluation_rows(make: Make, with_rows: Make, kept: list[int]) -> None:
    inputs = make()
    page = render(with_rows(inputs, [inputs.evaluation.rows[index] for index in kept]))
    assert [attributes["id"] for tag, attributes in parsed(page).tags if tag == "section"] == ANCHORS
    assert all(ElementTree.fromstring(drawing).tag.endswith("svg") for drawing in drawings(page))


@pytest.mark.full
def test_another_geometry_is_said_clearly(make: Make) -> None:
    inputs = make()
    assert "They are not speeds of org/mixed" in render(inputs)
    own = replace(inputs.speed, geometry_is_the_models=True)
    assert "They are not speeds of" not in render(replace(inputs, speed=own))


@pytest.mark.full
def test_a_tiny_models_own_speed_ups_are_not_in_tables(make: Make) -> None:
    inputs = make()
    own = replace(inputs.speed, geometry_is_the_models=True)
    assert "decode speed-up, estimated" in render(replace(inputs, speed=own)), "of a model as large as Mixtral"
    tiny = replace(own, geometry={**own.geometry, "num_layers": 4, "hidden_size": 96, "intermediate_size": 128})
    text = parsed(render(replace(inputs, speed=tiny))).text
    assert "decode speed-up, estimated" not in text
    assert "The model is so small that these times are of starting work" in text


def test_the_first_section_says_what_was_decided_with_settings_that_had_a_say(make: Make) -> None:
    inputs = make(gpu=0)
    parameters = {"quantizer": "gptq", "alpha": 0.5, "selector": True, "loss_weighting": "mass", "gpu_experts": 0}
    mixed = inputs.assignment.model_copy(update={"parameters": parameters | {"bits_per_weight": "23/10"}})
    loads = (Loads(name="native"), Loads(name="llama.cpp", reason="1 bit"))
    gates = (bounded("kl", 0.05, 0.04, "<="), bounded("bytes", 12e9, 13e9, "<="))
    shown = replace(inputs, assignment=mixed, loads=loads, gates=gates, labels={"mixed": "prefix-split 2.3 bits"})
    text = parsed(render(shown)).text
    first = text[text.index("What was decidedTerms") : text.index("Lower left is better")]
    for words in (
        "assignmentprefix-split 2.3 bits", "2.3 bits stored for a weight of the experts", "loss weighting mass",
        "loads innative (transformers with moeq); not in llama.cpp (1 bit)",
        "failed kl: 0.05 <= 0.04", "held bytes: 12,000,000,000 B <= 13,",
    ):  # fmt: skip
        assert words in first, words
    assert "gpu experts" not in first
    assert "A gate failed: kl: 0.05 <= 0.04." in text[text.index("Warnings (") :]
    assert text.count("prefix-split 2.3 bits") > 4, "in tables, too"
    for budget, words in ({"bits_per_weight": "23/10"}, "2.3 bits stored"), ({"code_bits": "3"}, "3 code bits"):
        hot = mixed.model_copy(update={"parameters": parameters | budget | {"gpu_experts": 4}})
        told = parsed(render(replace(shown, assignment=hot))).text
        assert f"budget{words} for a weight of the experts off the GPU" in told, "those on it are not counted"
    uniform = mixed.model_copy(update={"method": "uniform", "parameters": parameters | {"bits": 2}})
    text = parsed(render(replace(shown, assignment=uniform))).text
    assert "loss weighting" not in text, "uniform weighs no losses"
    assert "budgetnone: one width is named" in text
    assert "alpha" not in text[: text.index("Lower left is better")]


@pytest.mark.full
def test_warnings_are_listed_and_none_is_said(make: Make, with_rows: Make) -> None:
    inputs = make()
    text = parsed(render(inputs)).text
    listed = text[text.rindex("Warnings (") : text.index("Every variantEach row")]
    for words in (
        "3 of 15 experts saw fewer than 16 tokens in calibration",
        "Never chosen in calibration: model.layers.0.mlp, expert 4; model.layers.1.mlp, expert 4",
        "borrowed hessian (3), raised damping (3) of 15 experts",
        "Speeds are those of mixtral-8x7b, not of org/mixed.",
    ):
        assert words in listed, words
    assert "dominated:" not in listed
    rows = inputs.evaluation.rows
    better = rows[2].model_copy(update={"expert_bytes": rows[1].expert_bytes, "perplexity": 31.0})
    text = parsed(render(with_rows(inputs, [rows[0], rows[1], better]))).text
    assert "The exported checkpoint is dominated: uniform-4 is no larger and no worse." in text


def test_a_variant_of_a_lower_perplexity_and_a_higher_kl_is_no_better(make: Make, with_rows: Make) -> None:
    """A perplexity may fall by chance: 2 bits were said to be no worse than 3 that came far closer to the original."""
    inputs = make()
    first, own, other = inputs.evaluation.rows[:3]
    own = own.model_copy(update={"divergence": divergence_of(0.05)})
    for kl, worse in ((0.051, False), (0.05, True)):
        changed = {"expert_bytes": own.expert_bytes, "perplexity": 31.0, "divergence": divergence_of(kl)}
        shown = with_rows(inputs, [first, own, other.model_copy(update=changed)])
        assert ("is dominated: uniform-4" in str(cautions(shown).parts)) == worse


def test_papers_and_words_are_explained_where_they_first_stand(page: str) -> None:
    sections = dict(re.findall(r'<section id="([^"]+)">(.*?)</section>', page, flags=re.DOTALL))
    known: set[str] = set()
    for anchor, text in sections.items():
        listed = re.search(r'<details class="terms">.*?</details>', text, re.DOTALL)
        entries = set() if listed is None else set(re.findall(r"<dt>(.*?)</dt>", listed[0]))
        assert not entries & known, "nothing is explained twice"
        known |= entries
        shown = re.sub('<details class="terms">.*?</details>|<pre>.*?</pre>|<[^>]*>', " ", text, flags=re.DOTALL)
        for word in ("MoNDE", "HOBBIT", "bandwidth rule", "GPTQ", "NDP", "Fan et al. 2025", "MoPEQ"):
            assert word not in shown or word in known, f"{word} stands in {anchor} unexplained"
    assert {"MoNDE", "HOBBIT", "bandwidth rule", "GPTQ", "NDP", "Fan et al. 2025", "MoPEQ"} <= known
    assert CONTEXT_AWARE.title in parsed(page).text
    assert CONTEXT_AWARE.authors in parsed(page).text
    text = parsed(page).text
    for number in re.finditer(r"[Pp]aper 00\d", text):
        assert text[: number.start()].endswith((" (", "Called ")), text[number.start() - 60 : number.end()]


def test_layers_have_the_models_own_names(make: Make) -> None:
    inputs = make()
    names = tuple(f"model.layers.{number}.mlp" for number in (3, 5, 6))
    page = render(replace(inputs, profile=replace(inputs.profile, layers=names)))
    drawn = next(drawing for drawing in drawings(page) if "Activation frequency: map" in drawing)
    assert ">\N{DOWNWARDS ARROW} model.layers.N.mlp</text>" in drawn
    assert all(f">{number}</text>" in drawn for number in (3, 5, 6))
    assert "model.layers.6.mlp, expert 4" in page
    assert layer_names(["encoder.1.mlp", "decoder.1.mlp"]).labels == ("encoder.1.mlp", "decoder.1.mlp")
    assert layer_names(["h.2.moe"]) == LayerNames(labels=("2",), title="h.N.moe")
    assert layer_names(["a.1.b.2", "a.1.b.4"]).title == "a.1.b.N"


def test_domains_whose_file_stems_say_nothing_have_their_sources_name(make: Make, with_rows: Make) -> None:
    named = domain_names(
        ["test", "train", "math"], ["/text/wikitext/test.txt", "/data/c4/data/train.jsonl", "math.txt"]
    )
    assert named == {"test": "wikitext", "train": "c4", "math": "math"}
    inputs = make()
    rows = [
        row.model_copy(update={"perplexity_by_domain": {"test": 9.0, "math": 8.0}}) for row in inputs.evaluation.rows
    ]
    heads = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', render(replace(with_rows(inputs, rows), domains=named)))
    assert {"wikitext", "math"} <= set(heads)
    assert "test" not in heads


@pytest.mark.full
def test_assumptions_and_sensitivity_are_printed_in_full(make: Make) -> None:
    inputs = make()
    one = inputs.speed.estimates[0]
    text = parsed(render(inputs)).text
    assert all(named(line) in text for line in one.assumptions)
    assert all(row.change.replace("->", "→") in text for row in one.sensitivity)
    assert all(named(constant.source) in text for constant in one.hardware_constants)


@pytest.mark.full
def test_fallbacks_and_unreached_experts_are_counted(make: Make) -> None:
    text = parsed(render(make(layers=3, experts=5))).text
    assert "3 experts of 15: too few calibration tokens, so part of the layer's Hessian stood in" in text
    assert "3 experts of 15: the factorization held only with more damping" in text
    assert "Fewest calibration tokens: 0 (model.layers.0.mlp, expert 0)" in text
    assert "Never chosen in calibration: 3 experts (model.layers.0.mlp, expert 4; model.layers.1.mlp, expert 4" in text


def test_a_profile_without_decode_tokens(make: Make) -> None:
    inputs = make()
    silent = tuple(np.stack([counts[:, 0], 0 * counts[:, 1]], 1) for counts in inputs.profile.counts)
    page = render(replace(inputs, profile=replace(inputs.profile, counts=silent)))
    assert "their similarity is unknown" in page


@pytest.mark.full
@pytest.mark.parametrize(("layers", "experts"), [(94, 128), (61, 256)])
def test_pages_of_large_models_stay_small(make: Make, with_rows: Make, layers: int, experts: int) -> None:
    inputs = make(layers=layers, experts=experts, gpu=0, widths=(2, 3))
    other = inputs.evaluation.rows[-1]
    names = [f"mopeq-{letter}" for letter in "abcdef"]
    more = [other.model_copy(update={"name": name, "assignment": renamed(other, name)}) for name in names]
    page = render(with_rows(inputs, [*inputs.evaluation.rows, *more]))
    found = drawings(page)
    assert len(found) == 2 + 5 + 2 + 3 + 6 + 1
    for drawing in found:
        ElementTree.fromstring(drawing)
        assert len(drawing.encode()) < 90_000
    assert len(page.encode()) < 1_200_000
    folded = [attributes for tag, attributes in parsed(page).tags if tag == "details"]
    assert not any("open" in attributes for attributes in folded)


def renamed(row: EvalRow, name: str) -> Assignment:
    assert row.assignment is not None
    return row.assignment.model_copy(update={"name": name, "method": "mopeq", "parameters": {"metric": "hessian"}})


@pytest.mark.full
def test_outlined_maps_of_large_models_stay_small(make: Make) -> None:
    for drawing in drawings(render(make(layers=94, experts=128, gpu=40, widths=(2,)))):
        ElementTree.fromstring(drawing)
        assert len(drawing.encode()) < 150_000


@pytest.mark.full
def test_every_assignment_has_a_map_with_its_bits_and_bytes(make: Make, with_rows: Make) -> None:
    inputs = make()
    other = inputs.evaluation.rows[-1]
    rows = [*inputs.evaluation.rows, other.model_copy(update={"name": "mopeq", "assignment": renamed(other, "mopeq")})]
    page = render(with_rows(inputs, rows))
    bits = {row.name: f"{row.bits_per_weight:.2f}" for row in rows if row.assignment is not None}
    for name, size in (("mixed", "879 KiB"), ("uniform-4", "1.63 MiB"), ("mopeq", "1.63 MiB")):
        assert f">{name}: {bits[name]} bits, {size}</text>" in page
    assert "MoPEQ (metric hessian, scope layer). No expert is placed on the GPU." in page
    folded = [attributes for tag, attributes in parsed(page).tags if tag == "details"]
    assert sum("open" in attributes for attributes in folded) == 2  # of small models, nothing but the recipe is folded


@pytest.mark.full
def test_measures_have_a_map_each_and_unknown_ones_none(make: Make) -> None:
    inputs = make()
    titles = ["Activation frequency", "Routing mass", "Hessian trace", "Hybrid importance",
              "Trace of the calibration Hessian", "2-bit loss", "1-bit loss", "3-bit loss",
              "4-bit loss"]  # fmt: skip
    assert re.findall(r'aria-label="([^":]+): map of 3 layers by 5 experts', render(inputs))[:9] == titles
    table = inputs.sensitivities.table
    place = table.column_names.index("calibration_hessian_trace")
    nothing = pa.nulls(len(table), pa.float64())
    unknown = SensitivityTable(table.set_column(place, "calibration_hessian_trace", nothing))
    page = render(replace(inputs, sensitivities=unknown))
    assert "Not known of any expert of this run: Trace of the calibration Hessian." in page
    assert "calibration-hessian-trace" not in {one.key for one in atlas(replace(inputs, sensitivities=unknown))}
    assert page.count(": map of 3 layers") == len(titles) - 1 + 2


def test_maps_as_files(make: Make) -> None:
    inputs = make(gpu=0)
    found = {one.key: one for one in atlas(inputs)}
    assert {"activation-frequency", "hybrid-importance", "relative-loss-4", "widths-mixed"} < set(found)
    for one in found.values():
        root = ElementTree.fromstring(one.svg())
        assert float(root.attrib["width"]) > 300
        assert "var(" not in one.svg()
        rows = list(csv.reader(io.StringIO(one.csv())))
        assert rows[0] == ["layer", "expert", "value"]
        assert [tuple(map(int, row[:2])) for row in rows[1:]] == [(n, e) for n in range(3) for e in range(5)]
        values = np.array([float(value or "nan") for _, _, value in rows[1:]]).reshape(3, 5)
        np.testing.assert_array_equal(values, np.stack(one.values))
    assert found["calibration-hessian-trace"].csv().endswith("2,4,\n")
    np.testing.assert_array_equal(found["widths-mixed"].values, inputs.assignment.bits())


def test_names_that_differ_in_letters_of_other_scripts_have_maps_of_their_own(make: Make, with_rows: Make) -> None:
    inputs = make()
    named = [
        row.model_copy(update={"name": name, "assignment": row.assignment.model_copy(update={"name": name})})
        for row in inputs.evaluation.rows
        if row.assignment is not None and not row.exported
        for name in ("größe", "grüße")
    ]
    shown = with_rows(inputs, [*inputs.evaluation.rows, *named])
    assert len({one.key for one in atlas(shown)}) == len(atlas(inputs)) + 2


def test_matrices_of_several_widths_have_their_mean(make: Make) -> None:
    inputs = make(gpu=0)
    layer = inputs.assignment.layers[0]
    mixed = ExpertChoice(tier="ndp", bits=4, projections={"gate_proj": 2, "up_proj": 2, "down_proj": 4}, importance=0.5)
    first = layer.model_copy(update={"experts": (mixed, *layer.experts[1:])})
    own = inputs.assignment.model_copy(update={"layers": (first, *inputs.assignment.layers[1:])})
    inputs = replace(inputs, assignment=own)
    found = own_widths(inputs)
    assert float(found.csv().splitlines()[1].removeprefix("0,0,")) == 8 / 3
    assert found.csv().splitlines()[2] == f"0,1,{layer.experts[1].bits}"
    assert "Cells: the mean of the expert's matrices." in found.caption()
    assert ">2.7</text>" in found.svg()
    assert "the mean of its matrices' code bits" in parsed(render(inputs)).text
    for given, counted in ((inputs, "matrices"), (make(), "experts")):
        (bars,) = [drawn for drawn in drawings(render(given)) if f"Bar chart of {counted} by code bits" in drawn]
        assert re.findall(">(experts|matrices)</text>", bars) == [counted]


@pytest.mark.full
def test_the_header_says_what_calibration_reached_and_what_was_refined(make: Make, page: str) -> None:
    inputs = make()
    text = parsed(page).text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert "Calibration reached 12 of 15 experts with 16 tokens or more, 80 %; 3 of the others never." in text
    assert "every layer's placed experts trained" not in text
    refined = Refined(changed=9, quantized=12, iterations=200)
    text = parsed(render(replace(inputs, refined=refined))).text
    assert "refinedevery layer's placed experts trained together, 200 steps a layer; it changed 9 of 12" in text


def test_sizes_stand_beside_quality(page: str) -> None:
    text = re.sub("<[^>]*>", "|", page.replace("\N{NARROW NO-BREAK SPACE}", " "))
    row = re.sub(r"\|+", "|", text[text.index("|mixed|exported|") :])
    assert row.startswith("|mixed|exported|")
    assert "|2.40|879 KiB| 15.0 %|2.77 MiB| 36.2 %|5.80|32.00| +6.7 %|60.0 %|" in row
    first = re.sub(r"\|+", "|", text[text.index("|16.00|") :])
    assert first.startswith("|16.00|5.73 MiB| 100.0 %|7.63 MiB| 100.0 %|16.00|30.00|60.0 %|")


def test_other_replicas_are_said_where_the_checkpoint_has_some(make: Make, page: str) -> None:
    """The bits of all weights are without them, the bytes of the whole checkpoint are not."""
    assert "other replicas" not in page
    inputs = make()
    totals = inputs.manifest.totals.model_copy(update={"other_replica_bytes": 422_400})
    manifest = inputs.manifest.model_copy(update={"totals": totals})
    text = parsed(render(replace(inputs, manifest=manifest))).text
    for words in (
        "5.80 of a weight of the whole checkpoint, other replicas left out", "413 KiB of other replicas among them",
        "are of all tensors but other replicas over the checkpoint's 4,000,000 weights",
    ):  # fmt: skip
        assert words in text, words


def test_the_cards_rows_are_sorted_by_size(make: Make) -> None:
    found = card_figures(make().evaluation, {})
    assert [row["name"] for row in found] == ["original", "uniform-4", "mixed"]
    assert set(found[0]) == {
        "name",
        "bits_per_weight",
        "expert_bytes",
        "perplexity",
        "accuracy",
        "kl",
        "kl_stderr",
        "same_top",
    }


def other_row(module: str, kind: str, error: float | None, **more: object) -> OtherRow:
    values = {
        "module": module, "kind": kind, "bits": 4, "method": "gptq", "group_size": 64, "symmetric": False, "rows": 40,
        "inputs": 30, "relative_error": error, "calibration_rows": 9, "heldout_rows": 3, "fallback": "none",
        "bytes": 700,
    }  # fmt: skip
    return OtherRow(**values | more)


@pytest.mark.full
def test_other_modules_have_a_section_where_they_are_packed(make: Make, page: str) -> None:
    rows = (
        other_row("layers.0.q", "attention", 0.01),
        other_row("layers.0.k", "attention", 0.03, fallback="rounded+no_tokens", method="rtn"),
        other_row("table", "embeddings", None, bits=8, tied="lm_head", bytes=1300),
    )
    left = {"layers.0.dt": "the family's code reads its weight without calling it"}
    inputs = make()
    evaluation = inputs.evaluation.model_copy(
        update={"rows": tuple(row.model_copy(update={"other_bytes": 4_000_000}) for row in inputs.evaluation.rows)}
    )
    table = OtherTable(modules=rows, left=left, absent=("dense",))
    text = parsed(render(replace(inputs, others=table, evaluation=evaluation))).text
    for words in (
        "What else was packed", "1.37 KiB", "4.69 KiB", "2 %", "3 %", "table and lm_head are one tensor",
        "1 module left in full precision: the family's code reads its weight", "Not in this model: dense",
        "rounded to nearest instead of GPTQ", "no calibration row came to it", "bytes of the whole checkpoint",
        "whole checkpoint", "9.54 MiB", "4.68 MiB",
    ):  # fmt: skip
        assert words in text.replace("\N{NARROW NO-BREAK SPACE}", " "), words
    assert "What else was packed" not in page


@pytest.mark.full
def test_what_other_sizes_would_cost(make: Make) -> None:
    points = [
        *(
            Point(method="optimal by matrix", bits_per_weight=b, expert_bytes=100 * b, objective=4.0**-b)
            for b in (1, 2)
        ),
        Point(method=UNIFORM, bits_per_weight=2, expert_bytes=200, objective=0.1),
        Point(method=THIS, bits_per_weight=1.5, expert_bytes=150, objective=0.12),
    ]
    shown = render(replace(make(), around=points))
    anchors = [attributes["id"] for tag, attributes in parsed(shown).tags if tag == "section"]
    assert anchors == [*ANCHORS[:2], "frontier", *ANCHORS[2:]]
    drawing = next(one for one in drawings(shown) if "this run: 0.12 at 150 B" in one)
    root = ElementTree.fromstring(drawing)
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"optimal by matrix", UNIFORM, THIS, "objective"} <= set(texts)
    larger = render(replace(make(), around=[replace(point, expert_bytes=7_386_704) for point in points]))
    assert "this run: 0.12 at 7.05 MiB" in larger, "as in the table of sizes"
    exact = [replace(point, objective=0.0) for point in points]
    assert render(replace(make(), around=exact)) == render(make()), "nothing costs anything"


@pytest.mark.full
def test_size_quality_and_speed_stand_together_with_what_makes_them(make: Make, traded: list[TradeOff]) -> None:
    inputs, points = make(), traded
    shown = render(replace(inputs, trade_offs=points))
    anchors = [attributes["id"] for tag, attributes in parsed(shown).tags if tag == "section"]
    assert anchors == [*ANCHORS[:2], "trade-offs", *ANCHORS[2:]]
    section = shown.split('<section id="trade-offs"', 1)[1].split("</section>", 1)[0]
    drawing = ElementTree.fromstring(drawings(section)[0])
    texts = ["".join(text.itertext()) for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"static mixed precision", "context-aware", "objective", "decode tokens a second"} <= set(texts)
    assert "this run: 0.0312 at 2.39 MiB, 36 a second" in section
    assert re.findall(r"<code>(.*?)</code>", section) == [p.command for p in points if p.command is not None]
    assert "with the sizes of mixtral-8x7b, by a model of h100-ndp-cxl, not measured" in section
    toy = replace(inputs.speed, geometry_is_the_models=True, geometry=dict(inputs.speed.geometry, hidden_size=8))
    nothing_to_say = replace(inputs, speed=toy)
    assert render(replace(nothing_to_say, trade_offs=points)) == render(nothing_to_say)
    assert render(replace(inputs, trade_offs=points[:1])) == render(inputs)


def test_what_codes_are_and_where_they_load(make: Make) -> None:
    inputs = make()
    trellis = inputs.assignment.model_copy(update={"state_bits": 10, "group_size": -1, "symmetric": True})
    reasons = {"native": None, "vllm": "trellis codes", "gptqmodel": "trellis codes", "x": "2 bits"}
    loads = [Loads(name=name, reason=reason) for name, reason in reasons.items()]
    shown = parsed(render(replace(inputs, assignment=trellis, loads=loads))).text
    assert "trellis codes of 1,024 states, one group a row" in shown
    assert "native (transformers with moeq); not in vllm, gptqmodel (trellis codes); x (2 code bits)" in shown


def test_paper_keeps_tables_and_what_belongs_together() -> None:
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", CSS.split("@media print", 1)[1])
    of = {name.strip(): text for names, text in rules for name in names.split(",") if "break-inside" in text}
    assert {"figure", "tr", ".tile", ".warning"} <= set(of)
    assert not any("display" in text for names, text in rules if re.search(r"\b(table|tr|th|td)\b", names))
