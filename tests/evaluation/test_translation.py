"""Parallel text and its errors; scores are sacrebleu's, intervals are paired."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import sacrebleu
import torch

from moeq.errors import CorpusError, EvaluationError, MissingError, RecipeError
from moeq.evaluation import translation
from moeq.evaluation.translation import Pairs, read_pairs, score
from moeq.recipe import TranslationSection, load_recipe

REFERENCES = tuple(f"the {word} cat sat on the {word} mat at {number}" for number, word in enumerate("abcdefghij"))
WORSE = tuple(text.replace("sat on", "was on") if index % 2 else text for index, text in enumerate(REFERENCES))
WORST = tuple(text.split(" at ")[0].upper() for text in REFERENCES)
PAIRS = Pairs(sources=REFERENCES, references=REFERENCES)


def section(source: Path | str, **more: object) -> TranslationSection:
    return TranslationSection.model_validate({"source": str(source), **more})


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_lines_are_parallel_whatever_ends_them(tmp_path: Path) -> None:
    source = write(tmp_path / "a.en", "\ufeffone\ntwo\u2028and a half\x0b\nthree")
    target = write(tmp_path / "a.de", "eins\r\nzwei\r\ndrei\r\n")
    found = read_pairs(section(source, target=str(target)))
    assert found.sources == ("one", "two\u2028and a half\x0b", "three")
    assert found.references == ("eins", "zwei", "drei")
    assert read_pairs(section(source, target=str(target), sentences=2)).references == ("eins", "zwei")


def test_pairs_in_one_file(tmp_path: Path) -> None:
    wanted = Pairs(sources=("one", 'the "two"'), references=("eins", "zwei"))
    bare = write(tmp_path / "bare.tsv", 'one\teins\nthe "two"\tzwei\n')
    named = write(tmp_path / "named.tsv", 'id\tde\ten\n1\teins\tone\n2\tzwei\tthe "two"\n')
    rows = write(
        tmp_path / "rows.jsonl", '{"en": "one", "de": "eins"}\n{"en": "the \\"two\\"", "de": "zwei", "x": 1}\n'
    )
    assert read_pairs(section(bare)) == wanted
    for path in (named, rows):
        assert read_pairs(section(path, source_field="en", target_field="de")) == wanted


@pytest.mark.parametrize(
    ("name", "text", "target", "message"),
    [
        ("a.en", "one\ntwo\n", "eins\n", r"a\.de: 1 lines for the 2 of .*a\.en; give one reference"),
        ("a.en", "one\n \nthree\n", "eins\nzwei\ndrei\n", r"a\.en, line 2: an empty sentence; drop the pair"),
        ("a.en", "one\ntwo\n", "eins\n\n", r"a\.de, line 2: an empty sentence"),
        ("a.en", "", "", r"a\.en: no sentences in it"),
        ("a.en", "one\n", None, r"a\.en: source lines without references; set eval.translation.target"),
        ("a.tsv", "one\teins\ntwo\n", None, r"a\.tsv, line 2: no text 'target' \(there are: source\)"),
        ("a.tsv", "one\teins\n\tzwei\n", None, r"a\.tsv, line 2: an empty sentence"),
        ("a.jsonl", '{"source": "one", "target": "eins"}\n[]\n', None, r"a\.jsonl, line 2: not a JSON object"),
        (
            "a.jsonl",
            '{"source": "one", "target": 1}\n',
            None,
            r"line 1: no text 'target' \(there are: source, target\)",
        ),
        ("a.jsonl", '{"source": "one"\n', None, r"line 1: not a JSON object"),
        ("a.en", "one\n", "\xff", None),
    ],
)
def test_text_that_cannot_be_translated(
    tmp_path: Path, name: str, text: str, target: str | None, message: str | None
) -> None:
    source = write(tmp_path / name, text)
    more = {}
    if target is not None:
        path = tmp_path / "a.de"
        path.write_bytes(target.encode("latin-1") if message is None else target.encode())
        more = {"target": str(path)}
    with pytest.raises(CorpusError, match=message or "cannot be read .*give a file of UTF-8 text") as caught:
        read_pairs(section(source, **more))
    assert "\n" not in str(caught.value)


def test_files_and_sentences_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"none\.en: no such file or directory; give .* in eval.translation"):
        read_pairs(section(tmp_path / "none.en", target="none.de"))
    source = write(tmp_path / "a.tsv", "one\teins\n")
    with pytest.raises(CorpusError, match=r"1 pairs, 2 are wanted; lower eval\.translation\.sentences"):
        read_pairs(section(source, sentences=2))
    with pytest.raises(RecipeError, match="beams must name none twice"):
        load_recipe(None, [f"eval.translation={{source: {source}, beams: [1, 1]}}"])


def test_scores_are_those_of_sacrebleu() -> None:
    systems = {"original": {1: WORSE, 2: REFERENCES}, "int4": {1: WORST, 2: REFERENCES}}
    found = score(systems, "original", PAIRS, section("x"))
    by_name = {(one.name, one.beams): one for one in found.scores}
    for (name, beams), one in by_name.items():
        texts, references = systems[name][beams], [REFERENCES]
        assert one.bleu.score == pytest.approx(sacrebleu.corpus_bleu(texts, references).score)
        assert one.chrf.score == pytest.approx(sacrebleu.corpus_chrf(texts, references).score)
        assert one.bleu.low <= one.bleu.score <= one.bleu.high
    lost = by_name["int4", 1].bleu
    assert lost.difference == pytest.approx(lost.score - by_name["original", 1].bleu.score)
    assert lost.difference_low <= lost.difference <= lost.difference_high < 0
    same = by_name["int4", 2].chrf
    assert (same.difference, same.difference_low, same.difference_high) == (0, 0, 0)
    assert by_name["original", 1].bleu.difference is None
    assert found.signatures["bleu"].startswith("nrefs:1|case:mixed")
    assert (found.sentences, found.baseline) == (10, "original")
    assert score(systems, "original", PAIRS, section("x")) == found


def test_intervals_are_of_resampled_sentences() -> None:
    """Student's t of the standard error; against sentences drawn one by one."""
    found = score({"original": {1: WORSE}}, "original", PAIRS, section("x", resamples=4000)).scores[0].bleu
    generator = torch.Generator().manual_seed(5)
    drawn = []
    for _ in range(400):
        rows = torch.randint(10, (10,), generator=generator).tolist()
        drawn.append(sacrebleu.corpus_bleu([WORSE[i] for i in rows], [[REFERENCES[i] for i in rows]]).score)
    half = 2.262 * float(torch.tensor(drawn).std()) * (10 / 9) ** 0.5
    assert (found.low, found.high) == pytest.approx((found.score - half, found.score + half), abs=0.15 * half)


