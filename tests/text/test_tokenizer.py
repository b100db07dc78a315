"""Tokenizers of directories: exact text, whole characters in pieces, chat templates, errors."""

import contextlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from gguf_checkpoints import BYTES
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import TOKENIZERS

from sketchwalk_jax.text.tokenizer import (
    StreamDecoder,
    apply_chat_template,
    decode,
    encode,
    load_tokenizer,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{{ opening }}{% endif %}"
)


def byte_level(**settings):
    """Makes one like Llama 3's and Qwen's: bytes, and merges that split characters anywhere.

    It adds a beginning-of-sequence token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # Each merge joins the first two bytes; others stay alone.
    merges = [tuple(spelled(text.encode())[:2]) for text in ("th", " a", "é", "你", "😀")]
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    model = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    model.add_tokens(["<think>"])
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", **settings
    )


def spelled(data: bytes) -> str:
    """Writes bytes in the characters of byte-level vocabularies."""
    return "".join(BYTES[byte] for byte in data)


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = TOKENIZERS["spaces as characters"]
BYTE_IDS = {byte: BYTE_FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    byte_level(chat_template=CHAT_TEMPLATE).save_pretrained(tmp_path)
    return tmp_path


def stream(tokenizer, tokens: list[int], chunks: list[int], **options) -> list[str]:
    decoder, pieces, start = StreamDecoder(tokenizer, **options), [], 0
    for size in [*chunks, len(tokens)]:
        pieces.append(decoder.push(np.array(tokens[start : start + size], np.int32)))
        start += size
    return [*pieces, decoder.finish()]


chunk_sizes = st.lists(st.integers(0, 5), max_size=40)
texts = st.text(st.sampled_from("a the.é你好😀\n\N{REPLACEMENT CHARACTER}\u0301"), max_size=30)


@given(texts)
def test_text_survives_byte_for_byte(text: str):
    tokens = encode(BYTE_LEVEL, text)
    assert tokens.dtype == np.int32
    assert tokens[0] == BYTE_LEVEL.bos_token_id
    assert decode(BYTE_LEVEL, tokens) == text
    assert encode(BYTE_LEVEL, text, add_special_tokens=False).tolist() == tokens[1:].tolist()


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=40), chunk_sizes, st.booleans())
def test_streamed_text_of_any_tokens_equals_full_decode(
    tokens: list[int], chunks: list[int], skip: bool
):
    pieces = stream(BYTE_LEVEL, tokens, chunks, skip_special_tokens=skip)
    assert "".join(pieces) == decode(BYTE_LEVEL, np.array(tokens, int), skip_special_tokens=skip)


@given(texts, chunk_sizes, st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]))
def test_pieces_hold_whole_characters_only(text: str, chunks: list[int], tokenizer):
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    tokens = encode(tokenizer, text).tolist()
    pieces = stream(tokenizer, tokens, chunks)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) == decode(tokenizer, np.array(tokens))


def test_a_character_comes_with_its_last_byte():
    decoder = StreamDecoder(BYTE_FALLBACK)
    pieces = [decoder.push(BYTE_IDS[byte]) for byte in "你😀".encode()]
    assert pieces == ["", "", "你", "", "", "", "😀"]
    assert decoder.finish() == ""


def test_an_ill_formed_byte_leaves_returned_text_as_it_was():
    decoder = StreamDecoder(BYTE_FALLBACK)
    for byte in "你".encode():
        last = decoder.push(BYTE_IDS[byte])
    assert last == "你"
    broken = [BYTE_IDS[0xFF], BYTE_FALLBACK.convert_tokens_to_ids("a")]
    assert decoder.push(np.array(broken)) == "\N{REPLACEMENT CHARACTER}a"


def test_an_unfinished_character_comes_at_the_end_and_the_next_text_starts_anew():
    decoder = StreamDecoder(BYTE_LEVEL)
    assert decoder.push(BYTE_LEVEL.convert_tokens_to_ids(list(spelled(b"a\xf0\x9f")))) == "a"
    assert decoder.finish() == "\N{REPLACEMENT CHARACTER}"
    assert decoder.push(BYTE_LEVEL.convert_tokens_to_ids("b")) == "b"


class CountingTokenizer:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self.tokenizer, self.largest, self.total = tokenizer, 0, 0

    def decode(self, tokens, **options):
        self.largest = max(self.largest, len(tokens))
        self.total += len(tokens)
        return self.tokenizer.decode(tokens, **options)


@pytest.mark.parametrize(
    "data",
    [b"a the ", "你😀".encode(), b"\xff", b"\xe4", "\N{REPLACEMENT CHARACTER}".encode()],
    ids=["letters", "characters", "ill-formed", "unfinished", "replacement characters"],
)
def test_the_work_for_a_token_does_not_grow_with_the_text(data: bytes):
    tokens = BYTE_LEVEL.convert_tokens_to_ids(list(spelled(data * 200)))
    counting = CountingTokenizer(BYTE_LEVEL)
    decoder = StreamDecoder(counting)
    text = "".join(decoder.push(token) for token in tokens) + decoder.finish()
    assert text == (data * 200).decode(errors="replace")
    assert counting.largest <= 20
    assert counting.total <= 100 * len(tokens)


def test_a_loaded_tokenizer_is_the_saved_one(directory: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    text = "a the é你😀</s>"
    for source in (directory, f"~/{directory.name}"):
        loaded = load_tokenizer(source)
        assert encode(loaded, text).tolist() == encode(BYTE_LEVEL, text).tolist()
        assert loaded.eos_token == "</s>"


def digits_by_threes():
    """Makes a byte-level tokenizer with rules for lower case, digits by threes and whole pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    model = Tokenizer(models.BPE(ignore_merges=True))
    model.normalizer = normalizers.Lowercase()
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(["walk the walks 123 123 456 456 e\u0301te\u0301"] * 9, trainer)
    return model


