"""The promises of ARCHITECTURE.md: what is bit-equal, what is equal to a tolerance, which rows."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, POLICIES, params, prompts
from tolerances import tolerance
from variants import slow_unless

from sketchwalk_jax import (
    Sampling,
    SketchWalkConfig,
    algorithm,
    decode_step,
    forward,
    generate,
    init_cache,
    prefill,
    stream,
)
from sketchwalk_jax.inference.calls import prompt_rows
from sketchwalk_jax.selection import select_blocks

LENGTHS = (100, 37, 64)
NEW, CAPACITY, SIZE = 6, 144, 16
OPTIONS = {"model_config": MODEL, "max_new_tokens": NEW, "max_tokens": CAPACITY}
CONFIGS = {
    "dense": POLICIES["dense"],
    "paper": POLICIES["paper"],
    "recommended": SketchWalkConfig.recommended(
        block_size=2 * SIZE,  # two pages
        density=0.5,
        min_tokens=2 * SIZE,
        local_tokens=0,
        early_representatives=((64, 16),),
    ),
}
names = pytest.mark.parametrize("name", slow_unless(("paper",).__contains__, CONFIGS))


@pytest.fixture(scope="module")
def weights():
    return params()


@pytest.fixture(scope="module")
def run(weights):
    """Returns logits of every token, and a generation with its lists."""

    def run(name, tokens, lengths=LENGTHS, rows=None, **options):
        common = {"policy": CONFIGS[name], "lengths": np.asarray(lengths, np.int32)} | options
        room = {"max_tokens": common.pop("max_tokens", CAPACITY)}
        logits = forward(weights, tokens, model_config=MODEL, **common)
        out = generate(weights, tokens, return_selection=True, **OPTIONS | room, **common)
        rows = range(len(lengths)) if rows is None else rows
        found = {f"logits {row}": logits[row, : lengths[row]] for row in rows}
        found["tokens"] = np.asarray(out.tokens)[list(rows)]
        if out.selection is not None:
            found["ids"] = np.asarray(out.selection.ids)[:, list(rows)]
            found["counts"] = np.asarray(out.selection.counts)[:, list(rows)]
        return found

    return run


def assert_equal(one, other):
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def assert_close(one, other):
    """Compares logits to the tolerance, and tokens and lists, as there are no near-ties."""
    for name in one:
        if name.startswith("logits"):
            np.testing.assert_allclose(one[name], other[name], **tolerance("logits"), err_msg=name)
    np.testing.assert_array_equal(one["tokens"], other["tokens"])


@pytest.mark.slow
@names
def test_a_repeated_call_is_bit_equal(run, name):
    tokens, _ = prompts(*LENGTHS)
    assert_equal(run(name, tokens), run(name, tokens))


@pytest.mark.slow
@names
def test_what_stands_in_padding_changes_no_bit(run, name):
    tokens, lengths = prompts(*LENGTHS)
    padded = np.where(np.arange(tokens.shape[1])[None] < lengths[:, None], tokens, 9)
    assert_equal(run(name, tokens), run(name, padded))


@names
def test_what_neighbours_hold_changes_no_bit(run, name, weights):
    tokens, lengths = prompts(*LENGTHS)
    others = tokens.copy()
    others[0] = prompts(LENGTHS[0], seed=5)[0]
    assert_equal(run(name, tokens, rows=(1, 2)), run(name, others, rows=(1, 2)))
    # The other sequence has a NaN embedding, from a model that differs only in that row.
    tokens = np.where(tokens == 62, 61, tokens)
    weights = jax.tree.map(lambda x: x, weights)
    weights["embed"]["embedding"] = weights["embed"]["embedding"].at[62].set(jnp.nan)
    options = {"policy": CONFIGS[name], "model_config": MODEL, "lengths": lengths}
    plain = forward(weights, tokens, **options)
    tokens = tokens.copy()
    tokens[0, 3] = 62
    spoiled = forward(weights, tokens, **options)
    np.testing.assert_array_equal(spoiled[1:, :37], plain[1:, :37])


@pytest.mark.slow
@names
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_chunks_change_no_more_than_the_tolerance(run, name, chunk_size):
    tokens, _ = prompts(*LENGTHS)
    assert_close(run(name, tokens), run(name, tokens, chunk_size=chunk_size))


@pytest.mark.slow
@names
def test_widths_and_batches_change_no_more_than_the_tolerance(run, name):
    tokens, lengths = prompts(*LENGTHS)
    whole = run(name, tokens)
    assert_close(whole, run(name, np.pad(tokens, ((0, 0), (0, 28)))))
    assert_close(whole, run(name, tokens, max_tokens=2 * CAPACITY))
    alone = run(name, tokens[1:2], lengths[1:2])
    np.testing.assert_allclose(whole["logits 1"], alone["logits 0"], **tolerance("logits"))
    np.testing.assert_array_equal(whole["tokens"][1], alone["tokens"][0])


@pytest.mark.slow
def test_dense_steps_change_no_more_than_the_tolerance(weights):
    tokens = prompts(LENGTHS[0])[0]
    options = {"model_config": MODEL, "policy": CONFIGS["dense"]}
    whole = forward(weights, tokens, **options)
    cache = init_cache(MODEL, CONFIGS["dense"], batch=1, max_tokens=CAPACITY)
    last, cache = prefill(weights, tokens[:, :80], cache, **options)
    for position in range(80, 90):
        np.testing.assert_allclose(last, whole[:, position - 1], **tolerance("logits"))
        last, cache = decode_step(weights, tokens[:, position], cache, **options)


@pytest.mark.slow
def test_ranks_change_no_more_than_the_tolerance(run_python, repository):
    run_python(
        f"""
