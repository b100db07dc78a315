"""Models: configurations, parameters and checkpoints of Llama, Qwen2, Qwen3 and Qwen3-MoE.

Names are imported on first use, so that reading a configuration does not start JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sketchwalk_jax.models.checkpoint import save as save
    from sketchwalk_jax.models.config import ModelConfig as ModelConfig
    from sketchwalk_jax.models.hub import bundled_model as bundled_model
    from sketchwalk_jax.models.params import init_params as init_params
    from sketchwalk_jax.models.params import param_shapes as param_shapes
    from sketchwalk_jax.models.plans import fingerprint as fingerprint
    from sketchwalk_jax.models.quantized import quantize_params as quantize_params
    from sketchwalk_jax.models.rope import RopeConfig as RopeConfig
    from sketchwalk_jax.models.rope import apply_rope as apply_rope
    from sketchwalk_jax.models.rope import rope_frequencies as rope_frequencies
    from sketchwalk_jax.models.weights import load as load

_MODULES = {
    "ModelConfig": "config",
    "RopeConfig": "rope",
    "apply_rope": "rope",
    "bundled_model": "hub",
    "fingerprint": "plans",
    "init_params": "params",
    "load": "weights",
    "param_shapes": "params",
    "quantize_params": "quantized",
    "rope_frequencies": "rope",
    "save": "checkpoint",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports an exported name from its module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the exported names."""
    return __all__
