"""Policies that a model and held-out prompts set: knobs to a density, and Adamas's thresholds.

MInference and FlexPrefill keep what the model and the prompt make them keep; a field of theirs, the
*knob*, makes it more or less. To compare them at a density, `calibrate` finds the knob by bisection
on prompts that no result counts, never on those that are scored, and it stays as it is for all of
them. Adamas's published thresholds are absolute numbers, and keys of another model may lie on
another scale: where none reaches the outer thresholds, half of every code goes unused.
`fit_thresholds` takes the quartiles of the model's own keys. `set_density` and `fit_policy` do what
one policy needs, and `RuleCalibration` what those of an evaluation do.
"""

import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.cache import Density, sparse_layers
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.evaluation.programs import Programs, read_prompts, whole_batch
from sketchwalk_jax.evaluation.settings import OVER, Rule
from sketchwalk_jax.evaluation.tasks import draw_samples, text_for
from sketchwalk_jax.evaluation.text import Text, read_text
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies import Policy, changed_fields, takes_density
from sketchwalk_jax.policies.adamas import AdamasConfig, key_quartiles
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.sharding import constrain, placement_of
from sketchwalk_jax.validation import check_choice, check_number

PyTree = Any
_log = logging.getLogger(__name__)

HELD_OUT = 2**32
"""Added to the seed of an evaluation, gives that of its held-out prompts."""
_KEYS_OF_A_PROMPT = 1024
_DECODED = 64  # positions that stand for those of decoded tokens
_STEPS = 10_000  # densities are set to four decimals
_TOO_MUCH = 0.05  # share of a density by which a rule over all layers may be above it
_FITTED_ON: tuple[str, ...] = ("text_loss", "multi_key")
_MAX_TOKENS_OF_KEYS = 8192  # quartiles of keys depend little on the length
_LEAST_TOKENS = 128  # of a prompt that a density is set on


