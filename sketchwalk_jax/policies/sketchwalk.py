"""Sketch-and-Walk: Algorithms 1 and 2 (arXiv:2602.07397), except the attention itself.

`SketchWalkConfig` is a frozen configuration with named presets, and the policy that it configures.
`update_statistics` is steps 1-4 of Algorithm 1 (2 and 3 of Algorithm 2), and `select` is steps 5-7
(3 to 6). Each step is a separate function (`sketch`, `walk`, `selection`), chosen by a field.
`KernelConfig` determines how fast this runs, and changes results only by rounding.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import MAX_POWER, KernelConfig
from sketchwalk_jax.pallas_kernels.top_k import api as top_k
from sketchwalk_jax.pallas_kernels.walk import api as walk_kernels
from sketchwalk_jax.policies.base import BudgetPolicy, LayerShape, Span
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.policies.released import ReleasedConfig
from sketchwalk_jax.pytree import register
from sketchwalk_jax.selection import BlockSelection, select_blocks
from sketchwalk_jax.sketch import (
    block_means,
    block_scores,
    block_sums,
    head_means,
    project,
    sketch_size,
    srht_matrix,
)
from sketchwalk_jax.validation import check_choice, check_integer, check_number
from sketchwalk_jax.walk import WalkState, walk_step

Transition = Literal["power", "relu_power", "softmax"]

_TRANSITIONS = ("power", "relu_power", "softmax")


@register
@dataclasses.dataclass(frozen=True)
class SketchSums:
    """Running sums of head means of queries and keys in sketch space.

    Attributes:
      query: Sums over the queries of each block, float32 `[B, J, 1, R]`.
      key: The same for keys.
    """

    query: Float[Array, "B J 1 R"]
    key: Float[Array, "B J 1 R"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchWalkConfig(BudgetPolicy):
    r"""Sketch-and-Walk block selection (arXiv:2602.07397, sections 2.2, 2.3 and Algorithms 1, 2).

    Queries and keys are averaged over heads and over the tokens of a block. With these
    means `q̄[i]` and `k̄[j]` and the sketch `Ω` (a random projection), the block scores are
    `A[i, j] = (q̄[i] Ω)(k̄[j] Ω)ᵀ / sqrt(H)` for `j <= i`. A transition turns the scores into `W`
    (element-wise power) or `P` (causal row softmax). The walk carries the scores from layer to
    layer: its state in layer `k` is `R_k = R_{k-1} W_k` (equation 1), or with damping
    `X ← (1 - β) P + β X P`.

    Row `i` (a query block) keeps the `count[i]` best key blocks of `R_k[i]`, with `count[i] =
    min(i + 1, max(sink_blocks + local_blocks, ceil(density · (i + 1))))`.

    Instances are hashable. Pass them to `jax.jit` as static arguments.

    Attributes:
      block_size: Tokens per block (a power of two, at least 16).
      sketch_dim: Number of columns of the sketch, a subsampled randomised Hadamard transform. With
        `None`, or a value not below the padded head dimension, there is no projection.
      seed: Seed of the random transform.
      transition: `"power"` is `A ** exponent`, `"relu_power"` is `max(A, 0) ** exponent`, and
        `"softmax"` is the causal row softmax of `A`.
      exponent: The power `s` of the two power transitions, at most 32.
      walk_degree: Number of walk steps per layer.
      beta: Damping. `None` is the plain product. 0 keeps no memory of earlier layers (one hop).
        Values in (0, 1) need the softmax transition, whose rows sum to one.
      density: Fraction of the causal blocks of each row that is kept, in (0, 1].
      sink_blocks: Number of first blocks that every row keeps. They count towards its budget.
      local_blocks: Number of last blocks, up to the row's own, that every row keeps. They count
        towards its budget.
      dense_layers: Layers with dense attention: the number of leading ones, or a tuple of layer
        indices. They neither read nor write the walk.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> SketchWalkConfig.paper(density=0.1).exponent
      8
    """

    blocks_on_mesh = "own"

    sketch_dim: int | None = 64
    seed: int = 0
    transition: Transition = "power"
    exponent: int = 8
    walk_degree: int = 1
    beta: float | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_integer("sketch_dim", self.sketch_dim, is_optional=True)
        check_choice("transition", self.transition, _TRANSITIONS)
        check_integer("seed", self.seed, least=0)
        check_integer("exponent", self.exponent)
        check_integer("walk_degree", self.walk_degree)
        if self.exponent > MAX_POWER:
            raise ValueError(f"exponent must be at most {MAX_POWER}, got {self.exponent}")
        if self.beta is not None:
            check_number("beta", self.beta, "[0, 1)")
            if self.beta != 0 and self.transition != "softmax":
                raise ValueError(
                    "beta must be None or 0 unless transition is 'softmax' (damping needs rows "
                    f"that sum to one), got beta={self.beta!r} with transition={self.transition!r}"
                )

    @classmethod
    def paper(cls, **overrides: Any) -> "SketchWalkConfig":
        """Makes the method as printed: `R_k = R_{k-1} W_k` with `W = A ** 8`, scores of head means.

        Args:
          **overrides: Fields to change, such as `density=0.1`.
        """
        return cls(**overrides)

    @classmethod
    def damped(cls, **overrides: Any) -> "SketchWalkConfig":
        """Makes softmax transitions with damping: `X ← (1 - β) P + β X P`, with β = 0.25.

        Args:
          **overrides: Fields to change, such as `density=0.1`.
        """
        return cls(**{"transition": "softmax", "beta": 0.25, **overrides})

    @classmethod
    def one_hop(cls, **overrides: Any) -> "SketchWalkConfig":
        """Makes the ablation without a walk: `R_k = P`, so each layer selects by its own scores.

        Args:
          **overrides: Fields to change, such as `density=0.1`.
        """
        return cls(**{"transition": "softmax", "beta": 0.0, **overrides})

    @classmethod
    def released(cls, **overrides: Any) -> ReleasedConfig:
        """Makes the rule of the authors' published code, in another class, `ReleasedConfig`.

        Args:
          **overrides: Fields of `ReleasedConfig` to change.
        """
        return ReleasedConfig(**overrides)

    @classmethod
    def recommended(cls, **overrides: Any) -> RecommendedConfig:
        """Makes the recommended policy, in another class, `RecommendedConfig`.

        It loses far fewer answers than the method as printed. Its lists hold pages of 16 keys.

        Args:
          **overrides: Fields of `RecommendedConfig` to change, such as `density=0.1`, or
            `max_kl=0.02` in place of a density.

        Raises:
          ValueError: If both are given.
        """
        if {"density", "max_kl"} <= overrides.keys() and overrides["max_kl"] is not None:
            raise ValueError(
                f"density must be left out with max_kl, which chooses it, got "
                f"{overrides['density']!r}"
            )
        return RecommendedConfig(**overrides)

    # State.

    @property
    def statistics_key(self) -> tuple[tuple[str, Any], ...]:
        """The fields that define the sketch."""
        return ("sketch_dim", self.sketch_dim), ("seed", self.seed)

    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> SketchSums:
        """Returns sums of zero in sketch space."""
        size = (batch, num_blocks, 1, sketch_size(shape.head_dim, self.sketch_dim))
        return SketchSums(jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.float32))

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> WalkState:
        """Returns the walk before the first sparse layer."""
        return WalkState.zeros(batch, num_rows, num_blocks)

    # Algorithm 1 steps 1-4; Algorithm 2 steps 2 and 3.

    def update_statistics(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: SketchSums,
        *,
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> SketchSums:
        """Adds the span's tokens to the sums."""
        omega = self._omega(query)
        valid = span.valid if span.blocks is None else span.blocks.own(span.valid, axis=1)
        size = min(self.block_size, valid.shape[1])  # 1 in decode: a token is its own sum
        new = None
        if kernel_config is not None:
            new = walk_kernels.sketch_sums(
                query, key, valid, omega=omega, block_size=size, kernel_config=kernel_config
            )
        if new is None:
            means = head_means(query), head_means(key)
            one, other = (project(block_sums(x, valid, size), omega) for x in means)
            new = one, other
        if span.blocks is not None:
            new = span.blocks.gather(new[0], axis=1), span.blocks.gather(new[1], axis=1)
        return SketchSums(
            _add_blocks(statistics.query, new[0], span.first_block),
            _add_blocks(statistics.key, new[1], span.first_block),
        )

    # Algorithm 1 steps 5-7; Algorithm 2 steps 3-6.

    def select(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: SketchSums,
        walk: WalkState,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> tuple[BlockSelection, WalkState]:
        """Scores, walk and top-τ: selects blocks for every query block, or the decoded token.

        The mean query represents a query block; in decode, the token's mean over heads does.
        """
        num_blocks = statistics.key.shape[1]
        rows, (budget, max_count) = span.rows(self.block_size), self.budget_table(num_blocks)
        omega = self._omega(query)
        if span.is_token and kernel_config is not None:
            selected = walk_kernels.select_token(
                query,
                statistics.query,
                statistics.key,
                walk,
                positions=span.positions,
                budget=budget,
                max_count=max_count,
                omega=omega,
                **self._walk_rule,
                **self._list_rule,
                kernel_config=kernel_config,
            )
            if selected is not None:
                return selected
        query_means = block_means(statistics.query, span.end, self.block_size)
        key_means = block_means(statistics.key, span.end, self.block_size)
        if span.is_token:
            is_row = jnp.arange(num_blocks, dtype=jnp.int32)[None, :] == rows
            token = project(head_means(query), omega)
            query_means = jnp.where(is_row[:, :, None, None], token, query_means)
        scores = block_scores(query_means, key_means, query.shape[-1])
        precision = walk_kernels.walk_precision(kernel_config)
        selecting, walk = walk_step(walk, scores, rows, **self._walk_rule, precision=precision)
        counts = self.counts(rows, num_blocks)
        lists = dict(self._list_rule, max_count=max_count)
        selection = None
        if kernel_config is not None:
            selection = top_k.select_blocks(
                selecting, rows, counts, **lists, kernel_config=kernel_config
            )
        return selection or select_blocks(selecting, rows, counts, **lists), walk

    @property
    def _walk_rule(self) -> dict[str, Any]:
        """Arguments of `walk_step`, or of the kernels that replace it."""
        names = ("transition", "exponent", "walk_degree", "beta")
        return {name: getattr(self, name) for name in names}

    @property
    def _list_rule(self) -> dict[str, Any]:
        """Arguments of `select_blocks`, or of the kernels that replace it."""
        names = ("sink_blocks", "local_blocks", "block_size")
        return {name: getattr(self, name) for name in names}

    def _omega(self, query: Float[Array, "B T N H"]) -> Float[np.ndarray, "H R"] | None:
        return srht_matrix(query.shape[-1], self.sketch_dim, self.seed)


def _add_blocks(
    total: Float[Array, "B J 1 R"], new: Float[Array, "B I 1 R"], first_block: Int[Array, "B"]
) -> Float[Array, "B J 1 R"]:
    """Adds sums to the blocks from `first_block` on. Blocks beyond the last one are dropped."""
    num_rows = new.shape[1]
    sequence = jnp.arange(total.shape[0], dtype=jnp.int32)[:, None]
    if num_rows == 1:
        return total.at[sequence, first_block[:, None]].add(new, mode="drop")
    # Unlike a scatter, this fuses with the operations before and after.
    row = jnp.arange(total.shape[1], dtype=jnp.int32)[None, :] - first_block[:, None]
    is_new = (row >= 0) & (row < num_rows)
    added = new[sequence, jnp.clip(row, 0, num_rows - 1)]
    return total + jnp.where(is_new[:, :, None, None], added, 0.0)
