"""The training recipe: its sequences are true, and two small runs end in a usable model."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from tokenizers import Tokenizer
from tokenizers.models import BPE

from sketchwalk_jax import forward, load
from sketchwalk_jax.text.haystack import is_held_out
from sketchwalk_jax.text.tokenizer import encode, load_tokenizer

TRAINING = Path(__file__).resolve().parents[2] / "training"
sys.path.append(str(TRAINING))

import corpus  # noqa: E402
import export  # noqa: E402
import loader  # noqa: E402
import prepare  # noqa: E402
import recipe  # noqa: E402
import sequences  # noqa: E402
import train  # noqa: E402

HOPS = recipe.Recipe(stages=(), peak=1.0).hops


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes some megabytes of English: Python's help, repeated."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join([*topics.values()] * 8), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def data(text_file: Path) -> tuple:
    """Prepares tokenizer, tokens and sentences."""
    text, _, _ = corpus.read_corpus(text_file, validation_share=0.1)
    tokenizer = corpus.train_tokenizer(text, vocab_size=recipe.VOCAB_SIZE, seed=0)
    words = corpus.find_words(text, held_out=False)
    tokens = corpus.encode_text(tokenizer, text)
    return tokenizer, tokens, corpus.make_pieces(tokenizer, words)


def test_an_exported_model_is_the_model(tmp_path: Path):
    tree, tokenizer = tiny.params(), Tokenizer(BPE())
    about = {"metrics": {}, "card": "a model"}
    export.export(tmp_path / "model", tree, tokenizer, model_config=tiny.MODEL, **about)
    found, model_config = load(tmp_path / "model", progress=False)
    assert model_config.num_layers == tiny.MODEL.num_layers
    jax.tree.map(np.testing.assert_array_equal, found, tree)


def maker(data: tuple, *, lists_chains: bool = True) -> sequences.SequenceMaker:
    return sequences.SequenceMaker(data[1], data[2], hops=HOPS, lists_chains=lists_chains)


def answers(tokenizer, tokens: np.ndarray, classes: np.ndarray) -> list[tuple[str, str, str]]:
    """Returns kind, preceding text and answer of every question in a sequence."""
    names = {index: kind for kind, index in sequences.CLASSES.items()}
    cuts = [0, *np.flatnonzero(np.diff(classes)) + 1, len(classes)]
    found = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        if classes[start] in names:
            before = tokenizer.decode(tokens[: start + 1].tolist(), skip_special_tokens=False)
            answer = tokenizer.decode(
                tokens[start + 1 : stop + 1].tolist(), skip_special_tokens=False
            )
            found.append((names[int(classes[start])], before, answer))
    return found


def expected(kind: str, before: str, *, lists_chains: bool) -> list[str]:
    """Answers the question at the end of a text, with regular expressions."""
    if kind == "vote":
        votes = re.findall(r" One vote for (\w+)\.", before)
        return [max(set(votes), key=votes.count)]
    codes = re.findall(r" The code of (\w+) is (\d+)\.", before)
    asked = re.search(r" Q: (?:code|value|all codes) of (?:each of )?([\w, ]+)\? A:$", before)
    words = asked.group(1).split(", ")
    if not kind.startswith("value"):
        return [number for word in words for owner, number in codes if owner == word]
    values = dict(re.findall(r" Let (\w+) be (\w+)\.", before))
    chain = [values[words[0]]]
    while chain[-1] in values:
        chain.append(values[chain[-1]])
    assert len(chain) == int(kind.removeprefix("value_"))
    return chain if lists_chains else chain[-1:]


@pytest.mark.parametrize("lists_chains", [True, False])
def test_every_answer_is_true_and_asked_after_what_it_needs(data: tuple, lists_chains: bool):
    rng, kinds = np.random.default_rng(0), set()
    for length in (256, 512, 2048):
        for _ in range(40):
            drawn = maker(data, lists_chains=lists_chains).draw(rng, length)
            for kind, before, answer in answers(data[0], *drawn):
                values = expected(kind, before, lists_chains=lists_chains)
                assert answer == f" {', '.join(values)}.{corpus.END}"
                kinds.add(kind)
    assert kinds == set(sequences.CLASSES)


def test_sequences_have_their_length_and_batches_follow_from_the_seed(data: tuple):
    for length in (64, 333, 1024):
        tokens, classes = maker(data).draw(np.random.default_rng(1), length)
        assert (tokens.shape, classes.shape) == ((length + 1,), (length,))
        assert tokens[0] == corpus.BEGIN_ID and tokens.dtype == np.uint16
        assert set(np.unique(classes)) <= set(range(sequences.NUM_CLASSES))
    first, same, other = (loader.make_batch(maker(data), (0, 1, i), (3, 128)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first.tokens, same.tokens)
    np.testing.assert_array_equal(first.classes, same.classes)
    assert not np.array_equal(first.tokens, other.tokens)


def test_training_asks_for_no_word_of_the_evaluation(data: tuple):
    words = [data[0].decode(word.tolist()).strip() for word in data[2].words]
    assert len(words) > 300 and not any(is_held_out(word) for word in words)
    assert all(re.fullmatch("[a-z]{4,8}", word) for word in words)


def test_sentences_are_tokens_of_their_text(data: tuple):
    tokenizer, _, pieces = data
    drawer, rng = maker(data), np.random.default_rng(2)
    for _ in range(50):
        word = pieces.words[rng.integers(len(pieces.words))]
        sentence = drawer._fill("code", word, drawer._number(rng))
        text = tokenizer.decode(sentence.tolist())
        assert re.fullmatch(r" The code of [a-z]+ is \d{5}\.", text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == sentence.tolist()
    for digits in ("07", "12345", "90210"):  # a digit is a token with or without a space
        assert len(tokenizer.encode(f" {digits}", add_special_tokens=False).ids) == len(digits)


def test_the_bigram_baseline_beats_a_unigram_and_knows_what_always_follows():
    tokens = np.tile(np.arange(8, dtype=np.uint16), 200)
    assert corpus.bigram_loss(tokens, tokens, vocab_size=8) < 0.1 < np.log(8)


def test_the_rate_warms_up_and_falls_to_its_final_share():
    plan = recipe.RECIPES["continue"]
    rates = [plan.learning_rate(1000, share) for share in np.linspace(0, 1, 11)]
    assert plan.learning_rate(0, 0.0) == pytest.approx(plan.peak / plan.warm_up)
    assert rates[0] == plan.peak and rates[-1] == pytest.approx(plan.peak * plan.final)
    assert rates == sorted(rates, reverse=True)


@pytest.fixture
def _promotion_as_elsewhere() -> Iterator[None]:
    """Turns off strict promotion for Optax and Flax; the setting also applies in threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.mark.weekly
