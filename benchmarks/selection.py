"""What selecting costs: every policy at two lengths, in prefill and in decode, on one GPU.

    python benchmarks/selection.py [--out benchmarks/results/selection.json] [--policy NAME]
    python benchmarks/selection.py --share    # of a layer's time

One layer of normal queries and keys, beside dense attention to the same and attention over the
lists that were chosen. Policies with a knob have it set so that their lists have the density asked
for.

Selection is timed in loops of one program each, in which one layer after another observes and
selects; so is attention in decode, while in prefill calls are queued. The steps of a loop rotate
over the layers' inputs and wait for one another, so that nothing is computed once for all of them;
what they make are results of the loop, so that nothing is left out.

With `--share`, the paper's rule, the recommended policy, and `recommended_blocks` with each number
of queries that a plan may give a layer, at four lengths and two densities.
"""

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import kernel_inputs
import kernels
from jaxtyping import Array, Int
from kernel_inputs import Shape, Step, loop
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax import dispatch
from sketchwalk_jax.compiled import keep_compiled_programs
from sketchwalk_jax.evaluation.settings import DENSE, Rule
from sketchwalk_jax.pallas_kernels.config import KernelConfig
from sketchwalk_jax.policies import POLICIES, PRESETS, Policy, has_knob
from sketchwalk_jax.policies.base import LayerShape, PrefillPolicy, Span
from sketchwalk_jax.selection import BlockSelection

PyTree = Any
Row = dict[str, Any]
Call = Callable[[int], Any]  # runs that many steps
LAYERS = 4
KERNELS = dispatch.selection_kernels(None)
ROUND_SECONDS = 0.04
PROMPTS = 2  # layers that prefill rotates over: together far larger than any cache
# Rounds over the layers between two looks at a loop's condition; where prompts take long, fewer.
ROUNDS, SLOW_ROUNDS = 8, 1
SLOW = ("oracle", "flexprefill")
KNOB_STEPS = 17  # to a single offset of MInference's
SHARE = common.RESULTS / "selection_share.json"
SHARE_TOKENS, SHARE_DENSITIES = (2**14, 2**15, 2**16, 2**17), (0.1, 0.2)
QUERIES = (4, 8, 16, 32)  # of a row, as plans give them
# Milliseconds of one layer: `observe` alone, all of `selection`, `attention` over its lists.
PARTS = ("observe", "selection", "attention")
# What tells rows apart.
NAMES = ("phase", "tokens", "policy", "preset", "fields", "density")
MEASURED = (
    "settings",
    "measured_density",
    "num_lists",
    "list_block_size",
    *(f"{part}_{name}" for part in PARTS for name in ("ms", "ms_iqr")),
    "attention_implementation",
)


