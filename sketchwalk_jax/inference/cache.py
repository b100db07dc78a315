"""The state of a batch of sequences: keys, values, a policy's statistics, lengths and density."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from sketchwalk_jax.memory import advice, num_bytes, show_bytes
from sketchwalk_jax.models.config import ModelConfig, check_model_config
from sketchwalk_jax.policies.base import LayerShape, Policy, Span, check_policy
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.precision import start_indices
from sketchwalk_jax.pytree import register
from sketchwalk_jax.sharding import Placement
from sketchwalk_jax.validation import check_dtype, check_integer, is_known


@register
@dataclasses.dataclass(frozen=True)
class Density:
    """Measured density: attended (query, key) pairs over all causal pairs, dense layers included.

    The counts are float32, per phase, layer and sequence.

    Attributes:
      prefill_pairs: Pairs attended to in prefill, `[L, B]` (mean over heads).
      prefill_causal: All causal pairs of the prompts, `[B]`.
      decode_pairs: Pairs attended to in decode, `[L, B]` (mean over heads).
      decode_causal: All causal pairs of the decoded tokens, `[B]`.
    """

    prefill_pairs: Float[Array, "L B"]
    prefill_causal: Float[Array, "B"]
    decode_pairs: Float[Array, "L B"]
    decode_causal: Float[Array, "B"]

    @classmethod
    def zeros(cls, num_layers: int, batch: int) -> "Density":
        """Returns counts of zero."""
        # Each field gets a buffer of its own: one buffer cannot be donated twice.
        shapes = ((num_layers, batch), (batch,), (num_layers, batch), (batch,))
        return cls(*(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def add(self, phase: str, pairs: Float[Array, "L B"], causal: Float[Array, "B"]) -> "Density":
        """Adds the counts of one call to `phase`, `"prefill"` or `"decode"`."""
        old = getattr(self, f"{phase}_pairs"), getattr(self, f"{phase}_causal")
        new = {f"{phase}_pairs": old[0] + pairs, f"{phase}_causal": old[1] + causal}
        return dataclasses.replace(self, **new)

    @property
    def prefill(self) -> Float[Array, "L"]:
        """Density of each layer over the prompts (NaN if no prompt was read)."""
        return jnp.sum(self.prefill_pairs, axis=1) / jnp.sum(self.prefill_causal)

    @property
    def decode(self) -> Float[Array, "L"]:
        """Density of each layer over the decoded tokens (NaN if there are none)."""
        return jnp.sum(self.decode_pairs, axis=1) / jnp.sum(self.decode_causal)

    @property
    def overall(self) -> Float[Array, ""]:
        """Density over both phases, all layers and all sequences."""
        pairs = jnp.sum(self.prefill_pairs) + jnp.sum(self.decode_pairs)
        causal = jnp.sum(self.prefill_causal) + jnp.sum(self.decode_causal)
        return pairs / (causal * float(self.prefill_pairs.shape[0]))


@register
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state that decoding needs of earlier tokens. Layers are stacked on the leading axis.

    Attributes:
      key: Keys after rotary embedding, `[L, B, S, K, H]`. `S` is the capacity in tokens. On a mesh
        with a `sequence` axis, all blocks of one rank come before the blocks of the next rank
        (`policies.ranks.Blocks`).
      value: Values, `[L, B, S, K, H]`.
      statistics: The policy's statistics of the tokens, from which it selects blocks. Every leaf
        has a leading axis of sparse layers.
      lengths: Number of tokens of each sequence, int32 `[B]`.
      density: Pairs attended to so far, and all causal pairs.
      made_for: The policy and layers that the statistics belong to, from `made_for`. Empty if there
        are no statistics.
    """

    key: Float[Array, "L B S K H"]
    value: Float[Array, "L B S K H"]
    statistics: Any
    lengths: Int[Array, "B"]
    density: Density
    made_for: tuple[Any, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Number of tokens that each sequence can hold."""
        return self.key.shape[2]

    def __repr__(self) -> str:
        """Describes the contents in one line, without printing arrays."""
        try:
            num_layers, batch, capacity = self.key.shape[:3]
            size = show_bytes(num_bytes(self))
            said = f"{num_layers} layers, {batch} sequences of {capacity} tokens, {self.key.dtype}"
            owner = self.made_for[1] if self.made_for else "none"
            lengths = show_numbers(self.lengths)
            return f"Cache({said}, {size}, lengths={lengths}, statistics of {owner})"
        except (AttributeError, TypeError, ValueError):  # JAX may put other leaves in
            return "Cache(...)"


def show_numbers(x: Any) -> str:
    """Shows a small array in a `repr`: its values if they are known, else dtype and shape."""
    if is_known(x) and np.size(x) <= 16:
        numbers = np.asarray(x)
        is_whole = numbers.dtype.kind in "biu"
        return str(numbers.tolist() if is_whole else numbers.astype(float).round(4).tolist())
    is_gone = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
    return f"{x.dtype}{list(x.shape)}" + " (donated)" * is_gone


def made_for(statistics: Any, model_config: ModelConfig, policy: Policy) -> tuple[Any, ...]:
    """Identifies statistics: sparse layers, policy, and the fields that change their meaning.

    The statistics of two caches have the same meaning if these values and the arrays' shapes agree.
    """
    if not jax.tree.leaves(statistics):
        return ()
    return (sparse_layers(model_config, policy), type(policy).__name__, *policy.statistics_key)


def sparse_layers(model_config: ModelConfig, policy: Policy) -> tuple[int, ...]:
    """Returns the layers in which a policy selects, in order; empty if it never selects."""
    layers = range(model_config.num_layers) if policy.phases else ()
    return tuple(layer for layer in layers if not policy.is_dense(layer))


def init_cache(
    model_config: ModelConfig,
    policy: Policy | None = None,
    *,
    batch: int,
    max_tokens: int,
    dtype: DTypeLike | None = None,
    sharding: jax.sharding.Sharding | Placement | None = None,
) -> Cache:
    """Makes an empty cache.

    Args:
      model_config: Configuration of the model.
      policy: The policy that the cache is for, such as `SketchWalkConfig.recommended(density=0.2)`
        or `Dense()`. It decides which statistics the cache keeps. Default:
        `SketchWalkConfig.recommended(plan=model_config.plan)`.
      batch: Number of sequences.
      max_tokens: Number of tokens that the cache must hold for each sequence. Rounded up to whole
        blocks; on a mesh with a `sequence` axis, to the same number of blocks for each rank.
      dtype: Type of keys and values. Default: the dtype of the model.
      sharding: Sharding of keys and values; or a `Placement`, which places the whole cache on a
        mesh. Calls with parameters on a mesh need a cache made with their `Placement`. Each device
        then holds only its share.

    Returns:
      A `Cache` with lengths of zero.

    Raises:
      ValueError: If a size is not positive, the model's context is shorter than `max_tokens`, the
        mesh's `data` axis does not divide `batch`, or `policy` is not a policy.
      NotImplementedError: If the policy cannot select on the mesh's `sequence` axis.
    """
    check_model_config(model_config)
    policy = RecommendedConfig(plan=model_config.plan) if policy is None else policy
    check_policy(policy)
    check_integer("batch", batch)
    check_integer("max_tokens", max_tokens)
    if max_tokens > model_config.context_length:
        raise ValueError(
            f"max_tokens must not exceed the model's context of "
            f"{model_config.context_length} tokens, got {max_tokens}"
        )
    num_blocks = -(-max_tokens // policy.block_size)
    dtype = check_dtype("dtype", model_config.dtype if dtype is None else dtype)
    placement = sharding if isinstance(sharding, Placement) else None
    device = None if isinstance(sharding, Placement) else sharding
    heads, head_dim = model_config.num_kv_heads, model_config.head_dim
    shape = LayerShape(model_config.num_heads, heads, head_dim, dtype)
    if placement is not None:
        placement.check_batch(batch)
        placement.check_policy(policy)
        num_blocks = placement.num_blocks(num_blocks)
        heads, shape = placement.num_kv_heads, placement.layer_shape(policy, dtype)
    size = (model_config.num_layers, batch, num_blocks * policy.block_size, heads, head_dim)
    num_sparse = len(sparse_layers(model_config, policy))

    def make() -> Cache:
        one_layer = policy.init_statistics(shape, batch=batch, num_blocks=num_blocks)
        return Cache(
            key=jnp.zeros(size, dtype, device=device),
            value=jnp.zeros(size, dtype, device=device),
            statistics=jax.tree.map(
                lambda x: jnp.broadcast_to(x[None], (num_sparse, *x.shape)), one_layer
            ),
            lengths=jnp.zeros((batch,), jnp.int32),
            density=Density.zeros(model_config.num_layers, batch),
            made_for=made_for(one_layer, model_config, policy),
        )

    with advice(cache=2 * math.prod(size) * dtype.itemsize):
        if placement is None:
            return make()
        return jax.jit(lambda: spread_cache(make(), placement, policy))()


def spread_cache(cache: Cache, placement: Placement | None, policy: Policy) -> Cache:
    """Spreads the cache over a mesh, under `jit`; returns it unchanged on one device."""
    if placement is None:
        return cache
    shardings = placement.cache(policy)
    arrays = {name: getattr(cache, name) for name in shardings}
    return dataclasses.replace(cache, **jax.lax.with_sharding_constraint(arrays, shardings))


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """The placement of the prompts' columns when the prompts are read chunk by chunk.

    Columns are moved so that the first chunk starts at a block boundary. If the cache ends inside a
    block, the first chunk begins with padding. New column `j` of sequence `b`
    is column `j - shift[b]` of its prompt.

    Attributes:
      num_chunks: Number of chunks.
      chunk_size: Tokens per chunk, a multiple of the block size.
      shift: Number of columns by which each sequence is moved, int32 `[B]`.
      source: The prompt column that is moved to each new column, int32
        `[B, num_chunks · chunk_size]`; any column for padding.
      valid: Whether each new column is a token of its sequence.
    """

    num_chunks: int
    chunk_size: int
    shift: Int[Array, "B"]
    source: Int[Array, "B C"]
    valid: Bool[Array, "B C"]


def chunk_layout(
    num_tokens: int,
    lengths: Int[Array, "B"],
    used: Int[Array, "B"],
    *,
    block_size: int,
    chunk_size: int | None = None,
    is_fresh: bool = False,
    num_pieces: int = 1,
) -> ChunkLayout:
    """Lays prompts of `num_tokens` columns out after the `used` tokens that the cache holds.

    A fresh cache holds no tokens. Each chunk has `num_pieces` pieces, all with the same number of
    whole blocks.
    """
    shift = jnp.zeros(lengths.shape, jnp.int32) if is_fresh else used % block_size
    reach = num_tokens if is_fresh else num_tokens + block_size - 1
    chunk = min(chunk_size or reach, reach)
    least = block_size * num_pieces
    chunk = -(-chunk // least) * least
    num_chunks = -(-reach // chunk)
    source = jnp.arange(num_chunks * chunk, dtype=jnp.int32)[None, :] - shift[:, None]
    valid = (source >= 0) & (source < lengths[:, None])
    return ChunkLayout(num_chunks, chunk, shift, jnp.clip(source, 0, num_tokens - 1), valid)


def write_layer(
    buffer: Float[Array, "L B S K H"],
    new: Float[Array, "B T K H"],
    *,
    layer: Int[Array, ""],
    start: Int[Array, "B"] | None,
    span: Span,
) -> Float[Array, "L B S K H"]:
    """Writes the keys or values of a span into one layer, in place under `jit`.

    Args:
      buffer: Keys or values of all layers.
      new: Keys or values of the span's tokens.
      layer: Index of the layer.
      start: Position of column 0, `span.start(block_size)`. `None` means 0 for every sequence. The
        padding is then written too, but beyond the sequence's length, where any values are allowed.
      span: The tokens. Columns that are not valid are not written.

    Returns:
      The buffer. Tokens at positions beyond its capacity are dropped.
    """
    if start is None:
        return jax.lax.dynamic_update_slice_in_dim(buffer, new[None], layer, axis=0)
    if span.is_token:
        position = jnp.where(span.valid[:, 0], start, buffer.shape[2])
        sequence = jnp.arange(buffer.shape[1], dtype=jnp.int32)
        return buffer.at[layer, sequence, position].set(new[:, 0], mode="drop")
    capacity = buffer.shape[2]
    width = min(new.shape[1], capacity)
    extent = (1, 1, width, *buffer.shape[3:])

    def write_one(index: Int[Array, ""], buffer: Array) -> Array:
        # `dynamic_slice` would clamp a window beyond the end: move it back, its content forward.
        begin = jnp.minimum(start[index], capacity - width)
        ahead = start[index] - begin
        place = start_indices(layer, index, begin, 0, 0)
        inside = jnp.arange(width, dtype=jnp.int32) >= ahead
        fresh = jnp.roll(span.valid[index, :width], ahead) & inside
        update = jnp.roll(new[index, :width], ahead, axis=0)
        kept = jax.lax.dynamic_slice(buffer, place, extent)
        merged = jnp.where(fresh[None, None, :, None, None], update[None, None], kept)
        return jax.lax.dynamic_update_slice(buffer, merged, place)

    return jax.lax.fori_loop(0, buffer.shape[1], write_one, buffer)
