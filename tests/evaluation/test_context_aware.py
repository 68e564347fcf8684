"""Context-aware evaluation: HFLM's own numbers where all experts are exact, and answers that no batch changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from replicas_made import Made, losses_of
from tiny_models import save_tiny

from moeq.errors import EvaluationError, RecipeError
from moeq.evaluation.context_options import ContextOptions, check_replicas, chooser, of_result
from moeq.evaluation.harness_models import ContextAwareLM, StaticLM
from moeq.models import loading
from moeq.models.experts import set_expert_weights
from moeq.models.forward import cache_name
from moeq.models.source import open_source
from moeq.runtime.context_aware import ContextAwareModel, PrefillStore
from moeq.runtime.experts_by_row import Dequantized
from moeq.runtime.prefixes import can_join
from moeq.runtime.routing_counts import RoutingCounts, counting

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # of a log-likelihood in nats: float32 sums in another order
READINGS = [
    {"first_token": "decode"},
    {"first_token": "decode", "statistics": "before_last"},
    {"first_token": "prefill"},
]
NAMES = ["whole context", "before last", "first token of prefill"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "two", "green", "lamps", "while", "it", "rained"]


def sentence(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def requests(kind: str) -> list[Any]:
    """lm-eval requests of one kind: several answers a context, contexts of many lengths."""
    rng = random.Random(3)
    contexts = ["", *(sentence(rng, count) for count in (1, 4, 9, 14, 14))]
    if kind == "loglikelihood":
        answers = [" A", " B", " a lamp", " two green mats and more"]
        made = [(context, answer) for context in contexts for answer in answers]
    elif kind == "rolling":
        made = [(sentence(rng, count),) for count in (2, 25, 70, 150)]
    else:
        made = [(context, {"until": ["."], "max_gen_toks": 6}) for context in contexts[1:]]
    return [SimpleNamespace(args=one, task_name="made") for one in made]


@pytest.fixture(scope="module", params=["tiny_mixtral", "tiny_qwen"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any, Made]:
    source = open_source(str(request.getfixturevalue(request.param)))
    model: Any = loading.load_model(source, torch.float32, CPU)
    return model, loading.load_tokenizer(source), Made(model)


def runtime(loaded: tuple[Any, Any, Made], prefills: PrefillStore | None = None, **given: Any) -> ContextAwareModel:
    model, _, made = loaded
    options = ContextOptions.of(given)
    placed = None
    if options.prefill == "placed":
        placed = np.full((len(made.layers), made.layers[0].num_experts), 2)
    return ContextAwareModel(
        model,
        made.layers,
        Dequantized(made, model.dtype, CPU),
        chooser(options, losses_of(made.layers)),
        placed=placed,
        exact_start=options.first_token == "prefill",
        count_last=options.statistics == "context",
        prefills=prefills,
    )


def context_aware(loaded: tuple[Any, Any, Made], batch_size: Any = 4, **given: Any) -> ContextAwareLM:
    return ContextAwareLM(runtime(loaded, **given), loaded[1], batch_size=batch_size, max_length=64)


def answers(lm: Any, kind: str, asked: list[Any]) -> list[Any]:
    call = {"loglikelihood": lm.loglikelihood, "rolling": lm.loglikelihood_rolling, "generation": lm.generate_until}
    return call[kind](asked, disable_tqdm=True)


def assert_same(kind: str, found: list[Any], wanted: list[Any]) -> None:
    if kind == "generation":
        assert found == wanted
    elif kind == "rolling":
        assert found == pytest.approx(wanted, abs=TOLERANCE * 10)  # of up to 200 tokens
    else:
        assert [one[1] for one in found] == [one[1] for one in wanted]
        assert [one[0] for one in found] == pytest.approx([one[0] for one in wanted], abs=TOLERANCE)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["loglikelihood", "rolling", "generation"])
@pytest.mark.parametrize("reading", READINGS, ids=NAMES)
def test_all_experts_exact_is_hflm(loaded: tuple[Any, Any, Made], kind: str, reading: dict[str, str]) -> None:
    experts = loaded[2].layers[0].num_experts
    asked = requests(kind)
    plain = StaticLM(loaded[0], loaded[1], batch_size=4, max_length=64)
    mine = context_aware(loaded, gpu_experts=experts, **reading)
    found = answers(mine, kind, asked)
    assert_same(kind, found, answers(plain, kind, asked))
    coarse = context_aware(loaded, gpu_experts=0, code_bits="1", **reading)
    with pytest.raises(AssertionError):  # at one bit something changes
        assert_same(kind, answers(coarse, kind, asked), found)


@pytest.mark.parametrize("kind", ["loglikelihood", "generation"])
def test_windows_of_attention_have_no_place_for_pads(tmp_path: Path, kind: str) -> None:
    """Rows whose caches cannot lie beside each other run alone, to the same numbers."""
    source = open_source(str(save_tiny(tmp_path / "model", "mixtral", sliding_window=6)))
    model: Any = loading.load_model(source, torch.float32, CPU)
    sliding = model, loading.load_tokenizer(source), Made(model)
    mine = context_aware(sliding, gpu_experts=5)
    with mine.runtime.installed():
        assert not can_join([mine.runtime.prefill(list(range(4, 20))).cache])
    plain = StaticLM(*sliding[:2], batch_size=1, max_length=64)
    asked = requests(kind)
    assert_same(kind, answers(mine, kind, asked), answers(plain, kind, asked))


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["loglikelihood", "rolling", "generation"])
@pytest.mark.parametrize("statistics", ["context", "before_last"])
def test_batches_and_order_change_nothing(loaded: tuple[Any, Any, Made], kind: str, statistics: str) -> None:
    given = {"gpu_experts": 1, "code_bits": "2.5", "statistics": statistics}
    asked = requests(kind)
    wanted = answers(context_aware(loaded, 1, **given), kind, asked)
    for batch_size in (4, "auto"):
        assert_same(kind, answers(context_aware(loaded, batch_size, **given), kind, asked), wanted)
    order = list(range(len(asked)))
    random.Random(1).shuffle(order)
    shuffled = answers(context_aware(loaded, 3, **given), kind, [asked[place] for place in order])
    assert_same(kind, [shuffled[order.index(place)] for place in range(len(asked))], wanted)


@pytest.mark.cases(1)
def test_decisions_are_the_same_bits_in_any_batch(loaded: tuple[Any, Any, Made]) -> None:
    asked = requests("loglikelihood")
    found = []
    for batch_size, order in ((1, 1), (5, -1)):
        lm = context_aware(loaded, batch_size, gpu_experts=1, code_bits="2.5")
        seen: dict[bytes, np.ndarray] = {}
        decide = lm.runtime.choose
        lm.runtime.choose = lambda routing, decide=decide, seen=seen: seen.setdefault(
            routing.counts.tobytes() + routing.scores.tobytes(), decide(routing)
        )
        answers(lm, "loglikelihood", asked[::order])
        found.append(seen)
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 3, "contexts decide differently"
    assert all(np.array_equal(keys, found[1][key]) for key, keys in found[0].items())


@pytest.mark.cases(2)
@pytest.mark.parametrize("reading", READINGS, ids=NAMES)
def test_a_decision_is_what_the_model_runs_with(loaded: tuple[Any, Any, Made], reading: dict[str, str]) -> None:
    """The score of a continuation, against the model with the decided replicas written over its experts."""
    model, tokenizer, made = loaded
    mine = runtime(loaded, gpu_experts=1, code_bits="2", **reading)
    context, continuation = (tuple(tokenizer(text)["input_ids"]) for text in (sentence(random.Random(5), 9), " a mat"))
    with mine.installed():
        prefilled = mine.prefill(context)
        piece = mine.continuation(prefilled, [continuation])
        found = mine.score([piece])[0][0][0]
    wide = [int((row == 16).sum()) for row in piece.keys]
    assert wide == [1] * len(made.layers)
    with torch.no_grad():
        split = len(context) - (reading["first_token"] == "decode")
        before = model(torch.tensor([context[:split]]), use_cache=True)
        write(loaded, lambda layer, expert: int(piece.keys[layer, expert]))
        rest = [*context[split:], *continuation[:-1]]
        after = model(torch.tensor([rest]), **{cache_name(model): getattr(before, cache_name(model))}).logits
        write(loaded, lambda layer, expert: 16)
    logits = torch.cat([before.logits, after], 1)[0, len(context) - 1 :]
    wanted = logits.log_softmax(-1)[range(len(continuation)), list(continuation)]
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=TOLERANCE)


def write(loaded: tuple[Any, Any, Made], width: Callable[[int, int], int]) -> None:
    model, _, made = loaded
    for layer in made.layers:
        for expert in range(layer.num_experts):
            stored = made.expert(layer, expert, width(layer.index, expert))[0]
            values = {n: one if isinstance(one, torch.Tensor) else one.dequantize() for n, one in stored.items()}
            set_expert_weights(model, layer, expert, values)


@pytest.mark.cases(1)
@pytest.mark.parametrize("reading", READINGS, ids=NAMES)
def test_batched_answers_are_those_of_one_step_after_the_other(
    loaded: tuple[Any, Any, Made], reading: dict[str, str]
) -> None:
    """Contexts of several lengths, generated and scored together, against a plain model that decodes token by token."""
    mine = runtime(loaded, gpu_experts=1, code_bits="2", **reading)
    contexts = [list(range(5, 5 + length)) for length in (12, 1, 7, 2)]
    steps = [step_by_step(loaded, mine, context, reading, count=4) for context in contexts]
    with mine.installed():
        found = mine.generate(contexts, pad=0, max_new_tokens=4, do_sample=False, eos_token_id=None)
        prefilled = [mine.prefill(context) for context in contexts]
        pieces = [mine.continuation(one, [tokens]) for one, (tokens, _) in zip(prefilled, steps, strict=True)]
        scored = [answers[0] for answers in mine.score(pieces)]
    assert found == [tokens for tokens, _ in steps]
    for (logprobs, greedy), (_, wanted) in zip(scored, steps, strict=True):
        assert bool(greedy.all())
        assert logprobs.tolist() == pytest.approx(wanted, abs=TOLERANCE)


def step_by_step(
    loaded: tuple[Any, Any, Made], mine: ContextAwareModel, context: list[int], reading: dict[str, str], count: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities: the context in one pass of the plain model, then a token a pass."""
    model, _, made = loaded
    counted = context[:-1] or context if reading.get("statistics") == "before_last" else context
    tokens: list[int] = []
    logprobs: list[float] = []
    with torch.no_grad():
        with counting(model, made.layers) as routing:
            model(torch.tensor([counted]))
        keys, split = mine.choose(routing), len(context) - (reading["first_token"] == "decode")
        output = model(torch.tensor([context[:split]]), use_cache=True) if split else None
        write(loaded, lambda layer, expert: int(keys[layer, expert]))
        for _ in range(count):
            fed = [*context, *tokens][split:]
            if fed:
                cache = None if output is None else getattr(output, cache_name(model))
                output = model(torch.tensor([fed]), use_cache=True, **{cache_name(model): cache})
                split += len(fed)
            assert output is not None
            likely = output.logits[0, -1].log_softmax(-1)
            tokens.append(int(likely.argmax()))
            logprobs.append(float(likely.max()))
        write(loaded, lambda layer, expert: 16)
    return tokens, logprobs


