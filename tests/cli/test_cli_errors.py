"""Bad input to the command line: its message, its exit status, and an empty standard output."""

import io
import json
import os
import sys
import warnings
from pathlib import Path

import checkpoints
import jax
import pytest

from sketchwalk_jax import language_model
from sketchwalk_jax.cli import main, options, prompt
from sketchwalk_jax.inference import compiled
from sketchwalk_jax.models import hub
from sketchwalk_jax.models.weights import load, save
from sketchwalk_jax.text import tokenizer
from sketchwalk_jax.text.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def _without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles no programs for commands that fail meanwhile."""
    monkeypatch.setattr(language_model.LanguageModel, "warm_up", lambda *_, **__: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    checkpoints.write_checkpoint(directory, tokenizer=True)
    return directory


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]):
    """Runs a command that fails, and returns its message."""

    def refuse(status: int, *arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == status
        out, err = capsys.readouterr()
        assert out == ""
        message, _, hint = err.partition("\nTry ")
        assert message.startswith("error: ")
        assert hint.endswith(" --help'.\n") if status == 2 else not hint
        return message

    return refuse


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch):
    """Fails the test if weights are read."""
    monkeypatch.setattr(options, "load", None)


# Commands with mistakes. `generate`, the command by default, gets a prompt if it has none.
MISTAKES = [
    ("--prompt a --prompt-file b", "--prompt and --prompt-file must not be given together"),
    ("--prompt a --system b", "--system must be given together with --chat"),
    ("--prompts a", "--prompts must be given together with --out"),
    ("--out a", "--out must be given together with --prompts"),
    ("--prompts a --out b --prompt c", "--prompts must not be given together with --prompt"),
    ("--prompts a --out b --json", "--json must not be given together with --prompts"),
    ("--policy kascade", "--policy must be one of ('dense', 'streaming'"),
    ("--preset best", "--preset must be one of ('recommended',"),
    ("--policy dense --density 2", "--density must be in (0, 1]"),
    ("--policy flexprefill --density 2", "--density must be in (0, 1]"),
    ("--density nan", "--density must be in (0, 1], got nan"),
    ("--density inf", "--density must be in (0, 1], got inf"),
    ("--density 0", "--density must be in (0, 1], got 0.0"),
    ("--density 1.5", "--density must be in (0, 1], got 1.5"),
    ("--density low", "Invalid value for '--density'"),
    ("--max-kl 0.1 --density 0.2", "--max-kl must be left out with --density, got 0.1"),
    ("--max-kl 0.1 --set max_kl=0.3", "--max-kl must be left out with --set max_kl, got 0.1"),
    ("--max-kl 0.1 --preset paper", "--max-kl must be left out with --preset paper, got 0.1"),
    ("--max-kl 0.1 --policy dense", "--max-kl must be left out with --policy dense, got 0.1"),
    ("--set seed", "--set must be FIELD=VALUE, got 'seed'"),
    ("--set exponent=high", "--set exponent must be a positive"),
    ("--policy minference --set gamma=1", "--set must name a field of minference, block_size, de"),
    ("--policy minference --set scale=-1", "--set scale must be in [0, inf), got -1"),
    ("--policy flexprefill --phase decode", "--phase must be 'both' or 'prefill' for FlexPrefill"),
    ("--phase all", "--phase must be one of ('both', 'prefill', 'decode')"),
    ("--chunk-size 100", "--chunk-size must be a positive multiple of"),
    ("--chunk-size 0", "--chunk-size must be a positive multiple of"),
    ("--mesh data=2", "--mesh must be tensor=RANKS, sequence=RANKS or"),
    ("--mesh tensor=4,sequence=64", "--mesh must have at most the "),
    ("--dtype int8", "--dtype must be one of ('float32', 'float16', 'bfloat16', None), got 'int8'"),
    ("--weights int4", "--weights must be one of ('float8', 'int8', None), got 'int4'"),
    ("--max-new-tokens 0", "Invalid value for '--max-new-tokens'"),
    ("--stream-every 0", "Invalid value for '--stream-every'"),
    ("--seed -1", "Invalid value for '--seed'"),
    ("--temperature -1", "--temperature must be finite and at least 0"),
    ("--temperature nan", "--temperature must be finite and at least 0"),
    ("--top-k -1", "--top-k must be an integer in [0, 2**31), got -1"),
    ("--top-p 2", "--top-p must be in [0, 1], got 2.0"),
    ("--min-p 2", "--min-p must be in [0, 1], got 2.0"),
    ("--repetition-penalty 0", "--repetition-penalty must be finite and"),
    ("--fast", "No such option: --fast"),
    ("translate", "No such command 'translate'"),
    ("", "Missing command"),
    ("eval --policy kascade", "--policy must be one of ('dense',"),
    ("eval --preset a", "--preset must be one of ('recommended',"),
    ("eval --phase middle", "--phase must be one of"),
    ("eval --task needle", "--task must be one of ('single_needle',"),
    ("eval --density 0", "--density must be in (0, 1], got 0.0"),
    ("eval --set gamma", "--set must be FIELD=VALUE, got 'gamma'"),
    ("eval --set beta2=1", "--set must be of a policy that is run, got 'beta2'"),
    ("eval --set gamma=2", "--set gamma must be in [0, 1], got 2"),
    ("eval --tokens 500", "--tokens must be multiples of 64, got 500"),
    ("eval --tokens 512 --tokens 1024", "--tokens must not exceed the model's context"),
    ("eval --prompts 0", "--prompts must be a positive integer, got 0"),
    ("eval --tokens 512 --text-tail 2", "--text-tail must be in (0, 1], got 2"),
    ("eval --tokens 512 --text none.txt", "--text must be a readable UTF-8 file"),
    ("info --context 513", "--context must not exceed the model's context of 512 tokens, got 513"),
    ("bench --preset a", "--preset must be one of ('recommended',"),
    ("bench --tokens 100000", "--tokens must not exceed the model's context of"),
    ("bench --tokens 5", "Invalid value for '--tokens': Input should be greater than or"),
    ("demo --tokens 513", "--tokens must not exceed the model's context of 512"),
    ("demo --tokens 319 --facts 2", "--tokens must be at least 320 for 2 facts, got 319"),
    ("demo --facts 0", "Invalid value for '--facts'"),
    ("demo --facts 17", "Invalid value for '--facts'"),
    ("demo --phase all", "--phase must be one of ('both',"),
    ("demo --policy dense", "--policy must be one of ('streaming', "),
    ("demo --out a.txt", "--out must end in one of ('.png', '.pdf', '.svg')"),
    ("demo --out b/a.png", "--out must lie in an existing folder, got 'b/a.png'"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
@pytest.mark.unchecked
def test_mistake_on_the_command_line_is_named_before_anything_is_read(
    words, message, model, tmp_path, refuse, without_weights, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = words.split()
    if words.startswith("--"):
        command = ["generate", *([] if "--prompt" in command else ["--prompt", "a"]), *command]
    where = ["--model", model] if len(command) > 1 else []
    assert refuse(2, *command, *where).startswith(f"error: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.unchecked
def test_results_of_something_else_are_not_overwritten(model, tmp_path, refuse):
    out = tmp_path / "quality.json"
    out.write_text('{"meta": {"wall_s": 1.0, "seed": 5}, "rows": []}')
    message = refuse(1, "eval", "--model", model, "--tokens", 512, "--out", out)
    assert "seed 5 there, 0 now; " in message
    assert json.loads(out.read_text())["meta"]["seed"] == 5


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("phase", "left_out"), [("prefill", True), ("both", True), ("decode", False)]
)
@pytest.mark.unchecked
def test_policies_without_the_phase_asked_for_are_named(model, sketchwalk, phase, left_out):
    command = ["eval", "--model", model, "--policy", "quest", "--phase", phase]
    err = sketchwalk(*command, "--tokens", 512, "--text", "none.txt", status=2)[1]  # at once
    warning = "warning: --policy quest selects in decode only and is left out; add --phase decode\n"
    assert err.startswith(warning) == left_out


def test_sampling_is_checked_before_a_checkpoint_is_looked_for(tmp_path, refuse):
    wrong = ["--prompt", "a", "--top-p", 2]
    message = refuse(2, "generate", "--model", tmp_path / "missing", *wrong)
    assert "--top-p must be in [0, 1]" in message


@pytest.mark.parametrize("command", ["generate", "info"])
def test_directory_that_does_not_exist_is_named(command, tmp_path, refuse):
    arguments = ["--prompt", "a"] if command == "generate" else []
    missing = tmp_path / "missing"
    message = refuse(2, command, "--model", missing, *arguments)
    assert "--model must be an existing checkpoint directory" in message and str(missing) in message
    file = tmp_path / "file"
    file.touch()
    assert "got the file" in refuse(2, command, "--model", file, *arguments)


@pytest.mark.parametrize(("command", "status"), [("generate", 1), ("info", 2)])
def test_a_directory_of_other_weights_is_refused(command, status, model, tmp_path, refuse):
    params, config = load(model, weights="int8", progress=False)
    save(tmp_path / "saved", params, config)
    checkpoints.write_byte_tokenizer(tmp_path / "saved")
    prompt = ["--prompt", "a"] if command == "generate" else []
    options = ["--model", tmp_path / "saved", "--weights", "float8"]
    message = refuse(status, command, *options, *prompt)
    assert "weights must be 'int8' or left out" in message
    assert message.startswith("error: --weights") == (command == "info")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must not be empty"),
        (b"caf\xe9 au lait", "UTF-8 text, got byte 0xe9 at offset 3"),
        (b"a" * 505, "got 505 and 8; shorten the prompt or lower --max-new-tokens"),
    ],
    ids=["empty", "not UTF-8", "too long"],
)
@pytest.mark.parametrize("source", ["--prompt-file", "standard input", "--prompt"])
def test_bad_prompt_is_refused(
    source, content, message, tmp_path, model, refuse, without_weights, monkeypatch
):
    (tmp_path / "prompt.txt").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    given = {"--prompt-file": tmp_path / "prompt.txt", "--prompt": os.fsdecode(content)}
    arguments = [source, given[source]] if source in given else []
    refused = refuse(1, "generate", "--model", model, "--max-new-tokens", 8, *arguments)
    assert message in refused
    assert source in refused or str(given["--prompt-file"]) in refused or "got 505" in refused


@pytest.mark.parametrize(
    ("longest", "message"),
    [
        (None, "context of 512 tokens, got 10485760 characters; shorten the prompt"),
        # A token this long would let ten megabytes fit, but the text does not have it.
        ("x" * 10_000, "of which the first 8192 are 8192 tokens; shorten the prompt"),
    ],
)
def test_ten_megabytes_are_refused_before_they_are_cut(
    longest, message, tmp_path, model, refuse, without_weights, monkeypatch
):
    tokens, cut, encode = load_tokenizer(model), [], tokenizer.encode
    if longest is not None:
        tokens.add_tokens([longest])
    monkeypatch.setattr(prompt, "open_tokenizer", lambda _: tokens)
    monkeypatch.setattr(
        tokenizer, "encode", lambda _, text: cut.append(len(text)) or encode(tokens, text)
    )
    (tmp_path / "prompt.txt").write_bytes(b"a" * 10 * 2**20)
    path = tmp_path / "prompt.txt"
    assert message in refuse(1, "generate", "--model", model, "--prompt-file", path)
    assert sum(cut) <= 16 * 512  # in characters; tokenizing the whole text takes two gigabytes


def test_terminal_is_not_read_as_the_prompt(model, refuse, monkeypatch):
    terminal = io.StringIO("typed")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "a prompt must be given" in refuse(2, "generate", "--model", model)


def test_installation_without_the_bundled_model_is_named(tmp_path, refuse, monkeypatch):
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "hub.py"))
    message = refuse(1, "generate", "--prompt", "a")
    assert "the bundled model must be installed with the package" in message
    assert "without config.json, model.safetensors, tokenizer.json" in message


def test_prompt_file_that_cannot_be_read_is_named(tmp_path, model, refuse):
    for file, reason in (("missing", "No such file"), ("", "Is a directory")):
        path = tmp_path / file
        message = refuse(1, "generate", "--model", model, "--prompt-file", path)
        assert str(path) in message and reason in message


def damage(file: Path, change: None | int | str | dict) -> None:
    """Removes a file, cuts it to a size, replaces it by a text, or changes entries of its JSON."""
    match change:
        case None:
            file.unlink()
        case int():
            file.write_bytes(file.read_bytes()[:change])
        case str():
            file.write_text(change)
        case _:
            file.write_text(json.dumps(json.loads(file.read_text()) | change))


REFUSING = {"chat_template": "{{ raise_exception('no users') }}"}
BAD_CHECKPOINTS = [
    ("", "config.json", None, "config.json does not exist"),
    ("", "config.json", 20, "must be a JSON file"),
    ("", "config.json", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
    ("", "config.json", {"vocab_size": 64}, "the model's 64 tokens, got token 121"),
    ("", "tokenizer.json", None, "must hold tokenizer files"),
    ("", "tokenizer.json", 100, "cannot be opened: EOF while parsing"),
    ("--chat", "tokenizer_config.json", {"chat_template": None}, "--chat must be left out: the ch"),
    ("--chat", "tokenizer_config.json", REFUSING, "template refuses the messages: no users"),
    ("--generation-config", "README.md", "No settings.", "has no generation_config.json"),
    (
        "--generation-config",
        "generation_config.json",
        '{"repetition_penalty": "1"}',
        "must give numbers for its sampling settings, got {'repetition_penalty': '1'}",
    ),
    (
        "--generation-config",
        "generation_config.json",
        '{"repetition_penalty": 0}',
        "generation_config.json: repetition_penalty must be finite and greater than 0",
    ),
]


@pytest.mark.parametrize(("option", "file", "change", "message"), BAD_CHECKPOINTS)
def test_bad_checkpoint_is_refused_before_its_weights_are_read(
    option, file, change, message, model, refuse, without_weights
):
    damage(model / file, change)
    options = ["--prompt", "my", *option.split()]
    assert message in refuse(1, "generate", "--model", model, *options)


def test_bad_weights_are_refused(model, refuse):
    damage(model / "model.safetensors", 5000)
    message = refuse(1, "generate", "--model", model, "--prompt", "a")
    assert "truncated or corrupt" in message and "download it again" in message


def test_full_memory_says_what_to_do(model, refuse, monkeypatch):
    def stream(*arguments: object, **options: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nBuffers:\n 1. ...")

    monkeypatch.setattr(language_model, "Stream", stream)
    message = refuse(1, "generate", "--model", model, "--prompt", "a")
    assert message.startswith("error: RESOURCE_EXHAUSTED: Out of memory.; pass --chunk-size")
    assert "Buffers" not in message


def test_defects_keep_their_traceback(model, monkeypatch):
    monkeypatch.setattr(language_model, "Stream", None)
    with pytest.raises(TypeError):
        main(["generate", "--model", str(model), "--prompt", "a"])


def test_warnings_take_one_line(model, capsys, monkeypatch):
    def stream(*arguments: object, **options: object) -> None:
        warnings.warn("mind the gap", stacklevel=1)
        raise ValueError("stop")

    monkeypatch.setattr(language_model, "Stream", stream)
    # Filters of warnings belong to all threads, also to those that compile for other tests.
    for program in compiled._all:
        for one in [*program._programs.values()]:
            one.exception()  # waits
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        main(["generate", "--model", str(model), "--prompt", "a"])
    assert capsys.readouterr().err == "warning: mind the gap\nerror: stop\n"
