"""Translating with every variant that eval measures, where the recipe asks for it (eval.translation)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.evaluation import Translation
from moeq.artifacts.files import make_directory, write_text
from moeq.evaluation import translation
from moeq.folders import expanded
from moeq.stages.context import Context

NAME = "translations.jsonl"


class Translating:
    """Collects what every variant makes of the recipe's parallel text; nothing where there is none."""

    def __init__(self, context: Context) -> None:
        self.context, self.section = context, context.recipe.eval.translation
        self._translated: dict[str, dict[int, list[str]]] = {}

    @cached_property
    def pairs(self) -> translation.Pairs:
        assert self.section is not None, "only asked for where there is some"
        return translation.read_pairs(self.section)

    @property
    def batches(self) -> int:
        """How often `add` advances."""
        if self.section is None:
            return 0
        return len(self.section.beams) * -(-len(self.pairs) // self.section.batch_size)

    def add(self, name: str, model: Any, advance: Callable[[], None]) -> None:
        """Translate with one variant."""
        if self.section is not None:
            context = self.context
            self._translated[name] = translation.translate(
                model, context.model.tokenizer, self.pairs.sources, self.section, context.model.device, advance
            )

    def last(self) -> dict[int, list[str]] | None:
        """What the last variant made of it, by beams; None where nothing is translated."""
        return next(reversed(self._translated.values()), None)

    def take(self, name: str, translated: dict[int, list[str]] | None) -> None:
        """Have what another process made of it with a variant."""
        if translated is not None:
            self._translated[name] = translated

    def result(self, baseline: str) -> Translation | None:
        """The scores of all variants, None where nothing was translated; the translations go beside the evaluation."""
        path = self.context.directory("eval") / NAME
        if self.section is None:
            path.unlink(missing_ok=True)
            return None
        make_directory(path.parent)
        write_text(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in self._rows()))
        return translation.score(self._translated, baseline, self.pairs, self.section)

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Every sentence with its reference and {variant: {beams: translation}}."""
        for index, (source, reference) in enumerate(zip(self.pairs.sources, self.pairs.references, strict=True)):
            yield {
                "source": source,
                "reference": reference,
                "translations": {
                    name: {str(beams): texts[index] for beams, texts in by_beams.items()}
                    for name, by_beams in self._translated.items()
                },
            }


def check_translation(context: Context) -> None:
    """CorpusError for text that is missing or not parallel, EvaluationError for a model that cannot translate."""
    section = context.recipe.eval.translation
    if section is not None:
        translation.check_model(context.model.skeleton.config, context.model.tokenizer, context.model_name)
        translation.read_pairs(section)


def text_digests(context: Context) -> list[str] | None:
    """SHA-256 of the files of parallel text; None where there are none."""
    section = context.recipe.eval.translation
    if section is None:
        return None
    names = [name for name in (section.source, section.target) if name is not None]
    return [digest_of_file(expanded(name)) for name in names]


def figures(result: Translation) -> dict[str, dict[str, float]]:
    """{variant, beams: scores and what they lose} of the summary."""
    return {
        f"{scored.name}, beam {scored.beams}": {
            name: value
            for metric, score in (("bleu", scored.bleu), ("chrf", scored.chrf))
            for name, value in ((metric, score.score), (f"{metric}_difference", score.difference))
            if value is not None
        }
        for scored in result.scores
    }
