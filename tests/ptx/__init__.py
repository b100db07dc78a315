"""Runs a kernel's PTX without a GPU, as Hopper does, and raises a fault for what it forbids.

README.md says what is checked, what is not, and how to run the kernels of other projects. `reading`
reads what a compiler has printed, `machine` executes it warp by warp, and `registers` and `memory`
are the instructions.
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
