"""From how many tokens on sparse policies are not slower than dense attention: what `Auto` goes by.

    python benchmarks/break_even.py [--quick]    # on a CPU: results/break_even_cpu.json

Whole models with random weights, prompts as `stream` reads them and decode steps at a full cache,
in turns with dense attention, round by round. Linear layers take the same time on either side, so
that few narrow ones will do. On a GPU, rows of `end_to_end.py` say the same of real models. What is
expected of GPUs that were not measured is what one layer took on an H200 with the code that runs on
them, by `xla_path.py`.

`report.py` makes of these files the table that the package comes with,
`sketchwalk_jax/break_even.json`, and the sentence of README.md.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import common
import cpu
import jax
import jax.numpy as jnp
from tqdm import tqdm

import sketchwalk_jax as sw
from sketchwalk_jax.auto import BreakEven
from sketchwalk_jax.compiled import keep_compiled_programs
from sketchwalk_jax.dispatch import GPU_GROUPS
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import init_params
from sketchwalk_jax.policies import Policy, by_name

DENSITY = 0.2  # of the default
PRESETS = ("recommended", "paper")
WIDE = dataclasses.replace(
    cpu.MODEL,
    num_layers=4,
    num_heads=16,
    head_dim=64,
    hidden_size=512,
    intermediate_size=1024,
)
MODELS = {"narrow": cpu.MODEL, "wide": WIDE}
LENGTHS = {"prefill": (256, 512, 1024, 2048, 4096), "decode": (256, 512, 1024, 2048, 4096, 8192)}
BATCHES = {"narrow": (1, 8), "wide": (1,)}
MOST_TOKENS = 16384  # of all sequences of a batch together
FILES = ("break_even_cpu.json", "end_to_end.json", "xla_path.json")
# Of each group of GPUs, dense attention and the sums of a sparse layer, by phase, in `xla_path.py`;
# of several sums, the first that has been measured. Selection by XLA is no faster than by kernels.
EXPECTED = {
    GPU_GROUPS[0]: (
        "cudnn",
        {"prefill": ("all_kernels", "kernel_and_selection"), "decode": ("all_kernels",)},
    ),
    GPU_GROUPS[1]: ("xla_dense", {"prefill": ("all_xla",), "decode": ("all_xla",)}),
}
SHORT = 8192  # tokens; a policy that pays from so few on need not have lost anywhere
TABLE = common.ROOT / "sketchwalk_jax" / "break_even.json"
Row = dict[str, Any]


def main() -> None:
    """Runs everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=common.RESULTS / FILES[0])
    parser.add_argument("--repeats", type=int, default=9, help="rounds, in turns")
    parser.add_argument("--quick", action="store_true", help="two short lengths, two rounds")
    options = parser.parse_args()
    keep_compiled_programs()
    repeats = 2 if options.quick else options.repeats
    rows = []
    for cell in tqdm(list(cells(is_quick=options.quick)), desc="break-even"):
        rows += measure(*cell, repeats)
        tqdm.write("\n".join(map(describe, rows[-len(PRESETS) :])))
    meta = common.describe_machine(is_quick=options.quick, repeats=repeats)
    common.write_results(options.out, meta, rows)


def cells(*, is_quick: bool) -> Iterator[tuple[str, str, int, int]]:
    """Model, phase, tokens and batch of every measurement, short ones first."""
    for (name, batches), (phase, lengths) in itertools.product(BATCHES.items(), LENGTHS.items()):
        for batch, tokens in itertools.product(batches, lengths[:2] if is_quick else lengths):
            if batch * tokens <= MOST_TOKENS:
                yield name, phase, tokens, batch


@functools.cache
def params_of(name: str) -> Any:
    """Random weights."""
    return init_params(jax.random.key(0), MODELS[name])


