"""Translation quality of an encoder-decoder on local parallel text: BLEU and chrF by sacrebleu, with intervals.

A score of a corpus is no mean of its sentences' scores, so its standard error is that of scores of resampled sentences,
and of differences to another system on the same resamples (paired). Intervals of 95 % are Student's t of it: sentences
are taken as independent.

Letters: n sentences, R resamples.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeq.artifacts.evaluation import Score, Translation, TranslationScore
from moeq.artifacts.reading import parse_record, read_bounded
from moeq.errors import CorpusError, EvaluationError, missing
from moeq.folders import expanded
from moeq.models.forward import one_answer_each
from moeq.numerics import inference
from moeq.recipe import TranslationSection
from moeq.runtime.batch_pruning import pruning_if_alone

TEXT_BYTES = 1 << 30  # the largest file of sentences that is read
KEY = "eval.translation"
Hypotheses = Mapping[int, Sequence[str]]  # by the number of beams


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Parallel text: line i of both is one sentence."""

    sources: tuple[str, ...]
    references: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sources)


def read_pairs(section: TranslationSection) -> Pairs:
    """The section's parallel text; CorpusError naming file and line for what is missing, empty or not parallel."""
    path = expanded(section.source)
    target = path if section.target is None else expanded(section.target)
    if section.target is None:
        rows = _rows(path, section)
    else:
        sources, references = _lines(path), _lines(target)
        if len(sources) != len(references):
            raise CorpusError(
                f"{len(references)} lines for the {len(sources)} of {path}",
                where=str(target),
                do="give one reference line for every source line",
            )
        rows = [(number, *pair) for number, pair in enumerate(zip(sources, references, strict=True), 1)]
    for file, side in ((path, 1), (target, 2)):
        empty = next((row[0] for row in rows if not str(row[side]).strip()), None)
        if empty is not None:
            raise CorpusError("an empty sentence", where=f"{file}, line {empty}", do="drop the pair from both sides")
    if not rows:
        raise CorpusError("no sentences in it", where=str(path), do="give parallel text")
    count = section.sentences
    if count is not None and count > len(rows):
        raise CorpusError(
            f"{len(rows)} pairs, {count} are wanted", where=str(path), do=f"lower {KEY}.sentences or give more text"
        )
    return Pairs(sources=tuple(row[1] for row in rows[:count]), references=tuple(row[2] for row in rows[:count]))


