"""Instructions on memory: loads and stores, barriers, the copy engine and the tensor cores."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptx.machine import (
    GARBAGE,
    GLOBAL,
    LANE,
    LANES,
    PARAMETERS,
    TYPES,
    Barrier,
    Copy,
    Fault,
    Product,
    Waiting,
    Warp,
    operation,
)
from ptx.reading import Instruction, split

# Memory

_WORD = 4  # bytes


def _bytes_of(places: np.ndarray, width: int) -> np.ndarray:
    return (places[:, None] + np.arange(width)).reshape(-1)


def _space(one: Instruction, places: np.ndarray) -> str:
    named = {"shared", "shared::cta", "global", "param", "param::entry", "shared::cluster"}
    for part in one.name:
        if part in named:
            return part.split("::")[0]
    lowest = int(places.min())
    return "global" if lowest >= GLOBAL else "param" if lowest >= PARAMETERS else "shared"


def _vector(one: Instruction) -> int:
    return next((int(x[1:]) for x in one.name if x in ("v2", "v4", "v8")), 1)


@operation("ld", "ldu")
def _do_load(warp: Warp, one: Instruction) -> None:
    target, source = one.operands
    dtype, count = TYPES[one.name[-1]], _vector(one)
    targets = split(target.strip("{}")) if target.startswith("{") else [target]
    if len(targets) != count:
        raise ValueError("as many registers as entries")
    block, lanes = warp.block, warp.active
    places = warp.address(source)
    space = _space(one, places[lanes])
    if space == "param":
        found = np.array([block.values[int(place)] for place in places], np.uint64)
        warp.put(targets[0], found)
        return
    width = dtype.itemsize * count
    if (places[lanes] % width).any():
        raise Fault(f"addresses are no multiples of {width}")
    wanted = _bytes_of(places[lanes], width)
    if space == "shared":
        found = block.shared[block.check(wanted)]
    else:
        found = block.memory.read(wanted)
    entries = np.zeros((LANES, count), dtype)
    entries[lanes] = np.ascontiguousarray(found).view(dtype).reshape(-1, count)
    for index, name in enumerate(targets):
        warp.put(name, entries[:, index])


@operation("st")
def _do_store(warp: Warp, one: Instruction) -> None:
    target, source = one.operands
    kind, count = one.name[-1], _vector(one)
    sources = split(source.strip("{}")) if source.startswith("{") else [source]
    if len(sources) != count:
        raise ValueError("as many registers as entries")
    lanes = warp.active
    places, width = warp.address(target)[lanes], TYPES[kind].itemsize * count
    if (places % width).any():
        raise Fault(f"addresses are no multiples of {width}")
    entries = [warp.lanes(x, kind)[lanes] for x in sources]
    values = np.ascontiguousarray(np.stack(entries, axis=-1)).view(np.uint8).reshape(-1)
    _write(warp, _space(one, places), _bytes_of(places, width), values)


def _write(warp: Warp, space: str, places: np.ndarray, values: np.ndarray) -> None:
    """Writes the threads' bytes to memory."""
    block = warp.block
    if space == "shared":
        block.check(places)
        block.shared[places] = values
        block.unfenced[places] = warp.index + 1
    else:
        block.memory.write(places, values)


@operation("atom", "red")
def _do_atomic(warp: Warp, one: Instruction) -> None:
    """Adds to integers in shared memory, one thread after another, in random order."""
    if one.name[1:-1] != ("shared", "add") or TYPES[one.name[-1]].itemsize != _WORD:
        raise NotImplementedError(one.text)
    *target, place, source = one.operands
    block, kind = warp.block, one.name[-1]
    places, added = warp.address(place), warp.lanes(source, kind)
    found = np.zeros(LANES, TYPES[kind])
    for lane in block.random.sample(list(np.flatnonzero(warp.active)), int(warp.active.sum())):
        if places[lane] % _WORD:
            raise Fault(f"addresses are no multiples of {_WORD}")
        own = block.check(places[lane] + np.arange(_WORD))
        found[lane] = block.shared[own].view(TYPES[kind])[0]
        total = found[lane : lane + 1] + added[lane]
        _write(warp, "shared", own, total.view(np.uint8))
    if target:
        warp.put(target[0], found)


