"""`sketchwalk bench`: measures in minutes what sparse attention gains and loses on this device."""

import dataclasses
import gc
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sketchwalk_jax.attention.api import dense_attention
from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import usage_errors
from sketchwalk_jax.cli.info import describe_attention
from sketchwalk_jax.cli.options import METHOD, OUTPUT, field
from sketchwalk_jax.evaluation import EvaluationConfig, read_text
from sketchwalk_jax.evaluation.provenance import describe_machine, hash_weights
from sketchwalk_jax.evaluation.results import ResultsFile
from sketchwalk_jax.evaluation.rows import Row, group_key
from sketchwalk_jax.evaluation.runner import check_lengths, continue_evaluation, describe_texts
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.evaluation.tables import counted, markdown_table, pool
from sketchwalk_jax.inference.generation import stream
from sketchwalk_jax.inference.layer import sketchwalk_attention
from sketchwalk_jax.memory import OutOfDeviceMemory
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hub import checkpoint_name
from sketchwalk_jax.models.params import Params
from sketchwalk_jax.policies import Policy
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.progress import elapsed

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ANSWERED_AT = 4096  # tokens of the prompts with questions
TASKS = ("single_needle", "multi_key", "mid_prompt")
TIMED_SHARE = 0.6  # share of the seconds for times; the rest is for answers
NEW_TOKENS = 32  # tokens over which a step's time is averaged
ROUNDS, MOST_SECONDS = 5, 15.0  # of one length; each round runs every policy once
PARTS = {"attention": "prefill", "first_token": "prefill", "token": "decode"}


