"""The text that tasks hide their sentences in: any English prose."""

import dataclasses
import functools
import hashlib
import lzma
import os
import platform
import re
from pathlib import Path

from sketchwalk_jax.evaluation.templates import is_held_out


@dataclasses.dataclass(frozen=True)
class Text:
    """A text, and what tells which text it is.

    Attributes:
      content: The text in one line: words with one space between them.
      name: Name of the file, or of the module that carries the text.
      sha256: SHA-256 of the file's bytes, of the whole file whatever `tail` is; without a file, of
        the whole text in UTF-8.
      tail: Share of the whole text that `content` is, from its end.
    """

    content: str
    name: str
    sha256: str
    tail: float

    @functools.cached_property
    def held_out_words(self) -> tuple[str, ...]:
        """Lower-case words of 4 to 8 letters that no training has seen hidden, sorted."""
        # Not the beginning of a contraction: "wouldn" of "wouldn't" is no word.
        words = set(re.findall(r"\b[a-z]{4,8}\b(?!['’]\w)", self.content))
        return tuple(sorted(word for word in words if is_held_out(word)))


def read_text(path: str | os.PathLike[str] | None = None, *, tail: float = 1.0) -> Text:
    """Reads a text file, or the English prose that every Python carries.

    Args:
      path: A UTF-8 file, compressed if its name ends with `.xz`. None takes the topics of Python's
        own help (`pydoc_data.topics`).
      tail: Share of the text to keep, from its end: of a text that a model was trained on, keep
        what it has not seen.

    Returns:
      The text in one line; with a `tail` below 1, from the beginning of a word on.

    Raises:
      ValueError: If `tail` is not in (0, 1], or if the file cannot be read as text or has no words.

    Example:
      >>> read_text().content[:21]
      'The "assert" statemen'
    """
    if not 0 < tail <= 1:
        raise ValueError(f"tail must be in (0, 1], got {tail}")
    if path is None:
        from pydoc_data.topics import topics

        name = f"pydoc_data.topics of Python {platform.python_version()}"
        raw = " ".join(topics.values()).encode()
        text = raw.decode()
    else:
        name = Path(path).name
        raw, text = _read_file(Path(path))
    text = " ".join(text.split())
    start = len(text) - int(len(text) * tail)
    if start > 0 and text[start - 1] != " ":
        start = text.find(" ", start) + 1 or len(text)
    content = text[start:]
    if not content:
        raise ValueError(f"path must be a text with words in its last {tail:g}, got {name!r}")
    return Text(content, name, hashlib.sha256(raw).hexdigest(), float(tail))


def _read_file(path: Path) -> tuple[bytes, str]:
    """The bytes of a file and the text in them."""
    try:
        raw = path.read_bytes()
        return raw, (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(
            f"path must be a readable UTF-8 file, got {str(path)!r}: {error}"
        ) from None
