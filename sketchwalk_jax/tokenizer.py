"""Text to tokens and back, with the tokenizer that stands in a checkpoint.

A thin layer over transformers, which is imported where it is used. No code of the checkpoint is
run, and nothing is downloaded unless a model of the Hugging Face hub is asked for by its name.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from sketchwalk_jax.chat_templates import bounded_template
from sketchwalk_jax.gguf_tokenizer import make_tokenizer
from sketchwalk_jax.models.family import read_json
from sketchwalk_jax.models.gguf_header import is_gguf, read_header
from sketchwalk_jax.models.hub import find_checkpoint, is_hub_name
from sketchwalk_jax.validation import check_texts, describe

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)

# What decoding writes for bytes that are no character, or not yet one.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character of UTF-8 has at most four bytes, hence at most four tokens.
_TOKENS_PER_CHARACTER = 4


def load_tokenizer(directory: str | os.PathLike[str]) -> Any:
    """Loads the tokenizer of a Hugging Face checkpoint directory or a GGUF file.

    Args:
      directory: Folder with `tokenizer.json` (or the vocabulary files of an older tokenizer) and
        `tokenizer_config.json`; or a GGUF file, which has a tokenizer in its metadata; or the name
        of a model on the Hugging Face hub, as in `load`.

    Returns:
      The tokenizer that `transformers.AutoTokenizer` makes of the folder, or one of transformers
      that cuts and merges as the original of the GGUF file does.

    Raises:
      ImportError: If it is a GGUF file and the package `gguf` is missing.
      ValueError: If there is no such folder or file, if no tokenizer is in it, or one that is not
        known, or if its tokenizer is defined by code of its own, which is never run.

    Example:
      tokenizer = load_tokenizer("checkpoints/Llama-3.2-1B")
    """
    if is_hub_name(directory) and not Path(directory).exists():
        directory = find_checkpoint(directory, weights=False)
    directory = Path(directory)
    if is_gguf(directory):
        header = read_header(directory)
        with _damage_explained(directory):
            return make_tokenizer(header)
    if not directory.is_dir():
        raise ValueError(
            f"directory must be a checkpoint folder or a GGUF file, got {str(directory)!r}"
        )
    found = sorted(path.name for path in directory.iterdir())
    if not set(found) & set(_TOKENIZER_FILES):
        raise ValueError(
            f"directory must hold tokenizer files (one of {', '.join(_TOKENIZER_FILES)}; copy them "
            f"from the original checkpoint), got {str(directory)!r} with {found[:20]}"
        )
    with _without_advice():
        from transformers import CONFIG_MAPPING, AutoTokenizer

    tokenizer_map = _read_json(directory / "tokenizer_config.json").get("auto_map")
    config = _read_json(directory / "config.json")
    is_known = str(config.get("model_type")) in CONFIG_MAPPING
    config_map = None if is_known else config.get("auto_map")
    if tokenizer_map or config_map:
        raise ValueError(
            "the tokenizer must be one of transformers' own classes, got an auto_map to code of "
            f"the checkpoint: {tokenizer_map or config_map}"
        )
    with _damage_explained(directory):
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ValueError(
            f"model_max_length of {str(directory / 'tokenizer_config.json')!r} must be a number, "
            f"got {str(tokenizer.model_max_length)[:80]!r}; correct it"
        )
    return tokenizer


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Keeps transformers from saying, when it is imported, that it would like to have PyTorch."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


@contextlib.contextmanager
def _damage_explained(path: str | Path, what: str = "be opened") -> Iterator[None]:
    """Turns what the libraries raise for damaged files, of many types, into one error."""
    try:
        yield
    except (ImportError, OSError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise  # it says what is wrong already
        raise _damaged(path, what, error) from error
    except BaseException as error:
        # A panic of the tokenizers' Rust code is no `Exception`.
        if type(error).__name__ != "PanicException":
            raise
        raise _damaged(path, what, error) from error


def _damaged(path: str | Path, what: str, error: BaseException) -> ValueError:
    reason = str(error).strip().partition("\n")[0][:300]
    return ValueError(
        f"the tokenizer of {str(path)!r} cannot {what}: {reason or type(error).__name__}; "
        f"download its files again"
    )


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> Int[np.ndarray, "T"]:
    """The tokens of a text, exactly as it stands: nothing is stripped, cut or padded.

    Takes memory of some 200 times the text, and of ten megabytes a quarter of a minute.

    Args:
      tokenizer: A tokenizer of transformers.
      text: The text. Special tokens spelled out in it become those tokens.
      add_special_tokens: Whether to add what the tokenizer's own settings add, such as the
        beginning-of-sequence token of Llama (Qwen adds none).

    Returns:
      int32 token ids.

    Raises:
      ValueError: If the text is no string, or holds a lone surrogate; if the tokenizer has ids that
        are no int32, or is damaged.

    Example:
      tokens = encode(tokenizer, "Walk with")[None]  # a batch of one
    """
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {describe(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must be valid Unicode, got a lone surrogate, {text[error.start]!r}, at "
            f"character {error.start}; text that was read with errors='surrogateescape' has some"
        ) from error
    # A vocabulary that lacks its own token for the unknown shows here, and for some texts alone.
    name = getattr(tokenizer, "name_or_path", type(tokenizer).__name__)
    with _damage_explained(name, "cut this text"):
        encoded = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    if max(encoded, default=0) >= 2**31:
        raise ValueError(
            f"tokens must have ids below 2**31, got {max(encoded)}; copy the tokenizer"
        )
    return np.asarray(encoded, np.int32)


def decode(
    tokenizer: Any, tokens: ArrayLike | Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of tokens, without any clean-up of its spaces.

    Args:
      tokenizer: A tokenizer of transformers.
      tokens: Token ids of one sequence.
      skip_special_tokens: Whether to leave out special tokens, such as the end-of-sequence token.

    Returns:
      The text; bytes that form no character are U+FFFD in it.

    Example:
      text = decode(tokenizer, result.tokens[0, : result.lengths[0]])
    """
    return tokenizer.decode(
        np.atleast_1d(np.asarray(tokens)).tolist(),
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def apply_chat_template(
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **template_arguments: Any,
) -> Int[np.ndarray, "T"]:
    """The tokens of a conversation, written by the chat template of the checkpoint.

    Templates write their own beginning-of-sequence token: none is added to it here.

    Args:
      tokenizer: A tokenizer of transformers.
      prompt: What the user says; or all messages, `{"role": ..., "content": ...}` each.
      add_generation_prompt: Whether to end with the opening of the assistant's turn.
      **template_arguments: Further variables of the template, such as `enable_thinking`.

    Returns:
      int32 token ids.

    Raises:
      ValueError: If the tokenizer has no chat template, or there is no message.

    Example:
      tokens = apply_chat_template(tokenizer, "Who walks?")
    """
    check_texts("prompt", prompt, "messages")
    if len(prompt) == 0:
        raise ValueError(f"prompt must hold text or messages, got {prompt!r}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for index, one in enumerate(messages):
        if not isinstance(one, Mapping):
            raise ValueError(
                f'prompt must hold messages {{"role": ..., "content": ...}}, got {describe(one)} '
                f"at [{index}]"
            )
    text = render_chat(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, **template_arguments
    )
    return encode(tokenizer, text, add_special_tokens=False)


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **template_arguments: Any,
) -> str:
    """The text of a conversation, special tokens spelled out, by the checkpoint's chat template.

    Arguments as in `apply_chat_template`, which encodes this text.

    The template runs in Jinja's sandbox, for ten seconds at most.

    Raises:
      ValueError: If the tokenizer has no chat template, or one that fails, refuses the messages,
        takes too long or too much memory.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "tokenizer must have a chat template, got none: base models have none, encode() their "
            "prompts as plain text"
        )
    with bounded_template(tokenizer.chat_template):
        return tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_arguments,
        )


class StreamDecoder:
    """Turns tokens into text as they come, characters whole.

    The pieces that `push` and `finish` return join to `decode(tokenizer, all_tokens)`. A token can
    end inside a character; its bytes are held until the character is complete. Only the tokens
    since the last but one piece are decoded again, so the cost of a token does not grow with the
    text. One decoder serves one sequence.

    Tokenizers that spell unknown characters in bytes (SentencePiece) replace a whole run of bytes
    if one of them is ill-formed; with those, text that was already returned stays as it was.

    Example:
      >>> decoder = StreamDecoder(tokenizer)  # doctest: +SKIP
      >>> for chunk in chunks:  # doctest: +SKIP
      ...     print(decoder.push(chunk.tokens[0]), end="", flush=True)
      >>> print(decoder.finish())  # doctest: +SKIP
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        """Starts a text.

        Args:
          tokenizer: A tokenizer of transformers.
          skip_special_tokens: Whether to leave out special tokens.
        """
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self._tokenizer = tokenizer
        self._skipped = frozenset(token_id for token_id, token in added if token.special)
        self._start()

    def _start(self) -> None:
        # The text of the first `_num_context` tokens was returned; they stand here because how a
        # token is written (its leading space) depends on the token before it.
        self._window: list[int] = []
        self._num_context = 0

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, np.array(tokens, int), skip_special_tokens=False)

    def push(self, tokens: ArrayLike | Sequence[int]) -> str:
        """Adds tokens and returns the text that they complete.

        Args:
          tokens: One token id, or several in order.

        Returns:
          New text, empty while a character is incomplete.
        """
        new = np.atleast_1d(np.asarray(tokens)).tolist()
        self._window += [token for token in new if token not in self._skipped]
        # Up to three tokens at the end can belong to a character that more bytes complete.
        for end in range(len(self._window), len(self._window) - _TOKENS_PER_CHARACTER, -1):
            if end <= self._num_context:
                return ""
            text = self._decode(self._window[:end])
            piece = "" if text.endswith(_BROKEN) else self._after_context(text, end)
            if piece:
                self._window = self._window[self._num_context :]
                self._num_context = end - self._num_context
                return piece
        return self._settle()

    def finish(self) -> str:
        """Returns what is still held, such as an incomplete character, and starts a new text."""
        piece = self._after_context(self._decode(self._window), len(self._window))
        self._start()
        return piece

    def _after_context(self, text: str, end: int) -> str:
        """The part of `text`, which is that of `window[:end]`, that was not returned yet."""
        context = self._decode(self._window[: self._num_context])
        if text.startswith(context):
            return text[len(context) :]
        return self._decode(self._window[self._num_context : end])

    def _settle(self) -> str:
        """Returns text before the last character once that text cannot change any more.

        Without this, tokens that never form a character would be held for ever. Where the window
        can be cut without changing its text, bytes before the cut do not wait for bytes after it;
        of four cuts in a row one is at the end of a character, for it has four bytes at most.
        """
        if len(self._window) - self._num_context <= 2 * _TOKENS_PER_CHARACTER:
            return ""
        text = self._decode(self._window)
        for held in range(_TOKENS_PER_CHARACTER, 2 * _TOKENS_PER_CHARACTER):
            head, tail = self._window[:-held], self._window[-held:]
            settled = self._decode(head)
            if settled + self._decode(tail) == text:
                piece = self._after_context(settled, len(head))
                self._window, self._num_context = tail, 0
                return piece
        return ""
