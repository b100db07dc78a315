"""Executes a kernel: its memory, its blocks, and their warps, which take turns at random.

`registers` and `memory` implement the instructions and add them to `OPERATIONS`.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ptx.reading import Instruction, Launch, Program, TensorMap, parse, read_launch

LANES = 32
_ALL = np.ones(LANES, bool)
LANE = np.arange(LANES)
SHARED = 1024  # start address and alignment of a block's shared memory
SHARED_END = SHARED + 227 * 1024
PARAMETERS = 1 << 24  # first address of parameters
GLOBAL = 1 << 32
GARBAGE = 0xFF  # bytes before data has arrived: NaN in every float type

_INTEGERS = {
    f"{kind}{bits}": np.dtype(f"{sign}int{bits}")
    for bits in (8, 16, 32, 64)
    for kind, sign in (("s", ""), ("u", "u"), ("b", "u"))
}
TYPES: dict[str, np.dtype[Any]] = _INTEGERS | {
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "pred": np.dtype(bool),
}
PAIRS = {f"{kind}x2": kind for kind in ("f16", "bf16", "u16", "s16")}


class Fault(Exception):
    """An error that makes a GPU's results depend on chance, or lets it wait forever."""


class Memory:
    """Arrays in global memory, at separate addresses."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, np.ndarray]] = []
        self._top = GLOBAL

    def place(self, array: np.ndarray) -> int:
        """Adds an array, which the kernel writes in place, and returns its address."""
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
        """Reads bytes."""
        flat, inside = self._of(places)
        return flat[inside]

    def write(self, places: np.ndarray, values: np.ndarray) -> None:
        """Writes bytes."""
        flat, inside = self._of(places)
        flat[inside] = values


@dataclasses.dataclass
class Barrier:
    """One `mbarrier`."""

    count: int
    missing: int
    bytes_missing: int = 0
    phase: int = 0

    def settle(self) -> None:
        """Ends the phase if no arrivals and bytes are missing."""
        if self.missing < 0:
            raise Fault("a barrier has more arrivals than it counts")
        if not self.missing and not self.bytes_missing:
            self.phase += 1
            self.missing = self.count


@dataclasses.dataclass
class Copy:
    """A copy in flight."""

    finish: Callable[[], None]
    read: Callable[[], None] | None = None


@dataclasses.dataclass
class Product:
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
        self.shared = np.full(SHARED_END, GARBAGE, np.uint8)
        # For each byte, 1 + the index of the warp that wrote it without a proxy fence since.
        self.unfenced = np.zeros(SHARED_END, np.uint8)
        self.shared_end = SHARED + program.shared_bytes + launch.shared_bytes
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, list[Warp]] = {}
        self.copies: list[Copy] = []
        self.maps: dict[int, TensorMap] = {}
        self.parameters: dict[str, int] = {}
        self.values: dict[int, int] = {}  # parameters by address
        address = PARAMETERS
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
        """Runs until all threads have ended."""
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

    def finish(self, copy: Copy) -> None:
        """Completes a copy."""
        if copy.read is not None:
            copy.read()
        copy.finish()
        self.copies.remove(copy)

    def check(self, places: np.ndarray) -> np.ndarray:
        """Checks that addresses are in shared memory."""
        if places.size and (places.min() < SHARED or places.max() >= self.shared_end):
            raise Fault(f"outside of shared memory: {places.min():#x} to {places.max():#x}")
        return places

    def read_shared(self, places: np.ndarray) -> np.ndarray:
        """Reads bytes as the copy engine and the tensor cores do, which requires a proxy fence."""
        self.check(places)
        by = self.unfenced[places]
        if by.any():
            raise Fault(f"no fence has passed on what warp {by.max() - 1} has written")
        return self.shared[places]


@dataclasses.dataclass
class _Path:
    """The position of some threads of a warp, and the point where they rejoin the others."""

    threads: np.ndarray
    next: int
    meeting: int


class Waiting(Exception):
    """Raised when an instruction cannot proceed yet."""


class Warp:
    """32 threads."""

    def __init__(self, block: Block, index: int) -> None:
        self.block, self.index = block, index
        self.values: dict[str, np.ndarray] = {}
        self.paths = [_Path(_ALL, 0, -1)]  # a stack; the last one runs until it rejoins the others
        self.alive = _ALL.copy()
        self.active = _ALL  # threads of the current instruction
        self.is_blocked: Callable[[], bool] | None = None
        self.open: list[Product] = []
        self.groups: list[list[Product]] = []
        self.flying: dict[str, int] = {}  # registers of products in flight, with counts
        self.bulk_open: list[list[Copy]] = [[] for _ in range(LANES)]
        self.bulk: list[list[list[Copy]]] = [[] for _ in range(LANES)]
        # Per-thread copies; the threads of a warp commit and await their groups together.
        self.thread_open: list[Copy] = []
        self.thread_groups: list[list[Copy]] = []

    @property
    def has_ended(self) -> bool:
        """Whether all threads have ended."""
        return self.alive is not _ALL and not self.alive.any()

    def can_go_on(self) -> bool:
        """Whether the warp is not waiting."""
        if self.is_blocked is not None and not self.is_blocked():
            self.is_blocked = None
        return self.is_blocked is None

    def where(self) -> str:
        """Returns the text of the next instruction."""
        return self.block.program.instructions[self.paths[-1].next].text

    def step(self) -> bool:
        """Executes one instruction; returns whether another one may follow immediately."""
        if self.has_ended or not self.can_go_on():
            return False
        program = self.block.program
        while len(self.paths) > 1 and (
            self.paths[-1].next == self.paths[-1].meeting
            or not (self.paths[-1].threads & self.alive).any()
        ):
            self.paths.pop()
        path = self.paths[-1]
        at, active = path.next, _both(path.threads, self.alive)
        one = program.instructions[at]
        if one.guard is None:
            running = active
        else:
            running = _both(active, self.get(one.guard[0], "pred") != one.guard[1])
        if one.name[0] in ("ret", "exit"):
            self.alive = self.alive & ~running
            if self.has_ended and (self.open or self.groups):
                raise Fault("threads end before their products have")
        elif one.name[0] == "bra":
            target = program.labels[one.operands[0]]
            if running is active or (running == active).all():
                path.next = target
                return True
            if running.any():
                path.next = meeting = program.meetings[at]
                self.paths.append(_Path(active & ~running, at + 1, meeting))
                self.paths.append(_Path(running, target, meeting))
                return True
        elif running is _ALL or running.any():
            self.active = running
            execute = OPERATIONS.get(one.name[0])
            if execute is None:
                raise NotImplementedError(one.text)
            try:
                execute(self, one)
            except Waiting:
                return False
            except Fault as error:
                raise Fault(f"{error} (warp {self.index}: {one.text})") from None
            except (KeyError, TypeError, IndexError, ValueError, StopIteration) as error:
                raise Fault(f"{type(error).__name__} {error} (in {one.text})") from error
        path.next = at + 1
        return self.is_blocked is None

    def wait(self, is_blocked: Callable[[], bool]) -> None:
        """Completes the instruction, but blocks the next one while `is_blocked()` holds."""
        if is_blocked():
            self.is_blocked = is_blocked

    def together(self) -> None:
        """Checks that all threads take part."""
        if self.active is not _ALL:
            raise Fault("some threads of the warp are elsewhere")

    # Registers

    def get(self, operand: str, kind: str) -> np.ndarray:
        """Returns an operand as a type, with one entry if it is equal in all threads."""
        dtype = TYPES[kind]
        if operand in self.flying:
            raise Fault(f"a product in flight has {operand}")
        value = self.values.get(operand)
        if value is not None:
            if value.dtype.itemsize > dtype.itemsize:
                return value.astype(f"u{dtype.itemsize}").view(dtype)
            if value.dtype.itemsize < dtype.itemsize:
                raise ValueError(f"{operand} is too narrow")
            return value.view(dtype)
        if operand[0] == "-" or operand[0].isdigit():
            return constant(operand, dtype)
        if operand in self.block.program.registers:
            raise Fault(f"nothing has been written to {operand}")
        special = operand.partition(".")
        if special[0] in ("%tid", "%ctaid", "%ntid", "%nctaid"):
            axis = "xyz".index(special[2])
            if special[0] == "%tid":
                found = self.index * LANES + LANE if axis == 0 else np.zeros(LANES, int)
            elif special[0] == "%ctaid":
                found = np.array(self.block.place[axis])
            else:
                raise NotImplementedError(operand)
            return found.astype(dtype)
        if operand == "%laneid":
            return LANE.astype(dtype)
        if operand in self.block.parameters:
            return np.array(self.block.parameters[operand], dtype)
        if operand in self.block.program.shared:
            return np.array(SHARED + self.block.program.shared[operand], dtype)
        raise NotImplementedError(operand)

    def lanes(self, operand: str, kind: str) -> np.ndarray:
        """Returns an operand as a type, with one entry per thread."""
        return _spread(self.get(operand, kind))

    def number(self, operand: str) -> int:
        """Returns an operand that is equal in all threads as an integer."""
        return int(np.max(self.get(operand, "u32")))

    def put(self, register: str, value: np.ndarray) -> None:
        """Writes the active threads' entries."""
        if register == "_":
            return
        kind = self.block.program.registers[register]
        if register in self.flying:
            raise Fault(f"a product in flight has {register}")
        value = np.asarray(value)
        if kind != "pred":
            stored = TYPES[f"b{kind[1:]}"]
            if value.dtype.itemsize == stored.itemsize:
                value = _spread(value).view(stored)
            elif value.dtype.kind in "iu":
                value = _spread(value).astype(stored)
            else:
                raise ValueError(f"{register} has another size")
        else:
            value = _spread(value).astype(bool)
        if self.active is _ALL:
            self.values[register] = value
        else:
            before = self.values.get(register, np.zeros(LANES, value.dtype))
            self.values[register] = np.where(self.active, value, before)

    def address(self, operand: str) -> np.ndarray:
        """Returns each thread's address, from an operand in brackets."""
        inside = operand.strip("[]").replace(" ", "")
        base, sign, offset = re.match(r"([^+]+?)(?:([+])(-?\w+))?$", inside).groups()
        if base.lstrip("-").isdigit():
            found = np.array(int(base))
        else:
            width = self.block.program.registers.get(base, "b64")
            found = self.get(base, f"u{width[1:]}").astype(np.int64)
        return _spread(found + (int(offset, 0) if sign else 0))


