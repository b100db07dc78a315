"""Measures a rule in its phases on one batch of prompts, with as few prefills as possible.

Each shape and policy has a prefill program and a decode program. The decode program leaves the
prefilled cache unchanged, so one prefill serves several phases. Long decoding steps dense attention
and a policy through the same tokens in one program and compares them after every token: storing 512
rows of logits would take hundreds of megabytes per prompt for a large vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sketchwalk_jax.evaluation.probe import decode_bytes, probe_decode, probe_prefill
from sketchwalk_jax.evaluation.prompts import (
    MAX_STEPS,
    Prompts,
    loss_in_decode,
    loss_in_prefill,
    right_in_decode,
    right_in_prefill,
)
from sketchwalk_jax.evaluation.rows import Outcome, Probed
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.evaluation.tasks import LOSS_TASKS, Sample
from sketchwalk_jax.inference.cache import Cache, Density, sparse_layers
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.inference.padding import pad_right
from sketchwalk_jax.inference.steps import decode_token, read_into_new_cache
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import unembed
from sketchwalk_jax.policies import LayerShape, Policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.sharding import (
    constrain,
    constrain_logits,
    devices_of,
    lies_on_one_device,
    placement_of,
)

PyTree = Any
Predicted = tuple[Int[Array, "B C"], Float[Array, "B C"]]


def _predict(logits: Float[Array, "B V"], target: Int[Array, "B"]) -> tuple[Array, Array]:
    """Returns the likeliest next tokens, and the loss of the right ones in nats."""
    right = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return likeliest, jax.nn.logsumexp(logits, axis=-1) - right


@partial(jax.jit, static_argnames=("settings", "columns_at_a_time"))
def prefill_program(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    columns: Int[Array, "B C"],
    targets: Int[Array, "B C"],
    *,
    settings: Settings,
    columns_at_a_time: int | None = None,
) -> tuple[Predicted, Cache]:
    """Prefills prompts into a new cache, and scores the tokens after some columns.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded.
      lengths: Tokens of each.
      columns: Columns whose next tokens are predicted.
      targets: The right next tokens.
      settings: Model and policy.
      columns_at_a_time: Columns whose logits are in memory at a time; one by default.

    Returns:
      The likeliest next token after each column and the loss `-log p` of the right one; the cache.
    """
    hidden, cache = read_into_new_cache(params, tokens, lengths, columns, settings=settings)

    def one_column(column: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = unembed(params, column[0], model_config=settings.model_config)
        return _predict(constrain_logits(logits, settings.placement), column[1])

    # A few columns at a time: all logits of a large vocabulary would take too much memory.
    given = jnp.swapaxes(hidden, 0, 1), jnp.swapaxes(targets, 0, 1)
    found = jax.lax.map(one_column, given, batch_size=columns_at_a_time)
    found = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)
    return constrain(found, settings.placement), cache


@partial(jax.jit, static_argnames="settings")
def decode_program(
    params: PyTree,
    cache: Cache,
    after_prompt: Int[Array, "B A"],
    continuation: Int[Array, "B U"],
    num_forced: Int[Array, "B"],
    num_steps: Int[Array, "B"],
    *,
    settings: Settings,
) -> tuple[Predicted, Density]:
    """Feeds `num_steps` tokens: `num_forced` of the continuation, then the likeliest tokens.

    The last column of `after_prompt` is the likeliest token after the prompt, for sequences without
    forced tokens. Returns the likeliest next token after each fed token and the loss `-log p` of
    the right one, and the attended pairs, the prefill's included.
    """
    is_fed = jnp.arange(MAX_STEPS, dtype=jnp.int32)

    def one_token(step: Array, carry: tuple[Array, Cache, Array, Array]) -> Any:
        last, cache, likeliest, losses = carry
        active = step < num_steps
        token = jnp.where(step < num_forced, continuation[:, step], last)
        logits, cache, _ = decode_token(params, token, cache, active=active, settings=settings)
        last, loss = _predict(logits, continuation[:, jnp.minimum(step + 1, MAX_STEPS - 1)])
        is_here = (is_fed == step)[None, :] & active[:, None]
        likeliest = jnp.where(is_here, last[:, None], likeliest)
        return last, cache, likeliest, jnp.where(is_here, loss[:, None], losses)

    shape = len(num_steps), MAX_STEPS
    nothing = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    carry = (after_prompt[:, -1], cache, *nothing)
    _, cache, *found = jax.lax.fori_loop(0, jnp.max(num_steps), one_token, carry)
    likeliest, losses = constrain(found, settings.placement)
    return (likeliest, losses), cache.density


def compare_logits(
    exact: Float[Array, "N V"], logits: Float[Array, "N V"], target: Int[Array, "N"]
) -> tuple[Float[Array, "N"], Float[Array, "N"], Bool[Array, "N"]]:
    """Compares a distribution `q` over the next token with a reference distribution `p`.

        loss = -log q[target],   KL(p ‖ q) = Σ_v p[v] (log p[v] - log q[v])

    Args:
      exact: Logits of `p`.
      logits: Logits of `q`.
      target: The next tokens.

    Returns:
      Losses and divergences in nats, and whether both have the same likeliest token.
    """
    wanted, found = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(found, target[:, None], axis=-1)[:, 0]
    divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
    return loss, divergence, jnp.argmax(exact, axis=-1) == jnp.argmax(logits, axis=-1)


@partial(jax.jit, static_argnames=("plain", "settings"))
def compare_program(
    params: PyTree,
    dense: Cache,
    cache: Cache,
    tokens: Int[Array, "B U"],
    numbers: PyTree = None,
    *,
    plain: Settings,
    settings: Settings,
) -> tuple[Float[Array, "B V"], Float[Array, "B V"], Bool[Array, "B V"], Density]:
    """Feeds the same tokens to dense attention and to a policy, and compares their predictions.

    The comparison follows every token but the last.

    Args:
      params: Parameter tree.
      dense: Cache of dense attention.
      cache: Cache of the policy.
      tokens: The tokens, in order.
      numbers: Those of `Policy.for_program`, if they are not in the settings.
      plain: Model and dense attention.
      settings: Model and policy.

    Returns:
      Three values for each token after the first, `[B, U - 1]`: its loss `-log p` under the policy,
      `KL(p_dense ‖ p_policy)` of the prediction, both in nats, and whether policy and dense
      attention have the same likeliest token. Then the pairs that the policy attended to.
    """
    active, settings = jnp.ones(tokens.shape[:1], bool), settings.with_numbers(numbers)

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
    return losses, divergences, agrees, carry[1].density


def check_devices(params: PyTree, model_config: ModelConfig) -> None:
    """Raises a `NotImplementedError` for parameters whose placement evaluations do not support."""
    devices = devices_of(params)
    if len(devices) > 1 and placement_of(params, model_config) is None:
        raise NotImplementedError(
            f"params must lie on one device, or where sharding.place says, to be evaluated, "
            f"got {len(devices)} devices; load them with sharding=place(mesh, model_config)"
        )
    if any(device.process_index != jax.process_index() for device in devices):
        raise NotImplementedError(
            "params must lie on devices of one host to be evaluated, got those of several: the "
            "file of the results is one process's"
        )


class Measurement:
    """Measures rules on batches of prompts.

    If the question ends the prompt, the prompt is prefilled and the answer decoded; the phases
    `prefill` (the answer decoded densely) and `both` share one sparse prefill. If the tokens
    contain the answer, `prefill` prefills all of them and scores the answer's columns; `decode` and
    `both` prefill up to the question and are fed the rest one by one. Dense attention is measured
    like `prefill`.

    Attributes:
      batch: Prompts at a time.
    """

    def __init__(
        self,
        params: PyTree,
        model_config: ModelConfig,
        *,
        batch: int,
        policies: Mapping[Rule, Policy] | None = None,
    ) -> None:
        """Stores the arguments; programs are compiled when first used.

        Args:
          params: Parameter tree, on one device or a mesh.
          model_config: The model.
          batch: Prompts at a time.
          policies: Calibrated policies of the rules that need calibration.
        """
        self.batch = batch
        self._params, self._model_config = params, model_config
        self._policies = dict(policies or {})
        self._where = {
            "placement": placement_of(params, model_config),
            "on_one_device": lies_on_one_device(params),
        }

    def policy_of(self, rule: Rule) -> Policy:
        """Returns the policy of a rule, calibrated if the rule needs it."""
        return self._policies.get(rule) or rule.make()

    def dense_layers(self, rule: Rule) -> tuple[int, ...]:
        """Layers in which a rule does not select; none for dense attention."""
        if rule == DENSE:
            return ()
        sparse = sparse_layers(self._model_config, self.policy_of(rule))
        return tuple(i for i in range(self._model_config.num_layers) if i not in sparse)

    def _settings(self, policy: Policy, phase: str = "both") -> Settings:
        options: dict[str, Any] = self._where | {"policy": policy, "phase": phase}
        return Settings(model_config=self._model_config, **options)

    def _reading(self, rule: Rule, phase: str) -> Settings:
        """Settings for prefill: in phase `decode` dense, but with the policy's statistics."""
        return self._settings(self.policy_of(rule), "decode" if phase == "decode" else "both")

    def _decoding(self, rule: Rule, phase: str) -> Settings:
        """Settings for decoding: dense in phase `prefill`."""
        policy = self.policy_of(rule)
        # On a mesh the block size decides which rank stores a block, so dense keeps the cache's.
        return self._settings(Dense(block_size=policy.block_size) if phase == "prefill" else policy)

    def run(
        self, prompts: Prompts, rule: Rule, phases: Sequence[str], tokenizer: Any
    ) -> dict[str, Outcome]:
        """Measures a rule in some phases on one batch of prompts.

        Args:
          prompts: The batch, of one task.
          rule: The rule.
          phases: Its phases.
          tokenizer: A tokenizer of transformers.

        Returns:
          The outcome of every phase.
        """
        found: dict[str, Outcome] = {}
        made: dict[tuple[Settings, bool], tuple[Predicted, Cache]] = {}
        for phase in phases:
            # If the tokens lack the answer, the prompt is the whole either way.
            reads_all = phase == "prefill" or rule == DENSE or not prompts.has_answer
            key = self._reading(rule, phase), reads_all
            if key not in made:
                made.clear()  # memory is for one cache
                lengths = prompts.lengths if reads_all else prompts.prompt_lengths
                columns, targets = prompts.columns(lengths), prompts.targets()
                given = self._params, prompts.tokens, lengths, columns, targets
                made[key] = prefill_program(*given, settings=key[0])
            if reads_all and prompts.has_answer:
                found[phase] = self._score_prefill(prompts, *made[key])
            else:
                settings = self._decoding(rule, phase)
                found[phase] = self._decode(prompts, *made[key], settings, tokenizer)
        return found

    def _score_prefill(self, prompts: Prompts, predicted: Predicted, cache: Cache) -> Outcome:
        (likeliest, losses), density = jax.device_get((predicted, cache.density))
        count = len(prompts.samples)
        if prompts.task in LOSS_TASKS:
            return _outcome(count, density, losses=loss_in_prefill(prompts, losses))
        return _outcome(count, density, is_right=right_in_prefill(prompts, likeliest))

    def _decode(
        self,
        prompts: Prompts,
        predicted: Predicted,
        cache: Cache,
        settings: Settings,
        tokenizer: Any,
    ) -> Outcome:
        decoded = decode_program(
            self._params,
            cache_for(settings, cache),
            predicted[0],
            prompts.continuation,
            prompts.num_forced,
            prompts.num_steps,
            settings=settings,
        )
        before, ((likeliest, losses), density) = jax.device_get((predicted, decoded))
        first, first_losses = (x[:, -1] for x in before)
        count = len(prompts.samples)
        if prompts.task in LOSS_TASKS:
            found = loss_in_decode(prompts, first_losses, losses)
            return _outcome(count, density, losses=found)
        eos = self._model_config.eos_token_ids
        is_right = right_in_decode(prompts, first, likeliest, tokenizer, eos)
        return _outcome(count, density, is_right=is_right)

    def run_long(
        self, samples: Sequence[Sample], rule: Rule, phases: Sequence[str], *, num_tokens: int
    ) -> dict[str, Outcome]:
        """Measures a rule on long_decode, feeding it and dense attention token by token.

        In phase `decode` a rule continues what dense attention has read; in phase `both` it has
        read the text itself.

        Args:
          samples: At most `batch` samples of long_decode.
          rule: The rule.
          phases: Its phases.
          num_tokens: Tokens of a text, decoded ones included.

        Returns:
          The outcome of every phase.
        """
        rows = [*samples, *[samples[-1]] * (self.batch - len(samples))]
        tokens, _ = pad_right([sample.tokens for sample in rows], num_tokens)
        lengths = np.array([sample.answer_start for sample in rows], np.int32)
        answers = np.stack([sample.answer for sample in rows])
        ends = lengths[:, None] - 1, answers[:, :1]
        read = partial(prefill_program, self._params, tokens, lengths, *ends)
        plain, found = self._decoding(rule, "prefill"), dict[str, Outcome]()
        dense = read(settings=self._reading(rule, "decode"))[1]
        for phase in phases:
            settings = self._decoding(rule, phase)
            reads_itself = phase == "both" and rule != DENSE
            cache = read(settings=self._reading(rule, phase))[1] if reads_itself else dense
            caches = cache_for(plain, dense), cache_for(settings, cache)
            *values, density = jax.device_get(
                compare_program(self._params, *caches, answers, plain=plain, settings=settings)
            )
            names = ("losses", "divergences", "agreements")
            means = (x.mean(axis=1, dtype=np.float64)[: len(samples)] for x in values)
            found[phase] = _outcome(len(samples), density, **dict(zip(names, means, strict=True)))
        return found

    def probe(self, prompts: Prompts, rule: Rule, phases: Sequence[str]) -> dict[str, Probed]:
        """Measures mass recall and output error by sparse layer, and bytes read in decode.

        The query tokens are the ones each phase prefills and decodes, with the right answer in
        place of the generated one; `both` counts the query tokens of prefill and decode together.
        On a mesh every rank measures everything.

        Args:
          prompts: Prompts of one task.
          rule: The rule.
          phases: Its phases.

        Returns:
          The measurements of every phase in which the rule selects; for dense attention only bytes.
        """
        by_layer = self._dense_bytes(prompts)
        if rule == DENSE:
            every = by_layer * self._model_config.num_layers
            return {"both": Probed(decode_bytes=tuple(every.tolist()))}
        static = {"model_config": self._model_config, "policy": self.policy_of(rule)}
        probe = partial(probe_prefill, self._params, prompts.tokens, **static)
        before, cache = probe(prompts.lengths)
        sums, read = {"prefill": before}, None
        if set(phases) != {"prefill"}:
            if prompts.has_answer:
                before, cache = probe(prompts.prompt_lengths)
            told = prompts.continuation, prompts.num_told
            sums["decode"] = probe_decode(self._params, cache, *told, **static)
            sums["both"] = before + sums["decode"]
            own = sums["decode"].bytes_per_token()
            if own is not None:
                read = tuple((own + by_layer * len(self.dense_layers(rule))).tolist())
        found = {}
        for phase in phases:
            recall, error = sums[phase].by_layer()
            found[phase] = Probed(recall, error, None if phase == "prefill" else read)
        return found

    def _dense_bytes(self, prompts: Prompts) -> Float[np.ndarray, "3"]:
        """Counts the bytes that a dense layer reads for one decoded token of the probe."""
        model, dtype = self._model_config, self._params["embed"]["embedding"].dtype
        shape = LayerShape(model.num_heads, model.num_kv_heads, model.head_dim, dtype)
        positions = np.concatenate(
            [
                start + np.arange(count, dtype=np.int32)
                for start, count in zip(prompts.prompt_lengths, prompts.num_told, strict=True)
            ]
        )
        read = decode_bytes(Dense(), None, jnp.asarray(positions), shape=shape)
        return np.asarray(read, np.float64).mean(axis=-1)


def cache_for(settings: Settings, cache: Cache) -> Cache:
    """Returns the cache for a policy to continue: without statistics if it never selects."""
    if settings.policy.phases:
        return cache
    return dataclasses.replace(cache, statistics=None, made_for=())


def _outcome(count: int, density: Density, **found: Any) -> Outcome:
    """Makes the outcome of `count` prompts, without the batch's padding rows."""
    density = jax.tree.map(lambda x: x[..., :count], density)
    return Outcome(**{"is_right": None, "losses": None} | found, density=density)
