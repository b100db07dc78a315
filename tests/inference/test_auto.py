"""`Auto`: its choice from measurements, the program that then runs, and the measurements."""

import dataclasses
import functools
import importlib
import json
from pathlib import Path

import checkpoints
import chex
import jax
import jax.numpy as jnp
import pytest
import tiny
from tiny import MODEL, POLICIES, params, prompts

import sketchwalk_jax as sw
from sketchwalk_jax import Auto, Dense
from sketchwalk_jax.cli import main
from sketchwalk_jax.inference import generation
from sketchwalk_jax.inference.auto import BreakEven, default_policy
from sketchwalk_jax.language_model import LanguageModel
from sketchwalk_jax.pallas_kernels import dispatch
from sketchwalk_jax.plan import PHASES, Loss
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.quest import QuestConfig
from sketchwalk_jax.policies.streaming import StreamingConfig

PAPER = POLICIES["paper"]  # density 0.4, blocks of 16 tokens
PREFILL = BreakEven(
    device="cpu",
    phase="prefill",
    policy="SketchWalkConfig",
    density=0.4,
    block_size=16,
    width=MODEL.num_heads * MODEL.head_dim,
    tokens=100,
    longest=400,
)
DECODE = dataclasses.replace(PREFILL, phase="decode", tokens=200)
TABLE = (PREFILL, DECODE)


def table_of(tokens=(100, 200), **changes):
    """Returns the table with these break-evens of prefill and decode, and other changes."""
    pairs = zip(TABLE, tokens, strict=True)
    return tuple(dataclasses.replace(one, tokens=at, **changes) for one, at in pairs)


NEVER = table_of((None, None))
QUEST = {  # a policy of decode only
    "policy": QuestConfig(block_size=16, density=0.3),
    "table": table_of(policy="QuestConfig"),
}


def chosen(tokens, table=TABLE, *, policy=PAPER, batch=1, **options):
    return Auto(policy, table).choose(MODEL, batch=batch, tokens=tokens, **options)


def what(found):
    return ("dense" if isinstance(found.policy, Dense) else "sparse"), found.phase


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (99, {}, ("dense", "both")),
        (100, {}, ("sparse", "prefill")),
        (199, {}, ("sparse", "prefill")),
        (200, {}, ("sparse", "both")),
        (100, {"max_new_tokens": 200}, ("sparse", "both")),  # 100 tokens longer on average
        (99, {"max_new_tokens": 202}, ("sparse", "decode")),
        (200, {"phase": "prefill"}, ("sparse", "prefill")),
        (199, {"phase": "decode"}, ("dense", "both")),
        (99, {"policy": Dense(block_size=16)}, ("dense", "both")),
        (400, {"table": NEVER}, ("dense", "both")),
        (150, QUEST, ("dense", "both")),
        (200, QUEST, ("sparse", "both")),
    ],
)
def test_a_phase_is_sparse_from_its_break_even_on(tokens, options, expected):
    found = chosen(tokens, **options)
    assert what(found) == expected
    assert found.policy.block_size == 16
    if options is QUEST:
        assert len(found.reasons) == 1
    if options.get("table") is NEVER:
        assert "sparse did not pay up to 400" in found.reasons[0]


def test_the_nearest_measurement_counts():
    others = (
        dataclasses.replace(PREFILL, density=0.5, tokens=40),
        dataclasses.replace(PREFILL, width=128, tokens=60),
        dataclasses.replace(PREFILL, device="gpu", tokens=80),
    )
    table = (*others, PREFILL)

    def found(**options):
        policy = dataclasses.replace(PAPER, **options)
        return Auto(policy, table).find("prefill", MODEL).tokens

    assert found() == 100
    assert found(density=0.1) == 100  # fewer blocks cannot be slower
    assert found(density=0.45) == 40
    wider = dataclasses.replace(MODEL, num_heads=8)
    assert Auto(PAPER, table).find("prefill", wider).tokens == 60
    narrow = dataclasses.replace(MODEL, num_heads=2, num_kv_heads=1)
    wide = (dataclasses.replace(PREFILL, width=4096), dataclasses.replace(PREFILL, width=8192))
    assert Auto(PAPER, wide).find("prefill", narrow) is wide[0]
    assert "queries 4,096 wide" in Auto(PAPER, wide).choose(narrow, batch=1, tokens=9).reasons[0]
    assert Auto(PAPER, table).find("prefill", MODEL, device="gpu").tokens == 80


