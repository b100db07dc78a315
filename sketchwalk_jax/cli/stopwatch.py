"""What compilation takes is left out of the times shown."""

import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax

Result = TypeVar("Result")

_EVENTS = "/jax/core/compile/"


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
