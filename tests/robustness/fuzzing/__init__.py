"""What is fuzzed: every entry point that reads what others may have written, and how valid inputs are changed.

`TARGETS` maps a name to a class: its valid input, how that is changed, and the reading, which refuses with one of
moeq's own errors (one line that says where and what to do), or gives what is sound, as the class checks; within 5 s,
and within memory where the reader promises it. Hypothesis (test_fuzz.py), atheris (fuzz_atheris.py) and the counted run
(benchmarks/fuzzing.py) use the same ones. A target is added in one place: a subclass of `Target` with a name.

artifacts: JSON that stages write; tensors: safetensors, GGUF, profiles; tables: Parquet, cells, sums; settings:
recipes, hardware, options; checkpoints: configurations, foreign formats, tokenizers, cards; texts: corpora and images;
integers: integer forwards; claims: provenance, signatures; numbers: packed codes. readers.py: which function of moeq is
reached by which target.
"""

from robustness.fuzzing import (
    artifacts,
    checkpoints,
    claims,
    integers,
    numbers,
    readers,
    settings,
    tables,
    tensors,
    texts,
)
from robustness.fuzzing.target import SECONDS, SPARE_BYTES, TARGETS, Fuzzed, Target

__all__ = [
    "FILES", "NUMBERS", "SECONDS", "SPARE_BYTES", "TARGETS", "Fuzzed", "Target", "artifacts", "checkpoints", "claims",
    "integers", "numbers", "readers", "settings", "tables", "tensors", "texts",
]  # fmt: skip
NUMBERS = tuple(name for name, target in TARGETS.items() if issubclass(target, numbers.NumbersTarget))
FILES = tuple(name for name in TARGETS if name not in NUMBERS)
