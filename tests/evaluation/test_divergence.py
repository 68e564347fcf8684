"""What `--kl-divergence` of llama.cpp prints, against plain float64; storage of all logits and of the likeliest."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moeq.artifacts.evaluation import Divergence
from moeq.errors import EvaluationError, StorageError
from moeq.evaluation import divergence, reference_logits
from moeq.evaluation.divergence import Comparer, Recorder, Reference, Scorer
from moeq.evaluation.paired import Items
from moeq.evaluation.perplexity import perplexity
from moeq.evaluation.reference_logits import ReferenceLogits, kept_logits, stored_bytes
from moeq.evaluation.results import text_of_items
from moeq.models import loading
from moeq.models.corpus import Sequences
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel

Windows = list[tuple[Tensor, Tensor]]  # logits [T, V] and targets [T]
CPU = torch.device("cpu")


def windows(count: int, tokens: int, vocabulary: int, seed: int, dtype: torch.dtype = torch.float32) -> Windows:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            (3 * torch.randn(tokens + n % 3, vocabulary, generator=generator)).to(dtype),
            torch.randint(vocabulary, (tokens + n % 3,), generator=generator),
        )
        for n in range(count)
    ]


def changed(text: Windows, noise: float, seed: int) -> Windows:
    generator = torch.Generator().manual_seed(seed)
    return [((part + noise * torch.randn(part.shape, generator=generator)).to(part.dtype), at) for part, at in text]


def measure(scorer: Scorer, text: Windows) -> dict[str, Any]:
    """A text as `perplexity` measures it, and its divergence."""
    scores = [scorer.score((number, 0), *window) for number, window in enumerate(text)]
    sums, tokens = (np.array([float(f(one)) for one in scores]) for f in (torch.sum, len))
    items = Items(kind="perplexity", values=sums, weights=tokens, names=("",) * len(scores))
    cut = {"documents": len(scores), "window": 8, "stride": 8, "counted": "all", "unit": "sequence"}
    measured = {"text": "one", **text_of_items(items, **cut)}
    return {"scores": torch.cat(scores), "divergence": scorer.divergence(measured), "missing": scorer.missing}


def compared(base: Windows, other: Windows, folder: Path | None = None) -> dict[str, Any]:
    with Reference(folder) as reference:
        tokens = sum(len(targets) for _, targets in base)
        assert measure(reference.scorer("base", tokens), base)["divergence"] is None
        return measure(reference.scorer("other", tokens), other)


def by_llama(base: Windows, other: Windows) -> dict[str, Any]:
    """The figures of perplexity.cpp's kl_divergence, in plain float64 and with all tokens of the base."""
    kls, changes, same, overlap = [], [], [], []
    for (first, targets), (second, _) in zip(base, other, strict=True):
        for p_logits, q_logits, target in zip(first.double().numpy(), second.double().numpy(), targets, strict=True):
            p, q = (np.exp(logits - logits.max()) for logits in (p_logits, q_logits))
            p, q = p / p.sum(), q / q.sum()
            kls.append(np.sum(p * (np.log(p) - np.log(q))))
            changes.append(q[target] - p[target])
            same.append(p.argmax() == q.argmax())
            overlap.append(len(set(np.argsort(-p)[:5]) & set(np.argsort(-q)[:5])) / 5)
    return {"kl": np.sort(kls), "change": np.sort(changes), "same": np.mean(same), "overlap": np.mean(overlap)}


