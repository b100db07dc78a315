"""Quantizes the keys of blocks to four bits on NVIDIA GPUs, in place.

Per channel, over the keys `s` of a block (`policies.quantized_keys.encode`), with zero point
`zero_point` and `scale = 2 ** scale_exponent`:

    low, high = min_s k_s, max_s k_s,   zero_point = bfloat16((low + high) / 2)
    scale = least power of two that is >= max(high - zero_point, zero_point - low) / 7
    quantized_s = round((k_s - zero_point) / scale),   in -7 .. 7

This gives the same bits as `encode`, in the slow half of the channels. Rounding is monotonic, so
the extremes determine the largest distance from the zero point.

A thread block has one block of one key/value head. Keys go from memory to registers, 16 per warp; a
thread has two adjacent channels of a quarter or half of those, in both runs of slow channels. So
one thread makes both quantized numbers of a byte, and only the extremes cross threads. With a
head_dim of 128, each key costs 128 bytes of reads and 32 bytes of writes.

The arrays hold all layers and stay in place: a thread block writes only its own block. The first
one also continues the previous call's unfinished block and stores the new unfinished block. A
decoded token adds one key to such a block; the thread blocks can write that key and its value to
the cache as well, which saves a launch.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.scaled import power_of_two, replace

_KEYS = 64  # per block
_NO_KEY = -128  # scale exponent of a block without keys
_MIN_EXPONENT, _MAX_EXPONENT = -9, 6
_LARGEST_QUANTIZED = 7.0
# Complement of 7/4's mantissa: adding it carries into the exponent for all numbers above 7 times a
# power of two, and no others.
_CARRY = (1 << 23) - 1 - (3 << 21)
# The low bits of `x + _ROUNDER` are `x`, rounded to nearest even, in two's complement.
_ROUNDER = 1.5 * 2.0**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Static parameters of a call.

    Attributes:
      blocks: Blocks per sequence in the arrays.
      rows: Blocks per sequence in the call.
      quarter: Channels in each of the two slow runs.
      is_token: Whether the call has one key per sequence, anywhere in its block, and maybe its
        value.
    """

    blocks: int
    rows: int
    quarter: int
    is_token: bool

    @property
    def layout(self) -> Any:
        """Layout of the keys of a block."""
        return row_ops.key_layout(self.quarter)

    def runs(self, *, of_keys: bool = False) -> dict[str, Any]:
        """Returns where the two runs of slow channels are in the quantized arrays.

        These are arguments of `ops.read_several`, for a block's keys or for one vector.
        """
        return self._places((0, self.quarter), of_keys=of_keys)

    def slow(self, *, of_keys: bool = False) -> dict[str, Any]:
        """Returns where they are in a key's channels: RoPE rotates `d` and `d + H/2` together."""
        return self._places((self.quarter, 3 * self.quarter), of_keys=of_keys)

    def _places(self, firsts: Sequence[int], *, of_keys: bool) -> dict[str, Any]:
        if of_keys:
            shape, of_key = (_KEYS, self.quarter), [(0, first) for first in firsts]
            return {"layout": self.layout, "shape": shape, "starts": of_key}
        starts = [(first,) for first in firsts]
        return {"layout": self.layout.reduce(0), "shape": (self.quarter,), "starts": starts}

    def write_token(self, new: Any, target: Any) -> None:
        """Copies one head of a key or value."""
        where = self._places(range(0, 4 * self.quarter, self.quarter), of_keys=False)
        ops.write_several(target, ops.read_several(new, **where), **where)

    def spread(self, vector: Array) -> Array:
        """Broadcasts one number per channel to all keys."""
        shape = (_KEYS, self.quarter)
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, (1,)), self.layout)


