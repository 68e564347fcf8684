"""Wrong options are refused, and what is small is answered, before torch, transformers or lm-eval are imported.

Refusals take neither pyarrow nor the hub's client, those of files that are missing not even numpy. One process goes
through all of them with an import hook that lets none of these in: what tries fails with exit code 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from made_before import archives

from moeq import cli, pipeline
from moeq.artifacts import run as folders
from moeq.artifacts.assignment import Assignment, ExpertChoice, LayerAssignment, write_assignment
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.provenance import BuildDefinition, Builder, Making, RunDetails
from moeq.artifacts.sums import write_sums
from moeq.artifacts.tensor_files import write_tensors

HEAVY = ("torch", "transformers", "lm_eval", "numba", "matplotlib", "sklearn", "accelerate", "datasets",
         "scipy.optimize", "scipy.sparse", "scipy.stats")  # fmt: skip
NO_REFUSAL = (*HEAVY, "pyarrow", "huggingface_hub.hf_api")
NO_MISSING_FILE = (*NO_REFUSAL, "numpy", "safetensors")
DRIVER = """
import contextlib, importlib.abc, io, json, sys

class Refused(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if any(name == heavy or name.startswith(heavy + ".") for heavy in self.kept_out):
            raise RuntimeError(f"imports {name}")

refused = Refused()
sys.meta_path.insert(0, refused)
asked, results, answers = json.load(sys.stdin), sys.argv[1], []
refused.kept_out = asked[0][0]
from moeq.cli import main
import functools, typer.main
typer.main.get_command = functools.cache(typer.main.get_command)  # made once, not for every command line
for refused.kept_out, words in asked:
    sys.argv = ["moeq", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
    answers.append([code, out.getvalue(), err.getvalue()])
json.dump(answers, open(results, "w"))
"""
COMMIT = "0" * 40
TEXT, OTHER = (hashlib.sha256(text).hexdigest() for text in (b"text", b"{"))  # of file.txt and broken.json
BUNDLED = ("--model", "bundled:tiny-mixtral")
CUT = "cut/recipe.yaml: a link that leads to nothing"
Case = tuple[tuple[str, ...], int, str]  # options, exit code, words of the line


def of_a_run(*more: Case, dense: bool = False) -> list[Case]:
    """What every command on a run refuses; dense: it takes models without experts, too."""
    return [
        (("no.yaml",), 13, "no.yaml: no such file or directory"),
        (("broken.yaml",), 2, "broken.yaml"),
        (
            ("--out", "nowhere"),
            2,
            "--out nowhere: no run is there, and no model is named; give the directory of a run, or",
        ),
        (("unnamed.yaml",), 2, "unnamed.yaml: no model; give --model, or write `model:` in it"),
        (("--model", "./nowhere"), 13, "./nowhere: no such file or directory"),
        (("--model", "no where"), 3, "no where: neither a directory that is there nor a hub id"),
        (("--model", "bundled:nothing"), 3, "no such bundled model"),
        (("--model", "empty"), 3, "no config.json"),
        (("--model", "nobody/nothing"), 3, "nobody/nothing"),
        *(
            []
            if dense
            else [(("--model", "dense"), 3, "dense: it is dense (llama), not a Mixture-of-Experts model: moeq")]
        ),
        ((*BUNDLED, "--set", "losses.bites=3"), 2, "did you mean 'bits'"),
        ((*BUNDLED, "--set", "losses.group_size=3"), 2, "group_size"),
        ((*BUNDLED, "--set", "device=gpu"), 2, "device"),
        ((*BUNDLED, "--set", "threads=99999999999"), 2, "threads is 99999999999; give 4096 or less"),
        ((*BUNDLED, "--set", "assign.code_bits=-1"), 2, "code_bits"),
        ((*BUNDLED, "--out", "file.txt"), 8, "file.txt: is a file"),
        ((*BUNDLED, "--out", "s3://a/b"), 8, "s3://a/b: an address, and files are written to paths alone; give a path"),
        ((*BUNDLED, "--out", "\udcff"), 8, "its name is no UTF-8; choose another --out"),
        (("--out", "cut"), 13, CUT),
        (("--out", "made-before"), 13, "made-before/recipe.yaml: no such file or directory; put it back; moeq "),
        ((*BUNDLED, "--set", "store=s3://a/b"), 8, "s3://a/b: an address, and files are written to paths alone"),
        *more,
    ]


NO_TEXT: Case = ((*BUNDLED, "--set", "corpus.source=no.txt"), 13, "no.txt: no such file or directory")
NO_EVALUATION: Case = ((*BUNDLED, "--set", "eval.perplexity.source=no.txt"), 13, "no.txt: no such file or directory")
NO_TASKS: Case = (
    (*BUNDLED, "--set", "eval.tasks=[mine]", "--set", "eval.include_path=nowhere"), 13, "nowhere: no such file or dir",
)  # fmt: skip
NO_HARDWARE: Case = ((*BUNDLED, "--set", "estimate.hardware=abacus"), 10, "unknown hardware 'abacus'")
EVERY = of_a_run(NO_TEXT, NO_EVALUATION, NO_TASKS, NO_HARDWARE)

TWO_RUNS: list[Case] = [
    (("run", "--out", "other"), 2, "two runs: run and --out other; give one of them"),
    (("run", "--out", "s3://a/b"), 2, "two runs: run and --out s3://a/b; give one of them"),
]
WRITTEN = "an address, and files are written to paths alone"
NO_TEXT_FILE: Case = (("model", "--text", "no.txt"), 13, "no.txt: no such file or directory")
WITHOUT_RECIPE: list[Case] = [
    (("az://a/b",), 13, "az://a/b: an address, where a path is wanted; give the path of a copy on this machine"),
    (("./nowhere",), 13, "./nowhere: no such file or directory"),
    (("--model", "run"), 2, "run: this is a run, no model; its recipe is run/recipe.yaml; `moeq run run` goes"),
    (("model", *BUNDLED), 2, "two models: model and --model bundled:tiny-mixtral"),
    (("model", "--preset", "paper-0000"), 2, "no preset 'paper-0000'; did you mean 'paper-000'"),
    (("model", "--quality", "bets"), 2, "no quality 'bets'; did you mean 'best'"),
    (("model", "--quality", "best", "--preset", "fast"), 2, "--preset goes without --quality"),
    (("run/recipe.yaml", "--quality", "best"), 2, "--quality goes without a recipe"),
    (("model", "--bits", "99"), 2, "--bits is 99; give a number between"),
    (("model", "--bits", "2", "--size", "1GiB"), 2, "one budget is enough: --bits or --size"),
    (("model", "--group-size", "3"), 2, "--group-size"),
    NO_TEXT_FILE,
    (("model", "--text", "file.txt", "--eval-text", "file.txt"), 2, "--eval-text: file.txt is in --text, too"),
    (("model", "--text", "\udcff.txt"), 2, ".txt: its name is no UTF-8; rename it"),
]

REFUSED: dict[str, list[Case]] = {
    "run": [*EVERY, *WITHOUT_RECIPE, *TWO_RUNS],
    "plan": [*EVERY, *WITHOUT_RECIPE, *TWO_RUNS],
    "init": [
        *(case for case in WITHOUT_RECIPE if case is not NO_TEXT_FILE and case[0][0] != "run/recipe.yaml"),
        (("broken.yaml",), 2, "broken.yaml: is a recipe"),
        (("model", "--out", "file.txt"), 2, "--out file.txt: is no name of a recipe; end its name in .yaml"),
        (("model", "--out", "broken.yaml"), 2, "broken.yaml: is there already"),
        (("model", "--out", "s3://a.yaml"), 8, f"s3://a.yaml: {WRITTEN}"),
    ],
    "recipe": [
        (("no.yaml",), 13, "no.yaml: no such file or directory"),
        (("broken.yaml",), 2, "broken.yaml"),
        (("model",), 2, "model: is no recipe"),
        (("--preset", "papers"), 2, "no preset 'papers'"),
        (("--set", "losses.bites=3"), 2, "did you mean 'bits'"),
    ],
    "reparam": of_a_run(NO_TEXT, dense=True),
    "profile": of_a_run(
        NO_TEXT,
        ((*BUNDLED, "--imatrix", "file.txt"), 2, "--imatrix file.txt: is there already"),
        ((*BUNDLED, "--imatrix", "s3://a"), 8, f"s3://a: {WRITTEN}"),
    ),
    "losses": of_a_run(NO_TEXT),
    "assign": of_a_run(
        NO_HARDWARE,
        ((*BUNDLED, "--code-bits", "many"), 2, "--code-bits is 'many'; give a number such as"),
        ((*BUNDLED, "--average-bits", "2"), 2, "give --bits, which counts all that is stored, or --code-bits"),
        ((*BUNDLED, "--code-bits", "2", "--size", "1GiB"), 2, "one budget is enough"),
        ((*BUNDLED, "--size", "5 parsecs"), 2, "unknown unit 'parsecs'"),
        ((*BUNDLED, "--size", "1GiB", "--set", "quantize.replicas=all"), 2, "moeq: --size: assign: size is"),
        ((*BUNDLED, "--method", "magic"), 2, "magic"),
        ((*BUNDLED, "--target", "toaster"), 2, "toaster"),
    ),
    "quantize": of_a_run(),
    "export": of_a_run(((*BUNDLED, "--format", "zip"), 2, "zip")),
    "estimate": [
        *(
            (("--model", "mixtral-8x7b", option, "nowhere"), 13, "nowhere: no such file or directory")
            for option in ("--assignment", "--manifest", "--trace", "--fit")
        ),
        (("--model", "mixtral-8x7b", "--hardware", "./no.yaml"), 13, "./no.yaml: no such file or directory"),
        (("--model", "nowhere-8x7b"), 10, "did you mean 'mixtral-8x7b'"),
        (("az://a/b",), 2, "az://a/b: no recipe; give a YAML recipe, or a model as --model az://a/b"),
        (("--model", "mixtral-8x7b", "--hardware", "abacus"), 10, "unknown hardware 'abacus'"),
        (("--model", "mixtral-8x7b", "--grid", "in=many"), 2, "'many' is no whole number"),
        (("--model", "mixtral-8x7b", "--replicas", "1,x"), 2, "x"),
        (("--model", "mixtral-8x7b", "--policy", "luck"), 10, "luck"),
        (("--sheet", "paper-000", "--model", "mixtral-8x7b"), 2, "--sheet uses nothing of --model"),
        (("--bits", "3"), 2, "no model"),
        (("no.yaml",), 13, "no.yaml: no such file or directory"),
        (("--out", "nowhere"), 2, "no model"),
    ],
    "eval": [
        *of_a_run(NO_EVALUATION, NO_TASKS, NO_HARDWARE)[2:],
        (
            ("--tasks", "mine", "--include-path", "nowhere", *BUNDLED),
            13,
            "nowhere: no such file or directory; give a folder of task",
        ),
        (("--window", "3"), 2, "--window belongs to models, checkpoints and runs"),
        (("model", "--out", "s3://a/r.json"), 8, "s3://a/r.json: an address, and files are written to paths alone"),
        (("model", "--text", "\udcff.txt"), 2, "its name is no UTF-8; rename it"),
        (("run", "--set", "seed=1"), 2, "--set belongs to a run's stage"),
        (("./nowhere",), 13, "./nowhere: no such file or directory"),
        (
            ("translator",),
            9,
            "translator: an encoder-decoder continues no text; measure translations: eval.translation",
        ),
        (("run", "./nowhere.json"), 13, "./nowhere.json: no such file or directory"),
        (("run:other",), 9, "no assignment 'other'"),
        (("run", "--device", "gpu"), 2, "--device: unknown device 'gpu'"),
        (("run", "--window", "4", "--stride", "9"), 9, "window 4, stride 9"),
        (("run", "--tasks", "mine", "--window", "9"), 2, "--window without --text"),
        (("run", "--limit", "3"), 2, "--limit without --tasks"),
        (
            ("run", "--tasks", "mine", "--include-path", "nowhere"),
            13,
            "nowhere: no such file or directory; give a folder of task",
        ),
        (("run", "--tasks", "mine", "--include-path", "file.txt"), 9, "file.txt: not a directory; give a folder"),
        (("run", "--batch-size", "some"), 2, "--batch-size some"),
        (("run", "--text", "no.txt"), 13, "no.txt: no such file or directory"),
        (("run", "--out", "empty"), 9, "is no file that can be written"),
        (("run", "--out", "pipe"), 8, "pipe: a device or a pipe, which a file would replace; give a file's path"),
        (("run", "--context-aware", "gpu_experts=x"), 2, "gpu_experts"),
    ],
    "report": of_a_run(
        (("--out", "run", "--maps", "x", "--analysis", "y"), 2, "--analysis goes without --maps"),
        *((("--out", "run", option, "model"), 2, "model: a model or ch") for option in ("--maps", "--analysis")),
        *((("--out", "run", option, "s3://a/b"), 8, f"s3://a/b: {WRITTEN}") for option in ("--maps", "--analysis")),
        dense=True,
    ),
    "inspect": [
        (("nowhere",), 13, "nowhere: no such file or directory"),
        (("nobody/nothing",), 13, "of the hub: hf download nobody/nothing --local-dir"),
        (("empty",), 7, "neither a checkpoint, a run, a stage nor a model"),
        (("file.txt",), 7, "not a file that moeq knows"),
        (("broken.yaml",), 2, "broken.yaml"),
        (("broken.json",), 7, "broken.json: cannot be read as JSON"),
        (("run", "--out", "new"), 2, "--out: a file, and nothing is written to it"),
        (("run", "--widen"), 2, "--widen: nothing is widened"),
        (("run", "--tensor-types", "k", "--placement-for", "sglang"), 2, "one is told at a time"),
        (("empty", "--tensor-types", "k"), 7, "empty: no assignment of widths"),
        (("run", "--placement-for", "llama.cpp", "--out", "new"), 2, "llama.cpp reads no file"),
        (("cut",), 13, CUT),
        (("run", "--placement-for", "sglang", "--out", "new.pt"), 2, "from a file that ends in .json"),
        (("model", "--placement-for", "llama.cpp"), 7, "placement.json"),
    ],
    "convert": [
        (("model", "--to", "llama.cpp", "--out", "new", "--max-shard", "two"), 2, "--max-shard: no size: 'two'"),
        (
            ("nowhere", "--to", "llama.cpp", "--out", "new"),
            13,
            "nowhere: no such file or directory; give a checkpoint's",
        ),
        (
            ("nowhere/x", "--to", "llama.cpp", "--out", "new"),
            13,
            "nowhere/x: no such file or directory; give a checkpoint's directory; of the hub: hf download nowhere/x",
        ),
        (("empty", "--to", "llama.cpp", "--out", "new"), 3, "no config.json"),
        (("model", "--to", "llama.cpp", "--out", "empty"), 2, "empty: is there already"),
        (("model", "--to", "llama.cpp", "--out", "link"), 2, "link: is there already"),
        (("model", "--to", "llama.cpp", "--out", "\udcff"), 8, "its name is no UTF-8; choose another --out"),
    ],
    "verify": [
        (("nowhere",), 13, "nowhere: no such file or directory"),
        (("nobody/nothing",), 13, "give a checkpoint's directory; of the hub: hf download nobody/nothing --local-dir"),
        (("model", "--against", "./nowhere"), 13, "./nowhere: no such file or directory"),
        (("model", "--signature"), 2, "--signature: needs one key or root to trust"),
        (("model", "--public-key", "file.txt"), 2, "a key, and no signature is verified; give --signature too"),
        (("model", "--signature", "--public-key", "nowhere"), 13, "nowhere: no such file or directory"),
        (("model", "--target", "toaster"), 2, "--target: unknown runtime 'toaster'; did you mean 'transformers'?"),
    ],
    "reproduce": [
        (("nowhere", "--model", "small"), 13, "nowhere: no such file or directory"),
        (("run", "--model", "small"), 7, "run: this run has no checkpoint; go on with it: moeq run run"),
        (("model", "--model", "small"), 7, "model: no provenance.json, which says what it was made of"),
        (("made/edited", "--model", "small"), 7, "config.json: changed since SHA256SUMS was written"),
        (("made/edited-too", "--model", "small"), 7, "config.json: provenance.json has another digest of it"),
        (("made/converted", "--model", "small"), 2, "made by `moeq convert` from origin, not by a run"),
        (("made/code", "--model", "small"), 2, "its recipe runs Python code that the model brings along; read that"),
        (("made/key", "--model", "small"), 2, "provenance.json: recipe: unknown key 'losses.bites'; reproduce it with"),
        (("made/plugin", "--model", "small"), 2, "assign.method: unknown allocator 'evil'"),
        (("made/hardware", "--model", "small"), 2, "hardware is '/etc/passwd', a file that moeq does not bring"),
        (("made/path", "--model", "small"), 7, "it has no digest of '/etc/passwd', which its recipe names"),
        (
            ("made/dataset", "--model", "small"),
            4,
            "hub:org/data@1:a:train': missing: it was calibrated on this dataset; allow",
        ),
        (("made/whole", "--model", "small"), 4, f"missing: it was calibrated on it, SHA-256 {TEXT}; give it by --text"),
        (("made/whole", "--model", "small", "--text", "no.txt"), 13, "moeq: no.txt: no such file or directory"),
        (("made/whole", "--model", "small", "--text", "s3://a/b"), 13, "s3://a/b: an address, where a path is wanted"),
        (
            ("made/whole", "--model", "small", "--text", "broken.json"),
            4,
            f"broken.json: its SHA-256 is {OTHER}, in provenance.json it is {TEXT}",
        ),
        (("made/whole", "--model", "./nowhere", "--text", "file.txt"), 13, "./nowhere: no such file or directory"),
        (
            ("made/whole", "--model", "small", "--text", "file.txt", "--text", "broken.json"),
            4,
            f"broken.json: SHA-256 {OTHER}, and provenance.json has no text of that",
        ),
        (("made/whole", "--model", "small", "--text", "file.txt"), 3, f"in provenance.json it is {'0' * 64}"),
        (("made/weights", "--model", "small", "--text", "file.txt"), 3, "model.safetensors: SHA-256 "),
        (("made/more", "--model", "small", "--text", "file.txt"), 3, "tokenizer.json: missing: provenance.json has it"),
        (("made/out", "--model", "small", "--text", "file.txt"), 3, "not a plain file name: '../broken.json'"),
    ],
    "families": [
        (("nothing-like-it",), 3, "no family of this name"),
        (("./nowhere",), 13, "./nowhere: no such file or directory"),
        (("nowhere/config.json",), 13, "nowhere/config.json: no such file or directory"),
        (("nobody/nothing",), 3, "nobody/nothing: neither here nor to be had from the hub"),
        (("empty",), 3, "no config.json"),
    ],
    "sign": [
        (("nowhere", "--key", "file.txt"), 13, "nowhere: no such file or directory"),
        (("run", "--key", "file.txt"), 7, "run: this run has no checkpoint; go on with it: moeq run run"),
        (("model", "--key", "nowhere"), 13, "nowhere: no such file or directory; give a file in PEM to --key"),
        (("model", "--key", "file.txt", "--certificate-chain", "file.txt"), 2, "give --certificate too"),
    ],
    "push": [
        (("nowhere", "me/name"), 13, "nowhere: no such file or directory"),
        (("file.txt", "me/name"), 3, "file.txt: not a directory; give RUN/checkpoint of a moeq run"),
        (("run", "me/name"), 7, "run: this run has no checkpoint; go on with it: moeq run run"),
        (("model", "name"), 2, "name: no name of a repository; give USER/NAME"),
        (("model", "me/name"), 7, "no SHA256SUMS"),
    ],
    "generate": [
        (("nowhere", "hi"), 13, "nowhere: no such file or directory"),
        (("file:///a/b", "hi"), 13, "file:///a/b: an address, where a path is wanted"),
        (("file.txt", "hi"), 3, "file.txt: not a directory; give RUN/checkpoint of a moeq run"),
        (("empty", "hi"), 3, "no config.json"),
        (("model", "hi", "--device", "gpu"), 2, "--device: unknown device 'gpu'"),
        (("model", "hi", "--seed", str(2**64)), 2, f"--seed '{2**64}'; give a whole number from 0 to {2**63 - 1}"),
        (("model", "hi", "--temperature", "inf"), 2, "--temperature: cannot be inf; give a finite number from 0"),
        (("model", "hi", "--temperature", "nan"), 2, "--temperature 'nan'; give a number from 0"),
    ],
    "bench": [
        (("./nowhere",), 13, "./nowhere: no such file or directory"),
        (("empty",), 3, "no config.json"),
        (("model", "--device", "gpu"), 2, "--device: unknown device 'gpu'"),
        (("model", "--gguf", "nowhere"), 13, "nowhere: no such file or directory; give a GGUF file to --gguf"),
        (("model", "--batch", "many"), 2, "--batch"),
    ],
    "gc": [
        ((), 2, "nothing to clean"),
        (("--out", "nowhere"), 13, "nowhere: no such file or directory"),
        (("--out", "empty"), 7, "not a run directory"),
        (("nowhere",), 13, "nowhere: no such file or directory"),
        (("--store", "empty"), 7, "empty"),
        (("cut",), 13, CUT),
        (("--store", "link"), 13, "link: a link that leads to nothing; give the folder that runs used"),
        (("moved",), 8, "moved/store: a link that leads to nothing; remove it, or make what it names"),
        (("--store", "s3://a/b"), 13, "s3://a/b: an address, where a path is wanted"),
    ],
    "watch": [
        (("nowhere",), 13, "nowhere: no such file or directory"),
        (("empty",), 7, "empty: this is no run; give the directory of a run"),
        (("file.txt",), 7, "file.txt: this is no run; give the directory of a run"),
        (("cut",), 13, CUT),
        (("run", "--once", "--html", "pipe"), 8, "pipe: a device or a pipe, which a file would replace"),
        (("run", "--once", "--html", "screen"), 8, "screen: a device or a pipe, which a file would replace"),
    ],
}
MISSING = [
    ("inspect", "nowhere"), ("verify", "nowhere"), ("verify", "model", "--against", "./nowhere"),
    ("convert", "nowhere/x", "--to", "llama.cpp", "--out", "new"), ("generate", "nowhere", "hi"), ("eval", "./nowhere"),
]  # fmt: skip
ARCHIVE = archives.names()[-1]  # what an earlier moeq made: a run, checkpoints in every format, models
INSPECTED = [  # all but the forward in whole numbers, which is run again
    *(path for path in archives.index(ARCHIVE)["inspect"] if not path.endswith("reparam/integer")),
    "checkpoints/auto-round", "checkpoints/gptq", "checkpoints/compressed-tensors", "tiny-vit", "recipes/demo.yaml",
    "run/profile/profile.safetensors", "run/losses/others.json", "run/losses/replicas.json", "run/assign/frontier.json",
]  # fmt: skip
ANSWERED = [
    ("families",), ("families", "qwen3"), ("families", "llama"), ("families", "kept/tiny-qwen"),
    ("families", "kept/tiny-vit/config.json"), ("families", "kept/run/checkpoint", "--json"), ("families", "dense"),
    ("families", "bundled:tiny-mixtral"), ("families", "org/model"), ("families", "own-code"),
    ("inspect", "assignment.json"), ("inspect", "run/recipe.yaml"), ("inspect", "run"),
    *(("inspect", f"kept/{path}") for path in INSPECTED),
    ("watch", "run"), ("watch", "kept/run", "--once", "--json"),
    ("gc", "--out", "run", "--dry-run"), ("gc", "--out", "kept/run", "--dry-run"), ("gc", "--store", "kept/run/store"),
    ("estimate", "--model", "mixtral-8x7b", "--quiet"), ("estimate", "--sheet", "paper-004", "--json"),
    ("estimate", "--model", "mixtral-8x7b", "--hardware", "h100-ndp-pcie4"),
    ("estimate", "--model", "mixtral-8x7b", "--capacity"),
    ("estimate", "--model", "kept/tiny-qwen", "--bits", "3"), ("estimate", "--model", "kept/checkpoints/gptq"),
    ("estimate", "--model", "kept/run/checkpoint"),
    ("recipe", "--schema"), ("recipe", "--preset", "best"), ("init", "model", "--out", "-", "--bits", "3"),
    ("--version",), ("--help",), *((name, "--help") for name in cli.COMMANDS),
]  # fmt: skip

DRAWN = [("estimate", "kept/recipes/paper-000-figures.yaml", "--out", "page")]  # with a page, whose charts are drawn


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the cases name."""
    folder = tmp_path_factory.mktemp("early")
    for name in ("empty", "run", "model", "cut", "moved", "made-before/checkpoint"):
        (folder / name).mkdir(parents=True)
    for link in ("link", "cut/recipe.yaml", "moved/store"):
        (folder / link).symlink_to("nothing")
    os.mkfifo(folder / "pipe")
    (folder / "screen").symlink_to("/proc/self/fd/1")
    (folder / "made-before" / "checkpoint" / "config.json").write_text("{}", "utf-8")
    for name in ("run", "moved"):
        (folder / name / "recipe.yaml").write_text("model: bundled:tiny-mixtral\n", "utf-8")
    (folder / "model" / "config.json").write_text('{"model_type": "mixtral"}', "utf-8")
    (folder / "translator").mkdir()
    described = {"model_type": "nllb-moe", "is_encoder_decoder": True}
    (folder / "translator" / "config.json").write_text(json.dumps(described), "utf-8")
    hub = folder / "hub" / "models--org--model"  # as the client keeps what was downloaded
    for place in (folder / "dense", folder / "own-code", hub / "snapshots" / COMMIT, hub / "refs"):
        place.mkdir(parents=True)
    (hub / "refs" / "main").write_text(COMMIT, "utf-8")
    (hub / "snapshots" / COMMIT / "config.json").write_text('{"model_type": "olmoe"}', "utf-8")
    (folder / "dense" / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    (folder / "own-code" / "config.json").write_text(json.dumps(own), "utf-8")
    archives.kept_in(ARCHIVE, folder / "kept")
    write_statements(folder)
    (folder / "broken.yaml").write_text("losses: [", "utf-8")
    (folder / "unnamed.yaml").write_text("name: unnamed\n", "utf-8")
    (folder / "broken.json").write_text("{", "utf-8")
    (folder / "file.txt").write_text("text", "utf-8")
    choice = ExpertChoice(tier="ndp", bits=2, importance=0.5)
    layer = LayerAssignment(name="layer", experts=(choice, choice))
    made = Assignment(name="two", method="uniform", parameters={}, group_size=64, layers=(layer,))
    write_assignment(folder / "assignment.json", made)
    return folder


def write_statements(folder: Path) -> None:
    """A model `small`, and directories in `made` that name it and file.txt in statements that are refused."""
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text('{"model_type": "mixtral"}', "utf-8")
    write_tensors(folder / "small" / "model.safetensors", {"a": torch.zeros(2)})
    config = digest_of_file(folder / "small" / "config.json")

    def write(
        name: str, *, build: str = "checkpoint", files: dict[str, str] | None = None, text: Any = None, **recipe: Any
    ) -> Path:
        made, known = folder / "made" / name, {"config.json": config} | (files or {})
        made.mkdir(parents=True)
        (made / "config.json").write_text("{}", "utf-8")
        named = {"model": {"name": "small"}, "texts": ["a.txt"], "recipe": {"corpus": {"source": "a.txt"}} | recipe}
        definition = BuildDefinition.model_validate(
            {
                "buildType": f"urn:moeq:{build}:1",
                "externalParameters": {"runtime": "native"}
                | (named if build == "checkpoint" else {"checkpoint": {"name": "origin"}}),
                "resolvedDependencies": [
                    *({"name": f"model/{file}", "digest": {"sha256": digest}} for file, digest in known.items()),
                    text or {"name": "text/a.txt", "digest": {"sha256": TEXT}},
                ],
            }
        )
        Making(definition=definition, details=RunDetails(builder=Builder(version={"moeq": "0"}))).write(made)
        write_sums(made)
        return made

    weights = {"model.safetensors": digest_of_file(folder / "small" / "model.safetensors")}
    write("whole", files={"model.safetensors": "0" * 64})
    write("weights")
    write("more", files=weights | {"tokenizer.json": "0" * 64})
    write("out", files=weights | {"../broken.json": "0" * 64})
    write("converted", build="conversion")
    write("code", trust_remote_code=True)
    write("key", losses={"bites": 1})
    write("plugin", assign={"method": "evil"})
    write("hardware", assign={"hardware": "/etc/passwd"})
    write("path", corpus={"source": ["a.txt", "/etc/passwd"]})
    dataset = {"name": "text/hub:org/data@1:a:train", "digest": {"gitCommit": "1"}}
    write("dataset", text=dataset, corpus={"source": "hub:org/data"})
    for name in ("edited", "edited-too"):
        (write(name) / "config.json").write_text("{ }", "utf-8")
    write_sums(folder / "made" / "edited-too")


@pytest.fixture(scope="module")
def answers(here: Path) -> dict[tuple[str, ...], Any]:
    """What moeq says to every command line, without what is heavy: exit code, standard output, standard error."""
    refused = [(name, *words) for name, cases in REFUSED.items() for words, _, _ in cases]
    asked = [  # the strictest first: what is imported once is there
        *((NO_MISSING_FILE, words) for words in MISSING),
        *((NO_REFUSAL, words) for words in refused if words not in MISSING),
        *((HEAVY, words) for words in ANSWERED),
        *(([name for name in HEAVY if name != "matplotlib"], words) for words in DRAWN),
    ]
    results = here / "results.json"
    subprocess.run(
        [sys.executable, "-c", DRIVER, str(results)],
        input=json.dumps(asked),
        cwd=here,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(here / "hub")},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return dict(zip([words for _, words in asked], json.loads(results.read_text("utf-8")), strict=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_wrong_options_are_refused_before_anything_heavy(name: str, answers: dict[tuple[str, ...], Any]) -> None:
    for words, code, said in REFUSED[name]:
        ended, out, err = answers[name, *words]
        assert (ended, out) == (code, ""), f"{name} {words}: {err}"
        assert said in err, f"{name} {words}: {err}"
        assert err.startswith("moeq: ")
        assert err.count("\n") == 1


def test_every_command_has_its_refusals() -> None:
    assert {command.name or command.callback.__name__ for command in cli.app.registered_commands} == set(REFUSED)  # type: ignore[union-attr]
    assert min(map(len, REFUSED.values())) >= 1
    assert {(name, *words) for name, cases in REFUSED.items() for words, _, _ in cases} >= set(MISSING)


@pytest.mark.parametrize("words", [*ANSWERED, *DRAWN], ids=lambda words: " ".join(words))
def test_what_is_small_is_answered_without_anything_heavy(
    words: tuple[str, ...], answers: dict[tuple[str, ...], Any]
) -> None:
    code, out, err = answers[words]
    assert (code, err) == (0, "")
    assert out or "--quiet" in words


def test_the_stages_that_are_known_without_their_code_are_those_of_the_pipeline() -> None:
    assert tuple(pipeline.BY_NAME) == folders.STAGES
