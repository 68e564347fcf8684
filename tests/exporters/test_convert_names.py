"""What `moeq convert` keeps beside the weights: name, licence, base model and card; and how it cuts files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from exporters import handmade
from made_sources import MadeSource, save_model

from moeq import conversion
from moeq.artifacts.provenance import read_provenance
from moeq.artifacts.sums import check_sums
from moeq.conversion import convert
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.native_reader import NativeReader
from moeq.models.source import open_source
from moeq.terminal import print_summary

CARD = """---
license: apache-2.0
license_name: theirs
language: [en, de]
base_model: some-lab/Base-8x1B
base_model_relation: merge
tags: [gptq]
---
# Base-8x1B in 4 bits
Made with care. <b>Markup</b>
"""


def front(directory: Path) -> dict[str, object]:
    text = (directory / "README.md").read_text("utf-8")
    found: dict[str, object] = yaml.safe_load(text.split("\n---", 1)[0])
    return found


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptq")
    model = handmade.model(folder / "model", "qwen3_moe")
    handmade.write(model, folder / "packed", handmade.gptq_config(), handmade.gptq_parts)
    (folder / "packed" / "README.md").write_text(CARD, "utf-8")
    (folder / "packed" / "LICENSE").write_text("the terms", "utf-8")
    return folder / "packed"


def test_name_licence_and_card_go_from_format_to_format(gptq: Path, tmp_path: Path) -> None:
    """Each is made of the one before it, and knows the model whose weights these are."""
    source, kept = gptq, CARD
    for number, name in enumerate(["auto-round", "native", "gptqmodel", "dequantized"]):
        out = tmp_path / str(number)
        convert(source, name, out)
        about = front(out)
        assert (about["license"], about["license_name"], about["language"]) == ("apache-2.0", "theirs", ["en", "de"])
        assert (about["base_model"], about["base_model_relation"]) == ("some-lab/Base-8x1B", "merge")
        title = (out / "README.md").read_text("utf-8").split("\n---\n", 1)[1].splitlines()[0]
        assert title.startswith("# some-lab/Base-8x1B")
        assert (out / "README.source.md").read_text("utf-8") == kept
        assert (out / "LICENSE").read_text("utf-8") == "the terms"
        sums = check_sums(out)
        assert sums is not None
        assert sums.files.keys() >= {"README.source.md", "LICENSE"}
        statement = read_provenance(out)
        assert statement is not None
        assert statement.parameters.model is not None
        assert statement.parameters.model.name == "some-lab/Base-8x1B"
        source, kept = out, (out / "README.md").read_text("utf-8")
    assert NativeReader(tmp_path / "1").manifest.model.name == "some-lab/Base-8x1B"


def test_a_model_without_a_card_is_called_as_the_manifest_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conversion, "bytes_in", lambda _: 7_386_704)
    model = save_model(tmp_path / "model", "qwen3_moe")
    write("native", MadeSource(model, lambda *_: 4), tmp_path / "checkpoint", WriteOptions(model_name="lab/Small"))
    summary = convert(tmp_path / "checkpoint", "gptqmodel", tmp_path / "out")
    assert "# lab/Small for gptqmodel" in (tmp_path / "out" / "README.md").read_text("utf-8")
    assert front(tmp_path / "out")["base_model"] == "lab/Small"
    assert front(tmp_path / "out")["base_model_relation"] == "quantized"
    assert "notes" not in summary
    print_summary(summary)
    assert capsys.readouterr().out.count("7.05 MiB") == 1, "as the same bytes are shown everywhere, once"


def test_shards_are_no_larger_than_asked(gptq: Path, tmp_path: Path) -> None:
    for name in ("dequantized", "native"):
        convert(gptq, name, tmp_path / name, max_shard=40_000)
        headers = open_source(str(tmp_path / name)).tensors
        sizes: dict[str, int] = {}
        for key, header in headers.items():
            if ".experts." not in key:
                sizes[header.file.name] = sizes.get(header.file.name, 0) + header.bytes
        assert len(sizes) > 3
        assert max(sizes.values()) <= 40_000
    index = json.loads((tmp_path / "native" / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    assert {headers[key].file.name for key in headers} == set(index.values())


def test_files_that_no_digest_covers_are_named(gptq: Path, tmp_path: Path) -> None:
    convert(gptq, "auto-round", tmp_path / "listed")
    (tmp_path / "listed" / "added_tokens.json").write_text("{}", "utf-8")
    summary = convert(tmp_path / "listed", "native", tmp_path / "native")
    assert "SHA256SUMS does not list added_tokens.json" in summary["notes"]
