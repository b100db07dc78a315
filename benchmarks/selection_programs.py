"""What `selection.py` times: loops in which one layer after another observes, selects or attends.

Every loop is one program. Its steps rotate over the layers' inputs and wait for one another, so
that nothing is computed once for all of them; what they make are results of the loop, so that
nothing is left out.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import kernel_inputs
from jaxtyping import Array, Int
from kernel_inputs import Shape
from loops import Step, loop

import sketchwalk_jax as sw
from sketchwalk_jax.dispatch import selection_kernels
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.base import LayerShape, PrefillPolicy, Span
from sketchwalk_jax.selection import BlockSelection

PyTree = Any
LAYERS = 4
KERNELS = selection_kernels(None)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Queries, keys and values of whole prompts, of several layers; normal entries.

    Attributes:
      shape: Their sizes.
      layers: `(query [B T N H], key [B T K H], value [B T K H])` of each layer.
      span: The tokens of whole prompts.
    """

    shape: Shape
    layers: Sequence[tuple[Array, Array, Array]]
    span: Span

    @classmethod
    def draw(cls, shape: Shape) -> "Inputs":
        """Draws them."""
        heads = (shape.heads[0], shape.heads[1], shape.heads[1])
        layers = []
        for index in range(LAYERS):
            keys = jax.random.split(jax.random.key(index), 3)
            arrays = [kernel_inputs.draw(keys[n], shape, heads[n], shape.tokens) for n in range(3)]
            layers.append((arrays[0], arrays[1], arrays[2]))
        return cls(shape, layers, kernel_inputs.whole_prompt(shape))

    @property
    def layer_shape(self) -> LayerShape:
        """Sizes of a layer."""
        shape = self.shape
        return LayerShape(*shape.heads, shape.head_dim, jnp.dtype(shape.dtype))

    def num_blocks(self, policy: Policy) -> int:
        """Blocks of the policy's size."""
        return self.shape.tokens // policy.block_size


