"""`--prompts FILE --out FILE`: each line is a text; runs continue after interruptions."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import pytest

from sketchwalk_jax import Dense
from sketchwalk_jax.cli.prompt_files import read_prompts
from sketchwalk_jax.language_model import LanguageModel
from sketchwalk_jax.models import ModelConfig
from sketchwalk_jax.text.tokenizer import load_tokenizer

NEW = 6
PROMPTS = ["Walk with", "a" * 40, {"prompt": "né 你", "id": 7}, "Then", "walk on"]
MESSAGES = {"messages": [{"role": "user", "content": "Who walks?"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tensors = checkpoints.write_checkpoint(directory, tokenizer=True)
    checkpoints.write_letters_only(directory, tensors)
    return directory


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in values), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run(model: Path, tmp_path: Path, sketchwalk):
    """Runs the command line on a file of prompts; returns standard error."""

    def run(prompts: Path | list[Any], *more: object, status: int = 0) -> str:
        if isinstance(prompts, list):
            prompts = write_lines(tmp_path / "prompts.jsonl", prompts)
        where = ["--prompts", prompts, "--out", tmp_path / "texts.jsonl"]
        words = ["generate", "--model", model, *where, "--max-new-tokens", NEW]
        words += ["--policy", "dense", *more]  # dense programs compile in half the time
        out, err = sketchwalk(*words, status=status)
        assert out == ""
        return err

    return run


@pytest.mark.slow
def test_texts_are_those_of_the_prompts_in_their_order(run, model, tmp_path):
    err = run([*PROMPTS, MESSAGES], "--batch", 4)
    assert err.splitlines()[-1] == f"{tmp_path / 'texts.jsonl'}: 6 texts"
    found = read_lines(tmp_path / "texts.jsonl")
    assert [one["index"] for one in found] == list(range(6))
    assert [one["input"] for one in found] == [*PROMPTS, MESSAGES]
    lm = LanguageModel.load(model, policy=Dense(), progress=False)
    for text, one in zip([*PROMPTS[:2], "né 你", *PROMPTS[3:]], found, strict=False):
        assert one["text"] == lm.generate(text, max_new_tokens=NEW)
    assert found[-1]["text"] == lm.chat(MESSAGES["messages"], max_new_tokens=NEW)
    assert {one["finish_reason"] for one in found} == {"length"}


def test_what_is_there_is_kept_and_half_a_line_is_written_again(run, tmp_path):
    out = tmp_path / "texts.jsonl"
    run(PROMPTS, "--top-k", 9, "--seed", 5)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    marked = json.loads(lines[3]) | {"text": "from before"}
    out.write_bytes(json.dumps(marked).encode() + b"\n" + lines[0] + lines[1][:20])
    err = run(PROMPTS, "--top-k", 9, "--seed", 5)
    assert "5 texts, 2 of them from before" in err
    found = read_lines(out)
    assert found[3]["text"] == "from before"
    assert found[:3] + found[4:] == [json.loads(line) for line in lines[:3] + lines[4:]]


def test_other_prompts_or_settings_are_refused(run, tmp_path):
    run(PROMPTS)
    before = (tmp_path / "texts.jsonl").read_bytes()
    for prompts, more, message in (
        ([*PROMPTS[1:], "more"], [], "of the same prompts, got those of"),
        (PROMPTS, ["--top-k", 3], "sampling {'temperature': 0.0"),
        (PROMPTS, ["--phase", "decode"], "phase both there, decode now"),
        (PROMPTS, ["--weights", "int8"], "weights None there, int8 now"),
    ):
        err = run(prompts, *more, status=1)
        assert message in err and "--overwrite" in err
        assert (tmp_path / "texts.jsonl").read_bytes() == before
    run(PROMPTS[1:], "--overwrite")
    assert len(read_lines(tmp_path / "texts.jsonl")) == len(PROMPTS) - 1


MISTAKES = {
    "no JSON": (b'"a"\nb\n', "line 2 of "),
    "no prompt": (b"{}\n", '"prompt" or "messages", got {}'),
    "both": (b'{"prompt": "a", "messages": []}\n', '"prompt" or "messages"'),
    "a number": (b"3\n", '"prompt" must be a string, got 3'),
    "no messages": (b'{"messages": []}\n', '"messages" must be a list of objects, got []'),
    "too long": (json.dumps("a" * 600).encode(), "context of 512 tokens, got 600 and 6"),
    "empty": (b"\n\n", "must hold a prompt, got none"),
    "no UTF-8": (b'"\xff"\n', "line 1 of "),
}


@pytest.mark.unchecked
@pytest.mark.parametrize(("content", "message"), MISTAKES.values(), ids=MISTAKES)
def test_lines_that_are_no_prompts_are_named(content, message, run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert message in run(path, status=1) and not (tmp_path / "texts.jsonl").exists()


TOOLS = [{"type": "function", "function": {"name": "walk", "parameters": {"type": "object"}}}]
WITH_TOOLS = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def read_with_tools(model, tmp_path, line: dict[str, Any], *, template=WITH_TOOLS, is_chat=False):
    """Returns the prompt text of a line, for a tokenizer with that chat template."""
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = template
    (entry,) = read_prompts(
        write_lines(tmp_path / "prompts.jsonl", [line]),
        tokenizer,
        is_chat=is_chat,
        system=None,
        model_config=ModelConfig.from_pretrained(model),
        max_new_tokens=NEW,
    )
    return bytes(entry.tokens.tolist()).decode()


def test_tools_of_a_line_reach_the_chat_template(model, tmp_path):
    content = MESSAGES["messages"][0]["content"]
    found = read_with_tools(model, tmp_path, MESSAGES | {"tools": TOOLS})
    assert found == f"<walk>{content}"
    asked = {"prompt": content, "tools": TOOLS}
    assert read_with_tools(model, tmp_path, asked, is_chat=True) == found
    for none in ([], None):
        assert read_with_tools(model, tmp_path, MESSAGES | {"tools": none}) == content


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (MESSAGES | {"tools": TOOLS}, "template of the model has"),
        ({"prompt": "a", "tools": TOOLS}, 'beside "messages", got "prompt"; or pass'),
        (MESSAGES | {"tools": "walk"}, '"tools" must be a list of objects, got walk'),
        (MESSAGES | {"tools": {}}, '"tools" must be a list of objects, got {}'),
        (MESSAGES | {"tools": [3]}, '"tools" must be a list of objects'),
    ],
)
def test_tools_that_would_be_lost_are_refused(model, tmp_path, line, message):
    template = WITH_TOOLS.replace("tools", "t") if message.startswith("template") else WITH_TOOLS
    with pytest.raises(ValueError, match=f"line 1 of .*: .*{message}"):
        read_with_tools(model, tmp_path, line, template=template)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n", "line 1 of "),
        (b'{"index": 9, "text": ""}\n', "must be a text of this run"),
        (b'{"index": 0, "text": ""}\n' * 2, "line 2 of "),
    ],
)
def test_a_damaged_file_of_texts_is_refused(content, message, run, tmp_path):
    run(PROMPTS[:1])
    (tmp_path / "texts.jsonl").write_bytes(content)
    assert message in run(PROMPTS[:1], status=1)
    (tmp_path / "texts.jsonl.settings.json").unlink()
    assert "got it alone" in run(PROMPTS[:1], status=1)


# After two texts the process waits inside native code, as in a program of JAX.
WAITING = """
import itertools, os, signal, sys, threading
from sketchwalk_jax.cli import main
from sketchwalk_jax.language_model import LanguageModel

