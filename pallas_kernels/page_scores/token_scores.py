"""Page scores of one token per head, from 4-bit keys, on GPUs from Ampere on.

    l[n, p] = scale · (q_n · zero_point_j + max_{s in page p} q'_n · scale_j quantized_s)

for the query heads `n` of one key/value head and the four pages `p` of 16 keys of each block `j`
(`policies.quantized_keys`). A thread block has some key blocks of one key/value head, few enough
that thread blocks fill the GPU, and four warps that share them; `token_products` multiplies. The
norm over heads needs powers of shares,

    share[n, p] = exp(l[n, p]) / Σ_i exp(l[n, i])

whose denominators no thread block knows. So each writes statistics of its own pages:

    top[n] = max_p l[n, p],   total[n] = Σ_p exp(l[n, p] - top[n]),
    powers[n, p] = exp(l[n, p] - top[n]) ^ exponent

and `token_lists` combines them. The exponentials are computed here, on all of the GPU. Logits that
are NaN or too large (`LARGEST_LOGIT`) count as no attention. Each quantized number is read once,
half a byte. A thread has all pages of a block. Their powers are rounded to bfloat16, 8 bytes for
the four: the one thread block that reads all of them would take twice as long for float32. A share,
the root of a power, then has a relative error of at most `2^-9 / exponent`.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels.config import SCORED_PAGES
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.page_scores.token_products import (
    KEYS,
    MOST_BLOCKS,
    QUERIES,
    block_products,
    room_of_keys,
)
from sketchwalk_jax.precision import LARGEST_LOGIT, MASK_VALUE
from sketchwalk_jax.scaled import integer_power

PAGE = KEYS // SCORED_PAGES
"""Keys per page."""
_PROGRAMS = 528  # thread blocks of 128 threads that a GPU with 132 SMs runs at a time
_PARTS = 64  # most parts per head, unless they would be too large
_SHAPE = (MOST_BLOCKS, QUERIES)


class TokenParts(NamedTuple):
    """Softmax statistics of the parts; entries beyond a sequence are not written.

    Attributes:
      powers: `powers` of the module, `[B, N, room]`, bfloat16.
      top: `top` of the module, `[B, more than N, parts]`, float32.
      total: `total` of the module, likewise.
      size: Columns per part: the pages of some blocks.
    """

    powers: Float[Array, "B N W"]
    top: Float[Array, "B M P"]
    total: Float[Array, "B M P"]
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Static parameters of a call.

    Attributes:
      group: Query heads per key/value head.
      count: Key blocks per thread block.
      scale: Factor of the logits.
      exponent: Exponent of the shares.
    """

    group: int
    count: int
    scale: float
    exponent: int


def blocks_of_part(batch: int, kv_heads: int, num_blocks: int) -> int:
    """Chooses key blocks per thread block, 4 to 64, so that thread blocks fill the GPU.

    Example:
      >>> [blocks_of_part(1, 8, num_blocks) for num_blocks in (45, 256, 2048)]
      [4, 4, 32]
    """
    least = max(batch * kv_heads * num_blocks / _PROGRAMS, num_blocks / _PARTS, row_ops.WARPS)
    return min(1 << math.ceil(math.log2(least)), MOST_BLOCKS)


def _score(
    query: Any,
    quantized: Any,
    zero_point: Any,
    scale_exponent: Any,
    lengths: Any,
    layer: Any,
    powers_ref: Any,
    top_ref: Any,
    total_ref: Any,
    *,
    sizes: _Sizes,
    max_logits: Any,
    shared: Any,
    room: Any,
) -> None:
    """Runs one thread block: some key blocks of one key/value head."""
    batch, part, kv_head = (jax.lax.axis_index(name) for name in ("batch", "part", "kv_head"))
    first = part * sizes.count
    length, index = lengths[batch], layer[0]
    there = jnp.clip(jax.lax.div(length + KEYS - 1, KEYS) - first, 0, sizes.count)

    # The second condition always holds. It makes the compiler load layer and length together.
    @pl.when((there > 0) & (index >= 0))
    def _() -> None:
        block_products(
            query.at[batch],
            quantized.at[index, batch],
            zero_point.at[index, batch],
            scale_exponent.at[index, batch],
            max_logits,
            shared,
            room,
            kv_head=kv_head,
            group=sizes.group,
            first=first,
            count=sizes.count,
            there=there,
            length=length,
        )
        row_ops.barrier()
        own = [ops.read(max_logits.at[page]) for page in range(SCORED_PAGES)]
        beside = ops.read(shared)
        # In base 2.
        logits = [(x + beside) * (sizes.scale * math.log2(math.e)) for x in own]
        counts = [jnp.abs(x) < LARGEST_LOGIT * math.log2(math.e) for x in logits]
        is_block = ops.matrix_index(_SHAPE, 0) < there
        is_seen = [is_block & x for x in counts]
        logits = [jnp.where(seen, x, MASK_VALUE) for seen, x in zip(is_seen, logits, strict=True)]
        top = jnp.max(functools.reduce(jnp.maximum, logits), axis=0)
        shares = [jnp.exp2(x - ops.spread(top, _SHAPE, 1)) for x in logits]
        shares = [jnp.where(seen, x, 0.0) for seen, x in zip(is_seen, shares, strict=True)]
        total = jnp.sum(functools.reduce(jnp.add, shares), axis=0)
        _write(
            [integer_power(x, sizes.exponent) for x in shares],
            (top, total),
            powers_ref.at[batch],
            (top_ref.at[batch], total_ref.at[batch]),
            head=kv_head * sizes.group,
            part=part,
            there=there,
            sizes=sizes,
        )


