"""Converts text to tokens and back with a checkpoint's tokenizer.

This is a thin layer over transformers, which is imported on first use. It never runs code of the
checkpoint, and downloads only models of the Hugging Face hub that are requested by name.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from sketchwalk_jax.models.family import describe_damage, read_json
from sketchwalk_jax.models.gguf_header import is_gguf, read_header
from sketchwalk_jax.models.hub import find_checkpoint, is_hub_name
from sketchwalk_jax.text.chat_templates import bounded_template
from sketchwalk_jax.text.gguf_tokenizer import make_tokenizer
from sketchwalk_jax.validation import check_texts, describe

_TOKENIZER_FILES = "tokenizer.json tokenizer.model vocab.json vocab.txt tekken.json".split()

# Decoding writes this for bytes that form no character, or an incomplete one.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character of UTF-8 has at most four bytes, hence at most four tokens.
_TOKENS_PER_CHARACTER = 4
# Tokens of context that can change a continuation's text: leading space, split character.
_NUM_CONTEXT = 8

# Attributes that decide how an added token is matched in a text.
_MATCHING = ("lstrip", "rstrip", "single_word", "normalized")

# Private copies, because another thread may set a tokenizer's truncation or padding at any time.
_private_copies: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def load_tokenizer(directory: str | os.PathLike[str]) -> Any:
    """Loads the tokenizer of a Hugging Face checkpoint directory or a GGUF file.

    Args:
      directory: Folder with `tokenizer.json` (or the vocabulary files of an older tokenizer) and
        `tokenizer_config.json`; or a GGUF file, which has a tokenizer in its metadata; or the name
        of a model on the hub, as in `load`.

    Returns:
      A tokenizer of transformers. With `tokenizer.json`, its ids come from that file, whatever
      class the configuration names; special tokens and the chat template come from the
      configuration. Otherwise `transformers.AutoTokenizer` makes it from the vocabulary files. The
      tokenizer of a GGUF file splits and merges as llama.cpp does.

    Raises:
      ImportError: If a package is missing: `gguf` for a GGUF file, `sentencepiece` or `tiktoken`
        for a folder with `tokenizer.model` alone.
      ValueError: If there is no such folder or file, if it has no tokenizer or an unknown one, or
        if its tokenizer is defined by the checkpoint's own code, which is never run.

    Example:
      tokenizer = load_tokenizer("checkpoints/Llama-3.2-1B")
    """
    if is_hub_name(directory) and not Path(directory).exists():
        directory = find_checkpoint(directory, weights=False)
    directory = Path(directory).expanduser()
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
    settings = _read_json(directory / "tokenizer_config.json")
    config = _read_json(directory / "config.json")
    _refuse_code(settings.get("auto_map"), config)
    with _damage_explained(directory):
        if "tokenizer.json" in found:
            tokenizer = _read_tokenizer(directory, settings, config)
        else:
            tokenizer = _convert_tokenizer(directory, found)
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ValueError(
            f"model_max_length of {str(directory / 'tokenizer_config.json')!r} must be a number, "
            f"got {str(tokenizer.model_max_length)[:80]!r}; correct it"
        )
    return tokenizer


def _refuse_code(tokenizer_map: Any, config: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a tokenizer that is defined by code of the checkpoint."""
    config_map = config.get("auto_map")
    if config_map:
        with _without_advice():
            from transformers import CONFIG_MAPPING
        if str(config.get("model_type")) in CONFIG_MAPPING:
            config_map = None
    if tokenizer_map or config_map:
        raise ValueError(
            "the tokenizer must be one of transformers' own classes, got an auto_map to code of "
            f"the checkpoint: {tokenizer_map or config_map}"
        )


