"""Compares Sketch-and-Walk with dense on a CPU: attention layer, prefill, decode, start-up.

    python benchmarks/cpu.py [--out benchmarks/results/cpu.json] [--quick]

Both run in one process, in turns, on a model of 12 layers with random weights; times do not depend
on the weights, because the density fixes the number of selected blocks. No compiled program may
hold an array of size tokens × tokens.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.inference.layer import select_whole
from sketchwalk_jax.memory import num_bytes
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import init_params, param_shapes
from sketchwalk_jax.policies.base import Span

DENSITY = 0.1
LENGTHS = (4096, 8192, 16384)
QUICK_LENGTHS = (1024, 2048)
DECODE_CAPACITY = 32768
DECODE_TOKENS = 8  # per timed call
MODEL = ModelConfig(
    model_type="llama",
    vocab_size=256,
    num_layers=12,
    hidden_size=256,
    intermediate_size=768,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    max_position_embeddings=65536,
)
POLICIES = {"dense": sw.Dense(), "sparse": sw.SketchWalkConfig.recommended(density=DENSITY)}
Row = dict[str, Any]


def main() -> None:
    """Runs all measurements and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(common.RESULTS / "cpu.json"))
    parser.add_argument("--quick", action="store_true", help="short prompts, two rounds")
    options = parser.parse_args()
    # Compile times are measured too, so no program may come from the cache on disk.
    jax.config.update("jax_enable_compilation_cache", False)
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    repeats = 2 if options.quick else 7
    capacity = DECODE_CAPACITY // 8 if options.quick else DECODE_CAPACITY

    params = init_params(jax.random.key(0), MODEL)
    steps = [functools.partial(measure_start, params, min(lengths))]
    steps += [functools.partial(measure_attention, length, repeats) for length in lengths]
    steps += [functools.partial(measure_prefill, params, length, repeats) for length in lengths]
    steps += [functools.partial(measure_decode, params, capacity, repeats)]
    rows: list[Row] = []
    for step in tqdm(steps, desc="cpu benchmark", unit="table part"):
        rows += step()
    for row in rows:
        print(describe(row))
    model = {
        name: getattr(MODEL, name)
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    }
    meta = common.describe_machine(model=model, density=DENSITY, is_quick=options.quick)
    common.write_results(options.out, meta, rows)