def _update_statistics(
    key: Any,
    valid: Any,
    first_block: Any,
    end: Any,
    layer: Any,
    quantized: Any,
    zero_point: Any,
    scale_exponent: Any,
    unfinished: Any,
    *cache: Any,
    sizes: _Sizes,
    scratch: Any,
) -> None:
    """Runs one thread block: one block of one key/value head.

    `cache` is empty, or the key cache, the value cache and their layer, to write the token to.
    """
    batch, row, head = (jax.lax.axis_index(name) for name in ("batch", "row", "head"))
    which, length = layer[0], end[batch]
    if sizes.is_token:
        block = jax.lax.div(length - 1, _KEYS)
        is_new = valid[batch, 0]
    else:
        block = first_block[batch] + row
        # Valid keys are adjacent. So a row with valid keys begins or ends with one, unless it
        # contains all of them; then it is the first row.
        begin = row * _KEYS
        is_new = (row == 0) | valid[batch, begin] | valid[batch, begin + _KEYS - 1]
        is_new = is_new & (length > block * _KEYS)
    is_new = is_new & (block < sizes.blocks)
    left = length - block * _KEYS  # keys in this block
    place = ops.matrix_index((_KEYS, sizes.quarter), 0, sizes.layout)

    def load(row: Any) -> list[Array]:
        """Reads the keys of one of the call's blocks."""
        own = key.at[batch, pl.ds(row * _KEYS, _KEYS), head]
        return ops.read_several(own, **sizes.slow(of_keys=True))

    kept = unfinished.at[which, batch, :, head]

    def old() -> list[Array]:
        """Reads the previous call's unfinished block."""
        return ops.read_several(kept, **sizes.runs(of_keys=True))

    def keep(halves: list[Array]) -> None:
        ops.write_several(kept, halves, **sizes.runs(of_keys=True))

    def write(halves: list[Array]) -> None:
        packed, *found = _encode(halves, place < left, scratch, sizes=sizes)
        ops.write_global(quantized.at[which, batch, block, head], packed, sizes.layout)
        for target, own in zip((zero_point, scale_exponent), found, strict=True):
            ops.write_several(target.at[which, batch, block, head], own, **sizes.runs())

    if sizes.is_token:

        @pl.when(is_new)
        def _() -> None:
            new = ops.read_several(key.at[batch, 0, head], **sizes.slow())
            is_old = place != left - 1
            halves = zip(new, old(), strict=True)
            write([jnp.where(is_old, y, sizes.spread(x)) for x, y in halves])
            ops.write_several(unfinished.at[which, batch, left - 1, head], new, **sizes.runs())
            if cache:
                *targets, own_layer = cache
                for index, one in enumerate(targets):
                    target = one.at[own_layer[0], batch, length - 1, head]
                    sizes.write_token(key.at[batch, index, head], target)

        return

    # The first block's old keys, which precede the new ones.
    begin = jax.lax.cond(
        (row == 0) & is_new,
        lambda: row_ops.count_unset(valid.at[batch, pl.ds(0, _KEYS)], left),
        lambda: jnp.int32(0),
    )

    @pl.when(is_new & (begin < jnp.minimum(left, _KEYS)))
    def _() -> None:
        @pl.when(row == 0)
        def _() -> None:
            is_old = place < begin
            keep([jnp.where(is_old, y, x) for x, y in zip(load(0), old(), strict=True)])
            # Read the block again: both in registers would allow fewer thread blocks per SM.
            row_ops.barrier()

        write(jax.lax.cond(row == 0, old, lambda: load(row)))
        # The block of the last key, which the next call may continue.
        last = jnp.minimum(jax.lax.div(left, _KEYS), sizes.rows - 1)

        @pl.when((row == 0) & (last > 0))
        def _() -> None:
            keep(load(last))


