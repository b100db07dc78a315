"""What policies for prefill share: nothing is kept between calls, and decoding is dense."""

import copy
import dataclasses
from typing import Any, ClassVar, Self

from jaxtyping import Array, Float, Int

from sketchwalk_jax.policies.base import StatelessPolicy
from sketchwalk_jax.selection import BlockSelection, full_selection

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPolicy(StatelessPolicy):
    """A policy that selects while prompts are read, one list per query head; it decodes densely.

    Such a policy has no density of its own: how much it keeps depends on the model and the prompt.
    One of its fields, the *knob*, makes it keep more or less, and
    `sketchwalk_jax.evaluation.calibrate` finds the value that a density takes.

    Attributes:
      block_size: Tokens per block.
      dense_layers: Leading layers that stay dense.
      knob: Name of the field that sets how much is kept; more with larger values.
      knob_range: Its least value, and one that keeps (nearly) everything.
      floor: Name of the field with the least that is kept, in tokens, which `relaxed` lowers; None
        without any.
    """

    knob: ClassVar[str]
    knob_range: ClassVar[tuple[float, float]]
    floor: ClassVar[str | None] = None

    @property
    def phases(self) -> tuple[str, ...]:
        """Prefill only: decoding attends to everything."""
        return ("prefill",)

    @property
    def knob_value(self) -> float:
        """What the knob is set to."""
        return float(getattr(self, self.knob))

    def with_knob(self, value: float) -> Self:
        """The policy with its knob at another value."""
        fields: dict[str, Any] = {self.knob: value}
        return dataclasses.replace(self, **fields)

    def with_traced(self, value: Float[Array, ""], floor: Int[Array, ""] | None = None) -> Self:
        """With knob and floor at values that are not known when a program is compiled.

        Args:
          value: The knob; unchecked, as no program can be.
          floor: The floor, of no effect where the policy has none; as it is by default.
        """
        changed = copy.copy(self)
        object.__setattr__(changed, self.knob, value)
        if floor is not None and self.floor is not None:
            object.__setattr__(changed, self.floor, floor)
        return changed

    @property
    def floor_value(self) -> int:
        """What the floor is set to; 0 without any."""
        return 0 if self.floor is None else int(getattr(self, self.floor))

    def relaxed(self) -> Self | None:
        """With lower floors, for densities that the knob does not reach; None without any."""
        return None

    def select_decode(
        self,
        query: Float[Array, "B 1 N H"],
        key: Float[Array, "Ls B S K H"],
        statistics: None,
        walk: PyTree,
        *,
        layer: Int[Array, ""],
        positions: Int[Array, "B"],
    ) -> tuple[BlockSelection, PyTree]:
        """Every block up to the token's own."""
        rows = (positions // self.block_size)[:, None]
        num_blocks = key.shape[2] // self.block_size
        return full_selection(rows, num_blocks, block_size=self.block_size), walk