def test_decode_is_as_wide_as_the_keys_of_all_sequences():
    """A token's time goes to reading keys and values; a prompt's does not depend on the batch."""
    width = MODEL.num_kv_heads * MODEL.head_dim
    assert width < PREFILL.width
    table = tuple(
        dataclasses.replace(one, width=times * width, tokens=tokens)
        for one in TABLE
        for times, tokens in ((1, 1), (2, 2), (8, None), (16, 3))
    )

    def found(batch, phase="decode", model_config=MODEL):
        return Auto(PAPER, table).find(phase, model_config, batch=batch).tokens

    # Between two widths the later break-even counts, and never is latest.
    assert [found(batch) for batch in (1, 2, 3, 8, 9, 16, 64)] == [1, 2, None, None, None, 3, 3]
    queries = PREFILL.width // width
    assert [found(batch, "prefill") for batch in (1, 64)] == [queries] * 2
    every = dataclasses.replace(MODEL, num_kv_heads=MODEL.num_heads)
    assert found(1, model_config=every) == queries
    reasons = Auto(PAPER, table).choose(MODEL, batch=16, tokens=401).reasons
    assert f"keys of all sequences {16 * width} wide" in reasons[1]


def test_models_with_experts_have_break_evens_of_their_own():
    mixture = tiny.EXPERTS
    assert Auto(PAPER, TABLE).find("decode", mixture) == DECODE  # no other was measured
    own = dataclasses.replace(DECODE, has_experts=True, tokens=300)
    table = (*TABLE, own)
    assert [Auto(PAPER, table).find("decode", x) for x in (mixture, MODEL)] == [own, DECODE]


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ((), {}, "no measurement for this device, cpu"),
        ((DECODE,), {}, "no measurement for this device, cpu"),
        (TABLE, {"policy": StreamingConfig(block_size=16)}, "no measurement of StreamingConfig"),
        (TABLE, {"policy": dataclasses.replace(PAPER, block_size=32)}, "with blocks of 32"),
        (TABLE, {"policy": dataclasses.replace(PAPER, density=0.9)}, "a density of 0.9 or more"),
        (TABLE, {"is_spread": True}, "no measurement on several devices"),
        (NEVER, {}, "no measurement beyond 400 tokens"),
    ],
)
def test_without_a_measurement_the_sparse_policy_runs_and_says_so(table, options, message):
    found = chosen(401, table, **options)
    assert what(found) == ("sparse", "both")
    assert found.policy is options.get("policy", PAPER)
    assert message in found.reasons[0] and "prefill sparse: no measurement" in found.reasons[0]


def test_a_phase_that_keeps_all_keys_is_dense():
    unknown = "sparse: no measurement for this device, cpu"
    every = "dense: the policy would keep all keys"
    for tokens, new, phase, prefill, decode in (
        (1280, 768, "both", every, every),
        (1280, 769, "decode", every, unknown),
        (1281, 0, "prefill", unknown, every),
        (2048, 0, "both", unknown, unknown),
    ):
        found = Auto(measured=()).choose(MODEL, batch=1, tokens=tokens, max_new_tokens=new)
        assert found.reasons == (f"prefill {prefill}", f"decode {decode}")
        assert found.phase == phase
    full = sw.SketchWalkConfig.recommended(density=1.0)
    assert what(Auto(full, ()).choose(MODEL, batch=1, tokens=2**20)) == ("dense", "both")


def test_gpus_without_measurements_get_what_is_expected_of_their_group(monkeypatch):
    monkeypatch.setattr("sketchwalk_jax.inference.auto.device_kind", lambda: "some GPU")
    group = dataclasses.replace(PREFILL, device="GPUs from Ampere on", width=4096)
    never = dataclasses.replace(group, tokens=None)
    older = dataclasses.replace(group, device="GPUs before Ampere", tokens=10)
    table = (never, dataclasses.replace(group, phase="decode"), older)
    for capability, expected in (
        ("8.6", [("dense", "both"), ("sparse", "decode"), ("sparse", "decode")]),
        ("7.5", [("sparse", "both")] * 3),  # no measurement of decode
        ("9.0", [("sparse", "both")] * 3),  # no measurement
        ("", [("sparse", "both")] * 3),
    ):
        monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)  # noqa: B023
        assert [what(chosen(tokens, table)) for tokens in (99, 100, 401)] == expected
        own = (*table, dataclasses.replace(PREFILL, device="some GPU", tokens=500))
        assert what(chosen(401, own))[1] in ("decode", "both")
        reasons = chosen(401, table).reasons
        assert ("expected, not measured" in reasons[0]) == (capability in ("7.5", "8.6"))
        assert "prefill dense" in chosen(401, own).reasons[0]


