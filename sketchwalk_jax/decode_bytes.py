"""Bytes that attention reads for one decoded token: keys, values, and what selecting them takes.

A query head reads the tokens of its list; the query heads of a group read keys and values of one
key/value head, each token once, so a group reads the union of its lists.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.policies.base import LayerShape, Policy
from sketchwalk_jax.selection import BlockSelection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBytes:
    """Bytes read for one token of each sequence in one layer, float32 `[B]`.

    Attributes:
      keys: Of selected keys.
      values: Of selected values.
      metadata: Of what the policy looks at to select.
    """

    keys: Float[Array, "B"]
    values: Float[Array, "B"]
    metadata: Float[Array, "B"]

    @property
    def total(self) -> Float[Array, "B"]:
        """All of them."""
        return self.keys + self.values + self.metadata


def tokens_read(
    selection: BlockSelection, positions: Int[Array, "B"], *, num_kv_heads: int
) -> Int[Array, "B"]:
    """Keys that one decoded token reads, added up over the key/value heads.

    Args:
      selection: Its lists, one row.
      positions: Its position in each sequence; later tokens of its own block are not read.
      num_kv_heads: Key/value heads `K`.

    Returns:
      For each sequence `Σ_k |union of the lists of the query heads of group k|` in tokens, int32.

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
) -> DecodeBytes:
    """Bytes that one layer reads for one decoded token of each sequence.

    Args:
      policy: The policy that selected.
      selection: Its lists for the token, or `None` where the layer attends to everything.
      positions: The token's position in each sequence.
      shape: Sizes of the layer, and the type of its keys and values.

    Returns:
      The bytes; for a layer that attends to everything those of all keys and values.

    Raises:
      ValueError: As `tokens_read`.

    Example:
      >>> from sketchwalk_jax.policies import by_name
      >>> layer = LayerShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype=jnp.bfloat16)
      >>> dense = decode_bytes(by_name("dense"), None, jnp.array([999]), shape=layer)
      >>> dense.total.tolist()
      [512000.0]
    """
    if selection is None:
        tokens, metadata = (positions + 1) * shape.num_kv_heads, jnp.zeros(positions.shape)
    else:
        tokens = tokens_read(selection, positions, num_kv_heads=shape.num_kv_heads)
        metadata = policy.metadata_bytes(shape, positions)
    by_head = shape.head_dim * jnp.dtype(shape.dtype).itemsize
    read = tokens.astype(jnp.float32) * float(by_head)
    return DecodeBytes(keys=read, values=read, metadata=metadata.astype(jnp.float32))