complete = LanguageModel.complete

def two_texts(self, prompts, **options):
    yield from itertools.islice(complete(self, prompts, **options), 2)
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

LanguageModel.complete = two_texts
main()
"""


@pytest.mark.slow
def test_who_interrupts_a_run_is_told_what_it_keeps(run, model, tmp_path):
    texts, prompts = tmp_path / "texts.jsonl", tmp_path / "prompts.jsonl"
    write_lines(prompts, PROMPTS)
    words = ["generate", "--model", model, "--prompts", prompts, "--out", texts, "--batch", 1]
    words += ["--max-new-tokens", NEW, "--policy", "dense"]
    command = [sys.executable, "-c", WAITING, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130 and done.stdout == ""
    assert f"{texts}: stopped; it keeps 2 of 5 texts, and the same command" in done.stderr
    assert len(read_lines(texts)) == 2
    assert "5 texts, 2 of them from before" in run(PROMPTS)


def test_an_error_in_the_middle_says_what_is_kept(run, tmp_path, monkeypatch):
    complete = LanguageModel.complete

    def failing(self, prompts, **options):
        yield from itertools.islice(complete(self, prompts, **options), 1)
        raise ValueError("there is no more")

    monkeypatch.setattr(LanguageModel, "complete", failing)
    for kept in (1, 2):  # texts of the earlier run count
        err = run(PROMPTS, "--batch", 1, status=1)
        assert f"it keeps {kept} of 5 texts" in err
        assert "error: there is no more" in err
