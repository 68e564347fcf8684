"""The mode under which a model is watched: one piece for tracing norms and for rounding inputs."""

from __future__ import annotations

import pytest
import torch
from greenlet import getcurrent, greenlet
from torch import nn
from torch.nn.modules import module

from moeq.integers.edges.norms import Norm
from moeq.integers.edges.trace import Trace
from moeq.integers.edges.watching import Watching
from moeq.integers.static_int8 import StaticInputs


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)

    def get_expanded_tied_weights_keys(self, all_submodels: bool) -> dict[str, str]:
        return {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.one(values)  # type: ignore[no-any-return]


def hooks(model: nn.Module) -> int:
    own = [*model.modules()]
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in own) + sum(
        len(found) for found in (module._global_forward_pre_hooks, module._global_forward_hooks)
    )


def norm(name: str) -> Norm:
    return Norm(name=name, kind="RMSNorm", width=2, eps=1e-6, plus_one=False, weight="weight", bias=None)


def test_both_modes_watch_in_the_same_way() -> None:
    assert issubclass(Trace, Watching)
    assert issubclass(StaticInputs, Watching)
    for mode in (Trace, StaticInputs):
        assert not {"__enter__", "__exit__"} & set(vars(mode))


@pytest.mark.parametrize("name", ["one", "nowhere"])
def test_no_hook_stays_whether_the_mode_is_entered_or_not(name: str) -> None:
    model = One()
    before = hooks(model)
    trace = Trace(model, [norm(name)], ["one"])
    if name == "nowhere":
        with pytest.raises(AttributeError), trace:
            pass
    else:
        with trace:
            assert hooks(model) == before + 5
            model(torch.zeros(1, 2))
    assert hooks(model) == before


def test_a_pass_that_fails_leaves_nothing() -> None:
    model = One()
    before = hooks(model)
    with pytest.raises(RuntimeError), StaticInputs(model, ["one"], frozenset({"one.weight"})):
        model(torch.zeros(1, 3))
    assert hooks(model) == before


def test_a_block_is_known_until_the_last_batch_has_left_it() -> None:
    """Batches that wait within a block for one another, as they do before experts."""
    model, main = One(), getcurrent()

    def wait(*_: object) -> None:
        main.switch()

    with torch.no_grad(), StaticInputs(model, ["one"], frozenset({"one.weight"})) as noted:
        stop = model.one.register_forward_pre_hook(wait)
        runs = [greenlet(lambda most=most: model(torch.full((1, 2), most))) for most in (1.0, 3.0, 2.0)]
        for run in (*runs, *runs):
            run.switch()
        stop.remove()
    assert noted.largest == {"one.weight": 3.0}
