"""For mlx-lm, on Apple silicon and wherever MLX runs: a width for each stack of a layer's experts, with zero points.

Of a matrix [N, K] `weight` uint32 [N, K*b/32] holds a row's codes as one little-endian bit stream; `scales` and
`biases` [N, G] have the type of the model's other weights: a code q stands for scale * q + bias. The experts of a layer
are three stacks [E, N, ...], as mlx-lm computes with them. `quantization` of config.json names every packed module with
its grid. float16 and float32 keep the scales; bfloat16 rounds them. A symmetric grid stays symmetric: its biases are
its scales times a power of two.
N output rows, K inputs, G groups of inputs, b bits, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from moeq.artifacts.targets import ANY_GRID, ONE_WIDTH, Grid, Target, refuse_stack, widest_of
from moeq.bounded import shown
from moeq.errors import FormatError
from moeq.exporters.exporter import Exporter, ExportSizes, Loader, as_packed, later, more_bytes, packed_matrices
from moeq.exporters.mlx_families import EXPERTS, FAMILIES, Family
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor, nn

    from moeq.exporters.foreign import Draft
    from moeq.models.disk_names import DiskNames
    from moeq.models.experts import ExpertLayer
    from moeq.models.source import ModelSource
    from moeq_kernels.packed import PackedWeight

NAME, VERSION = "mlx", "0.32.2"
GROUP_BYTES = 4  # a scale and a bias, of a model of 16 bits


TARGET = Target(
    name=NAME,
    widths=(2, 3, 4, 5, 6, 8, FULL),
    granularity="layer",
    groups=(32, 64, 128),
    stacks=True,
    group_bytes=GROUP_BYTES,
    reads="`quantization`, a grid for each module: of experts, of a stack; zero points as biases",
    multiple=32,
    proof=f"tests/exporters/test_mlx.py, mlx-lm {VERSION}",
)


def check(source: ModelSource, model: nn.Module) -> None:
    """FormatError for a family that was not tried in mlx-lm, and for settings that mlx-lm does not heed."""
    from moeq.exporters.foreign import check_counts

    family = _family(source.config.get("model_type"))
    check_counts(source, model)
    whole: Any = model.config
    for name, own, taken in family.unheeded(whole.get_text_config()):
        what = f"{name} is {shown(own)}, and mlx-lm {VERSION} computes as if it were {shown(taken)}"
        raise FormatError(what, where=f"for {NAME}", do=ANY_GRID)


def _family(model_type: str | None) -> Family:
    family = None if model_type is None else FAMILIES.get(model_type)
    if family is None:
        what = f"model_type {model_type} was not tried in mlx-lm {VERSION}"
        raise FormatError(what, where=f"for {NAME}", do=f"{ANY_GRID}; {NAME} is for {', '.join(FAMILIES)}")
    return family


def write(draft: Draft) -> None:
    """FormatError for what mlx-lm would not load as it is meant."""
    import torch

    from moeq.exporters.foreign import OTHERS_FILE
    from moeq.exporters.readers.mlx import Mlx
    from moeq.models.declared import main_dtype
    from moeq.numerics.layouts import affine_parts

    check(draft.source.source, draft.model)
    family = _family(draft.source.config["model_type"])
    dtype = getattr(torch, main_dtype(draft.source.source))
    grids: dict[str, dict[str, int]] = {}
    for layer in draft.source.layers:
        grids |= _write_layer(draft, layer, f"{_block_of(draft, layer)}{family.stacks}", dtype)
    others = {
        name: draft.names.renamed(f"{name}.weight").removesuffix(".weight") for name in draft.source.other_names()
    }
    if others:
        with draft.file(OTHERS_FILE, [f"{stem}.{part}" for stem in others.values() for part in Mlx.parts]) as add:
            for name, weight in draft.source.others():
                loadable = draft.other(name, weight)
                grids[others[name]] = _declared(loadable)
                for part, tensor in affine_parts(loadable, dtype).items():
                    add(f"{others[name]}.{part}", tensor)
    grids |= {family.own(name): grid for name, grid in grids.items()}
    draft.notes += family.remarks(cast("Any", draft.model.config).get_text_config())
    common = next(iter(grids.values()), {"group_size": 64, "bits": 4})
    quantization = {"quant_method": NAME, **common, "mode": "affine", **grids}
    draft.finish(quantization, more={"quantization": quantization, **_settings(draft, family)})


def _settings(draft: Draft, family: Family) -> dict[str, Any]:
    """Keys of config.json beside the source's that mlx-lm reads."""
    config, said = draft.source.config, cast("Any", draft.model.config)
    text = said.get_text_config()
    if text is said:
        return _earlier_names(config, said) | family.more(said)
    inner = config["text_config"]
    own = {**_earlier_names(inner, text), **family.more(text), "tie_word_embeddings": bool(said.tie_word_embeddings)}
    return {"vocab_size": text.vocab_size, "text_config": {**inner, **own}}


