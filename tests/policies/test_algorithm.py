"""Policies and kernels compute the results of `sketchwalk_jax.algorithm`.

Runs without kernels, in the interpreter of kernels, as compiled, or on a GPU.
"""

import functools
import re
from pathlib import Path

import cases
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import specification
from hypothesis import given
from specification import EPS, assert_same_pages
from tolerances import tolerance
from variants import INTERPRET, slow_unless

from sketchwalk_jax import (
    KernelConfig,
    SketchWalkConfig,
    algorithm,
    init_layer_cache,
    sketchwalk_attention,
    sketchwalk_cached_attention,
)

NUM_LAYERS, PARTS = 3, ("queries", "keys", "values")
SMALL = {"block_size": 32, "min_tokens": 64, "early_representatives": ((96, 12),)}
# Policy; heads, head_dim and type; tokens of each sequence.
PROMPTS = {
    "recommended": (
        SketchWalkConfig.recommended(min_tokens=256), (4, 2), 64, "float32", (577,),
    ),
    "recommended, small blocks": (
        SketchWalkConfig.recommended(density=0.4, **SMALL), (6, 2), 32, "bfloat16", (250, 1),
    ),
    "paper": (SketchWalkConfig.paper(), (4, 2), 128, "float32", (1000,)),
    "paper, small blocks": (
        SketchWalkConfig.paper(density=0.5, block_size=16), (6, 2), 64, "bfloat16", (250, 1),
    ),
}  # fmt: skip
# Prompts; the token after them starts a new block in the second sequence.
CACHED = {
    "recommended": (
        SketchWalkConfig.recommended(density=0.1, **SMALL), (8, 1), 128, "float32", (200, 96),
    ),
    "paper": (
        SketchWalkConfig.paper(density=0.1, block_size=16, sketch_dim=16),
        (8, 1), 32, "float32", (320, 96),
    ),
}  # fmt: skip
# Relative errors of walks. Default rule: a share's relative error is its logit's absolute error;
# logits reach 16 and sum up to 64 products, each rounded by EPS / 2. Printed rule: three layers,
# whose eighth power multiplies a relative error by eight. Eighth powers of shares below 2^-15.75
# are below 2^-126, float32's smallest normal number.
WALK = {"rtol": 256 * EPS, "atol": 2.0**-15.75}
# Outputs are means of values up to 4, weighted with such errors. In bfloat16, weights and outputs
# also have a relative error of 2^-9.
OUTPUT = {
    "float32": {"rtol": 64 * EPS, "atol": 64 * EPS},
    "bfloat16": {"rtol": 2.0**-8, "atol": 2.0**-6},
}


def draw(case):
    """Draws each layer's queries, keys and values `[B, T, heads, H]`: a prompt and one token."""
    policy, heads, head_dim, dtype, lengths = case
    shape = {"num_layers": NUM_LAYERS, "heads": heads, "head_dim": head_dim}
    shape |= {"block_size": policy.block_size, "spread": 0.5, "num_tokens": max(lengths) + 1}
    drawn = [cases.draw_layers(seed, **shape) for seed in range(len(lengths))]
    return [
        [jnp.asarray(np.stack([getattr(x, part)[layer] for x in drawn]), dtype) for part in PARTS]
        for layer in range(NUM_LAYERS)
    ]


def specified(case, layers, sequence, length, *, is_token=False, walk=None, **changes):
    """Computes output, walk and kept pages of each layer of one sequence by the specification."""
    run, found = specification.layer(case[0], is_token=is_token, **changes), []
    for arrays in layers:
        found.append(run(*(x[sequence, :length] for x in arrays), walk))
        walk = found[-1][1]
    return jax.device_get(found)


def assert_walks_equal(policy, walk, wanted, **bound):
    """Compares rows of walks; the printed rule fixes its rows only up to a factor."""
    walk = np.asarray(walk)[: wanted.shape[0], : wanted.shape[1]]
    if isinstance(policy, SketchWalkConfig):
        largest = np.abs(walk).max(axis=1, keepdims=True)
        walk = walk / np.where(largest > 0, largest, 1.0)
    np.testing.assert_allclose(walk, wanted, **(WALK | bound))


@functools.cache
def prompts(name):
    """Draws layers, and runs `sketchwalk_attention` on them."""
    case = policy, _, _, dtype, lengths = PROMPTS[name]
    layers, walk, found = draw(case), None, []
    behind = np.arange(max(lengths))[None] >= np.array(lengths)[:, None]
    for arrays in layers:
        arrays = [
            jnp.where(behind[..., None, None], jnp.asarray(jnp.nan, dtype), x[:, : max(lengths)])
            for x in arrays
        ]
        out, walk = sketchwalk_attention(
            *arrays, walk, policy=policy, lengths=jnp.array(lengths, jnp.int32)
        )
        found.append((np.asarray(out, np.float32), walk.scores))
    return layers, found


