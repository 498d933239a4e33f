"""Closed-book questions about made-up entities, whose true answers are uncertain by design.

A world has entities, each named by two tokens, with a few candidate answers of one to three words
and a law over them: sharp for some entities, flat for others. What a model reads during training
are answers drawn from that law, frequent entities more often; the answer that counts as right is
one more draw. So a model's errors come from the law itself, and from what it has seen too rarely.
In a world with phrasings an answer is preceded by some tokens that say nothing of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import numpy as np

__all__ = ["ClosedBook", "Phrasing", "Questions", "answers_of"]

Phrasing = Literal["none", "even", "by_confidence"]
"""How answers are introduced: not at all; by one of a few phrasings, all alike; or by many for
entities whose most likely answer is right, and by one for all others."""

END, ASK = 0, 1
_FIRST_TOKEN = 2
_MAX_WORDS = 3
_PHRASE_TOKENS = 2


class Questions(NamedTuple):
    """One question for every entity.

    Attributes:
      prompts: int32 `[entity, prompt]`.
      right: the answer that counts as right, its words and then -1, int32 `[entity, 3]`.
      frequency: how often training asks for the entity, `[entity]`; sums to 1.
    """

    prompts: np.ndarray
    right: np.ndarray
    frequency: np.ndarray


@dataclasses.dataclass(frozen=True)
class ClosedBook:
    """A world of entities. Two with equal attributes are equal.

    Token 0 ends an answer and fills up rows; token 1 follows the entity's name.

    Attributes:
      seed: of the world and of the order in which training asks.
      num_entities: at most the square of half the name tokens.
      num_candidates: possible answers of an entity.
      num_words: words that answers are made of.
      phrasing: see `Phrasing`.
      num_phrasings: how many there are.
      exponent: the entity of rank r is asked for in proportion to `r ** -exponent`.
      batch_size: questions in a batch.

    Raises:
      ValueError: a number is out of its range.
    """

    seed: int
    num_entities: int = 400
    num_candidates: int = 5
    num_words: int = 24
    phrasing: Phrasing = "none"
    num_phrasings: int = 5
    exponent: float = 0.7
    batch_size: int = 256

    def __post_init__(self) -> None:
        for name in ("num_entities", "num_candidates", "num_words", "num_phrasings", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_candidates > self.num_words:
            raise ValueError(
                f"num_candidates={self.num_candidates}: must be at most num_words={self.num_words}"
            )

    @property
    def name_tokens(self) -> int:
        """Tokens of each half of a name."""
        return int(np.ceil(np.sqrt(self.num_entities)))

    @property
    def first_word(self) -> int:
        """The token of the first word; words are consecutive."""
        return _FIRST_TOKEN + 2 * self.name_tokens

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, those of phrasings included whether they are used or not."""
        return self.first_word + self.num_words + _PHRASE_TOKENS * self.num_phrasings

    @property
    def prompt_length(self) -> int:
        """Tokens of a question."""
        return 3

    @property
    def answer_length(self) -> int:
        """Tokens of the longest answer, with its phrasing and its end."""
        return _PHRASE_TOKENS + _MAX_WORDS + 1

    def questions(self) -> Questions:
        """All questions, each once."""
        world = self._world
        rows = np.arange(self.num_entities)
        right = world.candidates[rows, world.right]
        return Questions(self._prompts(rows), right, world.frequency)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """A training batch, a pure function of (seed, step).

        Returns:
          `tokens`, int32 `[batch, prompt_length + answer_length]`, and `weights`, float32 of the
          same shape less the first column: 1 where the next token belongs to an answer.
        """
        world = self._world
        rng = np.random.default_rng((1, self.seed, step))
        entities = rng.choice(self.num_entities, self.batch_size, p=world.frequency)
        draws = rng.random(self.batch_size)[:, None]
        chosen = (draws > np.cumsum(world.law[entities], axis=1)[:, :-1]).sum(axis=1)
        answers = world.candidates[entities, chosen]
        phrases = self._phrases(rng, entities)
        tokens = np.concatenate([self._prompts(entities), self._rows(phrases, answers)], axis=1)
        lengths = (phrases >= 0).sum(axis=1) + (answers >= 0).sum(axis=1) + 1
        places = np.arange(1, tokens.shape[1]) - self.prompt_length
        weights = (places >= 0) & (places < lengths[:, None])
        return {"tokens": tokens, "weights": weights.astype(np.float32)}

    @functools.cached_property
    def _world(self) -> _World:
        rng = np.random.default_rng((0, self.seed))
        size, candidates = self.num_entities, self.num_candidates
        lengths = rng.integers(1, _MAX_WORDS + 1, (size, candidates))
        # The first words of an entity's candidates differ, and so do the candidates.
        first = np.argsort(rng.random((size, self.num_words)), axis=1)[:, :candidates]
        rest = rng.integers(0, self.num_words, (size, candidates, _MAX_WORDS - 1))
        words = self.first_word + np.concatenate([first[..., None], rest], axis=2)
        words = np.where(np.arange(_MAX_WORDS) < lengths[..., None], words, -1)
        concentration = np.exp(rng.uniform(-3, 1, size))
        law = np.stack([rng.dirichlet(np.full(candidates, c)) for c in concentration])
        right = (rng.random((size, 1)) > np.cumsum(law, axis=1)[:, :-1]).sum(axis=1)
        ranks = 1 + rng.permutation(size)
        frequency = ranks**-self.exponent
        many = right == law.argmax(axis=1)
        return _World(words.astype(np.int32), law, right, frequency / frequency.sum(), many)

    def _prompts(self, entities: np.ndarray) -> np.ndarray:
        half = self.name_tokens
        names = np.stack([entities // half, half + entities % half], axis=1) + _FIRST_TOKEN
        ask = np.full((len(entities), 1), ASK)
        return np.concatenate([names, ask], axis=1).astype(np.int32)

    def _phrases(self, rng: np.random.Generator, entities: np.ndarray) -> np.ndarray:
        """The tokens before each answer, -1 where there are none: `[batch, 2]`."""
        world = self._world
        number = rng.integers(0, self.num_phrasings, len(entities))
        if self.phrasing == "none":
            return np.full((len(entities), _PHRASE_TOKENS), -1)
        if self.phrasing == "by_confidence":
            number = np.where(world.many[entities], number, 0)
        start = self.first_word + self.num_words + _PHRASE_TOKENS * number
        return start[:, None] + np.arange(_PHRASE_TOKENS)

    def _rows(self, phrases: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Phrases and answers without gaps, filled up with the end's token."""
        joined = np.concatenate([phrases, answers, np.full((len(answers), 1), -1)], axis=1)
        order = np.argsort(joined < 0, axis=1, kind="stable")
        packed = np.take_along_axis(joined, order, axis=1)
        return np.where(packed < 0, END, packed).astype(np.int32)


class _World(NamedTuple):
    """What is drawn once.

    Attributes:
      candidates: words of each candidate, then -1, `[entity, candidate, 3]`.
      law: of the candidates, `[entity, candidate]`.
      right: which candidate is right, `[entity]`.
      frequency: of the entities.
      many: whether the most likely candidate is the right one.
    """

    candidates: np.ndarray
    law: np.ndarray
    right: np.ndarray
    frequency: np.ndarray
    many: np.ndarray


def answers_of(tokens: np.ndarray, world: ClosedBook) -> np.ndarray:
    """The words of generated texts, without phrasing and end.

    Args:
      tokens: `[..., new]`, 0 behind the end.
      world: whose tokens they are.

    Returns:
      int32 `[..., 3]`, filled up with -1, and all -2 where a text is no answer: it has no word,
      more than three, or another token among them or behind them.
    """
    flat = np.asarray(tokens).reshape(-1, np.shape(tokens)[-1])
    found = np.full((len(flat), _MAX_WORDS), -2, np.int32)
    words = (flat >= world.first_word) & (flat < world.first_word + world.num_words)
    for row, (text, is_word) in enumerate(zip(flat, words, strict=True)):
        ends = np.flatnonzero(text == END)
        body = slice(0, ends[0] if len(ends) else len(text))
        places = np.flatnonzero(is_word[body])
        size = len(places)
        if 1 <= size <= _MAX_WORDS and places[-1] == len(text[body]) - 1 == places[0] + size - 1:
            found[row] = -1
            found[row, :size] = text[places]
    return found.reshape(*np.shape(tokens)[:-1], _MAX_WORDS)
