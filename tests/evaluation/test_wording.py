"""Tasks worded as chat turns for instruction models; the loss of code; long texts."""

import copy
import re

import numpy as np
import pytest
from tiny_tokenizers import TOKENIZERS

from sketchwalk_jax.evaluation.tasks import ANSWERED_TASKS, LOSS_TASKS, TASKS, draw_samples, score
from sketchwalk_jax.text.haystack import Text, read_code, read_text
from sketchwalk_jax.text.tokenizer import decode, encode

TEXT = read_text()
CODE = re.compile(r" The (?:(?:first|second|third|fourth) )?secret code of (\w+) is (\d{5})\.")
VALUE = re.compile(r" Let (\w+) be (\w+)\.")
VOTE = re.compile(r" One vote for (\w+)\.")
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]\n{{ message['content'] }}[end]\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
ASKED = [task for task in TASKS if task not in LOSS_TASKS]


def with_template(name: str, template: str | None = TEMPLATE):
    tokenizer = copy.deepcopy(TOKENIZERS[name])
    tokenizer.chat_template = template
    return tokenizer


CHATS = {name: with_template(name) for name in TOKENIZERS}


def draw(task: str, *, tokenizer=CHATS["bytes"], num_tokens=4096, count=5, text=TEXT, **options):
    options = {"seed": 0, "wording": "chat"} | options
    return draw_samples(task, text, tokenizer, num_tokens=num_tokens, count=count, **options)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("task", ASKED)
def test_the_answer_follows_the_beginning_of_the_assistants_turn(name: str, task: str):
    tokenizer = CHATS[name]
    for sample in draw(task, tokenizer=tokenizer, num_tokens=5000, count=2):
        assert len(sample.tokens) <= 5000
        text = decode(tokenizer, sample.tokens)
        if name in ("bytes", "merges"):
            assert len(sample.tokens) == 5000
            whole = encode(tokenizer, text, add_special_tokens=False)
            np.testing.assert_array_equal(sample.tokens, whole)
            turns = 1 + (task == "mid_prompt")
            assert text.startswith("[user]\nSome ") and text.count("[user]\n") == turns
            assert text.count("[assistant]\n") == turns
        before = decode(tokenizer, sample.tokens[: sample.answer_start])
        turn = before.rsplit("[assistant]\n", 1)[1]
        assert turn and "[" not in turn and not turn.endswith(" ")
        question = decode(tokenizer, sample.tokens[sample.question_start : sample.answer_start])
        assert question.lstrip().startswith("(End of the text.)\n\n")
        whole = np.concatenate([sample.tokens[: sample.answer_start], sample.answer])
        assert decode(tokenizer, whole) == f"{before} {sample.expected}"
        assert score(sample, decode(tokenizer, sample.answer))
        behind = sample.tokens[sample.answer_start : sample.answer_start + len(sample.answer)]
        np.testing.assert_array_equal(behind, sample.answer if task in ANSWERED_TASKS else [])


def test_what_is_hidden_and_asked_is_that_of_the_plain_wording():
    for task, pattern in (("multi_key", CODE), ("multi_value", CODE), ("aggregation", VOTE)):
        for chat, plain in zip(draw(task), draw(task, wording="plain"), strict=True):
            hidden = pattern.findall(decode(CHATS["bytes"], chat.tokens).split("(End of")[0])
            wanted = (
                decode(CHATS["bytes"], plain.tokens).split(" Q: ")[0].replace("code", "secret code")
            )
            assert hidden == pattern.findall(wanted)
            numbers = re.findall(r"\d{5}", plain.expected)
            assert re.findall(r"\d{5}", chat.expected) == numbers


