"""The program: `moeq`, or `python -m moeq`."""

import gc


def main() -> None:
    """The command line. No garbage is looked for in what it imports, now or later: that takes as long as to import."""
    gc.disable()
    from moeq.cli import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
