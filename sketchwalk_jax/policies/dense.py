"""Dense attention as a policy: the reference for accuracy."""

import dataclasses

from jaxtyping import Array, Float, Int

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import Policy, PyTree, Span
from sketchwalk_jax.selection import BlockSelection, full_selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Policy):
    """The policy that attends to everything. It has no statistics, and runs dense attention.

    Attributes:
      block_size: Tokens per block, if dense attention is run with block indices.
      dense_layers: Has no effect: every layer is dense.
    """

    blocks_on_mesh = "keys"

    @property
    def phases(self) -> tuple[str, ...]:
        """Empty: the policy selects in neither phase."""
        return ()

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
        """Lists every causal block of every row."""
        size = self.block_size
        return full_selection(span.rows(size), key.shape[2] // size, block_size=size), walk
