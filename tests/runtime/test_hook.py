"""`trust_remote_code=True` brings moeq in where nobody imports it; without either, loading fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fork_server import TRANSFORMERS, Finished, shared
from transformers import AutoModelForCausalLM

from moeq.runtime.hook import HOOK_FILE, HOOK_TEXT, forget_hook, hooked, unhooked

Exported = Callable[[str], Path]
TRUSTING = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, pipeline
assert "moeq" not in sys.modules
folder, family = sys.argv[1:]
auto = AutoModelForSeq2SeqLM if family == "switch_transformers" else AutoModelForCausalLM
model, info = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True, dtype=torch.float32)
assert not any(info.values()), info
assert type(model).__module__.startswith("transformers.models.")
kinds = {type(module).__module__ for module in model.modules()}
assert "moeq.runtime.packed_experts" in kinds, kinds
if family == "mixtral":
    ids = torch.arange(3, 27).reshape(2, 12)
    with torch.no_grad():
        torch.save(model(ids).logits, folder + "/../logits.pt")
    assert pipeline("text-generation", model=folder, trust_remote_code=True)("def main", max_new_tokens=3)
print("LOADED")
"""
WITHOUT = """
import sys
assert "moeq" not in sys.modules
sys.modules["moeq"] = None
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
for place in sys.argv[1:]:
    folder, family, trust = place.split("=")
    auto = AutoModelForSeq2SeqLM if family == "switch_transformers" else AutoModelForCausalLM
    try:
        auto.from_pretrained(folder, trust_remote_code={"yes": True, "no": False, "unsaid": None}[trust])
        print("LOADED", family)
    except (RuntimeError, ImportError) as error:
        print("REFUSED", family, type(error).__name__)
"""
KINDS = ("mixtral", "gpt_oss", "dbrx", "llama4_text", "switch_transformers", "jetmoe")


APART = """
import os
from transformers import dynamic_module_utils
dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]
"""


def python(code: str, *arguments: str, folder: Path) -> Finished:
    """Run a program where transformers is imported and moeq is not, and no code of checkpoints is kept."""
    program = folder / "program.py"
    program.write_text(APART + code)
    own = {"HF_MODULES_CACHE": str(folder / "modules")}
    return shared(*TRANSFORMERS).run(*arguments, program=program, cwd=folder, env=own)


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "switch_transformers"])
def test_trusted_code_loads_it_where_nobody_imports_moeq(family: str, exported: Exported, tmp_path: Path) -> None:
    folder = shutil.copytree(exported(family), tmp_path / f"{family}-copy")
    done = python(TRUSTING, str(folder), family, folder=tmp_path)
    assert "LOADED" in done.stdout, done.stderr[-2000:]
    if family == "mixtral":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            wanted = model(torch.arange(3, 27).reshape(2, 12)).logits
        assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), wanted)


@pytest.mark.full
def test_without_moeq_no_kind_of_experts_loads(exported: Exported, tmp_path: Path) -> None:
    """Trusted or not: never with experts made up."""
    places = [f"{exported(family)}={family}=unsaid" for family in KINDS]
    places += [f"{exported('mixtral')}=mixtral={trust}" for trust in ("no", "yes")]
    done = python(WITHOUT, *places, folder=tmp_path)
    families = [*KINDS, "mixtral"]
    refusals = [f"REFUSED {family} RuntimeError" for family in families] + ["REFUSED mixtral ModuleNotFoundError"]
    said = [line for line in done.stdout.splitlines() if line.startswith(("LOADED", "REFUSED"))]
    assert said == refusals, done.stderr[-2000:]
    assert "Unknown quantization type, got moeq" in done.stderr
    assert done.stderr.count("size mismatch") >= len(families)


def test_the_file_is_two_lines_and_code_of_the_original_model_is_not_named() -> None:
    assert HOOK_TEXT.count("\n") == 2
    own = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.Y", "AutoTokenizer": "tokens_x.Z"}
    config = {"model_type": "deepseek_v3", "auto_map": own}
    made = hooked(config)
    assert made["auto_map"] == {
        "AutoConfig": f"{HOOK_FILE.removesuffix('.py')}.RegisteredConfig",
        "AutoTokenizer": "tokens_x.Z",
    }
    assert config["auto_map"] == own
    assert unhooked(made) == {"model_type": "deepseek_v3", "auto_map": {"AutoTokenizer": "tokens_x.Z"}}
    assert unhooked(hooked({"model_type": "mixtral"})) == {"model_type": "mixtral"}
    assert unhooked(config) == config


def test_a_model_saved_again_names_no_file_that_is_not_there(exported: Exported, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported("mixtral"))
    model.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text("utf-8"))
    other = type(model.config)()
    other.auto_map = {"AutoConfig": "somebody.Elses"}
    forget_hook(other)
    assert other.auto_map == {"AutoConfig": "somebody.Elses"}
