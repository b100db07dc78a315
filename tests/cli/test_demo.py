"""`sketchwalk demo`: the facts that it hides and asks for, its computations and its output."""

import json
import re
import shutil
import sys
from pathlib import Path

import checkpoints
import jax
import numpy as np
import pytest
from matplotlib import colors
from safetensors.numpy import load_file

from sketchwalk_jax import Dense, SketchWalkConfig, cli, load, make_generate
from sketchwalk_jax.cli.demo import (
    ANSWER_TOKENS,
    ROOM,
    WORDS,
    Fact,
    Prompt,
    Reading,
    hide_facts,
    prose,
    timed,
)
from sketchwalk_jax.evaluation.wording import code_question, code_statement
from sketchwalk_jax.selection import BlockSelection
from sketchwalk_jax.text.haystack import is_held_out
from sketchwalk_jax.text.tokenizer import decode, encode, load_tokenizer

TOKENS, FACTS = 512, 2  # the whole context
NUM_LAYERS = 4  # the first two stay dense
PAPER = ("--preset", "paper", "--density", 0.5)  # most of these tests share its programs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tensors = checkpoints.write_checkpoint(directory, tokenizer=True, num_hidden_layers=NUM_LAYERS)
    # Make random weights attend to few tokens, and write only letters, to tell answers apart.
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensors[name] *= np.float32(3)
    checkpoints.write_letters_only(directory, tensors)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model: Path):
    return load_tokenizer(model)


