"""Coverage-guided fuzzing of what moeq reads, beside test_fuzz.py: needs `pip install '.[fuzz]'`.

    python tests/robustness/fuzz_atheris.py TARGET CHECKPOINT WORK -runs=100000

TARGET is one of `fuzzing.TARGETS`, CHECKPOINT a checkpoint that moeq exported, WORK a folder that does not exist.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["moeq.artifacts", "moeq.bounded", "moeq.recipe", "moeq.models.source", "json"]
):
    from robustness.fuzzing import NUMBERS, Fuzzed


def main() -> None:
    target, checkpoint, work, *options = sys.argv[1:]
    fuzzed = Fuzzed(Path(work), Path(checkpoint))
    corpus = Path(work) / "corpus"
    corpus.mkdir()
    (corpus / "valid").write_bytes(fuzzed.valid(target))
    for seed in range(0 if target in NUMBERS else 200):
        (corpus / str(seed)).write_bytes(fuzzed.mutated(target, seed))
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: fuzzed.run(target, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
