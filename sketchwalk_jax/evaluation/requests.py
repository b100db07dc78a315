"""Requests of a harness in batches of one size: prompts, options of generation, and scores."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.cache import Density, init_cache
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.generation import bucket_length
from sketchwalk_jax.inference import read_prompt
from sketchwalk_jax.models.transformer import unembed

PyTree = Any

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_TARGETS = 256  # tokens of a sequence whose logits exist at a time


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """How a prompt is continued.

    Attributes:
      max_new_tokens: Most tokens to generate.
      until: Strings that end the text.
      sampling: Names and values for `Sampling`.
    """

    max_new_tokens: int
    until: tuple[str, ...]
    sampling: tuple[tuple[str, float], ...]

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> "GenerationOptions":
        """From the harness's options, normalised by it.

        Raises:
          ValueError: For one that has no meaning here.
        """
        rest = dict(options)
        until, count = rest.pop("until"), rest.pop("max_gen_toks")
        is_drawn = rest.pop("do_sample")
        given = {name: rest.pop(name) for name in _SAMPLING if rest.get(name) is not None}
        rest = {name: value for name, value in rest.items() if value is not None}
        if rest:
            raise ValueError(
                "generation_kwargs must be among until, max_gen_toks, do_sample, "
                f"{', '.join(_SAMPLING)}, got {sorted(rest)}"
            )
        if not is_drawn:
            given = {"temperature": 0.0} | {
                name: value for name, value in given.items() if name == "repetition_penalty"
            }
        return cls(count, tuple(until), tuple(sorted(given.items())))

    def cut(self, text: str) -> str:
        """The text before the first of the strings that end it."""
        for stop in filter(None, self.until):
            text = text.split(stop)[0]
        return text


def batches(places: Sequence[int], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Batches of places; and the same filled up with the last one, so that all have one size.

    Example:
      >>> list(batches([4, 7, 1], 2))
      [([4, 7], [4, 7]), ([1], [1, 1])]
    """
    for start in range(0, len(places), size):
        some = list(places[start : start + size])
        yield some, some + some[-1:] * (size - len(some))


def pad(
    sequences: Sequence[Sequence[int]],
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Sequences as one array, padded on the right, and their lengths."""
    lengths = np.array([len(one) for one in sequences], np.int32)
    tokens = np.zeros((len(sequences), int(lengths.max())), np.int32)
    for row, one in zip(tokens, sequences, strict=True):
        row[: len(one)] = one
    return tokens, lengths


def score_continuations(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[np.ndarray, "B"],
    continuations: Sequence[Sequence[int]],
    *,
    settings: Settings,
) -> tuple[list[float], list[bool], Density]:
    """Log-likelihoods of the last tokens of sequences, each given all before it.

    Args:
      params: Parameter tree.
      tokens: The sequences but their last token, right-padded.
      lengths: Tokens of each.
      continuations: What is scored, the last token included.
      settings: Model and policy. All is read at once, so that only prefill is sparse.

    Returns:
      Sums in nats, whether every token is the likeliest, and the density of the reading.
    """
    targets, counts = pad(continuations)
    room = bucket_length(targets.shape[1], multiple=16)
    room = room if room <= _TARGETS else -(-room // _TARGETS) * _TARGETS
    targets = np.pad(targets, ((0, 0), (0, room - targets.shape[1])))
    columns = (lengths - counts)[:, None] + np.arange(room, dtype=np.int32)[None, :]
    logprobs, is_best, density = _score(
        params,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(columns),
        jnp.asarray(targets),
        settings=settings,
    )
    sums, best = np.asarray(logprobs, np.float64), np.asarray(is_best)
    rows = list(enumerate(counts.tolist()))
    return (
        [float(sums[row, :count].sum()) for row, count in rows],
        [bool(best[row, :count].all()) for row, count in rows],
        density,
    )


@functools.partial(jax.jit, static_argnames="settings")
def _score(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    columns: Int[Array, "B C"],
    targets: Int[Array, "B C"],
    *,
    settings: Settings,
) -> tuple[Float[Array, "B C"], Bool[Array, "B C"], Density]:
    """Log-probabilities of `targets` after the tokens at `columns`, and whether they are best."""
    batch, num_tokens = tokens.shape
    cache = init_cache(
        settings.model_config,
        settings.config,
        batch=batch,
        max_tokens=num_tokens,
        dtype=params["embed"]["embedding"].dtype,
    )
    hidden, cache, _ = read_prompt(
        params, tokens, lengths, columns, cache, is_fresh=True, settings=settings
    )
    count = columns.shape[1]
    size = min(count, _TARGETS)

    def score(begin: Int[Array, ""]) -> tuple[Float[Array, "B C"], Bool[Array, "B C"]]:
        some = jax.lax.dynamic_slice_in_dim(hidden, begin, size, axis=1)
        wanted = jax.lax.dynamic_slice_in_dim(targets, begin, size, axis=1)
        logits = unembed(params, some, model_config=settings.model_config)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, wanted[:, :, None], axis=-1)[:, :, 0]
        return chosen, jnp.argmax(logits, axis=-1).astype(jnp.int32) == wanted

    begins = jnp.arange(0, count, size, dtype=jnp.int32)
    logprobs, is_best = jax.lax.map(score, begins)
    return (
        jnp.moveaxis(logprobs, 0, 1).reshape(batch, count),
        jnp.moveaxis(is_best, 0, 1).reshape(batch, count),
        cache.density,
    )
