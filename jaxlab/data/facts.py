"""Questions about facts that can be checked by computing or by looking them up in a package.

What another version of Python or of a package could change is left out or given with all its
forms, so that the questions stay what they are.
"""

from __future__ import annotations

import datetime
import difflib
import hashlib
import importlib
import itertools
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from jaxlab.data.questions import Question
from jaxlab.errors import UserError

__all__ = ["FACT_TOPICS", "fact_questions"]

_Fact = tuple[str, str, tuple[str, ...]]  # the question's name within its topic, itself, answers

_MONTH_NAMES = (
    "January February March April May June July August September October November December"
)
_WEEKDAY_NAMES = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_GREEK = "αβγδεζηθικλμνξοπρστυφχψω"
_SMALL_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ROMAN_VALUES = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
_ROMAN_SIGNS = "M CM D CD C XC L XL X IX V IV I"
# Renamed in Python 3.13.
_RENAMED_STATUSES = frozenset({413, 414, 416, 422})
_OTHER_ELEMENT_NAMES = {"aluminum": "aluminium", "cesium": "caesium", "sulfur": "sulphur"}

# The members of the United Nations by ISO 3166, but for Israel, whose capital is disputed, and
# Nauru, which has none. Other entries of the package are territories and former states.
_COUNTRIES = """
    AFG AGO ALB AND ARE ARG ARM ATG AUS AUT AZE BDI BEL BEN BFA BGD BGR BHR BHS BIH BLR BLZ BOL
    BRA BRB BRN BTN BWA CAF CAN CHE CHL CHN CIV CMR COD COG COL COM CPV CRI CUB CYP CZE DEU DJI
    DMA DNK DOM DZA ECU EGY ERI ESP EST ETH FIN FJI FRA FSM GAB GBR GEO GHA GIN GMB GNB GNQ GRC
    GRD GTM GUY HND HRV HTI HUN IDN IND IRL IRN IRQ ISL ITA JAM JOR JPN KAZ KEN KGZ KHM KIR KNA
    KOR KWT LAO LBN LBR LBY LCA LIE LKA LSO LTU LUX LVA MAR MCO MDA MDG MDV MEX MHL MKD MLI MLT
    MMR MNE MNG MOZ MRT MUS MWI MYS NAM NER NGA NIC NLD NOR NPL NZL OMN PAK PAN PER PHL PLW PNG
    POL PRK PRT PRY QAT ROU RUS RWA SAU SDN SEN SGP SLB SLE SLV SMR SOM SRB SSD STP SUR SVK SVN
    SWE SWZ SYC SYR TCD TGO THA TJK TKM TLS TON TTO TUN TUR TUV TZA UGA UKR URY USA UZB VCT VEN
    VNM VUT WSM YEM ZAF ZMB ZWE
"""
_COUNTRY_NAMES = {"MKD": "North Macedonia", "MMR": "Myanmar", "SWZ": "Eswatini"}
# Where the package names an old capital or one of several, and where spellings differ.
_CAPITALS = {
    "BDI": ("Gitega", "Bujumbura"),
    "BEN": ("Porto-Novo", "Cotonou"),
    "BOL": ("Sucre", "La Paz"),
    "CHE": ("Bern", "Berne"),
    "DJI": ("Djibouti", "Djibouti City"),
    "GNQ": ("Malabo", "Ciudad de la Paz"),
    "KAZ": ("Astana", "Nur-Sultan"),
    "KIR": ("South Tarawa", "Tarawa"),
    "KWT": ("Kuwait City", "Kuwait"),
    "LKA": ("Sri Jayawardenepura Kotte", "Kotte", "Colombo"),
    "LUX": ("Luxembourg", "Luxembourg City"),
    "MMR": ("Naypyidaw", "Nay Pyi Taw"),
    "MNG": ("Ulaanbaatar", "Ulan Bator"),
    "PLW": ("Ngerulmud", "Melekeok"),
    "SMR": ("San Marino", "City of San Marino"),
    "SWZ": ("Mbabane", "Lobamba"),
    "TON": ("Nuku'alofa", "Nukuʻalofa"),
    "UKR": ("Kyiv", "Kiev"),
    "USA": ("Washington", "Washington, D.C."),
    "ZAF": ("Pretoria", "Cape Town", "Bloemfontein"),
}
_WITH_ARTICLE = re.compile(
    r"^(United|Democratic|Republic of|Federated)|(Republic|Islands)$"
    r"|^(Bahamas|Comoros|Gambia|Maldives|Netherlands|Philippines)$"
)