@operation("ldmatrix", "stmatrix")
def _do_matrices(warp: Warp, one: Instruction) -> None:
    """Loads 8 by 8 matrices of 16 bits; thread `8 m + r` has the address of row `r` of matrix `m`.

    Thread `t` gets entries `2 (t % 4)` and `2 (t % 4) + 1` of row `t / 4`.
    """
    warp.together()
    is_load = one.name[0] == "ldmatrix"
    registers, place = one.operands if is_load else one.operands[::-1]
    names = split(registers.strip("{}"))
    places, block = warp.address(place), warp.block
    for index, name in enumerate(names):
        rows = places[8 * index : 8 * index + 8]
        if (rows % 16).any():
            raise Fault("rows of matrices are not aligned")
        where = block.check(_bytes_of(rows, 16))
        row, column = LANE // 4, 2 * (LANE % 4)
        if is_load:
            matrix = np.ascontiguousarray(block.shared[where]).view(np.uint16).reshape(8, 8)
            matrix = matrix.T if "trans" in one.name else matrix
            pair = np.stack([matrix[row, column], matrix[row, column + 1]], axis=-1)
            warp.put(name, np.ascontiguousarray(pair).view(np.uint32).reshape(LANES))
        else:
            pair = warp.lanes(name, "b32").view(np.uint16).reshape(LANES, 2)
            matrix = np.zeros((8, 8), np.uint16)
            matrix[row, column], matrix[row, column + 1] = pair[:, 0], pair[:, 1]
            matrix = matrix.T if "trans" in one.name else matrix
            _write(warp, "shared", where, np.ascontiguousarray(matrix).view(np.uint8).reshape(-1))


# Barriers


@operation("bar", "barrier")
def _do_barrier(warp: Warp, one: Instruction) -> None:
    warp.together()
    if "cluster" in one.name or "warp" in one.name:
        return
    if "red" in one.name:
        raise NotImplementedError(one.text)
    block = warp.block
    number, *counts = one.operands
    number = warp.number(number)
    count = warp.number(counts[0]) if counts else None
    waiting = block.named.setdefault(number, [])
    if warp in waiting:
        raise Fault("a warp comes to a barrier twice")
    waiting.append(warp)
    needed = count // LANES if count else sum(not other.has_ended for other in block.warps)
    if len(waiting) > needed:
        raise Fault(f"{len(waiting)} warps at a barrier of {needed}")
    if len(waiting) == needed:
        block.named[number] = []
        return
    if "arrive" not in one.name:
        warp.wait(lambda: block.named.get(number) is waiting)


def _place(warp: Warp, operand: str) -> int:
    """Returns the address that all active threads share."""
    found = set(warp.address(operand)[warp.active].tolist())
    if len(found) != 1:
        raise Fault("threads have different addresses")
    return found.pop()


