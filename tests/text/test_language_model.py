"""Text in, text out: one prompt, many, pieces, draws, and conversations of several turns."""

import dataclasses
import threading
from collections.abc import Iterator

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_checkpoints import write_gguf

import sketchwalk_jax as sw
from sketchwalk_jax import LanguageModel, Sampling, SketchWalkConfig
from sketchwalk_jax.inference import generation
from sketchwalk_jax.text.tokenizer import decode

POLICY = SketchWalkConfig.paper(sketch_dim=8, dense_layers=1, density=0.5)  # blocks of 64 tokens
NEW = 6
SHORT = "Walk with the "
LONG = "Walk with the sketch, then walk once more: "
DRAWN = Sampling(temperature=1.5)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    directory = tmp_path_factory.mktemp("model")
    tensors = checkpoints.write_checkpoint(directory, tokenizer=True)
    checkpoints.write_letters_only(directory, tensors)
    # Dense programs compile in half the time, and text does not depend on the policy.
    return LanguageModel.load(directory, policy=sw.Dense(), progress=False)


def test_a_text_is_what_the_pure_functions_give(lm):
    tokens = np.frombuffer(SHORT.encode(), np.uint8).astype(np.int32)[None]
    call = sw.make_generate(lm.model_config, POLICY, max_new_tokens=NEW)
    expected = decode(lm.tokenizer, call(lm.params, tokens).tokens[0])
    sparse = lm.with_policy(POLICY)
    assert sparse.generate(SHORT, max_new_tokens=NEW) == expected and len(expected) == NEW
    assert sparse.params is lm.params and "SketchWalkConfig of density 0.5" in repr(sparse)
    assert repr(lm) == "LanguageModel(llama, 2 layers, float32, context 512, Dense)"


def test_texts_of_a_list_are_those_of_its_prompts_in_order_and_share_programs(lm):
    prompts = [SHORT[:5], SHORT, LONG, SHORT[:3], LONG[3:]]
    alone = [lm.generate(text, max_new_tokens=NEW) for text in prompts]
    before = generation._start._cache_size()
    assert lm.generate(prompts, max_new_tokens=NEW, batch_size=4) == alone
    assert generation._start._cache_size() == before + 1  # batches of four; the fifth goes alone
    more = lm.generate([*prompts, "one", "more"], max_new_tokens=NEW, batch_size=4)
    assert more[:5] == alone and len(more) == 7
    assert generation._start._cache_size() == before + 1  # three, one of them repeated
    assert lm.generate([]) == []


@pytest.mark.parametrize("sampling", [None, DRAWN], ids=["greedy", "drawn"])
def test_warming_up_begins_the_programs_of_the_call(lm, sampling, monkeypatch):
    begun = []

    class Now(threading.Thread):
        start = threading.Thread.run

    def begin(call, params, *, is_ahead):
        begun.append((call.decoding["greedy_steps"], len(call.prompt[0]), call.max_new_tokens))

    monkeypatch.setattr(threading, "Thread", Now)
    monkeypatch.setattr(generation.Call, "begin", begin)
    lm.warm_up(40, max_new_tokens=NEW, sampling=sampling)
    assert set(begun) == {(int(sampling is None), 1, NEW)}


def test_a_gguf_file_is_a_model_and_its_tokenizer(tmp_path):
    write_gguf(tmp_path / "model.gguf", tokenizer={})
    lm = LanguageModel.load(tmp_path / "model.gguf", progress=False)
    assert lm.params["embed"]["embedding"].dtype == jnp.float32
    assert decode(lm.tokenizer, lm.encode("Walk")) == "Walk"


