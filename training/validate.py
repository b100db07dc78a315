"""Measures accuracy on held-out words in held-out text, and the text's loss, by length."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from corpus import BEGIN_ID
from loader import make_batch
from prepare import Prepared
from sequences import CLASSES, SequenceMaker
from step import validation_step

from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.models.params import Params

_TOKENS_PER_BATCH = 1 << 16
_SEED = 2**31  # keeps validation batches different from training batches


def validate(
    params: Params,
    prepared: Prepared,
    lengths: list[int],
    *,
    model_config: ModelConfig,
    dtype: str,
    max_tokens: int = 1 << 20,
    **options: Any,
) -> list[dict[str, Any]]:
    """Measures the model with dense attention and teacher-forced answers.

    Args:
      params: Parameters of any dtype.
      prepared: Data of the run.
      lengths: Lengths of sequences.
      model_config: The model.
      dtype: Dtype of the computation.
      max_tokens: Most tokens for each length.
      **options: Options of `SequenceMaker`.

    Returns:
      For each length: the loss of the text (nats per token), and for each kind of question the
      share of answers whose every token was the likeliest, with the number of answers.
    """
    maker = SequenceMaker(prepared.validation, prepared.validation_pieces, **options)
    program = jax.jit(partial(validation_step, model_config=model_config))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    rows = []
    for length in sorted(set(lengths)):
        sequences = max(1, min(_TOKENS_PER_BATCH, max_tokens, len(prepared.validation)) // length)
        answers: dict[str, list[bool]] = {kind: [] for kind in CLASSES}
        num_tokens = min(max_tokens, len(prepared.validation))
        for index in range(max(1, num_tokens // (sequences * length))):
            batch = make_batch(maker, (_SEED, length, index), (sequences, length))
            _, right = jax.device_get(program(params, *batch))
            for row, row_right in zip(batch.classes, right, strict=True):
                for kind, all_right in _answers(row, row_right):
                    answers[kind].append(all_right)
        exact = {
            kind: {"exact": float(np.mean(some)), "answers": len(some)}
            for kind, some in answers.items()
            if some
        }
        text = prepared.validation[: max(num_tokens, sequences * length)]
        loss = _text_loss(program, params, text, (sequences, length))
        rows.append({"tokens": length, "text_loss": loss, "kinds": exact})
    return rows


def _text_loss(
    program: Callable[..., Any], params: Params, text: np.ndarray, shape: tuple[int, int]
) -> float:
    """Computes the mean loss of plain text cut into sequences, nats per token."""
    sequences, length = shape
    windows = text[: len(text) // length * length].reshape(-1, length)
    windows = windows[: len(windows) // sequences * sequences].reshape(-1, *shape)
    begin = np.full((sequences, 1), BEGIN_ID, np.uint16)
    losses = [
        jax.device_get(program(params, np.concatenate([begin, some], axis=1), None)[0]).mean()
        for some in windows
    ]
    return float(np.mean(losses))


def _answers(classes: np.ndarray, right: np.ndarray) -> list[tuple[str, bool]]:
    """Lists the kind of each answer of a sequence, and whether all its tokens are right."""
    cuts = np.flatnonzero(np.diff(classes)) + 1
    names = {index: kind for kind, index in CLASSES.items()}
    return [
        (names[int(part[0])], bool(part_right.all()))
        for part, part_right in zip(np.split(classes, cuts), np.split(right, cuts), strict=True)
        if int(part[0]) in names
    ]
