"""Sums of queries and keys over blocks of tokens and groups of heads, in one pass (steps 1-3).

Reading queries and keys once is all that takes time: a thread block per block of tokens adds up
whole rows of heads in registers, and folds the heads of each group at the end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from sketchwalk_jax.pallas_kernels import ops

_THREADS = 128
_VECTOR = 8  # 16-byte loads of 16-bit numbers
_TOKENS_PER_STEP = 4


def _pieces(width: int) -> list[tuple[int, int]]:
    """Starts and vector sizes that cover a row of `width` entries."""
    pieces, start = [], 0
    while start < width:
        vector = _VECTOR
        while vector * _THREADS > width - start:
            vector //= 2
        pieces.append((start, vector))
        start += vector * _THREADS
    return pieces


def _fold(total: list[Array], memory: Any, out_ref: Any) -> None:
    """Writes the sums over the heads of each group, `out_ref[groups, copies · H]`."""
    groups, wide = out_ref.shape
    for (start, vector), piece in zip(_pieces(memory.shape[0]), total, strict=True):
        memory[pl.ds(start, vector * _THREADS)] = piece
    plgpu.commit_smem()
    layout = plgpu.Layout.WG_STRIDED((wide,), vec_size=wide // _THREADS)
    steps = memory.shape[0] // groups // wide
    for group in range(groups):
        result = None
        for step in range(steps):
            part = plgpu.load(memory.at[pl.ds((group * steps + step) * wide, wide)], layout=layout)
            result = part if result is None else result + part
        out_ref[group] = result


def _sum_block(
    query_ref: Any,
    key_ref: Any,
    valid_ref: Any,
    query_out: Any,
    key_out: Any,
    query_memory: Any,
    key_memory: Any,
    *,
    block_size: int,
) -> None:
    sequence, block = jax.lax.axis_index("sequence"), jax.lax.axis_index("block")
    for rows_ref, out_ref, memory in (
        (query_ref, query_out, query_memory),
        (key_ref, key_out, key_memory),
    ):
        pieces = _pieces(rows_ref.shape[-1])

        def add(step: Array, total: list[Array], rows_ref: Any = rows_ref, pieces: Any = pieces):
            for offset in range(_TOKENS_PER_STEP):
                token = block * block_size + step * _TOKENS_PER_STEP + offset
                is_valid = valid_ref[sequence, token] != 0
                for index, (start, vector) in enumerate(pieces):
                    size = vector * _THREADS
                    part = plgpu.load(
                        rows_ref.at[sequence, token, pl.ds(start, size)],
                        layout=plgpu.Layout.WG_STRIDED((size,), vec_size=vector),
                        optimized=False,
                    ).astype(jnp.float32)
                    total[index] = total[index] + jnp.where(is_valid, part, 0.0)
            return total

        start = [
            plgpu.layout_cast(
                jnp.zeros((vector * _THREADS,), jnp.float32),
                plgpu.Layout.WG_STRIDED((vector * _THREADS,), vec_size=vector),
            )
            for _, vector in pieces
        ]
        total = jax.lax.fori_loop(0, block_size // _TOKENS_PER_STEP, add, start)
        _fold(total, memory, out_ref.at[sequence, block])


def block_sums_kernel(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"],
    *,
    num_groups: int,
    is_mean: bool,
    block_size: int = 64,
    interpret: bool = False,
) -> tuple[Float[Array, "B I C H"], Float[Array, "B I C H"]]:
    """Sums over the valid tokens of each block, heads averaged or added up within each group.

    Args:
      query: Queries, 16- or 32-bit floats.
      key: Keys of the same tokens.
      valid: Which tokens count; the others may hold anything.
      num_groups: Groups of heads `C`: 1 or the number of key/value heads.
      is_mean: Whether heads are averaged.
      block_size: Tokens per block; `T` is a multiple of it.
      interpret: Whether to interpret the kernel, which needs no GPU.

    Returns:
      The sums of queries and of keys, float32.

    Raises:
      ValueError: If the heads of a group do not fill whole rows of 128 entries.
    """
    batch, tokens, _, head_dim = query.shape
    # Threads hold 128 columns, so smaller heads are folded two or more at a time.
    wide = max(head_dim, _THREADS)
    sizes = [x.shape[2] * head_dim for x in (query, key)]
    if wide % head_dim or wide % _THREADS or any(x // num_groups % wide for x in sizes):
        raise ValueError(
            f"heads of each of {num_groups} groups must fill rows of {wide}, got shapes "
            f"{query.shape} and {key.shape}"
        )
    shape = (batch, tokens // block_size, num_groups, wide)
    sums = plgpu.kernel(
        functools.partial(_sum_block, block_size=block_size),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2,
        grid=(batch, tokens // block_size),
        grid_names=("sequence", "block"),
        scratch_types=[plgpu.SMEM((size,), jnp.float32) for size in sizes],
        compiler_params=ops.compiler_params(),
        interpret=ops.interpreter(interpret, detect_races=False),
        kernel_name="sketchwalk_block_sums",
    )(
        query.reshape(batch, tokens, sizes[0]),
        key.reshape(batch, tokens, sizes[1]),
        valid.astype(jnp.int32),
    )

    def finish(x: Array, heads: int) -> Array:
        x = x.reshape(*shape[:3], wide // head_dim, head_dim).sum(axis=3)
        return x * (num_groups / heads) if is_mean else x

    return finish(sums[0], query.shape[2]), finish(sums[1], key.shape[2])