@pytest.mark.parametrize("task", ["multi_query", "multi_value"])
def test_several_codes_are_asked_for_line_by_line(task: str):
    for sample in draw(task):
        text = decode(CHATS["bytes"], np.concatenate([sample.tokens, sample.answer]))
        hidden, asked = text.split("(End of the text.)")
        lines = asked.split("[assistant]\n")[1].splitlines()
        assert len(lines) == 4
        if task == "multi_value":  # codes of one word are counted in the order of the text
            ordinals = re.findall(r"The (\w+th|\w+st|\w+nd|\w+rd) secret code of", hidden)
            assert ordinals == ["first", "second", "third", "fourth"]
            assert re.findall(r"The (\w+) secret code of", "\n".join(lines)) == ordinals
            continue
        codes = dict(CODE.findall(hidden))
        for line in lines:
            ((word, number),) = CODE.findall(f" {line}")
            assert codes[word] == number and f"The secret code of {word} is ___." in asked


def test_mid_prompt_goes_on_in_a_further_turn():
    for sample in draw("mid_prompt"):
        stop = sample.answer_start + len(sample.answer)
        behind = decode(CHATS["bytes"], sample.tokens[stop:])
        assert behind.startswith("[end]\n[user]\nHere is more text: ")
        assert behind.endswith(" (End of the text.)[end]\n[assistant]\n")
        hay = behind.removeprefix("[end]\n[user]\nHere is more text: ").split(" (End of")[0]
        assert hay in TEXT.content and len(behind) >= 512
        assert 0.49 < sample.question_start / 4096 <= 0.75


def test_losses_have_no_frame_and_samples_can_be_drawn_from_any_one_on():
    (chat,), (plain,) = (draw("text_loss", count=1, wording=one) for one in ("chat", "plain"))
    np.testing.assert_array_equal(chat.tokens, plain.tokens)
    every, later = draw("variable_tracking"), draw("variable_tracking", count=2, first=3)
    for one, same in zip(every[3:], later, strict=True):
        np.testing.assert_array_equal(one.tokens, same.tokens)
        assert one.hops == same.hops


@pytest.mark.parametrize("name", TOKENIZERS)
def test_code_keeps_its_lines(name: str):
    code, tokenizer = read_code(), TOKENIZERS[name]
    assert code.sha256 == read_code().sha256 and "\ndef " in code.content
    for sample in draw("code_loss", tokenizer=tokenizer, text=code, num_tokens=1000, count=3):
        assert len(sample.tokens) == 1000 and len(sample.answer) == 64
        text = (
            decode(tokenizer, sample.tokens).lstrip(" ").removesuffix("\N{REPLACEMENT CHARACTER}")
        )
        place = code.content.index(text[:200].lstrip())
        begin = code.content[:place].rsplit("\n", 1)
        assert begin[-1].strip() == "" and "\n" in text


def test_a_passage_at_the_end_of_the_code_begins_earlier():
    code = Text("x = 1\n" * 200, "short", "", 1.0)
    for sample in draw("code_loss", text=code, num_tokens=1100, count=5):
        assert len(sample.tokens) == 1100
    with pytest.raises(ValueError, match="text must be long enough for passages of 1300 tokens"):
        draw("code_loss", text=code, num_tokens=1300)


def test_long_decode_feeds_the_last_tokens():
    (sample,) = draw("long_decode", count=1, num_tokens=2048)
    assert sample.answer_start == len(sample.tokens) - 512
    np.testing.assert_array_equal(sample.answer, sample.tokens[-512:])
    with pytest.raises(ValueError, match="num_tokens must be at least 1024 for long_decode"):
        draw("long_decode", num_tokens=1000)


def test_what_cannot_be_worded_is_refused():
    with pytest.raises(ValueError, match="tokenizer must have a chat template, got none"):
        draw("multi_key", tokenizer=with_template("bytes", None))
    twice = with_template("bytes", TEMPLATE.replace("[end]", "{{ message['content'] }}"))
    with pytest.raises(ValueError, match="writes every message once and as it is"):
        draw("multi_key", tokenizer=twice)
    with pytest.raises(ValueError, match=r"wording must be one of \('plain', 'chat'\), got 'loud'"):
        draw("multi_key", wording="loud")
