"""The model of a run: what is known of it without loading it, and its weights, which are replaced for a while only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor, nn

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.provenance import NamedModel
from moeq.artifacts.run import FOLDED
from moeq.artifacts.stage import ModelStamp, missing_files, read_record
from moeq.errors import ArtifactError, ModelError, RecipeError
from moeq.exporters.front_matter import Origin, read_origin
from moeq.models import corpus, hub, loading
from moeq.models.drafts import left_drafts
from moeq.models.experts import ExpertLayer, find_expert_layers, set_expert_weights, stacked_weights
from moeq.models.forward import takes_images
from moeq.models.non_experts import OtherModules, find_others
from moeq.models.side_files import SideFiles, find_side_files
from moeq.models.single import ExpertReader
from moeq.models.source import ModelSource, open_source
from moeq.models.streaming import StreamedModel
from moeq.models.walk import Batch, LayerInputs, walk
from moeq.progress import Reporter
from moeq.recipe import Recipe
from moeq.runtime.swapping import ExpertPlace, Place, Replacement, Swapped, overwrite
from moeq.stages.recorded import stamp_of

ReplacedExperts = Callable[[ExpertLayer, nn.Module | None], Mapping[ExpertPlace, Replacement]]


@dataclass(kw_only=True, eq=False)
class RunModel:
    """A model, each part read when it is first asked for.

    name: as the user has it; out: the run directory; folded: the directory of reparam, where the run goes on with what
    that stage made. check: files are hashed also where a digest that was taken of them before would do. called: what
    artifacts call it, where that is not what it is called here. weights: of a hub model, whether they are downloaded.
    """

    name: str
    recipe: Recipe
    out: Path
    reporter: Reporter
    check: bool
    folded: Path | None
    called: NamedModel | None = None
    weights: bool = True
    _announced: bool = False

    @cached_property
    def source(self) -> ModelSource:
        """Raises ArtifactError where the folded model is wanted and not there."""
        trust = self.recipe.trust_remote_code
        if self.reporter.quiet:
            hub.be_quiet()
        if self.folded is None:
            source = open_source(self.name, self.recipe.revision, trust_remote_code=trust, weights=self.weights)
            called = self.called or source
            return replace(source, name=called.name, revision=called.revision)
        record = read_record(self.folded, "reparam")
        for name in missing_files(self.folded, record):
            do = "run `moeq reparam` or `moeq run` to make it again"
            raise ArtifactError("file is missing", where=str(self.folded / name), do=do)
        given = record.model
        source = open_source(str(self.folded / FOLDED), trust_remote_code=trust)
        return replace(source, name=given.name, revision=given.revision)

    @cached_property
    def files(self) -> dict[str, str]:
        """{name: SHA-256} of the model's files as this run found them."""
        return self.source.file_digests(cached=not self.check, reporter=self.reporter)

    @cached_property
    def stamp(self) -> ModelStamp:
        return stamp_of(self.source, self.files, self.out)

    def check_unchanged(self) -> None:
        """ModelError naming the first of the model's files that has changed since this run began."""
        now = self.source.file_digests()
        for name, path in self.source.named_files().items():
            if now[name] != self.files.get(name):
                raise ModelError("changed since the run began", where=str(path), do="run the same command again")

    @cached_property
    def side_files(self) -> SideFiles:
        """What beside the weights goes along into checkpoints.

        Raises ModelError for what cannot: links that lead out of the directory, settings that are no JSON.
        """
        return find_side_files(self.source.path, self.source.config, self.recipe.trust_remote_code)

    @cached_property
    def origin(self) -> Origin:
        """What the model's own card says of it."""
        return read_origin(self.source.path)

    def say_left_behind(self) -> None:
        """Name tensors, code and other files that its checkpoints will not have, and a card that cannot be read."""
        for line in (left_drafts(self.source.drafts), self.side_files.said(), self.origin.said()):
            if line is not None:
                self.reporter.say(f"  {escape(line)}")

    def code(self) -> dict[str, Any] | None:
        """What of its own code goes along; None for one without, whose checkpoints are the same either way."""
        files = self.side_files
        if not files.code and not files.entries:
            return None
        return {"code": files.code_digests(), "entries_left_out": list(files.entries)}

    def goes_along(self) -> dict[str, Any] | None:
        """What `export` takes beside what the model's digest covers: code, licences, vocabularies of other names."""
        data, code = self._beside(self.side_files.data), self.code()
        return {**(code or {}), **({"data": data} if data else {})} or None

    def beside(self) -> dict[str, Any]:
        """What copies of the model take beside what its digest covers: what goes along, and what its card says."""
        card = {name: value for name, value in vars(self.origin).items() if value}
        return {**(self.goes_along() or {}), **({"card": card} if card else {})}

    def of_the_text(self) -> dict[str, str]:
        """{name: SHA-256} of what a tokenizer or a processor is made of beside what the model's digest covers: code of
        theirs alone, vocabularies of other names."""
        return self._beside(self.side_files.of_the_text())

    def _beside(self, files: Iterable[Path]) -> dict[str, str]:
        """{name: SHA-256} of those files that the model's digest does not cover."""
        covered = set(self.source.side_files())
        return {path.name: digest_of_file(path, cached=True) for path in files if path not in covered}

    @cached_property
    def device(self) -> torch.device:
        return loading.resolve_device(self.recipe.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        return loading.compute_dtype(self.source, self.recipe.dtype, self.device)

    def compute(self) -> dict[str, str]:
        """What beside the inputs decides the digits of a result."""
        return {"dtype": str(self.dtype), "device": self.device.type}

    @cached_property
    def described(self) -> tuple[nn.Module, list[ExpertLayer]]:
        """Skeleton on the meta device and expert layers (none of a dense model), from the configuration alone."""
        return loading.describe(self.source, self.recipe.trust_remote_code, experts=False)

    @property
    def skeleton(self) -> nn.Module:
        return self.described[0]

    @property
    def layers(self) -> list[ExpertLayer]:
        """The expert layers; ModelError when there are none."""
        return self.described[1] or find_expert_layers(self.skeleton)

    @cached_property
    def expert_keys(self) -> set[str]:
        """The tensors on disk that hold routed experts."""
        return loading.expert_keys(self.source, *self.described)

    @cached_property
    def others(self) -> OtherModules:
        """What is not a routed expert and can be quantized."""
        return find_others(*self.described, self.source)

    @cached_property
    def takes_images(self) -> bool:
        """Whether the model is an image classifier: it reads images with labels, and has no tokenizer."""
        return takes_images(self.skeleton)

    @cached_property
    def image_task(self) -> corpus.ImageTask:
        """What the image classifier takes."""
        return corpus.ImageTask.of(self.skeleton, self.source.path)

    @cached_property
    def tokenizer(self) -> Any:
        return loading.load_tokenizer(self.source, self.recipe.trust_remote_code)

    @cached_property
    def expert_reader(self) -> ExpertReader:
        """Experts read one by one, in the checkpoint's own type."""
        dtype = loading.source_dtype(self.source)
        return ExpertReader(self.source, loading.skeleton(self.source, dtype, self.recipe.trust_remote_code))

    @cached_property
    def streams(self) -> bool:
        """Whether decoder layers stay where they are: as the recipe says; auto: when they are over a third of memory.

        Those of an object store always do.
        """
        if self.source.is_remote:
            if self.recipe.stream == "never":
                what = "a model in an object store is read layer by layer"
                raise RecipeError(what, where="stream: never", do="leave stream out, or copy the model to a directory")
            return True
        if self.recipe.stream != "auto":
            return self.recipe.stream == "always"
        return loading.loaded_bytes(self.source, self.dtype) > loading.memory_bytes(self.device) / 3

    @cached_property
    def streamed(self) -> StreamedModel | None:
        """The model with its decoder layers on disk, None when it is to be loaded whole."""
        if not self.streams:
            return None
        return StreamedModel(self.source, self.dtype, self.device, self.recipe.trust_remote_code)

    def in_float32(self, source: ModelSource | None = None) -> StreamedModel:
        """A streamed model of its own, which its reader may change for good; source: of another version of it."""
        return StreamedModel(source or self.source, torch.float32, self.device, self.recipe.trust_remote_code)

    @cached_property
    def module(self) -> nn.Module:
        """The model in full precision, to be read; `replacing`, `overlay` and `changeable` are for other weights."""
        how = "streaming" if self.streamed is not None else "loading"
        if not self._announced:
            dtype = str(self.dtype).removeprefix("torch.")
            self.reporter.say(f"  {how} {escape(self.name)} ({dtype}, {self.device})")
            self._announced = True
        if self.streamed is not None:
            return self.streamed.model  # type: ignore[no-any-return]
        return loading.load_model(self.source, self.dtype, self.device, self.recipe.trust_remote_code)

    def walk(
        self, batches: Sequence[Batch], layers: Sequence[ExpertLayer] | None = None, **listening: Any
    ) -> Iterator[LayerInputs]:
        """The inputs of every expert layer in turn, or of some; listening: what `walk` is given beside."""
        layers = self.layers if layers is None else layers
        return walk(self.module, layers, batches, self.device, streamed=self.streamed, **listening)

    @contextmanager
    def changeable(self) -> Iterator[nn.Module]:
        """The model, whose experts may be overwritten meanwhile; what needs it afterwards has it read anew."""
        try:
            yield self.module
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Keep the model no longer; what needs it afterwards has it read anew."""
        self.__dict__.pop("module", None)

    @contextmanager
    def replacing(
        self, layer: ExpertLayer, experts: Sequence[int], weights: Callable[[int], dict[str, Tensor]]
    ) -> Iterator[None]:
        """With other weights in some of a layer's experts, and copies of their own kept for afterwards."""

        def replace_all(model: nn.Module, here: ExpertLayer) -> None:
            for expert in experts if here.index == layer.index else ():
                set_expert_weights(model, here, expert, weights(expert))

        if self.streamed is not None:
            self.streamed.overlay = replace_all
            try:
                yield
            finally:
                self.streamed.overlay = None
            return
        kept = {expert: self._copies(layer, expert) for expert in experts}
        replace_all(self.module, layer)
        try:
            yield
        finally:
            for expert, own in kept.items():
                set_expert_weights(self.module, layer, expert, own)

    def _copies(self, layer: ExpertLayer, expert: int) -> dict[str, Tensor]:
        stacks = stacked_weights(self.module, layer, slice(expert, expert + 1))
        return {name: stack[0].clone() for name, stack in stacks.items()}

    @contextmanager
    def overlay(self) -> Iterator[Overlay]:
        """Replacements of any experts and modules, one set after the other; none are left afterwards."""
        with self.changeable():
            overlay = Overlay(self)
            try:
                yield overlay
            finally:
                overlay.close()


class Overlay:
    """Replacements in a model: written as a streamed model's layers are read, else into the loaded one."""

    def __init__(self, model: RunModel) -> None:
        self._streamed = model.streamed
        self._swapped = Swapped(model.module, model.layers) if self._streamed is None else None
        self._overwritten: list[str] = []  # resident parameters of a streamed model

    def set(self, experts: ReplacedExperts | None = None, others: Mapping[str, Replacement] | None = None) -> nn.Module:
        """The model with these replacements and no others; it is to be let go before the overlay is closed.

        experts(layer, model): of one layer's experts; model: where the layer's own weights are there, None where they
        are to be read from the disk. others: of other modules, by name.
        """
        others = others or {}
        if self._streamed is not None:
            self._set_streamed(self._streamed, experts, others)
            return self._streamed.model  # type: ignore[no-any-return]
        assert self._swapped is not None, "closed"
        wanted: list[tuple[Place, Replacement]] = [*others.items()]
        if experts is not None:
            for layer in self._swapped.layers:
                wanted += experts(layer, None).items()
        self._swapped.set(dict(wanted))
        return self._swapped.model

    def _set_streamed(
        self, streamed: StreamedModel, experts: ReplacedExperts | None, others: Mapping[str, Replacement]
    ) -> None:
        by_block: dict[str, list[str]] = {}
        for name in others:
            by_block.setdefault(streamed.block_of(name), []).append(name)

        def write(model: nn.Module, block: str) -> None:
            """Not in place: the old weights may be the very memory through which the file is read again."""
            for name in by_block.get(block, ()):
                weight = model.get_submodule(name).get_parameter("weight")
                weight.data = others[name].make()["weight"].to(weight)

        self.close()
        self._overwritten = [f"{name}.weight" for name in by_block.get("", ())]
        write(streamed.model, "")
        streamed.block_overlay = write
        if experts is not None:
            streamed.overlay = lambda model, layer: overwrite(model, layer, experts(layer, model))

    def close(self) -> None:
        """Let the loaded model go, or have the streamed one's weights as the checkpoint has them."""
        self._swapped = None
        if self._streamed is not None:
            self._streamed.overlay = self._streamed.block_overlay = None
            self._streamed.read_again(self._overwritten)
            self._overwritten = []
