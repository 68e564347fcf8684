"""The program: `moeq`, or `python -m moeq`."""

import gc
import os
import signal
from typing import Any


def main() -> None:
    """The command line. No garbage is looked for in what it imports, now or later: that takes as long as to import. An
    interrupt meanwhile has nothing to take back."""
    gc.disable()
    if heard := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    from moeq.cli import main as run

    gc.freeze()
    gc.enable()
    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _interrupted(*_: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
