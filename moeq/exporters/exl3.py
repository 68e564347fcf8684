"""For exllamav3: EXL3's codes, one width for each matrix of all of a layer's experts; all else in 16 bits.

Every packed Linear is `trellis`, `suh`, `svh` and `mul1`, whose multiplier names the codebook (moeq_kernels/exl3.py).
exllamav3 (1.4.1) tells what a Linear is from these names alone: one with a `weight` beside them is loaded in float16.
Its kernels for experts take one width and codebook for a layer's gates, one for its ups, one for its downs; gate and up
may differ. A layer some of whose matrices are in 16 bits goes through its slow path. Experts are called as the family
has them on disk. What it divides by while it converts (Laguna's and Mistral 4's up projections) is not written here.

quantization_config.json lists every packed tensor (`tensor_storage`), as exllamav3's converter does; gptqmodel reads
the same from quantize_config.json. exllamav3 reads neither.
N output rows, K inputs, k bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import Target
from moeq.exporters.exporter import Exporter, ExportSizes, Loader, as_packed, later
from moeq.exporters.gptq import ON_DISK
from moeq_kernels.widths import EXL3_SIDE, FULL, TRELLIS_BITS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from moeq.artifacts.targets import Grid
    from moeq.exporters.foreign import Draft
    from moeq.exporters.packed_source import PackedSource
    from moeq.models.experts import ExpertLayer
    from moeq.models.source import ModelSource
    from moeq_kernels.description import Matrix

NAME, VERSION, GPTQMODEL = "exl3", "1.4.1", "7.6.0"
PARTS = ("weight", "trellis", "suh", "svh", "mul1")
CODEBOOK = "mul1"
CONVERTER: dict[str, Any] = {"version": VERSION, "head_bits": FULL}  # which gptqmodel takes for other things
STORAGE: dict[str, dict[str, Any]] = {
    "quantization_config.json": CONVERTER,
    "quantize_config.json": {"checkpoint_format": NAME},
}
LISTED = 2000  # bytes of what both of these and the index of tensors say of one matrix
TYPES = {"trellis": "int16", "suh": "float16", "svh": "float16", "mul1": "int32"}
FAMILIES = (
    "mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "hy_v3", "minimax_m2",
)  # fmt: skip
APART = Loader(name=NAME, packages={"exllamav3": "pip install exllamav3"}, load=None)
TORCH = Loader(
    name="gptqmodel-exl3",
    packages={"gptqmodel": f"pip install gptqmodel=={GPTQMODEL}"},
    load="gptqmodel_model",
)


def loader_of(source: PackedSource) -> Loader:
    """gptqmodel's kernel in torch, on a CPU, where experts are called on disk as in memory: it finds no others."""
    return APART if any(ON_DISK.search(key) for key in source.source.tensors) else TORCH


def check(source: ModelSource, model: nn.Module) -> None:
    """FormatError for a family that exllamav3 does not know, or whose experts are no matrices by themselves."""
    from moeq.errors import FormatError
    from moeq.exporters.foreign import check_experts

    if (family := source.config.get("model_type")) not in FAMILIES:
        raise FormatError(f"exllamav3 {VERSION} loads no model_type {family} of moeq's", do="write it for native")
    check_experts(source, model)


def write(draft: Draft) -> None:
    """FormatError for what the runtime would not load as it is meant."""
    from moeq.artifacts.files import write_json
    from moeq.exporters.schemes import refuse_others

    check(draft.source.source, draft.model)
    refuse_others(draft)
    storage: dict[str, Any] = {}
    for layer in draft.source.layers:
        _write_layer(draft, layer, storage)
    widths = [grid.bits for grid in draft.grids.values()]
    block = {
        "quant_method": NAME,
        "bits": round(sum(widths) / max(1, len(widths)), 4),
        "codebook": CODEBOOK,
    }
    for name, more in STORAGE.items():
        write_json(draft.directory / name, {**block, **more, "tensor_storage": storage})
    draft.finish({**block, **CONVERTER})


