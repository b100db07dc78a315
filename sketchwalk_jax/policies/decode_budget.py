"""What policies share that select in decode alone: a budget of tokens, and dense prompts."""

import dataclasses
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.policies.budget import check_density
from sketchwalk_jax.selection import BlockSelection, block_budget, select_blocks_per_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodePolicy(Policy):
    """A policy that reads prompts densely and selects for decoded tokens, per query head.

    What it lists are *units* of `unit_size` tokens: pages, or single tokens. With `n` units up to
    and including the token's own, every query head keeps

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

    density: float = 0.2
    token_budget: int | None = None
    force_current: bool = False
    dense_layers: int = 2

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        check_density(self.density)
        budget = self.token_budget
        if budget is not None and (type(budget) is not int or budget < 1):
            raise ValueError(f"token_budget must be None or a positive integer, got {budget!r}")
        if not isinstance(self.force_current, bool):
            raise ValueError(f"force_current must be True or False, got {self.force_current!r}")

    @property
    def phases(self) -> tuple[str, ...]:
        """It selects in decode; prompts are read densely."""
        return ("decode",)

    @property
    def unit_size(self) -> int:
        """Tokens in one unit of its lists."""
        return self.block_size

    @property
    def min_units(self) -> int:
        """Fewest units to keep, where there are as many."""
        return 1

    def init_walk(self, *, batch: int, num_rows: int, num_blocks: int) -> None:
        """Nothing to carry from layer to layer."""
        return None

    def select_prefill(self, *_: Any, **__: Any) -> NoReturn:
        """Not for prompts."""
        raise NotImplementedError(
            f"{type(self).__name__} selects in decode only; attend densely where a policy's phases "
            "lack 'prefill', as generate does"
        )

    def budget(self, num_units: int) -> np.ndarray:
        """Units that a head keeps of `1 .. num_units`, int32 on the host, non-decreasing."""
        tokens = self.token_budget
        return block_budget(
            num_units,
            density=self.density,
            top_blocks=None if tokens is None else tokens // self.unit_size,
            local_blocks=self.min_units,
        )

    def keep_best(
        self, scores: Float[Array, "B N U"], positions: Int[Array, "B"]
    ) -> BlockSelection:
        """The units with the highest scores for the tokens at `positions`; ties to the earlier."""
        num_units = scores.shape[-1]
        last = (positions // self.unit_size)[:, None]
        budget = self.budget(num_units)
        return select_blocks_per_head(
            scores[:, :, None],
            last,
            jnp.asarray(budget)[jnp.minimum(last, num_units - 1)],
            sink_blocks=0,
            local_blocks=int(self.force_current),
            max_count=int(budget[-1]),
            block_size=self.unit_size,
        )
