"""Every exporter, moeq's own and another package's: what is written is read back to the bit, or refused."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from made_sources import Choose, MadeSource, save_model
from safetensors.torch import load_file
from strange_exporter import ENTRIES, MODULES
from strangers import on_path, write_package
from torch import Tensor

from moeq.artifacts.sums import NAME as SUMS
from moeq.artifacts.sums import check_sums
from moeq.artifacts.targets import Grid, grids_of, refuse_layers, targets
from moeq.errors import ArtifactError, FormatError, MoeqError
from moeq.exporters import write
from moeq.exporters.exporter import Exporter, ExportSizes, loaders
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.packed_source import Checkable, Matrices
from moeq.exporters.readers import open_packed
from moeq.exporters.readers.foreign import Foreign
from moeq.exporters.readers.gguf import Gguf
from moeq.models.experts import ExpertLayer
from moeq.models.source import ModelSource
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.registry import EXPORTERS
from moeq.runtimes import Runtime, of_method, runtimes, written
from moeq.verification import probe
from moeq.verification.reference import values
from moeq.verification.weights import differences
from moeq_kernels.packed import PackedWeight, packed_bytes
from moeq_kernels.widths import FULL, SUPPORTED_BITS

WRITTEN = [*written(), "strangers-runtime"]
GROUP = 64  # that every runtime reads
ODD = {"hidden_size": 72, "intermediate_size": 40}
PLACE = ("model.layers.1.mlp.experts", 2, "up_proj")  # of what is spoiled
QUIET = Reporter(quiet=True)


@pytest.fixture(autouse=True, scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("strangers")
    write_package(folder, EXPORTERS.group, ENTRIES, MODULES)
    with on_path(folder, EXPORTERS, MODULES):
        yield


@pytest.fixture(params=[*EXPORTERS.own, "strangers"])
def exporter(request: pytest.FixtureRequest) -> Exporter:
    found: Exporter = EXPORTERS.get(request.param)
    return found


@pytest.fixture(params=WRITTEN)
def writer(request: pytest.FixtureRequest) -> Runtime:
    """A runtime that is converted for."""
    found = runtimes()[request.param]
    if found.exporter.needs.keys() & {"gguf"}:
        peers.module("gguf")
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Matrices of 256 x 256, which every format can hold in some grid, and of 72 x 40."""
    folder, few = tmp_path_factory.mktemp("models"), {"sliding_window": None, "num_local_experts": 3}
    even = save_model(folder / "even", "mixtral", hidden_size=256, intermediate_size=256, **few)
    return {"even": even, "odd": save_model(folder / "odd", "mixtral", **ODD, **few)}


ROUNDED = 0.02  # relative, of what a target with rounded scales stores


def source_of(model: Path, writer: Runtime, choose: Choose = lambda *place: 4, **grid: Any) -> MadeSource:
    """In a grid, or in codes of EXL3, for who reads no grids."""
    exl3 = writer.target is not None and "grid" not in writer.target.codes
    return MadeSource(model, choose, **{"group_size": GROUP, "exl3": exl3} | grid)


def refused(name: str, source: MadeSource) -> tuple[str, str] | None:
    """Why a format cannot carry a source."""
    widths = [
        [{part: source.choose(layer.index, expert, part) for part in layer.projections} for expert in range(3)]
        for layer in source.layers
    ]
    same = [[one["up_proj"] if len({*one.values()}) == 1 else one for one in layer] for layer in widths]
    return refuse_layers(name, source.layers, same, **vars(source.encoding))


def check_values(source: MadeSource, out: Path) -> None:
    """What is read back has the values of the source to the bit, rounded once where they are stored as plain ones; of a
    file with rounded scales as nearly as it says, which `differences` looks at."""
    found = open_packed(out, as_values=True)
    assert isinstance(found, Checkable)
    found.check()
    for layer, other in zip(source.layers, found.layers, strict=True):
        for expert in range(layer.num_experts):
            theirs = found.expert(other, expert)[0]
            for name, matrix in source.expert(layer, expert)[0].items():
                wanted, read = values(found.written(matrix) if isinstance(found, Foreign) else matrix), theirs[name]
                wanted = wanted.to(read.dtype).float() if isinstance(read, Tensor) else wanted
                stated = found.refit_error(other, expert, name) if isinstance(found, Gguf) else None
                assert torch.equal(values(read), wanted) or 0 < (stated or 0) < ROUNDED, (layer.name, expert, name)
    for name, weight in source.others():
        if name not in found.other_names():
            read = tensor_of(found.source, f"{name}.weight")
            assert torch.equal(read.float(), weight.dequantize().to(read.dtype).float())
    beside = tuple(source.other_names())
    assert [line for line in differences(source, found, QUIET) if not line.startswith(beside or "-")] == []


