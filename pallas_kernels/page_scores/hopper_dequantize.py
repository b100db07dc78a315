"""Dequantizes 4-bit keys to float8, relative to their block's zero point, on Hopper GPUs.

    k'_s = scale · quantized_s,   exact in float8_e4m3fn (`policies.quantized_keys`)

for the keys of one layer, in the layout that `hopper` multiplies (`hopper_max_logits`). Missing
tokens of a page repeat its first key, so the maximum stays the same. Pages without a key are NaN.

A warp has one block of one key/value head. Two threads share a key. Each reads 8 or 16 quantized
bytes of four keys, converts the channels' scales once, and writes as many bytes of the first half
of the channels and of the second half. So each number costs half a byte of reads and a byte of
writes. Two quantized numbers become float16 in one instruction (their bits go into the mantissa of
1024); then the excess is subtracted, and they are scaled and converted to float8.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxtyping import Array, Float, Int, Int8, UInt8

from sketchwalk_jax.pallas_kernels.lib import mlir_utils as mlir
from sketchwalk_jax.pallas_kernels.lib import ops, row_ops
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith
from sketchwalk_jax.pallas_kernels.page_scores import hopper_max_logits as max_logits
from sketchwalk_jax.pallas_kernels.page_scores.four_bits import (
    BITS,
    EXCESS,
    HIGH,
    LOW,
    MAGIC,
    NO_SCALE,
)

_KEYS = max_logits.BLOCK
_OF_GROUP = max_logits.GROUP * _KEYS  # keys
_SHARING = 2  # threads per key
_AT_ONCE = mlir.LANES // _SHARING  # keys per warp at a time: a page
_PAGES = max_logits.PAGES
_WORD = 4  # bytes
_NAN = 0x7F  # in float8_e4m3fn
_STEP_BIAS = (15, 11)  # float16 exponent bias of the scale, and of a 16th of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Static parameters of a call.

    Attributes:
      blocks: Blocks per sequence in the arrays.
      kv_heads: Key/value heads.
      row_bytes: Quantized bytes per key.
    """

    blocks: int
    kv_heads: int
    row_bytes: int

    @property
    def lines(self) -> int:
        """Lines per group of keys."""
        return max_logits.lines(2 * self.row_bytes)

    @property
    def units(self) -> int:
        """Number of warps' units, each a block of a head."""
        return self.blocks * self.kv_heads

    @property
    def words(self) -> int:
        """Quantized words per key and thread."""
        return self.row_bytes // (_SHARING * _WORD)


def _write_offsets(
    quantized: Any, scale_exponent: Any, lengths: Any, layer: Any, out: Any, *, sizes: _Sizes
) -> None:
    """Runs one thread block: four adjacent pairs of a block and a head."""
    batch, program = jax.lax.axis_index("batch"), jax.lax.axis_index("program")
    own, length = layer[0], lengths[batch]
    quantized, scale_exponent, out = (
        quantized.at[own, batch],
        scale_exponent.at[own, batch],
        out.at[batch],
    )
    if ops.is_interpreted():
        for warp in range(row_ops.WARPS):
            unit = program * row_ops.WARPS + warp
            write_unit = functools.partial(
                _write_interpreted, quantized, scale_exponent, out, unit, length
            )
            pl.when(unit < sizes.units)(functools.partial(write_unit, sizes=sizes))
        return

    @mlir.emit(quantized, scale_exponent, out, numbers=(program, length))
    def _(quantized: Any, scale_exponent: Any, out: Any, first: Any, length: Any) -> None:
        unit = arith.addi(arith.muli(first, _int(row_ops.WARPS)), mlir.warp())
        is_there = mlir.compare("slt", unit, sizes.units)
        with mgpu.when(is_there):
            _write_unit(quantized, scale_exponent, out, unit, length, sizes=sizes)


