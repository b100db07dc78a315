import hashlib
import lzma
from pathlib import Path

import pytest

from sketchwalk_jax.text.haystack import Text, is_held_out, read_text


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_becomes_one_line(tmp_path: Path, compressed: bool):
    raw = "Ein Wort\n\n  und\tnoch  é.\n".encode()
    raw = lzma.compress(raw) if compressed else raw
    path = tmp_path / ("text.xz" if compressed else "text.txt")
    path.write_bytes(raw)
    text = read_text(path)
    assert text == Text("Ein Wort und noch é.", path.name, hashlib.sha256(raw).hexdigest(), 1.0)
    assert read_text(str(path), tail=0.5).content == "noch é."
    assert read_text(path, tail=0.5).sha256 == text.sha256


def test_the_default_text_is_the_same_prose_every_time():
    whole, again = read_text(), read_text(tail=0.25)
    assert again.name.startswith("pydoc_data.topics of Python 3.")
    assert again.sha256 == whole.sha256 and whole.content.endswith(" " + again.content)
    assert len(again.content) == pytest.approx(0.25 * len(whole.content), abs=100)
    assert all(is_held_out(word) and 4 <= len(word) <= 8 for word in whole.held_out_words)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("missing.txt", None, "path must be a readable UTF-8 file, got .*missing.txt"),
        ("latin.txt", b"\xe9t\xe9", "path must be a readable UTF-8 file, got .*latin.txt"),
        ("plain.xz", b"no archive", "path must be a readable UTF-8 file, got .*plain.xz"),
        ("empty.txt", b" \n", "path must be a text with words in its last 1, got 'empty.txt'"),
    ],
)
def test_an_unreadable_text_is_refused(tmp_path: Path, name: str, raw: bytes | None, message: str):
    if raw is not None:
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / name)
    for tail in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match=r"tail must be in \(0, 1\], got"):
            read_text(tail=tail)
