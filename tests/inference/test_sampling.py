import subprocess
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tolerances import tolerance

from sketchwalk_jax.inference.sampling import (
    Sampling,
    mark_seen,
    process_logits,
    sample,
    seen_tokens,
    sequence_keys,
)

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_goldens() -> dict[str, dict[str, np.ndarray]]:
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(Path(__file__).parents[1] / "goldens" / "sampling.npz") as file:
        for path, array in file.items():
            name, key = path.split("/")
            cases.setdefault(name, {})[key] = array
    for case in cases.values():
        case.update(zip(FIELDS, case.pop("settings"), strict=True))
    return cases


GOLDENS = read_goldens()

process = jax.jit(process_logits)
draw = jax.jit(sample)


def process_request(request: dict[str, np.ndarray]) -> np.ndarray:
    """Processes a request of `parity/sampling_worker.py`."""
    logits = jnp.asarray(request["logits"])
    seen = seen_tokens(
        jnp.asarray(request["tokens"]),
        jnp.asarray(request["lengths"]),
        vocab_size=logits.shape[1],
    )
    sampling = Sampling(**{name: request[name] for name in FIELDS})
    return np.asarray(process(logits, sampling, seen))


def assert_processed_alike(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))
    np.testing.assert_allclose(actual, expected, **tolerance("sampling"))


def unseen(logits: jax.Array) -> jax.Array:
    return jnp.zeros(logits.shape, bool)


@pytest.mark.parametrize("name", GOLDENS)
def test_processed_logits_equal_transformers(name: str):
    case = GOLDENS[name]
    assert_processed_alike(process_request(case), case["processed"])


def test_goldens_have_settings_that_remove_tokens_and_settings_that_do_not():
    survivors = {name: np.isfinite(case["processed"]).sum(-1) for name, case in GOLDENS.items()}
    assert (survivors["defaults"] == 48).all()
    assert (survivors["ties_top_k"] == [4, 4, 3]).all()
    assert (survivors["ties_top_p"] == [2, 2, 2]).all()


@pytest.mark.parity
def test_fresh_settings_equal_transformers(reference_python: str, tmp_path: Path):
    rng = np.random.default_rng(0)
    batch, vocab_size, num_tokens = 200, 200, 30
    request = {
        "logits": (4.0 * rng.standard_normal((batch, vocab_size))).astype(np.float32),
        "tokens": rng.integers(0, vocab_size, (batch, num_tokens)),
        "lengths": rng.integers(1, num_tokens + 1, batch),
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], batch) * rng.uniform(0.8, 1.2, batch),
        "top_k": rng.choice([0, 1, 5, 40, 1000], batch),
        "top_p": rng.choice([0.0, 0.3, 0.9, 1.0], batch),
        "min_p": rng.choice([0.0, 0.01, 0.3, 1.0], batch),
        "repetition_penalty": rng.choice([0.7, 1.0, 1.4], batch),
    }
    np.savez(tmp_path / "request.npz", **request)
    worker = Path(__file__).parents[1] / "parity" / "sampling_worker.py"
    subprocess.run(
        [reference_python, worker, tmp_path / "request.npz", tmp_path / "answer.npz"],
        check=True,
        capture_output=True,
    )
    with np.load(tmp_path / "answer.npz") as answer:
        assert_processed_alike(process_request(request), answer["processed"])


@pytest.mark.parametrize("truncating_neighbour", [False, True])
def test_default_settings_change_no_bit(truncating_neighbour: bool):
    logits = 5.0 * normal((2, 100))
    sampling = Sampling(top_k=[0, 3]) if truncating_neighbour else Sampling()
    processed = process(logits, sampling, jnp.ones(logits.shape, bool))
    np.testing.assert_array_equal(processed[0], logits[0])


logit_rows = st.lists(
    st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
    | st.sampled_from([0.0, -0.0, 1.0, -np.inf]),
    min_size=12,
    max_size=12,
).filter(lambda row: max(row) > -np.inf)
settings = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-45, 1e-30, 1e-3, 1.0, 1e30]),
        "top_k": st.integers(0, 14),
        "top_p": st.floats(0, 1, width=32),
        "min_p": st.floats(0, 1, width=32),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
    }
)