@pytest.mark.interpreted
@pytest.mark.parametrize("capability", ["8.0", "7.5", "9.0"])
def test_the_default_is_sparse_where_that_is_expected_to_pay(capability, monkeypatch):
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
    monkeypatch.setattr("sketchwalk_jax.inference.auto.device_kind", lambda: "some GPU")
    assert default_policy(MODEL) == Auto(sw.SketchWalkConfig.recommended())
    prompt = jax.ShapeDtypeStruct((1, 2100), jnp.int32)
    model_config = dataclasses.replace(MODEL, max_position_embeddings=4096)
    call = functools.partial(sw.generate, model_config=model_config, max_new_tokens=1)
    choice = jax.eval_shape(lambda x: call(params(), x), prompt).choice
    assert choice.phase != "prefill" and "prefill dense: 2,100 tokens" in choice.reasons[0]


def test_a_loss_that_no_density_keeps_to_is_dense():
    policy = sw.SketchWalkConfig.recommended(max_kl=0.1)
    found = Auto(policy, ()).choose(MODEL, batch=1, tokens=2**20)
    assert what(found) == ("sparse", "decode")
    assert found.reasons[0] == "prefill dense: the policy would keep all keys"
    strict = dataclasses.replace(policy, max_kl=1e-6)
    assert what(Auto(strict, ()).choose(MODEL, batch=1, tokens=2**20)) == ("dense", "both")


def test_each_phase_is_looked_up_at_its_own_density():
    losses = tuple(
        Loss(phase, tokens, density, kept=density, kl=0.001, most=0.001, same=1.0)
        for phase, tokens, density in (
            ("prefill", 4096, 0.4),
            ("prefill", 16384, 0.2),
            ("decode", 4096, 0.1),
        )
    )
    plan = dataclasses.replace(tiny.plan((0.1, 0.5), *((0.5, 0.1),) * 4), model_losses=losses)
    policy = sw.SketchWalkConfig.recommended(max_kl=0.1, plan=plan, block_size=16)
    assert policy.density_at("decode", 20) == policy.density == 0.1
    assert policy.density_at("prefill", 16384) == 0.4
    # 0.4 of the first quarter of the pairs, and 0.2 of the others.
    assert policy.density_at("prefill", 32768) == pytest.approx(0.25)
    assert sw.SketchWalkConfig.recommended(density=2 / 3).density_at("prefill", 4096) == 2 / 3
    table = tuple(
        dataclasses.replace(one, policy="RecommendedConfig", density=density, tokens=tokens)
        for one in TABLE
        for density, tokens in ((0.1, 1), (0.3, None))
    )
    find = Auto(policy, table).find
    assert [find(one, MODEL, tokens=32768).density for one in PHASES] == [0.3, 0.1]
    # What is denser than all that was measured does not pay where the densest does not.
    assert find("prefill", MODEL, tokens=300).density == 0.3
    assert "density of 0.4 or more" in find("prefill", MODEL, tokens=16384)


def test_a_phase_that_keeps_all_keys_from_some_position_on_is_dense():
    losses = tuple(
        Loss("decode", tokens, 0.2, kept=0.2, kl=kl, most=kl, same=1.0)
        for tokens, kl in ((4096, 0.001), (8192, 1.0))
    )
    plan = dataclasses.replace(tiny.plan((0.1, 0.5), *((0.5, 0.1),) * 4), model_losses=losses)
    policy = sw.SketchWalkConfig.recommended(max_kl=0.1, plan=plan)
    assert policy.least_densities("decode") == ((0, 0.2), (4096, 1.0))
    for tokens, new, phase in ((10_000, 8, "both"), (2_000, 3_000, "decode"), (3_000, 8, "decode")):
        found = Auto(policy, ()).choose(MODEL, batch=1, tokens=tokens, max_new_tokens=new)
        assert (found.phase, isinstance(found.policy, Dense)) == (phase, phase == "both")
    every = sw.SketchWalkConfig.recommended(density=1.0, dense_layers=MODEL.num_layers)
    assert what(Auto(every, ()).choose(MODEL, batch=1, tokens=10_000)) == ("dense", "both")


