"""Measures how long users wait for first calls: in a new process, and after each new argument.

    python benchmarks/first_call.py [--out FILE] [--model DIR] [--part steps] [--quick]

Every step is one call as a user makes it, until its tokens are on the host. `first_s` has the
seconds of a step's first call, which may compile, `warm_s` those of the same call again, and
`extra_s` the difference. `peak_bytes` is the peak memory of a GPU up to the end of the first step.
Prompts are random tokens, the policy is `recommended` at density 0.1 unless a step has another one,
and end tokens are ignored.

The steps run in a fixed order in one process, so a step compiles only what no earlier step has
compiled. They run in two processes:

- `"empty"`: the cache of compiled programs on disk (`$XDG_CACHE_HOME`) is empty;
- `"filled"`: a later process, with the cache that the first process filled.

A third process measures a `session` with an empty cache: 20 prompts, one call each. Their lengths
are spread geometrically from 100 tokens to 100,000 or the model's context, and shuffled; densities
are 0.05, 0.1 and 0.2 in turns. `--part` runs only the steps or only the session.

On a GPU the model has the shape of Llama-3.1-8B and random weights in bfloat16, and rows go to
`first_call.json`; on a CPU it is the bundled model, and rows go to `first_call_cpu.json`. `--model`
reads a checkpoint instead. Another model adds its rows to the file.

`compiled` counts the programs that XLA compiled during a first call, and `from_disk` those that
were read from disk instead, whole or from JAX's cache. JAX reports
`/jax/core/compile/backend_compile_duration` for what it compiles and what it finds in its cache,
and `/jax/compilation_cache/cache_hits` only for the latter. Small operations outside of `jit` are
programs too; those that compile in less than 0.2 s are not kept on disk.
"""

import argparse
import collections
import dataclasses
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

# The package and JAX are imported in `Process`, because their import is timed.

Row = dict[str, Any]
KEY = ("model", "step", "cache")  # fields that identify a row
COMPILE, HIT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
NEW_TOKENS = 32
QUICK = ("first", "second turn", "stream", "dense")  # steps of a run with --quick
DENSITIES = (0.05, 0.1, 0.2)  # of a session
SHORTEST, LONGEST = 100, 100_000  # tokens of a session's prompts
# Settings of the caller that would replace the cache on disk.
SETTINGS = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_ENABLE_COMPILATION_CACHE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One call.

    Attributes:
      step: Name of the step.
      tokens: Length of each prompt in tokens.
      batch: Number of prompts.
      density: Density of `recommended`, or None for `Dense()`.
      max_new_tokens: Number of new tokens.
      max_tokens: Capacity of the cache in tokens, or None for that of a single call.
      is_streamed: Whether to call `stream`.
      is_continued: Whether to continue the cache of the step `max_tokens`.
    """

    step: str
    tokens: int
    batch: int = 1
    density: float | None = 0.1
    max_new_tokens: int = NEW_TOKENS
    max_tokens: int | None = None
    is_streamed: bool = False
    is_continued: bool = False


def make_steps(tokens: int) -> list[Step]:
    """Lists the steps in their order; `tokens` is the length of the first prompt."""
    first = Step(step="first", tokens=tokens)
    room = dataclasses.replace(first, step="max_tokens", max_tokens=2 * tokens + 512)

    def changed(step: str, **fields: Any) -> Step:
        return dataclasses.replace(first, step=step, **fields)

    return [
        first,
        changed("same octave", tokens=15 * tokens // 16),
        changed("other octave", tokens=5 * tokens // 4),
        changed("short", tokens=SHORTEST),
        changed("density", density=0.2),
        changed("max_new_tokens", max_new_tokens=48),
        room,
        dataclasses.replace(room, step="second turn", tokens=tokens // 16, is_continued=True),
        changed("batch", batch=2),
        changed("stream", is_streamed=True),
        changed("dense", density=None),
    ]


def main() -> None:
    """Runs the processes, which add their rows to the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: first_call.json or first_call_cpu.json")
    parser.add_argument("--model", type=Path, help="checkpoint; default: see above")
    parser.add_argument("--tokens", type=int, help="first prompt; default: 16000, 1000 on a CPU")
    parser.add_argument("--part", choices=("steps", "session"), help="default: both")
    parser.add_argument("--repeats", type=int, default=3, help="warm calls of a step")
    parser.add_argument("--quick", action="store_true", help="tiny model, four steps, two prompts")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the command that started it
    parser.add_argument("--cache", help=argparse.SUPPRESS)  # "empty" or "filled", in a child
    options = parser.parse_args()
    if options.child:
        Process(options).run()
        return
    for part, caches in (("steps", ("empty", "filled")), ("session", ("empty",))):
        if options.part in (None, part):
            with tempfile.TemporaryDirectory() as folder:
                for cache in caches:
                    start_process(folder, "--part", part, "--cache", cache)