def _text(path: Path) -> str:
    try:
        return read_bounded(path, TEXT_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise missing(path, f"give the path of parallel text in {KEY}") from None
    except (OSError, ValueError) as error:
        raise CorpusError(f"cannot be read ({error})", where=str(path), do="give a file of UTF-8 text") from None


def _lines(path: Path) -> list[str]:
    """Lines as every tool for parallel text counts them: only line feeds end one."""
    lines = _text(path).split("\n")
    return [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _rows(path: Path, section: TranslationSection) -> list[tuple[int, str, str]]:
    """Line, source and reference of the rows of a .tsv or .jsonl file."""
    names = (section.source_field, section.target_field)
    if path.suffix == ".jsonl":
        rows = [(number, _record(path, number, line)) for number, line in enumerate(_lines(path), 1)]
    elif path.suffix == ".tsv":
        try:
            cells = [*csv.reader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)]
        except csv.Error as error:
            raise CorpusError(
                f"not lines of cells ({error})",
                where=str(path),
                do="save it as text with one row a line, cells apart by tabs",
            ) from None
        named = bool(cells) and set(names) <= set(cells[0])
        columns = cells[0] if named else list(names)
        rows = [(number, dict(zip(columns, row, strict=False))) for number, row in enumerate(cells[named:], 1 + named)]
    else:
        raise CorpusError("source lines without references", where=str(path), do=f"set {KEY}.target")
    for number, row in rows:
        missing = next((name for name in names if not isinstance(row.get(name), str)), None)
        if missing is not None:
            there = ", ".join(map(str, row)) or "nothing"
            raise CorpusError(
                f"no text {missing!r} (there are: {there})",
                where=f"{path}, line {number}",
                do=f"set {KEY}.source_field and target_field, or correct the line",
            )
    return [(number, row[names[0]], row[names[1]]) for number, row in rows]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    where, do = f"{path}, line {number}", "write it as one JSON object, or drop it"
    try:
        record = parse_record(line)
    except ValueError as error:
        raise CorpusError(f"not a JSON object ({error})", where=where, do=do) from None
    if not isinstance(record, dict):
        raise CorpusError("not a JSON object", where=where, do=do)
    return record


def check_model(config: Any, tokenizer: Any, name: str) -> None:
    """EvaluationError for a model that is no encoder-decoder, or whose tokenizer cannot pad a batch."""
    if not config.is_encoder_decoder:
        raise EvaluationError(
            f"translation needs an encoder-decoder, this is a decoder alone ({config.model_type})",
            where=name,
            do=f"set {KEY}: null",
        )
    if tokenizer.pad_token_id is None:
        raise EvaluationError("the tokenizer has no padding token", where=name, do="set one in tokenizer_config.json")


def translate(
    model: Any,
    tokenizer: Any,
    sources: Sequence[str],
    section: TranslationSection,
    device: torch.device,
    advance: Callable[[], None],
) -> dict[int, list[str]]:
    """{beams: translation of every source}, likeliest tokens alone; `advance` is called once a batch and width.

    Sentences of a batch that are finished reach no expert any more. Raises EvaluationError when a source has no tokens.
    """
    by_beams: dict[int, list[str]] = {}
    texts = [f"{section.prefix}{source}" for source in sources]
    for beams in section.beams:
        translations = by_beams[beams] = []
        for start in range(0, len(texts), section.batch_size):
            batch = tokenizer(texts[start : start + section.batch_size], return_tensors="pt", padding=True)
            _check_tokens(batch["attention_mask"], start)
            with torch.no_grad(), pruning_if_alone(model), one_answer_each(model, tokenizer) as more:
                ids = model.generate(
                    input_ids=batch["input_ids"].to(device),
                    attention_mask=batch["attention_mask"].to(device),
                    num_beams=beams,
                    do_sample=False,
                    max_new_tokens=section.max_new_tokens,
                    **more,
                )
            translations += [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
            advance()
    return by_beams


def _check_tokens(mask: Tensor, start: int) -> None:
    """EvaluationError naming the first source [B, T], counted from `start`, that has no tokens."""
    empty = (~mask.bool().any(1)).nonzero()
    if len(empty):
        raise EvaluationError("a source without tokens", where=f"{KEY}, pair {start + int(empty[0]) + 1}", do="drop it")


def score(systems: Mapping[str, Hypotheses], baseline: str, pairs: Pairs, section: TranslationSection) -> Translation:
    """BLEU and chrF of every system at every number of beams, with their differences to the baseline's.

    The same sentences are resampled for all systems; the seed is fixed, so that equal translations give equal figures.
    """
    from sacrebleu.metrics import BLEU, CHRF

    metrics: dict[str, Any] = {"bleu": BLEU(tokenize=section.tokenize), "chrf": CHRF()}
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(len(pairs), np.full(len(pairs), 1 / len(pairs)), size=section.resamples)
    scores: dict[str, dict[int, dict[str, _Scores]]] = {
        system: {
            beams: {name: _Scores.of(metric, texts, pairs, drawn) for name, metric in metrics.items()}
            for beams, texts in hypotheses.items()
        }
        for system, hypotheses in systems.items()
    }
    return Translation(
        sentences=len(pairs),
        baseline=baseline,
        signatures={name: str(metric.get_signature()) for name, metric in metrics.items()},
        scores=tuple(
            TranslationScore(
                name=system,
                beams=beams,
                **{
                    name: own.against(scores[baseline][beams][name] if system != baseline else None)
                    for name, own in by_metric.items()
                },
            )
            for system, by_beams in scores.items()
            for beams, by_metric in by_beams.items()
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """A metric's score of so many sentences, and of every resample of them [R]."""

    score: float
    resampled: NDArray[np.float64]
    sentences: int

    @classmethod
    def of(cls, metric: Any, texts: Sequence[str], pairs: Pairs, drawn: NDArray[np.int64]) -> _Scores:
        """drawn: how often [R, n] each sentence is in each resample.

        A metric's counts of single sentences are not public in sacrebleu; its own significance tests use them so.
        """

        def value(sums: NDArray[np.int64]) -> float:
            return float(metric._compute_score_from_stats(sums.tolist()).score)

        counts = np.array(metric._extract_corpus_statistics(texts, [pairs.references]))  # [n, counts of a sentence]
        resampled = np.array([value(sums) for sums in drawn @ counts])
        return cls(score=value(counts.sum(0)), resampled=resampled, sentences=len(pairs))

    def against(self, other: _Scores | None) -> Score:
        """As the artifact has it; other: the baseline's, None for the baseline itself."""
        low, high = self._interval(self.score, self.resampled)
        if other is None:
            return Score(score=self.score, low=low, high=high)
        difference = self.score - other.score
        ends = self._interval(difference, self.resampled - other.resampled)
        return Score(
            score=self.score,
            low=low,
            high=high,
            difference=difference,
            difference_low=ends[0],
            difference_high=ends[1],
        )

    def _interval(self, value: float, resampled: NDArray[np.float64]) -> tuple[float, float] | tuple[None, None]:
        """Of 95 %; none of too few sentences."""
        if self.sentences < inference.FEWEST_ITEMS:
            return None, None
        variance = resampled.var(ddof=1) * self.sentences / (self.sentences - 1)  # a resample's is that of n - 1
        half = inference.half_width(variance, self.sentences - 1)
        return value - float(half), value + float(half)