def measure(name: str, phase: str, tokens: int, batch: int, repeats: int) -> list[Row]:
    """Both presets beside dense attention."""
    policies: dict[str, Policy] = {"dense": sw.Dense()}
    policies |= {one: by_name("sketchwalk", preset=one, density=DENSITY) for one in PRESETS}
    call = {"prefill": reading, "decode": stepping}[phase]
    calls = {
        key: call(params_of(name), MODELS[name], policy, tokens, batch, repeats)
        for key, policy in policies.items()
    }
    times = common.alternate(calls, repeats=repeats)
    return [
        {
            "model": name,
            "width": width_of(MODELS[name]),
            "phase": phase,
            "tokens": tokens,
            "batch": batch,
            "policy": "sketchwalk",
            "preset": one,
            "density": DENSITY,
            **common.timing(times[one]),
            "dense_wall_s": common.timing(times["dense"])["wall_s"],
            "speedup": common.speedup(times["dense"], times[one], "wall"),
        }
        for one in PRESETS
    ]


def width_of(config: ModelConfig) -> int:
    """Query heads times their size."""
    return config.num_heads * config.head_dim


def reading(
    params: Any, model: ModelConfig, policy: Policy, tokens: int, batch: int, repeats: int
) -> Any:
    """From the prompts to the end of prefill, as `stream` and `generate` do it."""
    own = jax.random.key(1)
    prompts = jax.random.randint(own, (batch, tokens), 0, model.vocab_size, jnp.int32)
    return cpu.reading(params, prompts, model, policy)


def stepping(
    params: Any, model: ModelConfig, policy: Policy, tokens: int, batch: int, repeats: int
) -> Any:
    """A few decode steps at a full cache, each call where the last one ended."""
    token = jnp.ones((batch,), jnp.int32)
    step = functools.partial(sw.decode_step, params, token, model_config=model, policy=policy)
    cache = sw.init_cache(model, policy, batch=batch, max_tokens=tokens)
    return cpu.decoding(step, cache, tokens - cpu.DECODE_TOKENS * (repeats + 1))


def describe(row: Row) -> str:
    """One line for the terminal."""
    found = row["speedup"]
    text = f"{row['model']:<8}{row['phase']:<8} {row['tokens']:>6} x{row['batch']} "
    text += f"{row['preset']:<12} {found['median']:.2f}x dense"
    return f"{text} ({found['q25']:.2f}-{found['q75']:.2f})"


# What is made of the results.


def break_evens(results: Path) -> list[BreakEven]:
    """All break-evens of the results that are there.

    Args:
      results: Their folder.

    Raises:
      ValueError: If one is of a run with `--quick`.
    """
    found = []
    for path in (results / name for name in FILES):
        if not path.exists():
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["meta"].get("is_quick"):
            raise ValueError(f"{path.name} must be of a whole run, got one with --quick")
        if path.name == FILES[2]:
            found += expected(data)
            continue
        rows = data["rows"] if path.name == FILES[0] else list(speedups(data))
        # What is looked up is the class of a policy and its density.
        rows = [row for row in rows if row["preset"] in PRESETS]
        found += of_rows(rows, data["meta"]["device"])
    return found


def expected(data: dict[str, Any]) -> Iterator[BreakEven]:
    """What is expected of groups of GPUs, from the rows of `xla_path.py`.

    Where no length is known to lose, the shortest one counts as the break-even: below it the
    default is dense, which is never slower than dense.
    """
    for group, (dense, sums) in EXPECTED.items():
        rows = []
        for row in data["rows"]:
            forms = row["forms"]
            sparse = next((one for one in sums[row["op"]] if one in forms), None)
            if sparse is not None:
                faster = {"median": forms[dense]["ms"] / forms[sparse]["ms"]}
                width = row["heads"][0] * row["head_dim"]
                found = {"phase": row["op"], "policy": "sketchwalk", "preset": "recommended"}
                rows.append(row | found | {"width": width, "speedup": faster})
        yield from of_rows(rows, group, from_shortest=True)


def speedups(data: dict[str, Any]) -> Iterator[Row]:
    """Rows of `end_to_end.py` as those of this file, each beside the fastest dense attention.

    That may have read the prompt in pieces; a policy is taken as calls run it by default, in one.
    """
    from end_to_end import MODELS as REAL

    names = ("model", "phase", "tokens", "batch")
    rows = [row for row in data["rows"] if row["implementation"] == "ours" and not row["error"]]
    dense: dict[tuple[Any, ...], float] = {}
    for row in rows:
        where, found = tuple(row[name] for name in names), row["seconds"]["median"]
        if row["policy"] == "dense":
            dense[where] = min(found, dense.get(where, found))
    for row in rows:
        where = tuple(row[name] for name in names)
        if row["policy"] != "dense" and not row["chunk_size"] and where in dense:
            faster = {"median": dense[where] / row["seconds"]["median"]}
            yield row | {"width": width_of(REAL[row["model"]]), "speedup": faster}


