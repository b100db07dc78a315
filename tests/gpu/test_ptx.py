"""The emulator computes PTX correctly on a CPU, and detects each fault that it promises to."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import ptx
import pytest

HEAD = """
.version 9.0
.target sm_90a
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.visible .entry one(.param .u64 .ptr .align 256 one_0, .param .u64 .ptr .align 256 one_1,
  .param .align 64 .b8 one_2[256])
.maxntid {threads}, 1, 1
{{
  .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<30>;
  ld.param.b64 %rd1, [one_0];
  ld.param.b64 %rd2, [one_1];
  mov.b64 %rd3, one_2;
  mov.u32 %r1, %tid.x;
  mov.b64 %rd9, __dynamic_shmem__0;
  cvt.u32.u64 %r90, %rd9;
  mul.wide.u32 %rd4, %r1, 4;
  add.s64 %rd5, %rd1, %rd4;
  add.s64 %rd6, %rd2, %rd4;
  setp.eq.s32 %p8, %r1, 0;
"""


def run(body, source, target, *, threads=32, maps=(), seed=0):
    """Runs instructions after `HEAD`: `%rd5` and `%rd6` address a thread's words of both arrays."""
    memory = ptx.Memory()
    addresses = [memory.place(x) for x in (source, target)]
    arguments = (0, 8, 1 << 20)
    found = {
        arguments[2] + 128 * index: ptx.TensorMap(addresses[which], *rest)
        for index, (which, *rest) in enumerate(maps)
    }
    held = dict(zip(arguments, addresses, strict=False))
    launch = ptx.Launch((1, 1, 1), threads, 32768, arguments, held, found)
    ptx.execute(f"{HEAD.format(threads=threads)} {body} ret; }}", launch, memory, seed=seed)
    return target


def arrays(count=32, dtype=np.uint32):
    return np.arange(count, dtype=dtype), np.zeros(count, dtype)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %r3, %r2, 7;", lambda x: x + 7),
        ("mul.wide.u32 %rd7, %r2, 5; cvt.u32.u64 %r3, %rd7;", lambda x: x * 5),
        ("mul.hi.u32 %r3, %r2, -1;", lambda x: x * (2**32 - 1) >> 32),
        (
            "{ .reg .b32 x; shl.b32 x, %r2, 3; lop3.b32 %r3, x, %r2, 5, 0x6a; }",
            lambda x: (x << 3 & x) ^ 5,
        ),
        ("shf.l.wrap.b32 %r3, 0x87654321, %r2, 36;", lambda x: x << 4 | 8),
        ("shf.r.clamp.b32 %r3, 0x87654321, %r2, 12;", lambda x: x << 20 | 0x87654),
        ("prmt.b32 %r3, %r2, 255, 0x4400;", lambda x: x | x << 8 | 255 << 16 | 255 << 24),
        ("shfl.sync.bfly.b32 %r3, %r2, 3, 31, -1;", lambda x: x ^ 3),
        ("shfl.sync.idx.b32 %r3, %r2, 5, 31, -1;", lambda x: 0 * x + 5),
        ("setp.lt.u32 %p1, %r2, 9; selp.b32 %r3, 1, 2, %p1;", lambda x: np.where(x < 9, 1, 2)),
        ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r3, {%rs2, %rs1};", lambda x: x << 16),
        (
            "cvt.u16.u32 %rs1, %r2; cvt.rn.f16x2.e4m3x2 %r3, %rs1;",
            lambda x: x.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype("f2").view("u2"),
        ),
        (
            "cvt.rn.f32.u32 %r4, %r2; mul.f32 %r4, %r4, 0f40000000; cvt.rzi.u32.f32 %r3, %r4;",
            lambda x: 2 * x,
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_instructions_compute(body, expected):
    source, target = arrays()
    wanted = expected(source.astype(np.int64))
    found = run(f"ld.global.b32 %r2, [%rd5]; {body} st.global.b32 [%rd6], %r3;", source, target)
    np.testing.assert_array_equal(found, wanted.astype(np.uint32))


# Odd threads loop a given number of times; even threads jump to code after the end.
PARTING = """
  mov.b32 %r3, 0; and.b32 %r4, %r1, 1; setp.eq.s32 %p1, %r4, 0;
  @%p1 bra FAR;
AGAIN:
  add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, %r1; @%p2 bra AGAIN;
MEET:
  shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1; st.global.b32 [%rd6], %r5; ret;
FAR:
  mov.b32 %r3, 100; bra MEET;
"""


def test_threads_that_part_meet_again():
    found = run(PARTING, *arrays())
    lane = np.arange(32)
    np.testing.assert_array_equal(found, np.where(lane % 2, 100, lane + 1))


def test_threads_that_have_not_met_may_not_exchange():
    body = PARTING.replace("mov.b32 %r3, 100;", "shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;")
    with pytest.raises(ptx.Fault, match=r"elsewhere .*shfl"):
        run(body, *arrays())


EXCHANGE = """
  shl.b32 %r2, %r1, 2; add.s32 %r2, %r2, %r90;
  ld.global.b32 %r3, [%rd5]; st.shared.b32 [%r2], %r3;
  bar.sync 0;
  xor.b32 %r4, %r1, 32; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r90;
  ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd6], %r5;
"""


@pytest.mark.parametrize("seed", range(4))
def test_warps_exchange_through_shared_memory(seed):
    source, target = arrays(64)
    found = run(EXCHANGE, source, target, threads=64, seed=seed)
    np.testing.assert_array_equal(found, source ^ 32)


def test_without_a_barrier_some_order_of_warps_finds_garbage():
    source, target = arrays(64)
    body = EXCHANGE.replace("bar.sync 0;", "")
    found = [run(body, source, target.copy(), threads=64, seed=seed) for seed in range(8)]
    assert any((x != source ^ 32).any() for x in found)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %r3, %r4, 1;", "nothing has been written to %r4"),
        ("st.global.b32 [%rd6+4096], %r1;", "no array has the addresses"),
        ("ld.shared.b32 %r3, [%r90+40000];", "outside of shared memory"),
        ("st.global.b64 [%rd6], %rd5;", "no multiples of 8"),
        ("bar.sync 1, 64;", "wait forever"),
        ("@%p8 bar.sync 0;", "elsewhere"),
        ("mbarrier.init.shared.b64 [%r90], 1;", "made more than once"),
        ("trap;", "trap"),
    ],
)
def test_faults_of_threads_are_seen(body, message):
    with pytest.raises(ptx.Fault, match=message):
        run(body, *arrays())


# Copies 64 floats with the copy engine to shared memory and back.
MAPS = ((0, 4, (64,), (1,), (64,), 16), (1, 4, (64,), (1,), (64,), 16))
THERE = """
  @%p8 mbarrier.init.shared.b64 [%r90+1024], 1;
  bar.sync 0;
  @%p8 mbarrier.arrive.expect_tx.shared.b64 %rd8, [%r90+1024], 256;
  @%p8 cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r90], [%rd3, {0}], [%r90+1024];
"""
WAIT = """
  { .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%r90+1024], 0, 1000;
    @done bra.uni DONE; bra.uni AGAIN; DONE: }
"""
DOUBLE = """
  shl.b32 %r2, %r1, 2; add.s32 %r2, %r2, %r90;
  ld.shared.b32 %r3, [%r2]; add.f32 %r3, %r3, %r3; st.shared.b32 [%r2], %r3;
  ld.shared.b32 %r3, [%r2+128]; add.f32 %r3, %r3, %r3; st.shared.b32 [%r2+128], %r3;
"""
FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"
BACK = """
  add.s64 %rd7, %rd3, 128;
  @%p8 cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd7, {0}], [%r90];
  cp.async.bulk.commit_group;
"""
END = "cp.async.bulk.wait_group 0;"
OVERWRITE = "st.shared.b32 [%r2], %r1;"


def copy(*parts):
    source = np.arange(64, dtype=np.float32)
    return run("".join(parts), source, np.zeros_like(source), maps=MAPS), 2 * source


def test_copies_arrive():
    np.testing.assert_array_equal(*copy(THERE, WAIT, DOUBLE, FENCE, BACK, END))


def test_who_does_not_wait_for_a_copy_finds_garbage():
    found, wanted = copy(THERE, DOUBLE, FENCE, WAIT, BACK, END)
    assert (found != wanted).any()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((THERE, WAIT, DOUBLE, BACK, END), "no fence has passed on"),
        ((THERE, WAIT, DOUBLE, FENCE, BACK, OVERWRITE, END), "overwritten"),
        ((THERE.replace("256;", "260;"), WAIT), "wait forever"),
        ((THERE.replace("1024], 1;", "1024], 2;"), WAIT), "wait forever"),
        ((THERE, "@%p8 mbarrier.arrive.shared.b64 %rd8, [%r90+1024];"), "more arrivals"),
        ((THERE, THERE), "made more than once"),
        ((THERE, WAIT, BACK.replace("@%p8 ", ""), END), "more than one thread copies"),
    ],
)
def test_faults_of_copies_are_seen(parts, message):
    with pytest.raises(ptx.Fault, match=message):
        copy(*parts)


