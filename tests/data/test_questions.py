import calendar
import gzip
import json
import re
import sys
import unicodedata
from collections import Counter
from http import HTTPStatus

import pytest

from jaxlab.data.facts import FACT_TOPICS, fact_questions
from jaxlab.data.questions import Question, few_shot_prompt, read_questions, split_examples
from jaxlab.errors import UserError
from jaxlab.evaluation.answers import normalize_answer


def write(folder, *records):
    path = folder / "mine.jsonl"
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


PINNED = [
    "arithmetic/21+61",
    "calendar/new-year-1983",
    "letters/place-13",
    "numerals/binary-60",
    "computing/ascii-109",
    "capitals/KEN",
    "elements/symbol-Cs",
]
GOOD = {"question": " Who? ", "answers": ["Ada ", "Ada Lovelace"], "id": 7, "topic": "people"}


def test_questions_of_a_file(tmp_path):
    path = write(tmp_path, GOOD, "", {"question": "Où?", "answers": "Là", "note": 1, "id": None})
    expected = [
        Question("Who?", ("Ada", "Ada Lovelace"), "7", "people"),
        Question("Où?", ("Là",), "3"),
    ]
    assert read_questions(path) == expected
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_questions(str(packed)) == expected


BAD = [
    ("[1]", "holds an array"),
    ("{", "is not JSON"),
    ({"answers": ["x"]}, "has no field 'question'"),
    ({"question": "Who?"}, "has no field 'answers'"),
    ({"question": "Who?", "answer": "x"}, "did you mean 'answer' to be 'answers'?"),
    ({"question": 1, "answers": ["x"]}, "question must be text, not 1"),
    ({"question": " ", "answers": ["x"]}, "question is empty"),
    ({"question": "Who?", "answers": []}, "with at least one, not []"),
    ({"question": "Who?", "answers": None}, "with at least one, not None"),
    ({"question": "Who?", "answers": {"text": "x"}}, "answers must be a text or a list"),
    ({"question": "Who?", "answers": 12}, "answers must be a text or a list"),
    ({"question": "Who?", "answers": ["x", 12]}, "answers[1] must be text, not 12"),
    ({"question": "Who?", "answers": ["x", "\t"]}, "answers[1] is empty"),
    ({"question": "Who?", "answers": ""}, "answers is empty"),
    ({"question": "Who?", "answers": "\ud800"}, "a character that no text has"),
    ({"question": "Who?\0", "answers": "x"}, "a character that no text has"),
    ({**GOOD, "id": True}, "id must be a text or a whole number, not True"),
    ({**GOOD, "id": 1.5}, "id must be a text or a whole number"),
    ({**GOOD, "topic": 3}, "topic must be text"),
    (GOOD, "its id '7' was there before"),
]