def _write_unit(
    quantized: ir.Value,
    scale_exponent: ir.Value,
    out: ir.Value,
    unit: ir.Value,
    length: ir.Value,
    *,
    sizes: _Sizes,
) -> None:
    """Dequantizes one block of a head; values are per thread."""
    block, head = (x(unit, _int(sizes.kv_heads)) for x in (arith.divsi, arith.remsi))
    lane, row_bytes = mlir.lane(), sizes.row_bytes
    start = arith.muli(arith.andi(lane, _int(_SHARING - 1)), _int(_WORD * sizes.words))
    first_key = arith.muli(block, _int(_KEYS))

    def row(index: ir.Value, width: int) -> ir.Value:
        """Returns the offset of the thread's first entry in a row."""
        return arith.addi(arith.muli(index, _int(width)), start)

    own = arith.shrui(lane, _int(_SHARING.bit_length() - 1))
    # Quantized rows are ordered by block, head and key.
    first_row = arith.subi(arith.muli(unit, _int(_KEYS)), first_key)
    keys, stored, missing = [], [], []
    for page in range(_PAGES):
        key = arith.addi(arith.addi(first_key, own), _int(page * _AT_ONCE))
        is_key = mlir.compare("slt", key, length)
        first = arith.addi(first_key, _int(page * _AT_ONCE))
        is_page = mlir.compare("slt", first, length)
        missing.append(arith.select(is_page, _int(0), _int(_NAN)))
        present = arith.select(is_key, key, first)
        keys.append(key)
        pointer = mlir.address(quantized, row(arith.addi(first_row, present), row_bytes))
        stored.append(_load(pointer, sizes.words))
    pointer = mlir.address(scale_exponent, row(unit, 2 * row_bytes))
    scale_exponents = [_load(pointer, sizes.words, offset=half * row_bytes) for half in (LOW, HIGH)]
    factors = [[_factors(x, half) for x in scale_exponents[half]] for half in (LOW, HIGH)]
    group = arith.divsi(block, _int(max_logits.GROUP))
    groups = _int(-(-sizes.blocks // max_logits.GROUP))
    group_start = arith.muli(arith.addi(arith.muli(head, groups), group), _int(_OF_GROUP))
    for page, (key, held) in enumerate(zip(keys, stored, strict=True)):
        place = arith.andi(key, _int(_OF_GROUP - 1))
        in_block = _place(own, page)
        place = arith.ori(arith.andi(place, _int(-_KEYS)), in_block)
        beside, line = (x(place, _int(sizes.lines)) for x in (arith.divui, arith.remui))
        target = arith.addi(arith.muli(line, _int(max_logits.LINE)), start)
        target = arith.addi(target, arith.muli(beside, _int(2 * row_bytes)))
        target = arith.addi(target, arith.muli(group_start, _int(2 * row_bytes)))
        pointer = mlir.address(out, target)
        for half in (LOW, HIGH):
            found = [_numbers(x, half, *y) for x, y in zip(held, factors[half], strict=True)]
            if half == LOW:
                # NaN in one channel makes every product NaN.
                found[0] = arith.ori(found[0], missing[page])
            mlir.store(pointer, found, offset=half * row_bytes)


def _place(own: ir.Value, page: int) -> ir.Value:
    """Returns `hopper_max_logits.place_of_key` of the key `own` of a page."""
    pair, one = arith.andi(own, _int(-2)), arith.andi(own, _int(1))
    place = arith.ori(arith.muli(pair, _int(_PAGES)), one)
    return arith.ori(place, _int(max_logits.place_of_key(page * _AT_ONCE)))


def _factors(scale_exponents: ir.Value, half: int) -> tuple[ir.Value, ir.Value]:
    """Returns float16 pairs of scales for bytes 0 and 2 and for bytes 1 and 3, or NaN."""
    found = []
    for shift in (0, 8):
        x = arith.andi(arith.shrui(scale_exponents, _int(shift)), _int(0x00FF00FF))
        # Of the negative exponents, only `NO_SCALE` has no bit after the first.
        is_none = arith.andi(x, arith.xori(arith.shli(x, _int(1)), _int(-1)))
        is_none = arith.muli(arith.andi(is_none, _int(0x00800080)), _int(0x7E00 // 0x80))
        bias = _STEP_BIAS[half]
        field = arith.andi(arith.addi(x, _int(bias << 16 | bias)), _int(0x001F001F))
        found.append(arith.ori(arith.shli(field, _int(10)), is_none))
    return found[0], found[1]


def _numbers(stored: ir.Value, half: int, even: ir.Value, odd: ir.Value) -> ir.Value:
    """Dequantizes four of a word's quantized numbers to float8."""
    lines = [
        f"lop3.b32 x, {source}, {BITS[half]}, {MAGIC[half]}, 0x6a; "
        f"add.rn.f16x2 x, x, excess; mul.rn.f16x2 x, x, {factor}; "
        f"cvt.rn.satfinite.e4m3x2.f16x2 {target}, x;"
        for source, factor, target in (("$1", "$2", "a"), ("y", "$3", "b"))
    ]
    code = (
        f"{{ .reg .b32 x, y, excess; .reg .b16 a, b; mov.b32 excess, {EXCESS[half]}; "
        f"shr.u32 y, $1, 8; {' '.join(lines)} "
        "cvt.u32.u16 x, a; cvt.u32.u16 y, b; prmt.b32 $0, x, y, 0x5140; }"
    )
    return mlir.run(code, stored, even, odd)


def _write_interpreted(
    quantized: Any, scale_exponent: Any, out: Any, unit: Array, length: Array, *, sizes: _Sizes
) -> None:
    block, head = jax.lax.div(unit, sizes.kv_heads), jax.lax.rem(unit, sizes.kv_heads)
    signed = jax.lax.bitcast_convert_type(quantized[block, head], jnp.int8).astype(jnp.int32)
    stored = jnp.concatenate([(signed << 28) >> 28, signed >> 4], axis=-1).astype(jnp.float32)
    key = block * _KEYS + jnp.arange(_KEYS, dtype=jnp.int32)[:, None]
    first = stored.reshape(_PAGES, -1, stored.shape[-1])[:, :1]
    first = jnp.broadcast_to(first, (_PAGES, _AT_ONCE, stored.shape[-1]))
    stored = jnp.where(key < length, stored, first.reshape(stored.shape))
    stored = jnp.where(key // _AT_ONCE * _AT_ONCE < length, stored, jnp.nan)
    exponent = scale_exponent[block, head].astype(jnp.int32)
    scale = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    found = stored * jnp.where(exponent == NO_SCALE, jnp.nan, scale)[None]
    found = jax.lax.bitcast_convert_type(found.astype(jnp.float8_e4m3fn), jnp.int8)
    # Permute keys as `hopper_max_logits.place_of_key` does.
    found = found.reshape(_PAGES, -1, 2, found.shape[-1]).swapaxes(0, 1).reshape(found.shape)
    # A block's keys are in consecutive lines.
    group, place = (
        jax.lax.div(block, max_logits.GROUP),
        jax.lax.rem(block, max_logits.GROUP),
    )
    beside, line = (x(place * _KEYS, sizes.lines) for x in (jax.lax.div, jax.lax.rem))
    channels = 2 * sizes.row_bytes
    out[head, group, pl.ds(line, _KEYS), pl.ds(beside * channels, channels)] = found


def dequantize_kernel(
    quantized: UInt8[Array, "L B J K S C2"],
    scale_exponent: Int8[Array, "L B J K C"],
    *,
    layer: Int[Array, ""],
    lengths: Int[Array, "B"],
    interpret: bool = False,
) -> Float[Array, "B K G lines 128"]:
    """Computes `k'` of the module for all blocks of one layer.

    The padding of the last group is not written.

    Args:
      quantized: Quantized keys (`QuantizedKeys`) of all layers, in blocks of 64 keys and 32 or 64
        channels.
      scale_exponent: Exponents of the scales, likewise.
      layer: The layer.
      lengths: Number of keys in each sequence.
      interpret: Whether the interpreter runs the kernel.
    """
    _, batch, blocks, kv_heads, _, row_bytes = quantized.shape
    sizes = _Sizes(blocks=blocks, kv_heads=kv_heads, row_bytes=row_bytes)
    groups = -(-blocks // max_logits.GROUP)
    shape = (batch, kv_heads, groups, sizes.lines, max_logits.LINE)
    found = ops.kernel(
        functools.partial(_write_offsets, sizes=sizes),
        out_type=jax.ShapeDtypeStruct(shape, jnp.int8),
        grid=(batch, -(-sizes.units // row_ops.WARPS)),
        grid_names=("batch", "program"),
        compiler_params=ops.compiler_params(),
        interpret=interpret,
        kernel_name="dequantized_offsets",
    )(quantized, scale_exponent, lengths.astype(jnp.int32), layer.astype(jnp.int32)[None])
    return jax.lax.bitcast_convert_type(found, jnp.float8_e4m3fn)


_int = mlir.constant
_load = functools.partial(mlir.load, how=".nc")
