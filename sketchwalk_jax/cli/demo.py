"""`sketchwalk demo`: facts hidden in a long text, asked of dense attention and Sketch-and-Walk.

All answer side by side on standard output, rivals too if there are any; a picture shows what
Sketch-and-Walk attended to, and where the facts were.
"""

import dataclasses
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import numpy as np
import typer

from sketchwalk_jax.cache import sparse_layers
from sketchwalk_jax.cached_layer import Settings
from sketchwalk_jax.cli import options, prompt
from sketchwalk_jax.cli.demo_reader import (
    MAX_FACTS,
    ROOM,
    SOURCE,
    TOKENS_PER_FACT,
    Answer,
    Prompt,
    Reader,
    hide_facts,
)
from sketchwalk_jax.cli.errors import NOT_FINITE, UsageError, usage_errors
from sketchwalk_jax.cli.stopwatch import Stopwatch
from sketchwalk_jax.compiled import keep_compiled_programs
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.hub import checkpoint_name
from sketchwalk_jax.models.plans import find_plan
from sketchwalk_jax.plots import (
    BLUE,
    DARK,
    HALF_BLUE,
    LIGHT_GREY,
    ORANGE,
    block_map,
    draw_map,
)
from sketchwalk_jax.policies import POLICIES, PRESETS, Policy, by_name, takes_density
from sketchwalk_jax.policies.dense import Dense
from sketchwalk_jax.progress import elapsed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is shown unless something else is asked for.
PRESET, PHASE = PRESETS[0], "both"
TOKENS, FACTS = 8192, 4
RIVALS = tuple(name for name in POLICIES if name not in ("dense", "sketchwalk"))
_PICTURES = (".png", ".pdf", ".svg")
_TEXT = "Text"
_LABEL_WIDTH, _COLUMN_WIDTH = 24, 27
_PANELS_IN_A_ROW = 5
_DPI = 110


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
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Another policy to set beside them, at the same density: {', '.join(RIVALS)}. "
            "May be given several times.",
            show_default="none",
            rich_help_panel=options.METHOD,
        ),
    ] = None,
    density: options.DensityOption = None,
    phase: options.PhaseOption = PHASE,
    dtype: options.DTypeOption = None,
    mesh: options.MeshOption = None,
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

    Each reads the text once, then answers every question from there. The text is English prose from
    Python's own help. A picture shows which blocks Sketch-and-Walk attended to.
    """
    started = time.perf_counter()
    directory = options.check_model(model)
    config = options.make_policy("sketchwalk", preset, density)
    model_config = ModelConfig.from_pretrained(directory)
    config = options.take_plan(config, (), find_plan(directory))
    nominal = density or getattr(config, "density", None)
    rivals = _rivals(policy or (), nominal)
    with usage_errors():
        for one in (config, *rivals.values()):
            Settings(model_config=model_config, policy=one, phase=phase)
    placement = options.make_placement(mesh, model_config, config, *rivals.values())
    num_tokens = _check_tokens(tokens, facts, model_config.context_length)
    chosen = options.choose_dtype(dtype, model_config)
    is_drawn = not no_plot and _can_draw(out)
    with elapsed("hiding facts"):
        tokenizer = prompt.open_tokenizer(directory)
        text = hide_facts(tokenizer, num_tokens=num_tokens - ROOM, num_facts=facts, seed=seed)
    prompt.check_tokens(text.tokens, max_new_tokens=ROOM, model_config=model_config)
    keep_compiled_programs()
    params, model_config = options.load_model(directory, chosen, sharding=placement)

    rivals = {
        name: options.set_density(
            one, nominal, params, model_config, tokenizer, num_tokens=num_tokens
        )
        for name, one in rivals.items()
    }
    name = _describe(config, preset, phase)
    table = _Table(is_shown=not as_json)
    _introduce(table, directory, text)
    with Stopwatch() as stopwatch:
        dense, sparse, *others = (
            Reader(params, model_config, one, tokenizer, phase=phase, stopwatch=stopwatch)
            for one in (Dense(block_size=config.block_size), config, *rivals.values())
        )
        columns = {"dense": dense, "Sketch-and-Walk": sparse}
        columns |= dict(zip(rivals, others, strict=True))
        _compare(table, text, columns, num_tokens=num_tokens, name=name)
        compile_s = stopwatch.compile_s
    table.line()
    if not all(reader.is_finite for reader in columns.values()):
        warnings.warn(NOT_FINITE, stacklevel=1)
    for who, reader in list(columns.items())[1:]:
        table.line(_summary(dense, reader, who=who))
    if phase == "prefill":
        table.line("Its answers were written densely; --phase both makes them sparse as well.")

    is_drawn = is_drawn and _draw(
        out,
        text,
        dense,
        sparse,
        layers=sparse_layers(model_config, config),
        name=name,
    )
    total_s = time.perf_counter() - started
    if as_json:
        found = {
            "model": checkpoint_name(directory),
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
            "rivals": {name: _results(columns[name]) for name in rivals},
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


def _rivals(names: Sequence[str], density: float | None) -> dict[str, Policy]:
    """The policies beside Sketch-and-Walk; those with a knob as published, at first.

    No layer of theirs is dense unless they say so themselves: the density is that of all layers.
    """
    found = {}
    for name in names:
        if name == options.AUTO:
            raise UsageError("--policy auto is either of the two that are here already")
        if name not in RIVALS:
            raise UsageError(f"--policy must be one of {RIVALS}, got {name!r}")
        fields: dict[str, Any] = (
            {"dense_layers": 0} if hasattr(by_name(name), "dense_layers") else {}
        )
        policy: Any = by_name(name, **fields)
        if density is not None and takes_density(policy):
            policy = dataclasses.replace(policy, density=density)
        found[name] = policy
    return found


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


def _can_draw(out: Path) -> bool:
    """Whether there can be a picture; says before all else on standard error why not.

    Raises:
      UsageError: If the file cannot be one.
    """
    if out.suffix not in _PICTURES:
        raise UsageError(f"--out must end in one of {_PICTURES}, got {str(out)!r}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out must lie in an existing folder, got {str(out)!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        print(
            'no picture: it needs matplotlib, pip install "sketchwalk-jax[plots]"', file=sys.stderr
        )
        return False
    return True


def _describe(config: Policy, preset: str, phase: str) -> str:
    density = getattr(config, "density", None)
    parts = [
        preset,
        "" if density is None else f"density {density:g}",
        "" if phase == "both" else f"{phase} only",
    ]
    return ", ".join(part for part in parts if part)


class _Table:
    """Lines of a label and columns on standard output.

    On a terminal the last line can be written again while answers grow; elsewhere a line is
    written once, when it is complete.
    """

    def __init__(self, *, is_shown: bool) -> None:
        """Prints nothing at all unless `is_shown`."""
        self._is_shown = is_shown
        self._is_live = is_shown and sys.stdout is not None and sys.stdout.isatty()

    def line(self, label: str = "", *cells: str) -> None:
        """Writes a complete line."""
        if self._is_shown:
            print(self._start + self._format(label, cells).rstrip(), flush=True)

    def update(self, label: str, *cells: str) -> None:
        """Writes a line that `update` or `line` will replace."""
        if self._is_live:
            print(self._start + self._format(label, cells), end="", flush=True)

    @property
    def _start(self) -> str:
        return "\r\x1b[K" if self._is_live else ""  # back to the margin, and clear the line

    def _format(self, label: str, cells: Sequence[str]) -> str:
        columns = "".join(f"{cell:<{_COLUMN_WIDTH}}" for cell in cells[:-1])
        return f"{label:<{_LABEL_WIDTH}}{columns}{cells[-1] if cells else ''}"


def _introduce(table: _Table, directory: Path, text: Prompt) -> None:
    device = jax.devices()[0].device_kind
    who = f"read by {checkpoint_name(directory)} on {device}"
    table.line(f"{len(text.tokens):,} tokens of English from {SOURCE}, {who}")
    for fact in text.facts:
        share = fact.position / len(text.tokens)
        table.line(f"  hidden at {share:.0%}", f"The code of {fact.word} is {fact.number}.")


def _compare(
    table: _Table, text: Prompt, columns: Mapping[str, Reader], *, num_tokens: int, name: str
) -> None:
    """Lets all read and answer, and shows it while it happens."""
    dense, *others = readers = list(columns.values())
    table.line()
    table.line("", *columns)
    table.line("", "", f"({name})")
    for who, reader in columns.items():
        with elapsed(f"{who} reads the text"):
            reader.read(text, max_tokens=num_tokens)
        table.update("reading", *(f"{one.read_s:.2f} s" for one in readers if one.read_s))
    table.line(
        "reading",
        f"{dense.read_s:.2f} s",
        *(f"{one.read_s:.2f} s  {_speed(dense, one)}" for one in others),
    )
    table.line("  attended pairs", *(f"{one.read_density:.1%}" for one in readers))
    for fact in text.facts:
        label = f"code of {fact.word}?"
        # Token by token in turns, so that all answers grow at once.
        for grown in itertools.zip_longest(*(one.ask(fact) for one in readers)):
            # Those that have ended stay as they are.
            answers = [
                answer or one.answers[-1] for answer, one in zip(grown, readers, strict=True)
            ]
            table.update(label, *map(_shorten, answers))
        table.line(label, *(_verdict(one.answers[-1]) for one in readers))
    table.line("  attended pairs", *(f"{one.decode_density:.1%}" for one in readers))
    table.line("writing", *(f"{one.tokens_per_s:.1f} tokens/s" for one in readers))
    table.line("right", *(f"{one.num_right} of {len(text.facts)}" for one in readers))


def _verdict(answer: Answer) -> str:
    """An answer and whether it is right, for one column."""
    return f"{_shorten(answer) or '(nothing)'}  {'right' if answer.is_right else 'WRONG'}"


def _shorten(answer: Answer) -> str:
    """As much of an answer as a column has room for."""
    return answer.text if len(answer.text) <= 16 else answer.text[:15] + "…"


def _speed(dense: Reader, sparse: Reader) -> str:
    """How the sparse reader's time compares."""
    ratio = dense.read_s / sparse.read_s
    return f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"