def assert_prompt_equal(name, sequence, **changes):
    """Compares one sequence's outputs and walks with the specification."""
    case, (layers, found) = PROMPTS[name], prompts(name)
    wanted = specified(case, layers, sequence, case[-1][sequence], **changes)
    for (out, walk), (wanted_out, wanted_walk, _) in zip(found, wanted, strict=True):
        assert_walks_equal(case[0], walk[sequence], wanted_walk)
        own = out[sequence, : len(wanted_out)]
        np.testing.assert_allclose(own, wanted_out, **OUTPUT[case[3]])


@pytest.mark.parametrize("name", slow_unless(("recommended", "paper").__contains__, PROMPTS))
def test_prompts_are_what_the_specification_says(name):
    for sequence in range(len(PROMPTS[name][-1])):
        assert_prompt_equal(name, sequence)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("recommended, small blocks", {"decay": 0.0}, marks=pytest.mark.slow),
        pytest.param("recommended, small blocks", {"exponent": 7}, marks=pytest.mark.slow),
        ("paper, small blocks", {"exponent": 6}),
        pytest.param("paper, small blocks", {"local_blocks": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_another_specification_would_not_agree(name, change):
    with pytest.raises(AssertionError):
        assert_prompt_equal(name, 0, **change)


def assert_cached_layers_equal(case, rounding, **options):
    """Compares a prompt, a token after it, and their lists of pages with the specification.

    Args:
      case: One of `CACHED`.
      rounding: Relative error of walks.
      **options: Options of `sketchwalk_cached_attention`.
    """
    policy, (heads, kv_heads), head_dim, dtype, lengths = case
    layers, lengths = draw(case), np.array(lengths, np.int32)
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    make = functools.partial(init_layer_cache, **sizes, policy=policy, dtype=dtype)
    caches = [make(len(lengths), max(case[-1]) + 1) for _ in layers]
    attend = functools.partial(
        sketchwalk_cached_attention, policy=policy, return_selection=True, **options
    )
    for is_token in (False, True):
        new = np.ones_like(lengths) if is_token else lengths
        place = (lengths[:, None] if is_token else np.arange(max(case[-1]))[None])[..., None, None]
        ends, size = lengths + is_token, 1 if is_token else policy.block_size
        wanted = []
        for sequence, end in enumerate(ends.tolist()):
            first = specification.neutral_walk(policy, end, is_token=is_token)
            wanted.append(specified(case, layers, sequence, end, is_token=is_token, walk=first))
        walk = None
        for index, arrays in enumerate(layers):
            arrays = [jnp.take_along_axis(x, place, axis=1) for x in arrays]
            arrays, where = (*arrays, caches[index]), {"lengths": jnp.asarray(new)}
            if walk is None:  # pass an empty walk, so that all layers run one program
                shapes = jax.eval_shape(functools.partial(attend, **where), *arrays)[2]
                walk = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            out, caches[index], walk, lists = attend(*arrays, walk, **where)
            for sequence, (wanted_out, wanted_walk, kept) in enumerate(x[index] for x in wanted):
                wanted_walk = wanted_walk[-len(kept) :]  # last row only, for the printed rule
                assert_walks_equal(policy, walk.scores[sequence], wanted_walk, rtol=rounding)
                ids, counts = (np.asarray(x)[sequence, 0] for x in (lists.ids, lists.counts))
                is_same = assert_same_pages(ids, counts, kept, wanted_walk, rounding)
                is_same = np.repeat(is_same, size)[: len(wanted_out)]
                own = np.asarray(out, np.float32)[sequence, : len(wanted_out)]
                np.testing.assert_allclose(own[is_same], wanted_out[is_same], **OUTPUT[dtype])


@pytest.mark.parametrize("name", slow_unless("recommended".__eq__, CACHED))
def test_a_prompt_in_a_cache_and_a_token_after_it_are_what_the_specification_says(name):
    assert_cached_layers_equal(CACHED[name], WALK["rtol"], implementation="xla")


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["recommended", "paper"])
def test_kernels_compute_what_the_specification_says(name):
    """Kernels hold page max logits in float16, and round shares to bfloat16."""
    few = {"recommended": {"density": 0.3, "min_tokens": 64}, "paper": {"density": 0.6}}
    policy = getattr(SketchWalkConfig, name)(**few[name])
    case = policy, (2, 1), 64, "bfloat16", (190, 128)
    kernels = KernelConfig(interpret=INTERPRET)
    assert_cached_layers_equal(case, 2.0**-5, implementation="mosaic_gpu", kernel_config=kernels)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("is_token", [False, True])
def test_the_neutral_walk_has_the_effect_of_none(name, is_token):
    case = policy, *_, lengths = CACHED[name]
    layers, length = draw(case)[:1], lengths[1]
    neutral = specification.neutral_walk(policy, length, is_token=is_token)
    found, wanted = (
        specified(case, layers, 1, length, is_token=is_token, walk=x) for x in (neutral, None)
    )
    for one, other in zip(found[0], wanted[0], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CACHED)
def test_a_row_of_the_specification_knows_nothing_of_later_blocks(name):
    case = policy, *_, lengths = CACHED[name]
    layers, blocks = draw(case), lengths[1] // policy.block_size
    short, long = (specified(case, layers, 0, length) for length in reversed(lengths))
    for (out, walk, kept), (long_out, long_walk, long_kept) in zip(short, long, strict=True):
        pages = kept.shape[1]
        np.testing.assert_array_equal(kept, long_kept[:blocks, :pages])
        np.testing.assert_allclose(walk, long_walk[:blocks, :pages], **WALK)
        np.testing.assert_allclose(out, long_out[: len(out)], **OUTPUT["float32"])


def test_block_scores_equal_loops_over_blocks_and_tokens():
    """Definition 2.1 for means over heads: the mean of scores over all pairs of tokens."""
    num_tokens, size, head_dim = 53, 16, 32
    layers = cases.draw_layers(0, num_layers=1, num_tokens=num_tokens, head_dim=head_dim)
    query, key = (x[0].astype(np.float64).mean(1) for x in (layers.queries, layers.keys))
    expected = np.zeros((4, 4))
    for i in range(4):
        for j in range(i + 1):
            rows, columns = (x[n * size : (n + 1) * size] for x, n in ((query, i), (key, j)))
            expected[i, j] = np.mean(rows @ columns.T) / head_dim**0.5
    arrays = jnp.asarray(layers.queries[0]), jnp.asarray(layers.keys[0])
    actual = algorithm.block_scores(*arrays, size, None)
    np.testing.assert_allclose(actual, expected, **tolerance("scores"))


def test_attention_to_all_pages_equals_jax():
    layers = cases.draw_layers(2, num_layers=1, num_tokens=100, heads=(6, 2), spread=0.0)
    arrays = [jnp.asarray(x[0]) for x in (layers.queries, layers.keys, layers.values)]
    found = algorithm.attend(*arrays, jnp.ones((4, 7), bool), block_size=32, page_size=16)
    with jax.default_matmul_precision("highest"):
        wanted = jax.nn.dot_product_attention(*(x[None] for x in arrays), is_causal=True)[0]
    np.testing.assert_allclose(found, wanted, **tolerance("attention"))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=9, max_size=9), st.data())
