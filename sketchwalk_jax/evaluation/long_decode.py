"""Long decoding: a text read, its last 512 tokens fed one by one, beside dense attention.

Dense attention and a policy step side by side through the same tokens in one program, each with a
cache of its own, so that their distributions are compared where they arise: 512 rows of the
logits of a large vocabulary would be hundreds of megabytes for each prompt.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.cache import Cache, Density
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.evaluation.programs import Programs, Readers
from sketchwalk_jax.evaluation.rows import Outcome
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.evaluation.tasks import NUM_DECODED, Sample
from sketchwalk_jax.inference import decode_token, read_into_new_cache
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.padding import pad_right
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.sharding import constrain

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compared:
    """What feeding `U` tokens gave.

    Attributes:
      losses: `-log p` of each token after the first, by the policy, float32 `[B, U - 1]`.
      divergences: `KL(p_dense ‖ p_policy)` at each of these places, nats, float32 `[B, U - 1]`.
      agrees: Whether the likeliest token there is that of dense attention, bool `[B, U - 1]`.
      density: Pairs that the policy attended to.
    """

    losses: Float[Array, "B V"]
    divergences: Float[Array, "B V"]
    agrees: Bool[Array, "B V"]
    density: Density


def read_program(
    params: PyTree, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], *, settings: Settings
) -> Cache:
    """Reads texts into a new cache of `T` tokens."""
    return read_into_new_cache(params, tokens, lengths, settings=settings)[1]


def compare_logits(
    exact: Float[Array, "N V"], logits: Float[Array, "N V"], target: Int[Array, "N"]
) -> tuple[Float[Array, "N"], Float[Array, "N"], Bool[Array, "N"]]:
    """How a distribution `q` over the next token differs from another one, `p`.

        loss = -log q[target],   KL(p ‖ q) = Σ_v p[v] (log p[v] - log q[v])

    Args:
      exact: Logits of `p`.
      logits: Logits of `q`.
      target: The next tokens.

    Returns:
      Losses and divergences in nats, and whether the likeliest tokens are the same.
    """
    wanted, found = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(found, target[:, None], axis=-1)[:, 0]
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
    return loss, divergence, jnp.argmax(exact, axis=-1) == jnp.argmax(logits, axis=-1)


def compare_program(
    params: PyTree,
    dense: Cache,
    cache: Cache,
    tokens: Int[Array, "B U"],
    *,
    plain: Settings,
    settings: Settings,
) -> Compared:
    """Feeds the same tokens to dense attention and to a policy, and compares what they predict.

    They are compared after every token but the last.

    Args:
      params: Parameter tree.
      dense: Cache of dense attention.
      cache: Cache of the policy.
      tokens: The tokens, in order.
      plain: Model and dense attention.
      settings: Model and policy.

    Returns:
      Losses, divergences and agreements.
    """
    active = jnp.ones(tokens.shape[:1], bool)

    def step(carry: tuple[Cache, Cache], column: tuple[Array, Array]) -> Any:
        token, target = column
        exact, dense, _ = decode_token(params, token, carry[0], active=active, settings=plain)
        logits, cache, _ = decode_token(params, token, carry[1], active=active, settings=settings)
        return (dense, cache), compare_logits(exact, logits, target)

    columns = jnp.swapaxes(tokens, 0, 1)
    carry, found = jax.lax.scan(step, (dense, cache), (columns[:-1], columns[1:]))
    losses, divergences, agrees = (
        jnp.swapaxes(one, 0, 1) for one in constrain(found, settings.placement)
    )
    return Compared(losses, divergences, agrees, carry[1].density)


class LongDecode:
    """Programs for long decoding at one length, and what they find.

    In phase `decode` the policy continues what dense attention has read; in phase `both` it has
    read the text itself.
    """

    def __init__(
        self,
        programs: Programs,
        params: PyTree,
        model_config: ModelConfig,
        wanted: Mapping[Rule, Sequence[str]],
        *,
        num_tokens: int,
        batch: int,
        policies: Mapping[Rule, Policy],
    ) -> None:
        """Starts to compile.

        Args:
          programs: Where programs are compiled.
          params: Parameter tree.
          model_config: The model.
          wanted: Every rule, and its phases.
          num_tokens: Tokens of a text, those that are decoded included.
          batch: Texts at a time.
          policies: Calibrated policies, of the rules that need it.
        """
        self._programs, self._params, self._model_config = programs, params, model_config
        self.batch, self._num_tokens = batch, num_tokens
        self.readers = Readers(wanted, policies, model_config, programs.placement)
        for config in self.readers.all if wanted else ():
            self._read_program(config)
        for rule, phases in wanted.items():
            if "both" in phases and rule != DENSE:
                self._read_program(self.readers.policies[rule])
            self._compare_program(rule)

    def _read_program(self, config: Policy) -> Future[Any]:
        tokens = jax.ShapeDtypeStruct((self.batch, self._num_tokens), jnp.int32)
        lengths = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return self._programs.start(
            read_program, tokens, lengths, settings=self._programs.settings(config)
        )

    def _compare_program(self, rule: Rule) -> Future[Any]:
        shape = {"batch": self.batch, "num_tokens": self._num_tokens}
        # On a mesh, blocks of the dense cache lie by their size.
        dense = Dense(block_size=self.readers.of(rule).block_size)
        policy = dense if rule == DENSE else self.readers.policies[rule]
        plain, settings = (self._programs.settings(x) for x in (dense, policy))
        caches = (self._programs.cache(one, **shape) for one in (plain, settings))
        tokens = jax.ShapeDtypeStruct((self.batch, NUM_DECODED), jnp.int32)
        return self._programs.start(
            compare_program, *caches, tokens, plain=plain, settings=settings
        )

    def run(
        self,
        samples: Sequence[Sample],
        wanted: Mapping[Rule, Sequence[str]],
        *,
        after: Callable[[], None],
    ) -> dict[tuple[Rule, str], Outcome]:
        """Measures rules in their phases on one batch.

        Args:
          samples: At most `batch` samples of long_decode.
          wanted: Phases of each rule.
          after: Called whenever a rule is done.

        Returns:
          The outcome of every rule and phase.
        """
        rows = [*samples, *[samples[-1]] * (self.batch - len(samples))]
        tokens, _ = pad_right([sample.tokens for sample in rows], self._num_tokens)
        lengths = np.array([sample.answer_start for sample in rows], np.int32)
        answers = np.stack([sample.answer for sample in rows])
        read = partial(self._read, tokens, lengths)
        dense, reader = None, None
        found: dict[tuple[Rule, str], Outcome] = {}
        for rule, phases in wanted.items():
            if dense is None or self.readers.of(rule) != reader:
                dense, reader = None, self.readers.of(rule)  # memory is for the cache of one
                dense = read(reader)
            for phase in phases:
                compared = self._compare(read, dense, answers, rule, phase)
                found[rule, phase] = _outcome(compared, len(samples))
            after()
        return found

    def _compare(
        self,
        read: Callable[[Policy], Cache],
        dense: Cache,
        answers: Int[np.ndarray, "B U"],
        rule: Rule,
        phase: str,
    ) -> Compared:
        """Feeds the answers to a rule in one phase, beside dense attention to its own cache."""
        plain = dataclasses.replace(dense, statistics=None, made_for=())
        if rule == DENSE:
            cache = plain
        elif phase == "both":
            cache = read(self.readers.policies[rule])
        else:
            cache = self.readers.cache_of(rule, dense)
        compare = self._compare_program(rule).result()
        return jax.device_get(compare(self._params, plain, cache, answers))

    def _read(self, tokens: np.ndarray, lengths: np.ndarray, config: Policy) -> Cache:
        return self._read_program(config).result()(self._params, tokens, lengths)


def _outcome(compared: Compared, count: int) -> Outcome:
    """Means over tokens, without the rows that only fill the batch."""
    losses, divergences, agreements = (
        np.asarray(x, np.float64).mean(axis=1)[:count]
        for x in (compared.losses, compared.divergences, compared.agrees)
    )
    density = jax.tree.map(lambda x: x[..., :count], compared.density)
    return Outcome(None, losses, density, divergences, agreements)
