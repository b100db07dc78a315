"""Compares sparse with dense attention layer by layer, on the hidden states of the dense model.

The model runs densely. In every sparse layer the policy selects from the dense queries and keys,
with its walk carried from layer to layer; its output is compared and discarded:

* *mass recall*, the share of dense attention's softmax weights on selected blocks, mean over query
  tokens and heads. It is `exp(lse_sparse - lse_dense)`, with the log-sum-exp of the scores over the
  selected and over all keys, so block indices per head need no special case;
* *output error*, `‖o_sparse - o_dense‖ / ‖o_dense‖` over all query tokens and heads;
* *bytes read* for every decoded token, counted from the block indices (`decode_bytes`): keys,
  values, and the statistics that selection reads. The query heads of a group read keys and values
  of one key/value head, each token once, so a group reads the union of its heads' blocks.

On a mesh, ranks share the weights, but each keeps all keys and values and measures all heads and
query blocks.
"""

import dataclasses
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention.api import dense_attention, prepare_lists
from sketchwalk_jax.attention.differentiable import attend_lists
from sketchwalk_jax.inference.cache import Cache, init_cache, sparse_layers
from sketchwalk_jax.inference.cached_layer import (
    Settings,
    attention_by_layer,
    join_layers,
    write_and_update,
)
from sketchwalk_jax.inference.exchange import Exchange
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import Attend, run_layers
from sketchwalk_jax.policies.base import LayerShape, Policy, Span
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sharding import (
    choose_mixture,
    constrain,
    embed_tokens,
    on_every_rank,
    placement_of,
)

PyTree = Any