@pytest.mark.usefixtures("_promotion_as_elsewhere")
def test_runs_that_go_on_from_one_another_end_in_a_model_that_loads(tmp_path, monkeypatch):
    from pydoc_data.topics import topics

    text, first, second = tmp_path / "text.txt", tmp_path / "first", tmp_path / "second"
    text.write_text(" ".join(topics.values()), encoding="utf-8")
    monkeypatch.setattr(prepare, "TEXT_SHARE_FOR_VALIDATION", 0.3)
    monkeypatch.setattr(train, "MODEL", dataclasses.replace(recipe.MODEL, num_layers=2))
    # At this scale all stages but the second run's last share a shape, and so a program.
    common = {"text": text, "scale": 0.005, "workers": 1, "dtype": "float32"}
    train.main(out=first, steps="150,1,1,1,2", **common)
    train.main(out=second, recipe="continue", init=first / "model", steps="1,1,1,1", **common)

    metrics = json.loads((second / "model" / "metrics.json").read_text())
    assert [run["recipe"] for run in metrics["runs"]] == ["scratch", "continue"]
    steps = [[stage["steps"] for stage in run["stages"]] for run in metrics["runs"]]
    assert steps == [[150, 1, 1, 1, 2], [1, 1, 1, 1]]
    # So few steps teach only which tokens are frequent.
    assert metrics["validation"][-1]["text_loss"] < 6.85 < np.log(recipe.VOCAB_SIZE)
    assert [row["tokens"] for row in metrics["validation"]] == [64, 81]
    params, model_config = load(second / "model", dtype="float32")
    tokens = encode(load_tokenizer(second / "model"), " The code of lantern is 68084.")
    assert tokens[0] == corpus.BEGIN_ID
    assert np.isfinite(forward(params, tokens[None], model_config=model_config)).all()
    card = (second / "model" / "README.md").read_text()
    assert metrics["text"]["sha256"] in card and "1 × 1 × 81" in card


@pytest.mark.weekly
def test_the_documented_command_trains(program_environment, text_file: Path, tmp_path: Path):
    command = [sys.executable, TRAINING / "train.py", "--text", text_file, "--out", tmp_path]
    command += "--scale 0.005 --workers 1 --dtype float32 --steps 2,1,1,1,1".split()
    done = subprocess.run(command, env=program_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "model" / "metrics.json").read_text())["runs"]
    assert [stage["length"] for stage in run["stages"]] == [64] * 5
    assert load(tmp_path / "model")[1] == recipe.MODEL
