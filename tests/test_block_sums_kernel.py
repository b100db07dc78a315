"""The block-sum kernel, interpreted, adds up what the equations say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sketchwalk_jax.pallas_kernels.block_sums import block_sums_kernel
from sketchwalk_jax.sketch import block_sums, group_heads, project, srht_matrix

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_groups", "sketch_dim"),
    [
        (4, 2, 128, 1, 64),
        (4, 2, 64, 1, 64),
        (7, 1, 128, 1, None),
        (4, 2, 128, 2, 32),
        (12, 4, 128, 4, 64),
        (4, 2, 256, 1, 128),
    ],
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_sums_equal_the_reference(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_groups: int,
    sketch_dim: int | None,
    block_size: int,
) -> None:
    omega = srht_matrix(head_dim, sketch_dim)
    rng = np.random.default_rng(num_heads)
    num_tokens = 2 * block_size
    valid = rng.random((2, num_tokens)) > 0.3
    valid[1, block_size:] = False
    combine = "mean" if num_groups == 1 else "sum"
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
            num_groups=num_groups,
            is_mean=combine == "mean",
            omega=omega,
            block_size=block_size,
            interpret=True,
        )
        grouped = [group_heads(x, num_groups, combine=combine) for x in (query, key)]
        return sums, [project(block_sums(x, valid, block_size), omega) for x in grouped]

    got, wanted = run(*tokens)
    for sums, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(sums, want, rtol=1e-5, atol=1e-5)


def test_heads_that_do_not_fill_rows_are_refused() -> None:
    query, key = jnp.zeros((1, 64, 3, 64)), jnp.zeros((1, 64, 1, 64))
    with pytest.raises(ValueError, match="must fill rows of 128"):
        block_sums_kernel(query, key, jnp.ones((1, 64), bool), num_groups=1, is_mean=True)