def _write(
    powers: list[Array],
    sums: tuple[Array, Array],
    powers_ref: Any,
    sum_refs: tuple[Any, Any],
    *,
    head: Array,
    part: Array,
    there: Array,
    sizes: _Sizes,
) -> None:
    """Writes the results of existing heads and blocks."""
    if ops.is_interpreted():
        heads, size = pl.ds(head, sizes.group), sizes.count * SCORED_PAGES
        found = jnp.stack([x[: sizes.count, : sizes.group].T for x in powers], axis=-1)
        found = found.reshape(sizes.group, size).astype(powers_ref.dtype)
        powers_ref[heads, pl.ds(part * size, size)] = found
        for ref, one in zip(sum_refs, sums, strict=True):
            ref[heads, pl.ds(part, 1)] = one[: sizes.group, None]
        return
    row, column = (ops.matrix_index(_SHAPE, axis) for axis in range(2))
    own = plgpu.layout_cast(jnp.max(column, axis=0), ops.BY_COLUMN)
    width = powers_ref.shape[1] // SCORED_PAGES
    place = (head + column) * width + part * sizes.count + row
    place = jnp.where((row < there) & (column < sizes.group), place, place * 0 - 1)
    row_ops.write_fours(powers, place, powers_ref, layout=ops.ACCUMULATOR)
    place = (head + own) * sum_refs[0].shape[1] + part
    place = jnp.where(own < sizes.group, place, place * 0 - 1)
    for ref, one in zip(sum_refs, sums, strict=True):
        row_ops.write_places(one, place, ref, layout=ops.BY_COLUMN)


def token_scores_kernel(
    query: Float[Array, "B N H"],
    quantized: UInt8[Array, "L B J K S C2"],
    zero_point: Float[Array, "L B J K C"],
    scale_exponent: Int8[Array, "L B J K C"],
    *,
    layer: Int[Array, ""],
    lengths: Int[Array, "B"],
    scale: float,
    exponent: int,
    room: tuple[int, int],
    all_kv_heads: int | None = None,
    interpret: bool = False,
) -> TokenParts:
    """Computes `powers`, `top` and `total` of the module for every token and head.

    Args:
      query: Queries in bfloat16, at most eight heads per key/value head, in all channels.
      quantized: Quantized keys (`QuantizedKeys`) of all layers: blocks of 64 keys, slow half of the
        channels.
      zero_point: Zero points, likewise.
      scale_exponent: Exponents of the scales, likewise.
      layer: The layer.
      lengths: Number of keys in each sequence.
      scale: Factor of the products.
      exponent: Exponent of the shares.
      room: Heads and columns of the result, padded; columns are a multiple of 256. The columns are
        the pages of all blocks, in order.
      all_kv_heads: Key/value heads of all ranks if these are one rank's; they determine the parts.
      interpret: Whether the interpreter runs the kernel.
    """
    batch, num_heads, _ = query.shape
    num_blocks, kv_heads = quantized.shape[2:4]
    count = blocks_of_part(batch, all_kv_heads or kv_heads, num_blocks)
    parts = -(-num_blocks // count)
    sizes = _Sizes(
        group=num_heads // kv_heads,
        count=count,
        scale=scale,
        exponent=exponent,
    )
    sums = jax.ShapeDtypeStruct((batch, room[0], -(-parts // _PARTS) * _PARTS), jnp.float32)
    numbers = jax.ShapeDtypeStruct((batch, num_heads, room[1]), jnp.bfloat16)
    found = ops.kernel(
        functools.partial(_score, sizes=sizes),
        out_type=[numbers, sums, sums],
        scratch_types={
            "max_logits": plgpu.SMEM((SCORED_PAGES, *_SHAPE), jnp.float32),
            "shared": plgpu.SMEM(_SHAPE, jnp.float32),
            "room": room_of_keys(quantized.shape[5]),
        },
        grid=(batch, parts, kv_heads),
        grid_names=("batch", "part", "kv_head"),
        compiler_params=ops.compiler_params(),
        interpret=interpret,
        kernel_name="token_scores",
    )(query, quantized, zero_point, scale_exponent, lengths, layer.astype(jnp.int32)[None])
    powers, top, total = found
    return TokenParts(powers, top, total, count * SCORED_PAGES)
