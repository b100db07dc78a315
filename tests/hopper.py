"""Compiles kernels for GPUs on a machine without one, and reads the assembler's messages.

The tests call `compiling.compile_for`. It starts `serve` in an environment with JAX's CUDA plugin,
`ptxas` and `nvdisasm`. `serve` reads one case per line and answers with a line of JSON. A case is
`file.py:NAME`, by its name in the file or in the file's table `COMPILED`. The answer holds the
assembler's messages about each kernel. With the word `program` before the case it describes the
whole program: writes to memory, launches in loops, transfers between GPUs if the case is for
several (`ranks`), work that overlaps them, and roundings.
"""

import functools
import json
import math
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import sass

# An H200 with its own (`a`) instructions, as XLA's fusions depend on the chip's figures.
TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  device_memory_size: 151397597184
}
"""
_LEAST_WITH_KERNELS = 8.0
_OWN = "feature_extension: ACCELERATED_FEATURES"
# Other GPUs by compute capability: their target's differences from an H200's. Figures of 8.0
# (A100, 40 GB), 8.6 (A6000), 10.0 (B200), 12.0 (RTX 6000 Pro) and the H200 are from XLA's
# repository (`xla/backends/gpu/target_config/specs`), with two exceptions at 12.0: 100 KiB of
# shared memory, not 128, and the GPU's own (`a`) instructions. XLA has no target for 8.9 and 7.5:
# 8.9 has unchecked figures of an RTX 4090, 7.5 the figures of a T4's data sheet.
_FIGURES = (
    "threads_per_core_limit",
    "shared_memory_per_core",
    "core_count",
    "fpus_per_core",
    "clock_rate_ghz",
    "memory_bandwidth",
    "l2_cache_size",
    "device_memory_size",
)
_OTHERS: dict[str, tuple[str, tuple[float, ...]]] = {
    "7.5": ("minor: 5", (1024, 65536, 40, 64, 1.59, 320000000000, 4194304, 15843721216)),
    "8.0": ("", (2048, 167936, 108, 64, 1.41, 1555200000000, 41943040, 42331013120)),
    "8.6": ("minor: 6", (1536, 102400, 84, 128, 1.8, 768096000000, 6291456, 51041271808)),
    "8.9": ("minor: 9", (1536, 102400, 128, 128, 2.52, 1008000000000, 75497472, 24000000000)),
    "10.0": (_OWN, (2048, 233472, 148, 128, 1.965, 7672320000000, 132644864, 191514411008)),
    "12.0": (_OWN, (1536, 102400, 188, 128, 2.6, 1792000000000, 134217728, 103079215104)),
}
SHARED_KIB = {"9.0": 228} | {
    name: int(figures[1]) // 1024
    for name, (_, figures) in _OTHERS.items()
    if float(name) >= _LEAST_WITH_KERNELS
}
"""Shared memory per multiprocessor in KiB, by compute capability, of GPUs with kernels."""
_FACTS = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
}
# For each kernel, lines of `ptxas` are printed, then its code from `nvdisasm`.
_KERNEL = re.compile(r"^(ptxas .*?)^(\s*\.target\b.*?)(?=^ptxas |\Z)", re.M | re.S)
_NAME = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?'")


def read_assembler(text: str) -> dict[str, Any]:
    """Reads registers, stack, spills and warnings from the `ptxas -v` messages about one kernel."""
    facts: dict[str, Any] = {}
    for name, pattern in _FACTS.items():
        found = [int(number) for number in re.findall(pattern, text)]
        if not found:
            raise ValueError(f"no {name} in what the assembler said:\n{text}")
        facts[name] = max(found)
    lines = text.splitlines()
    facts["complaints"] = [x for x in lines if re.search("warning|performance loss|error", x, re.I)]
    return facts


def split_kernels(printed: str) -> list[tuple[str, str]]:
    """Splits the output into pairs of the assembler's messages about a kernel, and its code."""
    return _KERNEL.findall(printed)


def read_kernels(printed: str) -> dict[str, dict[str, Any]]:
    """Reads the assembler's messages about each kernel, by name, and finds its hazards."""
    kernels = {}
    for said, code in split_kernels(printed):
        name = f"{_NAME.findall(said)[0]}_{len(kernels)}"
        kernels[name] = read_assembler(said) | {"hazards": sass.hazards(code)}
    if len(kernels) != len(_NAME.findall(printed)):
        raise ValueError(f"no code of some kernel in what was printed:\n{printed[-4000:]}")
    return kernels


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_NO_WRITES = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}
_NO_LAUNCHES = _NO_WRITES | {"while", "conditional", "fusion-done", "copy-done"}
_NO_WRITES |= {"while", "custom-call"}


