"""What `kernels.py` feeds to both sides: several sets of each input, larger than any cache.

And loops of steps that depend on each other, as those of layers do.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

import sketchwalk_jax as sw
from sketchwalk_jax.dispatch import selection_kernels
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.selection import block_budget, select_blocks

PyTree = Any
Step = Callable[[PyTree, PyTree, int], PyTree]  # state, inputs of all layers, layer
KERNELS = selection_kernels(None)
CACHE_BYTES = 2**29  # sets rotate over at least ten times the 50 MB of the chip's own cache
LAYERS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One line of the table."""

    op: str
    tokens: int
    density: float
    batch: int = 1
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"

    @property
    def num_blocks(self) -> int:
        """Blocks of a sequence."""
        return self.tokens // self.block_size

    @property
    def config(self) -> sw.SketchWalkConfig:
        """The policy that selects."""
        return sw.SketchWalkConfig.paper(density=self.density, block_size=self.block_size)


def random_lists(key: jax.Array, shape: Shape, rows: jax.Array) -> sw.BlockSelection:
    """Lists as long as the density asks for, of blocks drawn at random."""
    budget = block_budget(shape.num_blocks, density=shape.density, sink_blocks=1, local_blocks=1)
    rows = jnp.broadcast_to(rows, (shape.batch, rows.shape[-1]))
    select = jax.jit(
        functools.partial(
            select_blocks,
            sink_blocks=1,
            local_blocks=1,
            max_count=int(budget[-1]),
            block_size=shape.block_size,
        )
    )
    scores = jax.random.uniform(key, (*rows.shape, shape.num_blocks))
    return select(scores, rows, jnp.asarray(budget)[rows])


def draw(key: jax.Array, shape: Shape, heads: int, tokens: int, *lead: int) -> jax.Array:
    """Normal entries `[*lead, B, tokens, heads, H]`."""
    size = (*lead, shape.batch, tokens, heads, shape.head_dim)
    return jax.random.normal(key, size, jnp.dtype(shape.dtype))


def num_sets(shape: Shape) -> int:
    """Sets of queries, keys and values that do not fit in a cache together."""
    width = shape.heads[0] + 2 * shape.heads[1]
    size = shape.batch * shape.tokens * width * shape.head_dim * 2
    return max(2, min(8, math.ceil(CACHE_BYTES / size)))


def prefill_sets(shape: Shape) -> list[Any]:
    """Queries, keys, values and lists of whole prompts."""
    rows = jnp.arange(shape.num_blocks, dtype=jnp.int32)
    sets = []
    for index in range(num_sets(shape)):
        keys = jax.random.split(jax.random.key(index), 4)
        heads = (shape.heads[0], shape.heads[1], shape.heads[1])
        arrays = [draw(keys[n], shape, heads[n], shape.tokens) for n in range(3)]
        sets.append((*arrays, random_lists(keys[3], shape, rows)))
    return sets


def decode_inputs(shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array, list[Any]]:
    """A query, a cache of several layers filled to the end, and lists for each layer."""
    keys = jax.random.split(jax.random.key(0), 3 + LAYERS)
    query = draw(keys[0], shape, shape.heads[0], 1)
    cache = [draw(one, shape, shape.heads[1], shape.tokens, LAYERS) for one in keys[1:3]]
    row = jnp.array([shape.num_blocks - 1], jnp.int32)
    return query, *cache, [random_lists(one, shape, row) for one in keys[3:]]


def selection_sets(shape: Shape) -> list[Any]:
    """Queries and keys of whole prompts, and which tokens these are."""
    sets = []
    for index in range(num_sets(shape)):
        keys = jax.random.split(jax.random.key(index))
        arrays = [draw(keys[n], shape, shape.heads[n], shape.tokens) for n in range(2)]
        sets.append((*arrays, whole_prompt(shape)))
    return sets


def whole_prompt(shape: Shape) -> Span:
    """The tokens of whole prompts, which inference lays out once for all layers."""
    lengths = jnp.full((shape.batch,), shape.tokens, jnp.int32)
    return Span(
        jnp.zeros_like(lengths), jnp.ones((shape.batch, shape.tokens), bool), lengths, lengths
    )


