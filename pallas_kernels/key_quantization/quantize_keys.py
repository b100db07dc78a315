"""Four bits of what every key is beside its block, on NVIDIA GPUs, written where they belong.

Channel by channel, over the keys `s` of a block (`policies.block_codes.encode`):

    low, high = min_s k_s, max_s k_s,   centre = bfloat16((low + high) / 2)
    step = least power of two that is >= max(high - centre, centre - low) / 7
    code_s = round((k_s - centre) / step),   in -7 .. 7

to the same bits, in the slow half of the channels. Rounding keeps order, so that the extremes alone
tell how far any key is from the centre.

A program has one block of one key/value head. Keys go from memory to registers, 16 to a warp; a
thread has two adjacent channels of a quarter or half of those, in both runs of slow channels. So
the two codes of a byte are made in one thread, and only the extremes cross threads. With a head_dim
of 128, 128 bytes of each key are read, once, and 32 bytes of codes are written.

The arrays of codes are those of all layers and stay in place: a program writes its own block, and
nothing else moves. The program of the first row also goes on with the unfinished block of the last
call and leaves that of this one. A decoded token is one new key of such a block, which the programs
may write to the cache as well, with its value: a launch less.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.scaled import power_of_two, replace

_KEYS = 64  # of a block
_FLAGS = 16  # loaded at a time
_NO_KEY = -128  # in the place of a step
_MIN_STEP, _MAX_STEP = -9, 6
_LARGEST_CODE = 7.0
# Beyond the mantissa of 7/4: what carries into the exponent, of all numbers above 7 times a power
# of two and of no other.
_CARRY = (1 << 23) - 1 - (3 << 21)
# Of a sum with this the low bits are the other number, rounded to even, as a two's complement.
_ROUNDER = 1.5 * 2.0**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What is static about a call.

    Attributes:
      blocks: Blocks that there is room for.
      rows: Blocks of the call.
      quarter: Channels in each of the two slow runs.
      is_token: Whether the call has one key of each sequence, anywhere in its block; a value may
        follow it.
      interpret: Whether the interpreter runs the kernel.
    """

    blocks: int
    rows: int
    quarter: int
    is_token: bool
    interpret: bool

    @property
    def layout(self) -> Any:
        """Of the keys of a block."""
        return row_ops.key_layout(self.quarter)

    def run(self, half: int) -> Any:
        """One of the two runs of slow channels, among those of the codes."""
        return pl.ds(half * self.quarter, self.quarter)

    def slow(self, half: int) -> Any:
        """The same run among the channels of a key: `d` and `d + H/2` turn together."""
        return pl.ds((2 * half + 1) * self.quarter, self.quarter)

    def write_token(self, new: Any, target: Any) -> None:
        """Copies a head of a key or value."""
        for start in range(0, 4 * self.quarter, self.quarter):
            run = pl.ds(start, self.quarter)
            ops.write(target.at[run], ops.read(new.at[run], self.layout.reduce(0)))

    def spread(self, vector: Array) -> Array:
        """A number of each channel for all keys."""
        shape = (_KEYS, self.quarter)
        return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, (1,)), self.layout)


