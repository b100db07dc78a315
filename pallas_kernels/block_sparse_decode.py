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

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig

# A finite stand-in for log(0) and a running maximum above it: a masked score weighs exp2(-5e29) = 0
# whatever else a part holds, and an empty part weighs nothing beside others.
_MASK_VALUE = -1e30
_FIRST_MAXIMUM = -5e29
_ROWS = 64  # of a matrix instruction
_MAX_SPLITS = 64
_LOG2_E = math.log2(math.e)
_LAYOUT = plgpu.Layout.WGMMA
_BY_HEAD = _LAYOUT.reduce(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """Everything static about a call.

    Attributes:
      batch: Sequences.
      units: Groups of heads that share a list and a key/value head, in each sequence.
      group: Query heads of a unit.
      kv_heads: Key/value heads.
      num_lists: Lists per sequence: 1, or one for each key/value or query head.
      head_dim: Features.
      key_tokens: Keys of a sequence that the cache holds.
      block_size: Tokens per block.
      step_keys: Keys of one step.
      stages: Steps that are in shared memory at a time.
      splits: Parts of a list.
      dtype: Type of queries, keys, values and output.
      scale: Factor of the scores.
    """

    batch: int
    units: int
    group: int
    kv_heads: int
    num_lists: int
    head_dim: int
    key_tokens: int
    block_size: int
    step_keys: int
    stages: int
    splits: int
    dtype: Any
    scale: float

    @property
    def columns(self) -> int:
        """Heads, padded to what a matrix instruction takes."""
        return -(-self.group // 8) * 8

    @property
    def features(self) -> int:
        """Features, padded to what a matrix instruction takes as rows."""
        return -(-self.head_dim // _ROWS) * _ROWS

    @property
    def swizzle(self) -> int:
        """Bytes of the pattern of shared memory; a tile of it must divide the features."""
        return next(x for x in (128, 64, 32) if self.head_dim * 2 % x == 0)

    @property
    def step_blocks(self) -> int:
        """Blocks of one step."""
        return self.step_keys // self.block_size


def _by_rows(x: Float[Array, "n"], shape: tuple[int, int]) -> Float[Array, "m n"]:
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, (1,)), _LAYOUT)


def _store_transposed(ref: Any, x: Float[Array, "m n"]) -> None:
    """Writes `xᵀ` to shared memory, for matrix instructions and copies to read."""
    x = plgpu.layout_cast(x.astype(ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    ref.transpose((1, 0))[...] = x


def _finish(
    o: Float[Array, "H n"], total: Float[Array, "n"], maximum: Float[Array, "n"]
) -> tuple[Float[Array, "H n"], Float[Array, "n"]]:
    """The output and the log-sum-exp of a finished sum; 0 and -inf where nothing was summed."""
    is_empty = total == 0.0
    safe = jnp.where(is_empty, 1.0, total)
    lse = jnp.where(is_empty, -jnp.inf, (maximum + jnp.log2(safe)) / _LOG2_E)
    return o * _by_rows(1.0 / safe, o.shape), lse


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
    shape: _Shape,
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
    row = unit if shape.num_lists > 1 else 0

    heads = pl.ds(place * shape.group, shape.group)
    own_heads = (pl.ds(0, shape.group), pl.ds(0, width))
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
                block = tiles.at[slot, pl.ds(index * size, size), pl.ds(0, width)]
                plgpu.copy_gmem_to_smem(cache.at[source], block, bars.at[slot])

    for ahead in range(stages):

        @pl.when(start + ahead < stop)
        def _() -> None:
            fetch(start + ahead, ahead)

    plgpu.barrier_wait(q_bar.at[0])
    raw = plgpu.load(q_raw.transpose((1, 0)), layout=_LAYOUT, optimized=False)
    _store_transposed(q_tile, raw)
    plgpu.commit_smem()

    scores_shape = (shape.step_keys, shape.columns)
    offset = plgpu.broadcasted_iota(jnp.int32, scores_shape, 0, layout=_LAYOUT)

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

        s = pl.run_scoped(multiply_keys, plgpu.ACC(scores_shape)) * (shape.scale * _LOG2_E)
        s = hide(s, offset, visible, _MASK_VALUE)
        new_maximum = jnp.maximum(maximum, jnp.max(s, axis=0))
        p = jnp.exp2(s - _by_rows(new_maximum, scores_shape))
        decay = jnp.exp2(maximum - new_maximum)
        total = total * _by_rows(decay, scores_shape) + p
        _store_transposed(p_tile, p)
        plgpu.barrier_wait(v_bars.at[slot])

        @pl.when(functools.reduce(jnp.minimum, visible) < size)
        def _() -> None:
            # Slots that hold no token may hold anything, NaN included; weight 0 would not erase it.
            for index in range(0, shape.step_keys, _ROWS):
                tile = v_tiles.at[slot, pl.ds(index, _ROWS)]
                shown = (_ROWS, shape.features)
                places = plgpu.broadcasted_iota(jnp.int32, shown, 0, layout=_LAYOUT) + index
                tile[...] = hide(plgpu.load(tile, layout=_LAYOUT), places, visible, 0.0)

        plgpu.commit_smem()  # also: everyone has left the previous step

        def multiply_values(acc: Any) -> Array:
            values = v_tiles.at[slot].transpose((1, 0))
            plgpu.wgmma(acc, values, p_tile.transpose((1, 0)))

            @pl.when((step > start) & (step - 1 + stages < stop))
            def _() -> None:
                fetch(step - 1 + stages, jax.lax.rem(step - 1 - start, stages))

            return acc[...]

        update = pl.run_scoped(multiply_values, plgpu.ACC((shape.features, shape.columns)))
        return new_maximum, total, o * _by_rows(decay, o.shape) + update

    def zeros(rows: int) -> Array:
        return plgpu.layout_cast(jnp.zeros((rows, shape.columns), jnp.float32), _LAYOUT)

    first = plgpu.layout_cast(jnp.full((shape.columns,), _FIRST_MAXIMUM, jnp.float32), _BY_HEAD)
    running = (first, zeros(shape.step_keys), zeros(shape.features))
    maximum, total, o = jax.lax.fori_loop(start, stop, one_step, running)
    total = jnp.sum(total, axis=0)
    if shape.splits > 1:
        out[split, place] = o
        statistics[0][split, place, 0] = maximum
        statistics[0][split, place, 1] = total
        return
    o, lse = _finish(o, total, maximum)
    if statistics:
        statistics[0][place] = lse
    _store_transposed(q_raw, o)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_raw.at[own_heads], out.at[heads])
    plgpu.wait_smem_to_gmem(0)


def _combine_body(parts: Any, statistics: Any, out: Any, *rest: Any, shape: _Shape) -> None:
    """Adds the parts of one unit, in order, for one tile of its features."""
    *lse_out, tile = rest
    place, chunk = jax.lax.axis_index("unit"), jax.lax.axis_index("chunk")

    def by_head(split: int, index: int) -> Array:
        return plgpu.load(statistics.at[split, place, index], layout=_BY_HEAD, optimized=False)

    splits = range(shape.splits)
    maxima = [by_head(split, 0) for split in splits]
    maximum = functools.reduce(jnp.maximum, maxima)
    weights = [jnp.exp2(x - maximum) for x in maxima]
    total = functools.reduce(jnp.add, [by_head(split, 1) * weights[split] for split in splits])
    rows = pl.ds(chunk * _ROWS, _ROWS)
    o = None
    for split in splits:
        part = plgpu.load(parts.at[split, place, rows], layout=_LAYOUT, optimized=False)
        part = part * _by_rows(weights[split], part.shape)
        o = part if o is None else o + part
    o, lse = _finish(o, total, maximum)
    if lse_out:

        @pl.when(chunk == 0)
        def _() -> None:
            lse_out[0][place] = lse

    _store_transposed(tile, o)
    plgpu.commit_smem()
    for index in range(shape.features // _ROWS):
        width = min(_ROWS, shape.head_dim - index * _ROWS)

        @pl.when(chunk == index)
        def _(index: int = index, width: int = width) -> None:
            source = tile.at[pl.ds(0, shape.group), pl.ds(0, width)]
            heads = pl.ds(place * shape.group, shape.group)
            plgpu.copy_smem_to_gmem(source, out.at[heads, pl.ds(index * _ROWS, width)])

    plgpu.wait_smem_to_gmem(0)


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    tiling = (8, swizzle // jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _barriers(count: int, arrivals: int = 1) -> Any:
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def _parameters() -> Any:
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


def num_splits(units: int, list_blocks: int, block_size: int, config: KernelConfig) -> int:
    """Parts into which lists are split: those that keep all multiprocessors busy, and no more.

    Args:
      units: Lists times key/value heads to attend with, in all sequences.
      list_blocks: Capacity of a list.
      block_size: Tokens per block.
      config: Tile sizes.

    Returns:
      A number from 1 to 64.
    """
    steps = -(-list_blocks * block_size // max(config.decode_keys, block_size))
    if config.decode_splits is not None:
        return min(config.decode_splits, steps, _MAX_SPLITS)

    def time(splits: int) -> tuple[float, int]:  # in steps; starting and combining cost some
        waves = -(-units * splits // config.decode_programs)
        return waves * (-(-steps // splits) + 3) + (2 if splits > 1 else 0), splits

    return min(range(1, min(steps, _MAX_SPLITS) + 1), key=time)


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
) -> Float[Array, "B 1 N H"] | tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
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
      The output in query's dtype, and with `return_lse` the float32 log-sum-exp `[B, 1, N]`.
    """
    config = config or KernelConfig()
    batch, _, num_heads, head_dim = query.shape
    num_layers, _, key_tokens, kv_heads, _ = key.shape
    if padding := -head_dim % 16:  # copies whole caches: for the sake of completeness
        widths = ((0, 0), (0, 0), (0, 0), (0, padding))
        query = jnp.pad(query, widths)
        key, value = (jnp.pad(x, ((0, 0), *widths)) for x in (key, value))
    num_lists = ids.shape[1]
    units = max(num_lists, kv_heads)
    step_keys = max(config.decode_keys, block_size)
    splits = num_splits(batch * units, ids.shape[-1], block_size, config)
    features = -(-head_dim // _ROWS) * _ROWS
    stage_bytes = step_keys * 2 * features * query.dtype.itemsize
    steps = -(-ids.shape[-1] * block_size // (step_keys * splits))
    shape = _Shape(
        batch=batch,
        units=units,
        group=num_heads // units,
        kv_heads=kv_heads,
        num_lists=num_lists,
        head_dim=head_dim + padding,
        key_tokens=key_tokens,
        block_size=block_size,
        step_keys=step_keys,
        stages=max(2, min(config.decode_buffer_kib * 1024 // stage_bytes, steps + 1)),
        splits=splits,
        dtype=query.dtype,
        scale=scale,
    )
    rows = (num_layers * batch * key_tokens, kv_heads, shape.head_dim)
    out, lse = _run(
        shape,
        query.reshape(batch * num_heads, shape.head_dim),
        key.reshape(rows),
        value.reshape(rows),
        ids[:, :, 0],
        counts[:, :, 0],
        jnp.reshape(layer, (1,)).astype(jnp.int32),
        kv_lengths.astype(jnp.int32),
        return_lse=return_lse,
        interpret=config.interpret,
    )
    out = out.reshape(batch, 1, num_heads, shape.head_dim)[..., :head_dim]
    if not return_lse:
        return out
    lse = lse.reshape(batch, units, -1)[:, :, : shape.group]
    return out, lse.reshape(batch, 1, num_heads)


def _run(
    shape: _Shape, query: Array, *operands: Array, return_lse: bool, interpret: bool
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
        "compiler_params": _parameters(),
        "interpret": plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    }
    outputs = plgpu.kernel(
        functools.partial(_decode_body, shape=shape),
        out_type=partial if shape.splits > 1 else final,
        grid=(shape.batch, shape.splits, shape.units),
        grid_names=("batch", "split", "unit"),  # the last varies fastest
        scratch_types=[
            plgpu.SMEM((columns, features), dtype),
            _tiled((columns, features), dtype, swizzle),
            _tiled((shape.stages, shape.step_keys, shape.head_dim), dtype, swizzle),
            _tiled((shape.stages, shape.step_keys, features), dtype, swizzle),
            _tiled((columns, shape.step_keys), dtype, swizzle),
            _barriers(1),
            _barriers(shape.stages, shape.step_blocks),
            _barriers(shape.stages, shape.step_blocks),
        ],
        kernel_name="block_sparse_decode",
        **common,
    )(query, *operands)
    if shape.splits > 1:
        outputs = plgpu.kernel(
            functools.partial(_combine_body, shape=shape),
            out_type=final,
            grid=(places, features // _ROWS),
            grid_names=("unit", "chunk"),
            scratch_types=[plgpu.SMEM((columns, _ROWS), dtype)],
            kernel_name="combine_decode",
            **common,
        )(*outputs)
    return outputs[0], outputs[1] if return_lse else None
