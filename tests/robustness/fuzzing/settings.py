"""Targets: what people write: recipes, changes of them, hardware, options of the command line."""

from __future__ import annotations

import io
import math
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from robustness.fuzzing.mutations import json_bytes, text_bytes
from robustness.fuzzing.target import BytesTarget, Check, JsonTarget, Place

import moeq
from moeq.bounded import YAML_DEPTH, YamlError, parse_yaml
from moeq.cli.checkpoints import _standard_input
from moeq.errors import ArtifactError, EstimateError, RecipeError
from moeq.estimation.grids import parse_grid, parse_replicas
from moeq.estimation.kernels import AXES, PARALLEL, parse_design
from moeq.estimator.geometry import TOP_K, geometry_from_config
from moeq.estimator.hardware import _parse, load_hardware
from moeq.estimator.units import parse_quantity
from moeq.evaluation.context_options import ContextOptions
from moeq.recipe import load_recipe
from moeq.recipe.earlier import RECORDED
from moeq.runtime.dynamic.options import DynamicOptions

VALUE_BYTES = 200  # of YAML: a value of a byte with its line and its path
SCHEMA_BYTES = 4 << 20  # of recipes, made where a key is unknown
RECIPE = b"""name: fuzz
model: bundled:tiny-mixtral
seed: 0x10
corpus: {source: [bundled, "a b.txt"], sequences: 1_000, until_covered: {share: 0.9}}
losses:
  bits: [1, 2, 3, 4]
  damping: 1.0e-2
assign: {method: optimal, code_bits: 5/2, widths: [2, 4]}
export: {max_shard: 5 GB, verify: no}
eval:
  compare:
  - name: 'uniform'
    method: uniform
    bits: 4
  num_fewshot: ~
"""
EARLIER = f"""{RECORDED}
name: fuzz
model: bundled:tiny-mixtral
losses: {{bits: [2, 4]}}
assign: {{method: optimal, average_bits: 2.5}}
eval: {{compare: [{{name: u, method: uniform, bits: 4}}]}}
""".encode()
CHANGES = b"""assign.bits_per_weight=2.5
corpus.sequences=64
losses.bits=[1, 2, 3, 4]"""


class Yaml(BytesTarget):
    """Plain YAML within the bounds."""

    name, data = "yaml", RECIPE
    per_byte = 2 * VALUE_BYTES

    def read(self, data: bytes) -> Check:
        try:
            read = parse_yaml(data)
        except YamlError as error:
            raise ArtifactError(str(error), where=error.at("fuzzed"), do="as its readers do") from None
        return lambda: _is_plain(read.value, YAML_DEPTH)


def _is_plain(value: Any, depth: int) -> None:
    """AssertionError for what plain YAML within the bounds cannot hold."""
    if isinstance(value, (dict, list)):
        assert depth > 0
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            _is_plain(part, depth - 1)
    elif isinstance(value, str):
        assert value.isprintable() or not set(value) & set(map(chr, (*range(9), 27, 127)))
        value.encode()
    elif isinstance(value, int):
        assert abs(value) < 2**63
    else:
        assert value is None or math.isfinite(value)


class Recipe(JsonTarget):
    """A recipe: its values are plain, and it is the same when it is written and read again."""

    name = "recipe"
    per_byte, spare = 2 * VALUE_BYTES, 2 * SCHEMA_BYTES

    def prepare(self, place: Place) -> None:
        self.value = yaml.safe_load(RECIPE)

    def read(self, data: bytes) -> Check:
        recipe = load_recipe(self.file("recipe.yaml", data))
        return lambda: _is_plain(recipe.model_dump(), YAML_DEPTH)


class EarlierRecipe(BytesTarget):
    """recipe.yaml of a run, whose keys may be called as they were."""

    name, data = "recipe_of_run", EARLIER
    per_byte, spare = 2 * VALUE_BYTES, 2 * SCHEMA_BYTES

    def read(self, data: bytes) -> Check:
        recipe = load_recipe(self.file("recipe.yaml", data))
        return lambda: _is_plain(recipe.model_dump(), YAML_DEPTH)


class Preset(BytesTarget):
    """The keys of a preset, changed: what `moeq init --preset` starts from."""

    name = "preset"
    per_byte, spare = 2 * VALUE_BYTES, 2 * SCHEMA_BYTES

    def prepare(self, place: Place) -> None:
        folder = Path(moeq.__file__).parent / "bundled" / "presets"
        self.data = min(folder.glob("*.yaml"), key=lambda path: path.stat().st_size).read_bytes()

    def read(self, data: bytes) -> Check:
        recipe = load_recipe(self.file("preset.yaml", data))
        return lambda: _is_plain(recipe.model_dump(), YAML_DEPTH)


class Changes(BytesTarget):
    """`--set`, one a line."""

    name, data = "set", CHANGES
    per_byte, spare = 2 * VALUE_BYTES, 2 * SCHEMA_BYTES

    def read(self, data: bytes) -> Check:
        recipe = load_recipe(None, data.decode("utf-8", "surrogateescape").split("\n")[:4])
        return lambda: _is_plain(recipe.model_dump(), YAML_DEPTH)


