"""Reads the prompt byte for byte, and encodes it."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from sketchwalk_jax.cli.errors import UsageError
from sketchwalk_jax.models.config import ModelConfig
from sketchwalk_jax.progress import elapsed


def check_one_source(prompt: str | None, prompt_file: Path | None) -> None:
    """Raises a `UsageError` unless exactly one prompt is given, standard input included."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file must not be given together")
    if prompt is None and prompt_file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(
            "a prompt must be given: pass --prompt or --prompt-file, or pipe it into the command"
        )


def read_source(prompt: str | None, prompt_file: Path | None) -> str:
    """Reads the prompt exactly: nothing is stripped and no line end is translated.

    Raises:
      ValueError: If it is empty or not UTF-8.
      OSError: If the file cannot be read.
    """
    if prompt is not None:
        source, content = "--prompt", os.fsencode(prompt)
    elif prompt_file is not None:
        source, content = str(prompt_file), prompt_file.read_bytes()
    else:
        source, content = "standard input", sys.stdin.buffer.read()
    if not content:
        raise ValueError(f"the prompt must not be empty, got no bytes from {source}")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt must be UTF-8 text, got byte 0x{content[error.start]:02x} at offset "
            f"{error.start} of {source}"
        ) from error


def open_tokenizer(directory: Path) -> Any:
    """Loads the checkpoint's tokenizer, and shows that it is loading.

    Raises:
      ValueError: If there is none, or its files are damaged.
    """
    from sketchwalk_jax.text.tokenizer import load_tokenizer

    try:
        with elapsed("opening the tokenizer"):
            return load_tokenizer(directory)
    except ImportError as error:
        raise ValueError(
            f"the tokenizer of {str(directory)!r} cannot be opened: {error}"
        ) from error


def check_size(text: str, tokenizer: Any, *, model_config: ModelConfig) -> None:
    """Raises a `ValueError` for a text far longer than the context, before encoding all of it.

    Encoding ten megabytes takes a core 15 s and two gigabytes of memory. A text counts as far
    longer if even tokens as long as the longest one would be four times too many, or if its
    beginning alone has twice as many tokens as the context: not much more than that is encoded.
    """
    from sketchwalk_jax.text.tokenizer import encode

    context, length = model_config.context_length, len(text)
    if length <= 4 * context:
        return
    must = f"the prompt must fit into the model's context of {context} tokens, got {length}"
    if length > 4 * context * max(map(len, tokenizer.get_vocab())):
        raise ValueError(f"{must} characters; shorten the prompt")
    part = 16 * context
    while part < length:
        count = len(encode(tokenizer, text[:part]))
        if count > 2 * context:
            raise ValueError(
                f"{must} characters, of which the first {part} are {count} tokens; shorten the "
                f"prompt"
            )
        part *= 4


def tokenize(
    tokenizer: Any, text: str, *, is_chat: bool, system: str | None, **template_arguments: Any
) -> Int[np.ndarray, "T"]:
    """Encodes the prompt as plain text, or as the user's turn of a conversation.

    Raises:
      ValueError: If there is no chat template, the template refuses the messages, or the text
        has no tokens.
    """
    from sketchwalk_jax.text.tokenizer import apply_chat_template, encode

    if is_chat:
        if not tokenizer.chat_template:
            raise ValueError(
                "--chat must be left out: the checkpoint has no chat template, as base models"
            )
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": text})
        tokens = apply_chat_template(tokenizer, messages, **template_arguments)
    else:
        tokens = encode(tokenizer, text)
    if not len(tokens):
        raise ValueError("the prompt must have at least one token, got none for its text")
    return tokens


def check_chat_template(tokenizer: Any) -> None:
    """Raises a `ValueError` for the tokenizer of a base model, which has no chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            "--model must be an instruction model: the checkpoint has no chat template, as base "
            "models; continue a text with `sketchwalk generate`"
        )


def check_tokens(
    tokens: Int[np.ndarray, "T"], *, max_new_tokens: int, model_config: ModelConfig
) -> None:
    """Raises a `ValueError` for tokens that the model does not know or has no room for."""
    context, length = model_config.context_length, len(tokens)
    if length + max_new_tokens > context:
        raise ValueError(
            f"prompt and new tokens must fit into the model's context of {context} tokens, got "
            f"{length} and {max_new_tokens}; shorten the prompt or lower --max-new-tokens"
        )
    if tokens.max() >= model_config.vocab_size:
        raise ValueError(
            f"the tokenizer must have at most the model's {model_config.vocab_size} tokens, got "
            f"token {tokens.max()} in the prompt; copy the tokenizer of the original checkpoint"
        )