def held_out_prompts(
    text: Text,
    tokenizer: Any,
    *,
    tasks: Sequence[str],
    num_tokens: int,
    seed: int = 0,
    wording: str = "plain",
) -> tuple[Int[np.ndarray, "P T"], Int[np.ndarray, "P"]]:
    """One prompt of each task that no evaluation with a seed below 2^32 scores.

    Args:
      text: Text to hide facts in.
      tokenizer: A tokenizer of transformers.
      tasks: Names of tasks.
      num_tokens: Length of the prompts.
      seed: Seed of the evaluation.
      wording: As in `draw_samples`.

    Returns:
      Tokens, right-padded, and lengths, as `calibrate` takes them.

    Raises:
      ValueError: If `num_tokens` leaves no room for a task.
    """
    options = {"num_tokens": num_tokens, "count": 1, "seed": HELD_OUT + seed}
    drawn = [
        draw_samples(task, text_for(task, text), tokenizer, wording=wording, **options)[0].tokens
        for task in tasks
    ]
    padded = [np.pad(one, (0, num_tokens - len(one))) for one in drawn]
    return np.stack(padded).astype(np.int32), np.array([len(one) for one in drawn], np.int32)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What `calibrate` found.

    Attributes:
      policy: The policy with its knob set.
      density: Measured with it on the calibration prompts, in the layers that were to count.
      tried: Values of the knob and the densities that they gave, in the order tried.
    """

    policy: PrefillPolicy
    density: float
    tried: tuple[tuple[float, float], ...]

    @property
    def least(self) -> float:
        """The least density of those tried."""
        return min(density for _, density in self.tried)

    @property
    def settings(self) -> dict[str, Any]:
        """The knob, and the other fields of the policy that are not at their defaults."""
        return {self.policy.knob: self.policy.knob_value} | changed_fields(self.policy)


def calibrate(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "P T"],
    lengths: Int[Array | np.ndarray, "P"] | None = None,
    *,
    policy: PrefillPolicy,
    model_config: ModelConfig,
    density: float,
    tolerance: float = 0.02,
    max_steps: int = 12,
    batch: int | None = None,
    over: str = "sparse_layers",
    program: Callable[..., Density] | None = None,
) -> Calibration:
    """Finds the value of a policy's knob that gives a density.

    The density is the attended over all causal pairs of the prompts, mean over the layers in which
    the policy selects, as measured while it reads them. Where the least value of the knob keeps
    too much, the policy's floors are lowered (`relaxed`); where that does not help either, the
    least density is taken, with a warning. One compiled program serves all values.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded, of about the length that the policy is to be used at: the
        density of one setting depends on it. They should not be prompts that are scored.
      lengths: Tokens of each prompt; all `T` by default.
      policy: The policy, such as `MInferenceConfig()`.
      model_config: The model.
      density: The density to reach, in (0, 1].
      tolerance: How far from it is near enough, as a share of it.
      max_steps: Most values to try; the best is taken.
      batch: Prompts at a time; all by default.
      over: Layers whose mean density counts: `"sparse_layers"` or `"all_layers"`.
      program: `prefill_density` compiled for `batch` prompts of `T` tokens and `unset(policy)`;
        compiled here by default.

    Returns:
      The policy with its knob set, and what it gave.

    Raises:
      ValueError: If the policy has no knob, or the density is out of range.

    Example:
      >>> found = calibrate(params, tokens, policy=MInferenceConfig(),
      ...                   model_config=model_config, density=0.2)  # doctest: +SKIP
      >>> found.policy.scale, found.density  # doctest: +SKIP
      (0.2265625, 0.2013)
    """
    if not isinstance(policy, PrefillPolicy):
        raise ValueError(f"policy must have a knob, as MInferenceConfig has, got {policy!r}")
    check_number("density", density, "(0, 1]")
    tokens = jnp.asarray(tokens, jnp.int32)
    if lengths is None:
        lengths = np.full(tokens.shape[:1], tokens.shape[1])
    prompts = params, tokens, jnp.asarray(lengths, jnp.int32)
    size = whole_batch(batch or tokens.shape[0], placement_of(params, model_config))
    published = unset(policy)

    def measure(value: float, *, policy: PrefillPolicy) -> float:
        same, run = unset(policy), program
        if run is None or same != published:
            run = functools.partial(prefill_density, policy=same, model_config=model_config)
        return _measure(
            run,
            *prompts,
            value,
            policy.floor_value,
            layers=sparse_layers(model_config, policy)
            if over == "sparse_layers"
            else range(model_config.num_layers),
            batch=size,
        )

    check_choice("over", over, OVER)
    found = _bisect(measure, policy, density, tolerance, max_steps)
    while found.least > density * (1 + tolerance):
        relaxed = found.policy.relaxed()
        if relaxed is None:
            warnings.warn(
                f"{type(policy).__name__} keeps at least {found.least:.3f} of prompts of "
                f"{int(np.max(lengths))} tokens: density {density:g} is out of its reach",
                stacklevel=2,
            )
            break
        begin = relaxed.with_knob(policy.knob_value)
        found = _bisect(measure, begin, density, tolerance, max_steps)
    return found


def _bisect(
    measure: Any, policy: PrefillPolicy, density: float, tolerance: float, max_steps: int
) -> Calibration:
    """The value nearest to the density, from the policy's own one on."""
    low, high = policy.knob_range
    value, tried = policy.knob_value, list[tuple[float, float]]()
    while len(tried) < max_steps:
        measured = measure(value, policy=policy)
        tried.append((value, measured))
        if abs(measured - density) <= tolerance * density:
            break
        if measured > density:
            high = value
        else:
            low = value
        if value == policy.knob_range[0] and measured > density:
            break
        # What is above from the start may be so at the least value too.
        value = low if len(tried) == 1 and measured > density else 0.5 * (low + high)
    value, measured = min(tried, key=lambda one: abs(one[1] - density))
    return Calibration(policy.with_knob(value), measured, tuple(tried))


def _measure(
    program: Callable[..., Density],
    params: PyTree,
    tokens: Int[Array, "P T"],
    lengths: Int[Array, "P"],
    value: float,
    floor: int,
    *,
    layers: Sequence[int],
    batch: int,
) -> float:
    """The measured density at one value of knob and floor, in some layers."""
    attended, causal, count = 0.0, 0.0, tokens.shape[0]
    for start in range(0, count, batch):
        # The last batch repeats the last prompt, which is counted once.
        rows = np.minimum(np.arange(start, start + batch), count - 1)
        found = program(
            params,
            tokens[rows],
            lengths[rows],
            jnp.asarray(value, jnp.float32),
            jnp.asarray(floor, jnp.int32),
        )
        new = slice(min(batch, count - start))
        pairs = np.asarray(found.prefill_pairs, np.float64)[list(layers), new]
        attended += pairs.sum()
        causal += np.asarray(found.prefill_causal, np.float64)[new].sum() * len(pairs)
    return float(attended / causal)


