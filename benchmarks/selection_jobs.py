"""The rows of `selection.py` at one length: what they are called, and what measures them."""

import functools
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import common
import jax
import jax.numpy as jnp
import selection_programs as programs
from loops import loop
from selection_programs import LAYERS, Inputs

from sketchwalk_jax import dispatch
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.policies import Policy, has_knob
from sketchwalk_jax.policies.base import PrefillPolicy
from sketchwalk_jax.selection import BlockSelection

PEER = "cudnn" if jax.default_backend() == "gpu" else "xla"
ROUND_SECONDS = 0.04
PROMPTS = 2  # layers that prefill rotates over: together far larger than any cache
# Rounds over the layers between two looks at a loop's condition; where prompts take long, fewer.
ROUNDS, SLOW_ROUNDS = 8, 1
SLOW = ("oracle", "flexprefill")
KNOB_STEPS = 17  # to a single offset of MInference's
Row = dict[str, Any]
Call = Callable[[int], Any]  # runs that many steps
# Milliseconds of one layer: `observe` alone, all of `selection`, `attention` over its lists.
PARTS = ("observe", "selection", "attention")
MEASURED = (
    "settings",
    "measured_density",
    "num_lists",
    "list_block_size",
    *(f"{part}_{name}" for part in PARTS for name in ("ms", "ms_iqr")),
    "attention_implementation",
)


def timed(call: Call, repeats: int, *, step: int = 1) -> dict[str, float]:
    """Milliseconds per step: median and distance of the quartiles over rounds of some time."""
    jax.block_until_ready(call(step))
    start = time.perf_counter()
    jax.block_until_ready(call(step))
    seconds = (time.perf_counter() - start) / step
    count = max(1, min(1000, math.ceil(ROUND_SECONDS / seconds / step))) * step
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(count))
        found.append((time.perf_counter() - start) / count * 1e3)
    values = common.summarize(found)
    return {"ms": values["median"], "ms_iqr": values["q75"] - values["q25"]}


def named(part: str, values: Mapping[str, float]) -> Row:
    """The times of a part as fields of a row."""
    return {f"{part}_{name}": value for name, value in values.items()}


