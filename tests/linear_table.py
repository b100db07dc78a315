"""Counts what a token's linear layers move and execute in each type of weights, without a GPU.

    python tests/linear_table.py [--out benchmarks/results/linear_code.json]

Takes an environment with JAX's CUDA plugin, `ptxas` and `nvdisasm`. Of each product of a layer of
Llama 3.1 8B with one row, on an H200: what the kernel for few rows (`pallas_kernels/linear.py`) is
compiled to, and what it copies.

* `weight_bytes`: of four bits without the scales of groups, which are `scale_bytes`.
* `memory_bytes_per_weight_byte`: each array read once, scales included, and partial sums written
  and read again, over the bytes of the weights. `copied_bytes_per_weight_byte`: all copies into
  shared memory; every program copies rows and the norm's scale, most of them from the L2 cache.
* `instructions_per_weight_byte`: of a thread, in the inner loop; `instructions_per_weight` over the
  number of weights. `issue_share`: of all instructions that a processor can start while memory
  delivers the weights, and the scales of groups, at its full rate.
* `kib_in_flight`: weights that a processor has asked for and that have not come.

The last row of a type estimates a token: the bytes of all layers and of the head in bfloat16, at
the rate that the benchmark `end_to_end` measured for them in bfloat16. `tokens` adds what that
benchmark measured of the rest of a token, by context and number of sequences, beside the whole
token in bfloat16. These are no measurements.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ampere_table
import hopper

_BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
_LAYERS, _HEAD = 32, 128256 * 4096
_CELLS = ((131072, 1), (16384, 1), (65536, 8))  # contexts and sequences of tokens
_THREADS, _REGISTERS, _RESERVED = 128, 65536, 1024
# An H200: bytes in a second, processors, clock under load, and instructions of a clock.
_BANDWIDTH, _PROCESSORS, _CLOCK, _STARTED = 4.8e12, 132, 1.75e9, 4


def row_of(name: str, product: Any, dtype: str, sharding: Any) -> dict[str, Any]:
    """Counts what one product of the benchmark `linear` moves and executes."""
    import jax
    import linear as linear_benchmark
    import ptx
    from linear_cases import LinearKernelCase

    from sketchwalk_jax.pallas_kernels import linear
    from sketchwalk_jax.pallas_kernels.config import WEIGHT_GROUP

    columns, inputs, has_norm = product
    case = LinearKernelCase(
        rows=1,
        inputs=inputs,
        columns=columns,
        has_norm=has_norm,
        dtype=linear_benchmark.DTYPES[dtype],
        is_transposed=dtype != "bfloat16",
    )
    function, shapes = case.program()
    tiling = linear.tile(shapes[0], shapes[3], has_norm=has_norm, is_transposed=case.is_transposed)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    was = os.dup(1)
    with tempfile.TemporaryFile("w+") as printed:
        os.dup2(printed.fileno(), 1)
        with hopper.compiling_for("9.0"):
            jax.jit(function).lower(*shapes).compile()
        os.dup2(was, 1)
        printed.seek(0)
        text = printed.read()
    os.close(was)
    ((said, code),) = hopper.split_kernels(text)
    facts = hopper.read_assembler(said)
    shared = ptx.read_launch(next(ptx.kernels(text))[1], [0] * 16).shared_bytes
    programs = min(
        _REGISTERS // (-(-facts["registers"] // 8) * 8 * _THREADS),
        hopper.SHARED_KIB["9.0"] * 1024 // (shared + _RESERVED),
    )
    bits = {"bfloat16": 16, "int4": 4}.get(dtype, 8)
    tile_bytes = 64 * tiling.depth * bits // 8
    count, products = ampere_table.inner_loop(code, ("HGMMA", "IGMMA", "QGMMA"))
    width = sum(columns)
    weight_bytes = width * inputs * bits // 8
    vectors = 2 * inputs * (2 if has_norm else 1)  # the row, and what the norm multiplies by
    scales = {"bfloat16": 0, "int4": 2 * width * inputs // WEIGHT_GROUP}.get(dtype, 4 * width)
    partial_sums = 2 * 4 * width * tiling.parts
    with_scales = 1 + scales / weight_bytes if bits == 4 else 1.0
    delivered = _BANDWIDTH / _PROCESSORS / _CLOCK  # bytes in a clock
    return {
        "product": name,
        "dtype": dtype,
        "columns": columns,
        "inputs": inputs,
        "weight_bytes": weight_bytes,
        "memory_bytes": weight_bytes + vectors + scales + partial_sums,
        "memory_bytes_per_weight_byte": 1 + (vectors + scales + partial_sums) / weight_bytes,
        "scale_bytes": scales,
        "copied_bytes_per_weight_byte": 1 + vectors * tiling.starts[-1] / weight_bytes,
        "registers": facts["registers"],
        "spill_bytes": ampere_table.spills(facts),
        "shared_bytes": shared,
        "stages": tiling.stages,
        "programs": programs,
        "warps": programs * 4,
        "kib_in_flight": programs * (tiling.stages - 1) * tile_bytes // 1024,
        "instructions": count,
        "products_of_loop": products,
        "instructions_per_weight_byte": count * _THREADS / tile_bytes,
        "instructions_per_weight": count * _THREADS / (64 * tiling.depth),
        "issue_share": count * 4 / (tile_bytes * with_scales) * delivered / _STARTED,
    }


def estimate(
    rows: list[dict[str, Any]], measured: dict[tuple[int, int], dict[str, float]]
) -> dict[str, Any]:
    """A token's linear layers with the types of these rows, and whole tokens.

    Args:
      rows: Of the products of a layer.
      measured: Parts of a token in bfloat16, by context and number of sequences.
    """
    measured_ms = measured[_CELLS[0]]["linear"]
    own = _LAYERS * sum(row["memory_bytes"] for row in rows)
    wide = _LAYERS * sum(2 * sum(row["columns"]) * row["inputs"] for row in rows) + 2 * _HEAD
    rate = wide / measured_ms / 1e9
    estimated_ms = (own + 2 * _HEAD) / rate / 1e9
    tokens = []
    for (context, sequences), parts in measured.items():
        whole_ms = sum(parts.values())
        cell = {"context": context, "sequences": sequences, "bfloat16_ms": whole_ms}
        tokens.append(cell | {"estimated_ms": whole_ms - parts["linear"] + estimated_ms})
    return {
        "product": "a token",
        "dtype": rows[0]["dtype"],
        "layer_bytes": own,
        "head_bytes": 2 * _HEAD,
        "measured_bfloat16_ms": measured_ms,
        "measured_bfloat16_tb_per_s": rate,
        "estimated_ms": estimated_ms,
        "tokens": tokens,
        "largest_issue_share": max(row["issue_share"] for row in rows),
    }


def _measured_parts() -> dict[tuple[int, int], dict[str, float]]:
    """Parts of a token of the 8B model in bfloat16, as `end_to_end` measured them."""
    every = json.loads((_BENCHMARKS / "results" / "end_to_end.json").read_text())["rows"]
    wanted = {"model": "llama-3.1-8b", "phase": "decode", "implementation": "ours"}
    wanted |= {"policy": "sketchwalk", "preset": "recommended", "density": 0.1}
    found = {}
    for cell in _CELLS:
        own = wanted | dict(zip(("tokens", "batch"), cell, strict=True))
        (row,) = (row for row in every if own.items() <= row.items())
        found[cell] = row["parts_ms"]
    return found


def main() -> None:
    """Compiles every product in every type and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(_BENCHMARKS / "results" / "linear_code.json"))
    options = parser.parse_args()
    os.environ["PATH"] = hopper.path_of_assemblers(Path(sys.prefix))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    for what in ("PTXAS", "SASS_CTRL", "PTX", "HOST_LLVM"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"
    sys.path[:0] = [str(_BENCHMARKS.parent), str(_BENCHMARKS)]
    import common
    import linear
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(hopper.make_mesh(1, "device", "9.0"), PartitionSpec())
    rows, measured = [], _measured_parts()
    # Beside weights of four bits, some arrays keep eight (`params.quantized_dtype`).
    in_four = ("output", "gate, up")
    in_eight: list[dict[str, Any]] = []
    for dtype in linear.TYPES:
        names = [name for name in linear.PRODUCTS if dtype != "int4" or name in in_four]
        own = [row_of(name, linear.PRODUCTS[name], dtype, sharding) for name in names]
        every = own
        if dtype == "int4":
            every = own + [row for row in in_eight if row["product"] not in in_four]
        in_eight = own
        rows += [*own, estimate(every, measured)]
        print(f"{dtype}: {rows[-1]['estimated_ms']:.2f} ms a token, estimated", flush=True)
    details = {"assembler": ampere_table.assembler(), "is_measured": False}
    common.write_results(options.out, common.describe_machine(**details), rows)


if __name__ == "__main__":
    main()
