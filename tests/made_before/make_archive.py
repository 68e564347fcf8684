"""Makes an archive of this moeq's run directories, stores, checkpoints and files, for `test_made_before.py`.

Run by hand before keys or formats change, never for the sake of a test that fails: what is in an archive was made by
the moeq of its name. From the repository's root:

    PYTHONPATH=$PWD:$PWD/tests OMP_NUM_THREADS=1 .venv/bin/python tests/made_before/make_archive.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from family_models import VOCABULARY, build
from made_before.archives import FOLDER, GGUF, NATIVE, TEXT, answers, context_aware, decoded, environment, moeq
from transformers import AutoModelForCausalLM

import moeq as package
from moeq.bundled import bundled_path
from moeq.version import __version__

ROOT = FOLDER.parents[1]
STEP, WORDS_STEP = 2.0**-6, 2.0**-3  # weights, and those of words, are multiples of it: they compress to a third
ELSEWHERE = "/made/before"  # where nothing lies
TO_EXPORT = ("profile", "losses", "assign", "quantize", "export")
CALIBRATION = {"sequences": 8, "sequence_length": 48, "batch_size": 4}
LAYERS = {"mlp_only_layers": [], "num_hidden_layers": 2, "norm_topk_prob": True}
VISION = {
    "hidden_size": 24, "intermediate_size": 20, "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_experts": 4,
    "num_attention_heads": 3, "moe_layers": [1],
}  # fmt: skip
ALL_WIDTHS: dict[str, Any] = {
    "name": "made-before",
    "device": "cpu",
    "corpus": CALIBRATION,
    "profile": {"trace": True},
    "losses": {
        "bits": [1, 2, 3, 4, 8], "methods": ["gptq", "rtn"], "group_size": 32,
        "layer_effects": {"bits": 2, "sequences": 2}, "expert_effects": {"bits": 2, "sequences": 2},
    },
    "others": {"attention": 4},
    "assign": {
        "method": "prefix-split", "code_bits": 2.5, "gpu_experts": 1, "quantizer": "best",
        "loss_weighting": "effect",
    },
    "export": {"verify": False},
    "eval": {
        "perplexity": {"sequences": 4, "sequence_length": 48},
        "tasks": ["moeq_continuation"],
        "limit": 2,
        "compare": [{"name": "uniform-3", "method": "uniform", "bits": 3}],
        "low_precision": [{"bits": 2, "high_bits": 8, "shares": [0, 0.5, 1], "seeds": 1, "sequences": 2}],
    },
    "estimate": {"geometry": "model", "popularity": "trace", "grid": {"inputs": [64], "outputs": [64]}},
}  # fmt: skip
EXPORTED = {"device": "cpu", "corpus": CALIBRATION, "export": {"verify": False}, "eval": {"compare": []}}
UNIFORM = EXPORTED | {
    "name": "uniform-4",
    "losses": {"bits": [4], "methods": ["rtn"], "group_size": 32, "symmetric": True},
    "assign": {"method": "uniform", "bits": 4, "quantizer": "rtn"},
}  # fmt: skip
NESTED_RUN = EXPORTED | {
    "name": "nested",
    "losses": {"methods": ["gptq"], "group_size": 16, "symmetric": True, "nested": True},
    "assign": {"method": "prefix-split", "code_bits": 2.5, "gpu_experts": 1},
    "quantize": {"replicas": "all"},
}  # fmt: skip
PROJECTIONS = EXPORTED | {
    "name": "projections",
    "losses": {"methods": ["gptq"], "group_size": -1},
    "others": {"attention": 4, "embeddings": 8, "head": 3, "group_size": 16},
    "assign": {"method": "optimal", "code_bits": 2.5, "granularity": "projection"},
    "quantize": {"refine": {"iterations": 4}},
}  # fmt: skip
IMAGES = {
    "name": "digits", "device": "cpu",
    "corpus": {"source": "digits", "sequences": 32, "batch_size": 16},
    "reparam": {"bits": 8, "samples": 16, "integer": {"vectors": 1, "calibration": 8, "schemes": False}},
    "losses": {"bits": [2, 4], "methods": ["rtn"], "group_size": 16},
    "assign": {"method": "optimal", "code_bits": 3, "quantizer": "rtn"},
    "export": {"verify": False},
    "eval": {"images": {"images": 24}, "compare": [{"name": "u2", "method": "uniform", "bits": 2, "quantizer": "rtn"}]},
    "estimate": {"grid": {"inputs": [64], "outputs": [64]}},
}  # fmt: skip

INSPECTED = (  # beside run directories, their stages and native checkpoints
    "comparison.json", "run/store", "run/profile/trace.safetensors", "run/losses/losses.parquet",
    "run/assign/assignment.json", "run/assign/sensitivities.parquet", "run/eval/eval.json", "tiny-qwen",
    "vit-run/eval/eval.json", "vit-run/reparam/reparam.json", "vit-run/reparam/integer", "vit-run/reparam/integer.json",
)  # fmt: skip


def language_model(folder: Path, family: str, **sizes: Any) -> Path:
    """A random model of four experts in bfloat16, with the bundled tokenizer."""
    counts = dict.fromkeys(("num_experts", "num_local_experts"), 4)
    _coarse(build(family, **counts | sizes)).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_path("tiny-mixtral") / name, folder / name)
    return folder


def _coarse(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            step = WORDS_STEP if len(weight) == VOCABULARY else STEP
            weight.copy_((weight / step).round() * step)
    return model


def recipe(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")
    return path


def checkpoint(work: Path, name: str, model: Path, data: dict[str, Any]) -> Path:
    """A run up to its export, of which the checkpoint is kept as it would be published."""
    out = work / f"{name}-run"
    for stage in TO_EXPORT:
        moeq(stage, recipe(work / f"{name}.yaml", data), "--model", model, "--out", out, "--quiet")
    target = shutil.copytree(out / "checkpoint", work / "kept" / "checkpoints" / name)
    (target / "stage.json").unlink()
    return target


def make(work: Path) -> Path:
    """Everything that is kept, in a folder."""
    kept = work / "kept"
    (kept / "checkpoints").mkdir(parents=True)
    shutil.copytree(ROOT / "recipes", kept / "recipes", ignore=shutil.ignore_patterns("*.py"))
    wide = {"hidden_size": 32, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16, **LAYERS}
    model = language_model(kept / "tiny-qwen", "qwen3_moe", **wide)
    mixtral = language_model(work / "tiny-mixtral", "mixtral", num_hidden_layers=2)
    oss = language_model(work / "tiny-oss", "gpt_oss", num_hidden_layers=2)
    run = kept / "run"
    moeq("run", recipe(kept / "run.yaml", ALL_WIDTHS), "--model", model, "--out", run, "--quiet")
    moeq("assign", "--out", run, "--frontier", "--quiet")
    uniform = checkpoint(work, "uniform", model, UNIFORM)
    for name in ("auto-round", "gptq"):
        moeq(
            "convert", run / "checkpoint", "--to", name, "--out", kept / "checkpoints" / name, "--widen", "--no-verify"
        )
    for name in ("compressed-tensors", "gguf"):
        moeq("convert", uniform, "--to", name, "--out", kept / "checkpoints" / name, "--no-verify")
    shutil.rmtree(uniform)
    checkpoint(work, "nested", mixtral, NESTED_RUN)
    checkpoint(work, "projections", oss, PROJECTIONS)
    vit = kept / "tiny-vit"
    _coarse(build("moe_vit", **VISION)).save_pretrained(vit)
    moeq("run", recipe(kept / "vit-run.yaml", IMAGES), "--model", vit, "--out", kept / "vit-run", "--quiet")
    grid = ("--grid", "in=64", "out=64", "batch=1")
    moeq("estimate", "--model", "mixtral-8x7b", "--bits", "3", *grid, "--out", kept / "estimate", "--quiet")
    text = kept / TEXT
    text.write_text(" ".join(json.loads(_first_line())["text"].split())[:600])
    moeq("eval", run, model, "--text", text, "--out", kept / "comparison.json", "--quiet")
    for lock in kept.rglob(".lock"):
        lock.unlink()
    for path in [kept / "comparison.json", *kept.glob("*/recipe.yaml")]:
        path.write_text(path.read_text("utf-8").replace(str(kept), ELSEWHERE), "utf-8")
    return kept


def _first_line() -> str:
    with bundled_path("corpus/evaluation.jsonl").open(encoding="utf-8") as file:
        return file.readline()


def expected(kept: Path, work: Path) -> dict[str, Any]:
    """What everything in the folder gives."""
    last = subprocess.run(
        ["git", "log", "-1", "--format=%h %cI", "--", "moeq"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commit, date = last.stdout.split()
    made_by = {"moeq": __version__, "commit": commit, "date": date, **environment()}
    folders = ["run", "vit-run", *(f"checkpoints/{name}" for name in ("gguf", "nested", "projections"))]
    runs = {
        "run": {"model": "tiny-qwen", "again": [], "otherwise": [f"assign/frontier.{end}" for end in ("json", "svg")]},
        "vit-run": {"model": "tiny-vit", "again": [], "otherwise": []},
    }
    stages = [path.parent.relative_to(kept).as_posix() for run in runs for path in kept.glob(f"{run}/*/stage.json")]
    paths = [*folders, *sorted(stages), *INSPECTED]
    inspected = {path: moeq("inspect", kept / path) for path in paths}
    found: dict[str, Any] = {"made_by": made_by, "inspect": inspected, "runs": runs, "decoded": {}, "native": {}}
    for folder in [kept / "run" / "checkpoint", *sorted(set(kept.glob("checkpoints/*")) - {kept / GGUF})]:
        path = folder.relative_to(kept).as_posix()
        plain = work / "plain" / path
        plain.parent.mkdir(parents=True, exist_ok=True)
        moeq("convert", folder, "--to", "dequantized", "--out", plain, "--no-verify")
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        found["decoded"][path] = {"weights": decoded(plain), **answers(model)}
    for path in NATIVE:
        found["native"][path] = answers(package.load(kept / path, dtype="float32"))
    found["gguf"] = moeq("verify", kept / GGUF, "--against", kept / "tiny-qwen")["distance"]
    found["context_aware"] = context_aware(kept)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="moeq-made-") as folder:
        kept = make(Path(folder))
        found = expected(kept, Path(folder))
        name = f"{found['made_by']['moeq']}-{found['made_by']['commit']}"
        text = json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(text.replace(f"{kept}/", "") + "\n", "utf-8")
        with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(kept.rglob("*")):
                archive.add(path, path.relative_to(kept), recursive=False, filter=_nobodys)
    print(FOLDER / f"{name}.tar.xz", (FOLDER / f"{name}.tar.xz").stat().st_size)


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry without owner and date."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
