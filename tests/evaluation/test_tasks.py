import dataclasses
import re
from collections import Counter

import numpy as np
import pytest
from tiny_tokenizers import TOKENIZERS

from sketchwalk_jax.evaluation.tasks import TASKS, Sample, draw_samples, score
from sketchwalk_jax.text.haystack import Text, is_held_out, read_text
from sketchwalk_jax.text.tokenizer import decode, encode

CODE = re.compile(r" The code of (\w+) is (\d{5})\.")
VALUE = re.compile(r" Let (\w+) be (\w+)\.")
VOTE = re.compile(r" One vote for (\w+)\.")
QUESTION = re.compile(r" Q: .*?\? A:")
MID_PROMPT = "mid_prompt"

TEXT = read_text()
BYTES = TOKENIZERS["bytes"]


def draw(task: str, *, tokenizer=BYTES, num_tokens=4096, count=5, seed=0, text=TEXT, **options):
    return draw_samples(
        task, text, tokenizer, num_tokens=num_tokens, count=count, seed=seed, **options
    )


def parts(sample: Sample, tokenizer=BYTES) -> tuple[str, str, str]:
    """Returns the text up to the question, the question, and the text after it."""
    start, stop = sample.question_start, sample.answer_start
    pieces = [sample.tokens[:start], sample.tokens[start:stop], sample.tokens[stop:]]
    before, question, behind = (decode(tokenizer, piece) for piece in pieces)
    return before, question, behind


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("task", TASKS)
def test_tokens_are_those_of_one_string_with_question_and_answer_in_their_place(name, task):
    tokenizer = TOKENIZERS[name]
    for sample in draw(task, tokenizer=tokenizer, num_tokens=4000, count=2):
        assert len(sample.tokens) == 4000
        assert sample.tokens.dtype == sample.answer.dtype == np.int32
        whole = encode(tokenizer, decode(tokenizer, sample.tokens))
        if whole[-1] == tokenizer.eos_token_id:
            whole = whole[:-1]
        np.testing.assert_array_equal(sample.tokens, whole)
        if task == "text_loss":
            continue
        question = decode(tokenizer, sample.tokens[sample.question_start : sample.answer_start])
        assert QUESTION.fullmatch(" " + question.lstrip())
        stop = sample.answer_start + len(sample.answer)
        behind = sample.tokens[sample.answer_start : stop]
        is_within = task in (MID_PROMPT, "variable_tracking")
        np.testing.assert_array_equal(behind, sample.answer if is_within else [])
        whole = np.concatenate([sample.tokens[: sample.answer_start], sample.answer])
        text = decode(tokenizer, whole)
        assert text.endswith(f"? A: {sample.expected}")
        np.testing.assert_array_equal(encode(tokenizer, text)[: len(whole)], whole)


def test_the_haystack_is_a_passage_of_the_text_from_a_word_on():
    for sample in draw("multi_key"):
        before, _, _ = parts(sample)
        hay = CODE.sub("", before)
        place = TEXT.content.index(hay)
        assert place == 0 or TEXT.content[place - 1] == " "
        assert TEXT.content[place + len(hay)] == " "


def test_passages_come_from_all_over_the_text():
    places = [TEXT.content.index(parts(s)[0]) for s in draw("text_loss", count=40)]
    assert len(set(places)) > 35
    counts, _ = np.histogram(places, bins=4, range=(0, len(TEXT.content)))
    assert counts.min() >= 3


@pytest.mark.parametrize("task", [task for task in TASKS if task != "text_loss"])
def test_words_are_held_out_and_occur_in_statements_only(task: str):
    for sample in draw(task):
        before, question, behind = parts(sample)
        statements = CODE.findall(before) + VALUE.findall(before)
        words = {word for pair in statements for word in pair if word.isalpha()}
        words |= set(VOTE.findall(before))
        assert words and all(is_held_out(word) for word in words)
        hay = VOTE.sub("", VALUE.sub("", CODE.sub("", before)))
        hay += behind.removeprefix(f" {sample.expected}")
        assert not words & set(re.findall("[a-z]+", hay.lower()))
        numbers = [number for pair in statements for number in pair if number.isdigit()]
        assert len(numbers) == len(set(numbers))
        assert all(10000 <= int(number) <= 99999 for number in numbers)


def test_single_needle_stands_at_its_depth():
    samples = draw("single_needle", count=25, depths=10)
    centres = [(part + 0.5) / 10 for part in range(10)]
    counts = Counter(sample.depth for sample in samples)
    assert sorted(counts) == pytest.approx(centres)
    assert set(counts.values()) == {2, 3}
    for sample in samples:
        before, question, _ = parts(sample)
        ((word, number),) = CODE.findall(before)
        assert question == f" Q: code of {word}? A:" and sample.expected == f"{number}."
        length = len(CODE.sub("", before))
        assert CODE.search(before).start() / length == pytest.approx(sample.depth, abs=0.01)


