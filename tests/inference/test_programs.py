"""Programs shared by lengths and budgets, compiled side by side, and kept on disk."""

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from tiny import MODEL, POLICIES, SPARSE, params, plan, prompts
from variants import slow_unless, weekly

import sketchwalk_jax as sw
from sketchwalk_jax.inference import compiled, generation
from sketchwalk_jax.inference.compiled import programs_folder
from sketchwalk_jax.inference.padding import length_class
from sketchwalk_jax.policies import by_name
from sketchwalk_jax.policies.adamas import AdamasConfig
from sketchwalk_jax.policies.quest import QuestConfig

PAGED = {"block_size": 32, "min_tokens": 48, "early_representatives": ((128, 8),)}


def recommended(density=0.3, **fields):
    return sw.SketchWalkConfig.recommended(density=density, representatives=4, **PAGED | fields)


ANY = {
    **POLICIES,
    "recommended": recommended(),
    "planned": recommended(0.4, plan=plan((0.2, 0.6), *[(0.5, 0.1), (0.1, 0.05)] * 2)),
    "quest": QuestConfig(density=0.3, dense_layers=1),
    "quest-tokens": QuestConfig(token_budget=64, dense_layers=1),
    "adamas": AdamasConfig(density=0.3, dense_layers=1, block_size=16),
    "streaming": by_name("streaming", density=0.4, block_size=16),
    "random": by_name("random", density=0.4, block_size=16),
    "oracle": by_name("oracle", density=0.4, block_size=16),
    "minference": by_name("minference", block_size=16),
    "flexprefill": by_name("flexprefill", block_size=16),
}


@pytest.fixture
def weights():
    return params()


def _forget():
    """Forgets programs as the end of a process does."""
    compiled.forget_programs()
    jax.clear_caches()


def _of_generation(compilations):
    """The names of the programs that read prompts and decode tokens, without small operations."""
    return [name for name in compilations if "decod" in name]


# Sharing.


SOME = ("recommended", "planned", "quest", "minference", "oracle")  # the others each week


