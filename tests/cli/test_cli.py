import dataclasses
import io
import json
import re
import sys
from pathlib import Path

import checkpoints
import jax
import numpy as np
import pytest
import tiny
from quality_rows import DENSE, make_rows

from sketchwalk_jax import Dense, SketchWalkConfig, calibration, language_model, make_generate
from sketchwalk_jax.cli import evaluate, info, main, options
from sketchwalk_jax.evaluation.tables import pool, rows_with
from sketchwalk_jax.inference.sampling import Sampling
from sketchwalk_jax.models.tensor_files import TensorFiles
from sketchwalk_jax.models.weights import load, save
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.policies.minference import MInferenceConfig
from sketchwalk_jax.policies.oracle import OracleConfig
from sketchwalk_jax.policies.streaming import StreamingConfig

PROMPT = "Walk with the sketch,\r\nthen walk again: né, 你.\n" * 4
NUM_BYTES = len(PROMPT.encode())
NUM_LAYERS = 4  # the first two stay dense


def write_model(directory: Path, **options) -> None:
    checkpoints.write_checkpoint(directory, tokenizer=True, num_hidden_layers=NUM_LAYERS, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    return file


@pytest.fixture
def generate(sketchwalk, model: Path, prompt_file: Path):
    """Runs `sketchwalk generate --json` on the prompt file and returns the object."""

    def generate(*arguments: object, model: Path = model, new_tokens: int = 16) -> dict:
        command = ["generate", "--model", model, "--max-new-tokens", new_tokens, "--json"]
        if "--prompt" not in arguments:
            command += ["--prompt-file", prompt_file]
        return json.loads(sketchwalk(*command, *arguments)[0])

    return generate


def expected_tokens(model: Path, num_tokens: int, **options) -> np.ndarray:
    """Returns the library's own new tokens; a prompt's tokens are its bytes."""
    params, model_config = load(model, dtype="float32")
    config = options.pop("policy", None)
    call = make_generate(model_config, config, max_new_tokens=num_tokens)
    prompt = np.frombuffer(PROMPT.encode(), np.uint8).astype(np.int32)[None]
    return np.asarray(call(params, prompt, **options).tokens)[0]


def text_of(tokens: np.ndarray) -> str:
    """Returns the text of bytes without an end token."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def test_text_is_that_of_the_library(sketchwalk, model: Path, prompt_file: Path):
    out, err = sketchwalk(
        *("generate", "--model", model, "--prompt-file", prompt_file, "--max-new-tokens", 16),
        *("--policy", "sketchwalk"),
    )
    assert out == text_of(expected_tokens(model, 16)) + "\n"
    assert f"{NUM_BYTES} prompt tokens, 16 new" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("source", ["--prompt", "--prompt-file", "standard input"])
def test_every_source_gives_the_prompt_byte_for_byte_and_json_the_measurements(
    source, sketchwalk, model, prompt_file, monkeypatch
):
    given = {"--prompt": ["--prompt", PROMPT], "--prompt-file": ["--prompt-file", prompt_file]}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    command = ["generate", "--model", model, "--max-new-tokens", 16, "--json"]
    command += ["--policy", "sketchwalk"]
    result = json.loads(sketchwalk(*command, *given.get(source, []))[0])
    assert result["text"] == text_of(expected_tokens(model, 16))
    assert (result["prompt_tokens"], result["new_tokens"]) == (NUM_BYTES, 16)
    assert result["finish_reason"] == "length"
    assert result["ttft_s"] > 0 and result["tokens_per_s"] > 0 and result["load_s"] > 0
    assert 0 < result["measured_density"] <= 1
    assert (result["policy"], result["phase"]) == ("sketchwalk", "both")
    assert result["preset"] == "recommended"
    assert (result["settings"], result["dtype"]) == ({}, "float32")


@pytest.fixture
def started(model: Path, prompt_file: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a command up to the generation, and returns the generation's arguments."""

    def started(*arguments: object, command: str = "generate") -> dict:
        found = {}

        def stop(call, params, *, every):
            settings, ends = call.reading["settings"], call.decoding["eos_token_ids"]
            for name in ("policy", "phase", "chunk_size"):
                found[name] = getattr(settings, name)
            for field in dataclasses.fields(Sampling):
                found[field.name] = float(getattr(call.sampling, field.name))
            found.update(every=every, max_new_tokens=call.max_new_tokens)
            found["prompt"] = np.asarray(call.prompt[0]), int(call.prompt[1][0])
            found["dtype"] = params["embed"]["embedding"].dtype
            found["eos_token_ids"] = None if ends == settings.model_config.eos_token_ids else ends
            raise ValueError("stop")

        monkeypatch.setattr(language_model, "Stream", stop)
        # The programs would compile all the same, beside other tests.
        monkeypatch.setattr(language_model.LanguageModel, "warm_up", lambda *_, **__: None)
        words = [command, "--model", model, *arguments]
        if command == "generate" and "--prompt" not in arguments:
            words += ["--prompt-file", prompt_file]
        assert main([str(word) for word in words]) == 1
        return found

    return started


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"policy": Dense(), "phase": "both", "every": 8}),  # short prompts gain nothing
        (["--policy", "sketchwalk"], {"policy": SketchWalkConfig.recommended()}),
        ([], {"max_new_tokens": 128, "eos_token_ids": None, "chunk_size": None}),
        pytest.param(["--policy", "dense"], {"policy": Dense()}, marks=pytest.mark.slow),
        pytest.param(["--policy", "oracle"], {"policy": OracleConfig()}, marks=pytest.mark.slow),
        (["--policy", "streaming", "--density", 0.5], {"policy": StreamingConfig(density=0.5)}),
        pytest.param(
            ["--preset", "damped"], {"policy": SketchWalkConfig.damped()}, marks=pytest.mark.slow
        ),
        pytest.param(
            ["--preset", "released"],
            {"policy": SketchWalkConfig.released()},
            marks=pytest.mark.slow,
        ),
        (
            ["--policy", "sketchwalk", "--density", 0.5],
            {"policy": SketchWalkConfig.recommended(density=0.5)},
        ),
        pytest.param(
            ["--policy", "minference"], {"policy": MInferenceConfig()}, marks=pytest.mark.slow
        ),
        (
            ["--policy", "minference", "--set", "scale=0.5", "--set", "pattern=stream"],
            {"policy": MInferenceConfig(scale=0.5, pattern="stream")},
        ),
        (
            ["--preset", "paper", "--density", 0.5, "--set", "seed=3"],
            {"policy": SketchWalkConfig(density=0.5, seed=3)},
        ),
        (["--preset", "damped", "--phase", "decode"], {"phase": "decode"}),
        (["--chunk-size", 128], {"chunk_size": 128}),
        (["--max-new-tokens", 3], {"max_new_tokens": 3}),
        (["--ignore-eos"], {"eos_token_ids": ()}),
        (["--stream-every", 3], {"every": 3}),
        # Tokens are drawn only if that is asked for.
        ([], {"temperature": 0, "dtype": "float32"}),
        (["--repetition-penalty", 1.5], {"temperature": 0, "repetition_penalty": 1.5}),
        (["--temperature", 0.5], {"temperature": 0.5, "top_k": 0, "top_p": 1}),
        (["--top-k", 5], {"temperature": 1, "top_k": 5}),
        pytest.param(["--top-p", 0.5], {"temperature": 1, "top_p": 0.5}, marks=pytest.mark.slow),
        pytest.param(["--min-p", 0.5], {"temperature": 1, "min_p": 0.5}, marks=pytest.mark.slow),
        (["--top-k", 5, "--temperature", 0], {"temperature": 0, "top_k": 5}),
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        pytest.param(["--dtype", "float16"], {"dtype": "float16"}, marks=pytest.mark.slow),
    ],
)
def test_options_reach_the_generation(arguments, expected, started):
    found = started(*arguments)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.slow
