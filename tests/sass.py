"""Finds registers in Hopper's machine code that are overwritten while a product still reads them.

A product (`HGMMA`, `QGMMA`, `IGMMA`) whose left operand is in registers reads them while later
instructions run, until a wait (`WARPGROUP.DEPBAR`) for it. Waits are for groups of products: `gsb0`
ends a group, and a wait may leave the last few in flight. The assembler does not protect the
registers if the wait is in another iteration of a loop; results are then wrong only on a GPU, and
only sometimes.
"""

import re
from collections.abc import Iterator

_LINE = re.compile(r"(?:^|\s)/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(.*?)\s*;?\s*$")
_LABEL = re.compile(r"(\.L_x_\d+):")
_PRODUCT = re.compile(r"[HIQ]GMMA\.(\S+) R\d+, R(\d+), gdesc")
_END_OF_GROUP = re.compile(r"[HIQ]GMMA\..*, gsb0\b")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
BRANCH = re.compile(r"\bBRA\S* .*`\((\.L_x_\d+)\)")
PREDICATE = re.compile(r"@!?U?P\w+\s+")
# Instructions that read their first register and do not write it.
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
_LEFT_REGISTERS = 4  # 64 x 16 operand in 16 bits, or 64 x 32 in eight


def hazards(text: str) -> list[str]:
    """Returns instructions that may write a register which a product in flight still reads."""
    code, labels = parse(text)
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


def parse(text: str) -> tuple[list[str], dict[str, int]]:
    """Returns the instructions, and the target of each label."""
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
    """Yields instructions that can run after a product and before a wait that includes it.

    The product's own group is the first to end after it. A wait that leaves `n` groups in flight
    includes it once `n` more have ended. Groups beyond `most` are not counted.
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
            branch = BRANCH.search(code[place])
            if branch:
                starts.append((labels[branch[1]], ended))
            always = not PREDICATE.match(code[place]) and ".DIV" not in code[place]
            if always and (branch or code[place].startswith("EXIT")):
                break
            place += 1


def _written(instruction: str) -> set[int]:
    """Returns the registers that an instruction writes: its first operand, or all of a group."""
    name, _, operands = PREDICATE.sub("", instruction, count=1).partition(" ")
    target = re.match(r"R(\d+)", operands.strip())
    if not target or name.startswith(_READERS):
        return set()
    width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    return set(range(int(target[1]), int(target[1]) + width))
