"""Attention of one token per sequence over its key blocks, on Hopper: `softmax(scale q Kᵀ) V`.

A program attends with the heads that share a list and a key/value head, over one part (split) of
the list. Its operands are swapped, so that keys and features, of which there are many, fill the
64 rows of a matrix instruction, and heads, of which there are few, its 8 columns:

    Sᵀ = K Qᵀ        [keys, heads]
    m' = max(m, Sᵀ)   over keys, P = exp(S - m')
    Oᵀ = Oᵀ exp(m - m') + Vᵀ Pᵀ   [features, heads]

Keys and values come through several stages of asynchronous copies, a step of `decode_keys` keys at
a time. A second small kernel adds the parts in a fixed order; one part alone needs none.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels import ops
from sketchwalk_jax.pallas_kernels.attention import without_derivative
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.decode_parts import (
    BY_HEAD,
    COLUMNS,
    LAYOUT,
    LOG2_E,
    ROWS,
    DecodeShape,
    by_rows,
    combine_body,
    finish,
    num_splits,
    store,
    store_transposed,
)

# A finite stand-in for log(0) and a running maximum above it: a masked score weighs exp2(-5e29) = 0
# whatever else a part holds, and an empty part weighs nothing beside others.
_MASK_VALUE = -1e30
_FIRST_MAXIMUM = -5e29
_MAX_HEADS = 32  # of a program, so that registers suffice
_FEW_SPLITS = 4
_SHARED_BYTES = 220 * 1024  # of 227 KiB; barriers and reductions take some


def _decode_body(
    query: Any,
    key: Any,
    value: Any,
    ids: Any,
    counts: Any,
    layer: Any,
    kv_lengths: Any,
    out: Any,
    *rest: Any,
    shape: DecodeShape,
) -> None:
    """One part of one unit's list; see the module's docstring."""
    *statistics, q_raw, q_tile, k_tiles, v_tiles, p_tile, q_bar, k_bars, v_bars = rest
    batch = jax.lax.axis_index("batch")
    split = jax.lax.axis_index("split")
    unit = jax.lax.axis_index("unit")
    size, blocks, stages = shape.block_size, shape.step_blocks, shape.stages
    width = shape.head_dim
    place = batch * shape.units + unit
    head = unit // (shape.units // shape.kv_heads)
    row = unit // (shape.units // shape.num_lists)
    heads = pl.ds(place * shape.group, shape.group)
    own_heads = pl.ds(0, shape.group)
    if shape.overlap and shape.splits > 1:
        plgpu.griddepcontrol_launch_dependents()
    plgpu.copy_gmem_to_smem(query.at[heads], q_raw.at[own_heads], q_bar.at[0])
    count = counts[batch, row]
    length = kv_lengths[batch]
    first_row = (layer[0] * shape.batch + batch) * shape.key_tokens
    num_steps = (count + blocks - 1) // blocks
    start = split * num_steps // shape.splits
    stop = (split + 1) * num_steps // shape.splits

    def block_id(step: Any, index: int) -> Any:
        last = jnp.maximum(count - 1, 0)  # what pads the last step is read, and masked
        found = ids[batch, row, jnp.minimum(step * blocks + index, last)]
        return jnp.clip(found, 0, shape.key_tokens // size - 1)

    def fetch(step: Any, slot: Any) -> None:
        for index in range(blocks):
            source = (pl.ds(first_row + block_id(step, index) * size, size), head)
            for tiles, cache, bars in ((k_tiles, key, k_bars), (v_tiles, value, v_bars)):
                block = tiles.at[slot, pl.ds(index * size, size)]
                plgpu.copy_gmem_to_smem(cache.at[source], block, bars.at[slot])

    for ahead in range(stages):

        @pl.when(start + ahead < stop)
        def _(ahead: int = ahead) -> None:
            fetch(start + ahead, ahead)

    plgpu.barrier_wait(q_bar.at[0])
    raw = plgpu.load(q_raw.transpose((1, 0)), layout=LAYOUT, optimized=False)
    store_transposed(q_tile, raw, is_swizzled=True)
    plgpu.commit_smem()

    scores_shape = (shape.step_keys, shape.columns)
    offset = plgpu.broadcasted_iota(jnp.int32, scores_shape, 0, layout=LAYOUT)

    def limits(step: Any) -> list[Any]:
        """For each block of a step, its keys that count."""
        return [
            jnp.where(step * blocks + index < count, length - block_id(step, index) * size, 0)
            for index in range(blocks)
        ]

    def hide(x: Array, offset: Array, limits: list[Any], fill: float) -> Array:
        if len(limits) == 1:
            return jnp.where(offset < limits[0], x, jnp.asarray(fill, x.dtype))
        for index, limit in enumerate(limits):
            first = index * size
            hidden = (offset >= first + limit) & (offset >= first) & (offset < first + size)
            x = jnp.where(hidden, jnp.asarray(fill, x.dtype), x)
        return x

    def one_step(step: Any, running: Any) -> Any:
        maximum, total, o = running
        slot = jax.lax.rem(step - start, stages)
        visible = limits(step)
        plgpu.barrier_wait(k_bars.at[slot])

        def multiply_keys(acc: Any) -> Array:
            plgpu.wgmma(acc, k_tiles.at[slot], q_tile.at[:, pl.ds(0, width)].transpose((1, 0)))
            return acc[...]

        s = pl.run_scoped(multiply_keys, plgpu.ACC(scores_shape)) * (shape.scale * LOG2_E)
        s = hide(s, offset, visible, _MASK_VALUE)
        new_maximum = jnp.maximum(maximum, jnp.max(s, axis=0))
        p = jnp.exp2(s - by_rows(new_maximum, scores_shape))
        decay = jnp.exp2(maximum - new_maximum)
        total = total * by_rows(decay, scores_shape) + p
        store_transposed(p_tile, p, is_swizzled=True)
        plgpu.barrier_wait(v_bars.at[slot])

        @pl.when(functools.reduce(jnp.minimum, visible) < size)
        def _() -> None:
            # Slots that hold no token may hold anything, NaN included; weight 0 would not erase it.
            for index in range(0, shape.step_keys, ROWS):
                tile = v_tiles.at[slot, pl.ds(index, ROWS)]
                shown = (ROWS, width)
                places = plgpu.broadcasted_iota(jnp.int32, shown, 0, layout=LAYOUT) + index
                tile[...] = hide(plgpu.load(tile, layout=LAYOUT), places, visible, 0.0)

        plgpu.commit_smem()  # also: everyone has left the previous step

        def multiply_values(*accumulators: Any) -> tuple[Array, ...]:
            for acc, first in zip(accumulators, shape.chunks, strict=True):
                values = v_tiles.at[slot, :, pl.ds(first, ROWS)].transpose((1, 0))
                plgpu.wgmma(acc, values, p_tile.transpose((1, 0)))

            @pl.when((step > start) & (step - 1 + stages < stop))
            def _() -> None:
                fetch(step - 1 + stages, jax.lax.rem(step - 1 - start, stages))

            return tuple(acc[...] for acc in accumulators)

        accumulators = [plgpu.ACC((ROWS, shape.columns)) for _ in shape.chunks]
        updates = pl.run_scoped(multiply_values, *accumulators)
        decay = by_rows(decay, updates[0].shape)
        o = tuple(x * decay + update for x, update in zip(o, updates, strict=True))
        return new_maximum, total, o

    def zeros(rows: int) -> Array:
        return plgpu.layout_cast(jnp.zeros((rows, shape.columns), jnp.float32), LAYOUT)

    first = plgpu.layout_cast(jnp.full((shape.columns,), _FIRST_MAXIMUM, jnp.float32), BY_HEAD)
    running = (first, zeros(shape.step_keys), tuple(zeros(ROWS) for _ in shape.chunks))
    maximum, total, o = jax.lax.fori_loop(start, stop, one_step, running)
    total = jnp.sum(total, axis=0)
    tiles = [pl.ds(index * ROWS, ROWS) for index in range(len(shape.chunks))]
    if shape.splits > 1:
        for tile, x in zip(tiles, o, strict=True):
            store(out.at[split, place, tile], x)
        store(statistics[0].at[split, place, 0], maximum)
        store(statistics[0].at[split, place, 1], total)
        return
    for tile, x in zip(tiles, o, strict=True):
        x, lse = finish(x, total, maximum)
        store_transposed(q_raw.at[:, tile], x)
    if statistics:
        store(statistics[0].at[place], lse)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_raw.at[own_heads], out.at[heads])
    plgpu.wait_smem_to_gmem(0)


def _barriers(count: int, arrivals: int = 1) -> Any:
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def block_sparse_decode_kernel(
    query: Float[Array, "B 1 N H"],
    key: Float[Array, "L B S K H"],
    value: Float[Array, "L B S K H"],
    ids: Int[Array, "B M 1 P"],
    counts: Int[Array, "B M 1"],
    *,
    layer: Int[Array, ""],
    kv_lengths: Int[Array, "B"],
    scale: float,
    block_size: int = 64,
    return_lse: bool = False,
    config: KernelConfig | None = None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"] | None]:
    """Exact attention of one token per sequence over its listed blocks.

    Args:
      query: The current token's queries, bfloat16 or float16.
      key: Stacked cache of keys, the current token's included; `S` is a multiple of the block size.
      value: Values, shaped like `key`.
      ids: Key blocks of each list, in any order.
      counts: Blocks in each list.
      layer: Layer of the cache; it is not sliced.
      kv_lengths: Keys present in each sequence.
      scale: Factor of the scores.
      block_size: Tokens per block, a multiple of 8.
      return_lse: Whether to return the log-sum-exp of the scaled scores.
      config: Tile sizes.

    Returns:
      The output in query's dtype, and with `return_lse` the float32 log-sum-exp `[B, 1, N]`, else
      `None`.

    Raises:
      NotImplementedError: If a derivative is taken.
    """
    config = config or KernelConfig()
    batch, _, num_heads, head_dim = query.shape
    num_layers, _, key_tokens, kv_heads, _ = key.shape
    if padding := max(ROWS - head_dim, -head_dim % 16):  # for completeness: copies whole caches
        query = _pad_features(query, padding)
        key, value = _pad_features(key, padding), _pad_features(value, padding)
    num_lists = ids.shape[1]
    group = num_heads // max(num_lists, kv_heads)
    group = max(x for x in range(1, _MAX_HEADS + 1) if group % x == 0)
    units = num_heads // group
    step_keys = max(config.decode_keys, block_size)
    splits = num_splits(batch * units, ids.shape[-1], block_size, config)
    # beside keys and values: queries, twice, and weights, whose heads are padded to 8
    other_bytes = (group + 7) * (2 * 2 * ROWS + step_keys) * query.dtype.itemsize
    is_brief = splits > _FEW_SPLITS  # latency rules, not bandwidth
    buffer_kib = config.decode_buffer_kib or (96 if is_brief else 192)
    buffer_bytes = min(buffer_kib * 1024, _SHARED_BYTES - other_bytes)
    stage_bytes = step_keys * 2 * (head_dim + padding) * query.dtype.itemsize
    steps = -(-ids.shape[-1] * block_size // (step_keys * splits))
    shape = DecodeShape(
        batch=batch,
        units=units,
        group=group,
        kv_heads=kv_heads,
        num_lists=num_lists,
        head_dim=head_dim + padding,
        key_tokens=key_tokens,
        block_size=block_size,
        step_keys=step_keys,
        stages=max(2, min(buffer_bytes // stage_bytes, steps + 1)),
        splits=splits,
        dtype=query.dtype,
        scale=scale,
        overlap=(is_brief if config.decode_overlap is None else config.decode_overlap)
        and not config.interpret,
    )
    rows = (num_layers * batch * key_tokens, kv_heads, shape.head_dim)
    out, lse = _run(
        shape,
        _pad_features(query, shape.features - shape.head_dim).reshape(-1, shape.features),
        key.reshape(rows),
        value.reshape(rows),
        ids[:, :, 0],
        counts[:, :, 0],
        jnp.reshape(layer, (1,)).astype(jnp.int32),
        kv_lengths.astype(jnp.int32),
        return_lse=return_lse,
        interpret=config.interpret,
    )
    out = out.reshape(batch, 1, num_heads, shape.features)
    if shape.features > shape.head_dim:  # the chunks overlap
        rest = out[..., shape.features - (shape.head_dim - ROWS) :]
        out = jnp.concatenate([out[..., :ROWS], rest], axis=-1)
    out = out[..., :head_dim]
    if lse is None:
        return out, None
    lse = lse.reshape(batch, units, -1)[:, :, : shape.group]
    return out, lse.reshape(batch, 1, num_heads)


def _pad_features(x: Array, padding: int) -> Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),)) if padding else x


def _run(
    shape: DecodeShape, query: Array, *operands: Array, return_lse: bool, interpret: bool
) -> tuple[Array, Array | None]:
    """Launches the kernel, and the one that combines parts if there are several."""
    places, columns, features = shape.batch * shape.units, shape.columns, shape.features
    dtype, swizzle = shape.dtype, shape.swizzle
    final = [jax.ShapeDtypeStruct(query.shape, dtype)]
    if return_lse:
        final.append(jax.ShapeDtypeStruct((places, columns), jnp.float32))
    partial = [
        jax.ShapeDtypeStruct((shape.splits, places, features, columns), jnp.float32),
        jax.ShapeDtypeStruct((shape.splits, places, 2, columns), jnp.float32),
    ]
    common = {
        "compiler_params": ops.compiler_params(approx_math=True, unsafe_no_auto_barriers=True),
        "interpret": ops.interpreter(interpret),
    }
    attend = plgpu.kernel(
        functools.partial(_decode_body, shape=shape),
        out_type=partial if shape.splits > 1 else final,
        grid=(shape.batch, shape.splits, shape.units),
        grid_names=("batch", "split", "unit"),  # the last varies fastest
        scratch_types=[
            plgpu.SMEM((columns, features), dtype),
            ops.tiled((columns, features), dtype, swizzle=swizzle),
            ops.tiled((shape.stages, shape.step_keys, shape.head_dim), dtype, swizzle=swizzle),
            ops.tiled((shape.stages, shape.step_keys, shape.head_dim), dtype, swizzle=swizzle),
            ops.tiled((columns, shape.step_keys), dtype, swizzle=swizzle),
            _barriers(1),
            *[_barriers(shape.stages, shape.step_blocks)] * 2,
        ],
        kernel_name="block_sparse_decode",
        **common,
    )
    outputs = without_derivative(attend)(query, *operands)
    if shape.splits > 1:
        outputs = plgpu.kernel(
            functools.partial(combine_body, shape=shape),
            out_type=final,
            grid=(places, columns // COLUMNS, features // ROWS),
            grid_names=("unit", "heads", "chunk"),
            scratch_types=[plgpu.SMEM((COLUMNS, ROWS), dtype)],
            kernel_name="combine_decode",
            **common,
        )(*outputs)
    return outputs[0], outputs[1] if return_lse else None