def tensor_of(source: ModelSource, key: str) -> Tensor:
    """A tensor that is not packed."""
    tensor: Tensor = load_file(source.tensors[key].file)[key] if source.read is None else source.read(key)
    return tensor


def check_refused(error: MoeqError, folder: Path) -> None:
    assert "\n" not in str(error)
    assert error.do
    assert list(folder.iterdir()) == [], "nothing is left behind"


def shared_widths(widths: list[int], granularity: str) -> list[Choose]:
    """Choices of widths, which stand side by side as far as they may, that have all of them."""
    if granularity == "model":
        return [lambda layer, expert, part, bits=bits: bits for bits in widths]
    if granularity == "layer":
        pairs = [widths[place : place + 2] for place in range(0, len(widths), 2)]
        return [lambda layer, expert, part, pair=pair: pair[layer % len(pair)] for pair in pairs]
    parts = ("gate_proj", "up_proj", "down_proj")
    return [lambda layer, expert, part: widths[(9 * layer + 3 * expert + parts.index(part)) % len(widths)]]


@pytest.mark.cases(1)
def test_what_is_written_is_read_back_at_every_width(writer: Runtime, models: dict[str, Path], tmp_path: Path) -> None:
    target = writer.target
    declared = set(target.widths) if target is not None else {*SUPPORTED_BITS, FULL}
    group = -1 if target is not None and target.blocks is not None else GROUP
    written: set[int] = set()
    for symmetric in (True, False):
        grid = {"symmetric": symmetric, "group_size": group}
        chosen: dict[int, Choose] = {bits: lambda *place, bits=bits: bits for bits in sorted(declared)}
        alone = {bits: source_of(models["even"], writer, choose, **grid) for bits, choose in chosen.items()}
        widths = [bits for bits, source in alone.items() if refused(writer.name, source) is None]
        for number, choose in enumerate(shared_widths(widths, target.granularity if target else "projection")):
            source = source_of(models["even"], writer, choose, **grid)
            assert refused(writer.name, source) is None
            out = tmp_path / f"{symmetric}-{number}"
            write(writer.name, source, out, WriteOptions())
            check_values(source, out)
        written |= {*widths}
    assert written == declared


@pytest.mark.cases(4)
@pytest.mark.parametrize(("model", "group"), [("odd", 8), ("odd", 16), ("odd", -1), ("even", 48)])
def test_odd_shapes_and_short_groups_are_carried_or_refused(
    writer: Runtime, model: str, group: int, models: dict[str, Path], tmp_path: Path
) -> None:
    source = source_of(models[model], writer, group_size=group)
    reason = refused(writer.name, source)
    if reason is None:
        write(writer.name, source, tmp_path / "out", WriteOptions())
        check_values(source, tmp_path / "out")
        return
    with pytest.raises(FormatError) as caught:
        write(writer.name, source, tmp_path / "out", WriteOptions())
    check_refused(caught.value, tmp_path)
    assert caught.value.what in reason[0]
    assert caught.value.do == reason[1]


@pytest.mark.cases(1)
def test_what_is_packed_beside_the_experts_is_carried_or_refused(
    writer: Runtime, models: dict[str, Path], tmp_path: Path
) -> None:
    others = {"model.layers.0.self_attn.o_proj": 4, "model.layers.1.self_attn.v_proj": 8}
    source = source_of(models["even"], writer, others=others)
    error = None
    try:
        write(writer.name, source, tmp_path / "out", WriteOptions())
    except FormatError as refusal:
        error = refusal
    if error is None:
        check_values(source, tmp_path / "out")
    else:
        check_refused(error, tmp_path)
        assert next(iter(others)) in str(error.where)


@pytest.mark.cases(2)
def test_writing_twice_gives_the_same_bytes(writer: Runtime, models: dict[str, Path], tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(writer.name, source_of(models["even"], writer), tmp_path / name, WriteOptions(model_name="a model"))
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in
                     ("first", "second"))  # fmt: skip
    assert first == second


