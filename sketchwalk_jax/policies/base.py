"""The interface between prediction (which blocks?) and attention (over which blocks).

A *policy* turns queries, keys and its own state into a `BlockSelection`; one set of attention
kernels then attends over the listed blocks, whatever policy listed them. Two kinds of state exist:

* *statistics*, one set per layer, live in the cache beside K and V and grow with the sequence
  (sums of queries and keys in sketch space, say);
* the *walk* crosses layers within one call and starts afresh with the next.

`Policy` is the interface. What a rule needs of it decides where it starts: `BudgetPolicy` and
`DecodePolicy` write a score and get their lists made of it, `PrefillPolicy` lists blocks itself and
is set to a density by a knob. `README.md` beside this file has an example.
"""

import abc
import copy
import dataclasses
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

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


@register
@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens that one call adds to the sequences: those of a prompt, or one of each in decode.

    Tokens of a prompt are laid out on absolute block boundaries: column `t` of the call's arrays
    stands for position `first_block · block_size + t`. A single decoded token stands at `end - 1`,
    anywhere in its block.

    Attributes:
      first_block: Block of the first row, int32 `[B]`.
      valid: Which columns hold a token of the sequence, bool `[B, T]`; the others are padding.
      end: Tokens in the cache once this call has been written, int32 `[B]`.
      prompt_end: Tokens in the cache once the whole prompt has been written, int32 `[B]`; later
        than `end` while a prompt is being read in chunks.
      heads: How the heads are spread over ranks, each of which makes this call for its own; `None`
        where they are all here.
      blocks: How the rows of a prompt are spread over ranks; `None` where they are all here.
    """

    first_block: Int[Array, "B"]
    valid: Bool[Array, "B T"]
    end: Int[Array, "B"]
    prompt_end: Int[Array, "B"]
    heads: Heads | None = dataclasses.field(default=None, metadata={"static": True})
    blocks: Blocks | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of_tokens(
        cls, positions: Int[Array, "B"], block_size: int, active: Bool[Array, "B"] | None = None
    ) -> "Span":
        """One decoded token of each sequence, at `positions`; inactive ones are padding."""
        active = jnp.ones(positions.shape, bool) if active is None else active
        return cls(positions // block_size, active[:, None], positions + 1, positions + 1)

    @property
    def is_token(self) -> bool:
        """Whether this is one token of each sequence, as decoding adds them."""
        return self.valid.shape[1] == 1

    @property
    def phase(self) -> str:
        """`"prefill"` or `"decode"`."""
        return "decode" if self.is_token else "prefill"

    @property
    def positions(self) -> Int[Array, "B"]:
        """The last token's position in each sequence: in decode, the one token's."""
        return self.end - 1

    def start(self, block_size: int) -> Int[Array, "B"]:
        """Position of column 0 of the call's arrays in each sequence."""
        return self.positions if self.is_token else self.first_block * block_size

    def rows(self, block_size: int) -> Int[Array, "B I"]:
        """Absolute block indices of the call's query blocks; in decode of the token's own block."""
        if self.is_token:
            return (self.positions // block_size)[:, None]
        num_rows = self.valid.shape[1] // block_size
        return self.first_block[:, None] + jnp.arange(num_rows, dtype=jnp.int32)[None, :]

    def queries_of_rows(self, block_size: int) -> tuple[Int[Array, "B I"], Int[Array, "B I"]]:
        """Position of the first query of each row, and how many queries the row has.

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


class TokenWrite(NamedTuple):
    """A decoded token's values, and where they and its keys go.

    Attributes:
      value: The values.
      keys: Keys of all layers.
      values: Values of all layers.
      layer: The layer.
    """

    value: Float[Array, "B 1 K H"]
    keys: Float[Array, "L B S K H"]
    values: Float[Array, "L B S K H"]
    layer: Int[Array, ""]


def take_layer(stacked: PyTree, layer: Int[Array, ""]) -> PyTree:
    """A copy of one layer's arrays, of those of all on a leading axis."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stacked)


@runtime_checkable
class InPlace(Protocol):
    """Statistics of all layers on a leading axis, of which no layer is taken out to change it.

    A policy may have one (`Policy.in_place`); without it, a layer's statistics are copied out for
    `Policy.observe` and put back.
    """

    def observe(
        self,
        key: Float[Array, "B T K H"],
        statistics: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernel_config: KernelConfig | None,
        write: TokenWrite | None = None,
    ) -> tuple[Any, ...] | None:
        """`Policy.observe` in one of all layers.

        Args:
          key: Keys of the span's tokens.
          statistics: Those of all layers so far.
          layer: Which of them the tokens are added to.
          span: The tokens.
          kernel_config: What kernels run with, or `None` for plain JAX.
          write: Where a decoded token's keys and values are written in the same launch.

        Returns:
          The statistics of all layers, and behind them with `write` the caches of keys and values;
          or `None` where the call cannot be taken.
        """

    def of_layer(self, statistics: PyTree, layer: Int[Array, ""]) -> PyTree:
        """What `Policy.select` takes of one layer, of the statistics of all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(abc.ABC):
    """A rule that selects key blocks. Subclasses are frozen, hashable dataclasses.

    A policy without a memory writes `select` alone: by default there are neither statistics nor a
    walk.

    Attributes:
      block_size: Tokens per block.
      dense_layers: Layers that attend to everything: how many leading ones, or a tuple of the
        indices of any.
    """

    counts_dense_layers: ClassVar[bool] = False
    """Whether a density means all layers of the model, dense ones included."""

    heads_on_mesh: ClassVar[Literal["all", "combined", "own"]] = "all"
    """What the policy sees on ranks that share the heads of a layer (`Span.heads`).

    `"all"`: queries, keys and statistics of all heads, gathered before it is asked. Any policy
    works so, and selects what it selects on one device; every rank does all of the work, and
    receives queries and keys of the span, and the whole cache if the policy reads it. `"combined"`:
    those of the rank's own heads; it puts what it finds together, over `span.heads`, before it
    makes one list for all heads. `"own"`: those of the rank's own heads, for each of which it makes
    a list.
    """

    blocks_on_mesh: ClassVar[Literal["none", "keys", "own"]] = "none"
    """What the policy sees on ranks that share the blocks of a sequence (`Span.blocks`).

    `"none"`: it is refused there. Otherwise ranks ask it for lists of different rows of a prompt,
    each for the two stretches of rows that are its own, one after the other; all have the same
    statistics, which they keep of all blocks; and the cache that it is given has this rank's blocks
    alone. So a row's list must follow from the row's own queries, the statistics and the walk.
    `"keys"`: it observes, of a prompt, keys of all rows, and the queries of its own rows, on which
    statistics must not depend. `"own"`: it observes queries and keys of its own rows, and puts what
    it finds together, over `span.blocks`, before it adds it to the statistics; `span` is that of
    all rows.
    """

    prompt_kernels: ClassVar[str] = "selection"
    """Which kernels observe and select for a prompt, one of the names in `dispatch.KERNELS`."""

    token_kernels: ClassVar[str] = "selection"
    """Which ones do so for a token."""

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
        """Whether a layer of the model attends to everything."""
        dense = self.dense_layers
        return layer in dense if isinstance(dense, tuple) else layer < dense

    def for_layer(self, layer: int, num_layers: int) -> "Policy":
        """The policy as it selects in one layer of a model of `num_layers`.

        Neighbouring layers for which it is equal share one compiled loop. Every layer keeps
        statistics of one shape, those of the policy itself.
        """
        return self

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases in which the policy selects: a subset of `("prefill", "decode")`."""
        return ("prefill", "decode")

    @property
    def statistics_key(self) -> tuple[tuple[str, Any], ...]:
        """Fields, each with its value, that change what statistics mean but not their shapes.

        A cache is continued only by a policy with the same ones.
        """
        return ()

    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> PyTree:
        """Empty statistics of one layer; every leaf starts with axes `[B, J]` or `[B]`."""
        return None

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> PyTree:
        """The state that crosses layers, before the first sparse layer."""
        return None

    def observe(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: PyTree,
        *,
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> PyTree:
        """Statistics after the tokens of `span`, in prefill and in decode alike.

        Args:
          query: Queries of the span's tokens.
          key: Their keys.
          statistics: Those of this layer so far.
          span: The tokens.
          kernel_config: What the policy's kernels run with, or `None` for plain JAX.
        """
        return statistics

    @property
    def in_place(self) -> "InPlace | None":
        """How statistics are kept where they lie, for a policy whose kernels do that."""
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
        """Blocks for every query block of `span` (one row in decode), and the next layer's walk.

        Called in the policy's own `phases` only.

        Args:
          query: Queries of the span's tokens.
          key: The stacked cache, already holding the tokens of `span`.
          statistics: Those of this layer, which have observed the span.
          walk: The state that the last layer left.
          layer: This layer's index in the cache.
          span: The tokens.
          kernel_config: What the policy's kernels run with, or `None` for plain JAX.
        """

    def check_phase(self, span: Span) -> None:
        """Raises for a call in a phase in which the policy does not select."""
        if span.phase not in self.phases:
            raise NotImplementedError(
                f"{type(self).__name__} selects in {self.phases[0]} only; attend densely where a "
                f"policy's phases lack {span.phase!r}, as generate does"
            )

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


def check_policy(policy: Any, name: str = "policy") -> None:
    """Raises unless something is a policy.

    Args:
      policy: What was given.
      name: Of the argument.

    Raises:
      ValueError: If it is something else, such as a policy's name.
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
    """A policy that ranks what it lists by a score: the best are kept, as many as the budget says.

    What is listed are *units* of `unit_size` tokens: blocks, or in decode also pages or single
    tokens. Start from `BudgetPolicy` or `DecodePolicy`, which say what the budget is.

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
        """Tokens in one unit of the lists."""
        return self.block_size

    @property
    @abc.abstractmethod
    def forced(self) -> tuple[int, int]:
        """First and last units that every row keeps, inside its budget."""

    @abc.abstractmethod
    def budget(self, num_units: int) -> np.ndarray:
        """Units that each of `num_units` rows keeps, int32 on the host, non-decreasing."""

    def counts(self, rows: Int[Array, "B I"], num_units: int) -> Int[Array, "B I"]:
        """Units that the given rows keep; padding rows beyond the cache count as its last."""
        return jnp.asarray(self.budget(num_units))[jnp.minimum(rows, num_units - 1)]

    def score(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> Float[Array, "B *M I J"]:
        """The score of every unit for every row, `[B, I, J]`, or for every head, `[B, M, I, J]`.

        Only the order within a row matters, float32; what lies after the row's own unit, and what
        is forced, may score anything. The arguments are those of `select`; in decode `T = I = 1`.
        A rule that knows its lists without a score writes `select` instead.
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
        """The units with the highest scores, up to each row's budget, forced ones included."""
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
            max_count=int(self.budget(num_units)[-1]),
            block_size=self.unit_size,
        )
        return lists, walk


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetPolicy(ScorePolicy):
    """A policy that keeps `block_budget` blocks of every row, in prefill and in decode.

    Row `i` keeps `min(i + 1, max(sink_blocks + local_blocks, ceil(density · (i + 1))))` blocks, the
    forced ones among them; a subclass scores the others.

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

    of them, as other policies do of blocks, or with a `token_budget`
    `min(n, max(min_units, token_budget // unit_size))`.

    Attributes:
      density: Share of the causal units that every query head keeps, in (0, 1].
      token_budget: When given, tokens to keep at every step, in place of the density.
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

    @property
    def phases(self) -> tuple[str, ...]:
        """It selects in decode; prompts are read densely."""
        return ("decode",)

    @property
    def forced(self) -> tuple[int, int]:
        """The unit that holds the current token, if it is always kept."""
        return 0, int(self.force_current)

    @property
    def min_units(self) -> int:
        """Fewest units to keep, where there are as many."""
        return 1

    def budget(self, num_units: int) -> np.ndarray:
        """Units that a head keeps of `1 .. num_units`, int32 on the host, non-decreasing."""
        tokens = self.token_budget
        return block_budget(
            num_units,
            density=self.density,
            top_blocks=None if tokens is None else tokens // self.unit_size,
            local_blocks=self.min_units,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPolicy(Policy):
    """A policy that selects while prompts are read, one list per query head; it decodes densely.

    Such a policy has no density of its own: how much it keeps depends on the model and the prompt.
    One of its fields, the *knob*, makes it keep more or less, and
    `sketchwalk_jax.evaluation.calibrate` finds the value that a density takes.

    Attributes:
      block_size: Tokens per block.
      dense_layers: Leading layers that stay dense.
      knob: Name of the field that sets how much is kept; more with larger values.
      knob_range: Its least value, and one that keeps (nearly) everything.
      floor: Name of the field with the least that is kept, in tokens, which `relaxed` lowers; None
        without any.
    """

    knob: ClassVar[str]
    knob_range: ClassVar[tuple[float, float]]
    floor: ClassVar[str | None] = None

    @property
    def phases(self) -> tuple[str, ...]:
        """Prefill only: decoding attends to everything."""
        return ("prefill",)

    @property
    def knob_value(self) -> float:
        """What the knob is set to."""
        return float(getattr(self, self.knob))

    def with_knob(self, value: float) -> Self:
        """The policy with its knob at another value."""
        fields: dict[str, Any] = {self.knob: value}
        return dataclasses.replace(self, **fields)

    def with_traced(self, value: Float[Array, ""], floor: Int[Array, ""] | None = None) -> Self:
        """With knob and floor at values that are not known when a program is compiled.

        Args:
          value: The knob; unchecked, as no program can be.
          floor: The floor, of no effect where the policy has none; as it is by default.
        """
        changed = copy.copy(self)
        object.__setattr__(changed, self.knob, value)
        if floor is not None and self.floor is not None:
            object.__setattr__(changed, self.floor, floor)
        return changed

    @property
    def floor_value(self) -> int:
        """What the floor is set to; 0 without any."""
        return 0 if self.floor is None else int(getattr(self, self.floor))

    def relaxed(self) -> Self | None:
        """With lower floors, for densities that the knob does not reach; None without any."""
        return None