@given(logit_rows, settings)
def test_survivors_hold_the_best_token_and_every_higher_one(row: list[float], chosen: dict):
    logits = jnp.array([row], jnp.float32)
    seen = jnp.zeros(logits.shape, bool).at[:, ::3].set(True)
    processed = np.asarray(process(logits, Sampling(**chosen), seen)[0])
    penalised = Sampling(repetition_penalty=chosen["repetition_penalty"])
    scores = np.asarray(process(logits, penalised, seen)[0])
    survivors = np.isfinite(processed)
    assert survivors.any()
    assert not np.isnan(processed).any()
    assert scores[survivors].max() == scores.max()
    removed = scores[~survivors]
    assert (removed <= scores[survivors].min()).all()


@given(logit_rows, st.integers(1, 14))
def test_top_k_keeps_as_many_and_ties(row: list[float], top_k: int):
    logits = jnp.array([row], jnp.float32)
    processed = process(logits, Sampling(top_k=top_k), unseen(logits))
    last_kept = sorted(row)[-min(top_k, len(row))]
    np.testing.assert_array_equal(
        np.asarray(processed[0]), np.where(np.array(row) >= last_kept, logits[0], -np.inf)
    )


@pytest.mark.parametrize("count", range(2, 33))
def test_top_p_of_equal_tokens_is_not_moved_by_rounding(count: int):
    row = jnp.where(jnp.arange(32) < count, -7.3, -jnp.inf)
    processed = process(
        jnp.tile(row, (3, 1)), Sampling(top_p=[0.25, 0.5, 0.75]), jnp.zeros((3, 32), bool)
    )
    kept = jnp.isfinite(processed).sum(axis=1).tolist()
    assert kept == [-(-count // 4), -(-count // 2), -(-3 * count // 4)]


def test_batched_draws_equal_single_draws():
    logits = 2.0 * normal((5, 300), seed=1)
    seen = jax.random.bernoulli(jax.random.key(2), 0.5, logits.shape)
    fields = {
        "temperature": [0.0, 0.5, 1.0, 2.0, 1.0],
        "top_k": [0, 0, 10, 0, 0],
        "top_p": [1.0, 0.9, 1.0, 0.5, 1.0],
        "repetition_penalty": [1.2, 1.0, 1.0, 1.1, 1.0],
    }
    keys = sequence_keys(jax.random.key(3), batch=5)
    together = draw(logits, Sampling(**fields), seen, keys)
    assert together.dtype == jnp.int32
    for row, token in enumerate(together):
        own = Sampling(**{name: values[row] for name, values in fields.items()})
        one = slice(row, row + 1)
        assert draw(logits[one], own, seen[one], keys[one])[0] == token


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=2.0, top_k=5), Sampling(top_p=0.8), Sampling(min_p=0.2)],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_draws_follow_the_processed_distribution(sampling: Sampling):
    num_draws, row = 20_000, jnp.array([1.0, -0.5, 0.3, 2.0, -4.0, 0.0, 1.5, -1.0])
    logits = jnp.tile(row, (num_draws, 1))
    keys = sequence_keys(jax.random.key(4), batch=num_draws)
    drawn = np.asarray(draw(logits, sampling, unseen(logits), keys))
    probabilities = np.asarray(
        jax.nn.softmax(process(row[None], sampling, unseen(row[None]))[0]), np.float64
    )
    counts = np.bincount(drawn, minlength=row.size)
    is_kept = probabilities > 0
    assert counts[~is_kept].sum() == 0
    expected = num_draws * probabilities[is_kept] / probabilities.sum()
    assert stats.chisquare(counts[is_kept], expected).pvalue > 1e-3


def test_what_is_known_to_be_greedy():
    assert Sampling.greedy().is_greedy and Sampling(temperature=jnp.zeros(2)).is_greedy
    assert not Sampling().is_greedy and not Sampling(temperature=[0.0, 0.1]).is_greedy
    traced = []
    jax.jit(lambda one: traced.append(one.is_greedy))(Sampling.greedy())
    assert traced == [False]


def test_greedy_is_the_argmax_after_the_penalty_whatever_the_key():
    logits = jnp.array([[3.0, 2.9, -1.0], [-1.0, -0.9, -0.8]])
    seen = jnp.array([[True, False, False], [False, False, True]])
    for seed in range(3):
        keys = sequence_keys(jax.random.key(seed), batch=2)
        plain = draw(logits, Sampling.greedy(), seen, keys)
        penalised = draw(logits, Sampling.greedy(repetition_penalty=1.5), seen, keys)
        assert plain.tolist() == [0, 2]
        assert penalised.tolist() == [1, 1]


