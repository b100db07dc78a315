"""Page max logits of a prompt's queries with 4-bit keys, on GPUs from Ampere on.

    max_logits[p, m] = max_{s in page p} q'_m · scale quantized_s

`m` counts the representative queries, as in `hopper`, and `q'` are the queries rounded to eight
bits (`round_queries`). Results are float16 without the queries' powers of two, like those of
Hopper's first kernel. Sums are float16 too, two per register: one instruction takes two maxima, and
some GPUs add up float32 only at half the rate.

A warp has 64 queries in registers and processes block after block. It waits for no other warp and
uses no shared memory. Queries are the rows of tensor core products (`mma.sync`), keys the columns.
A thread reads eight quantized keys and dequantizes them (`four_bits`); each serves 64 queries. Of
about 450 instructions for a block of 64 channels, 128 multiply, and these take the tensor cores
longer than the others take the warp. The next block's quantized keys overwrite used registers.

*Order of keys.* A thread has the sums of two of a product's eight columns. Keys are ordered so that
thread `t` of four always has keys of page `t`. So threads exchange nothing for a page's maximum.

*Order of queries.* A thread's eight maxima, two in each of four products, belong to adjacent
queries: it writes 16 bytes, and eight threads write a line of memory.

*Missing keys.* A missing key is replaced by the last existing one, which does not change the
maximum. The maxima of a page without a key are NaN.
"""

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
from sketchwalk_jax.pallas_kernels.lib.mlir_utils import arith, scf
from sketchwalk_jax.pallas_kernels.page_scores import four_bits
from sketchwalk_jax.pallas_kernels.page_scores.four_bits import HIGH, LOW, NO_SCALE
from sketchwalk_jax.pallas_kernels.page_scores.hopper import last_block

QUERIES = 64  # per warp
TILE = QUERIES * row_ops.WARPS
"""The number of queries is a multiple of this."""
_KEYS = 64  # per block
_PAGES, _OF_PAGE = 4, 16
_ROWS = 16  # per product
_TILES = QUERIES // _ROWS
_COLUMNS = 8  # per product, and products per block of keys
_WORD = 4  # bytes
_PART = 32  # key blocks per thread block; with more, a few would run alone at the end
_NAN = 0x7FFF7FFF  # two float16 NaN


def _find_max_logits(
    query: Any,
    quantized: Any,
    scale_exponent: Any,
    lengths: Any,
    first_row: Any,
    layer: Any,
    out: Any,
    *,
    per_row: int,
) -> None:
    """Runs one thread block: some key blocks, and 64 queries per warp."""
    kv_head, batch = jax.lax.axis_index("kv_head"), jax.lax.axis_index("batch")
    # Tiles with many blocks come first.
    tile = query.shape[2] // TILE - 1 - jax.lax.axis_index("tile")
    last = last_block(first_row[batch], tile * TILE, TILE, per_row=per_row, length=lengths[batch])
    first = jax.lax.axis_index("part") * _PART
    end = jnp.minimum(last + 1, first + _PART)
    last_key = jnp.maximum(lengths[batch] - 1, 0)
    quantized, scale_exponent = quantized.at[layer[0], batch], scale_exponent.at[layer[0], batch]
    numbers = (kv_head, tile * TILE, first, end, lengths[batch], last_key)
    query, out = query.at[batch, kv_head], out.at[batch, kv_head]

    @pl.when(first < end)
    def _() -> None:
        if ops.is_interpreted():
            _interpreted(query, quantized, scale_exponent, out, *numbers)
            return

        @mlir.emit(query, quantized, scale_exponent, out, numbers=numbers)
        def _(*values: Any) -> None:
            _Warp(*values).run()


