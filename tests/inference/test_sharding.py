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
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as spec
from mesh_checks import MESH_EXPERTS, MESH_MODEL, POLICIES, SIZE
from tiny import prompts
from variants import cpu_devices, slow_unless

from sketchwalk_jax import generate, init_cache, load, sharding
from sketchwalk_jax.evaluation.settings import Rule
from sketchwalk_jax.inference.cached_layer import Settings
from sketchwalk_jax.models.params import EXPERTS, flatten_params, param_shapes
from sketchwalk_jax.policies.ranks import Blocks


def mesh(kind: AxisType = AxisType.Auto, **axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


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


def test_ranks_divide_the_width_of_experts_and_only_mlps_that_there_are():
    model = dataclasses.replace(MESH_EXPERTS, intermediate_size=50, expert_intermediate_size=12)
    with pytest.raises(ValueError, match=r"divide intermediate_size 50 and .* 12, .* of \[1, 2\]"):
        sharding.place(mesh(tensor=8), model)
    model = dataclasses.replace(model, dense_mlp_layers=())
    with pytest.raises(ValueError, match=r"divide expert_intermediate_size 12, .* of \[1, 2, 4\]"):
        sharding.place(mesh(tensor=8), model)
    assert sharding.place(mesh(tensor=4), model).notes == ()


def test_calls_that_a_mesh_cannot_share_are_refused():
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


@pytest.mark.parametrize("weights", [None, "int8"])
def test_ranks_share_the_width_of_every_expert(weights):
    where, width = sharding.place(mesh(tensor=4), MESH_EXPERTS), 16
    for path, shape in flatten_params(param_shapes(MESH_EXPERTS, weights=weights)).items():
        if path[-2] in EXPERTS:
            part = where(path, shape).shard_shape(shape.shape)
            assert part == tuple(n // 4 if n == width else n for n in shape.shape), path


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
    stored = found["whole_blocks"]
    for one in (stored.quantized, stored.scale_exponent, stored.unfinished):
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
    assert recommended["statistics"].quantized.spec == spec(None, "data", None, "tensor")
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


def call(name: str, *arguments, **options) -> str:
    """Returns the call of a function of `mesh_checks`."""
    given = [*map(repr, arguments), *(f"{k}={v!r}" for k, v in options.items())]
    return f"{name}({', '.join(given)})"


@pytest.fixture
def check(devices: subprocess.Popen):
    """Makes a call in the process with eight devices."""

    def check(call: str) -> None:
        assert devices.stdin is not None and devices.stdout is not None
        print(json.dumps(call), file=devices.stdin, flush=True)
        answer = devices.stdout.readline()
        assert answer, "the process has ended"
        if failure := json.loads(answer):
            pytest.fail(failure, pytrace=False)

    return check


ALL = {"data": 2, "sequence": 2, "tensor": 2}
TWO = {"data": 2, "tensor": 4}
MAIN = ["paper", "recommended", "quest"]
OTHERS = [name for name in POLICIES if name not in (*MAIN, "dense", "whole_blocks")]
_OWN = (("block_size", SIZE), ("min_tokens", 4 * SIZE))
RULES = {
    "recommended": Rule("sketchwalk", "recommended", 0.4, _OWN),
    "damped": Rule("sketchwalk", "damped", 0.4),
    **{name: Rule(name, None, 0.4) for name in ("quest", "oracle", "adamas")},
}


def evaluation(*names: str, axes: dict[str, int], **options) -> str:
    return call("check_evaluation", [RULES[name] for name in names], axes, **options)


CHECKS = [
    call("check_products", ALL),
    call("check_mixture", ALL),
    call("check_gated_rows", {"data": 2, "sequence": 4}),
    call("check_lists", ["quest"], ALL),
    call("check_types_of_policies", ["paper"]),
    call("check_refused_evaluation"),
]
LONG_CHECKS = [
    call("check_types_inside_shard_map"),
    call("check_types_on_explicit_axes"),
    call("check_model", ["recommended"], ALL, chunk_size=64),
    call("check_bytes", ["whole_blocks"], ALL),
    call("check_lists", ["recommended"], ALL),
    call("check_lists", [*MAIN, "oracle_for_all"], {"tensor": 8}),
    call("check_model", ["paper"], {"data": 4}),
    call("check_model", ["quest"], {"tensor": 8}, chunk_size=48),
    call("check_steps", "recommended", {"sequence": 4}),
    call("check_bytes", ["dense", "paper"], ALL),
    call("check_bytes", ["dense"], ALL, has_experts=True),
    call("check_products", {"tensor": 8}),
    call("check_mixture", {"tensor": 8}),
    call("check_inside_shard_map", "quest", has_models=False),
    call("check_types_of_policies", []),
    call("check_explicit_axes", None),
    evaluation("recommended", axes=ALL, parts=("answers",), phases=("both",)),
    call("check_calibration", TWO, has_threshold=True),
]
# Further meshes and policies, and whole models inside `shard_map` or on explicit axes.
WEEKLY_CHECKS = [
    call("check_lists", OTHERS, TWO),
    call("check_lists", [*MAIN, "dense", "one_hop"], {"sequence": 4}),
    call("check_lists", ["recommended", "whole_blocks"], TWO, dtype="bfloat16"),
    call("check_model", ["whole_blocks", "dense"], {"sequence": 8}),
    call("check_model", ["recommended"], ALL, chunk_size=64, has_experts=True),
    call("check_explicit_axes", "recommended"),
    evaluation("damped", "recommended", axes={"sequence": 4}),
    call("check_lists", ["paper"], ALL),
    call("check_lists", ["adamas", "quest_for_all"], ALL),
    call("check_lists", ["recommended", "whole_blocks"], {"sequence": 2}, dtype="bfloat16"),
    call("check_model", ["recommended"], {"sequence": 2, "tensor": 2}),
    call("check_model", ["paper"], {"sequence": 2, "tensor": 4}, chunk_size=48),
    call("check_model", ["quest"], {"data": 2, "sequence": 4}),
    call("check_steps", "recommended", TWO),
    call("check_bytes", ["dense", "paper"], TWO),
    call("check_bytes", ["dense", "paper"], {"sequence": 4}),
    call("check_mixture", {"data": 4, "sequence": 2}),
    call("check_inside_shard_map", "recommended", has_models=True),
    evaluation("recommended", "quest", axes=ALL),
    evaluation("damped", "oracle", "adamas", axes={"tensor": 8}),
    evaluation("recommended", "quest", axes={"sequence": 4}, parts=("long",)),
    call("check_calibration", {"sequence": 2, "tensor": 2}, has_threshold=False),
]


@pytest.mark.parametrize(
    "call",
    [
        *slow_unless(CHECKS.__contains__, CHECKS + LONG_CHECKS),
        *(pytest.param(one, marks=pytest.mark.weekly) for one in WEEKLY_CHECKS),
    ],
    ids=lambda call: call.partition("(")[0],
)
def test_a_mesh_gives_what_one_device_gives(check, call):
    check(call)


_CHECKPOINT = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64}


# One of two layers has experts.
_EXPERTS = _CHECKPOINT | {"moe_intermediate_size": 64, "mlp_only_layers": [0]}


@pytest.mark.slow
def test_ranks_read_their_share(check, tmp_path: Path):
    write_checkpoint(tmp_path / "model", "qwen3_moe", **_EXPERTS, num_shards=2)
    check(call("check_loading", str(tmp_path / "model"), str(tmp_path / "saved")))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float8", "int8"])
def test_ranks_quantise_what_one_device_would(weights, check, tmp_path: Path):
    write_checkpoint(tmp_path / "model", "qwen3_moe", **_EXPERTS)
    check(call("check_eight_bits", str(tmp_path / "model"), weights))


@pytest.fixture
def on_meshes(run_python, tmp_path):
    """Runs the command line with a model on one device and on a mesh; returns what it prints."""

    def run(command: str, text: str, out: str | None = None, **sizes: int) -> list[dict]:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
        write_checkpoint(tmp_path / "model", "llama", tokenizer=True, **heads, **sizes)
        words, found = [command, "--model", str(tmp_path / "model"), *text.split()], []
        for name, mesh in {"one": [], "many": ["--mesh", "tensor=2,sequence=2"]}.items():
            file = tmp_path / f"{name}.json"
            own = [*words, *mesh, *([out, str(file)] if out else [])]
            code = f"import sys\nfrom sketchwalk_jax.cli import main\nsys.exit(main({own}))"
            printed = run_python(code, devices=4)
            found.append(json.loads(file.read_text() if out else printed))
        return found

    return run


@pytest.mark.slow
def test_the_command_line_shares_a_model_over_devices(on_meshes):
    options = f"--prompt {'Walk.' * 40} --max-new-tokens 8 --json --no-compile-cache"
    one, many = on_meshes("generate", options)
    assert one["text"] == many["text"]


@pytest.mark.weekly
def test_the_command_line_evaluates_on_a_mesh(on_meshes):
    options = "--preset recommended --policy sketchwalk --density 0.5 --tokens 512 --prompts 2"
    options += " --task single_needle --task text_loss --probe-prompts 1"
    one, many = on_meshes("eval", options, "--out", num_hidden_layers=2)
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