def read_writes(text: str) -> list[tuple[int, str]]:
    """Finds each write to memory outside of custom calls: bytes and instruction.

    An in-place update of a buffer counts with the whole buffer's bytes; its line says
    `dynamic_update_slice` or `scatter`.
    """
    inlined = set(re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", text))
    found = []
    for name, lines in _computations(text):
        if name in inlined:
            continue
        for line in lines:
            written = _INSTRUCTION.match(line)
            if written is not None and written[2] not in _NO_WRITES:
                found.append((_largest(written[1]), line.strip()[:200]))
    return found


def read_launches(text: str) -> list[int]:
    """Counts kernels and copies that each loop of a compiled program launches, largest first."""
    bodies = set(re.findall(r"\bbody=%([\w.\-]+)", text))
    found = []
    for name, lines in _computations(text):
        if name in bodies:
            made = [_INSTRUCTION.match(line) for line in lines]
            kinds = [one[2] for one in made if one is not None]
            found.append(sum(kind not in _NO_LAUNCHES for kind in kinds))
    return sorted(found, reverse=True)


def read_questions(text: str) -> int:
    """Counts the instructions of a compiled program that wait until the host has read a condition.

    These are branches, and loops whose number of rounds is unknown.
    """
    asking = re.compile(r" conditional\(| while\((?!.*known_trip_count)")
    return sum(asking.search(line) is not None for line in text.splitlines())


def read_sends(text: str) -> list[tuple[str, int]]:
    """Returns kind and result bytes per rank of each collective in a compiled program, in order."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found = []
    for line in text.splitlines():
        made = re.search(rf" = (.*?) ({kinds})(?:-start)?\(", line)
        if made is not None:
            found.append((made[2], _largest(made[1])))
    return found


def read_overlaps(text: str) -> list[tuple[int, int]]:
    """Returns the bytes of each all-gather in a compiled program, and how much work overlaps it.

    The work is the number of matrix products and kernels that are launched between its start and
    its end. The program lists instructions in the GPU's launch order.
    """
    found: list[tuple[int, int]] = []
    for _, lines in _computations(text):
        running: dict[str, tuple[int, int]] = {}
        for line in lines:
            made = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) all-gather-start\(", line)
            ended = re.search(r" all-gather-done\(%([\w.\-]+)\)", line)
            if made is not None:
                running[made[1]] = _largest(made[2]), 0
            elif ended is not None:
                found.append(running.pop(ended[1]))
            elif re.search(r"%gemm_fusion[\w.\-]* = | custom-call\(", line):
                running = {name: (size, count + 1) for name, (size, count) in running.items()}
    return found


def read_products(text: str) -> list[tuple[str, str, str]]:
    """Finds every matrix product of a compiled program: its name in JAX, and both operands.

    Operands are in XLA's notation, such as `bf16[32,64]`.
    """
    found = []
    for _, lines in _computations(text):
        operands = dict(
            match.groups()
            for line in lines
            if (match := re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (\w+\[[\d,]*\])", line))
        )
        for line in lines:
            product = re.search(r" (?:dot|custom-call)\(%([\w.\-]+), %([\w.\-]+)", line)
            if product and (" dot(" in line or '"__cublas$' in line):
                name = re.search(r'op_name="([^"]*)"', line)
                own = [operands.get(one, "?") for one in product.groups()]
                found.append((name[1] if name else "", *own))
    return found


def read_roundings(text: str) -> list[tuple[int, int]]:
    """Returns exponent and mantissa bits of each rounding whose result the program uses.

    Conversions to a narrower type and back do not count: XLA leaves such pairs out on GPUs.
    """
    found = re.findall(r" reduce-precision\(.*?exponent_bits=(\d+), mantissa_bits=(\d+)", text)
    return [(int(exponent), int(mantissa)) for exponent, mantissa in found]


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each computation of a compiled program, and its lines."""
    for computation in re.split(r"\n\n", text):
        head, *lines = computation.strip().split("\n")
        name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", head)
        if name is not None:
            yield name[1], lines


def _largest(shape: str) -> int:
    """Returns the bytes of an array, or of a tuple's largest array."""
    found = [0]
    for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        sizes = [int(size) for size in sizes.split(",") if size]
        found.append(math.prod(sizes) * _BYTES.get(kind, 4))
    return max(found)


def path_of_assemblers(environment: Path) -> str:
    """Returns `PATH` with the programs of NVIDIA's wheels in a virtual environment."""
    wheels = environment.glob("lib/python3*/site-packages/nvidia/*/bin")
    return os.pathsep.join([*map(str, wheels), os.environ["PATH"]])


def target(capability: str) -> str:
    """Returns the target of a GPU by its compute capability; Hopper's is `TARGET`."""
    if capability == "9.0":
        return TARGET
    more, figures = _OTHERS[capability]
    facts = dict(zip(_FIGURES, figures, strict=True))
    # A thread block can use 1 KiB less than the multiprocessor has.
    facts["shared_memory_per_block_optin"] = facts["shared_memory_per_core"] - 1024
    found = TARGET.replace(f"major: 9 {_OWN}", f"major: {int(float(capability))} {more}")
    for key, value in facts.items():
        found = re.sub(rf"\b{key}: \S+", f"{key}: {value}", found)
    return found


@contextmanager
def compiling_for(capability: str) -> Iterator[None]:
    """Makes Mosaic GPU compile for this capability; it takes any pretended device for 9.0."""
    from jax.experimental.mosaic.gpu import utils

    from sketchwalk_jax.pallas_kernels import config, dispatch

    major, minor = map(int, capability.split("."))
    has_kernels = float(capability) >= _LEAST_WITH_KERNELS
    here = "hopper" if capability == "9.0" else "ampere" if has_kernels else None
    memory = {"9.0": SHARED_KIB.get(capability, 0)}  # a CPU counts as 9.0
    with (
        mock.patch.object(utils, "_infer_arch", lambda: (major, minor)),
        mock.patch.object(dispatch, "kernels_here", lambda: here),
        mock.patch.dict(config._SHARED_KIB, memory),
    ):
        yield


def make_mesh(ranks: int, axis: str, capability: str = "9.0") -> Any:
    """Makes a mesh of pretended GPUs, in an environment with JAX's CUDA plugin."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        "", platform="cuda", topology=f"1x1x{ranks}", target_config=target(capability)
    )
    return topologies.make_mesh(topology, (ranks,), (axis,))


def compile_case(case: Any, capability: str) -> tuple[Any, str]:
    """Compiles a case for a GPU.

    Returns:
      The compiled program, and what the compilers printed past `sys.stdout`.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    ranks = getattr(case, "ranks", 1)
    if ranks > 1:
        function, arguments = case.program(mesh=make_mesh(ranks, case.axis))
    else:
        function, arguments = case.program()
        sharding = NamedSharding(make_mesh(1, "device", capability), PartitionSpec())
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
    was = os.dup(1)
    with tempfile.TemporaryFile("w+") as printed:
        os.dup2(printed.fileno(), 1)
        try:
            with compiling_for(capability):
                program = jax.jit(function, donate_argnums=getattr(case, "donated", ()))
                compiled = program.lower(*arguments).compile()
        finally:
            os.dup2(was, 1)
            os.close(was)
        printed.seek(0)
        return compiled, printed.read()


def serve() -> None:
    """Compiles the cases that standard input names, for the GPU of the first argument.

    A JAX process compiles for one GPU only.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports may print to standard output, too
    # JAX reads these when it is imported. Autotuning would run programs. No dump folder: the
    # compiler would also write 100 MB of passes per kernel, in half of its time.
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    os.environ["MOSAIC_GPU_DUMP_SASS_CTRL"] = "1"
    for line in sys.stdin:
        try:
            answer = _answer(line.strip(), sys.argv[1])
        except Exception as error:  # the tests show it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(name: str, capability: str) -> dict[str, Any]:
    case = _find(name.removeprefix("program "), capability)
    compiled, printed = compile_case(case, capability)
    if not name.startswith("program "):
        return read_kernels(printed)
    text = compiled.as_text()
    return {
        "writes": read_writes(text),
        "launches": read_launches(text),
        "questions": read_questions(text),
        "sends": read_sends(text),
        "overlaps": read_overlaps(text),
        "roundings": read_roundings(text),
        "products": read_products(text),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def _find(name: str, capability: str) -> Any:
    """Finds a case by its name in a file, or in the file's table of cases of a GPU."""
    file, _, name = name.rpartition(":")
    found = _read_file(file)
    compiled = found.get("COMPILED", {}).get(capability, ())
    return (found | {str(case): case for case in compiled})[name]


@functools.cache
def _read_file(file: str) -> dict[str, Any]:
    sys.path.append(str(Path(file).parent))  # it may import its neighbours
    return runpy.run_path(file)
