"""Makes training sequences on the fly: real text with hidden sentences, and questions.

Sequences are assembled from tokens, so that one of 16,384 tokens takes about a millisecond.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from corpus import BEGIN_ID, END_ID, Pieces

# Class of a target token: ignored, text, or an answer of one of the kinds below.
IGNORED, TEXT = 0, 1
KINDS = ("code", "each", "all", *(f"value_{hops}" for hops in range(1, 7)), "vote")
CLASSES = {kind: TEXT + 1 + index for index, kind in enumerate(KINDS)}
NUM_CLASSES = TEXT + 1 + len(KINDS)
MAX_HOPS = 6

# Shares of sequences of plain text, and of the sets of sentences in other sequences.
_PLAIN_TEXT = 0.15
_SETS = {"codes": 0.35, "several": 0.12, "variables": 0.4, "votes": 0.13}
_ONE_SET = 0.6
_SHUFFLED, _NOISE = 0.08, 0.04  # shares of haystacks that are not English
_SINGLE_QUESTION = 0.15


@dataclasses.dataclass
class Question:
    """A question, its answer, and its earliest place.

    Attributes:
      tokens: The question.
      answer: The answer, with the token that ends it.
      kind: One of `KINDS`.
      after: Earliest place, as a share of the text: the place of the last sentence it needs.
    """

    tokens: np.ndarray
    answer: np.ndarray
    kind: str
    after: float


@dataclasses.dataclass
class Draft:
    """Sentences with their places (shares of the text), and questions about them."""

    places: list[float] = dataclasses.field(default_factory=list)
    sentences: list[np.ndarray] = dataclasses.field(default_factory=list)
    ignored: list[np.ndarray] = dataclasses.field(default_factory=list)
    questions: list[Question] = dataclasses.field(default_factory=list)

    def add(self, place: float, sentence: np.ndarray, is_ignored: np.ndarray) -> None:
        """Adds a sentence, with its unpredictable tokens marked."""
        self.places.append(place)
        self.sentences.append(sentence)
        self.ignored.append(is_ignored)

    def size(self) -> int:
        """Counts the tokens of all sentences and questions."""
        questions = sum(len(one.tokens) + len(one.answer) for one in self.questions)
        return sum(map(len, self.sentences)) + questions


class SequenceMaker:
    """Draws sequences of one length.

    Args:
      text: Tokens of the corpus.
      pieces: From `make_pieces`.
      hops: Shares of chains of 1, 2, ... statements.
      lists_chains: Whether the answer to a chain lists it, or is only its number.
    """

    def __init__(
        self, text: np.ndarray, pieces: Pieces, *, hops: Sequence[float], lists_chains: bool
    ) -> None:
        """Keeps the corpus and the pieces."""
        self.text = text
        self.pieces = pieces
        self.hops = hops
        self.lists_chains = lists_chains

    def draw(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws one sequence.

        Args:
          rng: Random generator.
          length: Tokens that the model reads, `T`.

        Returns:
          Tokens uint16 `[T + 1]`, the last one only a target, and the class of each target, uint8
          `[T]`: `IGNORED`, `TEXT`, or one of `CLASSES`.
        """
        draft = Draft()
        if rng.random() >= _PLAIN_TEXT:
            self._draw_sets(rng, length, draft)
            self._choose_questions(rng, length, draft)
        return self._assemble(rng, length, draft)

    def _draw_sets(self, rng: np.random.Generator, length: int, draft: Draft) -> None:
        number = 1 if rng.random() < _ONE_SET else 2
        wanted = rng.choice(list(_SETS), number, replace=False, p=list(_SETS.values()))
        # All sets share one permutation of words, so that no word has two meanings.
        self._words = iter(rng.permutation(len(self.pieces.words)))
        room = length // 2 // number
        makers: dict[str, Callable[[np.random.Generator, int, Draft], None]] = {
            "codes": self._draw_codes,
            "several": self._draw_several,
            "variables": self._draw_variables,
            "votes": self._draw_votes,
        }
        for name in wanted:
            makers[str(name)](rng, room, draft)

    def _word(self) -> np.ndarray:
        return self.pieces.words[next(self._words)]

    def _number(self, rng: np.random.Generator) -> np.ndarray:
        digits = rng.integers(0, 10, 5)
        digits[0] = rng.integers(1, 10)
        return np.concatenate([self.pieces.first_digit[digits[:1]], self.pieces.digit[digits[1:]]])

    def _fill(self, name: str, *values: np.ndarray) -> np.ndarray:
        fixed = self.pieces.fixed[name]
        parts = [fixed[0]]
        for value, after in zip(values, fixed[1:], strict=True):
            parts += [value, after]
        return np.concatenate(parts)

    def _list(self, values: Sequence[np.ndarray]) -> np.ndarray:
        comma = np.array([self.pieces.comma], np.uint16)
        return np.concatenate([x for value in values for x in (comma, value)][1:])

    def _answer(self, values: Sequence[np.ndarray]) -> np.ndarray:
        return np.append(self._fill("answer", self._list(values)), np.uint16(END_ID))

    def _state(
        self, draft: Draft, place: float, name: str, subject: np.ndarray, value: np.ndarray
    ) -> None:
        """Adds `The code of SUBJECT is VALUE.` and the like; neither can be predicted."""
        sentence = self._fill(name, subject, value)
        is_ignored = np.zeros(len(sentence), bool)
        stop = len(sentence) - len(self.pieces.fixed[name][-1])
        is_ignored[stop - len(value) : stop] = True
        draft.add(place, sentence, is_ignored)

    def _draw_codes(self, rng: np.random.Generator, room: int, draft: Draft) -> None:
        """Draws codes of many words, and questions for one word or each of several."""
        most = max(1, room // 16)
        count = int(rng.integers(1, most + 1)) if rng.random() < 0.3 else _log_uniform(rng, 1, most)
        facts = [(self._word(), self._number(rng), rng.random()) for _ in range(count)]
        for word, number, place in facts:
            self._state(draft, place, "code", word, number)
        facts = [facts[i] for i in rng.permutation(count)]
        while facts:
            several = int(rng.integers(2, 6)) if rng.random() < 0.25 else 1
            some, facts = facts[:several], facts[several:]
            words, numbers, places = zip(*some, strict=True)
            kind = "code" if len(some) == 1 else "each"
            name = f"{kind}?"
            subject = words[0] if len(some) == 1 else self._list(words)
            draft.questions.append(
                Question(self._fill(name, subject), self._answer(numbers), kind, max(places))
            )

    def _draw_several(self, rng: np.random.Generator, room: int, draft: Draft) -> None:
        """Draws words with several codes, and questions for all codes."""
        for _ in range(_log_uniform(rng, 1, max(1, room // 64))):
            word = self._word()
            places = np.sort(rng.random(int(rng.integers(2, 6))))
            numbers = [self._number(rng) for _ in places]
            for place, number in zip(places, numbers, strict=True):
                self._state(draft, float(place), "code", word, number)
            question = self._fill("all?", word)
            draft.questions.append(
                Question(question, self._answer(numbers), "all", float(places[-1]))
            )

    def _draw_variables(self, rng: np.random.Generator, room: int, draft: Draft) -> None:
        """Draws chains of variables, each set to the one before, and questions for their ends.

        Most sequences have several chains: one alone would teach to copy the only number.
        """
        size = draft.size()
        least = min(64, room)
        wanted = size + (
            _log_uniform(rng, least, room) if rng.random() < 0.5 else rng.integers(least, room + 1)
        )
        while draft.size() < wanted:
            hops = int(rng.choice(MAX_HOPS, p=self.hops)) + 1
            places = np.sort(rng.random(hops))
            number = self._number(rng)
            names, value = [], number
            for place in places:
                names.append(self._word())
                self._state(draft, float(place), "value", names[-1], value)
                value = names[-1]
            # Ask for the end of the chain, and sometimes for variables on the way.
            for hop in range(1, hops + 1):
                if hop < hops and rng.random() > 0.3:
                    continue
                question = self._fill("value?", names[hop - 1])
                before = names[: hop - 1][::-1] if self.lists_chains else []
                answer = self._answer([*before, number])
                draft.questions.append(
                    Question(question, answer, f"value_{hop}", float(places[hop - 1]))
                )

    def _draw_votes(self, rng: np.random.Generator, room: int, draft: Draft) -> None:
        """Draws votes for a few words, and one question for the word with the most."""
        most = int(rng.integers(3, max(4, min(15, room // 24))))
        words = [self._word() for _ in range(int(rng.integers(2, 8)))]
        counts = [most, *rng.integers(1, max(2, most // 2), len(words) - 1)]
        for word, count in zip(words, counts, strict=True):
            for place in rng.random(int(count)):
                sentence = self._fill("vote", word)
                is_ignored = np.zeros(len(sentence), bool)
                start = len(self.pieces.fixed["vote"][0])
                is_ignored[start : start + len(word)] = True
                draft.add(float(place), sentence, is_ignored)
        question = self.pieces.fixed["vote?"][0]
        draft.questions.append(Question(question, self._answer(words[:1]), "vote", 1.0))

    def _choose_questions(self, rng: np.random.Generator, length: int, draft: Draft) -> None:
        """Keeps as many questions as fit, or one, as in a test."""
        order = rng.permutation(len(draft.questions))
        if rng.random() < _SINGLE_QUESTION:
            order = order[:1]
        questions = [draft.questions[i] for i in order]
        draft.questions = []
        room = length - draft.size() - length // 8
        for question in questions:
            room -= len(question.tokens) + len(question.answer)
            if room >= 0:
                draft.questions.append(question)

    def _assemble(
        self, rng: np.random.Generator, length: int, draft: Draft
    ) -> tuple[np.ndarray, np.ndarray]:
        # Short sequences may have drawn too much: drop sentences, and their questions.
        while draft.size() > length - length // 8:
            draft = Draft()
        inserts = [
            (place, sentence, np.where(is_ignored, IGNORED, TEXT).astype(np.uint8))
            for place, sentence, is_ignored in zip(
                draft.places, draft.sentences, draft.ignored, strict=True
            )
        ]
        share_inside = rng.choice([0.0, 0.3, 0.8])
        for question in draft.questions:
            is_inside = question.after < 1.0 and rng.random() < share_inside
            place = rng.uniform(question.after, 1.0) if is_inside else 2.0 + rng.random()
            tokens = np.concatenate([question.tokens, question.answer])
            classes = np.full(len(tokens), TEXT, np.uint8)
            classes[len(question.tokens) :] = CLASSES[question.kind]
            inserts.append((float(place), tokens, classes))
        inserts.sort(key=lambda insert: insert[0])
        text = self._haystack(rng, length - draft.size())
        # Insert sentences at the beginnings of words.
        starts = np.append(np.flatnonzero(self.pieces.starts_word[text]), len(text))
        begin = np.array([BEGIN_ID], np.uint16)
        tokens, classes, last = [begin], [np.zeros(1, np.uint8)], 0
        for place, insert, insert_classes in inserts:
            cut = int(starts[int(place * (len(starts) - 1))]) if place < 1.0 else len(text)
            tokens += [text[last:cut], insert]
            classes += [np.full(cut - last, TEXT, np.uint8), insert_classes]
            last = cut
        tokens.append(text[last:])
        classes.append(np.full(len(text) - last, TEXT, np.uint8))
        return np.concatenate(tokens), np.concatenate(classes)[1:]

    def _haystack(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Draws text from anywhere in the corpus; sometimes shuffled, or random tokens."""
        start = int(rng.integers(0, len(self.text) - size))
        text = self.text[start : start + size]
        kind = rng.random()
        if kind < _SHUFFLED:
            cuts = np.flatnonzero(self.pieces.starts_word[text])[1:]
            words = np.split(text, cuts)
            return np.concatenate([words[i] for i in rng.permutation(len(words))])
        if kind < _SHUFFLED + _NOISE:
            return rng.integers(END_ID + 1, len(self.pieces.starts_word), size).astype(np.uint16)
        return text


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
