"""Measures the machine code of the kernels for GPUs from Ampere on; `report.py` shows the table.

    python tests/ampere_table.py [--out benchmarks/results/ampere_code.json]

Needs an environment with JAX's CUDA plugin, `ptxas` and `nvdisasm`, but no GPU. Each row has, for
one GPU and shape: registers, bytes of spills and of shared memory, thread blocks per multiprocessor
and the resource that limits them, and a warp's instructions for 64 keys in the inner loop (without
the branch of masked steps), with the number of them that multiply, the lower bound.

For decode, whose warps have keys of their own, a row also has the bytes of keys and values that a
multiprocessor's thread blocks have in flight, and registers and spills of the kernel that combines.

For the kernels that select for prompts on other GPUs than Hopper, a row has the instructions of
their loops. Where NVIDIA publishes tensor cores' throughput, it also has the cycles that they need
for the kernel's largest products.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hopper
import sass

_FOLDER = Path(__file__).resolve().parent
_BENCHMARKS = _FOLDER.parent / "benchmarks"
_THREADS, _REGISTERS, _RESERVED = 128, 65536, 1024


def inner_loop(code: str, product: str | tuple[str, ...] = "HMMA") -> tuple[int, int]:
    """Counts instructions of the loop that multiplies, and the multiplying ones; no masked steps.

    Args:
      code: The kernel's code as `nvdisasm` printed it.
      product: Name of the instructions that multiply.
    """
    names, jumps = _read_code(code)
    products = [index for index, name in enumerate(names) if name.startswith(product)]
    # ptxas rotates the loop: it ends in a jump back, or continues after one.
    start, end = min(
        ((to, at) for at, to in jumps.items() if to <= products[0] and at >= products[-1]),
        key=lambda x: x[1] - x[0],
    )
    count, index = 0, start
    while index <= end:
        count += 1
        to = jumps.get(index, 0)
        is_masked = index < to <= end and any(name.startswith("BAR") for name in names[index:to])
        index = to if is_masked else index + 1
    return count, len(products)


def loops(code: str, product: str = "HMMA") -> tuple[int, int]:
    """Counts all and multiplying instructions in one pass of each innermost loop that multiplies.

    Args:
      code: The kernel's code as `nvdisasm` printed it.
      product: Name of the instructions that multiply.
    """
    names, jumps = _read_code(code)
    back = [(to, at) for at, to in jumps.items() if to <= at]
    of_loops = {x: sum(name.startswith(product) for name in names[x[0] : x[1] + 1]) for x in back}
    multiply = [x for x in back if of_loops[x]]
    inner = [
        (start, end)
        for start, end in multiply
        if not any((to, at) != (start, end) and start <= to and at <= end for to, at in multiply)
    ]
    return sum(end - start + 1 for start, end in inner), sum(of_loops[x] for x in inner)


def _read_code(code: str) -> tuple[list[str], dict[int, int]]:
    """Returns the names of all instructions, and each jump's target by its own index."""
    lines, labels = sass.parse(code)
    found = enumerate(map(sass.BRANCH.search, lines))
    jumps = {index: labels[target[1]] for index, target in found if target}
    return [sass.PREDICATE.sub("", line).partition(" ")[0] for line in lines], jumps


