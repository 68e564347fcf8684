"""What `print(model)` says of packed modules: sizes, widths and encoding, of all experts of a layer in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from moeq.artifacts.assignment import FULL
from moeq_kernels.widths import Encoding


def of_linear(inputs: int, outputs: int, bits: int, encoding: Encoding, biased: bool) -> str:
    """As nn.Linear's, with the code bits and how codes stand for values; of a dense matrix its bits alone."""
    sizes = f"in_features={inputs}, out_features={outputs}, bias={biased}, bits={bits}"
    return sizes if bits == FULL else f"{sizes}, {of_encoding(encoding)}"


def of_encoding(encoding: Encoding) -> str:
    """An encoding's fields that are not the rule; trellis codes have neither groups nor zero points to tell of."""
    said = encoding.describe()
    if encoding.state_bits:
        said = {name: value for name, value in said.items() if name not in ("group_size", "symmetric")}
    return ", ".join(f"{name}={value!r}" for name, value in said.items())


def of_experts(experts: Sequence[Mapping[str, int]], encoding: Encoding) -> str:
    """A layer's experts, each by the code bits of its matrices, none of a dropped one: how many matrices have which."""
    dropped = sum(not one for one in experts)
    lines = [
        ", ".join([f"{len(experts)} experts", *([f"{dropped} dropped"] if dropped else []), of_encoding(encoding)])
    ]
    for name in dict.fromkeys(name for one in experts for name in one):
        widths = sorted(Counter(one[name] for one in experts if name in one).items())
        lines.append(f"{name}: {', '.join(f'{count} of {bits} bits' for bits, count in widths)}")
    return "\n".join(lines)


def within(name: str, said: str, children: Iterable[tuple[str, nn.Module]]) -> str:
    """A module's text, as torch writes it: what is said of it, then its children, indented by two."""
    lines = [*said.splitlines(), *(f"({child}): {module!r}" for child, module in children)]
    inner = "\n".join(lines).replace("\n", "\n  ")
    return f"{name}(\n  {inner}\n)"
