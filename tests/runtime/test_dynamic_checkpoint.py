"""Experts with changing precision over a real checkpoint on disk: what happens when its files go, shrink or stall, and
what a process holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import family_models
import numpy as np
import pytest
import torch
from triton_here import triton_here

from moeq import pipeline
from moeq.artifacts.coactivation import NAME, read_coactivation
from moeq.artifacts.sums import write_sums
from moeq.errors import ArtifactError, MoeqError, StorageError
from moeq.exporters.native_dynamic import open_dynamic
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.native_replicas import CheckpointReplicas, CopyingReader
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.dynamic.copies import Switch
from moeq.runtime.dynamic.forms import BESIDE
from moeq.runtime.dynamic.model import DynamicMoE, DynamicSettings
from moeq.runtime.dynamic.pools import HIGH, LOW
from moeq.stages.checkpoint_size import CheckpointSize
from moeq.stages.context import Context
from moeq_kernels.names import TRITON, VARIABLE

RECIPE = (
    "corpus.sequences=4", "corpus.sequence_length=32", "losses.group_size=32", "losses.bits=[2,4]",
    "losses.methods=[rtn]", "losses.nested=true", "assign={method: uniform, bits: 2, quantizer: rtn}",
    "quantize.replicas=all", "eval.compare=[]", "export.verify=false", "profile.trace=true",
)  # fmt: skip
IDS = torch.tensor([[3, 7, 1, 4, 9, 2, 8, 5]])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with nested replicas of 2 and 4 bits."""
    folder = tmp_path_factory.mktemp("dynamic")
    family_models.save("mixtral", folder / "model", hidden_size=64, intermediate_size=96)
    recipe = load_recipe(None, list(RECIPE))
    context = Context(
        recipe=recipe, model_name=str(folder / "model"), out=folder / "run", reporter=Reporter(quiet=True)
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return context.directory("export")


@pytest.fixture
def checkpoint(exported: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(exported, tmp_path / "checkpoint"))


def opened(path: Path, said: list[str], **given: Any) -> DynamicMoE:
    """All experts low, but for half of every layer's."""
    source = CheckpointReplicas(CopyingReader(path))
    model: Any = load_checkpoint(path, torch.float32, torch.device("cpu"), policy="fixed")
    usual = {
        "high": 4,
        "low": 2,
        "host_bytes": 1,
        "background": True,
        "busy": 1.0,
        "period": 4,
        "memory_bytes": 1 << 20,
    }
    settings = DynamicSettings(**{**usual, **given})
    return DynamicMoE(
        model, source.reader.layers, source, settings, policy="fixed", say=said.append, log=path / "log.jsonl"
    )


def budget_for_half(path: Path) -> int:
    with opened(path, []) as probe:
        budget = probe.budget
    half = min(budget.layers) // 2
    return budget.least_bytes + half * len(budget.layers) * (budget.high_bytes - budget.low_bytes)


def exchange(dynamic: DynamicMoE) -> list[Switch]:
    """In every layer the first low expert for the first high one."""
    wanted = []
    for number in range(len(dynamic.layers)):
        high = dynamic.high(number).tolist()
        wanted += [Switch(number, high.index(False), HIGH), Switch(number, high.index(True), LOW)]
    dynamic.copies.request(wanted, {wanted[at + 1]: wanted[at] for at in range(0, len(wanted), 2)})
    return wanted


def versions(dynamic: DynamicMoE) -> list[list[bool]]:
    return [dynamic.high(number).tolist() for number in range(len(dynamic.layers))]


@pytest.mark.full
def test_a_copying_reader_reads_what_the_mapping_one_does(exported: Path) -> None:
    mapped, copied = NativeReader(exported), CopyingReader(exported)
    for layer in mapped.layers[:1]:
        for key in (2, 4):
            for expert in range(layer.num_experts):
                one, two = (reader.replica(layer, expert, key)[0] for reader in (mapped, copied))
                assert one.keys() == two.keys()
                for name, weight in one.items():
                    parts, others = weight.parts(), two[name].parts()  # type: ignore[union-attr]
                    assert all(torch.equal(parts[part], others[part]) for part in parts)


@pytest.mark.full
def test_a_checkpoint_opens_in_the_form_of_a_gpu(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter where there is no GPU; its own bytes hold the tables of the kernel too."""
    here = open_dynamic(exported, copies="between", policy="fixed")
    here.close()
    with triton_here() as device:
        if device == "cpu":
            monkeypatch.setenv(VARIABLE, TRITON)
        with open_dynamic(exported, dtype="float32", device=device, copies="between", policy="fixed") as dynamic:
            beside = dynamic.budget.other_bytes[BESIDE]
            assert dynamic.summary()["planes"]
            assert dynamic.places == here.places
            needed = dynamic.budget.pool_bytes + sum(dynamic.budget.other_bytes.values())
            assert beside < needed <= dynamic.budget.memory_bytes
            dynamic.copies.request([Switch(0, 1, HIGH), Switch(0, 2, HIGH)])
            counts, reader = dynamic.copies.counts, NativeReader(exported)
            assert counts.failures == 0
            assert counts.promotions == 2
            for expert, (version, _) in enumerate(dynamic.copies.layers[0].places()):
                wanted, _ = reader.replica(reader.layers[0], expert, 4 if version == HIGH else 2)
                for name, matrix in wanted.items():
                    found = dynamic.copies.layers[0].matrix(expert, name)
                    for part, tensor in matrix.parts().items():  # type: ignore[union-attr]
                        assert torch.equal(found.parts()[part].cpu(), tensor)  # type: ignore[union-attr]


@pytest.mark.cases(1)
@pytest.mark.parametrize("planes", [True, False])
def test_versions_of_a_checkpoint_change_while_it_generates(checkpoint: Path, planes: bool) -> None:
    said: list[str] = []
    with opened(checkpoint, said, memory_bytes=budget_for_half(checkpoint), planes=planes, period=99) as dynamic:
        assert dynamic.summary()["planes"] is planes
        before = versions(dynamic)
        for _ in range(3):
            exchange(dynamic)
            dynamic.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=2)
            assert dynamic.copies.settle()
        assert versions(dynamic) != before
        assert dynamic.copies.counts.promotions > 0
        high, low = dynamic.copies.layers[0].blocks[HIGH].nbytes, dynamic.copies.layers[0].blocks[LOW].nbytes
        counts = dynamic.copies.counts
        brought = counts.copied_bytes / counts.promotions
        assert brought < high / 2 if planes else brought == high + low * counts.demotions / counts.promotions
        reader = NativeReader(checkpoint)
        for number, layer in enumerate(dynamic.copies.layers):
            for expert, (version, _) in enumerate(layer.places()):
                wanted = reader.replica(reader.layers[number], expert, 4 if version == HIGH else 2)[0]
                for name, matrix in wanted.items():
                    found = layer.matrix(expert, name)
                    assert torch.equal(found.codes, matrix.codes)  # type: ignore[union-attr]
    assert said == []


def damage(path: Path, how: str) -> None:
    """What becomes of the replicas of 4 bits, which lie in files of their own."""
    files = sorted(path.glob("replicas-*.safetensors"))
    assert files
    for file in files:
        if how == "deleted":
            file.unlink()
        elif how == "truncated":
            with file.open("r+b") as stream:
                stream.truncate(file.stat().st_size // 8)
        else:
            content = bytearray(file.read_bytes())
            content[len(content) // 4 :] = bytes(len(content) - len(content) // 4)
            file.write_bytes(content)


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["deleted", "truncated", "overwritten"])
def test_damaged_replicas_leave_the_old_versions(checkpoint: Path, how: str) -> None:
    said: list[str] = []
    with opened(checkpoint, said, memory_bytes=budget_for_half(checkpoint), period=2) as dynamic:
        before, wanted = versions(dynamic), dynamic(input_ids=IDS).logits
        damage(checkpoint, how)
        for _ in range(3):
            exchange(dynamic)
            assert dynamic.copies.settle()  # else what the controller asks for may take the place of what waits
            dynamic.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=2)
            assert dynamic.copies.settle()
        counts = dynamic.copies.counts
        assert versions(dynamic) == before
        assert counts.promotions == counts.demotions == 0
        assert counts.failures >= 3 * len(dynamic.layers)
        assert torch.equal(dynamic(input_ids=IDS).logits, wanted)
        assert len(said) <= 2  # once for every kind of failure
        assert all("stays as it is" in text for text in said)
        dynamic(input_ids=IDS)
        dynamic(input_ids=IDS)
    lines = [json.loads(line) for line in (checkpoint / "log.jsonl").read_text("utf-8").splitlines()]
    assert [text for line in lines for text in line.get("said", [])] == said
    assert lines[-1]["failures"] > 0


def test_what_is_not_there_is_named(checkpoint: Path) -> None:
    reader = CopyingReader(checkpoint)
    layer = reader.layers[0]
    damage(checkpoint, "truncated")
    with pytest.raises(MoeqError, match=r"truncated|ends within"):
        reader.replica(layer, 0, 4)
    damage(checkpoint, "deleted")
    with pytest.raises(StorageError, match="cannot read"):
        reader.replica(layer, 0, 4)


def test_a_throttled_disk_slows_no_step(checkpoint: Path) -> None:
    """Reads that take long: steps go on with the old versions, which change when the reads are done."""
    said: list[str] = []
    with opened(checkpoint, said, memory_bytes=budget_for_half(checkpoint), period=1 << 30) as dynamic:
        read = dynamic._source.expert
        slow = 0.05

        def throttled(*given: Any) -> Any:
            time.sleep(slow)
            return read(*given)

        dynamic._source.expert = throttled  # type: ignore[method-assign]
        before = versions(dynamic)
        exchange(dynamic)
        steps = 0
        while dynamic.copies.in_flight or dynamic.copies._pending:
            dynamic(input_ids=IDS[:, :1])
            steps += 1
        assert steps > 3
        assert versions(dynamic) != before
    assert said == []


@pytest.mark.full
def test_a_process_holds_no_more_than_its_budget(exported: Path, tmp_path: Path) -> None:
    """RssAnon and RssShmem over some thousand switches, with the pools and the cache written."""
    script = Path(__file__).with_name("dynamic_memory.py")
    shutil.copytree(exported, tmp_path / "checkpoint")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "checkpoint"), "120"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["switches"] > 200
    assert found["failures"] == 0
    allowed = found["pool_bytes"] + found["host_bytes"]
    assert found["after"] - found["before"] <= allowed + found["slack"]
    assert found["after"] - found["half"] <= found["slack"] // 4


def test_what_follows_what_goes_with_the_checkpoint_and_is_read_ahead(checkpoint: Path) -> None:
    """Measured on the profile's trace, listed with its digest; prefetch=0 reads nothing ahead."""
    table = read_coactivation(checkpoint)
    assert table is not None
    assert NAME in (checkpoint / "SHA256SUMS").read_text()
    assert all(share.sum(1) == pytest.approx(np.ones(len(share)), abs=1e-3) for share in table.follows())
    with open_dynamic(checkpoint, "memory=1GiB", dtype="float32", policy="fixed") as probe:
        memory = sum(probe.budget.other_bytes.values()) + budget_for_half(checkpoint)
    ahead = {}
    for prefetch in (4, 0):
        options = f"memory={memory},period=1,ema=0.5,certainty=0,host=1MB,copies=between,prefetch={prefetch}"
        with open_dynamic(checkpoint, options, dtype="float32", policy="fixed") as dynamic:
            for seed in range(30):
                torch.manual_seed(seed)
                dynamic(input_ids=torch.randint(0, 30, (1, 2)))
            ahead[prefetch] = dynamic.copies.counts.prefetched
            assert bool(dynamic._follows) == bool(prefetch)
    assert ahead[0] == 0 < ahead[4]


def test_what_follows_what_counts_for_the_size_of_the_checkpoint(exported: Path) -> None:
    run = exported.parent
    recipe, quiet = load_recipe(None, list(RECIPE)), Reporter(quiet=True)
    context = Context(recipe=recipe, model_name=str(run.parent / "model"), out=run, reporter=quiet)
    written = (exported / NAME).stat().st_size
    assert written <= CheckpointSize(context).fixed[NAME] <= written + 32


def test_what_follows_what_in_another_model_is_refused(checkpoint: Path) -> None:
    table = json.loads((checkpoint / NAME).read_text())
    table["layers"][0]["name"] = "elsewhere"
    (checkpoint / NAME).write_text(json.dumps(table))
    with pytest.raises(ArtifactError, match="changed since SHA256SUMS"):
        open_dynamic(checkpoint, "memory=2MB", dtype="float32", policy="fixed")
    write_sums(checkpoint)
    with pytest.raises(ArtifactError, match="of other layers"):
        open_dynamic(checkpoint, "memory=2MB", dtype="float32", policy="fixed")
    with open_dynamic(checkpoint, "memory=2MB,prefetch=0", dtype="float32", policy="fixed"):
        pass
