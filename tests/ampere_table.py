"""What `ptxas` makes of the kernels for GPUs from Ampere on, which `report.py` shows.

    python tests/ampere_table.py [--out benchmarks/results/ampere_code.json]

Takes an environment with JAX's CUDA plugin, `ptxas` and `nvdisasm`, and no GPU. Of each GPU and
shape: registers, bytes of spills and of shared memory, programs of a multiprocessor at a time and
what allows no more, and instructions of a warp for 64 keys in the inner loop, without the branch of
masked steps, beside those that multiply, which no code can do without.

Of decode, whose warps have keys of their own, also the bytes of keys and values that the programs
of a multiprocessor have under way, and registers and spills of the kernel that combines.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hopper

_FOLDER = Path(__file__).resolve().parent
_BENCHMARKS = _FOLDER.parent / "benchmarks"
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)(.*)")
_THREADS, _REGISTERS, _RESERVED = 128, 65536, 1024


def inner_loop(code: str, product: str = "HMMA") -> tuple[int, int]:
    """Instructions of the loop that multiplies, and how many multiply; masked steps left out.

    Args:
      code: What `nvdisasm` printed of a kernel.
      product: The name of what multiplies.
    """
    lines: list[tuple[str, str]] = []  # name and operands
    labels: dict[str, int] = {}
    for text in code.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", text)
        found = _LINE.search(text)
        if label is not None:
            labels[label[1]] = len(lines)
        elif found is not None:
            lines.append((found[3], found[4]))
    jumps = {}
    for index, (name, operands) in enumerate(lines):
        target = re.search(r"`\((\.L_x_\d+)\)", operands)
        if name.startswith("BRA") and target is not None:
            jumps[index] = labels[target[1]]
    products = [index for index, (name, _) in enumerate(lines) if name.startswith(product)]
    # ptxas turns the loop so that it ends in a jump back, or goes on behind one.
    start, end = min(
        ((to, at) for at, to in jumps.items() if to <= products[0] and at >= products[-1]),
        key=lambda x: x[1] - x[0],
    )
    count, index = 0, start
    while index <= end:
        count += 1
        to = jumps.get(index, 0)
        is_masked = index < to <= end and any(name.startswith("BAR") for name, _ in lines[index:to])
        index = to if is_masked else index + 1
    return count, len(products)


def spills(facts: dict[str, Any]) -> int:
    """Bytes that are written to memory and read again for want of registers."""
    return facts["spill_store_bytes"] + facts["spill_load_bytes"]


def rows_of(capability: str) -> None:
    """Prints the rows of one GPU; a process of JAX compiles for one alone."""
    os.environ["PATH"] = hopper.path_of_assemblers(Path(sys.prefix))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    for what in ("PTXAS", "SASS_CTRL", "PTX", "HOST_LLVM"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"
    import ampere_cases
    import jax
    import ptx
    from jax.sharding import NamedSharding, PartitionSpec

    from sketchwalk_jax.pallas_kernels import ampere_prefill

    sharding = NamedSharding(hopper.make_mesh(1, "device", capability), PartitionSpec())
    memory = hopper.SHARED_KIB[capability] * 1024
    answers = os.fdopen(os.dup(1), "w")
    for case in ampere_cases.COMPILED.values():
        if case.capability != capability:
            continue
        function, shapes = case.program()
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
        with tempfile.TemporaryFile("w+") as printed:
            os.dup2(printed.fileno(), 1)
            with hopper.compiling_for(capability):
                jax.jit(function).lower(*shapes).compile()
            printed.seek(0)
            text = printed.read()
        # The kernel that combines comes second, if there is one.
        (said, code), *others = hopper.split_kernels(text)
        facts = hopper.read_assembler(said)
        shared = ptx.read_launch(next(ptx.kernels(text))[1], [0] * 10).shared_bytes
        registers = -(-facts["registers"] // 8) * 8 * _THREADS
        limits = {
            "registers": _REGISTERS // registers,
            "shared memory": memory // (shared + _RESERVED),
        }
        least = min(limits, key=limits.__getitem__)
        if case.op == "prefill":
            rows = 64 if case.heads[0] == case.heads[1] else 128
            keys, stages = ampere_prefill.sizes(rows, case.head_dim, memory)
            own = keys
        else:  # of the keys of a step each warp has its own
            keys, own = 64, 16
            stages = shared // (2 * 2 * keys * case.head_dim)
        count, products = inner_loop(code)
        row = {
            "op": case.op,
            "capability": capability,
            "heads": case.heads,
            "head_dim": case.head_dim,
            "lists": f"pages of {case.block_size}"
            if case.block_size == 16
            else f"{case.block_size}",
            "dtype": case.dtype,
            "keys": keys,
            "stages": stages,
            "registers": facts["registers"],
            "spill_bytes": spills(facts),
            "shared_bytes": shared,
            "programs": limits[least],
            "limit": least,
            "instructions": count * 64 // own,
            "products": products * 64 // own,
        }
        if case.op == "decode":
            combine = [hopper.read_assembler(said) for said, _ in others]
            row |= {
                "kib_in_flight": limits[least] * (stages - 1) * keys * case.head_dim // 256,
                "parts": "several" if combine else "one",
                "combine_registers": combine[0]["registers"] if combine else None,
                "combine_spill_bytes": spills(combine[0]) if combine else None,
            }
        print(json.dumps(row), file=answers, flush=True)


def main() -> None:
    """Compiles for one GPU after another, each in a process of its own, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(_BENCHMARKS / "results" / "ampere_code.json"))
    parser.add_argument("--rows-of", metavar="CAPABILITY", help="print the rows of one GPU")
    options = parser.parse_args()
    if options.rows_of is not None:
        rows_of(options.rows_of)
        return
    rows = []
    search = os.pathsep.join(map(str, (_FOLDER, _FOLDER.parent)))
    for capability in sorted(hopper.SHARED_KIB, key=float):
        command = [sys.executable, __file__, "--rows-of", capability]
        environment = os.environ | {"PYTHONPATH": search}
        done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
        rows += [json.loads(line) for line in done.stdout.splitlines()]
        print(f"{capability}: {len(rows)} rows", flush=True)
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.append(str(_BENCHMARKS))
    import common

    common.write_results(options.out, common.describe_machine(assembler=assembler()), rows)


def assembler() -> str:
    """The version of `ptxas`."""
    path = hopper.path_of_assemblers(Path(sys.prefix))
    said = subprocess.run(
        ["ptxas", "--version"], env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, check=True
    )
    found = re.search(r"release [\d.]+, V([\d.]+)", said.stdout.decode())
    return "unknown" if found is None else found[1]


if __name__ == "__main__":
    main()
