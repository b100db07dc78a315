"""A report of one evaluation in markdown: its tables and figures, as `sketchwalk report` writes it.

`sections` makes the tables by name, for a page with prose of its own; `drawings` are the figures of
the rows, `model_drawings` those of the model as it reads one prompt: the blocks attended to, and
powers of its attention. `write_report` writes all of it into a folder.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from sketchwalk_jax.cache import sparse_layers
from sketchwalk_jax.evaluation.attention_powers import attention_matrix, plot_attention_powers
from sketchwalk_jax.evaluation.plots import (
    plot_accuracy,
    plot_mass_recall,
    plot_needle_depth,
    plot_output_error,
)
from sketchwalk_jax.evaluation.results import Results, Row
from sketchwalk_jax.evaluation.summaries import (
    PHASE_TITLES,
    densities,
    measured_phases,
    policy_label,
    probed_phases,
    rows_with,
    values_of,
)
from sketchwalk_jax.evaluation.tables import (
    accuracy_table,
    density_title,
    difference_table,
    hops_table,
    lengths_table,
    longest,
    loss_table,
    recall_table,
    settings_table,
    summary_table,
)
from sketchwalk_jax.evaluation.tasks import Sample, draw_samples
from sketchwalk_jax.evaluation.text import Text, read_text
from sketchwalk_jax.generation import make_generate
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.plots import ORANGE, import_pyplot, plot_block_map
from sketchwalk_jax.policies import by_name, with_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PyTree = Any

NOT_MEASURED = "*Not measured.*"
NOT_CALIBRATED = "*No policy here takes calibration.*"
SUMMARY_NOTE = (
    "A policy that selects in one phase only has a dash in the others. Text loss and density are "
    "those of the first phase in which it has a figure."
)

TITLES = {
    "setup": "What was measured",
    "summary": "Summary",
    "accuracy": "Right answers by task",
    "differences": "Differences to dense attention",
    "lengths": "By length",
    "depths": "Needles by depth",
    "hops": "Variable tracking by statements to follow",
    "loss": "Text loss",
    "layers": "Layer by layer",
    "settings": "What calibration set",
}
"""Sections of a report and their titles."""

_DPI = 110
_LISTED = 12  # names in one sentence
_MAP_TOKENS, _MATRIX_TOKENS = 4096, 2048


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure to be.

    Attributes:
      description: What it shows, in a sentence.
      draw: Makes it.
    """

    description: str
    draw: Callable[[], "Figure"]


