"""Register instructions: arithmetic of each thread, and exchanges within a warp."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ptx.machine import LANE, LANES, OPERATIONS, PAIRS, TYPES, Warp, kind_of, operation
from ptx.reading import Instruction, split


def _elementwise(function: Callable[..., Any]) -> Callable[[Warp, Instruction], None]:
    """Makes an instruction of a function of numbers; it also applies to packed pairs."""

    def execute(warp: Warp, one: Instruction) -> None:
        kind, (target, *sources) = kind_of(one.name), one.operands
        if kind in PAIRS:
            half = TYPES[PAIRS[kind]]
            given = [warp.lanes(x, "b32").view(half) for x in sources]
            found = np.asarray(function(one, *given)).astype(half)
            warp.put(target, np.ascontiguousarray(found).view(np.uint32))
            return
        given = [warp.get(x, kind) for x in sources]
        found = function(one, *given)
        if kind in ("f16", "bf16", "f32"):
            found = np.asarray(found).astype(TYPES[kind])
        warp.put(target, np.asarray(found))

    return execute


def _wide(x: np.ndarray) -> np.ndarray:
    """Converts to a type of twice the width."""
    return x.astype(f"{x.dtype.kind}{2 * x.dtype.itemsize}")


def _multiply(one: Instruction, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if "wide" in one.name:
        return _wide(x) * _wide(y)
    if "hi" in one.name:
        product = x.astype(object) * y.astype(object)
        return np.asarray(product >> 8 * x.dtype.itemsize).astype(x.dtype)
    return x * y


def _largest(one: Instruction, *given: np.ndarray) -> np.ndarray:
    is_strict = "NaN" in one.name or given[0].dtype.kind in "ui"
    choose = {
        ("max", True): np.maximum,
        ("max", False): np.fmax,
        ("min", True): np.minimum,
        ("min", False): np.fmin,
    }[one.name[0], is_strict]
    if given[0].dtype != TYPES["bf16"]:
        return functools.reduce(choose, given)
    found = functools.reduce(choose, (x.astype(np.float32) for x in given))
    return found.astype(given[0].dtype)


def _divide(one: Instruction, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.dtype.kind not in "ui":
        return x / y
    quotient = np.abs(x.astype(object)) // np.abs(y.astype(object))
    sign = np.where((x < 0) != (y < 0), -1, 1)
    return np.asarray(quotient * sign).astype(x.dtype)


def _fused(one: Instruction, x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    # Round once from float64, which is exact unless the summands differ very much in size.
    found = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    return found.astype(x.dtype)


def _shift(one: Instruction, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    bits = 8 * x.dtype.itemsize
    y = y.astype(np.int64)
    if one.name[0] == "shl":
        return np.where(y >= bits, 0, x << np.minimum(y, bits - 1).astype(x.dtype)).astype(x.dtype)
    moved = x >> np.minimum(y, bits - 1).astype(x.dtype)
    if x.dtype.kind == "i":
        return moved
    return np.where(y >= bits, 0, moved).astype(x.dtype)


def _clear(one: Instruction, found: np.ndarray) -> np.ndarray:
    """Flushes subnormal numbers to zero, if the instruction does."""
    if "ftz" not in one.name:
        return found
    return np.where(np.abs(found) < 2.0**-126, np.float32(0), found)


def _float(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(one: Instruction, *given: np.ndarray) -> np.ndarray:
        given = tuple(_clear(one, x.astype(np.float32)) for x in given)
        return _clear(one, function(*given).astype(np.float32))

    return apply


for _name, _function in {
    "add": lambda one, x, y: x + y,
    "sub": lambda one, x, y: x - y,
    "mul": _multiply,
    "max": _largest,
    "min": _largest,
    "div": _divide,
    "rem": lambda one, x, y: np.fmod(x, y),
    "fma": _fused,
    "and": lambda one, x, y: x & y,
    "or": lambda one, x, y: x | y,
    "xor": lambda one, x, y: x ^ y,
    "not": lambda one, x: ~x,
    "neg": lambda one, x: -x,
    "abs": lambda one, x: np.abs(x),
    "ex2": _float(np.exp2),
    "lg2": _float(np.log2),
    "rcp": _float(lambda x: np.float32(1) / x),
    "sqrt": _float(np.sqrt),
    "rsqrt": _float(lambda x: np.float32(1) / np.sqrt(x)),
    "tanh": _float(np.tanh),
    "popc": lambda one, x: np.bitwise_count(x).astype(np.uint32),
}.items():
    OPERATIONS[_name] = _elementwise(_function)


@operation("shl", "shr")
def _do_shift(warp: Warp, one: Instruction) -> None:
    target, source, count = one.operands
    warp.put(target, _shift(one, warp.get(source, kind_of(one.name)), warp.get(count, "u32")))


@operation("shf")
def _do_funnel_shift(warp: Warp, one: Instruction) -> None:
    target, low, high, count = one.operands
    both = (
        warp.lanes(low, "u32").astype(np.uint64) | warp.lanes(high, "u32").astype(np.uint64) << 32
    )
    count = warp.lanes(count, "u32").astype(np.uint64)
    count = np.minimum(count, 32) if "clamp" in one.name else count & 31
    found = both >> count if "r" in one.name else both << count >> 32
    warp.put(target, found.astype(np.uint32))


@operation("mad")
def _do_mad(warp: Warp, one: Instruction) -> None:
    target, x, y, z = one.operands
    kind = kind_of(one.name)
    product = _multiply(one, warp.get(x, kind), warp.get(y, kind))
    wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in one.name else kind
    warp.put(target, product + warp.get(z, wide))


@operation("mov")
def _do_move(warp: Warp, one: Instruction) -> None:
    target, source = one.operands
    kind = one.name[-1]
    if target.startswith("{"):
        parts = split(target.strip("{}"))
        value = warp.lanes(source, kind)
        width = value.dtype.itemsize // len(parts)
        found = value.view(f"u{width}").reshape(LANES, len(parts))
        for index, part in enumerate(parts):
            warp.put(part, found[:, index])
        return
    if source.startswith("{"):
        parts = split(source.strip("{}"))
        width = TYPES[kind].itemsize // len(parts)
        found = [warp.lanes(x, f"u{8 * width}") for x in parts]
        together = np.ascontiguousarray(np.stack(found, axis=-1))
        warp.put(target, together.view(TYPES[f"u{8 * width * len(parts)}"]).reshape(LANES))
        return
    warp.put(target, warp.get(source, kind))


@operation("selp")
def _do_select(warp: Warp, one: Instruction) -> None:
    target, x, y, which = one.operands
    kind = one.name[-1]
    found = np.where(warp.get(which, "pred"), warp.get(x, kind), warp.get(y, kind))
    warp.put(target, found.astype(TYPES[kind]))


_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@operation("setp")
def _do_compare(warp: Warp, one: Instruction) -> None:
    target, x, y, *more = one.operands
    kind, name = kind_of(one.name), one.name[1]
    first, second = warp.get(x, kind), warp.get(y, kind)
    is_unordered = name.endswith("u")  # true if a number is NaN
    found = _COMPARISONS[name.removesuffix("u")](first, second)
    if kind in ("f16", "bf16", "f32", "f64"):
        either = np.isnan(first) | np.isnan(second)
        found = (found & ~either) | (either & is_unordered)
    if more:
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[one.name[2]]
        found = combine(found, warp.get(more[0], "pred"))
    first_target, _, second_target = target.partition("|")
    warp.put(first_target, found)
    if second_target:
        warp.put(second_target, ~found)


@operation("lop3")
def _do_lop3(warp: Warp, one: Instruction) -> None:
    target, *sources, table = one.operands
    a, b, c = (warp.get(x, "u32") for x in sources)
    found = np.zeros(LANES, np.uint32)
    for index in range(8):
        if int(table, 0) >> index & 1:
            found |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    warp.put(target, found)


@operation("prmt")
def _do_permute(warp: Warp, one: Instruction) -> None:
    target, x, y, selector = one.operands
    both = [warp.lanes(z, "u32") for z in (x, y)]
    sources = np.ascontiguousarray(np.stack(both, axis=-1)).view(np.uint8)
    select = warp.lanes(selector, "u32")
    found = np.zeros((LANES, 4), np.uint8)
    for index in range(4):
        which = (select >> 4 * index) & 15
        byte = sources[LANE, which & 7]
        sign = np.where(byte & 128, 255, 0)
        found[:, index] = np.where(which & 8, sign, byte)
    warp.put(target, found.view(np.uint32).reshape(LANES))


_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@operation("cvt")
def _do_convert(warp: Warp, one: Instruction) -> None:
    names = [part for part in one.name if part in TYPES or part[:-2] in TYPES]
    to, origin = names
    target, *sources = one.operands
    if to.endswith("x2"):  # the first source is the upper half
        narrow = TYPES[to[:-2]]
        if origin.endswith("x2"):
            pair = TYPES[origin[:-2]]
            x = warp.get(sources[0], f"b{16 * pair.itemsize}")
            x = np.ascontiguousarray(np.broadcast_to(x, (LANES,)))
            halves = x.view(pair).reshape(LANES, 2).astype(np.float32)
        else:
            both = [warp.lanes(x, origin) for x in sources[::-1]]
            halves = np.stack(both, axis=-1).astype(np.float32)
        if "satfinite" in one.name:
            most = float(ml_dtypes.finfo(narrow).max)
            halves = np.clip(halves, -most, most)
        found = np.ascontiguousarray(halves.astype(narrow))
        warp.put(target, found.view(f"u{2 * narrow.itemsize}").reshape(LANES))
        return
    value, wanted = warp.get(sources[0], origin), TYPES[to]
    roundings = [_ROUNDINGS[x] for x in one.name if x in _ROUNDINGS]
    if wanted.kind in "ui" and value.dtype.kind not in "uib":
        rounded = roundings[0](value.astype(np.float64))
        limits = np.iinfo(wanted)
        rounded = np.nan_to_num(rounded, nan=0.0, posinf=limits.max, neginf=limits.min)
        found = np.clip(rounded, limits.min, limits.max)
        found = np.array([int(x) for x in found.reshape(-1)], object).astype(wanted)
        warp.put(target, found.reshape(rounded.shape))
        return
    if wanted == value.dtype and wanted.kind not in "ui" and roundings:
        value = roundings[0](value)
    warp.put(target, value.astype(wanted))


@operation("cvta")
def _do_address(warp: Warp, one: Instruction) -> None:
    target, source = one.operands
    warp.put(target, warp.get(source, "u64"))


# Threads of a warp


@operation("shfl")
def _do_shuffle(warp: Warp, one: Instruction) -> None:
    warp.together()
    target, source, lane, clamp, _ = one.operands
    target, _, is_valid = target.partition("|")
    value = warp.lanes(source, "b32")
    number, clamp = warp.get(lane, "u32").astype(int) & 31, int(clamp, 0)
    limit, segment = clamp & 31, clamp >> 8 & 31
    first = LANE & segment
    last = first | (limit & ~segment & 31)
    mode = one.name[2]
    if mode == "idx":
        other = first | (number & ~segment & 31)
        valid = other <= last
    elif mode == "bfly":
        other = LANE ^ number
        valid = other <= last
    elif mode == "down":
        other = LANE + number
        valid = other <= last
    else:
        other = LANE - number
        valid = other >= (first | limit & ~31)
    warp.put(target, value[np.where(valid, other, LANE) & 31])
    if is_valid:
        warp.put(is_valid, valid)


@operation("vote")
def _do_vote(warp: Warp, one: Instruction) -> None:
    warp.together()
    target, source, _ = one.operands
    is_negated = source.startswith("!")
    value = np.broadcast_to(warp.get(source.strip("!"), "pred") != is_negated, (LANES,))
    if "ballot" in one.name:
        found = np.array(int((value.astype(np.uint64) << LANE.astype(np.uint64)).sum()), np.uint32)
    else:
        found = value.any() if "any" in one.name else value.all()
    warp.put(target, np.asarray(found))


@operation("redux")
def _do_reduce(warp: Warp, one: Instruction) -> None:
    warp.together()
    target, source, _ = one.operands
    value = warp.lanes(source, one.name[-1])
    reduce = {
        "add": np.sum,
        "max": np.max,
        "min": np.min,
        "or": np.bitwise_or.reduce,
        "and": np.bitwise_and.reduce,
        "xor": np.bitwise_xor.reduce,
    }[next(x for x in one.name if x in ("add", "max", "min", "or", "and", "xor"))]
    warp.put(target, np.asarray(reduce(value)).astype(value.dtype))


@operation("elect")
def _do_elect(warp: Warp, one: Instruction) -> None:
    warp.together()
    target, _, chosen = one.operands[0].partition("|")
    warp.put(target, np.array(0, np.uint32))
    warp.put(chosen, LANE == 0)