def _observe(
    key: Any,
    valid: Any,
    first_block: Any,
    end: Any,
    layer: Any,
    code: Any,
    centre: Any,
    step: Any,
    unfinished: Any,
    *cache: Any,
    sizes: _Sizes,
) -> None:
    """One program: one block of one key/value head.

    `cache` is that of keys, that of values, and the layer in them, where a token is to be written.
    """
    batch, row, head = (jax.lax.axis_index(name) for name in ("batch", "row", "head"))
    which, length = layer[0], end[batch]
    if sizes.is_token:
        block = jax.lax.div(length - 1, _KEYS)
        is_new = valid[batch, 0]
    else:
        block = first_block[batch] + row
        # Valid ones are adjacent, so that a row that has some begins or ends with one, unless they
        # are all in it: then it is the first.
        begin = row * _KEYS
        is_new = (row == 0) | valid[batch, begin] | valid[batch, begin + _KEYS - 1]
        is_new = is_new & (length > block * _KEYS)
    is_new = is_new & (block < sizes.blocks)
    left = length - block * _KEYS  # keys of this block that there are
    place = plgpu.broadcasted_iota(jnp.int32, (_KEYS, sizes.quarter), 0, layout=sizes.layout)

    def load(row: Any) -> list[Array]:
        """The keys of a row of the call."""
        rows = pl.ds(row * _KEYS, _KEYS)
        keys = (key.at[batch, rows, head, sizes.slow(half)] for half in range(2))
        return [ops.read(one, sizes.layout) for one in keys]

    def old() -> list[Array]:
        """The keys of the block that the last call ended in."""
        kept = (unfinished.at[which, batch, :, head, sizes.run(half)] for half in range(2))
        return [ops.read(one, sizes.layout) for one in kept]

    def keep(halves: list[Array]) -> None:
        for half in range(2):
            target = unfinished.at[which, batch, :, head, sizes.run(half)]
            ops.write(target, halves[half])

    def write(halves: list[Array]) -> None:
        packed, centres, steps = _encode(halves, place < left, sizes=sizes)
        ops.write(code.at[which, batch, block, head], packed)
        for half in range(2):
            where = (which, batch, block, head, sizes.run(half))
            ops.write(centre.at[where], centres[half])
            ops.write(step.at[where], steps[half])

    if sizes.is_token:

        @pl.when(is_new)
        def _() -> None:
            own = sizes.layout.reduce(0)
            new = [ops.read(key.at[batch, 0, head, sizes.slow(half)], own) for half in range(2)]
            is_old = place != left - 1
            halves = zip(new, old(), strict=True)
            write([jnp.where(is_old, y, sizes.spread(x)) for x, y in halves])
            for half in range(2):
                target = unfinished.at[which, batch, left - 1, head, sizes.run(half)]
                ops.write(target, new[half])
            if cache:
                *targets, own_layer = cache
                for index, one in enumerate(targets):
                    target = one.at[own_layer[0], batch, length - 1, head]
                    sizes.write_token(key.at[batch, index, head], target)

        return

    @pl.when((row == 0) & is_new)
    def _() -> None:
        def count(part: Any, found: Any) -> Any:
            places = [part * _FLAGS + c for c in range(_FLAGS)]
            before = [(c < left) & jnp.logical_not(valid[batch, c]) for c in places]
            # Else all would be loaded at once, for which there are no registers.
            row_ops.barrier(interpret=sizes.interpret)
            return functools.reduce(jnp.add, [one.astype(jnp.int32) for one in before], found)

        # Keys that there are and are not new come before those that are.
        begin = jax.lax.fori_loop(0, _KEYS // _FLAGS, count, jnp.int32(0))

        @pl.when(begin < jnp.minimum(left, _KEYS))
        def _() -> None:
            is_old = place < begin
            keep([jnp.where(is_old, y, x) for x, y in zip(load(0), old(), strict=True)])
            # Read again after that: both in registers would leave room for fewer programs.
            row_ops.barrier(interpret=sizes.interpret)
            write(old())
            # The block that the last key is in, which the next call may go on with.
            last = jnp.minimum(jax.lax.div(left, _KEYS), sizes.rows - 1)

            @pl.when(last > 0)
            def _() -> None:
                keep(load(last))

    if sizes.rows > 1:

        @pl.when((row > 0) & is_new)
        def _() -> None:
            write(load(row))


def _encode(
    halves: list[Array], is_present: Array, *, sizes: _Sizes
) -> tuple[Array, list[Array], list[Array]]:
    """Codes, two in a byte, and of both runs of channels the centres and steps."""
    halves = [x.astype(jnp.float32) for x in halves]
    is_finite = (jnp.abs(halves[0]) < jnp.inf) & (jnp.abs(halves[1]) < jnp.inf)
    lost = row_ops.any_of_key(jnp.logical_not(is_finite), interpret=sizes.interpret)
    counts = is_present & jnp.logical_not(lost)
    nibbles, centres, steps = [], [], []
    for x in halves:
        low = jnp.min(jnp.where(counts, x, jnp.inf), axis=0)
        high = jnp.max(jnp.where(counts, x, -jnp.inf), axis=0)
        has_key = high > -jnp.inf
        centre = jnp.where(has_key, 0.5 * low + 0.5 * high, 0.0).astype(jnp.bfloat16)
        middle = centre.astype(jnp.float32)
        farthest = jnp.where(has_key, jnp.maximum(high - middle, middle - low), 0.0)
        bits = jax.lax.bitcast_convert_type(farthest, jnp.int32)
        step = jnp.right_shift(bits + _CARRY, 23) - 129  # less 2, which is the exponent of 7
        step = jnp.minimum(jnp.maximum(step, _MIN_STEP), _MAX_STEP)
        away = jnp.where(counts, x - sizes.spread(middle), 0.0) * sizes.spread(power_of_two(-step))
        away = jnp.minimum(jnp.maximum(away, -_LARGEST_CODE), _LARGEST_CODE) + _ROUNDER
        nibbles.append(jax.lax.bitcast_convert_type(away, jnp.int32) & 15)
        centres.append(centre)
        steps.append(replace(step, jnp.logical_not(has_key), _NO_KEY).astype(jnp.int8))
    packed = nibbles[0] | jnp.left_shift(nibbles[1], 4)
    return packed.astype(jnp.int8), centres, steps


def quantize_keys_kernel(
    code: UInt8[Array, "L B J K S C2"],
    centre: Float[Array, "L B J K C"],
    step: Int8[Array, "L B J K C"],
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
    """The statistics of all layers with a call's keys put into one; in place under `jit`.

    Args:
      code: As `BlockCodes` has it, of blocks of 64 keys.
      centre: Likewise.
      step: Likewise.
      unfinished: Likewise, in 16 bits, of 32 or 64 channels.
      key: Keys of the same type, in all channels: of whole rows, or one of each sequence.
      valid: Which of them are new: adjacent ones, up to `end`, from the first row on.
      first_block: Block of the first row; of single keys any number.
      end: Keys of each sequence, with the new ones.
      layer: Which layer's they are.
      write: Of single keys: their values `[B, 1, K, H]`, the caches of keys and values
        `[Lc, B, S, K, H]` that both are to be written to, and the layer in these.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      Code, centre, step and unfinished, and both caches if there are any.
    """
    batch, tokens, kv_heads, head_dim = key.shape
    sizes = _Sizes(
        blocks=code.shape[2],
        rows=max(1, tokens // _KEYS),
        quarter=head_dim // 4,
        is_token=tokens == 1,
        interpret=interpret,
    )
    kernel = ops.kernel(
        functools.partial(_observe, sizes=sizes),
        grid=(batch, sizes.rows, kv_heads),
        grid_names=("batch", "row", "head"),
        # Threads read of what they write their own part alone: of the unfinished block.
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=ops.interpreter(interpret),
        kernel_name="block_codes",
    )
    code = jax.lax.bitcast_convert_type(code, jnp.int8)
    refs = [jax.new_ref(x) for x in (code, centre, step, unfinished)]
    first_block, end, layer = (x.astype(jnp.int32) for x in (first_block, end, layer))
    last = []
    if write is not None:
        value, keys, values, own_layer = write
        key = jnp.concatenate([key, value], axis=1)
        refs += [jax.new_ref(x) for x in (keys, values)]
        last = [own_layer.astype(jnp.int32)[None]]
    kernel(key, valid, first_block, end, layer[None], *refs, *last)
    code, *found = (jax.freeze(ref) for ref in refs)
    return jax.lax.bitcast_convert_type(code, jnp.uint8), *found