def unset(policy: PrefillPolicy) -> PrefillPolicy:
    """The policy whatever its knob and its floor say: one program serves all of their values."""
    least = {} if policy.floor is None else {policy.floor: 1}
    return dataclasses.replace(policy.with_knob(policy.knob_range[0]), **least)


@functools.partial(jax.jit, static_argnames=("policy", "model_config"))
def prefill_density(
    params: PyTree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    value: Float[Array, ""],
    floor: Int[Array, ""],
    *,
    policy: PrefillPolicy,
    model_config: ModelConfig,
) -> Density:
    """Reads prompts with knob and floor at values that are not known when it is compiled.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded.
      lengths: Tokens of each.
      value: The knob.
      floor: The floor; of no effect where the policy has none.
      policy: The policy, `unset`.
      model_config: The model.

    Returns:
      The pairs that were attended to.
    """
    settings = Settings(
        model_config=model_config,
        policy=policy.with_traced(value, floor),
        placement=placement_of(params, model_config),
    )
    return read_prompts(params, tokens, lengths, settings=settings)[1].density


@dataclasses.dataclass(frozen=True)
class FittedThresholds:
    """What `fit_thresholds` found.

    Attributes:
      policy: The policy with its thresholds set.
      before: Fields that were set before, and their values.
    """

    policy: AdamasConfig
    before: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that were set."""
        return {**self.before, "thresholds": list(self.policy.thresholds)}


def fit_thresholds(
    params: PyTree,
    tokens: Int[Array | np.ndarray, "P T"],
    lengths: Int[Array | np.ndarray, "P"] | None = None,
    *,
    policy: AdamasConfig,
    model_config: ModelConfig,
    program: Callable[..., Array] | None = None,
) -> FittedThresholds:
    """Sets the thresholds to the quartiles of a model's own keys, to four decimals.

    Args:
      params: Parameter tree.
      tokens: Prompts, right-padded, read densely and at once. They should not be prompts that are
        scored.
      lengths: Tokens of each prompt; all `T` by default.
      policy: The policy. Keys of its dense layers do not count.
      model_config: The model.
      program: `quartiles_of_keys` compiled for these prompts; compiled here by default.

    Returns:
      The policy with new thresholds; as it is where no layer is sparse.

    Raises:
      ValueError: If the model's head_dim has no Hadamard transform.

    Example:
      >>> found = fit_thresholds(params, tokens, policy=AdamasConfig(),
      ...                        model_config=model_config)  # doctest: +SKIP
      >>> found.policy.thresholds  # doctest: +SKIP
      (-1.1680, 0.0094, 1.1765)
    """
    layers = sparse_layers(model_config, policy)
    if not layers:
        return FittedThresholds(policy)
    if lengths is None:
        lengths = np.full(tokens.shape[:1], tokens.shape[1])
    if program is None:
        program = functools.partial(quartiles_of_keys, layers=layers, model_config=model_config)
    # Prompts of no tokens, of which ranks have as many each, have no keys.
    more = whole_batch(len(tokens), placement_of(params, model_config)) - len(tokens)
    tokens, lengths = jnp.pad(tokens, ((0, more), (0, 0))), jnp.pad(lengths, (0, more))
    quartiles = program(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))
    low, middle, high = (round(one, 4) for one in np.asarray(quartiles).tolist())
    return FittedThresholds(dataclasses.replace(policy, thresholds=(low, middle, high)))


@functools.partial(jax.jit, static_argnames=("layers", "model_config"))
def quartiles_of_keys(
    params: PyTree,
    tokens: Int[Array, "P T"],
    lengths: Int[Array, "P"],
    *,
    layers: tuple[int, ...],
    model_config: ModelConfig,
) -> Float[Array, "3"]:
    """Quartiles over some layers, heads, channels and tokens evenly spread."""
    where, policy = placement_of(params, model_config), Dense()
    settings = Settings(model_config=model_config, policy=policy, placement=where)
    _, cache = read_prompts(params, tokens, lengths, settings=settings)
    num_tokens = tokens.shape[1]
    stride = (lengths[:, None] + _KEYS_OF_A_PROMPT - 1) // _KEYS_OF_A_PROMPT
    count = min(_KEYS_OF_A_PROMPT, num_tokens)
    places = jnp.arange(count, dtype=jnp.int32)[None, :] * stride
    is_real = (places < lengths[:, None])[None, :, :, None, None]
    places = jnp.minimum(places, num_tokens - 1)
    if where is not None and where.blocks is not None:
        places = where.blocks.place_in_cache(places, cache.capacity, policy.block_size)
    places = places[None, :, :, None, None]
    keys = jnp.take_along_axis(cache.key[np.array(layers, int)], places, axis=2)
    if where is not None and where.heads is not None:
        keys = keys[:, :, :, :: where.heads.copies]
    return constrain(key_quartiles(jnp.where(is_real, keys, jnp.nan)), where)


def set_density(
    policy: PrefillPolicy,
    params: PyTree,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    density: float,
    num_tokens: int,
) -> Calibration:
    """Sets a policy's knob to a density, on plain English of about the length of prompts to come.

    Args:
      policy: The policy.
      params: Parameter tree.
      model_config: The model.
      tokenizer: A tokenizer of transformers.
      density: As in `calibrate`.
      num_tokens: Tokens of a prompt, of which at least 128 and at most the model's context are
        taken.

    Returns:
      What `calibrate` found.
    """
    num_tokens = min(max(num_tokens, _LEAST_TOKENS), model_config.context_length)
    text = held_out_prompts(read_text(), tokenizer, tasks=_FITTED_ON[:1], num_tokens=num_tokens)
    return calibrate(params, *text, policy=policy, model_config=model_config, density=density)


def fit_policy(
    policy: Policy,
    params: PyTree,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    num_tokens: int,
    density: float | None = None,
    is_fitted: bool = False,
) -> Policy:
    """The policy as it suits a model, on prompts that no harness has.

    A knob is set on two of one length, English text and a question about codes hidden in such text:
    what is kept of one that ends in a question is more. Thresholds take the text alone.

    Args:
      policy: The policy.
      params: Parameter tree.
      model_config: The model.
      tokenizer: A tokenizer of transformers.
      num_tokens: Tokens of a prompt: for a density, about those of the prompts to come. Thresholds
        take at most 8,192.
      density: What a policy with a knob is calibrated to; as it is without.
      is_fitted: Whether the thresholds of Adamas are the model's already.

    Returns:
      The policy with its knob or thresholds set; others as they are.

    Raises:
      ValueError: If the prompts do not fit `num_tokens`, or the text is shorter.
    """
    has_target = isinstance(policy, PrefillPolicy) and density is not None
    if not has_target and (is_fitted or not isinstance(policy, AdamasConfig)):
        return policy
    tasks = _FITTED_ON
    if isinstance(policy, AdamasConfig):
        num_tokens, tasks = min(num_tokens, _MAX_TOKENS_OF_KEYS), _FITTED_ON[:1]
    tokens, lengths = held_out_prompts(read_text(), tokenizer, tasks=tasks, num_tokens=num_tokens)
    if isinstance(policy, AdamasConfig):
        fitted = fit_thresholds(params, tokens, lengths, policy=policy, model_config=model_config)
        return fitted.policy
    assert isinstance(policy, PrefillPolicy) and density is not None
    found = calibrate(
        params,
        tokens,
        lengths,
        policy=policy,
        model_config=model_config,
        density=density,
        batch=1,
    )
    _log.info("%s: density %.3f on held-out prompts", found.settings, found.density)
    return found.policy


def is_set_by_model(rule: Rule) -> bool:
    """Whether a rule is calibrated to a density, or has thresholds to be fitted."""
    return rule.is_calibrated or rule.is_fitted or isinstance(rule.make(), AdamasConfig)


@dataclasses.dataclass(frozen=True)
class FittedDensity:
    """What `fit_density` found.

    Attributes:
      policy: The policy with its density set.
      density: What that gives, mean over all layers.
      least: The least that the policy can give.
    """

    policy: Policy
    density: float
    least: float

    @property
    def settings(self) -> dict[str, Any]:
        """The field that was set."""
        policy: Any = self.policy
        return {"density": policy.density}


def layers_density(
    policy: Policy, model_config: ModelConfig, *, num_tokens: int, phase: str
) -> float:
    """The density that a budget gives, mean over all layers, whatever the prompt says.

    Row `i` keeps `budget[i]` units, its own among them. With `n` dense layers of `L`, and mean
    density `s` of the others, it is `(n + (L - n) s) / L`. A policy with a plan has a budget for
    each of these.

    Args:
      policy: The policy.
      model_config: The model.
      num_tokens: Tokens of a prompt.
      phase: `"prefill"` for all of its tokens as queries, `"decode"` for the last 64 of them.

    Returns:
      Attended over causal pairs.

    Raises:
      ValueError: If the policy has no budget that its density sets.
    """
    budget: Any = getattr(policy, "budget", None)
    if budget is None or not takes_density(policy):
        raise ValueError(f"policy must have a budget by its density, got {policy!r}")
    unit_size = getattr(policy, "unit_size", policy.block_size)
    positions = np.arange(num_tokens)[0 if phase == "prefill" else -_DECODED :]
    units = positions // unit_size
    budgets = getattr(policy, "budgets", budget)  # of the sparse layers, or of all alike
    kept = np.atleast_2d(budgets(int(units[-1]) + 1))[:, units].astype(np.int64)
    pairs = (kept - 1) * unit_size + positions % unit_size + 1
    sparse = float(pairs.mean(axis=0).sum() / (positions + 1).sum())
    num_layers = model_config.num_layers
    count = num_layers - len(sparse_layers(model_config, policy))
    return (count + (num_layers - count) * sparse) / num_layers


def fit_density(
    policy: Policy,
    model_config: ModelConfig,
    *,
    density: float,
    num_tokens: int,
    phase: str,
) -> FittedDensity:
    """Finds the `density` of a policy whose mean over all layers is a given one, by bisection.

    The budget of such a policy depends on positions alone, so that no prompt has to be read.

    Args:
      policy: The policy.
      model_config: The model.
      density: The mean to reach, in (0, 1].
      num_tokens: As in `layers_density`.
      phase: As there.

    Returns:
      The policy, and what it gives: the least density above what is asked for if even that is more.

    Raises:
      ValueError: If the density is out of range, or the policy has no budget that it sets.

    Example:
      >>> found = fit_density(SketchWalkConfig.paper(), model_config, density=0.2,
      ...                     num_tokens=8192, phase="prefill")  # doctest: +SKIP
      >>> found.policy.density, found.density  # doctest: +SKIP
      (0.1358, 0.2)
    """
    check_number("density", density, "(0, 1]")

    def at(value: float) -> Policy:
        fields: dict[str, Any] = {"density": value}
        return dataclasses.replace(policy, **fields)

    def give(value: float) -> float:
        made = at(value)
        return layers_density(made, model_config, num_tokens=num_tokens, phase=phase)

    low, high = 1, _STEPS
    while low < high:  # the least step that reaches the density
        middle = (low + high) // 2
        low, high = (low, middle) if give(middle / _STEPS) >= density else (middle + 1, high)
    near = min((max(low - 1, 1), low), key=lambda step: abs(give(step / _STEPS) - density))
    return FittedDensity(at(near / _STEPS), give(near / _STEPS), give(1 / _STEPS))


@dataclasses.dataclass(frozen=True)
class SetBefore:
    """What an earlier call found, as its rows say.

    Attributes:
      policy: The policy with its fields set.
      settings: These fields.
    """

    policy: Policy
    settings: dict[str, Any]

    @classmethod
    def of(cls, rule: Rule, settings: Mapping[str, Any]) -> "SetBefore":
        """The policy of a rule with fields as a row has them, lists for tuples."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
        }
        return cls(dataclasses.replace(rule.make(), **fields), dict(settings))


