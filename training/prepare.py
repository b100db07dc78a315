"""Prepares a run before its first step: tokenizer, tokens of the text, sentences, baseline."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from corpus import (
    Pieces,
    bigram_loss,
    encode_text,
    find_words,
    make_pieces,
    read_corpus,
    train_tokenizer,
)
from recipe import TEXT_SHARE_FOR_VALIDATION, VOCAB_SIZE
from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The data of a run.

    Attributes:
      tokenizer: Tokenizer trained on the training part, or taken from the initial model.
      path: File with the tokens of the training part.
      pieces: Sentences about training words.
      validation: Tokens of the validation part.
      validation_pieces: Sentences about held-out words.
      description: Description of the data for the model card.
    """

    tokenizer: Tokenizer
    path: Path
    pieces: Pieces
    validation: np.ndarray
    validation_pieces: Pieces
    description: dict[str, Any]


def prepare(text: Path, folder: Path, *, init: Path | None, seed: int, about: str = "") -> Prepared:
    """Reads, encodes and stores the text.

    Args:
      text: UTF-8 text, plain or `.xz`.
      folder: Folder for the tokens.
      init: A model whose tokenizer is used, or `None` to train one.
      seed: Seed of the tokenizer's data.
      about: Description of the text, for the model card.
    """
    training, held_back, source = read_corpus(text, validation_share=TEXT_SHARE_FOR_VALIDATION)
    if init is None:
        tokenizer = train_tokenizer(training, vocab_size=VOCAB_SIZE, seed=seed)
    else:
        tokenizer = Tokenizer.from_file(str(init / "tokenizer.json"))
    tokens = encode_text(tokenizer, training)
    validation = encode_text(tokenizer, held_back)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokens.npy"
    np.save(path, tokens)
    words = find_words(training, held_out=False)
    held_out = find_words(training, held_out=True)
    bytes_per_token = len(held_back.encode()) / len(validation)
    print(f"{len(tokens)} tokens, {bytes_per_token:.2f} bytes each; {len(words)} words", flush=True)
    return Prepared(
        tokenizer=tokenizer,
        path=path,
        pieces=make_pieces(tokenizer, words),
        validation=validation,
        validation_pieces=make_pieces(tokenizer, held_out),
        description={
            "name": source.name,
            "sha256": source.sha256,
            "about": about,
            "validation_share": TEXT_SHARE_FOR_VALIDATION,
            "training_tokens": len(tokens),
            "validation_tokens": len(validation),
            "bytes_per_token": bytes_per_token,
            "training_words": len(words),
            "held_out_words": len(held_out),
            "bigram_loss": bigram_loss(tokens, validation, vocab_size=VOCAB_SIZE),
        },
    )
