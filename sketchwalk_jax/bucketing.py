"""`make_generate`: the callable that users keep, with prompts padded to few lengths."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from sketchwalk_jax.cache import Cache
from sketchwalk_jax.generation import Generation, generate
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.padding import bucket_length, left_to_right_padding
from sketchwalk_jax.policies.base import Policy
from sketchwalk_jax.sampling import Sampling

PyTree = Any

_STATIC_OPTIONS = (
    "eos_token_ids",
    "pad_token_id",
    "phase",
    "chunk_size",
    "implementation",
    "kernel_config",
    "max_tokens",
    "return_selection",
)


class Generate:
    """The callable that `make_generate` returns."""

    def __init__(self, model_config: ModelConfig, config: Policy, **static: Any) -> None:
        """Keeps the static options; see `make_generate`."""
        self.model_config, self.config, self.static = model_config, config, static

    def __call__(
        self,
        params: PyTree,
        tokens: Int[Array | np.ndarray, "B T"],
        *,
        lengths: Int[Array | np.ndarray, "B"] | None = None,
        attention_mask: Int[Array | np.ndarray, "B T"] | None = None,
        sampling: Sampling | None = None,
        key: Key[Array, "..."] | None = None,
        cache: Cache | None = None,
    ) -> Generation:
        """Continues the prompts; see `generate`.

        Args:
          params: Parameter tree from `load`.
          tokens: Prompts, right-padded; padded on either side if `attention_mask` is given.
          lengths: Prompt tokens of each sequence.
          attention_mask: Instead of `lengths`: 1 at real tokens, as tokenizers return it.
          sampling: How tokens are drawn; greedy by default.
          key: Random key, one or one per sequence.
          cache: Continues the sequences of an earlier call; donated.

        Returns:
          A `Generation`.

        Raises:
          ValueError: As `generate`.
        """
        if attention_mask is not None:
            if lengths is not None:
                raise ValueError("lengths must be None when attention_mask is given, got both")
            tokens, lengths = left_to_right_padding(tokens, attention_mask)
        tokens, lengths = pad_to_bucket(tokens, lengths, self.model_config, self.config)
        return generate(
            params,
            tokens,
            model_config=self.model_config,
            config=self.config,
            lengths=lengths,
            sampling=sampling,
            key=key,
            cache=cache,
            **self.static,
        )


def pad_to_bucket(
    tokens: Any, lengths: Any, model_config: ModelConfig, config: Policy
) -> tuple[Array, Any]:
    """Pads prompts on the right to the next bucket, which never exceeds the model's context."""
    if np.ndim(tokens) != 2 or 0 in np.shape(tokens):
        return tokens, lengths  # `generate` says what is wrong
    batch, width = np.shape(tokens)
    if lengths is None:
        lengths = np.full((batch,), width, np.int32)
    bucket = bucket_length(width, multiple=config.block_size)
    bucket = max(width, min(bucket, model_config.context_length))
    return jnp.pad(jnp.asarray(tokens), ((0, 0), (0, bucket - width))), lengths


def make_generate(
    model_config: ModelConfig, config: Policy, *, max_new_tokens: int, **static: Any
) -> Generate:
    """The jitted `generate(params, tokens)` for one model and policy.

    Prompts are padded to buckets of lengths, so that a new length seldom compiles anew.

    Args:
      model_config: The model.
      config: The policy.
      max_new_tokens: Most tokens to generate for a sequence.
      **static: Any other option of `generate` that is not an array: `eos_token_ids`,
        `pad_token_id`, `phase`, `chunk_size`, `implementation`, `kernel_config`, `max_tokens`,
        `return_selection`.

    Returns:
      A callable `generate(params, tokens, *, lengths=None, attention_mask=None, sampling=None,
      key=None, cache=None)`.

    Raises:
      ValueError: If an option is unknown.

    Example:
      >>> generate = make_generate(cfg, SketchWalkConfig.paper(), max_new_tokens=32)
      ... # doctest: +SKIP
      >>> generate(params, tokens).tokens  # doctest: +SKIP
    """
    unknown = sorted(set(static) - set(_STATIC_OPTIONS))
    if unknown:
        raise ValueError(f"make_generate's options must be among {_STATIC_OPTIONS}, got {unknown}")
    return Generate(model_config, config, max_new_tokens=max_new_tokens, **static)
