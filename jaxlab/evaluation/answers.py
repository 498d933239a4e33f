"""Comparing short answers as text, by the rules of SQuAD.

Case, punctuation, articles (a, an, the) and white space do not count. Beyond ASCII the rules go
on as one expects: Unicode's punctuation is punctuation, and letters are equal in composed and
decomposed form.
"""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

__all__ = ["exact_match", "fold_accents", "normalize_answer", "squad_f1"]

_ARTICLES = frozenset({"a", "an", "the"})
_PUNCTUATION = frozenset(string.punctuation)
# Combining classes from here on are marks above, below or attached to a letter. Lower ones are
# vowels, tones and voicing, without which many scripts spell other words.
_FIRST_ACCENT_CLASS = 200


def normalize_answer(text: str) -> str:
    """What is compared of an answer: case-folded words without punctuation and articles.

    On ASCII this is SQuAD's own rule, with its consequences: signs and points of numbers are
    punctuation too (`-5` is `5`, `3.14` is `314`), and an answer that is only an article is empty.

    Example:
      >>> normalize_answer("The  Café “Müller”, Straße 5!")
      'café müller strasse 5'
    """
    folded = unicodedata.normalize("NFD", text).casefold()
    kept = "".join(letter for letter in folded if not _is_punctuation(letter))
    words = unicodedata.normalize("NFC", kept).split()
    return " ".join(word for word in words if word not in _ARTICLES)


def fold_accents(text: str) -> str:
    """The text without the accents of its letters: `Chișinău` becomes `Chisinau`.

    Marks that make another letter of a script without accents (vowel signs, voicing) stay.
    """
    letters = unicodedata.normalize("NFD", text)
    kept = (mark for mark in letters if unicodedata.combining(mark) < _FIRST_ACCENT_CLASS)
    return unicodedata.normalize("NFC", "".join(kept))


def exact_match(prediction: str, references: str | Sequence[str]) -> bool:
    """Whether the prediction equals a reference after `normalize_answer`.

    Args:
      prediction: the answer.
      references: accepted answers, or a single one.

    Raises:
      ValueError: there is no reference.
    """
    given = normalize_answer(prediction)
    return any(given == normalize_answer(reference) for reference in _several(references))


def squad_f1(prediction: str, references: str | Sequence[str]) -> float:
    """The largest F1 of words in common with a reference, by the rules of SQuAD.

    Words are those of `normalize_answer` and count as often as they occur. Where one side has no
    words, F1 is 1 if the other has none either, else 0.

    Args:
      prediction: the answer.
      references: accepted answers, or a single one.

    Returns:
      In [0, 1].

    Raises:
      ValueError: there is no reference.

    Source: Rajpurkar et al. 2016 and 2018 (SQuAD 1.1 and 2.0).

    Example:
      >>> squad_f1("the city of Paris", ["Paris", "Paris, France"])
      0.5
    """
    given = normalize_answer(prediction).split()
    return max(_f1(given, normalize_answer(text).split()) for text in _several(references))


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted))


def _is_punctuation(letter: str) -> bool:
    return letter in _PUNCTUATION or unicodedata.category(letter).startswith("P")


def _several(references: str | Sequence[str]) -> Sequence[str]:
    if isinstance(references, str):
        return (references,)
    if not len(references):
        raise ValueError("references=[]: there must be at least one")
    return references