def main() -> None:
    """Runs everything and writes the results, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: by what is measured")
    parser.add_argument("--share", action="store_true", help="what selecting takes of a layer")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument("--tokens", type=int, action="append", help="default: 16384 and 65536")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no length after this")
    parser.add_argument("--quick", action="store_true", help="one tiny shape, two repeats")
    options = parser.parse_args()
    keep_compiled_programs()
    size: dict[str, Any] = {"heads": (4, 2), "head_dim": 64} if options.quick else {}
    lengths = options.tokens or ([1024] if options.quick else [2**14, 2**16])
    densities: Sequence[float] = (options.density,)
    out = options.out or common.RESULTS / "selection.json"
    if options.share:
        lengths = options.tokens or (lengths if options.quick else SHARE_TOKENS)
        densities, out = SHARE_DENSITIES, options.out or SHARE
    own = functools.partial(rules, list(options.policy or POLICIES), is_quick=options.quick)
    repeats = 2 if options.quick else options.repeats
    started = time.monotonic()
    meta = common.describe_machine(is_quick=options.quick, repeats=repeats)
    wanted = {one: share_rules(one) if options.share else own(one) for one in densities}
    shapes = [
        Shape(op="selection", tokens=tokens, density=density, **size)
        for tokens in lengths
        for density in densities
    ]
    asked = [
        names_of(shape, rule, phase)
        for shape in shapes
        for rule, phase in measurements(
            shape, wanted[shape.density], with_dense=shape.density == densities[0]
        )
    ]
    common.check_filters(options, (), asked)
    common.note_asked(meta, asked, *NAMES)
    for tokens in lengths:
        if time.monotonic() - started > options.seconds:
            return
        # The arrays of one length at a time.
        jobs: list[tuple[Row, Callable[[], Row]]] = []
        with common.Compiling() as pool:
            for shape in shapes:
                if shape.tokens == tokens:
                    length = Length(Inputs.draw(shape), pool, repeats, options.quick)
                    with_dense = shape.density == densities[0]
                    jobs += length.jobs(wanted[shape.density], with_dense=with_dense)
        for names, job in tqdm(jobs, desc=f"{tokens:,} tokens"):
            row = names | common.found_or_error(job)
            tqdm.write(describe(row))
            common.add_rows(out, meta, [row], NAMES)


def rules(policies: list[str], density: float, *, is_quick: bool) -> list[Rule]:
    """Policies and presets; FlexPrefill with no head and with every head query-aware."""
    found = []
    for policy in policies:
        if policy == "dense":
            continue
        if policy == "flexprefill":
            for tau in (0.0, 1.0):  # the distance is at most sqrt(log 2)
                found.append(Rule(policy, None, density, (("tau", tau),)))
            continue
        presets: tuple[str | None, ...] = (None,) if policy != "sketchwalk" else PRESETS
        for preset in presets[:1] if is_quick else presets:
            own = None if preset == "released" else density
            found.append(Rule(policy, preset, own))
    return found


def share_rules(density: float) -> list[Rule]:
    """The paper's rule, the recommended policy, and that of blocks with each number of queries."""
    own = [
        Rule("sketchwalk", "recommended_blocks", density, (("representatives", count),))
        for count in QUERIES
    ]
    presets = ("paper", "recommended")
    return [*(Rule("sketchwalk", preset, density) for preset in presets), *own]


def describe(row: Row) -> str:
    """One line for the terminal."""
    name = " ".join(
        [row["preset"] or row["policy"], *(f"{k}={v:g}" for k, v in row["fields"].items())]
    )
    text = f"{row['phase']:<8}{row['tokens']:>6} {name:<20}"
    if row["error"]:
        return f"{text} failed: {row['error']}"
    for part in ("observe", "selection", "attention"):
        if row[f"{part}_ms"] is not None:
            text += f"{part} {row[f'{part}_ms']:.4f} ms (iqr {row[f'{part}_ms_iqr']:.4f}) "
    return text + f"density {row['measured_density'] or math.nan:.3f}"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Queries, keys and values of whole prompts, of several layers; normal entries.

    Attributes:
      shape: Their sizes.
      layers: `(query [B T N H], key [B T K H], value [B T K H])` of each layer.
      span: The tokens of whole prompts.
    """

    shape: Shape
    layers: Sequence[tuple[Array, Array, Array]]
    span: Span

    @classmethod
    def draw(cls, shape: Shape) -> "Inputs":
        """Draws them."""
        heads = (shape.heads[0], shape.heads[1], shape.heads[1])
        layers = []
        for index in range(LAYERS):
            keys = jax.random.split(jax.random.key(index), 3)
            arrays = [kernel_inputs.draw(keys[n], shape, heads[n], shape.tokens) for n in range(3)]
            layers.append((arrays[0], arrays[1], arrays[2]))
        return cls(shape, layers, kernel_inputs.whole_prompt(shape))

    def num_blocks(self, policy: Policy) -> int:
        """Blocks of the policy's size."""
        return self.shape.tokens // policy.block_size


def layer_shape(shape: Shape) -> LayerShape:
    """Sizes of a layer."""
    return LayerShape(*shape.heads, shape.head_dim, jnp.dtype(shape.dtype))


def observes(policy: Policy, shape: Shape) -> bool:
    """Whether the policy keeps statistics."""
    make = functools.partial(policy.init_statistics, batch=1, num_blocks=1)
    return bool(jax.tree.leaves(jax.eval_shape(lambda: make(layer_shape(shape)))))


