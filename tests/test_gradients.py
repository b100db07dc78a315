"""Gradients of attention: against autodiff of masked attention, on every path, and their memory."""

import dataclasses
import functools
import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, PartitionSpec
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import (
    BlockSelection,
    KernelConfig,
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
    sketchwalk_attention,
)
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.attention import hopper
from sketchwalk_jax.policies.streaming import StreamingConfig
from sketchwalk_jax.selection import full_selection

ON_GPU = dispatch.is_hopper()
OPERATIONS = {
    "lists": block_sparse_attention,
    "decode": block_sparse_decode,
    "dense": dense_attention,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call of attention whose gradient is tested.

    Attributes:
      op: Attention function.
      lists: Whether a list serves all heads, one key/value head, or one query head.
      heads: Query heads and key/value heads.
      lengths: Keys of each sequence; later slots are NaN.
      offset: Position of each sequence's first query; `None` for 0.
      num_queries: Queries of each sequence.
      scale: Factor of the scores.
      layer: Layer of a stacked cache of three, or `None` for keys and values alone.
      block_size: Tokens of a block.
      head_dim: Features of a head.
      dtype: Type of queries, keys and values.
    """

    op: str = "lists"
    lists: str = "shared"
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, ...] = (70, 37)
    offset: tuple[int, ...] | None = None
    num_queries: int = 70
    scale: float | None = None
    layer: int | None = None
    block_size: int = 16
    head_dim: int = 16
    dtype: str = "float32"

    @property
    def positions(self) -> np.ndarray:
        """Positions of the queries, `[B, T]`."""
        if self.op == "decode":
            return np.array(self.lengths)[:, None] - 1
        first = np.array(self.offset or [0] * len(self.lengths))
        return first[:, None] + np.arange(self.num_queries)

    def __str__(self) -> str:
        """Names the case by its fields that are not defaults."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return "-".join(str(x) for x in changed.values()).replace(" ", "") or "shared"


def draw(case: Case) -> tuple[tuple[jax.Array, ...], dict[str, Any], np.ndarray]:
    """Draws queries, keys, values and other arguments; and the mask of pairs, `[B, N, T, S]`."""
    rng = np.random.default_rng(0)
    batch, (num_heads, kv_heads), size = len(case.lengths), case.heads, case.block_size
    positions = case.positions
    num_blocks = -(-(max(case.lengths)) // size)
    keys = np.arange(num_blocks * size)
    query = rng.standard_normal((batch, positions.shape[1], num_heads, case.head_dim))
    key, value = rng.standard_normal((2, batch, len(keys), kv_heads, case.head_dim))
    is_key = keys < np.array(case.lengths)[:, None]
    key[~is_key] = value[~is_key] = np.nan
    rows = positions[:, ::size] // size if case.offset is None else positions[:, :1] // size
    if case.offset is not None:  # queries may straddle one more block
        rows = rows + np.arange(-(-(case.num_queries + size - 1) // size))
    lists = dict(zip(cases.LIST_KINDS, (1, *case.heads[::-1]), strict=True))[case.lists]
    mask = rng.random((batch, lists, rows.shape[1], num_blocks)) < 0.4
    mask[:, :, :, 0] |= rng.random(mask.shape[:3]) < 0.8
    mask &= (np.arange(num_blocks) <= rows[..., None])[:, None]
    if rows.shape[1] > 2:
        mask[0, 0, 2] = False  # sees no key
    ids, counts = cases.pack_lists(mask)
    options: dict[str, Any] = {"kv_lengths": jnp.array(case.lengths, jnp.int32)}
    options |= {"scale": case.scale, "return_lse": True}
    if case.offset is not None:
        options["query_offset"] = jnp.array(case.offset, jnp.int32)
    place = np.minimum(positions // size - rows[:, :1], rows.shape[1] - 1)
    sees = np.ones((batch, 1, positions.shape[1], len(keys)), bool)
    if case.op != "dense":
        options["selection"] = BlockSelection(jnp.asarray(ids), jnp.asarray(counts), size)
        sees = np.stack([one[:, at] for one, at in zip(mask, place, strict=True)])
        sees = np.repeat(sees, size, axis=-1)
    sees = sees & (keys <= positions[..., None])[:, None] & is_key[:, None, None]
    sees = np.repeat(sees, num_heads // sees.shape[1], axis=1)
    arrays = tuple(jnp.asarray(x, case.dtype) for x in (query, key, value))
    return arrays, options, sees


def cotangents(case: Case) -> tuple[jax.Array, jax.Array]:
    """Draws the loss's weights of outputs and log-sum-exps, 0 where a query is padding."""
    rng = np.random.default_rng(1)
    shape = (*case.positions.shape, case.heads[0], case.head_dim)
    grad, grad_lse = rng.standard_normal(shape), rng.standard_normal(shape[:-1])
    is_padding = case.positions >= np.array(case.lengths)[:, None]
    grad[is_padding] = grad_lse[is_padding] = 0.0
    return jnp.asarray(grad, jnp.float32), jnp.asarray(grad_lse, jnp.float32)


def loss(case: Case, options: dict[str, Any], query, key, value) -> jax.Array:
    """Returns a weighted sum of outputs and log-sum-exps, for a call like a user's."""
    if case.layer is not None:
        others = jnp.full_like(key, jnp.nan)
        stacked = [[others] * 3, [others] * 3]
        stacked[0][case.layer], stacked[1][case.layer] = key, value
        key, value = (jnp.stack(x) for x in stacked)
        options = options | {"layer": jnp.asarray(case.layer, jnp.int32)}
    out, lse = OPERATIONS[case.op](query, key, value, **options)
    grad, grad_lse = cotangents(case)
    # A row without keys has a constant log-sum-exp of -inf.
    lse = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.sum(out.astype(jnp.float32) * grad) + jnp.sum(lse * grad_lse)


@functools.cache
def expected(case: Case) -> tuple[np.ndarray, ...]:
    """Computes gradients by autodiff of masked attention in float32."""
    arrays, _, sees = draw(case)
    grad, grad_lse = cotangents(case)

    def total(query, key, value):
        total = jnp.zeros((), jnp.float32)
        for row in range(len(case.lengths)):
            out, lse = reference.masked_attention(
                query[row], key[row], value[row], sees[row], case.scale
            )
            total += jnp.sum(out * grad[row])
            total += jnp.sum(jnp.where(sees[row].any(-1).T, lse, 0.0) * grad_lse[row])
        return total

    wide = (np.nan_to_num(np.asarray(x).astype(np.float32)) for x in arrays)
    return tuple(np.asarray(x) for x in jax.jit(jax.grad(total, (0, 1, 2)))(*wide))


def gradients(case: Case, **options: Any) -> tuple[jax.Array, ...]:
    """Computes the library's gradients."""
    arrays, own, _ = draw(case)
    of = jax.grad(functools.partial(loss, case, own | options), (0, 1, 2))
    return jax.jit(of)(*arrays)


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


@pytest.mark.parametrize("case", slow_unless(KEPT.__contains__, CASES), ids=str)
def test_gradients_are_those_of_masked_attention(case):
    found = gradients(case, kernel_config=KernelConfig(dense_rows=32, dense_keys=24, block_step=2))
    for one, wanted in zip(found, expected(case), strict=True):
        assert one.dtype == case.dtype and np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(
            np.asarray(one, np.float32), wanted, **tolerance("gradient", case.dtype)
        )
    again = gradients(case, kernel_config=KernelConfig(dense_rows=32, dense_keys=24, block_step=2))
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))


KERNELS = (
    Case(block_size=64, head_dim=64, lengths=(193, 70), num_queries=193, dtype="bfloat16"),
    Case(op="decode", block_size=64, head_dim=64, lengths=(193, 70), dtype="bfloat16"),
    Case(op="dense", block_size=64, head_dim=64, lengths=(128, 70), num_queries=90, offset=(38, 0),
         dtype="bfloat16"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.interpreted
def test_the_gradient_of_a_token_is_the_same_with_the_kernel_for_other_gpus(monkeypatch):
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "8.0")
    test_kernels_go_forward_and_gradients_are_the_same(KERNELS[1], monkeypatch)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "case",
    slow_unless(lambda case: ON_GPU or case.op == "decode", KERNELS),
    ids=lambda case: case.op,
)
def test_kernels_go_forward_and_gradients_are_the_same(case, monkeypatch):
    if not ON_GPU and case.op != "decode" and jax.__version_info__ < (0, 12):
        pytest.skip("before JAX 0.12 its interpreter cannot run the kernel")
    config = None if ON_GPU else KernelConfig(interpret=True)
    if config is not None:
        monkeypatch.setattr(hopper, "num_multiprocessors", lambda: 2)
    found = gradients(case, implementation="mosaic_gpu", kernel_config=config)
    for one, wanted in zip(found, expected(case), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), wanted, **tolerance("gradient", case.dtype)
        )
        distance = np.linalg.norm(np.asarray(one, np.float32) - wanted) / np.linalg.norm(wanted)
        assert distance < tolerance("kernel", case.dtype)["atol"]


def transformed(how: str, function, x: jax.Array) -> jax.Array:
    """Returns `function(x) + function(2 x)` through a transformation."""
    if how == "vmap":
        return jnp.sum(jax.vmap(function)(jnp.stack([x, 2 * x])))
    if how == "scan":
        total, _ = jax.lax.scan(
            lambda total, x: (total + function(x), None), 0.0, jnp.stack([x, 2 * x])
        )
        return total
    if how == "checkpoint":
        function = jax.checkpoint(function)
    if how == "shard_map":
        mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Auto,))
        inside, spec = function, PartitionSpec("batch")
        function = jax.shard_map(
            lambda x: jax.lax.psum(inside(x), "batch"),
            mesh=mesh,
            in_specs=spec,
            out_specs=PartitionSpec(),
        )
    return function(x) + function(2 * x)


@pytest.mark.parametrize(
    "how", slow_unless("vmap".__ne__, ["vmap", "scan", "checkpoint", "shard_map"])
)
def test_transformations_change_only_rounding(how):
    query = jax.random.normal(jax.random.key(0), (1, 48, 4, 16))
    selection = full_selection(jnp.arange(3, dtype=jnp.int32)[None], 3, block_size=16)
    key = query[:, :, :2] * 0.7

    def function(query):  # keys and values are the same on all devices
        out = block_sparse_attention(query, key, key, selection)
        return jnp.sum(jnp.sin(out) + jnp.sin(dense_attention(query, key, key)))

    wanted = jax.grad(lambda x: function(x) + function(2 * x))(query)
    found = jax.jit(jax.grad(functools.partial(transformed, how, function)))(query)
    np.testing.assert_allclose(found, wanted, **tolerance("gradient"))


@pytest.mark.slow
def test_shards_on_two_devices_have_the_gradients_of_the_whole(run_python):
    run_python(SHARDED, devices=2)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from sketchwalk_jax import SketchWalkConfig, sketchwalk_attention

config = SketchWalkConfig.recommended(block_size=16, density=0.5, min_tokens=64)
query = jax.random.normal(jax.random.key(0), (2, 64, 4, 16))
key = query[:, :, :1] * 0.7

def function(query, key):
    out, walk = sketchwalk_attention(query, key, key, policy=config)
    out, _ = sketchwalk_attention(out + query, key, key, walk, policy=config)
    return jnp.sum(jnp.sin(out))

mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
inside = lambda *arrays: jax.lax.psum(function(*arrays), "x")
sharded = jax.shard_map(inside, mesh=mesh, in_specs=P("x"), out_specs=P())
wanted = jax.jit(jax.grad(function, (0, 1)))(query, key)
found = jax.jit(jax.grad(sharded, (0, 1)))(query, key)
for one, other in zip(found, wanted):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
"""


def temporary_bytes(attend, num_tokens: int) -> int:
    """Returns the bytes that the gradient needs besides arguments and results."""
    shape = jax.ShapeDtypeStruct((1, num_tokens, 2, 16), jnp.float32)
    of = jax.grad(lambda *x: jnp.sum(attend(*x)), (0, 1, 2))
    return jax.jit(of).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


def listed(query, key, value):
    rows = query.shape[1] // 16
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    ids = jnp.minimum(jnp.arange(4, dtype=jnp.int32)[None, :], row)
    counts = jnp.full((1, 1, rows), 4, jnp.int32)
    return block_sparse_attention(query, key, value, BlockSelection(ids[None, None], counts, 16))


@pytest.mark.parametrize("attend", [listed, dense_attention])
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
    arrays = jax.random.normal(jax.random.key(1), (3, 1, 80, 2, 16))
    sums, of_output, of_walk = cotangents_of_a_layer(*arrays)
    assert sums[1] > 0.0
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0.1 for x in of_output)
    assert not any(np.any(x) for x in of_walk)


def listed_sum(x):
    selection = full_selection(jnp.arange(1, dtype=jnp.int32)[None], 1, block_size=16)
    return jnp.sum(block_sparse_attention(x, x * 2.0, x, selection))


ATTENTIONS = {
    "dense": lambda x: jnp.sum(dense_attention(x, x * 2.0, x)),
    "lists": listed_sum,
    "layer": lambda x: jnp.sum(sketchwalk_attention(x, x * 2.0, x)[0]),
}
REFUSED = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
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
