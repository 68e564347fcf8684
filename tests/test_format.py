"""FORMAT.md says what the code does: its worked example, its list of files and keys, and that it is shipped."""

from __future__ import annotations

import re
from importlib.resources import files

import numpy as np
import torch
from manifest_reader import matrix

from moeq.artifacts.manifest import PlacementManifest
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import pack
from moeq_kernels.widths import CODEBOOKS, Encoding

TEXT = (files("moeq") / "FORMAT.md").read_text("utf-8")


def test_the_worked_example() -> None:
    codes, zeros = torch.tensor([[5, 1, 7, 2, 6]]), torch.tensor([[3, 4]])
    scales = torch.tensor([[0.5, 0.25]], dtype=torch.float16)
    packed, packed_zeros = pack(codes, 3), pack(zeros, 3)
    assert f"bytes    {' '.join(f'0x{byte:02X}' for byte in packed[0].tolist())} " in TEXT
    assert f"byte 0x{packed_zeros[0, 0].item():02X}" in TEXT
    assert f"stored as {' '.join(f'{byte:02X}' for byte in scales.view(torch.uint8)[0].tolist())}" in TEXT
    weight = PackedWeight(
        codes=packed, scales=scales, zeros=packed_zeros, bits=3, group_size=4, inputs=5, symmetric=False
    )
    values = weight.dequantize()
    assert f"=  {' '.join(map(str, values[0].tolist()))}" in TEXT
    parts = {name: tensor.numpy() for name, tensor in weight.parts().items()}
    assert np.array_equal(matrix(parts, 5, 3, {"group_size": 4}), values.numpy())


def test_every_field_of_the_manifest_is_described() -> None:
    schema = PlacementManifest.model_json_schema()
    fields = {name for part in (schema, *schema["$defs"].values()) for name in part["properties"]}
    missing = {name for name in fields - {"dtype", "shape"} if name not in TEXT}
    assert not missing


def test_every_layout_version_is_listed() -> None:
    grids = ({"nested": True}, {"state_bits": 12}, *({"codebook": codebook} for codebook in CODEBOOKS))
    versions = {Encoding(group_size=-1, symmetric=True, **grid).layout_version for grid in grids}
    row = next(line for line in TEXT.splitlines() if line.startswith("| `layout`, `layout_version` |"))
    assert {int(number) for number in re.findall(r"\b[0-9]\b", row)} == versions
