"""Runs a kernel's PTX without a GPU: what Hopper does with it, warp by warp, and what it forbids.

What Pallas interprets is the kernel as it was written; this is the kernel as it was compiled, with
its layouts, addresses, barriers, descriptors and instructions of the assembler. Warps take turns at
random. What ends at some time ends here as late as it may: copies of the copy engine (TMA) when
somebody is stuck without them, products of the tensor cores when their group is awaited. Whoever
does not wait finds garbage, and these are faults:

* a deadlock; a barrier of too many arrivals; warps apart where they must be together
* registers of a product in flight read or written, or shared memory of one overwritten
* shared memory overwritten that a copy still reads
* shared memory read by the copy engine or the tensor cores that ordinary stores have written and no
  `fence.proxy.async` has passed on
* memory outside of what there is; a register that nothing has been written to

Sums are made in float32 and rounded once to what the instruction returns, so that products differ
from a chip's by rounding; approximate instructions are exact. What it says nothing about: time,
clusters of several blocks, and what `ptxas` makes of the code.

Sources: "PTX ISA" 9.0 of NVIDIA: asynchronous warpgroup instructions (§9.7.15), tensor copies
(§9.7.9.27), `mbarrier` (§9.7.13.15).
"""

import dataclasses
import functools
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

LANES = 32
_ALL = np.ones(LANES, bool)
_LANE = np.arange(LANES)
_SHARED = 1024  # where a block's shared memory begins, and how it is aligned
_SHARED_END = _SHARED + 227 * 1024
_PARAMETERS = 1 << 24  # addresses
_GLOBAL = 1 << 32
_GARBAGE = 0xFF  # bytes of what has not arrived: NaN in every type

_INTEGERS = {
    f"{kind}{bits}": np.dtype(f"{sign}int{bits}")
    for bits in (8, 16, 32, 64)
    for kind, sign in (("s", ""), ("u", "u"), ("b", "u"))
}
_TYPES: dict[str, np.dtype[Any]] = _INTEGERS | {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "pred": np.dtype(bool),
}
_PAIRS = {f"{kind}x2": kind for kind in ("f16", "bf16", "u16", "s16")}
_ELEMENTS = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}  # bytes, by kind of a copy


class Fault(Exception):
    """What a GPU would leave to chance, or wait for forever."""