def _interpreted(
    query: Any,
    quantized: Any,
    scale_exponent: Any,
    out: Any,
    kv_head: Array,
    first_query: Array,
    first: Array,
    end: Array,
    length: Array,
    last_key: Array,
) -> None:
    own = pl.ds(first_query, TILE)
    queries = query[own].astype(jnp.float32)

    def find(block: Array, nothing: Any) -> Any:
        signed = jax.lax.bitcast_convert_type(quantized[block, kv_head], jnp.int8).astype(jnp.int32)
        stored = jnp.concatenate([(signed << 28) >> 28, signed >> 4], axis=-1)
        exponent = scale_exponent[block, kv_head].astype(jnp.int32)
        half = jax.lax.bitcast_convert_type((exponent + 126) << 23, jnp.float32)
        keys = stored.astype(jnp.float32) * half[None]
        products = jnp.dot(keys, queries.T, precision=jax.lax.Precision.HIGHEST)
        key = block * _KEYS + jnp.arange(_KEYS, dtype=jnp.int32)[:, None]
        products = jnp.where(key <= last_key, products, -jnp.inf).astype(jnp.float16)
        found = jnp.max(products.reshape(_PAGES, _OF_PAGE, TILE), axis=1)
        is_there = (key[::_OF_PAGE] < length) & (exponent[0] != NO_SCALE)
        # A page without keys becomes NaN.
        found = jnp.where(is_there, found, jnp.float16(jnp.nan))
        out[pl.ds(block * _PAGES, _PAGES), own] = found
        return nothing

    jax.lax.fori_loop(first, end, find, ())


