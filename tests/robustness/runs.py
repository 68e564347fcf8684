"""Making, watching and reading runs: a recipe that takes a second, what it reports, what is on disk afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from fork_server import Running

from moeq.bundled import bundled_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 2048  # of the bundled tokenizer
STAGES = ("profile", "losses", "assign", "quantize", "export", "eval", "estimate", "report")
DIRECTORIES = {"export": "checkpoint"}
APART = {"recipe.yaml", ".lock"}  # what a run writes every time
BETWEEN = "between stages"


def save_model(directory: Path, *, max_shard: str = "5GB", **sizes: int) -> Path:
    """A Mixtral with random weights and the bundled tokenizer; sizes: keys of its configuration."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = MixtralConfig(num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, **tokens, **sizes)
    MixtralForCausalLM(config).save_pretrained(directory, max_shard_size=max_shard)
    copy_tokenizer(directory)
    return directory


def save_tiny_model(directory: Path) -> Path:
    """Mixtral with awkward sizes, in two shards."""
    return save_model(
        directory,
        max_shard="600KB",
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_local_experts=5,
        max_position_embeddings=128,
    )


def save_wide_model(directory: Path) -> Path:
    """One layer of 12 experts and a large vocabulary, in one file of float32: 110 MB."""
    return save_model(
        directory,
        vocab_size=9000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_local_experts=12,
        max_position_embeddings=1024,
    )


def save_short_corpus(path: Path) -> Path:
    """A few of the bundled calibration documents of every domain."""
    rows = [json.loads(line) for line in bundled_path("corpus/calibration.jsonl").read_text("utf-8").splitlines()]
    chosen: dict[str, list[str]] = {}
    for row in rows:
        mine = chosen.setdefault(row["domain"], [])
        if sum(map(len, mine)) < 3000:
            mine.append(json.dumps(row | {"text": row["text"][:3000]}))
    path.write_text("\n".join(line for lines in chosen.values() for line in lines) + "\n", "utf-8")
    return path


def copy_tokenizer(directory: Path) -> None:
    for name in TOKENIZER_FILES:
        shutil.copyfile(bundled_path("tiny-mixtral") / name, directory / name)


def tiny_recipe(model: Path, corpus: Path, **sections: Any) -> dict[str, Any]:
    """A whole run that takes a second; `sections` replace or add keys."""
    recipe: dict[str, Any] = {
        "name": "tiny",
        "model": str(model),
        "corpus": {"source": str(corpus), "sequences": 12, "sequence_length": 64, "batch_size": 6},
        "losses": {"group_size": 16, "clip": "minmax", "hessian_weighting": "none"},  # widths that tests name
        "assign": {"code_bits": 2},
        "export": {"verify": False},
        "eval": {
            "perplexity": {"source": str(corpus), "sequences": 4, "sequence_length": 64},
            "compare": [{"name": "uniform-3", "method": "uniform", "bits": 3}],
        },
        "estimate": {"grid": {"inputs": [128], "outputs": [128]}},
    }
    return recipe | sections


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    return path


def partials(directory: Path) -> list[Path]:
    """What is half-written below a directory."""
    return sorted(directory.rglob("*.partial*")) if directory.exists() else []


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Modification time and content of every file of a run except its lock."""
    return {
        path.relative_to(directory).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def restamp(run: Path) -> None:
    """Let the stages' records state what their files hold now, as whoever wrote such files would have recorded them."""
    for path in run.glob("*/stage.json"):
        record = json.loads(path.read_text("utf-8"))
        for name, stamp in record.get("files", {}).items():
            data = (path.parent / name).read_bytes()
            stamp |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        path.write_text(json.dumps(record), "utf-8")


def digests(run: Path) -> dict[str, str]:
    """The digest in every finished stage's record."""
    records = [path for path in run.glob("*/stage.json") if path.parent.suffix not in {".partial", ".begun"}]
    return {path.parent.name: json.loads(path.read_text("utf-8"))["digest"] for path in records}


def stage_record(run: Path, stage: str) -> dict[str, Any]:
    """What a finished stage's record says."""
    found: dict[str, Any] = json.loads((run / DIRECTORIES.get(stage, stage) / "stage.json").read_text("utf-8"))
    return found


def content(directory: Path) -> dict[str, bytes]:
    """Every file that a digest covers."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in APART | {"stage.json"}
    }


def follow(running: Running) -> Iterator[tuple[str, str]]:
    """(stage, begins | done | skipped) as the run reports it."""
    while line := running.line():
        word, *rest = line.split() or [""]
        if word in ("reparam", *STAGES):
            yield word, "skipped" if "skipped" in rest else "done" if rest[:1] == ["done"] else "begins"


def kill_during(running: Running, target: str, delay: float) -> str | None:
    """Kill the process group `delay` seconds after a stage began; where it died, None when the run was over."""
    last = ("", "")
    for last in follow(running):
        if last == (target, "begins"):
            time.sleep(delay)
            running.signal(signal.SIGKILL)
            break
    return _died(running, last)


def kill_after(running: Running, delay: float) -> str | None:
    """Kill the process group after so many seconds; where it died, None when the run was over."""
    time.sleep(delay)
    running.signal(signal.SIGKILL)
    return _died(running, ("", ""))


def _died(running: Running, last: tuple[str, str]) -> str | None:
    """The stage in which a command was killed, or `between stages`; None where it had ended. last: what it reported."""
    for last in follow(running):  # noqa: B007
        pass
    code = running.wait().code
    assert code in {0, -signal.SIGKILL}, code
    return None if code == 0 else last[0] if last[1] == "begins" else BETWEEN


def can_mount() -> bool:
    """Whether file systems can be mounted here."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as place, suppress(subprocess.CalledProcessError), mounted(Path(place) / "disk"):
        return True
    return False


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """An empty file system in memory at a new directory; options: as `mount -o` takes them."""
    place.mkdir(parents=True)
    chosen = ["-o", ",".join(options)] if options else []
    subprocess.run(["mount", "-t", "tmpfs", *chosen, "tmpfs", str(place)], check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, capture_output=True)


def remount(place: Path, *options: str) -> None:
    """Change the options of what is mounted there."""
    subprocess.run(["mount", "-o", ",".join(("remount", *options)), str(place)], check=True, capture_output=True)