def walked(key: jax.Array, shape: Shape, rows: int) -> sw.WalkState:
    """A walk that has passed a layer: its next step takes a product."""
    scores = jax.random.uniform(key, (shape.batch, rows, shape.num_blocks))
    index = jnp.arange(shape.num_blocks)
    causal = index[None, :] <= index[-rows:, None]
    return sw.WalkState(jnp.where(causal[None], scores, 0.0), jnp.ones((), jnp.int32))


def prefill_selection(shape: Shape) -> tuple[Callable[..., Any], Any]:
    """One step (a layer's observation and selection of whole prompts), and what it starts from."""
    config = shape.config
    layer = LayerShape(*shape.heads, shape.head_dim)
    empty = config.init_statistics(layer, batch=shape.batch, num_blocks=shape.num_blocks)

    def step(state: Any, inputs: Any, index: int) -> Any:
        walk, results = state
        # Nothing may be computed once for all rounds of the loop.
        walk, (query, key, span) = jax.lax.optimization_barrier((walk, inputs[index]))
        statistics = config.observe(query, key, empty, span=span, kernel_config=KERNELS)
        first = jnp.zeros((), jnp.int32)
        selection, walk = config.select(
            query, key[None], statistics, walk, layer=first, span=span, kernel_config=KERNELS
        )
        # All lists and statistics are results of the loop: none is left out.
        return walk, (*results[:index], (selection, statistics), *results[index + 1 :])

    rows = jnp.arange(shape.num_blocks, dtype=jnp.int32)
    lists = random_lists(jax.random.key(0), shape, rows)
    walk = walked(jax.random.key(1), shape, shape.num_blocks)
    return step, (walk, ((lists, empty),) * num_sets(shape))


def decode_selection(shape: Shape) -> tuple[Callable[..., Any], Any, list[Any]]:
    """One step (selection of a layer for one token), what it starts from, and sums of layers."""
    config = shape.config
    keys = jax.random.split(jax.random.key(1), 4)
    layer = LayerShape(*shape.heads, shape.head_dim)
    zeros = config.init_statistics(layer, batch=shape.batch, num_blocks=shape.num_blocks)
    inputs = [
        (
            draw(one, shape, shape.heads[0], 1),
            jax.tree.map(lambda x, k=one: jax.random.normal(k, x.shape) * 8.0, zeros),
        )
        for one in jax.random.split(keys[0], LAYERS)
    ]
    span = Span.of_tokens(jnp.full((shape.batch,), shape.tokens - 1, jnp.int32), shape.block_size)
    cache = (1, shape.batch, shape.tokens, shape.heads[1], shape.head_dim)

    def step(state: Any, inputs: Any, index: int) -> Any:
        walk, selections = state
        # Nothing may be computed once for all rounds of the loop.
        walk, (query, sums) = jax.lax.optimization_barrier((walk, inputs[index]))
        selection, walk = config.select(
            query,
            jnp.zeros(cache, query.dtype),  # the policy reads no key
            sums,
            walk,
            layer=jnp.zeros((), jnp.int32),
            span=span,
            kernel_config=KERNELS,
        )
        # All lists are results of the loop: none is left out.
        return walk, (*selections[:index], selection, *selections[index + 1 :])

    row = jnp.array([shape.num_blocks - 1], jnp.int32)
    selections = tuple(random_lists(keys[1], shape, row) for _ in range(LAYERS))
    return step, (walked(keys[2], shape, 1), selections), inputs


def loop(step: Step, *, num_layers: int, rounds: int) -> Callable[..., PyTree]:
    """A program of `count` times `rounds` rounds over the layers, from a state on.

    The number of inner rounds is known when it is compiled: a GPU asks the host whether to go on
    after all of them only.
    """

    def run(count: Int[Array, ""], state: PyTree, inputs: PyTree) -> PyTree:
        def one_round(_: Array, state: PyTree) -> PyTree:
            for index in range(num_layers):
                state = step(state, inputs, index)
            return state

        def some_rounds(_: Array, state: PyTree) -> PyTree:
            return jax.lax.fori_loop(0, rounds, one_round, state)

        return jax.lax.fori_loop(0, count, some_rounds, state)

    return run