@dataclasses.dataclass(kw_only=True)
class Bench(options.Command):
    """Measure this device: dense attention beside Sketch-and-Walk, by context, and answers.

    Times are of one layer's attention, of a prompt's first token and of each token after it, for
    one sequence. Answers are those that dense attention gives to questions about a text. All
    results go to a JSON file, and tables in markdown to standard output; a call that was
    interrupted keeps what it has. To share them, open an issue of the project ("Times on a
    device").
    """

    preset: str = field(
        "--preset NAME", "Variant of Sketch-and-Walk to measure.", METHOD, value="recommended"
    )
    density: float = field(
        "--density FRACTION", "Share of its causal keys that a query keeps.", METHOD, value=0.2
    )
    tokens: list[int] | None = field(
        "--tokens N",
        "Length of the context, new tokens included; may be given several times.",
        None,
        "1,024, 2,048 and so on, within the model's context",
        min=128,
    )
    prompts: int = field("--prompts N", "Prompts of each task; 0 asks nothing.", min=0, value=10)
    seconds: float = field("--seconds N", "Begin nothing after so long.", min=1.0, value=600.0)
    out: Path = field(
        "--out FILE",
        "File of the results. Another call goes on from there.",
        OUTPUT,
        value=Path("bench.json"),
    )
    overwrite: bool = field("--overwrite", "Start afresh where the file exists.", OUTPUT)

    def run(self) -> None:
        """Measures what the file lacks, and prints its tables."""
        directory, model_config, policy, dtype, _ = self.prepare()
        context = model_config.context_length
        lengths = sorted({*(self.tokens or (one for one in LENGTHS if one <= context))})
        options.check_context("--tokens", max(lengths, default=0), model_config)
        tokenizer = prompt.open_tokenizer(directory)
        with usage_errors():
            config = self._questions(context, tokenizer) if self.prompts else None
        text = read_text(None)
        more: dict[str, Any] = {} if self.weights is None else {"weights": self.weights}
        more |= {} if config is None else describe_texts(text, config) | config.describe()
        meta = describe_machine(
            model={"name": checkpoint_name(directory), "sha256": hash_weights(directory)},
            preset=self.preset,
            density=self.density,
            dtype=dtype,
            attention={
                phase: describe_attention(policy, phase, model_config, dtype)["implementation"]
                for phase in ("prefill", "decode")
            },
            **more,
        )
        file = ResultsFile(self.out, meta, overwrite=self.overwrite, other_code=True)
        start = time.monotonic()
        params, model_config = options.load_model(directory, dtype, weights=self.weights)
        rule = Rule("sketchwalk", self.preset, self.density).with_plan(model_config.plan)
        with elapsed("measuring times"):
            for length in lengths:
                if time.monotonic() - start > TIMED_SHARE * self.seconds or not _measure(
                    file, params, model_config, policy, rule, length
                ):
                    break
        left = self.seconds - (time.monotonic() - start)
        if config is not None and left > 0:
            continue_evaluation(
                file,
                params,
                model_config,
                tokenizer,
                text=text,
                config=config,
                lengths=check_lengths(config, model_config),
                seconds=left,
                progress=True,
            )
        print(tables(file.meta, file.rows), flush=True)
        print(f"{self.out}: {len(file.rows)} rows", file=sys.stderr)

    def _questions(self, context: int, tokenizer: Any) -> EvaluationConfig:
        return EvaluationConfig(
            policies=("sketchwalk",),
            presets=(self.preset,),
            densities=(self.density,),
            tokens=(min(ANSWERED_AT, context // 64 * 64),),
            tasks=TASKS,
            phases=("both",),
            prompts=self.prompts,
            probe_prompts=0,
            wording="chat" if tokenizer.chat_template else "plain",
            answerable=True,
            tries=3,
            density_over="all_layers",
        )


# Times


def _measure(
    file: ResultsFile,
    params: Params,
    model_config: ModelConfig,
    policy: Policy,
    rule: Rule,
    length: int,
) -> bool:
    """Adds the times of one length if missing; returns whether a longer one may fit."""
    rules = (DENSE, rule)
    if all(
        file.has(group_key(one, phase, part, length))
        for one in rules
        for part, phase in PARTS.items()
    ):
        return True
    try:
        found = _attention_seconds(model_config, policy, length, params)
        found |= _model_seconds(params, model_config, policy, length)
    except OutOfDeviceMemory as error:
        print(f"{length} tokens: {error.found}", file=sys.stderr)
        return False
    finally:
        gc.collect()
    rows = []
    for one, (part, phase) in itertools.product(rules, PARTS.items()):
        times = found[part, one == DENSE]
        low, median, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
        plan = one.plan
        rows.append(
            {
                **one.name_fields,
                "phase": phase,
                "task": part,
                "tokens": length,
                "settings": None if plan is None else {"plan": plan.short_hash},
                "seconds": {"median": median, "q25": low, "q75": high, "repeats": len(times)},
            }
        )
    file.add(rows)
    return True


def _attention_seconds(
    model_config: ModelConfig, policy: Policy, length: int, params: Params
) -> dict[tuple[str, bool], list[float]]:
    """Times one layer's attention to a prompt, sparse attention including its selection."""
    dtype = params["embed"]["embedding"].dtype
    heads = (model_config.num_heads, model_config.num_kv_heads, model_config.num_kv_heads)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        jax.random.normal(one, (1, length, count, model_config.head_dim), jnp.float32).astype(dtype)
        for one, count in zip(keys, heads, strict=True)
    ]
    dense = jax.jit(lambda *qkv: dense_attention(*qkv))
    sparse = jax.jit(lambda *qkv: sketchwalk_attention(*qkv, policy=policy)[0])

    def run(attend: Callable[..., Any]) -> dict[str, float]:
        start = time.perf_counter()
        jax.block_until_ready(attend(*arrays))
        return {"attention": time.perf_counter() - start}

    return _in_turns(lambda is_dense: run(dense if is_dense else sparse))


def _model_seconds(
    params: Params, model_config: ModelConfig, policy: Policy, length: int
) -> dict[tuple[str, bool], list[float]]:
    """Times a prompt's first token, and each token after it."""
    rng = np.random.default_rng(length)
    shape = (1, length - NEW_TOKENS - 1)
    tokens = rng.integers(0, model_config.vocab_size, shape, dtype=np.int32)

    def run(policy: Policy) -> dict[str, float]:
        chunks = stream(
            params,
            tokens,
            model_config=model_config,
            policy=policy,
            max_new_tokens=1 + NEW_TOKENS,
            eos_token_ids=(),
            every=NEW_TOKENS,
        )
        start = time.perf_counter()
        next(chunks)  # the prompt
        next(chunks)  # the first decoded token
        first = time.perf_counter()
        next(chunks)
        end = time.perf_counter()
        return {"first_token": first - start, "token": (end - first) / NEW_TOKENS}

    return _in_turns(lambda is_dense: run(Dense() if is_dense else policy))


def _in_turns(run: Callable[[bool], dict[str, float]]) -> dict[tuple[str, bool], list[float]]:
    """Returns seconds by name and by `is_dense`, for the rounds after the compiling one."""
    found: dict[tuple[str, bool], list[float]] = {}
    start = 0.0
    for number in range(1 + ROUNDS):
        if number > 1 and time.monotonic() - start > MOST_SECONDS:
            break
        for is_dense in (True, False):
            for name, value in run(is_dense).items():
                found.setdefault((name, is_dense), []).append(value)
        if number == 0:
            found.clear()
            start = time.monotonic()
    return found


# Tables

Pairs = dict[str, dict[int, tuple[float, ...]]]
"""Median seconds of dense attention and of the sparse policy, by part and by tokens."""


def tables(meta: dict[str, Any], rows: Sequence[Row]) -> str:
    """Describes a file of results in markdown: the device, times, break-even lengths, answers."""
    pairs: Pairs = {}
    timed = [row for row in rows if row["task"] in PARTS]
    for row in sorted(timed, key=lambda row: row["policy"] != "dense"):
        own = pairs.setdefault(row["task"], {})
        own[row["tokens"]] = (*own.get(row["tokens"], ()), row["seconds"]["median"])
    runs, device, versions = meta["attention"], meta["device"], meta["versions"]
    machine = f"{meta['cpu']}, {meta['cores']} cores"
    parts = [
        f"**{machine if device == 'cpu' else device}**: {meta['model']['name']} in "
        f"{meta['dtype']}, one sequence; attention over lists runs on {runs['prefill']} in prompts "
        f"and on {runs['decode']} for tokens"
    ]
    if timed:
        parts += [
            _times(pairs),
            f"Medians of dense attention → {_name(timed[-1])}, and how many times faster that is.",
            f"To read a prompt, {_where_it_pays(pairs['first_token'])}.",
            f"To write a token, {_where_it_pays(pairs['token'])}.",
        ]
    parts += [
        _answers(rows),
        f"{machine}, {meta['memory_gib']} GiB; Python {versions['python']}, JAX "
        f"{versions['jax']}, sketchwalk-jax {versions['sketchwalk-jax']}; {meta['date']}; "
        f"`{meta['command']}`",
    ]
    return "\n\n".join(filter(None, parts))


def _times(pairs: Pairs) -> str:
    titles = ("Tokens", "One layer's attention", "First token", "Each token after it")
    body = [
        [
            f"{length:,}",
            *(
                f"{_duration(dense)} → {_duration(own)}, **{dense / own:.2f}×**"
                for dense, own in (pairs[part][length] for part in PARTS)
            ),
        ]
        for length in sorted(pairs["token"])
    ]
    return markdown_table(titles, body)


def _name(row: Row) -> str:
    return f"`{row['preset']}` {row['density']:g}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _where_it_pays(pairs: Mapping[int, tuple[float, ...]]) -> str:
    """Names the shortest length from which on the sparse policy is never slower."""
    slower = [length for length, (dense, own) in pairs.items() if own > dense]
    pays = [length for length in pairs if length > max(slower, default=0)]
    if not pays:
        return f"dense attention is faster at {max(pairs):,} tokens, the longest here"
    before = "; below, dense attention is faster" if slower else ""
    return f"sparse attention is no slower from {min(pays):,} tokens on{before}"


def _answers(rows: Sequence[Row]) -> str:
    asked = counted([row for row in rows if row["task"] in TASKS])
    sparse = [row for row in asked if row["policy"] != "dense"]
    found = pool(sparse)
    if found is None or found.exact is None:
        return ""
    return (
        f"Of {found.prompts} questions that dense attention answers in prompts of "
        f"{sparse[0]['tokens']:,} tokens, {_name(sparse[0])} answers {found.exact:.0%} (measured "
        f"density {found.density_all_layers:.2f})."
    )
