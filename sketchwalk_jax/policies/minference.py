"""MInference (arXiv:2407.02490): one pattern per head, filled in from the last queries."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies import lines
from sketchwalk_jax.policies.base import PrefillPolicy, PyTree, Span, take_layer
from sketchwalk_jax.precision import LARGEST
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.validation import check_choice, check_integer, check_number

Pattern = Literal["vertical_and_slash", "block_sparse", "stream"]

_PATTERNS = ("vertical_and_slash", "block_sparse", "stream")
_LAST_QUERIES = 64
_FIRST_COLUMNS, _NEAR_OFFSETS = 30, 100  # always kept, if the sizes allow
_LEAST_VERTICAL, _LEAST_SLASH = 30, 50
_FULL_SCALE = 64.0  # keeps everything of prompts of up to 32K tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class MInferenceConfig(PrefillPolicy):
    """Keeps the columns and diagonals to which the last 64 queries attend, per query head.

    Let `A = softmax(q[-m:] kᵀ / sqrt(H))` be the causal attention of the last `m = min(64, n)`
    queries of a prompt of `n` tokens. The pattern `vertical_and_slash` keeps

    * the `v = min(n, max(scale · vertical, 30))` keys with the largest column sums of `A`, the
      first 30 keys before all others;
    * the `s = min(n, max(scale · slash, 50))` offsets `o` with the largest sums along diagonals,
      the nearest 100 before all others. For an offset, the queries of block `i` attend to the keys
      `block_size · i - o + (0 .. block_size - 1)`.

    Attention works on blocks, so columns and ranges are extended to whole blocks. The measured
    density counts the attended pairs, which are several times the rule's pairs if those are few.

    The pattern `block_sparse` keeps the `scale · top_blocks` blocks with the largest products of
    mean query and mean key. The pattern `stream` keeps the first `scale · sink_tokens` and the last
    `scale · local_tokens` keys of every query.

    Every head has the same pattern and sizes, as in the published table for Llama-3.1-8B. Decoding
    is dense. If a prompt is read in chunks or continues a cache, each chunk is estimated from its
    own last queries. Ties go to the first key and the nearest offset.

    Attributes:
      block_size: Tokens per block; 64 in the paper.
      dense_layers: Leading layers that stay dense; none in the paper.
      pattern: `"vertical_and_slash"`, `"block_sparse"` or `"stream"`.
      vertical: Number of columns to keep, in tokens.
      slash: Number of offsets to keep, in tokens.
      top_blocks: Number of blocks that `block_sparse` keeps in every row.
      sink_tokens: Number of first keys that `stream` keeps.
      local_tokens: Number of last keys that `stream` keeps, including the query's own.
      scale: Factor of these sizes, at least 0: the threshold that sets the density. The nominal
        density of (512, 2048) is .78 at 4K tokens, .26 at 16K, .07 at 64K.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> MInferenceConfig(scale=0.5).phases
      ('prefill',)
    """

    heads_on_mesh = "own"

    threshold_field: ClassVar[str] = "scale"
    threshold_range: ClassVar[tuple[float, float]] = (0.0, _FULL_SCALE)

    pattern: Pattern = "vertical_and_slash"
    vertical: int = 512
    slash: int = 2048
    top_blocks: int = 100
    sink_tokens: int = 100
    local_tokens: int = 800
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_choice("pattern", self.pattern, _PATTERNS)
        for name in ("vertical", "slash", "top_blocks", "sink_tokens", "local_tokens"):
            check_integer(name, getattr(self, name))
        check_number("scale", self.scale, "[0, inf)")

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
        """Selects the blocks that the pattern touches, for every query head and query block."""
        self.check_phase(span)
        size, rows = self.block_size, span.rows(self.block_size)
        num_blocks = key.shape[2] // size
        causal = lines.row_mask(span, num_blocks, size)
        if self.pattern == "stream":
            return lines.lists_of(self._stream(causal, rows), size), walk
        keys = take_layer(key, layer)
        if self.pattern == "block_sparse":
            mask = self._best_blocks(query, keys, causal, span)
            return lines.lists_of(mask, size), walk
        last = lines.last_queries(query, span, block_size=size, count=_LAST_QUERIES)
        columns, offsets = self._kept_lines(*last, keys, span.end)
        # For offset `o`, row `i` reads the blocks `i - floor(o / size)` and `i - ceil(o / size)`.
        later = jnp.pad(offsets, ((0, 0), (0, 0), (size - 1, 0)))[..., : offsets.shape[-1]]
        distances = lines.any_in_block(offsets | later, size)
        mask = lines.lines_to_blocks(lines.any_in_block(columns, size), distances, rows)
        return lines.lists_of(mask & causal, size), walk

    def _scaled(self, size: int, least: int = 1) -> Int[Array, ""]:
        scaled = jnp.round(float(size) * jnp.asarray(self.scale, jnp.float32))
        return jnp.maximum(scaled.astype(jnp.int32), least)

    def _kept_lines(
        self,
        last: Float[Array, "B M N H"],
        is_query: Bool[Array, "B M"],
        keys: Float[Array, "B S K H"],
        end: Int[Array, "B"],
    ) -> tuple[Bool[Array, "B N S"], Bool[Array, "B N S"]]:
        """Marks the columns and the offsets to keep."""
        vertical, slash = lines.line_sums(last, keys, is_query, end)
        index = jnp.arange(vertical.shape[-1], dtype=jnp.int32)[None, None, :]
        exists = index < end[:, None, None]

        def keep(sums: Array, num_forced: int, count: Int[Array, ""]) -> Bool[Array, "B N S"]:
            ranked = jnp.where(index < num_forced, LARGEST, sums)
            place = lines.places(jnp.where(exists, ranked, -LARGEST))
            return exists & (place < count)

        columns = keep(vertical, _FIRST_COLUMNS, self._scaled(self.vertical, _LEAST_VERTICAL))
        by_offset = lines.from_the_end(slash, end)
        return columns, keep(by_offset, _NEAR_OFFSETS, self._scaled(self.slash, _LEAST_SLASH))

    def _best_blocks(
        self,
        query: Float[Array, "B T N H"],
        keys: Float[Array, "B S K H"],
        causal: Bool[Array, "B 1 I J"],
        span: Span,
    ) -> Bool[Array, "B N I J"]:
        size = self.block_size
        means = lines.mean_pool(query, span.valid, size)
        exists = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, :] < span.end[:, None]
        scores = lines.head_products(means, lines.mean_pool(keys, exists, size))
        place = lines.places(jnp.where(causal, jnp.maximum(scores, -LARGEST), -LARGEST))
        return causal & (place < self._scaled(self.top_blocks))

    def _stream(
        self, causal: Bool[Array, "B 1 I J"], rows: Int[Array, "B I"]
    ) -> Bool[Array, "B 1 I J"]:
        size = self.block_size
        sink, local = self._scaled(self.sink_tokens), self._scaled(self.local_tokens)
        columns = jnp.arange(causal.shape[-1], dtype=jnp.int32)[None, None, :]
        # The first query of row `i` reaches back to the key `size · i - (local - 1)`.
        is_near = rows[:, :, None] - columns <= (local - 1 + size - 1) // size
        return causal & ((columns * size < sink) | is_near)[:, None]
