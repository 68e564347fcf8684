"""What fuzzing has found, by its smallest input: accepted nonsense, and errors of other kinds than moeq's."""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from robustness.fuzzing import Fuzzed
from robustness.fuzzing.mutations import table_bytes
from robustness.fuzzing.tables import loss_table

from moeq.artifacts import losses
from moeq.artifacts.losses import read_losses, summarize
from moeq.errors import MoeqError
from moeq.evaluation.results import leaves

LONG = "x" * 300


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Fuzzed:
    """Of targets that need no checkpoint."""
    return Fuzzed(tmp_path_factory.mktemp("found") / "inputs", Path("no checkpoint"))


def put(value: Any, path: str, new: Any) -> bytes:
    """JSON with another value at a dotted path."""
    changed = copy.deepcopy(value)
    *parents, leaf = (int(part) if part.isdigit() else part for part in path.split("."))
    here = changed
    for part in parents:
        here = here[part]
    here[leaf] = new
    return json.dumps(changed).encode()


REFUSED: dict[str, tuple[str, str, Any, str]] = {  # target, place in its valid input, what stands there, the refusal
    "effects": ("effects", "divergence.0", "nan", r"is '(nan|inf|1e999)'"),
    "expert effects": ("expert_effects", "fit.0", "inf", r"is '(nan|inf|1e999)'"),
    "evaluation": ("evaluation", "rows.0.perplexity", "1e999", r"is '(nan|inf|1e999)'"),
    "gates": ("gates", "gates.0.value", "nan", r"is '(nan|inf|1e999)'"),
    "estimate": ("estimate", "estimates.0.points.0.prefill_seconds", "inf", r"is '(nan|inf|1e999)'"),
    "reparam": ("reparam", "norms.0.scale", "nan", r"is '(nan|inf|1e999)'"),
    "integer report": ("integer_report", "tasks.a.description_error", "nan", r"is '(nan|inf|1e999)'"),
    "a method that is a number": ("quantizers", "layers", {"a": [{"4": 3}]}, "layers"),
    "experts that are a number": ("quantizers", "layers", {"a": 3}, "layers"),
    "a width that is a word": ("quantizers", "layers", {"a": [{"x": "gptq"}]}, "layers"),
    "a note of a long path": ("store_note", "run", f"/{LONG}", "run directory"),
    "top_k that is a list": ("profile", "layers.0.top_k", [1], "top_k"),
    "top_k above the experts": ("profile", "layers.0.top_k", 5, "top_k"),
    "a layer without a name": ("profile", "layers.0.name", 1, "names"),
    "dynamic list": ("gptq", "quantization_config.dynamic", {"x": []}, "place of a grid"),
    "dynamic pattern": ("gptq", "quantization_config.dynamic", {"(": {}}, r"pattern '\('"),
    "no bits": ("gptq", "quantization_config.bits", 0, "0 bits"),
    "groups of nothing": ("gptq", "quantization_config.group_size", None, "groups of None"),
    "extra list": ("auto_round", "quantization_config.extra_config", {"x": []}, "place of a grid"),
    "ignored pattern": ("compressed_tensors", "quantization_config.ignore", ["re:("], "pattern"),
    "negative bits": ("compressed_tensors", "quantization_config.config_groups.group_0.weights.num_bits", -4, "bits"),
    "a rule that is a list": ("humming", "quantization_config.dynamic", {"+:x": []}, "cannot read"),
    "a codebook that is a list": ("exl3", "quantization_config.codebook", ["mul1"], "codebook"),
    "a type of no numbers": ("humming", "quantization_config.b_dtype", 4, "4 weights"),
    "a token that is a number": ("tokenizer", "added_tokens.0.content", 1, "token"),
    "a token below 0": ("tokenizer", "added_tokens.0.id", -3, "token"),
    "a merge of one": ("tokenizer", "model.merges", [["a"]], "merge"),
    "weights without a digest": ("replay", "files", {}, "no SHA-256"),
    "a cell that overflows": ("results", "rows.0.perplexity.items.logprob", [-1e308, -1e308], "not a result"),
    "no number for pixels": ("preprocessor", "rescale_factor", 10**400, "rescale_factor"),
    "pixels times 0": ("preprocessor", "rescale_factor", 0, "rescale_factor"),
    "pixels divided by 0": ("preprocessor", "image_std", [0.0], "image_std"),
    "a mean beyond float32": ("preprocessor", "image_mean", [1e300], "image_mean"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_json_that_was_not_refused(fuzzed: Fuzzed, case: str) -> None:
    name, path, new, words = REFUSED[case]
    target: Any = fuzzed.target(name)
    data = put(target.value, path, new)
    with pytest.raises(MoeqError, match=words):
        target.read(data)
    assert fuzzed.run(name, data) == "refused"


def test_a_damaged_list_of_progress_is_none(fuzzed: Fuzzed) -> None:
    target: Any = fuzzed.target("refine_progress")
    for files in (3, ["a"], {"../x": "0" * 64}, {"a": 3}):
        assert fuzzed.run("refine_progress", put(target.value, "files", files)) == "read"


def changed(name: str, value: Any) -> Callable[[pa.Table], pa.Table]:
    """A table with another value in the first row of a column."""

    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        values = [value, *table[name].to_pylist()[1:]]
        return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))

    return change


