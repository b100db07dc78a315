"""Parses a compiler's output: a kernel's PTX, and the host code that launches it."""

import dataclasses
import functools
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_ELEMENTS = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}  # bytes, by type code of a copy


def kernels(printed: str) -> Iterator[tuple[str, str]]:
    """Yields PTX and host code of each kernel in a compilation's output."""
    pattern = r"(^\.version .*?^\}\s*$).*?(^define \w+ @\w+_mosaic_gpu\(.*?^\})"
    for found in re.finditer(pattern, printed, re.M | re.S):
        yield found[1], found[2]


# The host: grid, arguments, and descriptors of copies


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A copy engine's (TMA) descriptor of an array, outermost axis first.

    Attributes:
      address: Address of the first entry.
      itemsize: Bytes per entry.
      sizes: Entries along each axis.
      strides: Stride of each axis, in entries.
      box: Entries along each axis of a copied box.
      swizzle: Bytes per swizzled line in shared memory; 16 without a swizzle.
    """

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def places(self, corner: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns addresses of a box's bytes, row by row, and a mask of those inside the array."""
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
    """Launch parameters of a kernel.

    Attributes:
      grid: Blocks along each of the three axes.
      threads: Threads per block.
      shared_bytes: Bytes of dynamic shared memory.
      arguments: Address in host memory of each argument.
      memory: Contents of host memory, by address.
      maps: Descriptors, by address in host memory.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[int, ...]
    memory: dict[int, Any]
    maps: dict[int, TensorMap]


def read_launch(code: str, buffers: Sequence[int]) -> Launch:
    """Runs a kernel's host function, in LLVM IR.

    Args:
      code: The module.
      buffers: Addresses of the kernel's input arrays, then of its output arrays.
    """
    body = re.search(r"^define \w+ @\w+_mosaic_gpu\(([^)]*)\)[^{]*\{\n(.*?)^\}", code, re.M | re.S)
    if body is None:
        raise ValueError("there is no host function")
    memory: dict[int, Any] = {8 * index: buffer for index, buffer in enumerate(buffers)}
    top = 1 << 20  # next free address
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
    """Splits off the first type, and the comma or blank after it."""
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
    """Returns offset and type of an entry of a structure or an array."""
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


# Instructions and kernels


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      guard: Its predicate register, and whether the predicate is negated.
      name: The parts of its name.
      operands: Operands as text, with register names resolved.
      text: Original text.
    """

    guard: tuple[str, bool] | None
    name: tuple[str, ...]
    operands: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
      instructions: Instructions in order.
      labels: Index of the instruction at each label.
      parameters: Names of the parameters.
      registers: Type of each register.
      shared: Byte offset of each array in shared memory.
      shared_bytes: Bytes of the arrays with sizes in the code.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]
    registers: dict[str, str]
    shared: dict[str, int]
    shared_bytes: int

    @functools.cached_property
    def meetings(self) -> dict[int, int]:
        """Returns where threads rejoin after each branch: the first point on all paths to the end.

        The assembler does the same (Fung et al., "Dynamic Warp Formation", 2007).
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
        following: list[list[int]] = []  # successors of each stretch of instructions
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
        # Bit mask of the stretches on all paths from each stretch.
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


# An array in shared memory: its alignment, bits of an entry, name and entries (none if `extern`).
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([\w$]+)(?:\[(\d*)\])?")
_STATEMENT = re.compile(r"\s*(?:(\{)|(\})|([\w$]+)\s*:|([^;]*);)")
_TOKEN = re.compile(r"%?[A-Za-z_$][\w$]*")


@functools.lru_cache(64)
def parse(text: str) -> Program:
    """Parses a kernel's PTX."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^\s*\.(loc|file|pragma)\b.*$", "", text, flags=re.M)
    head = re.search(r"\.entry\s+\w+\s*\((.*?)\)[^{]*\{", text, re.S)
    if head is None:
        raise ValueError("there is no kernel")
    parameters = tuple(re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", head[1].strip()))
    shared, shared_bytes = _place_shared(_SHARED.findall(text))
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    jumps: list[tuple[int, list[dict[str, str]]]] = []
    scopes: list[dict[str, str]] = [{}]
    count = 1  # number of scopes

    def resolve(match: re.Match[str]) -> str:
        return next((scope[match[0]] for scope in scopes[::-1] if match[0] in scope), match[0])

    for found in _STATEMENT.finditer(text, head.end()):
        opens, closes, label, line = found.groups()
        if opens:
            scopes.append({})
            count += 1
        elif closes:
            scopes.pop()
        if not scopes:
            break
        if label:
            name = f"{label}.{count}"
            scopes[-1][label] = name
            labels[name] = len(instructions)
        if not line:
            continue
        line = " ".join(line.split())
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
            continue
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
            Instruction(guard, tuple(name.split(".")), tuple(split(operands)), line)
        )
    for index, inside in jumps:
        one = instructions[index]
        label = next(scope[one.operands[0]] for scope in inside[::-1] if one.operands[0] in scope)
        instructions[index] = dataclasses.replace(one, operands=(label,))
    return Program(tuple(instructions), labels, parameters, registers, shared, shared_bytes)


def _place_shared(arrays: Sequence[tuple[str, str, str, str]]) -> tuple[dict[str, int], int]:
    """Returns the offsets of arrays in shared memory, and the bytes of those with known sizes."""
    found: dict[str, int] = {}
    top = 0
    for align, bits, name, count in arrays:
        if count:
            step = int(align or int(bits) // 8)
            found[name] = -(-top // step) * step
            top = found[name] + int(bits) // 8 * int(count)
    if found:
        top = -(-top // 1024) * 1024
    # Dynamic shared memory follows; all arrays without a size begin there.
    return found | {name: top for _, _, name, count in arrays if not count}, top


def split(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    found, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            found.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*found, last] if last else found
