"""Compiled programs of an evaluation: one for each shape and policy, compiled side by side.

A *prefill* program makes a cache; a *decode* program continues it and leaves it as it was, so that
one prefill serves several phases. Dense prefill keeps the statistics of all policies at once, so
that it runs once for all of them (`together`).
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from sketchwalk_jax.cache import (
    Cache,
    Density,
    empty_cache,
    sparse_layers,
)
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.evaluation.prompts import MAX_STEPS
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.evaluation.tasks import NUM_SCORED
from sketchwalk_jax.evaluation.together import Together
from sketchwalk_jax.inference import decode_token, read_into_new_cache
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import unembed
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.sharding import (
    Placement,
    constrain,
    constrain_logits,
    devices_of,
    lies_on_one_device,
    placement_of,
)

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


def _next_tokens(
    params: PyTree,
    hidden: Float[Array, "B C D"],
    targets: Int[Array, "B C"],
    *,
    settings: Settings,
) -> tuple[Int[Array, "B C"], Float[Array, "B C"]]:
    """The likeliest next tokens, and the loss of the right ones, nats."""

    def one_column(column: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, target = column
        logits = unembed(params, hidden, model_config=settings.model_config)
        logits = constrain_logits(logits, settings.placement)
        right = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - right
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), loss

    # Column by column: the logits of all of them would be large for a large vocabulary.
    found = jax.lax.map(one_column, (jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(targets, 0, 1)))
    found = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)
    return constrain(found, settings.placement)


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
    hidden, cache = read_into_new_cache(params, tokens, lengths, columns, settings=settings)
    likeliest, losses = _next_tokens(params, hidden, targets, settings=settings)
    first = constrain(likeliest[:, -1], settings.placement)
    return Prefilled(likeliest, losses, first, cache)


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
    likeliest, losses = constrain(carry[2:], settings.placement)
    return Decoded(likeliest, losses, carry[1].density)


class Readers:
    """The policies of rules, and what reads prompts densely for each of them.

    A rule that decodes sparsely after a dense prefill continues the cache of the reader that kept
    its statistics; where there is none, plain dense attention reads.

    Attributes:
      policies: The policy of each rule.
      all: Every reader; the first one serves rules that have none.
    """

    def __init__(
        self,
        wanted: Mapping[Rule, Sequence[str]],
        calibrated: Mapping[Rule, Policy],
        model_config: ModelConfig,
        placement: Placement | None,
    ) -> None:
        """Finds the readers.

        Args:
          wanted: Phases of each rule.
          calibrated: Calibrated policies, of the rules that need it.
          model_config: The model.
          placement: Where it lies on a mesh, if it does.
        """
        self.policies = {rule: rule.make() for rule in wanted} | dict(calibrated)
        self._model_config, self._placement = model_config, placement
        watched = {
            rule: self.policies[rule]
            for rule, phases in wanted.items()
            if rule != DENSE and "decode" in phases
        }
        self._watching = Together.watching(watched, placement)
        readers = dict.fromkeys(together for together, _ in self._watching.values())
        self.all: tuple[Policy, ...] = tuple(readers) or (Dense(),)

    def of(self, rule: Rule) -> Policy:
        """What reads prompts densely for a rule."""
        return self._watching[rule][0] if rule in self._watching else self.all[0]

    def cache_of(self, rule: Rule, cache: Cache) -> Cache:
        """The cache of a rule's reader, with the statistics that the rule's policy expects."""
        together, place = self._watching[rule]
        return together.cache_of(cache, place, self._model_config, self._placement)

    def dense_layers(self, rule: Rule) -> tuple[int, ...]:
        """Layers in which a rule does not select; none for dense attention itself."""
        if rule == DENSE:
            return ()
        sparse = sparse_layers(self._model_config, self.policies[rule])
        return tuple(i for i in range(self._model_config.num_layers) if i not in sparse)


class Programs:
    """Programs of one model, compiled in threads from the moment they are asked for."""

    def __init__(self, params: PyTree, model_config: ModelConfig) -> None:
        """Starts without programs.

        Args:
          params: Parameter tree, on one device or a mesh: the first argument of every program.
          model_config: The model.

        Raises:
          NotImplementedError: If it is spread over devices without a placement, or over hosts.
        """
        self.placement, devices = placement_of(params, model_config), devices_of(params)
        if len(devices) > 1 and self.placement is None:
            raise NotImplementedError(
                f"params must lie on one device, or where sharding.place says, to be evaluated, "
                f"got {len(devices)} devices; load them with sharding=place(mesh, model_config)"
            )
        if any(device.process_index != jax.process_index() for device in devices):
            raise NotImplementedError(
                "params must lie on devices of one host to be evaluated, got those of several: the "
                "file of the results is one process's"
            )
        self._model_config, self._on_one_device = model_config, lies_on_one_device(params)
        self._params = jax.tree.map(self._abstract, params)
        self._threads = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS))
        self._started: dict[Any, Future[Any]] = {}

    def settings(self, policy: Policy) -> Settings:
        """Those of a program with a policy, which selects wherever it is run."""
        return Settings(
            model_config=self._model_config,
            policy=policy,
            # `Together` observes and never selects.
            phase="decode" if isinstance(policy, Together) else "both",
            placement=self.placement,
            on_one_device=self._on_one_device,
        )

    def start(self, function: Callable[..., Any], *arguments: Any, **static: Any) -> Future[Any]:
        """Starts to compile a function of the parameters, unless that was done before.

        Args:
          function: Takes the parameters, then `arguments`.
          *arguments: Arrays, or shapes and types of arrays, in any trees.
          **static: Arguments by name that are no arrays.

        Returns:
          The future compiled program; it takes the parameters and `arguments`.
        """
        abstract = jax.tree.map(self._abstract, arguments)
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
        """Shapes of a cache, which say where it lies on a mesh."""
        where = settings.placement
        made = jax.eval_shape(
            partial(
                empty_cache,
                settings.model_config,
                settings.policy,
                batch=batch,
                max_tokens=num_tokens,
                dtype=self._params["embed"]["embedding"].dtype,
                sharding=where,
            )
        )
        if where is None:
            return made
        shardings = where.cache(settings.policy)
        arrays = {
            name: jax.tree.map(
                lambda sharding, part: jax.tree.map(partial(_placed, sharding), part),
                one,
                getattr(made, name),
            )
            for name, one in shardings.items()
        }
        return dataclasses.replace(made, **arrays)

    def _abstract(self, x: Any) -> jax.ShapeDtypeStruct:
        """Shape and type of an array; on a mesh where it lies, which is everywhere if unknown."""
        if self.placement is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        where = getattr(x, "sharding", None)
        return _placed(where if isinstance(where, NamedSharding) else self.placement.sharding(), x)

    def close(self) -> None:
        """Drops what has not been compiled yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _placed(sharding: NamedSharding, x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _integers(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]


def _compile(program: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(program).lower(*arguments).compile()