import sys; sys.path.insert(0, {str(repository / "tests")!r})
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tiny import MODEL, POLICIES, params, prompts
from sketchwalk_jax import forward
tokens, lengths = prompts(100, 37)
options = dict(model_config=MODEL, policy=POLICIES["paper"])
plain = forward(params(), tokens, lengths=lengths, **options)
mesh = Mesh(np.array(jax.devices()), ("batch",))
place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
weights = jax.tree.map(place, params())
shared = forward(weights, place(tokens, "batch"), lengths=place(lengths, "batch"), **options)
assert len(shared.sharding.device_set) == 2
for row, length in enumerate(lengths):
    np.testing.assert_allclose(shared[row, :length], plain[row, :length], rtol=1e-5, atol=1e-5)
""",
        devices=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [None, Sampling(temperature=0.8)],
    ids=["greedy", "sampled"],
)
def test_two_threads_get_what_one_gets(weights, sampling):
    tokens, lengths = prompts(*LENGTHS)
    options = OPTIONS | {"policy": CONFIGS["paper"], "lengths": lengths, "sampling": sampling}
    texts = [tokens, tokens[::-1].copy() % 60]
    expected = [np.asarray(generate(weights, x, **options).tokens) for x in texts]
    found, start = {}, threading.Barrier(4)

    def work(index):
        start.wait()
        for _ in range(3):
            text = texts[index % 2]
            if index < 2:
                found[index] = np.asarray(generate(weights, text, **options).tokens)
            else:
                chunks = list(stream(weights, text, every=2, **options))
                found[index] = np.concatenate([chunk.tokens for chunk in chunks], axis=1)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(4):
        np.testing.assert_array_equal(found[index], expected[index % 2])


@pytest.mark.parametrize("local_blocks", [1, 2])
@pytest.mark.parametrize(
    "scores",
    [
        [0, 1, 1, 1, 1, 0, 9],
        [0, -0.0, 0.0, -0.0, 0.0, 0, 9],
        [0, 1, np.nan, 2, np.inf, 0, 9],
        [0, np.nan, -3e38, np.inf, -np.inf, 0, 9],
        [np.nan, np.nan, -np.inf, np.inf, np.nan, np.nan, np.nan],
        *([what] * 7 for what in (np.nan, np.inf, -np.inf)),
    ],
)
def test_forced_blocks_win_then_finite_scores_and_ties_go_to_the_lower_block(scores, local_blocks):
    """Lists row 5 with the first block and the last ones forced."""
    options = {"sink_blocks": 1, "local_blocks": local_blocks, "block_size": SIZE}
    row, array = jnp.array([[5]], jnp.int32), jnp.asarray(scores, jnp.float32)
    rest = range(1, 6 - local_blocks)
    ranked = sorted(rest, key=lambda j: (-scores[j] if np.isfinite(scores[j]) else np.inf, j))
    for count in range(1 + local_blocks, 7):
        lists = select_blocks(array[None, None], row, jnp.array([[count]]), max_count=6, **options)
        expected = sorted([0, *ranked[: count - 1 - local_blocks], *range(6 - local_blocks, 6)])
        assert lists.ids[0, 0, 0].tolist() == expected + [len(scores)] * (6 - count)
        sizes = {"sink": 1, "local": local_blocks}
        by_rule = algorithm.select_pages(array[None], np.array([5]), np.array([count]), **sizes)
        assert np.flatnonzero(by_rule).tolist() == expected


def rows(length, used=0):
    return -(-(used % SIZE + length) // SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 32])
@pytest.mark.parametrize("used", [0, 20])
def test_a_selection_has_the_rows_of_the_prompt_and_no_others(weights, used, chunk_size):
    tokens, lengths = prompts(40, 20)
    options = {"model_config": MODEL, "policy": CONFIGS["paper"]}
    cache = init_cache(MODEL, CONFIGS["paper"], batch=2, max_tokens=CAPACITY)
    if used:
        _, cache = prefill(weights, prompts(used, used)[0], cache, **options)
    options |= {"lengths": lengths, "chunk_size": chunk_size, "return_selection": True}
    selection = prefill(weights, tokens, cache, **options)[2]
    assert selection.counts.shape[3] == rows(40, used) == selection.ids.shape[3]
    counts, ids = np.asarray(selection.counts)[:, :, 0], np.asarray(selection.ids)[:, :, 0]
    assert (counts[:, 0] > 0).all() and (counts[:, 1, : rows(20, used)] > 0).all()
    assert (counts[:, 1, rows(20, used) :] == 0).all()
    assert (ids[:, 1, rows(20, used) :] == CAPACITY // SIZE).all()


def test_rows_are_those_of_the_sequence_that_touches_most_blocks():
    cache = init_cache(MODEL, CONFIGS["paper"], batch=2, max_tokens=CAPACITY)
    cache = dataclasses.replace(cache, lengths=jnp.array([SIZE - 1, 0], jnp.int32))
    for lengths, wanted in (((1, SIZE), 1), ((2, SIZE), 2), ((1, SIZE + 1), 2)):
        tokens = np.zeros((2, max(lengths)), np.int32)
        assert prompt_rows(tokens, np.array(lengths), cache, SIZE) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("function", ["generate", "stream", "jit"])
def test_generation_returns_the_rows_of_the_prompt(weights, function):
    options = OPTIONS | {"policy": CONFIGS["paper"], "return_selection": True}
    tokens, lengths = prompts(40, 20)[0], np.array([25, 20], np.int32)
    run = {
        "generate": lambda: generate(weights, tokens, lengths=lengths, **options).selection,
        "stream": lambda: next(stream(weights, tokens, lengths=lengths, **options)).selection,
        "jit": lambda: jax.jit(
            lambda lengths: generate(weights, tokens, lengths=lengths, **options).selection
        )(lengths),
    }[function]
    counts = np.asarray(run().counts)[:, :, 0]
    assert counts.shape[2] == (rows(40) if function == "jit" else rows(25))
    assert (counts[:, :, : rows(20)] > 0).all() and (counts[:, :, 2:] == 0).all()
