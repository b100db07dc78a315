"""The block-sum kernel, interpreted, adds up what the equations say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sketchwalk_jax.pallas_kernels.block_sums import block_sums_kernel
from sketchwalk_jax.sketch import block_sums, head_means, project, srht_matrix

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "sketch_dim"),
    [
        (4, 2, 128, 64),
        (4, 2, 64, 64),
        (7, 1, 128, None),
        (4, 2, 128, 32),
        (4, 2, 256, 128),
    ],
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_sums_equal_the_reference(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sketch_dim: int | None,
    block_size: int,
) -> None:
    omega = srht_matrix(head_dim, sketch_dim)
    rng = np.random.default_rng(num_heads)
    num_tokens = 2 * block_size
    valid = rng.random((2, num_tokens)) > 0.3
    valid[1, block_size:] = False
    tokens = []
    for heads in (num_heads, num_kv_heads):
        x = rng.normal(size=(2, num_tokens, heads, head_dim))
        x[~valid] = np.nan  # what padding holds never matters
        tokens.append(jnp.asarray(x, jnp.bfloat16))
    valid = jnp.asarray(valid)

    @jax.jit
    def run(query: jax.Array, key: jax.Array) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
        sums = block_sums_kernel(
            query,
            key,
            valid,
            omega=omega,
            block_size=block_size,
            interpret=True,
        )
        means = head_means(query), head_means(key)
        return sums, [project(block_sums(x, valid, block_size), omega) for x in means]

    got, wanted = run(*tokens)
    for sums, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(sums, want, rtol=1e-5, atol=1e-5)


def test_heads_that_do_not_fill_rows_are_refused() -> None:
    query, key = jnp.zeros((1, 64, 3, 64)), jnp.zeros((1, 64, 1, 64))
    with pytest.raises(ValueError, match="must fill rows of 128"):
        block_sums_kernel(query, key, jnp.ones((1, 64), bool))
