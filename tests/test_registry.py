"""Registries: own members by their modules, others' by entry points, broken ones in one line that names them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from strangers import on_path, write_package

from moeq.errors import AssignmentError, BudgetError, EstimateError, RecipeError
from moeq.registry import ALLOCATORS, EXPORTERS, POLICIES, QUANTIZERS, Registry

OWN = {
    ALLOCATORS: ("budget", "frequency", "mopeq", "optimal", "prefix-split", "uniform"),
    EXPORTERS: ("auto-round", "compressed-tensors", "dequantized", "exl3", "gguf", "gptq", "humming", "mlx", "moeq"),
    QUANTIZERS: ("exl3", "gptq", "iq", "mxfp4", "nvfp4", "rtn", "signround", "trellis"),
    POLICIES: ("context_aware", "dynaexq", "gpu_only", "hobbit", "monde", "static_mixed", "static_placement"),
}
MODULES = {
    "kind_good": "from dataclasses import replace\n"
    "from moeq.estimator.policies.gpu_only import POLICY as OWN\n"
    "POLICY = replace(OWN, name='kind')\n",
    "kind_broken": "import no_such_module\n",
    "kind_leaves": "raise SystemExit(3)\n",
    "kind_wrong": "POLICY = 3\n",
}
ENTRIES = {
    "kind": "kind_good:POLICY",
    "monde": "kind_good:POLICY",
    "broken": "kind_broken:POLICY",
    "leaves": "kind_leaves:POLICY",
    "wrong": "kind_wrong:POLICY",
    "other_name": "kind_good:POLICY",
    "absent": "kind_good:NOTHING",
}


@pytest.mark.parametrize("registry", OWN, ids=lambda one: one.kind)
def test_own_members_are_the_modules_that_declare_one(registry: Registry) -> None:
    assert registry.names() == OWN[registry]
    assert tuple(member.name for member in registry) == OWN[registry]
    assert registry.problems() == []
    module, _, base = registry.base.partition(":")
    for name in registry.names():
        assert isinstance(registry.get(name), getattr(importlib.import_module(module), base))
        assert registry.get(name) is registry.get(name)


def test_listing_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from moeq.registry import ALLOCATORS, EXPORTERS, POLICIES, QUANTIZERS\n"
        "assert all(one.names() for one in (ALLOCATORS, EXPORTERS, POLICIES, QUANTIZERS))\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'moeq.assigners', 'moeq.estimator', 'moeq.quantizers',"
        " 'moeq.exporters'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"unknown allocator 'optimum'; did you mean 'optimal'\?"):
        ALLOCATORS.get("optimum")
    with pytest.raises(EstimateError, match=r"unknown policy 'zzzz'; known: context_aware, "):
        POLICIES.get("zzzz", EstimateError)


def test_others_are_found_and_broken_ones_are_told_in_a_line(tmp_path: Path) -> None:
    write_package(tmp_path, POLICIES.group, ENTRIES, MODULES)
    with on_path(tmp_path, POLICIES, MODULES):
        assert POLICIES.names() == (*OWN[POLICIES], *sorted(ENTRIES.keys() - {"monde"}))
        assert tuple(member.name for member in POLICIES) == (*OWN[POLICIES], "kind")
        assert POLICIES.get("monde").name == "monde"
        lines = POLICIES.problems()
        told = {line.split(" = ")[0].split()[-1]: line for line in lines}
        assert told.keys() == ENTRIES.keys() - {"kind"}
        assert "\n" not in "".join(lines)
        assert told["monde"] == (
            "strangers 1.0: entry point monde = kind_good:POLICY of moeq.policies cannot be used (moeq has policy "
            "'monde'); update or remove that package"
        )
        for name, why in {
            "broken": "ModuleNotFoundError: No module named 'no_such_module'",
            "leaves": "SystemExit: 3",
            "wrong": "a int is no moeq.estimator.policies:Policy",
            "other_name": "it is named 'kind'",
            "absent": "AttributeError: ",
        }.items():
            assert f"({why}" in told[name]
            with pytest.raises(EstimateError) as caught:
                POLICIES.get(name, EstimateError)
            assert str(caught.value) == told[name]
    assert POLICIES.names() == OWN[POLICIES]


FAILING = """
from dataclasses import replace

from moeq.assigners.uniform import ALLOCATOR as OWN
from moeq.errors import BudgetError


def assign(inputs):
    raise BudgetError("no such budget") if inputs else KeyError("bits")


def trials(inputs, averages):
    yield "one", {}
    raise ValueError("no second one")


ALLOCATOR = replace(OWN, name="failing", assign=assign, trials=trials)
"""


def test_what_others_raise_is_one_line_that_names_their_package(tmp_path: Path) -> None:
    """Functions that give their results one by one too; errors of moeq's own pass, and what its own members raise."""
    modules = {"kind_failing": FAILING}
    write_package(tmp_path, ALLOCATORS.group, {"failing": "kind_failing:ALLOCATOR"}, modules)
    with on_path(tmp_path, ALLOCATORS, modules):
        allocator = ALLOCATORS.get("failing")
        assert {*ALLOCATORS.guarded} == {one.name for one in fields(allocator) if "Callable" in str(one.type)}
        assert allocator is ALLOCATORS.get("failing")
        with pytest.raises(AssignmentError) as caught:
            allocator.assign(None)
        assert str(caught.value) == (
            "strangers 1.0: allocator 'failing' failed at assign() (KeyError: 'bits'); "
            "report it to the authors of that package, or use another allocator"
        )
        with pytest.raises(AssignmentError, match=r"failed at trials\(\) \(ValueError: no second one\)"):
            allocator.trials(None, ())
        with pytest.raises(BudgetError, match="no such budget"):
            allocator.assign(1)
        with pytest.raises(AttributeError):
            ALLOCATORS.get("uniform").assign(None)


UNRULY = """
import sys
from moeq.assigners.allocator import Allocator

print("imported")


def nothing(inputs):
    print("on its way")


def leaves(inputs):
    sys.exit(0)


NOTHING, LEAVES = (Allocator(name=f.__name__, help="unruly", assign=f) for f in (nothing, leaves))
"""


def test_what_leaves_returns_nothing_or_prints_is_told_of_its_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {"nothing": "unruly:NOTHING", "leaves": "unruly:LEAVES"}
    write_package(tmp_path, ALLOCATORS.group, entries, {"unruly": UNRULY})
    with on_path(tmp_path, ALLOCATORS, {"unruly": UNRULY}):
        with pytest.raises(
            AssignmentError, match=r"strangers 1\.0: .*'nothing' failed at nothing\(\) .*a NoneType, no"
        ):
            ALLOCATORS.get("nothing").assign(None)
        with pytest.raises(AssignmentError, match=r"strangers 1\.0: .*'leaves' failed at leaves\(\) \(SystemExit: 0\)"):
            ALLOCATORS.get("leaves").assign(None)
        with ALLOCATORS.blaming("leaves", str):  # as quantizers and layouts are called
            print("called")
        with ALLOCATORS.blaming("uniform", str):
            print("moeq's own")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("moeq's own\n", "imported\non its way\ncalled\n")
