"""Samples become arrays, and answers are scored."""

import numpy as np
import pytest
from evaluation_samples import LENGTH, sample, samples

from sketchwalk_jax.evaluation.prompts import (
    loss_in_decode,
    loss_in_prefill,
    make_prompts,
    right_in_decode,
    right_in_prefill,
)


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
    for field in ("tokens", "lengths", "continuation"):  # the last sample fills up the batch
        values = getattr(prompts, field)
        np.testing.assert_array_equal(values[1], values[0])


@pytest.mark.unchecked
def test_answers_without_room_are_refused():
    one = sample("multi_key", 0, length=LENGTH - 3)
    with pytest.raises(ValueError, match="tokenizer must need at most 64 tokens for an answer"):
        make_prompts([one], batch=1, num_tokens=LENGTH)


class _Digits:
    """A tokenizer in which tokens 48 to 57 are digits and 46 is a full stop, as in ASCII."""

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("task", ["multi_key", "mid_prompt"])
@pytest.mark.parametrize(
    ("text", "is_right"),
    {
        "12345. ": True,
        "12345\0\0": True,
        "12344.": False,
        "123456.": False,
        "1234\x015": False,
        "12345\x0178": True,
    }.items(),
)
def test_answer_is_read_up_to_the_end_token(task, text, is_right):
    prompts = make_prompts([sample(task, 0)], batch=2, num_tokens=LENGTH)
    following = np.zeros((2, 97), np.int32)  # the likeliest tokens of a model that writes `text`
    start = prompts.num_forced[0]
    following[0, start : start + len(text)] = list(text.encode())
    found = right_in_decode(prompts, following[:, 0], following[:, 1:], _Digits(), (1,))
    assert found.tolist() == [is_right]


def test_every_answer_token_counts_in_prefill():
    some = samples("mid_prompt")
    prompts = make_prompts(some, batch=3, num_tokens=LENGTH)
    likeliest = prompts.targets().copy()
    likeliest[1, len(some[1].answer) - 1] += 1
    likeliest[2, len(some[2].answer)] += 1  # after the answer
    assert right_in_prefill(prompts, likeliest).tolist() == [True, False, True]


def test_loss_is_the_mean_over_scored_tokens():
    prompts = make_prompts(samples("text_loss"), batch=3, num_tokens=LENGTH)
    losses = np.random.default_rng(0).random((3, 97)).astype(np.float32)
    expected = losses[:, :64].mean(axis=1)
    np.testing.assert_allclose(loss_in_prefill(prompts, losses), expected, rtol=1e-6)
    np.testing.assert_allclose(
        loss_in_decode(prompts, losses[:, 0], losses[:, 1:]), expected, rtol=1e-6
    )
