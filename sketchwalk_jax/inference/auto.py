"""Chooses the policy of a call: the given one, the default, or the choice of an `Auto`.

`Auto` uses dense attention below the measured break-even length and sparse attention above it.

Selecting blocks takes time, so sparse attention is faster only from some length on. The break-even
asks for a little more: that prompts are read at least 1.15 times as fast as with dense attention,
and tokens decoded 1.03 times as fast, since a smaller gain is not worth the answers that are lost.
`Auto` is not a policy. It is replaced by a policy for each phase before tracing, because the choice
depends only on the sizes of the call. It uses the lengths up to which a policy keeps all keys, and
measurements: `break_even.json` in this folder, which `benchmarks/report.py` writes from the
benchmarks' results. For GPUs without measurements, it uses the times of the same code on an H200.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sketchwalk_jax.inference.cache import Cache
from sketchwalk_jax.models.config import ModelConfig, check_model_config
from sketchwalk_jax.pallas_kernels.dispatch import GPU_GROUPS, device_kind, group_of_gpus
from sketchwalk_jax.policies.base import Policy, check_policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.policies.recommended import RecommendedConfig
from sketchwalk_jax.validation import check_choice, describe

_BOTH = "both"
_TABLE = Path(__file__).with_name("break_even.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The number of tokens from which on a policy was measured to pay.

    How much time sparse attention saves grows with `tokens` and `width`: the attention of a prompt
    multiplies queries, that of a token reads keys and values. Linear layers take the same time with
    both, and a mixture of experts more of it where several sequences choose different experts.

    Attributes:
      device: The device, as JAX names its kind; or one of `dispatch.GPU_GROUPS`, for the break-even
        that is expected on GPUs that were not measured.
      phase: `"prefill"` or `"decode"`. `tokens` counts the prompt's tokens in prefill, and the
        tokens in each sequence's cache in decode.
      policy: Name of the policy's class.
      density: Density of the policy.
      block_size: Tokens per block of the policy.
      width: In prefill, the number of query heads times the size of a head. In decode, the number
        of sequences times the number of key/value heads times the size of a head.
      has_experts: Whether the model has a mixture of experts.
      tokens: The smallest measured length from which on the policy paid at every length: prompts
        were read 1.15 times as fast as with dense attention, tokens decoded 1.03 times as fast.
        Rows of other GPUs than Hopper's ask for no loss of time only. None if it did not pay at
        the longest length.
      longest: The longest length that was measured, in tokens.
    """

    device: str
    phase: str
    policy: str
    density: float
    block_size: int
    width: int
    tokens: int | None
    longest: int
    has_experts: bool = False

    @property
    def is_expected(self) -> bool:
        """Whether the break-even was measured with the same code on another GPU."""
        return self.device in GPU_GROUPS

    @property
    def size(self) -> str:
        """The width in words."""
        what = "queries" if self.phase == "prefill" else "keys of all sequences"
        return f"{what} {self.width:,} wide"

    def pays(self, tokens: int) -> bool | None:
        """Whether the policy is worth its losses; `None` at unmeasured lengths.

        If it is expected not to be at all measured lengths, it is not at longer lengths either.
        """
        if self.tokens is not None:
            return tokens >= self.tokens
        return False if tokens <= self.longest or self.is_expected else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of an `Auto`: two arguments of `generate`, and the reasons.

    Attributes:
      policy: The policy that chooses the key blocks of each query: the sparse policy, or `Dense()`
        if attention should be dense in both phases.
      phase: Phases with sparse attention: `"both"`, `"prefill"` or `"decode"`.
      reasons: The reason for each phase that had to be decided, in words.
    """

    policy: Policy
    phase: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Auto:
    """Chooses for each phase: sparse if that was measured to pay, dense otherwise.

    `generate`, `make_generate`, `stream` and `LanguageModel` use an `Auto` by default, and accept
    one in place of a policy. On NVIDIA GPUs without measurements, the choice follows measurements
    of the same code on an H200. The results of these functions say what was chosen
    (`Generation.choice`). `Auto` changes results: below the break-even, attention is dense. A phase
    in which the recommended policy keeps all keys (`min_tokens`, `max_kl`) is dense too, as lists
    of all keys would gain nothing. A call with a cache continues with the policy that the cache was
    made for: a cache of a short call, made without `max_tokens`, stays dense.

    A break-even applies to a call if it has the same device, policy and block size. Its density is
    the smallest measured one that is not below the call's; or, if there is none, the largest one,
    if that does not pay. If models with experts were measured, their break-evens apply to models
    with experts and to no others. Of these, the one with the call's width applies; between two
    measured widths, the longer one of both; beyond all of them, the nearest. If none applies, or
    the model is on several devices, the sparse policy runs as requested, and `Choice.reasons` says
    "no measurement".

    `prefill`, `decode_step` and `init_cache` need a policy, because they see only a part of a
    generation. Call `choose` to get a policy and a phase for them.

    Attributes:
      sparse: The sparse policy. Default: `SketchWalkConfig.recommended(plan=model_config.plan)`.
      measured: Break-evens to use. Default: the measurements that come with the package.

    Raises:
      ValueError: If `sparse` is not a policy.
    """

    sparse: Policy | None = None
    measured: tuple[BreakEven, ...] | None = None

    def __post_init__(self) -> None:
        """Checks both fields."""
        if self.sparse is not None:
            check_policy(self.sparse, "sparse")
        rows = () if self.measured is None else self.measured
        if not isinstance(rows, tuple) or not all(isinstance(one, BreakEven) for one in rows):
            raise ValueError(
                f"measured must be None or a tuple of BreakEven, got {describe(self.measured)}"
            )

    @property
    def block_size(self) -> int:
        """Tokens per block of the sparse policy."""
        return Policy.block_size if self.sparse is None else self.sparse.block_size

    def policy(self, model_config: ModelConfig) -> Policy:
        """The sparse policy, or the recommended one for this model if none was given."""
        default = recommended_policy(model_config)  # raises if it is not a `ModelConfig`
        return default if self.sparse is None else self.sparse

    def find(
        self,
        phase: str,
        model_config: ModelConfig,
        *,
        batch: int = 1,
        tokens: int | None = None,
        device: str | None = None,
    ) -> BreakEven | str:
        """Returns the break-even that applies to a model, or the reason why there is none.

        Args:
          phase: `"prefill"` or `"decode"`.
          model_config: Configuration of the model.
          batch: Number of sequences.
          tokens: Length of the call, on which the density depends with `max_kl`. Default: the
            policy's `density`, which is the least at any length.
          device: The kind of device. Default: the kind of JAX's default device.
        """
        policy = self.policy(model_config)
        device = device_kind() if device is None else device
        found = [one for one in self._rows if (one.device, one.phase) == (device, phase)]
        if not found and device == device_kind():
            group = group_of_gpus()
            found = [one for one in self._rows if (one.device, one.phase) == (group, phase)]
        if not found:
            return f"no measurement for this device, {device}"
        name, density = type(policy).__name__, getattr(policy, "density", None)
        if tokens is not None and isinstance(policy, RecommendedConfig):
            density = policy.density_at(phase, tokens)
        found = [one for one in found if one.policy == name and one.block_size == self.block_size]
        if not found or density is None:
            return f"no measurement of {name} with blocks of {self.block_size} on {device}"
        has_experts = model_config.num_experts > 0
        found = [one for one in found if one.has_experts == has_experts] or found
        width = attention_width(phase, model_config, batch=batch)
        enough = [one.density for one in found if one.density >= density]
        if enough:
            return _at_width([one for one in found if one.density == min(enough)], width)
        most = max(one.density for one in found)
        sparser = _at_width([one for one in found if one.density == most], width)
        if tokens is not None and sparser.pays(tokens) is False:
            return sparser  # what is denser does not pay either
        return f"no measurement of a density of {density:g} or more on {device}"

    def choose(
        self,
        model_config: ModelConfig,
        *,
        batch: int,
        tokens: int,
        max_new_tokens: int = 0,
        phase: str = _BOTH,
        is_spread: bool = False,
        cache: Cache | None = None,
    ) -> Choice:
        """Returns the policy and the phase to run with.

        Args:
          model_config: Configuration of the model.
          batch: Number of sequences.
          tokens: Number of tokens of each sequence before decoding, including padding: the prompt's
            tokens and the tokens in the cache. With `max_tokens`, `generate` counts the room for
            later prompts too, as they continue with the policy of the first.
          max_new_tokens: Maximum number of tokens to generate. The choice for decode adds half of
            it to `tokens`, because that is the average number of new tokens before a decode step.
          phase: Phase in which the policy may be sparse: `"both"`, `"prefill"` or `"decode"`.
          is_spread: Whether the model is on several devices, for which there are no measurements.
          cache: The cache that the call continues, if any. If it has statistics, the policy stays
            sparse in the phases where that pays, or in all its phases if it pays in none. If the
            policy needs statistics and the cache has none, attention is dense.

        Returns:
          A `Choice`. Its `policy` and `phase` are arguments of `generate`, `init_cache`, `prefill`
          and `decode_step`.

        Raises:
          ValueError: If the phase is unknown.

        Example:
          >>> from sketchwalk_jax.models.config import ModelConfig
          >>> shape = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "head_dim": 16}
          >>> model_config = ModelConfig(model_type="llama", vocab_size=64, num_layers=2,
          ...     num_kv_heads=2, max_position_embeddings=4096, **shape)
          >>> Auto(measured=()).choose(model_config, batch=1, tokens=2048).reasons[0]
          'prefill sparse: no measurement for this device, cpu'
        """
        check_choice("phase", phase, (_BOTH, "prefill", "decode"))
        policy, lengths = self.policy(model_config), {"prefill": tokens}
        lengths["decode"] = tokens + max_new_tokens // 2
        own = [one for one in policy.phases if phase in (_BOTH, one)]
        of_model = policy.for_layer(0, model_config.num_layers)
        places = {"prefill": (0, tokens), "decode": (tokens, tokens + max(1, max_new_tokens))}
        sparse, reasons = [], []
        for one in own:
            if isinstance(of_model, RecommendedConfig) and of_model.keeps_all(one, *places[one]):
                reasons.append(f"{one} dense: the policy would keep all keys")
                continue
            found = self.find(one, model_config, batch=batch, tokens=lengths[one])
            if is_spread:
                found = "no measurement on several devices"
            pays = None if isinstance(found, str) else found.pays(lengths[one])
            if pays is not False:
                sparse.append(one)
            why = _why(found, lengths[one], pays)
            reasons.append(f"{one} {'dense' if pays is False else 'sparse'}: {why}")
        if cache is not None:
            keeps = type(policy).init_statistics is not Policy.init_statistics
            if cache.made_for and not sparse:
                sparse, reasons = own, ["sparse: the cache was made so"]
            elif keeps and not cache.made_for:
                sparse, reasons = [], ["dense: the cache was made so"]
        if not sparse:
            return Choice(
                policy=Dense(block_size=policy.block_size), phase=_BOTH, reasons=tuple(reasons)
            )
        return Choice(
            policy=policy,
            phase=phase if sparse == own else sparse[0],
            reasons=tuple(reasons),
        )

    @property
    def _rows(self) -> Sequence[BreakEven]:
        return read_break_evens() if self.measured is None else self.measured


def _at_width(rows: Sequence[BreakEven], width: int) -> BreakEven:
    """Returns the break-even of a width: between two widths, the one of both that is longer."""
    narrower = [one for one in rows if one.width <= width]
    wider = [one for one in rows if one.width >= width]
    nearest = [max(narrower, key=lambda one: one.width)] if narrower else []
    nearest += [min(wider, key=lambda one: one.width)] if wider else []
    return max(nearest, key=lambda one: math.inf if one.tokens is None else one.tokens)


def attention_width(phase: str, model_config: ModelConfig, *, batch: int) -> int:
    """Returns the size of attention by which break-evens are looked up (`BreakEven.width`)."""
    if phase == "prefill":
        return model_config.num_heads * model_config.head_dim
    return batch * model_config.num_kv_heads * model_config.head_dim


def recommended_policy(model_config: ModelConfig) -> Policy:
    """Returns the recommended policy, with the model's plan if it has one.

    Raises:
      ValueError: If `model_config` is not a `ModelConfig`.
    """
    check_model_config(model_config)
    return RecommendedConfig(plan=model_config.plan)


def default_policy(model_config: ModelConfig) -> Auto:
    """Returns the policy of a call without one: an `Auto` of the recommended policy."""
    return Auto(recommended_policy(model_config))


def check_policy_or_auto(policy: Any) -> None:
    """Raises a ValueError unless `policy` is a policy or an `Auto`."""
    if not isinstance(policy, Auto):
        check_policy(policy)


def _why(found: BreakEven | str, tokens: int, pays: bool | None) -> str:
    """Says in words why a phase is sparse or dense."""
    if isinstance(found, str):
        return found
    where = f"{found.device}, {found.policy}, density {found.density:g}, {found.size}"
    if found.is_expected:
        where = f"expected, not measured: {where}"
    if pays is None:
        return f"no measurement beyond {found.longest:,} tokens ({where})"
    if found.tokens is None:
        return f"{tokens:,} tokens, and sparse did not pay up to {found.longest:,} ({where})"
    return f"{tokens:,} tokens, and sparse pays from {found.tokens:,} on ({where})"


@functools.cache
def read_break_evens() -> tuple[BreakEven, ...]:
    """Reads the break-evens that come with the package."""
    rows: list[dict[str, Any]] = json.loads(_TABLE.read_text(encoding="utf-8"))["rows"]
    return tuple(BreakEven(**row) for row in rows)