def test_few_sentences_have_no_interval() -> None:
    pairs = Pairs(sources=PAIRS.sources[:7], references=PAIRS.references[:7])
    found = score({"original": {1: WORSE[:7]}, "int4": {1: WORST[:7]}}, "original", pairs, section("x")).scores[1].bleu
    assert found.difference is not None
    assert (found.low, found.high, found.difference_low, found.difference_high) == (None, None, None, None)


def test_models_and_sources_that_cannot_be_translated() -> None:
    decoder = SimpleNamespace(is_encoder_decoder=False, model_type="mixtral")
    with pytest.raises(EvaluationError, match=r"m: translation needs an encoder-decoder, this is .*alone \(mixtral\)"):
        translation.check_model(decoder, None, "m")
    both = SimpleNamespace(is_encoder_decoder=True, model_type="t5")
    with pytest.raises(EvaluationError, match="no padding token"):
        translation.check_model(both, SimpleNamespace(pad_token_id=None), "m")
    mask = torch.tensor([[1, 1], [0, 0]])
    speaker = lambda *_, **__: {"input_ids": mask, "attention_mask": mask}  # noqa: E731
    with pytest.raises(EvaluationError, match=r"eval\.translation, pair 2: a source without tokens"):
        translation.translate(None, speaker, ["a", ""], section("x"), torch.device("cpu"), lambda: None)
