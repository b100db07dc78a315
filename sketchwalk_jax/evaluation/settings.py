"""Settings of an evaluation: policies, densities, lengths, tasks and phases."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from sketchwalk_jax.evaluation.tasks import ALL_TASKS, HOPS, LOSS_TASKS, TASKS
from sketchwalk_jax.evaluation.wording import WORDINGS
from sketchwalk_jax.inference.cached_layer import PHASES
from sketchwalk_jax.plan import Plan
from sketchwalk_jax.policies import (
    OVER,
    POLICIES,
    PRESETS,
    Policy,
    by_name,
    has_threshold,
    takes_density,
    with_plan,
)
from sketchwalk_jax.validation import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_several,
    describe,
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A policy at a density, as a row of the results names it.

    Attributes:
      policy: Name of the policy.
      preset: Preset of `sketchwalk`, None for other policies.
      density: Nominal density; 1 for dense, None for policies that set their own.
      fields: Names and values of other fields of the policy.
      variant: Name that tells apart rules of the same policy and density; None if there is one
        rule.
      over: Layers whose mean density is the nominal one: `"sparse_layers"`, in which the policy
        selects, or `"all_layers"`, to which the policy is fitted.
      phases: Phases to run it in; None for all. With `"all_layers"`, prefill and decode are
        separate rules with their own settings.
    """

    policy: str
    preset: str | None = None
    density: float | None = None
    fields: tuple[tuple[str, Any], ...] = ()
    variant: str | None = None
    over: str = "sparse_layers"
    phases: tuple[str, ...] | None = None

    def make(self) -> Policy:
        """Makes the policy, uncalibrated if calibration is to set its density."""
        if self.is_calibrated:
            check_number("density", self.density, "(0, 1]")
            return by_name(self.policy, **dict(self.fields))
        options = {"density": self.density} | dict(self.fields)
        return by_name(self.policy, preset=self.preset, **options)

    @property
    def name_fields(self) -> dict[str, Any]:
        """Returns the fields of a row that identify the rule."""
        names = ("policy", "preset", "variant", "density")
        return {name: getattr(self, name) for name in names}

    @property
    def is_fitted(self) -> bool:
        """Whether its field `density` is fitted so that the mean over all layers is nominal."""
        if self.over != "all_layers" or self.density is None or self == DENSE:
            return False
        return not self.is_calibrated and not self.make().counts_dense_layers

    @property
    def is_calibrated(self) -> bool:
        """Whether the policy is calibrated to the density on held-out prompts."""
        return self.density is not None and has_threshold(by_name(self.policy, preset=self.preset))

    def with_plan(self, plan: Plan | None) -> "Rule":
        """Adds a model's plan to a recommended policy whose fields do not set one.

        The field `("plan", None)` keeps a rule without a plan.
        """
        usual = by_name(self.policy, preset=self.preset)
        if "plan" in dict(self.fields) or with_plan(usual, plan) is usual:
            return self
        return dataclasses.replace(self, fields=(*self.fields, ("plan", plan)))

    @property
    def plan(self) -> Plan | None:
        """The rule's plan, if any."""
        return dict(self.fields).get("plan")

    def __str__(self) -> str:
        """Names the rule in progress and errors, such as `paper 0.2`."""
        name = self.preset or self.policy
        name += f" {self.variant}" if self.variant else ""
        return name if self.density is None or self == DENSE else f"{name} {self.density:g}"


DENSE = Rule("dense", None, 1.0)