@pytest.mark.cases(1)
def test_every_file_has_a_digest(writer: Runtime, models: dict[str, Path], tmp_path: Path) -> None:
    write(writer.name, source_of(models["even"], writer), tmp_path / "out", WriteOptions())
    files = {path.name for path in (tmp_path / "out").iterdir()} - {SUMS, "README.md"}
    assert {line[66:] for line in (tmp_path / "out" / SUMS).read_text("utf-8").splitlines()} == files
    shard = tmp_path / "out" / (writer.exporter.file or "model-experts-001.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 8
    shard.write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"{shard.name}.*changed since"):
        check_sums(tmp_path / "out")


class Spoiled(MadeSource):
    """One expert's matrix has a scale that is no number."""

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        matrices, biases = super().expert(layer, expert)
        if (layer.name, expert) == PLACE[:2]:
            weight = matrices[PLACE[2]]
            assert isinstance(weight, PackedWeight)
            scales = weight.scales.clone()
            scales[3, -1] = torch.nan
            matrices[PLACE[2]] = replace(weight, scales=scales)
        return matrices, biases


@pytest.mark.cases(1)
def test_what_is_no_number_is_refused_by_its_place(writer: Runtime, models: dict[str, Path], tmp_path: Path) -> None:
    exl3 = bool(source_of(models["even"], writer).encoding.codebook)
    source = Spoiled(models["even"], lambda *place: 4, group_size=GROUP, exl3=exl3)
    with pytest.raises(ArtifactError, match=rf"{PLACE[0]}, expert {PLACE[1]}, {PLACE[2]}.*not finite") as caught:
        write(writer.name, source, tmp_path / "out", WriteOptions())
    check_refused(caught.value, tmp_path)


@pytest.mark.cases(4)
def test_it_is_as_large_as_it_says(writer: Runtime, models: dict[str, Path], tmp_path: Path) -> None:
    source = source_of(models["even"], writer)
    write(writer.name, source, tmp_path / "out", WriteOptions())
    rest, every = set(source.rest()), source.source.tensors
    stacks: list[tuple[int, tuple[Grid, ...], bool]] = []
    packed = 0
    for layer in source.layers:
        for projection in layer.projections:
            rows, inputs = layer.shape(projection)
            grids = grids_of(layer, projection, [4], **vars(source.encoding))
            stacks.append((layer.num_experts * rows * inputs, tuple(grids), False))
            packed += layer.num_experts * packed_bytes(rows, inputs, 4, source.encoding)
    sizes = ExportSizes(
        plain=sum(header.bytes for header in every.values()), rest=sum(every[key].bytes for key in rest), packed=0,
        experts=packed, stacks=tuple(stacks), widen=False,
    )  # fmt: skip
    there = sum(
        path.stat().st_size for path in (tmp_path / "out").iterdir() if path.suffix in (".safetensors", ".gguf")
    )
    assert writer.exporter.size(sizes) == pytest.approx(there, rel=0.05)


def test_it_is_documented(exporter: Exporter) -> None:
    assert exporter.label
    assert exporter.runtime
    assert exporter.help
    assert len(exporter.help) <= 100
    assert "\n" not in exporter.help
    assert not exporter.help.endswith(".")
    compile(exporter.snippet, exporter.name, "exec")
    for target in exporter.targets:
        assert target.reads
        assert target.proof
        assert targets()[target.name] is target
    if exporter.write is not None:
        assert inspect.getdoc(import_module(exporter.write.__module__))
        assert inspect.getdoc(exporter.write)
    for key, field in () if exporter.settings is None else exporter.settings.model_fields.items():
        assert str(field.description).startswith(f"{exporter.name}: "), key


def test_it_can_be_loaded_and_read_back(exporter: Exporter) -> None:
    for loader in exporter.loaders:
        assert loaders()[loader.name] == loader
        assert all(install.startswith("pip install ") for install in (loader.packages | exporter.needs).values())
        assert loader.load is None or ":" in loader.load or callable(getattr(probe, loader.load))
    for method in exporter.methods or (exporter.name,):
        assert of_method(method) is exporter
    assert exporter.opened is not None or exporter.layout is not None or not exporter.targets


def test_a_recipe_can_ask_for_all_of_moeqs_own() -> None:
    for name in written():
        if runtimes()[name].exporter.name in EXPORTERS.own:
            assert load_recipe(None, [f"export.formats=[{name}]"]).export.formats == [name]
    for target in (target for name in EXPORTERS.own for target in EXPORTERS.get(name).targets):
        assert load_recipe(None, [f"assign.target={target.name}"]).assign.target == target.name


def test_declarations_import_no_torch() -> None:
    code = (
        "import sys\n"
        "import moeq.recipe\n"
        "from moeq.registry import EXPORTERS\n"
        "assert [one.label for one in EXPORTERS]\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