def start_process(folder: str, *arguments: str) -> None:
    """Runs this script as a child that keeps compiled programs in a folder."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(SETTINGS)}
    environment |= {"XDG_CACHE_HOME": folder, "CUDA_CACHE_PATH": f"{folder}/cuda"}
    command = [sys.executable, __file__, *sys.argv[1:], *arguments]
    command += ["--child", shlex.join(["python", *sys.argv])]
    done = subprocess.run(command, env=environment)
    if done.returncode:
        raise SystemExit(done.returncode)


def count_events() -> collections.Counter[str]:
    """Counts the events that JAX reports from now on, by name."""
    import jax

    events: collections.Counter[str] = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: events.update([event])
    )
    return events


def count_programs(events: collections.Counter[str]) -> dict[str, int]:
    """Counts the programs that were compiled, and those that were read from disk."""
    from sketchwalk_jax.inference import compiled

    from_disk = events[HIT] + events[compiled.LOADED]
    return {"compiled": events[COMPILE] - events[HIT], "from_disk": from_disk}


class Process:
    """A new process: imports the package, reads the weights, runs and writes its part."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Imports the package and makes the parameters; times both in seconds."""
        start = common.clock()
        import jax

        import sketchwalk_jax as sw

        self.seconds = {"import": common.clock() - start}
        import end_to_end

        from sketchwalk_jax.models import bundled_model

        self.options, self.sw, self.events = options, sw, count_events()
        is_cpu = jax.default_backend() == "cpu"
        self.tokens = options.tokens or (1000 if is_cpu or options.quick else 16000)
        self.out = options.out or common.RESULTS / f"first_call{'_cpu' if is_cpu else ''}.json"
        start = common.clock()
        if options.quick or (options.model is None and not is_cpu):
            self.model, load = "tiny" if options.quick else "llama-3.1-8b", "random weights"
            self.config = end_to_end.TINY if options.quick else end_to_end.MODELS[self.model]
            self.params = end_to_end.random_params(self.config)
        else:
            path, load = options.model or bundled_model(), "load"
            self.model = path.resolve().name.lower()
            self.params, self.config = sw.load(path)
        jax.block_until_ready(self.params)
        self.seconds[load] = common.clock() - start
        self.repeats = 1 if options.quick else options.repeats
        self.meta = common.describe_machine(
            shlex.split(options.child), is_quick=options.quick, repeats=self.repeats
        )

    def run(self) -> None:
        """Measures the part that the options name."""
        if self.options.part == "session":
            self.add("session", **common.found_or_error(self.session))
            return
        for name, seconds in self.seconds.items():
            self.add(name, error=None, first_s=seconds)
        for step in make_steps(self.tokens):
            if self.options.quick and step.step not in QUICK:
                continue
            found = common.found_or_error(self.measure, step)
            self.add(**dataclasses.asdict(step), **found)

    def add(self, step: str, **found: Any) -> None:
        """Adds a row to the file and prints it."""
        row = {"model": self.model, "step": step, "cache": self.options.cache, **found}
        common.add_rows(self.out, self.meta, [row], KEY)
        print(describe(row), flush=True)

    def measure(self, step: Step) -> Row:
        """Measures a step in seconds, its programs, and the peak memory of the first step."""
        import jax

        first_s, programs = self.time(step)
        stats = jax.devices()[0].memory_stats() or {} if step.step == "first" else {}
        peak = {"peak_bytes": stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {}
        warm_s = common.summarize([self.time(step)[0] for _ in range(self.repeats)])
        extra_s = first_s - warm_s["median"]
        return {"first_s": first_s, "warm_s": warm_s, "extra_s": extra_s, **programs, **peak}

    def time(self, step: Step) -> tuple[float, dict[str, int]]:
        """Makes one call; returns its seconds and its programs, without an earlier turn's."""
        earlier = next(one for one in make_steps(self.tokens) if one.step == "max_tokens")
        # A call consumes the cache, so each one continues its own.
        cache = self.generate(earlier).cache if step.is_continued else None
        self.events.clear()
        start = common.clock()
        if step.is_streamed:
            self.stream(step)
        else:
            self.generate(step, cache)
        return common.clock() - start, count_programs(self.events)

    def generate(self, step: Step, cache: Any = None) -> Any:
        """Calls `generate` and copies the tokens to the host."""
        import numpy as np

        options = self.arguments(step) | {"max_tokens": None if cache else step.max_tokens}
        generation = self.sw.make_generate(**options)(self.params, self.prompts(step), cache=cache)
        np.asarray(generation.tokens)
        return generation

    def stream(self, step: Step) -> None:
        """Calls `stream`, which copies its tokens to the host, and reads all chunks."""
        for _ in self.sw.stream(self.params, self.prompts(step), **self.arguments(step)):
            pass

    def arguments(self, step: Step) -> dict[str, Any]:
        """Returns the static arguments of a call."""
        recommended = self.sw.SketchWalkConfig.recommended
        plan, density = self.config.plan, step.density
        return {
            "model_config": self.config,
            "policy": recommended(density=density, plan=plan) if density else self.sw.Dense(),
            "max_new_tokens": step.max_new_tokens,
            "eos_token_ids": (),
        }

    def prompts(self, step: Step) -> Any:
        """Draws prompts on the host."""
        import numpy as np

        shape = (step.batch, step.tokens)
        return np.random.default_rng(0).integers(self.config.vocab_size, size=shape, dtype=np.int32)

    def session(self) -> Row:
        """Measures the seconds and the programs of a session, without import and weights."""
        import numpy as np

        longest = self.tokens if self.options.quick else LONGEST
        longest = min(longest, self.config.context_length - NEW_TOKENS)
        count = 2 if self.options.quick else 20
        lengths = np.geomspace(SHORTEST, longest, count).astype(int).tolist()
        lengths = np.random.default_rng(0).permutation(lengths).tolist()
        self.events.clear()
        taken = []
        for tokens, density in zip(lengths, itertools.cycle(DENSITIES), strict=False):
            start = common.clock()
            self.generate(Step(step="session", tokens=tokens, density=density))
            taken.append(common.clock() - start)
            print(f"session: {tokens:,} tokens, density {density}: {taken[-1]:.2f} s", flush=True)
        found = {"prompts": count, "lengths": lengths, "densities": DENSITIES, "each_s": taken}
        return found | {"first_s": sum(taken), **count_programs(self.events)}


def describe(row: Row) -> str:
    """Formats a row as one line for the terminal."""
    text = f"{row['model']} {row['cache']:<7}{row['step']:<16}"
    if row["error"]:
        return f"{text} {row['error']}"
    text += f"{row['first_s']:8.3f} s"
    if "warm_s" in row:
        text += f", then {row['warm_s']['median']:.3f} s"
    if "compiled" in row:
        text += f"; {row['compiled']} programs compiled, {row['from_disk']} from disk"
    return text


if __name__ == "__main__":
    main()