# Each thread copies 16 bytes, then 8 of 16; a thread of the other warp reads them.
THREADS_COPY = """
  shl.b32 %r2, %r1, 5; add.s32 %r2, %r2, %r90; mul.wide.u32 %rd7, %r1, 32; add.s64 %rd7, %rd1, %rd7;
  cp.async.cg.shared.global [%r2], [%rd7], 16;
  cp.async.commit_group;
  cp.async.ca.shared.global [%r2+16], [%rd7+16], 16, 8;
  cp.async.commit_group;
  {wait}
  bar.sync 0;
  xor.b32 %r4, %r1, 32; shl.b32 %r5, %r4, 5; add.s32 %r5, %r5, %r90;
  ld.shared.b32 %r6, [%r5]; ld.shared.b32 %r7, [%r5+20]; ld.shared.b32 %r8, [%r5+28];
  add.s32 %r6, %r6, %r7; add.s32 %r6, %r6, %r8; st.global.b32 [%rd6], %r6;
"""
BOTH_GROUPS = "cp.async.wait_group 0;"


def copy_of_threads(body, seed=0):
    source, target = np.arange(64 * 8, dtype=np.uint32), np.zeros(64, np.uint32)
    thread = np.arange(64) ^ 32  # bytes that are not copied are zero
    found = run(body, source, target, threads=64, seed=seed)
    return (found == 8 * thread + 8 * thread + 5).all()