def measurements(
    shape: Shape, wanted: Sequence[Rule], *, with_dense: bool
) -> list[tuple[Rule, str]]:
    """What is measured of some rules, and in which phase."""
    found = [(DENSE, "prefill"), (DENSE, "decode")] if with_dense else []
    for rule in wanted:
        policy = rule.make()
        if "prefill" in policy.phases or observes(policy, shape):
            found.append((rule, "prefill"))
    for rule in wanted:
        policy = rule.make()
        # A token's own query stands for itself, whatever their number in prompts.
        usual = getattr(policy, "representatives", None) in (None, QUERIES[1])
        if "decode" in policy.phases and usual:
            found.append((rule, "decode"))
    return found


def names_of(shape: Shape, rule: Rule, phase: str) -> Row:
    """What a row is called, and the fields that measuring fills."""
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


class Length:
    """All measurements at one length."""

    def __init__(self, inputs: Inputs, pool: common.Compiling, repeats: int, is_quick: bool):
        """Draws nothing, compiles nothing yet."""
        self._inputs, self._pool, self._repeats = inputs, pool, repeats
        self._is_quick = is_quick
        self._attending: dict[Any, Future[Any]] = {}
        self._keys, self._values = (
            jnp.stack([layer[place] for layer in inputs.layers]) for place in (1, 2)
        )
        self._lengths = jnp.full((inputs.shape.batch,), inputs.shape.tokens, jnp.int32)

    def jobs(
        self, wanted: list[Rule], *, with_dense: bool = True
    ) -> list[tuple[Row, Callable[[], Row]]]:
        """What each row is called, and what measures it; its programs start to compile."""
        return [
            (names_of(self._inputs.shape, rule, phase), self._measure(rule, phase))
            for rule, phase in measurements(self._inputs.shape, wanted, with_dense=with_dense)
        ]

    def _measure(self, rule: Rule, phase: str) -> Callable[[], Row]:
        if rule == DENSE:
            return self._dense_prefill() if phase == "prefill" else self._dense_decode()
        policy = rule.make()
        return self._prefill(rule, policy) if phase == "prefill" else self._decode(policy)

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
            jax.nn.dot_product_attention, is_causal=True, implementation=kernels.PEER
        )
        sets = list(self._inputs.layers)
        program = self._compile(attend, *sets[0])
        return lambda: {
            "attention_implementation": kernels.PEER,
            "measured_density": 1.0,
            **named("attention", timed(queued(program, sets), self._repeats)),
        }

    def _dense_decode(self) -> Callable[[], Row]:
        def attend(query: Any, given: Any, index: int) -> Any:
            layers, lengths = given
            key, value = layers[index]
            return jax.nn.dot_product_attention(
                query, key, value, key_value_seq_lengths=lengths, implementation=kernels.PEER
            )

        rounds, query = self._rounds(), self._inputs.layers[0][0][:, -1:]
        given = (tuple((key, value) for _, key, value in self._inputs.layers), self._lengths)
        attention = loop(attend, num_layers=LAYERS, rounds=rounds)
        program, step = self._compile(attention, jnp.int32(1), query, given), LAYERS * rounds
        run = looped(program, query, given, step)
        return lambda: {
            "attention_implementation": kernels.PEER,
            "measured_density": 1.0,
            **named("attention", timed(run, self._repeats, step=step)),
        }

    def _prefill(self, rule: Rule, policy: Policy) -> Callable[[], Row]:
        rounds = self._rounds(is_slow=rule.policy in SLOW)
        selects = "prefill" in policy.phases
        sizes: dict[str, Any] = {"num_layers": PROMPTS, "rounds": rounds}
        make = functools.partial(prompt_loop, policy, self._inputs, **sizes)
        knob, step = jnp.float32(0.0), PROMPTS * rounds
        observing = make(selects=False) if observes(policy, self._inputs.shape) else None
        observed = None if observing is None else self._compile_loop(observing, knob)
        selecting = make(selects=True) if selects else None
        selected = attended = None
        if selecting is not None:
            selected = self._compile_loop(selecting, knob)
            lists = selecting[1][2][0]
            queries = self._inputs.layers[0]
            attended = self._compile_attention(attend_prompt, 1, *queries, lists)

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
        make = functools.partial(token_loop, policy, self._inputs, self._keys, rounds=rounds)
        step = LAYERS * rounds
        observing = make(selects=False) if observes(policy, self._inputs.shape) else None
        observed = None if observing is None else self._compile_loop(observing)
        selecting = make(selects=True)
        selected = self._compile_loop(selecting)
        fill = observe_prompt(policy, self._inputs)
        filled = self._compile(fill, *self._inputs.layers[0][:2], self._inputs.span)
        query = self._inputs.layers[0][0][:, -1:]
        attention = loop(attend_token, num_layers=LAYERS, rounds=rounds)
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
        tokens, size = self._inputs.shape.tokens, lists.queries_per_row
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


