"""Phases, batches and shared prefills against `forward`, `prefill` and `decode_step`."""

import dataclasses

import jax
import numpy as np
import pytest
from evaluation_samples import LENGTH, WITHIN, samples
from tiny import MODEL, params
from tolerances import tolerance
from variants import slow_unless

import sketchwalk_jax as sw
from sketchwalk_jax.evaluation import measure
from sketchwalk_jax.evaluation.measure import Measurement
from sketchwalk_jax.evaluation.prompts import make_prompts
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.evaluation.tasks import TASKS

PHASES = ("both", "prefill", "decode")
SPARSE = Rule("sketchwalk", "damped", 0.4)
RELEASED = Rule("sketchwalk", "released")
FULL = Rule("sketchwalk", "paper", 1.0)
WANTED = {DENSE: ("both",), SPARSE: PHASES, RELEASED: PHASES}
# RELEASED looks at the end of a prompt, and needs all programs once more.
RULES = (SPARSE, pytest.param(RELEASED, marks=pytest.mark.slow))
# Tasks on every change: an answer after the prompt, one within it, and none.
KEPT = ("multi_key", "mid_prompt", "text_loss")
CLOSE = tolerance("logits")


@pytest.fixture(scope="module")
def weights():
    return params()


@pytest.fixture
def answers(monkeypatch):
    """Collects inputs of scoring: `(task, kind)` to a list of arrays, one per rule and phase."""
    seen = {}

    def note(kind, result):
        def scoring(prompts, *arrays):
            count = len(prompts.samples)
            arrays = [np.asarray(x)[:count] for x in arrays if isinstance(x, np.ndarray)]
            if kind.endswith("decode"):
                arrays = [np.concatenate([arrays[0][:, None], arrays[1]], axis=1)]
            seen.setdefault((prompts.task, kind), []).append(arrays[0])
            return result[:count]

        return scoring

    for name in ("right_in_decode", "right_in_prefill"):
        monkeypatch.setattr(measure, name, note(name, np.zeros(9, bool)))
    for name in ("loss_in_decode", "loss_in_prefill"):
        monkeypatch.setattr(measure, name, note(name, np.zeros(9)))
    return seen


def _run(weights, some, answers, *, batch=3, wanted=WANTED):
    """Returns outcomes by rule and phase, and the scored inputs in the same order."""
    answers.clear()
    measurement = Measurement(weights, MODEL, batch=batch)
    prompts = make_prompts(some, batch=batch, num_tokens=LENGTH)
    outcomes = {
        (rule, phase): outcome
        for rule, phases in wanted.items()
        for phase, outcome in measurement.run(prompts, rule, phases, None).items()
    }
    in_prefill = some[0].task in WITHIN
    scored = {}
    for kind in ("prefill", "decode"):
        found = (x for (_, name), some in answers.items() if name.endswith(kind) for x in some)
        for key in outcomes:
            is_prefilled = in_prefill and (key[0] == DENSE or key[1] == "prefill")
            if is_prefilled == (kind == "prefill"):
                scored[key] = next(found)
        assert next(found, None) is None
    return outcomes, scored, prompts


def _padded(some):
    tokens = np.zeros((len(some), LENGTH), np.int32)
    for row, one in zip(tokens, some, strict=True):
        row[: len(one.tokens)] = one.tokens
    return tokens, np.array([len(one.tokens) for one in some], np.int32)


