"""Loading models and tokenizers through transformers, with every silent failure made an error."""

from __future__ import annotations

import math
import os
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer

from moeq.artifacts.reading import read_json_file
from moeq.errors import ModelError, RecipeError
from moeq.models import half_products
from moeq.models.configuration import check_top_k, read_settings
from moeq.models.declared import (
    PACKED,
    is_dequantized,
    is_native,
    main_dtype,
    quantization_of,
    refuse_quantized,
    scale_keys,
)
from moeq.models.drafts import draft_keys
from moeq.models.experts import SUPPORTED, ExpertLayer, find_expert_layers
from moeq.models.forward import takes_images
from moeq.models.merge_cache import drop_merge_cache
from moeq.models.messages import asking_transformers, damaged, line, quiet_transformers, wrong_keys
from moeq.models.meta import without_weights
from moeq.models.source import CONFIG, TOKENIZER_FILES, VOCABULARIES, ModelSource
from moeq.models.support import is_packed_apart
from moeq.models.weights import WeightReader, owner
from moeq.runtimes import to_convert

_LOADING = threading.Lock()  # transformers leaves tied weights out of a model when threads load at the same time
TOKENIZER, TEXT = "tokenizer.json", "text_config"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTOS = (
    AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForMultimodalLM,
    AutoModelForImageClassification,
)  # fmt: skip


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one; ModelError for a GPU that is not there, and for what is neither a CPU nor a
    CUDA GPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError("no CUDA device here", where=f"device {device}", do="use device: cpu or auto")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ModelError("unknown device", where=f"device {device}", do="use auto, cpu or cuda")
    if found.type == "cuda" and found.index is not None and found.index >= (count := torch.cuda.device_count()):
        what = f"no such GPU here: there {'is 1' if count == 1 else f'are {count}'}, numbered from 0"
        raise ModelError(what, where=f"device {device}", do="name one of them, or use device: cuda")
    return found


def memory_bytes(device: torch.device) -> int:
    """Bytes of the machine's memory, or of the GPU's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def source_dtype(source: ModelSource) -> torch.dtype:
    """The dtype of most of the checkpoint's weights, as `main_dtype` says."""
    return DTYPES[main_dtype(source)]


def full_precision(source: ModelSource) -> str:
    """What a checkpoint's own precision is called: FP32, BF16 or FP16."""
    return {torch.float32: "FP32", torch.bfloat16: "BF16"}.get(source_dtype(source), "FP16")


def loaded_bytes(source: ModelSource, dtype: torch.dtype) -> int:
    """Bytes of the whole model in memory in `dtype`; of packed weights, what they unpack to."""
    if not is_dequantized(source):
        size = sum(header.bytes for header in source.tensors.values())
        return size * dtype.itemsize // source_dtype(source).itemsize
    return sum(_weights_in(source, key) for key in set(source.tensors) - scale_keys(source)) * dtype.itemsize


