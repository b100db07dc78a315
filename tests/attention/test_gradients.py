"""Gradients of attention: against autodiff of masked attention, on every path, and their memory."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import masked_attention
import numpy as np
import pytest
import reference
from arrays import normal
from masked_attention import Case, draw
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import (
    BlockSelection,
    KernelConfig,
    block_sparse_attention,
    dense_attention,
    sketchwalk_attention,
)
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.attention import hopper
from sketchwalk_jax.policies.streaming import StreamingConfig
from sketchwalk_jax.selection import full_selection

ON_GPU = dispatch.is_hopper()


def cotangents(case: Case) -> tuple[jax.Array, jax.Array]:
    """Draws the loss's weights of outputs and log-sum-exps, 0 where a query is padding."""
    rng = np.random.default_rng(1)
    shape = (*case.positions.shape, case.heads[0], case.head_dim)
    grad, grad_lse = rng.standard_normal(shape), rng.standard_normal(shape[:-1])
    is_padding = case.positions >= np.array(case.lengths)[:, None]
    grad[is_padding] = grad_lse[is_padding] = 0.0
    return jnp.asarray(grad, jnp.float32), jnp.asarray(grad_lse, jnp.float32)


def total(case: Case, out: jax.Array, lse: jax.Array) -> jax.Array:
    """Returns a weighted sum of outputs and log-sum-exps."""
    grad, grad_lse = cotangents(case)
    # A row without keys has a constant log-sum-exp of -inf.
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.sum(out.astype(jnp.float32) * grad) + jnp.sum(lse * grad_lse)


@functools.cache
def expected(case: Case) -> tuple[np.ndarray, ...]:
    """Computes gradients by autodiff of masked attention in float32."""
    arrays, _, sees = draw(case)

    def loss(*arrays):
        rows = zip(*arrays, sees, strict=True)
        found = [reference.masked_attention(*row, case.scale) for row in rows]
        return total(case, *map(jnp.stack, zip(*found, strict=True)))

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*masked_attention.wide(arrays))
    return tuple(map(np.asarray, found))


def gradients(case: Case, **options: Any) -> tuple[jax.Array, ...]:
    """Computes the library's gradients."""
    arrays, others, _ = draw(case)

    def loss(*arrays):
        return total(case, *masked_attention.attend(*arrays, others, case, **options))

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)


CASES = (
    Case(),
    Case(lists="kv_head", heads=(6, 2), scale=0.4),
    Case(lists="head", offset=(21, 3), num_queries=40, layer=1),
    Case(op="dense", offset=(5, 0), num_queries=60, layer=2),
    Case(op="dense", lengths=(70, 37), dtype="bfloat16"),
    Case(dtype="bfloat16"),
    Case(op="decode", lists="head", layer=1),
)

KEPT = (CASES[0], CASES[4], CASES[5], CASES[6])