def looped(program: Future[Any], state: Any, inputs: Any, step: int) -> Call:
    """Runs a compiled loop, `step` steps of it for each count."""
    return lambda count: program.result()(jnp.int32(count // step), state, inputs)


def queued(program: Future[Any], sets: list[Any]) -> Call:
    """Calls with the inputs of one layer after another."""

    def run(count: int) -> Any:
        for index in range(count):
            out = program.result()(*sets[index % len(sets)])
        return out

    return run


def zeros(shapes: Any) -> Any:
    """Arrays for shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def implementation_of(query: Any, lists: BlockSelection) -> str:
    """What attention over these lists runs on."""
    return dispatch.choose_implementation(None, query, block_size=lists.block_size)


class Length:
    """All measurements at one length."""

    def __init__(self, inputs: Inputs, pool: ThreadPoolExecutor, repeats: int, is_quick: bool):
        """Draws nothing, compiles nothing yet."""
        self._inputs, self._pool, self._repeats = inputs, pool, repeats
        self._is_quick = is_quick
        self._attending: dict[Any, Future[Any]] = {}
        self._keys, self._values = (
            jnp.stack([layer[place] for layer in inputs.layers]) for place in (1, 2)
        )
        self._lengths = jnp.full((inputs.shape.batch,), inputs.shape.tokens, jnp.int32)

    def jobs(self, wanted: list[Rule]) -> list[tuple[Row, Callable[[], Row]]]:
        """What each row is called, and what measures it; its programs start to compile."""
        dense = Rule("dense", None, 1.0)
        found = [
            (self._names(dense, "prefill"), self._dense_prefill()),
            (self._names(dense, "decode"), self._dense_decode()),
        ]
        for rule in wanted:
            policy = rule.make()
            if "prefill" in policy.phases or self._observes(policy):
                found.append((self._names(rule, "prefill"), self._prefill(rule, policy)))
        for rule in wanted:
            policy = rule.make()
            if "decode" in policy.phases:
                found.append((self._names(rule, "decode"), self._decode(policy)))
        return found

    def _names(self, rule: Rule, phase: str) -> Row:
        shape = self._inputs.shape
        return {
            "phase": phase,
            "tokens": shape.tokens,
            "policy": rule.policy,
            "preset": rule.preset,
            "fields": dict(rule.fields),
            "density": rule.density,
            "batch": shape.batch,
            "num_heads": shape.heads[0],
            "num_kv_heads": shape.heads[1],
            "head_dim": shape.head_dim,
            "dtype": shape.dtype,
        } | dict.fromkeys(MEASURED)

    def _observes(self, policy: Policy) -> bool:
        make = functools.partial(policy.init_statistics, batch=1, num_blocks=1)
        return bool(jax.tree.leaves(jax.eval_shape(lambda: make(self._inputs.layer_shape))))

    def _compile(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        return self._pool.submit(lambda: jax.jit(function).lower(*shapes).compile())

    def _compile_attention(
        self, function: Callable[..., Any], rounds: int, *arguments: Any
    ) -> Future[Any]:
        """Once for all policies whose lists have the same shapes."""
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(arguments))
        key = (rounds, shapes, jax.tree.structure(arguments))
        if key not in self._attending:
            self._attending[key] = self._compile(function, *arguments)
        return self._attending[key]

    def _compile_loop(self, made: tuple[Any, Any, Any], *more: Any) -> Future[Any]:
        function, state, inputs = made
        return self._compile(function, jnp.int32(1), state, (*inputs, *more))

    def _rounds(self, *, is_slow: bool = False) -> int:
        return SLOW_ROUNDS if is_slow or self._is_quick else ROUNDS

    def _dense_prefill(self) -> Callable[[], Row]:
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=PEER
        )
        sets = list(self._inputs.layers)
        program = self._compile(attend, *sets[0])
        return lambda: {
            "attention_implementation": PEER,
            "measured_density": 1.0,
            **named("attention", timed(queued(program, sets), self._repeats)),
        }

    def _dense_decode(self) -> Callable[[], Row]:
        def attend(query: Any, given: Any, index: int) -> Any:
            layers, lengths = given
            key, value = layers[index]
            return jax.nn.dot_product_attention(
                query, key, value, key_value_seq_lengths=lengths, implementation=PEER
            )

        rounds, query = self._rounds(), self._inputs.layers[0][0][:, -1:]
        given = (tuple((key, value) for _, key, value in self._inputs.layers), self._lengths)
        attention = loop(attend, num_layers=LAYERS, rounds=rounds)
        program, step = self._compile(attention, jnp.int32(1), query, given), LAYERS * rounds
        run = looped(program, query, given, step)
        return lambda: {
            "attention_implementation": PEER,
            "measured_density": 1.0,
            **named("attention", timed(run, self._repeats, step=step)),
        }

    def _prefill(self, rule: Rule, policy: Policy) -> Callable[[], Row]:
        rounds = self._rounds(is_slow=rule.policy in SLOW)
        selects = "prefill" in policy.phases
        sizes: dict[str, Any] = {"num_layers": PROMPTS, "rounds": rounds}
        make = functools.partial(programs.prefill_loop, policy, self._inputs, **sizes)
        knob, step = jnp.float32(0.0), PROMPTS * rounds
        observing = make(selects=False) if self._observes(policy) else None
        observed = None if observing is None else self._compile_loop(observing, knob)
        selecting = make(selects=True) if selects else None
        selected = attended = None
        if selecting is not None:
            selected = self._compile_loop(selecting, knob)
            lists = selecting[1][2][0]
            queries = self._inputs.layers[0]
            attended = self._compile_attention(programs.attend_prompt, 1, *queries, lists)

        def measure() -> Row:
            row: Row = {}
            if observing is not None and observed is not None:
                state, given = zeros(observing[1]), (*observing[2], knob)
                run = looped(observed, state, given, step)
                row |= named("observe", timed(run, self._repeats, step=step))
            if selecting is None or selected is None or attended is None:
                return row
            state, given = zeros(selecting[1]), selecting[2]
            program = selected.result()

            def density_at(value: float) -> float:
                made = program(jnp.int32(1), state, (*given, jnp.float32(value)))
                return sum(map(self._prefill_density, made[2])) / PROMPTS

            value = float(self._find_knob(policy, density_at)) if has_knob(policy) else 0.0
            given = (*given, jnp.float32(value))
            found = program(jnp.int32(1), state, given)[2]
            row |= self._describe(found, self._inputs.layers[0][0])
            row["measured_density"] = sum(map(self._prefill_density, found)) / PROMPTS
            if isinstance(policy, PrefillPolicy):
                row["settings"] = {policy.knob: value}
            run = looped(selected, state, given, step)
            row |= named("selection", timed(run, self._repeats, step=step))
            sets = [
                (*layer, lists)
                for layer, lists in zip(self._inputs.layers[:PROMPTS], found, strict=True)
            ]
            return row | named("attention", timed(queued(attended, sets), self._repeats))

        return measure

    def _decode(self, policy: Policy) -> Callable[[], Row]:
        rounds = self._rounds()
        make = functools.partial(
            programs.decode_loop, policy, self._inputs, self._keys, rounds=rounds
        )
        step, observes = LAYERS * rounds, self._observes(policy)
        observing = make(selects=False) if observes else None
        observed = None if observing is None else self._compile_loop(observing)
        selecting = make(selects=True)
        selected = self._compile_loop(selecting)
        fill = programs.observe_prompt(policy, self._inputs)
        filled = self._compile(fill, *self._inputs.layers[0][:2], self._inputs.span)
        query = self._inputs.layers[0][0][:, -1:]
        attention = loop(programs.attend_token, num_layers=LAYERS, rounds=rounds)
        lists = selecting[1][3]
        cache = (self._keys, self._values)
        given = (*cache, lists, self._lengths)
        attended = self._compile_attention(attention, rounds, jnp.int32(1), query, given)

        def measure() -> Row:
            row: Row = {}
            statistics = tuple(
                filled.result()(*layer[:2], self._inputs.span) for layer in self._inputs.layers
            )
            if observing is not None and observed is not None:
                state = (*zeros(observing[1][:2]), statistics, zeros(observing[1][3]))
                run = looped(observed, state, observing[2], step)
                row |= named("observe", timed(run, self._repeats, step=step))
            state = (*zeros(selecting[1][:2]), statistics, zeros(selecting[1][3]))
            run = looped(selected, state, selecting[2], step)
            found = run(step)[3]
            row |= self._describe(found, query)
            row["measured_density"] = sum(map(self._decode_density, found)) / LAYERS
            row |= named("selection", timed(run, self._repeats, step=step))
            run = looped(attended, query, (*cache, found, self._lengths), step)
            return row | named("attention", timed(run, self._repeats, step=step))

        return measure

    def _describe(self, found: tuple[BlockSelection, ...], query: Any) -> Row:
        lists = found[0]
        return {
            "num_lists": lists.ids.shape[1],
            "list_block_size": lists.block_size,
            "attention_implementation": implementation_of(query, lists),
        }

    def _prefill_density(self, lists: BlockSelection) -> float:
        tokens, size = self._inputs.shape.tokens, lists.block_size
        first = jnp.arange(0, tokens, size, dtype=jnp.int32)[None, :]
        pairs = lists.attended_pairs(first, jnp.full_like(first, size))
        return float(pairs[0]) / (tokens * (tokens + 1) / 2)

    def _decode_density(self, lists: BlockSelection) -> float:
        last = jnp.full((1, 1), self._inputs.shape.tokens - 1, jnp.int32)
        return float(lists.attended_pairs(last, jnp.ones_like(last))[0]) / self._inputs.shape.tokens

    def _find_knob(self, policy: Any, density_at: Callable[[float], float]) -> float:
        """By bisection; more is kept with larger values."""
        low, high = policy.knob_range
        for _ in range(KNOB_STEPS):
            middle = 0.5 * (low + high)
            if density_at(middle) > self._inputs.shape.density:
                high = middle
            else:
                low = middle
        return 0.5 * (low + high)
