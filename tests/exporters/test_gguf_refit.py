"""GGUF with rounded scales: groups shorter than a block, what the file says of its errors, and llama.cpp's logits.

Skipped where gguf, or llama-cpp-python, is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from made_sources import Choose, MadeSource, save_model

from moeq.conversion import convert
from moeq.errors import ArtifactError, FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf import ERRORS, EXPORTER, FILE, REFIT
from moeq.exporters.gguf_families import stack_name
from moeq.exporters.readers import open_packed
from moeq.exporters.readers.described import gguf as described
from moeq.numerics.matrix_error import relative_error
from moeq.progress import Reporter
from moeq.runtimes import runtimes
from moeq.verification.verify import Options, require, verify
from moeq.verification.weights import differences
from moeq_kernels.packed import PackedWeight

WIDE = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 512, "intermediate_size": 512}
KINDS = {2: "Q2_K", 3: "Q3_K", 4: "Q4_K", 5: "Q5_K", 6: "Q6_K", 8: "Q8_0"}


def by_layer(layer: int, expert: int, projection: str) -> int:
    """Other widths for every layer and matrix, as assign.granularity: stack gives them."""
    widths = {"gate_proj": (2, 3), "up_proj": (3, 6), "down_proj": (4, 8)}
    return widths[projection][layer % 2]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "model"
    return save_model(folder, "qwen3_moe", norm_topk_prob=True, **WIDE)


@pytest.fixture(scope="module")
def native(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native checkpoint of one width a stack in groups of 64 with zero points, as runs make them."""
    out = tmp_path_factory.mktemp("native") / "out"
    native_widths: Choose = lambda *place: {6: 2}.get(by_layer(*place), by_layer(*place))  # noqa: E731
    write("native", made(wide, native_widths), out, WriteOptions())
    return out


def made(model: Path, choose: Choose = by_layer, **settings: Any) -> MadeSource:
    return MadeSource(model, choose, **{"group_size": 64, "symmetric": False} | settings)


def exported(source: Any, out: Path, **options: Any) -> list[str]:
    peers.module("gguf")
    return write(REFIT, source, out, WriteOptions(**options))


@pytest.mark.cases(1)
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_matrix_is_as_far_off_as_the_file_says(symmetric: bool, wide: Path, tmp_path: Path) -> None:
    source = made(wide, symmetric=symmetric)
    (note,) = exported(source, tmp_path / "out")
    gguf = peers.module("gguf")
    reader = gguf.GGUFReader(tmp_path / "out" / FILE)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    errors = []
    for layer in source.layers:
        for projection in layer.projections:
            name = stack_name(layer, projection)
            bits = by_layer(layer.index, 0, projection)
            kind = tensors[name].tensor_type
            assert kind.name == ("Q4_0" if bits == 4 and symmetric else KINDS[bits])
            values = torch.from_numpy(gguf.dequantize(tensors[name].data, kind))
            stated = reader.fields[f"{ERRORS}{name}"].contents()
            assert len(stated) == layer.num_experts
            for expert, error in enumerate(stated):
                matrix = source.expert(layer, expert)[0][projection]
                assert isinstance(matrix, PackedWeight)
                assert relative_error(values[expert], matrix.dequantize()) == pytest.approx(error, rel=1e-6, abs=0)
                assert (error == 0) == (symmetric and bits in (4, 8))
                errors.append(error)
    assert 0 < max(errors) < 0.06
    assert f"at most {max(errors):.2g} (" in note
    assert note.startswith(f"{sum(error > 0 for error in errors)} of {len(errors)} matrices")
    assert "rounded scales" in (tmp_path / "out" / "README.md").read_text("utf-8")
    assert described(tmp_path / "out", False)["rounded_scales"] == f"values are off by up to {max(errors):.2g} relative"