TABLES: dict[str, tuple[str, Callable[[pa.Table], pa.Table], str]] = {
    "no rows": ("losses", lambda table: table.slice(0, 0), "no row of a whole expert"),
    "best": ("losses", changed("method", "best"), "a method that is called best"),
    "a layer below 0": ("losses", changed("layer", -1), "layer is not within"),
    "a layer far above": ("losses", changed("layer", 2**30), "layer is not within"),
    "an expert far above": ("losses", changed("expert", 2**30), "expert is not within"),
    "no bits": ("losses", changed("bits", 0), "bits is not within"),
    "no method": ("losses", changed("method", None), "method is empty"),
    "a loss that is no number": ("losses", changed("loss", float("nan")), "a loss that is below 0 or no number"),
    "metadata of bytes": (
        "losses", lambda table: table.replace_schema_metadata({"moeq_schema_version": b"\xff"}), "schema version",
    ),
    "a text of bytes": (
        "losses",
        lambda table: table.set_column(
            1, table.schema.field(1), pa.array([b"\xff"] * len(table), pa.binary()).view(pa.string())
        ),
        "cannot be read as Parquet",
    ),
    "no sensitivities": ("sensitivities", lambda table: table.slice(0, 0), "no rows"),
    "layers without order": ("sensitivities", changed("layer", 1), "layer by layer"),
    "a layer of 2**40": ("sensitivities", changed("layer", 2**40), "layer by layer"),
    "an expert twice": ("sensitivities", changed("expert", 1), "layer by layer"),
    "words for numbers": (
        "sensitivities",
        lambda table: table.set_column(0, "layer", pa.array(["a"] * len(table))), "holds no numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_were_not_refused(fuzzed: Fuzzed, case: str) -> None:
    name, change, words = TABLES[case]
    target: Any = fuzzed.target(name)
    with pytest.raises(MoeqError, match=words):
        target.read(table_bytes(change(target.table)))


def test_a_table_of_few_bytes_and_many_rows_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "losses.parquet").write_bytes(table_bytes(loss_table()))
    read_losses(tmp_path / "losses.parquet")
    monkeypatch.setattr(losses, "MOST_ROWS", 7)
    with pytest.raises(MoeqError, match="8 rows, at most 7"):
        read_losses(tmp_path / "losses.parquet")


def test_methods_that_measured_other_experts_go_together() -> None:
    """Of a method that lacks the last expert, and of one that lacks a width."""
    rows = loss_table().to_pylist()
    rows += [row | {"method": "rtn", "loss": 0.01} for row in rows if row["expert"] == 0 and row["bits"] == 4]
    table = losses.LossTable(pa.Table.from_pylist(rows, schema=losses.SCHEMA))
    assert table.experts() == [2, 2]
    assert table.matrix("rtn")[0][4].shape == (2,)
    assert table.best()[1][4].tolist() == ["rtn", "gptq"]
    assert summarize(table)["mean_relative_loss"]["rtn"] == {"4": pytest.approx(0.1)}


def test_groups_of_groups_end() -> None:
    """lm-eval's groups that hold one another, and forty levels that each hold the next twice."""
    assert leaves({"group_subtasks": {"a": ["b", "x"], "b": ["a"]}}, "a") == ["x"]
    doubled = {f"g{level}": [f"g{level + 1}"] * 2 for level in range(40)}
    began = time.perf_counter()
    assert leaves({"group_subtasks": doubled}, "g0") == ["g40"]
    assert time.perf_counter() - began < 1


def test_pixels_may_be_multiplied_by_a_whole_number_of_any_size(fuzzed: Fuzzed) -> None:
    target: Any = fuzzed.target("preprocessor")
    assert fuzzed.run("preprocessor", put(target.value, "rescale_factor", 2**64)) == "read"


def test_files_that_decoders_stumble_over(fuzzed: Fuzzed) -> None:
    png = b"\x89PNG\r\n\x1a\n\0\0\0\0IHDR\xa8\xa1\xae\x0a"  # a header of no bytes
    assert fuzzed.run("picture", png) == "refused"
    row = json.dumps({"text": "", "image": [LONG]}).encode()
    assert fuzzed.run("jsonl", row) == "refused"
    target: Any = fuzzed.target("corpus_parquet")
    text = pa.array([b"\xc1"]).cast(pa.binary()).view(pa.string())
    assert fuzzed.run("corpus_parquet", table_bytes(target.table.slice(0, 1).set_column(0, "text", text))) == "refused"


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gptq", "compressed_tensors"])
def test_patterns_without_end_are_given_up(fuzzed: Fuzzed, name: str) -> None:
    """One that tries every division of a name into parts: of 40 characters 2**40."""
    target: Any = fuzzed.target(name)
    endless = r"(?:(.)|(.))*[^\w]$"
    place = {"gptq": "dynamic", "compressed_tensors": "ignore"}[name]
    data = put(target.value, f"quantization_config.{place}", {endless: {}} if name == "gptq" else [f"re:{endless}"])
    began = time.process_time()
    with pytest.raises(MoeqError, match=r"takes more than 1.0 s"):
        target.read(data)
    assert time.process_time() - began < 3


@pytest.mark.parametrize("files", ["3", "{train: {}}", "[{split: train, path: {}}]", "[{split: train, path: [3]}]"])
def test_cards_of_datasets_that_name_no_files(fuzzed: Fuzzed, files: str) -> None:
    card = f"---\nconfigs:\n- {{config_name: en, data_files: {files}}}\n---\n"
    assert fuzzed.run("dataset_card", card.encode()) in ("read", "refused")


def test_a_pattern_of_files_that_is_longer_than_paths(fuzzed: Fuzzed) -> None:
    """fnmatch takes the square of it: minutes for one of a MiB."""
    card = f"---\nconfigs:\n- {{config_name: en, data_files: 'en/{'[' * 20_000}'}}\n---\n"
    began = time.process_time()
    assert fuzzed.run("dataset_card", card.encode(), memory=False) == "read"  # by the files' names
    assert time.process_time() - began < 1


def test_groups_of_rows_of_less_than_no_bytes(fuzzed: Fuzzed) -> None:
    """As the metadata of a table says whose sizes were changed."""
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["a" * 40]}), table, compression="none")
    metadata = pq.read_metadata(io.BytesIO(table.getvalue()))
    size = metadata.row_group(0).total_byte_size
    data, stated = table.getvalue(), bytes([2 * size & 0x7F | 0x80, 2 * size >> 7])
    assert data.count(stated) >= 1, "the size as Thrift has it: zigzag, seven bits a byte"
    assert fuzzed.run("corpus_parquet", data.replace(stated, bytes([stated[0] | 1, stated[1]]))) == "refused"


def test_a_change_that_is_refused_says_where(fuzzed: Fuzzed) -> None:
    for change in (b"", b"a", b"seed.a=1", b"assign.bits=[", b"name='\xff"):
        assert fuzzed.run("set", change) == "refused"
