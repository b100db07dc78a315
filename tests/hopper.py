"""Compiles kernels for Hopper on a machine without a GPU, and reads what the assembler said.

As a program, in an environment with JAX's CUDA plugin, `ptxas` and `nvdisasm`: takes names of cases
of `kernel_cases.COMPILED`, or `file.py:NAME` for a case in a file of its own, a line each, and
answers each with a line of JSON: what the assembler said of the kernels, or, behind the word
`program`, what the whole program writes to memory. The tests use `Compiler`, which starts it.
"""

import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sass

# All that the compiler asks about the chip: an H100 or H200, with its own (`a`) instructions.
TARGET = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647
  threads_per_warp: 32
}
"""
_FACTS = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
}
# What is printed for a kernel: lines of `ptxas`, then its code from `nvdisasm`.
_KERNEL = re.compile(r"^(ptxas .*?)^(\s*\.target\b.*?)(?=^ptxas |\Z)", re.M | re.S)
_NAME = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?'")


def read_assembler(text: str) -> dict[str, Any]:
    """Registers, stack, spills and complaints in the messages of `ptxas -v` about one kernel."""
    facts: dict[str, Any] = {}
    for name, pattern in _FACTS.items():
        found = [int(number) for number in re.findall(pattern, text)]
        if not found:
            raise ValueError(f"no {name} in what the assembler said:\n{text}")
        facts[name] = max(found)
    lines = text.splitlines()
    facts["complaints"] = [x for x in lines if re.search("warning|performance loss|error", x, re.I)]
    return facts


def read_kernels(printed: str) -> dict[str, dict[str, Any]]:
    """What `read_assembler` says about each kernel, by name, and the hazards in its code."""
    kernels = {}
    for said, code in _KERNEL.findall(printed):
        name = f"{_NAME.findall(said)[0]}_{len(kernels)}"
        kernels[name] = read_assembler(said) | {"hazards": sass.hazards(code)}
    if len(kernels) != len(_NAME.findall(printed)):
        raise ValueError(f"no code of some kernel in what was printed:\n{printed[-4000:]}")
    return kernels


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8}
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_NO_WRITES = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}
_NO_WRITES |= {"while", "custom-call"}


def read_writes(text: str) -> list[tuple[int, str]]:
    """What a compiled program writes to memory outside of custom calls: bytes and instruction.

    Entries of a buffer that are replaced where they lie count for the whole of it; their line says
    `dynamic_update_slice` or `scatter`.
    """
    inlined = set(re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", text))
    found = []
    for computation in re.split(r"\n\n", text):
        head, *lines = computation.strip().split("\n")
        name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", head)
        if name is None or name[1] in inlined:
            continue
        for line in lines:
            written = _INSTRUCTION.match(line)
            if written is not None and written[2] not in _NO_WRITES:
                found.append((_largest(written[1]), line.strip()[:200]))
    return found


def _largest(shape: str) -> int:
    """Bytes of an array, or of the largest of a tuple."""
    found = [0]
    for kind, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        sizes = [int(size) for size in sizes.split(",") if size]
        found.append(math.prod(sizes) * _BYTES.get(kind, 4))
    return max(found)


class Compiler:
    """The program below in another environment; a case that kills it leaves the others alone."""

    def __init__(self, python: str, *folders: Path) -> None:
        self._python, self._folders = python, folders  # of modules that cases import
        self._log = tempfile.TemporaryFile("w+")
        self._program: subprocess.Popen[str] | None = None

    def compile(self, name: str) -> dict[str, Any]:
        """The kernels of one case, by name; fails with the program's last words."""
        if self._program is None or self._program.poll() is not None:
            self._program = subprocess.Popen(
                [self._python, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=self._environment(),
            )
        assert self._program.stdin is not None and self._program.stdout is not None
        print(name, file=self._program.stdin, flush=True)
        answer = self._program.stdout.readline()
        if not answer:
            self._program.wait()
            self._log.seek(0)
            raise RuntimeError(f"compiling {name} ended the compiler: {self._log.read()[-4000:]}")
        result = json.loads(answer)
        if "error" in result:
            raise RuntimeError(f"{name} does not compile: {result['error']}")
        return result

    def close(self) -> None:
        """Ends the program."""
        if self._program is not None:
            self._program.communicate()
        self._log.close()

    def _environment(self) -> dict[str, str]:
        folder = Path(__file__).resolve().parent
        search = [str(path) for path in (folder.parent, folder, *self._folders)]
        # Programs of NVIDIA's wheels, which put them beside its libraries
        wheel = Path(self._python).parents[1].glob("lib/python3*/site-packages/nvidia/*/bin")
        programs = [*map(str, wheel), os.environ["PATH"]]
        drop = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # a cached program says nothing
        kept = {name: value for name, value in os.environ.items() if name not in drop}
        return kept | {
            "JAX_PLATFORMS": "cpu",
            "PATH": os.pathsep.join(programs),
            "PYTHONPATH": os.pathsep.join(search),
        }


def _serve() -> None:
    """Answers names from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")  # whatever compilers print is not an answer
    with _prepare() as compile_case:
        for line in sys.stdin:
            try:
                answer = compile_case(line.strip())
            except Exception as error:  # the tests show it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


@contextmanager
def _prepare() -> Iterator[Callable[[str], dict[str, Any]]]:
    with tempfile.TemporaryFile("w+") as printed:
        os.dup2(printed.fileno(), 1)
        # Read when JAX is imported; autotuning would run programs. Into a folder the compiler would
        # also write the module after each of its passes, 100 MB for a kernel, in half of the time.
        os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
        os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
        os.environ["MOSAIC_GPU_DUMP_SASS_CTRL"] = "1"
        import jax
        import kernel_cases
        from jax.experimental import topologies
        from jax.sharding import NamedSharding, PartitionSpec

        topology = topologies.get_topology_desc(
            "", platform="cuda", topology="1x1x1", target_config=TARGET
        )
        mesh = topologies.make_mesh(topology, (1,), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec())

        def compile_case(name: str) -> dict[str, Any]:
            kind, is_program, rest = name.partition("program ")
            name = rest if is_program and not kind else name
            file, is_file, case = name.rpartition(":")
            table = runpy.run_path(file) if is_file else kernel_cases.COMPILED
            function, arguments = kernel_cases.program(table[case])
            arguments = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
            )
            printed.seek(0)
            printed.truncate()
            donated = getattr(table[case], "donated", ())
            compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
            if is_program:
                return {
                    "writes": read_writes(compiled.as_text()),
                    "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
                }
            printed.seek(0)
            return read_kernels(printed.read())

        yield compile_case


if __name__ == "__main__":
    _serve()