def tokens_of(length: int) -> jax.Array:
    """Draws a random prompt."""
    return jax.random.randint(jax.random.key(1), (1, length), 0, MODEL.vocab_size, jnp.int32)


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Times each call once per round, in seconds."""
    once = {name: lambda _, call=call: call() for name, call in calls.items()}
    return common.rounds(once, repeats, round_seconds=0.0)


def row(part: str, tokens: int, name: str, times: dict[str, list[float]]) -> Row:
    """Makes a row: the times of one policy, and their ratio to dense, round by round."""
    faster = [slow / own for slow, own in zip(times["dense"], times[name], strict=True)]
    found = {"wall_s": common.summarize(times[name]), "speedup": common.summarize(faster)}
    return {"part": part, "tokens": tokens, "policy": name, **found}


def layer_selection(
    query: jax.Array, key: jax.Array, config: sw.RecommendedConfig
) -> sw.BlockSelection:
    """Computes the block indices of `sketchwalk_attention` in its first layer."""
    batch, length = query.shape[:2]
    lengths = jnp.full((batch,), length, jnp.int32)
    span = Span(jnp.zeros((batch,), jnp.int32), jnp.ones((batch, length), bool), lengths, lengths)
    walk = sw.init_walk(batch, length, policy=config)
    return select_whole([config], query, key, [walk], span=span)[0][0]


def measure_attention(length: int, repeats: int) -> list[Row]:
    """Times one layer: statistics, selection and attention; attention alone; dense attention."""
    config = POLICIES["sparse"]
    keys = jax.random.split(jax.random.key(2), 3)
    query = jax.random.normal(keys[0], (1, length, MODEL.num_heads, MODEL.head_dim))
    key, value = (
        jax.random.normal(one, (1, length, MODEL.num_kv_heads, MODEL.head_dim)) for one in keys[1:]
    )
    walk = sw.init_walk(1, length, policy=config)
    selection = jax.jit(functools.partial(layer_selection, config=config))(query, key)
    whole = functools.partial(sw.sketchwalk_attention, policy=config)
    programs = {
        "dense": (sw.dense_attention, (query, key, value)),
        "sparse": (whole, (query, key, value, walk)),
        "sparse, attention alone": (sw.block_sparse_attention, (query, key, value, selection)),
    }
    compiled = {
        name: jax.jit(function).lower(*arguments).compile()
        for name, (function, arguments) in programs.items()
    }
    for name, program in compiled.items():
        temporary = common.memory(program)["temporary_bytes"]
        # An array of tokens² bytes would be larger. (Shorter prompts cannot show it.)
        if length >= 8192 and temporary >= length**2:
            raise AssertionError(f"{name} holds {temporary} bytes at {length} tokens")
    calls = {name: functools.partial(compiled[name], *programs[name][1]) for name in programs}
    times = in_turns(calls, repeats)
    return [
        row("attention", length, name, times) | common.memory(compiled[name]) for name in programs
    ]


def measure_prefill(params: Any, length: int, repeats: int) -> list[Row]:
    """Times whole prefills, as in `stream` and `generate`."""
    tokens = tokens_of(length)

    def read(policy: Any) -> jax.Array:
        options = {"model_config": MODEL, "policy": policy, "max_new_tokens": 1}
        chunks = sw.stream(params, tokens, **options)
        next(chunks)  # the chunk without tokens that marks the end of prefill
        return chunks.cache.key

    calls = {name: functools.partial(read, policy) for name, policy in POLICIES.items()}
    times = in_turns(calls, repeats)
    return [row("prefill", length, name, times) for name in POLICIES]


def measure_decode(params: Any, capacity: int, repeats: int) -> list[Row]:
    """Times one token at a full cache, and counts its program's memory without the cache."""
    token = jnp.ones((1,), jnp.int32)
    calls, facts = {}, {}
    for name, config in POLICIES.items():
        step = functools.partial(sw.decode_step, model_config=MODEL, policy=config)
        cache = sw.init_cache(MODEL, config, batch=1, max_tokens=capacity)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (token, cache))
        program = jax.jit(step, donate_argnums=2).lower(param_shapes(MODEL), *arguments).compile()
        facts[name] = common.memory(program) | {"cache_bytes": num_bytes(cache)}
        first = capacity - DECODE_TOKENS * (repeats + 2)
        calls[name] = decoding(functools.partial(step, params, token), cache, first)
    times = {
        name: [seconds / DECODE_TOKENS for seconds in own]
        for name, own in in_turns(calls, repeats).items()
    }
    return [row("decode", capacity, name, times) | facts[name] for name in POLICIES]


def decoding(step: Callable[[Any], Any], cache: Any, first: int) -> Callable[[], Any]:
    """Makes a call that appends tokens from `first` on; each starts at the last one's end."""
    keys, values = (jax.random.normal(jax.random.key(n), cache.key.shape) for n in range(2))
    lengths = jnp.full(cache.lengths.shape, first, jnp.int32)
    state = [dataclasses.replace(cache, key=keys, value=values, lengths=lengths)]

    def run() -> Any:
        for _ in range(DECODE_TOKENS):
            logits, state[0] = step(state[0])
        return logits

    return run


def measure_start(params: Any, length: int) -> list[Row]:
    """Times the first `generate` call for one token in a fresh process, and later calls."""
    tokens, rows = tokens_of(length), []
    for name, config in POLICIES.items():
        generate = functools.partial(
            sw.generate, params, tokens, model_config=MODEL, policy=config, max_new_tokens=1
        )
        seconds = []
        for _ in range(4):
            start = common.clock()
            jax.block_until_ready(generate().tokens)
            seconds.append(common.clock() - start)
        warm = common.summarize(seconds[1:])
        rows.append({"part": "start", "tokens": length, "policy": name, "cold_s": seconds[0]})
        rows[-1] |= {"warm_s": warm, "compile_s": seconds[0] - warm["median"]}
    return rows


def describe(row: Row) -> str:
    """Formats a row as one line for the terminal."""
    text = f"{row['part']:<10} {row['tokens']:>6} tokens  {row['policy']:<24}"
    if "wall_s" in row:
        wall, faster = row["wall_s"], row["speedup"]["median"]
        text += f" {wall['median']:8.4f} s ({wall['q25']:.4f}-{wall['q75']:.4f}), {faster:.2f}x"
    if "cold_s" in row:
        text += f" first {row['cold_s']:.2f} s, then {row['warm_s']['median']:.3f} s"
    if "temporary_bytes" in row:
        text += f", temporary {row['temporary_bytes'] / 2**20:.1f} MiB"
    return text


if __name__ == "__main__":
    main()
