"""`evaluate`: every policy on every task, at several lengths, densities and phases."""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.evaluation.calibrated_rules import FittedRule, fit_rules
from sketchwalk_jax.evaluation.measure import Measurement, check_devices
from sketchwalk_jax.evaluation.prompts import ANSWER_ROOM, make_prompts
from sketchwalk_jax.evaluation.provenance import describe_machine, hash_weights
from sketchwalk_jax.evaluation.results import ResultsFile
from sketchwalk_jax.evaluation.rows import Outcome, Probed, empty_row, group_key, make_rows
from sketchwalk_jax.evaluation.settings import DENSE, LEAST_KEPT, EvaluationConfig, Rule
from sketchwalk_jax.evaluation.tasks import LOSS_TASKS, Sample, draw_samples, text_for
from sketchwalk_jax.memory import free_bytes
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hub import checkpoint_name, find_checkpoint
from sketchwalk_jax.models.params import weights_of
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.progress import progress_bar
from sketchwalk_jax.sharding import AXES, Placement, placement_of, whole_batch
from sketchwalk_jax.text.haystack import Text, read_text
from sketchwalk_jax.text.tokenizer import load_tokenizer
from sketchwalk_jax.validation import check_number

PyTree = Any
Wanted = dict[Rule, tuple[str, ...]]

_MAX_BATCH = {"cpu": 8}
_MAX_BATCH_ELSEWHERE = 64


