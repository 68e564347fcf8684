"""Experts that change their version while a layer runs: the same bits as layers that never change."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from packed_layers import layer_of, matrix_of, routed
from torch import Tensor

from moeq_kernels.choice import choosing, versioned_layer
from moeq_kernels.cpu.forms import forms
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.cpu.versions import BEGIN, Block, VersionedLayer
from moeq_kernels.description import LayerOfExperts
from moeq_kernels.errors import ModelError

E, HIDDEN, INNER = 6, 64, 48


class Made:
    """Two versions of every expert, each in a block of its own, and layers that have one of them for good."""

    def __init__(self, low: int, high: int, form: str | None = None, **options: object) -> None:
        self.sources = [layer_of([bits] * E, HIDDEN, INNER, **options) for bits in (low, high)]  # type: ignore[arg-type]
        self.kernel = CpuKernel(form)
        self.blocks = [Block(source.matrices[0]) for source in self.sources]
        size = [block.nbytes for block in self.blocks]
        self.starts = [[BEGIN + e * size[0] for e in range(E)], [BEGIN + E * size[0] + e * size[1] for e in range(E)]]
        self.held = torch.zeros(BEGIN + E * sum(size), dtype=torch.uint8)
        for version, source in enumerate(self.sources):
            for expert in range(E):
                start = self.starts[version][expert]
                self.blocks[version].write(source.matrices[expert], self.held[start : start + size[version]])
        places = [(0, self.starts[0][expert]) for expert in range(E)]
        self.layer: VersionedLayer = self.kernel.versions(
            self.sources[0], [source.matrices[0] for source in self.sources], self.held, places
        )

    def fixed(self, versions: Sequence[int]) -> LayerOfExperts:
        """A layer of which each expert has one version."""
        matrices = [self.sources[version].matrices[expert] for expert, version in enumerate(versions)]
        return replace(self.sources[0], matrices=matrices)

    def publish(self, versions: Sequence[int]) -> int:
        return self.layer.publish({e: (version, self.starts[version][e]) for e, version in enumerate(versions)})


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize(("low", "high"), [(2, 4), (4, 16), (1, 8), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_mix_has_the_bits_of_a_layer_made_so(form: str, low: int, high: int, dtype: torch.dtype) -> None:
    made = Made(low, high, form, symmetric=low == 1)
    for seed, versions in enumerate([(0,) * E, (1,) * E, (0, 1, 0, 1, 1, 0), (1, 0, 0, 0, 0, 1)]):
        made.publish(versions)
        for tokens in (1, 5, 40):
            given = routed(tokens, E, 2, HIDDEN, dtype, seed)
            found, fixed = made.layer(*given), made.kernel.layer(made.fixed(versions))
            wanted = fixed(*given)
            if fixed._form(dtype) == made.layer._view._form(
                dtype
            ):  # float16 beside codes has other vectors, or no tiles
                assert torch.equal(found, wanted)
            assert (found.float() - wanted.float()).abs().max() <= 1e-2 * wanted.float().abs().max()


def test_matrices_come_back_as_they_were_given() -> None:
    made = Made(2, 4)
    versions = (0, 1, 1, 0, 1, 0)
    made.publish(versions)
    assert [version for version, _ in made.layer.places()] == list(versions)
    for expert, version in enumerate(versions):
        for name, matrix in made.sources[version].matrices[expert].items():
            assert torch.equal(made.layer.matrix(expert, name).codes, matrix.codes)  # type: ignore[union-attr]


def test_biases_are_those_of_every_version() -> None:
    made = Made(2, 4, biased=True)
    made.publish((1, 0, 1, 0, 1, 0))
    given = routed(7, E, 2, HIDDEN, torch.float32)
    assert torch.equal(made.layer(*given), made.kernel.layer(made.fixed((1, 0, 1, 0, 1, 0)))(*given))


def test_calls_are_of_one_set_of_versions_while_another_thread_changes_them() -> None:
    made = Made(2, 4)
    mixes = [tuple(int(bit) for bit in f"{number:06b}") for number in range(2**E)]
    fixed = {mix: made.kernel.layer(made.fixed(mix)) for mix in mixes}
    given = routed(3, E, 2, HIDDEN, torch.float32)
    wanted = {mix: layer(*given) for mix, layer in fixed.items()}
    stop, failed = threading.Event(), []

    def flip() -> None:
        random = torch.Generator().manual_seed(0)
        while not stop.is_set():
            made.publish(mixes[int(torch.randint(len(mixes), (), generator=random))])

    thread = threading.Thread(target=flip)
    thread.start()
    seen = set()
    try:
        for call in range(100_000):
            if call >= 400 and len(seen) > 8:
                break
            with made.layer.reading() as view:
                result = view(*given)
            offsets = [view.first.offsets[e][0] for e in range(E)]
            mix = tuple(int(offset >= made.starts[1][0]) for offset in offsets)
            seen.add(mix)
            if not torch.equal(result, wanted[mix]):
                failed.append(mix)
    finally:
        stop.set()
        thread.join()
    assert not failed
    assert len(seen) > 8  # it did change


def test_blocks_are_quiet_when_no_call_reads_them() -> None:
    made, inside, go = Made(2, 4), threading.Event(), threading.Event()

    def gate(parts: dict[str, Tensor]) -> Tensor:
        inside.set()
        assert go.wait(20)
        return parts["gate_proj"]

    slow = replace(made.sources[0], gate=gate, activation=None)
    places = [(0, made.starts[0][expert]) for expert in range(E)]
    layer = made.kernel.versions(slow, [source.matrices[0] for source in made.sources], made.held, places)
    thread = threading.Thread(target=lambda: layer(*routed(1, E, 2, HIDDEN, torch.float32)))
    thread.start()
    assert inside.wait(20)
    published = layer.publish({0: (1, made.starts[1][0])})
    assert not layer.quiet(published)
    go.set()
    thread.join()
    assert layer.quiet(published)


def test_what_a_block_is_not_for_is_refused() -> None:
    made = Made(2, 4)
    with pytest.raises(ValueError, match="gate_proj is"):
        made.blocks[0].write(made.sources[1].matrices[0], made.held)
    names = {name: matrix_of(*size, 4) for name, size in (("up_proj", (48, 64)), ("down_proj", (64, 48)))}
    with choosing("reference"), pytest.raises(ModelError, match="cannot change their precision"):
        versioned_layer(made.sources[0], [names], made.held, [(0, BEGIN)], "reference")
