"""Meshes: refusals and placement here; the rest in processes with eight devices."""

import dataclasses
import functools
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from mesh_checks import MESH_MODEL, POLICIES, SIZE
from tiny import prompts
from variants import cpu_devices, slow_unless

from sketchwalk_jax import generate, init_cache, load, sharding
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.models.params import flatten_params, param_shapes
from sketchwalk_jax.policies.ranks import Blocks


def mesh(kind: AxisType = AxisType.Auto, **axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def spec(*names):
    return PartitionSpec(*names)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor": 3}, r"divide num_heads 8 and num_kv_heads 4 .*make it one of \[1, 2, 4, 8\]"),
        ({"tensor": 16}, "divide num_heads 8, got 16"),
        ({"model": 2}, r"axes among \('data', 'sequence', 'tensor'\), got \['model'\]"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_what_would(axes, message):
    with pytest.raises(ValueError, match=message):
        sharding.place(mesh(**axes), MESH_MODEL)


def test_other_refusals():
    with pytest.raises(ValueError, match="axes of type Auto"):
        sharding.place(mesh(AxisType.Explicit, data=2), MESH_MODEL)
    where = sharding.place(mesh(sequence=2), MESH_MODEL)
    sizes = {"batch": 1, "max_tokens": 64, "sharding": where}
    with pytest.raises(NotImplementedError, match="must be 1 for OracleConfig, .* got 2; put its"):
        init_cache(MESH_MODEL, POLICIES["oracle"], **sizes)
    with pytest.raises(NotImplementedError, match="must be 1 for MInferenceConfig"):
        Settings(model_config=MESH_MODEL, policy=POLICIES["minference"], placement=where)
    where = sharding.place(mesh(data=4), MESH_MODEL)
    with pytest.raises(ValueError, match="3 sequences for 4 ranks; pad the batch to 4"):
        init_cache(MESH_MODEL, POLICIES["paper"], batch=3, max_tokens=64, sharding=where)


def test_every_rank_has_its_share_of_the_parameters():
    where = sharding.place(mesh(data=2, sequence=1, tensor=4), MESH_MODEL)
    shapes, found = (flatten_params(x) for x in (param_shapes(MESH_MODEL), where.params))
    assert found.keys() == shapes.keys() and where.notes == ()
    for path, shape in shapes.items():
        part = found[path].shard_shape(shape.shape)
        is_norm = path[-1] == "scale"
        assert np.prod(shape.shape) == np.prod(part) * (1 if is_norm else 4), path
    # Split the summed axis of `out` and `down`, as ranks add up their results, else the outputs.
    layers = where.params["layers"]
    assert layers["out"]["kernel"].spec == spec(None, "tensor")
    assert layers["down"]["kernel"].spec == spec(None, "tensor")
    assert (
        layers["query"]["kernel"].spec == layers["up"]["kernel"].spec == spec(None, None, "tensor")
    )
    assert where.tokens.spec == spec("data")


def test_fewer_key_heads_than_ranks_are_replicated_with_a_note():
    model = dataclasses.replace(MESH_MODEL, num_kv_heads=2, vocab_size=63)
    where = sharding.place(mesh(tensor=8), model)
    assert where.num_kv_heads == 8
    assert where.params["layers"]["key"]["kernel"].spec == spec()
    assert where.params["embed"]["embedding"].spec == spec()
    copies, vocabulary = where.notes
    assert "each of 2 key/value heads lies on 4 of 8 ranks" in copies
    assert "8 ranks do not divide a vocabulary of 63" in vocabulary
    assert repr(where) == f"Placement(tensor=8); {copies}; {vocabulary}"
    keys = jax.eval_shape(
        lambda: init_cache(model, POLICIES["quest"], batch=1, max_tokens=64, sharding=where)
    )
    assert keys.key.shape[3] == keys.statistics.lowest.shape[3] == 8


def test_statistics_are_spread_where_ranks_select_by_their_own_heads():
    where = sharding.place(mesh(data=2, tensor=2), MESH_MODEL)
    found = {name: where.statistics(policy) for name, policy in POLICIES.items()}
    assert found["paper"].key.spec == found["released"].key.spec == spec(None, "data")
    codes = found["whole_blocks"]
    for one in (codes.code, codes.step, codes.unfinished):
        assert one.spec == spec(None, "data", None, "tensor")
    assert found["quest"].lowest.spec == spec(None, "data", None, "tensor")
    assert found["adamas"].spec == spec(None, "data", None, None, "tensor")
    assert found["oracle"] is None
    walk = where.walk(POLICIES["whole_blocks"], is_token=False)
    assert walk.scores.spec == spec("data")


def test_the_cache_is_spread_over_the_blocks_of_a_sequence():
    where = sharding.place(mesh(data=2, sequence=4, tensor=2), MESH_MODEL)
    assert where.notes == () and where.blocks == Blocks("sequence", 4)
    recommended = where.cache(POLICIES["whole_blocks"])
    assert recommended["key"].spec == spec(None, "data", "sequence", "tensor")
    assert recommended["statistics"].code.spec == spec(None, "data", None, "tensor")
    walks = [where.walk(POLICIES["paper"], is_token=is_token) for is_token in (False, True)]
    assert [walk.scores.spec for walk in walks] == [spec("data", "sequence"), spec("data")]
    make = functools.partial(init_cache, MESH_MODEL, POLICIES["paper"], batch=2, sharding=where)
    cache = jax.eval_shape(functools.partial(make, max_tokens=5 * 16))
    assert cache.capacity == 8 * 16 and cache.statistics.key.shape[2] == 8


@given(ranks=st.integers(1, 5), pieces=st.integers(1, 4))
def test_rows_are_dealt_so_that_ranks_have_as_much_to_attend_to(ranks, pieces):
    blocks = Blocks("sequence", ranks)
    rows = np.arange(blocks.num_pieces * pieces)

    @jax.jit
    def deal(rows):
        dealt = blocks.deal(rows, axis=0)
        return dealt, blocks.join(dealt, axis=0), blocks.place(rows, len(rows))

    dealt, joined, places = map(np.asarray, deal(rows))
    np.testing.assert_array_equal(joined, rows)
    np.testing.assert_array_equal(dealt[places], rows)
    causal = (dealt + 1).reshape(ranks, -1).sum(axis=1)
    assert len(set(causal)) == 1


def test_without_a_mesh_there_is_no_placement():
    assert sharding.placement_of({}, MESH_MODEL) is None
    params = {"embed": {"embedding": jnp.zeros((4, 4))}}
    assert sharding.placement_of(params, MESH_MODEL) is None
    traced = []
    jax.jit(lambda x: traced.append(sharding.placement_of(x, MESH_MODEL)))(params)
    assert traced == [None]


@pytest.fixture(scope="module")
def devices(program_environment, repository: Path, tmp_path_factory):
    """A process with eight devices that runs checks of `mesh_checks`."""
    process = subprocess.Popen(
        [sys.executable, repository / "tests" / "mesh_checks.py"],
        cwd=tmp_path_factory.mktemp("devices"),
        env=program_environment | {"XLA_FLAGS": cpu_devices(8)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()  # ends it


@pytest.fixture
def check(devices: subprocess.Popen):
    """Calls a function of `mesh_checks` in the process with eight devices."""

    def check(name: str, *arguments, **options) -> None:
        assert devices.stdin is not None and devices.stdout is not None
        call = ", ".join([*map(repr, arguments), *(f"{k}={v!r}" for k, v in options.items())])
        print(json.dumps(f"{name}({call})"), file=devices.stdin, flush=True)
        answer = devices.stdout.readline()
        assert answer, "the process has ended"
        if failure := json.loads(answer):
            pytest.fail(failure, pytrace=False)

    return check


_ELSEWHERE = ("dense", "paper", "whole_blocks", "recommended", "quest")
_OTHERS = [name for name in POLICIES if name not in _ELSEWHERE]


_ALL = {"data": 2, "sequence": 2, "tensor": 2}
_MAIN = ["paper", "recommended", "quest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (["recommended", "quest"], _ALL),
        pytest.param(["paper"], _ALL, marks=pytest.mark.slow),
        pytest.param(_OTHERS, {"data": 2, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param([*_MAIN, "oracle_for_all"], {"tensor": 8}, marks=pytest.mark.slow),
        pytest.param([*_MAIN, "dense", "one_hop"], {"sequence": 4}, marks=pytest.mark.slow),
        pytest.param(["adamas", "quest_for_all"], _ALL, marks=pytest.mark.slow),
    ],
)
def test_lists_of_given_queries_and_keys_are_those_of_one_device(check, names, axes):
    check("check_lists", names, axes)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 4}, {"sequence": 2}])
def test_lists_in_bfloat16_are_those_of_one_device(check, axes):
    check("check_lists", ["recommended", "whole_blocks"], axes, dtype="bfloat16")


@pytest.mark.parametrize(
    ("names", "axes", "options"),
    [
        (["recommended"], _ALL, {"chunk_size": 64}),
        pytest.param(["paper"], {"data": 4}, {}, marks=pytest.mark.slow),
        pytest.param(["quest"], {"tensor": 8}, {"chunk_size": 48}, marks=pytest.mark.slow),
        pytest.param(["whole_blocks", "dense"], {"sequence": 8}, {}, marks=pytest.mark.slow),
        pytest.param(["recommended"], {"sequence": 2, "tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param(
            ["paper"], {"sequence": 2, "tensor": 4}, {"chunk_size": 48}, marks=pytest.mark.slow
        ),
        pytest.param(["quest"], {"data": 2, "sequence": 4}, {}, marks=pytest.mark.slow),
    ],
)
def test_a_model_on_a_mesh_gives_what_it_gives_on_one_device(check, names, axes, options):
    check("check_model", names, axes, **options)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 4}, {"sequence": 4}])