def test_half_precision_logits_are_processed_in_float32():
    logits = jnp.array([[1.0, 2.0, 4.0]], jnp.bfloat16)
    processed = process(logits, Sampling(temperature=3.0), unseen(logits))
    assert processed.dtype == jnp.float32
    np.testing.assert_array_equal(processed, logits.astype(jnp.float32) / jnp.float32(3.0))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "settings",
    [
        [
            (0, 3),
            (0.5, np.int64(4)),
            (np.float64(0.7), jnp.int32(2)),
            (np.float16(0.5), 10**9),
            (jnp.asarray(0.5), jnp.asarray(3)),
            (jnp.bfloat16(1.5), np.uint8(3)),
        ],
        [([0, 1], 3), ([0.5, 0.6], 0), (np.array([1.0, 2.0]), 5), (jnp.array([0.0, 1.0]), 1)],
    ],
    ids=["one for all", "one for each sequence"],
)
def test_new_values_of_any_type_do_not_compile_anew(settings):
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(sample, n=1))
    logits, keys = jnp.ones((2, 8)), sequence_keys(jax.random.key(0), batch=2)
    for temperature, top_k in settings:
        traced(logits, Sampling(temperature=temperature, top_k=top_k), unseen(logits), keys)


def test_sampling_passes_through_jax_transformations():
    sampling = Sampling(temperature=[0.5, 0.0], top_k=3)
    leaves, structure = jax.tree.flatten(sampling)
    types = [(leaf.dtype.name, leaf.shape) for leaf in leaves]
    assert types == [("float32", (2,)), ("int32", ())] + [("float32", ())] * 3
    assert isinstance(jax.tree.unflatten(structure, [object()] * 5), Sampling)
    carried, _ = jax.lax.scan(lambda s, _: (s, None), sampling, length=2)
    chex.assert_trees_all_equal(carried, sampling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": [0.5, float("inf")]}, "temperature must be finite"),
        ({"temperature": 1e300}, "temperature must be finite"),
        ({"temperature": jnp.array([0.5, -1.0])}, "temperature must be finite"),
        ({"top_k": -1}, r"top_k must be an integer in \[0, 2\*\*31\), got -1"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_k": 2**31}, "top_k must be an integer"),
        ({"top_p": 1.1}, r"top_p must be in \[0, 1\], got 1.1"),
        ({"top_p": -0.1}, r"top_p must be in \[0, 1\]"),
        ({"min_p": np.float32(2.0)}, r"min_p must be in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and greater than 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be finite"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_settings_of_another_batch_are_refused():
    logits = jnp.zeros((3, 4))
    with pytest.raises(ValueError, match=r"top_p must have shape \[\] or \[3\], got \[2\]"):
        process_logits(logits, Sampling(top_p=[0.5, 0.6]), unseen(logits))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "keys",
    [jax.random.key(0), jax.random.split(jax.random.key(0), 2), jax.random.PRNGKey(0)],
    ids=["one", "too few", "untyped"],
)
def test_keys_that_are_not_one_for_each_sequence_are_refused(keys: jax.Array):
    logits = jnp.zeros((3, 4))
    with pytest.raises(ValueError, match="keys must be 3 typed keys"):
        sample(logits, Sampling(), unseen(logits), keys)


def test_sequence_keys_do_not_depend_on_the_batch():
    key = jax.random.key(7)
    few, many = sequence_keys(key, batch=2), sequence_keys(key, batch=5)
    chex.assert_trees_all_equal(jax.random.key_data(few), jax.random.key_data(many)[:2])
    assert len({tuple(data) for data in jax.random.key_data(many).tolist()}) == 5
    untyped = sequence_keys(jax.random.PRNGKey(7), batch=2)
    chex.assert_trees_all_equal(jax.random.key_data(few), jax.random.key_data(untyped))
    assert sequence_keys(many, batch=5) is many
    with pytest.raises(ValueError, match="key must be one key or 3 typed keys"):
        sequence_keys(many, batch=3)


def test_seen_tokens_are_those_within_the_lengths_and_those_marked_one_by_one():
    rng = np.random.default_rng(0)
    tokens = rng.integers(-2, 12, (4, 15))
    lengths = np.array([0, 1, 7, 15])
    seen = seen_tokens(jnp.asarray(tokens), jnp.asarray(lengths), vocab_size=10)
    rows = zip(tokens, lengths, strict=True)
    expected = [[token in row[:length] for token in range(10)] for row, length in rows]
    np.testing.assert_array_equal(seen, expected)
    marked = jnp.zeros((4, 10), bool)
    for column in tokens.T:
        marked = mark_seen(marked, jnp.asarray(column))
    together = [[token in row for token in range(10)] for row in tokens]
    np.testing.assert_array_equal(marked, together)