def fact_questions(
    topics: Sequence[str] | None = None, num: int | None = None, *, seed: int = 0
) -> list[Question]:
    """Short-answer questions about facts, with all accepted answers.

    Topics take turns, so any number of questions is spread evenly over them until one has no more.
    A larger `num` adds questions at the end. Capitals come from `countryinfo`, elements from
    `periodictable` (`pip install 'jaxlab[facts]'`).

    Args:
      topics: out of `FACT_TOPICS`, all by default.
      num: questions, at least 1; by default all there are, more than 100 of each topic.
      seed: which questions of a topic come first. Each question's place follows from the seed and
        its own id, so the choice does not depend on what else there is.

    Raises:
      ValueError: an unknown topic, one that is named twice or none at all, or there are not so
        many questions.
      UserError: the package of a topic is missing.
    """
    names = tuple(FACT_TOPICS if topics is None else topics)
    for name in names:
        if name not in _TOPICS:
            near = difflib.get_close_matches(str(name), FACT_TOPICS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"topics: {name!r} is none of {', '.join(FACT_TOPICS)}{hint}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"topics={list(names)}: must be at least one, and none twice")
    pools = [sorted(_questions(name), key=lambda item: _place(seed, item)) for name in names]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*pools))
    mixed = [question for question in turns if question is not None]
    if num is not None and not 1 <= num <= len(mixed):
        raise ValueError(f"num={num}: must lie in [1, {len(mixed)}] for these topics")
    return mixed[:num]


def _questions(topic: str) -> list[Question]:
    return [
        Question(text, tuple(dict.fromkeys(answers)), f"{topic}/{name}", topic)
        for name, text, answers in _TOPICS[topic]()
    ]


def _place(seed: int, question: Question) -> bytes:
    return hashlib.sha256(f"{seed}/{question.id}".encode()).digest()


def _arithmetic() -> Iterator[_Fact]:
    for a, b in itertools.combinations_with_replacement(range(13, 100, 4), 2):
        yield f"{a}+{b}", f"What is {a} plus {b}?", _number(a + b)
        if a < b:
            yield f"{b}-{a}", f"What is {b} minus {a}?", _number(b - a)
    for a, b in itertools.product(range(3, 20), range(13, 40, 2)):
        yield f"{a}*{b}", f"What is {a} times {b}?", _number(a * b)
    for a, b in itertools.product(range(40, 200, 7), range(3, 14)):
        text = f"What is the remainder when {a} is divided by {b}?"
        yield f"{a}%{b}", text, _number(a % b)