def assert_gradients(case: Case, found: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Compares gradients with the expected ones, and returns them in float32."""
    wide = [np.asarray(one, np.float32) for one in found]
    for one, wanted in zip(wide, expected(case), strict=True):
        np.testing.assert_allclose(one, wanted, **tolerance("gradient", case.dtype))
    return wide


@pytest.mark.parametrize("case", slow_unless(KEPT.__contains__, CASES), ids=str)
def test_gradients_are_those_of_masked_attention(case):
    config = KernelConfig(dense_rows=32, dense_keys=24, block_step=2)
    found, again = (gradients(case, kernel_config=config) for _ in range(2))
    assert_gradients(case, found)
    for one, other, wanted in zip(found, again, expected(case), strict=True):
        assert one.dtype == case.dtype and np.abs(wanted).max() > 0.1
        np.testing.assert_array_equal(one, other)


KERNELS = (
    Case(block_size=64, head_dim=64, lengths=(193, 70), num_queries=193, dtype="bfloat16"),
    Case(op="decode", block_size=64, head_dim=64, lengths=(193, 70), dtype="bfloat16"),
    Case(op="dense", block_size=64, head_dim=64, lengths=(128, 70), num_queries=90, offset=(38, 0),
         dtype="bfloat16"),
)  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "capability"),
    [
        pytest.param(KERNELS[0], None, marks=[] if ON_GPU else pytest.mark.slow),
        (KERNELS[1], None),
        pytest.param(KERNELS[1], "8.0", marks=pytest.mark.slow),  # the kernel for other GPUs
        pytest.param(KERNELS[2], None, marks=[] if ON_GPU else pytest.mark.slow),
    ],
    ids=lambda one: getattr(one, "op", one),
)
def test_kernels_go_forward_and_gradients_are_the_same(case, capability, monkeypatch):
    if not ON_GPU and case.op != "decode" and jax.__version_info__ < (0, 12):
        pytest.skip("before JAX 0.12 its interpreter cannot run the kernel")
    if capability is not None:
        monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
    config = None if ON_GPU else KernelConfig(interpret=True)
    if config is not None:
        monkeypatch.setattr(hopper, "num_multiprocessors", lambda: 2)
    found = gradients(case, implementation="mosaic_gpu", kernel_config=config)
    for one, wanted in zip(assert_gradients(case, found), expected(case), strict=True):
        distance = np.linalg.norm(one - wanted) / np.linalg.norm(wanted)
        assert distance < tolerance("kernel", case.dtype)["atol"]


def transformed(how: str, function, x: jax.Array) -> jax.Array:
    """Returns `function(x) + function(2 x)` through a transformation."""
    both = jnp.stack([x, 2 * x])
    if how == "vmap":
        return jnp.sum(jax.vmap(function)(both))
    if how == "scan":
        return jax.lax.scan(lambda total, x: (total + function(x), None), 0.0, both)[0]
    function = jax.checkpoint(function)
    return function(x) + function(2 * x)


# `test_sharding` has gradients inside `shard_map`.
@pytest.mark.parametrize("how", slow_unless("scan".__eq__, ["vmap", "scan", "checkpoint"]))
def test_transformations_change_only_rounding(how):
    query = normal((1, 48, 4, 16))
    selection = full_selection(jnp.arange(3, dtype=jnp.int32)[None], 3, block_size=16)
    key = query[:, :, :2] * 0.7

    def function(query):  # keys and values are the same on all devices
        out = block_sparse_attention(query, key, key, selection)
        return jnp.sum(jnp.sin(out) + jnp.sin(dense_attention(query, key, key)))

    wanted = jax.grad(lambda x: function(x) + function(2 * x))(query)
    found = jax.jit(jax.grad(functools.partial(transformed, how, function)))(query)
    np.testing.assert_allclose(found, wanted, **tolerance("gradient"))


def temporary_bytes(attend, num_tokens: int) -> int:
    """Returns the bytes that the gradient needs besides arguments and results."""
    shape = jax.ShapeDtypeStruct((1, num_tokens, 2, 16), jnp.float32)
    of = jax.grad(lambda *x: jnp.sum(attend(*x)), (0, 1, 2))
    return jax.jit(of).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


def listed(query, key, value):
    """Attends to the first four blocks."""
    row = jnp.arange(query.shape[1] // 16, dtype=jnp.int32)[:, None]
    ids = jnp.minimum(jnp.arange(4, dtype=jnp.int32)[None, :], row)[None, None]
    counts = jnp.full(ids.shape[:3], 4, jnp.int32)
    return block_sparse_attention(query, key, value, BlockSelection(ids, counts, 16))


@pytest.mark.parametrize(
    "attend", slow_unless(lambda attend: attend is listed, [listed, dense_attention])
)
def test_memory_is_linear_in_the_tokens(attend):
    short, long = (temporary_bytes(attend, tokens) for tokens in (2048, 16384))
    assert long < 8.5 * short


@jax.jit
def value_gradients(size, query, key, value, cotangent):
    """Returns gradients of values for `size` times larger queries and keys: ours, and JAX's."""
    rows = jnp.arange(3, dtype=jnp.int32)[None]
    listed = functools.partial(
        block_sparse_attention, selection=full_selection(rows, 3, block_size=16)
    )
    of_jax = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    return [
        jax.vjp(functools.partial(attend, query * size, key * size), value)[1](cotangent)[0]
        for attend in (dense_attention, listed, of_jax)
    ]


@pytest.mark.parametrize("logit", [1e5, 1e8])
def test_gradients_of_values_are_right_where_logits_are_large(logit):
    rng = np.random.default_rng(5)
    key, value = rng.standard_normal((2, 1, 40, 2, 64)).astype(np.float32)
    query, cotangent = rng.standard_normal((2, 1, 40, 4, 64)).astype(np.float32)
    size = np.float32(np.sqrt(logit / 8.0))  # with scale `1 / sqrt(H)`, logits are of this order
    with jax.default_matmul_precision("highest"):  # JAX's own on a GPU
        *found, wanted = value_gradients(size, query, key, value, cotangent)
    for one in found:
        np.testing.assert_allclose(one, wanted, rtol=0, atol=2e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutDerivative(StreamingConfig):
    """A policy whose selection JAX cannot differentiate, as it cannot a kernel's."""

    def select(self, query, key, statistics, walk, **where):
        """Makes the walk depend on the queries."""
        shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
        seen = jax.pure_callback(lambda x: np.asarray(x), shape, query)
        walk = dataclasses.replace(walk, scores=walk.scores + jnp.sum(seen * seen))
        return super().select(query, key, statistics, walk, **where)


@jax.jit
def cotangents_of_a_layer(query, key, value):
    """Returns gradients of a layer's output, and of its walk."""
    config = WithoutDerivative(block_size=16, density=0.5)

    def layer(*arrays):
        out, walk = sketchwalk_attention(*arrays, policy=config)
        return jnp.sum(jnp.sin(out)), jnp.sum(walk.scores)

    sums, back = jax.vjp(layer, query, key, value)
    return sums, back((1.0, 0.0)), back((0.0, 1.0))


def test_selection_is_a_constant():
    arrays = normal((3, 1, 80, 2, 16), seed=1)
    sums, of_output, of_walk = cotangents_of_a_layer(*arrays)
    assert sums[1] > 0.0
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0.1 for x in of_output)
    assert not any(np.any(x) for x in of_walk)


ATTENTIONS = {
    "dense": lambda x: jnp.sum(dense_attention(x, x * 2.0, x)),
    "lists": lambda x: jnp.sum(listed(x, x * 2.0, x)),
    "layer": lambda x: jnp.sum(sketchwalk_attention(x, x * 2.0, x)[0]),
}
REFUSED = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "in a scan": lambda f, x: jax.jvp(
        lambda x: jax.lax.scan(lambda total, y: (total + f(y), None), 0.0, x[None])[0], (x,), (x,)
    ),
    "grad of grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x),
}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "case",
    slow_unless(
        lambda case: case in (("dense", "jvp"), ("dense", "grad of grad")),
        itertools.product(ATTENTIONS, REFUSED),
    ),
    ids=" ".join,
)
def test_derivatives_that_attention_lacks_are_refused_in_words(case):
    attention, derivative = case
    words = "a second derivative" if derivative == "grad of grad" else "forward mode"
    with pytest.raises(NotImplementedError, match=rf"reverse mode only \(jax.grad.*got {words}"):
        REFUSED[derivative](ATTENTIONS[attention], jnp.ones((1, 16, 2, 16)))
