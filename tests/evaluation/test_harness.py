"""The adapter for the lm-evaluation-harness gives the model's results and refuses what it lacks."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import checkpoints
import jax
import numpy as np
import pytest
from scipy import special
from tolerances import tolerance

from sketchwalk_jax import forward, generate, load
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.policies import POLICIES, by_name, has_threshold

NUM_LAYERS, SIZE, WIDTH = 3, 16, 176
TEXTS = ("Walk with me. " * 9 + "Now", "A sketch", "Scout before you attend, " * 4 + "and")
BLOCKS = {"block_size": SIZE, "density": 0.4}


@pytest.fixture(scope="module")
def harness():
    """The module under test, where lm-eval is installed."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    from sketchwalk_jax.evaluation import harness

    return harness


@pytest.fixture
def without_harness(monkeypatch):
    """The module with stubs for lm-eval, to test its own code."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    names += ("lm_eval.models", "lm_eval.models.utils", "lm_eval.utils")
    modules = {name: ModuleType(name) for name in names}
    modules["lm_eval.api.model"].TemplateLM = object
    modules["lm_eval.api.registry"].register_model = lambda name: lambda made: made
    modules["lm_eval.models.utils"].normalize_gen_kwargs = None
    for name in ("get_rolling_token_windows", "make_disjoint_window"):
        setattr(modules["lm_eval.utils"], name, None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "sketchwalk_jax.evaluation.harness", raising=False)
    yield importlib.import_module("sketchwalk_jax.evaluation.harness")
    # Import the module again, to bind the real harness if there is one.
    monkeypatch.undo()
    sys.modules.pop("sketchwalk_jax.evaluation.harness", None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes a model of three layers over bytes; random weights seldom draw its end tokens."""
    directory = tmp_path_factory.mktemp("checkpoint")
    checkpoints.write_checkpoint(directory, tokenizer=True, num_hidden_layers=NUM_LAYERS)
    return str(directory)


def requests(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


def encoded(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def padded(text):
    """Pads a text as a batch of one; returns it and its length. One width means one program."""
    tokens = encoded(text)
    return np.pad(tokens, (0, WIDTH - len(tokens)))[None], np.array([len(tokens)], np.int32)


def check_score(checkpoint, policy, text, continuation, logprob, is_best):
    """Checks a continuation's log-likelihood against the logits of `forward`."""
    params, model_config = load(checkpoint)
    tokens, lengths = padded((text + continuation)[:-1])
    options = {"lengths": lengths, "model_config": model_config, "policy": policy}
    logits = np.asarray(forward(params, tokens, **options)[0, : lengths[0]], np.float64)
    targets = encoded(continuation)
    logprobs = special.log_softmax(logits[-len(targets) :], axis=-1)
    wanted = logprobs[np.arange(len(targets)), targets].sum()
    np.testing.assert_allclose(logprob, wanted, **tolerance("logits"))
    assert is_best == bool((logprobs.argmax(-1) == targets).all())
    return logits


@pytest.mark.parametrize(
    ("policy", "phase"),
    [
        ("dense", "both"),
        ("sketchwalk", "prefill"),
        pytest.param("quest", "both", marks=pytest.mark.slow),
    ],
)
def test_text_is_what_generate_writes_one_by_one(harness, checkpoint, policy, phase):
    lm = harness.SketchWalkLM(checkpoint, batch_size=2, policy=policy, phase=phase, **BLOCKS)
    assert lm.policy == by_name(policy, **BLOCKS)
    params, model_config = load(checkpoint)
    options = {"model_config": model_config, "policy": lm.policy, "phase": phase}
    counts = (9, 5 if policy == "dense" else 9, 9)
    asked = [(text, {"max_gen_toks": n}) for text, n in zip(TEXTS, counts, strict=True)]
    found = lm.generate_until(requests(*asked), disable_tqdm=True)
    attended, causal = 0.0, 0.0
    for text, count, answer in zip(TEXTS, counts, found, strict=True):
        tokens, lengths = padded(text)
        out = generate(params, tokens, lengths=lengths, max_new_tokens=count, **options)
        wanted = bytes(np.asarray(out.tokens)[0, : int(out.lengths[0])].astype(np.uint8))
        assert answer == wanted.decode(errors="replace")
        density = out.measured_density
        pairs = density.prefill_pairs + density.decode_pairs
        attended += np.asarray(pairs, np.float64).mean(0).sum()
        causal += float(density.prefill_causal[0] + density.decode_causal[0])
    # Padding of the last batch is not counted.
    total = {phase: pairs for phase, (_, pairs) in lm._pairs.items()}
    assert sum(total.values()) == causal
    density = sum(lm.measured_density()[x]["all_layers"] * total[x] for x in total) / causal
    assert density == pytest.approx(attended / causal, rel=1e-5)
    assert ("sparse_layers" in lm.measured_density()["decode"]) == (policy != "dense")


def test_text_ends_before_the_first_stop_string_and_options_set_how_it_is_drawn(
    harness, checkpoint
):
    lm = harness.SketchWalkLM(checkpoint, policy="dense", max_gen_toks=12)
    (whole,) = lm.generate_until(requests((TEXTS[0], {"until": []})), disable_tqdm=True)
    assert len(whole) > 4
    stop = whole[3:5]
    (cut,) = lm.generate_until(requests((TEXTS[0], {"until": [stop, ""]})), disable_tqdm=True)
    assert cut == whole[: whole.index(stop)]
    greedy = {"until": [], "do_sample": False, "temperature": 1.0, "top_p": 0.9}
    assert lm.generate_until(requests((TEXTS[0], greedy)), disable_tqdm=True) == [whole]
    drawn = {"until": [], "do_sample": True, "temperature": 3.0, "max_gen_toks": 12}
    some = lm.generate_until(requests(*[(TEXTS[0], drawn)] * 3), disable_tqdm=True)
    assert len(set(some)) == 3


@pytest.mark.parametrize("truncation", ["left", "middle"])
def test_long_prompts_lose_what_the_option_says(harness, checkpoint, truncation):
    lm = harness.SketchWalkLM(
        checkpoint, policy="dense", max_length=40, max_gen_toks=8, truncation=truncation
    )
    text = TEXTS[0]
    kept = text[-32:] if truncation == "left" else text[:16] + text[-16:]
    found = lm.generate_until(requests((text, {}), (kept, {})), disable_tqdm=True)
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="leave room for the answer, got 129 tokens, with 40 to"):
        lm.generate_until(requests((text, {"max_gen_toks": 40})), disable_tqdm=True)


@pytest.mark.parametrize("policy", ["dense", "sketchwalk"])
def test_log_likelihoods_are_those_of_the_logits(harness, checkpoint, policy):
    lm = harness.SketchWalkLM(checkpoint, policy=policy, batch_size=2, max_length=160, **BLOCKS)
    pairs = [(TEXTS[0], "and on"), (TEXTS[1], "e" * 40), ("", "alone"), (TEXTS[2], " ")]
    found = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, continuation), score in zip(pairs, found, strict=True):
        text = context or "\x01"  # byte 1 begins and ends texts here
        logits = check_score(checkpoint, lm.policy, text, continuation, *score)
        best = logits[-len(continuation)].argmax()
        asked = requests((text, bytes([best]).decode("latin-1")))
        if best < 128:
            assert lm.loglikelihood(asked, disable_tqdm=True)[0][1]


