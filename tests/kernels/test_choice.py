"""Which kernel is taken, and what is measured, kept and not believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_layers import any_codes, layer_of, matrix_of

from moeq.errors import ModelError
from moeq_kernels import caches, choice, measured
from moeq_kernels.cpu import kernel
from moeq_kernels.cpu.forms import FORMS, Form, forms
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.cpu.layer import PackedLayer, PackedLinear
from moeq_kernels.description import LayerOfExperts
from moeq_kernels.reference import ReferenceLayer, ReferenceLinear
from moeq_kernels.widths import Encoding

CPU = torch.device("cpu")
LAYER = layer_of((4, 2), 64, 32)


class Taken:
    """A kernel whose speed is made up; rows of 32 and more are unpacked faster."""

    measured = 0

    def __init__(self, form: str, prefill: int) -> None:
        self.form, self.prefill = form, prefill

    def seconds(self, rows: int) -> float:
        Taken.measured += 1
        slow = {"one": 2.0, "two": 1.0}[self.form]
        return 40.0 if self.prefill == 1 else slow * rows


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Speeds of two forms, and a cache of their own; how often was measured is in Taken."""
    monkeypatch.setenv(caches.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "_seconds", lambda made, _, rows, *more: [one.seconds(len(rows)) for one in made])
    Taken.measured = 0
    measured.best.cache_clear()
    yield tmp_path / "cache" / measured.NAME
    measured.best.cache_clear()


def best(found: tuple[str, ...] = ("one", "two")) -> Any:
    measured.best.cache_clear()
    return measured.best(Taken, found, 1)  # type: ignore[arg-type]


def test_the_fastest_form_is_taken_and_kept(speeds: Path) -> None:
    assert best() == ("two", 64)
    count = Taken.measured
    assert count > 0
    assert best() == ("two", 64)
    assert Taken.measured == count, "it was kept"
    (entry,) = json.loads(speeds.read_text("utf-8"))
    assert measured.cpu_model() in entry
    assert f"torch {torch.__version__}" in entry
    assert speeds.stat().st_mode & 0o777 == 0o600 or speeds.parent.stat().st_mode & 0o777 == 0o700
    measured.best.cache_clear()
    measured.best(Taken, ("one", "two"), 2)  # type: ignore[arg-type]
    assert Taken.measured == 2 * count, "another number of threads is another machine"
    assert len(json.loads(speeds.read_text("utf-8"))) == 2


def test_experts_and_a_matrix_alone_are_measured_apart(speeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(made: list[Taken], given: Any, rows: torch.Tensor, *more: int) -> list[float]:
        slower = len(rows) >= (256 if isinstance(given, LayerOfExperts) else 64)
        return [2.0 if slower and one.prefill != 1 else 1.0 for one in made]

    monkeypatch.setattr(measured, "_seconds", seconds)
    assert best() == ("one", 64)
    assert measured.best(Taken, ("one", "two"), 1, 0, True) == ("one", 256)  # type: ignore[arg-type]
    assert len(json.loads(speeds.read_text("utf-8"))) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"ENTRY": 3}', '{"ENTRY": ["three", 64]}',
                                    '{"ENTRY": ["two", 0]}', '{"ENTRY": ["two", "64"]}', "[" * 100_000])  # fmt: skip
def test_a_damaged_cache_is_measured_again(damage: str, speeds: Path) -> None:
    best()
    (entry,) = json.loads(speeds.read_text("utf-8"))
    count = Taken.measured
    speeds.write_text(damage.replace("ENTRY", entry), "utf-8")
    assert best() == ("two", 64)
    assert Taken.measured == 2 * count
    assert json.loads(speeds.read_text("utf-8"))[entry] == ["two", 64]


