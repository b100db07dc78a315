"""What an evaluation runs, how samples become arrays, and when an answer counts."""

import dataclasses

import numpy as np
import pytest
from evaluation_samples import LENGTH, sample, samples
from tiny import MODEL

from sketchwalk_jax import Dense, SketchWalkConfig
from sketchwalk_jax.evaluation.batch_size import choose_batch
from sketchwalk_jax.evaluation.prompts import (
    loss_in_decode,
    loss_in_prefill,
    make_prompts,
    right_in_decode,
    right_in_prefill,
)
from sketchwalk_jax.evaluation.rows import group_key, group_key_of
from sketchwalk_jax.evaluation.runner import check_lengths
from sketchwalk_jax.evaluation.settings import DENSE, EvaluationConfig, Rule
from sketchwalk_jax.policies.minference import MInferenceConfig
from sketchwalk_jax.policies.streaming import StreamingConfig


def test_rules_are_dense_and_every_policy_at_its_densities():
    config = EvaluationConfig(
        policies=("sketchwalk", "dense", "random"),
        presets=("paper", "released"),
        densities=(0.1, 0.2),
    )
    assert config.rules() == (
        DENSE,
        Rule("sketchwalk", "paper", 0.1),
        Rule("sketchwalk", "paper", 0.2),
        Rule("sketchwalk", "released", None),
        Rule("random", None, 0.1),
        Rule("random", None, 0.2),
    )
    assert config.rules()[2].make() == SketchWalkConfig.paper(density=0.2)
    assert [str(rule) for rule in config.rules()[:4:3]] == ["dense", "released"]


def test_phases_are_those_in_which_a_policy_selects():
    config = EvaluationConfig(phases=("both", "decode"))
    assert config.phases_of(SketchWalkConfig.paper()) == ("both", "decode")
    assert config.phases_of(Dense()) == ("both",)

    class DecodeOnly(type(SketchWalkConfig.paper())):
        phases = ("decode",)

    assert config.phases_of(DecodeOnly()) == ("decode",)


def test_fields_are_set_in_every_policy_that_has_them():
    config = EvaluationConfig(
        policies=("minference", "streaming"),
        densities=(0.2,),
        fields={"dense_layers": 3, "exact": True},
    )
    dense, minference, streaming = config.rules()
    assert dense == DENSE and minference.make() == MInferenceConfig(dense_layers=3, exact=True)
    assert streaming.make() == StreamingConfig(density=0.2, dense_layers=3)
    assert config.describe()["fields"] == {"dense_layers": 3, "exact": True}
    assert "fields" not in EvaluationConfig().describe()  # as in older files