def test_long_groups_are_held_as_they_are(wide: Path, tmp_path: Path) -> None:
    """Widths that llama.cpp has exactly have the same bytes, and nothing is said to be rounded."""
    source = made(wide, lambda layer, expert, projection: 2 + 2 * (layer % 2), group_size=256)
    assert exported(source, tmp_path / "out") == []
    write("llama.cpp", source, tmp_path / "plain", WriteOptions())
    size = (tmp_path / "plain" / FILE).stat().st_size
    tensors = [(tmp_path / name / FILE).read_bytes()[-size // 2 :] for name in ("out", "plain")]
    assert tensors[0] == tensors[1]
    assert not open_packed(tmp_path / "out", as_values=True).refitted  # type: ignore[attr-defined]


def test_converted_and_compared_with_what_it_was_made_of(
    native: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usual loader computes the rounded values, which are held against the checkpoint's and the file's word."""
    summary = convert(native, REFIT, tmp_path / "out", verify=True, reporter=Reporter())
    assert any("rounded scales" in note for note in summary["notes"])
    assert summary["verified_with"] == "transformers"
    said = " ".join(capsys.readouterr().err.split())
    assert "its values are as far from those of out as it says" in said
    assert "verified with transformers" in said


def changed_errors(out: Path, change: Callable[[float], float]) -> None:
    """What the file says of the first expert of the first stack, changed."""
    import struct

    data = bytearray((out / FILE).read_bytes())
    name = f"{ERRORS}blk.0.ffn_gate_exps.weight".encode()
    place = data.index(name) + len(name) + 4 + 4 + 8  # the types of the value and of its elements, and how many
    (error,) = struct.unpack_from("<f", data, place)
    struct.pack_into("<f", data, place, change(error))
    (out / FILE).write_bytes(data)


def test_another_error_than_is_written_down_is_found(native: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(native, REFIT, out)
    source, reporter = open_packed(native), Reporter(quiet=True)
    assert differences(source, open_packed(out, as_values=True), reporter) == []
    changed_errors(out, lambda error: error * 1.01)
    (problem,) = differences(source, open_packed(out, as_values=True), reporter)
    assert "expert 0, gate_proj: its values differ by" in problem
    assert "is written down" in problem
    changed_errors(out, lambda error: float("nan"))
    with pytest.raises(ArtifactError, match=r"moeq\.refit\.blk\.0\.ffn_gate_exps\.weight: not the errors of"):
        differences(source, open_packed(out, as_values=True), reporter)


def test_a_mix_among_the_experts_of_a_layer_is_refused_or_widened(wide: Path, tmp_path: Path) -> None:
    source = made(wide, lambda layer, expert, projection: 2 + expert % 2)
    with pytest.raises(FormatError, match=r"2, 3 bits among its experts; llama\.cpp has one type for all") as error:
        exported(source, tmp_path / "out")
    assert "--widen" in str(error.value)
    assert not (tmp_path / "out").exists()
    assert exported(source, tmp_path / "out", widen=True) == [], "4 bits hold both as they are"


def test_what_llama_cpp_refuses_names_this(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=f"in groups of 64; .* write it for {REFIT}, which rounds scales"):
        write("llama.cpp", made(wide), tmp_path / "out", WriteOptions())
    short = made(wide, lambda layer, expert, projection: 4, group_size=16)
    with pytest.raises(FormatError, match=r"set losses\.group_size: 32 or a multiple"):
        exported(short, tmp_path / "out")


def test_its_size_is_foreseen(wide: Path, tmp_path: Path) -> None:
    from moeq.artifacts.targets import Grid
    from moeq.exporters.exporter import ExportSizes

    source = made(wide)
    exported(source, tmp_path / "out")
    stacks = []
    for layer in source.layers:
        for projection in layer.projections:
            rows, inputs = layer.shape(projection)
            bits = by_layer(layer.index, 0, projection)
            grid = Grid(rows=rows, inputs=inputs, bits=bits, group_size=64, symmetric=False)
            stacks.append((layer.num_experts * rows * inputs, (grid,), False))
    sizes = ExportSizes(plain=0, rest=0, packed=0, experts=0, stacks=tuple(stacks), widen=False, target=REFIT)
    assert EXPORTER.size(sizes) == described(tmp_path / "out", False)["expert_bytes"]
    assert runtimes()[REFIT].target.runs is not None


@pytest.mark.parametrize("symmetric", [False, True])
def test_llama_cpp_computes_what_moeq_reads(symmetric: bool, wide: Path, tmp_path: Path) -> None:
    """Groups of 32: the logits of moeq's own decoding, but for llama.cpp's rounding of activations."""
    python = peers.interpreter("llama-cpp-python")
    exported(made(wide, group_size=32, symmetric=symmetric), tmp_path / "out")
    options = Options(target="llama.cpp", python=str(python))
    require(verify(tmp_path / "out", options, Reporter(quiet=True)))
