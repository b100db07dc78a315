"""`sketchwalk_jax.algorithm` for tests: a policy's layer, and comparison of pages."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax import algorithm
from sketchwalk_jax.policies.recommended import RecommendedConfig

EPS = float(np.finfo(np.float32).eps)


def constants(rule: Callable[..., Any]) -> list[str]:
    """Returns the names of a rule's constants, the keywords of a layer."""
    parameters = inspect.signature(rule).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]


@functools.cache
def compiled(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Jits a layer, one program for each shape and choice of constants."""
    return jax.jit(rule, static_argnames=constants(rule))


def layer(policy: Any, **changes: Any) -> Callable[..., Any]:
    """Returns the specification's layer with a policy's constants.

    Args:
      policy: `SketchWalkConfig.recommended()` or `.paper()`, with any fields.
      **changes: Constants that differ from the policy's.
    """
    is_paper = not isinstance(policy, RecommendedConfig)
    rule = algorithm.paper_layer if is_paper else algorithm.recommended_layer
    fields = {name: getattr(policy, name) for name in constants(rule) if name != "is_token"}
    return functools.partial(compiled(rule), **(fields | changes))


def neutral_walk(policy: Any, num_tokens: int, *, is_token: bool) -> jax.Array:
    """Returns a walk with the effect of `None`, so that all layers share one program."""
    num_blocks = -(-num_tokens // policy.block_size)
    if not isinstance(policy, RecommendedConfig):
        return jnp.eye(num_blocks)
    pages = num_blocks * (policy.block_size // policy.page_size)
    return jnp.zeros((1 if is_token else num_blocks, pages))


def assert_same_pages(
    ids: np.ndarray, counts: np.ndarray, kept: np.ndarray, scores: np.ndarray, rounding: float
) -> np.ndarray:
    """Checks that every row lists the specification's pages, except for pages with equal scores.

    Args:
      ids: Listed pages of each row, ascending, `[I, P]`.
      counts: Number of valid ids in each row, `[I]`.
      kept: The specification's pages, as a mask `[I, P]`.
      scores: The specification's walk, `[I, P]`.
      rounding: Scores that differ by at most this share of the larger one are equal.

    Returns:
      Mask of the rows that agree to the last page.
    """
    is_same = np.ones(len(kept), bool)
    for row, pages in enumerate(np.asarray(kept)):
        found, wanted = ids[row, : counts[row]].tolist(), np.flatnonzero(pages).tolist()
        assert found == sorted(set(found)) and len(found) == len(wanted), (row, found, wanted)
        differing = sorted(set(found) ^ set(wanted))
        is_same[row] = not differing
        if differing:
            values = np.asarray(scores)[row, differing]
            assert values.max() - values.min() <= rounding * values.max(), (row, found, wanted)
    return is_same