class _Warp:
    """The work of one warp; values are per thread.

    A thread has row or column `lane / 4` of eight, and place `lane % 4` within it.
    """

    def __init__(
        self,
        query: ir.Value,
        quantized: ir.Value,
        scale_exponent: ir.Value,
        out: ir.Value,
        kv_head: ir.Value,
        first_query: ir.Value,
        first: ir.Value,
        end: ir.Value,
        length: ir.Value,
        last_key: ir.Value,
    ) -> None:
        """Computes the thread's addresses."""
        self._query, self._quantized, self._scale_exponent, self._out = (
            query,
            quantized,
            scale_exponent,
            out,
        )
        self._kv_head, self._first, self._end = kv_head, first, end
        self._length, self._last_key = length, last_key
        _, self._kv_heads, _, self._row_bytes = ir.MemRefType(quantized.type).shape
        self._words = self._row_bytes // (4 * _WORD)  # quantized words per key and thread
        lane = mlir.lane()
        self._row = arith.shrui(lane, _int(2))
        self._place = arith.andi(lane, _int(3))
        self._channel = arith.muli(self._place, _int(_WORD * self._words))
        own = arith.addi(first_query, arith.muli(mlir.warp(), _int(QUERIES)))
        self._own = arith.addi(own, arith.muli(self._row, _int(2 * _TILES)))

    def run(self) -> None:
        """Processes all key blocks of the thread block."""
        queries = self._load_queries()
        quantized = self._keys_of(self._first)
        held = [x for group in range(_COLUMNS) for x in self._load_keys(quantized, group)]
        held += self._load_steps(self._first)
        bounds = [mlir.index(x) for x in (self._first, self._end, _int(1))]
        loop = scf.ForOp(*bounds, held)
        with ir.InsertionPoint(loop.body):
            block = arith.index_cast(mlir.i32(), loop.induction_variable)
            scf.yield_(self._find(block, list(loop.inner_iter_args), queries))

    # Memory

    def _load_queries(self) -> list[list[list[list[ir.Value]]]]:
        """Loads queries by tile, half and quantized word: four words each, as left operands."""
        width = 2 * self._row_bytes  # channels
        found = []
        for tile in range(_TILES):
            rows = []
            for index in range(2):
                row = arith.addi(self._own, _int(2 * tile + index))
                start = arith.addi(arith.muli(row, _int(width)), self._channel)
                pointer = mlir.address(self._query, start)
                halves = [
                    _load(pointer, 2 * self._words, offset=half * width) for half in (LOW, HIGH)
                ]
                rows.append([four_bits.in_pairs(x) for x in halves])
            found.append(
                [
                    [
                        [
                            rows[index][half][2 * word + pair]
                            for pair in range(2)
                            for index in range(2)
                        ]
                        for word in range(self._words)
                    ]
                    for half in (LOW, HIGH)
                ]
            )
        return found

    def _keys_of(self, block: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Returns the address of the thread's first key of a block, and bytes to the last key."""
        page = arith.shrui(self._row, _int(1))
        own = arith.addi(arith.muli(page, _int(_OF_PAGE)), arith.andi(self._row, _int(1)))
        place = arith.addi(arith.muli(block, _int(self._kv_heads)), self._kv_head)
        place = arith.addi(arith.muli(place, _int(_KEYS)), own)
        place = arith.addi(arith.muli(place, _int(self._row_bytes)), self._channel)
        # Blocks after the last key give other keys' addresses, whose results are masked.
        key = arith.addi(arith.muli(block, _int(_KEYS)), own)
        left = arith.muli(arith.subi(self._last_key, key), _int(self._row_bytes))
        return mlir.address(self._quantized, place), left

    def _load_keys(self, quantized: tuple[ir.Value, ir.Value], group: int) -> list[ir.Value]:
        """Starts to read one of eight quantized keys, clamped to the last existing key."""
        pointer, left = quantized
        kind, long = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(64)
        offset = arith.minsi(left, _int(2 * group * self._row_bytes))
        offset = arith.extsi(long, offset)
        return _load(mgpu.utils.getelementptr(pointer, [offset], kind), self._words)

    def _load_steps(self, block: ir.Value) -> list[ir.Value]:
        """Starts to read the scale exponents of a block."""
        place = arith.addi(arith.muli(block, _int(self._kv_heads)), self._kv_head)
        place = arith.addi(arith.muli(place, _int(2 * self._row_bytes)), self._channel)
        pointer = mlir.address(self._scale_exponent, place)
        found: list[ir.Value] = []
        for half in (LOW, HIGH):
            found += _load(pointer, self._words, offset=half * self._row_bytes)
        return found

    # Numbers

    def _find(
        self, block: ir.Value, held: list[ir.Value], queries: list[list[list[list[ir.Value]]]]
    ) -> list[ir.Value]:
        """Writes the maxima of one block; starts to read the next block and returns it."""
        own = self._words
        stored, scale_exponents = held[: _COLUMNS * own], held[_COLUMNS * own :]
        factors = [
            four_bits.factors(scale_exponents[half * own : (half + 1) * own], half)
            for half in (0, 1)
        ]
        missing = self._is_missing(block, scale_exponents)
        # After the last block, read it again.
        following = arith.minsi(arith.addi(block, _int(1)), arith.subi(self._end, _int(1)))
        coming = self._load_steps(following)
        quantized = self._keys_of(following)
        best: list[list[ir.Value]] = []
        loaded: list[ir.Value] = []
        for group in range(_COLUMNS):
            columns = self._columns(stored[group * own : (group + 1) * own], factors)
            loaded += self._load_keys(quantized, group)
            sums = [[_int(0)] * 2 for _ in range(_TILES)]
            for half, word, right in columns:
                for tile in range(_TILES):
                    left = queries[tile][half][word]
                    sums[tile] = mlir.multiply_halves(left, right, sums[tile])
            best = (
                [
                    [_larger(x, y) for x, y in zip(*pair, strict=True)]
                    for pair in zip(best, sums, strict=True)
                ]
                if best
                else sums
            )
        max_logits = [_of_queries(*rows) for rows in best]
        self._write(block, max_logits, missing)
        return [*loaded, *coming]

    def _columns(
        self, stored: list[ir.Value], factors: list[list[tuple[ir.Value, ir.Value]]]
    ) -> list[tuple[int, int, list[ir.Value]]]:
        """Returns half, word and right operand of each product with a thread's key."""
        found = []
        for word, low in enumerate(stored):
            both = [low, arith.shrui(low, _int(8))]
            for half in (LOW, HIGH):
                right = [
                    four_bits.numbers(x, half, *factors[half][2 * word + index])
                    for index, x in enumerate(both)
                ]
                found.append((half, word, right))
        return found

    def _is_missing(self, block: ir.Value, scale_exponents: list[ir.Value]) -> ir.Value:
        """Whether the thread's page has no key."""
        key = arith.muli(block, _int(_KEYS))
        key = arith.addi(key, arith.muli(self._place, _int(_OF_PAGE)))
        is_after = mlir.compare("sge", key, self._length)
        return arith.ori(is_after, four_bits.is_empty(scale_exponents))

    def _write(self, block: ir.Value, max_logits: list[ir.Value], missing: ir.Value) -> None:
        """Writes the maxima of a thread's page for its eight queries."""
        count = ir.MemRefType(self._out.type).shape[1]
        line = arith.addi(arith.muli(block, _int(_PAGES)), self._place)
        max_logits = [arith.select(missing, _int(_NAN), x) for x in max_logits]
        # 64 bits, since there may be more than 2^31 maxima.
        long = ir.IntegerType.get_signless(64)
        line, column = (arith.extui(long, x) for x in (line, self._own))
        place = arith.addi(arith.muli(line, arith.constant(long, count)), column)
        pointer = mlir.address(self._out, place)
        mlir.store(pointer, max_logits)


def _of_queries(first: ir.Value, second: ir.Value) -> ir.Value:
    """Returns the maxima of two pairs, each pair one query's two keys, side by side."""
    low, high = (f"prmt.b32 {x}, $1, $2, {y};" for x, y in (("x", "0x5410"), ("y", "0x7632")))
    return mlir.run(f"{{ .reg .b32 x, y; {low} {high} max.NaN.f16x2 $0, x, y; }}", first, second)


def _larger(left: ir.Value, right: ir.Value) -> ir.Value:
    """Returns the elementwise maximum of two pairs; NaN if either number is."""
    return mlir.run("max.NaN.f16x2 $0, $1, $2;", left, right)


def max_logits_kernel(
    query: Float[Array, "B K M C"],
    quantized: UInt8[Array, "L B J K S C2"],
    scale_exponent: Int8[Array, "L B J K C"],
    *,
    layer: Int[Array, ""],
    lengths: Int[Array, "B"],
    first_row: Int[Array, "B"],
    per_row: int,
    interpret: bool = False,
) -> Float[Array, "B K P M"]:
    """Computes page max logits, `max_logits` of the module.

    Pages after a query's own row, and those of rows after the last key, have arbitrary numbers.

    Args:
      query: Queries rounded to eight bits and doubled, as float16, row after row (`round_queries`);
        their number is a multiple of `TILE`.
      quantized: Quantized keys (`QuantizedKeys`) of all layers, in blocks of 64 keys and 32 or 64
        channels.
      scale_exponent: Exponents of the scales, likewise.
      layer: The layer.
      lengths: Number of keys in each sequence, at most those of `quantized`.
      first_row: Block index of each sequence's first row.
      per_row: Queries per row.
      interpret: Whether the interpreter runs the kernel.

    Returns:
      The largest products in float16, for the `P` pages of all blocks.
    """
    batch, kv_heads, num_queries, _ = query.shape
    blocks = quantized.shape[2]
    shape = (batch, kv_heads, blocks * _PAGES, num_queries)
    kernel = ops.kernel(
        functools.partial(_find_max_logits, per_row=per_row),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float16),
        grid=(-(-blocks // _PART), num_queries // TILE, kv_heads, batch),
        grid_names=("part", "tile", "kv_head", "batch"),
        compiler_params=ops.compiler_params(),
        interpret=interpret,
        kernel_name="max_logits_kernel",
    )
    numbers = (x.astype(jnp.int32) for x in (lengths, first_row, layer[None]))
    return kernel(query, quantized, scale_exponent, *numbers)


_int = mlir.constant
_load = functools.partial(mlir.load, how=".nc")
