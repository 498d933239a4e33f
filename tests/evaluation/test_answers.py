import re
import string
import unicodedata
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.evaluation.answers import exact_match, fold_accents, normalize_answer, squad_f1

FEW = settings(max_examples=50, deadline=None)
WORDS = ("the", "a", "an", "Paris", "paris,", "city", "of", "1,000", "U.S.", "théâtre")
words = st.lists(st.sampled_from(WORDS))
sentences = words.map(" ".join)


def official_words(text: str) -> list[str]:
    """SQuAD's rule, in its order."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


@FEW
@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])) | sentences)
def test_ascii_follows_the_rule(text):
    assert normalize_answer(text).split() == official_words(text)


@FEW
@given(st.text())
def test_normal_forms_stay_and_do_not_depend_on_composition(text):
    normal = normalize_answer(text)
    assert normalize_answer(normal) == normal
    for form in ("NFC", "NFD"):
        assert normalize_answer(unicodedata.normalize(form, text)) == normal
    assert exact_match(f" {text}! ", text)


@FEW
@given(sentences, sentences)
def test_f1_is_that_of_precision_and_recall(prediction, reference):
    given_words, wanted = official_words(prediction), official_words(reference)
    common = sum((Counter(given_words) & Counter(wanted)).values())
    if not given_words or not wanted:
        expected = float(given_words == wanted)
    elif not common:
        expected = 0.0
    else:
        precision, recall = common / len(given_words), common / len(wanted)
        expected = 2 * precision * recall / (precision + recall)
    assert squad_f1(prediction, [reference]) == pytest.approx(expected)
    assert squad_f1(prediction, [reference]) == squad_f1(reference, prediction)
    assert (squad_f1(prediction, reference) == 1) >= exact_match(prediction, reference)


def test_the_best_reference_counts():
    assert squad_f1("Paris", ["London", "Paris, France"]) == pytest.approx(2 / 3)
    assert exact_match("the U.S.", ["USA", "US"])
    assert not exact_match("us all", ["USA", "US"])
    assert not exact_match("", "US")
    assert exact_match("", ["the"])  # as in SQuAD, whose empty reference means no answer
    assert squad_f1("", "a") == 1
    assert squad_f1("", "b") == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("“Müller’s” — Café", "müllers CAFE\u0301"),
        ("STRASSE", "straße"),
        ("¿Dónde?", "dónde"),
        ("東京。", "東京"),
        ("Ⅷ\u00a0x", "ⅷ x"),
    ],
)
def test_unicode_is_compared_as_one_expects(one, other):
    assert normalize_answer(one) == normalize_answer(other)


def test_accents_go_and_other_marks_stay():
    assert (
        fold_accents("Chișinău, São Tomé, Zürich, Hà Nội") == "Chisinau, Sao Tome, Zurich, Ha Noi"
    )
    for text in ("がか", "की", "บ้าน", "ålesund"[1:]):
        assert fold_accents(text) == text
    assert normalize_answer("café") != normalize_answer("cafe")


@pytest.mark.parametrize("function", [exact_match, squad_f1])
def test_there_must_be_a_reference(function):
    with pytest.raises(ValueError, match="at least one"):
        function("x", [])
