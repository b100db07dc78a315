"""The interface between prediction (which blocks?) and attention (over which blocks).

A *policy* turns queries, keys and its own state into a `BlockSelection`; one set of attention
kernels then attends over the listed blocks, whatever policy listed them. Two kinds of state exist:

* *statistics*, one set per layer, live in the cache beside K and V and grow with the sequence
  (sums of queries and keys in sketch space, say);
* the *walk* crosses layers within one call and starts afresh with the next.
"""

import abc
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from sketchwalk_jax.selection import BlockSelection

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens that one call adds to the sequences, laid out on absolute block boundaries.

    Attributes:
      first_block: Block of the first row, int32 `[B]`. Column `t` of the call's arrays stands for
        position `first_block · block_size + t`.
      valid: Which columns hold a token of the sequence, bool `[B, T]`; the others are padding.
      end: Tokens in the cache once this call has been written, int32 `[B]`.
      prompt_end: Tokens in the cache once the whole prompt has been written, int32 `[B]`; later
        than `end` while a prompt is being read in chunks.
    """

    first_block: Int[Array, "B"]
    valid: Bool[Array, "B T"]
    end: Int[Array, "B"]
    prompt_end: Int[Array, "B"]

    def rows(self, block_size: int) -> Int[Array, "B I"]:
        """Absolute block indices of the call's query blocks."""
        num_rows = self.valid.shape[1] // block_size
        return self.first_block[:, None] + jnp.arange(num_rows, dtype=jnp.int32)[None, :]


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes a policy needs to lay out its statistics.

    Attributes:
      num_heads: Query heads `N`.
      num_kv_heads: Key/value heads `K`.
      head_dim: Size of one head `H`.
      dtype: Type of queries, keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(abc.ABC):
    """A rule that selects key blocks. Subclasses are frozen, hashable dataclasses.

    Attributes:
      block_size: Tokens per block.
      dense_layers: Leading layers that attend to everything.
    """

    block_size: int = 64
    dense_layers: int = 0

    def __post_init__(self) -> None:
        """Checks the fields that every policy has."""
        size = self.block_size
        if not isinstance(size, int) or size < 16 or size & (size - 1):
            raise ValueError(f"block_size must be a power of two of at least 16, got {size!r}")
        if not isinstance(self.dense_layers, int) or self.dense_layers < 0:
            raise ValueError(
                f"dense_layers must be an integer of at least 0, got {self.dense_layers!r}"
            )

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases in which the policy selects: a subset of `("prefill", "decode")`."""
        return ("prefill", "decode")

    @abc.abstractmethod
    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> PyTree:
        """Empty statistics of one layer; every leaf starts with axes `[B, J]` or `[B]`."""

    @abc.abstractmethod
    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> PyTree:
        """The state that crosses layers, before the first sparse layer."""

    @abc.abstractmethod
    def observe(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: PyTree,
        *,
        span: Span,
    ) -> PyTree:
        """Statistics after the tokens of `span`, in prefill and in decode alike."""

    @abc.abstractmethod
    def select_prefill(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> tuple[BlockSelection, PyTree]:
        """Blocks for every query block of `span`, and the walk for the next layer.

        `key` is the stacked cache, already holding the tokens of `span`; `statistics` have
        observed them.
        """

    @abc.abstractmethod
    def select_decode(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: PyTree,
        *,
        layer: Int[Array, ""],
        positions: Int[Array, "B"],
    ) -> tuple[BlockSelection, PyTree]:
        """Blocks for the token at `positions`, already in the cache and in the statistics."""

    def metadata_bytes(self, shape: LayerShape, positions: Int[Array, "B"]) -> Float[Array, "B"]:
        """Bytes that selecting for one token reads in one layer, the query apart.

        Here the statistics of all blocks up to the token's own; policies that read something else
        say so.

        Args:
          shape: Sizes of the layer.
          positions: Positions of the tokens.

        Returns:
          Bytes for each sequence, float32.
        """

        def size(num_blocks: int) -> int:
            make = partial(self.init_statistics, shape, batch=1, num_blocks=num_blocks)
            return sum(
                leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make))
            )

        by_block = size(2) - size(1)
        blocks = (positions // self.block_size + 1).astype(jnp.float32)
        return float(size(1) - by_block) + float(by_block) * blocks


class StatelessPolicy(Policy):
    """A policy that keeps nothing, neither of the tokens nor from layer to layer."""

    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> PyTree:
        """Nothing to keep."""
        return None

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> PyTree:
        """Nothing to carry from layer to layer."""
        return None

    def observe(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: PyTree,
        *,
        span: Span,
    ) -> PyTree:
        """Nothing to add."""
        return statistics