def evaluate(
    directory: str | Path,
    *,
    config: EvaluationConfig | None = None,
    text: Text | None = None,
    dtype: str | None = None,
    sharding: Placement | None = None,
    out: str | os.PathLike[str] = "quality.json",
    overwrite: bool = False,
    seconds: float | None = None,
    other_code: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Measures the quality of selections on a checkpoint, and writes it to a file as it goes.

    Args:
      directory: Checkpoint directory with a tokenizer, GGUF file, or `ORG/NAME` on the hub.
      config: What to run; lengths beyond the model's context are left out.
      text: Text to hide facts in, from `read_text`; Python's help topics by default.
      dtype: Type of weights and cache; by default float32 on CPUs, else the checkpoint's.
      sharding: Placement on a mesh of devices of this host, from `sharding.place`; one device by
        default. Answers differ only by rounding.
      out: File of the results. An existing file is continued: its rows are not run again.
      overwrite: Whether to replace an existing file instead.
      seconds: Time after which no further prompts are begun; finished rows are kept, and another
        call continues. No limit by default.
      other_code: Whether to continue a file that another version of this package began, which is
        refused by default; each row then names its version.
      progress: Whether to show progress on standard error.

    Returns:
      As `evaluate_model`.

    Raises:
      ValueError: If the checkpoint, the text or the lengths do not fit, or if `out` holds results
        of another evaluation.
      NotImplementedError: If a policy cannot select on the mesh.

    Example:
      >>> results = evaluate("path/to/checkpoint",
      ...                    config=EvaluationConfig.reduced())  # doctest: +SKIP
    """
    if not isinstance(sharding, Placement | None):
        raise ValueError(f"sharding must be a Placement from sharding.place, got {sharding!r}")
    _check_policies(config or EvaluationConfig(), sharding)
    text = read_text() if text is None else text
    directory = find_checkpoint(directory, progress=progress)
    tokenizer = load_tokenizer(directory)
    if dtype is None and jax.default_backend() == "cpu":
        dtype = "float32"  # CPUs are slow in 16 bits
    params, model_config = load(directory, dtype=dtype, sharding=sharding, progress=progress)
    model = {"name": checkpoint_name(directory), "sha256": hash_weights(directory)}
    own: dict[str, Any] = {"text": text, "model": model, "config": config, "progress": progress}
    return evaluate_model(
        params,
        model_config,
        tokenizer,
        **own,
        out=out,
        overwrite=overwrite,
        seconds=seconds,
        other_code=other_code,
    )


def evaluate_model(
    params: PyTree,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    text: Text,
    model: Mapping[str, Any],
    config: EvaluationConfig | None = None,
    out: str | os.PathLike[str] = "quality.json",
    overwrite: bool = False,
    seconds: float | None = None,
    other_code: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Runs `evaluate` on a model in memory.

    Args:
      params: Parameter tree, on one device or on a mesh of devices of this host.
      model_config: The model. Its plan, if any, is used by the preset `recommended`.
      tokenizer: A tokenizer of transformers.
      text: Text to hide facts in.
      model: Identification of the model for `meta`, compared when results are continued.
      config: As in `evaluate`.
      out: File of the results. An existing file is continued: its rows are not run again.
      overwrite: Whether to replace an existing file instead.
      seconds: Time after which no further prompts are begun; finished rows are kept, and another
        call continues. No limit by default.
      other_code: Whether to continue a file that another version of this package began, which is
        refused by default; each row then names its version.
      progress: As in `evaluate`.

    Returns:
      `{"meta": ..., "rows": ...}`, as in the file; `Results(**found).missing` lists the groups left
      when time ran out.

    Raises:
      ValueError: As `evaluate`.
      NotImplementedError: If a policy cannot select on the mesh, or `params` lie on several devices
        without a supported mesh.
    """
    config = config or EvaluationConfig()
    placement, weights = placement_of(params, model_config), weights_of(params)
    _check_policies(config, placement)
    lengths = check_lengths(config, model_config)
    known: dict[str, Any] = {} if placement is None else {"mesh": dict(placement.mesh.shape)}
    known |= {} if weights is None else {"weights": weights}
    meta = describe_machine(
        model=dict(model),
        **known,
        **describe_texts(text, config),
        **config.describe(),
        dtype=params["embed"]["embedding"].dtype.name,
    )
    file = ResultsFile(out, meta, overwrite=overwrite, other_code=other_code)
    what: dict[str, Any] = {"text": text, "config": config, "lengths": lengths}
    model_and_file = (file, params, model_config, tokenizer)
    continue_evaluation(*model_and_file, **what, seconds=seconds, progress=progress)
    return {"meta": file.meta, "rows": file.rows}


def _check_policies(config: EvaluationConfig, placement: Placement | None) -> None:
    """Raises for a policy that cannot select on a mesh, before anything runs."""
    if placement is not None:
        for rule in config.rules():
            placement.check_policy(rule.make())


def describe_texts(text: Text, config: EvaluationConfig) -> dict[str, Any]:
    """Describes the text for `meta`, and the program code if a task needs it."""
    found = {"text": text.about}
    if "code_loss" in config.tasks:
        found["code"] = text_for("code_loss", text).about
    return found


def continue_evaluation(
    file: ResultsFile,
    params: PyTree,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    text: Text,
    config: EvaluationConfig,
    lengths: Sequence[int],
    seconds: float | None = None,
    progress: bool = False,
) -> bool:
    """Runs the groups of an evaluation that its file of results lacks.

    Args:
      file: The results; finished groups are written at once.
      params: As in `evaluate_model`.
      model_config: As there.
      tokenizer: As there.
      text: As there.
      config: What to run.
      lengths: Its lengths, from `check_lengths`.
      seconds: As in `evaluate`.
      progress: As in `evaluate`.

    Returns:
      Whether the evaluation is complete: False if time ran out.

    Raises:
      ValueError: If a task or a policy does not fit the model or the text, or the file has rows of
        the preset `recommended` with another plan.
    """
    if seconds is not None:
        check_number("seconds", seconds, "(0, inf)")
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    check_devices(params, model_config)
    run = _Run(params, model_config, tokenizer, text, config, file, deadline)
    try:
        run.finish(lengths, progress=progress)
    except _OutOfTimeError:
        return False
    return True


class _OutOfTimeError(Exception):
    """Time is up: no further prompts may begin."""


def check_lengths(config: EvaluationConfig, model_config: ModelConfig) -> tuple[int, ...]:
    """Returns the lengths of an evaluation that fit the model's context, ascending.

    Raises:
      ValueError: If none fits, or one is not a multiple of every policy's block size.
    """
    context = model_config.context_length
    lengths = tuple(sorted(one for one in config.tokens if one <= context))
    if not lengths:
        raise ValueError(
            f"tokens must hold a length within the model's context of {context}, got "
            f"{config.tokens}"
        )
    size = max(rule.make().block_size for rule in config.rules())
    uneven = [one for one in lengths if one % size]
    if uneven:
        raise ValueError(f"tokens must be multiples of {size}, got {uneven[0]}")
    return lengths


def choose_batch(
    model_config: ModelConfig,
    config: EvaluationConfig,
    *,
    num_tokens: int,
    dtype: Any,
    placement: Placement | None = None,
) -> int:
    """Chooses the batch size: as many prompts as surely fit into memory, in equal batches.

    On a mesh, all ranks of `data` get equally many.
    """
    if config.batch is not None:
        return whole_batch(min(config.batch, config.prompts), placement)
    size = jnp.dtype(dtype).itemsize
    heads, (data, sequence, tensor) = model_config.num_kv_heads, (1, 1, 1)
    if placement is not None:
        heads, (data, sequence, tensor) = placement.num_kv_heads, map(placement.size, AXES)
    cache = 2 * model_config.num_layers * heads * model_config.head_dim * size
    width = model_config.hidden_size
    mlp = 3 * model_config.intermediate_size if model_config.mlp_layers else 0
    chosen = model_config.experts_per_token * (3 * model_config.expert_intermediate_size + width)
    shared = max(mlp, chosen) + 4 * model_config.num_heads * model_config.head_dim
    widths = 6 * width + 2 * model_config.num_experts + shared / tensor
    # Four caches (dense and sparse in long decoding, and the copies that decoding writes to), with
    # statistics, and one layer's activations in float32.
    needed = num_tokens * (4 * cache / tensor + 4 * widths) / sequence
    batch = data * max(1, int(0.6 * _free_memory() / needed))
    batch = min(batch, config.prompts, _MAX_BATCH.get(jax.default_backend(), _MAX_BATCH_ELSEWHERE))
    return whole_batch(-(-config.prompts // -(-config.prompts // batch)), placement)


def _free_memory() -> int:
    """Returns the device's bytes for this process; on a CPU, a quarter of the machine's memory."""
    found = free_bytes(jax.devices()[0])
    if found is not None:
        return found
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


@dataclasses.dataclass
class _Run:
    """A running evaluation, and its current length."""

    params: PyTree
    model_config: ModelConfig
    tokenizer: Any
    text: Text
    config: EvaluationConfig
    file: ResultsFile
    deadline: float
    num_tokens: int = 0

    def __post_init__(self) -> None:
        """Adds the model's plan to the rules, and checks that the file's rows have the same."""
        plan = self.model_config.plan
        self._rules = [rule.with_plan(plan) for rule in self.config.rules()]
        for rule in self._rules:
            self.file.check_plan(rule)

    def finish(self, lengths: Sequence[int], *, progress: bool) -> None:
        """Runs the groups that the file lacks."""
        missing = {num_tokens: self._missing(num_tokens) for num_tokens in lengths}
        missing = {num_tokens: tasks for num_tokens, tasks in missing.items() if tasks}
        for self.num_tokens, tasks in missing.items():
            for task in tasks:
                self._draw(task, count=1)  # raises at once if a task does not fit
        asked = [
            rule.name_fields | {"phases": list(self.config.phases_of_rule(rule))}
            for rule in self._rules
        ]
        self.file.note("asked", tokens=list(lengths), tasks=list(self.config.tasks), rules=asked)
        if missing and self.file.rows:
            self.file.write()  # from now on, an interrupted file tells what it lacks
        total = sum(
            len(wanted) * self.config.num_prompts(task)
            for tasks in missing.values()
            for task, wanted in tasks.items()
        )
        with progress_bar(total, "evaluating", unit=" prompts", is_wanted=progress) as self._bar:
            for self.num_tokens, tasks in missing.items():
                self._check_time()
                self._fit_rules(tasks)
                for task, wanted in tasks.items():
                    self._bar.set_postfix_str(f"{task}, {self.num_tokens} tokens")
                    if self.config.is_filtered(task):
                        self._filtered_group(self._draw(task), wanted)
                        continue
                    samples = self._draw(task)
                    for rule, phases in wanted.items():
                        self._group(samples, rule, phases)
        if missing and self.file.rows:
            self.file.write()  # also notes the rules left out at the last length

    def _missing(self, num_tokens: int) -> dict[str, Wanted]:
        """Lists the phases of each rule that the file lacks, by task."""
        found: dict[str, Wanted] = {}
        for task in self.config.tasks:
            answered = self.file.drawn(task, num_tokens)
            is_hopeless = answered is not None and "1" not in answered
            for rule in self._rules:
                phases = tuple(
                    phase
                    for phase in self.config.phases_of_rule(rule)
                    if not self.file.has(group_key(rule, phase, task, num_tokens))
                    and not (is_hopeless and rule != DENSE)
                    and (task != "long_decode" or rule == DENSE or phase != "prefill")
                )
                if phases:
                    found.setdefault(task, {})[rule] = phases
        return found

    def _draw(self, task: str, count: int | None = None, first: int = 0) -> list[Sample]:
        is_within = task in LOSS_TASKS or task == "mid_prompt"
        return draw_samples(
            task,
            text_for(task, self.text),
            self.tokenizer,
            num_tokens=self.num_tokens if is_within else self.num_tokens - ANSWER_ROOM,
            count=count or self.config.num_prompts(task),
            seed=self.config.seed,
            wording=self.config.wording,
            first=first,
        )

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise _OutOfTimeError

    def _fit_rules(self, tasks: dict[str, Wanted]) -> None:
        """Fits the rules of one length to their density, on held-out prompts if they need any.

        Rules that cannot reach their density are removed from `tasks` and not run.
        """

        def tell(what: str) -> None:
            self._check_time()
            self._bar.set_postfix_str(what)

        rules = dict.fromkeys(rule for wanted in tasks.values() for rule in wanted)
        found: dict[Rule, FittedRule] = {}
        for rule in rules:
            # Densities over all layers keep the first call's settings; others are calibrated on
            # each call's tasks.
            settings = self.file.settings(rule, self.num_tokens)
            if rule.over == "all_layers" and settings is not None:
                found[rule] = FittedRule.restored(rule, settings)
        batch = choose_batch(
            self.model_config,
            self.config,
            num_tokens=self.num_tokens,
            dtype=self.params["embed"]["embedding"].dtype,
            placement=placement_of(self.params, self.model_config),
        )
        found |= fit_rules(
            [rule for rule in rules if rule not in found],
            self.params,
            self.model_config,
            self.text,
            self.tokenizer,
            tasks=self.config.calibrated_on or self.config.tasks,
            num_tokens=self.num_tokens,
            batch=batch,
            seed=self.config.seed,
            wording=self.config.wording,
            before=tell,
        )
        for rule, one in found.items():
            if one.settings is None:
                phases = {phase for wanted in tasks.values() for phase in wanted.pop(rule, ())}
                self.file.note(
                    "not_run",
                    **rule.name_fields,
                    phases=sorted(phases),
                    tokens=self.num_tokens,
                    least_density_all_layers=round(one.least, 5),
                )
        self._fitted = found
        policies = {rule: one.policy for rule, one in found.items()}
        self._measurement = Measurement(
            self.params, self.model_config, batch=batch, policies=policies
        )

    def _filtered_group(self, samples: list[Sample], wanted: Wanted) -> None:
        """Measures the rules on the prompts that dense attention answers."""
        task, outcome = samples[0].task, None
        answered = self.file.drawn(task, self.num_tokens)
        if DENSE in wanted or answered is None:
            answered, outcome = self._find_answered(samples)
        missing = len(answered) - len(samples)
        if missing > 0:
            samples = samples + self._draw(task, missing, first=len(samples))
        kept = [sample for sample, one in zip(samples, answered, strict=False) if one == "1"]
        least = LEAST_KEPT * self.config.num_prompts(task)
        more = {"drawn": len(answered), "in_mean": len(kept) >= least}
        if not kept:
            options: dict[str, Any] = {"task": task, "tokens": self.num_tokens}
            self.file.add([empty_row(DENSE, drawn=len(answered), **options)])
        elif outcome is not None:
            self._add({"both": outcome}, kept, DENSE, more)
        for rule, phases in wanted.items():
            if kept and rule != DENSE:
                self._group(kept, rule, phases, more)

    def _find_answered(self, samples: list[Sample]) -> tuple[str, Outcome]:
        """Runs dense attention until it has answered enough prompts, and notes which it has.

        Further prompts are added to `samples`. Returns `"0110..."`, and the answered prompts.
        """
        task, batch = samples[0].task, self._measurement.batch
        count = self.config.num_prompts(task)
        most = count * self.config.tries
        flags: list[bool] = []
        outcomes: list[Outcome] = []
        while sum(flags) < count and len(flags) < most:
            self._check_time()
            if len(samples) < len(flags) + batch:
                samples += self._draw(task, count, first=len(samples))
            some = samples[len(flags) : min(len(flags) + batch, most)]
            prompts = make_prompts(some, batch=batch, num_tokens=self.num_tokens)
            found = self._measurement.run(prompts, DENSE, ("both",), self.tokenizer)
            outcomes.append(found["both"])
            assert outcomes[-1].is_right is not None
            flags += outcomes[-1].is_right.tolist()
        self._bar.update(count)
        # Drop prompts drawn after the last kept one, so that the batch size changes nothing.
        is_kept = np.array(flags) & (np.cumsum(flags) <= count)
        enough = np.flatnonzero(np.cumsum(flags) == count)
        answered = "".join("01"[one] for one in flags[: enough[0] + 1 if enough.size else None])
        self.file.note("drawn", task=task, tokens=self.num_tokens, answered=answered)
        return answered, Outcome.join(outcomes).take(is_kept)

    def _group(
        self,
        samples: list[Sample],
        rule: Rule,
        phases: Sequence[str],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Measures one rule on one task and length and writes its rows."""
        parts = []
        for some in map(list, itertools.batched(samples, self._measurement.batch)):
            self._check_time()
            options: dict[str, Any] = {"num_tokens": self.num_tokens}
            if samples[0].task == "long_decode":
                parts.append(self._measurement.run_long(some, rule, phases, **options))
            else:
                prompts = make_prompts(some, batch=self._measurement.batch, **options)
                parts.append(self._measurement.run(prompts, rule, phases, self.tokenizer))
            self._bar.update(len(some))
        found = {phase: Outcome.join([part[phase] for part in parts]) for phase in phases}
        self._add(found, samples, rule, more or {})

    def _add(
        self,
        found: Mapping[str, Outcome],
        samples: list[Sample],
        rule: Rule,
        more: Mapping[str, Any],
    ) -> None:
        """Probes a rule, and writes its rows, by phase."""
        probed = self._probe(samples, rule, tuple(found))
        fitted, rows = self._fitted.get(rule), []
        for phase, outcome in found.items():
            if outcome.losses is not None and not np.isfinite(outcome.losses).all():
                raise ValueError(
                    f"logits must be finite, got a loss of {outcome.losses.max()} in "
                    f"{samples[0].task} with {rule}; the weights may be damaged, or overflow in "
                    f"float16: load them as bfloat16 or float32, or download them again"
                )
            rows += make_rows(
                outcome,
                samples,
                rule,
                phase=phase,
                tokens=self.num_tokens,
                dense_layers=self._measurement.dense_layers(rule),
                probe=probed.get(phase, Probed()),
                settings=None if fitted is None else fitted.settings,
                more=more,
            )
        self.file.add(rows)

    def _probe(
        self, samples: list[Sample], rule: Rule, phases: Sequence[str]
    ) -> Mapping[str, Probed]:
        """Probes a few of the samples, evenly spread."""
        size = min(self.config.probe_prompts, self.config.prompts)
        count = min(size, len(samples))
        if not count or samples[0].task == "long_decode":
            return {}
        places = np.linspace(0, len(samples) - 1, count + 2).round().astype(int)[1:-1]
        some = [samples[place] for place in places]
        prompts = make_prompts(some, batch=size, num_tokens=self.num_tokens)
        return self._measurement.probe(prompts, rule, phases)
