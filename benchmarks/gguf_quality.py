"""Quality in llama.cpp at equal bytes of model.gguf: what moeq writes for it beside llama.cpp's own quantizer.

    python benchmarks/gguf_quality.py [--model DIR] [--budgets 2.625 3.4375] [--json PATH]

Needs .peers/llama-cpp-python (`make peers`), or MOEQ_PEERS, the package gguf, and the texts beside the trained models
in ../shared. llama.cpp's blocks of 2 and 3 bits are of 256 weights, which no row of these models has, so one of 256 x
256 is trained by ../shared/models/train_tiny.py: a Mixtral of 3 layers with 8 experts, --minutes on one core, whose
clock sets its learning rate, so that a rerun gives close but not the same figures; --model takes one that is there.

Of llama.cpp's quantizer: one type for all experts, with the importance matrix that `moeq profile --imatrix` writes of
the text that moeq calibrates on. Of moeq: `--for llama.cpp` at each budget, as it is by default (i-quants), and with
`--tune`; and in grids (`--quantizer gptq`), as they are and with `--refine`. Also the types that moeq assigned, filled
by llama.cpp's quantizer (`moeq inspect --tensor-types iq`). All else stays in float16. KL: mean over the tokens of 48
held-out texts of 256 tokens, of four domains, of llama.cpp's predictions from those of the file in full precision; with
the standard error over texts.

Goals: i-quants, trained or not, lose less than any of llama.cpp's own files of about the same size, and grids than its
k-quants.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip

sys.path[:0] = [str(figures.ROOT / "tests"), str(figures.ROOT / "tests" / "exporters")]
PEER = "llama-cpp-python"
THEIRS, NEAR = "llama.cpp's ", 0.1  # bits of a weight
KEPT = "attn_|token_embd|output"  # tensors that stay in float16
WAYS: dict[str, list[str]] = {
    "default": [],
    "tuned": ["--tune"],
    "grids": ["--quantizer", "gptq"],
    "grids, refined": ["--quantizer", "gptq", "--refine"],
}
GRIDS = "moeq's grids"


@dataclass(frozen=True, kw_only=True)
class Made:
    """A file that llama.cpp reads, by who made it."""

    name: str
    folder: Path
    kinds: str = ""
    bits: float = 0.0
    kl: float = 0.0
    error: float = 0.0


def trained(script: Path, minutes: float, out: Path) -> Path:
    """The model with rows of 256 weights."""
    tool = figures.script(script)

    def configuration(arch: str, tokenizer: Any) -> Any:
        from transformers import MixtralConfig

        tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return MixtralConfig(
            vocab_size=len(tokenizer), hidden_size=256, intermediate_size=256, num_hidden_layers=3, head_dim=64,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
            max_position_embeddings=512, router_aux_loss_coef=0.001, tie_word_embeddings=True, **tokens,
        )  # fmt: skip

    tool.lm_config = configuration
    tool.train_lm(
        SimpleNamespace(
            arch="mixtral", steps=2200, batch=16, lr=1.5e-3, warmup=100, max_minutes=minutes, threads=1,
            experts="grouped_mm", bf16=False, out=str(out),
        )
    )  # fmt: skip
    return out


def plain(model: Path, folder: Path) -> tuple[Path, dict[str, list[float]]]:
    """The model as GGUF in full precision, and the mean squares of every matrix's inputs."""
    import torch
    from made_sources import MadeSource
    from test_imatrix import read

    from moeq.exporters import write
    from moeq.exporters.foreign import WriteOptions
    from moeq.stages import imatrix

    write("llama.cpp", MadeSource(model, lambda *place: 16), folder / "plain", WriteOptions())
    imatrix.write(figures.context(model, folder / "profiled"), folder / "imatrix.gguf")
    found = {name: of for name, of in read(folder / "imatrix.gguf").items() if name}
    return folder / "plain", {
        name: torch.where(counts.unsqueeze(1) > 0, sums / counts.unsqueeze(1), 1.0).flatten().tolist()
        for name, (sums, counts) in found.items()
    }


def quantized(out: Path, source: Path, types: Mapping[str, str], means: dict[str, list[float]]) -> Path:
    """What llama.cpp's own quantizer makes of a file; types: {pattern of tensors' names: type}."""
    import gguf
    import peers

    out.mkdir()
    numbers = {pattern: int(gguf.GGMLQuantizationType[kind.upper()]) for pattern, kind in types.items()}
    job = {
        "source": str(source / "model.gguf"), "out": str(out / "model.gguf"), "types": numbers, "imatrix": means,
        "ftype": int(gguf.LlamaFileType.MOSTLY_Q8_0),
    }  # fmt: skip
    (out / "job.json").write_text(json.dumps(job))
    peers.run(PEER, figures.ROOT / "tests" / "exporters" / "peer_quantize.py", out / "job.json")
    return out


def by_moeq(model: Path, budget: str, out: Path, words: list[str]) -> Path:
    """The directory with model.gguf of a run."""
    less = ["--set", "eval.compare=[]", "--set", "eval.perplexity=null", "--no-verify"]
    asked = ["run", str(model), "--bits", budget, "--for", "llama.cpp", "--out", str(out), *less, *words, "--json"]
    paths = figures.moeq_json(*asked)["paths"]
    return next(Path(path) for name, path in paths.items() if name.startswith("checkpoint for"))


