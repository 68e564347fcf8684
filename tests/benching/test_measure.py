"""A bench as a whole: what it says of a packed checkpoint and of the model that it was made of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family_models
import pytest
import torch
from looped_models import looped
from tiny_models import save_tiny
from torch import nn
from typer.testing import CliRunner

import moeq
from moeq.artifacts.bench import FOLDER, read_bench
from moeq.artifacts.manifest import read_manifest
from moeq.benching import bandwidth, measure, one_expert, requests, tables
from moeq.benching.asked import BATCHES, GRID_BATCHES, GRID_BEAMS, Asked, whole_numbers
from moeq.benching.requests import ExpertClock
from moeq.benching.subject import _shared_bytes, load_subject
from moeq.cli import app
from moeq.errors import ArtifactError, EvaluationError, MissingError, ModelError, MoeqError, RecipeError, StorageError
from moeq.estimator import load_hardware
from moeq.estimator.fit import fit_file
from moeq.estimator.measured import read_points
from moeq.progress import Reporter
from moeq.recipe import Recipe
from moeq.reporting.measured import measured
from moeq.stages import report
from moeq.tables import rounded
from moeq_kernels.freed import return_memory

SHORT: dict[str, Any] = {"prompt_tokens": 6, "new_tokens": 3, "repeat": 1, "quiet": True}


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Nothing here asks how fast this machine is: little is read for the bandwidth, and few calls are timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "LEAST_BYTES", 64 << 20)  # from 32 MiB on, malloc gives a buffer back when it is freed
        patch.setattr(bandwidth, "CACHES", 0)
        patch.setattr(one_expert, "SECONDS", 0.002)
        yield


@pytest.fixture(scope="module")
def found(packed_run: Path, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both models at two batch sizes, beside the libraries that are here."""
    out = tmp_path_factory.mktemp("benched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(measure.VARIABLE, "reference")
        done = moeq.bench(packed_run, dense=tiny_mixtral, batches=(1, 3), out=out, **SHORT)
    return done | {"out": out}


def test_times_add_up(found: dict[str, Any]) -> None:
    packed, dense = found["models"]
    assert (packed["packed"], dense["packed"], found["kernel"]) == (True, False, "reference")
    assert (sum(packed["kernels"].values()), dense["kernels"]) == (2, {})
    assert [one["batch"] for one in packed["points"]] == [1, 3]
    for one in (*packed["points"], *dense["points"]):
        assert 0 < one["expert_seconds_per_step"] < one["token_seconds"]
        assert 0 < one["expert_seconds_prefill"] < one["first_token_seconds"]
        assert one["decode_tokens_per_second"] == one["batch"] / one["token_seconds"]
        assert one["prefill_tokens_per_second"] == one["batch"] * 6 / one["first_token_seconds"]
        share = one["bytes_per_step"] / one["token_seconds"] / found["bandwidth"]["bytes_per_second"]
        assert one["bandwidth_share"] == pytest.approx(share)
    for ratio, own, other in zip(found["ratios"], packed["points"], dense["points"], strict=True):
        assert ratio["token"] == other["token_seconds"] / own["token_seconds"]


def test_bytes_are_those_that_are_stored(found: dict[str, Any], packed_run: Path) -> None:
    """At one token every layer reads as many experts as it routes to: two of five, of two layers."""
    packed, dense = found["models"]
    weights = 3 * 40 * 56
    assert dense["points"][0]["expert_bytes_per_step"] == 2 * 2 * weights * 4
    assert dense["bits_per_weight"] == 32
    manifest = read_manifest(packed_run / "checkpoint")
    assert packed["bits_per_weight"] == pytest.approx(manifest.bits_per_weight)
    assert packed["expert_bytes"] == manifest.totals.placed_expert_bytes
    sizes = [sorted(expert.replicas[0].bytes for expert in layer.experts) for layer in manifest.layers]
    least, most = (sum(sum(of_layer[part]) for of_layer in sizes) for part in (slice(2), slice(-2, None)))
    assert least <= packed["points"][0]["expert_bytes_per_step"] <= most
    several = packed["points"][1]
    assert packed["points"][0]["expert_bytes_per_step"] < several["expert_bytes_per_step"]
    assert several["bytes_per_token"] == several["bytes_per_step"] / 3
    # embeddings are looked up, all else beside the experts is read: attention, norms, routers and the head, in float32
    each_layer = 40 * 32 * 2 + 40 * 16 * 2 + 2 * 40 + 5 * 40
    assert dense["shared_bytes_per_step"] == pytest.approx(4 * (2 * each_layer + 40 + 2048 * 40), rel=1e-3)
    assert dense["points"][0]["bytes_per_step"] == pytest.approx(
        dense["shared_bytes_per_step"] + 2 * 2 * weights * 4 + 4 * 40
    )


def test_tables_of_which_rows_are_looked_up_are_not_read_whole(tmp_path: Path) -> None:
    """Gemma 4 has a second one, with a vector for every layer; its head is the first one's tensor."""
    family_models.save("gemma4_text", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    subject = load_subject(str(tmp_path), torch.float32, torch.device("cpu"), False, Reporter(quiet=True))
    row = config["num_hidden_layers"] * config["hidden_size_per_layer_input"]
    experts = sum(int(each.sum()) for each in subject.expert_bytes.values())
    every = sum(one.nbytes for module in subject.model.modules() for one in module.buffers(recurse=False))
    every += sum(parameter.nbytes for parameter in subject.model.parameters())
    assert subject.shared_bytes == pytest.approx(every - experts - 4 * 2048 * row, rel=1e-4)
    assert subject.row_bytes == 4 * (40 + row)


def test_a_step_of_a_looped_model_reads_a_layer_at_every_visit(
    tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two layers runs three times: two of its experts each time, and all else of it."""
    subject = load_subject(str(tiny_mixtral), torch.float32, torch.device("cpu"), False, Reporter(quiet=True))
    looped(subject.model, 3, 1, 2)
    each_layer = 4 * (40 * 32 * 2 + 40 * 16 * 2 + 2 * 40 + 5 * 40)
    assert _shared_bytes(subject.model, subject.layers) == subject.shared_bytes + 2 * each_layer

    def two_steps(subject: Any, ids: torch.Tensor, _: int, stopping_criteria: list[Any]) -> None:
        for _ in range(2):
            subject.model(input_ids=ids, use_cache=False)
            stopping_criteria[0](ids, None)

    monkeypatch.setattr(requests, "generate", two_steps)
    assert requests.routed_bytes(subject, torch.ones(1, 1, dtype=torch.long), 2) == (1 + 3) * 2 * 3 * 40 * 56 * 4


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "gemma4", "llama4", "dots3_note"])
def test_what_sees_or_hears_is_not_read_for_a_token_of_text(family: str, tmp_path: Path) -> None:
    """What is read is what runs for one, but experts and tables of words; a head that is the same tensor is read."""
    family_models.save(family, tmp_path)
    subject = load_subject(str(tmp_path), torch.float32, torch.device("cpu"), False, Reporter(quiet=True))
    ran: set[nn.Module] = set()
    for module in subject.model.modules():
        module.register_forward_pre_hook(lambda module, _: ran.add(module))
    subject.model(input_ids=torch.ones(1, 2, dtype=torch.long))
    experts = {inner for layer in subject.layers for inner in subject.model.get_submodule(layer.name).modules()}
    read = {
        parameter.data_ptr(): parameter.nbytes
        for module in ran - experts
        for parameter in module.parameters(recurse=False)
        if not isinstance(module, nn.Embedding)
    }
    assert subject.shared_bytes == pytest.approx(sum(read.values()), rel=2e-3)  # buffers are read, too
    assert sum(parameter.nbytes for parameter in subject.model.parameters()) > 1.2 * subject.shared_bytes


def test_a_model_in_its_own_type_is_resident_whole(tmp_path: Path) -> None:
    """Also where its weights are mapped from the disk and nobody has read them yet."""
    save_tiny(tmp_path, "mixtral", intermediate_size=4096)
    return_memory()  # what other tests freed would be taken again, and not be counted
    subject = load_subject(str(tmp_path), torch.float32, torch.device("cpu"), False, Reporter(quiet=True))
    assert subject.tensor_bytes > 19e6
    assert 0.9 * subject.tensor_bytes < subject.resident_bytes < 3 * subject.tensor_bytes


def test_how_a_model_would_choose_tokens_is_left_out(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Stop strings, penalties and what comes back are no part of what is timed."""
    shutil.copytree(tiny_mixtral, other := tmp_path / "other")
    settings = json.loads((other / "generation_config.json").read_text())
    settings |= {"stop_strings": ["e"], "return_dict_in_generate": True, "repetition_penalty": 9.0}
    (other / "generation_config.json").write_text(json.dumps(settings))
    made = []
    for folder in (tiny_mixtral, other):
        subject = load_subject(str(folder), torch.float32, torch.device("cpu"), False, Reporter(quiet=True))
        made.append(requests.generate(subject, requests.prompts(subject, 2, 4), 6))
    assert torch.equal(*made)


def test_every_peer_is_measured_or_says_why(found: dict[str, Any]) -> None:
    alone = found["one_expert"]
    said = {peer["name"]: peer["refusal"] for peer in alone["peers"]}
    assert list(said)[:3] == ["model", "dense model", "torch dense"]
    assert said["aten int4"] == "takes no matrix of 56 x 40"
    assert all(isinstance(said[name], str) for name in ("gemlite", "humming"))
    for row in alone["points"]:
        assert set(row["seconds"]) == {name for name, reason in said.items() if reason is None}
        assert all(seconds > 0 for seconds in row["seconds"].values())
    assert found["llama_bench"] == {"refusal": "no --gguf FILE was given"}


def test_tables_fit_eighty_columns(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_bench(found, found["out"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(len(note) < 80 for _, _, notes in tables.tables(found) for note in notes), "none is broken"
    for word in (
        "MOEQ_KERNEL=reference",
        "GB/s",
        "Requests, packed",
        "Requests, dense",
        "Dense over packed",
        "resident",
    ):
        assert word in text
    assert "aten int4: takes no matrix" in text


@pytest.mark.full
def test_the_points_fit_a_hardware_file(found: dict[str, Any], packed_run: Path, tmp_path: Path) -> None:
    """`moeq estimate --fit` reads measured.csv as it is, the checkpoint's placement by --model; the dense model's
    weights are float32, of which it has no rows."""
    path = found["out"] / measure.POINTS
    points = read_points(path)
    own = found["models"][0]["points"]
    assert len(points) == 2 * len(own) == 2 * 2
    assert [point.seconds for point in points[::2]] == [one["first_token_seconds"] for one in own]
    assert [point.seconds for point in points[1::2]] == [one["token_seconds"] for one in own]
    words = ["estimate", "--fit", str(path), "--model", str(packed_run / "checkpoint"), "--hardware", "h100-cpu-pcie5"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "here.yaml"), "--json"])
    assert done.exit_code == 0, done.exception
    assert len(json.loads(done.stdout)["points"]) == len(points)
    assert load_hardware(str(tmp_path / "here.yaml")).name == "here"
    kept = json.loads((found["out"] / measure.NAME).read_text("utf-8"))
    assert kept == json.loads(json.dumps({name: value for name, value in found.items() if name != "out"}))
    assert kept["schema_version"] == measure.SCHEMA_VERSION
    assert len(read_bench(found["out"] / measure.NAME).models) == 2


def test_points_of_an_earlier_bench_go(found: dict[str, Any], tmp_path: Path) -> None:
    measured_here = {key: value for key, value in found.items() if key != "out"}
    measure.write(tmp_path, measured_here)
    assert (tmp_path / measure.POINTS).read_bytes() == (found["out"] / measure.POINTS).read_bytes()
    measure.write(tmp_path, measured_here | {"grid": {}})
    assert [path.name for path in tmp_path.iterdir()] == [measure.NAME]


def test_a_folder_that_cannot_be_is_refused_before_anything_is_timed(
    packed_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "bench", lambda *_: pytest.fail("it was timed"))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/out: cannot create the directory"):
        moeq.bench(packed_run, out=tmp_path / "file" / "out", **SHORT)
    with pytest.raises(StorageError, match=r"/proc/self/fdinfo.*: cannot write"):  # which is there
        moeq.bench(packed_run, out="/proc/self/fdinfo", **SHORT)


def test_points_without_the_model_are_refused_by_the_fit(found: dict[str, Any]) -> None:
    with pytest.raises(MoeqError):
        fit_file(found["out"] / measure.POINTS, load_hardware("h100-cpu-pcie5"))


def test_a_run_with_a_bench_shows_it(
    found: dict[str, Any], packed_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the checkpoint that lies there, with its dense model; one of another export is named and left out."""
    context = SimpleNamespace(
        out=tmp_path, folds=False, directory=lambda _: packed_run / "checkpoint", reporter=Reporter(), recipe=Recipe()
    )
    assert (report.own_inputs(context), report.measured(context)) == (None, None)
    (tmp_path / FOLDER).mkdir()
    path = tmp_path / FOLDER / measure.NAME
    path.write_bytes((found["out"] / measure.NAME).read_bytes())
    digest = report.own_inputs(context)
    read = report.measured(context)
    assert read is not None
    text = str(measured(read))
    for model in found["models"]:
        for one in model["points"]:
            assert rounded(one["token_seconds"] * 1e3, 3) in text
            assert rounded(one["prefill_tokens_per_second"], 3) in text
    assert "MOEQ_KERNEL was reference" in text
    kept = json.loads(path.read_text())
    kept["models"][0]["manifest_sha256"] = "0" * 64
    path.write_text(json.dumps(kept))
    assert report.measured(context) is None
    assert "is of another export" in capsys.readouterr().err.replace("\n", " ")
    assert report.own_inputs(context) != digest
    path.write_text(json.dumps(kept | {"machine": {}}))
    with pytest.raises(ArtifactError, match="run `moeq bench` again"):
        report.measured(context)


@pytest.mark.full
@pytest.mark.parametrize("which", ["mixtral", "switch"])
def test_the_grid_compares_with_and_without_pruning(
    which: str, packed_run: Path, packed_switch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Causal and encoder-decoder; the same tokens, and rows that no expert saw."""
    found = moeq.bench(
        packed_run if which == "mixtral" else packed_switch,
        grid=True, batches=(1, 4), prompt_tokens=5, new_tokens=8, repeat=1, quiet=True,
    )  # fmt: skip
    points = found["grid"]["points"]
    assert [(one["batch"], one["beams"]) for one in points] == [(1, 1), (4, 1), (1, 2), (4, 2)]
    for one in points:
        assert one["same_tokens"]
        assert (one["rows_left_out"] > 0) == (one["batch"] > 1)
        gain = one["pruned_input_tokens_per_second"] / one["input_tokens_per_second"]
        assert one["speed_up"] == pytest.approx(gain)
    assert found["grid"]["largest_speed_up"] == max(one["speed_up"] for one in points)
    tables.print_bench(found)
    text = capsys.readouterr().out
    assert "1.14" in text
    assert all(len(note) < 80 for _, _, notes in tables.tables(found) for note in notes)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.full
def test_an_encoder_decoder_is_timed(packed_switch: Path) -> None:
    """A decode step reads the decoder alone."""
    found = moeq.bench(packed_switch, batches=(2,), peers=False, **SHORT)
    (model,) = found["models"]
    assert "one_expert" not in found
    assert 0 < model["points"][0]["expert_bytes_per_step"] < model["expert_bytes"] / 2
    assert model["shared_bytes_per_step"] < model["tensor_bytes"] - model["expert_bytes"]


def test_experts_are_timed_on_the_gpu_that_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one, while the first is the current one: by events on its stream."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.place = ""

        def record(self, stream: str = "stream of the current GPU") -> None:
            self.place = stream

        def elapsed_time(self, end: Any) -> float:
            return 1500.0 if self.place == end.place == "stream of cuda:1" else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    clock = ExpertClock(torch.device("cuda", 1))
    model = torch.nn.Sequential(torch.nn.Identity())
    with clock.on(model, [SimpleNamespace(name="0")]):  # type: ignore[list-item]
        model(torch.zeros(1))
    assert clock.take() == 1.5


def test_what_cannot_be_benched_is_refused(packed_run: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="more than the model's 128 positions; lower --prompt-tokens"):
        moeq.bench(packed_run, prompt_tokens=120, new_tokens=16, quiet=True)
    family_models.save("mixtral", tmp_path / "other")
    with pytest.raises(EvaluationError, match="experts are not the checkpoint's"):
        moeq.bench(packed_run, dense=tmp_path / "other", **SHORT)
    for packed in (packed_run, packed_run / "checkpoint"):
        with pytest.raises(ModelError, match="packed, and --dense is the model that the checkpoint was made of"):
            moeq.bench(packed_run, dense=packed, **SHORT)
    family_models.save("openai_privacy_filter", tmp_path / "filter")
    with pytest.raises(ModelError, match="filter: OpenAIPrivacyFilterForTokenClassification makes no text"):
        moeq.bench(tmp_path / "filter", **SHORT)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for file in tiny_mixtral.iterdir():
        (foreign / file.name).write_bytes(file.read_bytes())
    config = json.loads((foreign / "config.json").read_text())
    four = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    other = "packed in another format than moeq's own"
    (foreign / "config.json").write_text(json.dumps(config | four))
    with pytest.raises(ModelError, match=rf"{other} \(gptq\).*moeq convert \S+ --to native"):
        moeq.bench(foreign, **SHORT)
    with pytest.raises(ArtifactError, match=rf"{other} \(gptq\); moeq convert \S+ --to native"):
        moeq.load(foreign)
    int8 = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": {}}}
    for declared in ({"quant_method": "hqq"}, {"quant_method": "gptq", "checkpoint_format": "marlin"}, int8):
        (foreign / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
        refused = rf"{other} \({declared['quant_method']}\); .*moeq does not read this format"
        for refuses in (lambda: moeq.bench(foreign, **SHORT), lambda: moeq.load(foreign)):
            with pytest.raises(MoeqError, match=refused):
                refuses()
    with pytest.raises(RecipeError, match="is one artifact of a run"):
        moeq.bench(packed_run, out=packed_run / "checkpoint", **SHORT)
    with pytest.raises(MissingError, match="GGUF"):
        moeq.bench(packed_run, gguf=tmp_path / "none.gguf", **SHORT)
    with pytest.raises(RecipeError, match="unknown device"):
        moeq.bench(packed_run, device="gpu", **SHORT)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"grid": True, "dense": "bundled:tiny-mixtral"}, "--grid: is of the checkpoint alone; leave --dense out"),
        ({"grid": True, "gguf": "model.gguf"}, "--grid: is of the checkpoint alone; leave --gguf out"),
        ({"beams": (1,)}, "--beams: are those of a grid; give --grid too"),
        ({"beams": (1,), "dynamic": "auto"}, "--dynamic: is measured beside static precision alone; leave --beams out"),
        ({"gguf": "model.gguf", "peers": False}, "--gguf: is for llama.cpp, one of the peers; leave --no-peers out"),
        ({"dense": "bundled:tiny-mixtral"}, "bundled:tiny-mixtral: not packed, and --dense is the model that"),
    ],
)
def test_options_that_would_do_nothing_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MoeqError) as raised:
        moeq.bench("bundled:tiny-mixtral", **given)
    assert said in str(raised.value)


def test_a_checkpoint_whose_bytes_changed_is_not_timed(packed_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (packed_run / "checkpoint").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(MoeqError, match=r"SHA256SUMS|changed|digest"):
        moeq.bench(copy, **SHORT)


def test_a_name_is_told_as_it_is(tiny_mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "[draft]").symlink_to(tiny_mixtral)
    moeq.bench(tmp_path / "[draft]", batches=(1,), peers=False, **SHORT | {"quiet": False})
    assert f"load {tmp_path}/[draft]\n" in capsys.readouterr().err


def test_words_of_the_command() -> None:
    assert Asked(checkpoint="x").sizes == BATCHES
    assert Asked(checkpoint="x", grid=True).sizes == GRID_BATCHES
    assert Asked(checkpoint="x", grid=True).beam_counts == GRID_BEAMS
    with pytest.raises(RecipeError, match="beams: none is named"):
        Asked(checkpoint="x", grid=True, beams=())
    assert whole_numbers(" 4,1,4", "--batch") == (4, 1)
    for wrong in ("", "0", "1,", "-1", "x", "99999999999999999999", "1.5"):
        with pytest.raises(RecipeError, match="give whole numbers from 1"):
            whole_numbers(wrong, "--batch")


def test_the_command_prints_json_with_its_version(tiny_mixtral: Path) -> None:
    words = ["--batch", "2", "--prompt-tokens", "4", "--new-tokens", "2", "--repeat", "1", "--no-peers", "--json"]
    done = CliRunner().invoke(app, ["bench", str(tiny_mixtral), *words])
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert found["schema_version"] == 1
    assert found["models"][0]["points"][0]["batch"] == 2
    assert found["settings"]["batches"] == [2]
    assert found["machine"]["torch"] == torch.__version__
