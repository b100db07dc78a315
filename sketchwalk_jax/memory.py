"""Reports too little device memory, before an allocation if known, and with advice."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

ADVICE = (
    "pass a smaller chunk_size, which bounds what a prompt takes beside the cache, fewer "
    "sequences, a smaller max_tokens, a smaller dtype (load(..., dtype='bfloat16')), or a lower "
    "density"
)


class OutOfDeviceMemory(jax.errors.JaxRuntimeError):
    """A device has too little memory for a call.

    Attributes:
      found: The error without the advice that `str` appends.
    """

    def __init__(self, found: str) -> None:
        """Adds the advice to the message."""
        super().__init__(f"{found}; {ADVICE}")
        self.found = found


def num_bytes(tree: Any) -> int:
    """Counts the bytes of all arrays of a tree, including abstract ones."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def show_bytes(count: int) -> str:
    """Formats a size for people, such as `"3.20 GiB"`."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.2f} MiB"


def free_bytes(like: Any) -> int | None:
    """Free bytes on the device of an array; None if unknown or if there are several devices.

    Args:
      like: An array, or a device.
    """
    if isinstance(like, jax.core.Tracer):
        return None
    if isinstance(like, jax.Array):
        devices = like.devices()
        if len(devices) != 1:
            return None
        (like,) = devices
    if not hasattr(like, "memory_stats"):
        return None
    found = like.memory_stats() or {}
    if "bytes_limit" not in found or "bytes_in_use" not in found:
        return None
    return found["bytes_limit"] - found["bytes_in_use"]


def check_memory(what: str, needed: int, like: Any) -> None:
    """Raises if a device is known to lack memory for an allocation.

    Args:
      what: Description of the allocation, for the message.
      needed: Number of bytes.
      like: An array on the device, or the device.

    Raises:
      OutOfDeviceMemory: If less is free.
    """
    free = free_bytes(like)
    if free is not None and needed > free:
        raise OutOfDeviceMemory(
            f"the device must have {show_bytes(needed)} free for {what}, got {show_bytes(free)}"
        )


@contextlib.contextmanager
def advice(**held: Any) -> Iterator[None]:
    """Turns XLA's out-of-memory error into one that says what was needed and what to do.

    Args:
      **held: Minimum needs of the call by name: trees of arrays, or bytes.
    """
    try:
        yield
    except OutOfDeviceMemory:
        raise
    except jax.errors.JaxRuntimeError as error:
        message = str(error).strip().partition("\n")[0]
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        sizes = {name: x if isinstance(x, int) else num_bytes(x) for name, x in held.items()}
        needed = ", ".join(f"{show_bytes(size)} of {name}" for name, size in sizes.items())
        raise OutOfDeviceMemory(f"{message} (the call holds at least {needed})") from error
