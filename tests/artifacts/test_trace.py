"""The file of a routing trace: what was written comes back, and what was not written is refused in one line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from estimator.test_estimator_trace import made_trace
from safetensors import safe_open

from moeq.artifacts.stage import ModelStamp
from moeq.artifacts.trace import HEADER, SEAL, RoutingTrace, join_traces, read_trace, write_trace
from moeq.errors import ArtifactError


def same(left: RoutingTrace, right: RoutingTrace) -> bool:
    return all(
        np.array_equal(getattr(left, one.name), getattr(right, one.name))
        if isinstance(getattr(left, one.name), np.ndarray)
        else getattr(left, one.name) == getattr(right, one.name)
        for one in fields(left)
    )


@pytest.fixture
def stamped() -> RoutingTrace:
    return replace(made_trace(), model=ModelStamp(name="tiny", revision=None, digest="0" * 64), text="1" * 64)


def test_which_tokens_are_of_images_is_kept_and_checked(tmp_path: Path, stamped: RoutingTrace) -> None:
    images = (np.arange(stamped.num_tokens) % 3 == 0).astype(np.uint8)
    seeing = replace(stamped, images=images)
    write_trace(tmp_path / "trace.safetensors", seeing)
    assert same(read_trace(tmp_path / "trace.safetensors"), seeing)
    joined = join_traces([stamped, seeing])
    assert joined.images is not None
    assert joined.images.tolist() == [0] * stamped.num_tokens + images.tolist()
    assert join_traces([stamped, stamped]).images is None
    with pytest.raises(ArtifactError, match="images are 2 somewhere, neither 0 nor 1"):
        replace(stamped, images=images * 2)
    with pytest.raises(ArtifactError, match=r"images are uint8 \[1\], not uint8 \[12\]"):
        replace(stamped, images=images[:1])


@pytest.mark.parametrize("weights", [True, False])
def test_what_was_written_is_read(tmp_path: Path, stamped: RoutingTrace, weights: bool) -> None:
    trace = stamped if weights else replace(stamped, weights=None)
    write_trace(tmp_path / "trace.safetensors", trace)
    found = read_trace(tmp_path / "trace.safetensors")
    assert same(found, trace)
    assert not found.experts.flags.writeable


def test_safetensors_itself_reads_it(tmp_path: Path, stamped: RoutingTrace) -> None:
    write_trace(tmp_path / "trace.safetensors", stamped)
    with safe_open(tmp_path / "trace.safetensors", "np") as handle:
        assert (handle.get_tensor("experts") == stamped.experts).all()
        assert json.loads(handle.metadata()[HEADER])["model"]["name"] == "tiny"


def test_the_bytes_repeat(tmp_path: Path, stamped: RoutingTrace) -> None:
    write_trace(tmp_path / "a", stamped)
    write_trace(tmp_path / "b", read_trace(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_truncation_and_every_flipped_byte_is_refused_or_changes_nothing(
    tmp_path: Path, stamped: RoutingTrace
) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(path, stamped)
    whole = path.read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError) as error:
            read_trace(path)
        assert "\n" not in str(error.value)
    for at in range(data, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with pytest.raises(ArtifactError, match="is damaged: another SHA-256"):
            read_trace(path)
    for at in range(8, 8 + len(whole[8:data].rstrip())):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ArtifactError):
            read_trace(path)


def test_names_that_changed_are_refused_and_traces_without_a_seal_are_read(
    tmp_path: Path, stamped: RoutingTrace
) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(path, stamped)
    seal = hashlib.sha256(metadata_of(path)[HEADER].encode()).hexdigest()
    assert metadata_of(path)[SEAL] == seal
    rewritten(path, lambda head, own: own["layers"][0].update(name="another"), sealed=False)
    with pytest.raises(ArtifactError, match="moeq_trace is damaged: another SHA-256 than was written"):
        read_trace(path)
    rewritten(path, lambda head, own: head["__metadata__"].pop(SEAL), sealed=False)
    assert read_trace(path).layers[0] == "another"  # of an older moeq, which wrote none


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as handle:
        return handle.metadata()


def rewritten(path: Path, change, *, sealed: bool = True) -> None:
    """Change the JSON of the metadata of a file; sealed: with the digest of what it is then."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    head = json.loads(whole[8 : 8 + length])
    own = json.loads(head["__metadata__"][HEADER])
    change(head, own)
    if HEADER in head["__metadata__"]:
        head["__metadata__"][HEADER] = json.dumps(own)
        if sealed:
            head["__metadata__"][SEAL] = hashlib.sha256(head["__metadata__"][HEADER].encode()).hexdigest()
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda head, own: own.update(schema_version=2), "schema version 2"),
        (lambda head, own: own.update(layers=own["layers"][:2]), "experts are int16 [12, 3, 2], not int16 [12, 2, 2]"),
        (lambda head, own: own["layers"][0].update(num_experts=3), "which has 3"),
        (lambda head, own: own["layers"][0].update(num_experts=10**6), "layers.0.num_experts is 1000000"),
        (lambda head, own: own.update(domains=["a"]), "a domain that has no name"),
        (lambda head, own: own.update(more=1), "more is a key that is not known"),
        (lambda head, own: own["sha256"].pop("prefill"), "prefill is damaged"),
        (lambda head, own: head["__metadata__"].pop(HEADER), "not a routing trace"),
        (lambda head, own: head.update(other=head.pop("prefill")), "no tensor 'prefill'"),
        (lambda head, own: head["experts"].update(dtype="U16"), "experts is U16 of 3 axes, not I16"),
        (lambda head, own: head["experts"].update(shape=[72]), "experts is I16 of 1 axes"),
    ],
)
def test_a_header_of_something_else_is_refused(tmp_path: Path, stamped: RoutingTrace, change, told: str) -> None:
    path = tmp_path / "trace.safetensors"
    write_trace(path, stamped)
    rewritten(path, change)
    with pytest.raises(ArtifactError) as error:
        read_trace(path)
    assert told in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file"):
        read_trace(tmp_path / "trace.safetensors")
    with pytest.raises(ArtifactError, match=r"is a directory; give trace\.safetensors, as `moeq profile` wrote it"):
        read_trace(tmp_path)


def test_parts_join_to_the_whole() -> None:
    parts = [made_trace(seed=1), made_trace(lengths=(4,), prefill=(2,), seed=2)]
    whole = join_traces(parts)
    assert whole.lengths.tolist() == [5, 3, 4, 4]
    assert whole.domains == ("a", "b", "a", "a")
    assert (whole.experts[12:] == parts[1].experts).all()
    assert (whole.weights[:12] == parts[0].weights).all()