def test_density_of_a_policy_with_a_threshold_is_found_on_another_text(started, capsys):
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    arguments = ["--policy", "flexprefill", "--density", 0.8, "--set", "min_budget=64"]
    config = started("--prompt", prompt, *arguments)["policy"]
    assert config.gamma != 0.9 and config.min_budget == 64
    # Match whole lines: on a slow machine, progress messages come before.
    message = r"^gamma ([0-9.]+), .*measured density ([0-9.]+)"
    found = re.search(message, capsys.readouterr().err, re.MULTILINE)
    assert found is not None and float(found[1]) == config.gamma
    assert float(found[2]) == pytest.approx(0.8, abs=0.1)


@pytest.mark.slow
def test_chat_and_the_text_level_set_a_threshold_as_generate_does(started, model, monkeypatch):
    asked, policy = [], MInferenceConfig()

    def calibrate(params, tokens, lengths, **options):
        asked.append((tokens.shape, options.pop("model_config").num_layers, options))
        return calibration.Calibration(policy.with_threshold(0.25), 0.3, ())

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who walks?\n"))
    options = ["--policy", "minference", "--density", 0.3, "--max-new-tokens", 16]
    lm = language_model.LanguageModel.load(model, policy=policy, density=0.3, progress=False)
    configs = [started(*options)["policy"], started(*options, command="chat")["policy"], lm.policy]
    assert configs == [MInferenceConfig(scale=0.25)] * 3
    expected = (NUM_LAYERS, {"policy": policy, "density": 0.3})
    # Calibrate at the prompt's length, or at the context's where prompts are unknown.
    assert asked == [((1, size), *expected) for size in (512, NUM_BYTES, 512)]
    assert lm.with_policy(policy).policy == policy
    assert lm.with_policy(StreamingConfig(), density=0.3).policy == StreamingConfig(density=0.3)
    with pytest.raises(ValueError, match="density must be None"):
        lm.with_policy(Dense(), density=0.3)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(
    ("arguments", "expected", "warning"),
    [
        (["--policy", "dense", "--density", 0.5], Dense(), "--density has no effect with --policy"),
        (["--policy", "dense", "--preset", "paper"], Dense(), "--preset has no effect with"),
        (["--policy", "oracle", "--preset", "paper"], OracleConfig(), "with --policy oracle"),
        (["--preset", "released", "--density", 0.5], SketchWalkConfig.released(), "sets its own"),
    ],
)
def test_options_without_effect_warn(arguments, expected, warning, started, capsys):
    assert started(*arguments)["policy"] == expected
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Hi\n"),
        (["--chat"], "user: Hi\n\nassistant: "),
        (["--chat", "--system", "Be brief."], "system: Be brief.\nuser: Hi\n\nassistant: "),
    ],
)
def test_chat_template_is_applied_when_asked_for(arguments, expected, started):
    found = started("--prompt", "Hi\n", *arguments)
    tokens, length = found["prompt"]
    assert bytes(tokens[0, :length].tolist()).decode() == expected
    assert tokens.shape == (1, 64)