@pytest.mark.parametrize("seed", range(4))
def test_copies_of_threads_arrive(seed):
    assert copy_of_threads(THREADS_COPY.format(wait=BOTH_GROUPS), seed)
    assert copy_of_threads(THREADS_COPY.format(wait="cp.async.wait_all;"), seed)


def test_a_group_that_is_not_awaited_is_garbage():
    assert not copy_of_threads(THREADS_COPY.format(wait=""))
    assert not copy_of_threads(THREADS_COPY.format(wait="cp.async.wait_group 1;"))
    # The first of two groups has arrived with one left; nothing else is read.
    first_alone = THREADS_COPY.replace("[%r5+20]", "[%r5]").replace("[%r5+28]", "[%r5]")
    for left in range(3):
        source, target = np.arange(64 * 8, dtype=np.uint32), np.zeros(64, np.uint32)
        body = first_alone.format(wait=f"cp.async.wait_group {left};")
        found = run(body, source, target, threads=64)
        assert (found == 24 * (np.arange(64) ^ 32)).all() == (left < 2)


def test_copies_of_threads_are_not_awaited_before_they_are_a_group():
    body = THREADS_COPY.format(wait=BOTH_GROUPS)
    last = body.rindex("cp.async.commit_group;")
    assert not copy_of_threads(body[:last] + body[last:].replace("cp.async.commit_group;", "", 1))


