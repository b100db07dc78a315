"""Sums of queries and keys over blocks of tokens, averaged over heads, in one pass.

Block means and their sketches derive from these sums (Algorithm 1 steps 1 to 4):

    sums[i] = 1/N · Σ over the valid tokens t of block i, and the N heads n, of x[t, n] Ω

A thread block has a block of tokens, or half of one, of one sequence. Reading queries and keys
once, `(N + K) H` numbers per token, takes all of the time: 128 threads add up rows of all heads in
float32 registers, then average the heads in shared memory and project them to sketch space.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from sketchwalk_jax.pallas_kernels.config import WIDE, fills_rows
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.row_ops import THREADS, WARPS

_VECTOR = 8  # 16-byte loads of 16-bit numbers
_TOKENS_PER_STEP = 4
_COLUMNS = 64  # most columns of a projection in the kernel
# Fewer blocks do not keep every SM busy and are divided, if four thread blocks fit on an SM.
_MANY_BLOCKS = 1024
_LEAST_TOKENS = 32
_LARGEST_WIDTH = 5120  # most entries of a token's queries and keys for this


def _pieces(width: int) -> list[tuple[int, int]]:
    """Returns starts and vector sizes of the pieces that cover a row of `width` entries.

    A piece has a vector of 8, 4, 2 or 1 entries per thread, the widest that still fits.
    """
    pieces, start = [], 0
    while start < width:
        vector = _VECTOR
        while vector * THREADS > width - start:
            vector //= 2
        pieces.append((start, vector))
        start += vector * THREADS
    return pieces


def _strided(width: int) -> Any:
    """Returns a vector's layout over a warpgroup, with adjacent entries in each thread."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=width // THREADS)


def _zeros(width: int) -> list[Array]:
    """Returns a row of zeros, in pieces."""
    widths = [vector * THREADS for _, vector in _pieces(width)]
    return [ops.full((width,), 0.0, _strided(width)) for width in widths]


def _load_token(row_ref: Any) -> list[Array]:
    """Loads all heads of one token, in pieces."""
    return [
        ops.read(row_ref.at[pl.ds(start, vector * THREADS)], _strided(vector * THREADS))
        for start, vector in _pieces(row_ref.shape[0])
    ]


def _fold(memory: Any, wide: int) -> Array:
    """Sums over heads, in rows of `wide` entries."""
    places = [pl.ds(start, wide) for start in range(0, memory.shape[0], wide)]
    return functools.reduce(jnp.add, [ops.read(memory.at[x], _strided(wide)) for x in places])


