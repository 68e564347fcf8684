"""Run by gptqmodel's interpreter: reads EXL3 Linears with its torch backend, and writes what it makes of them.

Arguments: a safetensors file of tensors `CODEBOOK.K.PART` and inputs `x`, and the file to write. Knows no moeq.
"""

import sys

import torch
from gptqmodel.nn_modules.exllamav3_torch import ExllamaV3TorchLinear
from safetensors.torch import load_file, save_file


def main() -> None:
    given, found = load_file(sys.argv[1]), {}
    x = given.pop("x")
    for module in sorted({name.rpartition(".")[0] for name in given}):
        tensors = {name.rpartition(".")[2]: tensor for name, tensor in given.items() if name.startswith(f"{module}.")}
        linear = ExllamaV3TorchLinear.from_tensors(
            in_features=len(tensors["suh"]), out_features=len(tensors["svh"]), name=module, tensors=tensors
        )
        found[f"{module}.inner"] = linear.get_inner_weight_tensor(torch.float16).contiguous()
        found[f"{module}.weight"] = linear.get_weight_tensor(torch.float32).contiguous()
        found[f"{module}.output"] = linear(x).contiguous()
    save_file(found, sys.argv[2])


main()
