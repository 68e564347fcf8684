"""Registers moeq with transformers as soon as transformers is imported, and not before (it takes seconds)."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

REGISTRATIONS = {  # transformers' modules that hold registries, and moeq's that register there when they are imported
    "transformers.quantizers.auto": "moeq.runtime.hf_quantizer",
    "transformers.models.auto.configuration_auto": "moeq.integers.vit.configuration",
    "transformers.models.auto.modeling_auto": "moeq.integers.vit.modeling",
}


class _ThenRegister(importlib.abc.Loader):
    """Loads a module with its own loader, then imports moeq's registration."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        importlib.import_module(REGISTRATIONS[module.__name__])


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of one module; every other module is left to the finders behind it."""

    def __init__(self, trigger: str) -> None:
        self.trigger = trigger

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.trigger:
            return None
        sys.meta_path.remove(self)  # once; the real finders answer the nested look-up
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


def install() -> None:
    """Register now where transformers' registries are loaded already, otherwise when they are."""
    waiting = {finder.trigger for finder in sys.meta_path if isinstance(finder, _Finder)}
    for trigger, registration in REGISTRATIONS.items():
        if trigger in sys.modules:
            importlib.import_module(registration)
        elif trigger not in waiting:
            sys.meta_path.insert(0, _Finder(trigger))
