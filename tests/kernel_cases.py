"""Cases that all tests of the kernels share: in the interpreter, compiled, and on a GPU.

`CASES` are computed, in the interpreter and on a GPU; `LARGE_CASES` on a GPU alone; `COMPILED` has
all of them and every other shape that the kernels promise to take, by name.
"""

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from sketch_kernel_cases import SKETCH_CASES, SketchCase

from sketchwalk_jax import KernelConfig, reference

NUM_LAYERS, LAYER = 3, 1
MODULES = {
    "prefill": ("block_sparse_prefill", "block_sparse_prefill"),
    "decode": ("block_sparse_decode", "block_sparse_decode_kernel"),
    "select": ("select", "select_blocks_kernel"),
}


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
      first_blocks: Block of each sequence's first query row, in prefill. Rows go on to the block of
        the longest sequence's last key.
      room: Blocks of the cache beyond the longest sequence.
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
    first_blocks: tuple[int, ...] | None = None
    room: int = 0
    list_blocks: int | None = None
    dtype: str = "bfloat16"
    return_lse: bool = True

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return -(-max(self.lengths) // self.block_size) + self.room

    @property
    def num_rows(self) -> int:
        """Query blocks, or 1 in decode."""
        if self.op == "decode":
            return 1
        first = min(self.first_blocks or (0,))
        return self.num_blocks - self.room - first

    @property
    def num_lists(self) -> int:
        """Lists per row."""
        return dict(zip(cases.LIST_KINDS, (1, *self.heads[::-1]), strict=True))[self.lists]

    def __str__(self) -> str:
        """Names the case in test ids."""
        lengths = ",".join(map(str, self.lengths[:3])) + (",.." if len(self.lengths) > 3 else "")
        parts = [self.op, "x".join(map(str, self.heads)), f"H{self.head_dim}", f"T{lengths}"]
        parts += [self.lists, f"block{self.block_size}", self.dtype]
        parts += [f"from{','.join(map(str, self.first_blocks))}"] if self.first_blocks else []
        parts += [f"room{self.room}"] if self.room else []
        return "-".join(parts if self.return_lse else [*parts, "nolse"])


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


Case = AttentionKernelCase | SelectionKernelCase | SketchCase
Prefill = functools.partial(AttentionKernelCase, op="prefill")
Decode = functools.partial(AttentionKernelCase, op="decode")
Select = SelectionKernelCase

CASES: tuple[Case, ...] = (
    Prefill(heads=(2, 2), lengths=(1,), head_dim=64),
    Prefill(heads=(2, 1), lengths=(130,)),
    Prefill(heads=(3, 1), lengths=(65, 191), head_dim=64, room=1),
    Prefill(heads=(4, 2), lengths=(129,), lists="kv_head", dtype="float16"),
    Prefill(heads=(4, 2), lengths=(193,), lists="head", head_dim=64, dtype="float16"),
    Prefill(heads=(7, 1), lengths=(64,)),
    Prefill(heads=(2, 1), lengths=(300, 200), first_blocks=(3, 1), return_lse=False),
    Prefill(heads=(2, 1), lengths=(100,), head_dim=96),
    Prefill(heads=(2, 1), lengths=(300,), block_size=128),
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

LARGE_CASES: tuple[Case, ...] = (
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


def _promised() -> tuple[Case, ...]:
    """Every combination of dtype, head_dim, group, kind of list and block size."""
    dtypes, head_dims, groups = ("bfloat16", "float16"), (64, 128), (1, 3, 4, 7, 8)
    some = itertools.product(dtypes, head_dims, groups)
    kinds = itertools.cycle(cases.LIST_KINDS)
    attention = []
    for dtype, head_dim, group in some:
        shape = {"dtype": dtype, "head_dim": head_dim, "heads": (group * 4, 4)}
        shape |= {"lists": next(kinds), "list_blocks": 13}
        attention.append(Prefill(lengths=(16384,), return_lse=False, **shape))
        attention.append(Decode(lengths=(16384,) * 4, return_lse=False, **shape))
    for head_dim in (64, 128):
        attention += [
            Prefill(heads=(32, 8), lengths=(131072,), head_dim=head_dim, list_blocks=205),
            Prefill(heads=(32, 8), lengths=(8192,), head_dim=head_dim, block_size=128),
            Decode(heads=(32, 8), lengths=(131072,), head_dim=head_dim, list_blocks=205),
            Decode(heads=(32, 8), lengths=(4096,) * 128, head_dim=head_dim),
            Decode(heads=(32, 8), lengths=(65536,) * 8, head_dim=head_dim, block_size=16),
        ]
    attention += [Prefill(heads=(32, 8), lengths=(4096,), head_dim=size) for size in (80, 96)]
    select = [
        Select(num_blocks=blocks, num_rows=rows, density=0.1)
        for blocks, rows in ((64, 64), (256, 1), (1024, 1024), (2048, 1), (8192, 8192), (16384, 1))
    ]
    return (*attention, *select, *SKETCH_CASES)


COMPILED: dict[str, Case] = {str(case): case for case in (*CASES, *LARGE_CASES, *_promised())}


def kernel(case: Case) -> Callable[..., Any]:
    """The kernel of a case."""
    module, name = MODULES[case.op]
    return getattr(importlib.import_module(f"sketchwalk_jax.pallas_kernels.{module}"), name)


def program(
    case: Case, *, config: KernelConfig | None = None
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """The kernel as a function of arrays alone, and the shapes of these."""
    if isinstance(case, SketchCase):
        return case.program()
    function = kernel(case)
    if isinstance(case, SelectionKernelCase):
        sinks, local = case.forced
        select = functools.partial(
            function,
            sink_blocks=sinks,
            local_blocks=local,
            max_count=int(reference_budget(case)[-1]),
            block_size=64,
            interpret=config is not None and config.interpret,
        )
        shape = (len(case.rows), case.num_rows)
        scores = jax.ShapeDtypeStruct((*shape, case.num_blocks), jnp.float32)
        return select, (scores, *(jax.ShapeDtypeStruct(shape, jnp.int32) for _ in range(2)))
    batch, (num_heads, num_kv_heads) = len(case.lengths), case.heads
    tokens = case.num_rows * case.block_size if case.op == "prefill" else 1
    lists = (batch, case.num_lists, case.num_rows)
    cache = (NUM_LAYERS, batch, case.num_blocks * case.block_size, num_kv_heads, case.head_dim)
    floats = [(batch, tokens, num_heads, case.head_dim), cache, cache]
    integers = [(*lists, case.list_blocks or case.num_blocks), lists, (), (batch,), (batch,)]
    arguments = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in floats]
    arguments += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in integers]
    static = {
        "scale": case.head_dim**-0.5,
        "block_size": case.block_size,
        "return_lse": case.return_lse,
        "config": config,
    }

    def attend(query, key, value, ids, counts, layer, kv_lengths, first_block):
        options = {"layer": layer, "kv_lengths": kv_lengths, **static}
        if case.op == "prefill":
            options["first_block"] = first_block
        out, lse = function(query, key, value, ids, counts, **options)
        return (out,) if lse is None else (out, lse)

    return attend, tuple(arguments)


def reference_budget(case: SelectionKernelCase) -> np.ndarray:
    """Blocks that each row keeps."""
    from sketchwalk_jax import SketchWalkConfig

    sinks, local = case.forced
    config = SketchWalkConfig.paper(density=case.density, sink_blocks=sinks, local_blocks=local)
    return reference.budget(config, case.num_blocks)
