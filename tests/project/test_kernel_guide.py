"""The example of the kernel guide runs unchanged, compiles, and is the kernel it claims to be."""

import re
import sys

import guides
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import assert_compiled, compile_for

from sketchwalk_jax import KernelConfig
from sketchwalk_jax.pallas_kernels import dispatch

SIZE = 16
# File name of each block, as other blocks import it.
FILES = {"twin": "block_maxima", "kernel": "block_maxima_kernel", "choice": "kernel_maxima"}


def block(repository, name):
    """Returns the Python block after `<!-- name -->` of the guide."""
    return guides.block(repository / "pallas_kernels" / "README.md", name)


@pytest.fixture(scope="module")
def folder(repository, tmp_path_factory):
    """Writes the blocks of the example to files of their own."""
    folder = tmp_path_factory.mktemp("guide")
    for name, file in (FILES | {"case": "case"}).items():
        (folder / f"{file}.py").write_text(block(repository, name), encoding="utf-8")
    return folder


@pytest.fixture
def example(folder, monkeypatch):
    """Imports the example's blocks; returns their names."""
    monkeypatch.syspath_prepend(folder)
    for file in FILES.values():
        monkeypatch.delitem(sys.modules, file, raising=False)
    scope = {}
    for file in FILES.values():
        exec(f"from {file} import *", scope)
    return scope


def draw_keys(heads, dtype, num_blocks=3):
    rng = np.random.default_rng(heads)
    return jnp.asarray(rng.standard_normal((2, num_blocks * SIZE, heads, 64)), dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize(("heads", "dtype"), [(2, "bfloat16"), (4, "float16")])
def test_the_kernel_equals_its_twin(example, heads, dtype, capfd):
    key = draw_keys(heads, dtype)
    interpret = not dispatch.is_hopper()
    run = jax.jit(example["block_maxima_kernel"], static_argnums=1, static_argnames="interpret")
    maxima = run(key, SIZE, interpret=interpret)
    assert maxima.dtype == key.dtype
    np.testing.assert_array_equal(maxima, example["block_maxima"](key, SIZE))
    wanted = np.asarray(key, np.float32).reshape(2, 3, SIZE, heads, 64).max(2)
    np.testing.assert_array_equal(np.asarray(maxima, np.float32), wanted)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("heads", "dtype", "runs"),
    [(2, "bfloat16", True), (3, "bfloat16", False), (2, "float32", False)],
)
@pytest.mark.parametrize("may_run", [True, False])
def test_the_twin_takes_what_the_kernel_leaves(
    example, repository, heads, dtype, runs, may_run, monkeypatch
):
    called = []
    module = sys.modules["block_maxima_kernel"]

    def kernel(key, block_size, *, interpret):
        called.append(interpret)
        return example["block_maxima"](key, block_size)

    monkeypatch.setattr(module, "block_maxima_kernel", kernel)
    kernels = KernelConfig(interpret=True) if may_run else None
    key = draw_keys(heads, dtype)
    scope = example | {"key": key, "block_size": SIZE, "kernels": kernels}
    exec(block(repository, "use"), scope)
    np.testing.assert_array_equal(scope["maxima"], example["block_maxima"](key, SIZE))
    assert called == ([True] if runs and may_run else [])


@pytest.mark.hopper
@pytest.mark.slow
def test_the_case_compiles_for_hopper_without_spills(folder):
    kernels = compile_for("9.0", f"{folder / 'case.py'}:CASE")
    assert len(kernels) == 1
    assert_compiled(kernels, threads=1024)


def test_the_guide_links_to_every_file(repository):
    home = repository / "pallas_kernels"
    text = (home / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in home.glob("*.py")} - {"__init__.py"}
    assert files <= set(re.findall(r"\]\(([^)#\s]+)\)", text))