class Hardware(JsonTarget):
    """A hardware file: rates and sizes above nothing and finite."""

    name = "hardware"
    per_byte, spare = 2 * VALUE_BYTES, 1 << 20

    def prepare(self, place: Place) -> None:
        folder = Path(moeq.__file__).parent / "estimator" / "hardware"
        self.text = (folder / "h100-ndp-cxl.yaml").read_bytes()
        self.value = parse_yaml(self.text).value

    def mutated(self, chance: random.Random) -> bytes:
        return json_bytes(self.value, chance) if chance.random() < 0.7 else text_bytes(self.text, chance)

    def read(self, data: bytes) -> Check:
        path = self.file("hardware.yaml", data)
        _parse.cache_clear()  # keeps what it read
        found = load_hardware(path)
        return lambda: _is_hardware(found)


def _is_hardware(found: Any) -> None:
    for section in (found.gpu, found.link, found.ndp):
        for value in section.model_dump().values():
            assert not isinstance(value, float) or (math.isfinite(value) and value >= 0)
    assert found.gpu.compute_rate > 0
    assert found.gpu.memory_rate > 0


class Quantity(BytesTarget):
    """A number with a unit."""

    name, data = "quantity", b"512.5 GB/s"
    spare = 4 << 20  # the registry of units

    def read(self, data: bytes) -> None:
        try:
            found = parse_quantity(data.decode("utf-8", "replace"), "byte/second")
        except ValueError as error:
            raise EstimateError(str(error), where="quantity", do="as its readers do") from None
        assert isinstance(found, float)


class OptionTarget(BytesTarget):
    """One of options of the command line: the words of a text are texts of their own."""

    per_byte, spare = 64, 1 << 20  # the nearest name is looked for among all


class GridOption(OptionTarget):
    """`--grid`: rising sizes from 1."""

    name, data = "grid", b"in=128,512 out=512 batch=1,4"

    def read(self, data: bytes) -> None:
        grid = parse_grid([data.decode("utf-8", "surrogateescape")])
        for sizes in (grid.inputs, grid.outputs, grid.batches):
            assert sizes
            assert sizes[0] >= 1
            assert sorted(set(sizes)) == list(sizes)


class DesignOption(OptionTarget):
    """`--design`: values of known axes, none twice."""

    name, data = "design_option", b"widths=8/8/4,4/8/4 softmax=log2 queries=16 units=4,8 clock=300MHz brams=912"

    def read(self, data: bytes) -> None:
        axes = parse_design([data.decode("utf-8", "surrogateescape")])
        assert set(axes) <= set(AXES)
        assert all(len(set(values)) == len(values) > 0 for values in axes.values())
        assert all(min(values) >= 1 for axis, values in axes.items() if axis in PARALLEL)
        assert all(2 <= bits <= 8 for widths in axes.get("widths", ()) for bits in widths)


class ReplicasOption(OptionTarget):
    """`--replicas`: rising widths below 16."""

    name, data = "replicas_option", b"1,2,3,4"

    def read(self, data: bytes) -> None:
        widths = parse_replicas(data.decode("utf-8", "surrogateescape"))
        assert list(widths) == sorted({width for width in widths if 1 <= width < 16})


class ContextOption(OptionTarget):
    """`--context-aware`."""

    name, data = "context_option", b"gpu_experts=2,code_bits=2.5,alpha=0.5"

    def read(self, data: bytes) -> None:
        options = ContextOptions.parse(data.decode("utf-8", "surrogateescape"))
        assert options.gpu_experts >= 0
        assert options.needed_widths(8) <= {1, 2, 3, 4, 16}
        assert ContextOptions.of(options.model_dump()) == options
        assert options.label.isprintable()


class DynamicOption(OptionTarget):
    """`--dynamic`."""

    name, data = "dynamic_option", b"memory=24GiB,high=4,low=2,period=64,ema=0.9,transient=2"

    def read(self, data: bytes) -> None:
        options = DynamicOptions.parse(data.decode("utf-8", "surrogateescape"))
        assert DynamicOptions.of(options.model_dump()) == options
        high, low = options.pair({options.high or 16, options.low or 1}, "here")
        assert high > low
        assert options.label((high, low)).isprintable()


class Prompt(BytesTarget):
    """The text on standard input."""

    name, data = "prompt", b"Es war einmal\n"
    spare = 4 << 20  # of reading at most so much

    def read(self, data: bytes) -> None:
        with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data))):
            text = _standard_input()
        assert text.encode() == data.removesuffix(b"\n").removesuffix(b"\r")


class Geometry(JsonTarget):
    """The sizes that config.json states of a model, for the estimator."""

    name = "geometry"
    value = {  # noqa: RUF012
        "model_type": "mixtral", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, TOP_K[0]: 2,
        "max_position_embeddings": 512, "text_config": {"head_dim": 16},
    }  # fmt: skip

    def read(self, data: bytes) -> None:
        import json

        try:
            config = json.loads(data)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):  # source.read_config refuses it before
            raise RecipeError("no object", where="config.json", do="as its readers do")
        sizes = {"num_moe_layers": 2, "num_experts": 8, "expert_intermediate_size": 32, "non_expert_parameters": 9}
        found = geometry_from_config(config, **sizes)
        assert min(found.hidden_size, found.head_dim, found.num_key_value_heads, found.num_attention_heads) >= 1
        assert 1 <= found.top_k <= found.num_experts