@pytest.mark.slow
def test_room_for_later_turns_counts_like_tokens():
    """Later turns continue with the policy of the first one."""
    weights, (prompt, _) = params(), prompts(40)
    call = {"model_config": MODEL, "policy": Auto(PAPER, TABLE), "max_new_tokens": 3}
    for room, policy in ((None, Dense), (60, Dense), (500, type(PAPER))):
        found = generation.generate(weights, prompt, **call, max_tokens=room)
        assert isinstance(found.choice.policy, policy)


@pytest.mark.unchecked
def test_it_wraps_a_policy_and_stands_for_none_elsewhere():
    with pytest.raises(ValueError, match="sparse must be a policy"):
        Auto("quest")
    with pytest.raises(ValueError, match="phase must be one of"):
        chosen(1, phase="all")
    with pytest.raises(ValueError, match="policy must be a policy"):
        sw.init_cache(MODEL, Auto(), batch=1, max_tokens=64)
    weights, (prompt, _) = params(), prompts(20)
    with pytest.raises(ValueError, match="policy must be a policy"):
        sw.forward(weights, prompt, model_config=MODEL, policy=Auto())
    with pytest.raises(ValueError, match=r"'auto'; sketchwalk_jax\.Auto takes a policy"):
        by_name("auto")
    with pytest.raises(ValueError, match="must be a Cache"):
        sw.generate(
            weights, prompt, model_config=MODEL, policy=Auto(), max_new_tokens=1, cache="cache"
        )


# Runs.


def run(config, *, tokens=40, **options):
    options = {"max_tokens": None if "cache" in options else 128} | options
    call = {"model_config": MODEL, "policy": config, "max_new_tokens": 3} | options
    return generation.generate(params(), prompts(tokens)[0], **call)


