"""What blocks of keys are worth to one token, on Hopper GPUs, from keys at four bits.

    l[n, j] = q_n · centre_j + max_{s in block j} q'_n · step_j code_s

for the query heads `n` of one key/value head (`policies.block_codes`). A program has 32 blocks of
one key/value head. Codes of a block are 64 rows of C/2 bytes, each of two channels: what the low
four bits say and what the high ones say are two matrices, which become bfloat16 in registers,
exactly, and are multiplied with the queries by the tensor cores. Each code is read once, half a
byte.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels import ops, warp_ops

_KEYS = 64  # of a block
_QUERIES = 8  # the least that tensor cores take
_BLOCKS = 32  # of a program
_ROWS = 64  # of a product; half of those of the centres are empty
_STAGES = 8
_TILE = 8  # blocks whose centres lie together in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is static about a call.

    Attributes:
      blocks: Blocks that there is room for, a multiple of 8.
      half: Half of the channels.
      interpret: Whether the interpreter runs the kernel.
    """

    blocks: int
    half: int
    interpret: bool


def _score(
    query: Any,
    rounded: Any,
    code: Any,
    centre: Any,
    step: Any,
    lengths: Any,
    out: Any,
    *,
    plan: _Plan,
    queries: Any,
    rounds: Any,
    codes: Any,
    centres: Any,
    steps: Any,
    found: Any,
    filled: Any,
    arrived: Any,
) -> None:
    """One program: some blocks of one key/value head."""
    part, kv_head, batch = (jax.lax.axis_index(name) for name in ("part", "kv_head", "batch"))
    first = jnp.minimum(part * _BLOCKS, plan.blocks - _BLOCKS)  # some of the last perhaps twice
    length = lengths[batch]
    present = jnp.clip(jax.lax.div(length + _KEYS - 1, _KEYS) - first, 0, _BLOCKS)

    def load(index: Any) -> None:
        @pl.when(index < present)
        def _() -> None:
            slot = jax.lax.rem(index, _STAGES)
            source = code.at[batch, first + index, :, kv_head]
            plgpu.copy_gmem_to_smem(source, codes.at[slot], filled.at[slot])

    @pl.when(present > 0)
    def _() -> None:
        blocks = pl.ds(first, _BLOCKS)
        plgpu.copy_gmem_to_smem(query.at[batch, kv_head], queries, arrived)
        plgpu.copy_gmem_to_smem(rounded.at[batch, kv_head], rounds, arrived)
        plgpu.copy_gmem_to_smem(
            centre.at[batch, blocks, kv_head], centres.at[pl.ds(0, _BLOCKS)], arrived
        )
        plgpu.copy_gmem_to_smem(step.at[batch, blocks, kv_head], steps, arrived)
        for index in range(_STAGES - 1):
            load(jnp.int32(index))
        plgpu.barrier_wait(arrived)
        shape = (_KEYS, plan.half)

        def peak(index: Any, nothing: Any) -> Any:
            slot = jax.lax.rem(index, _STAGES)
            plgpu.barrier_wait(filled.at[slot])
            pair = ops.read(codes.at[slot])
            exponent = [
                ops.read(steps.at[index, pl.ds(part * plan.half, plan.half)], ops.BY_COLUMN)
                for part in range(2)
            ]
            warp_ops.barrier(interpret=plan.interpret)  # all have read the last block's slot
            load(index + _STAGES - 1)
            low = jnp.bitwise_xor(jnp.bitwise_and(pair, jnp.int8(15)), jnp.int8(8))  # code + 8
            high = jnp.bitwise_and(pair, jnp.int8(-16))  # 16 code
            scales = [_power_of_two(one) for one in exponent]
            left = [
                (low.astype(jnp.bfloat16) - 8.0) * ops.spread(scales[0], shape, 1),
                high.astype(jnp.bfloat16) * ops.spread(scales[1] * 0.0625, shape, 1),
            ]

            def product(sums: ops.Accumulator) -> Any:
                for half in range(2):
                    sums.add_product(left[half], rounds.at[half].transpose((1, 0)))
                return sums.load()

            products = ops.with_accumulator(product, (_KEYS, _QUERIES), interpret=plan.interpret)
            place = (first + index) * _KEYS + ops.matrix_index((_KEYS, _QUERIES), 0)
            products = jnp.where(place < length, products, -jnp.inf)
            found[index] = jnp.max(products, axis=0)
            return nothing

        jax.lax.fori_loop(0, present, peak, ())

        def shared(sums: ops.Accumulator) -> Any:
            sums.add_product(centres, queries.transpose((1, 0)))
            return sums.load()

        plgpu.commit_smem()
        logits = ops.with_accumulator(shared, (_ROWS, _QUERIES), interpret=plan.interpret)
        logits = logits + ops.read(found)
        ops.write(found, logits)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(found.at[pl.ds(0, _BLOCKS)], out.at[batch, kv_head, part])
        plgpu.wait_smem_to_gmem(0)


