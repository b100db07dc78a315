"""`evaluate`: every policy on every task, at several lengths, densities and phases."""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from sketchwalk_jax.evaluation.calibration import (
    Calibration,
    FittedThresholds,
    RuleCalibration,
    is_set_by_model,
)
from sketchwalk_jax.evaluation.measure import Measurement, start_programs
from sketchwalk_jax.evaluation.programs import Programs
from sketchwalk_jax.evaluation.prompts import ANSWER_ROOM, make_prompts
from sketchwalk_jax.evaluation.results import (
    Outcome,
    Probed,
    ResultsFile,
    describe_machine,
    group_key,
    hash_weights,
    make_rows,
)
from sketchwalk_jax.evaluation.settings import EvaluationConfig, Rule
from sketchwalk_jax.evaluation.tasks import Sample, draw_samples
from sketchwalk_jax.evaluation.text import Text, read_text
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.weights import load
from sketchwalk_jax.tokenizer import load_tokenizer

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
    out: str | os.PathLike[str] = "quality.json",
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Measures the quality of selections on a checkpoint, and writes it to a file as it goes.

    Args:
      directory: Checkpoint directory with a tokenizer, or GGUF file.
      config: What to run; lengths beyond the model's context are left out.
      text: Text to hide facts in, from `read_text`; Python's help topics by default.
      dtype: Type of weights and cache; float32 on CPUs, elsewhere the checkpoint's, by default.
      out: File of the results. If it exists it is continued: what it holds is not run again.
      overwrite: Whether to start afresh instead.
      progress: Whether to show progress on standard error.

    Returns:
      `{"meta": ..., "rows": ...}`, as in the file.

    Raises:
      ValueError: If the checkpoint, the text or the lengths do not suit, or if `out` holds results
        of something else.

    Example:
      >>> results = evaluate("path/to/checkpoint",
      ...                    config=EvaluationConfig.reduced())  # doctest: +SKIP
    """
    text = read_text() if text is None else text
    tokenizer = load_tokenizer(directory)
    params, model_config = load(directory, dtype=_dtype(dtype), progress=progress)
    model = {"name": Path(directory).resolve().name, "sha256": hash_weights(directory)}
    return evaluate_model(
        params,
        model_config,
        tokenizer,
        text=text,
        model=model,
        config=config,
        out=out,
        overwrite=overwrite,
        progress=progress,
    )


def _dtype(dtype: str | None) -> str | None:
    if dtype is None and jax.default_backend() == "cpu":
        return "float32"  # CPUs compute the narrow types slowly
    return dtype


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
    progress: bool = False,
) -> dict[str, Any]:
    """`evaluate` for a model in memory.

    Args:
      params: Parameter tree, on one device.
      model_config: The model.
      tokenizer: A tokenizer of transformers.
      text: Text to hide facts in.
      model: What tells which model it is, for `meta`; compared when results are continued.
      config: As in `evaluate`.
      out: As in `evaluate`.
      overwrite: As in `evaluate`.
      progress: As in `evaluate`.

    Returns:
      As `evaluate`.

    Raises:
      ValueError: As `evaluate`.
    """
    config = config or EvaluationConfig()
    lengths = check_lengths(config, model_config)
    meta = describe_machine(
        model=dict(model),
        text={"name": text.name, "sha256": text.sha256, "tail": text.tail},
        **config.describe(),
        dtype=params["embed"]["embedding"].dtype.name,
    )
    file = ResultsFile(out, meta, overwrite=overwrite)
    run = _Run(params, model_config, tokenizer, text, config, file)
    run.finish(lengths, progress=progress)
    return {"meta": file.meta, "rows": file.rows}


def check_lengths(config: EvaluationConfig, model_config: ModelConfig) -> tuple[int, ...]:
    """The lengths of an evaluation that the model has room for, ascending.

    Raises:
      ValueError: If there is none, or one is not a multiple of every policy's block size.
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
    model_config: ModelConfig, config: EvaluationConfig, *, num_tokens: int, dtype: Any
) -> int:
    """Prompts at a time: as many as memory is sure to hold, in batches of equal size."""
    if config.batch is not None:
        return min(config.batch, config.prompts)
    size = jnp.dtype(dtype).itemsize
    cache = 2 * model_config.num_layers * model_config.num_kv_heads * model_config.head_dim * size
    widths = (
        6 * model_config.hidden_size
        + 3 * model_config.intermediate_size
        + 4 * model_config.num_heads * model_config.head_dim
    )
    # Four caches (dense, sparse, and a copy of one that decoding writes to, and their statistics)
    # and one layer's activations in float32.
    needed = num_tokens * (4 * cache + 4 * widths)
    batch = max(1, int(0.6 * _free_memory() / needed))
    batch = min(batch, config.prompts, _MAX_BATCH.get(jax.default_backend(), _MAX_BATCH_ELSEWHERE))
    return -(-config.prompts // -(-config.prompts // batch))


def _free_memory() -> int:
    """Bytes that the device has for this process; of a CPU, a quarter of the machine's memory."""
    found = jax.devices()[0].memory_stats()
    if found and "bytes_limit" in found:
        return found["bytes_limit"] - found.get("bytes_in_use", 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


class _Run:
    """One evaluation under way."""

    def __init__(
        self,
        params: PyTree,
        model_config: ModelConfig,
        tokenizer: Any,
        text: Text,
        config: EvaluationConfig,
        file: ResultsFile,
    ) -> None:
        self._params, self._model_config, self._tokenizer = params, model_config, tokenizer
        self._text, self._config, self._file = text, config, file
        self._calibrations: dict[tuple[Rule, int], Calibration | FittedThresholds] = {}

    def finish(self, lengths: tuple[int, ...], *, progress: bool) -> None:
        """Runs what the file lacks."""
        plan = {num_tokens: self._missing(num_tokens) for num_tokens in lengths}
        plan = {num_tokens: tasks for num_tokens, tasks in plan.items() if tasks}
        for num_tokens, tasks in plan.items():
            for task in tasks:
                self._draw(num_tokens, task, count=1)  # whatever does not fit shows at once
        total = sum(
            len(wanted) * self._config.num_prompts(task)
            for tasks in plan.values()
            for task, wanted in tasks.items()
        )
        programs, drawing = Programs(self._params), ThreadPoolExecutor(1)
        bar = tqdm(total=total, desc="evaluating", unit=" prompts", disable=not progress)
        try:
            with bar:
                samples = {
                    (num_tokens, task): drawing.submit(self._draw, num_tokens, task)
                    for num_tokens, tasks in plan.items()
                    for task in tasks
                }
                calibrations = {
                    num_tokens: self._start_early(programs, num_tokens, tasks, is_first=not index)
                    for index, (num_tokens, tasks) in enumerate(plan.items())
                }
                measurements = {}
                for num_tokens, tasks in plan.items():
                    self._calibrate(calibrations[num_tokens], num_tokens, bar)
                    measurements[num_tokens] = self._measurement(programs, num_tokens, tasks)
                for num_tokens, tasks in plan.items():
                    measurement = measurements.pop(num_tokens)
                    for task, wanted in tasks.items():
                        future: Future[list[Sample]] = samples.pop((num_tokens, task))
                        bar.set_postfix_str(f"{task}, {num_tokens} tokens")
                        self._group(measurement, future.result(), wanted, num_tokens, bar)
        finally:
            programs.close()
            drawing.shutdown(wait=False, cancel_futures=True)

    def _missing(self, num_tokens: int) -> dict[str, Wanted]:
        """Phases of each rule that the file lacks, by task."""
        found: dict[str, Wanted] = {}
        for task in self._config.tasks:
            for rule in self._config.rules():
                phases = tuple(
                    phase
                    for phase in self._config.phases_of(rule.make())
                    if not self._file.has(group_key(rule, phase, task, num_tokens))
                )
                if phases:
                    found.setdefault(task, {})[rule] = phases
        return found

    def _draw(self, num_tokens: int, task: str, count: int | None = None) -> list[Sample]:
        is_within = task in ("mid_prompt", "text_loss")
        return draw_samples(
            task,
            self._text,
            self._tokenizer,
            num_tokens=num_tokens if is_within else num_tokens - ANSWER_ROOM,
            count=count or self._config.num_prompts(task),
            seed=self._config.seed,
        )

    def _start_early(
        self, programs: Programs, num_tokens: int, tasks: Mapping[str, Wanted], *, is_first: bool
    ) -> RuleCalibration:
        """Compiles what calibrates one length, and meanwhile what the first needs anyway."""
        wanted = _joined(tasks)
        batch = self._batch(num_tokens)
        calibration = RuleCalibration(
            programs,
            wanted,
            self._model_config,
            num_tasks=len(self._config.tasks),
            num_tokens=num_tokens,
            batch=batch,
        )
        if is_first:
            known = {rule: some for rule, some in wanted.items() if not is_set_by_model(rule)}
            made = {rule: rule.make() for rule in known}
            shape = {"batch": batch, "num_tokens": num_tokens}
            start_programs(programs, self._model_config, known, made, **shape)
        return calibration

    def _calibrate(self, calibration: RuleCalibration, num_tokens: int, bar: tqdm) -> None:
        """Sets the rules of one length that need it to their density, on held-out prompts."""
        found = calibration.run(
            self._params,
            self._text,
            self._tokenizer,
            tasks=self._config.tasks,
            seed=self._config.seed,
            before=bar.set_postfix_str,
        )
        self._calibrations |= {(rule, num_tokens): one for rule, one in found.items()}

    def _batch(self, num_tokens: int) -> int:
        dtype = self._params["embed"]["embedding"].dtype
        return choose_batch(self._model_config, self._config, num_tokens=num_tokens, dtype=dtype)

    def _measurement(
        self, programs: Programs, num_tokens: int, tasks: Mapping[str, Wanted]
    ) -> Measurement:
        return Measurement(
            programs,
            self._params,
            self._model_config,
            _joined(tasks),
            num_tokens=num_tokens,
            batch=self._batch(num_tokens),
            probe_batch=min(self._config.probe_prompts, self._config.prompts),
            policies={
                rule: found.policy
                for (rule, length), found in self._calibrations.items()
                if length == num_tokens
            },
        )

    def _group(
        self,
        measurement: Measurement,
        samples: list[Sample],
        wanted: Wanted,
        num_tokens: int,
        bar: tqdm,
    ) -> None:
        """Measures one task at one length, and writes its rows."""
        parts: dict[tuple[Rule, str], list[Outcome]] = {}
        batch = measurement.batch
        for start in range(0, len(samples), batch):
            some = samples[start : start + batch]
            prompts = make_prompts(some, batch=batch, num_tokens=num_tokens)
            found = measurement.run(
                prompts, wanted, self._tokenizer, after=partial(bar.update, len(some))
            )
            for key, outcome in found.items():
                parts.setdefault(key, []).append(outcome)
        probed = self._probe(measurement, samples, wanted, num_tokens)
        rows = []
        for (rule, phase), outcomes in parts.items():
            calibrated = self._calibrations.get((rule, num_tokens))
            rows += make_rows(
                Outcome.join(outcomes),
                samples,
                rule,
                phase=phase,
                tokens=num_tokens,
                num_dense_layers=measurement.num_dense_layers(rule),
                probe=probed.get((rule, phase), Probed()),
                settings=None if calibrated is None else calibrated.settings,
            )
        self._file.add(rows)

    def _probe(
        self, measurement: Measurement, samples: list[Sample], wanted: Wanted, num_tokens: int
    ) -> Mapping[tuple[Rule, str], Probed]:
        count = measurement.probe_batch
        if not count:
            return {}
        places = np.linspace(0, len(samples) - 1, count + 2).round().astype(int)[1:-1]
        some = [samples[place] for place in places]
        return measurement.probe(make_prompts(some, batch=count, num_tokens=num_tokens))


def _joined(tasks: Mapping[str, Wanted]) -> Wanted:
    """The phases of each rule that some task wants."""
    wanted: dict[Rule, set[str]] = {}
    for rules in tasks.values():
        for rule, phases in rules.items():
            wanted.setdefault(rule, set()).update(phases)
    return {rule: tuple(sorted(phases)) for rule, phases in wanted.items()}