@pytest.mark.parametrize(
    ("breaks", "given", "phase"),
    [
        ((41, 42), Dense(block_size=16), "both"),
        pytest.param((40, 42), PAPER, "prefill", marks=pytest.mark.slow),
        pytest.param((41, 41), PAPER, "decode", marks=pytest.mark.slow),
        pytest.param((40, 41), PAPER, "both", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_policy_that_it_chooses_and_its_programs(breaks, given, phase):
    auto = Auto(PAPER, table_of(breaks))
    expected = run(given, phase=phase, max_tokens=None)
    programs = generation._start._cache_size(), generation._continue._cache_size()
    found = run(auto, max_tokens=None)
    assert (generation._start._cache_size(), generation._continue._cache_size()) == programs
    assert (found.choice.policy, found.choice.phase) == (given, phase)
    assert expected.choice is None
    chex.assert_trees_all_equal(dataclasses.replace(found, choice=None), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(40, 1000), (1000, 1)])
def test_a_cache_goes_on_as_it_was_made(first, then):
    """More tokens would make it sparse, or fewer dense, but the cache decides."""
    begun = run(Auto(PAPER, table_of((first, first), longest=first)))
    found = run(Auto(PAPER, table_of((then, then), longest=then)), cache=begun.cache, tokens=20)
    assert type(found.choice.policy) is type(begun.choice.policy)
    assert found.choice.reasons[0].endswith("the cache was made so")


@pytest.mark.slow
def test_streams_and_texts_say_what_was_chosen(tmp_path):
    checkpoints.write_checkpoint(tmp_path, tokenizer=True)
    own = {"policy": "RecommendedConfig", "density": 1.0, "block_size": 64, "width": 32}
    auto = Auto(measured=table_of((None, None), **own, longest=512))
    lm = LanguageModel.load(tmp_path, policy=auto, density=0.3, progress=False)
    assert lm.policy.sparse == sw.SketchWalkConfig.recommended(density=0.3)
    pieces = lm.stream("Walk with the ", max_new_tokens=4)
    dense = lm.with_policy(Dense())
    assert "".join(pieces) == dense.generate("Walk with the ", max_new_tokens=4)
    assert pieces.choice.policy == Dense() and len(pieces.choice.reasons) == 2
    prompts = ["Walk with the ", "sketch"]
    assert lm.generate(prompts, max_new_tokens=4) == dense.generate(prompts, max_new_tokens=4)


# The command line.


@pytest.fixture
def model(tmp_path):
    checkpoints.write_checkpoint(tmp_path / "model", tokenizer=True)
    return tmp_path / "model"


def test_the_command_line_says_what_it_chose(model, capsys, monkeypatch):
    rows = table_of((None, None), policy="RecommendedConfig", width=32, block_size=64)
    monkeypatch.setattr("sketchwalk_jax.inference.auto.read_break_evens", lambda: rows)
    command = ["generate", "--model", str(model), "--prompt", "Walk", "--max-new-tokens", "4"]
    assert main([*command, "--policy", "auto", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["policy"], found["chosen"], found["preset"]) == ("auto", "Dense", "recommended")
    assert found["measured_density"] == 1.0 and len(found["reasons"]) == 2
    assert err.splitlines()[0] == f"auto: {found['reasons'][0]}"
    info = ["info", "--model", str(model), "--set", "min_tokens=64"]
    assert main([*info, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["break_even"]
    size = "keys of all sequences 32 wide"
    found = {"tokens": None, "longest": 400, "size": size, "is_expected": False, "problem": None}
    assert shown["decode"] == found
    assert main(info) == 0
    assert "nowhere up to 400 tokens" in (text := capsys.readouterr().out)
    assert "(measured with queries 32 wide)" in text
    assert main([*info, "--density", "0.9"]) == 0
    assert "decode pays     no measurement of a density of 0.9" in capsys.readouterr().out
    assert main(info[:3]) == 0
    assert "decode pays     nowhere: it keeps all keys up to 512" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [("eval", "--policy must name what is measured, got 'auto'"), ("demo", "--policy auto is")],
)
def test_what_compares_refuses_it(command, message, model, capsys):
    assert main([command, "--model", str(model), "--policy", "auto"]) == 2
    assert message in capsys.readouterr().err


# The measurements.


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("break_even")


def test_a_break_even_is_where_no_longer_length_gains_less(benchmark):
    ratios = {512: 0.9, 1024: 1.1, 2048: 0.99, 4096: 1.0, 8192: 2.0}
    assert [benchmark.least_tokens(ratios, gain) for gain in (1.0, 1.1)] == [4096, 8192]
    assert benchmark.least_tokens({512: 1.5, 1024: 1.0}, 1.0) == 512
    assert benchmark.least_tokens({512: 1.5, 1024: 0.99}, 1.0) is None


@pytest.fixture
def found(benchmark, tmp_path):
    """Returns the break-evens of results as `end_to_end.py` writes them."""

    def found(rows, name="end_to_end", **meta):
        meta = {"device": "NVIDIA H200", "sources": "new"} | meta
        (tmp_path / f"{name}.json").write_text(json.dumps({"meta": meta, "rows": rows}))
        return benchmark.break_evens(tmp_path)

    return found


def row(tokens, policy, median, **more):
    fields = {"model": "llama-3.1-8b", "phase": "decode", "tokens": tokens, "batch": 8}
    fields |= {"implementation": "ours", "chunk_size": None, "error": None, "policy": policy}
    preset, density = ("recommended", 0.1) if policy == "sketchwalk" else (None, 1.0)
    seconds = {"median": median, "q25": 0.99 * median, "q75": 1.01 * median}
    return fields | {"preset": preset, "density": density, "seconds": seconds} | more


def test_a_length_that_pays_says_nothing_of_shorter_ones(benchmark, found):
    """Measurements at 128K tokens alone change nothing in `Auto`."""
    assert benchmark.is_known(4096, {2048: 0.9, 4096: 1.1})
    assert benchmark.is_known(8192, {8192: 1.1, 16384: 1.2})
    assert not benchmark.is_known(16384, {16384: 1.1, 32768: 1.2})
    assert benchmark.is_known(None, {131072: 0.9})  # so no shorter length pays
    dense = [row(2**17, "dense", 11.0), row(2**17, "dense", 10.0, chunk_size=2**15)]
    long = [*dense, row(2**17, "sketchwalk", 5.0)]
    assert found(long) == []
    short = [row(2**14, "dense", 11.0), row(2**14, "sketchwalk", 12.0)]
    at_once = found([*long, *short])  # on the measured device, and on others that run the same code
    assert [(one.tokens, one.longest) for one in at_once] == [(2**17, 2**17)] * 2
    # A policy must beat dense attention in chunks, and by more than 3 % and the spread of both.
    for time in (10.5, 9.8, 9.6):
        slower = [*dense, row(2**17, "sketchwalk", time)]
        assert [(one.tokens, one.longest) for one in found(slower)] == [(None, 2**17)] * 2


def test_expected_break_evens_follow_the_measured_ones(found):
    one = {"phase": "decode", "policy": "RecommendedConfig", "density": 0.2, "block_size": 64}
    one |= {"device": dispatch.GPU_GROUPS[-1], "width": 64, "tokens": 512, "longest": 1024}
    assert [dataclasses.asdict(x) for x in found([one], "break_even")] == [
        one | {"has_experts": False}
    ]
    with pytest.raises(ValueError, match="must hold only rows of Hopper GPUs, "):
        found([one | {"device": "cpu"}], "break_even")
    found([one], "break_even")
    rows = found([row(8192, "dense", 2.0), row(8192, "sketchwalk", 1.0)])
    assert [(x.device, x.is_expected) for x in rows] == [
        ("NVIDIA H200", False),
        (dispatch.GPU_GROUPS[0], True),
        (dispatch.GPU_GROUPS[-1], True),
    ]


def test_rows_of_whole_models_are_break_evens_of_their_device(found):
    rows = [row(16384, "dense", 1.0), row(16384, "sketchwalk", 1.2)]
    rows += [row(32768, "dense", 2.0), row(32768, "sketchwalk", 1.5)]
    rows += [row(65536, "dense", 1.0), row(65536, "sketchwalk", 9.0, error="does not fit")]
    rows += [row(65536, "dense", 1.0, implementation="transformers")]
    one, other = found(rows)
    assert other == dataclasses.replace(one, device=dispatch.GPU_GROUPS[0]) and other.is_expected
    expected = {"device": "NVIDIA H200", "phase": "decode", "policy": "RecommendedConfig"}
    expected |= {"density": 0.1, "block_size": 64, "width": 8 * 1024}  # eight sequences
    expected |= {"tokens": 32768, "longest": 32768, "has_experts": False}
    assert dataclasses.asdict(one) == expected
    # Of calls of one width, the one that gains least counts; a mixture of experts does not.
    other = {"model": "qwen2.5-7b", "batch": 16}
    slow = [row(32768, "dense", 2.0, **other), row(32768, "sketchwalk", 2.1, **other)]
    assert found([*rows, *slow])[0].tokens is None
    other = {"model": "qwen3-30b-a3b", "batch": 16}
    mixture = [row(32768, "dense", 2.0, **other), row(32768, "sketchwalk", 2.1, **other)]
    assert [(x.has_experts, x.tokens) for x in found([*rows, *mixture])[:2]] == [
        (False, 32768),
        (True, None),
    ]
    of_prompts = [one | {"phase": "prefill"} for one in rows[:4]]
    of_prompts += [row(2**16, "dense", 1.05, phase="prefill")]
    of_prompts += [row(2**16, "sketchwalk", 1.0, phase="prefill")]
    assert found(of_prompts)[0].tokens is None  # 5 % of a prompt is too little
    assert not one.is_expected
    small = [one | {"model": "6-layers-of-256"} for one in rows]
    cpu = next(one for one in found(small, "end_to_end_cpu", device="cpu") if one.device == "cpu")
    assert (cpu.width, cpu.tokens, cpu.is_expected) == (8 * 128, 32768, False)
    assert len(found(rows)) == 3  # the row of the CPU is not one of Hopper GPUs
    whole = [one | {"measured_density": 1.0} for one in small]
    whole = found(whole, "end_to_end_cpu", device="cpu")
    assert [one.tokens for one in whole if one.device == "cpu"] == [None]  # it keeps all keys
    with pytest.raises(ValueError, match="--quick"):
        found(rows, is_quick=True)


def test_a_table_of_other_results_is_found_and_replaced(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "TABLE", tmp_path / "break_even.json")
    results = benchmark.common.RESULTS
    assert not benchmark.update_table(results, is_check=True)
    assert "differs" in capsys.readouterr().out and not benchmark.TABLE.exists()
    assert not benchmark.update_table(results, is_check=False)
    assert benchmark.update_table(results, is_check=True)