LEAST_KEPT = 0.5
"""Share of the requested prompts that dense attention must answer for a task to count in a mean
over tasks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of `evaluate`. Dense attention is always measured as the reference.

    Attributes:
      policies: Names of policies.
      presets: Presets of `sketchwalk`.
      densities: Nominal densities of the policies that take one. Policies with a threshold instead
        are calibrated to each density on held-out prompts, one for each task, at every length.
      fields: Other fields, each set in every policy that has it: with `{"dense_layers": 2}` all
        policies leave the same layers dense.
      variants: Further rules, such as ablations; a file can be continued with more of them.
      tokens: Lengths: tokens of a prompt with its answer.
      tasks: Names of tasks.
      phases: Phases in which selection is sparse: `"prefill"`, `"decode"`, `"both"`.
      prompts: Number of prompts of each task and length; variable tracking has two fifths of it for
        every number of hops, long decoding one fifth.
      probe_prompts: Prompts of each task and length for mass recall and output error; 0 skips
        these.
      batch: Prompts at a time, or None to choose by the device's memory.
      seed: Seed of the prompts.
      wording: Sentences of the tasks, one of `WORDINGS`: `"plain"`, on which the bundled model was
        trained, or `"chat"`, for instruction models.
      answerable: Whether to leave out prompts that dense attention does not answer, for every
        policy: prompts are drawn until `prompts` of them are answered or `tries` times as many are
        drawn. A task with fewer than `LEAST_KEPT` of `prompts` counts in no mean.
      tries: Most prompts to draw, in multiples of `prompts`; only with `answerable`.
      density_over: Layers whose mean density is the nominal one: `"sparse_layers"`, or
        `"all_layers"`, dense ones included; a policy whose dense layers alone exceed the density is
        not run.
      calibrated_on: Tasks whose held-out prompts calibration takes; those of `tasks` by default.

    Raises:
      ValueError: If a name is unknown or repeated, or a number out of range.

    Example:
      >>> EvaluationConfig.reduced(policies=("streaming",)).prompts
      4
    """

    policies: Sequence[str] = POLICIES
    presets: Sequence[str] = PRESETS
    densities: Sequence[float] = (0.1, 0.2)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variants: Sequence[Rule] = ()
    tokens: Sequence[int] = (4096, 8192, 16384)
    tasks: Sequence[str] = TASKS
    phases: Sequence[str] = PHASES
    prompts: int = 50
    probe_prompts: int = 2
    batch: int | None = None
    seed: int = 0
    wording: str = "plain"
    answerable: bool = False
    tries: int = 6
    density_over: str = "sparse_layers"
    calibrated_on: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Checks every field."""
        known = {"policies": POLICIES, "presets": PRESETS, "tasks": ALL_TASKS, "phases": PHASES}
        kinds = dict.fromkeys((*known, "calibrated_on"), "names")
        kinds |= {"densities": "numbers", "tokens": "integers", "variants": "rules"}
        for name, kind in kinds.items():
            check_several(name, getattr(self, name), kind)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, values in (known | {"calibrated_on": ALL_TASKS}).items():
            for one in getattr(self, name):
                check_choice(name, one, values)
        for count in self.tokens:
            check_integer("tokens", count)
        for density in self.densities:
            if not isinstance(density, int | float):
                raise ValueError(f"densities must be numbers, got {describe(density)}")
        for name in (*known, "densities", "tokens"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise ValueError(f"{name} must hold at least one value, each once, got {given}")
        for name, least in {"prompts": 1, "probe_prompts": 0, "seed": 0, "tries": 1}.items():
            check_integer(name, getattr(self, name), least=least)
        check_integer("batch", self.batch, is_optional=True)
        check_flag("answerable", self.answerable)
        check_choice("wording", self.wording, WORDINGS)
        check_choice("density_over", self.density_over, OVER)
        if not isinstance(self.fields, Mapping):
            raise ValueError(f"fields must be values by their names, got {describe(self.fields)}")
        for one in self.variants:
            if not isinstance(one, Rule):
                raise ValueError(f"variants must be rules, got {describe(one)}")
        rules = self.rules()
        names = [(*one.name_fields.values(), one.phases) for one in rules]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"variants must have names of their own, got twice {repeated[0]}")
        used = {name for rule in rules for name, _ in rule.fields}
        unused = sorted(set(self.fields) - used) or sorted({"density"} & set(self.fields))
        if unused:
            raise ValueError(f"fields must be of a policy that is run, got {unused[0]!r}")
        for rule in rules:
            rule.make()

    @classmethod
    def reduced(cls, **fields: Any) -> Self:
        """Makes a small evaluation: ten minutes on two busy CPU cores for a few policies.

        Most of the time is compilation, and every further policy adds some.

        Args:
          **fields: Fields of the class, which replace the reduced values.
        """
        few: dict[str, Any] = {
            "policies": ("streaming", "quest", "sketchwalk"),
            "presets": PRESETS[:1],
            "densities": (0.2,),
            "tokens": (2048,),
            "tasks": ("single_needle", "multi_key", "text_loss"),
            "prompts": 4,
            "probe_prompts": 0,
        }
        return cls(**few | fields)

    def rules(self) -> tuple[Rule, ...]:
        """Lists dense attention, then every policy at every density, then the variants."""
        found = [DENSE]
        for policy in self.policies:
            for preset in self.presets if policy == "sketchwalk" else (None,):
                made = by_name(policy, preset=preset)
                has_density = takes_density(made) or has_threshold(made)
                known = {field.name for field in dataclasses.fields(made)}
                own = tuple(sorted(one for one in self.fields.items() if one[0] in known))
                for density in self.densities if has_density else (None,):
                    found.append(Rule(policy, preset, density, own))
        found += self.variants
        found = [rule for rule in found if rule.policy != "dense" or rule is DENSE]
        if self.density_over == "sparse_layers":
            return tuple(found)
        return tuple(part for rule in found for part in _over_all_layers(rule))

    def describe(self) -> dict[str, Any]:
        """Returns the settings for `meta`, which all rows of one file must share."""
        found: dict[str, Any] = {
            "seed": self.seed,
            "prompts": self.prompts,
            "probe_prompts": self.probe_prompts,
        }
        # Older files lack these options: leave out default values, so that they can be continued.
        found |= {"fields": dict(self.fields)} if self.fields else {}
        found |= {"wording": self.wording} if self.wording != "plain" else {}
        found |= {"answerable": {"tries": self.tries}} if self.answerable else {}
        is_sparse = self.density_over == "sparse_layers"
        return found | ({} if is_sparse else {"density_over": self.density_over})

    def phases_of_rule(self, rule: Rule) -> tuple[str, ...]:
        """Phases to run a rule in: phases of its policy that the rule allows."""
        found = self.phases_of(rule.make())
        return tuple(phase for phase in found if rule.phases is None or phase in rule.phases)

    def phases_of(self, policy: Policy) -> tuple[str, ...]:
        """Phases of the evaluation in which a policy selects.

        Dense attention has one row, called `both`. A policy that selects in one phase only is not
        run as `both`, which would repeat that phase.
        """
        if len(policy.phases) == 2:
            return tuple(self.phases)
        return tuple(one for one in self.phases if one in policy.phases) or (
            () if policy.phases else ("both",)
        )

    def num_prompts(self, task: str) -> int:
        """Returns the number of prompts of a task at each length."""
        if task == "long_decode":  # each scores 512 tokens
            return max(1, self.prompts // 5)
        if task != "variable_tracking":
            return self.prompts
        return len(HOPS) * max(1, 2 * self.prompts // len(HOPS))

    def is_filtered(self, task: str) -> bool:
        """Whether the task leaves out prompts that dense attention does not answer."""
        return self.answerable and task not in LOSS_TASKS


def _over_all_layers(rule: Rule) -> list[Rule]:
    """Splits a rule over all layers into one for prefill and one for decode."""
    if rule == DENSE or rule.density is None:
        return [rule]
    own = rule.make().phases
    wanted = PHASES if rule.phases is None else rule.phases
    found = []
    for first, part in (("prefill", ("prefill", "both")), ("decode", ("decode",))):
        phases = tuple(phase for phase in part if phase in wanted)
        if first in own and phases:
            found.append(dataclasses.replace(rule, over="all_layers", phases=phases))
    return found