def percentile(values: np.ndarray, fraction: float) -> float:
    """As perplexity.cpp interpolates among sorted values."""
    place = fraction * (len(values) - 1)
    below = int(place)
    return float((1 - place + below) * values[below] + (place - below) * values[min(below + 1, len(values) - 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", [0.05, 1.0])
def test_the_figures_are_llama_cpps_in_plain_float64(dtype: torch.dtype, noise: float, tmp_path: Path) -> None:
    base = windows(40, 9, 211, 0, dtype)
    other = changed(base, noise, 1)
    found = Divergence.of(compared(base, other, tmp_path)["divergence"])
    wanted = by_llama(base, other)
    assert found.tokens == len(wanted["kl"]) == sum(len(targets) for _, targets in base)
    assert found.kl == pytest.approx(wanted["kl"].mean(), rel=1e-12)
    median = np.median(wanted["kl"])
    assert found.kl_percentiles["50"] == pytest.approx(median, rel=1e-12)
    assert (found.kl_percentiles["0"], found.kl_percentiles["100"]) == pytest.approx(wanted["kl"][[0, -1]], rel=1e-9)
    for values, percentiles in ((wanted["kl"], found.kl_percentiles), (wanted["change"], found.change_percentiles)):
        for name, value in percentiles.items():
            assert value == pytest.approx(percentile(values, float(name) / 100), rel=1e-9, abs=1e-14), name
    assert {"99", "99.9"} <= set(found.kl_percentiles)
    assert found.change == pytest.approx(wanted["change"].mean(), rel=1e-9, abs=1e-14)
    assert found.rms_change == pytest.approx(np.sqrt(np.mean(wanted["change"] ** 2)), rel=1e-12)
    if dtype == torch.float32:  # equals among 16 bits have no one order
        assert found.same_top == pytest.approx(wanted["same"], rel=1e-12)
        assert found.top5_overlap == pytest.approx(wanted["overlap"], rel=1e-12)
    assert (found.kept, found.rest, found.kl_most, found.kl_percentiles_most) == (None, 0, None, {})


def test_a_case_by_hand() -> None:
    """Base 1/2, 1/4, 1/4 and model 1/4, 1/2, 1/4; then both the same, and the likeliest changes places."""
    half, quarter = float(np.log(0.5)), float(np.log(0.25))
    base = [(torch.tensor([[half, quarter, quarter], [quarter, half, quarter]]), torch.tensor([0, 0]))]
    other = [(torch.tensor([[quarter, half, quarter], [quarter, half, quarter]]), torch.tensor([0, 0]))]
    found = compared(base, other)["divergence"]
    assert found["kl"] == pytest.approx(np.log(2) / 4 / 2, rel=1e-6)
    assert found["kl_percentiles"]["50"] == pytest.approx(np.log(2) / 8, rel=1e-6)
    assert found["kl_percentiles"]["100"] == pytest.approx(np.log(2) / 4, rel=1e-6)
    assert (found["same_top"], found["top5_overlap"]) == (0.5, 1.0)
    assert found["change"] == pytest.approx(-0.125, rel=1e-6)
    assert found["rms_change"] == pytest.approx(0.25 / np.sqrt(2), rel=1e-6)
    assert found["items"]["kl"] == pytest.approx([np.log(2) / 4], rel=1e-6)
    assert found["kl_stderr"] is None, "of a single window"


def test_errors_are_over_windows() -> None:
    base = windows(200, 5, 60, 2)
    found = compared(base, changed(base, 0.5, 3))["divergence"]
    tokens = np.array([len(targets) for _, targets in base])

    def error(sums: list[float]) -> float:
        values = np.array(sums)
        residuals = values - values.sum() / tokens.sum() * tokens
        return float(np.sqrt(np.sum(residuals**2)) / tokens.sum())

    for name in ("kl", "same_top", "top5_overlap", "change"):
        assert found[f"{name}_stderr"] == pytest.approx(error(found["items"][name]), rel=0.35), name
    of_squares = error(found["items"]["squared_change"])
    assert found["rms_change_stderr"] == pytest.approx(of_squares / (2 * found["rms_change"]), rel=0.35)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("room", [1 << 30, 1])
def test_a_model_does_not_differ_from_itself(dtype: torch.dtype, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_logits, "MOST_BYTES", room)
    base = windows(4, 6, 700, 4, dtype)
    found = Divergence.of(compared(base, base)["divergence"])
    assert abs(found.kl) < 1e-15 if room > 1 else found.kl < 1e-3
    assert (found.same_top, found.top5_overlap, found.change, found.rms_change) == (1, 1, 0, 0)
    assert found.kept == (None if room > 1 else reference_logits.LEAST_KEPT)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made beside those that are given, and of all that there are at once."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.largest, self.most, self.now = 0, 0, 0
        self.held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return made

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.given:
            return
        self.held[place] = self.held.get(place, 0) + 1
        if self.held[place] == 1:
            self.now += size
            self.largest, self.most = max(self.largest, size), max(self.most, self.now)
        weakref.finalize(tensor, self._gone, place, size)

    def _gone(self, place: int, size: int) -> None:
        self.held[place] -= 1
        if not self.held[place]:
            del self.held[place]
            self.now -= size


def test_a_vocabulary_of_150000_stays_within_its_bounds_and_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary, tokens = 150_000, 32
    base = windows(2, tokens // 2, vocabulary, 5)
    base = [(2 * logits, targets) for logits, targets in base]  # nine tenths of the probability within the likeliest
    other = changed(base, 0.3, 6)
    count = sum(len(targets) for _, targets in base)
    monkeypatch.setattr(reference_logits, "MOST_BYTES", count * 8 * 4000)
    with Largest([tensor for window in (*base, *other) for tensor in window]) as seen:
        found = Divergence.of(compared(base, other, tmp_path)["divergence"])
    wanted = by_llama(base, other)
    assert found.kept == 4000
    assert 0 < found.rest < 0.2
    assert found.kl <= wanted["kl"].mean() <= found.kl_most  # type: ignore[operator]
    assert found.kl_most < 2 * found.kl + 20 * found.rest  # type: ignore[operator]
    for name, least in found.kl_percentiles.items():
        assert least <= percentile(wanted["kl"], float(name) / 100) <= found.kl_percentiles_most[name]
    assert found.same_top == wanted["same"]
    assert found.top5_overlap == pytest.approx(wanted["overlap"])
    assert found.rms_change == pytest.approx(np.sqrt(np.mean(wanted["change"] ** 2)), rel=1e-9)
    assert 8 * vocabulary <= seen.largest <= 8 * divergence.SLICE, "nothing of a whole window is in float64"
    assert seen.most <= divergence.slice_bytes(tokens // 2, vocabulary)


@pytest.mark.parametrize("room", [1 << 30, 300 * 8 * 30])
def test_the_file_takes_what_is_foretold_and_has_no_name(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_logits, "MOST_BYTES", room)
    base = windows(3, 10, 1000, 7)
    tokens = sum(len(targets) for _, targets in base)
    with Reference(tmp_path) as reference:
        scorer = reference.scorer("base", tokens)
        measure(scorer, base)
        file = scorer._reference._file  # type: ignore[attr-defined]
        assert os.fstat(file.fileno()).st_size == stored_bytes(tokens, 1000, 4)
        assert not list(tmp_path.iterdir())
    assert file.closed
    assert kept_logits(tokens, 1000, 4) == (1000 if room == 1 << 30 else room // (tokens * 8))


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with Reference(tmp_path / "none") as reference, pytest.raises(StorageError, match="No such file") as caught:
        reference.scorer("base", 8)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_compared_says_why() -> None:
    base = windows(2, 5, 50, 8)
    other = compared(base, windows(2, 5, 60, 8))
    assert (other["divergence"], other["missing"]) == (None, "its vocabulary is 60, that of base 50")
    elsewhere = [(logits, targets.roll(1)) for logits, targets in base]
    more = [*base, base[0]]
    for text in (elsewhere, more):
        found = compared(base, text)
        assert (found["divergence"], found["missing"]) == (None, "its tokens are not those of base")


def test_outputs_that_are_not_finite_are_refused() -> None:
    base = [(logits, torch.full_like(targets, 4)) for logits, targets in windows(2, 5, 50, 9)]
    broken = [(logits.masked_fill(torch.arange(50) == 3, -torch.inf), targets) for logits, targets in base]
    with pytest.raises(EvaluationError, match="KL to base: the model's outputs are not finite"):
        compared(base, broken)
    assert compared(broken, broken)["divergence"]["kl"] == 0, "ruled out by both"


def sequences() -> Sequences:
    """Of the last one nothing counts."""
    ids = torch.randint(3, 2048, (6, 24), generator=torch.Generator().manual_seed(10))
    mask = torch.arange(24) < torch.tensor([24, 24, 11, 24, 2, 1])[:, None]
    return Sequences(ids=ids, mask=mask, domains=tuple("abcabc"))


def test_a_streamed_model_is_compared_like_a_loaded_one(tiny_mixtral: Path) -> None:
    source, rows = open_source(str(tiny_mixtral)), sequences()
    whole: Any = loading.load_model(source, torch.float32, CPU)
    streamed = StreamedModel(source, torch.float32, CPU)
    coarse: Any = loading.load_model(source, torch.bfloat16, CPU)
    found = []
    with Reference(None) as reference:
        run: Callable[..., dict[str, Any]] = lambda model, one, scorer: perplexity(  # noqa: E731
            model, rows, 2, CPU, lambda: None, one, scorer
        )
        for name, model, one in (("base", whole, None), ("streamed", streamed.model, streamed), ("16", coarse, None)):
            scorer = reference.scorer(name, int(rows.mask[:, 1:].sum()))
            measured = run(model, one, scorer)
            found.append((measured, scorer.divergence(measured)))
    assert found[0][0] == found[1][0]
    assert found[0][0]["perplexity"] == run(whole, None, None)["perplexity"]
    same, other = found[1][1], found[2][1]
    assert (same["kl"], same["same_top"], same["rms_change"]) == (0, 1, 0)
    first, second = ([], [])
    for row, length in enumerate(rows.mask.sum(1).tolist()):
        for model, to in ((whole, first), (coarse, second)):
            with torch.no_grad():
                logits = model(input_ids=rows.ids[row : row + 1, :length]).logits[0, :-1]
            to.append((logits, rows.ids[row, 1:length]))
    wanted = by_llama(first, second)
    assert other["tokens"] == len(wanted["kl"])
    assert other["kl"] == pytest.approx(wanted["kl"].mean(), rel=0.05), "16 bits round with the batch"
    assert other["kl"] > 1e-6


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text("utf-8"))
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.full
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Figures of a few tokens each lay between the large tensors that were freed: 0.4 MB a token of 131,072 words."""
    vocabulary, length, windows = 131072, 15, 8
    logits, targets = torch.randn(length, vocabulary).bfloat16(), torch.arange(length)
    reference = ReferenceLogits(tmp_path, windows * length)
    first, second = Recorder(reference), Comparer("itself", reference)
    for window in range(windows):
        first.score((window, 0), logits, targets)
    second.score((0, 0), logits, targets)
    before = anonymous()
    for window in range(1, windows):
        second.score((window, 0), logits, targets)
    assert anonymous() - before < 12 * 2**20
    assert second.missing is None
