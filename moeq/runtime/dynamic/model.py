"""A model whose experts have high or low precision as its workload asks for it: `DynamicMoE`.

Paper 001 (DynaExq): a controller (`moeq.analysis.hotness`) over what routers choose, two pools of blocks under a budget
(`pools`), copies beside the forward pass (`copies`). One step is one forward pass of the model.

Letters: L MoE layers, E experts of a layer, T tokens, k experts a token.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from moeq.analysis.hotness import BoolArray, Control, Controller, FloatArray, gained
from moeq.artifacts.dynamic_log import Head, mask
from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer
from moeq.runtime.dynamic.copies import Copies, Switch
from moeq.runtime.dynamic.experts import DYNAMIC, Chosen, DynamicExperts
from moeq.runtime.dynamic.pools import HIGH, LOW, Budget, Pools
from moeq.runtime.experts_by_row import ReplicaSource
from moeq.version import __version__
from moeq_kernels import choice
from moeq_kernels.cpu.versions import BEGIN, Block
from moeq_kernels.description import LayerOfExperts, Matrix
from moeq_kernels.freed import return_memory

LOG = logging.getLogger("moeq.dynamic")


@dataclass(frozen=True, kw_only=True)
class DynamicSettings:
    """How precision follows the workload.

    high, low: bits of both versions; memory_bytes: of the device, all that the model needs of it; host_bytes: of copies
    of versions that are kept beside it; period: T, steps between decisions; ema, threshold, certainty: see `Control`;
    transient: experts that may be in transit at once; background: copies are made beside the forward pass, else between
    two passes, so that the same tokens give the same decisions and the same bits.
    """

    high: int
    low: int
    memory_bytes: int
    host_bytes: int = 1 << 30
    period: int = 128
    ema: float = 0.99
    threshold: float = 0.5
    certainty: float = 4.0
    transient: int = 4
    background: bool = True


class DynamicMoE:
    """A loaded causal model with experts in two versions, n_hot of every layer in high precision.

    Call it as the model, or `generate`. Close it, or use it in a `with`: a thread ends then, the experts stay in the
    versions that they have.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[ExpertLayer],
        source: ReplicaSource,
        settings: DynamicSettings,
        *,
        other_bytes: Mapping[str, int] | None = None,
        importance: FloatArray | None = None,
        policy: choice.Policy = "measured",
        log: Path | None = None,
        say: Callable[[str], None] = LOG.warning,
    ) -> None:
        """source: replicas of both widths; other_bytes: what else needs the memory, by name; importance [L, E]: whose
        high precision it begins with, the share of the routing weight where it is known; log: decisions as JSON lines.

        ModelError for precisions that the source has not, for a model that is not on the CPU, and, with the sum, where
        not even all experts in low precision fit.
        """
        self.model, self.layers, self.settings = model, list(layers), settings
        self._source = source
        self._check(source)
        widths = (settings.low, settings.high)
        examples = [[source.expert(layer, 0, width)[0] for width in widths] for layer in self.layers]
        sizes = [[Block(matrices).nbytes for matrices in of_layer] for of_layer in examples]
        self.budget = Budget(
            low_bytes=max(size[LOW] for size in sizes),
            high_bytes=max(size[HIGH] for size in sizes),
            layers=[layer.num_experts for layer in self.layers],
            transient=settings.transient,
            memory_bytes=settings.memory_bytes,
            other_bytes=dict(other_bytes or {}),
        )
        self.places = self.budget.places
        control = Control(
            places=self.places, ema=settings.ema, threshold=settings.threshold, certainty=settings.certainty
        )
        self.controllers = [
            Controller.after_warmup(control, self._first(number, layer, importance)[None])
            for number, layer in enumerate(self.layers)
        ]
        self.modules: list[DynamicExperts] = []
        for layer in self.layers:
            original = model.get_submodule(layer.name)
            module = DYNAMIC[layer.kind.name](layer, original)
            model.set_submodule(layer.name, module.train(original.training))
            self.modules.append(module)
        del original
        return_memory()
        self.pools = Pools(self.budget, BEGIN)
        for number, module in enumerate(self.modules):
            self._fill(number, module, examples[number], policy)
        self.copies = Copies(
            layers=[module.versions for module in self.modules if module.versions is not None],
            pools=self.pools,
            read=self._read,
            transient=settings.transient,
            host_bytes=settings.host_bytes,
            background=settings.background,
            say=say,
        )
        self.steps = self.decisions = 0
        self._log: TextIO | None = None if log is None else log.open("w", encoding="utf-8")
        self._writing = threading.Lock()
        self._write(self._head().model_dump(mode="json"))
        self._hook = model.register_forward_hook(self._after_step)

    def _check(self, source: ReplicaSource) -> None:
        where, settings = "dynamic precision", self.settings
        device = next(self.model.parameters()).device
        if device.type != "cpu":
            raise ModelError(
                f"the model lies on {device}", where=where, do="run it on the CPU; no GPU form is there yet"
            )
        if settings.low >= settings.high:
            what = f"low precision has {settings.low} bits, high precision {settings.high}"
            raise ModelError(what, where=where, do="name a higher one")
        known = source.widths()
        for width in (settings.high, settings.low):
            if width not in known:
                do = f"export with quantize.replicas: all, or take {', '.join(map(str, sorted(known)))}"
                raise ModelError(f"not every expert has a replica of {width} bits", where=where, do=do)

    def _first(self, number: int, layer: ExpertLayer, importance: FloatArray | None) -> FloatArray:
        """Hotness [E] before anything ran."""
        given = np.ones(layer.num_experts) if importance is None else np.asarray(importance[number], dtype=np.float64)
        total = given.sum()
        return given / total if total > 0 else np.full(layer.num_experts, 1 / layer.num_experts)

    def _fill(self, number: int, module: DynamicExperts, versions: Sequence[Mapping[str, Matrix]], policy: Any) -> None:
        """Every expert of a layer in a block of its first version."""
        layer, blocks, places, biases = self.layers[number], [Block(one) for one in versions], [], []
        for expert in range(layer.num_experts):
            version = HIGH if self.controllers[number].high[0, expert] else LOW
            place = self.pools.pools[version].take()
            assert place is not None, "the budget counts blocks for all experts"
            matrices, bias = self._source.expert(layer, expert, self._width(version))
            blocks[version].write(matrices, self.pools.bytes_of(version, place))
            places.append((version, place))
            biases.append(bias)
        described = LayerOfExperts(
            matrices=[versions[LOW]],
            biases=biases,
            gate=module.math.gate,
            activation=module.math.activation,
            finish=module.math.finish,
        )
        module.versions = choice.versioned_layer(described, versions, self.pools.held, places, policy)

    def _width(self, version: int) -> int:
        return self.settings.high if version == HIGH else self.settings.low

    def _read(self, layer: int, expert: int, version: int) -> Mapping[str, Matrix]:
        return self._source.expert(self.layers[layer], expert, self._width(version))[0]

    def _after_step(self, *_: Any) -> None:
        """Between two steps: what is ready takes effect; every T steps a decision is asked for."""
        self.steps += 1
        self.copies.register()
        if self.steps % self.settings.period == 0:
            seen = [self._drained(module) for module in self.modules]
            self.copies.submit(lambda: self._control(seen))

    @staticmethod
    def _drained(module: DynamicExperts) -> list[Chosen]:
        return [module.seen.popleft() for _ in range(len(module.seen))]

    def _control(self, seen: Sequence[Sequence[Chosen]]) -> None:
        """Fold what was chosen since the last decision, and ask for what differs from what is there."""
        switches: list[tuple[float, Switch]] = []
        for number, chosen in enumerate(seen):
            controller = self.controllers[number]
            controller.fold(*self._gained(number, chosen))
            high = controller.decide()[0]
            there = self.high(number)
            for expert in np.flatnonzero(high != there).tolist():
                switch = Switch(number, expert, HIGH if high[expert] else LOW)
                switches.append((float(controller.hotness[0, expert]), switch))
        self.decisions += 1
        ordered = _paired(switches)
        self._write(self._sums() | {"switches": [asdict(one) for one in ordered]})
        self.copies.request(ordered)

    def _gained(self, number: int, chosen: Sequence[Chosen]) -> tuple[FloatArray, int, FloatArray]:
        """S and Q [1, E] of some calls of a layer, and how many steps these are."""
        experts, ema = self.layers[number].num_experts, self.settings.ema
        sums, squares = np.zeros(experts), np.zeros(experts)
        for left, (index, weights) in zip(range(len(chosen) - 1, -1, -1), chosen, strict=True):
            numbers = index.reshape(-1).numpy()
            share = weights.reshape(-1).double().numpy() / max(1, len(index))
            known = numbers < experts
            one, two = gained(
                numbers[known], share[known], np.full(known.sum(), float(left)), num_experts=experts, ema=ema
            )
            sums, squares = sums + one, squares + two
        return sums[None], len(chosen), squares[None]

    def high(self, layer: int) -> BoolArray:
        """Which experts [E] of a layer are in high precision now."""
        versions = self.copies.layers[layer].places()
        return np.array([version == HIGH for version, _ in versions])

    def _head(self) -> Head:
        """The first line of the log."""
        return Head(
            moeq_version=__version__,
            settings=asdict(self.settings),
            other_bytes=self.budget.other_bytes,
            pool_bytes=self.budget.pool_bytes,
            layers=tuple(layer.name for layer in self.layers),
            experts=tuple(layer.num_experts for layer in self.layers),
            places=self.places,
            high=self._masks(),
        )

    def _masks(self) -> tuple[str, ...]:
        return tuple(mask(self.high(number).tolist()) for number in range(len(self.layers)))

    def _sums(self) -> dict[str, Any]:
        """What the log says of every decision, and at the end."""
        return {"step": self.steps, "high": self._masks(), **asdict(self.copies.counts)}

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._log is not None:
            with self._writing:
                self._log.write(json.dumps(line) + "\n")
                self._log.flush()

    def summary(self) -> dict[str, Any]:
        """Steps, decisions and counts so far, places of high precision, bytes of the pools."""
        return {
            "steps": self.steps,
            "decisions": self.decisions,
            "high_bits": self.settings.high,
            "low_bits": self.settings.low,
            "high_experts_a_layer": self.places,
            "pool_bytes": self.budget.pool_bytes,
            "memory_bytes": self.settings.memory_bytes,
            **asdict(self.copies.counts),
        }

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.model(*args, **options)

    @torch.no_grad()
    def generate(self, *args: Any, **options: Any) -> Any:
        """As transformers' own."""
        return self.model.generate(*args, **options)

    def close(self) -> None:
        """End the copies; nothing changes any more."""
        self._hook.remove()
        self.copies.close()
        if self._log is not None:
            self._write({"end": True, **self._sums()})
            self._log.close()
            self._log = None

    def __enter__(self) -> DynamicMoE:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _paired(switches: Sequence[tuple[float, Switch]]) -> list[Switch]:
    """Promotions, the hottest first, each with a demotion, the coldest first, so that blocks come free as they are
    taken."""
    up = [switch for _, switch in sorted(((-hot, one) for hot, one in switches if one.version == HIGH))]
    down = [switch for _, switch in sorted((hot, one) for hot, one in switches if one.version != HIGH)]
    ordered = []
    for place in range(max(len(up), len(down))):
        ordered += [*down[place : place + 1], *up[place : place + 1]]
    return ordered