@operation("mbarrier")
def _do_mbarrier(warp: Warp, one: Instruction) -> None:
    block, action = warp.block, one.name[1]
    threads = int(warp.active.sum())
    if action == "init":
        place, count = one.operands
        number = warp.number(count)
        at = _place(warp, place)
        if threads != 1 or at in block.barriers:
            raise Fault("a barrier is made more than once")
        block.check(np.array([at, at + 7]))
        block.barriers[at] = Barrier(number, number)
    elif action == "arrive":
        state, place, *more = one.operands if one.operands[0][0] != "[" else ("_", *one.operands)
        barrier = block.barriers[_place(warp, place)]
        if "expect_tx" in one.name:
            # Bytes may have arrived already, so the count may have been negative.
            barrier.bytes_missing += threads * warp.number(more[0])
            arrivals = threads
        else:
            arrivals = threads * (warp.number(more[0]) if more else 1)
        barrier.missing -= arrivals
        barrier.settle()
        if state != "_":
            warp.put(state, np.array(barrier.phase, np.uint64))
    elif action in ("try_wait", "test_wait") and one.name[2] == "parity":
        done, place, parity, *_ = one.operands
        barrier = block.barriers[_place(warp, place)]
        wanted = set(warp.lanes(parity, "u32")[warp.active].tolist())
        if len(wanted) != 1:
            raise Fault("threads wait for different phases")
        own = wanted.pop()
        if barrier.phase & 1 == own:
            warp.is_blocked = lambda: barrier.phase & 1 == own
            raise Waiting
        warp.put(done, np.array(True))
    else:
        raise NotImplementedError(one.text)


@operation("fence")
def _do_fence(warp: Warp, one: Instruction) -> None:
    if "proxy" in one.name:
        mine = warp.block.unfenced == warp.index + 1
        warp.block.unfenced[mine] = 0


@operation("setmaxnreg", "prefetch", "membar", "nanosleep", "griddepcontrol")
def _do_nothing(warp: Warp, one: Instruction) -> None:
    """Ignores instructions without an effect on results."""


@operation("trap")
def _do_trap(warp: Warp, one: Instruction) -> None:
    raise Fault("trap")


# Copies


def swizzled(places: np.ndarray, line: int) -> np.ndarray:
    """Returns swizzled addresses: 16-byte chunks are permuted within lines of `line` bytes."""
    mask = {16: 0, 32: 1, 64: 3, 128: 7}[line]
    return places ^ ((places >> 7 & mask) << 4)


@operation("cp")
def _do_copy(warp: Warp, one: Instruction) -> None:
    name = one.name
    if name[1:3] != ("async", "bulk"):
        _copy_of_threads(warp, one)
    elif "commit_group" in name:
        for lane in np.flatnonzero(warp.active):
            warp.bulk[lane].append(warp.bulk_open[lane])
            warp.bulk_open[lane] = []
    elif "wait_group" in name:
        _await_copies(warp, int(one.operands[0]), only_read="read" in name)
    elif "prefetch" not in name:
        if int(warp.active.sum()) != 1:
            raise Fault("more than one thread copies")
        _start_copy(warp, one, int(np.flatnonzero(warp.active)[0]))


def _copy_of_threads(warp: Warp, one: Instruction) -> None:
    """Starts per-thread copies, in separate groups, which complete when their thread awaits
    them."""
    action = one.name[2]
    if action in ("commit_group", "wait_group", "wait_all"):
        warp.together()
        if action != "wait_group":
            warp.thread_groups.append(warp.thread_open)
            warp.thread_open = []
        if action != "commit_group":
            left = int(one.operands[0]) if action == "wait_group" else 0
            while len(warp.thread_groups) > left:
                for copy in warp.thread_groups.pop(0):
                    if copy in warp.block.copies:
                        warp.block.finish(copy)
        return
    if action not in ("ca", "cg"):
        raise NotImplementedError(one.text)
    block, lanes = warp.block, warp.active
    target, source, size, *given = one.operands
    width = int(size)
    if width not in (4, 8, 16) or (action == "cg" and width != 16):
        raise Fault("a thread copies 4, 8 or 16 bytes, past the nearest cache 16")
    to, start = warp.address(target)[lanes], warp.address(source)[lanes]
    if (to % width).any() or (start % width).any():
        raise Fault(f"addresses are no multiples of {width}")
    held = warp.lanes(given[0], "u32")[lanes] if given else np.full(to.size, width)
    if (held > width).any():
        raise Fault(f"more than {width} bytes are there")
    is_there = (np.arange(width) < held[:, None]).reshape(-1)
    own, places = block.check(_bytes_of(to, width)), _bytes_of(start, width)
    if is_there.any():
        block.memory.read(places[is_there])  # raises if an address is outside of all arrays
    block.shared[own] = GARBAGE
    block.unfenced[own] = 0

    def finish() -> None:
        values = np.zeros(places.size, np.uint8)
        if is_there.any():
            values[is_there] = block.memory.read(places[is_there])
        _write(warp, "shared", own, values)

    copy = Copy(finish)
    block.copies.append(copy)
    warp.thread_open.append(copy)


