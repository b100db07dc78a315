"""Makes batches in worker processes, in an order that depends on the seed only."""

import collections
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from corpus import Pieces
from sequences import SequenceMaker

_makers: dict[str, SequenceMaker] = {}  # in a worker process: one for each text


class Batch(NamedTuple):
    """Tokens uint16 `[B, T + 1]` and the classes of the targets, uint8 `[B, T]`."""

    tokens: np.ndarray
    classes: np.ndarray


def _start_worker(path: str, pieces: Pieces, options: dict[str, Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _makers["training"] = SequenceMaker(np.load(path, mmap_mode="r"), pieces, **options)


def _end_with_parent() -> None:
    """Ends this worker if its run was killed; otherwise it would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def make_batch(maker: SequenceMaker, seed: tuple[int, ...], shape: tuple[int, int]) -> Batch:
    """Makes one batch of `shape` `(sequences, T)`, determined by the seed."""
    rng = np.random.default_rng(seed)
    sequences = [maker.draw(rng, shape[1]) for _ in range(shape[0])]
    return Batch(*(np.stack(parts) for parts in zip(*sequences, strict=True)))


def _make(seed: tuple[int, ...], shape: tuple[int, int]) -> Batch:
    return make_batch(_makers["training"], seed, shape)


class Loader:
    """A pool of processes that makes batches ahead.

    Args:
      text: File of the corpus' tokens (`numpy.save`), which the processes share.
      pieces: From `make_pieces`.
      seed: Batch `i` of stage `s` is drawn from `(seed, s, i)`.
      num_workers: Number of processes.
      **options: Options of `SequenceMaker`.
    """

    def __init__(
        self, text: Path, pieces: Pieces, *, seed: int, num_workers: int, **options: Any
    ) -> None:
        """Starts the processes."""
        self.seed, self.ahead = seed, 3 * num_workers
        self.pool = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(str(text), pieces, options),
        )

    def batches(self, stage: int, shape: tuple[int, int]) -> Iterator[Batch]:
        """Yields batches of one stage for ever; closing the iterator drops batches made ahead."""
        waiting: collections.deque[Future[Any]] = collections.deque()
        index = 0
        try:
            while True:
                while len(waiting) < self.ahead:
                    seed = (self.seed, stage, index)
                    waiting.append(self.pool.submit(_make, seed, shape))
                    index += 1
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Ends the processes."""
        self.pool.shutdown(cancel_futures=True)