@pytest.mark.cases(3)
@pytest.mark.parametrize("reading", READINGS, ids=NAMES)
def test_statistics_are_of_the_context_alone(loaded: tuple[Any, Any, Made], reading: dict[str, str]) -> None:
    """Every token that counts chooses top-k experts of every layer; no pad counts, and no token of an answer."""
    mine = runtime(loaded, gpu_experts=1, code_bits="2", **reading)
    top_k = loaded[0].config.num_experts_per_tok
    contexts = [[5, 6, 7], [9], [3] * 11]
    with mine.installed():
        prefilled = [mine.prefill(context) for context in contexts]
        mine.score([mine.continuation(one, [[4, 8], [4, 9]]) for one in prefilled])
    for context, one in zip(contexts, prefilled, strict=True):
        counted = max(1, len(context) - (reading.get("statistics") == "before_last"))
        assert (one.routing.counts.sum(1) == top_k * counted).all()
        assert np.allclose(one.routing.scores.sum(1), counted, atol=1e-5)


def test_readings_share_prefills_but_not_statistics(loaded: tuple[Any, Any, Made]) -> None:
    store, given = PrefillStore(), {"gpu_experts": 1, "code_bits": "2"}
    whole, before, exact = (runtime(loaded, store, **given, **reading) for reading in READINGS)
    found = []
    for mine in (whole, before, exact):
        with mine.installed():
            found.append(mine.prefill([5, 6, 7, 8]))
    assert found[0] is found[2]
    assert not np.array_equal(found[0].routing.counts, found[1].routing.counts)


