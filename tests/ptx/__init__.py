"""Emulates a kernel's PTX without a GPU, as Hopper runs it, and raises faults for its errors.

README.md lists the checks and their limits, and shows how to run other projects' kernels. `reading`
parses a compiler's output, `machine` executes it warp by warp, and `registers` and `memory`
implement the instructions.
"""

from ptx import memory, registers
from ptx.machine import Fault, Memory, execute, run, start
from ptx.reading import Launch, TensorMap, kernels, read_launch

__all__ = [
    "Fault",
    "Launch",
    "Memory",
    "TensorMap",
    "execute",
    "kernels",
    "memory",
    "read_launch",
    "registers",
    "run",
    "start",
]