@pytest.mark.slow
def test_draws_follow_the_seed(model: Path, generate):
    first, again, other = (generate("--top-k", 50, "--seed", seed) for seed in (1, 1, 2))
    assert first["text"] == again["text"] != other["text"]
    tokens = expected_tokens(
        model, 16, sampling=Sampling(temperature=1.0, top_k=50), key=jax.random.key(1)
    )
    assert first["text"] == text_of(tokens)


def test_end_token_ends_the_text(tmp_path: Path, model: Path, generate):
    end = int(expected_tokens(model, 16)[0])
    write_model(tmp_path, generation_config={"eos_token_id": [end]})
    result = generate(model=tmp_path)
    assert (result["new_tokens"], result["finish_reason"]) == (1, "eos")
    assert result["tokens_per_s"] is None  # the first token has no rate


GENERATION_CONFIG = {"temperature": 0.5, "top_k": 9, "repetition_penalty": 1.5, "min_p": None}


@pytest.mark.parametrize(
    ("do_sample", "arguments", "expected"),
    [
        (True, [], (0.0, 0, 1.0)),
        (True, ["--generation-config"], (0.5, 9, 1.5)),
        (True, ["--generation-config", "--top-k", 3], (0.5, 3, 1.5)),
        (True, ["--generation-config", "--temperature", 0], (0.0, 9, 1.5)),
        (False, ["--generation-config"], (0.0, 0, 1.5)),
        (False, ["--generation-config", "--top-k", 3], (1.0, 3, 1.5)),
    ],
)
def test_generation_config_counts_when_asked_for(do_sample, arguments, expected, tmp_path, started):
    write_model(tmp_path, generation_config=GENERATION_CONFIG | {"do_sample": do_sample})
    found = started("--model", tmp_path, *arguments)
    assert (found["temperature"], found["top_k"], found["repetition_penalty"]) == expected


