"""`sketchwalk demo`: facts hidden in a long text, asked of dense attention and Sketch-and-Walk."""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from sketchwalk_jax.cache import num_dense_layers
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.compiled import keep_compiled_programs
from sketchwalk_jax.cli.demo_picture import save_picture
from sketchwalk_jax.cli.demo_prompt import MAX_FACTS, SOURCE, TOKENS_PER_FACT, Prompt, hide_facts
from sketchwalk_jax.cli.demo_reader import ROOM, Reader
from sketchwalk_jax.cli.demo_table import Table, shorten, speed, summary, verdict
from sketchwalk_jax.cli.errors import UsageError, usage_errors
from sketchwalk_jax.cli.generate import load_model
from sketchwalk_jax.cli.progress import elapsed
from sketchwalk_jax.cli.stopwatch import Stopwatch
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.policies import PRESETS, Policy
from sketchwalk_jax.policies.dense import Dense

# What is shown unless something else is asked for.
PRESET, PHASE = "released", "prefill"
TOKENS, FACTS = 8192, 4
_PICTURES = (".png", ".pdf", ".svg")
_TEXT = "Text"


def demo(
    model: options.ModelOption = None,
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Variant of Sketch-and-Walk: {', '.join(PRESETS)}.",
            rich_help_panel=options.METHOD,
        ),
    ] = PRESET,
    density: options.DensityOption = None,
    phase: options.PhaseOption = PHASE,
    dtype: options.DTypeOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of text, question and answer together.",
            show_default=f"{TOKENS}, or the model's context if that is shorter",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    facts: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_FACTS, metavar="N", help="Facts to hide.", rich_help_panel=_TEXT
        ),
    ] = FACTS,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Seed of the passage, of the facts and of their places.",
            rich_help_panel=_TEXT,
        ),
    ] = 0,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help=f"The picture; {', '.join(_PICTURES)}."),
    ] = Path("sketchwalk-demo.png"),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw no picture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Hide facts in a long text and ask for them, with dense attention and with Sketch-and-Walk.

    Both read the text once, then answer every question from there. The text is English prose from
    Python's own help. A picture shows which blocks Sketch-and-Walk attended to.
    """
    started = time.perf_counter()
    directory = options.check_model(model)
    config = options.make_policy("sketchwalk", preset, density)
    model_config = ModelConfig.from_pretrained(directory)
    with usage_errors():
        Settings(model_config=model_config, config=config, phase=phase)
    num_tokens = _check_tokens(tokens, facts, model_config.context_length)
    chosen = options.choose_dtype(dtype, model_config)
    if not no_plot:
        _check_picture(out)
    with elapsed("hiding facts"):
        tokenizer = prompt.open_tokenizer(directory)
        text = hide_facts(tokenizer, num_tokens=num_tokens - ROOM, num_facts=facts, seed=seed)
    prompt.check_tokens(text.tokens, max_new_tokens=ROOM, model_config=model_config)
    keep_compiled_programs()
    params, model_config = load_model(directory, chosen)

    name = _describe(config, preset, phase)
    table = Table(is_shown=not as_json)
    _introduce(table, directory, text)
    with Stopwatch() as stopwatch:
        dense, sparse = (
            Reader(params, model_config, one, tokenizer, phase=phase, stopwatch=stopwatch)
            for one in (Dense(block_size=config.block_size), config)
        )
        _compare(table, text, dense, sparse, num_tokens=num_tokens, name=name)
        compile_s = stopwatch.compile_s
    table.line()
    table.line(summary(dense, sparse))
    if phase == "prefill":
        table.line("Its answers were written densely; --phase both makes them sparse as well.")

    is_drawn = not no_plot and _draw(
        out, text, dense, sparse, first_layer=num_dense_layers(model_config, config), name=name
    )
    total_s = time.perf_counter() - started
    if as_json:
        found = {
            "model": directory.resolve().name,
            "device": jax.devices()[0].device_kind,
            "dtype": chosen,
            "text": SOURCE,
            "tokens": len(text.tokens),
            "seed": seed,
            "preset": preset,
            "nominal_density": getattr(config, "density", None),
            "phase": phase,
            "facts": [
                {"word": fact.word, "number": fact.number, "position": fact.position}
                for fact in text.facts
            ],
            "dense": _results(dense),
            "sketchwalk": _results(sparse),
            "compile_s": compile_s,
            "total_s": total_s,
            "picture": str(out) if is_drawn else None,
        }
        print(json.dumps(_rounded(found), allow_nan=False), flush=True)
        return
    if is_drawn:
        table.line(f"What was attended to is drawn in {out}.")
    table.line(
        f"{total_s:.0f} s in all, {compile_s:.0f} s of which went into compiling; "
        "the times above leave that out."
    )


def _check_tokens(tokens: int | None, facts: int, context: int) -> int:
    least = facts * TOKENS_PER_FACT + ROOM
    found = min(TOKENS, context) if tokens is None else tokens
    if found > context:
        raise UsageError(
            f"--tokens must not exceed the model's context of {context} tokens, got {found}"
        )
    if found < least:
        raise UsageError(f"--tokens must be at least {least} for {facts} facts, got {found}")
    return found


def _check_picture(out: Path) -> None:
    if out.suffix not in _PICTURES:
        raise UsageError(f"--out must end in one of {_PICTURES}, got {str(out)!r}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out must lie in an existing folder, got {str(out)!r}")


def _describe(config: Policy, preset: str, phase: str) -> str:
    density = getattr(config, "density", None)
    parts = [
        preset,
        "" if density is None else f"density {density:g}",
        "" if phase == "both" else f"{phase} only",
    ]
    return ", ".join(part for part in parts if part)


def _introduce(table: Table, directory: Path, text: Prompt) -> None:
    device = jax.devices()[0].device_kind
    who = f"read by {directory.resolve().name} on {device}"
    table.line(f"{len(text.tokens):,} tokens of English from {SOURCE}, {who}")
    for fact in text.facts:
        share = fact.position / len(text.tokens)
        table.line(f"  hidden at {share:.0%}", f"The code of {fact.word} is {fact.number}.")


def _compare(
    table: Table, text: Prompt, dense: Reader, sparse: Reader, *, num_tokens: int, name: str
) -> None:
    """Lets both read and answer, and shows it while it happens."""
    table.line()
    table.line("", "dense", "Sketch-and-Walk")
    table.line("", "", f"({name})")
    for reader, who in ((dense, "dense"), (sparse, "Sketch-and-Walk")):
        with elapsed(f"{who} reads the text"):
            reader.read(text, max_tokens=num_tokens)
        table.update("reading", f"{dense.read_s:.2f} s", "")
    table.line("reading", f"{dense.read_s:.2f} s", f"{sparse.read_s:.2f} s  {speed(dense, sparse)}")
    table.line("  attended pairs", f"{dense.read_density:.1%}", f"{sparse.read_density:.1%}")
    for fact in text.facts:
        label = f"code of {fact.word}?"
        # Token by token in turns, so that both answers grow at once.
        for left, right in itertools.zip_longest(dense.ask(fact), sparse.ask(fact)):
            # The one that has ended stays as it is.
            left, right = left or dense.answers[-1], right or sparse.answers[-1]
            table.update(label, shorten(left), shorten(right))
        table.line(label, verdict(dense.answers[-1]), verdict(sparse.answers[-1]))
    table.line("  attended pairs", f"{dense.decode_density:.1%}", f"{sparse.decode_density:.1%}")
    table.line(
        "writing", f"{dense.tokens_per_s:.1f} tokens/s", f"{sparse.tokens_per_s:.1f} tokens/s"
    )
    count = len(text.facts)
    table.line("right", f"{dense.num_right} of {count}", f"{sparse.num_right} of {count}")


def _draw(
    out: Path,
    text: Prompt,
    dense: Reader,
    sparse: Reader,
    *,
    first_layer: int,
    name: str,
) -> bool:
    """Saves the picture, or says on standard error why there is none."""
    if sparse.selection is None:
        print("no picture: nothing was selected while the text was read", file=sys.stderr)
        return False
    title = (
        f"Blocks attended to in {len(text.tokens):,} tokens with {len(text.facts)} facts "
        f"({name}; {sparse.read_density:.0%} of all pairs)"
    )
    try:
        save_picture(out, text, dense, sparse, first_layer=first_layer, title=title)
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
        return False
    return True


def _results(reader: Reader) -> dict[str, Any]:
    return {
        "read_s": reader.read_s,
        "measured_density_prefill": reader.read_density,
        "tokens_per_s": reader.tokens_per_s,
        "measured_density_decode": reader.decode_density,
        "right": reader.num_right,
        "answers": [{"text": one.text, "is_right": one.is_right} for one in reader.answers],
    }


def _rounded(value: Any) -> Any:
    """Floats to four places."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 4))