def assigned(run: Path) -> dict[str, str]:
    """The types that a run assigned, {pattern of tensors' names: type}."""
    told = figures.moeq_json("inspect", str(run / "assign"), "--tensor-types", "iq", "--widen", "--json")
    return dict(word.split("=") for word in shlex.split(told["arguments"]) if "=" in word)


def held_out(script: Path, path: Path) -> Path:
    """Texts that neither training nor calibration has seen."""
    import torch
    from safetensors.torch import save_file
    from transformers import PreTrainedTokenizerFast

    tool = figures.script(script)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(script.parent / "tokenizer")
    streams = (tool.token_stream(tokenizer, domain, "heldout") for domain in tool.DOMAINS)
    save_file({"ids": torch.cat([tool.windows(stream, 256, 12) for stream in streams])}, path)
    return path


def measured(exact: Path, made: list[Made], ids: Path) -> list[Made]:
    """With their types, bits and divergences, one file after the other."""
    import gguf
    import peers

    found = []
    for one in made:
        logits = peers.load(PEER, "llama.cpp", [exact, one.folder], ids)
        first, other = (each.log_softmax(-1) for each in logits)
        of_texts = (first.exp() * (first - other)).sum(-1).mean(1)
        tensors = [tensor for tensor in gguf.GGUFReader(one.folder / "model.gguf").tensors if "_exps" in tensor.name]
        kinds = [tensor.tensor_type.name for tensor in tensors]
        listed = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        bits = 8 * sum(int(each.n_bytes) for each in tensors) / sum(int(each.n_elements) for each in tensors)
        spread = float(of_texts.std() / len(of_texts) ** 0.5)
        found.append(
            Made(name=one.name, folder=one.folder, kinds=listed, bits=bits, kl=float(of_texts.mean()), error=spread)
        )
    return found


def goals(results: figures.Figures, made: list[Made]) -> None:
    """What each way of moeq's loses beside the best k-quant, and the best of all types, that is no smaller, or smaller
    by less than a tenth of a bit."""
    theirs = [one for one in made if one.name.startswith(THEIRS)]
    for own in (one for one in made if one.name.startswith(tuple(f"moeq's {way}," for way in WAYS))):
        for what, kinds in (("k-quants", "Q"), ("all types", "")):
            near = [one for one in theirs if one.name.removeprefix(THEIRS).startswith(kinds)]
            near = [one for one in near if -NEAR < one.bits - own.bits < 2 * NEAR]
            best = min(near, key=lambda one: one.kl, default=None)
            if best is not None:
                goal = {"at_most": 1.0} if kinds or not own.name.startswith(GRIDS) else {}
                name = f"KL of {own.name} ({own.bits:.2f} bits), of {best.name}'s ({what})"
                results.add(name, own.kl / best.kl, **goal)


def main() -> int:
    options = figures.arguments(
        __doc__, models=figures.SHARED / "models", model=Path(), minutes=40.0,
        budgets=(["2.0625", "2.3125", "2.625", "3.0625", "3.4375", "4.25"], ["3.4375"]),
        ways=(list(WAYS), ["default"]),
        types=(["IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_K"], ["Q3_K"]),
    )  # fmt: skip
    os.environ.setdefault("MOEQ_PEERS", str(figures.ROOT / ".peers"))
    script = options.models / "train_tiny.py"
    if not script.is_file():
        return figures.skipped(options, f"no texts with their train_tiny.py in {options.models}")
    if not Path(os.environ["MOEQ_PEERS"], PEER).is_dir():
        return figures.skipped(options, f"no {PEER} below {os.environ['MOEQ_PEERS']}")
    if options.quick and options.model == Path():
        return figures.skipped(options, "a model is trained for it: without --quick, or with --model")
    results, made = figures.Figures(options), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = options.model != Path()
        model = options.model.resolve() if given else trained(script, options.minutes, folder / "model")
        exact, means = plain(model, folder)
        for kind in options.types:
            types = {KEPT: "F16", "ffn_.*_exps": kind}
            made.append(Made(name=f"{THEIRS}{kind}", folder=quantized(folder / kind, exact, types, means)))
        for budget in options.budgets:
            for way in options.ways:
                out = folder / f"{way}-{budget}"
                own = by_moeq(model, budget, out, WAYS[way])
                made.append(Made(name=f"moeq's {way}, --bits {budget}", folder=own))
            types = {KEPT: "F16", **assigned(folder / f"{options.ways[0]}-{budget}")}
            of_types = quantized(folder / f"types-{budget}", exact, types, means)
            made.append(Made(name=f"moeq's types by llama.cpp, --bits {budget}", folder=of_types))
        made = measured(exact, made, held_out(script, folder / "ids.safetensors"))
    results.table(["made by", "bits of a weight", "KL", "types of the experts' stacks"])
    for one in sorted(made, key=lambda one: (one.bits, one.kl)):
        results.row(one.name, f"{one.bits:.2f}", f"{one.kl:.4f} ± {one.error:.4f}", one.kinds)
    goals(results, made)
    return results.report()


if __name__ == "__main__":
    sys.exit(main())