def test_kept_pages_are_the_best_ones_with_the_forced_ones(scores, data):
    sink, local = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    last = data.draw(st.integers(0, 8))
    forced = {page for page in range(last + 1) if page < sink or page > last - local}
    count = data.draw(st.integers(len(forced), last + 1))
    row = jnp.array([scores], jnp.float32)
    kept = algorithm.select_pages(row, np.array([last]), np.array([count]), sink, local)
    kept = set(np.flatnonzero(kept).tolist())
    assert len(kept) == count and forced <= kept <= set(range(last + 1))
    for page in kept - forced:
        left = set(range(last + 1)) - kept
        assert all((scores[page], -page) > (scores[other], -other) for other in left)


def test_a_decoded_token_is_the_row_of_a_block_of_such_queries():
    """Printed rule: if all tokens of the last block have the same query, so has their mean."""
    case = policy, *_, lengths = CACHED["paper"]
    layers = draw(case)
    for arrays in layers:
        arrays[0] = arrays[0].at[:, lengths[1] - policy.block_size :].set(arrays[0][:, -1:])
    prompt, token = (specified(case, layers, 1, lengths[1], is_token=x) for x in (False, True))
    for (out, walk, kept), (token_out, token_walk, own) in zip(prompt, token, strict=True):
        np.testing.assert_array_equal(kept[-1:], own)
        np.testing.assert_allclose(walk, token_walk, **WALK)
        np.testing.assert_allclose(out[-1:], token_out, **OUTPUT["float32"])


ALLOWED = (
    "from sketchwalk_jax import algorithm",
    "from sketchwalk_jax.policies.sketchwalk import SketchWalkConfig",
    "from sketchwalk_jax.policies.released import ReleasedConfig",
)


def test_specification_and_references_share_no_code_with_what_they_specify():
    references = Path(reference.__file__).parent.glob("*.py")
    for file, allowed in [(Path(algorithm.__file__), ()), *((x, ALLOWED) for x in references)]:
        lines = re.findall(r"^ *(?:from|import) sketchwalk_jax.*", file.read_text(), re.M)
        assert [line for line in lines if line.strip() not in allowed] == []
