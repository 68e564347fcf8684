"""Arithmetic word problems in the form of GSM8K, drawn from the project's own templates in `math_templates.toml`.

A problem reads `Question: ...`, `Answer: ...` with one calculation `<<6*7=42>>` a line, and `#### result`. The
templates of calibration and evaluation are disjoint; the head of the template file explains their notation.
"""

from __future__ import annotations

import random
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from moeq.errors import CorpusError

MAX_DRAWS = 20_000  # a template whose results are whole for fewer than about one draw in 5,000 is a mistake

PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}
CHOICE = re.compile(r"\[([^][]*)\]")
FIELD = re.compile(r"\{(\w+)\}")
CALCULATION = re.compile(r"<(\$?)([\w+*/-]+)=(\w)>")
TERM = re.compile(r"[a-z]\b")


@dataclass(frozen=True, kw_only=True)
class Template:
    """One kind of word problem; see the head of `math_templates.toml`."""

    group: str
    index: int
    numbers: dict[str, tuple[int, int]]
    words: dict[str, list[str]]
    question: str
    steps: list[str]
    answer: str
    pronouns: dict[str, tuple[str, str, str]]  # of every name: she, her, her

    @property
    def name(self) -> str:
        return f"{self.group}-{self.index:02d}"


def load_templates(group: str) -> list[Template]:
    """The templates of `group`, "calibration" or "evaluation"."""
    with Path(__file__).with_name("math_templates.toml").open("rb") as file:
        table = tomllib.load(file)
    pronouns = {name: PRONOUNS[kind] for kind, names in table["names"].items() for name in names}
    return [Template(group=group, index=i, pronouns=pronouns, **row) for i, row in enumerate(table[group])]


def _evaluate(expression: str, values: dict[str, int]) -> int:
    """Value of `a*b+c` with the usual precedence; raises ValueError unless every division comes out even."""
    total = 0
    for sign, product in re.findall(r"([+-]?)([^+-]+)", expression):
        factors = re.findall(r"([*/]?)(\w+)", product)
        value = 1
        for operator, term in factors:
            number = values[term] if term in values else int(term)
            if operator == "/" and value % number:
                raise ValueError(f"{expression} is no whole number")
            value = value // number if operator == "/" else value * number
        total += -value if sign == "-" else value
    return total


def _draw_numbers(template: Template, rng: random.Random) -> dict[str, int]:
    """Numbers for the template and every result, all whole and positive."""
    for _ in range(MAX_DRAWS):
        values = {name: rng.randint(low, high) for name, (low, high) in template.numbers.items()}
        try:
            for _, expression, result in CALCULATION.findall(" ".join(template.steps)):
                values[result] = _evaluate(expression, values)
                if values[result] < 1:
                    raise ValueError(f"{expression} is not positive")
        except ValueError:
            continue
        return values
    raise CorpusError("no draw of the numbers gives whole positive results", where=f"math template {template.name}")


def _calculation(match: re.Match[str], values: dict[str, int], gap: str) -> str:
    dollar, expression, result = match.groups()
    inner = TERM.sub(lambda term: str(values[term.group()]), expression)
    shown = re.sub(r"([+*/-])", rf"{gap}\1{gap}", inner)
    return f"{shown}{gap}={gap}{dollar}<<{inner}={values[result]}>>{values[result]}"


def _sentence_case(text: str) -> str:
    return re.sub(r"(^|[.?!] )([a-z])", lambda match: match.group(1) + match.group(2).upper(), text)


def word_problem(template: Template, rng: random.Random) -> str:
    """One problem, ending in a newline."""
    values = _draw_numbers(template, rng)
    names = rng.sample(sorted(template.pronouns), 3)
    he, him, his = template.pronouns[names[0]]
    fields = {name: rng.choice(words) for name, words in template.words.items()}
    fields |= {"N1": names[0], "N2": names[1], "N3": names[2], "he": he, "him": him, "his": his}
    fields |= {"He": he.capitalize(), "His": his.capitalize()}
    fields |= {name: str(value) for name, value in values.items()}
    gap = rng.choice(("", " "))

    def render(text: str) -> str:
        text = CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), text)
        text = CALCULATION.sub(lambda match: _calculation(match, values, gap), text)
        return _sentence_case(FIELD.sub(lambda match: fields[match.group(1)], text))

    steps = "\n".join(render(step) for step in template.steps)
    return f"Question: {render(template.question)}\nAnswer: {steps}\n#### {values[template.answer]}\n"