def test_steps_on_a_mesh_give_what_they_give_on_one_device(check, axes):
    check("check_steps", "recommended", axes)


def test_programs_send_what_is_said(check):
    check("check_bytes", ["whole_blocks"], _ALL)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 4}, {"sequence": 4}, _ALL])
def test_programs_of_other_policies_send_what_is_said(check, axes):
    check("check_bytes", ["dense", "paper"], axes)


@pytest.mark.parametrize("axes", [_ALL, pytest.param({"tensor": 8}, marks=pytest.mark.slow)])
def test_ranks_multiply_few_rows_with_their_share_of_the_weights(check, axes):
    check("check_products", axes)


@pytest.mark.parametrize("axes", [{"data": 2, "sequence": 4}])
def test_ranks_gate_their_own_rows(check, axes):
    check("check_gated_rows", axes)


def test_functions_take_what_varies_inside_a_shard_map_of_the_callers(check):
    check("check_types_inside_shard_map")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recommended", "quest"])
def test_functions_give_inside_a_shard_map_what_they_give_outside(check, name):
    check("check_inside_shard_map", name, has_models=name == "recommended")


def test_attention_takes_what_explicit_axes_spread(check):
    check("check_types_on_explicit_axes")


@pytest.mark.slow
def test_all_policies_take_what_varies_and_what_explicit_axes_spread(check):
    check("check_types_of_policies")


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "recommended"])
def test_attention_gives_on_explicit_axes_what_it_gives_on_one_device(check, name):
    check("check_explicit_axes", name)