# The host: grid, arguments, and descriptors of copies


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """What a copy of the copy engine knows of an array, outermost axis first.

    Attributes:
      address: Of its first entry.
      itemsize: Bytes of an entry.
      sizes: Entries along each axis.
      strides: Entries from one to the next.
      box: Entries along each axis of what is copied.
      swizzle: Bytes of the lines that are swizzled in shared memory; 16 if none are.
    """

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def places(self, corner: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of the bytes of a box, row by row, and which of them there are."""
        place, is_there = np.zeros((), np.int64), np.ones((), bool)
        for start, width, size, stride in zip(
            corner, self.box, self.sizes, self.strides, strict=True
        ):
            index = start + np.arange(width)
            place = place[..., None] + index * stride * self.itemsize
            is_there = is_there[..., None] & (0 <= index) & (index < size)
        place = self.address + place[..., None] + np.arange(self.itemsize)
        is_there = np.broadcast_to(is_there[..., None], place.shape)
        return place.reshape(-1), is_there.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is started.

    Attributes:
      grid: Blocks along each of the three axes.
      threads: Threads of a block.
      shared_bytes: Bytes of its shared memory.
      arguments: Addresses in host memory, one for each.
      memory: What lies in host memory, by address.
      maps: Descriptors, by address in host memory.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[int, ...]
    memory: dict[int, Any]
    maps: dict[int, TensorMap]


def read_launch(code: str, buffers: Sequence[int]) -> Launch:
    """Runs a kernel's host function, in LLVM's language.

    Args:
      code: The module.
      buffers: Addresses of the arrays that the kernel reads, then of those that it writes.
    """
    body = re.search(r"^define \w+ @\w+_mosaic_gpu\(([^)]*)\)[^{]*\{\n(.*?)^\}", code, re.M | re.S)
    if body is None:
        raise ValueError("there is no host function")
    memory: dict[int, Any] = {8 * index: buffer for index, buffer in enumerate(buffers)}
    top = 1 << 20  # of what is allocated
    maps: dict[int, TensorMap] = {}
    values: dict[str, Any] = {name: 0 for name in re.findall(r"%\w+", body[1])}
    launch: Launch | None = None

    def value(text: str) -> Any:
        text = text.strip().split(" ")[-1]
        if text.startswith("%"):
            return values[text]
        return 0 if text in ("undef", "poison", "null", "false") else int(text)

    def array(address: int, length: int) -> tuple[int, ...]:
        return tuple(memory[address + 8 * index] for index in range(length))

    for line in body[2].splitlines():
        line = re.sub(r", (align|!).*", "", line.strip())
        target, is_named, rest = line.partition(" = ")
        rest = rest if is_named else line
        name, _, rest = rest.partition(" ")
        result: Any = None
        if name == "insertvalue":
            kind, whole, rest = re.match(r"(\{.*?\}) (\S+), (.*)", rest).groups()
            entry, *place = rest.split(", ")
            whole = dict(values.get(whole, {}))
            whole[", ".join(place)] = value(entry)
            result = whole
        elif name == "extractvalue":
            _, whole, place = re.match(r"(\{.*?\}) (\S+), (.*)", rest).groups()
            result = values[whole][place]
        elif name == "alloca":
            kind, _, count = rest.partition(", i64 ")
            count = count or kind.partition(", i32 ")[2] or "1"
            result = top
            top += -(-_size(kind.partition(", i32 ")[0]) * value(count) // 256) * 256
        elif name == "getelementptr":
            rest = re.sub(r"^(inbounds |nuw |nusw )*", "", rest)
            kind, rest = _first_type(rest)
            pointer, *index = rest.split(", ")
            result = value(pointer) + _size(kind) * value(index[0])
            for entry in index[1:]:
                offset, kind = _member(kind, value(entry))
                result += offset
        elif name == "load":
            kind, rest = _first_type(rest)
            address = value(rest)
            result = ("bytes", address, _size(kind)) if kind[0] in "[{" else memory[address]
        elif name == "store":
            kind, rest = _first_type(rest)
            entry, pointer = rest.split(", ")
            address, stored = value(pointer), value(entry)
            if isinstance(stored, tuple):
                _, source, size = stored
                maps |= {
                    address + at - source: found
                    for at, found in maps.items()
                    if source <= at < source + size
                }
            memory[address] = stored
        elif name in ("mul", "add"):
            first, second = re.sub(r"^(nuw |nsw )*", "", rest).split(", ")
            result = getattr(operator, name)(value(first), value(second))
        elif name in ("ptrtoint", "inttoptr", "trunc", "sext", "zext"):
            result = value(rest.partition(" to ")[0])
        elif name == "call":
            function, given = re.search(r"@(\w+)\((.*)\)", rest).groups()
            found = [value(one) for one in given.split(", ")]
            if function == "mosaic_gpu_init_tma_desc":
                at, address, kind, rank, sizes, strides, swizzle, box = found
                lists = (array(one, rank) for one in (sizes, strides, box))
                maps[at] = TensorMap(address, _ELEMENTS[kind], *lists, swizzle)
            elif function in ("mosaic_gpu_build_kernel_spec", "mosaic_gpu_launch_kernel"):
                arguments = found[13]
                count = sum(arguments + 8 * index in memory for index in range(32))
                launch = Launch(
                    tuple(found[1:4]),
                    found[7] * found[8] * found[9],
                    found[10],
                    array(arguments, count),
                    memory,
                    maps,
                )
                if any(one > 1 for one in found[4:7]):
                    raise NotImplementedError("clusters of blocks")
            else:
                raise NotImplementedError(function)
            result = 0
        elif name in ("ret", "br", "unreachable"):
            continue
        else:
            raise NotImplementedError(f"of a host function: {line}")
        if is_named:
            values[target] = result
    if launch is None:
        raise ValueError("the host function starts no kernel")
    return launch


def _first_type(text: str) -> tuple[str, str]:
    """A type, and what follows it and a comma or a blank."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character in ", " and not depth:
            return text[:index], text[index:].lstrip(", ")
    return text, ""


def _size(kind: str) -> int:
    kind = kind.strip()
    if kind.startswith("["):
        count, _, entry = kind[1:-1].partition(" x ")
        return int(count) * _size(entry)
    if kind.startswith("{"):
        return _member(kind, kind.count(",") + 1)[0]
    return 8 if kind == "ptr" else int(kind[1:]) // 8


def _member(kind: str, index: int) -> tuple[int, str]:
    """Offset and type of an entry of a structure or an array."""
    if kind.startswith("["):
        entry = kind[1:-1].partition(" x ")[2]
        return index * _size(entry), entry
    offset, rest = 0, kind.strip("{} ")
    for _ in range(index):
        if not rest:
            return offset, ""
        entry, rest = _first_type(rest)
        offset += _size(entry)
    entry = _first_type(rest)[0] if rest else ""
    if entry and not entry.startswith("["):
        offset = -(-offset // _size(entry)) * _size(entry)
    return offset, entry


# The program


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line.

    Attributes:
      guard: The predicate that it depends on, and whether on its being false.
      name: Its name, in parts.
      operands: What it takes, as text with names of registers resolved.
      text: As it stands there.
    """

    guard: tuple[str, bool] | None
    name: tuple[str, ...]
    operands: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
      instructions: In order.
      labels: Where each stands.
      parameters: Names.
      registers: The type of each.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]
    registers: dict[str, str]

    @functools.cached_property
    def meetings(self) -> dict[int, int]:
        """Where threads that part at a branch meet again: what all ways to the end pass first.

        That is what the assembler makes of it (Fung et al., "Dynamic Warp Formation", 2007).
        """
        end = len(self.instructions)
        jumps = {
            index: self.labels[one.operands[0]]
            for index, one in enumerate(self.instructions)
            if one.name[0] == "bra"
        }
        stops = {i for i, one in enumerate(self.instructions) if one.name[0] in ("ret", "exit")}
        after = {index + 1 for index in (*jumps, *stops)}
        starts = sorted({0, *self.labels.values(), *after} - {end})
        following: list[list[int]] = []  # of each stretch of instructions, by number
        number = {start: index for index, start in enumerate(starts)} | {end: len(starts)}
        last = [stop - 1 for stop in (*starts[1:], end)]
        for own in last:
            one, found = self.instructions[own], []
            if own in jumps:
                found.append(number[jumps[own]])
            if one.name[0] in ("ret", "exit"):
                found.append(number[end])
            if one.guard is not None or one.name[0] not in ("bra", "ret", "exit"):
                found.append(number[own + 1])
            following.append(found)
        # What all ways from each stretch pass, as bits.
        everything = (1 << len(starts) + 1) - 1
        passed = [everything] * len(starts) + [1 << len(starts)]
        while True:
            new = [
                functools.reduce(operator.and_, (passed[x] for x in found)) | 1 << index
                for index, found in enumerate(following)
            ]
            if new == passed[:-1]:
                break
            passed[:-1] = new
        found = {}
        for index, own in enumerate(last):
            if own in jumps:
                others = [x for x in range(len(passed)) if passed[index] >> x & 1 and x != index]
                first = max(others, key=lambda x: passed[x].bit_count())
                found[own] = (*starts, end)[first]
        return found


_TOKEN = re.compile(r"%?[A-Za-z_$][\w$]*")


def parse(text: str) -> Program:
    """A kernel's PTX."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^\s*\.(loc|file|pragma)\b.*$", "", text, flags=re.M)
    head = re.search(r"\.entry\s+\w+\s*\((.*?)\)[^{]*\{", text, re.S)
    if head is None:
        raise ValueError("there is no kernel")
    parameters = tuple(re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", head[1].strip()))
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    jumps: list[tuple[int, list[dict[str, str]]]] = []
    scopes: list[dict[str, str]] = [{}]
    count = 1  # of scopes

    def resolve(match: re.Match[str]) -> str:
        return next((scope[match[0]] for scope in scopes[::-1] if match[0] in scope), match[0])

    position, end = head.end(), len(text)
    while position < end:
        rest = re.compile(r"\s*").match(text, position)
        position = rest.end()
        if position >= end:
            break
        if text[position] == "{":
            scopes.append({})
            count += 1
            position += 1
            continue
        if text[position] == "}":
            scopes.pop()
            position += 1
            if not scopes:
                break
            continue
        label = re.compile(r"([\w$]+)\s*:").match(text, position)
        if label is not None:
            name = f"{label[1]}.{count}"
            scopes[-1][label[1]] = name
            labels[name] = len(instructions)
            position = label.end()
            continue
        stop = text.index(";", position)
        line = " ".join(text[position:stop].split())
        position = stop + 1
        if line.startswith(".reg"):
            _, kind, names = line.split(" ", 2)
            for name in names.split(","):
                name, _, number = name.strip().partition("<")
                own = [name] if not number else [f"{name}{i}" for i in range(int(number[:-1]))]
                for one in own:
                    scopes[-1][one] = f"{one}.{count}" if len(scopes) > 1 else one
                    registers[scopes[-1][one]] = kind[1:]
            continue
        if line.startswith("."):
            continue  # shared memory, which is where it is
        guard = None
        if line.startswith("@"):
            which, line = line[1:].split(" ", 1)
            own = _TOKEN.sub(resolve, which.strip("!"))
            guard = (own, which.startswith("!"))
        name, _, operands = line.partition(" ")
        if name.startswith("bra"):  # to a label that may come later
            jumps.append((len(instructions), list(scopes)))
        else:
            operands = _TOKEN.sub(resolve, operands)
        instructions.append(
            Instruction(guard, tuple(name.split(".")), tuple(_split(operands)), line)
        )
    for index, inside in jumps:
        one = instructions[index]
        label = next(scope[one.operands[0]] for scope in inside[::-1] if one.operands[0] in scope)
        instructions[index] = dataclasses.replace(one, operands=(label,))
    return Program(tuple(instructions), labels, parameters, registers)


def _split(text: str) -> list[str]:
    """What commas outside of brackets separate."""
    found, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            found.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*found, last] if last else found


# The machine


class Memory:
    """Arrays in global memory, at addresses of their own."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, np.ndarray]] = []
        self._top = _GLOBAL

    def place(self, array: np.ndarray) -> int:
        """The address of an array, which is written where it is."""
        flat = array.reshape(-1).view(np.uint8)
        address = self._top
        self._arrays.append((address, flat))
        self._top += -(-flat.size // 4096) * 4096 + 4096
        return address

    def _of(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for address, flat in self._arrays:
            inside = places - address
            if inside.size and inside.min() >= 0 and inside.max() < flat.size:
                return flat, inside
        raise Fault(f"no array has the addresses from {places.min():#x} to {places.max():#x}")

    def read(self, places: np.ndarray) -> np.ndarray:
        """Bytes."""
        flat, inside = self._of(places)
        return flat[inside]

    def write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Bytes."""
        flat, inside = self._of(places)
        flat[inside] = values


@dataclasses.dataclass
class _Barrier:
    """One `mbarrier`."""

    count: int
    missing: int
    bytes_missing: int = 0
    phase: int = 0

    def settle(self) -> None:
        """Ends the phase if nothing is missing."""
        if self.missing < 0:
            raise Fault("a barrier has more arrivals than it counts")
        if not self.missing and not self.bytes_missing:
            self.phase += 1
            self.missing = self.count


@dataclasses.dataclass
class _Copy:
    """A copy in flight."""

    finish: Callable[[], None]
    read: Callable[[], None] | None = None


@dataclasses.dataclass
class _Product:
    """A product in flight."""

    finish: Callable[[], None]
    registers: tuple[str, ...]


class Block:
    """A block of threads: its shared memory, its barriers, and its warps."""

    def __init__(
        self, program: Program, launch: Launch, memory: Memory, place: tuple[int, ...], seed: int
    ) -> None:
        self.program, self.memory, self.place = program, memory, place
        self.random = random.Random(seed)
        self.shared = np.full(_SHARED_END, _GARBAGE, np.uint8)
        # Who has written a byte that is not passed on: number of the warp, from 1 on.
        self.unfenced = np.zeros(_SHARED_END, np.uint8)
        self.shared_end = _SHARED + launch.shared_bytes
        self.barriers: dict[int, _Barrier] = {}
        self.named: dict[int, list[Warp]] = {}
        self.copies: list[_Copy] = []
        self.maps: dict[int, TensorMap] = {}
        self.parameters: dict[str, int] = {}
        self.values: dict[int, int] = {}  # of parameters
        address = _PARAMETERS
        for name, argument in zip(program.parameters, launch.arguments, strict=True):
            self.parameters[name] = address
            held = launch.memory.get(argument)
            if isinstance(held, int):
                self.values[address] = held
            else:  # descriptors
                self.maps |= {
                    address + at - argument: found
                    for at, found in launch.maps.items()
                    if 0 <= at - argument < 4096
                }
            address += 8192
        self.warps = [Warp(self, index) for index in range(launch.threads // LANES)]

    def run(self) -> None:
        """Until all threads have ended."""
        running = list(self.warps)
        while running:
            ready = [warp for warp in running if warp.can_go_on()]
            if not ready:
                if not self.copies:
                    where = {warp.index: warp.where() for warp in running}
                    raise Fault(f"warps wait forever: {where}")
                self.finish(self.random.choice(self.copies))
                continue
            warp = self.random.choice(ready)
            for _ in range(self.random.choice((1, 8, 64, 512))):
                if not warp.step():
                    break
            if warp.has_ended:
                running.remove(warp)
        for copy in list(self.copies):
            self.finish(copy)

    def finish(self, copy: _Copy) -> None:
        """Ends a copy."""
        if copy.read is not None:
            copy.read()
        copy.finish()
        self.copies.remove(copy)

    def check(self, places: np.ndarray) -> np.ndarray:
        """Addresses of shared memory."""
        if places.size and (places.min() < _SHARED or places.max() >= self.shared_end):
            raise Fault(f"outside of shared memory: {places.min():#x} to {places.max():#x}")
        return places

    def read_shared(self, places: np.ndarray) -> np.ndarray:
        """Bytes, as the copy engine and the tensor cores read them."""
        self.check(places)
        by = self.unfenced[places]
        if by.any():
            raise Fault(f"no fence has passed on what warp {by.max() - 1} has written")
        return self.shared[places]


@dataclasses.dataclass
class _Path:
    """Where some threads of a warp are, and where they meet the others again."""

    threads: np.ndarray
    next: int
    meeting: int


class _Waiting(Exception):
    """The instruction cannot go on now."""


class Warp:
    """32 threads."""

    def __init__(self, block: Block, index: int) -> None:
        self.block, self.index = block, index
        self.values: dict[str, np.ndarray] = {}
        self.paths = [_Path(_ALL, 0, -1)]  # the last one is gone, up to where it meets the others
        self.alive = _ALL.copy()
        self.active = _ALL  # of the current instruction
        self.is_blocked: Callable[[], bool] | None = None
        self.open: list[_Product] = []
        self.groups: list[list[_Product]] = []
        self.flying: dict[str, int] = {}  # registers of products in flight, and of how many
        self.bulk_open: list[list[_Copy]] = [[] for _ in range(LANES)]
        self.bulk: list[list[list[_Copy]]] = [[] for _ in range(LANES)]

    @property
    def has_ended(self) -> bool:
        """Whether no thread goes on."""
        return not self.alive.any()

    def can_go_on(self) -> bool:
        """Whether it waits for nothing."""
        if self.is_blocked is not None and not self.is_blocked():
            self.is_blocked = None
        return self.is_blocked is None

    def where(self) -> str:
        """The instruction that it has come to."""
        return self.block.program.instructions[self.paths[-1].next].text

    def step(self) -> bool:
        """Executes one instruction; whether another one may follow at once."""
        if self.has_ended or not self.can_go_on():
            return False
        program = self.block.program
        while len(self.paths) > 1 and (
            self.paths[-1].next == self.paths[-1].meeting
            or not (self.paths[-1].threads & self.alive).any()
        ):
            self.paths.pop()
        path = self.paths[-1]
        at, active = path.next, path.threads & self.alive
        one = program.instructions[at]
        if one.guard is None:
            running = active
        else:
            running = active & (self.get(one.guard[0], "pred") != one.guard[1])
        if one.name[0] in ("ret", "exit"):
            self.alive = self.alive & ~running
            if self.has_ended and (self.open or self.groups):
                raise Fault("threads end before their products have")
        elif one.name[0] == "bra":
            target = program.labels[one.operands[0]]
            if (running == active).all():
                path.next = target
                return True
            if running.any():
                path.next = meeting = program.meetings[at]
                self.paths.append(_Path(active & ~running, at + 1, meeting))
                self.paths.append(_Path(running, target, meeting))
                return True
        elif running.any():
            self.active = running
            execute = _OPERATIONS.get(one.name[0])
            if execute is None:
                raise NotImplementedError(one.text)
            try:
                execute(self, one)
            except _Waiting:
                return False
            except Fault as error:
                raise Fault(f"{error} (warp {self.index}: {one.text})") from None
            except (KeyError, TypeError, IndexError, ValueError, StopIteration) as error:
                raise Fault(f"{type(error).__name__} {error} (in {one.text})") from error
        path.next = at + 1
        return self.is_blocked is None

    def wait(self, is_blocked: Callable[[], bool]) -> None:
        """The instruction is done, and the next one comes when this no longer holds."""
        if is_blocked():
            self.is_blocked = is_blocked

    def together(self) -> None:
        """All threads take part."""
        if not self.active.all():
            raise Fault("some threads of the warp are elsewhere")

    # Registers

    def get(self, operand: str, kind: str) -> np.ndarray:
        """What an operand is, as a type; one entry if it is the same for all."""
        dtype = _TYPES[kind]
        if operand[0] == "-" or operand[0].isdigit():
            return _constant(operand, dtype)
        if operand in self.block.program.registers:
            if operand in self.flying:
                raise Fault(f"a product in flight has {operand}")
            if operand not in self.values:
                raise Fault(f"nothing has been written to {operand}")
            value = self.values[operand]
            if value.dtype.itemsize > dtype.itemsize:
                return value.astype(f"u{dtype.itemsize}").view(dtype)
            if value.dtype.itemsize < dtype.itemsize:
                raise ValueError(f"{operand} is too narrow")
            return value.view(dtype)
        special = operand.partition(".")
        if special[0] in ("%tid", "%ctaid", "%ntid", "%nctaid"):
            axis = "xyz".index(special[2])
            if special[0] == "%tid":
                found = self.index * LANES + _LANE if axis == 0 else np.zeros(LANES, int)
            elif special[0] == "%ctaid":
                found = np.array(self.block.place[axis])
            else:
                raise NotImplementedError(operand)
            return found.astype(dtype)
        if operand == "%laneid":
            return _LANE.astype(dtype)
        if operand in self.block.parameters:
            return np.array(self.block.parameters[operand], dtype)
        if "shmem" in operand:
            return np.array(_SHARED, dtype)
        raise NotImplementedError(operand)

    def lanes(self, operand: str, kind: str) -> np.ndarray:
        """What an operand is, as a type, with an entry for each thread."""
        return np.ascontiguousarray(np.broadcast_to(self.get(operand, kind), (LANES,)))

    def number(self, operand: str) -> int:
        """The number that an operand is for all threads."""
        return int(np.max(self.get(operand, "u32")))

    def put(self, register: str, value: np.ndarray) -> None:
        """Writes the threads' own entries."""
        if register == "_":
            return
        kind = self.block.program.registers[register]
        if register in self.flying:
            raise Fault(f"a product in flight has {register}")
        value = np.asarray(value)
        if kind != "pred":
            stored = _TYPES[f"b{kind[1:]}"]
            if value.dtype.itemsize == stored.itemsize:
                value = np.broadcast_to(value, (LANES,)).copy().view(stored)
            elif np.issubdtype(value.dtype, np.integer):
                value = np.broadcast_to(value, (LANES,)).astype(stored)
            else:
                raise ValueError(f"{register} has another size")
        else:
            value = np.broadcast_to(value, (LANES,)).astype(bool)
        if self.active.all():
            self.values[register] = value
        else:
            before = self.values.get(register, np.zeros(LANES, value.dtype))
            self.values[register] = np.where(self.active, value, before)

    def address(self, operand: str) -> np.ndarray:
        """The address in brackets of each thread."""
        inside = operand.strip("[]").replace(" ", "")
        base, sign, offset = re.match(r"([^+]+?)(?:([+])(-?\w+))?$", inside).groups()
        if base.lstrip("-").isdigit():
            found = np.array(int(base))
        else:
            width = self.block.program.registers.get(base, "b64")
            found = self.get(base, f"u{width[1:]}").astype(np.int64)
        return np.broadcast_to(found + (int(offset, 0) if sign else 0), (LANES,))


def _constant(text: str, dtype: np.dtype[Any]) -> np.ndarray:
    if text[:2] in ("0f", "0F", "0d", "0D"):
        width = 4 if text[1] in "fF" else 8
        bits = np.array(int(text[2:], 16), f"u{width}")
        return bits.view(dtype if dtype.itemsize == width else f"f{width}").astype(dtype)
    if "." in text:
        return np.array(float(text)).astype(dtype)
    number = int(text, 0)
    if dtype.kind == "b":
        return np.array(bool(number))
    width = dtype.itemsize  # the bits of a number
    return np.array(number & (1 << 8 * width) - 1, f"u{width}").view(dtype)


_OPERATIONS: dict[str, Callable[[Warp, Instruction], None]] = {}


def _operation(*names: str) -> Callable[..., Any]:
    def add(function: Callable[[Warp, Instruction], None]) -> Any:
        _OPERATIONS.update({name: function for name in names})
        return function

    return add


def _kind(one: Instruction) -> str:
    """The last type in an instruction's name."""
    return next(part for part in reversed(one.name) if part in _TYPES or part in _PAIRS)


def _elementwise(function: Callable[..., Any]) -> Callable[[Warp, Instruction], None]:
    """A function of numbers, of pairs of them too."""

    def execute(warp: Warp, one: Instruction) -> None:
        kind, (target, *sources) = _kind(one), one.operands
        if kind in _PAIRS:
            half = _TYPES[_PAIRS[kind]]
            given = [warp.lanes(x, "b32").view(half) for x in sources]
            found = np.asarray(function(one, *given)).astype(half)
            warp.put(target, np.ascontiguousarray(found).view(np.uint32))
            return
        given = [warp.get(x, kind) for x in sources]
        found = function(one, *given)
        if kind in ("f16", "bf16", "f32"):
            found = np.asarray(found).astype(_TYPES[kind])
        warp.put(target, np.asarray(found))

    return execute


def _wide(x: np.ndarray) -> np.ndarray:
    """Of twice the width."""
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
    if given[0].dtype != _TYPES["bf16"]:
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
    if x.dtype.kind in "ui":
        if "wide" in one.name:
            raise NotImplementedError(one.text)
        return x * y + z
    # Rounded once from what is exact but for sums far apart.
    found = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    if "relu" in one.name:
        found = np.maximum(found, 0.0)
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
    """Subnormal numbers to zero, if the instruction says so."""
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
    _OPERATIONS[_name] = _elementwise(_function)


@_operation("shl", "shr")
def _do_shift(warp: Warp, one: Instruction) -> None:
    target, source, count = one.operands
    warp.put(target, _shift(one, warp.get(source, _kind(one)), warp.get(count, "u32")))


@_operation("mad")
def _do_mad(warp: Warp, one: Instruction) -> None:
    target, x, y, z = one.operands
    kind = _kind(one)
    product = _multiply(one, warp.get(x, kind), warp.get(y, kind))
    wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in one.name else kind
    warp.put(target, product + warp.get(z, wide))


@_operation("mov")
def _do_move(warp: Warp, one: Instruction) -> None:
    target, source = one.operands
    kind = one.name[-1]
    if target.startswith("{"):
        parts = _split(target.strip("{}"))
        value = warp.lanes(source, kind)
        width = value.dtype.itemsize // len(parts)
        found = value.view(f"u{width}").reshape(LANES, len(parts))
        for index, part in enumerate(parts):
            warp.put(part, found[:, index])
        return
    if source.startswith("{"):
        parts = _split(source.strip("{}"))
        width = _TYPES[kind].itemsize // len(parts)
        found = [warp.lanes(x, f"u{8 * width}") for x in parts]
        together = np.ascontiguousarray(np.stack(found, axis=-1))
        warp.put(target, together.view(_TYPES[f"u{8 * width * len(parts)}"]).reshape(LANES))
        return
    warp.put(target, warp.get(source, kind))


@_operation("selp")
def _do_select(warp: Warp, one: Instruction) -> None:
    target, x, y, which = one.operands
    kind = one.name[-1]
    found = np.where(warp.get(which, "pred"), warp.get(x, kind), warp.get(y, kind))
    warp.put(target, found.astype(_TYPES[kind]))


_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}


@_operation("setp")
def _do_compare(warp: Warp, one: Instruction) -> None:
    target, x, y, *more = one.operands
    kind, name = _kind(one), one.name[1]
    first, second = warp.get(x, kind), warp.get(y, kind)
    if name == "nan":
        found = np.isnan(first) | np.isnan(second)
    elif name == "num":
        found = ~(np.isnan(first) | np.isnan(second))
    else:
        is_unordered = name.endswith("u") and name[:-1] in _COMPARISONS and name != "lu"
        compare = _COMPARISONS[name[:-1] if is_unordered else name]
        found = compare(first, second)
        if kind in ("f16", "bf16", "f32", "f64"):
            either = np.isnan(first) | np.isnan(second)
            found = (found & ~either) | (either if is_unordered else False)
    if more:
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[one.name[2]]
        found = combine(found, warp.get(more[0], "pred"))
    first_target, _, second_target = target.partition("|")
    warp.put(first_target, found)
    if second_target:
        warp.put(second_target, ~found)


@_operation("lop3")
def _do_lop3(warp: Warp, one: Instruction) -> None:
    target, *sources, table = one.operands
    a, b, c = (warp.get(x, "u32") for x in sources)
    found = np.zeros(LANES, np.uint32)
    for index in range(8):
        if int(table, 0) >> index & 1:
            found |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    warp.put(target, found)


@_operation("prmt")
def _do_permute(warp: Warp, one: Instruction) -> None:
    target, x, y, selector = one.operands
    both = [warp.lanes(z, "u32") for z in (x, y)]
    sources = np.ascontiguousarray(np.stack(both, axis=-1)).view(np.uint8)
    select = warp.lanes(selector, "u32")
    found = np.zeros((LANES, 4), np.uint8)
    for index in range(4):
        which = (select >> 4 * index) & 15
        byte = sources[_LANE, which & 7]
        sign = np.where(byte & 128, 255, 0)
        found[:, index] = np.where(which & 8, sign, byte)
    warp.put(target, found.view(np.uint32).reshape(LANES))


@_operation("bfe")
def _do_extract(warp: Warp, one: Instruction) -> None:
    target, x, start, length = one.operands
    kind = _kind(one)
    value = warp.get(x, kind)
    bits = 8 * value.dtype.itemsize
    first = warp.number(start) & 255
    width = warp.number(length) & 255
    if first + width > bits or not width:
        raise NotImplementedError(one.text)
    left = (value.astype(f"u{value.dtype.itemsize}") << (bits - first - width)).astype(
        f"u{value.dtype.itemsize}"
    )
    warp.put(target, (left.view(value.dtype) >> (bits - width)).astype(value.dtype))


@_operation("bfi")
def _do_insert(warp: Warp, one: Instruction) -> None:
    target, x, y, start, length = one.operands
    kind = _kind(one)
    inserted, into = warp.get(x, kind), warp.get(y, kind)
    first = warp.get(start, "u32").astype(inserted.dtype)
    mask = np.array((1 << int(_constant(length, np.dtype(np.uint32)))) - 1, inserted.dtype)
    warp.put(target, (into & ~(mask << first)) | ((inserted & mask) << first))


@_operation("clz", "brev", "bfind")
def _do_bits(warp: Warp, one: Instruction) -> None:
    target, x = one.operands
    value = np.broadcast_to(warp.get(x, _kind(one)), (LANES,))
    bits = 8 * value.dtype.itemsize
    texts = [format(int(v) & (1 << bits) - 1, f"0{bits}b") for v in value]
    if one.name[0] == "clz":
        found = [len(text) - len(text.lstrip("0")) for text in texts]
    elif one.name[0] == "brev":
        found = [int(text[::-1], 2) for text in texts]
    else:
        raise NotImplementedError(one.text)
    warp.put(target, np.array(found).astype(np.uint32 if bits == 32 else np.uint64))


_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@_operation("cvt")
def _do_convert(warp: Warp, one: Instruction) -> None:
    names = [part for part in one.name if part in _TYPES or part[:-2] in _TYPES]
    to, origin = names
    target, *sources = one.operands
    if to.endswith("x2"):  # the first source is the upper half
        narrow = _TYPES[to[:-2]]
        if origin.endswith("x2"):
            pair = _TYPES[origin[:-2]]
            x = warp.get(sources[0], f"b{16 * pair.itemsize}")
            x = np.ascontiguousarray(np.broadcast_to(x, (LANES,)))
            halves = x.view(pair).reshape(LANES, 2).astype(np.float32)
        else:
            both = [warp.lanes(x, origin) for x in sources[::-1]]
            halves = np.stack(both, axis=-1).astype(np.float32)
        if "relu" in one.name:
            halves = np.maximum(halves, 0)
        if narrow.itemsize == 1:
            most = float(ml_dtypes.finfo(narrow).max)
            if "satfinite" in one.name:
                halves = np.clip(halves, -most, most)
        found = np.ascontiguousarray(halves.astype(narrow))
        warp.put(target, found.view(f"u{2 * narrow.itemsize}").reshape(LANES))
        return
    if origin.endswith("x2"):
        raise NotImplementedError(one.text)
    value, wanted = warp.get(sources[0], origin), _TYPES[to]
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
    if "sat" in one.name:
        value = np.clip(np.nan_to_num(value, nan=0.0), 0, 1)
    found = value.astype(wanted)
    if "rz" in one.name and to == "bf16":
        found = (value.view(np.uint32) >> 16).astype(np.uint16)
    warp.put(target, found)


@_operation("cvta")
def _do_address(warp: Warp, one: Instruction) -> None:
    target, source = one.operands
    warp.put(target, warp.get(source, "u64"))


# Memory


def _bytes_of(places: np.ndarray, width: int) -> np.ndarray:
    return (places[:, None] + np.arange(width)).reshape(-1)


def _space(one: Instruction, places: np.ndarray) -> str:
    named = {"shared", "shared::cta", "global", "param", "param::entry", "shared::cluster"}
    for part in one.name:
        if part in named:
            return part.split("::")[0]
    lowest = int(places.min())
    return "global" if lowest >= _GLOBAL else "param" if lowest >= _PARAMETERS else "shared"


def _vector(one: Instruction) -> int:
    return next((int(x[1:]) for x in one.name if x in ("v2", "v4", "v8")), 1)


@_operation("ld", "ldu")
def _do_load(warp: Warp, one: Instruction) -> None:
    target, source = one.operands
    dtype, count = _TYPES[one.name[-1]], _vector(one)
    targets = _split(target.strip("{}")) if target.startswith("{") else [target]
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


@_operation("st")
def _do_store(warp: Warp, one: Instruction) -> None:
    target, source = one.operands
    kind, count = one.name[-1], _vector(one)
    sources = _split(source.strip("{}")) if source.startswith("{") else [source]
    if len(sources) != count:
        raise ValueError("as many registers as entries")
    lanes = warp.active
    places, width = warp.address(target)[lanes], _TYPES[kind].itemsize * count
    if (places % width).any():
        raise Fault(f"addresses are no multiples of {width}")
    entries = [warp.lanes(x, kind)[lanes] for x in sources]
    values = np.ascontiguousarray(np.stack(entries, axis=-1)).view(np.uint8).reshape(-1)
    _write(warp, _space(one, places), _bytes_of(places, width), values)


def _write(warp: Warp, space: str, places: np.ndarray, values: np.ndarray) -> None:
    """What threads write to memory."""
    block = warp.block
    if space == "shared":
        block.check(places)
        block.shared[places] = values
        block.unfenced[places] = warp.index + 1
    else:
        block.memory.write(places, values)


@_operation("atom", "red")
def _do_atomic(warp: Warp, one: Instruction) -> None:
    *target, place, source = one.operands
    kind = one.name[-1]
    dtype, block = _TYPES[kind], warp.block
    places = warp.address(place)
    values = warp.lanes(source, kind)
    space = _space(one, places[warp.active])
    combine = {
        "add": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "or": np.bitwise_or,
        "and": np.bitwise_and,
        "exch": lambda _, y: y,
    }[next(x for x in one.name if x in ("add", "max", "min", "or", "and", "exch"))]
    before = np.zeros(LANES, dtype)
    for lane in np.flatnonzero(warp.active):
        where = places[lane] + np.arange(dtype.itemsize)
        held = block.shared[block.check(where)] if space == "shared" else block.memory.read(where)
        before[lane] = np.ascontiguousarray(held).view(dtype)[0]
        after = np.array([combine(before[lane], values[lane])], dtype).view(np.uint8)
        _write(warp, space, where, after)
    if target:
        warp.put(target[0], before)


@_operation("ldmatrix", "stmatrix")
def _do_matrices(warp: Warp, one: Instruction) -> None:
    """Matrices of 8 by 8 entries of 16 bits: row `r` of matrix `m` is where thread `8 m + r` says.

    Thread `t` holds entries `2 (t % 4)` and the next one of row `t / 4`.
    """
    warp.together()
    is_load = one.name[0] == "ldmatrix"
    registers, place = one.operands if is_load else one.operands[::-1]
    names = _split(registers.strip("{}"))
    places, block = warp.address(place), warp.block
    for index, name in enumerate(names):
        rows = places[8 * index : 8 * index + 8]
        if (rows % 16).any():
            raise Fault("rows of matrices are not aligned")
        where = block.check(_bytes_of(rows, 16))
        row, column = _LANE // 4, 2 * (_LANE % 4)
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


# Threads of a warp


@_operation("shfl")
def _do_shuffle(warp: Warp, one: Instruction) -> None:
    warp.together()
    target, source, lane, clamp, _ = one.operands
    target, _, is_valid = target.partition("|")
    value = warp.lanes(source, "b32")
    number, clamp = warp.get(lane, "u32").astype(int) & 31, int(clamp, 0)
    limit, segment = clamp & 31, clamp >> 8 & 31
    first = _LANE & segment
    last = first | (limit & ~segment & 31)
    mode = one.name[2]
    if mode == "idx":
        other = first | (number & ~segment & 31)
        valid = other <= last
    elif mode == "bfly":
        other = _LANE ^ number
        valid = other <= last
    elif mode == "down":
        other = _LANE + number
        valid = other <= last
    else:
        other = _LANE - number
        valid = other >= (first | limit & ~31)
    warp.put(target, value[np.where(valid, other, _LANE) & 31])
    if is_valid:
        warp.put(is_valid, valid)


@_operation("vote")
def _do_vote(warp: Warp, one: Instruction) -> None:
    warp.together()
    target, source, _ = one.operands
    is_negated = source.startswith("!")
    value = np.broadcast_to(warp.get(source.strip("!"), "pred") != is_negated, (LANES,))
    if "ballot" in one.name:
        found = np.array(int((value.astype(np.uint64) << _LANE.astype(np.uint64)).sum()), np.uint32)
    elif "any" in one.name:
        found = value.any()
    elif "all" in one.name:
        found = value.all()
    else:
        found = value.all() | ~value.any()
    warp.put(target, np.asarray(found))


@_operation("redux")
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


@_operation("elect")
def _do_elect(warp: Warp, one: Instruction) -> None:
    warp.together()
    target, _, chosen = one.operands[0].partition("|")
    warp.put(target, np.array(0, np.uint32))
    warp.put(chosen, _LANE == 0)


@_operation("activemask")
def _do_active(warp: Warp, one: Instruction) -> None:
    mask = sum(1 << lane for lane in np.flatnonzero(warp.active))
    warp.put(one.operands[0], np.array(mask, np.uint32))


# Barriers


@_operation("bar", "barrier")
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
    """The one address that all active threads have."""
    found = set(warp.address(operand)[warp.active].tolist())
    if len(found) != 1:
        raise Fault("threads have different addresses")
    return found.pop()


@_operation("mbarrier")
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
        block.barriers[at] = _Barrier(number, number)
    elif action == "arrive":
        state, place, *more = one.operands if one.operands[0][0] != "[" else ("_", *one.operands)
        barrier = block.barriers[_place(warp, place)]
        if "expect_tx" in one.name:
            # The count of bytes that are to come may fall below zero before.
            barrier.bytes_missing += threads * warp.number(more[0])
            arrivals = threads
        else:
            arrivals = threads * (warp.number(more[0]) if more else 1)
        barrier.missing -= arrivals
        barrier.settle()
        if state != "_":
            warp.put(state, np.array(barrier.phase, np.uint64))
    elif action == "expect_tx":
        barrier = block.barriers[_place(warp, one.operands[0])]
        barrier.bytes_missing += threads * warp.number(one.operands[1])
    elif action in ("try_wait", "test_wait"):
        done, place, parity, *_ = one.operands
        if "parity" not in one.name:
            raise NotImplementedError(one.text)
        barrier = block.barriers[_place(warp, place)]
        wanted = set(warp.lanes(parity, "u32")[warp.active].tolist())
        if len(wanted) != 1:
            raise Fault("threads wait for different phases")
        own = wanted.pop()
        if barrier.phase & 1 == own:
            warp.is_blocked = lambda: barrier.phase & 1 == own
            raise _Waiting
        warp.put(done, np.array(True))
    elif action == "inval":
        del block.barriers[_place(warp, one.operands[0])]
    else:
        raise NotImplementedError(one.text)


@_operation("fence")
def _do_fence(warp: Warp, one: Instruction) -> None:
    if "proxy" in one.name:
        mine = warp.block.unfenced == warp.index + 1
        warp.block.unfenced[mine] = 0


@_operation("setmaxnreg", "prefetch", "membar", "nanosleep", "griddepcontrol")
def _do_nothing(warp: Warp, one: Instruction) -> None:
    """What changes no number."""


@_operation("trap")
def _do_trap(warp: Warp, one: Instruction) -> None:
    raise Fault("trap")


# Copies


def swizzled(places: np.ndarray, line: int) -> np.ndarray:
    """Where bytes lie whose 16-byte parts are exchanged within lines of so many bytes."""
    mask = {16: 0, 32: 1, 64: 3, 128: 7}[line]
    return places ^ ((places >> 7 & mask) << 4)


@_operation("cp")
def _do_copy(warp: Warp, one: Instruction) -> None:
    name = one.name
    if name[1:3] != ("async", "bulk"):
        raise NotImplementedError(one.text)
    if "commit_group" in name:
        for lane in np.flatnonzero(warp.active):
            warp.bulk[lane].append(warp.bulk_open[lane])
            warp.bulk_open[lane] = []
    elif "wait_group" in name:
        _await_copies(warp, int(one.operands[0]), only_read="read" in name)
    elif "prefetch" not in name:
        if int(warp.active.sum()) != 1:
            raise Fault("more than one thread copies")
        copy = _copy_tensor if name[3] == "tensor" else _copy_bulk
        copy(warp, one, int(np.flatnonzero(warp.active)[0]))


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


def _copy_tensor(warp: Warp, one: Instruction, lane: int) -> None:
    """A box of an array."""
    block = warp.block
    is_load = one.name[5].startswith("shared")  # to where
    source, target = (one.operands[1], one.operands[0]) if is_load else one.operands[::-1]
    tensor = source if is_load else target
    shared = target if is_load else source
    pointer, coordinates = _split(tensor.strip("[]"))
    where = block.maps[int(warp.lanes(pointer, "u64")[lane])]
    corner = [int(warp.lanes(x, "s32")[lane]) for x in _split(coordinates.strip("{}"))][::-1]
    places, is_there = where.places(corner)
    start = int(warp.address(shared)[lane])
    if start % 128:
        raise Fault("a copy's place in shared memory is not aligned")
    own = swizzled(start + np.arange(places.size), where.swizzle)
    block.check(own)
    if is_load:
        barrier = block.barriers[int(warp.address(one.operands[2])[lane])]
        _start_load(block, barrier, own, places, is_there)
    else:
        _start_store(warp, one, lane, own, places, is_there)


def _copy_bulk(warp: Warp, one: Instruction, lane: int) -> None:
    """Adjacent bytes."""
    block = warp.block
    is_load = one.name[3].startswith("shared")
    target, source = (int(warp.address(x)[lane]) for x in one.operands[:2])
    size = int(warp.lanes(one.operands[2], "u32")[lane])
    if size % 16 or target % 16 or source % 16:
        raise Fault("a copy is of multiples of 16 bytes")
    inside = np.arange(size)
    if is_load:
        barrier = block.barriers[int(warp.address(one.operands[3])[lane])]
        _start_load(block, barrier, block.check(target + inside), source + inside)
    else:
        _start_store(warp, one, lane, block.check(source + inside), target + inside)


def _start_load(
    block: Block,
    barrier: _Barrier,
    own: np.ndarray,
    places: np.ndarray,
    is_there: np.ndarray | bool = True,
) -> None:
    """Starts to copy from global to shared memory; what is not there becomes zero."""
    is_there = np.broadcast_to(is_there, places.shape)
    block.shared[own] = _GARBAGE
    block.unfenced[own] = 0

    def finish() -> None:
        values = np.zeros(places.size, np.uint8)
        values[is_there] = block.memory.read(places[is_there])
        block.shared[own] = values
        barrier.bytes_missing -= places.size
        barrier.settle()

    block.copies.append(_Copy(finish))


def _start_store(
    warp: Warp,
    one: Instruction,
    lane: int,
    own: np.ndarray,
    places: np.ndarray,
    is_there: np.ndarray | bool = True,
) -> None:
    """Starts to copy from shared to global memory."""
    block, is_there = warp.block, np.broadcast_to(is_there, places.shape)
    values = block.read_shared(own).copy()

    def read() -> None:
        if (block.shared[own] != values).any():
            raise Fault(f"what a copy reads has been overwritten ({one.text})")

    def write() -> None:
        block.memory.write(places[is_there], values[is_there])

    copy = _Copy(write, read)
    block.copies.append(copy)
    warp.bulk_open[lane].append(copy)


# Products


_SHAPE = re.compile(r"m64n(\d+)k(\d+)")


@_operation("wgmma")
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
    names = tuple(_split(target.strip("{}")))
    block, rows = warp.block, 16 * (warp.index % 4) + np.arange(16)
    itemsize = _TYPES[left_kind].itemsize
    signs = [int(x) for x in scales[:2]]
    from_registers = left.startswith("{")
    # Operands in registers cannot be turned, and have no word for it.
    turned = [False, False, *(bool(int(x)) for x in scales[2:])][-2:]
    goes_on = warp.lanes(keeps, "pred")
    if goes_on.any() != goes_on.all():
        raise Fault("threads differ in whether sums go on")
    right_places = _operand(warp, right, np.arange(columns), depth, itemsize, turned[1])
    read = [(right_places, block.read_shared(right_places))]
    if from_registers:
        left_names = _split(left.strip("{}"))
        held = [warp.lanes(x, "b32").copy() for x in left_names]
    else:
        left_places = _operand(warp, left, rows, depth, itemsize, turned[0])
        read.append((left_places, block.read_shared(left_places)))

    def as_matrix(raw: np.ndarray, kind: str) -> np.ndarray:
        dtype = _TYPES[kind]
        return np.ascontiguousarray(raw).view(dtype).reshape(-1, depth).astype(np.float32)

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
            first = _from_registers(held, _TYPES[left_kind], depth)
        else:
            first = as_matrix(read[1][1], left_kind)
        found = signs[0] * signs[1] * (first @ second.T)
        if goes_on.all():
            found = found + _sums(warp, names, to, columns)
        _put_sums(warp, names, to, found.astype(np.float32))

    for name in names:
        warp.flying[name] = warp.flying.get(name, 0) + 1
    warp.open.append(_Product(finish, names))


@_operation("mma")
def _do_mma(warp: Warp, one: Instruction) -> None:
    """A product of a warp's own: 16 rows with eight columns, both in registers."""
    warp.together()
    depth = int(re.search(r"m16n8k(\d+)", one.text)[1])
    to, left_kind, right_kind, _ = one.name[-4:]
    target, left, right, start = (_split(x.strip("{}")) for x in one.operands)
    held = [[warp.lanes(x, "b32") for x in y] for y in (left, right)]
    first = _from_registers(held[0], _TYPES[left_kind], depth)
    per = 4 // _TYPES[right_kind].itemsize
    second = np.zeros((8, depth), np.float32)
    for index, register in enumerate(held[1]):
        entries = np.ascontiguousarray(register).view(_TYPES[right_kind]).reshape(LANES, per)
        for part in range(per):
            column = per * (_LANE % 4) + 4 * per * index + part
            second[_LANE // 4, column] = entries[:, part].astype(np.float32)
    if to != "f32":
        raise NotImplementedError(one.text)
    sums = [warp.lanes(x, "f32") for x in start]
    product = first @ second.T
    for index in range(2):
        row, column = _sum_places(index)
        for part in range(2):
            found = product[row, column + part] + sums[2 * index + part]
            warp.put(target[2 * index + part], found.astype(np.float32))


def _operand(
    warp: Warp, operand: str, rows: np.ndarray, depth: int, itemsize: int, is_turned: bool
) -> np.ndarray:
    """Addresses of the bytes of rows of a matrix in shared memory, from its descriptor."""
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
        # Lines hold rows' entries of one column; eight columns follow each other.
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
    """The 16 rows of a warp whose entries are in registers."""
    per = 4 // dtype.itemsize
    found = np.zeros((16, depth), np.float32)
    for index, register in enumerate(held):
        entries = np.ascontiguousarray(register).view(dtype).reshape(LANES, per).astype(np.float32)
        row = _LANE // 4 + 8 * (index % 2)
        first = per * (_LANE % 4) + 4 * per * (index // 2)
        for part in range(per):
            found[row, first + part] = entries[:, part]
    return found


def _sum_places(index: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and first column of what register pair `index` holds: two columns."""
    return _LANE // 4 + 8 * (index % 2), 8 * (index // 2) + 2 * (_LANE % 4)


def _sums(warp: Warp, names: Sequence[str], kind: str, columns: int) -> np.ndarray:
    found = np.zeros((16, columns), np.float32)
    for index in range(columns // 4):
        row, column = _sum_places(index)
        if kind == "f32":
            pair = [warp.values[x].view(np.float32) for x in names[2 * index : 2 * index + 2]]
        else:
            both = np.ascontiguousarray(warp.values[names[index]]).view(np.float16)
            pair = list(both.reshape(LANES, 2).T)
        found[row, column], found[row, column + 1] = pair
    return found


def _put_sums(warp: Warp, names: Sequence[str], kind: str, found: np.ndarray) -> None:
    for index in range(found.shape[1] // 4):
        row, column = _sum_places(index)
        pair = found[row, column], found[row, column + 1]
        if kind == "f32":
            for name, value in zip(names[2 * index : 2 * index + 2], pair, strict=True):
                warp.values[name] = np.ascontiguousarray(value).view(np.uint32)
        elif kind == "f16":
            both = np.stack(pair, axis=-1).astype(np.float16)
            warp.values[names[index]] = np.ascontiguousarray(both).view(np.uint32).reshape(LANES)
        else:
            raise NotImplementedError(kind)


def run(
    ptx: str,
    host: str,
    arguments: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    *,
    seed: int = 0,
) -> None:
    """Runs a kernel, block by block.

    Args:
      ptx: Its code.
      host: The host's, in LLVM's language.
      arguments: What it reads, contiguous.
      results: What it writes, where it is.
      seed: Of the order in which warps take turns.

    Raises:
      Fault: If the kernel does what the module names.
    """
    memory = Memory()
    buffers = [memory.place(x) for x in (*arguments, *results)]
    launch, program = read_launch(host, buffers), parse(ptx)
    with np.errstate(all="ignore"):
        for index in np.ndindex(launch.grid):
            Block(program, launch, memory, index, seed).run()


def kernels(printed: str) -> Iterator[tuple[str, str]]:
    """Of each kernel that a compilation has printed: its PTX and its host's code."""
    pattern = r"(^\.version .*?^\}\s*$).*?(^define \w+ @\w+_mosaic_gpu\(.*?^\})"
    for found in re.finditer(pattern, printed, re.M | re.S):
        yield found[1], found[2]
