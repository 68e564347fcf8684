"""Somebody else's exporter, one file: its format, what loads it, its writer and its reader."""

STRANGER = '''
"""strangers: codes, scales and zero points as they are packed, every matrix under the family's own name."""

from pydantic import BaseModel, Field

from moeq.artifacts.targets import Target
from moeq.errors import FormatError
from moeq.exporters.exporter import TRANSFORMERS, Exporter, Loader


class Settings(BaseModel):
    strangers_note: str = Field("none", description="strangers: a line for whoever reads config.json")


def write(draft):
    """The parts of every matrix; its grid goes into config.json."""
    from moeq_kernels.packed import PackedWeight

    for name in draft.source.other_names():
        raise FormatError("packed", where=f"format strangers: {name}", do="run without `others`")
    for layer in draft.source.layers:
        draft.write_experts(
            layer, draft.expert_keys(layer), ("weight", "codes", "scales", "zeros"),
            lambda name, matrix: matrix.parts() if isinstance(matrix, PackedWeight) else {"weight": matrix},
        )
    grids = {name: (grid.bits, grid.group_size, grid.symmetric) for name, grid in draft.grids.items()}
    draft.finish({"quant_method": "strangers", "grids": grids, "note": draft.options.settings.strangers_note})


class Layout:
    anchor, parts = "codes", ("codes", "scales", "zeros")

    def __init__(self, declared):
        self.grids = declared["grids"]

    def grid(self, names):
        from moeq.exporters.readers.layout import Grid

        found = next((self.grids[name] for name in names if name in self.grids), None)
        return found and Grid(bits=found[0], group_size=found[1], symmetric=found[2])

    def shape(self, headers, grid):
        rows, row_bytes = headers["codes"].shape
        return rows, 8 * row_bytes // grid.bits

    def check(self, headers, grid, rows, inputs):
        from moeq.artifacts.tensor_files import dtype_name
        from moeq.exporters.readers.layout import expect
        from moeq_kernels.packed import packed_shapes
        from moeq_kernels.widths import Encoding

        shapes = packed_shapes(rows, inputs, grid.bits, Encoding(group_size=grid.group_size, symmetric=grid.symmetric))
        for part, (shape, dtype) in shapes.items():
            expect(headers, part, (dtype_name(dtype),), shape)

    def read(self, parts, grid, rows, inputs):
        from moeq.exporters.readers.layout import Stored
        from moeq_kernels.packed import PackedWeight

        found = {"zeros": None, **parts, **vars(grid)}
        return Stored(weight=PackedWeight(inputs=inputs, **found))


def load(request):
    """By way of plain weights, for want of a runtime."""
    import tempfile
    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM

    from moeq.exporters import write
    from moeq.exporters.foreign import WriteOptions
    from moeq.exporters.readers import open_packed

    with tempfile.TemporaryDirectory() as folder:
        write("dequantized", open_packed(Path(request["checkpoint"])), Path(folder) / "plain", WriteOptions())
        return AutoModelForCausalLM.from_pretrained(Path(folder) / "plain", dtype=torch.float32), None


EXPORTER = Exporter(
    name="strangers",
    label="the strangers' format",
    help="codes, scales and zero points as they are packed",
    write=write,
    settings=Settings,
    runtime="the strangers' runtime 1.0",
    snippet="import strangers_runtime",
    targets=(
        Target(
            name="strangers-runtime", widths=(1, 2, 3, 4, 8, 16), reads="whatever is packed", short_groups=True,
            proof="this test",
        ),
    ),
    layout=Layout,
    loaders=(
        Loader(
            name="strangers-runtime", packages={**TRANSFORMERS.packages, "moeq": "pip install moeq"},
            load="strangers_exporter:load",
        ),
    ),
)
'''
MODULES = {"strangers_exporter": STRANGER}
ENTRIES = {"strangers": "strangers_exporter:EXPORTER"}
