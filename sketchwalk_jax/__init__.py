"""Sketch-and-Walk sparse attention (arXiv:2602.07397) for JAX.

Text in, text out:

    lm = LanguageModel.load("Qwen/Qwen3-0.6B")
    lm.generate("Walk with")

The pure functions underneath, from tokens to tokens:

    params, model_config = load("Qwen/Qwen3-0.6B")
    generate = make_generate(model_config, max_new_tokens=64)
    generation = generate(params, tokens)

Importing this package does not import Flax, transformers or Orbax; only functions that need them
do. `LanguageModel` is imported when it is first used.
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# In a checkout the packages `models` and `pallas_kernels` are next to this folder, not in it.
_root = _Path(__file__).parent.parent
if all((_root / _name / "__init__.py").exists() for _name in ("models", "pallas_kernels")):
    __path__.append(str(_root))

from sketchwalk_jax import algorithm, sharding  # noqa: E402
from sketchwalk_jax._version import __version__  # noqa: E402
from sketchwalk_jax.attention.api import (  # noqa: E402
    block_sparse_attention,
    block_sparse_decode,
    dense_attention,
)
from sketchwalk_jax.inference.auto import Auto  # noqa: E402
from sketchwalk_jax.inference.cache import Cache, Density, init_cache  # noqa: E402
from sketchwalk_jax.inference.compiled import keep_compiled_programs  # noqa: E402
from sketchwalk_jax.inference.generation import Generation, generate, make_generate, stream  # noqa: E402
from sketchwalk_jax.inference.layer import init_walk, sketchwalk_attention  # noqa: E402
from sketchwalk_jax.inference.layer_cache import (  # noqa: E402
    LayerCache,
    init_layer_cache,
    sketchwalk_cached_attention,
)
from sketchwalk_jax.inference.sampling import Sampling  # noqa: E402
from sketchwalk_jax.inference.steps import decode_step, forward, prefill  # noqa: E402
from sketchwalk_jax.models.weights import load, save  # noqa: E402
from sketchwalk_jax.pallas_kernels import dispatch as dispatch  # noqa: E402
from sketchwalk_jax.pallas_kernels.config import KernelConfig  # noqa: E402
from sketchwalk_jax.policies.dense import Dense  # noqa: E402
from sketchwalk_jax.policies.recommended import RecommendedConfig  # noqa: E402
from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig  # noqa: E402
from sketchwalk_jax.selection import BlockSelection  # noqa: E402
from sketchwalk_jax.walk import WalkState  # noqa: E402

if _TYPE_CHECKING:
    from sketchwalk_jax.language_model import LanguageModel

__all__ = [
    "Auto",
    "BlockSelection",
    "Cache",
    "Dense",
    "Density",
    "Generation",
    "KernelConfig",
    "LanguageModel",
    "LayerCache",
    "RecommendedConfig",
    "Sampling",
    "SketchWalkConfig",
    "WalkState",
    "__version__",
    "algorithm",
    "block_sparse_attention",
    "block_sparse_decode",
    "decode_step",
    "dense_attention",
    "forward",
    "generate",
    "init_cache",
    "init_layer_cache",
    "init_walk",
    "keep_compiled_programs",
    "load",
    "make_generate",
    "prefill",
    "save",
    "sharding",
    "sketchwalk_attention",
    "sketchwalk_cached_attention",
    "stream",
]


def __getattr__(name: str) -> _Any:
    """Imports `LanguageModel` when it is first used, because the pure functions do not need it."""
    if name != "LanguageModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sketchwalk_jax.language_model import LanguageModel

    globals()[name] = LanguageModel
    return LanguageModel
