"""Powers of a model's own attention, against the NumPy model."""

from collections.abc import Iterator

import matplotlib
import numpy as np
import pytest
import tiny
from tolerances import tolerance

matplotlib.use("Agg")
from drawn import panels, shown
from matplotlib import pyplot
from reference_model import ReferenceModel

from sketchwalk_jax.evaluation.attention_powers import attention_matrix, plot_attention_powers

MODEL, PARAMS = tiny.MODEL, tiny.params()
TOKENS = tiny.prompts(100)[0][0]


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def reference_attention(layer: int) -> np.ndarray:
    """Softmax of one layer's scores, mean over heads, from the NumPy model's queries and keys."""
    model = ReferenceModel(PARAMS, MODEL, tiny.POLICIES["paper"], phase="decode")
    model.prefill(TOKENS)
    query, key, _ = model.history[layer]
    key = np.repeat(key, MODEL.num_heads // MODEL.num_kv_heads, axis=1)
    scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(MODEL.head_dim)
    scores = np.where(np.tri(len(TOKENS), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).mean(0)


@pytest.mark.parametrize("layer", [0, 3])
def test_attention_is_the_models_own_after_softmax(layer):
    found = attention_matrix(PARAMS, TOKENS, model_config=MODEL, layer=layer)
    np.testing.assert_allclose(found, reference_attention(layer), **tolerance("scores"))
    assert not np.any(np.triu(found, 1))


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (TOKENS, {"layer": 4}, "layer must be in 0..3, got 4"),
        (TOKENS[:0], {"layer": 0}, "tokens must be one prompt"),
    ],
)
def test_wrong_layers_and_prompts_are_refused(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        attention_matrix(PARAMS, tokens, model_config=MODEL, **options)


def test_powers_are_drawn_with_a_panel_each():
    attention = reference_attention(1)
    figure = plot_attention_powers(attention, powers=(1, 4), title="Powers")
    axes = panels(figure)
    assert list(axes) == ["$A^{1}$", "$A^{4}$"]
    expected = attention @ attention @ attention @ attention
    causal = np.tri(100, dtype=bool)
    found = shown(axes["$A^{4}$"])
    floor = axes["$A^{4}$"].get_images()[0].norm.vmin
    np.testing.assert_allclose(found[causal], np.maximum(expected, floor)[causal], rtol=1e-9)
    assert np.all(np.isnan(found[~causal]))
    share = expected[64:, :64].sum(-1).mean()
    assert axes["$A^{4}$"].texts[0].get_text().startswith(f"{share:.0%} on the")
    assert figure.get_suptitle() == "Powers"


def test_large_matrices_are_drawn_in_cells_that_keep_their_rows_sums():
    size = 1001
    attention = np.tri(size) / np.arange(1, size + 1)[:, None]
    (axis,) = panels(plot_attention_powers(attention, powers=(2,))).values()
    cells = shown(axis)
    assert cells.shape == (251, 251)  # of four tokens
    np.testing.assert_allclose(np.nansum(cells[5:], axis=1), 1.0, atol=1e-3)
    assert axis.get_xlim() == (0, size)


@pytest.mark.parametrize(
    ("attention", "powers", "message"),
    [
        (np.ones((2, 3)), (1,), r"attention must have shape \[S, S\], got \(2, 3\)"),
        (np.full((2, 2), 0.5), (1,), "attention must be lower triangular"),
        (np.tri(2), (1,), "with rows that sum to 1"),
        (np.eye(2), (), "powers must hold at least one exponent"),
        (np.eye(2), (1.5,), "powers must be a positive integer, got 1.5"),
    ],
)
@pytest.mark.unchecked
def test_what_is_no_attention_is_refused(attention, powers, message):
    with pytest.raises(ValueError, match=message):
        plot_attention_powers(attention, powers=powers)


def test_one_token_has_powers_too():
    assert len(panels(plot_attention_powers(np.ones((1, 1))))) == 3
