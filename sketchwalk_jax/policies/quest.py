"""Quest (arXiv:2406.10774): ranks pages by a bound on their inner products with the query."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import DecodePolicy, LayerShape, Span
from sketchwalk_jax.precision import matmul_precision
from sketchwalk_jax.pytree import register
from sketchwalk_jax.validation import check_integer


@register
@dataclasses.dataclass(frozen=True)
class PageBounds:
    """Smallest and largest key of each page, channel by channel, in the type of the keys.

    Attributes:
      lowest: Minima `[B, J, K, H]`; the type's largest number for pages without tokens.
      highest: Maxima `[B, J, K, H]`; the type's smallest number for pages without tokens.
    """

    lowest: Float[Array, "B J K H"]
    highest: Float[Array, "B J K H"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestConfig(DecodePolicy):
    """Keeps the pages that may hold the keys with the largest inner products.

    `lowest` and `highest` are the extremes of a page's keys in each channel. The page's score for a
    query is `Σ_d max(q_d · lowest_d, q_d · highest_d)`, at least `q · k` for every key `k` of the
    page. Every query head keeps the pages with the highest scores: a share of them (`density`) or
    `token_budget // block_size`, and at least `min_pages`. The extremes take `2 / block_size` of
    the bytes of the keys, an eighth by default.

    Prompts are read densely. By default the current page is always kept, as in the authors'
    kernels. Their evaluation does not keep it (`force_current=False`), which can cost much accuracy
    because the bound ignores how recent a page is.

    Attributes:
      block_size: Tokens per page.
      density: Share of the causal pages that every query head keeps, in (0, 1]; rounded up.
      token_budget: If given, number of tokens to keep at every step, instead of the density.
      min_pages: Minimum number of pages to keep.
      force_current: Whether the current page is always kept, inside the budget.
      dense_layers: Leading layers that stay dense.

    Raises:
      ValueError: If a field is outside its range.

    Example:
      >>> QuestConfig(token_budget=1024).budget(100)[-1]
      np.int32(64)
      >>> QuestConfig(density=0.1).phases
      ('decode',)
    """

    heads_on_mesh = "own"
    blocks_on_mesh = "keys"

    block_size: int = 16
    min_pages: int = 3
    force_current: bool = True

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_integer("min_pages", self.min_pages)

    @property
    def min_units(self) -> int:
        """Minimum number of pages to keep."""
        return self.min_pages

    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> PageBounds:
        """Returns the bounds of pages without tokens."""
        size = (batch, num_blocks, shape.num_kv_heads, shape.head_dim)
        largest = _largest(shape.dtype)
        return PageBounds(
            jnp.full(size, largest, shape.dtype), jnp.full(size, -largest, shape.dtype)
        )

    def update_statistics(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: PageBounds,
        *,
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> PageBounds:
        """Widens the bounds of the span's pages by its keys."""
        batch, tokens = span.valid.shape
        size = min(self.block_size, tokens)  # 1 in decode, where a span may start inside a page
        num_pages, pages = tokens // size, span.rows(self.block_size)
        sequence = jnp.arange(batch, dtype=jnp.int32)[:, None]
        key = key.astype(statistics.lowest.dtype).reshape(batch, num_pages, size, *key.shape[2:])
        is_key = span.valid.reshape(batch, num_pages, size, 1, 1)
        largest = _largest(key.dtype)
        lowest = jnp.min(jnp.where(is_key, key, largest), axis=2)
        highest = jnp.max(jnp.where(is_key, key, -largest), axis=2)
        return PageBounds(
            statistics.lowest.at[sequence, pages].min(lowest, mode="drop"),
            statistics.highest.at[sequence, pages].max(highest, mode="drop"),
        )

    def score(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PageBounds,
        *,
        layer: Int[Array, ""],
        span: Span,
    ) -> Float[Array, "B N 1 J"]:
        """Computes the bound of every page, for every query head."""
        return page_scores(query, statistics)[:, :, None]


def _largest(dtype: DTypeLike) -> float:
    """The largest number of a type: infinity would raise an error with `jax_debug_infs`."""
    return float(jnp.finfo(dtype).max)


def page_scores(query: Float[Array, "B 1 N H"], bounds: PageBounds) -> Float[Array, "B N J"]:
    """Upper bounds of every page's inner products with the query, per query head.

    `Σ_d max(q_d · lowest_d, q_d · highest_d) = max(q, 0) · highest + min(q, 0) · lowest`.

    Args:
      query: Queries of the current token.
      bounds: Extremes of the pages; the scores of empty pages are meaningless.

    Returns:
      Scores, float32.
    """
    batch, _, num_heads, head_dim = query.shape
    kv_heads = bounds.lowest.shape[2]
    grouped = query.astype(bounds.lowest.dtype).reshape(batch, kv_heads, -1, head_dim)

    def product(part: Array, bound: Array) -> Float[Array, "B K G J"]:
        return jnp.einsum(
            "bkgh,bjkh->bkgj",
            part,
            bound,
            precision=matmul_precision(bound),
            preferred_element_type=jnp.float32,
        )

    scores = product(jnp.maximum(grouped, 0), bounds.highest)
    scores += product(jnp.minimum(grouped, 0), bounds.lowest)
    return scores.reshape(batch, num_heads, -1)
