"""Prefill over block lists on Hopper GPUs: exact attention of query blocks over listed key blocks.

A program takes one tile of 64 queries and up to two query heads that share their keys and their
list. Each head has a warpgroup that computes; one more warpgroup, the loader, copies the listed
keys and values into shared memory, 128 keys a step, a few steps ahead. Steps run from the end of a
list to its beginning: the first one holds the diagonal block and is the only one with a mask. While
one head's weights are computed, the tensor cores multiply for the other.

Scores are kept in base 2: `p = 2^(c·s - c·m)` with `c = scale · log2(e)`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import ops, prefill_compute, prefill_tiles
from sketchwalk_jax.pallas_kernels.attention import without_derivative
from sketchwalk_jax.pallas_kernels.config import KernelConfig, default_kernel_config

QUERIES = prefill_tiles.QUERIES
KEYS = prefill_tiles.KEYS


def block_sparse_prefill(
    query: Float[Array, "B T N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    ids: Int[Array, "B M I P"],
    counts: Int[Array, "B M I"],
    *,
    layer: Int[Array, ""] | int,
    first_block: Int[Array, "B"],
    kv_lengths: Int[Array, "B"],
    scale: float,
    block_size: int = 64,
    return_lse: bool = False,
    config: KernelConfig | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"] | None]:
    """Causal attention of each query block over its list of key blocks.

    Row `i` of the lists covers the queries of block `first_block + i`. Its list is ascending and
    names no block beyond the row's own. Tiles of queries that lie beyond `kv_lengths` come out 0.

    Args:
      query: Queries on block boundaries, bfloat16 or float16, with a head_dim up to 128.
      key: Stacked cache of keys; `S` is a multiple of the block size.
      value: Values, shaped like `key`.
      ids: Lists for all heads (`M = 1`), each key/value head, or each query head.
      counts: Blocks in each list; what follows in `ids` is never read.
      layer: Layer of the cache.
      first_block: Block of each sequence's first query.
      kv_lengths: Keys present in each sequence; later ones may hold anything.
      scale: Factor of the scores, greater than 0.
      block_size: Tokens per block, 64 or 128.
      return_lse: Whether to return the log-sum-exp of the scaled scores as well.
      config: Sizes; the result does not depend on them beyond rounding.

    Returns:
      The output, and with `return_lse` the float32 log-sum-exp, else `None`.

    Raises:
      ValueError: If the kernel cannot take these arguments.
      NotImplementedError: If a derivative is taken.
    """
    config = default_kernel_config() if config is None else config
    _check(query, key, scale, block_size)
    head_dim = query.shape[-1]
    index = jnp.asarray(layer, jnp.int32)
    padded = 64 if head_dim <= 64 else 128
    if padded != head_dim:
        query, key, value, index = _pad_heads(query, key, value, index, padded)
    stages = 4 if padded == 64 else 2
    plan = prefill_tiles.Plan(
        batch=query.shape[0],
        tiles=query.shape[1] // QUERIES,
        heads=query.shape[2],
        kv_heads=key.shape[3],
        head_dim=padded,
        lists=ids.shape[1],
        subblocks=block_size // QUERIES,
        stages=config.prefill_stages or stages,
        value_stages=config.prefill_value_stages or stages,
        takes_turns=config.prefill_takes_turns,
        frees_early=config.prefill_frees_early,
        overlaps=config.prefill_overlaps,
        heads_first=config.prefill_heads_first,
        exponent=scale * math.log2(math.e),
        interpret=config.interpret,
    )
    out_type = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    if return_lse:
        shape = (query.shape[0], query.shape[2], query.shape[1])
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    programs = min(config.prefill_programs, plan.units)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan, programs=programs, return_lse=return_lse),
        out_type=out_type,
        scratch_types=_scratch(plan, query.dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=plan.computing + 1,
        thread_name="warpgroup",
        # No reduction here crosses warps; the room goes to another step of values.
        compiler_params=ops.compiler_params(approx_math=True, reduction_scratch_bytes=128),
        interpret=ops.interpreter(config.interpret),
        kernel_name="block_sparse_prefill",
    )
    outputs = without_derivative(kernel)(
        query,
        key,
        value,
        ids,
        counts,
        index.reshape(1),
        first_block.astype(jnp.int32),
        kv_lengths.astype(jnp.int32),
    )
    out = outputs[0][..., :head_dim]
    return out, jnp.swapaxes(outputs[1], 1, 2) if return_lse else None


def _check(query: Any, key: Any, scale: float, block_size: int) -> None:
    """Raises an error for arguments that the kernel cannot take."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"query must be bfloat16 or float16, got {query.dtype}")
    if query.shape[-1] > 128:
        raise ValueError(f"query must have a head_dim of at most 128, got {query.shape[-1]}")
    if block_size not in (64, 128):
        raise ValueError(f"block_size must be 64 or 128, got {block_size}")
    if query.shape[1] % block_size or key.shape[2] % block_size:
        raise ValueError(
            f"query and key must hold whole blocks of {block_size} tokens, "
            f"got {query.shape[1]} and {key.shape[2]}"
        )
    if not scale > 0.0:
        raise ValueError(f"scale must be greater than 0, got {scale}")


