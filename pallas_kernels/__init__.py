"""GPU kernels and their tile sizes."""

from sketchwalk_jax.pallas_kernels.config import KernelConfig, default_kernel_config

__all__ = ["KernelConfig", "default_kernel_config"]