def _await_copies(warp: Warp, left: int, *, only_read: bool) -> None:
    for lane in np.flatnonzero(warp.active):
        groups = warp.bulk[lane]
        for group in groups[: max(0, len(groups) - left)]:
            for copy in group:
                if copy not in warp.block.copies:
                    continue
                if only_read:
                    if copy.read is not None:
                        copy.read()
                        copy.read = None
                else:
                    warp.block.finish(copy)
        if not only_read:
            del groups[: max(0, len(groups) - left)]


def _start_copy(warp: Warp, one: Instruction, lane: int) -> None:
    """Starts to copy a box of an array, or adjacent bytes, from or to shared memory."""
    block, is_tensor = warp.block, one.name[3] == "tensor"
    is_load = one.name[5 if is_tensor else 3].startswith("shared")  # the target
    target, source, *more = one.operands
    shared, other = (target, source) if is_load else (source, target)
    start = int(warp.address(shared)[lane])
    if is_tensor:
        pointer, coordinates = split(other.strip("[]"))
        where = block.maps[int(warp.lanes(pointer, "u64")[lane])]
        corner = [int(warp.lanes(x, "s32")[lane]) for x in split(coordinates.strip("{}"))][::-1]
        places, is_there = where.places(corner)
        if start % 128:
            raise Fault("a copy's place in shared memory is not aligned")
        own = swizzled(start + np.arange(places.size), where.swizzle)
    else:
        first, size = int(warp.address(other)[lane]), int(warp.lanes(more.pop(0), "u32")[lane])
        if size % 16 or first % 16 or start % 16:
            raise Fault("a copy is of multiples of 16 bytes")
        own, places = (x + np.arange(size) for x in (start, first))
        is_there = np.ones(size, bool)
    block.check(own)
    if is_load:
        barrier = block.barriers[int(warp.address(more[0])[lane])]
        block.shared[own] = GARBAGE
        block.unfenced[own] = 0

        def load() -> None:
            values = np.zeros(places.size, np.uint8)  # as are bytes outside the array
            values[is_there] = block.memory.read(places[is_there])
            block.shared[own] = values
            barrier.bytes_missing -= places.size
            barrier.settle()

        block.copies.append(Copy(load))
        return
    values = block.read_shared(own).copy()

    def read() -> None:
        if (block.shared[own] != values).any():
            raise Fault(f"what a copy reads has been overwritten ({one.text})")

    def store() -> None:
        block.memory.write(places[is_there], values[is_there])

    copy = Copy(store, read)
    block.copies.append(copy)
    warp.bulk_open[lane].append(copy)


# Products


_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_KEPT_BITS = 13  # bits below the largest number's first that Hopper keeps in float8 sums


@operation("wgmma")
def _do_wgmma(warp: Warp, one: Instruction) -> None:
    warp.together()
    if one.name[1] == "fence":
        return
    if one.name[1] == "commit_group":
        warp.groups.append(warp.open)
        warp.open = []
        return
    if one.name[1] == "wait_group":
        left = int(one.operands[0])
        while len(warp.groups) > left:
            for product in warp.groups.pop(0):
                for name in product.registers:
                    warp.flying[name] -= 1
                    if not warp.flying[name]:
                        del warp.flying[name]
                product.finish()
        return
    _start_product(warp, one)


