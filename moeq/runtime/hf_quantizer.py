"""transformers' quantizer plug-in: `from_pretrained` on a checkpoint that moeq exported.

Importing this module registers the method `moeq`; `import moeq` arranges that (see moeq/plugin.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter, apply_converters
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moeq.artifacts.manifest import REMEDY
from moeq.artifacts.reading import TensorHeader
from moeq.errors import ArtifactError, ModelError
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.source import read_header
from moeq.runtime.arranged import Puts
from moeq.runtime.hook import forget_hook
from moeq.runtime.packed_experts import PACKED, PackedExperts, PackedLinear
from moeq.runtime.packed_modules import PackedModule, prepare, replace_modules
from moeq_kernels import choice
from moeq_kernels.checkpoint import DENSE, FORMAT_VERSION, Others, Stored, wrong_config
from moeq_kernels.widths import LAYOUT, LAYOUT_VERSION, METHOD, PARTS


@register_quantization_config(METHOD)
class MoeqConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of config.json: the width of every expert of every layer, and the grid.

    experts: {module path: [bits of expert 0, 1, ...]}, 16 meaning dense, and {projection: bits} for an expert whose
    matrices differ (format version 2); others: packed modules outside of the experts,
    with a grid of their own (see `moeq_kernels.checkpoint.Others`), absent where there are none.
    """

    def __init__(
        self,
        experts: dict[str, list[int | dict[str, int]]] | None = None,
        group_size: int = 128,
        symmetric: bool = False,
        nested: bool = False,
        state_bits: int = 0,
        codebook: str = "",
        others: dict[str, Any] | None = None,
        format_version: int = FORMAT_VERSION,
        layout: str = LAYOUT,
        layout_version: int = LAYOUT_VERSION,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD
        self.experts = experts or {}
        self.group_size, self.symmetric, self.nested = group_size, symmetric, nested
        self.format_version, self.layout, self.layout_version = format_version, layout, layout_version
        if others:
            self.others = others
        if state_bits:
            self.state_bits = state_bits
        if codebook:
            self.codebook = codebook
        Stored.of(vars(self))  # refused here, before anything is loaded

    @property
    def stored(self) -> Stored:
        """What it says, as every reader of checkpoints reads it."""
        return Stored.of(vars(self))


@register_quantizer(METHOD)
class MoeqHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces every experts module by a PackedExperts of the checkpoint's widths before weights are loaded."""

    requires_calibration = True
    saved_as_loaded = True
    stacks: tuple[str, ...] = ()  # ends of the names of the parameters that hold experts in the family's own model

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> nn.Module:
        config = self.quantization_config
        _refuse_divided(model)
        layers = {layer.name: layer for layer in find_expert_layers(model)}
        stored = _named_as_here(config, model)
        self.stacks = tuple(
            {f".{layer.name.rpartition('.')[2]}.{part}" for layer in layers.values() for part in layer.parameters}
        )
        if set(layers) != set(config.experts):
            first = min(set(layers) ^ set(config.experts))
            raise wrong_config("quantization_config and the model's MoE layers differ", first)
        for name, layer in layers.items():
            _check_layer(layer, config.experts[name])
            original: Any = model.get_submodule(name)
            with torch.device("meta"):
                packed = PACKED[layer.kind.name](
                    layer,
                    config.experts[name],
                    encoding=stored.encoding,
                    original=original,
                    dtype=original.get_parameter(layer.parameters[0]).dtype,
                )
            model.set_submodule(name, packed)
            if layer.kind.name == "numbered":  # the family's initialization reaches for experts by name
                setattr(model.get_submodule(name.rpartition(".")[0]), "_is_hf_initialized", True)  # noqa: B010
        if stored.others is not None:
            replace_modules(model, stored.others)
            model.resize_token_embeddings = Resizing(model)  # type: ignore[assignment]
        _check_files(model, checkpoint_files or ())
        model.save_pretrained = Saving(model, tuple({os.path.dirname(file) for file in checkpoint_files or ()}))  # type: ignore[assignment]
        forget_hook(model.config)
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        _warn_of_held_experts(model)
        model.get_memory_footprint = Footprint(model)
        from moeq.runtime.grouped_attention import group  # needs transformers, which is being imported by this file's

        group(model)
        if choice.at_once():
            prepare(model)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """Without those that only make what is packed, stacks of experts or others: a packed checkpoint has none."""
        left = [name for name, _ in model.named_parameters() if name.endswith(self.stacks)]  # of experts left alone
        kept = [
            rule
            for rule in weight_conversions
            if left or not (isinstance(rule, WeightConverter) and _makes(rule.target_patterns, self.stacks))
        ]
        packed = _packed_names(model)
        if packed:
            others = [name for name in _names_beside_experts(model) if name not in packed]
            kept = [rule for rule in kept if not (_takes(rule, packed) and not _takes(rule, others))]
        self.saved_as_loaded = not _changes_when_saved(kept, model)
        return kept

    def is_serializable(self, **_: Any) -> bool:
        """Not where the family's own conversions would take packed experts for weights of its own when it is saved."""
        return self.saved_as_loaded

    @property
    def is_trainable(self) -> bool:
        """Adapters beside packed weights are: gradients pass through packed modules, which have none of their own."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile decoding with a cache of fixed size, as it does on a GPU."""
        return True

    def dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Not in memory: ArtifactError."""
        where = str(getattr(getattr(model, "config", None), "name_or_path", "") or "model")
        what = "the experts of a packed checkpoint cannot be unpacked in memory"
        do = f"load the original, or what `moeq convert {where} --to dequantized --out OTHER` makes"
        raise ArtifactError(what, where=where, do=do)


def _refuse_divided(model: Any) -> None:
    """ModelError where transformers is to divide matrices or experts among devices: its plans name parameters that a
    packed model has not, and would add up what every device computes whole."""
    asked = getattr(model.config, "distributed_config", None)
    if any((getattr(asked, name, None) or 1) > 1 for name in ("tp_size", "ep_size")):
        raise ModelError(
            "transformers does not divide packed weights among devices (tensor or expert parallelism)",
            where=str(model.config.name_or_path or "model"),
            do="load it with device_map, or with pp_size alone, or serve it with vLLM, which divides them",
        )


def _named_as_here(config: MoeqConfig, model: Any) -> Stored:
    """What the checkpoint says, its modules by the names that this model has for them, and from now on in `config`.

    They differ where a checkpoint is loaded by another class than it was packed as, such as its base model: tensors are
    renamed by transformers then. A head, or another part of the whole, that this class does not have is left out; one
    that has the embeddings' tensor stays in `config`, so that what is saved loads with it again.
    """
    stored = config.stored
    modules, prefix = {name for name, _ in model.named_modules()}, f"{model.base_model_prefix}."
    on_disk = DiskNames(model)

    def here(name: str, part: str) -> str:
        if name in modules:
            return name
        renamed = on_disk.in_memory(f"{name}.{part}").removesuffix(f".{part}")
        every = (renamed, renamed.removeprefix(prefix), prefix + renamed)
        return next((one for one in every if one in modules), name)

    config.experts = {here(name, "0.down_proj.codes"): widths for name, widths in config.experts.items()}
    if stored.others is None:
        return config.stored
    named = {name: here(name, "codes") for name in (*stored.others.bits, *stored.others.tied.values())}
    left_out = {name for name, own in named.items() if own not in modules and not hasattr(model, own.split(".")[0])}
    bits = {named[name]: width for name, width in stored.others.bits.items() if name not in left_out}
    tied = {named[name]: named[head] for name, head in stored.others.tied.items()}
    config.others = config.others | {"bits": bits} | ({"tied": tied} if tied else {})
    here_tied = {named[name]: named[head] for name, head in stored.others.tied.items() if head not in left_out}
    return replace(config.stored, others=replace(Others.of(config.others), tied=here_tied))


def _check_files(model: nn.Module, files: Sequence[str]) -> None:
    """ArtifactError where the checkpoint's files cannot hold what the model was made for.

    The library allocates what it does not find: this is where a stated size is first believed. Packed tensors that are
    there have the model's shapes; all together are no larger than the files (written again, some have other names).
    """
    there: dict[str, TensorHeader] = {}
    for file in files:
        there |= read_header(Path(file))
    if not there:
        return
    where = str(Path(files[0]).parent)
    wanted = {
        f"{path}.{part}": tensor
        for path, module in model.named_modules()
        if isinstance(module, PackedLinear)
        for part, tensor in module.named_buffers(recurse=False)
        if part in (*PARTS, DENSE)
    }
    for name, tensor in wanted.items():
        if name in there and there[name].shape != tuple(tensor.shape):
            what = f"{name} is {list(there[name].shape)}, config.json wants {list(tensor.shape)}"
            raise ArtifactError(what, where=where, do=REMEDY)
    size, on_disk = sum(tensor.nbytes for tensor in wanted.values()), sum(header.bytes for header in there.values())
    if size > 2 * on_disk:  # 16-bit weights may be asked for in 32
        what = f"config.json wants {size} bytes of packed weights, the files hold {on_disk}"
        raise ArtifactError(what, where=where, do=REMEDY)


def _check_layer(layer: ExpertLayer, experts: Sequence[int | dict[str, int]]) -> None:
    """ArtifactError unless there are widths of every expert, and of every matrix of one whose matrices differ."""
    if len(experts) != layer.num_experts:
        raise wrong_config(f"{len(experts)} widths for {layer.num_experts} experts", layer.name)
    for expert, widths in enumerate(experts):
        if not isinstance(widths, int) and set(widths) != set(layer.projections):
            what = f"expert {expert} has widths of {', '.join(widths)}, not of {', '.join(layer.projections)}"
            raise wrong_config(what, layer.name)


def _warn_of_held_experts(model: nn.Module) -> None:
    """A device map sends to the disk or the CPU only parameters, unless told otherwise: packed experts are buffers."""
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    for path, module in model.named_modules():
        if isinstance(module, PackedExperts):
            names = path.split(".")
            around = (".".join(names[:count]) for count in range(len(names), -1, -1))  # itself first, the model last
            wanted = next((str(places[name]) for name in around if name in places), None)
            held = (tensor for *_, linear in module.linears() for tensor in linear.buffers())
            device = next((tensor.device.type for tensor in held), wanted)
            if (wanted == "disk" and device != "meta") or (wanted == "cpu" and device not in ("cpu", "meta")):
                warnings.warn(
                    f"{path}: the device map says {wanted}, but its experts are kept on {device}; "
                    "pass offload_buffers=True to from_pretrained",
                    stacklevel=2,
                )
                return


def _makes(targets: list[str], stacks: tuple[str, ...]) -> bool:
    return any(f".{target}".rstrip("$").replace("\\", "").endswith(stacks) for target in targets)


def _changes_when_saved(rules: list[Any], model: nn.Module) -> bool:
    """Whether a converter, turned round, takes hold of a packed expert's tensor, or of another packed module's."""
    names = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, PackedExperts)
        for expert, *_ in module.linears()[:1]  # which is stored; all may be dropped
        for name in module.get_submodule(str(expert)).state_dict(prefix=f"{expert}.")
    ]
    return any(_takes(rule, [*names, *_packed_names(model)]) for rule in rules)


def _packed_names(model: nn.Module) -> set[str]:
    """Names of the tensors of packed modules outside of the experts, biases apart."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, PackedModule)
        for name in module.state_dict()
        if name != "bias"
    }


