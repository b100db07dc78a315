"""Compiled programs of an evaluation: one for each shape and policy, compiled side by side.

A *prefill* program makes a cache; a *decode* program continues it and leaves it as it was, so that
one prefill serves several phases. Dense prefill keeps the statistics of all policies at once
(`Together`), so that it runs once for all of them.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.cache import Cache, Density, init_cache, made_for, sparse_layers
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.evaluation.prompts import MAX_STEPS
from sketchwalk_jax.evaluation.tasks import NUM_SCORED
from sketchwalk_jax.inference import decode_token, read_prompt
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import unembed
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.base import LayerShape, Span
from sketchwalk_jax.sharding import devices_of

PyTree = Any

_MAX_THREADS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefilled:
    """What a prefill program returns.

    Attributes:
      likeliest: The likeliest next token after each column asked for, int32 `[B, C]`.
      losses: `-log p` of the right one, float32 `[B, C]`.
      first: The likeliest next token after the last of these columns, int32 `[B]`.
      cache: Holds the prompts.
    """

    likeliest: Int[Array, "B C"]
    losses: Float[Array, "B C"]
    first: Int[Array, "B"]
    cache: Cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a decode program returns.

    Attributes:
      likeliest: The likeliest next token after each token that was fed, int32 `[B, U]`.
      losses: `-log p` of the right one, float32 `[B, U]`.
      density: Pairs attended to, of the prefill before as well.
    """

    likeliest: Int[Array, "B U"]
    losses: Float[Array, "B U"]
    density: Density


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
        kernels: KernelConfig | None = None,
    ) -> tuple[PyTree, ...]:
        """Statistics of every policy. Prompts start with block 0, whatever its size."""
        return tuple(
            policy.observe(query, key, own, span=self.span_of(policy, span), kernels=kernels)
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

    def cache_of(self, cache: Cache, index: int, model_config: ModelConfig) -> Cache:
        """The cache as if one of the policies alone had watched."""
        watched = sparse_layers(model_config, self)
        own = sparse_layers(model_config, self.policies[index])
        statistics = cache.statistics[index]
        if own != watched:
            places = np.array([watched.index(layer) for layer in own], int)
            statistics = jax.tree.map(lambda x: x[places], statistics)
        own_key = made_for(statistics, model_config, self.policies[index])
        return dataclasses.replace(cache, statistics=statistics, made_for=own_key)


def read_prompts(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    columns: Int[Array, "B C"] | None = None,
    *,
    settings: Settings,
) -> tuple[Float[Array, "B C D"], Cache]:
    """Reads prompts into a new cache of `T` tokens.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded.
      lengths: Tokens of each.
      columns: Columns whose output is wanted; the first one by default.
      settings: Model and policy.

    Returns:
      The last layer's output at those columns, and the cache.
    """
    batch, num_tokens = tokens.shape
    dtype = params["embed"]["embedding"].dtype
    cache = init_cache(
        settings.model_config, settings.config, batch=batch, max_tokens=num_tokens, dtype=dtype
    )
    if columns is None:
        columns = jnp.zeros((batch, 1), jnp.int32)
    hidden, cache, _ = read_prompt(
        params, tokens, lengths, columns, cache, is_fresh=True, settings=settings
    )
    return hidden, cache


def _next_tokens(
    params: PyTree,
    hidden: Float[Array, "B C D"],
    targets: Int[Array, "B C"],
    *,
    model_config: ModelConfig,
) -> tuple[Int[Array, "B C"], Float[Array, "B C"]]:
    """The likeliest next tokens, and the loss of the right ones, nats."""

    def one_column(column: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, target = column
        logits = unembed(params, hidden, model_config=model_config)
        right = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - right
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), loss

    # Column by column: the logits of all of them would be large for a large vocabulary.
    found = jax.lax.map(one_column, (jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(targets, 0, 1)))
    return jnp.swapaxes(found[0], 0, 1), jnp.swapaxes(found[1], 0, 1)


def prefill_program(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    columns: Int[Array, "B C"],
    targets: Int[Array, "B C"],
    *,
    settings: Settings,
) -> Prefilled:
    """Reads prompts into a new cache, and scores the tokens after some columns."""
    hidden, cache = read_prompts(params, tokens, lengths, columns, settings=settings)
    likeliest, losses = _next_tokens(params, hidden, targets, model_config=settings.model_config)
    return Prefilled(likeliest, losses, likeliest[:, -1], cache)


def decode_program(
    params: PyTree,
    cache: Cache,
    first: Int[Array, "B"],
    continuation: Int[Array, "B U"],
    num_forced: Int[Array, "B"],
    num_steps: Int[Array, "B"],
    *,
    settings: Settings,
) -> Decoded:
    """Feeds `num_steps` tokens: `num_forced` of the continuation, then the likeliest ones.

    `first` is the likeliest token after the prompt, for sequences that are forced nothing.
    """
    is_fed = jnp.arange(MAX_STEPS, dtype=jnp.int32)

    def one_token(step: Array, carry: tuple[Array, Cache, Array, Array]) -> Any:
        last, cache, likeliest, losses = carry
        active = step < num_steps
        token = jnp.where(step < num_forced, continuation[:, step], last)
        logits, cache, _ = decode_token(params, token, cache, active=active, settings=settings)
        last = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        target = continuation[:, jnp.minimum(step + 1, MAX_STEPS - 1)]
        right = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - right
        is_here = (is_fed == step)[None, :] & active[:, None]
        likeliest = jnp.where(is_here, last[:, None], likeliest)
        return last, cache, likeliest, jnp.where(is_here, loss[:, None], losses)

    batch = first.shape[0]
    carry = (
        first,
        cache,
        jnp.zeros((batch, MAX_STEPS), jnp.int32),
        jnp.zeros((batch, MAX_STEPS), jnp.float32),
    )
    carry = jax.lax.fori_loop(0, jnp.max(num_steps), one_token, carry)
    return Decoded(carry[2], carry[3], carry[1].density)


class Programs:
    """Programs of one model, compiled in threads from the moment they are asked for."""

    def __init__(self, params: PyTree) -> None:
        """Starts without programs.

        Args:
          params: Parameter tree, on one device: the first argument of every program.

        Raises:
          NotImplementedError: If it is spread over devices.
        """
        found = len(devices_of(params))
        if found > 1:
            raise NotImplementedError(
                f"params must lie on one device to be evaluated, got {found} devices; load "
                f"the checkpoint without sharding"
            )
        self._params = jax.tree.map(_abstract, params)
        self._threads = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS))
        self._started: dict[Any, Future[Any]] = {}

    def start(self, function: Callable[..., Any], *arguments: Any, **static: Any) -> Future[Any]:
        """Starts to compile a function of the parameters, unless that was done before.

        Args:
          function: Takes the parameters, then `arguments`.
          *arguments: Arrays, or shapes and types of arrays, in any trees.
          **static: Arguments by name that are no arrays.

        Returns:
          The future compiled program; it takes the parameters and `arguments`.
        """
        abstract = jax.tree.map(_abstract, arguments)
        leaves, tree = jax.tree.flatten(abstract)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
        key = (function, tuple(sorted(static.items())), tree, shapes)
        if key not in self._started:
            program = partial(function, **static)
            self._started[key] = self._threads.submit(_compile, program, self._params, *abstract)
        return self._started[key]

    def prefill(self, settings: Settings, *, batch: int, num_tokens: int) -> Future[Any]:
        """`prefill_program` for prompts of one shape."""
        columns = (batch, NUM_SCORED + 1)
        arguments = _integers((batch, num_tokens), (batch,), columns, columns)
        return self.start(prefill_program, *arguments, settings=settings)

    def decode(self, settings: Settings, *, batch: int, num_tokens: int) -> Future[Any]:
        """`decode_program` for a cache of `num_tokens` tokens."""
        cache = self.cache(settings, batch=batch, num_tokens=num_tokens)
        arguments = _integers((batch,), (batch, MAX_STEPS), (batch,), (batch,))
        return self.start(decode_program, cache, *arguments, settings=settings)

    def cache(self, settings: Settings, *, batch: int, num_tokens: int) -> Cache:
        """Shapes of a cache."""
        dtype = self._params["embed"]["embedding"].dtype
        return jax.eval_shape(
            partial(
                init_cache,
                settings.model_config,
                settings.config,
                batch=batch,
                max_tokens=num_tokens,
                dtype=dtype,
            )
        )

    def close(self) -> None:
        """Drops what has not been compiled yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _integers(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def _compile(program: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(program).lower(*arguments).compile()
