"""What a Hopper GPU does by itself: the rates that bounds of kernels are made of.

    python benchmarks/hopper_rates.py [--out benchmarks/results/hopper_rates.json]

Each kernel does one thing, over and over: one program for each multiprocessor, four warpgroups of
it. Instructions are written in the assembler's own language (PTX), so that no compiler changes what
is counted; the processors' own clocks say how long they took.

* `alu`: an instruction of single threads, eight independent ones in turn.
* `wgmma`: products of 64 rows in registers, or shared memory, with columns in shared memory, eight
  in flight from each warpgroup.
* `tma`: keys of one head, eight blocks at a time, from the second cache to shared memory: as lines
  of 128 bytes in one piece, or as rows of 64 bytes between those of the other heads.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as typed_arith
from jaxlib.mlir.dialects import llvm as typed_llvm
from jaxlib.mlir.dialects import memref
from jaxtyping import Array
from tqdm import tqdm

from sketchwalk_jax.pallas_kernels import ops, warp_ops, words

# Their annotations lack the operands that their functions take.
arith: Any = typed_arith
llvm: Any = typed_llvm

PROCESSORS = 132
WARPGROUPS = 4
_CHAINS = 8  # instructions that do not wait for each other
_UNROLLED = 8  # of each chain in a turn of the loop
_TURNS = 4096
_PRODUCTS = 8  # in flight
_STAGES = 4
_HEADS, _GROUPS = 8, 64
# What one thread executes, by the name that the assembler gives it.
INSTRUCTIONS = {
    "FFMA": "fma.rn.f32 {0}, {0}, {1}, {2};",
    "FMNMX": "max.f32 {0}, {1}, {2};",
    "MUFU.EX2": "ex2.approx.ftz.f32 {0}, {1};",
    "VIMNMX": "max.s32 {0}, {1}, {2};",
    "VIMNMX3": "max.s32 {0}, {0}, {1}; max.s32 {0}, {0}, {2};",
    "VHMNMX": "max.NaN.f16x2 {0}, {0}, {1}; max.NaN.f16x2 {0}, {0}, {2};",
    "HMNMX2": "max.NaN.f16x2 {0}, {1}, {2};",
    "SHFL": "shfl.sync.bfly.b32 {0}, {1}, 1, 31, -1;",
}
# Left operand, kind of the sums, columns.
PRODUCTS = tuple(
    (left, kind, columns)
    for kind in ("f32", "f16")
    for left in ("registers", "shared memory")
    for columns in (64, 128, 192)
)
Row = dict[str, Any]


def main() -> None:
    """Measures everything and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(common.RESULTS / "hopper_rates.json"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for name, what, run, count in tqdm(list(cases()), desc="rates"):
        found = measure(run, options.repeats)
        rate = common.summarize([count / cycles for cycles, _ in found])
        clock = common.summarize([cycles / seconds / 1e9 for cycles, seconds in found])
        rows.append({"op": name, **what, "per_cycle": rate, "clock_ghz": clock})
        tqdm.write(f"{name} {what}: {rate['median']:.2f} a cycle at {clock['median']:.2f} GHz")
    meta = common.describe_machine(repeats=options.repeats, processors=PROCESSORS)
    common.write_results(options.out, meta, rows)


def cases() -> list[tuple[str, Row, Callable[[], Array], float]]:
    """Name, what it is, a call that returns cycles of each warpgroup, and what is counted."""
    found: list[tuple[str, Row, Callable[[], Array], float]] = []
    for name, code in INSTRUCTIONS.items():
        call = functools.partial(_run, functools.partial(_emit_instructions, code))
        count = WARPGROUPS * warp_ops.THREADS * _CHAINS * _UNROLLED * _TURNS
        found.append(("alu", {"instruction": name, "unit": "results"}, call, count))
    for left, kind, columns in PRODUCTS:
        emit = functools.partial(_emit_products, left=left, kind=kind, columns=columns)
        count = WARPGROUPS * _PRODUCTS * _TURNS * 64.0 * columns * 32
        what = {"left": left, "sums": kind, "columns": columns, "unit": "multiplications"}
        found.append(("wgmma", what, functools.partial(_run, emit), count))
    for lies in ("lines", "rows"):
        call = functools.partial(_run_copies, lies)
        what = {"keys_lie_in": lies, "unit": "bytes"}
        found.append(("tma", what, call, float(_GROUPS * 512 * 64 * _COPIED_TIMES)))
    return found


def measure(run: Callable[[], Array], repeats: int) -> list[tuple[float, float]]:
    """Cycles of the slowest warpgroup and seconds of the call, of some calls after the first."""
    np.asarray(run())
    found = []
    for _ in range(repeats):
        start = common.clock()
        cycles = np.asarray(run())
        found.append((float(cycles.max()), common.clock() - start))
    return found


# Instructions


@functools.cache
def _compiled(emit: Any) -> Any:
    def body(keys: Any, out: Any, *, shared: Any, arrived: Any) -> None:
        program, warpgroup = (jax.lax.axis_index(x) for x in ("program", "warpgroup"))

        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.copy_gmem_to_smem(keys, shared, arrived)

        plgpu.barrier_wait(arrived)
        reference = plgpu.RefType(ops.transforms(keys.dtype, 128))

        @plgpu.inline_mgpu(arg_types=(reference, plgpu.RefType()))
        def count(_: Any, shared: Any, out: Any) -> None:
            cycles = emit(shared)
            thread = arith.remui(words.thread(), words.constant(warp_ops.THREADS))
            memref.store(cycles, out, [words.index(thread)])

        count(shared, out.at[program, warpgroup])

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((PROCESSORS, WARPGROUPS, warp_ops.THREADS), jnp.int32),
        scratch_types={
            "shared": ops.tiled((256, 128), jnp.float8_e4m3fn),
            "arrived": plgpu.Barrier(num_arrivals=1),
        },
        grid=(PROCESSORS,),
        grid_names=("program",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        compiler_params=ops.compiler_params(),
    )
    return jax.jit(kernel).lower(_keys((256, 128))).compile()


def _run(emit: Any) -> Array:
    return _compiled(emit)(_keys((256, 128)))


@functools.cache
def _keys(shape: tuple[int, ...]) -> Array:
    return jax.random.normal(jax.random.key(0), shape).astype(jnp.float8_e4m3fn)


def _emit_instructions(code: str, _: ir.Value) -> ir.Value:
    """Cycles of one instruction, over and over."""
    names = [f"x{index}" for index in range(_CHAINS)]
    lines = [f".reg .b32 x<{_CHAINS}>;"]
    lines += [f"mad.lo.u32 {name}, $2, {2 * index + 3}, 77;" for index, name in enumerate(names)]
    body = [
        code.format(name, names[(index + 1) % _CHAINS], names[(index + 2) % _CHAINS])
        for _ in range(_UNROLLED)
        for index, name in enumerate(names)
    ]
    return _timed(lines, body, names)


def _emit_products(shared: ir.Value, *, left: str, kind: str, columns: int) -> ir.Value:
    """Cycles of products, eight at a time."""
    sums = [f"s{index}" for index in range(columns * 64 // 128 // (2 if kind == "f16" else 1))]
    own = "{a0, a1, a2, a3}" if left == "registers" else "$3"
    product = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k32.{kind}.e4m3.e4m3 {{{', '.join(sums)}}}, "
        f"{own}, $3, 1, 1, 1;"
    )
    before = [f".reg .b32 s<{len(sums)}>; .reg .b32 a<4>;"]
    before += [f"mov.b32 {one}, 0;" for one in sums]
    before += [f"mad.lo.u32 a{index}, $2, {2 * index + 3}, 0x28303c38;" for index in range(4)]
    body = ["wgmma.fence.sync.aligned;", *[product] * _PRODUCTS]
    body += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    return _timed(before, body, sums, [_descriptor(shared)])


def _timed(
    before: Sequence[str], body: Sequence[str], results: Sequence[str], more: Sequence[Any] = ()
) -> ir.Value:
    """Cycles of a loop; what it computes goes where the assembler cannot know that it is lost."""
    after = ["mov.b32 kept, 0;", *[f"xor.b32 kept, kept, {one};" for one in results]]
    code = [
        ".reg .b64 start, end; .reg .b32 turn, kept; .reg .pred goes_on;",
        *before,
        "bar.sync 0; mov.u64 start, %clock64; mov.b32 turn, 0;",
        "again:",
        *body,
        f"add.u32 turn, turn, 1; setp.lt.u32 goes_on, turn, {_TURNS};",
        "@goes_on bra again;",
        "mov.u64 end, %clock64; sub.u64 end, end, start; cvt.u32.u64 $0, end;",
        *after,
        "mov.b32 $1, kept;",
    ]
    kinds = ["=r", "=r", "r", *["l"] * len(more)]
    both = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32)>"),
        [words.thread(), *more],
        f"{{ {' '.join(code)} }}",
        ",".join(kinds),
        asm_dialect=0,
        has_side_effects=True,
    )
    cycles, kept = (
        llvm.extractvalue(words.i32(), both, ir.DenseI64ArrayAttr.get([index]))
        for index in range(2)
    )
    # No value of `kept` makes a difference, which the assembler cannot know.
    is_odd = arith.cmpi(arith.CmpIPredicate.eq, kept, words.constant(0x13579BDF))
    return arith.select(is_odd, arith.addi(cycles, words.constant(1)), cycles)


