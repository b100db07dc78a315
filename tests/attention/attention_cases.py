"""Shapes of attention over page lists, in prefill and decode, that the kernels' tests share.

Each kernel has a class of its own, so that a change of one reaches the tests of that one alone.
Tests compute the cases in the interpreter, in the emulator and on a GPU, the large ones only on a
GPU. `COMPILED` are compiled for GPUs that the machine need not have.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import cases
import jax
import jax.numpy as jnp
from cases import NUM_LAYERS, Program
from pairwise import pairwise

from sketchwalk_jax import KernelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKernelCase:
    """Attention over block lists, for many tokens (`prefill`) or one per sequence (`decode`).

    Each subclass names the kernel that computes it.

    Attributes:
      op: `"prefill"` or `"decode"`.
      heads: Query heads and key/value heads.
      lengths: Keys present in each sequence.
      head_dim: Features per head.
      lists: `"shared"`, `"kv_head"` or `"head"`.
      block_size: Tokens per block.
      row_size: Queries per query block in prefill, `block_size` by default.
      first_blocks: Query block of each sequence's first query, in prefill. The last query block is
        the one that holds the longest sequence's last key.
      room: Capacity of the cache beyond the longest sequence, in query blocks.
      list_blocks: Capacity `P` of the lists, by default the number of blocks.
      dtype: Type of queries, keys and values.
      return_lse: Whether the kernel returns the log-sum-exp.
      needs_hopper: Whether the kernel runs on Hopper alone.
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

    needs_hopper: ClassVar[bool] = False

    @property
    def row_tokens(self) -> int:
        """Queries per query block."""
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
        """Lists per query block."""
        return dict(zip(cases.LIST_KINDS, (1, *self.heads[::-1]), strict=True))[self.lists]

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        lengths = ",".join(map(str, self.lengths[:3])) + (",.." if len(self.lengths) > 3 else "")
        parts = [self.op, "x".join(map(str, self.heads)), f"H{self.head_dim}", f"T{lengths}"]
        parts += [self.lists, f"block{self.block_size}", self.dtype]
        parts += [f"rows{self.row_size}"] if self.row_size else []
        parts += [f"from{','.join(map(str, self.first_blocks))}"] if self.first_blocks else []
        parts += [f"room{self.room}"] if self.room else []
        return "-".join(parts if self.return_lse else [*parts, "nolse"])

    @property
    def kernel(self) -> Callable[..., Any]:
        """The kernel."""
        raise NotImplementedError

    def program(self, *, kernel_config: KernelConfig | None = None) -> Program:
        """Returns the kernel as a function of arrays only, and their shapes."""
        is_prefill = self.op == "prefill"
        batch, (num_heads, num_kv_heads) = len(self.lengths), self.heads
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
            out, lse = self.kernel(*arrays, **options)
            return (out,) if lse is None else (out, lse)

        return attend, tuple(arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill(AttentionKernelCase):
    """A prompt's attention, by the kernel for GPUs from Ampere on."""

    op: str = "prefill"

    @property
    def kernel(self) -> Callable[..., Any]:
        """The kernel."""
        from sketchwalk_jax.pallas_kernels.attention.attention import attention_kernel

        return attention_kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperPrefill(AttentionKernelCase):
    """A prompt's attention, by the kernel for Hopper."""

    op: str = "prefill"

    needs_hopper: ClassVar[bool] = True

    def __str__(self) -> str:
        """Returns the name of the case in test ids."""
        return f"{super().__str__()}-hopper"

    @property
    def kernel(self) -> Callable[..., Any]:
        """The kernel."""
        from sketchwalk_jax.pallas_kernels.attention.hopper import hopper_attention_kernel

        return hopper_attention_kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(AttentionKernelCase):
    """A token's attention."""

    op: str = "decode"

    @property
    def kernel(self) -> Callable[..., Any]:
        """The kernel."""
        from sketchwalk_jax.pallas_kernels.decode_attention.decode_attention import (
            decode_attention_kernel,
        )

        return decode_attention_kernel


# Sizes of pages that are smaller than a query block.
PAGES = {"block_size": 16, "row_size": 64}

PREFILL_SHAPES: tuple[dict[str, Any], ...] = (
    {"heads": (2, 2), "lengths": (1,), "head_dim": 64},
    {"heads": (2, 1), "lengths": (130,)},
    {"heads": (3, 1), "lengths": (65, 191), "head_dim": 64, "room": 1},
    {"heads": (4, 2), "lengths": (129,), "lists": "kv_head", "dtype": "float16"},
    {"heads": (4, 2), "lengths": (193,), "lists": "head", "head_dim": 64, "dtype": "float16"},
    {"heads": (7, 1), "lengths": (64,)},
    {"heads": (2, 1), "lengths": (300, 200), "first_blocks": (3, 1), "return_lse": False},
    {"heads": (2, 1), "lengths": (100,), "head_dim": 96},
    {"heads": (2, 1), "lengths": (300,), "block_size": 128},
    {"heads": (3, 1), "lengths": (65, 390), "head_dim": 64, "room": 1, **PAGES},
    {"heads": (4, 2), "lengths": (300,), "lists": "kv_head", "dtype": "float16", **PAGES},
    {"heads": (4, 2), "lengths": (250,), "lists": "head", "head_dim": 64, **PAGES},
    {"heads": (2, 1), "lengths": (330, 200), "first_blocks": (3, 1), "return_lse": False, **PAGES},
    {"heads": (2, 1), "lengths": (150,), "head_dim": 96, **PAGES},
)
LARGE_PREFILL_SHAPES: tuple[dict[str, Any], ...] = (
    {"heads": (32, 8), "lengths": (4096,)},
    {"heads": (32, 8), "lengths": (2048, 1999), "head_dim": 64},
    {"heads": (28, 4), "lengths": (1500, 37), "lists": "kv_head"},
    {"heads": (24, 8), "lengths": (1100,), "lists": "head", "dtype": "float16"},
    {"heads": (32, 8), "lengths": (4096, 2222), "first_blocks": (56, 20), "room": 8},
)
# Values that are not finite: spare heads, blocks of one and two chunks, one and two computing
# warpgroups, both dtypes.
BAD_PREFILL_SHAPES: tuple[dict[str, Any], ...] = (
    {"heads": (3, 1), "lengths": (150, 200, 65), "head_dim": 64},
    {"heads": (2, 1), "lengths": (250, 300), "block_size": 128, "return_lse": False},
    {"heads": (2, 1), "lengths": (300, 230), "first_blocks": (2, 1)},
    {"heads": (4, 2), "lengths": (130, 193), "lists": "head", "dtype": "float16", **PAGES},
    {"heads": (2, 1), "lengths": (330, 250), "first_blocks": (2, 1), "return_lse": False, **PAGES},
)
BAD_PREFILL_SHAPES_OF_A_WEEK: tuple[dict[str, Any], ...] = (
    {"heads": (4, 2), "lengths": (193, 70), "lists": "head", "dtype": "float16"},
    {"heads": (2, 2), "lengths": (130, 192), "head_dim": 64, "block_size": 128},
    {"heads": (3, 1), "lengths": (300, 65), "head_dim": 64, **PAGES},
)

# One head's share of its rows' own pages differs from the others'.
OWN_PAGES: dict[str, Any] = {"heads": (16, 1), "lengths": (180,), "lists": "head", "head_dim": 64}

# Shapes of the table of machine code for GPUs from Ampere on. Prefill: both head_dims, with and
# without GQA, each page size, both types in turn. Decode: lists in one part and in several; groups
# of one head, of up to eight and of more.
CODE_PREFILL = tuple(
    Prefill(
        heads=heads,
        lengths=(4096, 4096),
        head_dim=head_dim,
        block_size=block_size,
        row_size=row_size,
        dtype=("bfloat16", "float16")[(index + head_dim // 64) % 2],
        return_lse=index != 2,
    )
    for head_dim in (64, 128)
    for heads in ((32, 8), (8, 8))
    for index, (block_size, row_size) in enumerate(((64, None), (16, 64), (128, None)))
)
CODE_DECODE = tuple(
    Decode(heads=heads, lengths=lengths, head_dim=head_dim, **lists)
    for head_dim in (64, 128)
    for heads, lengths, lists in (
        ((32, 8), (65536,), {"block_size": 16, "list_blocks": 820}),
        ((32, 8), (4096,) * 128, {"block_size": 16}),
        ((28, 4), (16384,) * 4, {"dtype": "float16", "lists": "kv_head", "return_lse": False}),
        ((32, 2), (16384,) * 4, {"block_size": 128}),
        ((8, 8), (16384,) * 32, {"lists": "head", "dtype": "float16"}),
    )
)


def _pairs(make: Any, *groups: int) -> list[Any]:
    """Returns cases in which every two values that a kernel takes meet."""
    is_prefill = make.op == "prefill"
    lengths = ((4096,), (131072,)) if is_prefill else ((65536,), (4096,) * 128)
    names = ("lists", "dtype", "head_dim", "return_lse")
    sizes: Any = (groups, cases.LIST_KINDS, ("bfloat16", "float16"), (128, 64), (True, False))
    found = []
    blocks = ((64, None), (16, 64), (128, None))
    for (block_size, row_size), tokens, group, *row in pairwise(blocks, lengths, *sizes):
        options = {"block_size": block_size, "heads": (group * 4, 4), "list_blocks": 13}
        options |= {"row_size": row_size} if is_prefill else {}
        options |= dict(zip(names, row, strict=True))
        found.append(make(lengths=tokens, **options))
    return found


def _shaped(shapes: tuple[Any, ...], head_dim: int, *heads: tuple[int, int]) -> list[Any]:
    return [x for x in shapes if x.head_dim == head_dim and x.heads in heads]


# Cases by GPU, for each kernel. Hopper and 8.0 get pairs of the sizes that they take; a head_dim
# other than 64 and 128 is padded. Other GPUs get the cases most likely to run out of registers, of
# which Blackwell's assembler uses more, or of shared memory, of which 8.6 and 8.9 have least.
_LONG: dict[str, Any] = {"heads": (32, 8), "lengths": (4096,)}
COMPILED_HOPPER = {
    "9.0": [
        *_pairs(HopperPrefill, 1, 7, 8),
        HopperPrefill(**_LONG, head_dim=80),
        HopperPrefill(**_LONG, head_dim=96, **PAGES),
    ]
}
COMPILED_PREFILL = {
    "8.0": [*_pairs(Prefill, 1, 7), Prefill(**_LONG, head_dim=80, **PAGES)],
    "8.6": _shaped(CODE_PREFILL, 128, (8, 8))[1:2],
    "8.9": _shaped(CODE_PREFILL, 128, (32, 8))[1:2],
    "10.0": _shaped(CODE_PREFILL, 128, (32, 8)),
    "12.0": _shaped(CODE_PREFILL, 128, (32, 8))[:2],
}
COMPILED_DECODE = {
    "9.0": _pairs(Decode, 1, 7, 8),
    "8.0": [*_pairs(Decode, 1, 7), Decode(heads=(32, 2), lengths=(4096,))],
    "8.6": _shaped(CODE_DECODE, 128, (32, 8)),
    "10.0": _shaped(CODE_DECODE, 128, (32, 2)),
    "12.0": [*_shaped(CODE_DECODE, 128, (32, 2)), *_shaped(CODE_DECODE, 64, (32, 8))[:1]],
}
FILE = __file__  # with `attention_cases.__file__`, .ci/checks.py would hash the whole module
COMPILED = {  # where `hopper.serve` looks for a case
    gpu: [
        case
        for one in (COMPILED_HOPPER, COMPILED_PREFILL, COMPILED_DECODE)
        for case in one.get(gpu, ())
    ]
    for gpu in ("9.0", "8.0", "8.6", "8.9", "10.0", "12.0")
}