FILES = {
    "digits by threes": digits_by_threes(),
    "merges": TOKENIZERS["merges"].backend_tokenizer,
    "spaces as characters": TOKENIZERS["spaces as characters"].backend_tokenizer,
}
CLASSES = (
    "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer",
    "Qwen2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", None,
)  # fmt: skip
STRINGS = (
    "<s>the Walk 123456, e\u0301te\u0301?", " the\n\n the  </s> the", "456 The <|endoftext|>", "",
)  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", None])
@pytest.mark.parametrize("kind", FILES)
def test_ids_are_those_of_the_file_whatever_class_is_named(
    tmp_path: Path, kind: str, model_type: str | None
):
    FILES[kind].save(str(tmp_path / "tokenizer.json"))
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name in CLASSES:
        settings = {"eos_token": "<s>", "add_bos_token": True, "tokenizer_class": name}
        settings = {key: value for key, value in settings.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        loaded = load_tokenizer(tmp_path)
        for text in STRINGS:
            assert encode(loaded, text).tolist() == FILES[kind].encode(text).ids, (name, text)
        assert loaded.eos_token == "<s>" and len(loaded) == FILES[kind].get_vocab_size()
        assert loaded(STRINGS[0])["input_ids"] == FILES[kind].encode(STRINGS[0]).ids


def test_the_configuration_says_what_is_special_and_adds_what_it_numbers(tmp_path: Path):
    model = digits_by_threes()
    model.add_tokens(["<told>"])  # the file says: plain text
    size = model.get_vocab_size()
    model.save(str(tmp_path / "tokenizer.json"))
    walk = next(token for token in model.get_vocab() if token.endswith("walk"))
    settings = {
        "eos_token": walk,  # in the vocabulary, but no added token of the file
        "pad_token": "<pad>",  # not in it: its id would exceed the model's
        "added_tokens_decoder": {
            str(size): {"content": "<new>", "special": False},
            str(size + 5): {"content": "<far>", "special": True},
            "0": {"content": "<s>", "special": True, "lstrip": True},  # the file strips nothing
            str(size - 1): {"content": "<told>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path)
    assert loaded.get_vocab() == model.get_vocab() | {"<new>": size}
    assert encode(loaded, f"{walk}<new>").tolist() == [model.token_to_id(walk), size]
    for text in ("a <s>", "<pad>", "<far>"):
        assert encode(loaded, text).tolist() == model.encode(text).ids
    assert decode(loaded, [model.token_to_id(walk), size, size - 1, 0]) == "<new>"
    assert encode(loaded, "a<told>").tolist() == model.encode("a<told>").ids


def test_the_model_names_the_ends_of_a_text_where_the_tokenizer_does_not(tmp_path: Path):
    FILES["merges"].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_token, loaded.eos_token_id) == ("<s>", 1)
    (tmp_path / "config.json").write_text('{"bos_token_id": -1, "eos_token_id": [0, 1]}')
    assert load_tokenizer(tmp_path).bos_token is load_tokenizer(tmp_path).eos_token is None
    (tmp_path / "config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "eos_token": "<s>"}')
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_token, loaded.eos_token_id) == (None, 0)


@pytest.mark.parametrize(
    ("content", "package"), [(b"\n\x0e\n\x05<unk>", "sentencepiece"), (b"IQ== 0\n", "tiktoken")]
)
def test_a_vocabulary_alone_names_the_package_that_it_needs(
    tmp_path: Path, content: bytes, package: str, monkeypatch
):
    monkeypatch.setattr("sketchwalk_jax.text.tokenizer.find_spec", lambda name: None)
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ImportError, match=f"needs the package {package}: pip install {package}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "left",
    [
        {"truncation": True, "max_length": 5},
        {"padding": "max_length", "max_length": 300},
        {"split_special_tokens": True},
    ],
    ids=["truncation", "padding", "special tokens"],
)
def test_a_call_leaves_nothing_behind_for_encode(left: dict):
    tokenizer = byte_level(pad_token="</s>")
    text = "<s>" + 200 * "th"
    expected = encode(tokenizer, text).tolist()
    tokenizer(text, **left)
    assert len(expected) == 202 and encode(tokenizer, text).tolist() == expected
    tokenizer(text, **left)
    tokenizer.add_tokens(["thth"])  # an earlier copy must not be used again
    assert len(encode(tokenizer, text)) == 102
    tokenizer.backend_tokenizer.post_processor = None
    assert len(encode(tokenizer, text)) == 101


def test_a_thread_that_truncates_cuts_no_prompt_of_another():
    tokenizer, text, is_over, done = byte_level(), 200 * "th", threading.Event(), list[int]()

    def truncate():
        while not is_over.is_set():
            with contextlib.suppress(RuntimeError):  # older versions raise it during encoding
                done.append(len(tokenizer(text, truncation=True, max_length=5)["input_ids"]))

    other = threading.Thread(target=truncate)
    other.start()
    try:
        assert {len(encode(tokenizer, text)) for _ in range(100)} == {201}
    finally:
        is_over.set()
        other.join()
    assert set(done) == {5}


@given(st.data(), st.sampled_from([*TOKENIZERS]), chunk_sizes, st.booleans())
def test_a_prompt_and_its_continuation_join_to_the_whole_text(data, kind, chunks, skip):
    tokenizer = TOKENIZERS[kind]
    text = data.draw(st.text(st.sampled_from("the of.é你😀\n"), max_size=30))
    tokens = encode(tokenizer, text).tolist()
    cut = data.draw(st.integers(0, len(tokens)))
    options = {"skip_special_tokens": skip}
    prompt = decode(tokenizer, tokens[:cut], **options)
    if prompt.endswith("\N{REPLACEMENT CHARACTER}"):
        return  # half a character, which nothing can complete
    more = decode(tokenizer, tokens[cut:], context=tokens[:cut], **options)
    assert prompt + more == decode(tokenizer, tokens, **options)
    pieces = stream(tokenizer, tokens[cut:], chunks, context=tokens[:cut], **options)
    assert "".join(pieces) == more


def test_decoding_leaves_spaces_before_punctuation(directory: Path):
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["clean_up_tokenization_spaces"] = True
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(directory)
    assert decode(loaded, encode(loaded, "a . a ?")) == "a . a ?"


def test_a_prompt_becomes_one_user_message(directory: Path):
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    for prompt, options, expected in (
        ("hi", {}, "<s>[user]hi[assistant]"),
        (messages, {"add_generation_prompt": False}, "<s>[system]be[user]hi"),
        ("hi", {"opening": "<think>"}, "<s>[user]hi[assistant]<think>"),
    ):
        tokens = apply_chat_template(tokenizer, prompt, **options)
        assert tokens.dtype == np.int32
        assert decode(tokenizer, tokens, skip_special_tokens=False) == expected
    for prompt in ("", []):
        with pytest.raises(ValueError, match="prompt must hold text or messages"):
            apply_chat_template(tokenizer, prompt)
    with pytest.raises(ValueError, match="tokenizer must have a chat template, got none"):
        apply_chat_template(BYTE_LEVEL, "hi")


def test_a_folder_without_a_tokenizer_is_refused(directory: Path, tmp_path_factory):
    bare = tmp_path_factory.mktemp("bare")
    (bare / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    for path, message in (
        (bare, r"must hold tokenizer files .*tokenizer\.json.* got .*\['config\.json'\]"),
        (directory, "cannot be opened: .* a pointer of Git LFS; run `git lfs"),
        (bare / "missing", "must be a checkpoint folder or .*missing"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Own", None]}}),
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}),
    ],
)
def test_a_tokenizer_with_code_of_its_own_is_refused(directory: Path, file: str, content: dict):
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="must be one of transformers' own classes"):
        load_tokenizer(directory)
    config = {"model_type": "llama", "auto_map": {"AutoConfig": "code.Own"}}
    (directory / "config.json").write_text(json.dumps(config))  # transformers knows this model
    if file == "config.json":
        assert load_tokenizer(directory).bos_token == "<s>"


def test_a_vocabulary_that_lacks_its_token_for_the_unknown_is_named():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE({"a": 0}, [], unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    assert encode(tokenizer, "aa").tolist() == [0, 0]
    with pytest.raises(ValueError, match="cannot cut this text: Unk token `.` not found"):
        encode(tokenizer, "ab")
