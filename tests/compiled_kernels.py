"""Runs Pallas kernels on a CPU as they are compiled for Hopper, in the emulator `ptx`.

This pytest plugin, which tests/conftest.py loads where SKETCHWALK_COMPILED_KERNELS is set, replaces
`plgpu.kernel`. Each call compiles the kernel for its operands' shapes, which needs JAX's CUDA
plugin but no GPU, and runs its PTX on them.
"""

import functools
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hopper
import jax
import jax.numpy as jnp
import numpy as np
import ptx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

_make = plgpu.kernel
_codes: dict[str, tuple[str, str]] = {}  # by the kernel's name in a compiled program
_seeds = itertools.count()  # each call runs warps in another random order
_capability = "9.0"


def pytest_configure() -> None:
    """Makes every later kernel run as it is compiled."""
    os.environ["PATH"] = hopper.path_of_assemblers(Path(sys.prefix))
    from sketchwalk_jax.pallas_kernels import dispatch
    from sketchwalk_jax.pallas_kernels.walk import api

    plgpu.kernel = _kernel
    dispatch.is_hopper = lambda: True
    api.walk_precision = lambda kernel_config: jax.lax.Precision.HIGHEST  # XLA runs on a CPU


@contextmanager
def compiled_for(capability: str) -> Iterator[None]:
    """Compiles the kernels that are called inside the context for another GPU."""
    global _capability
    _start_assembler()
    was, _capability = _capability, capability
    try:
        with hopper.compiling_for(capability):
            yield
    finally:
        _capability = was


@functools.cache
def _start_assembler() -> None:
    """Compiles for Hopper first: `ptxas` takes code for a process's first GPU and older ones."""

    def copy(source: Any, target: Any) -> None:
        target[0] = source[0]

    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    _code(_make(copy, out_type=one), [one])


def _kernel(body: Any, *, interpret: Any = None, **options: Any) -> Any:
    """Stands in for `plgpu.kernel`."""
    if interpret:
        return _make(body, interpret=interpret, **options)
    real = _make(body, **options)

    def call(*operands: Any) -> Any:
        is_reference = [isinstance(jax.typeof(x), _REFERENCE) for x in operands]
        held = [x[...] if own else x for x, own in zip(operands, is_reference, strict=True)]
        held = [jnp.asarray(x) for x in held]

        def program(*values: Any) -> Any:
            given = [
                jax.new_ref(x) if own else x for x, own in zip(values, is_reference, strict=True)
            ]
            results = real(*given)
            kept = [x[...] for x, own in zip(given, is_reference, strict=True) if own]
            return results, kept

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in held]
        results, kept = jax.eval_shape(program, *shapes)
        leaves, tree = jax.tree.flatten(results)
        run = functools.partial(
            _run, _code(program, shapes), leaves, tuple(is_reference), next(_seeds)
        )
        found, written = jax.pure_callback(run, (leaves, kept), *held)
        references = [x for x, own in zip(operands, is_reference, strict=True) if own]
        for one, value in zip(references, written, strict=True):
            one[...] = value
        return jax.tree.unflatten(tree, found)

    return call


_REFERENCE = type(jax.typeof(jax.new_ref(np.zeros(1, np.float32))))


@functools.cache
def _sharding(capability: str) -> NamedSharding:
    """Returns the sharding of one pretended GPU."""
    return NamedSharding(hopper.make_mesh(1, "device", capability), PartitionSpec())


def _code(program: Any, shapes: list[jax.ShapeDtypeStruct]) -> tuple[str, str]:
    """Returns the PTX of a program's only kernel, and its host code."""
    sharding = _sharding(_capability)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
    sys.stdout.flush()
    was = os.dup(1)
    try:
        with tempfile.TemporaryFile("w+") as printed:
            os.dup2(printed.fileno(), 1)
            text = jax.jit(program).lower(*placed).compile().as_text()
            os.dup2(was, 1)
            printed.seek(0)
            found = list(ptx.kernels(printed.read()))
    finally:
        os.dup2(was, 1)
        os.close(was)
    # A kernel that the process has compiled before prints nothing: its code is stored.
    name = re.search(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)
    if name is None or len(found) > 1:
        raise RuntimeError(f"one kernel is to be compiled, got {len(found)}")
    if found:
        _codes[name[1]] = found[0]
    return _codes[name[1]]


def _run(
    code: tuple[str, str],
    results: list[jax.ShapeDtypeStruct],
    is_reference: tuple[bool, ...],
    seed: int,
    *operands: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Runs a kernel whose outputs start as garbage."""
    held = [np.array(x, copy=own, order="C") for x, own in zip(operands, is_reference, strict=True)]
    written = [x for x, own in zip(held, is_reference, strict=True) if own]
    found = [
        np.full(x.size * x.dtype.itemsize, 0xFF, np.uint8).view(x.dtype).reshape(x.shape)
        for x in results
    ]
    ptx.run(*code, held, [*found, *written], seed=seed)
    return found, written
