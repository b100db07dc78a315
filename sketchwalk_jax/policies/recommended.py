"""The recommended form of Sketch-and-Walk: scores of single keys, kept across layers.

It follows the paper's framework: summarise, score blocks, combine across layers, and attend exactly
over one list that all heads share. It replaces the parts by others that real models need:

* A row (query block) is represented by its mean and by the queries farthest from it and from each
  other, not only by the mean. One token of 64 may be the one that retrieves.
* Each key of a block is scored, in the rotary channels that rotate slowly, quantized to four bits
  relative to the block's zero point (`quantized_keys`). These channels tell tokens apart by
  content, not by position. A mean over a block would hide a single key.
* Scores are sharpened before they are combined: first by a softmax for each head and query, then by
  a norm, with an exponent as in the paper. A retrieval is one head of one query. A sum would
  outvote it, and a maximum would ignore pages that many heads attend to a little.
* The walk remembers page scores: a page with a high score stays likely in the next layers.

Lists hold pages of 16 keys, a quarter of a block. The keys that a query needs seldom span more than
a page, so the same number of keys reaches four times as many places.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.key_quantization import api as key_quantization
from sketchwalk_jax.pallas_kernels.top_k import api as top_k
from sketchwalk_jax.plan import PHASES, TEXT_MARGIN, TYPICAL_LOSSES, Plan, least_densities
from sketchwalk_jax.policies.base import (
    SHARES,
    WIDEST_LISTS,
    LayerShape,
    PyTree,
    ScorePolicy,
    Span,
    TokenWrite,
    take_layer,
)
from sketchwalk_jax.policies.quantized_keys import LayerKeys, QuantizedKeys, block_scores
from sketchwalk_jax.policies.ranks import Heads
from sketchwalk_jax.precision import LARGEST, default_scale
from sketchwalk_jax.selection import BlockSelection, select_blocks
from sketchwalk_jax.validation import check_integer, check_number, describe
from sketchwalk_jax.walk import WalkState

# Powers below 1e-38 vanish; with this exponent, powers of softmax weights below 1e-5 do.
_MAX_EXPONENT = 8
# A layer to which a plan gives at least this density attends to everything.
_AS_GOOD_AS_DENSE = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecommendedConfig(ScorePolicy):
    r"""The recommended policy: Sketch-and-Walk with page scores from single keys.

    `SketchWalkConfig.recommended(**fields)` makes one too. Let `q_{r, h}` be the representative
    queries of row `i` (`representative_queries`; in decode, the token's own query). The score of
    page `p` and the walk of layer `k` are

        P_{r, h}[i, p] = softmax_p( max_{s in page p} q_{r, h} · k_s / sqrt(H) )
        S[i, p] = ( Σ_{r, h} P_{r, h}[i, p]^exponent )^(1 / exponent)
        R_k = max(S_k, decay · R_{k-1})

    The products use only `slow_channels`, and the keys as `QuantizedKeys` quantizes them. Row `i`
    (a query block) keeps the best pages of `R_k[i]`, including the pages that every row keeps.
    `budgets` gives their number: `density` of the keys before the row, and at least `min_tokens`.
    So short prompts measure more than `density`: for 0.1, it is 0.52 with 4,096 tokens, 0.28 with
    8,192, 0.15 with 16,384. Up to `min_tokens`, attention is dense. A decoded token keeps more than
    a prompt's row, since the weights, not the keys, take its time in a short cache.

    Attributes:
      block_size: Queries of a row, and keys of a block that share zero points (a power of two,
        at least 16).
      page_size: Keys of a page, the unit of lists: a power of two, at least 16. If blocks are not
        larger, lists hold whole blocks.
      density: Fraction of all causal pairs to keep, over all layers, dense ones included, in (0,
        1].
      sink_tokens: First keys that every row keeps, in whole pages. They count towards its budget.
      local_tokens: Keys before its own block that every row of a prompt keeps in addition to that
        block, in whole pages. They count towards its budget. A decoded token keeps the last
        `block_size` keys, in whole pages.
      min_tokens: Minimum number of keys that a row keeps, if there are as many: for rows of a
        prompt and for decoded tokens. One number stands for both.
      representatives: Number of queries that represent a row, including its mean. If a plan gives
        some layers more and others fewer, this is the mean over the layers.
      early_representatives: Pairs `(tokens, count)`: rows that begin before token `tokens` have at
        least `count` representatives, since budgets are small there.
      exponent: Order of the norm over heads and queries, at most 8. With 1 it adds their softmax
        weights; a large value approaches the maximum.
      decay: Factor of a page's score from one layer to the next, in [0, 1). 0 forgets all scores.
      dense_layers: Layers with dense attention: the number of leading ones, or a tuple of layer
        indices. The other layers keep correspondingly less.
      max_kl: Largest loss in nats per token and sparse phase, in place of a density: each row takes
        the least density that kept to a third of it on all texts of `sketchwalk calibrate`
        (`plan.least_densities`, `plan.TEXT_MARGIN`), by phase and position. `density` is then the
        least of them. Without a plan that has losses, `plan.TYPICAL_LOSSES` stand for them.
      plan: Density and representatives of each layer of the model. Without a plan, all layers have
        the same.
      num_layers: Number of layers of the model, set by `for_layer`. Without it, dense layers are
        not counted in the density.
      layer_representatives: Numbers of representatives that layers may have, set by `for_program`
        in place of a plan.

    Raises:
      ValueError: If a field is outside its range, dense layers alone exceed the density, or the
        plan is for a model with another number of layers.

    Example:
      >>> RecommendedConfig(density=0.1).budget(256)[[0, 3, 63, 255]]
      array([  4,  16,  80, 104], dtype=int32)
    """

    counts_dense_layers: ClassVar[bool] = True
    heads_on_mesh = "combined"
    blocks_on_mesh = "keys"
    prompt_kernels = "prompt selection"
    token_kernels = "token selection"

    page_size: int = 16
    sink_tokens: int = 16
    local_tokens: int = 32
    min_tokens: int | tuple[int, int] = (1280, 2048)
    representatives: int = 8
    early_representatives: tuple[tuple[int, int], ...] = ((8192, 32),)
    exponent: int = 8
    decay: float = 0.4
    dense_layers: int | tuple[int, ...] = 0
    max_kl: float | None = None
    plan: Plan | None = None
    num_layers: int | None = None
    layer_representatives: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Checks every field."""
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise ValueError(f"plan must be a Plan or None, got {describe(self.plan)}")
        if self.max_kl is not None:
            check_number("max_kl", self.max_kl, "(0, inf)")
            object.__setattr__(self, "max_kl", float(self.max_kl))
            used = [one for phase in PHASES for _, one in self.least_densities(phase)]
            object.__setattr__(self, "density", min(used))
        super().__post_init__()
        for name, least in (
            ("page_size", 16),
            ("sink_tokens", 0),
            ("local_tokens", 0),
        ):
            check_integer(name, getattr(self, name), least=least)
        if not isinstance(self.min_tokens, tuple):
            object.__setattr__(self, "min_tokens", (self.min_tokens,) * 2)
        if len(self.least_tokens) != 2:
            raise ValueError(f"min_tokens must have 2 numbers, got {self.min_tokens!r}")
        for count in self.least_tokens:
            check_integer("min_tokens", count)
        check_integer("representatives", self.representatives)
        check_integer("exponent", self.exponent)
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        self._check_representatives()
        if self.exponent > _MAX_EXPONENT:
            raise ValueError(f"exponent must be at most {_MAX_EXPONENT}, got {self.exponent}")
        check_number("decay", self.decay, "[0, 1)")
        check_integer("num_layers", self.num_layers, is_optional=True)
        if not isinstance(self.layer_representatives, tuple):
            raise ValueError(
                f"layer_representatives must be a tuple, got {describe(self.layer_representatives)}"
            )
        for count in self.layer_representatives:
            check_integer("layer_representatives", count)
        if self.plan is not None and self.num_layers is None:
            object.__setattr__(self, "num_layers", self.plan.num_layers)
        if self.plan is not None and self.num_layers != self.plan.num_layers:
            raise ValueError(
                f"plan must be of a model with {self.num_layers} layers, got one of "
                f"{self.plan.num_layers}"
            )
        if self.num_layers is not None:
            _ = self.layer_densities  # raises if they are impossible

    def _check_representatives(self) -> None:
        """Raises unless the numbers of representatives are possible and descend with tokens."""
        if self.representatives > self.block_size:
            raise ValueError(
                f"representatives must be at most the {self.block_size} queries of a block, got "
                f"{self.representatives}"
            )
        try:
            early = tuple((int(tokens), int(count)) for tokens, count in self.early_representatives)
        except (TypeError, ValueError):
            early = ((0, 0),)
        tokens, counts = [one for one, _ in early], [one for _, one in early]
        is_ordered = tokens == sorted(set(tokens)) and counts == sorted(set(counts), reverse=True)
        if not is_ordered or any(one < 1 for one in (*tokens, *counts)):
            raise ValueError(
                "early_representatives must be pairs (tokens, count) with ascending tokens and "
                f"descending counts, got {self.early_representatives!r}"
            )
        object.__setattr__(self, "early_representatives", early)

    @property
    def unit_size(self) -> int:
        """Number of keys in a page."""
        return min(self.page_size, self.block_size)

    @property
    def pages(self) -> int:
        """Number of pages in a block."""
        return self.block_size // self.unit_size

    @property
    def forced(self) -> tuple[int, int]:
        """Number of first pages, and of last pages of a prompt's row, that are always kept."""
        return self._in_pages(self.sink_tokens), self.pages + self._in_pages(self.local_tokens)

    @property
    def least_tokens(self) -> tuple[int, int]:
        """The two numbers of `min_tokens`."""
        found = self.min_tokens
        return found if isinstance(found, tuple) else (found, found)

    def _in_pages(self, tokens: int) -> int:
        """Number of whole pages for a number of tokens."""
        return -(-tokens // self.unit_size)

    def for_layer(self, layer: int, num_layers: int) -> "RecommendedConfig":
        """Returns the same policy with the number of layers filled in."""
        if self.num_layers == num_layers:
            return self
        return dataclasses.replace(self, num_layers=num_layers)

    def for_program(self, num_layers: int, num_blocks: int) -> tuple["RecommendedConfig", PyTree]:
        """Separates the budgets, and the representatives of each layer; see `Policy`."""
        own, num_pages = self.for_layer(0, num_layers), num_blocks * self.pages
        choices = sorted(set(own.sparse_representatives))
        numbers = {
            "prompt": own.budgets(num_blocks),
            "token": own.budgets(num_pages, is_token=True),
            "representatives": np.asarray(own.sparse_representatives, np.int32),
        }
        dense = tuple(filter(own.is_dense, range(num_layers)))
        num_sparse = num_layers - len(dense)
        numbers = {
            name: np.broadcast_to(x, (num_sparse, *x.shape[1:])) for name, x in numbers.items()
        }
        policy = dataclasses.replace(
            own,
            density=1.0,
            min_tokens=1,
            dense_layers=dense,
            max_kl=None,
            plan=None,
            layer_representatives=() if choices == [own.representatives] else tuple(choices),
        )
        if num_pages > WIDEST_LISTS and num_sparse:
            for share in SHARES:
                density = (share * num_sparse + len(dense)) / num_layers
                narrow = dataclasses.replace(policy, density=density)
                if all(
                    narrow.budgets(rows, is_token=is_token).max() >= numbers[name].max()
                    for name, rows, is_token in (
                        ("prompt", num_blocks, False),
                        ("token", num_pages, True),
                    )
                ):
                    return narrow, numbers
        return policy, numbers

    def is_dense(self, layer: int) -> bool:
        """Whether a layer is dense, by `dense_layers` or by the plan."""
        return super().is_dense(layer) or (
            self.plan is not None and self.layer_densities[layer] >= _AS_GOOD_AS_DENSE
        )

    @property
    def layer_densities(self) -> tuple[float, ...]:
        """The density of every layer. Their mean is `density`.

        If the number of layers is not known, this is the density of one layer.
        """
        return self._layer_densities(self.density)

    def _layer_densities(self, density: float) -> tuple[float, ...]:
        if self.num_layers is None:
            return (density,)
        is_dense = tuple(super(RecommendedConfig, self).is_dense(i) for i in range(self.num_layers))
        return _share_density(density, is_dense, self.plan)

    def least_densities(self, phase: str) -> tuple[tuple[int, float], ...]:
        """The densities of a phase with `max_kl`, from positions on; see `plan.least_densities`."""
        if self.max_kl is None:
            return ((0, self.density),)
        if self.plan is not None and self.plan.model_losses:
            return least_densities(self.plan.model_losses, self.max_kl / TEXT_MARGIN, phase)
        return least_densities(TYPICAL_LOSSES, self.max_kl, phase)

    @property
    def sparse_representatives(self) -> tuple[int, ...]:
        """Number of representatives of a row in every sparse layer; one entry without a plan."""
        if self.layer_representatives:
            return self.layer_representatives
        if self.plan is None or self.num_layers is None:
            return (self.representatives,)
        sparse = [i for i in range(self.num_layers) if not self.is_dense(i)]
        if not sparse:
            return (self.representatives,)
        found = self.plan.of_layers(sparse).share_representatives(self.representatives)
        return tuple(min(one, self.block_size) for one in found)

    def budget(self, num_units: int) -> Int[np.ndarray, "J"]:
        """Number of pages that each of `num_units` rows keeps, in the layer that keeps most."""
        return self.budgets(num_units).max(axis=0)

    def budgets(self, num_units: int, *, is_token: bool = False) -> Int[np.ndarray, "Ls J"]:
        """Number of pages that each row keeps in every sparse layer, int32 on the host.

        Args:
          num_units: Number of rows of a prompt. For decoded tokens it is the number of pages, and
            the result is indexed by the token's page.
          is_token: Whether a row is a decoded token.
        """
        sink, local = self.forced
        own = self.pages if is_token else local
        least = max(self._in_pages(self.least_tokens[is_token]), sink + own)
        pages = 1 if is_token else self.pages
        make = functools.partial(page_budget, num_units, pages=pages, least=least)

        def with_density(densities: tuple[float, ...]) -> Int[np.ndarray, "Ls J"]:
            if self.num_layers is not None:
                own = (one for i, one in enumerate(densities) if not self.is_dense(i))
                densities = tuple(own) or (1.0,)
            return np.stack([make(density=one) for one in densities])

        (_, first), *others = self.least_densities(PHASES[is_token])
        found = with_density(self._layer_densities(first))
        begins = np.arange(num_units) * pages * self.unit_size
        for position, one in others:
            found = np.where(begins >= position, with_density(self._layer_densities(one)), found)
        return found

    def budget_table(
        self, num_units: int, *, is_token: bool = False
    ) -> tuple[Int[Any, "Ls J"], int]:
        """Returns `budgets`, on the host or as an argument of the program, and lists' width."""
        own = self.budgets(num_units, is_token=is_token)
        numbers = vars(self).get("_numbers")
        found = own if numbers is None else numbers["token" if is_token else "prompt"]
        return found, int(own.max())

    def keeps_all(self, phase: str, first: int, end: int) -> bool:
        """Whether all tokens from position `first` to `end - 1` attend to all keys before them."""
        if self.num_layers is not None and all(map(self.is_dense, range(self.num_layers))):
            return True
        starts, densities = zip(*self.least_densities(phase), strict=True)
        first = max(first, self.least_tokens[PHASES.index(phase)])
        return all(
            density == 1.0 or min(stop, end) <= max(start, first)
            for start, stop, density in zip(starts, (*starts[1:], end), densities, strict=True)
        )

    def density_at(self, phase: str, tokens: int) -> float:
        """The density of a prompt of `tokens` tokens, or of a token decoded after as many.

        Without `max_kl` it is `density`. `min_tokens` is not counted.
        """
        starts, densities = zip(*self.least_densities(phase), strict=True)
        count = max(1, bisect.bisect_right(starts, tokens - (phase == "prefill")))
        if phase == "decode" or count == 1:
            return densities[count - 1]
        # A prompt has tokens² / 2 pairs.
        edges = np.square([*starts[:count], tokens], dtype=np.float64)
        return round(float(np.average(densities[:count], weights=np.diff(edges))), 6)

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> WalkState:
        """Returns the walk before the first sparse layer."""
        return WalkState.zeros(batch, num_rows, num_blocks * self.pages)

    def init_statistics(self, shape: LayerShape, *, batch: int, num_blocks: int) -> QuantizedKeys:
        """Returns the state without keys."""
        return QuantizedKeys.zeros(
            batch=batch,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=shape.num_kv_heads,
            num_channels=len(slow_channels(shape.head_dim)),
            dtype=shape.dtype,
        )

    def update_statistics(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: PyTree,
        *,
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> PyTree:
        """Quantizes and adds the span's keys."""
        if kernel_config is not None and isinstance(statistics, QuantizedKeys):
            only = statistics.as_layer()
            found = self.in_place.update_statistics(
                key, only.stack, layer=only.layer, span=span, kernel_config=kernel_config
            )
            if found is not None:
                return jax.tree.map(lambda x: x[0], found[0])
        return statistics.add(key[..., slow_channels(key.shape[-1])], span)

    @property
    def in_place(self) -> "KeysInPlace":
        """Lets kernels update and read one layer's keys inside the arrays of all layers."""
        return KeysInPlace()

    def select(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: PyTree,
        walk: WalkState,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> tuple[BlockSelection, WalkState]:
        """Selects the pages with the highest scores, for every query block or the decoded token.

        `statistics` may be `LayerKeys`, which kernels read in place.
        """
        if span.is_token:
            found = self._select_token(
                query, statistics, walk, span=span, kernel_config=kernel_config
            )
            if found is not None:
                return found
        rows = span.rows(self.block_size)
        score = functools.partial(
            self.page_scores,
            stored=statistics,
            kv_lengths=span.end,
            scale=default_scale(query.shape[-1]),
            heads=span.heads,
            kernel_config=kernel_config,
        )
        if span.is_token:
            scores = score(query[:, None][..., slow_channels(query.shape[-1])], rows=rows)
        else:
            scores = self._score_rows(query, span, walk.layers, score, kernel_config=kernel_config)
        page_scores = jnp.maximum(scores, self.decay * walk.scores)
        pages = span.rows(self.unit_size) if span.is_token else (rows + 1) * self.pages - 1
        lists = self.keep(
            page_scores, pages, walk.layers, is_token=span.is_token, kernel_config=kernel_config
        )
        return lists, WalkState(page_scores, walk.layers + 1)

    def _select_token(
        self,
        query: Float[Array, "B 1 N H"],
        statistics: PyTree,
        walk: WalkState,
        *,
        span: Span,
        kernel_config: KernelConfig | None,
    ) -> tuple[BlockSelection, WalkState] | None:
        """Runs all of `select` for a token in kernels; `None` if they do not support the call."""
        if isinstance(statistics, QuantizedKeys):
            statistics = statistics.as_layer()
        elif isinstance(statistics, LayerKeys):
            # The layer index equals the number of walk steps so far, and needs no counter.
            walk = WalkState(walk.scores, statistics.layer)
        if kernel_config is None or not isinstance(statistics, LayerKeys):
            return None
        stack = statistics.stack
        num_pages = stack.quantized.shape[2] * self.pages
        budgets, max_count = self.budget_table(num_pages, is_token=True)
        return top_k.select_token_by_page_scores(
            query,
            stack.quantized,
            stack.zero_point,
            stack.scale_exponent,
            walk,
            layer=statistics.layer,
            lengths=span.end,
            budgets=budgets,
            max_count=max_count,
            scale=default_scale(query.shape[-1]),
            exponent=self.exponent,
            decay=self.decay,
            sink_blocks=self.forced[0],
            local_blocks=self.pages,
            pages=self.pages,
            ranks=span.heads,
            kernel_config=kernel_config,
        )

    def page_scores(
        self,
        queries: Float[Array, "B I R N C"],
        stored: QuantizedKeys | LayerKeys,
        rows: Int[Array, "B I"],
        *,
        kv_lengths: Int[Array, "B"],
        scale: float,
        heads: Heads | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> Float[Array, "B I P"]:
        """Page scores `S[i, p]` of the class, from the representative queries of each row."""
        return block_scores(
            queries,
            stored,
            rows,
            kv_lengths=kv_lengths,
            scale=scale,
            exponent=self.exponent,
            pages=self.pages,
            heads=heads,
            kernel_config=kernel_config,
        )

    def represent(
        self,
        query: Float[Array, "B T N H"],
        valid: Bool[Array, "B T"],
        count: int,
        kernel_config: KernelConfig | None = None,
    ) -> Float[Array, "B I R N C"]:
        """Selects `count` representative queries of each row, in the channels of the scores."""
        sizes, found = {"count": count, "block_size": self.block_size}, None
        if kernel_config is not None:
            from sketchwalk_jax.pallas_kernels.page_scores.api import representatives

            found = representatives(query, valid, **sizes, kernel_config=kernel_config)
        if found is None:
            query = query[..., slow_channels(query.shape[-1])]
            found = representative_queries(query, valid, **sizes)
        return found

    def _score_rows(
        self,
        query: Float[Array, "B T N H"],
        span: Span,
        index: Int[Array, ""],
        score: Callable[..., Float[Array, "B I P"]],
        *,
        kernel_config: KernelConfig | None,
    ) -> Float[Array, "B I P"]:
        """Scores a prompt's rows, each with its number of representatives.

        The number depends on the row's position and on the sparse layer. All rows are scored with
        their layer's number. A span's start is known only at run time, but only its first rows can
        be early ones (`early_representatives`): their additional representatives are scored
        separately and added to the norm.
        """
        rows = span.rows(self.block_size)
        numbers = vars(self).get("_numbers", {"representatives": self.sparse_representatives})
        by_layer = jnp.asarray(numbers["representatives"], jnp.int32)
        least = by_layer[jnp.minimum(index, len(by_layer) - 1)]
        usual = sorted(set(self.sparse_representatives))

        def score_with(count: int) -> Float[Array, "B I P"]:
            return score(self.represent(query, span.valid, count, kernel_config), rows=rows)

        ways = [functools.partial(score_with, count) for count in usual]
        place = jnp.sum(jnp.asarray(usual, jnp.int32) < least, dtype=jnp.int32)
        found = jax.lax.switch(place, ways)
        parts: list[Array] = []
        first = 0
        for tokens, count in self.early_representatives:
            count = min(count, self.block_size)
            last = min(-(-tokens // self.block_size), rows.shape[1])
            if first == last or count <= usual[0]:
                break
            some = slice(first * self.block_size, last * self.block_size)
            own, before = rows[:, first:last], found[:, first:last]
            number = jnp.arange(usual[0], count, dtype=jnp.int32)[None, None]
            counts = self._early_representatives_of(own)[..., None]
            is_added = (number >= least) & (number < counts)
            # Scores are never negative. This comparison orders the collectives of both scores: on
            # CPUs two at once can deadlock.
            is_added = is_added & (before[..., :1] >= 0.0)

            def add(
                before: Array,
                some: slice = some,
                own: Array = own,
                count: int = count,
                is_added: Array = is_added,
            ) -> Float[Array, "B I P"]:
                added = self.represent(query[:, some], span.valid[:, some], count, kernel_config)
                added = jnp.where(is_added[..., None, None], added[:, :, usual[0] :], jnp.nan)
                # If no row of a sequence is early, they add nothing. Then score them as a prompt's
                # first rows, which have the fewest keys.
                is_early = jnp.any(is_added, axis=(1, 2), keepdims=True)[..., 0]
                after = score(added, rows=jnp.where(is_early, own, own - own[:, :1]))
                largest = jnp.maximum(jnp.maximum(before, after), jnp.finfo(jnp.float32).tiny)
                powers = (before / largest) ** self.exponent + (after / largest) ** self.exponent
                return largest * powers ** (1.0 / self.exponent)

            if span.is_fresh or span.heads is not None:
                # There are early rows; and collectives must not depend on a condition.
                before = add(before)
            else:
                before = jax.lax.cond(jnp.any(is_added), add, lambda before: before, before)
            parts.append(before)
            first = last
        return jnp.concatenate([*parts, found[:, first:]], axis=1)

    def _early_representatives_of(self, rows: Int[Array, "B I"]) -> Int[Array, "B I"]:
        """Minimum number of representatives of early rows; 0 for other rows."""
        found = jnp.zeros_like(rows)
        for tokens, count in reversed(self.early_representatives):
            count = min(count, self.block_size)
            found = jnp.where(rows * self.block_size < tokens, count, found)
        return found

    def keep(
        self,
        page_scores: Float[Array, "B I P"],
        last: Int[Array, "B I"],
        index: Int[Array, ""],
        *,
        is_token: bool,
        kernel_config: KernelConfig | None = None,
    ) -> BlockSelection:
        """Keeps the pages with the highest scores, up to the budget of a sparse layer.

        Args:
          page_scores: Page score of every page for every row, including the walk.
          last: The last page of each row: of its block, or the decoded token's page.
          index: Index of the layer among the sparse layers.
          is_token: Whether a row is a decoded token.
          kernel_config: Settings of the kernels, or `None` for plain JAX.
        """
        num_pages = page_scores.shape[-1]
        num_rows = num_pages if is_token else num_pages // self.pages
        budgets, max_count = self.budget_table(num_rows, is_token=is_token)
        own = jnp.asarray(budgets)[jnp.minimum(index, len(budgets) - 1)]
        rows = last if is_token else last // self.pages
        counts = own[jnp.minimum(rows, num_rows - 1)]
        sink, local = self.forced
        rule: dict[str, Any] = dict(
            sink_blocks=sink,
            local_blocks=self.pages if is_token else local,
            max_count=max_count,
            block_size=self.unit_size,
            row_size=None if is_token else self.block_size,
        )
        lists = None
        if kernel_config is not None:
            lists = top_k.select_blocks(
                page_scores, last, counts, **rule, kernel_config=kernel_config
            )
        return lists or select_blocks(page_scores, last, counts, **rule)


class KeysInPlace:
    """Quantized keys of all layers, which kernels update and read in place."""

    def update_statistics(
        self,
        key: Float[Array, "B T K H"],
        statistics: PyTree,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernel_config: KernelConfig | None,
        write: TokenWrite | None = None,
    ) -> tuple[Any, ...] | None:
        """Updates the statistics of one layer, like `Policy.update_statistics`.

        Args:
          key: Keys of the span's tokens.
          statistics: Statistics of all layers so far.
          layer: Index of the layer to update.
          span: The tokens.
          kernel_config: Settings of the kernels, or `None` for plain JAX.
          write: Caches into which the same kernel writes a decoded token's keys and values.

        Returns:
          The statistics of all layers, followed by the caches of keys and values if `write` is
          given; or `None` if this call is not supported.
        """
        if kernel_config is None or not isinstance(statistics, QuantizedKeys):
            return None
        stored = (
            statistics.quantized,
            statistics.zero_point,
            statistics.scale_exponent,
            statistics.unfinished,
        )
        found = key_quantization.quantized_keys(
            stored, key, span, layer=layer, write=write, kernel_config=kernel_config
        )
        return None if found is None else (QuantizedKeys(*found[:4]), *found[4:])

    def of_layer(self, statistics: PyTree, layer: Int[Array, ""]) -> PyTree:
        """Returns the quantized keys of one layer, left in place in the arrays of all layers."""
        if isinstance(statistics, QuantizedKeys):
            return LayerKeys(statistics, layer)
        return take_layer(statistics, layer)


def planned_layers(plan: Plan, density: float) -> list[tuple[float, int | None]]:
    """Density and representatives of every layer by a plan, with the preset's other defaults.

    Dense layers have density 1 and `None`.

    Args:
      plan: The plan.
      density: Mean density over the layers.

    Example:
      >>> plan = Plan(densities=((0.1, 0.5), (0.1, 0.5)), errors=((0.5, 0.1), (0.02, 0.01)),
      ...             weights=(1.0, 1.0), representatives=(4, 16), misses=((0.5, 0.1), (0.1, 0.0)))
      >>> planned_layers(plan, 0.3)
      [(0.5, 4), (0.1, 4)]
    """
    policy = RecommendedConfig(density=density, plan=plan)
    counts = iter(policy.sparse_representatives)
    return [
        (1.0, None) if policy.is_dense(layer) else (one, next(counts))
        for layer, one in enumerate(policy.layer_densities)
    ]


def slow_channels(head_dim: int) -> Int[np.ndarray, "H2"]:
    """Returns the half of a head's channels that the rotary embedding rotates most slowly.

    Channels `d` and `d + H/2` are rotated together, with a frequency that decreases with `d`.

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
    """Selects representative queries of each row, per head: its mean and the farthest queries.

    This is farthest-point traversal (Gonzalez 1985). It starts with the mean, and `count - 1` times
    adds the query that is farthest from the nearest query taken so far. Queries that are not valid
    or not finite are never taken. If there are no more queries, the mean is taken again.

    Args:
      query: Queries. Column 0 is the start of a row.
      valid: Whether each query is a token of the sequence.
      block_size: Number of queries in a row.
      count: Number of representatives `R`.

    Returns:
      The representatives, in the dtype of the queries; zeros for rows without a query.
    """
    batch, tokens, heads, head_dim = query.shape
    rows = query.reshape(batch, tokens // block_size, block_size, heads, head_dim)
    rows = jnp.moveaxis(rows, 3, 2).astype(jnp.float32)  # [B I N Q H]
    usable = valid.reshape(batch, -1, 1, block_size) & jnp.all(jnp.isfinite(rows), axis=-1)
    rows = jnp.where(usable[..., None], rows, 0.0)
    number = jnp.sum(usable, axis=-1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(rows, axis=-2) / jnp.maximum(number, 1.0)

    def take(
        carry: tuple[Array, Array, Array], _: None
    ) -> tuple[tuple[Array, Array, Array], Array]:
        usable, distance, newest = carry
        away = jnp.sum((rows - newest[..., None, :]) ** 2, axis=-1)
        distance = jnp.where(usable, jnp.minimum(distance, away), -1.0)
        place = jnp.argmax(distance, axis=-1)[..., None]
        found = jnp.take_along_axis(rows, place[..., None], axis=-2)[..., 0, :]
        is_left = jnp.take_along_axis(usable, place, axis=-1)
        newest = jnp.where(is_left, found, mean)
        usable = usable & (jnp.arange(block_size)[None, None, None] != place)
        return (usable, distance, newest), newest

    start = (usable, jnp.where(usable, LARGEST, -1.0), mean)
    _, others = jax.lax.scan(take, start, length=count - 1)  # unrolled, it compiles much longer
    taken = jnp.concatenate([mean[None], others])
    return jnp.moveaxis(taken, 0, 2).astype(query.dtype)  # [B I R N H]


@functools.lru_cache(maxsize=64)
def _share_density(
    density: float, is_dense: tuple[bool, ...], plan: Plan | None
) -> tuple[float, ...]:
    """Shares a mean density among the layers. Dense layers have density 1."""
    count = len(is_dense) - sum(is_dense)
    left = density * len(is_dense) - sum(is_dense)
    if not count:
        return (1.0,) * len(is_dense)
    if left <= 0:
        raise ValueError(
            f"density must exceed the share of the dense layers, got {density} with "
            f"{sum(is_dense)} dense layers of {len(is_dense)}"
        )
    if plan is None:
        return tuple(1.0 if dense else left / count for dense in is_dense)
    own = [i for i, dense in enumerate(is_dense) if not dense]
    found = dict(zip(own, plan.of_layers(own).share_density(left / count), strict=True))
    return tuple(found.get(i, 1.0) for i in range(len(is_dense)))


@functools.lru_cache(maxsize=1024)
def page_budget(num_rows: int, *, density: float, pages: int, least: int) -> Int[np.ndarray, "I"]:
    """Number of pages that each row keeps, so that all rows together keep the density.

    Half of a row's own block is in the future. So `c` pages in row `i` count as `c - pages / 2`,
    and the causal pages as `pages · (i + 1/2)`. A row therefore keeps `pages · (density · (i + 1/2)
    + 1/2)` pages, rounded, and at least `least` if there are as many. The first rows take more than
    the density, which makes the measured density higher. A row's budget depends only on its
    position, never on the length of the prompt.

    Args:
      num_rows: Number of rows.
      density: Fraction of all causal pairs.
      pages: Number of pages in a block; a row is a query block.
      least: Minimum number of pages of a row.

    Returns:
      int32 `[num_rows]` on the host, read-only.

    Example:
      >>> page_budget(128, density=0.1, pages=4, least=16)[[0, 3, 20, 63, 127]].tolist()
      [4, 16, 16, 27, 53]
    """
    share = Fraction(repr(float(density)))
    # In integers of any size, which round halves to even as `round` does.
    double = np.arange(1, 2 * num_rows, 2, dtype=object)  # 2 i + 1
    two_q = 2 * share.denominator
    scaled = pages * (share.numerator * double + share.denominator)
    wanted, rest = scaled // two_q, 2 * (scaled % two_q)
    wanted = wanted + ((rest > two_q) | ((rest == two_q) & (wanted % 2 == 1)))
    most = pages * np.arange(1, num_rows + 1)
    counts = np.minimum(most, np.maximum(least, wanted.astype(np.int64))).astype(np.int32)
    counts.setflags(write=False)
    return counts