def _replaced(values: tuple[PyTree, ...], index: int, value: PyTree) -> tuple[PyTree, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _first_entry(tree: PyTree) -> Int[Array, ""]:
    """One entry of a result, for the next step to wait for."""
    leaf = jax.tree.leaves(tree)[0]
    return leaf[(0,) * leaf.ndim].astype(jnp.int32)


def prefill_step(policy: Policy, inputs: Inputs, *, selects: bool) -> Step:
    """Observes a whole prompt and, if asked, selects for all its rows.

    The state is `(walk, entry, results)` with a result for each layer, statistics or lists; the
    inputs `(queries and keys of the layers, span, knob)`.
    """
    sizes = {"batch": inputs.shape.batch, "num_blocks": inputs.num_blocks(policy)}

    def step(state: PyTree, given: PyTree, index: int) -> PyTree:
        walk, entry, results = state
        layers, span, knob = given
        own = policy.with_traced(knob) if isinstance(policy, PrefillPolicy) else policy
        walk, entry, (query, key) = jax.lax.optimization_barrier((walk, entry, layers[index]))
        statistics = own.init_statistics(inputs.layer_shape, **sizes)
        result = own.observe(query, key, statistics, span=span, kernels=KERNELS)
        if selects:
            layer = jnp.zeros((), jnp.int32)
            result, walk = own.select(
                query, key[None], result, walk, layer=layer, span=span, kernels=KERNELS
            )
        return walk, _first_entry(result), _replaced(results, index, result)

    return step


def prefill_loop(
    policy: Policy, inputs: Inputs, *, selects: bool, num_layers: int, rounds: int
) -> tuple[Callable[..., PyTree], PyTree, PyTree]:
    """The loop of `prefill_step`, the shapes of its state, and its inputs without the knob."""
    step = prefill_step(policy, inputs, selects=selects)
    layers = tuple((query, key) for query, key, _ in inputs.layers[:num_layers])
    num_blocks, batch = inputs.num_blocks(policy), inputs.shape.batch
    knob = jax.ShapeDtypeStruct((), jnp.float32)

    def first() -> PyTree:
        walk = policy.init_walk(batch=batch, num_rows=num_blocks, num_blocks=num_blocks)
        return walk, jnp.zeros((), jnp.int32)

    walk, entry = jax.eval_shape(first)
    # What a step makes tells the shapes of all results.
    made = jax.eval_shape(
        lambda walk, entry, given: step((walk, entry, (None,)), given, 0),
        walk,
        entry,
        (layers[:1], inputs.span, knob),
    )
    state = (walk, entry, made[2] * num_layers)
    return loop(step, num_layers=num_layers, rounds=rounds), state, (layers, inputs.span)


def decode_step(policy: Policy, *, selects: bool) -> Step:
    """Observes one token and, if asked, selects for it.

    The state is `(walk, entry, statistics of the layers, lists of the layers)`; the inputs
    `(queries and keys of the token, stacked keys, span)`.
    """

    def step(state: PyTree, given: PyTree, index: int) -> PyTree:
        walk, entry, statistics, selections = state
        tokens, keys, span = given
        walk, entry, (query, key), own = jax.lax.optimization_barrier(
            (walk, entry, tokens[index], statistics[index])
        )
        own = policy.observe(query, key, own, span=span, kernels=KERNELS)
        if selects:
            selection, walk = policy.select(
                query, keys, own, walk, layer=jnp.int32(index), span=span, kernels=KERNELS
            )
            selections = _replaced(selections, index, selection)
        entry = _first_entry(selections[index] if selects else own)
        return walk, entry, _replaced(statistics, index, own), selections

    return step


def decode_loop(
    policy: Policy, inputs: Inputs, keys: Any, *, selects: bool, rounds: int
) -> tuple[Callable[..., PyTree], PyTree, PyTree]:
    """The loop of `decode_step`, the shapes of its state, and its inputs.

    Args:
      policy: The policy.
      inputs: What the cache holds; the last token is the one decoded.
      keys: Stacked keys of the layers `[L B S K H]`.
      selects: Whether the policy selects, or observes only.
      rounds: Rounds over the layers.
    """
    step = decode_step(policy, selects=selects)
    tokens = tuple((query[:, -1:], key[:, -1:]) for query, key, _ in inputs.layers)
    positions = jnp.full((inputs.shape.batch,), inputs.shape.tokens - 1, jnp.int32)
    given = (tokens, keys, Span.of_tokens(positions, policy.block_size))
    batch, num_blocks = inputs.shape.batch, inputs.num_blocks(policy)

    def first() -> PyTree:
        own = policy.init_statistics(inputs.layer_shape, batch=batch, num_blocks=num_blocks)
        walk = policy.init_walk(batch=batch, num_rows=1, num_blocks=num_blocks)
        return walk, jnp.zeros((), jnp.int32), (own,) * LAYERS

    walk, entry, statistics = jax.eval_shape(first)
    selections: tuple[PyTree, ...] = (None,) * LAYERS
    if selects:
        made = jax.eval_shape(
            lambda state, given: step(state, given, 0),
            (walk, entry, statistics, selections),
            given,
        )
        selections = made[3][:1] * LAYERS
    state = (walk, entry, statistics, selections)
    return loop(step, num_layers=LAYERS, rounds=rounds), state, given


def observe_prompt(policy: Policy, inputs: Inputs) -> Callable[..., PyTree]:
    """What fills the statistics of one layer."""
    sizes = {"batch": inputs.shape.batch, "num_blocks": inputs.num_blocks(policy)}

    def observe(query: Array, key: Array, span: Span) -> PyTree:
        statistics = policy.init_statistics(inputs.layer_shape, **sizes)
        return policy.observe(query, key, statistics, span=span, kernels=KERNELS)

    return observe


def attend_prompt(query: Array, key: Array, value: Array, selection: BlockSelection) -> Array:
    """Attention of a whole prompt over its lists."""
    return sw.block_sparse_attention(query, key, value, selection)


def attend_token(query: Array, given: PyTree, index: int) -> Array:
    """Attention of one token over its list: a step, whose result is the next layer's query."""
    keys, values, selections, lengths = given
    return sw.block_sparse_decode(
        query, keys, values, selections[index], layer=index, kv_lengths=lengths
    )