def test_a_cache_that_cannot_be_written_is_no_error(speeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds.parent.parent.joinpath("file").write_text("")
    monkeypatch.setenv(caches.VARIABLE, str(speeds.parent.parent / "file" / "below"))
    assert best() == best() == ("two", 64)


def test_the_cache_lies_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(caches.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caches.folder() == tmp_path / "moeq"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for none in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert caches.folder() == tmp_path / "home" / ".cache" / "moeq"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert caches.folder() == tmp_path / "home" / ".cache" / "moeq"


def test_a_form_that_is_always_faster_is_never_unpacked(speeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_seconds", lambda made, *_: [float(one.prefill == 1) for one in made])
    assert best(("one",)) == ("one", measured.NEVER)


@pytest.mark.parametrize(
    ("a_row", "of_unpacking", "once", "wanted"),
    [
        (3.0, 2.0, 4000.0, 4000),
        (2.5, 2.0, 1100.0, 2200),
        (2.0, 2.0, 1.0, measured.NEVER),
        (1.0, 2.0, 1.0, measured.NEVER),
    ],
)
def test_beyond_the_last_step_both_go_on_as_they_did(
    a_row: float, of_unpacking: float, once: float, wanted: int, speeds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what unpacking takes once is paid off: it was said to be never, of a long prompt 1.8 times too slow."""

    def seconds(made: list[Taken], _: Any, rows: torch.Tensor, *more: int) -> list[float]:
        return [once + of_unpacking * len(rows) if one.prefill == 1 else a_row * len(rows) for one in made]

    monkeypatch.setattr(measured, "_seconds", seconds)
    assert best(("one",)) == ("one", wanted)


def test_another_form_is_taken_only_where_it_is_clearly_faster(speeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, wanted in (({"one": 1.1, "two": 1.0}, "one"), ({"one": 1.3, "two": 1.0}, "two")):
        monkeypatch.setattr(measured, "_seconds", lambda made, *_, seconds=seconds: [seconds[one.form] for one in made])
        speeds.unlink(missing_ok=True)
        assert best() == (wanted, measured.NEVER)


def test_one_step_at_which_a_form_is_slower_is_chance(speeds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def seconds(made: list[Taken], _: Any, rows: torch.Tensor, *more: int) -> list[float]:
        steps.append(len(rows))
        return [2.0 if one.prefill != 1 and len(rows) in (32, 128, 256, 512) else 1.0 for one in made]

    monkeypatch.setattr(measured, "_seconds", seconds)
    assert best(("one",)) == ("one", 128)
    assert max(steps) == 256, "more rows tell nothing new"


@pytest.mark.parametrize(("misled", "wanted"), [((1024,), 512), ((512, 1024), 512), ((128,), 128), ((), 512)])
def test_the_step_before_is_asked_again(
    misled: tuple[int, ...], wanted: int, speeds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower than unpacking from `wanted` rows on; the first answers about some steps were of a busy machine."""
    asked: list[int] = []

    def seconds(made: list[Taken], _: Any, rows: torch.Tensor, *more: int) -> list[float]:
        count = len(rows)
        truly = count >= wanted
        asked.append(count)
        slower = truly if more else truly != (count in misled)
        return [2.0 if slower and one.prefill != 1 else 1.0 for one in made]

    monkeypatch.setattr(measured, "_seconds", seconds)
    assert best(("one",)) == ("one", wanted)


def test_moments_in_which_the_machine_is_busy_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels of one and two seconds, calls of which take longer by chance, the faster one's more often."""
    clock = [0.0]
    lost = {1.0: iter([0.0, 9.0, 4.0, 7.0, 5.0, 3.0, 0.4, 6.0, 0.0, 0.0]), 2.0: iter([0.0] * 10)}

    class Slow:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def linear(self, _: Any) -> Any:
            return lambda rows: clock.append(clock.pop() + self.seconds + next(lost[self.seconds]))

    monkeypatch.setattr(measured.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(measured, "MOST_SECONDS", 1000.0)
    rows = torch.zeros(1, 1)
    assert measured._seconds([Slow(1.0), Slow(2.0)], None, rows) == [1.0, 2.0]  # type: ignore[list-item,arg-type]


@pytest.mark.parametrize(
    ("here", "states", "compared"),
    [
        (["avx2_madd", "avx2", "plain"], 0, ["avx2_madd", "avx2"]),
        (["avx2_madd", "avx2", "plain"], 10, ["avx2_madd"]),  # both multiply them as they are, by the same code
        (["avx512_vnni", "avx512", "plain"], 10, ["avx512_vnni", "avx512"]),
        (["plain"], 8, ["plain"]),
    ],
)
def test_only_forms_of_different_code_are_compared_and_plain_loops_only_alone(
    monkeypatch: pytest.MonkeyPatch, here: list[str], states: int, compared: list[str]
) -> None:
    monkeypatch.setattr(kernel, "forms", lambda: here)
    assert kernel.contenders(2 if states else 4, states) == tuple(compared)


def test_what_is_measured_here_is_a_form_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(caches.VARIABLE, str(tmp_path))
    measured.best.cache_clear()
    prepared, why = choice.prepared_layer(LAYER, CPU, "measured")
    assert why is None
    assert isinstance(prepared, PackedLayer)
    assert list(json.loads((tmp_path / measured.NAME).read_text("utf-8")).values()) == [
        [prepared.form.name, prepared.prefill]
    ]
    measured.best.cache_clear()


def test_a_fixed_choice_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "best", None)
    prepared, why = choice.prepared_layer(LAYER, CPU, "fixed")
    assert why is None
    assert isinstance(prepared, PackedLayer)
    assert (prepared.form.name, prepared.prefill) == (forms()[0], CpuKernel().layer(LAYER).prefill)
    alone, _ = choice.prepared_linear(matrix_of(8, 32, 4), None, CPU, "fixed")
    assert isinstance(alone, PackedLinear)
    assert (alone.form.name, alone.prefill) == (forms()[0], FORMS[forms()[0]].prefill)


def test_the_reference_is_what_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choice.prepared_layer(LAYER, CPU, "reference")[0], ReferenceLayer)
    monkeypatch.setenv("MOEQ_KERNEL", "reference")
    assert isinstance(choice.prepared_layer(LAYER, CPU, "measured")[0], ReferenceLayer)
    assert isinstance(choice.prepared_linear(matrix_of(8, 16, 4), None, CPU, "fixed")[0], ReferenceLinear)
    monkeypatch.setenv("MOEQ_KERNEL", "plain")
    assert isinstance(choice.prepared_layer(LAYER, CPU, "reference")[0], ReferenceLayer)


@pytest.mark.parametrize("form", [*forms(), *forms(int8=True)])
def test_every_form_can_be_named(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_KERNEL", form)
    prepared, _ = choice.prepared_layer(LAYER, CPU, "measured")
    assert isinstance(prepared, PackedLayer)
    assert prepared.form.name == form


def test_a_form_that_rounds_activations_is_taken_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not set(forms()) & set(forms(int8=True))
    assert not any(FORMS[form].int8 for form in forms())
    monkeypatch.setenv("MOEQ_KERNEL", "cpu-int8")
    if forms(int8=True):
        prepared, _ = choice.prepared_layer(LAYER, CPU, "measured")
        assert isinstance(prepared, PackedLayer)
        assert prepared.form.name == forms(int8=True)[0]
        assert isinstance(choice.prepared_layer(LAYER, CPU, "reference")[0], ReferenceLayer)
    monkeypatch.setattr(Form, "runs_here", lambda self: not self.int8)
    wanted = r"MOEQ_KERNEL: this CPU does not run cpu-int8; take one of reference, cpu, .*avx512_bf16, .*, plain$"
    with pytest.raises(ModelError, match=wanted):
        choice.named()


def test_a_name_that_there_is_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_KERNEL", "avx")
    wanted = r"MOEQ_KERNEL: no kernel is called 'avx'; take one of reference, cpu, cpu-int8, amx, .*, triton$"
    with pytest.raises(ModelError, match=wanted):
        choice.named()
    elsewhere = next(name for name, form in FORMS.items() if not form.runs_here())
    monkeypatch.setenv("MOEQ_KERNEL", elsewhere)
    with pytest.raises(ModelError, match=f"MOEQ_KERNEL: this CPU does not run {elsewhere}; take one of reference, cpu"):
        choice.prepared_layer(LAYER, CPU, "measured")


def test_triton_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was computed as it is stored without a word."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MOEQ_KERNEL", "triton")
    with pytest.raises(ModelError, match="MOEQ_KERNEL=triton: there is no CUDA device; leave it out"):
        choice.prepared_layer(LAYER, CPU, "measured")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choice.named() == "triton"


def test_a_device_without_a_kernel_says_so() -> None:
    assert choice.prepared_layer(LAYER, torch.device("xpu"), "measured") == (None, "no kernel computes on xpu")
    assert choice.prepared_linear(matrix_of(8, 16, 4), None, torch.device("xpu"), "fixed")[0] is None


def test_what_a_kernel_cannot_take_says_why() -> None:
    doubles = layer_of((16, 16), 64, 32, dtype=torch.float64)
    prepared, why = choice.prepared_layer(doubles, CPU, "fixed")
    assert prepared is None
    assert why is not None
    assert "float64" in why
    assert choice.prepared_linear(matrix_of(8, 16, 16, dtype=torch.float64), None, CPU, "fixed")[0] is None


def test_a_policy_holds_for_what_is_made_within() -> None:
    with choice.choosing("fixed", at_once=False):
        assert (choice.policy(), choice.at_once()) == ("fixed", False)
    assert (choice.policy(), choice.at_once()) == ("measured", True)


def test_codes_of_exl3_have_no_kernel_but_the_plain_way() -> None:
    """Which is said, and is no silent fallback: whoever asks is told why."""
    exl3 = [any_codes(128, 128, 2, Encoding.exl3(), seed=seed) for seed in (0, 1)]
    matrices = [dict.fromkeys(LAYER.matrices[0], one) for one in exl3]
    layer = replace(LAYER, matrices=matrices)
    assert choice.prepared_layer(layer, CPU, "fixed") == (None, choice.NO_KERNEL.format("EXL3's"))
    assert choice.prepared_linear(matrices[0]["up_proj"], None, CPU, "measured") == (
        None,
        choice.NO_KERNEL.format("EXL3's"),
    )
    made, why = choice.prepared_layer(layer, CPU, "reference")
    assert isinstance(made, ReferenceLayer)
    assert why is None
    linear, _ = choice.prepared_linear(matrices[0]["up_proj"], None, CPU, "reference")
    assert isinstance(linear, ReferenceLinear)
    rows = torch.randn(3, 128)
    assert torch.equal(linear(rows), torch.nn.functional.linear(rows, matrices[0]["up_proj"].dequantize()))