def test_other_warps_know_of_copies_after_a_barrier_alone():
    body = THREADS_COPY.format(wait=BOTH_GROUPS).replace("bar.sync 0;", "")
    assert not all(copy_of_threads(body, seed) for seed in range(8))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[%r2], [%rd7], 16;", "[%r2], [%rd7+4], 16;", "no multiples of 16"),
        ("[%r2], [%rd7], 16;", "[%r2+8], [%rd7], 16;", "no multiples of 16"),
        ("[%rd7], 16;", "[%rd7+8192], 16;", "no array has the addresses"),
        ("[%rd7], 16;", "[%rd7], 8;", "past the nearest cache 16"),
        ("[%r2+16], [%rd7+16], 16, 8;", "[%r2+16], [%rd7+16], 8, 16;", "more than 8 bytes"),
        ("[%r2], [%rd7]", "[%r2+40000], [%rd7]", "outside of shared memory"),
        (BOTH_GROUPS, f"@%p8 {BOTH_GROUPS}", "elsewhere"),
    ],
)
def test_faults_of_copies_of_threads_are_seen(old, new, message):
    body = THREADS_COPY.format(wait=BOTH_GROUPS)
    assert old in body
    with pytest.raises(ptx.Fault, match=message):
        copy_of_threads(body.replace(old, new, 1))


def test_what_is_not_there_is_not_read():
    body = THREADS_COPY.format(wait=BOTH_GROUPS).replace("[%rd7+16], 16, 8", "[%rd7+8192], 16, 0")
    source, target = np.arange(64 * 8, dtype=np.uint32), np.zeros(64, np.uint32)
    assert (run(body, source, target, threads=64) == 8 * (np.arange(64) ^ 32)).all()


# 16 rows per warp times eight columns: queries in registers, keys in shared memory.
DEPTH = 32  # eight-bit numbers
SUMS = ", ".join(f"%r{10 + index}" for index in range(4))
LEFT = ", ".join(f"%r{20 + index}" for index in range(4))
START = f"""
  shl.b32 %r2, %r1, 2; add.s32 %r3, %r2, %r90;
  ld.global.b32 %r4, [%rd5+4096];
  setp.lt.u32 %p1, %r1, 64; @%p1 st.shared.b32 [%r3], %r4;
  and.b32 %r5, %r1, 31; shr.u32 %r6, %r1, 5; shl.b32 %r6, %r6, 9;
  shr.u32 %r7, %r5, 2; shl.b32 %r7, %r7, 5; add.s32 %r6, %r6, %r7;
  and.b32 %r7, %r5, 3; shl.b32 %r7, %r7, 2; add.s32 %r6, %r6, %r7;
  cvt.u64.u32 %rd7, %r6; add.s64 %rd7, %rd7, %rd1;
  ld.global.b32 %r20, [%rd7]; ld.global.b32 %r21, [%rd7+256];
  ld.global.b32 %r22, [%rd7+16]; ld.global.b32 %r23, [%rd7+272];
  shr.u64 %rd10, %rd9, 4; and.b64 %rd10, %rd10, 16383;
  or.b64 %rd10, %rd10, {(8 * 32 >> 4) << 32 | 3 << 62};
  setp.ne.b32 %p2, 0, 0;
"""
PRODUCT = f"""
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{{SUMS}}}, {{{LEFT}}}, %rd10, %p2, 1, 1;
  wgmma.commit_group.sync.aligned;
"""
AWAIT = "wgmma.wait_group.sync.aligned 0;"
WRITE = """
  and.b32 %r5, %r1, 31; shr.u32 %r6, %r1, 5; shl.b32 %r6, %r6, 9;
  shr.u32 %r7, %r5, 2; shl.b32 %r7, %r7, 5; add.s32 %r6, %r6, %r7;
  and.b32 %r7, %r5, 3; shl.b32 %r7, %r7, 3; add.s32 %r6, %r6, %r7;
  cvt.u64.u32 %rd7, %r6; add.s64 %rd7, %rd7, %rd2;
  st.global.v2.b32 [%rd7], {%r10, %r11}; st.global.v2.b32 [%rd7+256], {%r12, %r13};
"""


