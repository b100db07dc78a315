"""The interface between policies, which select key blocks, and attention over these blocks.

A *policy* turns queries, keys and its own state into a `BlockSelection`. The same attention kernels
then attend over the listed blocks for all policies. A policy has two kinds of state:

* *statistics*, one set per layer, are in the cache with K and V and grow with the sequence (for
  example sums of queries and keys in sketch space);
* the *walk* is passed from layer to layer within one call, and starts again in the next call.

`Policy` is the interface. Choose a base class by what you write: for `BudgetPolicy` and
`DecodePolicy` a score, from which they make the block indices; for `PrefillPolicy` the block
indices, with a threshold (`threshold_field`) that sets the density. `README.md` in this folder has
an example.
"""

import abc
import copy
import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.ranks import Blocks, Heads
from sketchwalk_jax.pytree import register
from sketchwalk_jax.selection import (
    BlockSelection,
    block_budget,
    select_blocks,
    select_blocks_per_head,
)
from sketchwalk_jax.validation import check_flag, check_integer, check_number, describe

PyTree = Any

# Lists of at most this many units are as wide as the cache; wider ones as one of these shares.
WIDEST_LISTS = 2**14
SHARES = (0.125, 0.25, 0.5, 1.0)


@register
@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens that one call adds to the sequences: prompts, or one token each in decode.

    Prompt tokens are aligned to absolute block boundaries: column `t` of the call's arrays has
    position `first_block · block_size + t`. A decoded token has position `end - 1`, anywhere in its
    block.

    Attributes:
      first_block: Block of the first row (query block), int32 `[B]`.
      valid: Whether each column is a token of the sequence, bool `[B, T]`; the others are padding.
      end: Number of tokens in the cache after this call's write, int32 `[B]`.
      prompt_end: Number of tokens in the cache after the whole prompt is written, int32 `[B]`;
        larger than `end` while a prompt is read in chunks.
      heads: Distribution of the heads over ranks, each of which makes this call for its own heads;
        `None` if this device has all heads.
      blocks: Distribution of a prompt's rows over ranks; `None` if this device has all rows.
      is_fresh: Whether the tokens are known to begin their sequences.
    """

    first_block: Int[Array, "B"]
    valid: Bool[Array, "B T"]
    end: Int[Array, "B"]
    prompt_end: Int[Array, "B"]
    heads: Heads | None = dataclasses.field(default=None, metadata={"static": True})
    blocks: Blocks | None = dataclasses.field(default=None, metadata={"static": True})
    is_fresh: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of_tokens(
        cls, positions: Int[Array, "B"], block_size: int, active: Bool[Array, "B"] | None = None
    ) -> "Span":
        """Makes the span of one decoded token per sequence; inactive ones are padding."""
        active = jnp.ones(positions.shape, bool) if active is None else active
        return cls(positions // block_size, active[:, None], positions + 1, positions + 1)

    @property
    def is_token(self) -> bool:
        """Whether this is one token of each sequence, as in decode."""
        return self.valid.shape[1] == 1

    @property
    def phase(self) -> str:
        """The phase, `"prefill"` or `"decode"`."""
        return "decode" if self.is_token else "prefill"

    @property
    def positions(self) -> Int[Array, "B"]:
        """Position of the last token in each sequence; in decode, of the only token."""
        return self.end - 1

    def start(self, block_size: int) -> Int[Array, "B"]:
        """Position of column 0 of the call's arrays in each sequence."""
        return self.positions if self.is_token else self.first_block * block_size

    def rows(self, block_size: int) -> Int[Array, "B I"]:
        """Absolute block indices of the query blocks; in decode, of the token's block."""
        if self.is_token:
            return (self.positions // block_size)[:, None]
        num_rows = self.valid.shape[1] // block_size
        return self.first_block[:, None] + jnp.arange(num_rows, dtype=jnp.int32)[None, :]

    def queries_of_rows(self, block_size: int) -> tuple[Int[Array, "B I"], Int[Array, "B I"]]:
        """Returns the position of the first query of each row, and the row's number of queries.

        A row may begin and end with padding.
        """
        rows = self.rows(block_size)
        if self.is_token:
            return self.positions[:, None], self.valid.astype(jnp.int32)
        by_row = self.valid.reshape(*rows.shape, block_size)
        first = rows * block_size + jnp.argmax(by_row, axis=-1).astype(jnp.int32)
        return first, jnp.sum(by_row, axis=-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes that a policy needs to allocate its statistics.

    Attributes:
      num_heads: Number of query heads `N`.
      num_kv_heads: Number of key/value heads `K`.
      head_dim: Size of a head `H`.
      dtype: Type of queries, keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike = jnp.float32


class TokenWrite(NamedTuple):
    """A decoded token's values, and the caches to write its keys and values into.

    Attributes:
      value: Values of the token.
      keys: Cached keys of all layers.
      values: Cached values of all layers.
      layer: Index of the layer to write.
    """

    value: Float[Array, "B 1 K H"]
    keys: Float[Array, "L B S K H"]
    values: Float[Array, "L B S K H"]
    layer: Int[Array, ""]


def take_layer(stacked: PyTree, layer: Int[Array, ""]) -> PyTree:
    """Copies one layer's arrays out of arrays with a leading axis of layers."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stacked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(abc.ABC):
    """A rule that selects key blocks. Subclasses are frozen, hashable dataclasses.

    A policy without state implements only `select`: by default there are neither statistics nor a
    walk.

    Attributes:
      block_size: Tokens per block.
      dense_layers: Layers that attend to everything: the number of leading ones, or a tuple of
        layer indices.
    """

    counts_dense_layers: ClassVar[bool] = False
    """Whether the density is a mean over all layers of the model, including dense ones."""

    heads_on_mesh: ClassVar[Literal["all", "combined", "own"]] = "all"
    """Heads that the policy sees if ranks share the heads of a layer (`Span.heads`).

    `"all"`: queries, keys and statistics of all heads, gathered before the call. This works for any
    policy and gives the selection of one device. But every rank does all the work, and receives the
    span's queries and keys, and the whole cache if the policy reads it. `"combined"`: the rank's
    own heads; the policy combines its results over `span.heads` before it makes one list for all
    heads. `"own"`: the rank's own heads; the policy makes a list for each of them.
    """

    blocks_on_mesh: ClassVar[Literal["none", "keys", "own"]] = "none"
    """Blocks that the policy sees if ranks share the blocks of a sequence (`Span.blocks`).

    `"none"`: the policy is refused. Otherwise each rank asks for lists of its own rows of a prompt,
    in two calls for its two pieces of consecutive rows. All ranks keep the same statistics, of all
    blocks, but pass only their own blocks of the cache. So a row's list must follow from the row's
    own queries, the statistics and the walk. `"keys"`: for a prompt, `update_statistics` gets the
    keys of all rows, and the queries of its own rows, on which statistics must not depend. `"own"`:
    `update_statistics` gets queries and keys of its own rows, and combines its results over
    `span.blocks` before it adds them to the statistics; `span` covers all rows.
    """

    prompt_kernels: ClassVar[str] = "selection"
    """Kernels that update statistics and select for a prompt, a name in `dispatch.KERNELS`."""

    token_kernels: ClassVar[str] = "selection"
    """Kernels that do the same for a token."""

    block_size: int = 64
    dense_layers: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        """Checks the fields that every policy has."""
        size = self.block_size
        if not isinstance(size, int) or size < 16 or size & (size - 1):
            raise ValueError(f"block_size must be a power of two of at least 16, got {size!r}")
        if not isinstance(self.dense_layers, tuple | list | set | frozenset):
            check_integer("dense_layers", self.dense_layers, least=0)
            return
        for layer in self.dense_layers:
            check_integer("dense_layers", layer, least=0)
        object.__setattr__(self, "dense_layers", tuple(sorted(set(self.dense_layers))))

    def is_dense(self, layer: int) -> bool:
        """Whether the policy attends to everything in a layer of the model."""
        dense = self.dense_layers
        return layer in dense if isinstance(dense, tuple) else layer < dense

    def for_layer(self, layer: int, num_layers: int) -> "Policy":
        """Returns the policy with its settings for one layer of a model of `num_layers`.

        Consecutive layers with equal policies share one compiled loop. All layers' statistics have
        the shapes of the policy's own.
        """
        return self

    def for_program(self, num_layers: int, num_blocks: int) -> tuple["Policy", PyTree]:
        """Separates the numbers that a program can take as arguments from the rest of the policy.

        Policies that differ only in these numbers, such as budgets, then share programs.

        Args:
          num_layers: Number of layers of the model.
          num_blocks: Number of blocks that the cache holds.

        Returns:
          The policy to compile for, and arrays for `with_numbers`; by default this policy and
          `None`.
        """
        return self, None

    def with_numbers(self, numbers: PyTree) -> Self:
        """Puts numbers of `for_program` back, as arrays that are unknown at compile time."""
        if numbers is None:
            return self
        changed = copy.copy(self)
        object.__setattr__(changed, "_numbers", numbers)
        return changed

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases in which the policy selects: a subset of `("prefill", "decode")`."""
        return ("prefill", "decode")

    @property
    def statistics_key(self) -> tuple[tuple[str, Any], ...]:
        """Fields and values that change the meaning of statistics but not their shapes.

        Only a policy with the same fields and values can continue a cache.
        """
        return ()

    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> PyTree:
        """Returns empty statistics of one layer; every leaf starts with axes `[B, J]` or `[B]`."""
        return None

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> PyTree:
        """Returns the walk before the first sparse layer."""
        return None

    def update_statistics(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: PyTree,
        *,
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> PyTree:
        """Updates the statistics with the tokens of `span`, in prefill and in decode.

        Args:
          query: Queries of the span's tokens.
          key: Keys of the span's tokens.
          statistics: Statistics of this layer so far.
          span: The tokens.
          kernel_config: Settings of the policy's kernels, or `None` for plain JAX.
        """
        return statistics

    @property
    def in_place(self) -> Any:
        """Updates one layer's statistics among those of all layers, without copying them out.

        `None`, or an object with the methods of `recommended.KeysInPlace`. Without it, a layer's
        statistics are copied out for `update_statistics` and copied back.
        """
        return None

    @abc.abstractmethod
    def select(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> tuple[BlockSelection, PyTree]:
        """Selects blocks for every query block of `span` (one row in decode); updates the walk.

        This is called only in the policy's own `phases`.

        Args:
          query: Queries of the span's tokens.
          key: The stacked cache, which already has the tokens of `span`.
          statistics: Statistics of this layer, already updated with `span`.
          walk: The walk after the previous layer.
          layer: Index of this layer in the cache.
          span: The tokens.
          kernel_config: Settings of the policy's kernels, or `None` for plain JAX.
        """

    def check_phase(self, span: Span) -> None:
        """Raises if the policy does not select in the span's phase."""
        if span.phase not in self.phases:
            raise NotImplementedError(
                f"{type(self).__name__} selects in {self.phases[0]} only; attend densely where a "
                f"policy's phases lack {span.phase!r}, as generate does"
            )

    def metadata_bytes(self, shape: LayerShape, positions: Int[Array, "B"]) -> Float[Array, "B"]:
        """Counts the bytes that selection for one token reads in one layer, without the query.

        By default, these are the statistics of all blocks up to the token's own. Policies that read
        other arrays override this.

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


def is_own(policy: Policy) -> bool:
    """Whether the policy's class is this package's."""
    return type(policy).__module__.startswith("sketchwalk_jax.")


def check_policy(policy: Any, name: str = "policy") -> None:
    """Raises unless `policy` is a policy.

    Args:
      policy: The argument.
      name: Name of the argument.

    Raises:
      ValueError: If it is not a policy, for example a policy's name.
    """
    if isinstance(policy, Policy):
        return
    named = "; sketchwalk_jax.policies.by_name makes one of a name"
    raise ValueError(
        f"{name} must be a policy such as SketchWalkConfig.recommended() or Dense(), got "
        f"{describe(policy)}{named if isinstance(policy, str) else ''}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorePolicy(Policy):
    """A policy that ranks blocks by a score and keeps the best, up to a budget.

    It lists *units* of `unit_size` tokens: blocks, or pages, or in decode also single tokens. Start
    from `BudgetPolicy` or `DecodePolicy`, which define the budget.

    Attributes:
      density: Share of the causal units of each row that is kept, in (0, 1].
      dense_layers: Leading layers that stay dense.
    """

    density: float = 0.2
    dense_layers: int | tuple[int, ...] = 2

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_number("density", self.density, "(0, 1]")

    @property
    def unit_size(self) -> int:
        """Number of tokens in one unit."""
        return self.block_size

    @property
    @abc.abstractmethod
    def forced(self) -> tuple[int, int]:
        """Number of first units and of last units that every row keeps, inside its budget."""

    @abc.abstractmethod
    def budget(self, num_units: int) -> np.ndarray:
        """Number of units that each of `num_units` rows keeps, int32 on the host, ascending."""

    def for_program(self, num_layers: int, num_blocks: int) -> tuple["ScorePolicy", PyTree]:
        """Separates the budgets; see `Policy`.

        Lists are as wide as the cache has units. If there are too many, they are as wide as an
        eighth, a quarter or a half of them where that suffices.
        """
        num_units = num_blocks * self.block_size // self.unit_size
        table = self.budget(num_units)
        shares = (1.0,) if num_units <= WIDEST_LISTS else SHARES
        density = next(share for share in shares if share * num_units >= table[-1])
        return dataclasses.replace(self, density=density), table

    def budget_table(self, num_units: int) -> tuple[Int[Any, "J"], int]:
        """Returns the budgets of all rows, and the width of lists, which is known at compile time.

        Budgets are on the host, or an argument of the program (`with_numbers`).
        """
        own = self.budget(num_units)
        return vars(self).get("_numbers", own), int(own[-1])

    def counts(self, rows: Int[Array, "B I"], num_units: int) -> Int[Array, "B I"]:
        """Number of units that the given rows keep. Padding rows count as the cache's last row."""
        return jnp.asarray(self.budget_table(num_units)[0])[jnp.minimum(rows, num_units - 1)]

    def score(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> Float[Array, "B *M I J"]:
        """Scores every unit for every row, `[B, I, J]`, or for every head, `[B, M, I, J]`.

        Scores are float32, and only their order within a row matters. Units after the row's own and
        forced units may have any score. The arguments are the same as for `select`; in decode
        `T = I = 1`. A policy that needs no score implements `select` instead.
        """
        raise NotImplementedError(f"{type(self).__name__} must have a method `score` or `select`")

    def select(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> tuple[BlockSelection, PyTree]:
        """Selects the units with the highest scores, up to each row's budget with forced ones."""
        self.check_phase(span)
        scores = self.score(query, key, statistics, layer=layer, span=span)
        rows, num_units = span.rows(self.unit_size), scores.shape[-1]
        sink, local = self.forced
        keep_best = select_blocks if scores.ndim == 3 else select_blocks_per_head
        lists = keep_best(
            scores,
            rows,
            self.counts(rows, num_units),
            sink_blocks=sink,
            local_blocks=local,
            max_count=self.budget_table(num_units)[1],
            block_size=self.unit_size,
        )
        return lists, walk


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetPolicy(ScorePolicy):
    """A policy that keeps `block_budget` blocks of every row, in prefill and in decode.

    Row `i` keeps `min(i + 1, max(sink_blocks + local_blocks, ceil(density · (i + 1))))` blocks,
    including the forced ones; a subclass scores the others.

    Attributes:
      density: Share of the causal blocks of each row that is kept, in (0, 1].
      sink_blocks: First blocks that every row keeps, inside its budget.
      local_blocks: Last blocks up to the diagonal that every row keeps, inside its budget.
      dense_layers: Leading layers that stay dense.

    Raises:
      ValueError: If a field is outside its range.
    """

    sink_blocks: int = 1
    local_blocks: int = 1

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_integer("sink_blocks", self.sink_blocks, least=0)
        check_integer("local_blocks", self.local_blocks)

    @property
    def forced(self) -> tuple[int, int]:
        """First and last blocks that every row keeps."""
        return self.sink_blocks, self.local_blocks

    def budget(self, num_units: int) -> np.ndarray:
        """Blocks that each of `num_units` rows keeps, int32 on the host, non-decreasing."""
        return block_budget(
            num_units,
            density=self.density,
            sink_blocks=self.sink_blocks,
            local_blocks=self.local_blocks,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePolicy(ScorePolicy):
    """A policy that reads prompts densely and selects for decoded tokens, per query head.

    With `n` units (pages, or single tokens) up to and including the token's own, every query head
    keeps

        min(n, max(min_units, ceil(density · n)))

    of them, like other policies do with blocks. With a `token_budget` it keeps
    `min(n, max(min_units, token_budget // unit_size))`.

    Attributes:
      density: Share of the causal units that every query head keeps, in (0, 1].
      token_budget: If given, number of tokens to keep at every step, instead of the density.
      force_current: Whether the unit that holds the current token is always kept, inside the
        budget.
      dense_layers: Leading layers that stay dense.
    """

    token_budget: int | None = None
    force_current: bool = False

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_integer("token_budget", self.token_budget, is_optional=True)
        check_flag("force_current", self.force_current)

    def for_program(self, num_layers: int, num_blocks: int) -> tuple[ScorePolicy, PyTree]:
        """Separates the budgets; see `Policy`."""
        policy, numbers = super().for_program(num_layers, num_blocks)
        if numbers is not None:
            changed: dict[str, Any] = {"token_budget": None}
            policy = dataclasses.replace(policy, **changed)
        return policy, numbers

    @property
    def phases(self) -> tuple[str, ...]:
        """Decode only; prompts are read densely."""
        return ("decode",)

    @property
    def forced(self) -> tuple[int, int]:
        """The unit that holds the current token, if it is always kept."""
        return 0, int(self.force_current)

    @property
    def min_units(self) -> int:
        """Minimum number of units to keep, if there are as many."""
        return 1

    def budget(self, num_units: int) -> np.ndarray:
        """Number of units that a head keeps of `1 .. num_units`, int32 on the host, ascending."""
        tokens = self.token_budget
        return block_budget(
            num_units,
            density=self.density,
            top_blocks=None if tokens is None else tokens // self.unit_size,
            local_blocks=self.min_units,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPolicy(Policy):
    """A policy that selects in prefill, with one list per query head, and decodes densely.

    It has no density: the share that it keeps depends on the model and the prompt. One of its
    fields, the *threshold*, makes it keep more or less.
    `sketchwalk_jax.evaluation.calibrate` finds the value for a density.

    Attributes:
      block_size: Tokens per block.
      dense_layers: Leading layers that stay dense.
      threshold_field: Name of the field with the threshold; larger values keep more.
      threshold_range: Smallest value of the threshold, and a value that keeps (nearly) everything.
      floor: Name of the field with the minimum number of tokens to keep, which `relaxed` lowers;
        `None` if there is no such field.
    """

    threshold_field: ClassVar[str]
    threshold_range: ClassVar[tuple[float, float]]
    floor: ClassVar[str | None] = None

    @property
    def phases(self) -> tuple[str, ...]:
        """Prefill only: decode attends to everything."""
        return ("prefill",)

    @property
    def threshold_value(self) -> float:
        """The value of the threshold."""
        return float(getattr(self, self.threshold_field))

    def with_threshold(self, value: float) -> Self:
        """Returns the policy with another threshold."""
        fields: dict[str, Any] = {self.threshold_field: value}
        return dataclasses.replace(self, **fields)

    def with_traced(self, value: Float[Array, ""], floor: Int[Array, ""] | None = None) -> Self:
        """Returns the policy with a threshold and a floor that are unknown at compile time.

        Args:
          value: The threshold; not checked, because a program cannot.
          floor: The floor; ignored if the policy has none. Default: unchanged.
        """
        changed = copy.copy(self)
        object.__setattr__(changed, self.threshold_field, value)
        if floor is not None and self.floor is not None:
            object.__setattr__(changed, self.floor, floor)
        return changed

    @property
    def floor_value(self) -> int:
        """The value of the floor; 0 if there is none."""
        return 0 if self.floor is None else int(getattr(self, self.floor))

    def relaxed(self) -> Self | None:
        """Lowers the floor, for densities below the threshold's range; `None` if there is none."""
        return None