def _earlier_names(config: Mapping[str, Any], said: Any) -> dict[str, Any]:
    """Settings that transformers 5 saves under other names than mlx-lm reads: where it finds none it takes defaults."""
    aliases: dict[str, str] = getattr(said, "attribute_map", {})
    found = {name: config[own] for name, own in aliases.items() if own in config}
    rope = dict(config.get("rope_parameters") or {})
    if rope and not any(isinstance(each, dict) for each in rope.values()):
        kind, theta = rope.pop("rope_type", "default"), rope.pop("rope_theta", None)
        found |= {} if theta is None else {"rope_theta": theta}
        found |= {"partial_rotary_factor": rope.pop("partial_rotary_factor")} if "partial_rotary_factor" in rope else {}
        found["rope_scaling"] = None if kind == "default" else {**rope, "type": kind}
    return {name: value for name, value in found.items() if name not in config}


def _write_layer(draft: Draft, layer: ExpertLayer, stem: str, dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """Write the stacks of a layer's experts into a file of their own; returns the grids of those that are packed."""
    import torch

    from moeq.exporters.foreign import layer_file
    from moeq.exporters.schemes import Scheme
    from moeq.numerics.layouts import affine_parts
    from moeq_kernels.packed import PackedWeight

    stems = {projection: f"{stem}{projection}" for projection in layer.projections}
    schemes = {projection: Scheme(draft) for projection in stems}
    stacks: dict[str, Tensor] = {}
    grids: dict[str, dict[str, int]] = {}
    linear = partial(affine_parts, dtype=dtype)
    for expert, projection, name, matrix in draft.matrices(layer, _widened(draft, layer)):
        parts = dict(schemes[projection].tensors(linear, name, matrix))
        if layer.biased:
            parts["bias"] = draft.biases[name]
        for part, tensor in parts.items():
            key = f"{stems[projection]}.{part}"
            if key not in stacks:
                stacks[key] = torch.empty((layer.num_experts, *tensor.shape), dtype=tensor.dtype)
            stacks[key][expert] = tensor
        if isinstance(matrix, PackedWeight):
            grids[stems[projection]] = _declared(matrix)
    draft.write(layer_file(layer.index), stacks)
    return grids


def _widened(draft: Draft, layer: ExpertLayer) -> dict[str, int | None]:
    """{projection: the width that all of a stack are widened to}; nothing where each stays as it is."""
    from moeq.exporters.foreign import grid_of
    from moeq_kernels.packed import PackedWeight

    if not draft.options.widen:
        return {}
    grids: dict[str, set[Grid]] = {}
    for expert in range(layer.num_experts):
        for projection, matrix in draft.source.expert(layer, expert)[0].items():
            if isinstance(matrix, PackedWeight):
                grids.setdefault(projection, set()).add(grid_of(matrix))
    found: dict[str, int | None] = {}
    for projection, several in grids.items():
        each = sorted(several, key=lambda grid: grid.bits)
        refused = refuse_stack(draft.target, each, full=False, widen=True)
        if refused is not None:
            raise FormatError(refused[0], where=f"for {NAME}: {layer.name}, {projection}", do=refused[1] or ONE_WIDTH)
        found[projection] = widest_of(draft.target, each) if len(each) > 1 else None
    return found


def _block_of(draft: Draft, layer: ExpertLayer) -> str:
    """The name on disk of the module that has a layer's experts in its own module `experts`."""
    block, found, _ = draft.names.renamed(f"{layer.name}.").rpartition(EXPERTS)
    if not found:
        raise FormatError(f"{layer.name} is called as no experts of mlx-lm's", where=f"for {NAME}", do=ANY_GRID)
    return block


def _declared(weight: PackedWeight) -> dict[str, int]:
    return {"group_size": weight.inputs if weight.group_size == -1 else weight.group_size, "bits": weight.bits}


def refuse_other(names: DiskNames, name: str, shape: tuple[int, int]) -> tuple[str, str] | None:
    """Why a matrix beside the experts cannot be written packed, and what to do."""
    plain = _family(names.model.config.model_type).plain
    why = next((why for end, why in plain.items() if name.endswith(end)), None)
    return None if why is None else (why, f"leave {name} out of `others`, as `moeq run --for {NAME}` does")


def size(sizes: ExportSizes) -> int:
    """As packed, and what MLX takes more of every matrix."""
    more = (count * more_bytes(TARGET, grid, widen=sizes.widen) for count, grid in packed_matrices(sizes))
    return as_packed(sizes) + sum(more)


EXPORTER = Exporter(
    name=NAME,
    label="mlx",
    help="grids with or without zero points, one width for each matrix of all of a layer's experts",
    write=write,
    check=check,
    refuse_other=refuse_other,
    runtime=f"mlx-lm {VERSION}",
    snippet="""from mlx_lm import generate, load  # pip install mlx-lm; "mlx-lm[cpu]" on Linux
model, tokenizer = load("THIS_DIRECTORY")""",
    library="mlx",
    targets=(TARGET,),
    size=size,
    families=tuple(FAMILIES),
    layout=later("moeq.exporters.readers.mlx:Mlx"),
    loaders=(
        Loader(
            name=NAME,
            packages={"mlx_lm": "pip install mlx-lm", "torch": "pip install torch"},
            load="mlx_logits",
            logits_only=True,
        ),
    ),
)
