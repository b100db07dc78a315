"""Kernels and the choice between them: tile sizes (`KernelConfig`) and dispatch."""

from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.pallas_kernels.dispatch import IMPLEMENTATIONS, choose_implementation

__all__ = ["IMPLEMENTATIONS", "KernelConfig", "choose_implementation"]