def test_rolling_log_likelihoods_count_every_token_once(harness, checkpoint):
    lm = harness.SketchWalkLM(checkpoint, policy="dense", max_length=48)
    text = TEXTS[2]
    found = lm.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    params, model_config = load(checkpoint)
    tokens = np.concatenate([[1], encoded(text)]).astype(np.int32)
    wanted = 0.0
    for begin in range(0, len(text), 48):  # the last window starts earlier to be whole
        end = min(begin + 48, len(text))
        window = tokens[max(0, end - 48) : end]
        logits = forward(params, window[None], model_config=model_config)[0]  # logits of 48 tokens
        logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
        targets = tokens[begin + 1 : end + 1]
        wanted += logprobs[np.arange(-len(targets), 0), targets].sum()
    np.testing.assert_allclose(found, [wanted], **tolerance("logits"))


def test_every_policy_has_its_name_and_what_it_needs_of_the_model(harness, checkpoint, tmp_path):
    for policy in POLICIES:
        density = {} if has_threshold(by_name(policy)) else {"density": 0.4}
        lm = harness.SketchWalkLM(checkpoint, policy=policy, max_length=256, **density)
        info = json.loads(json.dumps(lm.get_model_info()))
        assert type(lm.policy) is type(by_name(policy)) and info["phase"] == "both"
        assert info["policy_fields"].get("density") == (
            None if policy == "dense" else density.get("density")
        )
        assert ("thresholds" in info["policy_fields"]) == (policy == "adamas")
    given = {"policy": "adamas", "thresholds": [-1.0, 0.0, 1.0]}
    assert harness.SketchWalkLM(checkpoint, **given).policy.thresholds == (-1.0, 0.0, 1.0)
    # A density calibrates a threshold.
    checkpoints.write_checkpoint(tmp_path, tokenizer=True, max_position_embeddings=2048)
    options = {"policy": "minference", "density": 0.9, "block_size": SIZE}
    calibrated = harness.SketchWalkLM(str(tmp_path), **options).policy
    assert calibrated.scale != by_name("minference").scale


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "policy must be one of"),
        ({"policy": "quest", "phase": "prefill"}, "phase must be 'both' or 'decode'"),
        ({"density": 2.0}, "density must be in"),
        ({"pages": 3}, "sketchwalk must be given fields that it has"),
        ({"batch_size": "auto"}, "batch_size must be a positive integer, got 'auto'"),
        ({"max_length": 1024}, "max_length must be from 2 to the model's context of 512"),
        ({"truncation": "right"}, "truncation must be one of"),
    ],
)
def test_wrong_arguments_are_named(harness, checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        harness.SketchWalkLM(checkpoint, **options)


@pytest.mark.unchecked
def test_log_likelihoods_of_what_is_dense_in_prefill_are_refused(harness, checkpoint):
    for options in ({"policy": "quest"}, {"policy": "sketchwalk", "phase": "decode"}):
        lm = harness.SketchWalkLM(checkpoint, **options)
        with pytest.raises(NotImplementedError, match="selects in prefill, or densely"):
            lm.loglikelihood(requests(("a", "b")), disable_tqdm=True)


def test_conversations_follow_the_template(harness, checkpoint):
    lm = harness.SketchWalkLM(checkpoint, policy="dense")
    chat = [{"role": "user", "content": "Who walks?"}]
    assert lm.apply_chat_template(chat) == "user: Who walks?\nassistant: "
    chat.append({"role": "assistant", "content": "You"})
    begun = lm.apply_chat_template(chat, add_generation_prompt=False)
    assert begun == "user: Who walks?\nassistant: You"
    assert "{% for m in messages %}" in lm.chat_template(True)
    assert lm.tokenizer_name.endswith(checkpoint.rsplit("/", 1)[1])


@pytest.mark.slow
@pytest.mark.usefixtures("harness")
def test_the_harness_runs_tasks_from_its_own_command_line(
    checkpoint, tmp_path, program_environment
):
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    docs = [{"question": text, "answer": "e"} for text in TEXTS]
    (tasks / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    (tasks / "walk.yaml").write_text(
        f"task: walk\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tasks / 'docs.jsonl'}\noutput_type: generate_until\ntest_split: test\n"
        "doc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs:\n  max_gen_toks: 4\n  until: []\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    command = [sys.executable, "-m", "sketchwalk_jax.evaluation.harness", "run"]
    command += ["--model", "sketchwalk", "--tasks", "walk", "--include_path", str(tasks)]
    arguments = f"pretrained={checkpoint},policy=quest,density=0.4,phase=decode,min_pages=2"
    command += ["--model_args", arguments, "--output_path", str(tmp_path / "out")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=program_environment
        | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "HOME": os.environ["HOME"]},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert "exact_match,none" in results["results"]["walk"]
    config = results["config"]
    assert config["policy_fields"] == {"density": 0.4, "min_pages": 2}
    assert config["measured_density"]["prefill"]["all_layers"] == 1.0
    assert config["measured_density"]["decode"]["sparse_layers"] < 1.0


def test_documented_commands_pass_what_the_model_takes(harness, repository):
    page = (repository / "benchmarks" / "appendix" / "paper.md").read_text(encoding="utf-8")
    commands = page.partition("<!-- not run -->\n```bash\n")[2].partition("```")[0]
    given = re.findall(r"--model_args (\S+)", commands)
    assert len(given) == 2
    known = inspect.signature(harness.SketchWalkLM).parameters
    for arguments in given:
        names = {one.partition("=")[0] for one in arguments.split(",")}
        assert {"pretrained", "policy", "density", "max_length"} <= names <= set(known)
    for policies in re.findall(r"for policy in (.*); do", commands):
        assert set(policies.split()) <= set(POLICIES)


def test_batches_are_filled_up_and_unknown_options_are_named(without_harness):
    found = list(without_harness.batches([4, 7, 1], 2))
    assert found == [([4, 7], [4, 7]), ([1], [1, 1])]
    known = {"until": ["x"], "max_gen_toks": 3, "do_sample": False}
    read = without_harness.GenerationOptions.read
    assert read(known).sampling == (("temperature", 0.0),)
    assert read(known | {"until": ["x", ""]}).cut("axbx") == "a"
    with pytest.raises(ValueError, match=r"generation_kwargs must be among .*\['num_beams'\]"):
        read(known | {"num_beams": 4})


@pytest.mark.slow
def test_scores_are_those_of_the_logits(without_harness, checkpoint):
    params, model_config = load(checkpoint)
    policy = by_name("sketchwalk", **BLOCKS, min_tokens=4 * SIZE)
    pairs = [(TEXTS[0], "and on"), (TEXTS[2], " ")]
    tokens, lengths = (
        np.concatenate(parts)
        for parts in zip(*(padded((one + other)[:-1]) for one, other in pairs), strict=True)
    )
    *scores, density = without_harness.score_continuations(
        params,
        tokens,
        lengths,
        [encoded(other).tolist() for _, other in pairs],
        settings=Settings(model_config=model_config, policy=policy),
    )
    for pair, logprob, is_best in zip(pairs, *scores, strict=True):
        check_score(checkpoint, policy, *pair, logprob, is_best)
    assert np.all(np.asarray(density.prefill)[2:] < 1)


def test_what_is_missing_is_named(run_python):
    code = (
        "import sys\nsys.modules['lm_eval'] = None\n"
        "try:\n    import sketchwalk_jax.evaluation.harness\n"
        "except ImportError as error:\n    print(error)"
    )
    assert 'pip install "sketchwalk-jax[eval]"' in run_python(code)