def _summary(dense: Reader, sparse: Reader, *, who: str) -> str:
    """What came out, in a sentence."""
    pairs = list(zip(dense.answers, sparse.answers, strict=True))
    lost = sum(was.is_right and not now.is_right for was, now in pairs)
    if not dense.num_right and not sparse.num_right:
        return "This model answers none of the questions, with dense attention neither."
    if lost:
        found = f"{dense.num_right} facts that dense attention found"
        return f"{who} lost {lost} of the {found}."
    found = f"{who} found every fact that dense attention found"
    more = sparse.num_right - dense.num_right
    return f"{found}, and {more} more." if more else f"{found}."


def _results(reader: Reader) -> dict[str, Any]:
    return {
        "read_s": reader.read_s,
        "measured_density_prefill": reader.read_density,
        "tokens_per_s": reader.tokens_per_s,
        "measured_density_decode": reader.decode_density,
        "right": reader.num_right,
        "is_finite": reader.is_finite,
        "answers": [{"text": one.text, "is_right": one.is_right} for one in reader.answers],
    }


def _rounded(value: Any) -> Any:
    """Floats to four places."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 4))


def _draw(
    out: Path,
    text: Prompt,
    dense: Reader,
    sparse: Reader,
    *,
    layers: Sequence[int],
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
    draw_picture(text, dense, sparse, layers=layers, title=title).savefig(out, dpi=_DPI)
    return True


def draw_picture(
    prompt: Prompt, dense: Reader, sparse: Reader, *, layers: Sequence[int], title: str
) -> "Figure":
    """Draws a block map for every sparse layer, and below them what each question attended to.

    Orange marks stand below the blocks in which the facts are, and a dark line beside the rows that
    attended to everything before them. Where every question attended to everything, as with a
    preset that reads the end of a prompt densely, that part is left out.

    Args:
      prompt: The text.
      dense: Its answers stand beside those of `sparse`.
      sparse: What selected the blocks that are drawn.
      layers: The sparse layers, as the model counts.
      title: Title of the figure.

    Raises:
      ImportError: If matplotlib is missing.
    """
    from matplotlib.figure import Figure

    assert sparse.selection is not None
    size = sparse.selection.block_size
    maps = block_map(sparse.selection)
    num_blocks = -(-len(prompt.tokens) // size)
    maps = maps[:, :num_blocks, :num_blocks]
    places = [(fact.position - 1) // size for fact in prompt.facts]

    has_strips = not all(_is_full(answer) for answer in sparse.answers)
    rows = math.ceil(len(maps) / _PANELS_IN_A_ROW)
    heights = [2.4 * rows + 0.5, 0.5 + 0.7 * len(places)][: 1 + has_strips]
    figure = Figure(figsize=(12, sum(heights) + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=12)
    figure.legend(
        handles=_legend(maps), loc="outside lower center", ncols=5, fontsize=9, frameon=False
    )
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    above = parts[0]
    panels = above.subplots(rows, _PANELS_IN_A_ROW, sharex=True, sharey=True, squeeze=False).flat
    for index, panel in enumerate(panels):
        if index >= len(maps):
            panel.set_visible(False)
            continue
        draw_map(panel, maps[index], 0)
        _mark(panel, places)
        _mark_dense_rows(panel, maps[index])
        share = np.nanmean(maps[index])
        panel.set_title(f"layer {layers[index]}: {share:.0%} of blocks", fontsize=9)
    above.supxlabel(f"key block ({size} tokens each)", fontsize=10)
    above.supylabel("query block", fontsize=10)

    if has_strips:
        _draw_strips(parts[1], prompt, places, dense, sparse, layers)
    return figure


def _is_full(answer: Answer) -> bool:
    return answer.blocks is not None and bool(np.nanmin(answer.blocks) == 1.0)


def _draw_strips(
    below: Any,
    prompt: Prompt,
    places: Sequence[int],
    dense: Reader,
    sparse: Reader,
    layers: Sequence[int],
) -> None:
    """What the end of each question attended to, layer by layer."""
    strips = below.subplots(len(places), 1, sharex=True, squeeze=False)[:, 0]
    asked = zip(strips, prompt.facts, places, dense.answers, sparse.answers, strict=True)
    for strip, fact, place, was, now in asked:
        assert now.blocks is not None
        draw_map(strip, now.blocks, 0)
        strip.yaxis.set_major_formatter(lambda row, _: _name_of(float(row), layers))
        strip.set_aspect("auto")
        _mark(strip, [place])
        _mark_dense_rows(strip, now.blocks)
        strip.set_title(
            f"{fact.word}, {fact.number}: dense {_answered(was)}; sparse {_answered(now)}",
            fontsize=9,
            loc="left",
        )
    below.supxlabel(
        "key blocks that the end of each question attended to, before the answer", fontsize=10
    )
    below.supylabel("layer", fontsize=10)


def _name_of(row: float, layers: Sequence[int]) -> str:
    """The layer of a row; nothing between two rows."""
    return str(layers[int(row)]) if row in range(len(layers)) else ""


def _answered(answer: Answer) -> str:
    if answer.is_right:
        return "right"
    text = answer.text.encode("ascii", errors="replace").decode()  # which every font can write
    return f"wrong, {text}" if text else "silent"


def _mark(axis: Any, places: Sequence[int]) -> None:
    """Points at blocks from below the panel."""
    bottom = axis.get_ylim()[0]
    axis.plot(places, [bottom] * len(places), "^", color=ORANGE, markersize=5, clip_on=False)


def _mark_dense_rows(axis: Any, shares: np.ndarray) -> None:
    """Draws a line beside the rows in which every list held every causal block."""
    is_dense = np.nanmin(shares, axis=1) == 1.0
    edges = np.flatnonzero(np.diff(is_dense, prepend=False, append=False))
    left = axis.get_xlim()[0]
    for first, end in edges.reshape(-1, 2):
        rows = [first - 0.5, end - 0.5]
        axis.plot([left, left], rows, color=DARK, linewidth=4, clip_on=False)


def _legend(maps: np.ndarray) -> list[Any]:
    """What colours and marks mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shared = bool(np.any((maps > 0) & (maps < 1)))
    handles: list[Any] = [Patch(color=BLUE, label="all heads" if shared else "attended")]
    if shared:
        handles.append(Patch(color=HALF_BLUE, label="some heads"))
    return [
        *handles,
        Patch(color=LIGHT_GREY, label="not attended"),
        Line2D([], [], color=DARK, linewidth=4, label="rows that attended to everything"),
        Line2D([], [], color=ORANGE, marker="^", linestyle="", label="where a fact is"),
    ]
