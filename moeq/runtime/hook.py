"""How a checkpoint brings moeq in where nobody imports it: `from_pretrained(..., trust_remote_code=True)`.

transformers reads the configuration before it looks up the quantization method, and runs the file that `auto_map` names
for it. That file, two lines, imports moeq, which registers the method, and hands back to transformers' own class. Where
code is not trusted transformers ignores the entry, and the guards of the packed modules make the load fail.
"""

from __future__ import annotations

import hashlib
from typing import Any

from moeq.models.side_files import HOOK_FILE as HOOK_FILE

HOOK_CLASS = "RegisteredConfig"
HOOK_TEXT = f"import moeq\nfrom moeq.runtime.hook import {HOOK_CLASS}\n"
HOOK_SHA256 = hashlib.sha256(HOOK_TEXT.encode()).hexdigest()
_ENTRY = "AutoConfig"
_MODEL_CODE = (_ENTRY, "AutoModel")
_REFERENCE = f"{HOOK_FILE.removesuffix('.py')}.{HOOK_CLASS}"


class RegisteredConfig:
    """Stands where transformers expects the class of a checkpoint's configuration; makes that of the family."""

    @staticmethod
    def register_for_auto_class(auto_class: str = _ENTRY) -> None:
        """Nothing: the family's class is transformers' own, and no copy of its code goes into what is saved."""

    @staticmethod
    def from_pretrained(path: Any, **options: Any) -> Any:
        """The family's configuration, or what AutoConfig gives with `return_unused_kwargs`."""
        from transformers import AutoConfig

        own = ("_from_auto", "name_or_path", "trust_remote_code")
        return AutoConfig.from_pretrained(
            path, trust_remote_code=False, **{name: value for name, value in options.items() if name not in own}
        )


def has_own_code(model: Any) -> bool:
    """Whether a model is made by code that its checkpoint brings along, which takes the place of the hook."""
    return not type(model).__module__.startswith(("transformers.", "moeq."))


def hooked(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the hook, and without code of the original checkpoint's own for model and configuration.

    The packed tensors are those of transformers' class: the original's own class would not find its experts.
    """
    kept = {name: code for name, code in config.get("auto_map", {}).items() if not name.startswith(_MODEL_CODE)}
    return config | {"auto_map": kept | {_ENTRY: _REFERENCE}}


def unhooked(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the hook, for a checkpoint in another format."""
    kept = {name: code for name, code in config.get("auto_map", {}).items() if code != _REFERENCE}
    rest = {name: value for name, value in config.items() if name != "auto_map"}
    return rest | {"auto_map": kept} if kept else rest


def forget_hook(config: Any) -> None:
    """Take the hook out of a loaded model's configuration: `save_pretrained` would name the file but not write it."""
    auto_map = getattr(config, "auto_map", None) or {}
    if auto_map.get(_ENTRY) != _REFERENCE:
        return
    left = {name: code for name, code in auto_map.items() if name != _ENTRY}
    if left:
        config.auto_map = left
    else:
        del config.auto_map