def compute_dtype(source: ModelSource, wanted: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` keeps the checkpoint's dtype, except float16 on a CPU, which computes in float32; RecipeError for a type
    that models are not computed in."""
    if wanted != "auto":
        found = DTYPES.get(str(wanted).removeprefix("torch."))
        if found is None:
            raise RecipeError(f"unknown type {wanted}", where="dtype", do=f"use auto, {', '.join(DTYPES)}")
        return found
    dtype = source_dtype(source)
    return torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype


def load_config(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """The transformers configuration; ModelError for an unknown or inconsistent one.

    trust_remote_code: a checkpoint that brings its own code may run it; without it such a checkpoint is an error.
    """
    remote = source.config.get("auto_map") or {}
    if "AutoConfig" in remote and source.config["model_type"] not in CONFIG_MAPPING and not trust_remote_code:
        raise _needs_trust(source)
    with asking_transformers("read the configuration", source.path / CONFIG):
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    if isinstance(getattr(config, TEXT, None), dict):  # any other key that a class does not know is left alone
        what = f"{TEXT} is no part of {source.config['model_type']}, and transformers makes no model where it is there"
        do = f"move what it says, such as quantization_config, out of {TEXT}"
        raise ModelError(what, where=str(source.path / CONFIG), do=do)
    return config


def _needs_trust(source: ModelSource) -> ModelError:
    return ModelError(
        f"model type {source.config['model_type']} is not part of transformers and brings its own Python code",
        where=str(source.path),
        do="read its .py files; if you trust them, pass --trust-remote-code",
    )


def no_text(kind: Any) -> str | None:
    """What a model class is called whose models make no text; None of others, and of Auto classes, whose models have
    code of their own."""
    if takes_images(kind):
        return "an image classifier"
    return None if kind in AUTOS or hasattr(kind, "generate") else str(kind.__name__)


def model_class(source: ModelSource, config: Any, trust_remote_code: bool = False) -> Any:
    """The transformers class (or Auto class) that makes the model.

    It is the class that the checkpoint names, when transformers has it and it fits the configuration; else the class
    of a causal language model, of an image-text-to-text model, of an encoder-decoder, of a multimodal one or of an
    image classifier. Raises ModelError when there is none, or when only the checkpoint's own code has it and that is
    not trusted.
    """
    remote = source.config.get("auto_map") or {}
    own = next((auto for auto in AUTOS if auto.__name__ in remote), None)
    if own is not None and trust_remote_code:
        return own
    for name in (config.architectures or [])[:1]:
        named = getattr(transformers, name, None)
        headed = "For" in name or name.endswith("LMHeadModel")  # the bare model gives no logits
        if headed and isinstance(named, type) and isinstance(config, getattr(named, "config_class", None) or ()):
            return named
    for auto in AUTOS:
        if type(config) in auto._model_mapping:
            made = auto._model_mapping[type(config)]
            return made[0] if isinstance(made, tuple) else made  # DeiT's: without its teacher first
    if own is not None:
        raise _needs_trust(source)
    what = f"transformers has no language model or image classifier of type {source.config['model_type']}"
    raise ModelError(what, where=str(source.path), do=SUPPORTED)


def skeleton(
    source: ModelSource, dtype: torch.dtype | None = None, trust_remote_code: bool = False, *, packed: bool = False
) -> nn.Module:
    """The model on the meta device, structure without weights; buffers that are computed are real.

    packed: also of a quantized model, as it was before; otherwise ModelError for one, but for the formats that are
    dequantized while loading.
    """
    half_products.use_for(dtype)
    if not packed:
        refuse_quantized(source.config, source.path)
    config = load_config(source, trust_remote_code)
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    kind = model_class(source, config, trust_remote_code)
    options = {"trust_remote_code": trust_remote_code} if kind in AUTOS else {}
    make = kind.from_config if kind in AUTOS else kind._from_config
    with asking_transformers("build it", source.path / CONFIG, SUPPORTED), without_weights():
        return make(config, dtype=dtype, **options).eval()  # type: ignore[no-any-return]


def expert_keys(source: ModelSource, model: nn.Module, layers: list[ExpertLayer]) -> set[str]:
    """The tensors on disk that hold the routed experts: matrices, biases, and the scales of packed ones.

    Raises ModelError when the disk has not as many weights as the configuration wants, or experts differ in shape.
    """
    reader = WeightReader(source, model, torch.float32, torch.device("cpu"))
    names = {f"{layer.name}.{part}" for layer in layers for part in layer.parameters}
    origins = {origin.key: origin for name in names for origin in reader.origins.get(name, ())}
    weights = set(origins) - scale_keys(source)
    _check_shapes(source, {key for key in weights if len(origins[key].targets) == 1})
    names.update(name for origin in origins.values() for name in origin.targets)  # which share tensors with experts
    elements = sum(_weights_in(source, key) for key in weights)
    expected = sum(model.get_parameter(name).numel() for name in names)
    if elements != expected:
        what = f"expert tensors hold {elements} weights, the configuration wants {expected}"
        raise damaged(source.path, what)
    return set(origins)


def _weights_in(source: ModelSource, key: str) -> int:
    """How many weights a tensor on disk holds: a byte of MXFP4 blocks holds two."""
    header = source.tensors[key]
    per_byte = PACKED.get(header.dtype, 1) if is_dequantized(source) else 1
    return math.prod(header.shape) * per_byte


def _check_shapes(source: ModelSource, keys: set[str]) -> None:
    """The same matrix of all experts of a layer has one shape; transformers would not say which one has another."""
    alike: dict[str, dict[tuple[int, ...], list[str]]] = {}
    for key in sorted(keys):
        parts = key.split(".")
        last = max((index for index, part in enumerate(parts) if part.isdigit()), default=0)
        of_all = ".".join([*parts[:last], "*", *parts[last + 1 :]])
        alike.setdefault(of_all, {}).setdefault(source.tensors[key].shape, []).append(key)
    for shapes in alike.values():
        if len(shapes) > 1:
            odd, usual = (pick(shapes, key=lambda shape: len(shapes[shape])) for pick in (min, max))
            raise damaged(source.path, f"{shapes[odd][0]} is {list(odd)}, the other experts' are {list(usual)}")


def load_model(
    source: ModelSource, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> nn.Module:
    """Load for inference; ModelError when any weight is missing, unexpected or of another shape, ArtifactError for what
    moeq's own loader refuses.

    FP8-block and MXFP4 checkpoints are dequantized to `dtype`.
    """
    if source.is_remote:
        do = "copy it to a directory, or use a command that reads decoder layers as they run, such as `moeq run`"
        raise ModelError("lies in an object store, and is not read whole", where=source.name, do=do)
    if is_dequantized(source):
        return _load_dequantized(source, dtype, device, trust_remote_code)
    check_loads(source)
    half_products.use_for(dtype)
    config = load_config(source, trust_remote_code)
    kind = model_class(source, config, trust_remote_code)
    options = {"trust_remote_code": trust_remote_code} if kind in AUTOS else {}
    with _LOADING, asking_transformers("load it", source.path):
        model, info = kind.from_pretrained(
            source.path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    declared = bool(quantization_of(source.config))
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = sorted(map(str, info.get(problem) or ()))
        drafts = draft_keys(found, source.config) if problem == "unexpected_keys" else []
        if wrong := [key for key in found if key not in drafts]:
            error = wrong_keys(source.path, problem.replace("_", " "), wrong)
            raise _not_loaded(source, error.what) if declared and not is_native(source.config) else error
    return model.eval().to(device)  # type: ignore[no-any-return]


def check_loads(source: ModelSource) -> None:
    """ModelError for a packed checkpoint whose experts transformers would not find, or for which it lacks a package,
    before anything of it is read."""
    declared = quantization_of(source.config)
    if not declared or is_dequantized(source):
        return
    if is_packed_apart(source):
        raise _not_loaded(source, "its experts are packed one by one, and not as transformers loads this family's")
    with asking_transformers("load it", source.path):
        if AutoHfQuantizer.supports_quant_method(declared):
            AutoHfQuantizer.from_config(deepcopy(declared)).validate_environment(device_map=None, weights_only=True)


def _not_loaded(source: ModelSource, what: str) -> ModelError:
    """The error for a checkpoint of another tool's that transformers does not load whole."""
    do = to_convert(source.path, quantization_of(source.config), "native", "one of moeq's")
    return ModelError(what, where=str(source.path), do=do)


def _load_dequantized(
    source: ModelSource, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> nn.Module:
    model: Any = skeleton(source, dtype, trust_remote_code)
    reader = WeightReader(source, model, dtype, device)
    reader.check_unexpected()
    missing = reader.read(reader.names)
    ties = tied(model)
    share_copies(model, ties, reader.names - missing)
    for name, others in ties.items():
        there = next((other for other in others if other not in missing), None)
        if name in missing and there is not None:
            share(model, name, there)
            missing.discard(name)
    reader.check_missing(missing)
    return model.to(device)  # type: ignore[no-any-return]


def share(model: Any, name: str, other: str) -> None:
    """Let a parameter (or buffer) be another one of the model."""
    module, leaf = owner(model, name)
    setattr(module, leaf, model.get_parameter_or_buffer(other))


def share_copies(model: Any, ties: dict[str, list[str]], read: set[str]) -> None:
    """Let tied parameters that were both read be one where they are the same, as transformers does."""
    for name in sorted(read & ties.keys()):
        for other in read.intersection(ties[name]):
            own, its = model.get_parameter_or_buffer(name), model.get_parameter_or_buffer(other)
            if own is not its and torch.equal(own, its):
                share(model, name, other)


def tied(model: Any) -> dict[str, list[str]]:
    """Parameters that a family ties: each one's name to the names that it may be taken from."""
    groups: dict[str, list[str]] = {}
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        groups.setdefault(source, [source]).append(target)
    return {name: [other for other in group if other != name] for group in groups.values() for name in group}


def load_tokenizer(source: ModelSource, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer; ModelError when it is missing or broken."""
    if not any((source.path / name).is_file() for name in VOCABULARIES):
        what = "no tokenizer (tokenizer.json, tokenizer.model or vocab.*)"
        raise ModelError(what, where=str(source.path), do="copy the tokenizer files of the model into the directory")
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code)
            drop_merge_cache(tokenizer)
            tokenizer("a")  # some of its settings are only looked at when text comes
            return tokenizer
    except Exception as error:
        raise ModelError(
            f"the tokenizer cannot be loaded ({line(error)})",
            where=str(_damaged_json(source.path) or source.path),
            do=_tokenizer_remedy(source, trust_remote_code),
        ) from error


def _tokenizer_remedy(source: ModelSource, trust_remote_code: bool) -> str:
    """What to do about a tokenizer that transformers does not load."""
    settings = source.path / "tokenizer_config.json"
    own = read_settings(settings) if settings.is_file() and _damaged_json(source.path) is None else {}
    codes = [part.get("auto_map") for part in (source.config, own) if isinstance(part, dict)]
    if not trust_remote_code and any("AutoTokenizer" in code for code in codes if isinstance(code, dict)):
        return "it brings its own Python code: read its .py files; if you trust them, pass --trust-remote-code"
    there = next(name for name in sorted(VOCABULARIES) if (source.path / name).is_file())
    if (source.path / TOKENIZER).is_file() or not there.endswith((".model", ".tiktoken")):
        return "copy the tokenizer files of the model again"
    saved = "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    return f"put its {TOKENIZER} beside {there}: {saved} writes one where sentencepiece and tiktoken are installed"


def _damaged_json(folder: Path) -> Path | None:
    """The first of a tokenizer's files that should be a JSON object and is none."""
    for path in (folder / name for name in TOKENIZER_FILES if name.endswith(".json")):
        try:
            if path.is_file() and not isinstance(read_json_file(path), dict | list):
                return path
        except (OSError, ValueError):
            return path
    return None


def describe(
    source: ModelSource, trust_remote_code: bool = False, *, packed: bool = False, experts: bool = True
) -> tuple[nn.Module, list[ExpertLayer]]:
    """Skeleton and expert layers, from the configuration alone.

    packed: also of a quantized model; experts: ModelError for a model without (False: no layers then).
    """
    model = skeleton(source, trust_remote_code=trust_remote_code, packed=packed)
    layers = find_expert_layers(model, needed=experts)
    if layers:
        check_top_k(source.config, max(layer.num_experts for layer in layers), source.path / CONFIG)
    return model, layers