def _pad_heads(query: Array, key: Array, value: Array, layer: Array, padded: int) -> Any:
    """Zeros after the features of each head; of the cache, a copy of the layer alone."""
    after = ((0, 0),) * 3 + ((0, padded - query.shape[-1]),)

    def one_layer(cache: Array) -> Array:
        return jnp.pad(jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False), after)[None]

    return jnp.pad(query, after), one_layer(key), one_layer(value), jnp.zeros_like(layer)


def _scratch(plan: prefill_tiles.Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a program."""
    heads = plan.computing
    num_barriers = plan.stages + plan.value_stages
    return {
        "queries": ops.tiled((heads, QUERIES, plan.head_dim), dtype),
        "outputs": ops.tiled((heads, QUERIES, plan.head_dim), dtype),
        "keys": ops.tiled((plan.stages, KEYS, plan.head_dim), dtype),
        "values": ops.tiled((plan.value_stages, KEYS, plan.head_dim), dtype),
        "lse": plgpu.SMEM((heads, QUERIES), jnp.float32),
        # One register of each warpgroup keeps track of each of these arrays.
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=num_barriers),
        "freed": plgpu.Barrier(num_arrivals=heads, num_barriers=num_barriers),
        "single": plgpu.Barrier(num_arrivals=1, num_barriers=3 + 2 * heads),
    }


def _kernel(*refs: Any, plan: Any, programs: int, return_lse: bool, **scratch: Any) -> None:
    """One program: a loader and one or two warpgroups that compute."""
    names = [field.name for field in dataclasses.fields(prefill_tiles.Refs)]
    outputs = refs[8:] if return_lse else (refs[8], None)
    inputs = dict(zip(names, (*refs[:8], *outputs), strict=False))
    shared = prefill_tiles.Refs(**inputs, **scratch)
    warpgroup = jax.lax.axis_index("warpgroup")
    program = jax.lax.axis_index("program")
    spread = prefill_tiles.Spread(program, programs)

    # Registers of a thread, which all warpgroups share; narrow heads take fewer to compute.
    loading, computing = (88, 248) if plan.computing == 1 else (40, 232)
    if plan.computing == 2 and plan.head_dim == 64:
        loading, computing = 56, 224

    @pl.when(warpgroup == plan.computing)
    def _() -> None:
        plgpu.set_max_registers(loading, action="decrease")
        prefill_tiles.load_tiles(plan, shared, spread)

    @pl.when(warpgroup < plan.computing)
    def _() -> None:
        plgpu.set_max_registers(computing, action="increase")
        prefill_compute.compute_tiles(plan, shared, spread, warpgroup)