def _names_beside_experts(model: nn.Module) -> list[str]:
    """Names of all tensors but those of packed experts."""
    experts = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, PackedExperts))
    return [name for name in model.state_dict() if not name.startswith(experts)]


def _takes(rule: Any, names: Collection[str]) -> bool:
    """Whether a converter, turned round, takes hold of one of these tensors."""
    if not isinstance(rule, WeightConverter):
        return False
    converter = [rule.reverse_transform()]
    return any(apply_converters(name, converter)[1] is not None for name in names)


@dataclass(frozen=True)
class Saving:
    """`save_pretrained` of a model with packed modules: not into a folder that it was loaded from, of whose files
    transformers takes some away and leaves others, such as the manifest. folders: those."""

    model: Any
    folders: tuple[str, ...]

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As transformers'; ArtifactError for such a folder."""
        if os.path.isdir(save_directory) and any(
            os.path.isdir(folder) and os.path.samefile(folder, save_directory) for folder in self.folders
        ):
            what = "the checkpoint that this model was loaded from, which saving would leave in pieces"
            raise ArtifactError(what, where=str(save_directory), do="save it into another directory")
        return type(self.model).save_pretrained(self.model, save_directory, *args, **kwargs)


@dataclass(frozen=True)
class Footprint:
    """`get_memory_footprint` of a model with packed modules: transformers' own sums parameters and buffers alone."""

    model: Any

    def __call__(self, return_buffers: bool = True) -> int:
        """Bytes of the parameters, and with return_buffers of the buffers, packed ones as they lie or kernels hold
        them."""
        own: int = type(self.model).get_memory_footprint(self.model, return_buffers)
        held = [getattr(module, "prepared", None) for module in self.model.modules() if isinstance(module, Puts)]
        return own + sum(int(prepared.nbytes) for prepared in held if return_buffers and prepared is not None)


@dataclass(frozen=True)
class Resizing:
    """`resize_token_embeddings` of a model with packed modules: packed embeddings and heads have the rows they have."""

    model: Any

    def __call__(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers' where both are plain; else the embeddings, or ModelError for another number of rows."""
        table = self.model.get_input_embeddings()
        if not any(isinstance(one, PackedModule) for one in (table, self.model.get_output_embeddings())):
            return type(self.model).resize_token_embeddings(self.model, new_num_tokens, *args, **kwargs)
        if new_num_tokens in (None, table.num_embeddings):
            return table
        raise ModelError(
            f"packed embeddings or heads of {table.num_embeddings} rows cannot be given {new_num_tokens}",
            where=str(self.model.config.name_or_path or "model"),
            do="make the checkpoint with others.embeddings: null and others.head: null",
        )
