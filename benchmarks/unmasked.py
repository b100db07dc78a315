"""Sketch-and-Walk without a causal mask, as the paper prints it: for `ablations.py` alone.

Algorithm 1 (arXiv:2602.07397) masks neither scores nor walk. Rows then see blocks that come later,
so that a prompt's lists depend on what follows and decoding cannot continue them: no option of the
package, but a reading of the paper that is to be measured.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Span
from sketchwalk_jax.policies.sketchwalk import SketchSums, SketchWalkConfig
from sketchwalk_jax.selection import BlockSelection, select_blocks
from sketchwalk_jax.sketch import block_means, block_scores
from sketchwalk_jax.walk import (
    HIGHEST,
    WalkState,
    power_transition,
    softmax_transition,
    walk_product,
)

_MAX_BLOCKS = 1023  # products of larger matrices are for triangular ones
VARIANT = "no causal mask"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnmaskedConfig(SketchWalkConfig):
    """Scores and walk over all pairs of blocks, `R_k = R_{k-1} W_k` with full `W_k`.

    Only the choice is causal: row `i` keeps the best of the blocks `0 .. i`. In prefill, of whole
    prompts read at once, and without a dense tail.
    """

    @property
    def phases(self) -> tuple[str, ...]:
        """Prompts only: a decoded token's walk would pass through tokens that do not exist yet."""
        return ("prefill",)

    def select(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: SketchSums,
        walk: WalkState,
        *,
        layer: Int[Array, ""],
        span: Span,
        kernels: KernelConfig | None = None,
    ) -> tuple[BlockSelection, WalkState]:
        """Algorithm 1 steps 5 to 7, the mask at the end."""
        rows, num_blocks = span.rows(self.block_size), statistics.key.shape[1]
        if rows.shape[1] != num_blocks or num_blocks > _MAX_BLOCKS:
            raise NotImplementedError(
                f"whole prompts of at most {_MAX_BLOCKS} blocks only, got {rows.shape[1]} rows of "
                f"{num_blocks} blocks"
            )
        queries, keys = (
            block_means(x, span.end, self.block_size) for x in (statistics.query, statistics.key)
        )
        scores = block_scores(queries, keys, query.shape[-1])
        starts = jnp.arange(num_blocks, dtype=jnp.int32) * self.block_size
        exists = starts[None, :] < span.end[:, None]
        state = self._state(scores, exists, walk)
        counts = self.budget(num_blocks)
        selection = select_blocks(
            state,
            rows,
            jnp.broadcast_to(jnp.asarray(counts), rows.shape),
            sink_blocks=self.sink_blocks,
            local_blocks=self.local_blocks,
            max_count=int(counts[-1]),
            block_size=self.block_size,
        )
        return selection, WalkState(state, walk.layers + 1)

    def _state(
        self, scores: Float[Array, "B J J"], exists: Array, walk: WalkState
    ) -> Float[Array, "B J J"]:
        """`R_k`, rows up to a positive factor."""
        everything = jnp.ones(scores.shape[1:], bool)
        if self.transition == "softmax":
            scores = jnp.where(exists[:, None, :], scores, -jnp.inf)
            weights = softmax_transition(scores, everything)
            memory = 1.0 if self.beta is None else self.beta

            def step(state: Array) -> Array:
                moved = jnp.einsum("bim,bmj->bij", state, weights, precision=HIGHEST)
                return (1.0 - memory) * weights + memory * moved
        else:
            scores = jnp.where(exists[:, None, :] & exists[:, :, None], scores, 0.0)
            rectify = self.transition == "relu_power"
            weights, log2_scale = power_transition(
                scores, everything, exponent=self.exponent, rectify=rectify
            )

            def step(state: Array) -> Array:
                if self.beta == 0.0:
                    return weights
                return walk_product(state, weights, log2_scale, exponent=self.exponent)

        state = walk.scores
        for _ in range(self.walk_degree):
            state = step(state)
        return jnp.where(walk.layers == 0, weights, state)


@dataclasses.dataclass(frozen=True)
class UnmaskedRule(Rule):
    """A preset of `sketchwalk` without its mask."""

    variant: str | None = VARIANT

    def make(self) -> UnmaskedConfig:
        """The policy itself."""
        fields: dict[str, Any] = {"density": self.density} | dict(self.fields)
        return getattr(UnmaskedConfig, self.preset or "paper")(**fields)