def test_every_depth_comes_once_before_any_comes_again_and_few_are_spread():
    for depths in range(1, 13):
        few = draw("single_needle", count=depths, num_tokens=256, depths=depths)
        assert len({sample.depth for sample in few}) == depths
    few = sorted(sample.depth for sample in draw("single_needle", count=3, num_tokens=1024))
    assert min(np.diff(few)) >= 0.25


@pytest.mark.parametrize("num_keys", [1, 32])
def test_multi_key_asks_for_one_of_the_codes(num_keys: int):
    for sample in draw("multi_key", num_keys=num_keys):
        before, question, _ = parts(sample)
        codes = dict(CODE.findall(before))
        assert len(codes) == num_keys
        (word,) = re.findall(r"code of (\w+)\?", question)
        assert sample.expected == f"{codes[word]}."


def test_multi_query_asks_for_four_codes_in_its_own_order():
    orders = set()
    for sample in draw("multi_query"):
        before, question, _ = parts(sample)
        codes = dict(CODE.findall(before))
        (listed,) = re.findall(r" Q: code of each of (.*)\? A:", question)
        words = listed.split(", ")
        assert len(codes) == 16 and len(set(words)) == 4
        assert sample.expected == ", ".join(codes[word] for word in words) + "."
        orders.add(tuple(np.argsort([list(codes).index(word) for word in words]).tolist()))
    assert len(orders) > 1


def test_multi_value_asks_for_all_codes_of_a_word_in_the_order_of_the_text():
    for sample in draw("multi_value"):
        before, question, _ = parts(sample)
        (word,) = re.findall(r" Q: all codes of (\w+)\? A:", question)
        statements = CODE.findall(before)
        owners = Counter(owner for owner, _ in statements)
        assert owners.pop(word) == 4
        assert list(owners.values()) == [1] * 8
        codes = [number for owner, number in statements if owner == word]
        assert sample.expected == ", ".join(codes) + "."


def test_variable_tracking_lists_a_chain_of_as_many_statements_as_hops():
    samples = draw("variable_tracking", count=10)
    assert [sample.hops for sample in samples] == [2, 3, 4, 5, 6] * 2
    samples += draw("variable_tracking", hops=4)
    for sample in samples:
        before, question, _ = parts(sample)
        links = VALUE.findall(before)
        values, places = dict(links), {name: i for i, (name, _) in enumerate(links)}
        assert len(values) == len(links) == 3 * sample.hops
        (name,) = re.findall(r" Q: value of (\w+)\? A:", question)
        chain = []
        for hop in range(1, sample.hops + 1):
            chain.append(values[name])
            if hop < sample.hops:
                assert places[chain[-1]] < places[name]  # a name is given before it is copied
                name = chain[-1]
        assert chain[-1].isdigit()
        assert sample.expected == ", ".join(chain) + "."
        assert sum(value.isdigit() for value in values.values()) == 3
        # Chains have equal length: no name is copied twice, and three are never copied.
        assert max(Counter(values.values()).values()) == 1
        assert len(set(values) - set(values.values())) == 3
    assert {sample.hops for sample in samples[10:]} == {4}


@pytest.mark.parametrize("num_tokens", [2048, 4096, 16384])
def test_mid_prompt_goes_on_behind_the_answer(num_tokens: int):
    shares = []
    for sample in draw(MID_PROMPT, num_tokens=num_tokens, count=20):
        before, question, behind = parts(sample)
        codes = dict(CODE.findall(before))
        assert len(codes) == 16
        (word,) = re.findall(r" Q: code of (\w+)\? A:", question)
        assert sample.expected == f"{codes[word]}."
        assert behind.startswith(f" {sample.expected} ")
        assert not CODE.search(behind)
        assert len(sample.tokens) - sample.answer_start - len(sample.answer) >= 512
        shares.append(sample.question_start / num_tokens)
    assert 0.49 < min(shares) and max(shares) <= 0.75
    assert max(shares) - min(shares) > 0.1


def test_mid_prompt_without_room_for_much_behind_it_asks_in_the_middle():
    for sample in draw(MID_PROMPT, tokenizer=TOKENIZERS["merges"], num_tokens=1024):
        assert sample.question_start / 1024 == pytest.approx(0.5, abs=0.02)


def test_aggregation_asks_for_the_word_with_most_votes():
    for sample in draw("aggregation"):
        before, question, _ = parts(sample)
        votes = Counter(VOTE.findall(before))
        (most, number), *others = votes.most_common()
        assert question == " Q: most votes? A:" and sample.expected == f"{most}."
        assert number == 12 and len(others) == 5
        assert all(2 <= count <= 4 for _, count in others)