def test_the_first_half_of_the_first_window_is_exact(loaded: tuple[Any, Any, Made]) -> None:
    mine = context_aware(loaded, gpu_experts=0, code_bits="1")
    plain = StaticLM(loaded[0], loaded[1], batch_size=1, max_length=64)
    tokens = loaded[1](sentence(random.Random(2), 60))["input_ids"][:41]
    found = next(mine.rolling([(tokens[:-1], tokens[1:])])).log_softmax(-1)[range(40), tokens[1:]]
    with torch.no_grad():
        logits = plain.model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    exact = logits[range(40), tokens[1:]]
    assert found[:20].tolist() == pytest.approx(exact[:20].tolist(), abs=TOLERANCE)
    assert (found[20:] - exact[20:]).abs().max() > 0.01, "the second half runs at one bit"


def test_a_placed_prefill_runs_with_the_placed_replicas(loaded: tuple[Any, Any, Made]) -> None:
    exact = runtime(loaded, gpu_experts=1, code_bits="2")
    placed = runtime(loaded, gpu_experts=1, code_bits="2", prefill="placed")
    context = list(range(5, 25))
    found = []
    for mine in (exact, placed):
        with mine.installed():
            found.append(mine.prefill(context).routing)
    assert not np.allclose(found[0].scores, found[1].scores)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "setting",
    [
        ("return_dict_in_generate", True),
        ("stop_strings", ["zzz"]),
        ("use_cache", False),
        ("cache_implementation", "static"),
        ("num_return_sequences", 2),
    ],
)
def test_answers_come_back_as_tokens(
    loaded: tuple[Any, Any, Made], monkeypatch: pytest.MonkeyPatch, setting: tuple[str, Any]
) -> None:
    """Whatever the model's generation_config.json says."""
    lm = context_aware(loaded, gpu_experts=1, code_bits="2")
    usual = answers(lm, "generation", requests("generation"))
    monkeypatch.setattr(loaded[0].generation_config, *setting)
    assert answers(lm, "generation", requests("generation")) == usual