def write_report(
    results: Results,
    folder: str | Path,
    *,
    has_figures: bool = True,
    more: Mapping[str, Drawing] | None = None,
) -> list[Path]:
    """Writes `report.md` and its figures.

    Args:
      results: One evaluation.
      folder: Where; made if it is missing.
      has_figures: Whether figures are drawn, which takes matplotlib.
      more: Further figures, such as those of the model, by name.

    Returns:
      The files, `report.md` first.

    Raises:
      ImportError: If figures are wanted and matplotlib is missing.
      OSError: If a file cannot be written.

    Example:
      >>> write_report(read_results("quality.json"), "report")  # doctest: +SKIP
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    images = drawings(results.rows) | dict(more or {}) if has_figures else {}
    written = save_drawings(images, folder)
    parts = sections(results, plots="." if has_figures else None)
    text = ["# Quality of sparse attention", *describe_gaps(results)]
    for name, title in TITLES.items():
        text += [f"## {title}", parts[name]]
    if more:
        text.append("## The model on one prompt")
        text += [f"![{one.description}](./{name}.png)" for name, one in more.items()]
    path = folder / "report.md"
    path.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    return [path, *written]


def sections(results: Results, *, plots: str | None = None) -> dict[str, str]:
    """The parts of a report as markdown, by the names of `TITLES`.

    Args:
      results: One evaluation.
      plots: Folder of the figures, as the page links to it; without one there are no figures.

    Returns:
      Tables and figures, without titles. What the results have no rows for says so; where an
      evaluation is not finished or of several codes, the first two parts do.

    Example:
      >>> print(sections(read_results("quality.json"))["summary"])  # doctest: +SKIP
    """
    rows = results.rows
    # Where every policy sets its own density, `None` leaves the density open.
    tokens = longest(rows)
    nominal: list[float | None] = [*densities(rows)[::-1]] or [None]
    images = drawings(rows) if plots is not None else {}

    def show(prefix: str) -> list[str]:
        return [
            f"![{one.description}]({plots}/{name}.png)"
            for name, one in images.items()
            if name.startswith(prefix)
        ]

    has_loss = any(row["text_loss"] is not None for row in rows)
    has_hops = any(row["hops"] is not None for row in rows)
    has_layers = any(row.get("mass_recall_by_layer") for row in rows)
    parts = {
        "setup": [*describe_gaps(results), describe_results(results)],
        "summary": [
            *describe_gaps(results),
            *_by_density(summary_table, rows, nominal, tokens),
            SUMMARY_NOTE,
        ],
        "accuracy": [*show("accuracy"), *_by_phase(accuracy_table, rows, nominal, tokens)],
        "differences": _by_phase(difference_table, rows, nominal, tokens),
        "lengths": [
            block
            for density in nominal
            for block in (f"**{density_title(density)}**", lengths_table(rows, density=density))
        ],
        "depths": show("needle_depth"),
        "hops": _by_density(hops_table, rows, nominal, tokens) if has_hops else [],
        "loss": [loss_table(rows, densities=nominal, tokens=tokens)] if has_loss else [],
        "layers": [
            *([recall_table(rows, densities=nominal, tokens=tokens)] if has_layers else []),
            *show("mass_recall"),
            *show("output_error"),
        ],
        "settings": [settings_table(rows) or NOT_CALIBRATED],
    }
    return {name: "\n\n".join(blocks) or NOT_MEASURED for name, blocks in parts.items()}


def _by_density(
    make: Callable[..., str], rows: Sequence[Row], nominal: Sequence[float | None], tokens: int
) -> list[str]:
    blocks = []
    for density in nominal:
        blocks.append(f"**{density_title(density)}, {tokens:,} tokens**")
        blocks.append(make(rows, density=density, tokens=tokens))
    return blocks


def _by_phase(
    make: Callable[..., str], rows: Sequence[Row], nominal: Sequence[float | None], tokens: int
) -> list[str]:
    blocks = []
    for density in nominal:
        for phase in measured_phases(rows):
            place = PHASE_TITLES[phase].lower()
            blocks.append(f"**{density_title(density)}, sparse in {place}, {tokens:,} tokens**")
            blocks.append(make(rows, phase=phase, density=density, tokens=tokens))
    return blocks


def describe_gaps(results: Results) -> list[str]:
    """What a reader must know before any number: that rows are missing, or are of several codes.

    Args:
      results: One evaluation.

    Returns:
      Paragraphs of markdown; none for a finished evaluation of one code.
    """
    found = []
    missing, asked = results.missing, results.asked
    if missing:
        fields = ("policy", "phase", "task", "tokens")
        names = [
            f"{policy_label(one)}{'' if one['density'] in (None, 1) else f' {one["density"]:g}'}"
            for one in missing
        ]
        parts = [_listed(names), *(_listed([one[name] for one in missing]) for name in fields[1:])]
        what = "; ".join(
            f"{title} {part}"
            for title, part in zip(("of", "sparse in", "in", "at tokens"), parts, strict=True)
        )
        found.append(
            f"**Not finished.** {len(missing):,} of {asked:,} groups of rows (a policy, phase, "
            f"task and length) are missing, {what}. Means are over what is there, which differs "
            f"from policy to policy; the command that wrote the file goes on where it stopped."
        )
    if len(results.sources) > 1:
        parts = [f"{count:,} of code `{one}`" for one, count in results.sources.items()]
        found.append(
            f"**Of more than one code.** The package was changed while this was measured: rows are "
            f"{', '.join(parts)}."
        )
    return found


def _listed(values: Sequence[Any]) -> str:
    """Different values, in their order; of many the first ones."""
    found = [f"{one:,}" if isinstance(one, int) else str(one) for one in dict.fromkeys(values)]
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return ", ".join(found[:_LISTED]) + more


def describe_results(results: Results) -> str:
    """Model, text, prompts, machine and command in two paragraphs."""
    meta, rows = results.meta, results.rows
    model, text = meta["model"], meta["text"]
    hashes = ", ".join(f"`{value[:16]}`" for value in model["sha256"].values())
    part = "" if text["tail"] == 1 else f", the last {text['tail']:.0%} of it"
    by_hops = {row["prompts"] for row in rows if row["hops"] is not None}
    others = {row["prompts"] for row in rows if row["hops"] is None and row["depth"] is None}
    counts = f"{_range(others)} prompts of each task and length" if others else ""
    if by_hops:
        counts += (
            f"{', ' if counts else ''}{_range(by_hops)} for each number of statements to follow"
        )
    if meta.get("probe_prompts"):
        counts += f" (attention mass, errors and bytes on {meta['probe_prompts']} of each)"
    lengths = ", ".join(f"{tokens:,}" for tokens in values_of(rows, "tokens"))
    return (
        f"Model `{model['name']}` ({meta['dtype']}; SHA-256 of its weights begins {hashes}). "
        f"Facts are hidden in {text['name']}{part} (SHA-256 `{text['sha256'][:16]}`), in prompts "
        f"of {lengths} tokens: {counts}, seed {meta['seed']}, the same ones for every policy. "
        f"{_fields_text(meta)}The run took {meta['wall_s'] / 60:.1f} minutes.\n\n"
        f"{describe_run(meta)}"
    )


def _fields_text(meta: Mapping[str, Any]) -> str:
    """Fields of policies that the evaluation set; else every policy has its own."""
    fields = meta.get("fields") or {}
    if not fields:
        return ""
    text = ", ".join(f"`{name}={value}`" for name, value in fields.items())
    return f"In every policy that has them: {text}. "


def _range(counts: set[int]) -> str:
    return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def describe_run(meta: Mapping[str, Any]) -> str:
    """Hardware, versions, date and command in one line."""
    versions = meta["versions"]
    machine = f"{meta['cpu']}, {meta['cores']} cores, {meta['memory_gib']} GiB"
    if meta["device"] != "cpu":
        machine = f"{meta['device']} in a machine with {machine}"
    return (
        f"{machine}; "
        f"Python {versions['python']}, JAX {versions['jax']}; {meta['date']}; "
        f"`{meta['command']}`"
    )


def drawings(rows: Sequence[Row]) -> dict[str, Drawing]:
    """The figures that some rows give, by name; nothing is drawn yet.

    Args:
      rows: Rows of one evaluation.

    Returns:
      Accuracy, needles by depth, mass recall and output error, in each phase that was measured.
      By depth and by layer at the highest density below 1.

    Example:
      >>> list(drawings(rows))  # doctest: +SKIP
      ['accuracy_prefill', 'accuracy_decode', 'accuracy_both', 'needle_depth_prefill', ...]
    """
    found = {}
    phases = measured_phases(rows)
    for phase in phases:
        what = f"Right answers against measured density, {PHASE_TITLES[phase].lower()} sparse"
        found[f"accuracy_{phase}"] = Drawing(
            what, functools.partial(plot_accuracy, rows, phase=phase)
        )
    for phase in phases:
        if any(row["depth"] is not None for row in rows_with(rows, phase=phase)):
            what = f"Needles found by depth and length, {PHASE_TITLES[phase].lower()} sparse"
            draw = functools.partial(plot_needle_depth, rows, phase=phase)
            found[f"needle_depth_{phase}"] = Drawing(what, draw)
    for field, name, plot, what in (
        ("mass_recall_by_layer", "mass_recall", plot_mass_recall, "Attention mass kept"),
        ("output_error_by_layer", "output_error", plot_output_error, "Error of the output"),
    ):
        for phase in probed_phases(rows, field):
            title = f"{what} by layer, {PHASE_TITLES[phase].lower()} sparse"
            found[f"{name}_{phase}"] = Drawing(title, functools.partial(plot, rows, phase=phase))
    return found


def model_drawings(
    params: PyTree,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    text: Text | None = None,
    preset: str = "recommended",
    density: float = 0.2,
    layer: int | None = None,
    seed: int = 0,
) -> dict[str, Drawing]:
    """Figures of a model that reads a prompt with one fact in it and a question at its end.

    Args:
      params: Parameters of the model; float32 is best, for powers multiply rounding errors.
      model_config: The model.
      tokenizer: A tokenizer of transformers.
      text: Text to hide the fact in; Python's help topics by default.
      preset: Preset of Sketch-and-Walk for the block map.
      density: Its nominal density; not for `"released"`, which sets its own.
      layer: Layer whose attention is raised to powers; the middle one by default.
      seed: Seed of the prompts.

    Returns:
      `block_map`, blocks attended to layer by layer, and `attention_powers`, Figure 2 of the paper.
      Prompts are as long as the model's context allows, up to 4,096 and 2,048 tokens.

    Raises:
      ValueError: When drawn, if the preset, the density or the layer does not suit.

    Example:
      >>> figures = model_drawings(params, model_config, tokenizer)  # doctest: +SKIP
      >>> figures["block_map"].draw().savefig("block_map.png")  # doctest: +SKIP
    """
    text = read_text() if text is None else text
    layer = model_config.num_layers // 2 if layer is None else layer

    def draw_sample(most_tokens: int) -> Sample:
        size = min(most_tokens, model_config.context_length - 1)
        # The first one has its fact where every selection looks, at the beginning.
        samples = draw_samples(
            "single_needle", text, tokenizer, num_tokens=size, count=2, seed=seed
        )
        return samples[1]

    def draw_powers() -> "Figure":
        tokens = draw_sample(_MATRIX_TOKENS).tokens
        attention = attention_matrix(params, tokens, model_config=model_config, layer=layer)
        title = f"Powers of the attention of layer {layer}, {len(tokens):,} tokens"
        return plot_attention_powers(attention, title=title)

    draw_map = functools.partial(
        plot_needle_map, params, model_config=model_config, preset=preset, density=density
    )
    return {
        "block_map": Drawing(
            "Key blocks that each query block attended to, layer by layer",
            lambda: draw_map(draw_sample(_MAP_TOKENS)),
        ),
        "attention_powers": Drawing(
            f"Powers of the attention of layer {layer}: one step, four steps, seven steps",
            draw_powers,
        ),
    }


def plot_needle_map(
    params: PyTree,
    sample: Sample,
    *,
    model_config: ModelConfig,
    preset: str = "recommended",
    density: float | None = 0.2,
) -> "Figure":
    """Draws the blocks that Sketch-and-Walk attends to in a prompt, layer by layer.

    An orange mark below each panel stands at the block with the fact that the question asks for.

    Args:
      params: Parameters of the model.
      sample: A prompt, such as one of the task `single_needle`.
      model_config: The model.
      preset: Preset of Sketch-and-Walk.
      density: Its nominal density.

    Returns:
      The figure.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If the preset or the density is none.

    Example:
      >>> plot_needle_map(params, sample, model_config=model_config)  # doctest: +SKIP
    """
    config: Any = by_name(
        "sketchwalk", preset=preset, density=None if preset == "released" else density
    )
    config = with_plan(config, model_config.plan)
    generate = make_generate(model_config, config, max_new_tokens=1, return_selection=True)
    generation = jax.device_get(generate(params, sample.tokens[None]))
    sparse = list(sparse_layers(model_config, config))
    measured = float(np.mean(np.asarray(generation.measured_density.prefill)[sparse]))
    figure = plot_block_map(
        generation.selection,
        num_tokens=len(sample.tokens),
        dense_layers=config.dense_layers,
        title=f"Blocks attended to in a prompt of {len(sample.tokens):,} tokens "
        f"(preset {preset}, measured density {measured:.2f})",
    )
    place = find_answer(sample)
    if place is not None:
        for axis in figure.axes:
            bottom = axis.get_ylim()[0]
            axis.plot(
                [place // config.block_size],
                [bottom],
                "^",
                color=ORANGE,
                markersize=6,
                clip_on=False,
            )
    return figure


def find_answer(sample: Sample) -> int | None:
    """Where in the text before the question the answer stands, as an index of its first token.

    `None` if its tokens do not stand there in one piece.
    """
    answer = sample.answer[:-1]  # without the full stop, which may join with what follows
    before = sample.tokens[: sample.question_start]
    if not len(answer) or len(before) < len(answer):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(before, len(answer))
    found = np.flatnonzero(np.all(windows == answer[None], axis=-1))
    return int(found[0]) if found.size else None


def save_drawings(images: Mapping[str, Drawing], folder: Path) -> list[Path]:
    """Draws figures into PNG files named after them, and returns the files.

    Raises:
      ImportError: If matplotlib is missing.
      OSError: If a file cannot be written.
    """
    if not images:
        return []
    pyplot = import_pyplot()
    paths = []
    for name, image in images.items():
        figure = image.draw()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=_DPI)
        pyplot.close(figure)
    return paths
