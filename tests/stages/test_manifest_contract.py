"""The manifest as a contract: a reader that knows nothing of moeq rebuilds context-aware checkpoints bit for bit."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import manifest_reader
import numpy as np
import pytest
import torch
from manifest_reader import matrix, read_expert, read_tensor, relative_error
from safetensors.torch import load_file
from tiny_models import some
from transformers import AutoModelForCausalLM

from moeq import pipeline
from moeq.artifacts.manifest import NAME, PlacementManifest
from moeq.models.experts import stacked_weights
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context
from moeq.stages.replicas import load_index, open_layer

STAGES = ("profile", "losses", "assign", "quantize", "export")
SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "quantize.replicas=all",
    "eval.compare=[]", "others={attention: 4, head: 8, group_size: 24}",
)  # fmt: skip
CASES = {
    "plain": ("assign={method: prefix-split, code_bits: 5/2, gpu_experts: 2}",),
    "nested": ("losses.nested=true", "assign={method: prefix-split, code_bits: 5/2, gpu_experts: 2}"),
    "mixed": ("assign={method: optimal, code_bits: 2, granularity: projection, gpu_experts: 1}",),
    "nested, mixed, symmetric": (
        "losses.nested=true",
        "losses.symmetric=true",
        "assign={method: optimal, code_bits: 2, granularity: projection, gpu_experts: 1}",
    ),
}


@pytest.fixture(scope="module", params=some(CASES, 2))
def made(request: pytest.FixtureRequest, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    recipe = load_recipe(None, [*SMALL, *CASES[request.param]])
    out = tmp_path_factory.mktemp("contract") / "run"
    context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=out, reporter=Reporter(quiet=True))
    pipeline.run(context, STAGES)
    return context


def test_the_reader_knows_nothing_of_moeq() -> None:
    tree = ast.parse(Path(manifest_reader.__file__).read_text("utf-8"))
    found = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    assert found == {"__future__", "base64", "hashlib", "json", "pathlib", "typing", "numpy", "gguf"}


@pytest.mark.full
def test_every_replica_of_every_expert_is_rebuilt_bit_for_bit(made: Context, tiny_mixtral: Path) -> None:
    """Widths of the store as the store has them, 16 bits as the model has them, whichever matrix has which."""
    folder = made.directory("export")
    manifest: dict[str, Any] = json.loads((folder / NAME).read_text("utf-8"))
    original = AutoModelForCausalLM.from_pretrained(tiny_mixtral, dtype=torch.float32)
    index, widths = load_index(made), set()
    for number, layer in enumerate(manifest["layers"]):
        stored, source = open_layer(made, index, number), made.model.layers[number]
        assert len(layer["experts"]) == layer["num_experts"] == 5
        for expert in layer["experts"]:
            assert sum(replica["placed"] for replica in expert["replicas"]) == 1
            for replica in expert["replicas"]:
                values = read_expert(folder, layer, replica, manifest["layout"])
                assert list(values) == layer["projections"]
                dense = stacked_weights(original, source, slice(expert["expert"], expert["expert"] + 1))
                for name, mine in values.items():
                    bits = replica.get("projections", {}).get(name, replica["bits"])
                    widths.add(bits)
                    exact = dense[name][0].detach().numpy()
                    if bits == 16:
                        wanted = exact
                    else:
                        if "leading_bits_of" not in replica:
                            assert relative_error(mine, exact) == pytest.approx(replica["errors"][name], rel=1e-8)
                        entry = index.entry(replica["quantizer"], bits)
                        wanted = stored.expert(entry, name, expert["expert"]).dequantize().numpy()
                    assert np.array_equal(mine.astype(np.float32), wanted), (
                        layer["name"],
                        expert["expert"],
                        bits,
                        name,
                    )
    assert widths == {1, 2, 3, 4, 8, 16}


@pytest.mark.cases(1)
def test_every_tensor_of_every_file_is_listed_with_its_digest(made: Context) -> None:
    folder = made.directory("export")
    manifest: dict[str, Any] = json.loads((folder / NAME).read_text("utf-8"))
    experts = [expert for layer in manifest["layers"] for expert in layer["experts"]]
    places = [replica for expert in experts for replica in expert["replicas"]] + manifest["others"]
    listed = {(place["file"], place["key_prefix"] + stamp["name"]) for place in places for stamp in place["tensors"]}
    for tensor in manifest["tensors"]:
        array, data = read_tensor(folder / tensor["file"], tensor["name"])
        assert (list(array.shape), hashlib.sha256(data).hexdigest()) == (tensor["shape"], tensor["sha256"])
        assert (tensor["file"], tensor["name"]) not in listed
        listed.add((tensor["file"], tensor["name"]))
    assert listed == {(path.name, name) for path in folder.glob("*.safetensors") for name in load_file(path)}


def test_other_modules_are_rebuilt_bit_for_bit(made: Context) -> None:
    folder = made.directory("export")
    manifest: dict[str, Any] = json.loads((folder / NAME).read_text("utf-8"))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert {module["kind"] for module in manifest["others"]} == {"attention", "head"}
    for module in manifest["others"]:
        parts = {
            stamp["name"]: read_tensor(folder / module["file"], module["key_prefix"] + stamp["name"])[0]
            for stamp in module["tensors"]
        }
        mine = matrix(parts, module["inputs"], module["bits"], {"group_size": module["group_size"]})
        wanted = loaded.get_submodule(module["name"]).values(torch.float32).numpy()
        assert np.array_equal(mine.astype(np.float32), wanted), module["name"]


def test_the_manifest_is_valid_by_the_schema_beside_it(made: Context) -> None:
    folder = made.directory("export")
    manifest, schema = (json.loads((folder / name).read_text("utf-8")) for name in (NAME, "placement.schema.json"))
    assert schema == json.loads(json.dumps(PlacementManifest.model_json_schema()))
    if importlib.util.find_spec("jsonschema") is not None:
        import jsonschema

        jsonschema.validate(manifest, schema)
    PlacementManifest.model_validate(manifest)
