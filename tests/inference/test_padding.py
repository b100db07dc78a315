import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sketchwalk_jax.inference.padding import bucket_length, left_to_right_padding

NUM_TOKENS = 6
# (padding on the left, tokens) of each row
rows = st.lists(
    st.integers(1, NUM_TOKENS).flatmap(
        lambda length: st.tuples(st.integers(0, NUM_TOKENS - length), st.just(length))
    ),
    min_size=3,
    max_size=3,
)


@given(rows, st.sampled_from([np.bool_, np.int32, np.int64, np.uint8]))
def test_tokens_move_to_the_front_in_their_order(rows: list[tuple[int, int]], mask_type: type):
    tokens = np.arange(1, 3 * NUM_TOKENS + 1).reshape(3, NUM_TOKENS)
    mask = np.zeros(tokens.shape, mask_type)
    for row, (left, length) in enumerate(rows):
        mask[row, left : left + length] = 1
    rolled, lengths = left_to_right_padding(tokens, mask)
    assert lengths.tolist() == [length for _, length in rows]
    for row, (left, length) in enumerate(rows):
        assert rolled[row, :length].tolist() == tokens[row, left : left + length].tolist()
    assert rolled.dtype == lengths.dtype == jnp.int32


def test_rolling_under_jit_equals_rolling_outside():
    tokens = jnp.array([[0, 0, 7, 8], [0, 4, 5, 0]])
    mask = (tokens > 0).astype(jnp.int32)
    inside = jax.jit(left_to_right_padding)(tokens, mask)
    for actual, expected in zip(inside, left_to_right_padding(tokens, mask), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[0, 1, 1], [1, 0, 1]], "tokens that stand together, got 2 runs in row 1"),
        ([[0, 0, 0], [0, 1, 1]], "a token in each row, got none in row 0"),
        ([[0, 1, 2], [0, 1, 1]], r"hold 0 and 1 only, got \[0 1 2\]"),
        ([[0, 1, -1], [0, 1, 1]], "hold 0 and 1 only"),
        ([[0, 1], [1, 1]], r"the shape of tokens, \[2, 3\], got \[2, 2\]"),
    ],
)
@pytest.mark.unchecked
def test_masks_that_are_no_padding_are_refused(mask: list, message: str):
    with pytest.raises(ValueError, match=f"attention_mask must .*{message}"):
        left_to_right_padding(jnp.zeros((2, 3), jnp.int32), jnp.array(mask))


@given(st.integers(1, 1 << 21), st.sampled_from([1, 16, 48, 64, 128]))
def test_a_bucket_holds_the_prompt_and_little_more(num_tokens: int, multiple: int):
    bucket = bucket_length(num_tokens, multiple=multiple)
    assert bucket >= num_tokens
    assert bucket % multiple == 0
    assert bucket - num_tokens < multiple + num_tokens / 8
    assert bucket_length(bucket, multiple=multiple) == bucket
    assert bucket_length(num_tokens + 1, multiple=multiple) >= bucket


def test_there_are_few_buckets():
    buckets = {bucket_length(num_tokens) for num_tokens in range(64, 131_073, 64)}
    assert len(buckets) == 8 * 8 + 8  # octaves above 8 blocks, and the first 8 blocks
    assert max(buckets) == 131_072


def test_lengths_below_one_are_refused():
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        bucket_length(0)
    with pytest.raises(ValueError, match="multiple must be at least 1, got 0"):
        bucket_length(5, multiple=0)