def _both(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersects sets of threads; a whole warp is the object `_ALL`."""
    if some is _ALL and others is _ALL:
        return _ALL
    found = some & others
    return _ALL if found.all() else found


def _spread(value: np.ndarray) -> np.ndarray:
    """Broadcasts to one entry per thread. Do not write to it: a register may share the array."""
    if value.shape == (LANES,):
        return np.ascontiguousarray(value)
    found = np.empty(LANES, value.dtype)
    found[...] = value
    return found


@functools.cache
def constant(text: str, dtype: np.dtype[Any]) -> np.ndarray:
    if text[:2] in ("0f", "0F", "0d", "0D"):
        width = 4 if text[1] in "fF" else 8
        bits = np.array(int(text[2:], 16), f"u{width}")
        return bits.view(dtype if dtype.itemsize == width else f"f{width}").astype(dtype)
    if "." in text:
        return np.array(float(text)).astype(dtype)
    number = int(text, 0)
    if dtype.kind == "b":
        return np.array(bool(number))
    width = dtype.itemsize  # bytes of the bit pattern
    return np.array(number & (1 << 8 * width) - 1, f"u{width}").view(dtype)


OPERATIONS: dict[str, Callable[[Warp, Instruction], None]] = {}


def operation(*names: str) -> Callable[..., Any]:
    def add(function: Callable[[Warp, Instruction], None]) -> Any:
        OPERATIONS.update({name: function for name in names})
        return function

    return add


@functools.cache
def kind_of(name: tuple[str, ...]) -> str:
    """Returns the last type in an instruction's name."""
    return next(part for part in reversed(name) if part in TYPES or part in PAIRS)


def run(
    ptx: str,
    host: str,
    arguments: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    *,
    seed: int = 0,
) -> None:
    """Runs a Pallas kernel, block by block, as its host function launches it.

    Args:
      ptx: Code of the kernel.
      host: Code of the host function, in LLVM IR.
      arguments: Contiguous input arrays.
      results: Output arrays, written in place.
      seed: Seed of the order in which warps take turns.

    Raises:
      Fault: If the kernel makes an error listed in README.md.
    """
    memory = Memory()
    buffers = [memory.place(x) for x in (*arguments, *results)]
    execute(ptx, read_launch(host, buffers), memory, seed=seed)


def start(
    ptx: str,
    arguments: Sequence[np.ndarray | int],
    *,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int = 0,
    seed: int = 0,
) -> None:
    """Runs a kernel of any compiler, block by block.

    Args:
      ptx: Code of the kernel.
      arguments: Contiguous arrays, read and written in place, and integers.
      grid: Blocks along each of the three axes.
      threads: Threads per block.
      shared_bytes: Dynamic shared memory, in addition to arrays with sizes in the code.
      seed: Seed of the order in which warps take turns.

    Raises:
      Fault: If the kernel makes an error listed in README.md.
    """
    memory = Memory()
    held = {
        8 * index: x if isinstance(x, int) else memory.place(x) for index, x in enumerate(arguments)
    }
    launch = Launch(grid, threads, shared_bytes, tuple(held), held, {})
    execute(ptx, launch, memory, seed=seed)


def execute(ptx: str, launch: Launch, memory: Memory, *, seed: int = 0) -> None:
    """Runs a kernel, block by block.

    Args:
      ptx: Code of the kernel.
      launch: Grid, threads and arguments.
      memory: Global memory with the kernel's arrays.
      seed: Seed of the order in which warps take turns.

    Raises:
      Fault: If the kernel makes an error listed in README.md.
    """
    program = parse(ptx)
    with np.errstate(all="ignore"):
        for index in np.ndindex(launch.grid):
            Block(program, launch, memory, index, seed).run()
