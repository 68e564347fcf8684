"""A model whose experts have high or low precision as its workload asks for it: `DynamicMoE`.

Paper 001 (DynaExq): a controller (`moeq.analysis.hotness`) over what routers choose, two pools of blocks under a budget
(`pools`), copies beside the forward pass (`copies`). One step is one forward pass of the model.

Letters: L MoE layers, E experts of a layer, T tokens, k experts a token.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from moeq.analysis.coactivation import soon_hot
from moeq.analysis.hotness import BoolArray, Control, Controller, FloatArray
from moeq.artifacts.dynamic_log import Head, mask
from moeq.artifacts.storage import storage_errors
from moeq.errors import ModelError, first_line
from moeq.models.experts import ExpertLayer
from moeq.runtime.dynamic.copies import Copies, Switch
from moeq.runtime.dynamic.experts import DYNAMIC, DynamicExperts
from moeq.runtime.dynamic.forms import BESIDE, form_of
from moeq.runtime.dynamic.pools import HIGH, LOW, Budget
from moeq.runtime.dynamic.seen import Gained
from moeq.runtime.experts_by_row import ReplicaSource, moved, without_weights
from moeq.version import __version__
from moeq_kernels import choice
from moeq_kernels.description import LayerOfExperts, Matrix

LOG = logging.getLogger("moeq.dynamic")
Replica = tuple[Mapping[str, Matrix], Mapping[str, Tensor]]  # matrices and biases of an expert


@dataclass(frozen=True, kw_only=True)
class DynamicSettings:
    """How precision follows the workload.

    high, low: bits of both versions; memory_bytes: of the device, all that the model needs of it; host_bytes: of copies
    of versions that are kept beside it, of which there is room for one of each version at least; period: T, steps
    between decisions, the first of which ends the warm-up that fixes tau; ema, threshold, certainty: see `Control`;
    transient: experts that may be in transit at once; background: copies are made beside the forward pass, else between
    two passes, so that the same tokens give the same decisions and the same bits; busy: the share of one processor's
    time that copies beside the forward pass may take; planes: where low precision is the leading bits of high
    precision, only the others are brought; prefetch: versions that are read ahead of a decision, at most.
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
    busy: float = 0.25
    planes: bool = True
    prefetch: int = 4


