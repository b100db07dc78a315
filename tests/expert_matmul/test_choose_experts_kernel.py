"""The kernel that chooses experts takes those of `jax.lax.top_k`, in the same order."""

import functools

import jax
import jax.numpy as jnp
import kernel_draws
import numpy as np
import pytest
from variants import INTERPRET, slow_unless

from sketchwalk_jax.pallas_kernels.expert_matmul.choose_experts import choose_experts_kernel

pytestmark = pytest.mark.interpreted

EPS, LAYER, INPUTS = 1e-5, 2, 256


@functools.partial(jax.jit, static_argnames=("chosen", "eps", "sums_chosen"))
def choose(x, parts, is_token, **options):
    with kernel_draws.on_gpu():
        return choose_experts_kernel(
            x, parts, jnp.int32(LAYER), is_token, interpret=INTERPRET, **options
        )


def draw(kind, tokens, experts):
    """Draws parts of products that are exact in float32, so that sums have no rounding."""
    rng = np.random.default_rng(tokens)
    parts = np.float32(rng.integers(-64, 64, size=(3, tokens, experts)) / 8)
    if kind == "equal":
        parts[:] = 0.5
    elif kind == "ties":
        parts = np.round(parts / 16)
    elif kind == "special":
        parts[1:] = -0.0
        for value in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0):
            parts[0, :, rng.integers(experts)] = value
    return parts


CASES = {
    "one token": ("random", 1, 128, 8, True, True),
    "many tokens": ("random", 32, 128, 8, True, False),
    "ties": ("ties", 2, 64, 6, False, True),
    "equal": ("equal", 2, 128, 8, True, False),
    "special": ("special", 2, 192, 8, False, True),
    "all experts": ("random", 2, 8, 8, False, True),
}


@pytest.mark.parametrize("name", slow_unless(("ties", "special").__contains__, CASES))
def test_it_chooses_as_top_k_does(name):
    kind, tokens, experts, chosen, has_norm, sums_chosen = CASES[name]
    parts = draw(kind, tokens, experts)
    x = np.random.default_rng(0).standard_normal((tokens, INPUTS))
    x = jnp.asarray(x, jnp.bfloat16)
    is_token = np.arange(tokens) != 1
    eps = EPS if has_norm else None
    options = {"chosen": chosen, "eps": eps, "sums_chosen": sums_chosen}
    weights, matrix, root = choose(x, parts, jnp.asarray(is_token, jnp.int8), **options)
    wanted = np.ones(tokens, np.float32)
    if has_norm:
        wanted = 1 / np.sqrt(np.mean(np.float64(x) ** 2, axis=1) + EPS)
    np.testing.assert_allclose(root, wanted, rtol=1e-5)
    logits = jnp.asarray(parts).sum(0) * root[:, None]
    values, indices = jax.lax.top_k(logits, chosen)
    np.testing.assert_array_equal(
        matrix, LAYER * experts + np.where(is_token[:, None], indices, experts - 1)
    )
    shares = jnp.exp(values - values[:, :1])
    every = shares if sums_chosen else jnp.exp(logits - values[:, :1])
    shares = shares / every.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, shares, rtol=1e-5)
