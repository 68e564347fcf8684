"""Run by an interpreter that has llama_cpp: quantize a GGUF file with llama.cpp's own quantizer.

Argument: a JSON file with source, out, types {pattern: type}, ftype and, where there is one, imatrix {tensor: the mean
square of every input, expert after expert}.
"""

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp

job = json.loads(Path(sys.argv[1]).read_text())
params = llama_cpp.llama_model_quantize_default_params()
params.nthread, params.ftype = 1, job["ftype"]
types = [llama_cpp.llama_model_tensor_override(pattern.encode(), kind) for pattern, kind in job["types"].items()]
types.append(llama_cpp.llama_model_tensor_override(None, 0))
params.tt_overrides = (llama_cpp.llama_model_tensor_override * len(types))(*types)
arrays = {name: (ctypes.c_float * len(values))(*values) for name, values in job.get("imatrix", {}).items()}
if arrays:
    Data = llama_cpp.llama_model_imatrix_data
    pointer = ctypes.POINTER(ctypes.c_float)
    data = [Data(name.encode(), ctypes.cast(values, pointer), len(values)) for name, values in arrays.items()]
    params.imatrix = (Data * (len(data) + 1))(*data, Data(None, None, 0))
failed = llama_cpp.llama_model_quantize(job["source"].encode(), job["out"].encode(), ctypes.byref(params))
sys.exit(int(failed))