def multiply(*parts, dtype=ml_dtypes.float8_e4m3fn):
    """Multiplies 64 queries with eight keys; returns products, queries and keys."""
    rng = np.random.default_rng(0)
    factor = 40 if dtype == np.int8 else 1
    queries, keys = ((factor * rng.normal(size=(size, DEPTH))).astype(dtype) for size in (64, 8))
    held = np.zeros(8192, np.uint8)
    held[:2048] = queries.view(np.uint8).reshape(-1)
    # Lines of 32 bytes; every other four lines swap their halves.
    place = np.arange(256)
    held[4096 + (place ^ (place >> 7 & 1) << 4)] = keys.view(np.uint8).reshape(-1)
    wide = np.int32 if dtype == np.int8 else np.float32
    found = run("".join(parts), held, np.zeros((64, 8), wide), threads=128)
    return found, queries, keys


def test_products_of_eight_bits_lose_what_is_far_below_the_largest():
    found, queries, keys = multiply(START, FENCE, PRODUCT, AWAIT, WRITE)
    queries, keys = (x.astype(np.float64) for x in (queries, keys))
    products = queries[:, None] * keys[None]
    unit = 2.0 ** (np.floor(np.log2(np.abs(products).max(axis=-1))) - 13)
    # Each product is truncated towards zero: it loses less than a unit.
    kept = np.trunc(products / unit[..., None]).sum(axis=-1) * unit
    np.testing.assert_array_equal(found, kept.astype(np.float32))
    lost = np.abs(found - products.sum(axis=-1))
    assert (lost < DEPTH * unit).all() and lost.max() > 0


def test_products_of_whole_numbers_are_exact():
    product = PRODUCT.replace("f32.e4m3.e4m3", "s32.s8.s8").replace("%p2, 1, 1", "%p2")
    found, queries, keys = multiply(START, FENCE, product, AWAIT, WRITE, dtype=np.int8)
    np.testing.assert_array_equal(found, queries.astype(np.int32) @ keys.astype(np.int32).T)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((START, "bar.sync 0;", PRODUCT, AWAIT, WRITE), "no fence has passed on"),
        ((START, FENCE, PRODUCT, WRITE, AWAIT), "a product in flight has %r1"),
        ((START, FENCE, PRODUCT, "mov.b32 %r10, 0;", AWAIT), "a product in flight has %r10"),
        ((START, FENCE, PRODUCT, "mov.b32 %r20, 0;", AWAIT), "%r20.* has been overwritten"),
        ((START, FENCE, PRODUCT, "st.shared.b32 [%r90], %r1;", AWAIT), "has been overwritten"),
        ((START, FENCE, PRODUCT), "end before their products"),
        ((START, FENCE, PRODUCT.replace("%p2, 1", "%p8, 1"), AWAIT), "whether sums go on"),
    ],
)
def test_faults_of_products_are_seen(parts, message):
    with pytest.raises(ptx.Fault, match=message):
        multiply(*parts)


# A thread uses one word of its own everywhere in both matrices and in the sums.
OWN_PRODUCT = """
  ld.global.b32 %r2, [%rd5];
  mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r3, %r4}, {%r2, %r2, %r2, %r2}, {%r2, %r2},
    {%r2, %r2};
  st.global.b32 [%rd6], %r3; st.global.b32 [%rd6+128], %r4;
"""


