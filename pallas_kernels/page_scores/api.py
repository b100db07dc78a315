"""Page scores of a prompt's query blocks, and the representative queries of each block.

A function returns `None` if no kernel supports the call, or `takes_page_scores` says so; the policy
then uses plain JAX. Hopper multiplies in eight bits per warpgroup; other GPUs from Ampere on
multiply in float16 per warp.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.pallas_kernels.config import (
    SCORED_BLOCK,
    SCORED_HEADS,
    SCORED_PAGES,
    KernelConfig,
)
from sketchwalk_jax.scaled import to_float8

# Most page max logits in memory between kernels: half a gigabyte of float16.
_MOST_MAX_LOGITS = 2**28


def representatives(
    query: Float[Array, "B T N H"],
    valid: Bool[Array, "B T"],
    *,
    count: int,
    block_size: int,
    kernel_config: KernelConfig,
) -> Float[Array, "B I R N C"] | None:
    """Selects each query block's representative queries, in the slow half of the channels.

    They equal those of plain JAX unless two distances differ by less than a relative 2^-17.
    """
    is_right = query.dtype.itemsize == 2 and query.shape[-1] in SCORED_HEADS
    if not is_right or block_size != SCORED_BLOCK:
        return None
    from sketchwalk_jax.pallas_kernels.page_scores.representatives import (
        representatives_kernel,
    )

    return representatives_kernel(
        query,
        valid,
        count=count,
        by_warp=dispatch.kernels_here() == "ampere",
        interpret=kernel_config.interpret,
    )


def takes_page_scores(queries: Float[Array, "B I R N C"], *, block_size: int, pages: int) -> bool:
    """Whether kernels support page scores for these representative queries of a prompt."""
    is_right = queries.dtype == "bfloat16" and 2 * queries.shape[-1] in SCORED_HEADS
    is_token = queries.shape[1] * queries.shape[2] == 1
    return is_right and block_size == SCORED_BLOCK and pages == SCORED_PAGES and not is_token


def page_scores_of_kernels(
    queries: Float[Array, "B I R N C"],
    stored: Any,
    rows: Int[Array, "B I"],
    kv_lengths: Int[Array, "B"],
    *,
    scale: float,
    exponent: int,
    heads: Any,
    kernel_config: KernelConfig,
) -> Float[Array, "B I P"]:
    """Computes `quantized_keys.block_scores` with kernels, which flatten blocks and queries.

    Args:
      queries: Representative queries of each query block.
      stored: Quantized keys of one layer, a `LayerKeys`.
      rows: Index of each query block.
      kv_lengths: Number of keys in each sequence. Rows after them are padding and get zeros.
      scale: Factor of the products.
      exponent: Order of the norm over heads and queries.
      heads: The `Heads` of a rank, or `None` if all heads are local.
      kernel_config: Whether the kernels are interpreted.
    """
    from sketchwalk_jax.pallas_kernels.page_scores.hopper import STEP, TILE, queries_per_row

    is_ampere = dispatch.kernels_here() == "ampere"
    batch, num_rows, count, num_heads, channels = queries.shape
    num_blocks, kv_heads = stored.stack.zero_point.shape[2:4]
    # Under `jit` nothing else checks that the keys fit into the cache; those beyond it are dropped.
    kv_lengths = jnp.minimum(kv_lengths, num_blocks * SCORED_BLOCK)
    wanted = count * num_heads // kv_heads
    per_row = queries_per_row(wanted)
    # Query blocks at a time: a multiple of those of a thread block, up to the memory limit.
    room = num_blocks if is_ampere else -(-num_blocks // STEP) * STEP
    least = TILE // math.gcd(TILE, per_row)
    most = _MOST_MAX_LOGITS // (batch * kv_heads * room * SCORED_PAGES * per_row)
    tile = min(max(least, most // least * least), -(-num_rows // least) * least)
    more_rows = -num_rows % tile
    grouped = queries.reshape(batch, num_rows, count, kv_heads, -1, channels)
    grouped = jnp.moveaxis(grouped, 3, 1).reshape(batch, kv_heads, num_rows, wanted, channels)
    padding = ((0, 0), (0, 0), (0, more_rows), (0, per_row - wanted), (0, 0))
    grouped = jnp.pad(grouped, padding).reshape(batch, kv_heads, -1, tile * per_row, channels)
    score_tile = _score_tile(
        stored,
        kv_lengths,
        wanted=wanted,
        per_row=per_row,
        scale=scale,
        exponent=exponent,
        interpret=kernel_config.interpret,
    )

    def score(part: tuple[Array, Array]) -> Float[Array, "B Q P"]:
        index, own = part
        found = score_tile(own, rows[:, 0] + index * tile)
        found = found[..., : num_blocks * SCORED_PAGES]
        if heads is not None:
            found = heads.gather(found, axis=1)
        return jnp.sum(found, axis=(1, 2))

    grouped = jnp.moveaxis(grouped, 2, 0)
    parts = jnp.arange(len(grouped), dtype=jnp.int32), grouped
    found = jax.lax.map(score, parts)
    found = jnp.moveaxis(found, 0, 1).reshape(batch, -1, num_blocks * SCORED_PAGES)[:, :num_rows]
    page = jnp.arange(num_blocks * SCORED_PAGES, dtype=jnp.int32)[None, None]
    is_before = page < (rows[..., None] + 1) * SCORED_PAGES
    is_row = rows * SCORED_BLOCK < kv_lengths[:, None]
    return jnp.where(is_before & is_row[..., None], found, 0.0) ** (1.0 / exponent)


def _score_tile(
    stored: Any,
    kv_lengths: Int[Array, "B"],
    *,
    wanted: int,
    per_row: int,
    scale: float,
    exponent: int,
    interpret: bool,
) -> Callable[..., Float[Array, "B K parts Q P"]]:
    """Returns a function that scores queries `[B K M C]`, without the norm's root."""
    stack, layer = stored.stack, stored.layer
    zero_point = jax.lax.dynamic_index_in_dim(stack.zero_point, layer, keepdims=False)
    norm: dict[str, Any] = {"scale": scale, "exponent": exponent}
    where: dict[str, Any] = {"lengths": kv_lengths, "per_row": per_row, "interpret": interpret}
    if dispatch.kernels_here() == "ampere":
        from sketchwalk_jax.pallas_kernels.page_scores.max_logits import max_logits_kernel
        from sketchwalk_jax.pallas_kernels.page_scores.prompt_scores import page_scores_kernel

        def score(own: Array, first_row: Array) -> Array:
            rows = where | {"first_row": first_row}
            twice, factor = doubled_queries(own, per_row=per_row, wanted=wanted)
            max_logits = max_logits_kernel(
                twice, stack.quantized, stack.scale_exponent, layer=layer, **rows
            )
            return page_scores_kernel(max_logits, factor, own, zero_point, **norm, **rows)

        return score
    from sketchwalk_jax.pallas_kernels.page_scores import hopper as kernel
    from sketchwalk_jax.pallas_kernels.page_scores.hopper_dequantize import dequantize_kernel

    beside = dequantize_kernel(
        stack.quantized, stack.scale_exponent, layer=layer, lengths=kv_lengths, interpret=interpret
    )
    zero_point = jnp.pad(
        zero_point, ((0, 0), (0, -zero_point.shape[1] % kernel.STEP), (0, 0), (0, 0))
    )

    def hopper_score(own: Array, first_row: Array) -> Array:
        rows = where | {"first_row": first_row}
        max_logits, factor = kernel.hopper_max_logits_kernel(own, beside, wanted=wanted, **rows)
        return kernel.hopper_page_scores_kernel(max_logits, factor, own, zero_point, **norm, **rows)

    return hopper_score


def doubled_queries(
    query: Float[Array, "B K M C"], *, per_row: int, wanted: int
) -> tuple[Float[Array, "B K M C"], Float[Array, "B K M"]]:
    """Rounds queries for `max_logits_kernel`: to eight bits, doubled, with a power of two each.

    They are small enough that no sum of products with keys exceeds the largest float16.

    Args:
      query: Queries, block after block.
      per_row: Queries per block.
      wanted: Valid queries per block; the padding's factors are NaN.
    """
    from sketchwalk_jax.pallas_kernels.page_scores.hopper_max_logits import largest_of_query

    rounded, factor = to_float8(query, largest_of_query(query.shape[-1]))
    is_query = jnp.arange(query.shape[2], dtype=jnp.int32) % per_row < wanted
    return 2.0 * rounded.astype(jnp.float16), jnp.where(is_query, factor[..., 0], jnp.nan)