def _write_layer(draft: Draft, layer: ExpertLayer, storage: dict[str, Any]) -> None:
    """A layer's experts; notes what is stored of every packed Linear, as `tensor_storage` has it."""
    keys = draft.expert_keys(layer)
    modules = {f"{layer.name}.{expert}.{name}": key.removesuffix(".weight") for (expert, name), key in keys.items()}
    first: dict[str, tuple[str, int]] = {}

    def tensors(name: str, matrix: Matrix) -> dict[str, Tensor]:
        found = _linear(draft, name, matrix, first)
        if "trellis" in found:
            storage[modules[name]] = _stored(modules[name], found)
        return found

    draft.write_experts(layer, keys, PARTS, tensors)


def _linear(draft: Draft, name: str, matrix: Matrix, first: dict[str, tuple[str, int]]) -> dict[str, Tensor]:
    """The parts of a matrix; first: {projection: the first one's name and width}, which all of a layer share."""
    import torch

    from moeq.artifacts.targets import ONE_WIDTH
    from moeq.errors import FormatError
    from moeq_kernels import exl3

    bits = FULL if isinstance(matrix, torch.Tensor) else matrix.bits
    other, shared = first.setdefault(name.rpartition(".")[2], (name, bits))
    if bits != shared:
        what = f"{bits} bits beside {shared} bits of {other}; {draft.target.name} takes one width for all"
        raise FormatError(what, where=f"for {draft.runtime.name}: {name}", do=ONE_WIDTH)
    if isinstance(matrix, torch.Tensor):
        return {"weight": matrix}
    weight = exl3.weight_of(matrix.codes, matrix.scales.squeeze(-1), bits, matrix.inputs, matrix.codebook)
    return {key.rpartition(".")[2]: tensor for key, tensor in weight.tensors(name).items()}


def _stored(module: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What `tensor_storage` says of one Linear."""
    from moeq_kernels.exl3 import MULTIPLIERS

    entries = {
        f"{module}.{part}": {
            "shape": list(tensor.shape),
            "n_bytes": tensor.numel() * tensor.element_size(),
            "dtype": f"torch.{TYPES[part]}",
            "torch_dtype": TYPES[part],
        }
        for part, tensor in tensors.items()
    }
    return {
        "stored_tensors": entries,
        "quant_format": NAME,
        "bits_per_weight": tensors["trellis"].shape[-1] // 16,
        f"{CODEBOOK}_multiplier": MULTIPLIERS[CODEBOOK],
    }


def size(sizes: ExportSizes) -> int:
    """As packed, and of every matrix the signs of its inputs, a float16 each, and its codebook's multiplier."""
    return as_packed(sizes) + sum(_more(weights, grids) for weights, grids, full in sizes.stacks if not full)


def _more(weights: int, grids: tuple[Grid, ...]) -> int:
    """Bytes beside codes and scales of matrices of so many weights."""
    return sum(weights // (grid.rows * grid.inputs) * (2 * grid.inputs + 4) for grid in grids[:1])


EXPORTER = Exporter(
    name=NAME,
    label="EXL3",
    help="EXL3's codes, one width for each matrix of all of a layer's experts, all else in 16 bits",
    write=write,
    check=check,
    runtime=f"exllamav3 {VERSION}, on a GPU",
    snippet="""from exllamav3 import Config, Model  # pip install exllamav3
model = Model.from_config(Config.from_directory("THIS_DIRECTORY"))
model.load()""",
    library="exllamav3",
    targets=(
        Target(
            name=NAME,
            widths=(*TRELLIS_BITS, FULL),
            granularity="layer",
            reads="one width and codebook for each matrix of all of a layer's experts (modules/multilinear.py of "
            f"exllamav3 {VERSION}), sides that are multiples of {EXL3_SIDE}; Linears in 16 bits beside them",
            multiple=EXL3_SIDE,
            others=False,
            codes=("exl3",),
            stacks=True,
            proof=f"tests/exporters/test_exl3.py, test_exl3_peer.py: gptqmodel {GPTQMODEL}'s torch backend; "
            "exllamav3's kernels not run",
        ),
    ),
    size=size,
    listed=LISTED,
    families=FAMILIES,
    separate=True,
    layout=later("moeq.exporters.readers.exl3:Exl3"),
    loaders=(TORCH, APART),
    loader_of=loader_of,
)