class DynamicMoE:
    """A loaded causal model with experts in two versions, n_hot of every layer in high precision.

    Call it as the model, or `generate`. Close it, or use it in a `with`: a thread ends then, the experts stay in the
    versions that they have. Of a layer in a loop every visit counts as a step of its statistics.
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
        follows: Sequence[FloatArray] | None = None,
        policy: choice.Policy = "measured",
        log: Path | None = None,
        say: Callable[[str], None] = LOG.warning,
    ) -> None:
        """source: replicas of both widths; other_bytes: what else needs the memory, by name; importance [L, E]: whose
        high precision it begins with, the share of the routing weight where it is known; follows: `coactivation` of a
        trace, by which versions are read ahead; log: decisions as JSON lines.

        On a GPU all passes are to run on one stream. ModelError for precisions that the source has not, for a model
        that lies neither on the CPU nor on a CUDA device, and, with the sum, where not even all experts in low
        precision fit.
        """
        self.model, self.layers, self.settings = model, list(layers), settings
        self._source = source
        self._form = form_of(next(model.parameters()).device, settings.planes)
        self._check(source)
        widths = (settings.low, settings.high)
        examples = [[source.expert(layer, 0, width) for width in widths] for layer in self.layers]
        self.budget = self._budget(examples, other_bytes or {})
        self.places = self.budget.places
        self._follows = list(follows or ())
        self._check_follows()
        control = Control(
            places=self.places, ema=settings.ema, threshold=settings.threshold, certainty=settings.certainty
        )
        self.controllers = [
            Controller.after_warmup(control, self._first(number, layer, importance)[None])
            for number, layer in enumerate(self.layers)
        ]
        self._warm = [False] * len(self.layers)
        self.modules = self._taken_over()
        self._form.freed()
        self.pools = self._form.pools(self.budget)
        self._blocks: list[list[Any]] = []
        for number, module in enumerate(self.modules):
            self._fill(number, module, [one for one, _ in examples[number]], policy)
        self._form.streams.now().wait()  # copies on another stream find every block whole
        self._form.freed()
        self.steps = self.decisions = 0
        self._say, self._told = say, list[str]()
        self._log: TextIO | None = None
        if log is not None:
            with storage_errors(log):
                self._log = log.open("w", encoding="utf-8")
        self._deciding = threading.Lock()
        self.copies = self._copies()
        self._write(self._head().model_dump(mode="json"))
        self._hook = model.register_forward_hook(self._after_step)

    def _taken_over(self) -> list[DynamicExperts]:
        """The layers' modules in the place of those that the model had."""
        experts = [layer.num_experts for layer in self.layers]
        self._statistics = self._form.statistics(experts, self.settings.ema)
        made = []
        for number, layer in enumerate(self.layers):
            original = self.model.get_submodule(layer.name)
            module = DYNAMIC[layer.kind.name](layer, original)
            module.seen = self._statistics.of(number)
            self.model.set_submodule(layer.name, module.train(original.training))
            made.append(module)
        return made

    def _budget(self, examples: Sequence[Sequence[Replica]], other_bytes: Mapping[str, int]) -> Budget:
        """examples [L][version]: matrices and biases of an expert."""
        versions = [[matrices for matrices, _ in of_layer] for of_layer in examples]
        sizes = [[self._form.block(matrices).nbytes for matrices in of_layer] for of_layer in versions]
        experts = [layer.num_experts for layer in self.layers]
        beside = self._form.beside(versions, [of_layer[LOW][1] for of_layer in examples], experts)
        return Budget(
            low_bytes=max(size[LOW] for size in sizes),
            high_bytes=max(size[HIGH] for size in sizes),
            layers=experts,
            transient=self.settings.transient,
            memory_bytes=self.settings.memory_bytes,
            other_bytes={**other_bytes, **({BESIDE: beside} if beside else {})},
        )

    def _copies(self) -> Copies:
        settings, layers = self.settings, [one.versions for one in self.modules if one.versions is not None]
        transfer = self._form.transfer(self._read, self._blocks, settings.planes)
        return Copies(
            layers=layers,
            pools=self.pools,
            transfer=transfer,
            host=self._form.host(settings.host_bytes, transfer.host_sizes, sum(self.budget.layers)),
            transient=settings.transient,
            background=settings.background,
            busy=settings.busy,
            say=self._tell,
        )

    def _tell(self, text: str) -> None:
        """What went wrong, now and in the next line of the log."""
        self._told.append(text)
        self._say(text)

    def _check(self, source: ReplicaSource) -> None:
        where, settings = "dynamic precision", self.settings
        if settings.low >= settings.high:
            what = f"low precision has {settings.low} bits, high precision {settings.high}"
            raise ModelError(what, where=where, do="name a higher one")
        counts = {"period": settings.period, "transient": settings.transient}
        for name, value in counts.items():
            if value < 1:
                raise ModelError(f"{name} is {value}", where=where, do="give 1 or more")
        for name, share in {"ema": settings.ema, "busy": settings.busy}.items():
            if not (0 <= share < 1 if name == "ema" else 0 < share <= 1):
                raise ModelError(f"{name} is {share}", where=where, do="give a number between 0 and 1")
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
        layer, blocks, places, biases = self.layers[number], [self._form.block(one) for one in versions], [], []
        self._blocks.append(blocks)
        for expert in range(layer.num_experts):
            version = HIGH if self.controllers[number].high[0, expert] else LOW
            place = self.pools.pools[version].take()
            assert place is not None, "the budget counts blocks for all experts"
            matrices, bias = self._source.expert(layer, expert, self._width(version))
            there = {name: moved(matrix, self.pools.held.device) for name, matrix in matrices.items()}
            blocks[version].write(there, self.pools.bytes_of(version, place))
            places.append((version, place))
            biases.append(bias)
        described = LayerOfExperts(
            matrices=[versions[LOW]],
            biases=biases,
            gate=module.math.gate,
            activation=module.math.activation,
            finish=module.math.finish,
        )
        held, streams = self.pools.held, self._form.streams
        module.versions = choice.versioned_layer(described, versions, held, places, policy, streams)

    def _width(self, version: int) -> int:
        return self.settings.high if version == HIGH else self.settings.low

    def _read(self, layer: int, expert: int, version: int) -> Mapping[str, Matrix]:
        return self._source.expert(self.layers[layer], expert, self._width(version))[0]

    def _after_step(self, *_: Any) -> None:
        """Between two steps: what is ready takes effect; every T steps a decision is made, of what was chosen until
        then, as soon as that is known: a device is not waited for but where copies are made between passes."""
        if self._form.streams.capturing():
            return
        self.copies.register()
        with self._deciding:
            self.steps += 1
            if self.steps % self.settings.period == 0:
                self._statistics.ask()
            gained = self._statistics.answered(wait=not self.settings.background)
            if gained is not None:
                self._control(gained)

    def step(self) -> None:
        """A step that the model itself did not see: to be called where a captured graph of it was replayed, on the
        stream of its replays."""
        self._after_step()

    @contextmanager
    def still(self) -> Iterator[None]:
        """No copy is made within: while a CUDA graph of the model is captured, nothing else may ask the device."""
        with self.copies.paused():
            yield

    def _control(self, gained: Sequence[Gained]) -> None:
        """Fold what was chosen since the last decision, and ask for what differs from what is there.

        An expert that is no longer hot keeps its place until another one needs it, for its block would stay empty.
        """
        hot: list[tuple[float, Switch]] = []
        cold: list[tuple[float, Switch]] = []
        highs = []
        for number in range(len(self.modules)):
            controller, there = self.controllers[number], self.high(number)
            begun = self._warm[number]
            folded = (controller.fold if begun else controller.begin)(*gained[number])
            self._warm[number] = begun or bool(folded)
            wanted, hotness = controller.decide()[0], controller.hotness[0]
            up, down = (np.flatnonzero(mask).tolist() for mask in (wanted & ~there, there & ~wanted))
            needed = max(0, int(there.sum()) + len(up) - self.places)
            down = sorted(down, key=lambda expert: float(hotness[expert]))[:needed]
            hot += [(-float(hotness[expert]), Switch(number, expert, HIGH)) for expert in up]
            cold += [(float(hotness[expert]), Switch(number, expert, LOW)) for expert in down]
            highs.append(there | wanted)
        self.decisions += 1
        ordered, after = _paired(hot, cold)
        self._write(self._sums() | {"switches": [asdict(one) for one in ordered]})
        self.copies.request(ordered, after, self._ahead(highs))

    def _ahead(self, highs: Sequence[BoolArray]) -> list[Switch]:
        """What may soon be asked for."""
        if not self._follows or self.settings.prefetch < 1:
            return []
        hotness = [controller.hotness[0] for controller in self.controllers]
        found = soon_hot(hotness, highs, self._follows, self.settings.prefetch)
        return [Switch(layer, expert, HIGH) for layer, expert in found]

    def _check_follows(self) -> None:
        """ModelError for what was measured on a model of another shape."""
        experts = [layer.num_experts for layer in self.layers]
        wanted = [(here, there) for here, there in itertools.pairwise(experts)]
        given = [share.shape for share in self._follows]
        if given and given != wanted:
            what = f"experts follow each other in layers of {given}, this model has {wanted}"
            raise ModelError(what, where="dynamic precision", do="profile this model with profile.trace: true")

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
        """What the log says of every decision, and at the end; what went wrong, once."""
        told, self._told = self._told, []
        said = {"said": told} if told else {}
        return {"step": self.steps, "high": self._masks(), **asdict(self.copies.counts), **said}

    def _write(self, line: Mapping[str, Any]) -> None:
        """A line of the log; where it cannot be written, the model goes on without one."""
        if self._log is None:
            return
        try:
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()
        except OSError as error:
            self._log = None
            self._say(f"decisions are no longer logged: {first_line(error)}")

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
            "host_bytes": self.copies.host.nbytes,
            "planes": self.copies.transfer.planes,
            **asdict(self.copies.counts),
        }

    def __getstate__(self) -> dict[str, Any]:
        """ModelError: neither the pools nor the thread that copies can be copied or pickled."""
        raise without_weights("copied or pickled")

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.model(*args, **options)

    @torch.no_grad()
    def generate(self, *args: Any, **options: Any) -> Any:
        """As transformers' own."""
        return self.model.generate(*args, **options)

    def close(self) -> None:
        """End the copies; nothing changes any more, nothing is noted any more."""
        self._hook.remove()
        for module in self.modules:
            module.seen = None
        self.copies.close()
        self._write({"end": True, **self._sums()})
        if self._log is not None:  # which it may be since that line
            self._log.close()
            self._log = None

    def __enter__(self) -> DynamicMoE:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _paired(
    hot: Sequence[tuple[float, Switch]], cold: Sequence[tuple[float, Switch]]
) -> tuple[list[Switch], dict[Switch, Switch]]:
    """Promotions, the hottest first, each followed by a demotion in its layer, the coldest first; and which one each
    demotion follows: where a promotion cannot be made, nothing makes room for it."""
    down: dict[int, list[Switch]] = {}
    for _, switch in sorted(cold, reverse=True):
        down.setdefault(switch.layer, []).append(switch)
    ordered, after = [], {}
    for _, switch in sorted(hot):
        ordered.append(switch)
        if left := down.get(switch.layer):
            after[left[-1]] = switch
            ordered.append(left.pop())
    return ordered + [switch for left in down.values() for switch in reversed(left)], after