@pytest.fixture
def demo(sketchwalk, model: Path, tmp_path: Path, monkeypatch):
    """Runs the demonstration in an empty folder; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    command = ["demo", "--model", model, "--tokens", TOKENS, "--facts", FACTS]
    return lambda *arguments: sketchwalk(*command, *arguments)


def hidden(tokenizer, **changes) -> Prompt:
    """Returns the text that the command makes with the options above."""
    options = {"num_tokens": TOKENS - ROOM, "num_facts": FACTS, "seed": 0} | changes
    return hide_facts(tokenizer, **options)


def test_facts_stand_in_the_text_once_and_are_asked_for(tokenizer):
    text = hidden(tokenizer, num_facts=3)
    content = decode(tokenizer, text.tokens)
    for fact in text.facts:
        assert content.count(code_statement(fact.word, fact.number)) == 1
        assert len(re.findall(rf"\b{fact.word}\b", content)) == 1
        assert decode(tokenizer, text.tokens[: fact.position]).endswith(fact.number)
    positions = [fact.position for fact in text.facts]
    assert positions == sorted(positions)
    assert len({fact.number for fact in text.facts}) == len({f.word for f in text.facts}) == 3


@pytest.mark.parametrize("num_tokens", [256, 436, 3000, sum(map(len, prose())) + 5000])
def test_text_fills_the_room_and_repeats_the_topics_if_they_are_shorter(num_tokens, tokenizer):
    assert num_tokens - 32 < len(hidden(tokenizer, num_tokens=num_tokens).tokens) <= num_tokens


def test_text_and_facts_follow_the_seed(tokenizer):
    first, again, other = (hidden(tokenizer, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert [(f.word, f.number) for f in first.facts] == [(f.word, f.number) for f in again.facts]
    assert decode(tokenizer, first.tokens)[:50] != decode(tokenizer, other.tokens)[:50]
    assert {f.number for f in first.facts}.isdisjoint(f.number for f in other.facts)


def test_special_tokens_begin_the_text(tmp_path: Path):
    checkpoints.write_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    from tokenizers.processors import TemplateProcessing

    begin = ("<begin>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<begin> $A", None, [begin])
    text = hidden(tokenizer)
    assert text.tokens[0] == tokenizer.bos_token_id and len(text.tokens) <= TOKENS - ROOM
    for fact in text.facts:
        assert decode(tokenizer, text.tokens[: fact.position]).endswith(fact.number)


def test_words_are_held_out_from_training():
    assert len(set(WORDS)) == len(WORDS) >= 40
    assert all(is_held_out(word) and re.fullmatch("[a-z]{4,8}", word) for word in WORDS)


def test_prose_is_english_without_code():
    paragraphs = prose()
    assert sum(map(len, paragraphs)) > 60_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert not [line for line in paragraphs if ">>>" in line or "::=" in line]
    assert all(" the " in line or " a " in line or " is " in line for line in paragraphs[:50])


@pytest.mark.parametrize("text", [" 12345.", "12345", "12345, and more"])
def test_answer_is_right_if_it_begins_with_the_code(text):
    assert Fact("river", "12345", 7).is_answer(text)


@pytest.mark.parametrize("text", ["1234", "123456.", "12345th", "no 12345.", ""])
def test_answer_is_wrong_if_it_does_not_begin_with_the_code(text):
    assert not Fact("river", "12345", 7).is_answer(text)


def one_prompt(params, model_config, config, text: Prompt, fact: Fact, tokenizer) -> str:
    """Returns the answer to text and question as one prompt, up to its first full stop."""
    call = make_generate(model_config, config, max_new_tokens=ANSWER_TOKENS)
    question = encode(tokenizer, code_question(fact.word), add_special_tokens=False)
    generation = call(params, np.concatenate([text.tokens, question])[None])
    answer = decode(tokenizer, np.asarray(generation.tokens)[0, : int(generation.lengths[0])])
    return cli.demo._one_line(answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" 12345. And\nmore.", "12345."), (" a\n\tb", "a b"), ("\x1b[2Jx", "�[2Jx"), ("", "")],
)
def test_answer_ends_at_its_full_stop_and_commands_nothing(text, expected):
    assert cli.demo._one_line(text) == expected


@pytest.mark.slow
def test_answers_are_those_to_text_and_question_in_one_prompt(demo, model, tokenizer):
    options = (*PAPER, "--phase", "both")
    found = json.loads(demo(*options, "--no-plot", "--json")[0])
    params, model_config = load(model, dtype="float32")
    text = hidden(tokenizer)
    for name, config in (("dense", Dense()), ("sketchwalk", SketchWalkConfig.paper(density=0.5))):
        for fact, answer in zip(text.facts, found[name]["answers"], strict=True):
            assert answer["text"] == one_prompt(params, model_config, config, text, fact, tokenizer)
    dense, sparse = (found[name]["answers"] for name in ("dense", "sketchwalk"))
    assert [one["text"] for one in dense] != [one["text"] for one in sparse]


BESIDE = (*PAPER, "--policy", "streaming")


@pytest.mark.slow
def test_json_is_one_object_with_the_measurements_of_all(demo, tokenizer):
    out, err = demo(*BESIDE, "--phase", "both", "--no-plot", "--json")
    found = json.loads(out)
    text = hidden(tokenizer)
    assert err == "" and out.count("\n") == 1
    assert (found["preset"], found["nominal_density"], found["phase"]) == ("paper", 0.5, "both")
    assert found["tokens"] == len(text.tokens) and found["picture"] is None
    assert found["model"] == "tiny" and found["dtype"] == "float32"
    assert [fact["position"] for fact in found["facts"]] == [f.position for f in text.facts]
    for name, low, high in (("dense", 1.0, 1.0), ("sketchwalk", 0.5, 0.95)):
        assert low <= found[name]["measured_density_prefill"] <= high
        assert low <= found[name]["measured_density_decode"] <= high
        assert found[name]["read_s"] > 0 and found[name]["tokens_per_s"] > 0
    rival = found["rivals"]["streaming"]
    # In short texts, forced blocks alone exceed the requested density.
    assert 0.5 <= rival["measured_density_prefill"] <= 0.6 and len(rival["answers"]) == FACTS
    assert found["dense"]["is_finite"] and found["sketchwalk"]["is_finite"]
    assert 0 <= found["compile_s"] < found["total_s"]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "dense_part"), [("prefill", "decode"), ("decode", "prefill")])
def test_other_phase_stays_dense(phase, dense_part, demo):
    out, err = demo("--phase", phase, *PAPER, "--json")
    sparse = json.loads(out)["sketchwalk"]
    assert sparse[f"measured_density_{dense_part}"] == 1.0
    assert sparse[f"measured_density_{phase}"] < 1.0
    assert ("no picture: nothing was selected" in err) == (phase == "decode")


@pytest.mark.slow
def test_files_get_plain_lines(demo, tokenizer):
    out, err = demo(*BESIDE)
    assert err == "" and not re.search(r"[\x1b\r]", out)
    lines = out.splitlines()
    text = hidden(tokenizer)
    assert f"{len(text.tokens):,} tokens of English" in lines[0] and "by tiny on cpu" in lines[0]
    for fact in text.facts:
        assert any(line.endswith(f"The code of {fact.word} is {fact.number}.") for line in lines)
        (line,) = (line for line in lines if line.startswith(f"code of {fact.word}?"))
        assert line.count("WRONG") == 3  # random weights know no answer
    assert any(line.split() == ["dense", "Sketch-and-Walk", "streaming"] for line in lines)
    assert any(line.split() == ["right", *["0", "of", "2"] * 3] for line in lines)
    assert "Dense attention found none of the facts" in out
    assert re.search(r"\d+ s in all, \d+ s of which went into compiling", lines[-1])
    assert Path("sketchwalk-demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
def test_logits_that_are_not_finite_are_reported(demo, model, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    checkpoints.write_tensors(broken, tensors)
    out, err = demo(*PAPER, "--facts", 1, "--no-plot", "--json", "--model", broken)
    found = json.loads(out)
    assert found["dense"]["is_finite"] is found["sketchwalk"]["is_finite"] is False
    assert "warning: logits were NaN or infinite" in err


@pytest.mark.parametrize(
    ("dense", "sparse", "message"),
    [
        ("++", "++", "Sketch-and-Walk found 2 of the 2 facts that dense attention found."),
        ("++", "+-", "Sketch-and-Walk found 1 of the 2 facts that dense attention found."),
        ("+-", "-+", "Sketch-and-Walk found 0 of the 1 facts that dense attention found."),
        ("--", "-+", "Dense attention found none of the facts with this model."),
    ],
)
def test_summary_says_what_was_lost(dense, sparse, message):
    readings = (reading([("1.", mark == "+") for mark in marks]) for marks in (dense, sparse))
    assert cli.demo._summary(*readings, who="Sketch-and-Walk") == message


def reading(answers: list[tuple[str, bool]], *more: object) -> Reading:
    """A policy's result with these answers."""
    found = [{"text": text, "is_right": is_right} for text, is_right in answers]
    return Reading({"answers": found}, *more)


