"""What a config.json must be before anything is built from it: values of the kinds that their keys ask for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moeq.artifacts.reading import TensorHeader, read_json_file
from moeq.bounded import shown
from moeq.errors import ModelError, is_utf8, name_trouble

OBJECTS = re.compile(r"_config$|^auto_map$")
COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts", "moe_top_k",
    "moe_topk", "moe_k", "top_k_experts",
)  # fmt: skip
HUB_KERNELS = re.compile(r"^_?attn_implementation(_internal)?$")  # org/name has transformers run code of the hub
BESIDE = {  # where AutoGPTQ and AutoAWQ declare what they do not in an older checkpoint's config.json
    "quantize_config.json": "gptq", "quant_config.json": "awq",
}  # fmt: skip
PACKED = ".qweight"  # what their packed tensors are called
EARLIER = "compression_config"  # what llm-compressor called quantization_config
METHODS = {PACKED: "gptq or awq", ".weight_packed": "compressed-tensors", ".trellis": "exl3"}  # by tensors
MODULES = re.compile(r"layers$|_layer$|^depths?$|blocks$|experts$|_stages$")  # counts of modules in a configuration
SIZES = re.compile(r"(_size|_dim|_heads|_rank|_width|_groups)$|^d_|^n_embd$")  # what sizes tensors
MODULES_FREE, SIZES_FREE = 4096, 1 << 20
CONFIG_BYTES = 64 << 20  # the largest config.json that is read
REMEDY = "correct it, or download the file again"


def check_name(directory: Path) -> None:
    """ModelError for a directory by whose name safetensors opens no file."""
    name = f"{directory}{directory.resolve().name}"
    if not is_utf8(name):
        what, do = name_trouble(name, "rename it")
        raise ModelError(what, where=str(directory), do=do)


def read_settings(file: Path) -> Any:
    """What a JSON file of a model holds; ModelError where it is none."""
    try:
        return read_json_file(file, most=CONFIG_BYTES, tag_constants=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"not valid JSON ({error})", where=str(file), do="download the file again") from None


def declared_beside(config: dict[str, Any], keys: Iterable[str], folder: Path) -> dict[str, Any]:
    """A model's configuration with the quantization that it declares in an earlier word, a file beside it or, of EXL3,
    the names of tensors, where it declares none itself.

    ModelError for a file that holds no such settings, and for packed tensors of which nothing says how.
    """
    if any("quantization_config" in part for _, part in _parts(config)):
        return config
    if config.get(EARLIER):
        return config | {"quantization_config": config[EARLIER]}
    packed = next((key for key in keys if key.endswith((*METHODS,))), None)
    if packed is None:
        return config
    method = METHODS[f".{packed.rpartition('.')[2]}"]
    if method == "exl3":  # goes by the names alone
        return config | {"quantization_config": {"quant_method": method}}
    file = next((folder / name for name in BESIDE if (folder / name).is_file()), None)
    if not packed.endswith(PACKED) or file is None:
        what = f"no quantization_config in it says how {packed} is packed ({method})"
        raise ModelError(
            what, where=str(folder / "config.json"), do="take the config.json that was written with the weights"
        )
    settings = read_settings(file)
    if not isinstance(settings, dict):
        raise ModelError("its settings are no mapping", where=str(file), do=REMEDY)
    check_config({"quantization_config": settings}, file)
    return config | {"quantization_config": {"quant_method": BESIDE[file.name]} | settings}


def check_config(config: Mapping[str, Any], file: Path) -> None:
    """ModelError naming file and key for a value of a kind that its key cannot have; null is always allowed.

    What only one family knows is left to transformers, whose refusals `loading` words.
    """
    for path, part in _parts(config):
        for key, value in part.items():
            wanted = None if value is None else _wanted(key, value)
            if wanted is not None:
                raise ModelError(f"{wanted}, not {shown(value)}", where=f"{file}: {path}{key}", do=REMEDY)


def _wanted(key: str, value: Any) -> str | None:
    """What a key's value must be, None where it is."""
    if OBJECTS.search(key) and not isinstance(value, dict):
        return "it must be a mapping"
    if key == "architectures" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return "it must be a list of names"
    if HUB_KERNELS.search(key) and "/" in str(value):
        return "it must be one of transformers' own, no code of the hub"
    if key == "quant_method" and not isinstance(value, str):
        return "it must be a name"
    if key in COUNTS and not isinstance(value, list | dict):  # of stages or parts that have their own
        return "it must be a number from 1" if isinstance(value, bool | str) or value < 1 else None
    return None


def experts_a_token(config: Mapping[str, Any]) -> int:
    """How many experts of a layer a token chooses, as a checked configuration says; ModelError where it does not."""
    for _, part in _parts(config):
        for key in TOP_K:
            chosen = part.get(key)
            if isinstance(chosen, list) and chosen:
                return int(max(chosen))
            if isinstance(chosen, int):
                return chosen
    raise ModelError("it does not say how many experts a token chooses", where="config.json", do=f"add {TOP_K[0]}")


def check_top_k(config: Mapping[str, Any], num_experts: int, file: Path) -> None:
    """ModelError naming file and key where a token is to choose no expert, or more than a layer has."""
    for path, part in _parts(config):
        for key in TOP_K:
            chosen = part.get(key)
            for value in chosen if isinstance(chosen, list) else [chosen]:
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= num_experts:
                    raise ModelError(
                        f"a token chooses {shown(value)} of {num_experts} experts",
                        where=f"{file}: {path}{key}",
                        do="give a number from 1 to the number of experts, as the model was trained with",
                    )


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and those within it, each with the path of its keys."""
    parts = [("", config)]
    while parts:
        path, part = parts.pop()
        yield path, part
        parts += [
            (f"{path}{key}.", value) for key, value in part.items() if isinstance(value, dict) and OBJECTS.search(key)
        ]


def check_counts(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], where: Path) -> None:
    """ModelError for a configuration whose modules or sizes the weights cannot have, before a model is made of it.

    Layers and experts are modules of Python, at most as many as there are tensors or rows of one; heads and widths size
    tensors, none larger than the largest on disk. Small numbers pass whatever the weights are.
    """
    rows = max((max(header.shape, default=0) for header in tensors.values()), default=0)
    largest = max((math.prod(header.shape) for header in tensors.values()), default=0)
    for key, value in _whole_numbers(config):
        if MODULES.search(key):
            most = max(MODULES_FREE, len(tensors), rows if "expert" in key else 0)
        elif SIZES.search(key):
            most = max(SIZES_FREE, 8 * largest)
        else:
            continue
        if value > most:
            stated = str(value) if value < 10**20 else "more than 10**20"
            what = f"{key} is {stated}; weights of {len(tensors)} tensors cannot have that many"
            raise ModelError(what, where=str(where), do="download the model again")


def _whole_numbers(node: Any) -> Iterator[tuple[str, int]]:
    """Keys and whole numbers of a configuration, those of its parts included."""
    parts = [node]
    while parts:
        part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, (dict, list)):
                parts.append(value)
            elif isinstance(value, int) and isinstance(key, str):
                yield key, value
