"""Trains the small long-context model that ships with the project.

    python training/train.py --text FILE --out DIR [--minutes 9.3]
    python training/train.py --text FILE --out DIR --recipe continue --init DIR/model

The first command starts from random weights, the second from a finished model with a fresh
optimiser. Both write DIR/model, a Hugging Face directory.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from card import make_card
from export import export
from flax import nnx
from loader import Loader
from prepare import Prepared, prepare
from recipe import MODEL, RECIPES, Recipe, Stage
from sequences import CLASSES, TEXT
from step import Metrics, State, init_state, make_optimizer, train_step
from validate import validate

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.flax import CausalLM
from sketchwalk_jax.models.params import Params
from sketchwalk_jax.models.weights import load

_LOG_SECONDS = 10.0
_IN_FLIGHT = 4  # most dispatched steps that are not done yet


@dataclasses.dataclass
class Clock:
    """Progress of a run: by steps if their numbers are given, by time otherwise.

    Attributes:
      recipe: Recipe of the run.
      seconds: Total time of all stages.
      steps: Numbers of steps of the stages, to repeat a run exactly.
    """

    recipe: Recipe
    seconds: float
    steps: tuple[int, ...] | None = None
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def spent(self) -> float:
        """Returns the seconds of training so far."""
        return time.perf_counter() - self.started

    def progress(self, stage: int, step: int) -> float:
        """Returns the share of the run that is done; `step` counts within the stage."""
        if self.steps is None:
            return self.spent() / self.seconds
        return (sum(self.steps[:stage]) + step) / sum(self.steps)

    def is_over(self, stage: int, step: int) -> bool:
        """Whether the stage has used its share."""
        if self.steps is not None:
            return step >= self.steps[stage]
        shares = [one.share for one in self.recipe.stages]
        return self.spent() >= self.seconds * sum(shares[: stage + 1]) / sum(shares)


def train(
    state: State,
    recipe: Recipe,
    clock: Clock,
    loader: Loader,
    *,
    model_config: ModelConfig,
    dtype: str,
) -> tuple[State, list[int]]:
    """Runs all stages.

    Returns:
      The state after the last step, and the steps taken in every stage.
    """
    optimizer = make_optimizer(weight_decay=recipe.weight_decay, b2=recipe.b2, clip=recipe.clip)
    update = jax.jit(
        partial(train_step, model_config=model_config, optimizer=optimizer, dtype=dtype),
        donate_argnums=0,
    )
    steps = [0] * len(recipe.stages)
    with ThreadPoolExecutor(2) as compiler:
        # Later stages compile while the first one runs.
        programs: dict[tuple[int, int], Future[Any]] = {}
        for stage in recipe.stages:
            shape = (stage.sequences, stage.length)
            if shape not in programs:
                programs[shape] = compiler.submit(_compile, update, state, shape)
        for index, stage in enumerate(recipe.stages):
            shape = (stage.sequences, stage.length)
            program, log = programs[shape].result(), Log(stage)
            batches = loader.batches(index, shape)
            while not clock.is_over(index, steps[index]):
                rate = recipe.learning_rate(sum(steps), clock.progress(index, steps[index]))
                state, metrics = program(state, *next(batches), jnp.float32(rate))
                steps[index] += 1
                log.add(metrics, rate, clock)
            batches.close()
            log.show(clock)
    return state, steps


def _compile(update: Any, state: State, shape: tuple[int, int]) -> Any:
    started = time.perf_counter()
    program = update.lower(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state),
        jax.ShapeDtypeStruct((shape[0], shape[1] + 1), jnp.uint16),
        jax.ShapeDtypeStruct(shape, jnp.uint8),
        jax.ShapeDtypeStruct((), jnp.float32),
    ).compile()
    print(f"compiled {shape} in {time.perf_counter() - started:.0f} s", flush=True)
    return program


class Log:
    """Prints losses and the accuracy of each kind of answer token every few seconds."""

    def __init__(self, stage: Stage) -> None:
        """Starts with nothing seen."""
        self.stage, self.metrics, self.steps = stage, [], 0
        self.shown = time.perf_counter()
        self.rate = 0.0

    def add(self, metrics: Metrics, rate: float, clock: Clock) -> None:
        """Counts one step; waits for an earlier step."""
        self.metrics.append(metrics)
        self.steps, self.rate = self.steps + 1, rate
        if len(self.metrics) > _IN_FLIGHT:
            jax.block_until_ready(self.metrics[-_IN_FLIGHT])
        if time.perf_counter() - self.shown > _LOG_SECONDS:
            self.show(clock)

    def show(self, clock: Clock) -> None:
        """Prints the metrics since the last line."""
        if not self.metrics:
            return
        total = jax.tree.map(lambda *parts: np.sum(np.stack(parts), axis=0), *self.metrics)
        seconds = time.perf_counter() - self.shown
        tokens = len(self.metrics) * self.stage.sequences * self.stage.length
        count = np.maximum(total.count, 1)
        right = {name: total.right[index] / count[index] for name, index in CLASSES.items()}
        print(
            f"{clock.spent():5.0f} s  T={self.stage.length:<5}  step {self.steps:<5} "
            f"lr {self.rate:.1e}  {tokens / seconds / 1e6:.2f} M tokens/s  "
            f"text {total.loss[TEXT] / count[TEXT]:.3f}  "
            + "  ".join(f"{name} {value:.3f}" for name, value in right.items()),
            flush=True,
        )
        self.metrics, self.shown = [], time.perf_counter()


def _initial_params(init: Path | None, seed: int, model_config: ModelConfig) -> Params:
    if init is not None:
        return load(init, dtype="float32", progress=False)[0]
    model = CausalLM(model_config, rngs=nnx.Rngs(seed), dtype=jnp.float32)
    return model.params


def main(
    text: Annotated[Path, typer.Option(help="Plain UTF-8 text, or .xz of it.")],
    out: Annotated[Path, typer.Option(help="Folder for the model and its data.")],
    recipe: Annotated[str, typer.Option(help=f"One of {', '.join(RECIPES)}.")] = "scratch",
    about: Annotated[str, typer.Option(help="What the text is, for the model card.")] = "",
    init: Annotated[Path | None, typer.Option(help="Model to go on from.")] = None,
    minutes: Annotated[float, typer.Option(help="For everything, from start to end.")] = 9.3,
    steps: Annotated[str, typer.Option(help="Steps of each stage, instead of time.")] = "",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that make data.")] = 14,
    dtype: Annotated[str, typer.Option(help="Of the computation.")] = "bfloat16",
    scale: Annotated[float, typer.Option(help="Scales all lengths, to try the recipe out.")] = 1.0,
) -> None:
    """Trains, validates and exports."""
    started = time.perf_counter()
    if recipe not in RECIPES:
        raise typer.BadParameter(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    if (recipe == "continue") != (init is not None):
        raise typer.BadParameter("--init must be given with --recipe continue, and only then")
    plan = _scaled(RECIPES[recipe], scale)
    counts = tuple(int(part) for part in steps.split(",")) if steps else None
    if counts is not None and len(counts) != len(plan.stages):
        raise typer.BadParameter(f"--steps must be {len(plan.stages)} numbers, got {steps!r}")

    prepared = prepare(text, out / "data", init=init, seed=seed, about=about)
    options = {"hops": plan.hops, "lists_chains": plan.lists_chains}
    loader = Loader(prepared.path, prepared.pieces, seed=seed, num_workers=workers, **options)
    params = _initial_params(init, seed, MODEL)
    optimizer = make_optimizer(weight_decay=plan.weight_decay, b2=plan.b2, clip=plan.clip)
    state = init_state(params, optimizer)
    ready = time.perf_counter() - started
    print(f"ready after {ready:.0f} s", flush=True)
    reserve = 45.0 * min(1.0, minutes / 9)
    clock = Clock(plan, minutes * 60 - ready - reserve, counts)
    state, taken = train(state, plan, clock, loader, model_config=MODEL, dtype=dtype)
    run = {"recipe": recipe, "seed": seed, "seconds": round(clock.spent())}
    loader.close()
    metrics = _metrics(prepared, plan, taken, run, init=init)
    params = jax.tree.map(lambda x: x.astype(MODEL.dtype), state.params)
    del state
    lengths = [stage.length for stage in plan.stages if stage.length >= 1024 * min(scale, 1)]
    metrics["validation"] = validate(
        params,
        prepared,
        lengths,
        model_config=MODEL,
        dtype=dtype,
        max_tokens=int(min(scale, 1.0) * 2**20),
        **options,
    )
    metrics["wall_seconds"] = round(time.perf_counter() - started)
    card = make_card(metrics, MODEL)
    export(
        out / "model", params, prepared.tokenizer, model_config=MODEL, metrics=metrics, card=card
    )
    print(json.dumps(metrics["validation"], indent=1))
    print(f"written: {out / 'model'} after {time.perf_counter() - started:.0f} s", flush=True)


def _scaled(recipe: Recipe, scale: float) -> Recipe:
    stages = tuple(
        dataclasses.replace(
            stage,
            length=max(64, int(stage.length * scale)),
            sequences=max(1, round(stage.sequences * min(scale, 1.0))),
        )
        for stage in recipe.stages
    )
    return dataclasses.replace(recipe, stages=stages)


def _metrics(
    prepared: Prepared, recipe: Recipe, taken: list[int], run: dict[str, Any], *, init: Path | None
) -> dict[str, Any]:
    """Collects the metrics of the model card, except the validation."""
    before = json.loads((init / "metrics.json").read_text())["runs"] if init is not None else []
    stages = [
        dataclasses.asdict(stage) | {"steps": steps}
        for stage, steps in zip(recipe.stages, taken, strict=True)
    ]
    rates = {key: value for key, value in dataclasses.asdict(recipe).items() if key != "stages"}
    machine = {
        "device": jax.devices()[0].device_kind,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax")},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return {
        "text": prepared.description,
        "runs": [*before, run | rates | {"stages": stages, "machine": machine}],
    }


if __name__ == "__main__":
    typer.run(main)