def _read_tokenizer(directory: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Reads the tokenizer of `tokenizer.json`, with the special tokens of its configuration.

    Many classes of transformers take only vocabulary and merges from this file, and normalise and
    split a text by rules of their own. So the class that the configuration names is not used.
    Tokens that it calls special are special; a token that the file lacks is added if the
    configuration gives its id and this id is the next free one. If it names no token for the
    beginning or the end of a text, the model's configuration does.
    """
    with _without_advice():
        from tokenizers import AddedToken, Tokenizer, models
        from transformers import PreTrainedTokenizerFast

    model = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model.no_truncation()
    model.no_padding()
    # With an empty model, transformers reads the configuration and, in later versions, no model.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        directory, local_files_only=True, tokenizer_object=Tokenizer(models.BPE())
    )
    ids = _read_json(directory / "added_tokens.json") | {
        token["content"]: int(index)
        for index, token in settings.get("added_tokens_decoder", {}).items()
    }
    added = model.get_added_tokens_decoder()
    for token in tokenizer.added_tokens_decoder.values():
        index = model.token_to_id(token.content)
        own = None if index is None else added.get(index)
        if index is None and ids.get(token.content) == model.get_vocab_size():
            model.add_tokens([token])
        elif index is not None and token.special and not (own and own.special):
            # The file decides how the token is matched, if it says so.
            how = {name: getattr(own or token, name) for name in _MATCHING}
            model.add_tokens([AddedToken(token.content, special=True, **how)])
    model.encode_special_tokens = tokenizer.split_special_tokens
    tokenizer._tokenizer = model
    for name in ("bos", "eos"):
        index = config.get(f"{name}_token_id")
        is_named = f"{name}_token" in settings or getattr(tokenizer, f"{name}_token") is not None
        if isinstance(index, int) and 0 <= index < model.get_vocab_size() and not is_named:
            setattr(tokenizer, f"{name}_token", model.id_to_token(index))
    return tokenizer


def _convert_tokenizer(directory: Path, found: Sequence[str]) -> Any:
    """Converts older vocabulary files with transformers."""
    if set(found) & set(_TOKENIZER_FILES) == {"tokenizer.model"}:
        with (directory / "tokenizer.model").open("rb") as file:
            # Sentencepiece files are protocol buffers, tiktoken files lines of base64.
            needed = "sentencepiece" if file.read(1) == b"\n" else "tiktoken"
        if find_spec(needed) is None:
            raise ImportError(
                f"tokenizer.model of {str(directory)!r} needs the package {needed}: pip install "
                f"{needed}{' protobuf' * (needed == 'sentencepiece')}; or put the checkpoint's "
                f"tokenizer.json beside it"
            )
    with _without_advice():
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Suppresses the advice of transformers, when imported, to install PyTorch."""
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
    """Turns the many errors that libraries raise for damaged files into one."""
    try:
        yield
    except (ImportError, OSError, MemoryError):
        raise
    except BaseException as error:
        # Panics of the tokenizers' Rust code are not of type `Exception`.
        is_failure = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        is_explained = isinstance(error, ValueError) and str(path) in str(error)
        if is_explained or not is_failure:
            raise
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        file = Path(path) / "tokenizer.json"
        advice = describe_damage(file) if file.is_file() else "download its files again"
        raise ValueError(
            f"the tokenizer of {str(path)!r} cannot {what}: {reason}; {advice}"
        ) from error


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> Int[np.ndarray, "T"]:
    """Encodes a text exactly: nothing is stripped, truncated or padded.

    Encoding takes about 200 times the memory of the text, and 15 s for ten megabytes.

    Args:
      tokenizer: A tokenizer of transformers.
      text: The text. Special tokens spelled out in it become those tokens.
      add_special_tokens: Whether to add the special tokens of the tokenizer's settings, such as
        Llama's beginning-of-sequence token (Qwen adds none).

    Returns:
      int32 token ids.

    Raises:
      ValueError: If the text is no string, or holds a lone surrogate; if the tokenizer is damaged
        or its ids exceed int32.

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
    # A vocabulary without its unknown token fails only here, and only for some texts.
    name = getattr(tokenizer, "name_or_path", type(tokenizer).__name__)
    with _damage_explained(name, "cut this text"):
        (encoded,) = token_ids(tokenizer, [text], add_special_tokens=add_special_tokens)
    if max(encoded, default=0) >= 2**31:
        raise ValueError(
            f"tokens must have ids below 2**31, got {max(encoded)}; copy the tokenizer"
        )
    return np.asarray(encoded, np.int32)


def token_ids(tokenizer: Any, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Encodes texts, whatever options other threads pass to the same tokenizer.

    A call with `truncation`, `padding` or `split_special_tokens` sets these in the tokenizer, for
    all threads, until the next call. If they are set, a private copy encodes.
    """
    shared = getattr(tokenizer, "backend_tokenizer", None)
    if shared is None:  # a Python tokenizer: its calls share no state
        return tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    splits = tokenizer.split_special_tokens

    def is_plain() -> bool:
        is_whole = shared.truncation is None and shared.padding is None
        return is_whole and shared.encode_special_tokens == splits

    if is_plain():
        found = shared.encode_batch(texts, add_special_tokens=add_special_tokens)
        # Another thread may have set and reset an option since the first check.
        is_whole = not any(one.overflowing or 0 in one.attention_mask for one in found)
        if is_whole and is_plain():
            return [one.ids for one in found]
    processor = shared.post_processor
    state = shared.get_vocab_size(), splits, processor and processor.__getstate__()
    copied, copy = _private_copies.get(tokenizer, (None, None))
    if copied != state:
        copy = type(shared).from_str(shared.to_str())
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = splits
        _private_copies[tokenizer] = state, copy
    found = copy.encode_batch(texts, add_special_tokens=add_special_tokens)
    return [one.ids for one in found]


def decode(
    tokenizer: Any,
    tokens: ArrayLike | Sequence[int],
    *,
    context: ArrayLike | Sequence[int] = (),
    skip_special_tokens: bool = True,
) -> str:
    """Decodes tokens to text, without any clean-up of spaces.

    Args:
      tokenizer: A tokenizer of transformers.
      tokens: Token ids of one sequence.
      context: Token ids before them, such as the prompt. The context's text and the returned text
        join to the text of all tokens: without context, sentencepiece tokenizers would drop the
        first space, which in a continuation separates words.
      skip_special_tokens: Whether to leave out special tokens, such as the end-of-sequence token.

    Returns:
      The text; bytes that form no character become U+FFFD.

    Example:
      text = decode(tokenizer, result.tokens[0, : result.lengths[0]], context=prompt)
    """
    new = np.atleast_1d(np.asarray(tokens)).tolist()
    before = _context_of(tokenizer, context, skip_special_tokens=skip_special_tokens)
    whole = _text_of(tokenizer, before + new, skip_special_tokens=skip_special_tokens)
    return _after(tokenizer, before, new, whole, skip_special_tokens=skip_special_tokens)


def _after(
    tokenizer: Any, context: list[int], new: list[int], whole: str, *, skip_special_tokens: bool
) -> str:
    """Returns the part of `whole`, the text of context and new tokens, that the new tokens add."""
    start = _text_of(tokenizer, context, skip_special_tokens=skip_special_tokens)
    if whole.startswith(start):
        return whole[len(start) :]
    return _text_of(tokenizer, new, skip_special_tokens=skip_special_tokens)


def _text_of(tokenizer: Any, tokens: list[int], *, skip_special_tokens: bool) -> str:
    return tokenizer.decode(
        tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def _context_of(
    tokenizer: Any, tokens: ArrayLike | Sequence[int], *, skip_special_tokens: bool
) -> list[int]:
    """Returns the last tokens of a context, on which the text after them depends."""
    before = np.atleast_1d(np.asarray(tokens, np.int64))
    if skip_special_tokens and len(before):
        before = before[~np.isin(before, list(_special_ids(tokenizer)))]
    size = _NUM_CONTEXT
    # Do not start inside a run of bytes: sentencepiece decodes such a run as a whole.
    while size < len(before) and _text_of(
        tokenizer, before[-size:].tolist(), skip_special_tokens=False
    ).startswith(_BROKEN):
        size *= 2
    return before[-size:].tolist()


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(index for index, token in added if token.special)


def apply_chat_template(
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **template_arguments: Any,
) -> Int[np.ndarray, "T"]:
    """Encodes a conversation with the checkpoint's chat template.

    Templates write the beginning-of-sequence token themselves; no second one is added.

    Args:
      tokenizer: A tokenizer of transformers.
      prompt: The user's message, or all messages, each `{"role": ..., "content": ...}`.
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
    """Renders a conversation with the checkpoint's chat template, special tokens spelled out.

    Arguments as in `apply_chat_template`, which encodes this text.

    The template runs in Jinja's sandbox for at most ten seconds.

    Raises:
      ValueError: If the tokenizer has no chat template, or the template fails, refuses the
        messages, or takes too much time or memory.
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
    """Turns tokens into text as they arrive, in whole characters.

    The pieces from `push` and `finish` join to the text that `decode` returns for all tokens. A
    token can end inside a character; its bytes are held until the character is complete. Only the
    tokens since the last but one piece are decoded again, so the cost per token does not grow with
    the text. One decoder serves one sequence.

    Tokenizers that spell unknown characters in bytes (SentencePiece) replace a whole run of bytes
    if one of them is ill-formed; text that was already returned is not changed then.

    Example:
      >>> decoder = StreamDecoder(tokenizer)  # doctest: +SKIP
      >>> for chunk in chunks:  # doctest: +SKIP
      ...     print(decoder.push(chunk.tokens[0]), end="", flush=True)
      >>> print(decoder.finish())  # doctest: +SKIP
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        context: ArrayLike | Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Starts a text.

        Args:
          tokenizer: A tokenizer of transformers.
          context: Token ids before the text, as in `decode`.
          skip_special_tokens: Whether to leave out special tokens.
        """
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset[int]()
        self._start(_context_of(tokenizer, context, skip_special_tokens=skip_special_tokens))

    def _start(self, context: Sequence[int] = ()) -> None:
        # The text of the first `_num_context` tokens was returned, or is the context's. They are
        # kept because a token's text (its leading space) depends on the token before it.
        self._window = list(context)
        self._num_context = len(self._window)

    def _decode(self, tokens: list[int]) -> str:
        return _text_of(self._tokenizer, tokens, skip_special_tokens=False)

    def push(self, tokens: ArrayLike | Sequence[int]) -> str:
        """Adds tokens and returns the text that they complete.

        Args:
          tokens: One token id, or several in order.

        Returns:
          New text, empty while a character is incomplete.
        """
        new = np.atleast_1d(np.asarray(tokens)).tolist()
        self._window += [token for token in new if token not in self._skipped]
        # Up to three tokens at the end can belong to an incomplete character.
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
        """Returns the held text, such as an incomplete character, and starts a new text."""
        piece = self._after_context(self._decode(self._window), len(self._window))
        self._start()
        return piece

    def _after_context(self, text: str, end: int) -> str:
        """Returns the part of `text`, the text of `window[:end]`, that was not returned yet."""
        context, new = self._window[: self._num_context], self._window[self._num_context : end]
        return _after(self._tokenizer, context, new, text, skip_special_tokens=False)

    def _settle(self) -> str:
        """Returns text before the last character once that text cannot change any more.

        Without this, tokens that never form a character would be held for ever. If the window can
        be cut without changing its text, bytes before the cut need not wait for bytes after it. One
        of four successive cuts is at the end of a character, which has at most four bytes.
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
