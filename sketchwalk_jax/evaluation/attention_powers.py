"""Powers of one layer's attention matrix: what several steps of attention reach.

Figure 2 of the paper (arXiv:2602.07397) shows `A^1`, `A^4` and `A^7`, where `A` is the attention of
one layer after softmax; they are its argument for the walk. A row of `A^n` says where attention
leads after `n` steps of the same layer, with the heads averaged.
"""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sketchwalk_jax.attention import dense_attention
from sketchwalk_jax.attention.mass import block_mass
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.transformer import embed, run_layers
from sketchwalk_jax.plots import import_pyplot
from sketchwalk_jax.validation import check_integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PyTree = Any
_MAX_CELLS = 256  # rows of a panel; more are averaged
_FIRST_TOKENS = 64


def attention_matrix(
    params: PyTree,
    tokens: Int[Array, "T"] | Int[np.ndarray, "T"],
    *,
    model_config: ModelConfig,
    layer: int,
) -> Float[np.ndarray, "T T"]:
    """The attention of one layer after softmax, averaged over its heads.

    Args:
      params: Parameters of the model.
      tokens: One prompt.
      model_config: The model.
      layer: Which layer, from 0.

    Returns:
      Float32 on the host, lower triangular.

    Raises:
      ValueError: If there is no such layer, or no token.

    Example:
      >>> attention = attention_matrix(  # doctest: +SKIP
      ...     params, tokens, model_config=model_config, layer=5
      ... )
      >>> figure = plot_attention_powers(attention)  # doctest: +SKIP
    """
    if not 0 <= layer < model_config.num_layers:
        raise ValueError(f"layer must be in 0..{model_config.num_layers - 1}, got {layer}")
    if np.ndim(tokens) != 1 or not len(tokens):
        raise ValueError(f"tokens must be one prompt [T], got shape {np.shape(tokens)}")
    prompt = jnp.asarray(tokens, jnp.int32)[None]
    mass = _mass(params, prompt, model_config=model_config, layer=layer)
    # A row's mass is that of its query in all heads.
    return np.asarray(mass / jnp.sum(mass, axis=-1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("model_config", "layer"))
def _mass(
    params: PyTree,
    tokens: Int[Array, "1 T"],
    *,
    model_config: ModelConfig,
    layer: int,
) -> Float[Array, "T T"]:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def attend(query: Array, key: Array, value: Array, index: Array, state: PyTree) -> Any:
        return dense_attention(query, key, value), state, None

    def measure(query: Array, key: Array, value: Array, index: Array, state: PyTree) -> Any:
        return jnp.zeros_like(query), state, block_mass(query, key, block_size=1)[0]

    run = functools.partial(
        run_layers, params, positions=positions, state=None, model_config=model_config
    )
    layers = [(range(layer), attend)] if layer else []
    _, _, found = run(embed(params, tokens), layers=[*layers, (range(layer, layer + 1), measure)])
    return found[-1][0]


def plot_attention_powers(
    attention: Float[np.ndarray, "S S"],
    *,
    powers: Sequence[int] = (1, 4, 7),
    title: str | None = None,
) -> "Figure":
    """Draws powers of an attention matrix with logarithmic colours (Figure 2 of the paper).

    `A^n[i, j]` is the attention that query `i` pays to key `j` by all chains of `n` steps. Large
    matrices are drawn with cells of several rows and columns: the mean over the rows of what they
    give to the columns together.

    Args:
      attention: Causal attention `[S, S]` of one layer after softmax, from `attention_matrix`.
      powers: Exponents, one panel each.
      title: Title of the figure.

    Returns:
      The figure.

    Raises:
      ImportError: If matplotlib is missing.
      ValueError: If the matrix is not square and causal with rows that sum to 1, or a power is not
        a positive integer.

    Example:
      >>> figure = plot_attention_powers(np.tril(np.ones((4, 4))) / [[1], [2], [3], [4]])
      >>> len([axis for axis in figure.axes if axis.get_title()])
      3
    """
    matrix = np.asarray(attention, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"attention must have shape [S, S], got {matrix.shape}")
    if np.any(np.triu(matrix, 1)) or not np.allclose(matrix.sum(-1), 1.0, atol=1e-2):
        raise ValueError("attention must be lower triangular with rows that sum to 1")
    if not powers:
        raise ValueError("powers must hold at least one exponent, got none")
    for power in powers:
        check_integer("powers", power)
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import MaxNLocator

    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(
        1,
        len(powers),
        figsize=(3.1 * len(powers) + 0.8, 3.7),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    factor = math.ceil(len(matrix) / _MAX_CELLS)
    scale = LinearSegmentedColormap.from_list(
        "attention", ["#F4F4F4", "#BBD9EA", "#56A5CF", "#0072B2", "#00304D"]
    )
    floor = 10.0 ** math.floor(math.log10(0.1 * factor / len(matrix)))
    last = len(matrix)
    num_first = min(_FIRST_TOKENS, last - 1)
    for power, axis in zip(powers, axes[0], strict=True):
        result = np.linalg.matrix_power(matrix, power)
        cells = _average(result, factor)
        is_causal = np.tri(len(cells), dtype=bool)
        image = axis.imshow(
            np.ma.masked_where(~is_causal, np.maximum(cells, floor)),
            cmap=scale.with_extremes(bad="#FFFFFF"),
            norm=LogNorm(vmin=floor, vmax=1.0),
            interpolation="none",
            extent=(0, last, last, 0),
        )
        axis.set_title(f"$A^{{{power}}}$", fontsize=12)
        share = float(result[num_first:, :num_first].sum(-1).mean())
        axis.text(
            0.97,
            0.97,
            f"{share:.0%} on the\nfirst {num_first} tokens",
            transform=axis.transAxes,
            ha="right",
            va="top",
            fontsize=8,
        )
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.85, pad=0.02)
    bar.set_label(
        "attention to a key" if factor == 1 else f"attention to {factor} neighbouring keys",
        fontsize=9,
    )
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    figure.supxlabel("key, tokens", fontsize=10)
    axes[0, 0].set_ylabel("query, tokens", fontsize=10)
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return figure


def _average(matrix: np.ndarray, factor: int) -> np.ndarray:
    """Cells of `factor` rows and columns: means over rows of sums over columns."""
    padding = -len(matrix) % factor
    cells = np.pad(matrix, ((0, padding), (0, padding)), constant_values=0.0)
    size = len(cells) // factor
    sums = cells.reshape(size, factor, size, factor).sum((1, 3))
    rows = np.minimum(factor, len(matrix) - factor * np.arange(size))
    return sums / rows[:, None]