def _descriptor(shared: ir.Value) -> ir.Value:
    """Lines of 128 bytes in shared memory, swizzled."""
    long = ir.IntegerType.get_signless(64)
    address = llvm.ptrtoint(long, mgpu.utils.memref_ptr(shared))
    address = arith.andi(address, arith.constant(long, 0x3FFFF))
    address = arith.shrui(address, arith.constant(long, 4))
    return arith.ori(address, arith.constant(long, (8 * 128 >> 4 << 32) | (1 << 62)))


# Copies

_COPIED_TIMES = 64  # all keys of a head


@functools.cache
def _compiled_copies(lies: str) -> Any:
    is_lines = lies == "lines"
    shape = (_HEADS, _GROUPS, 256, 128) if is_lines else (_GROUPS * 512, _HEADS, 64)
    part = (256, 128) if is_lines else (512, 64)
    steps = _GROUPS * _COPIED_TIMES

    def body(keys: Any, out: Any, *, stages: Any, filled: Any) -> None:
        program = jax.lax.axis_index("program")
        head = jax.lax.rem(program, _HEADS)

        def load(step: Any) -> None:
            slot, group = jax.lax.rem(step, _STAGES), jax.lax.rem(step, _GROUPS)
            if is_lines:
                plgpu.copy_gmem_to_smem(keys.at[head, group], stages.at[slot], filled.at[slot])
                return
            for half in range(2):
                some = pl.ds(group * 512 + half * 256, 256)
                target = stages.at[slot, pl.ds(half * 256, 256)]
                plgpu.copy_gmem_to_smem(keys.at[some, head], target, filled.at[slot])

        start = _clock()
        for step in range(_STAGES):
            load(jnp.int32(step))

        def turn(step: Any, nothing: Any) -> Any:
            plgpu.barrier_wait(filled.at[jax.lax.rem(step, _STAGES)])
            pl.when(step + _STAGES < steps)(functools.partial(load, step + _STAGES))
            return nothing

        jax.lax.fori_loop(0, steps, turn, ())
        out[program] = _clock() - start

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((PROCESSORS,), jnp.int32),
        scratch_types={
            "stages": ops.tiled((_STAGES, *part), jnp.float8_e4m3fn, swizzle=part[1]),
            "filled": plgpu.Barrier(num_arrivals=1 if is_lines else 2, num_barriers=_STAGES),
        },
        grid=(PROCESSORS,),
        grid_names=("program",),
        compiler_params=ops.compiler_params(),
    )
    return jax.jit(kernel).lower(_keys(shape)).compile(), shape


def _run_copies(lies: str) -> Array:
    compiled, shape = _compiled_copies(lies)
    return compiled(_keys(shape))


def _clock() -> Array:
    """The processor's cycles, in 32 bits."""

    @plgpu.inline_mgpu(return_type=words.integer_type())
    def read(_: Any) -> Any:
        code = "mov.u32 $0, %clock;"
        found = llvm.inline_asm(words.i32(), [], code, "=r", asm_dialect=0, has_side_effects=True)
        return words.as_array(found)

    return read()


if __name__ == "__main__":
    main()
