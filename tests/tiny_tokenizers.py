"""Makes small tokenizers of the kinds that checkpoints have, without any file."""

from typing import Any

from sketchwalk_jax.text.haystack import read_text

# Llama 3's tokenizers split a text with this before they merge.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level():
    """Makes a tokenizer of bytes, without merges and special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def merged_bytes():
    """Makes one like Llama 3's: merges within words, a first and, here, a last token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([read_text().content[:50_000]], trainer)
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")


def spaces_as_characters():
    """Makes one like Llama 2's: a space before each text, and bytes for unknown characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pairs = [("▁", letter) for letter in "abcdeilmnoprstvwT"]
    pairs += [("t", "h"), ("e", "r"), ("o", "f"), ("▁t", "he"), ("▁th", "e")]
    letters = sorted(set("".join(map("".join, pairs))) | set("0123456789.,:?QA"))
    vocabulary = ["<unk>", "<s>", *letters, *dict.fromkeys("".join(pair) for pair in pairs)]
    vocabulary += ["he", "▁th"] + [f"<0x{byte:02X}>" for byte in range(256)]
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    merges = [("h", "e"), ("▁t", "h"), *pairs]
    merges = [pair for pair in merges if "".join(pair) in ids and set(pair) <= set(ids)]
    model = Tokenizer(
        models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    model.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    model.add_special_tokens([AddedToken("<s>", special=True)])
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", unk_token="<unk>")


# Tokenizers by kind.
TOKENIZERS: dict[str, Any] = {
    "bytes": byte_level(),
    "merges": merged_bytes(),
    "spaces as characters": spaces_as_characters(),
}