def timed(call: Call, repeats: int, *, step: int = 1) -> dict[str, float]:
    """Milliseconds per step: median and distance of the quartiles over rounds of some time."""
    times = kernels.rounds({"own": call}, repeats, step=step, round_seconds=ROUND_SECONDS)["own"]
    values = common.summarize(times)
    return {"ms": 1e3 * values["median"], "ms_iqr": 1e3 * (values["q75"] - values["q25"])}


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


def _replaced(values: tuple[PyTree, ...], index: int, value: PyTree) -> tuple[PyTree, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _first_entry(tree: PyTree) -> Int[Array, ""]:
    """One entry of a result, for the next step to wait for."""
    leaf = jax.tree.leaves(tree)[0]
    return leaf[(0,) * leaf.ndim].astype(jnp.int32)


def prompt_step(policy: Policy, inputs: Inputs, *, selects: bool) -> Step:
    """Observes a whole prompt and, if asked, selects for all its rows.

    The state is `(walk, entry, results)` with a result for each layer, statistics or lists; the
    inputs `(queries and keys of the layers, span, knob)`.
    """
    sizes = {"batch": inputs.shape.batch, "num_blocks": inputs.num_blocks(policy)}

    def step(state: PyTree, given: PyTree, index: int) -> PyTree:
        walk, entry, results = state
        layers, span, knob = given
        own = policy.with_traced(knob) if isinstance(policy, PrefillPolicy) else policy
        walk, entry, (query, key) = jax.lax.optimization_barrier((walk, entry, layers[index]))
        statistics = own.init_statistics(layer_shape(inputs.shape), **sizes)
        result = own.observe(query, key, statistics, span=span, kernel_config=KERNELS)
        if selects:
            layer = jnp.zeros((), jnp.int32)
            result, walk = own.select(
                query, key[None], result, walk, layer=layer, span=span, kernel_config=KERNELS
            )
        return walk, _first_entry(result), _replaced(results, index, result)

    return step


def prompt_loop(
    policy: Policy, inputs: Inputs, *, selects: bool, num_layers: int, rounds: int
) -> tuple[Callable[..., PyTree], PyTree, PyTree]:
    """The loop of `prompt_step`, the shapes of its state, and its inputs without the knob."""
    step = prompt_step(policy, inputs, selects=selects)
    layers = tuple((query, key) for query, key, _ in inputs.layers[:num_layers])
    num_blocks, batch = inputs.num_blocks(policy), inputs.shape.batch
    knob = jax.ShapeDtypeStruct((), jnp.float32)

    def first() -> PyTree:
        walk = policy.init_walk(batch=batch, num_rows=num_blocks, num_blocks=num_blocks)
        return walk, jnp.zeros((), jnp.int32)

    walk, entry = jax.eval_shape(first)
    # What a step makes tells the shapes of all results.
    made = jax.eval_shape(
        lambda walk, entry, given: step((walk, entry, (None,)), given, 0),
        walk,
        entry,
        (layers[:1], inputs.span, knob),
    )
    state = (walk, entry, made[2] * num_layers)
    return loop(step, num_layers=num_layers, rounds=rounds), state, (layers, inputs.span)


def token_step(
    policy: Policy, *, selects: bool, kernel_config: KernelConfig | None = KERNELS
) -> Step:
    """Observes one token and, if asked, selects for it, on XLA without a `kernel_config`.

    The state is `(walk, entry, statistics of the layers, lists of the layers)`; the inputs
    `(queries and keys of the token, stacked keys, span)`.
    """

    def step(state: PyTree, given: PyTree, index: int) -> PyTree:
        walk, entry, statistics, selections = state
        tokens, keys, span = given
        walk, entry, (query, key), own = jax.lax.optimization_barrier(
            (walk, entry, tokens[index], statistics[index])
        )
        own = policy.observe(query, key, own, span=span, kernel_config=kernel_config)
        if selects:
            selection, walk = policy.select(
                query,
                keys,
                own,
                walk,
                layer=jnp.int32(index),
                span=span,
                kernel_config=kernel_config,
            )
            selections = _replaced(selections, index, selection)
        entry = _first_entry(selections[index] if selects else own)
        return walk, entry, _replaced(statistics, index, own), selections

    return step


def token_loop(
    policy: Policy,
    inputs: Inputs,
    keys: Any,
    *,
    selects: bool,
    rounds: int,
    kernel_config: KernelConfig | None = KERNELS,
) -> tuple[Callable[..., PyTree], PyTree, PyTree]:
    """The loop of `token_step`, the shapes of its state, and its inputs.

    Args:
      policy: The policy.
      inputs: What the cache holds; the last token is the one decoded.
      keys: Stacked keys of the layers `[L B S K H]`.
      selects: Whether the policy selects, or observes only.
      rounds: Rounds over the layers.
      kernel_config: How kernels run; None for XLA.
    """
    step = token_step(policy, selects=selects, kernel_config=kernel_config)
    tokens = tuple((query[:, -1:], key[:, -1:]) for query, key, _ in inputs.layers)
    positions = jnp.full((inputs.shape.batch,), inputs.shape.tokens - 1, jnp.int32)
    given = (tokens, keys, Span.of_tokens(positions, policy.block_size))
    batch, num_blocks = inputs.shape.batch, inputs.num_blocks(policy)

    def first() -> PyTree:
        own = policy.init_statistics(layer_shape(inputs.shape), batch=batch, num_blocks=num_blocks)
        walk = policy.init_walk(batch=batch, num_rows=1, num_blocks=num_blocks)
        return walk, jnp.zeros((), jnp.int32), (own,) * LAYERS

    walk, entry, statistics = jax.eval_shape(first)
    selections: tuple[PyTree, ...] = (None,) * LAYERS
    if selects:
        made = jax.eval_shape(
            lambda state, given: step(state, given, 0),
            (walk, entry, statistics, selections),
            given,
        )
        selections = made[3][:1] * LAYERS
    state = (walk, entry, statistics, selections)
    return loop(step, num_layers=LAYERS, rounds=rounds), state, given


def observe_prompt(policy: Policy, inputs: Inputs) -> Callable[..., PyTree]:
    """What fills the statistics of one layer."""
    sizes = {"batch": inputs.shape.batch, "num_blocks": inputs.num_blocks(policy)}

    def observe(query: Array, key: Array, span: Span) -> PyTree:
        statistics = policy.init_statistics(layer_shape(inputs.shape), **sizes)
        return policy.observe(query, key, statistics, span=span, kernel_config=KERNELS)

    return observe


def attend_prompt(query: Array, key: Array, value: Array, selection: BlockSelection) -> Array:
    """Attention of a whole prompt over its lists."""
    return sw.block_sparse_attention(query, key, value, selection)


def attend_token(query: Array, given: PyTree, index: int) -> Array:
    """Attention of one token over its list: a step, whose result is the next layer's query."""
    keys, values, selections, lengths = given
    return sw.block_sparse_decode(
        query, keys, values, selections[index], layer=index, kv_lengths=lengths
    )


if __name__ == "__main__":
    main()