_RECOMMENDED = Rule(
    "sketchwalk", "recommended", 0.4, (("block_size", SIZE), ("min_tokens", 4 * SIZE))
)
_QUEST = Rule("quest", None, 0.4)
_DAMPED = Rule("sketchwalk", "damped", 0.4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "axes", "options"),
    [
        ([_RECOMMENDED], _ALL, {"probes": False, "phases": ("both",)}),
        pytest.param([_RECOMMENDED, _QUEST], _ALL, {}, marks=pytest.mark.slow),
        pytest.param([_DAMPED, _RECOMMENDED], {"sequence": 4}, {}, marks=pytest.mark.slow),
        pytest.param(
            [_DAMPED, Rule("oracle", None, 0.4), Rule("adamas", None, 0.4)],
            {"tensor": 8},
            {},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_evaluation_on_a_mesh_finds_what_it_finds_on_one_device(check, rules, axes, options):
    check("check_evaluation", rules, axes, **options)


@pytest.mark.slow
def test_long_decoding_on_a_mesh_finds_what_it_finds_on_one_device(check):
    check("check_long_decode", [_RECOMMENDED, _QUEST], {"sequence": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "has_knob"), [({"data": 2, "tensor": 4}, True), ({"sequence": 2, "tensor": 2}, False)]
)
def test_policies_are_set_on_a_mesh_as_on_one_device(check, axes, has_knob):
    check("check_calibration", axes, has_knob=has_knob)


_CHECKPOINT = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64}


def test_an_evaluation_is_refused_before_it_begins(check):
    check("check_refused_evaluation")


def test_ranks_read_their_share(check, tmp_path: Path):
    write_checkpoint(tmp_path / "model", "llama", **_CHECKPOINT, num_shards=2)
    check("check_loading", str(tmp_path / "model"), str(tmp_path / "saved"))


@pytest.mark.parametrize("weights", slow_unless("float8".__eq__, ["float8", "int8"]))
def test_ranks_quantise_what_one_device_would(weights, check, tmp_path: Path):
    write_checkpoint(tmp_path / "model", "llama", **_CHECKPOINT)
    check("check_eight_bits", str(tmp_path / "model"), weights)


@pytest.mark.slow
def test_the_command_line_shares_a_model_over_devices(run_python, tmp_path: Path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    write_checkpoint(tmp_path / "model", "llama", tokenizer=True, **heads)
    arguments = ["generate", "--model", str(tmp_path / "model"), "--prompt", "Walk." * 40]
    arguments += ["--max-new-tokens", "8", "--json", "--no-compile-cache"]
    code = "import sys\nfrom sketchwalk_jax.cli import main\nsys.exit(main({}))"
    meshes = ([], ["--mesh", "tensor=2,sequence=2"])
    one, many = (
        json.loads(run_python(code.format(arguments + mesh), devices=4)) for mesh in meshes
    )
    assert one["text"] == many["text"]


@pytest.mark.slow
def test_the_command_line_evaluates_on_a_mesh(run_python, tmp_path: Path):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    write_checkpoint(tmp_path / "model", "llama", tokenizer=True, **heads, num_hidden_layers=2)
    arguments = "--preset recommended --policy sketchwalk --density 0.5 --tokens 512 --prompts 2"
    arguments += " --task single_needle --task text_loss --probe-prompts 1"
    code = "import sys\nfrom sketchwalk_jax.cli import main\nsys.exit(main({}))"
    found = []
    for name, mesh in {"one": [], "many": ["--mesh", "tensor=2,sequence=2"]}.items():
        out = tmp_path / f"{name}.json"
        words = ["eval", "--model", str(tmp_path / "model"), *arguments.split(), *mesh]
        run_python(code.format([*words, "--out", str(out)]), devices=4)
        found.append(json.loads(out.read_text()))
    one, many = found
    assert "mesh" not in one["meta"] and many["meta"]["mesh"] == {"tensor": 2, "sequence": 2}
    assert len(one["rows"]) == len(many["rows"]) > 6
    for row, other in zip(one["rows"], many["rows"], strict=True):
        assert row.keys() == other.keys()
        for field, value in row.items():
            assert _is_close(value, other[field]), (field, value, other[field])


def _is_close(one, other) -> bool:
    """Says whether two entries of rows differ only by rounding."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_close, one, other))
    if isinstance(one, float):
        return one == pytest.approx(other, rel=1e-3, abs=1e-4)
    return one == other


@pytest.mark.slow
def test_two_processes_generate_the_tokens_of_one(
    program_environment, repository: Path, tmp_path: Path
):
    write_checkpoint(tmp_path, "llama", **_CHECKPOINT, head_dim=16)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    code = "import sys; sys.path.insert(0, sys.argv[1]); import mesh_checks\n"
    code += "mesh_checks.run_process(sys.argv[2], sys.argv[3], int(sys.argv[4]))"
    environment = program_environment | {"XLA_FLAGS": cpu_devices(4)}
    arguments = [str(repository / "tests"), str(tmp_path), address]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    params, config = load(tmp_path)
    tokens, lengths = prompts(100, 37, 64, 80)
    call = {"model_config": config, "policy": POLICIES["paper"], "lengths": lengths}
    expected = generate(params, tokens, **call, max_new_tokens=8, max_tokens=128).tokens
    for out, _ in said:
        assert out.strip().splitlines()[-1] == str(np.asarray(expected).tolist())
