"""What several threads may ask for at the same time, and one of them makes."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

MAKING = threading.RLock()  # held while anything is made whose address is kept

if TYPE_CHECKING:
    made_once = cached_property
else:

    class made_once(cached_property):
        """A cached property that one thread makes, and all have: Python's own is made by each that asks from 3.12 on,
        and what the first has taken the address of would go."""

        def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            with MAKING:
                return super().__get__(instance, owner)