def test_products_of_a_warp_have_sums_in_float16():
    pairs = np.random.default_rng(0).normal(size=(8, 4, 2)).astype(np.float16)  # by row and place
    lines = pairs.reshape(8, 8)
    left = np.block([[lines, lines], [lines, lines]]).astype(np.float32)
    right = np.concatenate([lines, lines], axis=1).astype(np.float32)  # a line for each column
    wanted = left @ right.T + np.concatenate([lines, lines])
    found = run(OWN_PRODUCT, pairs.view(np.uint32), np.zeros((2, 8, 4), np.uint32))
    found = found.view(np.float16).reshape(16, 8)
    np.testing.assert_array_equal(found, wanted.astype(np.float16))


HOST = """\
define void @one_mosaic_gpu(ptr %0, ptr %1) {
  %2 = load ptr, ptr %1, align 8
  %3 = getelementptr ptr, ptr %1, i32 1
  %4 = load ptr, ptr %3, align 8
  %5 = insertvalue { ptr, i64, [2 x i64] } poison, ptr %4, 0
  %6 = insertvalue { ptr, i64, [2 x i64] } %5, i64 6, 2, 1
  %7 = extractvalue { ptr, i64, [2 x i64] } %6, 0
  %8 = alloca [128 x i8], i64 1, align 64
  %9 = alloca i64, i64 2, align 8
  %10 = extractvalue { ptr, i64, [2 x i64] } %6, 2, 1
  store i64 4, ptr %9, align 4
  %11 = getelementptr inbounds nuw i64, ptr %9, i64 1
  store i64 %10, ptr %11, align 4
  call void @mosaic_gpu_init_tma_desc(ptr %8, ptr %7, i64 5, i64 2, ptr %9, ptr %9, i64 64, ptr %9)
  %12 = load [128 x i8], ptr %8, align 1
  %13 = alloca { ptr, [128 x i8] }, align 8
  %14 = alloca [2 x i64], align 8
  %15 = getelementptr { ptr, [128 x i8] }, ptr %13, i32 0, i32 0
  store ptr %2, ptr %15, align 8
  store ptr %15, ptr %14, align 8
  %16 = getelementptr { ptr, [128 x i8] }, ptr %13, i32 0, i32 1
  store [128 x i8] %12, ptr %16, align 1
  %17 = getelementptr i64, ptr %14, i32 1
  store ptr %16, ptr %17, align 8
  call void @mosaic_gpu_build_kernel_spec(ptr %0, i32 3, i32 2, i32 1, i32 0, i32 0, i32 0, \
i32 256, i32 1, i32 1, i32 4096, i32 0, i32 2, ptr %14, ptr %14)
  ret void
}
"""


def test_what_the_host_says_is_read():
    launch = ptx.read_launch(HOST, [1000, 2000])
    assert (launch.grid, launch.threads, launch.shared_bytes) == ((3, 2, 1), 256, 4096)
    first, second = launch.arguments
    assert launch.memory[first] == 1000
    assert launch.maps[second] == ptx.TensorMap(2000, 2, (4, 6), (4, 6), (4, 6), 64)


def test_a_box_that_reaches_beyond_an_array_says_which_bytes_there_are():
    one = ptx.TensorMap(1000, 2, (3, 8), (8, 1), (2, 4), 16)
    places, is_there = one.places((2, -1))
    assert places.reshape(2, 4, 2)[0, 1].tolist() == [1032, 1033]
    wanted = [[False, True, True, True], [False] * 4]
    np.testing.assert_array_equal(is_there.reshape(2, 4, 2)[..., 0], wanted)


def test_the_example_of_the_page_runs():
    page = (Path(ptx.__file__).parent / "README.md").read_text(encoding="utf-8")
    exec(re.search(r"<!-- example -->\n```python\n(.*?)```", page, re.DOTALL)[1], {})