def test_saved_checkpoints_are_read(tmp_path: Path, model: Path, generate, sketchwalk):
    params, model_config = load(model)
    save(tmp_path / "saved", params, model_config)
    checkpoints.write_byte_tokenizer(tmp_path / "saved")
    assert generate(model=tmp_path / "saved")["text"] == generate()["text"]
    stored = json.loads(sketchwalk("info", "--model", tmp_path / "saved", "--json")[0])["model"]
    assert stored["stored_dtypes"] == ["float32"] and stored["stored_bytes"] > 0


def test_info_sizes_cache_and_parameters_from_headers(model: Path, sketchwalk, monkeypatch):
    monkeypatch.setattr(TensorFiles, "read", None)
    tensors = checkpoints.random_tensors(checkpoints.tiny_config(num_hidden_layers=NUM_LAYERS))
    size = sum(tensor.size for tensor in tensors.values())
    command = ("info", "--model", model, "--context", 130)
    found = json.loads(sketchwalk(*command, "--dtype", "bfloat16", "--json")[0])
    assert found["model"]["parameters"] == size
    assert found["model"]["loaded_bytes"] == 2 * size
    assert found["model"]["stored_dtypes"] == ["float32"]
    assert found["model"]["stored_bytes"] == (model / "model.safetensors").stat().st_size
    # Keys and values: 4 layers, 2 heads, 8 channels, whole blocks of 64 tokens.
    assert found["cache"]["key_value_bytes"] == 2 * 4 * 2 * 8 * 192 * 2
    # 4 of 8 channels: 4 bits per key of 3 blocks, a zero point and scale each; one block's keys.
    per_head = 3 * 64 * 4 // 2 + 3 * 4 * (2 + 1) + 64 * 4 * 2
    assert found["cache"]["statistics_bytes"] == 4 * 2 * per_head
    assert found["environment"]["implementation"] == "xla"
    assert found["environment"]["devices"] == ["cpu"]
    text = sketchwalk(*command)[0]
    assert f"{size:,}" in text and "130 tokens" in text and "512 tokens" in text
    assert f"JAX {jax.__version__}" in text


def test_info_counts_dense_layers_in_what_a_policy_keeps(tmp_path: Path, sketchwalk):
    checkpoints.write_checkpoint(tmp_path, num_hidden_layers=4, max_position_embeddings=65536)
    command = ("info", "--model", tmp_path, "--set", "dense_layers=1", "--density", "0.4", "--json")
    kept = json.loads(sketchwalk(*command)[0])["kept"]
    assert {phase: one["65536"] for phase, one in kept.items()} == pytest.approx(
        {"prefill": 0.4, "decode": 0.4}, abs=0.01
    )


def test_info_counts_the_experts_of_a_token(tmp_path: Path, sketchwalk):
    for layers, mlp, where in (([], "", ""), ([0], ", mlp 64", ", in 1 of 2 layers")):
        tensors = checkpoints.write_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=layers)
        size = sum(tensor.size for tensor in tensors.values())
        unused = sum(x.size for name, x in tensors.items() if re.search(r"experts\.[2-5]\.", name))
        text = sketchwalk("info", "--model", tmp_path)[0]
        assert f"2 of width 32{mlp}\n" in text
        assert f"experts         6 of width 16, 2 for each token{where}\n" in text
        assert f"{size:,}, {size - unused:,} for each token, " in text


def test_info_says_what_runs_for_prompts_tokens_and_selection(model: Path, sketchwalk, monkeypatch):
    command = ("info", "--model", model, "--dtype", "bfloat16")
    found = {}
    for capability in ("", "8.6", "9.0"):
        monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)  # noqa: B023
        here = json.loads(sketchwalk(*command, "--json")[0])["environment"]
        names = ("prompts", "tokens", "selection", "token_selection")
        parts = [here[name] for name in names]
        found[capability] = [one["implementation"] for one in parts]
        assert here["implementation"] == parts[0]["implementation"]
        assert here["why_not_mosaic_gpu"] == parts[0]["why_not_mosaic_gpu"]
    # Heads of 8 channels are too small for the decode kernel.
    assert found == {
        "": ["xla"] * 4,
        "8.6": ["mosaic_gpu", "xla", "mosaic_gpu", "mosaic_gpu"],
        "9.0": ["mosaic_gpu", "xla", "mosaic_gpu", "mosaic_gpu"],
    }
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "8.6")
    lines = [line.split(maxsplit=1) for line in sketchwalk(*command)[0].splitlines()[2:6]]
    assert [name for name, _ in lines] == ["prompts", "selection", "tokens", "selection"]
    assert lines[0][1] == lines[1][1] == lines[3][1] == "mosaic_gpu"
    assert lines[2][1].startswith("xla: it takes a head_dim of 64 or 128 in decode")
    other = sketchwalk(*command, "--policy", "quest", "--set", "token_budget=64")[0].splitlines()
    assert [line.split()[1].rstrip(":") for line in other[2:6]] == ["cudnn", "xla", "xla", "xla"]
    paper = sketchwalk(*command, "--preset", "paper")[0].splitlines()[5]
    assert "xla: it needs an NVIDIA GPU of compute capability 9.0" in paper


