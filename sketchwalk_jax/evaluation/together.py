"""Policies that watch dense attention together, so that it runs once for all of them.

On a mesh it runs once for each group of policies that see the same there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import jax
import numpy as np
from jaxtyping import Array, Float

from sketchwalk_jax.cache import Cache, made_for, sparse_layers
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies.base import LayerShape, Policy, Span
from sketchwalk_jax.sharding import Placement

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Together(Policy):
    """Keeps the statistics of several policies while attention is dense; it never selects.

    Attributes:
      policies: The policies. Statistics are tuples, one element for each.
    """

    policies: tuple[Policy, ...]

    @classmethod
    def of(cls, policies: Sequence[Policy]) -> "Together":
        """With blocks that suit all of them."""
        size = max(policy.block_size for policy in policies)
        return cls(policies=tuple(policies), block_size=size)

    @classmethod
    def watching[Name](
        cls, policies: Mapping[Name, Policy], placement: Placement | None
    ) -> dict[Name, tuple["Together", int]]:
        """Who keeps the statistics of each policy: all together, or on a mesh several groups.

        There the policies of a group see the same of other ranks, and blocks of one size, which
        ranks of `sequence` have in turn.

        Args:
          policies: The policies, by any name.
          placement: Where the model lies on a mesh, if it does.

        Returns:
          By the same names the group, and the place among its policies.
        """
        groups: dict[Any, list[Name]] = {}
        for name, policy in policies.items():
            seen = policy.heads_on_mesh, policy.blocks_on_mesh, policy.block_size
            groups.setdefault(None if placement is None else seen, []).append(name)
        found: dict[Name, tuple[Together, int]] = {}
        for names in groups.values():
            together = cls.of([policies[name] for name in names])
            found |= {name: (together, place) for place, name in enumerate(names)}
        return found

    @property
    def heads_on_mesh(self) -> Literal["all", "combined", "own"]:  # type: ignore[override]
        """What all of the policies see, of which a mesh has those of one group."""
        return self.policies[0].heads_on_mesh

    @property
    def blocks_on_mesh(self) -> Literal["none", "keys", "own"]:  # type: ignore[override]
        """As `heads_on_mesh`."""
        return self.policies[0].blocks_on_mesh

    def is_dense(self, layer: int) -> bool:
        """Whether none of the policies selects in a layer."""
        return all(policy.is_dense(layer) for policy in self.policies)

    def for_layer(self, layer: int, num_layers: int) -> "Together":
        """Every policy as it selects in a layer."""
        policies = tuple(policy.for_layer(layer, num_layers) for policy in self.policies)
        return dataclasses.replace(self, policies=policies)

    @property
    def statistics_key(self) -> tuple[tuple[str, Any], ...]:
        """Those of all policies."""
        return tuple(
            (f"{index}.{name}", value)
            for index, policy in enumerate(self.policies)
            for name, value in policy.statistics_key
        )

    def init_statistics(
        self, shape: LayerShape, *, batch: int, num_blocks: int
    ) -> tuple[PyTree, ...]:
        """Empty statistics of every policy."""
        sizes = [num_blocks * self.block_size // policy.block_size for policy in self.policies]
        return tuple(
            policy.init_statistics(shape, batch=batch, num_blocks=size)
            for policy, size in zip(self.policies, sizes, strict=True)
        )

    def observe(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        statistics: tuple[PyTree, ...],
        *,
        span: Span,
        kernel_config: KernelConfig | None = None,
    ) -> tuple[PyTree, ...]:
        """Statistics of every policy. Prompts start with block 0, whatever its size."""
        return tuple(
            policy.observe(
                query, key, own, span=self.span_of(policy, span), kernel_config=kernel_config
            )
            for policy, own in zip(self.policies, statistics, strict=True)
        )

    def span_of(self, policy: Policy, span: Span) -> Span:
        """The span in blocks of one of the policies."""
        if not span.is_token:
            return span
        return dataclasses.replace(span, first_block=span.positions // policy.block_size)

    def select(self, *_: Any, **__: Any) -> NoReturn:
        """Not for selection."""
        raise NotImplementedError("statistics of several policies are for dense attention only")

    def cache_of(
        self, cache: Cache, index: int, model_config: ModelConfig, placement: Placement | None
    ) -> Cache:
        """The cache as if one of the policies alone had watched."""
        watched = sparse_layers(model_config, self)
        own = sparse_layers(model_config, self.policies[index])
        statistics = cache.statistics[index]
        if own != watched:
            places = np.array([watched.index(layer) for layer in own], int)
            statistics = jax.tree.map(lambda x: x[places], statistics)
        if placement is not None:
            statistics = jax.device_put(statistics, placement.statistics(self.policies[index]))
        own_key = made_for(statistics, model_config, self.policies[index])
        return dataclasses.replace(cache, statistics=statistics, made_for=own_key)