def rows_of(capability: str) -> None:
    """Prints the rows of one GPU, as a JAX process compiles for one GPU only."""
    os.environ["PATH"] = hopper.path_of_assemblers(Path(sys.prefix))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    for what in ("PTXAS", "SASS_CTRL", "PTX", "HOST_LLVM"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"
    import attention_cases
    import linear_cases
    import page_score_cases

    answers = os.fdopen(os.dup(1), "w")
    shapes = (*attention_cases.CODE_PREFILL, *attention_cases.CODE_DECODE)
    rows = [_attention_row(case, capability) for case in shapes]
    if capability != "9.0":
        rows += [_linear_row(case, capability) for case in linear_cases.CODE_SHAPES]
        for case in page_score_cases.CODE_SHAPES:
            rows += _selection_rows(case, capability)
    print(*map(json.dumps, rows), sep="\n", file=answers, flush=True)


def _kernels(case: Any, capability: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Compiles a case; yields the name and the code of each kernel, and its occupancy.

    The occupancy has registers, spills, thread blocks per multiprocessor and what limits them.
    """
    import ptx

    _, text = hopper.compile_case(case, capability)
    for (said, code), (_, host) in zip(hopper.split_kernels(text), ptx.kernels(text), strict=True):
        (name,) = set(re.findall(r"Compiling entry function '(\w+?)_mosaic_gpu_kernel'", said))
        facts, shared = hopper.read_assembler(said), ptx.read_launch(host, [0] * 10).shared_bytes
        limits = {
            "registers": _REGISTERS // (-(-facts["registers"] // 8) * 8 * _THREADS),
            "shared memory": hopper.SHARED_KIB[capability] * 1024 // (shared + _RESERVED),
        }
        least = min(limits, key=limits.__getitem__)
        yield (
            name,
            code,
            {
                "registers": facts["registers"],
                "spill_bytes": facts["spill_store_bytes"] + facts["spill_load_bytes"],
                "shared_bytes": shared,
                "programs": limits[least],
                "limit": least,
            },
        )


def _attention_row(case: Any, capability: str) -> dict[str, Any]:
    """Returns the row of an attention kernel."""
    from sketchwalk_jax.pallas_kernels.attention import attention

    # If there is a second kernel, it combines parts.
    (_, code, occupancy), *others = _kernels(case, capability)
    if case.op == "prefill":
        rows = 64 if case.heads[0] == case.heads[1] else 128
        memory = hopper.SHARED_KIB[capability] * 1024
        keys, stages = attention.sizes(rows, case.head_dim, memory)
        own = keys
    else:  # each warp has its own keys of a step
        keys, own = 64, 16
        stages = occupancy["shared_bytes"] // (2 * 2 * keys * case.head_dim)
    count, products = inner_loop(code)
    row = {
        "op": case.op,
        "capability": capability,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "lists": f"pages of {case.block_size}" if case.block_size == 16 else f"{case.block_size}",
        "dtype": case.dtype,
        "keys": keys,
        "stages": stages,
        **occupancy,
        "instructions": count * 64 // own,
        "products": products * 64 // own,
    }
    if case.op == "decode":
        combine = others[0][2] if others else {}
        row |= {
            "kib_in_flight": row["programs"] * (stages - 1) * keys * case.head_dim // 256,
            "parts": "several" if combine else "one",
            "combine_registers": combine.get("registers"),
            "combine_spill_bytes": combine.get("spill_bytes"),
        }
    return row


def _linear_row(case: Any, capability: str) -> dict[str, Any]:
    """Returns the row of the decode matmul kernel."""
    ((_, code, occupancy),) = _kernels(case, capability)
    count, products = loops(code)  # 0 where the assembler has unrolled the loop
    return {
        "op": "linear",
        "capability": capability,
        "rows": case.rows,
        "inputs": case.inputs,
        "columns": list(case.columns),
        "dtype": case.dtype,
        **occupancy,
        "instructions": count or None,
        "products": products or None,
        # A thread reads eight weights for each of four inputs of a group, four groups ahead.
        "kib_in_flight": occupancy["programs"] * _THREADS * 4 * 4 * 16 // 1024,
    }


# One pass through the loops of each kernel that selects for prompts, per warp.
_TURNS = {
    "representatives": "one query more, of 64",
    "max_logits_kernel": "64 keys, 64 queries",
    "page_scores_kernel": "16 blocks, 32 queries, both passes",
}
# Cycles per `mma.sync` with float16 sums on a quarter of a multiprocessor, by NVIDIA's figures for
# dense float16: 1024 fused multiply-adds per multiprocessor on an A100, 512 on the others.
_CYCLES = {"8.0": 8, "8.6": 16, "8.9": 16, "12.0": 16}


def _selection_rows(case: Any, capability: str) -> list[dict[str, Any]]:
    """Returns the rows of the kernels that select for a prompt."""
    rows = []
    for name, code, occupancy in _kernels(case, capability):
        count, products = loops(code)  # 0 where the assembler has unrolled the loop
        cycles = _CYCLES.get(capability) if name == "max_logits_kernel" else None
        rows.append(
            {
                "op": "prompt selection",
                "capability": capability,
                "heads": (case.heads, case.kv_heads),
                "head_dim": case.head_dim,
                "lists": "pages of 16",
                "kernel": name,
                "turn": _TURNS[name],
                **occupancy,
                "instructions": count or None,
                "products": products or None,
                "tensor_cycles": None if cycles is None else cycles * products,
            }
        )
    return rows


def main() -> None:
    """Compiles for each GPU in a process of its own, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(_BENCHMARKS / "results" / "ampere_code.json"))
    parser.add_argument("--rows-of", metavar="CAPABILITY", help="print the rows of one GPU")
    options = parser.parse_args()
    if options.rows_of is not None:
        rows_of(options.rows_of)
        return
    rows = []
    cases = (_FOLDER / x for x in ("attention", "decode_matmul", "page_scores"))
    search = os.pathsep.join(map(str, (_FOLDER, *cases, _FOLDER.parent)))
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
    """Returns the version of `ptxas`."""
    path = hopper.path_of_assemblers(Path(sys.prefix))
    said = subprocess.run(
        ["ptxas", "--version"], env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, check=True
    )
    found = re.search(r"release [\d.]+, V([\d.]+)", said.stdout.decode())
    return "unknown" if found is None else found[1]


if __name__ == "__main__":
    main()
