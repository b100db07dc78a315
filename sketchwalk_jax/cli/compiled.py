"""Compilation: programs are kept between runs, and what it takes is left out of the times shown."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import jax

Result = TypeVar("Result")

_EVENTS = "/jax/core/compile/"


def cache_directory() -> Path:
    """Where compiled programs are kept: in the user's folder for caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sketchwalk-jax" / "compiled"


def keep_compiled_programs() -> None:
    """Turns JAX's persistent compilation cache on, unless JAX is told already what to do.

    `JAX_COMPILATION_CACHE_DIR` and `JAX_ENABLE_COMPILATION_CACHE` keep their meaning. Where the
    folder cannot be written, programs are compiled in every run.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.jax_compilation_cache_dir:
        return
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return
    if not os.access(directory, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


class Stopwatch:
    """Times calls while it is entered.

    Attributes:
      compile_s: Seconds spent on tracing and compilation in all calls so far.

    Example:
      >>> with Stopwatch() as stopwatch:
      ...     result, run_s = stopwatch.time(lambda: jax.jit(lambda x: x + 1)(1))
    """

    def __init__(self) -> None:
        """Starts at zero."""
        self.compile_s = 0.0
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        """Begins to listen to JAX."""
        jax.monitoring.register_event_time_span_listener(self._listen)
        return self

    def __exit__(self, *exception: object) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_time_span_listener(self._listen)

    def _listen(self, event: str, start_time: float, end_time: float, **details: Any) -> None:
        if event.startswith(_EVENTS):
            self._spans.append((start_time, end_time))

    def time(self, call: Callable[[], Result]) -> tuple[Result, float]:
        """The result of a call, complete, and the seconds it took without those of compilation."""
        self._spans.clear()
        start = time.time()  # the clock of JAX's events
        result = jax.block_until_ready(call())
        elapsed, compiled, last = time.time() - start, 0.0, 0.0
        # Tracing a function includes tracing those that it calls.
        for begin, end in sorted(self._spans):
            compiled += max(0.0, end - max(begin, last))
            last = max(last, end)
        self.compile_s += compiled
        return result, elapsed - compiled