def of_rows(rows: list[Row], device: str, *, from_shortest: bool = False) -> list[BreakEven]:
    """The break-even of everything but the length, where the lengths say one.

    With `from_shortest` a shortest length that pays is one, however long it is.
    """
    names = ("phase", "policy", "preset", "density", "width", "batch")
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        groups.setdefault(key, {})[row["tokens"]] = row["speedup"]["median"]
    found = []
    for (phase, name, preset, density, width, batch), by_length in groups.items():
        tokens = least_tokens(by_length)
        if not (from_shortest or is_known(tokens, by_length)):
            continue
        policy = by_name(name, preset=preset, density=density)
        found.append(
            BreakEven(
                device=device,
                phase=phase,
                policy=type(policy).__name__,
                density=density,
                block_size=policy.block_size,
                width=width,
                batch=batch,
                tokens=tokens,
                longest=max(by_length),
            )
        )
    return found


def least_tokens(by_length: Mapping[int, float]) -> int | None:
    """The least length from which on no length has a ratio below 1; None if the longest has."""
    found = None
    for tokens in sorted(by_length, reverse=True):
        if by_length[tokens] < 1.0:
            break
        found = tokens
    return found


def is_known(tokens: int | None, by_length: Mapping[int, float]) -> bool:
    """Whether lengths show where a break-even is: they lose below it, or begin with short ones.

    That a policy pays at a long length says nothing of shorter ones; that it does not pay at the
    longest says that it does not at shorter ones either, as its gain grows with the length.
    """
    shortest = min(by_length)
    return tokens is None or tokens > shortest or shortest <= SHORT


def table_text(results: Path) -> str:
    """What the package comes with, as JSON, a row in each line."""
    lines = (json.dumps(dataclasses.asdict(one)) for one in break_evens(results))
    return '{"rows": [\n' + ",\n".join(f" {line}" for line in lines) + "\n]}\n"


def update_table(results: Path, *, is_check: bool) -> bool:
    """Rewrites that file, or only says that it differs; returns whether it was right before."""
    text = table_text(results)
    is_right = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
    if not is_right and is_check:
        print(f"{TABLE.name} differs from the results")
    elif not is_right:
        TABLE.write_text(text, encoding="utf-8")
    return is_right


def sentence(results: Path) -> str:
    """From where on sparse pays, for README.md: the default policy, one sequence."""
    own = [one for one in break_evens(results) if one.batch == 1 and not one.is_expected]
    own = [one for one in own if one.policy == "RecommendedConfig" and one.density == DENSITY]
    parts = []
    for device in dict.fromkeys(one.device for one in own):
        some = []
        for phase, what in (("prefill", "to read prompts of"), ("decode", "to decode after")):
            found = [one for one in own if (one.device, one.phase) == (device, phase)]
            some += [f"{what} {_span(found)}"] if found else []
        parts.append(f"on {_device(device)}, {' and '.join(some)}")
    return (
        f"With density {DENSITY:g} and one sequence, `recommended` takes no more time than dense "
        f"attention {'; '.join(parts)}. Below that, `Auto` and `--policy auto` run dense attention."
    )


def _span(found: list[BreakEven]) -> str:
    """From how many tokens on, over the widths that were measured."""
    if any(one.tokens is None for one in found):
        return f"no length up to {max(one.longest for one in found):,} tokens"
    tokens = sorted({one.tokens for one in found if one.tokens is not None})
    shown = f"{tokens[0]:,}" + (f" to {tokens[-1]:,}" if len(tokens) > 1 else "")
    widths = " (by the width of the model)" if len(tokens) > 1 else ""
    return f"{shown} tokens or more{widths}"


def _device(kind: str) -> str:
    return "a CPU" if kind == "cpu" else f"an {kind}"


if __name__ == "__main__":
    main()