def _sum_tokens(
    query_ref: Any,
    key_ref: Any,
    valid_ref: Any,
    projection_ref: Any,
    out_ref: Any,
    query_memory: Any,
    key_memory: Any,
    folded: Any,
    *,
    num_tokens: int,
    factors: tuple[float, ...],
    is_projected: bool,
) -> None:
    """Adds up the tokens of one block, or of one part of it.

    `query_memory` and `key_memory` are rows of all heads in shared memory; `folded` has the means
    over heads, first of queries, then of keys.
    """
    sequence, index = jax.lax.axis_index("sequence"), jax.lax.axis_index("index")
    rows = query_ref, key_ref

    def add(step: Array, totals: list[list[Array]]) -> list[list[Array]]:
        for offset in range(_TOKENS_PER_STEP):
            token = index * num_tokens + step * _TOKENS_PER_STEP + offset
            is_valid = valid_ref[sequence, token]
            parts = [_load_token(ref.at[sequence, token]) for ref in rows]
            totals = [
                [
                    x + jnp.where(is_valid, part.astype(jnp.float32), 0.0)
                    for x, part in zip(total, new, strict=True)
                ]
                for total, new in zip(totals, parts, strict=True)
            ]
        return totals

    totals = [_zeros(ref.shape[-1]) for ref in rows]
    # Queries and keys in one loop: the more loads are in flight, the better.
    totals = jax.lax.fori_loop(0, num_tokens // _TOKENS_PER_STEP, add, totals)
    wide, memories = folded.shape[-1], (query_memory, key_memory)
    # Load early to hide the latency.
    matrix = _load_projection(projection_ref) if is_projected else None
    for memory, total in zip(memories, totals, strict=True):
        for (start, vector), piece in zip(_pieces(memory.shape[0]), total, strict=True):
            memory[pl.ds(start, vector * THREADS)] = piece
    row_ops.barrier()
    for which, (memory, factor) in enumerate(zip(memories, factors, strict=True)):
        total = _fold(memory, wide)
        if factor != 1.0:
            total = total * factor
        if is_projected:
            folded[which] = total
        else:
            out_ref[sequence, index, which] = total
    if matrix is not None:
        row_ops.barrier()
        _project(matrix, folded, out_ref.at[sequence, index])


def _projection_layout(rows: int) -> Any:
    """Returns a layout with a quarter of the rows per warp, and two columns per thread."""
    tiles: tuple[tuple[int, ...], ...] = ((rows, _COLUMNS), (rows // WARPS, _COLUMNS))
    tiling = plgpu.Tiling((*tiles, (1, THREADS // WARPS), (1,)))
    return plgpu.Layout.TILED(tiling, (-7,), (-2,), -1, _check_canonical=False)


def _load_projection(ref: Any) -> Array:
    return ops.read(ref, _projection_layout(ref.shape[0]))


def _project(matrix: Array, folded: Any, out_ref: Any) -> None:
    """Multiplies every row in shared memory by the matrix in float32, and writes the results."""
    layout = _projection_layout(matrix.shape[0])
    for row in range(folded.shape[0]):
        x = ops.read(folded.at[row], layout.reduce(1))
        x = plgpu.layout_cast(jax.lax.broadcast_in_dim(x, matrix.shape, (0,)), layout)
        out_ref[row] = jnp.sum(x * matrix, axis=0)


def _projection(omega: np.ndarray | None, head_dim: int, wide: int) -> np.ndarray | None:
    """Returns the matrix that projects `wide` entries, heads side by side, to sketch space."""
    if omega is None and wide == head_dim:
        return None
    own = np.eye(head_dim, dtype=np.float32) if omega is None else omega
    return np.tile(own, (wide // head_dim, 1))


def block_sums_kernel(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"],
    *,
    omega: Float[np.ndarray, "H R"] | None = None,
    block_size: int = 64,
    interpret: bool = False,
) -> tuple[Float[Array, "B I 1 R"], Float[Array, "B I 1 R"]]:
    """Sums means over heads over the valid tokens of each block.

    Args:
      query: Queries, 16- or 32-bit floats.
      key: Keys of the same tokens.
      valid: Mask of valid tokens; the others may hold anything.
      omega: Projection of sums to sketch space, or `None` for the identity.
      block_size: Tokens per block; `T` is a multiple of it.
      interpret: Whether to interpret the kernel, which needs no GPU.

    Returns:
      The sums of queries and of keys, float32.

    Raises:
      ValueError: If the heads do not fill whole rows of 128 entries.
    """
    batch, tokens, _, head_dim = query.shape
    # Threads hold 128 columns, so smaller heads are folded two or more at a time.
    wide = max(head_dim, WIDE)
    sizes = [x.shape[2] * head_dim for x in (query, key)]
    if not fills_rows(query, key):
        raise ValueError(
            f"heads must fill rows of {wide}, got shapes {query.shape} and {key.shape}"
        )
    matrix = _projection(omega, head_dim, wide)
    is_projected = matrix is not None and wide == THREADS and matrix.shape[1] <= _COLUMNS
    num_blocks = tokens // block_size
    is_small = batch * num_blocks < _MANY_BLOCKS and sum(sizes) <= _LARGEST_WIDTH
    is_divided = is_small and block_size >= 2 * _LEAST_TOKENS
    parts = 2 if is_divided else 1
    size = _COLUMNS if is_projected else wide
    # Store both in one array, so that the next operation is one pass over both.
    shape = (batch, num_blocks * parts, 2, size)
    in_kernel = np.zeros((1, 1), np.float32)
    if matrix is not None and is_projected:
        in_kernel = np.pad(matrix, ((0, 0), (0, _COLUMNS - matrix.shape[1])))
    sums = ops.kernel(
        functools.partial(
            _sum_tokens,
            num_tokens=block_size // parts,
            factors=tuple(1 / x.shape[2] for x in (query, key)),
            is_projected=is_projected,
        ),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=shape[:2],
        grid_names=("sequence", "index"),
        scratch_types=[
            *(plgpu.SMEM((width,), jnp.float32) for width in sizes),
            plgpu.SMEM((2, wide), jnp.float32),
        ],
        compiler_params=ops.compiler_params(unsafe_no_auto_barriers=True),
        interpret=interpret,
        detect_races=False,
        kernel_name="sketchwalk_block_sums",
    )(
        query.reshape(batch, tokens, sizes[0]),
        key.reshape(batch, tokens, sizes[1]),
        valid,
        jnp.asarray(in_kernel),
    )

    sums = sums.reshape(batch, num_blocks, parts, 2, size)
    sums = sums.sum(axis=2) if is_divided else sums[:, :, 0]
    if matrix is not None and not is_projected:
        sums = jnp.matmul(sums, jnp.asarray(matrix), precision=jax.lax.Precision.HIGHEST)
    elif matrix is not None:
        sums = sums[..., : matrix.shape[1]]
    return sums[:, :, :1], sums[:, :, 1:]