def _one_by_one(weights, some, prompts, rule, phase):
    """Runs `prefill` and `decode_step`; returns the likeliest tokens or losses, and pairs.

    If the answer is among the tokens, those up to the question are prefilled, the rest is fed.
    """
    tokens, lengths = _padded(some)
    is_within, is_loss = some[0].task in WITHIN, some[0].task == "text_loss"
    if is_within:
        lengths = np.array([one.question_start for one in some], np.int32)
    config = rule.make()
    options = {"model_config": MODEL, "policy": config, "phase": phase}
    cache = sw.init_cache(MODEL, config, batch=len(some), max_tokens=LENGTH)
    logits, cache = sw.prefill(weights, tokens, cache, lengths=lengths, **options)
    pairs, found, rows = np.asarray(cache.density.prefill_pairs), [], np.arange(len(some))
    for step in range(max(prompts.num_steps) + 1):
        log_p = np.asarray(jax.nn.log_softmax(logits))
        best = log_p.argmax(axis=-1)
        places = np.minimum(lengths + step, [len(one.tokens) - 1 for one in some])
        targets = tokens[rows, places]
        found.append(-log_p[rows, targets] if is_loss else best)
        fed = np.where(step < prompts.num_forced[: len(some)], targets, best)
        logits, cache = sw.decode_step(weights, fed.astype(np.int32), cache, **options)
    return np.stack(found, axis=1), pairs


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_answers_are_written_as_by_prefill_and_decode_step(weights, answers, rule):
    some, wanted = samples("multi_key"), {DENSE: ("both",), rule: PHASES}
    outcomes, scored, prompts = _run(weights, some, answers, wanted=wanted)
    assert list(outcomes) == [(rule, phase) for rule, phases in wanted.items() for phase in phases]
    for (one, phase), following in scored.items():
        expected, pairs = _one_by_one(weights, some, prompts, one, phase)
        for row in range(3):
            count = prompts.num_steps[row] + 1
            np.testing.assert_array_equal(
                following[row, :count], expected[row, :count], err_msg=f"{one} {phase}"
            )
        np.testing.assert_allclose(outcomes[one, phase].density.prefill_pairs, pairs, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_answers_within_the_prompt_are_scored_as_forward_does(weights, answers, rule):
    wanted = {DENSE: ("both",), rule: PHASES}
    for task in WITHIN:
        some = samples(task)
        tokens, lengths = _padded(some)
        _, scored, _ = _run(weights, some, answers, wanted=wanted)
        for one in wanted:
            phase = "both" if one == DENSE else "prefill"
            logits = sw.forward(
                weights, tokens, lengths=lengths, model_config=MODEL, policy=one.make()
            )
            for row, sample in enumerate(some):
                size = len(sample.answer)
                columns = sample.answer_start - 1 + np.arange(size)
                expected = np.argmax(logits[row, columns], axis=-1)
                if task == "text_loss":
                    log_p = jax.nn.log_softmax(logits[row, columns])
                    targets = sample.answer[:, None]
                    expected = -np.take_along_axis(np.array(log_p), targets, 1)[:, 0]
                np.testing.assert_allclose(scored[one, phase][row, :size], expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("phase", slow_unless("both".__eq__, ["decode", "both"]))
@pytest.mark.parametrize("rule", RULES)
def test_decode_phases_read_up_to_the_question_and_are_fed_the_rest(weights, answers, rule, phase):
    wanted = {DENSE: ("both",), rule: PHASES}
    for task in WITHIN:
        some = samples(task)
        _, scored, prompts = _run(weights, some, answers, wanted=wanted)
        expected, _ = _one_by_one(weights, some, prompts, rule, phase)
        for row in range(3):
            count = prompts.num_steps[row] + 1
            found = scored[rule, phase][row, :count]
            np.testing.assert_allclose(found, expected[row, :count], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_full_density_equals_dense(weights, answers, task):
    wanted = {DENSE: ("both",), FULL: PHASES}
    some = samples(task)
    outcomes, scored, prompts = _run(weights, some, answers, wanted=wanted)
    dense, layers = scored[DENSE, "both"], range(2, MODEL.num_layers)
    # Dense attention reads the answer's tokens; decoding may differ after the first.
    is_read = task in WITHIN and task != "text_loss"
    for phase in PHASES:
        found, outcome = scored[FULL, phase], outcomes[FULL, phase]
        assert outcome.measured_density(phase, np.ones(3, bool), layers=layers) == 1
        for row in range(3):
            start = prompts.num_forced[row] if is_read and phase != "prefill" else 0
            size = 1 if is_read else {"text_loss": 64}.get(task, prompts.num_steps[row] + 1)
            np.testing.assert_allclose(found[row, start : start + size], dense[row, :size], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["multi_key", *WITHIN])
def test_batch_equals_one_by_one(weights, answers, task):
    some, wanted = samples(task), {DENSE: ("both",), SPARSE: PHASES}
    outcomes, scored, prompts = _run(weights, some, answers, wanted=wanted)
    for row, one in enumerate(some):
        alone, scored_alone, _ = _run(weights, [one], answers, batch=1, wanted=wanted)
        size = 64 if task == "text_loss" else prompts.num_steps[row] + 1
        for key, outcome in alone.items():
            np.testing.assert_allclose(
                scored_alone[key][0, :size], scored[key][row, :size], **CLOSE
            )
            for field in dataclasses.fields(outcome.density):
                both = [getattr(x.density, field.name) for x in (outcome, outcomes[key])]
                np.testing.assert_allclose(both[0][..., 0], both[1][..., row], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["multi_key", *WITHIN])
def test_attention_is_sparse_only_in_the_phase_named(weights, answers, task):
    wanted = {DENSE: ("both",), SPARSE: PHASES}
    outcomes, *_ = _run(weights, samples(task), answers, wanted=wanted)

    def density_of(outcome, part, first=2):
        layers = range(first, MODEL.num_layers)
        return outcome.measured_density(part, np.ones(3, bool), layers=layers)

    for phase in PHASES:
        outcome = outcomes[SPARSE, phase]
        for part in ("prefill", "decode"):
            density = density_of(outcome, part)
            if density is None:
                assert task in WITHIN and part == "decode" and phase == "prefill"
            elif phase in ("both", part):
                assert 0.1 < density < 0.8
            else:
                assert density == 1
        of_all = density_of(outcome, "both", first=0)
        assert of_all == pytest.approx((1 + density_of(outcome, "both")) / 2)
