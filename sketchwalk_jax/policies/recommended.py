"""Sketch-and-Walk that loses almost nothing: sharp scores of single keys, remembered across layers.

The framework is the paper's: summarise, score blocks, combine across layers, attend exactly over one
list that all heads share. Its parts are replaced by what real models need:

* A row of queries is summarised by its mean and by the queries least like it and each other, not
  by the mean alone: one token of 64 may be the one that asks.
* A block of keys is seen key by key, in the rotary channels that turn slowly. These tell tokens
  apart by what they are and not by where they stand; a mean over a page hides a single key.
* Scores are sharpened before they are put together: a softmax over blocks for each head and query,
  then the largest share. A retrieval is one head of one query, outvoted in any sum.
* The walk is memory of evidence: a block that a layer looked at stays likely in the next ones.
"""

import dataclasses
import functools
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.attention.mass import block_scores
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import BudgetPolicy, LayerShape, Span
from sketchwalk_jax.selection import BlockSelection, select_blocks
from sketchwalk_jax.validation import check_choice, check_integer, check_number
from sketchwalk_jax.walk import WalkState

PyTree = Any
CHANNELS = ("slow", "all")

# Largest share of a row's budget that it gives up for what earlier rows took beyond the density.
_REPAID = Fraction(1, 5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecommendedConfig(BudgetPolicy):
    r"""Sketch-and-Walk with token-level evidence (`SketchWalkConfig.recommended`).

    With representative queries `q_{r, h}` of row `i` (`representative_queries`; in decode the
    token's own), the score of block `j` and the walk of layer `k` are

        S[i, j] = max_{r, h} softmax_j( max_{s in block j} q_{r, h} · k_s / sqrt(H) )
        R_k = max(S_k, decay · R_{k-1})

    where the products run over `channels`. Row `i` keeps the best blocks of `R_k[i]`, the forced
    ones among them, as many as `budget` says: the floor of early rows is made up for later, so that
    prompts of more than a few thousand tokens measure the density that was asked for.

    Attributes:
      block_size: Tokens per block (a power of two, at least 16).
      density: Share of all causal blocks to keep, over all layers, dense ones included, in (0, 1].
      sink_blocks: First blocks that every row keeps, inside its budget.
      local_blocks: Last blocks up to the diagonal that every row keeps, inside its budget.
      min_blocks: Blocks that every row keeps, where there are as many.
      representatives: Queries that stand for a row, its mean among them.
      channels: `"slow"`, the half of the rotary channels that turns slowest, or `"all"`.
      decay: What remains of a block's evidence from one layer to the next, in [0, 1); 0 for none.
      dense_layers: Layers that attend to everything; the others get so much less.
      num_layers: Layers of the model, which `for_layer` sets; dense layers are not accounted for
        without.

    Raises:
      ValueError: If a field is outside its range, or dense layers alone exceed the density.

    Example:
      >>> RecommendedConfig(density=0.1).budget(256)[[0, 3, 63, 255]]
      array([ 1,  4,  5, 26], dtype=int32)
    """

    local_blocks: int = 3
    min_blocks: int = 5
    representatives: int = 8
    channels: str = "slow"
    decay: float = 0.7
    dense_layers: int | tuple[int, ...] = 0
    num_layers: int | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_integer("min_blocks", self.min_blocks)
        check_integer("representatives", self.representatives)
        if self.representatives > self.block_size:
            raise ValueError(
                f"representatives must be at most the {self.block_size} queries of a block, got "
                f"{self.representatives}"
            )
        check_choice("channels", self.channels, CHANNELS)
        check_number("decay", self.decay, "[0, 1)")
        check_integer("num_layers", self.num_layers, is_optional=True)
        if self.num_layers is not None and self._sparse_density <= 0:
            raise ValueError(
                f"density must exceed the share of dense layers, got {self.density} with "
                f"dense_layers={self.dense_layers} of {self.num_layers}"
            )

    def for_layer(self, layer: int, num_layers: int) -> "RecommendedConfig":
        """The policy that knows how many layers there are."""
        return dataclasses.replace(self, num_layers=num_layers)

    @property
    def _sparse_density(self) -> Fraction:
        """Density of the sparse layers with which all layers together have the nominal one."""
        density = Fraction(repr(float(self.density)))
        if self.num_layers is None:
            return density
        dense = sum(self.is_dense(layer) for layer in range(self.num_layers))
        return (density * self.num_layers - dense) / max(1, self.num_layers - dense)

    def budget(self, num_units: int) -> Int[np.ndarray, "J"]:
        """Blocks that each of `num_units` rows keeps, int32 on the host."""
        least = max(self.min_blocks, self.sink_blocks + self.local_blocks)
        return even_budget(num_units, density=self._sparse_density, least=least)

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> WalkState:
        """No evidence yet."""
        return WalkState.zeros(batch, num_rows, num_blocks)

    def metadata_bytes(self, shape: LayerShape, positions: Int[Array, "B"]) -> Float[Array, "B"]:
        """It reads the channels of every key."""
        size = len(self._channels(shape.head_dim)) * jnp.dtype(shape.dtype).itemsize
        return (positions + 1).astype(jnp.float32) * float(shape.num_kv_heads * size)

    def _channels(self, head_dim: int) -> np.ndarray:
        return np.arange(head_dim) if self.channels == "all" else slow_channels(head_dim)

    def select(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: WalkState,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernels: KernelConfig | None = None,
    ) -> tuple[BlockSelection, WalkState]:
        """The blocks with the most evidence, for every query block or for the decoded token."""
        size = self.block_size
        rows = span.rows(size)
        if span.is_token:
            queries = query[:, None]
        else:
            queries = representative_queries(
                query, span.valid, block_size=size, count=self.representatives
            )
        scores = block_scores(
            queries,
            key,
            rows,
            block_size=size,
            layer=layer,
            kv_lengths=span.end,
            channels=None if self.channels == "all" else self._channels(query.shape[-1]),
        )
        evidence = jnp.maximum(scores, self.decay * walk.scores)
        num_blocks = scores.shape[-1]
        budget = self.budget(num_blocks)
        lists = select_blocks(
            evidence,
            rows,
            jnp.asarray(budget)[jnp.minimum(rows, num_blocks - 1)],
            sink_blocks=self.sink_blocks,
            local_blocks=self.local_blocks,
            max_count=int(budget.max()),
            block_size=size,
        )
        return lists, WalkState(evidence, walk.layers + 1)


def slow_channels(head_dim: int) -> Int[np.ndarray, "H2"]:
    """The half of a head's channels that the rotary embedding turns slowest.

    Channels `d` and `d + H/2` turn together, with a frequency that falls with `d`.

    Example:
      >>> slow_channels(8).tolist()
      [2, 3, 6, 7]
    """
    half = head_dim // 2
    slow = np.arange(half // 2, half)
    return np.concatenate([slow, slow + half])


def representative_queries(
    query: Float[Array, "B T N H"], valid: Bool[Array, "B T"], *, block_size: int, count: int
) -> Float[Array, "B I R N H"]:
    """Queries that stand for those of each row, for every head: its mean, and the farthest ones.

    Farthest-point traversal (Gonzalez 1985) by the cosine: after the mean, the query whose largest
    cosine with those taken is least, `count - 1` times. Queries that are not valid or not finite
    are never taken; where there are no more, the mean is taken again.

    Args:
      query: Queries; column 0 begins a row.
      valid: Which of them are the sequence's.
      block_size: Queries of a row.
      count: Representatives `R`.

    Returns:
      The representatives, in the type of the queries; zeros for rows without a query.
    """
    batch, tokens, heads, head_dim = query.shape
    rows = query.reshape(batch, tokens // block_size, block_size, heads, head_dim)
    rows = jnp.moveaxis(rows, 3, 2).astype(jnp.float32)  # [B I N Q H]
    usable = valid.reshape(batch, -1, 1, block_size) & jnp.all(jnp.isfinite(rows), axis=-1)
    rows = jnp.where(usable[..., None], rows, 0.0)
    number = jnp.sum(usable, axis=-1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(rows, axis=-2) / jnp.maximum(number, 1.0)

    def unit(x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-30))

    directions = unit(rows)
    taken, nearest = [mean], jnp.full(usable.shape, -jnp.inf, jnp.float32)
    newest = unit(mean)
    for _ in range(count - 1):
        cosine = jnp.einsum(
            "binqh,binh->binq", directions, newest, precision=jax.lax.Precision.HIGHEST
        )
        nearest = jnp.where(usable, jnp.maximum(nearest, cosine), jnp.inf)
        place = jnp.argmin(nearest, axis=-1)[..., None, None]
        found = jnp.take_along_axis(rows, place, axis=-2)[..., 0, :]
        newest = jnp.take_along_axis(directions, place, axis=-2)[..., 0, :]
        is_left = jnp.take_along_axis(nearest, place[..., 0], axis=-1) < jnp.inf
        usable = usable & (jnp.arange(block_size) != place[..., 0])
        taken.append(jnp.where(is_left, found, mean))
    return jnp.stack(taken, axis=2).astype(query.dtype)  # [B I R N H]


@functools.lru_cache(maxsize=64)
def even_budget(num_blocks: int, *, density: Fraction, least: int) -> Int[np.ndarray, "J"]:
    """How many blocks each row keeps, so that all rows together keep the density.

    Half of a row's own block lies in the future: of `c` blocks in row `i`, `c - 1/2` count, and the
    causal ones are `i + 1/2`. So a row keeps `density · (i + 1/2) + 1/2` blocks, rounded, and
    `least` at least, where there are as many. What earlier rows kept beyond the density is given back by later ones, each a fifth of its
    own at most. A row's budget depends on its place alone, never on the length of the prompt.

    Args:
      num_blocks: Rows.
      density: Share of all causal blocks.
      least: Fewest blocks of a row.

    Returns:
      int32 `[num_blocks]` on the host, read-only.

    Example:
      >>> even_budget(128, density=Fraction(1, 10), least=4)[[3, 20, 63, 127]].tolist()
      [4, 4, 5, 13]
    """
    counts, excess, half = np.zeros(num_blocks, np.int32), Fraction(0), Fraction(1, 2)
    for row in range(num_blocks):
        wanted = density * (row + half) + half
        given_back = min(max(excess, Fraction(0)), wanted * _REPAID)
        counts[row] = min(row + 1, max(least, round(wanted - given_back)))
        excess += int(counts[row]) - wanted
    counts.setflags(write=False)
    return counts
