"""Plans are measured, and the policy follows them."""

import dataclasses

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import sketchwalk_jax as sw
from sketchwalk_jax import SketchWalkConfig, generate
from sketchwalk_jax.evaluation.calibrated_rules import fit_density, layers_density
from sketchwalk_jax.evaluation.planning import (
    TASKS,
    make_plan,
    measure_losses,
    planning_prompts,
)
from sketchwalk_jax.plan import Plan
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.text.tokenizer import load_tokenizer

MODEL = dataclasses.replace(tiny.MODEL, max_position_embeddings=8192)
SMALL = RecommendedConfig(block_size=16, min_tokens=64)  # few tokens are many blocks


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Measures a plan on two random prompts of different lengths."""
    rows, lengths = tiny.prompts(768, 700)
    prompts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    calls = []
    found = make_plan(
        tiny.params(model=MODEL),
        prompts,
        model_config=MODEL,
        policy=SMALL,
        fingerprint="a" * 64,
        after=lambda: calls.append(1),
    )
    assert len(calls) == 2
    return found


def test_each_layer_loses_less_at_a_larger_density():
    """The next tests, long ones, measure more densities, prompts and representatives."""
    model, tokens = dataclasses.replace(MODEL, num_layers=2), tiny.prompts(320)[0]
    given = {"model_config": model, "policy": SMALL, "densities": (0.3, 0.6)}
    plan = make_plan(tiny.params(model=model), [tokens[0]], representatives=(8,), **given)
    assert plan.num_layers == 2 and plan.representatives == (8,)
    for densities, errors in zip(plan.densities, plan.errors, strict=True):
        assert densities == pytest.approx((0.37, 0.62), abs=0.01)
        assert errors[0] > 2 * errors[1] > 0
    assert all(weight > 0 for weight in plan.weights)
    assert all(0 < one <= 1 for (one,) in plan.misses)


@pytest.mark.slow
def test_every_layer_is_measured_at_several_densities(plan):
    assert plan.num_layers == MODEL.num_layers and plan.fingerprint == "a" * 64
    for densities, errors in zip(plan.densities, plan.errors, strict=True):
        assert len(densities) >= 4 and densities[-1] == pytest.approx(0.6, abs=0.05)
        assert (np.diff(densities) > 0).all()
        assert (np.diff(errors) <= 0).all() and errors[0] > 2 * errors[-1] > 0
    assert plan.representatives == (4, 8, 16)  # as many as a row has
    misses = np.array(plan.misses)
    assert ((misses > 0) & (misses <= 1)).all()
    assert misses[:, 2].mean() < misses[:, 0].mean()
    assert all(weight > 0 for weight in plan.weights)


@pytest.mark.slow
def test_a_plan_of_the_default_policy_knows_densities_below_its_minimum():
    tokens = tiny.prompts(1024)[0]
    found = make_plan(tiny.params(model=MODEL), [tokens[0]], model_config=MODEL)
    for densities in found.densities:  # 256 of 1,024 keys are 0.44 of all pairs
        assert len(densities) >= 3 and densities[0] < 0.5 < densities[-1]


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.1, 0.2])
def test_the_policy_with_the_plan_measures_the_density_over_all_layers(plan, density):
    policy = dataclasses.replace(SMALL, density=density, plan=plan)
    tokens = tiny.prompts(2048)[0]
    call = {"model_config": dataclasses.replace(MODEL, plan=plan), "max_new_tokens": 2}
    found = generate(tiny.params(model=MODEL), tokens, policy=policy, **call).measured_density
    by_layer = np.asarray(found.prefill)
    assert by_layer.mean() == pytest.approx(density, abs=0.01)
    assert by_layer == pytest.approx(policy.layer_densities, abs=0.03)
    # The density that is predicted without a prompt equals the measured one.
    expected = layers_density(policy, MODEL, num_tokens=2048, phase="prefill")
    assert by_layer.mean() == pytest.approx(expected, abs=1e-3)


def test_losses_name_what_was_kept():
    """The next test, a long one, compares losses with those of a plain forward pass."""
    model, plan = dataclasses.replace(MODEL, num_layers=1), tiny.plan((0.05, 0.5), (0.02, 0.01))
    passages, given = [tiny.prompts(2304)[0][0]], {"model_config": model, "plan": plan}
    found = measure_losses(
        tiny.params(model=model), passages, num_tokens=2304, densities=(0.05,), **given
    )
    assert [one.phase for one in found] == ["prefill", "decode"]
    least = RecommendedConfig(density=0.05, plan=plan).least_tokens
    for one, tokens in zip(found, least, strict=True):
        assert one.most == one.kl > 1e-3 and one.same < 1.0
        assert one.kept == pytest.approx(tokens / 2304, abs=1e-3)


@pytest.mark.weekly
def test_losses_of_a_model_fall_with_the_density(plan):
    """A plain forward pass loses the same in prefill."""
    tokens, model = tiny.prompts(2304)[0], dataclasses.replace(MODEL, plan=plan)
    weights, densities = tiny.params(model=MODEL), (0.05, 1.0)
    given = {"model_config": model, "plan": plan, "num_tokens": 2304, "densities": densities}
    found = measure_losses(weights, [tokens[0], tokens[0, :2250]], **given)
    wanted = [(phase, density) for phase in ("prefill", "decode") for density in densities]
    assert [(one.phase, one.density) for one in found] == wanted
    for sparse, dense in (found[:2], found[2:]):
        assert sparse.most >= sparse.kl > 100 * dense.kl and dense.most < 1e-6
        assert sparse.same <= dense.same == 1.0 and sparse.tokens == 2304
    policy = RecommendedConfig(density=0.05, plan=plan)
    logits = [
        sw.forward(weights, tokens[:1, :-1], model_config=model, policy=one)[0, -63:]
        for one in (sw.Dense(), policy)
    ]
    exact, other = (jax.nn.log_softmax(one) for one in logits)
    kl = float(jnp.mean(jnp.sum(jnp.exp(exact) * (exact - other), axis=-1)))
    (alone, *_) = measure_losses(weights, [tokens[0]], **given)
    assert alone.kl == pytest.approx(kl, rel=1e-2) and alone.most == alone.kl


@pytest.mark.slow
def test_losses_know_which_layers_a_plan_makes_dense():
    """Losses at one density are those that are measured at it alone."""
    count = MODEL.num_layers
    uneven = tiny.plan((0.05, 0.5), (9.0, 4.0), *[(0.01, 0.005)] * (count - 1))
    dense = [RecommendedConfig(density=one, plan=uneven).is_dense(0) for one in (0.05, 0.4)]
    assert dense == [False, True]
    given = {"model_config": MODEL, "plan": uneven, "num_tokens": 2304}
    passages = [tiny.prompts(2304)[0][0]]
    both, alone = (
        measure_losses(tiny.params(model=MODEL), passages, densities=some, **given)
        for some in ((0.05, 0.4), (0.4,))
    )
    assert both[1::2] == alone


def test_a_density_is_fitted_with_the_plan():
    uneven = tiny.plan((0.05, 0.5), (0.9, 0.1), (0.01, 0.005), (0.5, 0.2), (0.02, 0.01))
    policy = SketchWalkConfig.recommended(plan=uneven, min_tokens=256)
    call = {"density": 0.15, "num_tokens": 4096, "phase": "prefill"}
    found = fit_density(policy, MODEL, **call)
    assert found.density == pytest.approx(0.15, abs=5e-3)
    assert found.policy.plan == uneven and found.policy.density < 0.15  # floors take the rest


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts must hold at least one prompt"),
        ([np.zeros(159, np.int32)], "must have at least 160 tokens, got one of 159"),
    ],
)
def test_prompts_that_tell_nothing_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        make_plan(tiny.params(model=MODEL), prompts, model_config=MODEL, policy=SMALL)


@pytest.mark.parametrize(
    ("lengths", "message"), [([], "at least one text"), ([64], "one of 64"), ([300, 257], "of 300")]
)
def test_texts_that_tell_nothing_are_refused(lengths, message):
    texts = [np.zeros(one, np.int32) for one in lengths]
    with pytest.raises(ValueError, match=message):
        measure_losses(tiny.params(model=MODEL), texts, model_config=MODEL, num_tokens=256)


def test_prompts_are_of_several_tasks_and_never_twice_the_same(tmp_path):
    checkpoints.write_checkpoint(tmp_path, tokenizer=True)
    tokenizer = load_tokenizer(tmp_path)
    drawn = planning_prompts(tokenizer, num_tokens=2048, count=len(TASKS) + 2)
    assert all(1024 < len(one) <= 2048 for one in drawn)
    assert len({one.tobytes() for one in drawn}) == len(drawn)
    again = planning_prompts(tokenizer, num_tokens=2048, count=2)
    assert all((a == b).all() for a, b in zip(again, drawn, strict=False))