def test_missing_matplotlib_costs_only_the_picture(demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out, err = demo(*PAPER)
    assert err.startswith("no picture: ") and "sketchwalk-jax[plots]" in err
    assert "seconds" not in out and "in all" in out
    assert not list(Path().iterdir())


def test_picture_shows_maps_questions_and_places_of_the_facts():
    size, num_layers, num_rows = 16, 3, 8
    causal = np.tri(num_rows, dtype=np.int32)
    ids = np.broadcast_to(
        np.arange(num_rows, dtype=np.int32), (num_layers, 1, 1, num_rows, num_rows)
    )
    counts = np.broadcast_to(causal.sum(1, dtype=np.int32), (num_layers, 1, 1, num_rows))
    facts = tuple(
        Fact(word, "12345", position) for word, position in (("river", 17), ("button", 112))
    )
    prompt = Prompt(np.zeros(7 * size + 1, np.int32), facts)
    blocks = np.eye(num_layers, num_rows, dtype=np.float32)
    answers = [("12345.", True), ("99\u4f60.", False)]
    sparse = reading(answers, BlockSelection(ids, counts, size), [blocks, blocks])
    dense = reading([("12345.", True), ("", False)])
    figure = cli.demo.draw_picture(prompt, dense, sparse, layers=(1, 3, 4), title="Blocks")
    *maps, first, second = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title() for axis in maps] == [f"layer {n}: 100% of blocks" for n in (1, 3, 4)]
    assert first.get_title(loc="left") == "river, 12345: dense right; sparse right"
    assert second.get_title(loc="left") == "button, 12345: dense silent; sparse wrong, 99?."
    for axis, places in ((maps[0], [1, 6]), (first, [1]), (second, [6])):
        marks, *dense_rows = axis.get_lines()
        assert list(marks.get_xdata()) == places
        # In the maps all rows are dense, and one bar marks them; in the strips no row is.
        assert [list(line.get_ydata()) for line in dense_rows] == [[-0.5, 7.5]] * (axis is maps[0])
        assert colors.same_color(marks.get_color(), "#D55E00")
    for axis in (first, second):
        np.testing.assert_array_equal(axis.get_images()[0].get_array(), blocks)
        name = axis.yaxis.get_major_formatter()
        assert [name(row, 0) for row in (-0.5, 0, 1, 1.5, 2, 3)] == ["", "1", "3", "", "4", ""]
    assert figure.get_suptitle() == "Blocks"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "attended" and labels[-2:] == [
        "rows that attended to everything",
        "where a fact is",
    ]


@pytest.mark.slow
def test_short_context_is_the_default_length_and_recommended_the_preset(
    model, tmp_path, sketchwalk, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    out, _ = sketchwalk("demo", "--model", model, "--facts", 1, "--no-plot", "--json")
    found = json.loads(out)
    assert 512 - ROOM - 32 < found["tokens"] <= 512 - ROOM
    assert (found["preset"], found["nominal_density"], found["phase"]) == (
        "recommended",
        0.2,
        "both",
    )


def test_compilation_is_timed_apart():
    @jax.jit
    def twice(x):
        return jax.jit(lambda x: x + x)(x)

    result, run_s, compile_s = timed(lambda: twice(np.float32(2)))
    assert result == 4 and 0 <= run_s and 0 < compile_s
    assert timed(lambda: twice(np.float32(3)))[2] == 0


def test_compilation_inside_another_counts_once(monkeypatch):
    events = [
        ("backend", -9.0, 1.5),
        ("trace", 2.0, 5.0),
        ("trace", 3.0, 4.0),
        ("lower", 4.5, 6.0),
        ("backend", 7.0, 8.0),
    ]
    clock = iter([1.0, 10.0])

    def call() -> int:
        for name, start, end in events:
            jax.monitoring.record_event_time_span(f"/jax/core/compile/{name}", start, end)
        jax.monitoring.record_event_time_span("/jax/other", 0.0, 9.0)
        return 7

    monkeypatch.setattr("time.time", lambda: next(clock))
    assert timed(call) == (7, 3.5, 5.5)
    monkeypatch.undo()
    assert timed(lambda: 8)[::2] == (8, 0.0)
