"""What the kernels' compiler and vLLM must not see of each other."""

from __future__ import annotations

from typing import Any


def hide() -> None:
    """Have llvmlite's handle of its library refuse names of Python's own.

    It answers every name with a function, `__dict__` too. As a worker begins, vLLM for CPUs (0.32) takes that for the
    namespace of a kernel's owner and fails, whoever has imported llvmlite by then.
    """
    from llvmlite.binding import ffi

    kind: Any = type(ffi.lib)
    answer = kind.__getattr__
    if getattr(answer, "__module__", None) == __name__:
        return

    def without_special(handle: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(handle, name)

    kind.__getattr__ = without_special