def _power_of_two(exponent: Int8[Array, "C"]) -> Float[Array, "C"]:
    """`2^exponent` in bfloat16; NaN for -128, which says that there is no key."""
    wide = exponent.astype(jnp.int32)
    bits = jnp.left_shift(wide + 127, 23)
    found = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(wide == -128, jnp.nan, found).astype(jnp.bfloat16)


def token_scores_kernel(
    query: Float[Array, "B K 8 C"],
    rounded: Float[Array, "B K 2 8 C2"],
    code: UInt8[Array, "B J S K C2"],
    centre: Float[Array, "B J K C"],
    step: Int8[Array, "B J K C"],
    *,
    lengths: Int[Array, "B"],
    interpret: bool = False,
) -> Float[Array, "B K J 8"]:
    """`l` of the module; of blocks beyond the sequence it may be anything.

    Args:
      query: Queries in bfloat16, up to eight heads for one of keys.
      rounded: `round_queries` of them, the halves of the channels one after the other.
      code: As `BlockCodes` has it, of at least 32 blocks.
      centre: Likewise.
      step: Likewise.
      lengths: Keys present in each sequence.
      interpret: Whether the interpreter runs the kernel.
    """
    batch, kv_heads, _, channels = query.shape
    # Centres are copied in tiles, from a multiple of their size on; no interpreter minds.
    num_blocks = code.shape[1]
    blocks = -(-num_blocks // _TILE) * _TILE
    padding = ((0, 0), (0, blocks - num_blocks), (0, 0), (0, 0))
    centre, step = jnp.pad(centre, padding), jnp.pad(step, padding)
    parts = -(-blocks // _BLOCKS)
    plan = _Plan(blocks=blocks, half=channels // 2, interpret=interpret)
    kernel = plgpu.kernel(
        functools.partial(_score, plan=plan),
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, parts, _BLOCKS, _QUERIES), jnp.float32),
        scratch_types={
            "queries": ops.tiled((_QUERIES, channels), query.dtype, swizzle=2 * channels),
            "rounds": ops.tiled((2, _QUERIES, plan.half), query.dtype, swizzle=channels),
            "codes": plgpu.SMEM((_STAGES, _KEYS, plan.half), jnp.int8),
            "centres": ops.tiled((_ROWS, channels), query.dtype, swizzle=2 * channels),
            "steps": plgpu.SMEM((_BLOCKS, channels), jnp.int8),
            "found": plgpu.SMEM((_ROWS, _QUERIES), jnp.float32),
            "filled": plgpu.Barrier(num_arrivals=1, num_barriers=_STAGES),
            "arrived": plgpu.Barrier(num_arrivals=4),
        },
        grid=(parts, kv_heads, batch),
        grid_names=("part", "kv_head", "batch"),
        compiler_params=ops.compiler_params(),
        interpret=ops.interpreter(interpret),
        kernel_name="token_scores",
    )
    code = jax.lax.bitcast_convert_type(code, jnp.int8)
    found = kernel(query, rounded, code, centre, step, lengths.astype(jnp.int32))
    found = found.reshape(batch, kv_heads, parts * _BLOCKS, _QUERIES)
    if not blocks % _BLOCKS:
        return found[:, :, :num_blocks]
    place = np.arange(num_blocks)
    place[(parts - 1) * _BLOCKS :] += parts * _BLOCKS - blocks  # the last part ends with the last
    return found[:, :, place]