def test_reduced_keeps_what_is_given():
    config = EvaluationConfig.reduced(tokens=(1024,), prompts=7)
    assert (config.tokens, config.prompts, config.densities) == ((1024,), 7, (0.2,))
    assert config.rules() == EvaluationConfig(densities=(0.2,)).rules()
    assert config.num_prompts("variable_tracking") == 10 and config.num_prompts("multi_key") == 7


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": ("kascade",)}, "policies must be among dense, .*, got 'kascade'"),
        ({"phases": ()}, "phases must hold at least one value"),
        ({"densities": (0.1, 0.1)}, "densities must hold at least one value, each once"),
        ({"fields": {"exact": True}, "policies": ("oracle",)}, "fields must be .*, got 'exact'"),
        ({"fields": {"density": 0.5}}, "fields must be of a policy that is run, got 'density'"),
        ({"fields": {"sketch_dim": 0}}, "sketch_dim must be a positive integer or None, got 0"),
        ({"densities": (2.0,)}, r"density must be in \(0, 1\], got 2.0"),
        ({"tokens": (0,)}, "tokens must be positive integers, got 0"),
        ({"prompts": 0}, "prompts must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EvaluationConfig(**fields)


def test_lengths_beyond_the_context_are_left_out():
    config = EvaluationConfig(tokens=(1024, 512, 256))
    assert check_lengths(config, MODEL) == (256, 512)
    with pytest.raises(ValueError, match="within the model's context of 512, got"):
        check_lengths(EvaluationConfig(), MODEL)
    with pytest.raises(ValueError, match="tokens must be multiples of 64, got 100"):
        check_lengths(EvaluationConfig(tokens=(100,)), MODEL)


def test_batches_are_of_equal_size_and_fit_into_memory():
    def choose(model, **fields):
        config = EvaluationConfig(prompts=50, **fields)
        return choose_batch(model, config, num_tokens=512, dtype="float32")

    assert choose(MODEL) == 8  # 7 batches of 8, 8, 7, ... would be 8 as well
    assert choose(MODEL, batch=20) == 20 and choose(MODEL, batch=64) == 50
    huge = dataclasses.replace(MODEL, num_layers=10**6, hidden_size=4096)
    assert choose(huge) == 1


def test_answer_columns_come_before_the_answer():
    one = sample("mid_prompt", 0)
    prompts = make_prompts([one], batch=2, num_tokens=LENGTH)
    columns = prompts.columns(prompts.lengths)[0]
    size = len(one.answer)
    np.testing.assert_array_equal(one.tokens[columns[:size] + 1], one.answer)
    assert columns[-1] == len(one.tokens) - 1
    np.testing.assert_array_equal(prompts.targets()[0, :size], one.answer)
    assert prompts.prompt_lengths[0] == one.question_start
    told = prompts.continuation[0, : prompts.num_told[0]]
    np.testing.assert_array_equal(told, one.tokens[one.question_start : one.answer_start + size])
    assert prompts.num_forced[0] == one.answer_start - one.question_start
    for field in ("tokens", "lengths", "continuation"):  # the batch is filled with the last sample
        values = getattr(prompts, field)
        np.testing.assert_array_equal(values[1], values[0])


@pytest.mark.unchecked
def test_answers_without_room_are_refused():
    one = sample("multi_key", 0, length=LENGTH - 3)
    with pytest.raises(ValueError, match="tokenizer must need at most 64 tokens for an answer"):
        make_prompts([one], batch=1, num_tokens=LENGTH)


class _Digits:
    """Tokens 48 to 57 are digits, 46 is a full stop, as in ASCII."""

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


def _generated(prompts, text: str) -> np.ndarray:
    """The likeliest tokens if the model writes `text` once it is asked."""
    following = np.zeros((2, 97), np.int32)
    start = prompts.num_forced[0]
    codes = list(text.encode())
    following[0, start : start + len(codes)] = codes
    return following


@pytest.mark.parametrize("task", ["multi_key", "mid_prompt"])
@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("12345. ", True),
        ("12345\0\0", True),
        ("12344.", False),
        ("123456.", False),
        ("1234\x015", False),
        ("12345\x0178", True),
    ],
)
def test_answer_is_read_up_to_the_end_token(task, text, is_right):
    prompts = make_prompts([sample(task, 0)], batch=2, num_tokens=LENGTH)
    following = _generated(prompts, text)
    found = right_in_decode(prompts, following[:, 0], following[:, 1:], _Digits(), (1,))
    assert found.tolist() == [is_right]


def test_every_answer_token_counts_in_prefill():
    some = samples("mid_prompt")
    prompts = make_prompts(some, batch=3, num_tokens=LENGTH)
    likeliest = prompts.targets().copy()
    likeliest[1, len(some[1].answer) - 1] += 1
    likeliest[2, len(some[2].answer)] += 1  # beyond the answer
    assert right_in_prefill(prompts, likeliest).tolist() == [True, False, True]


def test_loss_is_the_mean_over_scored_tokens():
    prompts = make_prompts(samples("text_loss"), batch=3, num_tokens=LENGTH)
    losses = np.random.default_rng(0).random((3, 97)).astype(np.float32)
    expected = losses[:, :64].mean(axis=1)
    np.testing.assert_allclose(loss_in_prefill(prompts, losses), expected, rtol=1e-6)
    np.testing.assert_allclose(
        loss_in_decode(prompts, losses[:, 0], losses[:, 1:]), expected, rtol=1e-6
    )


def test_variants_of_one_policy_run_side_by_side():
    variants = tuple(
        Rule("sketchwalk", "paper", 0.2, (("exponent", exponent),), f"exponent={exponent}")
        for exponent in (1, 4)
    )
    config = EvaluationConfig(
        policies=("sketchwalk",), presets=("paper",), densities=(0.2,), variants=variants
    )
    assert config.rules()[-2:] == variants
    assert [rule.make().exponent for rule in config.rules()[1:]] == [8, 1, 4]
    assert str(variants[0]) == "paper exponent=1 0.2"
    keys = {group_key(rule, "both", "multi_key", 4096) for rule in config.rules()}
    assert len(keys) == len(config.rules())
    assert config.describe() == EvaluationConfig().describe()  # more can be added to a file
    old = {"policy": "sketchwalk", "preset": "paper", "phase": "both", "task": "multi_key"}
    old |= {"tokens": 4096, "density": 0.2}  # of a file of before there were variants
    assert group_key_of(old) == group_key(config.rules()[1], "both", "multi_key", 4096)


def test_variants_without_a_name_of_their_own_are_refused():
    unnamed = Rule("sketchwalk", "paper", 0.2, (("exponent", 4),))
    with pytest.raises(ValueError, match="variants must have names of their own"):
        EvaluationConfig(variants=(unnamed,))
