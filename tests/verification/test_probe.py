"""What the probe does of itself; the runtimes that it loads with are tested with their exporters."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moeq.verification import probe


@pytest.mark.parametrize("tiles", [True, False])
def test_llama_cpp_s_form_for_amx_is_left_out_and_that_is_said(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, inner = ModuleType("llama_cpp"), SimpleNamespace()
    usual = lambda: SimpleNamespace(use_extra_bufts=True)  # noqa: E731
    fake.llama_model_default_params = inner.llama_model_default_params = usual  # type: ignore[attr-defined]
    loaded: list[bool] = []

    class Llama:
        scores = SimpleNamespace()

        def __init__(self, path: str, **settings: Any) -> None:
            loaded.append(inner.llama_model_default_params().use_extra_bufts)

        def reset(self) -> None: ...

        def eval(self, row: list[int]) -> None:
            import numpy

            self.scores = numpy.zeros((len(row), 3))

        def close(self) -> None: ...

    fake.llama_cpp, fake.Llama, fake.__version__ = inner, Llama, "1.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setattr(probe, "_flags", lambda: ["avx2", *([probe.TILES] if tiles else [])])
    request: dict[str, Any] = {
        "checkpoint": "there", "loading": {"gguf_file": "model.gguf"}, "inputs": {"input_ids": [[1, 2], [3, 4]]},
    }  # fmt: skip
    logits, _ = probe.llama_logits(request)
    assert logits.shape == (2, 2, 3)
    assert loaded == [not tiles]
    assert request.get("versions") == ({"llama_cpp": "1.2 without its form for AMX"} if tiles else None)