def tokens_read(
    selection: BlockSelection, positions: Int[Array, "B"], *, num_kv_heads: int
) -> Int[Array, "B"]:
    """Counts the keys that one decoded token reads, summed over the key/value heads.

    Args:
      selection: Its block indices, one query row.
      positions: Its position in each sequence; later tokens of its block are not read.
      num_kv_heads: Key/value heads `K`.

    Returns:
      For each sequence `Σ_k |union of the blocks of the query heads of group k|` in tokens, int32.

    Raises:
      ValueError: If the selection has several rows, or lists that are neither shared by the heads
        nor a multiple of the key/value heads.
    """
    batch, num_lists, num_rows, width = selection.ids.shape
    if num_rows != 1:
        raise ValueError(f"selection must have the one row of a decoded token, got {num_rows}")
    if num_lists != 1 and num_lists % num_kv_heads:
        raise ValueError(
            f"selection must have one list or a multiple of the {num_kv_heads} key/value heads, "
            f"got {num_lists}"
        )
    groups = 1 if num_lists == 1 else num_kv_heads
    nothing = jnp.iinfo(jnp.int32).max
    is_listed = (
        jnp.arange(width, dtype=jnp.int32)[None, None, None, :] < selection.counts[..., None]
    )
    ids = jnp.where(is_listed, selection.ids, nothing)
    ids = jnp.sort(ids.reshape(batch, groups, -1), axis=-1)
    is_first = jnp.concatenate(
        [jnp.ones_like(ids[..., :1], bool), ids[..., 1:] != ids[..., :-1]], axis=-1
    )
    size = selection.block_size
    starts = jnp.where(is_first & (ids != nothing), ids, 0) * size
    tokens = jnp.clip(positions[:, None, None] + 1 - starts, 0, size)
    tokens = jnp.where(is_first & (ids != nothing), tokens, 0)
    return jnp.sum(tokens, axis=(1, 2)) * (num_kv_heads // groups)


def decode_bytes(
    policy: Policy,
    selection: BlockSelection | None,
    positions: Int[Array, "B"],
    *,
    shape: LayerShape,
) -> Float[Array, "3 B"]:
    """Counts the bytes that one layer reads for one decoded token of each sequence.

    Args:
      policy: The policy that selected.
      selection: Its block indices for the token, or `None` for a dense layer.
      positions: The token's position in each sequence.
      shape: Sizes of the layer, and the type of its keys and values.

    Returns:
      Bytes of selected keys, of selected values, and of the statistics that selection reads,
      float32; a dense layer reads all keys and values.

    Raises:
      ValueError: As `tokens_read`.

    Example:
      >>> from sketchwalk_jax.policies import by_name
      >>> layer = LayerShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype=jnp.bfloat16)
      >>> decode_bytes(by_name("dense"), None, jnp.array([999]), shape=layer).tolist()
      [[256000.0], [256000.0], [0.0]]
    """
    if selection is None:
        tokens, metadata = (positions + 1) * shape.num_kv_heads, jnp.zeros(positions.shape)
    else:
        tokens = tokens_read(selection, positions, num_kv_heads=shape.num_kv_heads)
        metadata = policy.metadata_bytes(shape, positions)
    by_head = shape.head_dim * jnp.dtype(shape.dtype).itemsize
    read = tokens.astype(jnp.float32) * float(by_head)
    return jnp.stack([read, read, metadata.astype(jnp.float32)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProbeSums:
    """Sums over query tokens, for `L` sparse layers and `B` sequences; float32.

    Attributes:
      mass: Share of the softmax weights on selected blocks, `[L, B]`, mean over heads.
      squared_error: `‖o_sparse - o_dense‖²`, `[L, B]`.
      squared_norm: `‖o_dense‖²`, `[L, B]`.
      queries: Query tokens, `[L, B]`; 0 in phases in which the policy does not select.
      read: Bytes that decoding read, as `decode_bytes` counts them, `[L, 3, B]`; 0 in prefill.
    """

    mass: Float[Array, "L B"]
    squared_error: Float[Array, "L B"]
    squared_norm: Float[Array, "L B"]
    queries: Float[Array, "L B"]
    read: Float[Array, "L 3 B"]

    def __add__(self, other: Self) -> Self:
        """Adds the sums of two sets of query tokens."""
        return jax.tree.map(lambda x, y: x + y, self, other)

    def by_layer(self) -> tuple[list[float], list[float]]:
        """Mass recall and output error in every sparse layer, over all sequences.

        Empty lists if the policy was not measured.
        """
        mass, error, norm, queries = map(
            _of_sequences, (self.mass, self.squared_error, self.squared_norm, self.queries)
        )
        if not queries.all():
            return [], []
        return (mass / queries).tolist(), np.sqrt(error / norm).tolist()

    def bytes_per_token(self) -> Float[np.ndarray, "3"] | None:
        """Averages the bytes of keys, values and statistics read over query tokens.

        Summed over the sparse layers. `None` if the policy was not measured.
        """
        queries = _of_sequences(self.queries)
        if not queries.size or not queries.all():
            return None
        return (_of_sequences(self.read) / queries[:, None]).sum(axis=0)


def _of_sequences(x: Array | np.ndarray) -> Float[np.ndarray, "L *rest"]:
    """Sums an array over sequences, in float64."""
    return np.asarray(x, np.float64).sum(axis=-1)


def _compare(
    sparse: Any, dense: Any, is_query: Bool[Array, "B T"], read: Float[Array, "3 B"] | None = None
) -> ProbeSums:
    """Compares outputs and log-sum-exps of one layer, summed over unpadded queries."""

    def total(x: Float[Array, "B T *rest"]) -> Float[Array, "B"]:
        mask = is_query.reshape(is_query.shape + (1,) * (x.ndim - 2))
        return jnp.sum(jnp.where(mask, x, 0.0), axis=tuple(range(1, x.ndim)))

    share = jnp.exp(jnp.minimum(sparse[1] - dense[1], 0.0))  # above 1 only by rounding
    wide = dense[0].astype(jnp.float32)
    return ProbeSums(
        mass=total(jnp.mean(share, axis=-1)),
        squared_error=total((sparse[0].astype(jnp.float32) - wide) ** 2),
        squared_norm=total(wide**2),
        queries=jnp.sum(is_query, axis=1, dtype=jnp.float32),
        read=jnp.zeros((3, len(is_query)), jnp.float32)
        if read is None
        else jnp.where(is_query[:, 0], read, 0.0),
    )


def _zeros(*layers: int, batch: int) -> ProbeSums:
    nothing = jnp.zeros((*layers, batch), jnp.float32)
    read = jnp.zeros((*layers, 3, batch), jnp.float32)
    return ProbeSums(nothing, nothing, nothing, nothing, read)


def _probe_attention(
    span: Span,
    *,
    is_fresh: bool,
    is_sparse: bool,
    first_sparse: int,
    policy: Policy,
    settings: Settings,
) -> Attend:
    """Attends densely to the span's tokens, and compares the policy's output with the result."""
    start = None if is_fresh else span.start(policy.block_size)
    exchange = Exchange(span, policy, start)

    def attend(query: Array, key: Array, value: Array, layer: Array, state: PyTree) -> Any:
        cache, walk = state
        index = layer - first_sparse if is_sparse else None
        tokens = exchange.gather(query, key, value, cache, layer)
        cache, own = write_and_update(
            cache, tokens, layer=layer, index=index, exchange=exchange, settings=settings
        )
        keys, values, _ = exchange.attended(cache, tokens, layer)
        where: dict[str, Any] = {"layer": layer, "kv_lengths": span.end, "return_lse": True}
        dense = dense_attention(query, keys, values, query_offset=start, **where)
        sums, read = None, None
        if is_sparse and span.phase not in policy.phases:
            sums = _zeros(batch=len(span.end))
        elif is_sparse:
            selection, walk = policy.select(query, keys, own, walk, layer=layer, span=span)
            first_block = None if span.is_token else span.first_block
            given = prepare_lists(query, keys, values, selection, first_block, **where)
            sparse = attend_lists(*given)
            if span.is_token:
                kv_heads, head_dim = keys.shape[3:]
                shape = LayerShape(query.shape[2], kv_heads, head_dim, keys.dtype)
                read = decode_bytes(policy, selection, span.positions, shape=shape)
            sums = _compare(sparse, dense, span.valid, read)
        return dense[0], (cache, walk), (jnp.zeros(span.end.shape), sums)

    return attend


def _probe_layers(
    params: PyTree,
    tokens: Int[Array, "B T"],
    span: Span,
    cache: Cache,
    *,
    is_fresh: bool,
    settings: Settings,
) -> tuple[Cache, ProbeSums]:
    """Runs all layers on the span's tokens; returns the cache, lengths unchanged, and the sums."""
    policy, size = settings.policy, settings.policy.block_size
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    placement = placement_of(params, settings.model_config)

    def make(**layers: Any) -> Attend:
        def attend(span: Span, *arrays: Any) -> Any:
            own = _probe_attention(span, is_fresh=is_fresh, settings=settings, **layers)
            return own(*arrays)

        return partial(on_every_rank(attend, placement), span)

    batch, num_rows = span.rows(size).shape
    walk = policy.init_walk(batch=batch, num_rows=num_rows, num_blocks=cache.capacity // size)
    _, (cache, _), found = run_layers(
        params,
        embed_tokens(params, tokens, placement),
        span.start(size)[:, None] + column,
        (cache, walk),
        model_config=settings.model_config,
        layers=attention_by_layer(make, settings),
        is_token=span.valid,
        mix=choose_mixture(placement),
    )
    sums = join_layers(found)[1]
    sums = _zeros(0, batch=batch) if sums is None else sums
    return constrain((cache, sums), placement)


@partial(jax.jit, static_argnames=("model_config", "policy"))
def probe_prefill(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    *,
    model_config: ModelConfig,
    policy: Policy,
) -> tuple[ProbeSums, Cache]:
    """Compares a policy's attention with dense attention while prompts are read.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded; `T` is a multiple of the policy's block size.
      lengths: Tokens of each prompt.
      model_config: The model.
      policy: The policy.

    Returns:
      The sums over prompt tokens, and the dense cache with the policy's statistics.
    """
    batch, num_tokens = tokens.shape
    settings = Settings(model_config=model_config, policy=policy, implementation="xla")
    dtype = params["embed"]["embedding"].dtype
    cache = init_cache(model_config, policy, batch=batch, max_tokens=num_tokens, dtype=dtype)
    column = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    nothing = jnp.zeros((batch,), jnp.int32)
    span = Span(nothing, column < lengths[:, None], lengths, lengths)
    cache, sums = _probe_layers(params, tokens, span, cache, is_fresh=True, settings=settings)
    return sums, dataclasses.replace(cache, lengths=lengths)


@partial(jax.jit, static_argnames=("model_config", "policy"))
def probe_decode(
    params: PyTree,
    cache: Cache,
    continuation: Int[Array, "B U"],
    num_told: Int[Array, "B"],
    *,
    model_config: ModelConfig,
    policy: Policy,
) -> ProbeSums:
    """Compares them while tokens of `continuation` are fed one by one, `num_told` of each."""
    settings = Settings(model_config=model_config, policy=policy, implementation="xla")
    num_sparse = len(sparse_layers(model_config, policy))

    def one_token(step: Array, carry: tuple[Cache, ProbeSums]) -> tuple[Cache, ProbeSums]:
        cache, sums = carry
        active = step < num_told
        span = Span.of_tokens(cache.lengths, policy.block_size, active)
        token = continuation[:, step][:, None]
        cache, found = _probe_layers(params, token, span, cache, is_fresh=False, settings=settings)
        lengths = cache.lengths + active.astype(jnp.int32)
        return dataclasses.replace(cache, lengths=lengths), sums + found if num_sparse else sums

    carry = (cache, _zeros(num_sparse, batch=len(num_told)))
    return jax.lax.fori_loop(0, jnp.max(num_told), one_token, carry)[1]
