"""One loaded model for all subjects that share its weights: replicas are swapped in place, prefills are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeq.assigners.prefix_split import WIDTHS
from moeq.comparison.replicas import RunReplicas, run_widths
from moeq.comparison.subjects import Subject
from moeq.errors import EvaluationError
from moeq.evaluation.batching import BatchSize
from moeq.evaluation.context_options import ContextOptions, check_replicas, chooser
from moeq.evaluation.harness_models import ContextAwareLM, StaticLM
from moeq.evaluation.multimodal import static_lm
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.native_replicas import CheckpointReplicas
from moeq.models import corpus, loading
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.context_aware import ContextAwareModel, PrefillStore
from moeq.runtime.dynamic.options import DynamicOptions
from moeq.runtime.experts_by_row import Dequantized
from moeq.runtime.swapping import Place, Replacement, Swapped
from moeq.stages.assign import load as load_assignment
from moeq.stages.evaluate import other_replacements, replacements

if TYPE_CHECKING:
    from moeq.runtime.dynamic.model import DynamicMoE


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models are loaded and run; images: whether a task has them; dynamic_log: a file for decisions."""

    dtype: str = "auto"
    device: str = "auto"
    batch_size: BatchSize = 16
    max_length: int | None = None
    truncate: bool = False
    trust_remote_code: bool = False
    images: bool = False
    dynamic_log: Path | None = None

    def lm_options(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "max_length": self.max_length, "truncate": self.truncate}


@dataclass
class Loaded:
    """A model in memory, its tokenizer, and what subjects made of it so far; processor: for images; dynamic: whose
    experts change their precision."""

    model: Any
    tokenizer: Any
    processor: Any
    swapped: Swapped | None
    replicas: dict[str, tuple[RunReplicas | CheckpointReplicas, Dequantized, PrefillStore]] = field(
        default_factory=dict
    )
    dynamic: DynamicMoE | None = None


def load(subject: Subject, settings: Settings) -> Loaded:
    """Load what a subject is measured on; ModelError or ArtifactError for what cannot be loaded."""
    device = loading.resolve_device(settings.device)
    dtype = loading.compute_dtype(subject.source, settings.dtype, device)
    trust = settings.trust_remote_code
    tokenizer = loading.load_tokenizer(subject.source, trust)
    processor = corpus.load_processor(subject.source.path, trust) if settings.images else None
    if subject.checkpoint is not None and subject.dynamic is not None:
        following = _dynamic(subject.checkpoint, subject.dynamic, settings)
        return Loaded(following.model, tokenizer, processor, None, dynamic=following)
    if subject.checkpoint is not None:
        model = load_checkpoint(subject.checkpoint, dtype, device, trust, policy="fixed")
        return Loaded(model, tokenizer, processor, None)
    model = loading.load_model(subject.source, dtype, device, trust)
    swapped = Swapped(model, find_expert_layers(model) if subject.run is not None else ())
    return Loaded(model, tokenizer, processor, swapped)


def _dynamic(checkpoint: Path, options: DynamicOptions, settings: Settings) -> DynamicMoE:
    """Copies are made between passes unless the options say: the same requests give the same results."""
    from moeq.exporters.native_dynamic import open_dynamic  # which loads a compiler

    return open_dynamic(
        checkpoint,
        options,
        dtype=settings.dtype,
        device=settings.device,
        copies="between",
        policy="fixed",
        log=settings.dynamic_log,
        trust_remote_code=settings.trust_remote_code,
    )


def lm_of(loaded: Loaded, subject: Subject, settings: Settings) -> StaticLM:
    """The subject for lm-eval, on a model that is loaded; what the subject before did to it is undone."""
    if loaded.swapped is not None:
        run, wanted = subject.run, dict[Place, Replacement]()
        if run is not None and subject.context is not None:
            wanted.update(other_replacements(run).items())
        elif run is not None:
            wanted = replacements(run, subject.assignment, exported=subject.exported)
        if run is not None and not loaded.swapped.layers:
            loaded.swapped.layers = find_expert_layers(loaded.model)
        loaded.swapped.set(wanted)
    if subject.context is None:
        return static_lm(loaded.model, loaded.tokenizer, loaded.processor, **settings.lm_options())
    runtime = _runtime(loaded, subject, subject.context)
    return ContextAwareLM(runtime, loaded.tokenizer, **settings.lm_options())


def check(subject: Subject, trust_remote_code: bool = False) -> None:
    """EvaluationError, before anything is loaded, for a model that makes no text, and for options of a context that its
    replicas do not allow; ModelError for a packed one that transformers does not load here."""
    config = loading.load_config(subject.source, trust_remote_code)
    what = loading.no_text(loading.model_class(subject.source, config, trust_remote_code))
    if what is not None:
        raise EvaluationError(f"{what} continues no text", where=subject.name, do="name language models")
    if subject.run is None:
        loading.check_loads(subject.source)
    if subject.context is None:
        return
    where = str(subject.run.out if subject.run is not None else subject.checkpoint)
    if subject.run is not None:
        layers, widths = subject.run.model.layers, run_widths(subject.run)
    else:
        reader = _reader(subject)
        layers, widths = reader.layers, CheckpointReplicas(reader).widths()
    check_replicas(subject.context, layers[0].num_experts, widths, where, of_run=subject.run is not None)


def _runtime(loaded: Loaded, subject: Subject, options: ContextOptions) -> ContextAwareModel:
    """The context-aware model of a run, or of a checkpoint with its replicas."""
    layers = find_expert_layers(loaded.model) if subject.run is not None else _reader(subject).layers
    replicas, dequantized, prefills = _replicas(loaded, subject, layers)
    losses = None
    if options.selector and options.gpu_experts < layers[0].num_experts:
        losses = replicas.losses(WIDTHS)
        if losses is None:
            do = "export it again, or set selector=false"
            raise EvaluationError("does not say what its replicas lose", where=subject.name, do=do)
    return ContextAwareModel(
        loaded.model,
        layers,
        dequantized,
        chooser(options, losses),
        placed=np.stack(replicas.placed()) if options.prefill == "placed" else None,
        exact_start=options.first_token == "prefill",
        count_last=options.statistics == "context",
        prefills=prefills,
    )


def _reader(subject: Subject) -> NativeReader:
    assert subject.checkpoint is not None, "neither a run nor a checkpoint"
    return NativeReader(subject.checkpoint)


def _replicas(
    loaded: Loaded, subject: Subject, layers: list[ExpertLayer]
) -> tuple[RunReplicas | CheckpointReplicas, Dequantized, PrefillStore]:
    """Replicas and prefills, shared by all subjects of a run or a checkpoint."""
    key = str(subject.run.out.resolve() if subject.run is not None else subject.checkpoint)
    if key not in loaded.replicas:
        source: RunReplicas | CheckpointReplicas
        if subject.run is not None:
            source = RunReplicas(subject.run, load_assignment(subject.run), loaded.model, layers)
        else:
            source = CheckpointReplicas(_reader(subject))
        device = next(loaded.model.parameters()).device
        loaded.replicas[key] = source, Dequantized(source, loaded.model.dtype, device), PrefillStore()
    return loaded.replicas[key]
