"""Recipes, hardware files and --set values that would hang, fill memory or break moeq: one line each, and soon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import examples
from fork_server import ForkServer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recipe_words import LONGEST, check_words
from robustness.test_bad_input import ESTIMATE, HARDWARE, RECIPE, assert_refused

from moeq.bounded import YAML_BYTES, YAML_DEPTH, YAML_NODES, YamlError, parse_yaml, read_bounded
from moeq.errors import MissingError, RecipeError
from moeq.recipe import Recipe, load_recipe

MORE_BYTES = 256 << 20  # of memory
CPU_SECONDS = 10  # a machine may do other things too
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

RECIPES: dict[str, tuple[str | bytes, list[str]]] = {  # text, what the line says
    "billion laughs": (LAUGHS, ["line 2", "aliases", "*a"]),
    "quadratic laughs": (f"a: &a {'x' * 20_000}\nb: [{', '.join(['*a'] * 20_000)}]\n", ["line 2", "aliases"]),
    "an alias of itself": ("corpus: &a\n  source: *a\n", ["line 2", "aliases"]),
    "an alias of nothing": ("name: *a\n", ["line 1", "a"]),
    "a merge key": ("corpus:\n  <<: {sequences: 3}\n", ["line 2", "merge keys"]),
    "lists a million deep": ("[" * 1_000_000, ["line 1", "nested more than 32 deep"]),
    "mappings a hundred thousand deep": ("{a: " * 100_000, ["line 1", "nested more than 32 deep"]),
    "indented a thousand deep": (
        "".join(f"{' ' * depth}a:\n" for depth in range(1000)),
        [f"line {YAML_DEPTH + 1}", "nested"],
    ),
    "two hundred thousand values": ("- a\n" * 200_000, [f"line {YAML_NODES}", "more values than are read"]),
    "ten megabytes": ("#" * (10 << 20), [str(10 << 20), str(YAML_BYTES)]),
    "a megabyte of text": (f"name: {'x' * 1_000_000}\n", ["line 1", "characters"]),
    "seed of 5,000 digits": (f"seed: {'9' * 5000}\n", ["line 1", "64 bits"]),
    "seed of 5,000 digits in quotes": (f"seed: '{'9' * 5000}'\n", ["line 1", "seed"]),
    "seed of 400 digits in quotes": (f"seed: '{'9' * 400}'\n", ["seed", "give 9223372036854775807 or less"]),
    "seed of 65 bits": ("seed: 36893488147419103232\n", ["line 1", "64 bits"]),
    "hexadecimal": (f"seed: 0x{'f' * 5000}\n", ["line 1", "64 bits"]),
    "hexadecimal without digits": ("seed: 0x_\n", ["line 1", "64 bits"]),
    "binary without digits": ("seed: 0b_\n", ["line 1", "64 bits"]),
    "to base 60": (f"seed: 1{':59' * 2000}\n", ["line 1", "seed"]),
    "no whole number": ("seed: !!int soon\n", ["line 1", "whole number"]),
    "no truth": ("trust_remote_code: !!bool maybe\n", ["line 1", "true or false"]),
    "an exponent of 999": ("losses: {damping: 1.0e+999}\n", ["line 1", "finite"]),
    "infinity": ("losses: {borrow_tokens: .inf}\n", ["line 1", "finite"]),
    "infinity in words": ("losses: {borrow_tokens: infinity}\n", ["line 1", "finite"]),
    "not a number": ("corpus: {until_covered: {share: .nan}}\n", ["line 1", "finite"]),
    "not a number in words": ("corpus: {until_covered: {share: nan}}\n", ["line 1", "finite"]),
    "bits with a huge exponent": ("assign: {code_bits: 1e999999999}\n", ["line 1", "code_bits"]),
    "bits of 4,000 digits": (f"assign: {{code_bits: '{'9' * 4000}/{'9' * 4000}'}}\n", ["line 1", "code_bits"]),
    "bytes of 5,000 digits": (f"export: {{max_shard: '{'9' * 5000} GB'}}\n", ["line 1", "max_shard"]),
    "bytes and many blanks": (f"export: {{max_shard: '1{' ' * 60_000}!'}}\n", ["line 1", "max_shard"]),
    "bytes beyond 64 bits": ("export: {max_shard: 99999999999 GiB}\n", ["line 1", "max_shard"]),
    "a grid of a million points": (
        f"estimate: {{grid: {{inputs: {[1] * 1000}, outputs: {[1] * 1000}}}}}\n",
        ["line 1", "1000000 points"],
    ),
    "lengths beyond reach": ("estimate: {grid: {inputs: [9223372036854775807]}}\n", ["line 1", "estimate.grid.inputs"]),
    "the year 0": ("corpus: {sequences: 0000-01-01}\n", ["line 1", "corpus.sequences", "'0000-01-01'"]),
    "the year 99999": ("corpus: {sequences: 99999-99-99}\n", ["line 1", "corpus.sequences"]),
    "the 32nd of a month": ("seed: 2001-01-32\n", ["line 1", "seed", "'2001-01-32'"]),
    "an offset of 99 hours": ("seed: 2001-12-14t21:59:43.10-99:00\n", ["line 1", "seed"]),
    "a list as a key": ("? [a]\n: 1\n", ["line 1", "keys are text"]),
    "a template": ("name: {{name}}\n", ["line 1", "keys are text"]),
    "NUL in a value": ('model: "a\\0b"\n', ["line 1", "U+0000"]),
    "escapes for the terminal": ('model: "\\e]0;gone\\a"\n', ["line 1", "U+001B"]),
    "half of a pair": ('model: "\\ud800"\n', ["line 1", "Unicode"]),
    "NUL bytes": (b"name: a\0\n", ["not valid YAML"]),
    "UTF-16": ("name: a\n".encode("utf-16"), ["UTF-8"]),
    "Latin-1": (b"name: caf\xe9\n", ["UTF-8"]),
    "Python's os.system": ("name: !!python/object/apply:os.system [true]\n", ["line 1", "tag"]),
    "Python by another handle": ("%TAG ! tag:yaml.org,2002:python/\n---\nname: !name:os.system x\n", ["line 3", "tag"]),
    "a tag of its own": ("name: !env HOME\n", ["line 1", "tag"]),
    "bytes of base64": ("name: !!binary aGVsbG8=\n", ["line 1", "tag"]),
    "a set": ("corpus: !!set {sequences}\n", ["line 1", "tag"]),
    "twice in depth": ("eval:\n  compare:\n    - name: a\n      name: b\n", ["line 4", "'name' is there twice"]),
    "two documents": ("name: a\n---\nname: b\n", ["line 2", "second document"]),
    "an unending text": ('name: "' + "a " * 200_000, ["not valid YAML"]),
    "a hundred thousand quotes": ("name: '" + "''" * 100_000, ["not valid YAML"]),
    "a long unknown key": (f"{'k' * 1000}: 1\n", ["line 1", "unknown key"]),
    "a longer key": (f"? {'k' * 60_000}\n: 1\n", ["line 1", "unknown key"]),
    "a long value": (f"corpus: {{sequences: {'k' * 60_000}}}\n", ["line 1", "corpus.sequences"]),
    "a long name of a data set": (f"corpus: {{source: 'hub:{'@' * 60_000}'}}\n", ["line 1", "hub dataset"]),
}


VALUES_OF_ANY_KEY = (
    "null", "-1", "0", "9223372036854775807", "-9223372036854775807", "1.0e+308", "1.0e-320", "many", "''", "[]",
    "[1, 2]", "[[]]", "{}", "{a: 1}", "true", f"'{'9' * 4000}'", f"'{'9' * 400}'", "1e999999999", "2001-01-01",
    f"'{'x' * 5000}'",
    "[null]", "[{}]", "../../x", "1/0", "' '", "nan", "[.5]", "9" * 24 + " GB",
)  # fmt: skip


def _keys(schema: dict[str, Any], definitions: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted keys of a recipe, sections and what is in them."""
    options = [schema, *schema.get("anyOf", []), *schema.get("allOf", [])]
    reference = next((one["$ref"] for one in options if "$ref" in one), None)
    schema = schema if reference is None else definitions[reference.rsplit("/", 1)[-1]]
    for key, value in schema.get("properties", {}).items():
        yield from _keys(value, definitions, (*path, key))
    if path:
        yield ".".join(path)


