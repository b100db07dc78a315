"""Reads machine code for Hopper: registers that a matrix product still reads and others overwrite.

A product (`HGMMA`, `QGMMA`, `IGMMA`) whose left operand lies in registers reads them while later
instructions run, until a wait (`WARPGROUP.DEPBAR`) for it. Products are awaited in groups, of which
`gsb0` ends one; a wait may leave the last few groups under way. The assembler does not keep the
registers free if the wait stands in another turn of a loop; what comes out is then wrong only on a
GPU, and only sometimes.
"""

import re
from collections.abc import Iterator

_LINE = re.compile(r"\s/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(.*?)\s*;?\s*$")
_LABEL = re.compile(r"(\.L_x_\d+):")
_PRODUCT = re.compile(r"[HIQ]GMMA\.(\S+) R\d+, R(\d+), gdesc")
_END_OF_GROUP = re.compile(r"[HIQ]GMMA\..*, gsb0\b")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_BRANCH = re.compile(r"\bBRA\S* .*`\((\.L_x_\d+)\)")
_PREDICATE = re.compile(r"@!?U?P\w+\s+")
# Instructions whose first register is read, not written.
_READERS = (
    "ST",
    "RED",
    "BAR",
    "SYNCS",
    "HGMMA",
    "IGMMA",
    "QGMMA",
    "WARP",
    "UTMA",
    "NANOSLEEP",
    "R2UR",
)
_LEFT_REGISTERS = 4  # of a 64 x 16 operand of 16-bit numbers, or a 64 x 32 one of 8-bit ones


def hazards(text: str) -> list[str]:
    """Instructions that write to a register which a product in flight may read, in any order."""
    code, labels = _parse(text)
    waits = [int(wait[1], 16) for wait in map(_WAIT.search, code) if wait]
    most = max(waits, default=0) + 1  # groups that need counting
    found: dict[str, None] = {}
    for place, instruction in enumerate(code):
        product = _PRODUCT.search(instruction)
        if product:
            first = int(product[2])
            registers = set(range(first, first + _LEFT_REGISTERS))
            for writer in _before_its_wait(code, labels, place, most):
                if _written(code[writer]) & registers:
                    found[f"{code[writer]} (read by {instruction})"] = None
    return list(found)


def num_register_products(text: str) -> int:
    """Products whose left operand lies in registers."""
    return sum(_PRODUCT.search(instruction) is not None for instruction in _parse(text)[0])


def _parse(text: str) -> tuple[list[str], dict[str, int]]:
    """Instructions, and where each label points."""
    code: list[str] = []
    labels = {}
    for line in text.splitlines():
        label, instruction = _LABEL.match(line), _LINE.search(line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append(instruction[2])
    return code, labels


def _before_its_wait(
    code: list[str], labels: dict[str, int], product: int, most: int
) -> Iterator[int]:
    """Instructions that can run after a product without a wait that includes it in between.

    Its own group is the first to end from the product on; a wait that leaves `n` groups under way
    includes it once `n` more have ended. Beyond `most` they are not counted.
    """
    seen: set[tuple[int, int]] = set()
    starts = [(product + 1, int(_END_OF_GROUP.search(code[product]) is not None))]
    while starts:
        place, ended = starts.pop()
        while place < len(code) and (place, ended) not in seen:
            seen.add((place, ended))
            wait = _WAIT.search(code[place])
            if wait and ended > int(wait[1], 16):
                break
            yield place
            ended = min(most, ended + (_END_OF_GROUP.search(code[place]) is not None))
            branch = _BRANCH.search(code[place])
            if branch:
                starts.append((labels[branch[1]], ended))
            always = not _PREDICATE.match(code[place]) and ".DIV" not in code[place]
            if always and (branch or code[place].startswith("EXIT")):
                break
            place += 1


def _written(instruction: str) -> set[int]:
    """Registers that an instruction writes: its first operand, and those that go with it."""
    name, _, operands = _PREDICATE.sub("", instruction, count=1).partition(" ")
    target = re.match(r"R(\d+)", operands.strip())
    if not target or name.startswith(_READERS):
        return set()
    width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    return set(range(int(target[1]), int(target[1]) + width))