@dataclasses.dataclass(frozen=True)
class OutOfReach:
    """A rule that is not run, because it cannot be as sparse as it should be.

    Attributes:
      least: Its least density, mean over the layers that count.
    """

    least: float


class RuleCalibration:
    """Sets the rules of one length that need it; their programs are compiled from the beginning."""

    def __init__(
        self,
        programs: Programs,
        rules: Iterable[Rule],
        model_config: ModelConfig,
        *,
        num_tasks: int,
        num_tokens: int,
        batch: int,
    ) -> None:
        """Starts to compile.

        Args:
          programs: Where programs are compiled.
          rules: Rules, of which those with neither a knob nor thresholds are passed over.
          model_config: The model.
          num_tasks: Tasks of the evaluation, each of which gives one prompt.
          num_tokens: Length of the prompts.
          batch: Most prompts at a time.
        """
        self._rules = sorted(
            filter(is_set_by_model, rules), key=lambda rule: (str(rule), str(rule.phases))
        )
        self._programs, self._model_config = programs, model_config
        self._num_tokens = num_tokens
        self._batch = whole_batch(min(batch, num_tasks), programs.placement)
        self._measured = [
            rule for rule in self._rules if isinstance(rule.make(), PrefillPolicy | AdamasConfig)
        ]
        for rule in self._measured:
            self._program(rule.make())

    def _program(self, policy: Policy) -> Future[Any]:
        def integers(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        prompts = integers(self._batch, self._num_tokens), integers(self._batch)
        static: dict[str, Any] = {"model_config": self._model_config}
        if isinstance(policy, AdamasConfig):
            static["layers"] = sparse_layers(self._model_config, policy)
            return self._programs.start(quartiles_of_keys, *prompts, **static)
        assert isinstance(policy, PrefillPolicy)
        value, floor = jax.ShapeDtypeStruct((), jnp.float32), integers()
        static["policy"] = unset(policy)
        return self._programs.start(prefill_density, *prompts, value, floor, **static)

    def run(
        self,
        params: PyTree,
        text: Text,
        tokenizer: Any,
        *,
        tasks: Sequence[str],
        seed: int,
        wording: str = "plain",
        before: Callable[[str], object] = str,
    ) -> dict[Rule, "Found"]:
        """Calibrates.

        Args:
          params: Parameter tree.
          text: As in `held_out_prompts`.
          tokenizer: As in `held_out_prompts`.
          tasks: Names of the tasks.
          seed: Seed of the evaluation.
          wording: As in `held_out_prompts`.
          before: Is told what is done next.

        Returns:
          What was found for each rule that needs it.
        """
        found: dict[Rule, Found] = {}
        for rule in self._rules:
            if rule not in self._measured:
                found[rule] = self._fit(rule)
        if self._measured:
            tokens, lengths = held_out_prompts(
                text,
                tokenizer,
                tasks=tasks,
                num_tokens=self._num_tokens,
                seed=seed,
                wording=wording,
            )
            for rule in self._measured:
                found[rule] = self._set(rule, params, tokens, lengths, before)
        return found

    def _fit(self, rule: Rule) -> FittedDensity | OutOfReach:
        """Sets the field `density` of a rule by its budget."""
        policy = rule.make()
        assert rule.density is not None and rule.phases is not None
        found = fit_density(
            policy,
            self._model_config,
            density=rule.density,
            num_tokens=self._num_tokens,
            phase="decode" if rule.phases == ("decode",) else "prefill",
        )
        return _if_reached(found, rule.density)

    def _set(
        self,
        rule: Rule,
        params: PyTree,
        tokens: Int[np.ndarray, "P T"],
        lengths: Int[np.ndarray, "P"],
        before: Callable[[str], object],
    ) -> "Found":
        before(f"calibrating {rule}, {self._num_tokens} tokens")
        policy = rule.make()
        program = self._program(policy).result()
        if isinstance(policy, AdamasConfig):
            settings: dict[str, Any] = {}
            if rule.is_fitted:
                fitted = self._fit(rule)
                if isinstance(fitted, OutOfReach):
                    return fitted
                assert isinstance(fitted.policy, AdamasConfig)
                policy, settings = fitted.policy, fitted.settings
            found = fit_thresholds(
                params,
                tokens[: self._batch],
                lengths[: self._batch],
                policy=policy,
                model_config=self._model_config,
                program=program,
            )
            return dataclasses.replace(found, before=settings)
        assert isinstance(policy, PrefillPolicy) and rule.density is not None
        is_whole = rule.over == "all_layers"
        num_sparse = len(sparse_layers(self._model_config, policy))
        dense_share = 1 - num_sparse / self._model_config.num_layers
        if is_whole and dense_share >= rule.density:
            return OutOfReach(dense_share)  # no knob can mend that: nothing is tried
        calibration = calibrate(
            params,
            tokens,
            lengths,
            policy=policy,
            model_config=self._model_config,
            density=rule.density,
            batch=self._batch,
            over=rule.over,
            program=program,
        )
        return _if_reached(calibration, rule.density) if is_whole else calibration


Found = Calibration | FittedThresholds | FittedDensity | SetBefore | OutOfReach
"""What calibration makes of a rule."""


def _if_reached[Reached: (Calibration, FittedDensity)](
    found: Reached, density: float
) -> Reached | OutOfReach:
    """What was found, unless it is too far above the density that it was to reach."""
    is_reached = found.density <= density * (1 + _TOO_MUCH)
    return found if is_reached else OutOfReach(found.least)