@pytest.mark.cases(1)
def test_beams_of_generation_config_are_refused(loaded: tuple[Any, Any, Made], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = context_aware(loaded, gpu_experts=1, code_bits="2")
    monkeypatch.setattr(loaded[0].generation_config, "num_beams", 2)
    with pytest.raises(EvaluationError, match="generate with num_beams: 1"):
        answers(lm, "generation", requests("generation"))


@pytest.mark.cases(1)
def test_contexts_are_prefilled_once(loaded: tuple[Any, Any, Made], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = context_aware(loaded, gpu_experts=1, code_bits="2")
    ran: list[tuple[int, ...]] = []
    before = lm.runtime._prefill
    monkeypatch.setattr(lm.runtime, "_prefill", lambda tokens: ran.append(tokens) or before(tokens))
    asked = requests("loglikelihood")
    answers(lm, "loglikelihood", asked)
    assert len(ran) == len({request.args[0] for request in asked})


def test_too_long_a_request_is_one_line_or_cut(loaded: tuple[Any, Any, Made]) -> None:
    asked = [SimpleNamespace(args=(sentence(random.Random(1), 120), " mat"), task_name="made")]
    for lm in (context_aware(loaded, gpu_experts=1, code_bits="2"), StaticLM(loaded[0], loaded[1], max_length=64)):
        with pytest.raises(EvaluationError, match=r"request of \d+ tokens .* longer than the model's 64 positions"):
            answers(lm, "loglikelihood", asked)
    experts = loaded[2].layers[0].num_experts
    pair = (
        ContextAwareLM(runtime(loaded, gpu_experts=experts), loaded[1], max_length=64, truncate=True),
        StaticLM(loaded[0], loaded[1], max_length=64, truncate=True),
    )
    found, wanted = (answers(lm, "loglikelihood", asked) for lm in pair)
    assert_same("loglikelihood", found, wanted)
    assert [lm.cut["loglikelihood"] for lm in pair] == [1, 1]
    long = [SimpleNamespace(args=("a", asked[0].args[0]), task_name="made")]
    for lm in pair:
        with pytest.raises(EvaluationError, match=r"a continuation of \d+ tokens is longer"):
            answers(lm, "loglikelihood", long)
    named = [SimpleNamespace(args=("a cat", {"until": ["."], "max_new_tokens": 5}), task_name="made")]
    assert_same("generation", *(answers(lm, "generation", named) for lm in pair))


@pytest.mark.parametrize("kind", ["loglikelihood", "rolling"])
def test_outputs_that_are_no_numbers_are_no_answers(loaded: tuple[Any, Any, Made], kind: str) -> None:
    pair = context_aware(loaded, gpu_experts=1, code_bits="2"), StaticLM(loaded[0], loaded[1], max_length=64)
    weight = loaded[0].get_input_embeddings().weight
    before = weight.detach().clone()
    try:
        weight.data.fill_(float("nan"))
        for lm in pair:
            with pytest.raises(EvaluationError, match="outputs are not finite"):
                answers(lm, kind, requests(kind))
    finally:
        weight.data.copy_(before)


def test_options_that_cannot_be() -> None:
    assert ContextOptions.parse("gpu_experts=2, code_bits=2.5,selector=true").code_bits == "5/2"
    for text, message in {
        "gpu_expert=2": "unknown option 'gpu_expert'; did you mean 'gpu_experts'",
        "code_bits=5": "between 1 and 4",
        "average_bits=2": "unknown option 'average_bits'; write code_bits",
        "code_bits=2.5,selector=false": "selector off",
        "gpu_experts": "not OPTION=VALUE",
        "gpu_experts=1,gpu_experts=1": "gpu_experts is there twice",
        "statistics=all": "statistics is ",
        "first_token=prefill,statistics=before_last": "leave statistics out",
    }.items():
        with pytest.raises(RecipeError, match=message):
            ContextOptions.parse(text)
    narrow = frozenset({2, 16})
    with pytest.raises(EvaluationError, match="no replicas of every expert at 1, 3, 4 bits"):
        check_replicas(ContextOptions.parse("code_bits=2"), 8, narrow, "here")
    with pytest.raises(EvaluationError, match=r"; run `moeq run a/run --set 'losses\.bits=\[1,2,3,4\]'`, which makes"):
        check_replicas(ContextOptions.parse("code_bits=2"), 8, narrow, "a/run", of_run=True)
    check_replicas(ContextOptions.parse("code_bits=2,selector=false"), 8, narrow, "here")
    with pytest.raises(EvaluationError, match="gpu_experts is 9, a layer has 8"):
        check_replicas(ContextOptions(gpu_experts=9), 8, narrow, "here")
    with pytest.raises(EvaluationError, match="6 experts a layer have no width"):
        check_replicas(ContextOptions(gpu_experts=2), 8, narrow, "here")


def test_what_is_not_the_paper_s_stands_in_the_name() -> None:
    label = ContextOptions.parse("gpu_experts=1,code_bits=2").label
    assert label == "K=1 2 code bits"
    text = "gpu_experts=1,code_bits=2,loss_weighting=none,statistics=before_last"
    assert ContextOptions.parse(text).label == f"{label} unweighted last token not counted"


def test_results_from_before_the_statistics_were_an_option_say_what_they_counted() -> None:
    options = {"gpu_experts": 1, "average_bits": "2", "first_token": "decode"}

    def read(measured: bool = True, **more: str) -> tuple[str, dict[str, str]]:
        of = {"subject": "run K=1 2-bit", "context_aware": {**options, **more}}
        row = of_result({"name": "run K=1 2-bit", "of": of, "lm_eval": {"results": {}} if measured else None})
        return row["name"], row["of"]["context_aware"]

    assert read() == ("run K=1 2-bit last token not counted", {**options, "statistics": "before_last"})
    for kept in (read(measured=False), read(first_token="prefill"), read(statistics="context")):
        assert kept[0] == "run K=1 2-bit"
    plain = {"name": "run", "of": {"subject": "run"}, "lm_eval": {"results": {}}}
    assert of_result(plain) == plain


def test_the_selector_off_gives_one_width() -> None:
    routing = RoutingCounts(counts=np.array([[5, 1, 3]]), scores=np.array([[2.0, 0.5, 1.0]]))
    found = chooser(ContextOptions.parse("gpu_experts=1,code_bits=2,selector=false"), None)(routing)
    assert found.tolist() == [[16, 2, 2]]


def test_alpha_and_the_weighting_of_losses_decide() -> None:
    """Expert 0 is chosen often with little weight, expert 1 seldom with much; unweighted, all lose alike."""
    routing = RoutingCounts(counts=np.array([[9, 2, 1, 1]]), scores=np.array([[0.5, 4.0, 0.3, 0.2]]))
    losses = np.tile(np.array([8.0, 4.0, 2.0, 1.0]), (1, 4, 1)) * np.array([1.0, 1.0, 1.0, 9.0])[None, :, None]

    def decided(text: str) -> list[int]:
        found: list[list[int]] = chooser(ContextOptions.parse(text), losses)(routing).tolist()
        return found[0]

    hot = [decided(f"gpu_experts=1,code_bits=2,alpha={alpha}").index(16) for alpha in (0, 1)]
    assert sorted(hot) == [0, 1], "by weight and by count"
    mass, plain = (decided(f"code_bits=2,alpha=1,loss_weighting={one}") for one in ("mass", "none"))
    assert sum(mass) == sum(plain) == 8
    assert mass != plain
