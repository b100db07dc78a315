"""Every rule and phase on one batch of prompts, with as few prefills as they need."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.cache import Cache
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.evaluation.probe import ProbeSums, decode_bytes, probe_decode, probe_prefill
from sketchwalk_jax.evaluation.programs import Prefilled, Programs, Readers
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
from sketchwalk_jax.evaluation.tasks import LOSS_TASKS
from sketchwalk_jax.evaluation.together import Together
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies import LayerShape, Policy
from sketchwalk_jax.policies.dense import Dense

PyTree = Any
Wanted = Mapping[Rule, Sequence[str]]
"""Phases to run, by rule."""

# Of one program, which grows with every one; the programs are compiled side by side.
_MAX_PROBED = 8


def start_programs(
    programs: Programs, wanted: Wanted, policies: Mapping[Rule, Policy], **shape: int
) -> None:
    """Starts to compile what rules need for themselves; arguments as in `Measurement`."""
    for rule, phases in wanted.items():
        settings = programs.settings(policies[rule])
        if rule == DENSE or "prefill" in phases:
            programs.decode(programs.settings(_plain(policies[rule])), **shape)
        if rule != DENSE and {"prefill", "both"} & set(phases):
            programs.prefill(settings, **shape)
        if rule != DENSE and {"decode", "both"} & set(phases):
            programs.decode(settings, **shape)


def _plain(policy: Policy) -> Dense:
    """Dense attention to a cache of a policy, whose blocks lie on a mesh by their size."""
    return Dense(block_size=policy.block_size)


class Measurement:
    """Programs for prompts of one length, and what they find.

    Where the question ends the prompt, everything is prefilled and the answer decoded; sparse
    prefill is shared by the phases `prefill` (the answer decoded densely) and `both`. Where the
    answer is among the tokens, `prefill` reads all of them and scores the answer's columns;
    `decode` and `both` read what comes before the question and are fed the rest one by one. Dense
    attention is measured as `prefill` is.
    """

    def __init__(
        self,
        programs: Programs,
        params: PyTree,
        model_config: ModelConfig,
        wanted: Wanted,
        *,
        num_tokens: int,
        batch: int,
        probe_batch: int,
        policies: Mapping[Rule, Policy] | None = None,
    ) -> None:
        """Starts to compile.

        Args:
          programs: Where programs are compiled.
          params: Parameter tree.
          model_config: The model.
          wanted: Every rule and phase that some prompts will need.
          num_tokens: Tokens of the prompts with their answers.
          batch: Prompts at a time.
          probe_batch: Prompts to probe at a time; 0 leaves probing out.
          policies: Calibrated policies, of the rules that need it.
        """
        self._programs, self._params, self._model_config = programs, params, model_config
        self.batch, self.probe_batch = batch, probe_batch
        self._shape = {"batch": batch, "num_tokens": num_tokens}
        self.readers = Readers(wanted, policies or {}, model_config, programs.placement)
        self._policies = self.readers.policies
        by_layers: dict[tuple[int, ...], list[Rule]] = {}
        for rule in wanted if probe_batch else ():
            if rule != DENSE:
                by_layers.setdefault(self.readers.dense_layers(rule), []).append(rule)
        self._probes = [
            some for rules in by_layers.values() for some in itertools.batched(rules, _MAX_PROBED)
        ]
        self._probe_shape = {"batch": probe_batch, "num_tokens": num_tokens}
        self._start(wanted)

    def _start(self, wanted: Wanted) -> None:
        """Compiles in the order in which programs are needed."""
        for policy in self.readers.all:
            self._prefill_program(policy)
        start_programs(self._programs, wanted, self._policies, **self._shape)
        for rules in self._probes:
            self._probe_programs(rules)

    def _prefill_program(self, policy: Policy) -> Future[Any]:
        return self._programs.prefill(self._programs.settings(policy), **self._shape)

    def _decode_program(self, policy: Policy) -> Future[Any]:
        return self._programs.decode(self._programs.settings(policy), **self._shape)

    def run(
        self, prompts: Prompts, wanted: Wanted, tokenizer: Any, *, after: Any = None
    ) -> dict[tuple[Rule, str], Outcome]:
        """Measures rules in their phases on one batch.

        Args:
          prompts: The batch, of one task.
          wanted: Phases of each rule.
          tokenizer: A tokenizer of transformers.
          after: Called whenever a rule is done.

        Returns:
          The outcome of every rule and phase.
        """
        found: dict[tuple[Rule, str], Outcome] = {}
        dense: dict[tuple[Policy, bool], Prefilled] = {}
        for rule, phases in wanted.items():
            sparse: dict[tuple[Policy, bool], Prefilled] = {}
            for phase in phases:
                is_sparse = rule != DENSE and phase != "decode"
                policy = self._policies[rule] if is_sparse else self.readers.of(rule)
                # Where the answer is not among the tokens, both are the same prompt.
                reads_all = phase == "prefill" or rule == DENSE or not prompts.has_answer
                made = sparse if is_sparse else dense
                if any(other != policy for other, _ in made):
                    made.clear()  # memory is for the caches of one
                if (policy, reads_all) not in made:
                    made[policy, reads_all] = self._prefill(prompts, policy, reads_all=reads_all)
                if reads_all and prompts.has_answer:
                    outcome = self._score_prefill(prompts, made[policy, reads_all])
                else:
                    outcome = self._decode(
                        prompts, made[policy, reads_all], policy, rule, phase, tokenizer
                    )
                found[rule, phase] = outcome
            if after is not None:
                after()
        return found

    def _prefill(self, prompts: Prompts, policy: Policy, *, reads_all: bool) -> Prefilled:
        lengths = prompts.lengths if reads_all else prompts.prompt_lengths
        program = self._prefill_program(policy).result()
        return program(
            self._params, prompts.tokens, lengths, prompts.columns(lengths), prompts.targets()
        )

    def _score_prefill(self, prompts: Prompts, made: Prefilled) -> Outcome:
        likeliest, losses, density = jax.device_get(
            (made.likeliest, made.losses, made.cache.density)
        )
        if prompts.task in LOSS_TASKS:
            return _outcome(prompts, density, losses=loss_in_prefill(prompts, losses))
        return _outcome(prompts, density, is_right=right_in_prefill(prompts, likeliest))

    def _decode(
        self,
        prompts: Prompts,
        made: Prefilled,
        reader: Policy,
        rule: Rule,
        phase: str,
        tokenizer: Any,
    ) -> Outcome:
        is_sparse = rule != DENSE and phase != "prefill"
        policy = self._policies[rule] if is_sparse else _plain(reader)
        program = self._decode_program(policy).result()
        decoded = program(
            self._params,
            self._cache_for(made.cache, rule, phase),
            made.first,
            prompts.continuation,
            prompts.num_forced,
            prompts.num_steps,
        )
        first, first_losses, likeliest, losses, density = jax.device_get(
            (made.first, made.losses, decoded.likeliest, decoded.losses, decoded.density)
        )
        if prompts.task in LOSS_TASKS:
            found = loss_in_decode(prompts, first_losses[:, -1], losses)
            return _outcome(prompts, density, losses=found)
        eos = self._model_config.eos_token_ids
        is_right = right_in_decode(prompts, first, likeliest, tokenizer, eos)
        return _outcome(prompts, density, is_right=is_right)

    def _cache_for(self, cache: Cache, rule: Rule, phase: str) -> Cache:
        """The cache with the statistics that the decode program of a rule expects."""
        if rule == DENSE or phase == "prefill":
            return dataclasses.replace(cache, statistics=None, made_for=())
        return cache if phase == "both" else self.readers.cache_of(rule, cache)

    def _probe_programs(self, rules: Sequence[Rule]) -> tuple[Future[Any], Future[Any]]:
        together = Together.of([self._policies[rule] for rule in rules])
        static = {"model_config": self._model_config, "together": together}
        batch, num_tokens = self._probe_shape["batch"], self._probe_shape["num_tokens"]
        lengths = jax.ShapeDtypeStruct((batch,), np.dtype("int32"))
        tokens = jax.ShapeDtypeStruct((batch, num_tokens), lengths.dtype)
        continuation = jax.ShapeDtypeStruct((batch, MAX_STEPS), lengths.dtype)
        # Not that of programs: on a mesh every rank measures all of it.
        settings = Settings(model_config=self._model_config, policy=together, phase="decode")
        cache = self._programs.cache(settings, **self._probe_shape)
        return (
            self._programs.start(probe_prefill, tokens, lengths, **static),
            self._programs.start(probe_decode, cache, continuation, lengths, **static),
        )

    def probe(self, prompts: Prompts) -> dict[tuple[Rule, str], Probed]:
        """Mass recall and output error by sparse layer, bytes read in decode, by rule and phase.

        The tokens are those that each phase prefills and decodes, the right answer in the place of
        the generated one; `both` counts the query tokens of prefill and decode together.

        Args:
          prompts: As many prompts as `probe_batch`, of one task.

        Returns:
          What was found for every rule and phase, nothing where it does not select; of dense
          attention the bytes alone.
        """
        by_layer = self._dense_bytes(prompts)
        num_layers = self._model_config.num_layers
        found = {(DENSE, "both"): Probed(decode_bytes=_times(by_layer, num_layers))}
        for rules in self._probes:
            prefill, decode = (future.result() for future in self._probe_programs(rules))
            everything, cache = prefill(self._params, prompts.tokens, prompts.lengths)
            before = everything
            if prompts.has_answer:
                before, cache = prefill(self._params, prompts.tokens, prompts.prompt_lengths)
            behind = decode(self._params, cache, prompts.continuation, prompts.num_told)
            sums: dict[str, ProbeSums] = jax.device_get(
                {"prefill": everything, "decode": behind, "both": before}
            )
            sums["both"] += sums["decode"]
            for index, rule in enumerate(rules):
                read = sums["decode"].bytes_per_token(index)
                if read is not None:
                    keys, values, metadata = _times(by_layer, len(self.readers.dense_layers(rule)))
                    read = read[0] + keys, read[1] + values, read[2] + metadata
                for phase, some in sums.items():
                    own = None if phase == "prefill" else read
                    found[rule, phase] = Probed(*some.by_layer(index), own)
        return found

    def _dense_bytes(self, prompts: Prompts) -> tuple[float, float, float]:
        """Bytes that one layer which attends to everything reads for a token of the probe's."""
        model, dtype = self._model_config, self._params["embed"]["embedding"].dtype
        shape = LayerShape(model.num_heads, model.num_kv_heads, model.head_dim, dtype)
        positions = np.concatenate(
            [
                start + np.arange(count, dtype=np.int32)
                for start, count in zip(prompts.prompt_lengths, prompts.num_told, strict=True)
            ]
        )
        read = decode_bytes(Dense(), None, jnp.asarray(positions), shape=shape)
        keys, values, metadata = (
            float(np.asarray(part, np.float64).mean())
            for part in (read.keys, read.values, read.metadata)
        )
        return keys, values, metadata


def _times(parts: tuple[float, float, float], count: int) -> tuple[float, float, float]:
    keys, values, metadata = parts
    return count * keys, count * values, count * metadata


def _outcome(prompts: Prompts, density: Any, **found: Any) -> Outcome:
    """Without the rows that only fill the batch."""
    count = len(prompts.samples)
    density = jax.tree.map(lambda x: x[..., :count], density)
    return Outcome(**{"is_right": None, "losses": None} | found, density=density)