def _start_product(warp: Warp, one: Instruction) -> None:
    columns, depth = map(int, _SHAPE.search(one.text).groups())
    to, left_kind, right_kind = one.name[-3:]
    target, left, right, keeps, *scales = one.operands
    names = tuple(split(target.strip("{}")))
    block, rows = warp.block, 16 * (warp.index % 4) + np.arange(16)
    itemsize = TYPES[left_kind].itemsize
    is_whole = to == "s32"
    # Integer products have no operands for signs.
    signs = [1, 1] if is_whole else [int(x) for x in scales[:2]]
    from_registers = left.startswith("{")
    # Register operands have no flag for a transpose.
    turned = [False, False, *(bool(int(x)) for x in scales[2:])][-2:]
    goes_on = warp.lanes(keeps, "pred")
    if goes_on.any() != goes_on.all():
        raise Fault("threads differ in whether sums go on")
    right_places = _operand(warp, right, np.arange(columns), depth, itemsize, turned[1])
    read = [(right_places, block.read_shared(right_places))]
    if from_registers:
        left_names = split(left.strip("{}"))
        held = [warp.lanes(x, "b32").copy() for x in left_names]
    else:
        left_places = _operand(warp, left, rows, depth, itemsize, turned[0])
        read.append((left_places, block.read_shared(left_places)))

    def as_matrix(raw: np.ndarray, kind: str) -> np.ndarray:
        dtype = TYPES[kind]
        wide = np.int32 if is_whole else np.float32
        return np.ascontiguousarray(raw).view(dtype).reshape(-1, depth).astype(wide)

    for name in names:
        if name not in warp.flying and goes_on.all() and name not in warp.values:
            raise Fault(f"nothing has been written to {name}")

    def finish() -> None:
        if any((block.shared[places] != early).any() for places, early in read):
            raise Fault(f"what a product reads has been overwritten ({one.text})")
        second = as_matrix(read[0][1], right_kind)
        if from_registers:
            for name, value in zip(left_names, held, strict=True):
                if name in warp.values and (warp.values[name] != value).any():
                    raise Fault(f"{name}, which a product reads, has been overwritten")
            first = _from_registers(held, TYPES[left_kind], depth)
        else:
            first = as_matrix(read[1][1], left_kind)
        sign = signs[0] * signs[1]
        before = _sums(warp.values.__getitem__, names, to, columns) if goes_on.all() else None
        if (left_kind, to) == ("e4m3", "f32"):
            found = _sum_in_few_bits(sign * first[:, None] * second[None], before)
        else:
            found = sign * (first.astype(second.dtype) @ second.T)
            found = found if before is None else found + before
        found = found if is_whole else found.astype(np.float32)
        _put_sums(warp.values.__setitem__, names, to, found)

    for name in names:
        warp.flying[name] = warp.flying.get(name, 0) + 1
    warp.open.append(Product(finish, names))