@pytest.mark.full
def test_every_key_of_a_recipe() -> None:
    """Whatever stands at a key: a recipe, or one line that says where, in words of moeq's own."""
    schema = Recipe.model_json_schema()
    keys = list(_keys(schema, schema["$defs"]))
    assert len(keys) > 150
    accepted = 0
    for key, value in product(keys, VALUES_OF_ANY_KEY):
        try:
            load_recipe(None, [f"{key}={value}"])
            accepted += 1
        except RecipeError as error:
            check_words(error, key)
    assert accepted > 100


@pytest.mark.cases(7)
@pytest.mark.parametrize("case", RECIPES)
def test_recipe(moeq: ForkServer, tmp_path: Path, case: str) -> None:
    text, messages = RECIPES[case]
    path, out = tmp_path / "r.yaml", tmp_path / "out"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    limits = {"more_bytes": MORE_BYTES, "cpu_seconds": CPU_SECONDS}
    finished = moeq.run("plan", path, "--model", tmp_path / "none", "--out", out, "--no-probe", **limits)
    assert_refused(finished, RECIPE, str(path), *messages)
    assert len(finished.stderr) < LONGEST
    assert not out.exists()


def test_recipes_that_are_no_files(moeq: ForkServer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for device in ("zero", "null"):
        (tmp_path / f"{device}.yaml").symlink_to(f"/dev/{device}")
    for name in ("pipe", "loop", "folder", "zero", "null", "n" * 300):
        path = tmp_path / f"{name}.yaml"
        finished = moeq.run("plan", path, "--no-probe", more_bytes=MORE_BYTES, cpu_seconds=CPU_SECONDS)
        assert_refused(finished, RECIPE, str(path))


VALUES: dict[str, list[str]] = {
    "corpus={a: &a [*a]}": ["aliases"],
    f"corpus.source={'[' * 20_000}": ["nested"],
    f"seed={'9' * 5000}": ["64 bits"],
    "seed=0x_": ["64 bits"],
    "seed=2001-99-99": ["seed", "'2001-99-99'"],
    "losses.damping=.nan": ["finite"],
    "losses.damping=nan": ["finite"],
    "assign.code_bits=1e999999999": ["code_bits"],
    'model="\\0"': ["U+0000"],
    "name=!!python/name:os.system": ["tag"],
    "seed={a: 1, a: 2}": ["twice"],
    "seed={[a]: 1}": ["keys are text"],
    "name=a\n---\nname: b": ["second document"],
    f"{'a.' * 10_000}b=1": ["unknown key"],
    f"seed.{'a' * 20_000}=1": ["seed"],
}


@pytest.mark.cases(9)
@pytest.mark.parametrize("override", VALUES, ids=lambda override: override[:30].encode("unicode_escape").decode())
def test_override(moeq: ForkServer, tmp_path: Path, override: str) -> None:
    options = {"more_bytes": MORE_BYTES, "cpu_seconds": CPU_SECONDS}
    finished = moeq.run("plan", "--model", tmp_path / "none", "--set", override, "--no-probe", **options)
    assert_refused(finished, RECIPE, "--set", *VALUES[override])
    assert len(finished.stderr) < LONGEST


def _constant(value: object) -> str:
    """A hardware file of which one constant has this value."""
    return yaml.safe_dump(HARDWARE | {"gpu": HARDWARE["gpu"] | {"memory_bandwidth": {"value": value, "source": "x"}}})


HARDWARES: dict[str, tuple[str, list[str]]] = {
    "billion laughs": (LAUGHS, ["line 2", "aliases"]),
    "nested": ("[" * 500_000, ["line 1", "nested"]),
    "digits": (f"gpu: {'9' * 5000}\n", ["line 1", "64 bits"]),
    "date": ("gpu: 0000-01-01\nlink: {}\nndp: {}\n", ["gpu"]),
    "two documents": ("---\n{}\n---\n{}\n", ["line 3", "second document"]),
    "key twice": ("gpu: {}\nlink: {}\ngpu: {}\n", ["line 3", "twice"]),
    "a list as a key": ("? [gpu]\n: 1\n", ["line 1", "keys are text"]),
    "empty": ("", ["not a mapping"]),
    "NUL": ('name: "\\0"\n', ["line 1", "U+0000"]),
    "a power of powers": (_constant("1 B/s**9**9**9"), ["gpu.memory_bandwidth", "cannot be read"]),
    "a power in brackets": (_constant("1 B/s**(9**9**9)"), ["gpu.memory_bandwidth", "cannot be read"]),
    "a long unit": (_constant("1 " + "kilo" * 15_000 + "B"), ["gpu.memory_bandwidth", "longer"]),
    "a unit of operators": (_constant("1 " + "s*" * 5_000 + "s"), ["gpu.memory_bandwidth", "longer"]),
    "code as a unit": (_constant("1 __import__('os')"), ["gpu.memory_bandwidth", "cannot be read"]),
    "letters alone": (_constant("1 " + "m" * 55 + "!"), ["gpu.memory_bandwidth", "cannot be read"]),
    "infinite": (_constant("1e999 GB/s"), ["gpu.memory_bandwidth", "not finite"]),
    "infinite share": (_constant(None).replace("value: null", "value: .inf"), ["line", "finite"]),
    "a long text": (_constant(["x" * 60_000]), ["gpu.memory_bandwidth", "has no unit"]),
    "a long key": (f"? {'k' * 60_000}\n: 1\n", ["unknown key"]),
}


@pytest.mark.cases(10)
@pytest.mark.parametrize("case", HARDWARES)
def test_hardware(moeq: ForkServer, tmp_path: Path, case: str) -> None:
    text, messages = HARDWARES[case]
    path = tmp_path / "hw.yaml"
    path.write_text(text)
    options = ["--model", "bundled:tiny-mixtral", "--hardware", path]
    finished = moeq.run("estimate", *options, more_bytes=MORE_BYTES, cpu_seconds=CPU_SECONDS)
    assert_refused(finished, ESTIMATE, str(path), *messages)
    assert len(finished.stderr) < LONGEST


def test_hardware_that_is_no_file(moeq: ForkServer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name in (str(tmp_path / "pipe.yaml"), "/dev/zero", str(tmp_path), "n" * 5000, f"/{'n' * 5000}.yaml"):
        options = ["--model", "bundled:tiny-mixtral", "--hardware", name]
        finished = moeq.run("estimate", *options, more_bytes=MORE_BYTES, cpu_seconds=CPU_SECONDS)
        code = MissingError.exit_code if name.endswith("n.yaml") else ESTIMATE
        assert_refused(finished, code, name[:60])
        assert len(finished.stderr) < LONGEST


def test_reading_takes_files_alone_and_waits_for_no_pipes_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    program = "import sys, pathlib, moeq.bounded; moeq.bounded.read_bounded(pathlib.Path(sys.argv[1]), 9)"
    command = [sys.executable, "-c", program, str(tmp_path / "pipe")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "ValueError: not a regular file" in done.stderr
    with pytest.raises(ValueError, match="not a regular file"):
        read_bounded(tmp_path, 9)
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bounded(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ValueError, match="5 bytes, at most 4"):
        read_bounded(tmp_path / "a", 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1:30", "1:30"), ("a: 2001-01-01", "2001-01-01"), ("a: 0x1F", 31), ("a: 010", 10), ("a: 1_000", 1000),
        ("a: -9223372036854775807", -(2**63) + 1), ("a: 0", 0), ("a: +1.5e+3", 1500.0), ("a: yes", True), ("a:", None),
        ("a: !!str 5", "5"), ("a: =", "="), ("a: '5'", "5"), ("a: [b, {c: d}]", ["b", {"c": "d"}]), ("a: &x b", "b"),
        ("a: -010", -10),
        ("\ufeffa: 1.", 1.0), ("a: |\n  b\n  c\n", "b\nc\n"), ("a: 1e5", "1e5"), ("a: 08", "08"), ("a: 1:2.5", "1:2.5"),
    ],
)  # fmt: skip
def test_what_is_read(text: str, value: object) -> None:
    found = parse_yaml(text).value["a"]
    assert (found, type(found)) == (value, type(value))


def test_lines() -> None:
    read = parse_yaml("a: 1\nb:\n  - c\n  - d:\n      e: 2\n3: x\n")
    paths = [("a",), ("b",), ("b", 0), ("b", 1), ("b", 1, "d", "e"), ("b", 1, "d", "gone", 7), (3,), ("none",), ()]
    assert [read.line(path) for path in paths] == [1, 2, 3, 4, 5, 4, 6, None, None]
    with pytest.raises(YamlError) as found:
        parse_yaml("a: 1\nb: *c\n")
    assert (found.value.line, found.value.at("r.yaml")) == (2, "r.yaml, line 2")


TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**63, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(TEXT, parts, max_size=4),
    max_leaves=12,
)


class NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@settings(max_examples=examples(200), deadline=None)
@given(value=PLAIN, flow=st.sampled_from([None, True, False]))
def test_what_is_written_is_read(value: Any, flow: bool | None) -> None:
    text = yaml.dump(value, Dumper=NoAliases, default_flow_style=flow, allow_unicode=True)
    assert parse_yaml(text).value == value


class ToBaseTen(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's, but for numbers that begin with 0, which are to base 8 there."""

    def whole(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node).replace("_", "")
        found: int = int(text) if re.fullmatch(r"[-+]?\d+", text) else self.construct_yaml_int(node)
        return found


ToBaseTen.add_constructor("tag:yaml.org,2002:int", ToBaseTen.whole)


@settings(max_examples=examples(500), deadline=None)
@given(text=st.text("ab01:-.,#'\"{}[]&*!|>%? \n\t~<_", max_size=40))
@example("010")
@example("[-01_0, +0b1_1, 1_0]")
def test_any_text_is_read_as_pyyaml_does_or_refused(text: str) -> None:
    """But for numbers to base 60, which are text here, and to base 8, of which there are none."""
    try:
        found = parse_yaml(text).value
    except YamlError:
        return
    assert re.search(r"\d:\d", text) or found == yaml.load(text, Loader=ToBaseTen)
