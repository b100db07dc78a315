"""Cases that all tests of the kernels share: in the interpreter, compiled, and on a GPU.

A case is a shape of one kernel; its `program()` is that kernel as a function of arrays alone, and
the shapes of these. `CASES` are computed, in the interpreter and on a GPU; `LARGE_CASES` on a GPU
alone; `COMPILED` has all of them and pairs of all else that the kernels promise to take, by name.
The kernels around the sketch and the walk are computed in tests of their own.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Protocol

import cases
import jax
import jax.numpy as jnp
import numpy as np
import reference
from pairwise import pairwise

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels import kernel_selection
from sketchwalk_jax.pallas_kernels.config import WEIGHT_GROUP
from sketchwalk_jax.policies.base import LayerShape, Span, TokenWrite
from sketchwalk_jax.policies.recommended import RecommendedConfig

NUM_LAYERS, LAYER = 3, 1
Program = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]


class Case(Protocol):
    """A shape at which a kernel must compile; `str(case)` names it."""

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The kernel as a function of arrays alone, and the shapes of these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKernelCase:
    """Attention over lists, of many tokens (`prefill`) or of one per sequence (`decode`).

    Attributes:
      op: `"prefill"` or `"decode"`.
      heads: Query heads and key/value heads.
      lengths: Keys present in each sequence.
      head_dim: Features per head.
      lists: `"shared"`, `"kv_head"` or `"head"`.
      block_size: Tokens per block.
      row_size: Queries per row of lists in prefill; a block's tokens if left out.
      first_blocks: Row of each sequence's first query, in prefill. Rows go on to the one of the
        longest sequence's last key.
      room: Blocks of the cache beyond the longest sequence, in rows.
      list_blocks: Capacity `P` of the lists; as many as there are blocks if left out.
      dtype: Type of queries, keys and values.
      return_lse: Whether the kernel is to return the log-sum-exp.
    """

    op: str
    heads: tuple[int, int]
    lengths: tuple[int, ...]
    head_dim: int = 128
    lists: str = "shared"
    block_size: int = 64
    row_size: int | None = None
    first_blocks: tuple[int, ...] | None = None
    room: int = 0
    list_blocks: int | None = None
    dtype: str = "bfloat16"
    return_lse: bool = True

    @property
    def row_tokens(self) -> int:
        """Queries per row of lists."""
        return self.row_size or self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        rows = -(-max(self.lengths) // self.row_tokens) + self.room
        return rows * (self.row_tokens // self.block_size)

    @property
    def num_rows(self) -> int:
        """Query blocks, or 1 in decode."""
        if self.op == "decode":
            return 1
        return -(-max(self.lengths) // self.row_tokens) - min(self.first_blocks or (0,))

    @property
    def num_lists(self) -> int:
        """Lists per row."""
        return dict(zip(cases.LIST_KINDS, (1, *self.heads[::-1]), strict=True))[self.lists]

    def __str__(self) -> str:
        """Names the case in test ids."""
        lengths = ",".join(map(str, self.lengths[:3])) + (",.." if len(self.lengths) > 3 else "")
        parts = [self.op, "x".join(map(str, self.heads)), f"H{self.head_dim}", f"T{lengths}"]
        parts += [self.lists, f"block{self.block_size}", self.dtype]
        parts += [f"rows{self.row_size}"] if self.row_size else []
        parts += [f"from{','.join(map(str, self.first_blocks))}"] if self.first_blocks else []
        parts += [f"room{self.room}"] if self.room else []
        return "-".join(parts if self.return_lse else [*parts, "nolse"])

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.block_sparse_decode import block_sparse_decode_kernel
        from sketchwalk_jax.pallas_kernels.block_sparse_prefill import block_sparse_prefill

        kernel = block_sparse_prefill if self.op == "prefill" else block_sparse_decode_kernel
        return self.program_of(kernel, kernel_config)

    def program_of(self, kernel: Any, kernel_config: KernelConfig | None) -> Program:
        """The same of another kernel."""
        batch, (num_heads, num_kv_heads) = len(self.lengths), self.heads
        is_prefill = self.op == "prefill"
        tokens = self.num_rows * self.row_tokens if is_prefill else 1
        lists = (batch, self.num_lists, self.num_rows)
        keys = self.num_blocks * self.block_size
        cache = (NUM_LAYERS, batch, keys, num_kv_heads, self.head_dim)
        floats = [(batch, tokens, num_heads, self.head_dim), cache, cache]
        integers = [(*lists, self.list_blocks or self.num_blocks), lists, (), (batch,), (batch,)]
        arguments = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in floats]
        arguments += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers]
        static = {
            "scale": self.head_dim**-0.5,
            "block_size": self.block_size,
            "return_lse": self.return_lse,
            "kernel_config": kernel_config,
        }

        def attend(query, key, value, ids, counts, layer, kv_lengths, first_block):
            options = {"layer": layer, "kv_lengths": kv_lengths, **static}
            arrays = (query, key, value, ids, counts)
            if is_prefill:
                options |= {"first_block": first_block, "row_size": self.row_size}
            out, lse = kernel(*arrays, **options)
            return (out,) if lse is None else (out, lse)

        return attend, tuple(arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionKernelCase:
    """Top-τ and compaction of given scores.

    Attributes:
      num_blocks: Key blocks `J`.
      rows: Absolute block of the first row of each sequence.
      num_rows: Rows `I`.
      density: Share of the causal blocks.
      forced: Sink and local blocks.
      kind: What the scores are: `"normal"`, `"tied"` (few values), `"equal"`
        (one), or `"wide"` (all of float32, both zeros among them).
    """

    num_blocks: int
    num_rows: int
    rows: tuple[int, ...] = (0,)
    density: float = 0.2
    forced: tuple[int, int] = (1, 1)
    kind: str = "normal"
    op: str = "select"

    def __str__(self) -> str:
        """Names the case in test ids."""
        rows = ",".join(map(str, self.rows[:3]))
        sinks, local = self.forced
        return (
            f"select-J{self.num_blocks}-rows{rows}+{self.num_rows}-d{self.density:g}"
            f"-{sinks}+{local}-{self.kind}"
        )

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.select import select_blocks_kernel

        sinks, local = self.forced
        select = functools.partial(
            select_blocks_kernel,
            sink_blocks=sinks,
            local_blocks=local,
            max_count=int(self.budget[-1]),
            block_size=64,
            interpret=kernel_config is not None and kernel_config.interpret,
        )
        shape = (len(self.rows), self.num_rows)
        scores = jax.ShapeDtypeStruct((*shape, self.num_blocks), jnp.float32)
        return select, (scores, *(jax.ShapeDtypeStruct(shape, jnp.int32) for _ in range(2)))

    @property
    def budget(self) -> np.ndarray:
        """Blocks that each row keeps."""
        from sketchwalk_jax import SketchWalkConfig

        sinks, local = self.forced
        config = SketchWalkConfig.paper(density=self.density, sink_blocks=sinks, local_blocks=local)
        return reference.budget(config, self.num_blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSumsCase:
    """Sums of queries and keys over blocks."""

    heads: tuple[int, int]
    head_dim: int
    tokens: int = 16384
    sketch_dim: int = 64
    block_size: int = 64
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """Names the case in test ids."""
        heads = "x".join(map(str, self.heads))
        return (
            f"block_sums-{heads}-H{self.head_dim}-T{self.tokens}"
            f"-R{self.sketch_dim}-block{self.block_size}-{self.dtype}"
        )

    def program(self) -> Program:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.block_sums import block_sums_kernel
        from sketchwalk_jax.sketch import srht_matrix

        function = functools.partial(
            block_sums_kernel,
            omega=srht_matrix(self.head_dim, self.sketch_dim),
            block_size=self.block_size,
        )
        shapes = [(1, self.tokens, heads, self.head_dim) for heads in self.heads]
        arguments = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes]
        return function, (*arguments, jax.ShapeDtypeStruct((1, self.tokens), jnp.bool_))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSelectionCase:
    """Scores, walk row and list of one token per sequence."""

    num_blocks: int
    batch: int = 1
    sketch_dim: int = 64
    power: int = 8

    def __str__(self) -> str:
        """Names the case in test ids."""
        return f"select_token-J{self.num_blocks}-B{self.batch}-R{self.sketch_dim}-power{self.power}"

    def program(self) -> Program:
        """The kernels as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.select_decode import select_token_kernel

        function = functools.partial(
            select_token_kernel,
            head_dim=128,
            power=self.power,
            sink_blocks=1,
            local_blocks=1,
            max_count=max(2, self.num_blocks // 10),
        )
        sketch = (1, self.sketch_dim)
        sums = (self.batch, self.num_blocks, *sketch)
        floats = [(self.batch, *sketch), sums, sums, (self.batch, 1, self.num_blocks)]
        integers: list[tuple[int, ...]] = [(), (self.batch,), (self.batch, 1)]
        return function, (
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSelectionCase:
    """What follows the walk's product in a prompt."""

    num_blocks: int
    num_parts: int = 1

    def __str__(self) -> str:
        """Names the case in test ids."""
        return f"select_prompt-J{self.num_blocks}-parts{self.num_parts}"

    def program(self) -> Program:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.select_prompt import select_prompt_kernel
        from sketchwalk_jax.selection import block_budget

        budget = block_budget(self.num_blocks, density=0.1, sink_blocks=1, local_blocks=1)

        def select(product: Any, weights: Any, scores: Any, start: Any, layers: Any) -> Any:
            arrays = (product, weights, scores, start, layers, budget)
            return select_prompt_kernel(*arrays, sink_blocks=1, local_blocks=1)

        square = (1, self.num_blocks, self.num_blocks)
        floats, integers = [(self.num_parts, *square), square, square], [(1,), ()]
        return select, (
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkOperandsCase:
    """What precedes the walk's product in a prompt."""

    num_blocks: int
    num_rows: int
    power: int = 8

    def __str__(self) -> str:
        """Names the case in test ids."""
        return f"walk_operands-J{self.num_blocks}-I{self.num_rows}-power{self.power}"

    def program(self) -> Program:
        """The kernel as a function of arrays alone, and the shapes of these."""
        from sketchwalk_jax.pallas_kernels.select_prompt import walk_operands_kernel

        function = functools.partial(
            walk_operands_kernel,
            power=self.power,
            rectify=self.power % 2 == 1,
        )
        shapes = [(1, self.num_blocks, self.num_blocks), (1, self.num_blocks)]
        shapes.append((1, self.num_rows, self.num_blocks))
        return function, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


Prefill = functools.partial(AttentionKernelCase, op="prefill")
Pages = functools.partial(Prefill, block_size=16, row_size=64)
Decode = functools.partial(AttentionKernelCase, op="decode")
Select = SelectionKernelCase

CASES: tuple[AttentionKernelCase | SelectionKernelCase, ...] = (
    Prefill(heads=(2, 2), lengths=(1,), head_dim=64),
    Prefill(heads=(2, 1), lengths=(130,)),
    Prefill(heads=(3, 1), lengths=(65, 191), head_dim=64, room=1),
    Prefill(heads=(4, 2), lengths=(129,), lists="kv_head", dtype="float16"),
    Prefill(heads=(4, 2), lengths=(193,), lists="head", head_dim=64, dtype="float16"),
    Prefill(heads=(7, 1), lengths=(64,)),
    Prefill(heads=(2, 1), lengths=(300, 200), first_blocks=(3, 1), return_lse=False),
    Prefill(heads=(2, 1), lengths=(100,), head_dim=96),
    Prefill(heads=(2, 1), lengths=(300,), block_size=128),
    Pages(heads=(3, 1), lengths=(65, 390), head_dim=64, room=1),
    Pages(heads=(4, 2), lengths=(300,), lists="kv_head", dtype="float16"),
    Pages(heads=(4, 2), lengths=(250,), lists="head", head_dim=64),
    Pages(heads=(2, 1), lengths=(330, 200), first_blocks=(3, 1), return_lse=False),
    Pages(heads=(2, 1), lengths=(150,), head_dim=96),
    Decode(heads=(2, 2), lengths=(1,), head_dim=64),
    Decode(heads=(4, 1), lengths=(130, 64, 7)),
    Decode(heads=(3, 1), lengths=(65, 191), head_dim=64, room=1, dtype="float16"),
    Decode(heads=(14, 2), lengths=(129,), lists="kv_head"),
    Decode(heads=(4, 2), lengths=(193,), lists="head", return_lse=False),
    Decode(heads=(8, 1), lengths=(500,), block_size=16),
    Decode(heads=(2, 1), lengths=(100,), head_dim=96),
    Select(num_blocks=5, num_rows=5),
    Select(num_blocks=130, num_rows=3, rows=(0, 120), density=0.3, kind="tied"),
    Select(num_blocks=128, num_rows=1, rows=(0, 1, 63, 127), forced=(2, 3)),
    Select(num_blocks=200, num_rows=2, rows=(198,), density=1.0, kind="wide"),
    Select(num_blocks=64, num_rows=4, rows=(60,), forced=(0, 1), kind="equal"),
)

LARGE_CASES: tuple[AttentionKernelCase | SelectionKernelCase, ...] = (
    Prefill(heads=(32, 8), lengths=(4096,)),
    Prefill(heads=(32, 8), lengths=(2048, 1999), head_dim=64),
    Prefill(heads=(28, 4), lengths=(1500, 37), lists="kv_head"),
    Prefill(heads=(24, 8), lengths=(1100,), lists="head", dtype="float16"),
    Prefill(heads=(32, 8), lengths=(4096, 2222), first_blocks=(56, 20), room=8),
    Decode(heads=(32, 8), lengths=(16384,)),
    Decode(heads=(28, 4), lengths=(4095, 1, 2048, 777), room=3),
    Decode(heads=(32, 8), lengths=tuple(range(1, 1025, 8)), head_dim=64),
    Decode(heads=(32, 8), lengths=(4000, 130), block_size=16, lists="kv_head"),
    Decode(heads=(32, 8), lengths=(4000, 130), block_size=16, lists="head"),
    Select(num_blocks=2048, num_rows=100, rows=(0, 1948), density=0.1),
    Select(num_blocks=2048, num_rows=1, rows=(2047,) * 3, density=0.1, kind="wide"),
    Select(num_blocks=1000, num_rows=300, rows=(700, 3), kind="tied"),
    Select(num_blocks=16384, num_rows=4, rows=(16380,), density=0.1),
)


SKETCH_CASES: tuple[Case, ...] = (
    *(
        BlockSumsCase(heads=heads, head_dim=head_dim, dtype=dtype)
        for heads, head_dim, dtype in (
            ((32, 8), 128, "bfloat16"),
            ((28, 4), 128, "float16"),
            ((32, 8), 64, "bfloat16"),
            ((14, 2), 64, "float16"),
        )
    ),
    BlockSumsCase(heads=(32, 8), head_dim=128, block_size=16),
    BlockSumsCase(heads=(32, 8), head_dim=128, tokens=131072),
    BlockSumsCase(heads=(32, 8), head_dim=128, sketch_dim=128),
    *(TokenSelectionCase(num_blocks=blocks) for blocks in (5, 256, 1024, 2048, 8192, 16384)),
    *(PromptSelectionCase(num_blocks=blocks) for blocks in (5, 1500, 2048, 8192)),
    PromptSelectionCase(num_blocks=256, num_parts=4),
    *(WalkOperandsCase(num_blocks=blocks, num_rows=blocks) for blocks in (5, 256, 2048, 8192)),
    WalkOperandsCase(num_blocks=1500, num_rows=64, power=7),
    TokenSelectionCase(num_blocks=512, batch=128, power=4),
    TokenSelectionCase(num_blocks=1024, sketch_dim=256, power=1),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvidenceKernelCase:
    """The kernels of the recommended policy.

    Of a prompt, with `count` representatives of a row, from queries to scores of blocks; or of one
    token of each sequence, from its queries to its list, of blocks or of `pages` of each.
    """

    heads: int
    kv_heads: int
    head_dim: int
    count: int | None = None
    blocks: int = 40
    pages: int = 1
    batch: int = 1

    def __str__(self) -> str:
        """The name of the case."""
        what = "a token" if self.count is None else f"{self.count} queries"
        what += f", {self.pages} pages" if self.pages > 1 else ""
        what += f", {self.batch} sequences" if self.batch > 1 else ""
        return f"evidence {self.heads}/{self.kv_heads} of {self.head_dim}, {what}, {self.blocks}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Representatives, keys, peaks and scores; of a token scores, evidence and list."""
        from sketchwalk_jax import SketchWalkConfig

        of_pages = self.pages > 1
        policy = RecommendedConfig() if of_pages else SketchWalkConfig.recommended_blocks()
        kernels, blocks = kernel_config or KernelConfig(), self.blocks
        shape = LayerShape(self.heads, self.kv_heads, self.head_dim, jnp.bfloat16)
        make = functools.partial(policy.init_statistics, shape, batch=self.batch, num_blocks=blocks)
        codes = jax.eval_shape(make)

        def select(query: Any, codes: Any, lengths: Any) -> Any:
            walk = policy.init_walk(batch=self.batch, num_rows=1, num_blocks=blocks)
            key_shape = (1, self.batch, 1, self.kv_heads, self.head_dim)
            key = jnp.zeros(key_shape, query.dtype)  # not read
            span, layer = Span.of_tokens(lengths - 1, 64), jnp.zeros((), jnp.int32)
            return policy.select(
                query, key, codes, walk, layer=layer, span=span, kernel_config=kernels
            )

        def score(query: Any, codes: Any, lengths: Any) -> Any:
            valid = jnp.arange(query.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
            span = Span(jnp.zeros_like(lengths), valid, lengths, lengths)
            queries = policy.represent(query, valid, self.count, kernel_config=kernels)
            return policy.evidence(
                queries, codes, span.rows(64), kv_lengths=lengths, scale=0.1, kernel_config=kernels
            )

        tokens = 1 if self.count is None else 64 * blocks
        query = jax.ShapeDtypeStruct((self.batch, tokens, self.heads, self.head_dim), jnp.bfloat16)
        arguments = (query, codes, jax.ShapeDtypeStruct((self.batch,), jnp.int32))
        return select if self.count is None else score, arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageScoresCase:
    """Keys in eight bits, peaks and scores of pages, `per_row` queries of a row and a key's head.

    Attributes:
      per_row: Queries of a row, as `queries_per_row` gives them.
      channels: Channels that count.
      blocks: Blocks of keys.
    """

    per_row: int
    channels: int
    blocks: int = 64

    def __str__(self) -> str:
        """The name of the case."""
        return f"scores of pages of {self.channels}, {self.per_row} queries, {self.blocks}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Sums of powers of the shares of pages."""
        from sketchwalk_jax.pallas_kernels import block_scores as kernel
        from sketchwalk_jax.pallas_kernels.block_residuals import block_residuals_kernel

        kv_heads, rows = 2, max(1, kernel.TILE // self.per_row)
        interpret = kernel_config is not None and kernel_config.interpret
        where: dict[str, Any] = {"pages": 4, "interpret": interpret}

        def score(query: Any, code: Any, step: Any, centre: Any, layer: Any, lengths: Any) -> Any:
            key = block_residuals_kernel(code, step, layer=layer, lengths=lengths, **where)
            own = where | {"first_row": lengths // 64, "per_row": self.per_row}
            peaks = kernel.block_peaks_kernel(query, key, wanted=self.per_row, **own)
            return kernel.block_scores_kernel(*peaks, query, centre, scale=0.1, exponent=8, **own)

        size = (1, self.blocks)
        shapes = [((1, kv_heads, rows * self.per_row, self.channels), jnp.bfloat16)]
        shapes.append(((1, *size, kv_heads, 64, self.channels // 2), jnp.uint8))
        shapes.append(((1, *size, kv_heads, self.channels), jnp.int8))
        shapes.append(((*size, kv_heads, self.channels), jnp.bfloat16))
        shapes += [((), jnp.int32), ((1,), jnp.int32)]
        return score, tuple(jax.ShapeDtypeStruct(*one) for one in shapes)


PAGE_CASES = tuple(
    PageScoresCase(per_row=per_row, channels=channels, blocks=blocks)
    for per_row, channels, blocks in (
        (32, 64, 2048),
        (8, 64, 64),
        (16, 32, 64),
        (64, 32, 2048),
        (128, 64, 2048),
        (8, 32, 64),
    )
)

EVIDENCE_CASES = (
    EvidenceKernelCase(heads=32, kv_heads=8, head_dim=128, count=8),
    EvidenceKernelCase(heads=32, kv_heads=8, head_dim=64, count=32),
    EvidenceKernelCase(heads=28, kv_heads=4, head_dim=128, count=16),
    EvidenceKernelCase(heads=14, kv_heads=2, head_dim=64, count=4),
    EvidenceKernelCase(heads=9, kv_heads=3, head_dim=64, count=8),
    EvidenceKernelCase(heads=2, kv_heads=2, head_dim=64, count=4),
    EvidenceKernelCase(heads=9, kv_heads=3, head_dim=64, count=8, blocks=45),
    EvidenceKernelCase(heads=32, kv_heads=8, head_dim=128),
    EvidenceKernelCase(heads=14, kv_heads=2, head_dim=64),
    EvidenceKernelCase(heads=14, kv_heads=2, head_dim=64, blocks=45),
    EvidenceKernelCase(heads=32, kv_heads=8, head_dim=128, blocks=63),
    *(EvidenceKernelCase(heads=32, kv_heads=8, head_dim=128, blocks=n) for n in (256, 2048, 16384)),
    EvidenceKernelCase(heads=64, kv_heads=8, head_dim=128, blocks=8192),
    EvidenceKernelCase(heads=28, kv_heads=4, head_dim=128, blocks=2048),
    EvidenceKernelCase(heads=3, kv_heads=3, head_dim=64, blocks=1),
    *(
        EvidenceKernelCase(heads=heads, kv_heads=kv_heads, head_dim=size, blocks=n, pages=4)
        for heads, kv_heads, size, n in (
            (32, 8, 128, 40),
            (14, 2, 64, 45),
            (3, 3, 64, 1),
            (32, 8, 128, 256),
            (28, 4, 128, 512),
            (32, 8, 128, 1024),
            (32, 8, 128, 2048),
            (32, 8, 64, 2048),
            (64, 8, 128, 2048),
            (32, 8, 128, 4096),
        )
    ),
    EvidenceKernelCase(heads=32, kv_heads=8, head_dim=128, blocks=1024, pages=4, batch=8),
    EvidenceKernelCase(heads=32, kv_heads=8, head_dim=128, count=8, blocks=256, pages=4),
    EvidenceKernelCase(heads=28, kv_heads=4, head_dim=128, count=32, blocks=45, pages=4),
    EvidenceKernelCase(heads=14, kv_heads=2, head_dim=64, count=4, blocks=2048, pages=4),
    EvidenceKernelCase(heads=2, kv_heads=2, head_dim=64, count=8, pages=4),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodesKernelCase:
    """The codes of the keys of a prompt, or of one token of each sequence (`rows` of 0)."""

    kv_heads: int
    head_dim: int
    rows: int = 0
    batch: int = 1
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """The name of the case."""
        what = f"{self.rows} rows" if self.rows else "a token"
        return f"codes {self.kv_heads} of {self.head_dim}, {what}, {self.batch}, {self.dtype}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Statistics of all layers, with the keys added to one of them."""
        policy, kernels = RecommendedConfig(), kernel_config or KernelConfig()
        shape = LayerShape(self.kv_heads, self.kv_heads, self.head_dim, jnp.dtype(self.dtype))

        def empty() -> Any:
            codes = policy.init_statistics(shape, batch=self.batch, num_blocks=self.rows + 5)
            return jax.tree.map(lambda x: jnp.stack([x] * NUM_LAYERS), codes)

        def observe(key: Any, codes: Any, valid: Any, end: Any) -> Any:
            layer = jnp.asarray(LAYER, jnp.int32)
            span = Span(jnp.maximum(0, end // 64 - self.rows), valid, end, end)
            found = policy.in_place.observe(
                key, codes, layer=layer, span=span, kernel_config=kernels
            )
            assert found is not None
            return found[0]

        tokens = 64 * self.rows or 1
        key = (self.batch, tokens, self.kv_heads, self.head_dim)
        return observe, (
            jax.ShapeDtypeStruct(key, self.dtype),
            jax.eval_shape(empty),
            jax.ShapeDtypeStruct(key[:2], jnp.bool_),
            jax.ShapeDtypeStruct(key[:1], jnp.int32),
        )


CODES_CASES = (
    CodesKernelCase(kv_heads=8, head_dim=128, rows=256),
    CodesKernelCase(kv_heads=8, head_dim=64, rows=256, batch=3),
    CodesKernelCase(kv_heads=3, head_dim=64, rows=1),
    CodesKernelCase(kv_heads=4, head_dim=128, rows=7, dtype="float16"),
    CodesKernelCase(kv_heads=8, head_dim=128),
    CodesKernelCase(kv_heads=2, head_dim=64, batch=32),
    CodesKernelCase(kv_heads=3, head_dim=64, dtype="float16"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainCodesCase:
    """What the kernel of `CodesKernelCase` does, in plain JAX."""

    def program(self) -> Program:
        """Codes, centres and steps of blocks."""
        from sketchwalk_jax.policies.block_codes import encode

        key = jax.ShapeDtypeStruct((3, 4, 64, 2, 32), jnp.bfloat16)
        return encode, (key, jax.ShapeDtypeStruct(key.shape[:3], jnp.bool_))


plain_codes = PlainCodesCase()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearKernelCase:
    """Rows times one layer of stacked weights.

    Attributes:
      rows: Rows.
      inputs: Their width.
      columns: Columns of each array of weights.
      is_transposed: Whether they are `[L, F, D]`.
      has_norm: Whether the rows go through a norm.
      dtype: Of the weights; uint8 for four bits.
    """

    rows: int
    inputs: int
    columns: tuple[int, ...]
    is_transposed: bool = False
    has_norm: bool = False
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        """The name of the case."""
        columns = "+".join(map(str, self.columns))
        kind = " transposed" if self.is_transposed else ""
        kind += " with a norm" if self.has_norm else ""
        what = "linear" if self.dtype == "bfloat16" else f"linear in {self.dtype},"
        return f"{what} {self.rows}x{self.inputs} to {columns}{kind}"

    @property
    def num_products(self) -> int | None:
        """Products of the tensor cores in the code, if rows are multiplied in eight bits."""
        from sketchwalk_jax.pallas_kernels import linear

        _, (x, _, _, weights, _) = self.program()
        options = {"has_norm": self.has_norm, "is_transposed": self.is_transposed}
        tiling = linear.tile(x, weights, **options)
        return tiling.depth // 32 if tiling.has_digits else None

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The products."""
        from sketchwalk_jax.pallas_kernels.linear import linear_kernel

        def multiply(x: Any, layer: Any, scale: Any, kernels: Any, weight_scales: Any) -> Any:
            options: dict[str, Any] = {"scale": scale, "eps": 1e-5} if self.has_norm else {}
            options |= {"is_transposed": self.is_transposed, "weight_scales": weight_scales}
            return linear_kernel(x, kernels, layer, **options)

        def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        def weights(width: int) -> jax.ShapeDtypeStruct:
            stored = self.inputs // 2 if self.dtype == "uint8" else self.inputs
            own = (width, stored) if self.is_transposed else (stored, width)
            return array(NUM_LAYERS, *own, dtype=self.dtype)

        scales = None
        if self.dtype == "uint8":
            scales = [
                array(NUM_LAYERS, self.inputs // WEIGHT_GROUP, width) for width in self.columns
            ]
        elif self.dtype != "bfloat16":
            scales = [array(NUM_LAYERS, width, dtype="float32") for width in self.columns]
        return multiply, (
            array(self.rows, self.inputs),
            array(dtype="int32"),
            array(NUM_LAYERS, self.inputs),
            [weights(width) for width in self.columns],
            scales,
        )


LINEAR_CASES = (
    LinearKernelCase(rows=1, inputs=4096, columns=(4096, 1024, 1024), has_norm=True),
    LinearKernelCase(rows=8, inputs=4096, columns=(14336, 14336), has_norm=True),
    LinearKernelCase(rows=1, inputs=4096, columns=(4096,)),
    LinearKernelCase(rows=24, inputs=14336, columns=(4096,)),
    LinearKernelCase(rows=64, inputs=3584, columns=(18944, 18944), has_norm=True),
    LinearKernelCase(rows=1, inputs=2048, columns=(128256,), is_transposed=True, has_norm=True),
    LinearKernelCase(rows=64, inputs=896, columns=(151936,), is_transposed=True),
    LinearKernelCase(rows=3, inputs=576, columns=(576, 192, 192)),
    *(
        LinearKernelCase(**shape, is_transposed=True, dtype=dtype)
        for dtype in ("float8_e4m3fn", "int8", "uint8")
        for shape in (
            {"rows": 1, "inputs": 4096, "columns": (4096, 1024, 1024), "has_norm": True},
            {"rows": 1, "inputs": 4096, "columns": (14336, 14336), "has_norm": True},
            {"rows": 1, "inputs": 4096, "columns": (4096,)},
            {"rows": 1, "inputs": 14336, "columns": (4096,)},
            {"rows": 3, "inputs": 4096, "columns": (4096,)},
            {"rows": 8, "inputs": 4096, "columns": (14336, 14336), "has_norm": True},
            {"rows": 24, "inputs": 14336, "columns": (4096,)},
            {"rows": 64, "inputs": 3584, "columns": (18944, 18944), "has_norm": True},
        )
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedRowsCase:
    """Rows of a gated mlp in eight bits, of their products."""

    rows: int
    columns: int

    def __str__(self) -> str:
        """The name of the case."""
        return f"gated rows {self.rows}x{self.columns}"

    @property
    def threads(self) -> int:
        """Threads of a multiprocessor that the kernel counts on."""
        from sketchwalk_jax.pallas_kernels import gated_rows

        return gated_rows._WARPGROUPS * 128

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """The rows and their scales."""
        from sketchwalk_jax.pallas_kernels.gated_rows import gated_rows_kernel

        products = jax.ShapeDtypeStruct((self.rows, self.columns), jnp.bfloat16)
        of_rows, of_columns = (
            jax.ShapeDtypeStruct((size,), jnp.float32) for size in products.shape
        )
        return gated_rows_kernel, (products, products, of_rows, of_columns, of_columns)


GATED_CASES = tuple(
    GatedRowsCase(rows=rows, columns=columns)
    for rows, columns in (
        (131072, 14336),
        (7, 64),
        (32768, 1792),
        (32768, 3072),
        (32768, 8192),
        (32768, 11008),
        (300000, 18944),
        (8192, 25600),
        (8192, 28672),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteKernelCase:
    """The key and value of one token of each sequence, written to the caches; with codes or not."""

    kv_heads: int
    head_dim: int
    batch: int = 1
    dtype: str = "bfloat16"
    has_codes: bool = False

    def __str__(self) -> str:
        """The name of the case."""
        what = "coded and written" if self.has_codes else "written"
        return f"token {what}, {self.kv_heads} of {self.head_dim}, {self.batch}, {self.dtype}"

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Caches of all layers, and codes, with the token in one."""
        policy, kernels = RecommendedConfig(), kernel_config or KernelConfig()
        shape = LayerShape(self.kv_heads, self.kv_heads, self.head_dim, jnp.dtype(self.dtype))

        def empty() -> Any:
            codes = policy.init_statistics(shape, batch=self.batch, num_blocks=5)
            return jax.tree.map(lambda x: jnp.stack([x] * NUM_LAYERS), codes)

        def write(key: Any, value: Any, keys: Any, values: Any, codes: Any, end: Any) -> Any:
            layer, span = jnp.asarray(LAYER, jnp.int32), Span.of_tokens(end - 1, 64)
            new = TokenWrite(value, keys, values, layer)
            if self.has_codes:
                found = policy.in_place.observe(
                    key, codes, layer=layer, span=span, kernel_config=kernels, write=new
                )
            else:
                found = kernel_selection.write_token(key, new, span=span, kernel_config=kernels)
            assert found is not None
            return found

        token = jax.ShapeDtypeStruct((self.batch, 1, self.kv_heads, self.head_dim), self.dtype)
        size = (NUM_LAYERS, self.batch, 320, self.kv_heads, self.head_dim)
        cache, end = (jax.ShapeDtypeStruct(size, self.dtype), (self.batch,))
        codes = jax.eval_shape(empty)
        return write, (token, token, cache, cache, codes, jax.ShapeDtypeStruct(end, jnp.int32))


WRITE_CASES = (
    WriteKernelCase(kv_heads=8, head_dim=128),
    WriteKernelCase(kv_heads=2, head_dim=64, batch=64),
    WriteKernelCase(kv_heads=3, head_dim=128, dtype="float32"),
    WriteKernelCase(kv_heads=8, head_dim=128, has_codes=True),
    WriteKernelCase(kv_heads=3, head_dim=64, batch=32, dtype="float16", has_codes=True),
)


def _promised() -> tuple[Case, ...]:
    """Every pair of dtype, head_dim, group and kind of list, and every block size."""
    attention = []
    for dtype, head_dim, group, lists in pairwise(
        ("bfloat16", "float16"), (64, 128), (1, 3, 4, 7, 8), cases.LIST_KINDS
    ):
        shape = {"dtype": dtype, "head_dim": head_dim, "heads": (group * 4, 4)}
        shape |= {"lists": lists, "list_blocks": 13}
        attention.append(Prefill(lengths=(16384,), return_lse=False, **shape))
        attention.append(Pages(lengths=(16384,), return_lse=False, **shape))
        attention.append(Decode(lengths=(16384,) * 4, return_lse=False, **shape))
    for head_dim in (64, 128):
        attention += [
            Prefill(heads=(32, 8), lengths=(131072,), head_dim=head_dim, list_blocks=205),
            Prefill(heads=(32, 8), lengths=(8192,), head_dim=head_dim, block_size=128),
            Pages(heads=(32, 8), lengths=(131072,), head_dim=head_dim, list_blocks=820),
            Decode(heads=(32, 8), lengths=(131072,), head_dim=head_dim, list_blocks=205),
            Decode(heads=(32, 8), lengths=(4096,) * 128, head_dim=head_dim),
            Decode(heads=(32, 8), lengths=(65536,) * 8, head_dim=head_dim, block_size=16),
        ]
    attention += [Prefill(heads=(32, 8), lengths=(4096,), head_dim=size) for size in (80, 96)]
    attention.append(Pages(heads=(32, 8), lengths=(4096,), head_dim=80))
    select = [
        Select(num_blocks=blocks, num_rows=rows, density=0.1)
        for blocks, rows in ((64, 64), (256, 1), (1024, 1024), (2048, 1), (8192, 8192), (16384, 1))
    ]
    token = (*CODES_CASES, *WRITE_CASES, *LINEAR_CASES, *GATED_CASES)
    return (*attention, *select, *SKETCH_CASES, *EVIDENCE_CASES, *PAGE_CASES, *token)


COMPILED: dict[str, Case] = {str(case): case for case in (*CASES, *LARGE_CASES, *_promised())}


def _family(name: str, case: Case) -> tuple[str, ...]:
    """What kernels share their code: the same operation, of rows or of a token, on such heads."""
    heads = re.search(r"H\d+|of \d+", name)
    of_token = "a token" if "a token" in name else ""
    return type(case).__name__, re.split(r"\d", name)[0], of_token, heads[0] if heads else ""


# The first case of each family, which is compiled on every change.
FAMILIES = frozenset(
    {_family(name, case): name for name, case in reversed(COMPILED.items())}.values()
)


def program(case: Case, *, kernel_config: KernelConfig | None = None) -> Program:
    """The kernel of a case as a function of arrays alone, and the shapes of these."""
    return case.program() if kernel_config is None else case.program(kernel_config=kernel_config)