def _sum_in_few_bits(products: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    """Sums over the last axis as Hopper does for float8, with few bits per number.

    Results of an H100 or H200 agree with truncating the numbers 13 bits below the largest.
    """
    if before is not None:
        products = np.concatenate([products, before[..., None]], axis=-1)
    products = products.astype(np.float64)
    _, exponent = np.frexp(np.abs(products).max(axis=-1, keepdims=True))
    unit = np.ldexp(1.0, exponent - 1 - _KEPT_BITS)
    with np.errstate(invalid="ignore"):
        return (np.trunc(products / unit) * unit).sum(axis=-1)


@operation("mma")
def _do_mma(warp: Warp, one: Instruction) -> None:
    """Computes a warp-level product of 16 rows with eight columns, both in registers."""
    warp.together()
    depth = int(re.search(r"m16n8k(\d+)", one.text)[1])
    to, left_kind, right_kind, _ = one.name[-4:]
    target, left, right, start = (split(x.strip("{}")) for x in one.operands)

    def read(name: str) -> np.ndarray:
        return warp.lanes(name, "b32")

    first = _from_registers([read(x) for x in left], TYPES[left_kind], depth)
    # The columns lie as the first eight rows of a left operand, which has every other register.
    twice = [read(x) for x in right for _ in range(2)]
    second = _from_registers(twice, TYPES[right_kind], depth)[:8]
    sums = first @ second.T + _sums(read, start, to, 8)
    _put_sums(warp.put, target, to, sums.astype(np.float32))


def _operand(
    warp: Warp, operand: str, rows: np.ndarray, depth: int, itemsize: int, is_turned: bool
) -> np.ndarray:
    """Returns addresses of the bytes of a matrix's rows in shared memory, from its descriptor."""
    values = warp.lanes(operand, "u64")
    if (values != values[0]).any():
        raise Fault("threads have different descriptors")
    bits = int(values[0])
    start, leading, stride = (
        (bits & 0x3FFF) << 4,
        (bits >> 16 & 0x3FFF) << 4,
        (bits >> 32 & 0x3FFF) << 4,
    )
    if bits >> 49 & 7:
        raise NotImplementedError("a matrix that does not begin where its swizzling does")
    line = {0: 16, 1: 128, 2: 64, 3: 32}[bits >> 62]
    column = np.arange(depth)
    if not is_turned:
        row = rows[:, None]
        if line == 16:  # eight rows of 16 bytes
            inside = column * itemsize
            place = row // 8 * stride + row % 8 * 16 + inside // 16 * leading + inside % 16
        else:
            place = row // 8 * stride + row % 8 * line + column * itemsize
    else:
        # A line holds one column's entries of several rows; eight columns are adjacent.
        per_line = line // itemsize
        row = rows[:, None]
        place = (
            row // per_line * leading
            + row % per_line * itemsize
            + column // 8 * stride
            + column % 8 * line
        )
    place = swizzled(start + place, line)
    return (place[..., None] + np.arange(itemsize)).reshape(-1)


def _from_registers(held: list[np.ndarray], dtype: np.dtype[Any], depth: int) -> np.ndarray:
    """Assembles the 16 rows of a warp from its registers."""
    per = 4 // dtype.itemsize
    found = np.zeros((16, depth), np.float32)
    for index, register in enumerate(held):
        entries = np.ascontiguousarray(register).view(dtype).reshape(LANES, per).astype(np.float32)
        row = LANE // 4 + 8 * (index % 2)
        first = per * (LANE % 4) + 4 * per * (index // 2)
        for part in range(per):
            found[row, first + part] = entries[:, part]
    return found


@functools.cache
def _sum_places(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns row and first of the two columns in register pair `index`."""
    return LANE // 4 + 8 * (index % 2), 8 * (index // 2) + 2 * (LANE % 4)


def _sums(
    read: Callable[[str], np.ndarray], names: Sequence[str], kind: str, columns: int
) -> np.ndarray:
    """Assembles the 16 rows of a warp's sums: two columns per register of 16 bits, else one."""
    found = np.zeros((16, columns), np.float32 if kind == "f16" else TYPES[kind])
    for index in range(columns // 4):
        row, column = _sum_places(index)
        if kind == "f16":
            pair = np.ascontiguousarray(read(names[index])).view(np.float16).reshape(LANES, 2).T
        else:
            pair = [read(x).view(found.dtype) for x in names[2 * index : 2 * index + 2]]
        found[row, column], found[row, column + 1] = pair
    return found


def _put_sums(
    write: Callable[[str, np.ndarray], None], names: Sequence[str], kind: str, found: np.ndarray
) -> None:
    for index in range(found.shape[1] // 4):
        row, column = _sum_places(index)
        pair = found[row, column], found[row, column + 1]
        if kind == "f16":
            both = np.stack(pair, axis=-1).astype(np.float16)
            write(names[index], np.ascontiguousarray(both).view(np.uint32).reshape(LANES))
            continue
        for name, value in zip(names[2 * index : 2 * index + 2], pair, strict=True):
            write(name, np.ascontiguousarray(value).view(np.uint32))
