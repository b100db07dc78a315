"""Makes a tokenizer from the metadata of a GGUF file.

The file stores the vocabulary, the merges, the kind of every token, and the name of the rules that
split a text before merging, but not these rules. This module has them, copied from the original
tokenizers, so that the model sees the tokens it was trained on. Unknown names are refused: with
other rules the same text would silently give other tokens.

transformers has a loader too, but it needs torch, splits by GPT-2's rules if it does not know the
name, and does not compose characters as Qwen's tokenizer does.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sketchwalk_jax.models.gguf_header import GgufHeader, end_token_ids

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that are matched whole: control tokens, and user-defined text."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_NUMBERS
_QWEN_2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_NUMBERS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """Rules by which a byte-level tokenizer splits a text before merging.

    Attributes:
      regex: Pattern of the pieces; None for GPT-2's.
      has_single_digits: Whether each digit is first split off.
      is_normalized: Whether the text is first brought to Unicode's composed form (NFC).
      ignores_merges: Whether a piece in the vocabulary becomes that token without merging.
      adds_bos: Whether a text begins with the bos token, unless the file says otherwise.
    """

    regex: str | None = None
    has_single_digits: bool = False
    is_normalized: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT_2 = _Cut()
_DIGITS = _Cut(has_single_digits=True)
_LLAMA = _Cut(regex=_LLAMA_3, ignores_merges=True, adds_bos=True)
_CUTS: Mapping[str, _Cut] = {
    "gpt-2": _GPT_2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "llama-bpe": _LLAMA,
    "smaug-bpe": _Cut(regex=_LLAMA_3),
    "qwen2": _Cut(regex=_QWEN_2, is_normalized=True),
    "deepseek-r1-qwen": _Cut(regex=_QWEN_2),
    "tekken": _Cut(regex=_TEKKEN, ignores_merges=True, adds_bos=True),
}
"""Splitting rules by the value of `tokenizer.ggml.pre`."""


def make_tokenizer(header: GgufHeader) -> Any:
    """Makes the tokenizer that a GGUF file describes.

    Args:
      header: The file's header.

    Returns:
      A tokenizer of transformers, with the file's special tokens and chat template.

    Raises:
      ValueError: If the file has no tokenizer, or one of an unknown kind.
    """
    from transformers import PreTrainedTokenizerFast

    prefix = "tokenizer.ggml."
    found = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    kind, tokens = found.get("model"), found.get("tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ValueError(
            f"tokenizer.ggml.model of {header.path} must be 'gpt2' or 'llama' with tokens, got "
            f"{kind!r} with {len(tokens or ())}; load the tokenizer of the original checkpoint"
        )
    kinds = list(found.get("token_type") or [1] * len(tokens))
    for index in end_token_ids(header.metadata):  # some files mark end tokens as text
        if index < len(kinds):
            kinds[index] = _CONTROL
    if kind == "gpt2":
        name = found.get("pre")
        if name not in _CUTS:
            raise ValueError(
                f"tokenizer.ggml.pre of {header.path} must be one of {', '.join(_CUTS)}, got "
                f"{name!r}; load the tokenizer of the original checkpoint"
            )
        cut = _CUTS[str(name)]
        model, adds_bos = _byte_level(tokens, kinds, found.get("merges", ()), cut), cut.adds_bos
    else:
        has_prefix = found.get("add_space_prefix", True)
        model, adds_bos = _spaces_as_characters(tokens, found, has_prefix=has_prefix), True
    _add_whole_tokens(model, tokens, kinds)

    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: found.get(f"{key}_token_id") for name, key in special.items()}
    wrong = {name: i for name, i in ids.items() if i is not None and i >= len(tokens)}
    if wrong:
        raise ValueError(
            f"special tokens of {header.path} must be among its {len(tokens)} tokens, got {wrong}"
        )
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    _add_ends(
        model,
        first=named.get("bos") if found.get("add_bos_token", adds_bos) else None,
        last=named.get("eos") if found.get("add_eos_token", False) else None,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        clean_up_tokenization_spaces=False,
        chat_template=header.metadata.get("tokenizer.chat_template"),
        **{f"{name}_token": token for name, token in named.items()},
    )


def _byte_level(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], cut: _Cut
) -> Any:
    """Makes a tokenizer like GPT-2, Llama 3 and Qwen: it merges bytes written as characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    to_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        # Tokens that are matched whole are stored as plain text, not as byte characters.
        is_whole = kind in (_CONTROL, _USER_DEFINED)
        if not is_whole and not set(token) <= alphabet:
            token = "".join(piece for piece, _ in to_characters.pre_tokenize_str(token))
        ids[token] = index
    pairs = [_pair(merge) for merge in merges]
    model = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=cut.ignores_merges))
    if cut.is_normalized:
        model.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if cut.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None))
    model.pre_tokenizer = pre_tokenizers.Sequence(steps)
    model.decoder = decoders.ByteLevel()
    return model


def _pair(merge: str) -> tuple[str, str]:
    """Splits a merge into its two parts; the first may begin with a space."""
    space = merge.index(" ", 1)
    return merge[:space], merge[space + 1 :]


def _spaces_as_characters(
    tokens: Sequence[str], found: Mapping[str, Any], *, has_prefix: bool
) -> Any:
    """Makes a tokenizer like Llama 2: spaces are characters, unknown characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {token: index for index, token in enumerate(tokens)}
    if "merges" in found:
        pairs = [_pair(merge) for merge in found["merges"]]
    else:
        pairs = _pairs_by_score(ids, dict(zip(tokens, found.get("scores", ()), strict=False)))
    model = Tokenizer(models.BPE(vocab=ids, merges=pairs, fuse_unk=True, byte_fallback=True))
    # Prepend a space to each text between special tokens, even if it begins with one.
    prefix = [normalizers.Prepend("▁")] * has_prefix
    model.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * has_prefix)
    return model


def _pairs_by_score(ids: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Lists the merges that a vocabulary implies: all splits of every token, best score first."""
    found = []
    for token, score in scores.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        cuts = [(left, right) for left, right in cuts if left in ids and right in ids]
        found += [(score, cut) for cut in sorted(cuts, key=lambda cut: (ids[cut[0]], ids[cut[1]]))]
    found.sort(key=lambda each: (each[0], len(each[1][0]), len(each[1][1])), reverse=True)
    return [cut for _, cut in found]


def _add_whole_tokens(model: Any, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Adds control and user-defined tokens, which are matched whole."""
    from tokenizers import AddedToken

    for kind, add in ((_CONTROL, model.add_special_tokens), (_USER_DEFINED, model.add_tokens)):
        add(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, other in zip(tokens, kinds, strict=True)
                if other == kind
            ]
        )


def _add_ends(model: Any, *, first: str | None, last: str | None) -> None:
    """Makes every text begin with `first` and end with `last`, if given."""
    from tokenizers import processors

    ends = [token for token in (first, last) if token is not None]
    if ends:
        template = " ".join(filter(None, (first, "$A", last)))
        special = [(token, model.token_to_id(token)) for token in dict.fromkeys(ends)]
        model.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special
        )
