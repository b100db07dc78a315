"""`sketchwalk calibrate`: measures a model's plan and writes it next to its checkpoint."""

import dataclasses
import functools
import itertools
import sys
import tempfile
from pathlib import Path

from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.errors import UsageError, usage_errors
from sketchwalk_jax.cli.options import field
from sketchwalk_jax.evaluation.planning import (
    PASSAGES,
    TASKS,
    loss_passages,
    make_plan,
    measure_losses,
    planning_prompts,
)
from sketchwalk_jax.evaluation.provenance import describe_machine
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hub import checkpoint_name
from sketchwalk_jax.models.params import weights_of
from sketchwalk_jax.models.plans import fingerprint
from sketchwalk_jax.plan import Plan, plan_path
from sketchwalk_jax.policies.recommended import RecommendedConfig, planned_layers
from sketchwalk_jax.progress import elapsed, progress_bar
from sketchwalk_jax.text.haystack import read_text

MOST_TOKENS = 8192
PROMPTS = 2 * len(TASKS)
# Densities at which the table shows each layer's share of the plan.
_SHOWN = (0.1, 0.2)


@dataclasses.dataclass(kw_only=True)
class Calibrate(options.Command):
    """Measure how the layers of a model should share a density.

    On generated prompts that no evaluation scores, it is measured what each layer loses where the
    recommended policy selects at several densities. The plan takes effect wherever that policy runs
    without one: `generate`, `sketchwalk generate`, `sketchwalk eval`. A table goes to standard
    output, the plan to a file.
    """

    tokens: int | None = field(
        "--tokens N",
        "Tokens of a prompt; short ones say little about low densities.",
        None,
        f"{MOST_TOKENS}, or the model's context if that is shorter",
    )
    prompts: int = field("--prompts N", "Prompts.", min=1, value=PROMPTS)
    text: Path | None = options.TEXT_FILE
    mesh: str | None = options.MESH
    out: Path | None = field(
        "--out FILE",
        "The plan's file.",
        None,
        "where `load` finds it, in the checkpoint's folder",
    )
    overwrite: bool = field("--overwrite", "Replace the file if it exists.")

    def run(self) -> None:
        """Measures the plan, writes it and prints its table."""
        directory = options.check_model(self.model)
        path = plan_path(directory) if self.out is None else self.out
        _check_file(path, overwrite=self.overwrite)
        model_config = ModelConfig.from_pretrained(directory)
        num_tokens = options.check_context("--tokens", self.tokens, model_config, usual=MOST_TOKENS)
        least = 10 * RecommendedConfig().block_size
        if num_tokens < least:
            whose = ", the model's context" if self.tokens is None else ""
            raise UsageError(
                f"--tokens must be at least {least}, for blocks to choose from, got "
                f"{num_tokens}{whose}"
            )
        dtype = options.choose_dtype(self.dtype, model_config)
        placement = options.make_placement(self.mesh, model_config)
        with usage_errors(path="text"):
            source = read_text(self.text)
        tokenizer = prompt.open_tokenizer(directory)
        with usage_errors(num_tokens="tokens"), elapsed("writing prompts"):
            drawn = planning_prompts(
                tokenizer, num_tokens=num_tokens, count=self.prompts, text=source
            )
            lengths = (num_tokens // 2, num_tokens)
            texts = {one: loss_passages(tokenizer, num_tokens=one, text=source) for one in lengths}
        for one in drawn:
            prompt.check_tokens(one, max_new_tokens=0, model_config=model_config)
        own = fingerprint(directory)
        # Ignore an existing plan, which may be of another checkpoint and is to be replaced.
        params, model_config = options.load_model(
            directory, dtype, weights=self.weights, use_plan=False, sharding=placement
        )

        count = self.prompts + len(lengths) * PASSAGES
        with progress_bar(count, "measuring", unit=" prompts") as bar:
            after = functools.partial(bar.update, 1)
            plan = make_plan(params, drawn, model_config=model_config, fingerprint=own, after=after)
            losses = [
                measure_losses(
                    params,
                    texts[one],
                    model_config=model_config,
                    plan=plan,
                    num_tokens=one,
                    after=after,
                )
                for one in lengths
            ]
            plan = dataclasses.replace(plan, model_losses=tuple(itertools.chain(*losses)))
        measured = describe_machine(
            model=checkpoint_name(directory),
            prompts=self.prompts,
            tokens=num_tokens,
            tasks=list(TASKS[: self.prompts]),
            text={"name": source.name, "sha256": source.sha256},
            dtype=dtype,
            weights=weights_of(params),
        )
        plan.write(path, measured=measured)
        print(_table(plan), flush=True)
        print(f"{path}: plan {plan.short_hash} of {plan.num_layers} layers", file=sys.stderr)
        if path.resolve() != plan_path(directory).resolve():
            print(
                f"to use it, put it where it is looked for: {plan_path(directory)}", file=sys.stderr
            )


def _check_file(path: Path, *, overwrite: bool) -> None:
    """Raises a `UsageError` unless the plan can be written, before hours of measuring."""
    if path.is_dir():
        raise UsageError(f"--out must be a file, got the folder {str(path)!r}")
    if path.exists() and not overwrite:
        raise UsageError(
            f"--overwrite must be given to replace the plan {str(path)!r}, or --out with another "
            f"file"
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"--out must be a file in a folder that can be written to, got {str(path)!r} "
            f"({error.strerror}); give --out FILE"
        ) from error


def _table(plan: Plan) -> str:
    """Shows for each layer its loss in nats at the measured densities, and its share of the plan.

    The share is the layer's density and its number of representative queries per query block, for
    each density in `_SHOWN`. Most layers are measured at the same densities; a cell names others.
    """
    tried = plan.densities[0]
    header = ["layer", *(f"loss at {one:.3f}" for one in tried)]
    header += [f"{what} at {one:g}" for one in _SHOWN for what in ("density", "queries")]
    given = [planned_layers(plan, one) for one in _SHOWN]
    rows = []
    for layer, (densities, own) in enumerate(zip(plan.densities, plan.losses, strict=True)):
        losses = [f"{one:.2e}" for one in own]
        if densities != tried:
            pairs = zip(losses, densities, strict=True)
            losses = [f"{loss} at {one:.3f}" for loss, one in pairs]
            losses += [""] * (len(tried) - len(losses))
        ends = [f"{one[layer][0]:.3f}  {one[layer][1] or 'all'}".split() for one in given]
        rows.append([str(layer), *losses, *itertools.chain(*ends)])
    return options.align([header, *rows])
