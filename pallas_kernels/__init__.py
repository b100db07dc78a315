"""Kernels and the choice between them: tile sizes (`KernelConfig`) and dispatch."""

from sketchwalk_jax.pallas_kernels.config import KernelConfig, default_kernel_config
from sketchwalk_jax.pallas_kernels.dispatch import IMPLEMENTATIONS, choose_implementation

__all__ = ["IMPLEMENTATIONS", "KernelConfig", "choose_implementation", "default_kernel_config"]
