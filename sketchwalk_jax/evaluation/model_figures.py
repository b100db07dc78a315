"""Figures of a model reading one prompt: the blocks attended to, and powers of its attention."""

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from sketchwalk_jax.evaluation.attention_powers import attention_matrix, plot_attention_powers
from sketchwalk_jax.evaluation.figures import Drawing
from sketchwalk_jax.evaluation.tasks import Sample, draw_samples
from sketchwalk_jax.evaluation.text import Text, read_text
from sketchwalk_jax.generation import make_generate
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.plots import ORANGE, plot_block_map
from sketchwalk_jax.policies import by_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PyTree = Any

_MAP_TOKENS, _MATRIX_TOKENS = 4096, 2048


def model_drawings(
    params: PyTree,
    model_config: ModelConfig,
    tokenizer: Any,
    *,
    text: Text | None = None,
    preset: str = "paper",
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
    preset: str = "paper",
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
    generate = make_generate(model_config, config, max_new_tokens=1, return_selection=True)
    generation = jax.device_get(generate(params, sample.tokens[None]))
    measured = float(np.mean(generation.measured_density.prefill[config.dense_layers :]))
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
