"""FlexPrefill (arXiv:2502.20766): keeps the keys that cover a share of the attention."""

import dataclasses
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies import lines
from sketchwalk_jax.policies.base import PrefillPolicy, PyTree, Span, take_layer
from sketchwalk_jax.precision import LARGEST, MASK_VALUE
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.validation import check_integer, check_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexPrefillConfig(PrefillPolicy):
    """Keeps lines or blocks that cover a share `gamma` of the attention, per query head.

    With blocks of `B` tokens, let `A = softmax(q[-B:] kᵀ / sqrt(H))` be the causal attention of the
    last `B` queries:

    * `vertical`, the mean of `A` over its rows, and `slash`, the sums of `A` along diagonals over
      `B`, are distributions over keys and over distances. Each gets a budget of `t // B + 1`
      blocks, `t = count(cumulative sum of the descending values <= gamma) + 1`, clamped to
      `[min_budget, max_budget] / B`.
    * The block distribution of mean query and mean keys, `softmax(q̄ k̄ᵀ / sqrt(H))`, is compared
      with `vertical` summed over blocks. If the Jensen-Shannon distance (the root of the divergence
      in nats, `0 log 0 = 0`) is at least `tau`, the head keeps the best blocks of `vertical` and
      the best block diagonals of `slash`.
    * Otherwise the head is *query-aware*. It keeps the same with the minimum budget. In addition it
      keeps the largest entries of the causal map `softmax(q̄ᵢ k̄ᵀ / sqrt(H))` of all query blocks,
      while their cumulative sum is at most `gamma` times the number of query blocks.

    Every row keeps block 0 and the diagonal, inside the budgets. A prompt of at most
    `max(2 B, ceil(min_budget / B) B)` tokens is dense, and so is decoding. If a prompt is read in
    chunks or continues a cache, each chunk is estimated from its own last queries and query blocks.

    Attributes:
      block_size: Tokens per block; 128 in the paper, here 64 by default.
      dense_layers: Leading layers that stay dense; none in the paper.
      gamma: Share of the attention to cover, in [0, 1]: the threshold that sets the density. The
        paper uses 0.9, and 0.95 for Llama on RULER.
      tau: Distance below which a head is query-aware; with 0 no head is.
      min_budget: Minimum budget of lines, in tokens; 512 in the paper, and 1024 on RULER.
      max_budget: Maximum budget of lines, in tokens; None for no limit.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> FlexPrefillConfig(gamma=0.95, min_budget=1024, block_size=128).tau
      0.1
    """

    heads_on_mesh = "own"

    threshold_field: ClassVar[str] = "gamma"
    threshold_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    floor: ClassVar[str | None] = "min_budget"

    gamma: float = 0.9
    tau: float = 0.1
    min_budget: int = 512
    max_budget: int | None = None

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_number("gamma", self.gamma, "[0, 1]")
        check_number("tau", self.tau, "[0, inf)")
        check_integer("min_budget", self.min_budget)
        check_integer("max_budget", self.max_budget, is_optional=True)

    def relaxed(self) -> Self | None:
        """Returns the policy with half the minimum budget, down to one block."""
        if self.min_budget <= self.block_size:
            return None
        return dataclasses.replace(self, min_budget=max(self.block_size, self.min_budget // 2))

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
        """Selects the blocks that every query head keeps for every query block."""
        self.check_phase(span)
        size, keys = self.block_size, take_layer(key, layer)
        num_blocks = keys.shape[1] // size
        last, is_query = lines.last_queries(query, span, block_size=size, count=size)
        num_queries = jnp.maximum(jnp.sum(is_query, axis=1, dtype=jnp.float32), 1.0)
        vertical, slash = (
            sums / num_queries[:, None, None]
            for sums in lines.line_sums(last, keys, is_query, span.end)
        )
        exists = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :] < span.end[:, None]
        key_means = lines.mean_pool(keys, exists, size)
        by_block = jnp.sum(vertical.reshape(*vertical.shape[:2], num_blocks, size), axis=-1)
        is_aware = self._is_query_aware(last, is_query, key_means, by_block, span)

        ends = (span.end + size - 1) // size
        kept_columns = self._keep(by_block, self._budget(vertical, ends), is_aware)
        diagonals = jnp.sum(slash.reshape(*slash.shape[:2], num_blocks, size), axis=-1)
        diagonals = lines.from_the_end(diagonals, ends)
        kept_diagonals = self._keep(diagonals, self._budget(slash, ends), is_aware)

        causal = lines.row_mask(span, num_blocks, size)
        mask = lines.lines_to_blocks(kept_columns, kept_diagonals, span.rows(size))
        if self.tau > 0:
            query_means = lines.mean_pool(query, span.valid, size)
            mask |= self._best_pairs(query_means, key_means, causal, is_aware)
        mask |= (span.prompt_end <= self._dense_tokens)[:, None, None, None]
        return lines.lists_of(mask & causal, size), walk

    @property
    def _least_blocks(self) -> Int[Array, ""]:
        # During calibration, the budget is a traced number.
        return -(-jnp.asarray(self.min_budget, jnp.int32) // self.block_size)

    @property
    def _dense_tokens(self) -> Int[Array, ""]:
        """Maximum number of tokens of a prompt that is dense."""
        return jnp.maximum(self._least_blocks, 2) * self.block_size

    def _budget(self, weights: Float[Array, "B N S"], ends: Int[Array, "B"]) -> Int[Array, "B N"]:
        """Number of blocks that cover `gamma` of a distribution over tokens, clamped."""
        covered = jnp.cumsum(-jnp.sort(-weights, axis=-1), axis=-1)
        # Clip rounding errors, so that `gamma = 1` keeps everything.
        is_within = jnp.minimum(covered, 1.0) <= self.gamma
        tokens = jnp.sum(is_within, axis=-1, dtype=jnp.int32) + 1
        most = ends[:, None]
        if self.max_budget is not None:
            most = jnp.minimum(most, math.ceil(self.max_budget / self.block_size))
        blocks = tokens // self.block_size + 1
        return jnp.minimum(jnp.maximum(blocks, self._least_blocks), most)

    def _keep(
        self,
        weights: Float[Array, "B N J"],
        budget: Int[Array, "B N"],
        is_aware: Bool[Array, "B N"],
    ) -> Bool[Array, "B N J"]:
        """Keeps the best lines up to the budget; the first line always comes first."""
        budget = jnp.where(is_aware, self._least_blocks, budget)
        is_first = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, None, :] == 0
        return lines.places(jnp.where(is_first, LARGEST, weights)) < budget[:, :, None]

    def _is_query_aware(
        self,
        last: Float[Array, "B M N H"],
        is_query: Bool[Array, "B M"],
        key_means: Float[Array, "B J K H"],
        by_block: Float[Array, "B N J"],
        span: Span,
    ) -> Bool[Array, "B N"]:
        """Whether the mean query and mean keys nearly reproduce the tokens' distribution."""
        mean = lines.mean_pool(last, is_query, self.block_size)  # [B 1 N H]
        scores = lines.head_products(mean, key_means)[:, :, 0]
        columns = jnp.arange(by_block.shape[-1], dtype=jnp.int32)[None, :]
        exists = (columns * self.block_size < span.end[:, None])[:, None, :]
        estimate = jax.nn.softmax(jnp.where(exists, scores, -LARGEST), axis=-1)
        return jensen_shannon_distance(estimate, by_block) < self.tau

    def _best_pairs(
        self,
        query_means: Float[Array, "B I N H"],
        key_means: Float[Array, "B J K H"],
        causal: Bool[Array, "B 1 I J"],
        is_aware: Bool[Array, "B N"],
    ) -> Bool[Array, "B N I J"]:
        """Keeps the largest entries of the block map, in query-aware heads; head by head."""
        group = query_means.shape[2] // key_means.shape[2]
        causal = causal[:, 0]
        num_rows = jnp.sum(jnp.any(causal, axis=-1), axis=-1, dtype=jnp.float32)

        def of_head(head: tuple[Array, Array, Array]) -> Bool[Array, "B I J"]:
            index, query_mean, aware = head

            def find() -> Bool[Array, "B I J"]:
                keys = jnp.take(key_means, index // group, axis=2)[:, :, None]
                scores = lines.head_products(query_mean[:, :, None], keys)[:, 0]
                weights = jax.nn.softmax(jnp.where(causal, scores, MASK_VALUE), axis=-1)
                weights = jnp.where(causal, weights, 0.0)
                ordered = -jnp.sort(-weights.reshape(weights.shape[0], -1), axis=-1)
                everything = num_rows[:, None]
                covered = jnp.minimum(jnp.cumsum(ordered, axis=-1), everything)
                is_within = covered <= self.gamma * everything
                count = jnp.sum(is_within, axis=-1, dtype=jnp.int32)[:, None]
                last = jnp.take_along_axis(ordered, jnp.maximum(count - 1, 0), axis=-1)
                least = jnp.where(aware[:, None] & (count > 0), last, LARGEST)
                return weights >= least[:, :, None]

            return jax.lax.cond(jnp.any(aware), find, lambda: jnp.zeros_like(causal))

        heads = jnp.arange(query_means.shape[2], dtype=jnp.int32)
        found = jax.lax.map(of_head, (heads, jnp.moveaxis(query_means, 2, 0), is_aware.T))
        return jnp.moveaxis(found, 0, 1)


def jensen_shannon_distance(
    p: Float[Array, "*lead J"], q: Float[Array, "*lead J"]
) -> Float[Array, "*lead"]:
    """Computes `sqrt((KL(p ‖ m) + KL(q ‖ m)) / 2)`, `m = (p + q) / 2`, in nats; `0 log 0 = 0`.

    Args:
      p: A distribution over the last axis.
      q: Another distribution over the last axis.

    Returns:
      The distance, in `[0, sqrt(log 2)]`.
    """
    mean = 0.5 * (p + q)

    def divergence(x: Array) -> Float[Array, "*lead"]:
        ratio = jnp.where(x > 0, x, 1.0) / jnp.where(x > 0, mean, 1.0)
        return jnp.sum(x * jnp.log(ratio), axis=-1)

    return jnp.sqrt(jnp.maximum(0.5 * (divergence(p) + divergence(q)), 0.0))