@pytest.mark.parametrize(
    "name",
    [
        *slow_unless("recommended".__eq__, SOME),
        *weekly(x for x in ANY if x not in SOME),
    ],
)
def test_a_shared_program_computes_what_one_for_these_lengths_does(weights, name):
    """Under the caller's `jit`, shapes are those of the prompts, and budgets are constants."""
    tokens, lengths = prompts(301, 150)
    options = {"model_config": MODEL, "policy": ANY[name], "max_new_tokens": 5, "lengths": lengths}
    shared = generation.generate(weights, tokens, **options)
    own = jax.jit(lambda params: generation.generate(params, tokens, **options))(weights)
    np.testing.assert_array_equal(shared.tokens, own.tokens)
    np.testing.assert_array_equal(shared.cache.lengths, own.cache.lengths)
    for mine, theirs in zip(
        *map(jax.tree.leaves, (shared.cache.density, own.cache.density)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    for row, length in enumerate(lengths + 5):
        of_row = [x.key[:, row, :length] for x in (shared.cache, own.cache)]
        np.testing.assert_allclose(*of_row, rtol=1e-5, atol=1e-5)


SHARING = {
    "budgets": [recommended(0.3), recommended(0.2), recommended(0.7, min_tokens=64)],
    "plans": [
        recommended(0.4, plan=plan((0.2, 0.6), *[(0.5, 0.1), (0.1, 0.05)] * 2)),
        recommended(0.3, plan=plan((0.2, 0.6), *[(0.1, 0.05), (0.5, 0.1)] * 2)),
    ],
    "paper": [POLICIES["paper"], dataclasses.replace(POLICIES["paper"], density=0.1)],
    "quest": [ANY["quest"], ANY["quest-tokens"]],
}


@pytest.mark.parametrize("changed", slow_unless("budgets".__eq__, SHARING))
def test_lengths_budgets_and_plans_compile_nothing(weights, compilations, changed):
    for number, (policy, length, new) in enumerate(
        zip(SHARING[changed], (300, 257, 400), (3, 20, 9), strict=False)
    ):
        compilations.clear()
        tokens, lengths = prompts(length, 150, seed=length)
        run = generation.make_generate(MODEL, policy, max_new_tokens=new)
        out = run(weights, tokens, lengths=lengths)
        assert out.tokens.shape == (2, new)
        named = {"model_config": MODEL, "policy": policy, "max_new_tokens": new}
        whole = generation.generate(weights, tokens, lengths=lengths, **named)
        chunks = list(generation.stream(weights, tokens, lengths=lengths, **named))
        found = np.concatenate([one.tokens for one in chunks], axis=1)
        np.testing.assert_array_equal(out.tokens, whole.tokens)
        np.testing.assert_array_equal(out.tokens, found)
        assert number == 0 or not compilations, (policy, compilations)


def test_a_session_compiles_two_programs_a_class(weights, compilations):
    _forget()
    compilations.clear()
    _answer(weights)
    assert sorted(compilations) == ["jit(decode_tokens)", "jit(start_decoding)"]
    lengths = np.geomspace(100, 100_000, 20).astype(int)
    assert len({length_class(n, growth=4) for n in lengths.tolist()}) == 4  # with kernels


@pytest.mark.slow
def test_padding_on_the_left_and_later_turns_compile_nothing(weights, compilations):
    policy = recommended()
    run = generation.make_generate(MODEL, policy, max_new_tokens=4, max_tokens=500)
    later = generation.make_generate(MODEL, policy, max_new_tokens=4)
    for number, length in enumerate((60, 75)):
        compilations.clear()
        tokens, _ = prompts(length, seed=length)
        mask = np.ones_like(tokens)
        tokens, mask = (np.pad(x, ((0, 0), (7, 0))) for x in (tokens, mask))
        out = run(weights, tokens, attention_mask=mask)
        for turn in range(2):
            out = later(weights, prompts(20 + turn + number)[0], cache=out.cache)
        assert number == 0 or not compilations


@pytest.mark.slow
def test_measured_density_follows_the_density_of_each_call(weights):
    tokens, _ = prompts(400)
    found = []
    for density in (0.2, 0.5, 1.0):
        run = generation.make_generate(MODEL, recommended(density), max_new_tokens=2)
        found.append(float(run(weights, tokens).measured_density.overall))
    assert found[0] < found[1] < found[2] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("base", [POLICIES["paper"], recommended()])
def test_policies_of_ones_own_see_their_density(weights, base):
    seen = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(type(base)):
        def select(self, *arguments, **options):
            seen.append(self.density)
            return super().select(*arguments, **options)

    policy = Own(**{one.name: getattr(base, one.name) for one in dataclasses.fields(base)})
    generation.generate(
        weights, prompts(30)[0], model_config=MODEL, policy=policy, max_new_tokens=1
    )
    assert set(seen) == {base.density}


@pytest.mark.slow
def test_a_context_that_is_no_multiple_of_blocks_can_be_continued(weights):
    model = dataclasses.replace(MODEL, max_position_embeddings=500)
    run = generation.make_generate(model, POLICIES["paper"], max_new_tokens=4)
    first = run(weights, prompts(100)[0])
    again = run(weights, prompts(390, seed=1)[0], cache=first.cache)
    assert np.asarray(again.cache.lengths).tolist() == [498]


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.slow
def test_vmap_over_keys_and_types_of_tokens(weights, compilations):
    tokens, _ = prompts(30)
    options = {"model_config": MODEL, "policy": POLICIES["paper"], "max_new_tokens": 3}
    sampling = sw.Sampling(temperature=1.0)

    def draw(key, tokens=tokens):
        return generation.generate(weights, tokens, key=key, sampling=sampling, **options).tokens

    keys = jax.random.split(jax.random.key(0), 2)
    both, alone = jax.vmap(draw)(keys), [draw(key) for key in keys]
    np.testing.assert_array_equal(both, np.stack(alone))
    compilations.clear()
    np.testing.assert_array_equal(draw(keys[0], tokens.astype(np.int64)), alone[0])
    assert not _of_generation(compilations)


@pytest.mark.slow
def test_a_class_is_given_up_if_memory_is_short(weights, monkeypatch):
    tokens, _ = prompts(300)
    options = {"model_config": MODEL, "policy": POLICIES["paper"], "max_new_tokens": 1}
    assert generation.generate(weights, tokens, **options).cache.capacity == 512
    long = dataclasses.replace(MODEL, max_position_embeddings=2048)
    options["model_config"] = long
    most = generation.generate(weights, tokens, **options)
    assert most.cache.capacity == 512 + 256
    monkeypatch.setattr(generation, "free_bytes", lambda like: 2**19)
    least = generation.generate(weights, tokens, **options)
    assert least.cache.capacity == 320 + 256
    np.testing.assert_array_equal(least.tokens, most.tokens)


# Disk.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Keeps whole programs in a new folder."""
    monkeypatch.setattr(compiled, "programs_folder", lambda: tmp_path)
    _forget()
    yield tmp_path
    _forget()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The tokens of `_answer`, and the folder with its two programs."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "programs_folder", lambda: folder)
        _forget()
        return _answer(params()), folder


@pytest.fixture
def used(kept, folder):
    """The same in a folder of the test's own."""
    shutil.copytree(kept[1], folder, dirs_exist_ok=True)
    return kept[0], folder


def _answer(weights, policy=None, **options):
    policy = POLICIES["paper"] if policy is None else policy
    run = generation.make_generate(MODEL, policy, max_new_tokens=3, **options)
    return np.asarray(run(weights, prompts(20)[0]).tokens)


@contextmanager
def _compiling(monkeypatch):
    """Expects that the block begins to compile both programs, which fails."""
    asked, both = itertools.count(1), threading.Event()

    def refuse(lowered, **options):
        if next(asked) == 2:
            both.set()
        assert both.wait(timeout=60)  # had one failed before, the call would ask for it again
        raise RuntimeError("compiled")

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", refuse)
        with pytest.raises(RuntimeError, match="^compiled$"):
            yield


def test_a_later_process_loads_programs(weights, used, compilations):
    first, folder = used
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 2
    compilations.clear()
    np.testing.assert_array_equal(_answer(weights), first)
    assert not _of_generation(compilations)


@pytest.mark.slow
def test_damaged_programs_are_compiled_and_written_again(weights, used, compilations, monkeypatch):
    first, folder = used
    files = {path: path.read_bytes() for path in folder.iterdir()}
    for damage in (
        lambda raw: b"",
        lambda raw: raw[:-1],
        lambda raw: raw[:99] + b"x" + raw[100:],
        lambda raw: raw + b"x",  # only the digest differs
    ):
        for path, raw in files.items():
            path.write_bytes(damage(raw))
        _forget()
        with _compiling(monkeypatch):
            _answer(weights)
    compilations.clear()
    np.testing.assert_array_equal(_answer(weights), first)
    assert len(_of_generation(compilations)) == 2
    assert set(folder.iterdir()) == set(files)
    _forget()
    compilations.clear()
    np.testing.assert_array_equal(_answer(weights), first)
    assert not _of_generation(compilations)


CHANGES = ["version", "code", "flags", "settings", "precision", "weights"]


@pytest.mark.parametrize("change", slow_unless("settings".__eq__, CHANGES))
def test_a_program_made_for_something_else_is_not_loaded(weights, used, monkeypatch, change):
    paths, load = [], compiled._load

    def look(path, *others):
        paths.append(path)
        return load(path, *others)

    monkeypatch.setattr(compiled, "_load", look)
    policy, precision = None, None
    if change == "version":
        monkeypatch.setattr(compiled, "_installed", lambda: ("another",))
    elif change == "code":
        monkeypatch.setattr(compiled, "_code_here", lambda: "another")
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    elif change == "settings":
        policy = dataclasses.replace(POLICIES["paper"], exponent=4)
    elif change == "precision":
        precision = "highest"
    elif change == "weights":
        weights = params("bfloat16")
    with _compiling(monkeypatch), jax.default_matmul_precision(precision):
        _answer(weights, policy)
    assert len(set(paths) - set(used[1].iterdir())) == 2  # they would be kept beside the others


@pytest.mark.slow
def test_policies_of_ones_own_are_not_kept(weights, folder):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(sw.SketchWalkConfig):
        pass

    _answer(weights, Own(**SPARSE))
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_the_programs_used_longest_ago_go_first(weights, used, monkeypatch):
    _, folder = used
    old = list(folder.iterdir())
    for path in old:
        os.utime(path, (1, 1))
    monkeypatch.setattr(compiled, "MOST_BYTES", sum(path.stat().st_size for path in old) + 1)
    _answer(weights, dataclasses.replace(POLICIES["paper"], exponent=4))
    left = list(folder.iterdir())
    assert len(left) == 2 and not set(old) & set(left)


@pytest.mark.slow
def test_a_full_disk_is_no_error(weights, folder, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(compiled.os, "replace", fail)
    assert _answer(weights).shape == (1, 3)
    assert not list(folder.iterdir())


def test_only_a_folder_of_ones_own_is_used(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert programs_folder() == tmp_path / "programs"
        assert (tmp_path / "programs").stat().st_mode & 0o777 == 0o700
        (tmp_path / "programs").chmod(0o770)
        with pytest.warns(UserWarning, match="must be a folder that only you can write"):
            assert programs_folder() is None
        (tmp_path / "programs").rmdir()
        (tmp_path / "programs").symlink_to(tmp_path)  # who made the link may change it
        compiled._warn_once.cache_clear()
        with pytest.warns(UserWarning, match="must be a folder that only you can write"):
            assert programs_folder() is None
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/folder")
        assert programs_folder() is None
        jax.config.update("jax_compilation_cache_dir", None)
        assert programs_folder() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert programs_folder() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)


_LATER = """
import sys
import jax
names = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **more: names.append(more.get("fun_name"))
    if event == "/jax/core/compile/backend_compile_duration" else None
)
sys.path.insert(0, {tests!r})
import numpy as np
from tiny import MODEL, POLICIES, params, prompts
import sketchwalk_jax as sw
run = sw.make_generate(MODEL, POLICIES["paper"], max_new_tokens=3)
print(np.asarray(run(params(), prompts(20)[0]).tokens).tolist())
print([name for name in names if "decod" in name])
"""


@pytest.mark.slow
def test_processes_share_programs(tmp_path, program_environment):
    tests = str(next(p for p in map(os.path.abspath, sys.path) if os.path.exists(f"{p}/tiny.py")))
    environment = program_environment | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _LATER.format(tests=tests)]
    same = {"env": environment, "text": True, "stdout": subprocess.PIPE}
    both = [subprocess.Popen(command, **same) for _ in range(2)]  # may write at once
    first, second = (one.communicate()[0].splitlines() for one in both)
    assert first[0] == second[0] and len(list((tmp_path / "programs").iterdir())) == 2
    later = subprocess.run(command, check=True, **same).stdout.splitlines()
    assert later == [first[0], "[]"]


# Compiling.


@pytest.mark.slow
def test_both_programs_compile_at_once(weights, monkeypatch):
    _forget()
    meet = threading.Barrier(2, timeout=60)
    compile_one = jax.stages.Lowered.compile

    def wait(lowered, *arguments, **options):
        meet.wait()  # breaks if one ends before the other begins
        return compile_one(lowered, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", wait)
    assert _answer(weights).shape == (1, 3)


def test_a_failure_to_compile_is_raised_and_tried_again(weights, monkeypatch):
    _forget()

    def fail(*arguments, **options):
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises(RuntimeError, match="no compiler"):
            _answer(weights)
        assert not generation._start._cache_size()  # nothing keeps the weights
    assert _answer(weights).shape == (1, 3)


@pytest.mark.slow
def test_a_slow_compilation_says_so_in_a_terminal(weights, monkeypatch, capsys):
    for is_terminal in (False, True):
        _forget()
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
        monkeypatch.setattr(compiled, "_SLOW_SECONDS", 0.0)
        _answer(weights)
        said = capsys.readouterr().err
        assert ("compiling the program that reads prompts" in said) == is_terminal
        assert ("compiling the program that decodes tokens" in said) == is_terminal
    _answer(weights)
    assert not capsys.readouterr().err
    compiled.forget_programs()
    monkeypatch.setattr(sys, "stderr", object())  # of a logger: no terminal
    assert _answer(weights).shape == (1, 3)


def test_shapes_of_weights_are_enough_to_compile_ahead(weights, compilations):
    _forget()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    made = generation.make_generate(MODEL, POLICIES["paper"], max_new_tokens=3)
    made.check(shapes, np.zeros((1, 31), np.int32)).begin(shapes, is_ahead=True)
    assert _answer(weights).shape == (1, 3)
    assert len(_of_generation(compilations)) == 2