def _calendar() -> Iterator[_Fact]:
    months, weekdays = _MONTH_NAMES.split(), _WEEKDAY_NAMES.split()
    for kind, names, group in (("month", months, "month"), ("day", weekdays, "day of the week")):
        for before, name in zip(names, names[1:] + names[:1], strict=True):
            yield f"{kind}-after-{before}", f"Which {group} comes after {before}?", (name,)
            yield f"{kind}-before-{name}", f"Which {group} comes before {name}?", (before,)
    for number, name in enumerate(months, start=1):
        days = (datetime.date(2023 + number // 12, number % 12 + 1, 1)).toordinal()
        days -= datetime.date(2023, number, 1).toordinal()
        when = " in a common year" if name == "February" else ""
        yield f"days-{name}", f"How many days does {name} have{when}?", _number(days)
        yield f"number-{name}", f"Which month of the year is {name}, as a number?", _number(number)
    for year in range(1800, 2025, 5):
        first, last = datetime.date(year, 1, 1), datetime.date(year, 12, 31)
        text = f"How many days did the year {year} have?"
        yield f"year-{year}", text, (str((last - first).days + 1),)
    for year in range(1950, 2025):
        weekday = weekdays[datetime.date(year, 1, 1).weekday()]
        yield f"new-year-{year}", f"Which day of the week was 1 January {year}?", (weekday,)


def _letters() -> Iterator[_Fact]:
    letters = string.ascii_uppercase
    # A is no answer to anything, here or elsewhere: where articles do not count, it is empty.
    for number, letter in enumerate(letters[1:], start=2):
        before = letters[number - 2]
        text = f"Which letter comes after {before} in the English alphabet?"
        yield f"after-{before}", text, (letter,)
        text = f"Which letter has place {number} in the English alphabet?"
        yield f"place-{number}", text, (letter,)
        if before != "A":
            text = f"Which letter comes before {letter} in the English alphabet?"
            yield f"before-{letter}", text, (before,)
    greek = [unicodedata.name(letter).rpartition(" ")[2].lower() for letter in _GREEK]
    # Unicode has a spelling of its own.
    greek = ["lambda" if name == "lamda" else name for name in greek]
    for letter, name in zip(_GREEK, greek, strict=True):
        yield f"greek-{name}", f"What is the Greek letter {letter} called?", (name,)
    for name, letter, before in zip(greek[1:], _GREEK[1:], greek, strict=False):
        text = f"Which letter comes after {before} in the Greek alphabet?"
        yield f"greek-after-{before}", text, (name, letter)


def _numerals() -> Iterator[_Fact]:
    for number in range(4, 500, 7):
        numeral, rest = "", number
        for value, sign in zip(_ROMAN_VALUES, _ROMAN_SIGNS.split(), strict=True):
            count, rest = divmod(rest, value)
            numeral += sign * count
        yield f"roman-{number}", f"Which number is the Roman numeral {numeral}?", _number(number)
    for number in range(4, 64):
        answers = (f"{number:b}", f"0b{number:b}")
        yield f"binary-{number}", f"What is the decimal number {number} in binary?", answers
    for number in range(15, 256, 5):
        answers = (f"{number:X}", f"0x{number:X}")
        text = f"What is the decimal number {number} in hexadecimal?"
        yield f"hexadecimal-{number}", text, answers


def _computing() -> Iterator[_Fact]:
    for status in HTTPStatus:
        if status not in _RENAMED_STATUSES:
            text = f"Which HTTP status code means '{status.phrase}'?"
            yield f"http-{status.value}", text, (str(status.value),)
    for letter in string.ascii_letters:
        case = "capital" if letter.isupper() else "small"
        text = f"What is the ASCII code of the {case} letter {letter}, in decimal?"
        yield f"ascii-{ord(letter)}", text, (str(ord(letter)),)
    for power in range(3, 21):
        yield f"power-{power}", f"What is 2 to the power of {power}?", _number(2**power)


def _capitals() -> Iterator[_Fact]:
    wanted = set(_COUNTRIES.split())
    for country in _package("countryinfo", "capitals").all_countries():
        entry = country.info()
        code = entry["ISO"]["alpha3"] if entry.get("ISO") else ""
        if code not in wanted:
            continue
        capitals = _CAPITALS.get(code, (entry.get("capital"),))
        if not isinstance(capitals[0], str):
            continue
        wanted.remove(code)  # some have two entries
        name = (_COUNTRY_NAMES.get(code) or entry["name"]).removeprefix("The ")
        article = "the " if _WITH_ARTICLE.search(name) else ""
        yield code, f"What is the capital of {article}{name}?", tuple(_spellings(capitals))


def _spellings(names: Iterable[str]) -> Iterator[str]:
    """Each name, also without accents and with Saint in full or short."""
    for name in names:
        plain = unicodedata.normalize("NFD", name).encode("ascii", "ignore").decode()
        yield name
        yield plain
        for long, short in (("Saint ", "St. "), ("St. ", "Saint ")):
            if plain.startswith(long):
                yield short + plain.removeprefix(long)


def _elements() -> Iterator[_Fact]:
    for element in _package("periodictable", "elements").elements:
        if element.number < 1:  # the neutron
            continue
        name, symbol = element.name, element.symbol
        names = (name, *filter(None, [_OTHER_ELEMENT_NAMES.get(name)]))
        yield f"symbol-{symbol}", f"What is the chemical symbol of {name}?", (symbol,)
        text = f"Which chemical element has the atomic number {element.number}?"
        yield f"number-{element.number}", text, names


def _number(value: int) -> tuple[str, ...]:
    """A number in digits, and a small one also in words."""
    if value >= 100:
        return (str(value),)
    tens, ones = divmod(value, 10)
    small = _SMALL_NUMBERS.split()
    if value < len(small):
        words = small[value]
    else:
        words = _TENS.split()[tens - 2] + (f"-{small[ones]}" if ones else "")
    return str(value), words


def _package(name: str, topic: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        others = ", ".join(other for other in FACT_TOPICS if other not in ("capitals", "elements"))
        raise UserError(
            "data.topics",
            topic,
            f"needs {name}: pip install 'jaxlab[facts]'; topics without a package: {others}",
        ) from error


_TOPICS: dict[str, Callable[[], Iterator[_Fact]]] = {
    "arithmetic": _arithmetic,
    "calendar": _calendar,
    "letters": _letters,
    "numerals": _numerals,
    "computing": _computing,
    "capitals": _capitals,
    "elements": _elements,
}
FACT_TOPICS = tuple(_TOPICS)