def test_a_continuation_keeps_the_space_before_its_first_word(lm):
    """Sentencepiece tokenizers drop a text's first space, but an answer continues a text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    # Each letter is a word: the token of its byte is the letter with a space before it.
    letters = {i: "▁" * (i < 128 and chr(i).isalpha()) + chr(i) for i in range(256)}
    model = Tokenizer(models.WordLevel({token: i for i, token in letters.items()}))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = PreTrainedTokenizerFast(tokenizer_object=model)
    spaced, prompt = dataclasses.replace(lm, tokenizer=words), lm.encode(SHORT)
    pieces = spaced.stream(prompt, max_new_tokens=NEW)
    text = "".join(pieces)
    whole = np.array([*prompt, *pieces.tokens])
    assert decode(words, prompt) + text == decode(words, whole)
    assert text.startswith(" ") and len(text) == 2 * NEW
    for is_answer, expected in ((False, text), (True, text[1:])):
        found = spaced.complete([prompt], max_new_tokens=NEW, is_answer=is_answer)
        assert next(found)[1].text == expected
        pieces = spaced.stream(prompt, max_new_tokens=NEW, is_answer=is_answer)
        assert "".join(pieces) == expected


def test_pieces_are_never_empty_and_join_to_the_text(lm):
    pieces = lm.stream(SHORT, max_new_tokens=NEW, every=2)
    with pytest.raises(ValueError, match="must have been started"):
        _ = pieces.completion
    found = list(pieces)
    assert "".join(found) == lm.generate(SHORT, max_new_tokens=NEW) and all(found)
    assert list(map(len, found)) == [1, 2, 2, 1]
    done = pieces.completion
    assert (done.prompt_tokens, done.new_tokens, done.finish_reason) == (len(SHORT), NEW, "length")
    ((_, again),) = lm.complete([lm.encode(SHORT)], max_new_tokens=NEW)
    assert dataclasses.replace(again, measured_density=0.0) == dataclasses.replace(
        done, measured_density=0.0
    )
    assert 0 < done.measured_density <= 1 and pieces.ttft_s > 0 and pieces.tokens_per_s > 0


def test_every_call_draws_anew_unless_a_key_is_given(lm):
    def draw(prompts=SHORT, **options):
        return lm.generate(prompts, max_new_tokens=NEW, sampling=DRAWN, **options)

    assert len({draw() for _ in range(4)}) > 1
    assert draw(key=3) == draw(key=jax.random.key(3)) == draw(key=jax.random.PRNGKey(3))
    both = draw([SHORT, SHORT], key=3)
    assert both[0] == draw(key=3) != both[1]
    pieces = lm.stream(SHORT, max_new_tokens=NEW, sampling=DRAWN, key=3)
    assert "".join(pieces) == draw(key=3)
    with pytest.raises(ValueError, match="key must be None without sampling"):
        lm.generate(SHORT, key=3)


ASKED = ("Who walks?", "And then?", "Where?")


def anew(lm, messages, **options):
    """Answers messages from the beginning, without a cache."""
    return lm.chat(messages, max_new_tokens=NEW, **options)


def test_a_conversation_reads_only_what_is_new_and_answers_as_if_it_read_all(lm):
    talk = lm.conversation(system="Be brief.", max_new_tokens=NEW)
    for turn, text in enumerate(ASKED):
        before = list(talk.messages)
        answer = talk.send(text)
        assert answer == anew(lm, [*before, {"role": "user", "content": text}])
        assert talk.messages[-2:] == [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer},
        ]
        # Later turns read a line end and the new turn.
        written = len(f"user: {text}\nassistant: ")
        assert talk.num_read == (written + 1 if turn else len("system: Be brief.\n") + written)


def test_what_the_cache_does_not_hold_is_read_anew(lm):
    talk = lm.conversation(max_new_tokens=NEW)
    talk.send(ASKED[0])
    talk.messages[-1]["content"] = "Nobody"  # as if a template had changed the history
    answer = talk.send(ASKED[1])
    assert talk.num_read == len(
        f"user: {ASKED[0]}\nassistant: Nobody\nuser: {ASKED[1]}\nassistant: "
    )
    assert answer == anew(lm, talk.messages[:-1])


@pytest.mark.slow
def test_a_full_cache_gives_way_to_a_larger_one(lm, monkeypatch):
    monkeypatch.setattr("sketchwalk_jax.language_model.LEAST_CONVERSATION", 48)
    talk = lm.conversation(max_new_tokens=NEW)
    read, answers = [], []
    for text in ASKED:
        answers.append(talk.send(text))
        read.append(talk.num_read)
    assert read[1] > read[0] and read[2] < read[1]  # the second turn did not fit
    assert answers[-1] == anew(lm, talk.messages[:-1])


def test_who_stops_early_leaves_what_came(lm):
    talk = lm.conversation(max_new_tokens=NEW)
    pieces: Iterator[str] = talk.stream(ASKED[0], every=2)
    first = next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": first}
    assert talk.send(ASKED[1]) == anew(lm, talk.messages[:-1])


@pytest.mark.slow
def test_draws_of_a_conversation_follow_its_key(lm):
    def answers(key):
        talk = lm.conversation(max_new_tokens=NEW, sampling=DRAWN, key=key)
        return [talk.send(ASKED[0]), talk.send(ASKED[0])]

    assert answers(1) == answers(1) != answers(2)


@pytest.mark.unchecked
def test_a_conversation_without_room_or_template_is_refused(lm):
    talk = lm.conversation(max_new_tokens=NEW, max_tokens=16)
    with pytest.raises(ValueError, match="max_tokens must be at least"):
        talk.send("Who walks?")
    assert talk.messages == []
    template, lm.tokenizer.chat_template = lm.tokenizer.chat_template, None
    try:
        for call in (lm.chat, lambda text: lm.conversation().send(text)):
            with pytest.raises(ValueError, match="must have a chat template"):
                call("Hi")
    finally:
        lm.tokenizer.chat_template = template


NO_POLICY = "policy must be a policy such as SketchWalkConfig"
MISTAKES = [
    (lambda lm: lm.generate(["a", ""]), "at least one token, got none for ''"),
    (lambda lm: lm.generate("a" * 600), "context of 512 tokens, got 600"),
    (lambda lm: lm.generate(["a"], batch_size=0), "batch_size must be None or a positive integer"),
    (lambda lm: lm.generate([1, 2]), "text must be a string, got 1"),
    (lambda lm: lm.generate(np.arange(3)), "prompts must be a string or a list"),
    (lambda lm: lm.generate(b"Walk"), "prompts must be a string or a list of strings"),
    (lambda lm: lm.generate(["Walk", b"on"]), "text must be a string, got a b"),
    (lambda lm: lm.generate(None), "prompts must be a string or a list .* got None"),
    (lambda lm: lm.generate("Walk \ud800"), "valid Unicode, got a lone surrogate, .* character 5"),
    (lambda lm: lm.stream(b"Walk"), "prompt must be an integer array"),
    (lambda lm: lm.chat(3), "prompt must be a string or a list of messages"),
    (lambda lm: lm.chat(["Walk"]), "messages .* got 'Walk' at"),
    (lambda lm: next(lm.complete(["Walk"])), r"prompts\[0\] must be an integer"),
    (lambda lm: lm.with_policy("dense"), NO_POLICY),
    (lambda lm: lm.with_policy(sw.Dense), NO_POLICY),
    (lambda lm: lm.with_policy(None), NO_POLICY),
    # Refused before loading.
    (lambda lm: LanguageModel.load("nowhere", policy="dense"), NO_POLICY),
    (lambda lm: LanguageModel.load("nowhere", policy=0.2), NO_POLICY),
]


@pytest.mark.unchecked
@pytest.mark.parametrize("index", range(len(MISTAKES)))
def test_mistakes_are_named_and_not_blamed_on_files_of_the_tokenizer(lm, index):
    call, message = MISTAKES[index]
    with pytest.raises(ValueError, match=message) as raised:
        call(lm)
    assert "download" not in str(raised.value)
