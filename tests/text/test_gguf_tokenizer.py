"""Tokenizers of GGUF files: the same tokens as the original, or a refusal."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf_checkpoints import BYTES, TEMPLATE, write_gguf
from tiny_tokenizers import TOKENIZERS

from sketchwalk_jax.text.haystack import read_text
from sketchwalk_jax.text.tokenizer import apply_chat_template, decode, encode, load_tokenizer

TEXTS = (
    "Who walks? It's the WALKER's 12345 steps; don't they'll.",
    "  leading\n\n\tspaces\r\nand trailing  ",
    "def walk(x):\n    return x ** 2  # 0x1F, 100_000\n",
    "Zürich “café” 日本語 한국어 Привет 🎉👩‍👩‍👧 ½ ² ٣٤",
    "<s>a token in the text</s>",
    "",
    " ",
)


def read_tokens(tokenizer: Any) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def read_merges(tokenizer: Any) -> list[str]:
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return [" ".join(pair) for pair in merges]


def make(path: Path, **settings: Any) -> Any:
    """Makes the tokenizer of a file with that metadata."""
    write_gguf(path / "model.gguf", tokenizer=settings)
    return load_tokenizer(path / "model.gguf")


def pieces(tokenizer: Any, text: str) -> Sequence[str]:
    return tokenizer.convert_ids_to_tokens(encode(tokenizer, text).tolist())


def test_a_tokenizer_of_bytes_and_merges_gives_the_tokens_of_the_original(tmp_path: Path):
    original = TOKENIZERS["merges"]
    tokens = read_tokens(original)
    tokenizer = make(
        tmp_path,
        pre="llama-bpe",
        tokens=tokens,
        merges=read_merges(original),
        kinds=[3 if token in ("<s>", "</s>") else 1 for token in tokens],
        special={"bos": tokens.index("<s>"), "eos": tokens.index("</s>")},
        flags={"add_bos_token": True, "add_eos_token": True},
    )
    for text in TEXTS:
        expected = encode(original, text).tolist()
        assert encode(tokenizer, text).tolist() == expected, text
        assert decode(tokenizer, expected) == decode(original, expected)
        assert decode(tokenizer, encode(tokenizer, text, add_special_tokens=False)) == (
            text.replace("<s>", "").replace("</s>", "")
        )
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


def test_a_tokenizer_with_spaces_as_characters_gives_the_tokens_of_the_original(tmp_path: Path):
    original = TOKENIZERS["spaces as characters"]
    tokens = read_tokens(original)
    tokenizer = make(
        tmp_path,
        model="llama",
        pre=None,
        tokens=tokens,
        merges=read_merges(original),
        kinds=[{"<unk>": 2, "<s>": 3}.get(token, 1) for token in tokens],
        special={"bos": tokens.index("<s>"), "unknown": tokens.index("<unk>")},
    )
    for text in ("the other nest", "there\nwas é 日 in it.", "3.14: A?"):
        assert encode(tokenizer, text).tolist() == encode(original, text).tolist()
        assert decode(tokenizer, encode(tokenizer, text)) == text
    bare = make(
        tmp_path,
        model="llama",
        tokens=tokens,
        merges=read_merges(original),
        flags={"add_space_prefix": False, "add_bos_token": False},
        special={},
    )
    assert pieces(bare, "the") == ["t", "he"]


def test_merges_follow_from_scores(tmp_path: Path):
    tokens = ["<unk>", "▁", "a", "b", "c", "ab", "bc", "abc", "▁a"]
    scores = [0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    settings = {"model": "llama", "pre": None, "tokens": tokens, "special": {}, "kinds": [1] * 9}
    tokenizer = make(tmp_path, **settings, scores=scores)
    assert pieces(tokenizer, "abc") == ["▁", "abc"]
    assert pieces(tokenizer, "ab") == ["▁", "ab"]
    scores[6] = -5.0  # now the merge "a b" comes before "b c"
    assert pieces(make(tmp_path, **settings, scores=scores), "bab") == ["▁", "b", "ab"]


WORDS = ["▁", "h", "e", "l", "o", "[", "]", "▁▁", "ll", "he", "llo", "▁he", "▁[", "el"]
SPACED = {
    "model": "llama",
    "pre": "default",
    "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *WORDS, "<think>"],
    "kinds": [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4],
    "scores": [0.0] * 259 + [-float(WORDS.index(word)) for word in WORDS] + [0.0],
    "special": {"bos": 1, "eos": 2, "unknown": 0},
}
# Token ids from llama.cpp.
SPACED_TEXTS = {
    "hello": "▁he llo",
    " hello": "▁▁ he llo",
    "  hello": "▁▁ ▁he llo",
    "hello  hello": "▁he llo ▁▁ he llo",
    "<s>[hello]": "<s> ▁[ he llo ]",
    "<s> hello</s>hello": "<s> ▁▁ he llo </s> ▁he llo",
    "<think>he<think> he": "<think> ▁he <think> ▁▁ he",
    "é\n[": "▁ <0xC3> <0xA9> <0x0A> [",
    "   ": "▁▁ ▁▁",
    "": "",
}


def test_a_space_comes_before_each_text_between_special_tokens(tmp_path: Path):
    tokenizer = make(tmp_path, **SPACED)
    for text, expected in SPACED_TEXTS.items():
        ids = encode(tokenizer, text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids.tolist()) == expected.split(), text


def test_tokens_are_those_of_llama_cpp(tmp_path: Path):
    """Checks the values above against the package, where it is installed."""
    llama_cpp = pytest.importorskip("llama_cpp")
    write_gguf(tmp_path / "model.gguf", tokenizer=SPACED, vocab_size=len(SPACED["tokens"]))
    model = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    for text, expected in SPACED_TEXTS.items():
        ids = model.tokenize(text.encode(), add_bos=False, special=True)
        assert [SPACED["tokens"][index] for index in ids] == expected.split(), text


def test_tokens_are_those_of_sentencepiece(tmp_path: Path):
    """Checks a vocabulary trained by the package, where it is installed."""
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(read_text().content[:20_000].split(". ")),
        model_writer=written,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    ids = range(len(model))
    tokenizer = make(
        tmp_path,
        model="llama",
        pre="default",
        tokens=[model.id_to_piece(i) for i in ids],
        scores=[model.get_score(i) for i in ids],
        kinds=[2 if i == 0 else 3 if i < 3 else 6 if model.is_byte(i) else 1 for i in ids],
        special={"bos": 1, "eos": 2, "unknown": 0},
    )
    for text in [*TEXTS, *SPACED_TEXTS, read_text().content[20_000:22_000]]:
        if "<" not in text:  # the package does not split off special tokens
            assert encode(tokenizer, text).tolist() == [1, *model.encode(text)], text
            assert decode(tokenizer, model.encode(text)) == model.decode(model.encode(text))


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "12 3 a b c"),
        ("smollm", "1 2 3 a b c"),
        ("starcoder", "1 2 3 a b c"),
        ("llama-bpe", "12 3 abc"),
        ("smaug-bpe", "12 3 a b c"),
        ("qwen2", "1 2 3 a b c"),
        ("deepseek-r1-qwen", "1 2 3 a b c"),
        ("tekken", "1 2 3 abc"),
    ],
)
def test_texts_are_cut_as_the_original_cuts_them(tmp_path: Path, pre: str, expected: str):
    """Some split digits, some take a piece that is a token whatever its merges."""
    settings = {"tokens": [*BYTES, "12", "abc"], "merges": ["1 2"], "special": {}}
    tokenizer = make(tmp_path, pre=pre, **settings)
    assert [*pieces(tokenizer, "123"), *pieces(tokenizer, "abc")] == expected.split()
    composes = pieces(tokenizer, "é") == pieces(tokenizer, "e\u0301")
    assert composes == (pre == "qwen2")


@pytest.mark.parametrize(
    ("pre", "flags", "has_bos"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_bos_is_added_where_the_file_or_its_kind_says(
    tmp_path: Path, pre: str, flags: dict[str, bool], has_bos: bool
):
    tokenizer = make(tmp_path, pre=pre, flags=flags)
    assert len(encode(tokenizer, "a")) == 1 + has_bos


def test_control_and_user_defined_tokens_are_matched_whole(tmp_path: Path):
    tokens = [*BYTES, "<｜User｜>", "<think>", "日本"]
    kinds = [1] * 256 + [3, 4, 1]
    tokenizer = make(tmp_path, pre="qwen2", tokens=tokens, kinds=kinds, special={"eos": 256})
    assert len(tokenizer) == 259
    ids = encode(tokenizer, "<｜User｜>a<think>").tolist()
    assert ids == [256, BYTES.index("a"), 257]
    assert decode(tokenizer, ids) == "a<think>"
    # A plain token that is not in byte characters decodes to its own text.
    assert decode(tokenizer, [258]) == "日本"


def test_a_token_that_ends_a_generation_is_a_control_token(tmp_path: Path):
    """This also holds where the file calls it plain text or user-defined."""
    tokens = [*BYTES, "<|im_end|>", "<|eot_id|>"]
    tokenizer = make(tmp_path, pre="qwen2", tokens=tokens, kinds=[1] * 257 + [4], special={})
    ids = encode(tokenizer, "<|im_end|>a<|eot_id|>").tolist()
    assert ids == [256, BYTES.index("a"), 257] and decode(tokenizer, ids) == "a"


def test_the_chat_template_is_that_of_the_metadata(tmp_path: Path):
    tokenizer = make(tmp_path)
    assert tokenizer.chat_template == TEMPLATE
    tokens = apply_chat_template(tokenizer, "Who walks?")
    assert decode(tokenizer, tokens) == "user: Who walks?\nassistant: "


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pre": "viking"}, "tokenizer.ggml.pre of .* must be one of .* got 'viking'"),
        ({"pre": None}, "tokenizer.ggml.pre of .* must be one of .* got None"),
        ({"model": "rwkv"}, "tokenizer.ggml.model of .* must be 'gpt2' or 'llama' .* got 'rwkv'"),
        ({"special": {"bos": 256}}, r"must be among its 256 tokens, got {'bos': 256}"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **settings)
