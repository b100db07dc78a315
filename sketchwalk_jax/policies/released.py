"""The rule of the authors' published code, which differs from Algorithms 1 and 2 as printed.

It is implemented from a description of the code. It scores per head without a projection, and sees
later blocks (its softmax has no causal mask). It depends on the length of the prompt, so chunked
prefill selects other blocks than one-shot prefill. Its density cannot be set.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import LayerShape, Policy, Span
from sketchwalk_jax.policies.lines import lists_of
from sketchwalk_jax.precision import LARGEST
from sketchwalk_jax.pytree import register
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.sketch import block_sums
from sketchwalk_jax.validation import check_integer, check_number
from sketchwalk_jax.walk import HIGHEST, WalkState


@register
@dataclasses.dataclass(frozen=True)
class HeadSums:
    """Statistics of `ReleasedConfig`: per-head block sums, and the latest queries.

    Attributes:
      query: Sums of each block's queries, float32 `[B, J, N, H]`.
      key: Sums of each block's keys, float32 `[B, J, K, H]`.
      recent: The latest queries, at index `position % decode_queries`, float32 `[B, W, N, H]`.
    """

    query: Float[Array, "B J N H"]
    key: Float[Array, "B J K H"]
    recent: Float[Array, "B W N H"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleasedConfig(Policy):
    """Per-head block softmax, a damped three-step walk, and a quantile rule.

    `P` is the mean over query heads of `softmax(logit_scale · q̄ k̄ᵀ / sqrt(H))` over all blocks;
    `S = R_{k-1}` (`P` at first); then `walk_steps` times `S ← (1 - damping) P + damping · S P`;
    `R_k = S`. With `n` tokens, row `i` keeps the blocks of the first `sink_fraction · n` tokens, of
    the `recent_fraction · n` tokens before it, and its own. It also keeps the blocks above the
    `quantile` of `S[i]` among the causal blocks after the first `skip_fraction · n` tokens. The
    prompt's last `dense_rows` rows keep everything. Decode keeps no state across layers: its row
    pools the last `decode_queries` queries.

    Logits that are not finite are ignored. Since the softmax sees later blocks, a NaN token changes
    the lists of rows before it, as every token does here; it never makes them NaN.

    Attributes:
      logit_scale: Factor of the logits.
      walk_steps: Walk steps per layer.
      damping: Weight of the walked scores.
      sink_fraction: Share of tokens at the start that every row keeps.
      recent_fraction: Share of tokens before a row that it keeps.
      skip_fraction: Share of tokens at the start that the quantile ignores.
      quantile: Quantile above which a block is kept, in (0, 1).
      dense_rows: Number of last rows of a prompt that keep everything.
      decode_queries: Number of queries pooled in decode.
      dense_layers: Leading layers that stay dense.

    Raises:
      ValueError: If a field is outside its range.
    """

    logit_scale: float = 1.28
    walk_steps: int = 3
    damping: float = 0.25
    sink_fraction: float = 0.05
    recent_fraction: float = 0.05
    skip_fraction: float = 0.025
    quantile: float = 0.875
    dense_rows: int = 4
    decode_queries: int = 32
    dense_layers: int | tuple[int, ...] = 2

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        for name in ("damping", "sink_fraction", "recent_fraction", "skip_fraction", "quantile"):
            check_number(name, getattr(self, name), "[0, 1)")
        for name, least in (("walk_steps", 1), ("dense_rows", 0), ("decode_queries", 1)):
            check_integer(name, getattr(self, name), least=least)
        check_number("logit_scale", self.logit_scale, "(0, inf)")

    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> HeadSums:
        """Returns sums of zero."""

        def zeros(length: int, heads: int) -> Array:
            return jnp.zeros((batch, length, heads, shape.head_dim), jnp.float32)

        return HeadSums(
            zeros(num_blocks, shape.num_heads),
            zeros(num_blocks, shape.num_kv_heads),
            zeros(self.decode_queries, shape.num_heads),
        )

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> WalkState:
        """Returns the walk before the first sparse layer."""
        return WalkState.zeros(batch, num_rows, num_blocks)

    def update_statistics(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: HeadSums,
        *,
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> HeadSums:
        """Adds the span's tokens to the sums, and stores the latest queries."""
        batch, tokens = span.valid.shape
        size = min(self.block_size, tokens)
        sequence = jnp.arange(batch, dtype=jnp.int32)[:, None]
        blocks = span.rows(self.block_size)

        def add(total: Array, x: Array) -> Array:
            new = block_sums(x.astype(jnp.float32), span.valid, size)
            return total.at[sequence, blocks].add(new, mode="drop")

        slot = jnp.arange(self.decode_queries, dtype=jnp.int32)[None, :]
        latest = span.positions[:, None]
        position = latest - (latest - slot) % self.decode_queries
        column = position - span.start(self.block_size)[:, None]
        inside = jnp.clip(column, 0, tokens - 1)
        is_new = (column >= 0) & jnp.take_along_axis(span.valid, inside, axis=1)
        fresh = jnp.take_along_axis(query, inside[:, :, None, None], axis=1).astype(jnp.float32)
        return HeadSums(
            add(statistics.query, query),
            add(statistics.key, key),
            jnp.where(is_new[:, :, None, None], fresh, statistics.recent),
        )

    def _transition(
        self,
        query: Float[Array, "B I N H"],
        key_sums: Float[Array, "B J K H"],
        exists: Bool[Array, "B J"],
    ) -> Float[Array, "B I J"]:
        """Computes `P`, the mean block softmax of heads, one head at a time to save memory.

        Logits that are not finite are ignored, so a head with no others adds nothing.
        """
        num_heads, head_dim = query.shape[2:]
        group = num_heads // key_sums.shape[2]
        keys = key_sums / float(self.block_size)
        scale = self.logit_scale / math.sqrt(head_dim)

        def add_head(total: Array, head: Array) -> tuple[Array, None]:
            one_query = jax.lax.dynamic_index_in_dim(query, head, axis=2, keepdims=False)
            one_key = jax.lax.dynamic_index_in_dim(keys, head // group, axis=2, keepdims=False)
            logits = jnp.einsum("bih,bjh->bij", one_query, one_key, precision=HIGHEST) * scale
            counts = exists[:, None] & jnp.isfinite(logits)
            shares = jax.nn.softmax(jnp.where(counts, logits, -LARGEST))
            return total + jnp.where(counts, shares, 0.0), None

        shape = (query.shape[0], query.shape[1], key_sums.shape[1])
        heads = jnp.arange(num_heads, dtype=jnp.int32)
        start = jnp.zeros_like(query, jnp.float32, shape=shape)
        total, _ = jax.lax.scan(add_head, start, heads)
        return total / float(num_heads)

    def _walk(
        self, start: Float[Array, "B I J"], rows: Float[Array, "B I J"], matrix: Array
    ) -> Float[Array, "B I J"]:
        for _ in range(self.walk_steps):
            moved = jnp.einsum("bim,bmj->bij", start, matrix, precision=HIGHEST)
            start = (1.0 - self.damping) * rows + self.damping * moved
        return start

    def _keep(
        self,
        scores: Float[Array, "B I J"],
        rows: Int[Array, "B I"],
        num_tokens: Int[Array, "B"],
        is_dense: Bool[Array, "B I"],
    ) -> BlockSelection:
        num_blocks = scores.shape[-1]

        def blocks(fraction: float, *, up: bool) -> Int[Array, "B 1 1"]:
            tokens = fraction * num_tokens.astype(jnp.float32)
            count = jnp.ceil(tokens / self.block_size) if up else tokens // self.block_size
            return count.astype(jnp.int32)[:, None, None]

        column = jnp.arange(num_blocks, dtype=jnp.int32)[None, None, :]
        row = rows[..., None]
        causal = column <= row
        is_sink = column < blocks(self.sink_fraction, up=True)
        is_recent = column >= row - blocks(self.recent_fraction, up=True)
        is_candidate = causal & (column >= blocks(self.skip_fraction, up=False))
        # `nanquantile` ignores NaN.
        threshold = jnp.nanquantile(
            jnp.where(is_candidate, scores, jnp.nan),
            jnp.asarray(self.quantile, jnp.float32),
            axis=-1,
            keepdims=True,
        )
        is_kept = is_sink | is_recent | (is_candidate & (scores > threshold)) | is_dense[..., None]
        is_kept &= causal
        return lists_of(is_kept[:, None], self.block_size)

    def select(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: HeadSums,
        walk: WalkState,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> tuple[BlockSelection, WalkState]:
        """Selects for every query block and updates the walk; a token leaves it unchanged."""
        rows, num_blocks = span.rows(self.block_size), statistics.key.shape[1]
        starts = jnp.arange(num_blocks, dtype=jnp.int32) * self.block_size
        exists = starts[None, :] < span.end[:, None]
        matrix = self._transition(statistics.query / self.block_size, statistics.key, exists)
        if span.is_token:
            pooled = jnp.sum(statistics.recent, axis=1, keepdims=True)  # unused slots are zero
            count = jnp.minimum(span.end, self.decode_queries).astype(jnp.float32)
            own = self._transition(pooled / count[:, None, None, None], statistics.key, exists)
            is_row = jnp.arange(num_blocks, dtype=jnp.int32)[None, :, None] == rows[:, :, None]
            scores = self._walk(own, own, jnp.where(is_row, own, matrix))
            return self._keep(scores, rows, span.end, jnp.zeros(rows.shape, bool)), walk
        reachable = jnp.minimum(rows, num_blocks - 1)
        own = jnp.take_along_axis(matrix, reachable[:, :, None], axis=1)
        start = jnp.where(walk.layers == 0, own, walk.scores)
        scores = self._walk(start, own, matrix)
        prompt_blocks = (span.prompt_end + self.block_size - 1) // self.block_size
        is_dense = rows >= (prompt_blocks - self.dense_rows)[:, None]
        selection = self._keep(scores, rows, span.end, is_dense)
        return selection, WalkState(scores, walk.layers + 1)