@pytest.mark.parametrize(("record", "problem"), BAD)
def test_a_bad_line_is_named(tmp_path, record, problem):
    path = write(tmp_path, GOOD, record)
    with pytest.raises(UserError) as caught:
        read_questions(path)
    assert str(caught.value).startswith("data.path=mine.jsonl line 2: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_lines_can_be_passed_over(tmp_path):
    seen = []
    path = write(tmp_path, GOOD, *(record for record, _ in BAD))
    questions = read_questions(path, skip_bad=True, on_skip=lambda *place: seen.append(place))
    assert [question.id for question in questions] == ["7"]
    assert [place for place, _ in seen] == [f"mine.jsonl line {2 + i}" for i in range(len(BAD))]
    path = write(tmp_path, BAD[3][0])
    with pytest.raises(UserError, match="holds no questions; 1 bad lines were passed over"):
        read_questions(path, skip_bad=True)


def test_a_file_without_questions(tmp_path):
    with pytest.raises(UserError, match=r"mine\.jsonl: holds no questions$"):
        read_questions(write(tmp_path, "", " "))
    with pytest.raises(UserError, match="does not exist"):
        read_questions(tmp_path / "other.jsonl")


def test_a_question_is_never_empty():
    for question, answers in [(" ", ("x",)), ("Who?", ()), ("Who?", ("x", " "))]:
        with pytest.raises(ValueError, match="'a': neither it nor its answers may be empty"):
            Question(question, answers, "a")


@pytest.fixture(scope="module")
def facts():
    return fact_questions()


def test_there_are_many_facts(facts):
    counts = Counter(question.topic for question in facts)
    assert set(counts) == set(FACT_TOPICS)
    assert min(counts.values()) > 100
    assert len({question.id for question in facts}) == len(facts)
    assert len({question.question.casefold() for question in facts}) == len(facts)
    for question in facts:
        assert all(normalize_answer(answer) for answer in question.answers), question
        assert question.question.isprintable()


def test_topics_take_turns_and_more_questions_add_to_fewer(facts):
    few = fact_questions(num=50, seed=3)
    counts = Counter(question.topic for question in few)
    assert sorted(counts.values()) == [7] * 6 + [8]
    assert fact_questions(num=70, seed=3)[:50] == few
    assert fact_questions(num=50, seed=4) != few
    assert set(fact_questions(seed=3)) == set(facts)
    # What is chosen of a topic does not depend on the others.
    one = fact_questions(["letters"], num=counts["letters"], seed=3)
    assert one == [question for question in few if question.topic == "letters"]
    # Pinned: another version of Python or of a package must not change what is asked.
    assert [question.id for question in few[:7]] == PINNED


def numbers(text):
    return [int(digits) for digits in re.findall(r"\d+", text)]


def test_sums_and_dates_are_right(facts):
    operations = {
        "plus": lambda a, b: a + b,
        "minus": lambda a, b: a - b,
        "times": lambda a, b: a * b,
        "divided": lambda a, b: a % b,
        "power": lambda a, b: a**b,
    }
    checked = Counter()
    months, days = list(calendar.month_name), list(calendar.day_name)
    for question in facts:
        text, answer = question.question, question.answers[0]
        for word, operation in operations.items():
            if f" {word} " in text:
                assert int(answer) == operation(*numbers(text)), question
                checked[word] += 1
        kind, _, rest = question.id.partition("/")[2].partition("-")
        if question.topic == "calendar":
            if kind == "new":
                year = numbers(text)[1]
                assert answer == days[calendar.weekday(year, 1, 1)]
            elif kind == "year":
                assert int(answer) == 365 + calendar.isleap(numbers(text)[0])
            elif kind == "days":
                assert int(answer) == calendar.monthrange(2023, months.index(rest))[1]
            elif kind == "number":
                assert months[int(answer)] == rest
            else:
                names = days if kind == "day" else months[1:]
                where, _, name = rest.partition("-")
                step = 1 if where == "after" else -1
                assert answer == names[(names.index(name) + step) % len(names)]
            checked[kind] += 1
    assert set(checked) == {*operations, "new", "year", "days", "number", "day", "month"}


def test_codes_numerals_and_letters_are_right(facts):
    by_id = {question.id: question for question in facts}
    for question in facts:
        name = question.id.partition("/")[2]
        answer = question.answers[0]
        if name.startswith("http-"):
            assert HTTPStatus(int(answer)).phrase in question.question
        elif name.startswith("ascii-"):
            letter = chr(int(answer))
            assert f" letter {letter}," in question.question
            assert ("capital" in question.question) == letter.isupper()
        elif name.startswith(("binary-", "hexadecimal-")):
            base = 2 if name[0] == "b" else 16
            assert (
                int(answer, base) == int(question.answers[1], base) == numbers(question.question)[0]
            )
        elif re.match(r"(after|before)-.$", name):
            asked = re.search(r"(after|before) (.) in", question.question)
            assert asked is not None
            assert ord(answer) - ord(asked[2]) == (1 if asked[1] == "after" else -1)
        elif name.startswith("place-"):
            assert ord(answer) - ord("A") + 1 == numbers(question.question)[0]
    romans = {4: "IV", 9: "IX", 11: "XI", 39: "XXXIX", 88: "LXXXVIII", 144: "CXLIV", 494: "CDXCIV"}
    for number, numeral in romans.items():
        question = by_id.get(f"numerals/roman-{number}")
        assert question is None or f" {numeral}?" in question.question
    assert sum(f"numerals/roman-{number}" in by_id for number in romans) >= 4
    assert by_id["letters/greek-lambda"].question == "What is the Greek letter λ called?"
    assert by_id["letters/greek-after-rho"].answers == ("sigma", "σ")
    assert by_id["letters/greek-after-psi"].answers == ("omega", "ω")


def test_small_numbers_are_also_given_in_words(facts):
    by_id = {question.id: question.answers for question in facts}
    assert by_id["arithmetic/47%3"] == ("2", "two")
    assert by_id["calendar/days-May"] == ("31", "thirty-one")
    assert by_id["arithmetic/37-17"] == ("20", "twenty")
    assert by_id["arithmetic/13+97"] == ("110",)


def test_capitals_are_of_countries_that_have_one(facts):
    capitals = {q.id.partition("/")[2]: q for q in facts if q.topic == "capitals"}
    assert len(capitals) == 191
    assert not {"ISR", "PSE", "NRU", "TWN", "ESH", "HKG", "ATA", "SCG"} & set(capitals)
    assert capitals["BDI"].answers[0] == "Gitega"
    assert set(capitals["ZAF"].answers) == {"Pretoria", "Cape Town", "Bloemfontein"}
    assert capitals["MDA"].answers == ("Chișinău", "Chisinau")
    assert capitals["GRD"].answers == ("St. George's", "Saint George's")
    assert capitals["GBR"].question == "What is the capital of the United Kingdom?"
    assert capitals["BHS"].question == "What is the capital of the Bahamas?"
    assert capitals["FRA"].question == "What is the capital of France?"
    assert capitals["MMR"].question == "What is the capital of Myanmar?"
    for question in capitals.values():
        assert not set(question.question) & set(",;/()[]")
        assert any(answer.isascii() for answer in question.answers)
        assert all(unicodedata.is_normalized("NFC", answer) for answer in question.answers)


def test_elements_have_both_spellings(facts):
    elements = {q.id.partition("/")[2]: q for q in facts if q.topic == "elements"}
    assert len(elements) == 236
    assert elements["number-13"].answers == ("aluminum", "aluminium")
    assert elements["number-79"].answers == ("gold",)
    assert elements["symbol-W"].question == "What is the chemical symbol of tungsten?"


@pytest.mark.parametrize(
    ("topics", "num", "message"),
    [
        (["capital"], 1, "'capital' is none of .*did you mean 'capitals'"),
        ([], 1, "at least one"),
        (["letters", "letters"], 1, "none twice"),
        (["letters"], 0, "num=0: must lie in "),
        (["letters"], 1000, r"num=1000: must lie in \[1, 1"),
    ],
)
def test_misuse_is_named(topics, num, message):
    with pytest.raises(ValueError, match=message):
        fact_questions(topics, num)


@pytest.mark.parametrize(
    ("topic", "package"), [("capitals", "countryinfo"), ("elements", "periodictable")]
)
def test_a_missing_package_is_one_line(monkeypatch, topic, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as caught:
        fact_questions([topic])
    line = str(caught.value)
    assert line.startswith(f"data.topics={topic}: needs {package}: pip install 'jaxlab[facts]'")
    assert line.endswith("without a package: arithmetic, calendar, letters, numerals, computing")
    fact_questions(["letters", "computing"], 3)


def test_examples_are_not_asked(facts):
    examples, others = split_examples(facts[:100], 10, seed=1)
    assert len(examples) == 10
    assert len(others) == 90
    assert others == [question for question in facts[:100] if question not in examples]
    assert sorted(Counter(e.topic for e in examples).values()) == [1, 1, 1, 1, 2, 2, 2]
    assert split_examples(facts[:100], 10, seed=1)[0] == examples
    assert split_examples(facts[:100], 10, seed=2)[0] != examples
    assert split_examples(facts[:2], 0) == ([], facts[:2])
    twins = [Question(text, ("x",), str(i)) for i, text in enumerate(["A b?", "a  B?", "c?"])]
    shown, asked = split_examples(twins, 1)
    assert len(shown) + len(asked) == (2 if shown[0].question != "c?" else 3)
    for num in (-1, 3, 2):
        with pytest.raises(ValueError, match=f"num_examples={num}"):
            split_examples(twins, num)


def test_prompts(facts):
    examples, others = split_examples(facts[:20], 2)
    prompt = few_shot_prompt(others[0], examples, instruction="Be brief.")
    first, second = examples
    assert prompt == (
        f"Be brief.\n\nQ: {first.question}\nA: {first.answers[0]}\n\n"
        f"Q: {second.question}\nA: {second.answers[0]}\n\nQ: {others[0].question}\nA:"
    )
    assert few_shot_prompt("Who?", instruction="") == "Q: Who?\nA:"
    with pytest.raises(ValueError, match="must not be shown"):
        few_shot_prompt(examples[1].question.upper(), examples)
