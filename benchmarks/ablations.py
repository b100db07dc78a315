"""Measures what each part of the method does: presets with one changed field, on all tasks.

    python benchmarks/ablations.py --text FILE --text-tail 0.03 [--out FILE] [--reduced]
    python benchmarks/report.py               # anywhere: the tables

Variants of `paper` and `damped` are compared with dense attention and random blocks on the same
prompts. An interrupted run continues from its file, as in `sketchwalk eval`.

One variant is not an option of the package: Algorithm 1 (arXiv:2602.07397), read literally, masks
neither scores nor walk (`UnmaskedConfig`). Query blocks then see later blocks, so a prompt's
selection depends on the text after it, and decoding cannot continue it.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sketchwalk_jax.evaluation import EvaluationConfig, evaluate, read_text
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.inference.cached_layer import PHASES
from sketchwalk_jax.inference.compiled import keep_compiled_programs
from sketchwalk_jax.models import bundled_model
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

DENSITY = 0.2
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5)
TASKS = ("single_needle", "multi_key", "mid_prompt", "aggregation", "text_loss")
PRESETS = ("paper", "damped")
# Values to try besides each preset's own. Heads of the bundled model have 64 channels, so the
# preset's sketch of 64 does not compress; an odd exponent keeps the sign.
CHANGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "paper": {
        "sketch_dim": (8, 16, 32),
        "exponent": (1, 2, 3, 4, 7, 16),
        "transition": ("relu_power", "softmax"),
        "walk_degree": (2, 3),
        "beta": (0.0,),
        "dense_layers": (0, 1),
    },
    "damped": {
        "sketch_dim": (8, 16, 32),
        "walk_degree": (2, 3),
        "beta": (0.0, 0.1, 0.5),
        "dense_layers": (0, 1),
    },
}
NO_MASK = "no causal mask"
_MAX_BLOCKS = 1023  # larger matrices are multiplied only if triangular


def main() -> None:
    """Runs the variants that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="checkpoint; default: the bundled model")
    parser.add_argument("--text", type=Path, help="default: Python's help topics")
    parser.add_argument("--text-tail", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=32, help="of each task")
    parser.add_argument("--probe-prompts", type=int, default=1, help="for the mass recall")
    parser.add_argument("--preset", action="append", choices=PRESETS, help="default: both")
    parser.add_argument("--phase", action="append", choices=PHASES, help="default: all")
    parser.add_argument("--only", action="append", default=[], help=f"a field, or '{NO_MASK}'")
    parser.add_argument("--reduced", action="store_true", help="two short prompts of two tasks")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "ablations.json")
    parser.add_argument(
        "--other-code", action="store_true", help="go on with a file that other code began"
    )
    options = parser.parse_args()
    keep_compiled_programs()
    amount: dict[str, Any] = {
        "tokens": (options.tokens,),
        "tasks": TASKS,
        "prompts": options.prompts,
        "probe_prompts": options.probe_prompts,
        "densities": DENSITIES,
    }
    if options.reduced:
        amount |= {"tokens": (1024,), "tasks": ("single_needle", "text_loss"), "prompts": 2}
        amount |= {"probe_prompts": min(1, options.probe_prompts), "densities": (DENSITY,)}
    presets = options.preset or PRESETS
    changed = variants(presets, options.only)
    every = [NO_MASK, *(field for preset in presets for field in CHANGES[preset])]
    common.check_filters(options, ({"only": one} for one in every), changed)
    config = EvaluationConfig(
        policies=("sketchwalk", "random"),
        presets=presets,
        phases=options.phase or PHASES,
        variants=changed,
        **amount,
    )
    evaluate(
        options.model or bundled_model(),
        config=config,
        text=read_text(options.text, tail=options.text_tail),
        out=options.out,
        other_code=options.other_code,
        progress=True,
    )


def variants(presets: Sequence[str] = PRESETS, only: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Lists the variants: one changed field each, then each preset without a mask.

    Args:
      presets: Presets to change.
      only: Fields to change; all by default.
    """
    found: list[Rule] = []
    for preset in presets:
        for field, values in CHANGES[preset].items():
            for value in values:
                rule = Rule("sketchwalk", preset, DENSITY, ((field, value),), f"{field}={value}")
                found += [rule] if not only or field in only else []
        if not only or NO_MASK in only:
            found.append(UnmaskedRule("sketchwalk", preset, DENSITY))
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnmaskedConfig(SketchWalkConfig):
    """Scores and walk over all pairs of blocks, `R_k = R_{k-1} W_k` with full `W_k`.

    Only the selection is causal: query block `i` keeps the best of the blocks `0 .. i`. It supports
    prefill of whole prompts in one piece, without a dense tail.
    """

    @property
    def phases(self) -> tuple[str, ...]:
        """Prefill only: a decoded token's walk would pass through tokens that do not exist yet."""
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
        kernel_config: KernelConfig | None = None,
    ) -> tuple[BlockSelection, WalkState]:
        """Runs steps 5 to 7 of Algorithm 1, with the mask at the end."""
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
        """Computes `R_k`, each row up to a positive factor."""
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

    variant: str | None = NO_MASK

    def make(self) -> UnmaskedConfig:
        """Makes the policy."""
        fields: dict[str, Any] = {"density": self.density} | dict(self.fields)
        return getattr(UnmaskedConfig, self.preset or "paper")(**fields)


if __name__ == "__main__":
    main()
