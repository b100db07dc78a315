"""Llama and Qwen as Flax modules: `CausalLM` for nnx and `LinenCausalLM` for Linen.

Both own the tree that `load` returns and `generate` takes, with stacked layers, and call the same
pure functions. There is no object per layer, so splitting, merging and `nnx.jit` cost the same for
2 layers as for 80.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from sketchwalk_jax.inference.cache import Cache
from sketchwalk_jax.inference.generation import Generation, generate
from sketchwalk_jax.inference.steps import decode_step, forward, prefill
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import Params, check_params, init_params, weights_of
from sketchwalk_jax.policies.base import Policy


def _variables(params: Mapping[str, Any]) -> nnx.Module:
    return nnx.Dict(
        {
            name: _variables(x) if isinstance(x, Mapping) else nnx.Param(x)
            for name, x in params.items()
        }
    )


def _values(variables: Mapping[str, Any]) -> Params:
    return {
        name: _values(x) if isinstance(x, nnx.Dict) else x.get_value()
        for name, x in variables.items()
    }


# Methods of both modules, which differ only in how they own their parameters.


def _logits(  # noqa: D417 (`self`)
    self: "CausalLM | LinenCausalLM",
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    policy: Policy | None = None,
    lengths: Int[Array | np.ndarray, "B"] | None = None,
) -> Float[Array, "B T V"]:
    """Computes float32 logits of every token; see `sketchwalk_jax.forward`.

    Args:
     tokens: Token ids, right-padded.
     policy: The policy; dense by default.
     lengths: Tokens of each sequence; all `T` by default.

    Returns:
     The logits; rows of padding are undefined.

    Raises:
     ValueError: If `params` has missing, unknown or mis-shaped arrays.
    """
    return forward(
        self._params(), tokens, model_config=self.model_config, policy=policy, lengths=lengths
    )


def _prefill(
    self: "CausalLM | LinenCausalLM", tokens: Any, cache: Cache, *, policy: Policy, **options: Any
) -> tuple:
    """Calls `sketchwalk_jax.prefill` with this model's parameters; same options and results."""
    return prefill(
        self._params(), tokens, cache, model_config=self.model_config, policy=policy, **options
    )


def _decode_step(
    self: "CausalLM | LinenCausalLM", tokens: Any, cache: Cache, *, policy: Policy, **options: Any
) -> tuple:
    """Calls `sketchwalk_jax.decode_step` with this model's parameters."""
    return decode_step(
        self._params(), tokens, cache, model_config=self.model_config, policy=policy, **options
    )


def _generate(
    self: "CausalLM | LinenCausalLM", tokens: Any, *, policy: Policy | None = None, **options: Any
) -> Generation:
    """Calls `sketchwalk_jax.generate` with this model's parameters."""
    return generate(
        self._params(), tokens, model_config=self.model_config, policy=policy, **options
    )


def _check_own(params: Mapping[str, Any], model_config: ModelConfig) -> None:
    """Runs `check_params` and refuses quantised weights, which optimisers would train."""
    if weights_of(params) is not None:
        raise NotImplementedError(
            f"modules for Flax must have weights that train, got weights in {weights_of(params)}; "
            f"pass these params to sketchwalk_jax.generate, or load without weights="
        )
    check_params(params, model_config)


class CausalLM(nnx.Module):
    """A Llama or Qwen language model as an nnx module.

    `nnx.to_pure_dict(nnx.state(model, nnx.Param))` is the parameter tree of `load`; the methods
    pass it to the pure functions of the same names, which are jitted themselves.

    Attributes:
     model_config: The model's sizes and switches; static.
     embed: The `nnx.Param` of the embedding.
     layers: Each `nnx.Param` of all layers, stacked on a leading axis.
     final_norm: The `nnx.Param` of the last norm.
     lm_head: The `nnx.Param` of the output head, unless the embedding is tied.

    Example:
     >>> import jax.numpy as jnp
     >>> config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2, hidden_size=32,
     ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
     ...                      max_position_embeddings=512)
     >>> model = CausalLM(config, rngs=nnx.Rngs(0))
     >>> model(jnp.zeros((1, 5), jnp.int32)).shape
     (1, 5, 64)
    """

    def __init__(
        self, model_config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike | None = None
    ) -> None:
        """Draws random parameters, as `init_params` does.

        Args:
         model_config: The model.
         rngs: Random streams; one key of the stream `params` is used.
         dtype: Type of the parameters, the checkpoint's own by default.
        """
        self.model_config = model_config
        self._own(init_params(rngs.params(), model_config, dtype))

    def _own(self, params: Mapping[str, Any]) -> None:
        for name, branch in params.items():
            setattr(self, name, _variables(branch))

    @classmethod
    def from_params(cls, params: Mapping[str, Any], model_config: ModelConfig) -> "CausalLM":
        """Makes a model that owns given parameters; the arrays are shared, not copied.

        Args:
         params: Parameter tree, such as `load` returns.
         model_config: The model.

        Returns:
         The module.

        Raises:
         ValueError: If arrays are missing, unknown or of another shape.
         NotImplementedError: If weights are quantised.
        """
        _check_own(params, model_config)
        model = nnx.eval_shape(lambda: cls(model_config, rngs=nnx.Rngs(0)))
        model._own(params)
        return model

    @property
    def params(self) -> Params:
        """The parameters as the plain nested dict that the pure functions take."""
        return {name: _values(x) for name, x in vars(self).items() if isinstance(x, nnx.Dict)}

    def _params(self) -> Params:
        return self.params

    __call__, prefill, decode_step, generate = _logits, _prefill, _decode_step, _generate


class LinenCausalLM(nn.Module):
    """A Llama or Qwen language model as a Linen module.

    Its variables are `{"params": params}` with the parameter tree of `load`. Methods other than the
    call need `apply(..., method="generate")`.

    Attributes:
     model_config: The model's sizes and switches.
     dtype: Type of the parameters that `init` draws, the checkpoint's own by default.

    Example:
     >>> import jax
     >>> import jax.numpy as jnp
     >>> config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2, hidden_size=32,
     ...                      intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8,
     ...                      max_position_embeddings=512)
     >>> model, tokens = LinenCausalLM(config), jnp.zeros((1, 5), jnp.int32)
     >>> params = model.init(jax.random.key(0), tokens)["params"]
     >>> model.apply({"params": params}, tokens).shape
     (1, 5, 64)
    """

    model_config: ModelConfig
    dtype: DTypeLike | None = None

    @nn.compact
    def _params(self) -> Params:
        if self.is_initializing():  # draw the whole tree once
            tree = init_params(self.make_rng("params"), self.model_config, self.dtype)
        else:
            tree = dict(self.variables.get("params", {}))
            _check_own(tree, self.model_config)
        return {name: self.param(name, lambda _, x=branch: x) for name, branch in tree.items()}

    __call__, prefill, decode_step, generate = _logits, _prefill, _decode_step, _generate