@pytest.mark.parametrize(("capability", "prompts"), [("9.0", "mosaic_gpu"), ("8.0", "cudnn")])
def test_info_says_what_reads_a_dense_prompt_as_long_as_the_context(
    capability, prompts, monkeypatch
):
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
    config = dataclasses.replace(tiny.MODEL, head_dim=64, max_position_embeddings=131072)
    found = info.describe_attention(Dense(), "prefill", config, "bfloat16")
    assert found["implementation"] == prompts


def test_without_a_model_the_bundled_one_is_taken(model: Path, sketchwalk, generate, monkeypatch):
    monkeypatch.setattr(options, "bundled_model", lambda: model)
    assert json.loads(sketchwalk("info", "--json")[0])["model"]["directory"] == str(model)
    out = sketchwalk("generate", "--prompt", PROMPT, "--max-new-tokens", 16, "--json")[0]
    assert json.loads(out)["text"] == generate()["text"]


@pytest.mark.parametrize("command", [[], ["chat"], ["demo"], ["eval"], ["generate"], ["info"]])
def test_help_names_the_options_and_shows_flags_as_flags(command, sketchwalk):
    text = sketchwalk(*command, "--help")[0]
    with_values = [line for line in text.splitlines() if "<bool>" in line]
    assert all("--help" in line for line in with_values) and "--help" in text


def test_chat_answers_every_line_of_a_pipe(model: Path, sketchwalk, monkeypatch):
    """Chat passes lines to the text level, whose tests define a turn."""
    piped = io.TextIOWrapper(io.BytesIO(b"Who walks?\n\nAnd then?\n"))
    monkeypatch.setattr(sys, "stdin", piped)
    few = ["--max-new-tokens", 4, "--policy", "dense"]
    out, _ = sketchwalk("chat", "--model", model, "--system", "Be brief.", *few)
    lm = language_model.LanguageModel.load(model, policy=Dense(), progress=False)
    talk = lm.conversation(system="Be brief.", max_new_tokens=4)
    assert out == "".join(f"{talk.send(text)}\n" for text in ("Who walks?", "And then?"))


def test_commands_and_options_of_the_readme_exist(repository: Path, sketchwalk):
    readme = (repository / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"sketchwalk ([a-z]+)((?: --?[a-z-]+(?: [^-`\n][^ `\n]*)?)*)", readme)
    assert {"chat", "demo", "generate", "info", "eval"} <= {command for command, _ in found}
    for command, arguments in found:
        text = sketchwalk(command, "--help")[0]
        for option in re.findall(r"--[a-z-]+", arguments):
            assert re.search(rf"{option}\b", text), f"sketchwalk {command} {option}"


def test_table_of_an_evaluation_has_a_line_for_every_policy_density_and_phase():
    policies = {DENSE: (1.0, 1.0, 0.0), ("streaming", None): (0.5, 0.8, 0.1)}
    options = {"densities": (0.3, 0.5), "phases": ("prefill",)}
    rows = make_rows(policies=policies, lengths=(512, 1024), **options)
    short, long = evaluate._quality_table(rows).split("\n\n")
    lines = short.splitlines()
    assert (lines[0], long.splitlines()[0]) == ("512 tokens", "1024 tokens")
    tasks = "needle keys queries values variables mid votes loss"
    assert lines[1].split() == f"policy density measured sparse in {tasks} all".split()
    found = [line.split() for line in lines[2:]]
    assert [line[0] for line in found] == ["dense", "streaming", "streaming"]
    assert [line[1] for line in found[1:]] == ["0.3", "0.5"]
    dense = rows_with(rows, label="dense", tokens=512)
    loss, every = pool(rows_with(dense, task="text_loss")), pool(dense)
    assert found[0][-2:] == [f"{loss.text_loss:.2f}", f"{every.exact:.2f}"]