@pytest.mark.parametrize(("num_tokens", "behind"), [(4096, 512), (1024, 256)])
def test_text_loss_scores_tokens_before_the_end(num_tokens: int, behind: int):
    for sample in draw("text_loss", num_tokens=num_tokens):
        assert decode(BYTES, sample.tokens) in TEXT.content
        assert sample.question_start == sample.answer_start == num_tokens - behind - 64
        window = sample.tokens[sample.answer_start : num_tokens - behind]
        np.testing.assert_array_equal(sample.answer, window)
        assert sample.expected == ""


@pytest.mark.parametrize("task", TASKS)
def test_samples_depend_on_the_seed_and_not_on_their_number(task: str):
    few, many = draw(task, count=2), draw(task, count=4)
    for one, same in zip(few, many, strict=False):
        np.testing.assert_array_equal(one.tokens, same.tokens)
        np.testing.assert_array_equal(one.answer, same.answer)
        assert (one.expected, one.depth, one.hops) == (same.expected, same.depth, same.hops)
    assert not np.array_equal(many[0].tokens, many[1].tokens)
    (other,) = draw(task, count=1, seed=1)
    assert not np.array_equal(few[0].tokens, other.tokens)


def test_where_no_cut_is_exact_a_prompt_is_shorter_never_longer():
    words = [word for word in TEXT.held_out_words if len(word) == 8]
    even = Text(" ".join(["seventy"] * 2000 + words), "even", "", 1.0)  # each word has eight bytes
    for sample in draw("multi_key", text=even, num_keys=2, num_tokens=2048, count=8):
        assert 2048 - 8 < len(sample.tokens) <= 2048


class CountingTokenizer:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.total = tokenizer, 0

    def __call__(self, texts, **options):
        self.total += sum(map(len, texts))
        return self.tokenizer(texts, **options)


@pytest.mark.parametrize("task", ["multi_key", "text_loss"])
def test_the_text_is_not_encoded_again_for_every_prompt(task: str):
    counting = CountingTokenizer(TOKENIZERS["merges"])
    samples = draw(task, tokenizer=counting, num_tokens=30_000, count=25)
    assert sum(len(sample.tokens) for sample in samples) > len(TEXT.content) > counting.total


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        (
            "12345.",
            ["12345.", " 12345", "\n12345. The"],
            ["123456.", "12345a", "1234", "The 12345.", ""],
        ),
        ("12345, 67890.", [" 12345, 67890."], [" 67890, 12345.", " 12345."]),
        ("river.", [" river."], [" rivers."]),
    ],
)
def test_score(expected: str, right: list[str], wrong: list[str]):
    sample = dataclasses.replace(draw("single_needle", count=1)[0], expected=expected)
    assert [score(sample, text) for text in right] == [True] * len(right)
    assert [score(sample, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "text_loss"])
def test_the_answer_of_a_sample_is_right_and_that_of_another_wrong(task: str):
    one, other = draw(task, count=2)
    assert score(one, decode(BYTES, one.answer))
    assert not score(one, decode(BYTES, other.answer))


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("needle", {}, r"task must be one of \('single_needle', .*, got 'needle'"),
        ("multi_key", {"count": 0}, "count must be a positive integer, got 0"),
        ("multi_key", {"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ("multi_key", {"num_keys": 0}, "num_keys must be a positive integer, got 0"),
        ("single_needle", {"depths": 0}, "depths must be a positive integer, got 0"),
        ("multi_key", {"hops": 2}, "hops must be None for multi_key, got 2"),
        ("variable_tracking", {"hops": 7}, r"hops must be one of \(2, 3, 4, 5, 6\), got 7"),
        ("text_loss", {"num_tokens": 127}, "num_tokens must be at least 128 for text_loss"),
        ("multi_key", {"num_tokens": 0}, "num_tokens must be a positive integer, got 0"),
        ("multi_key", {"num_tokens": 1000}, "num_tokens must leave room for 32 statements"),
        ("mid_prompt", {"num_tokens": 800}, "num_tokens must leave room for 16 statements"),
        ("multi_key", {"num_tokens": 10**6}, "text must be long enough .* 1000000 tokens, got 45"),
    ],
)
def test_what_cannot_be_drawn_is_refused(task: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        draw(task, **options)


def test_a_text_without_words_to_hide_and_a_sample_without_an_answer_are_refused():
    text = dataclasses.replace(TEXT, content="wouldn't it " * 1000)
    assert text.held_out_words == ()
    message = "text must have at least 1 held-out words .* for single_needle, got 0"
    with pytest.raises(ValueError, match=message):
        draw("single_needle", text=text)
    with pytest.raises(ValueError, match="sample must have an answer, got one of text_loss"):
        score(draw("text_loss", count=1)[0], "12345.")