def _encode(
    halves: list[Array], is_present: Array, scratch: Any, *, sizes: _Sizes
) -> tuple[Array, list[Array], list[Array]]:
    """Returns quantized keys, two per byte, and zero points and scales of both channel runs."""
    halves = [x.astype(jnp.float32) for x in halves]
    is_finite = (jnp.abs(halves[0]) < jnp.inf) & (jnp.abs(halves[1]) < jnp.inf)
    lost = row_ops.any_of_key(jnp.logical_not(is_finite))
    counts = is_present & jnp.logical_not(lost)
    nibbles, zero_points, scale_exponents = [], [], []
    for x, (low, high) in zip(halves, row_ops.extremes(halves, counts, scratch), strict=True):
        has_key = high > -jnp.inf
        zero_point = jnp.where(has_key, 0.5 * low + 0.5 * high, 0.0).astype(jnp.bfloat16)
        middle = zero_point.astype(jnp.float32)
        farthest = jnp.where(has_key, jnp.maximum(high - middle, middle - low), 0.0)
        bits = jax.lax.bitcast_convert_type(farthest, jnp.int32)
        scale_exponent = jnp.right_shift(bits + _CARRY, 23) - 129  # 127, plus 2 for 7's exponent
        scale_exponent = jnp.minimum(jnp.maximum(scale_exponent, _MIN_EXPONENT), _MAX_EXPONENT)
        away = jnp.where(counts, x - sizes.spread(middle), 0.0) * sizes.spread(
            power_of_two(-scale_exponent)
        )
        away = jnp.minimum(jnp.maximum(away, -_LARGEST_QUANTIZED), _LARGEST_QUANTIZED) + _ROUNDER
        nibbles.append(jax.lax.bitcast_convert_type(away, jnp.int32) & 15)
        zero_points.append(zero_point)
        scale_exponents.append(
            replace(scale_exponent, jnp.logical_not(has_key), _NO_KEY).astype(jnp.int8)
        )
    packed = nibbles[0] | jnp.left_shift(nibbles[1], 4)
    return packed.astype(jnp.int8), zero_points, scale_exponents


def quantize_keys_kernel(
    quantized: UInt8[Array, "L B J K S C2"],
    zero_point: Float[Array, "L B J K C"],
    scale_exponent: Int8[Array, "L B J K C"],
    unfinished: Float[Array, "L B S K C"],
    key: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"],
    *,
    first_block: Int[Array, "B"],
    end: Int[Array, "B"],
    layer: Int[Array, ""],
    write: tuple[Array, Array, Array, Array] | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Adds a call's keys to one layer of the quantized keys; in place under `jit`.

    Args:
      quantized: Quantized keys as in `QuantizedKeys`, in blocks of 64 keys.
      zero_point: Zero points, likewise.
      scale_exponent: Exponents of the scales, likewise.
      unfinished: Keys of each unfinished block, likewise, 16 bits and 32 or 64 channels.
      key: Keys of the same type in all channels: of whole blocks, or one per sequence.
      valid: Mask of the new keys, which are adjacent, begin in the first block and end at `end`.
      first_block: Index of the first block; ignored for single keys.
      end: Number of keys in each sequence, including the new ones.
      layer: Layer of the keys.
      write: For single keys: their values `[B, 1, K, H]`, the key and value caches
        `[Lc, B, S, K, H]` to write both to, and the layer in these.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      The updated `quantized`, `zero_point`, `scale_exponent` and `unfinished`, and both caches if
      given.
    """
    batch, tokens, kv_heads, head_dim = key.shape
    sizes = _Sizes(
        blocks=quantized.shape[2],
        rows=max(1, tokens // _KEYS),
        quarter=head_dim // 4,
        is_token=tokens == 1,
    )
    kernel = ops.kernel(
        functools.partial(_update_statistics, sizes=sizes),
        scratch_types={"scratch": row_ops.scratch_of_extremes(sizes.quarter)},
        grid=(batch, sizes.rows, kv_heads),
        grid_names=("batch", "row", "head"),
        # No barriers: of the unfinished block, threads read only what they wrote themselves.
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="quantized_keys",
    )
    quantized = jax.lax.bitcast_convert_type(quantized, jnp.int8)
    refs = [jax.new_ref(x) for x in (quantized, zero_point, scale_exponent, unfinished)]
    first_block, end, layer = (x.astype(jnp.int32) for x in (first_block, end, layer))
    last = []
    if write is not None:
        value, keys, values, own_layer = write
        key = jnp.concatenate([key, value], axis=1)
        refs += [jax.new_ref(x) for x in (keys, values)]
        last = [own_layer.astype(jnp.int32)[None]]
    kernel(key, valid, first_block, end, layer[None], *refs, *last)
    quantized, *found = (jax.freeze(ref) for ref in refs)
    return jax.lax.bitcast_convert_type(quantized, jnp.uint8), *found
