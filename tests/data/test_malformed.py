"""Malformed input of every kind: one line that names file, place and what is allowed."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxlab.data.corpora import load_corpus
from jaxlab.data.readers import read_documents
from jaxlab.data.text import Document
from jaxlab.data.tokenizers import BpeTokenizer, ByteTokenizer
from jaxlab.errors import UserError

Attempt = Callable[..., object]

GOOD = '{"text": "good"}\n'
NOISE = random.Random(0).randbytes(5000).replace(b"\xff\xfe", b"..")
MANY = gzip.compress("".join(f'{{"text": "line {number}"}}\n' for number in range(3000)).encode())
BOOK = gzip.compress("".join(f"line {number}\n" for number in range(9000)).encode())


class Case(NamedTuple):
    """A malformed input.

    Attributes:
      name: of the test.
      make: writes it into a folder and returns the attempt to use it, which takes settings.
      where: how the message starts; `{folder}` stands for the folder.
      words: what else it says.
      skipped: places that are passed over on request; None where it stays an error even beside
        good files.
    """

    name: str
    make: Callable[[Path], Attempt]
    where: str
    words: str
    skipped: int | None = 1


def load(path: os.PathLike[str] | str, **settings: object) -> Attempt:
    def attempt(**more: object) -> object:
        return load_corpus(path, **{"tokenizer": ByteTokenizer(), **settings, **more})  # pyright: ignore

    return attempt


def file(name: str, content: bytes | str, **settings: object) -> Callable[[Path], Attempt]:
    """A file with this content, loaded as a corpus."""

    def make(folder: Path) -> Attempt:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load(path, **settings)

    return make


def line(name: str, content: bytes | str, words: str, number: int = 2) -> Case:
    """A bad line of JSON after a good one."""
    content = content.encode() if isinstance(content, str) else content
    where = f"data.path=a.jsonl line {number}: "
    return Case(name, file("a.jsonl", GOOD.encode() + content), where, words)


def table(make_column: Callable[[Any], object], **settings: object) -> Callable[[Path], Attempt]:
    """A Parquet file with one column `text`, loaded as a corpus."""

    def make(folder: Path) -> Attempt:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
        columns = {"text": make_column(arrow), "id": [1, 2, 3]}
        parquet.write_table(arrow.table(columns), folder / "a.parquet")
        return load(folder / "a.parquet", **settings)

    return make


def cut_table(folder: Path) -> Attempt:
    attempt = table(lambda arrow: ["a", "b", "c"])(folder)
    content = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(content[: len(content) // 2])
    return attempt


def damaged_table(folder: Path) -> Attempt:
    attempt = table(lambda arrow: ["a" * 99, "b" * 99, "c" * 99])(folder)
    content = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(content[:4] + bytes(200) + content[204:])
    return attempt


def path(place: str, prepare: Callable[[Path], object] = lambda folder: None, **settings: object):
    """A path below the folder."""

    def make(folder: Path) -> Attempt:
        prepare(folder)
        return load(f"{folder}/{place}", **settings)

    return make


def special(create: Callable[[Path], object]) -> Callable[[Path], Attempt]:
    """A folder with this one entry."""

    def make(folder: Path) -> Attempt:
        create(folder / "entry")
        return load(folder)

    return make


def unix_socket(entry: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(entry.name)  # the whole path may be too long for an address


def tokenizer(content: bytes | str) -> Callable[[Path], Attempt]:
    def make(folder: Path) -> Attempt:
        target = folder / "tokenizer.json"
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        return lambda **settings: BpeTokenizer.load(target)

    return make


def training(vocab_size: object) -> Callable[[Path], Attempt]:
    documents = [Document("a", b"some text")]
    return lambda folder: lambda **settings: BpeTokenizer.train(documents, vocab_size)  # pyright: ignore


def long_line(folder: Path) -> Attempt:
    with open(folder / "a.jsonl", "wb") as target:
        target.write(b"[" + b'"word", ' * 6_250_000)
    return load(folder / "a.jsonl")


COMPRESSED = [
    Case(
        f"gzip cut after {kept} bytes",
        file("a.txt.gz", BOOK[:kept]),
        "data.path=a.txt.gz",
        "is cut off: its gzip data have no end",
    )
    for kept in (3, 5, 10, 5000, len(BOOK) - 8, len(BOOK) - 1)
] + [
    Case(
        "lines of gzip cut in the middle",
        file("a.jsonl.gz", MANY[: len(MANY) // 2]),
        "data.path=a.jsonl.gz line 1",
        "is cut off: its gzip data have no end",
    ),
    Case(
        "lines of gzip cut at the end",
        file("a.jsonl.gz", MANY[:-8]),
        "data.path=a.jsonl.gz line 3001: ",
        "is cut off: its gzip data have no end",
    ),
    Case("no gzip", file("a.txt.gz", "text"), "data.path=a.txt.gz: ", "is not gzip data"),
    Case("no gzip of lines", file("a.jsonl.gz", GOOD), "data.path=a.jsonl.gz: ", "is not gzip"),
    Case("noise as gzip", file("a.ndjson.gz", NOISE), "data.path=a.ndjson.gz: ", "is not gzip"),
    Case(
        "gzip with a wrong checksum",
        file("a.txt.gz", BOOK[:-8] + bytes(8)),
        "data.path=a.txt.gz line 9001: ",
        "checksum",
    ),
    Case(
        "gzip with a flipped byte",
        file("a.txt.gz", BOOK[:200] + bytes([BOOK[200] ^ 255]) + BOOK[201:]),
        "data.path=a.txt.gz",
        "is damaged: its gzip",
    ),
    Case(
        "gzip with something after it",
        file("a.txt.gz", BOOK + b"more"),
        "data.path=a.txt.gz line 9001: ",
        "what follows",
    ),
    Case(
        "gzip under another name",
        file("a.txt", BOOK),
        "data.path=a.txt: ",
        "is gzip data; allowed: names that end in .txt.gz",
    ),
    Case(
        "gzip that holds latin-1",
        file("a.txt.gz", gzip.compress(b"one\ncaf\xe9\n")),
        "data.path=a.txt.gz line 2: ",
        "byte 0xe9 is not UTF-8",
    ),
]

ENCODINGS = [
    Case(
        "latin-1",
        file("a.txt", "one\r\ntwo\rcafé".encode("latin-1")),
        "data.path=a.txt line 3: ",
        "byte 0xe9 is not UTF-8; allowed: UTF-8",
    ),
    Case(
        "a character cut off", file("a.txt", "né".encode()[:2]), "data.path=a.txt line 1: ", "0xc3"
    ),
    Case("UTF-16", file("a.txt", "text".encode("utf-16")), "data.path=a.txt: ", "is UTF-16"),
    Case(
        "UTF-16 of lines",
        file("a.jsonl", b"\xfe\xff" + GOOD.encode("utf-16-be")),
        "data.path=a.jsonl: ",
        "is UTF-16",
    ),
    Case(
        "UTF-16 without its mark",
        file("a.txt", "a\ntext".encode("utf-16-le")),
        "data.path=a.txt line 1: ",
        "holds a NUL byte",
    ),
    line(
        "lines of UTF-16 without its mark", GOOD.encode("utf-16-le"), "it holds NUL bytes"
    )._replace(skipped=2),
    Case("UTF-32", file("a.md", "text".encode("utf-32")), "data.path=a.md: ", "UTF-16 or UTF-32"),
    Case("overlong", file("a.txt", b"a\n\xc0\xaf"), "data.path=a.txt line 2: ", "byte 0xc0"),
    Case(
        "an encoded surrogate", file("a.txt", b"\xed\xa0\x80"), "data.path=a.txt line 1: ", "0xed"
    ),
    line(
        "latin-1 in JSON", b'{"text": "caf\xe9"}', "byte 0xe9 is not UTF-8; allowed: UTF-8 (column"
    ),
    line("overlong in JSON", b'{"text": "\xc0\xaf"}', "byte 0xc0 is not UTF-8"),
    line("an encoded surrogate in JSON", b'{"text": "\xed\xb0\x80"}', "byte 0xed is not UTF-8"),
    line("half a pair", r'{"text": "a \ud83d b"}', r"half of a surrogate pair, \ud83d"),
    line("the other half", r'{"text": "\ude00"}', r"half of a surrogate pair, \ude00"),
    line("a pair reversed", r'{"text": "\ude00\ud83d"}', "half of a surrogate pair"),
    line("an escaped NUL", r'{"text": "a\u0000b"}', "holds a NUL character"),
    Case("NUL bytes", file("a.bin", bytes(5000)), "data.path=a.bin line 1: ", "NUL byte"),
    Case(
        "a program", file("prog", b"\x7fELF\x02\x01\x01\0"), "data.path=prog line 1: ", "NUL byte"
    ),
    Case("noise", file("a.txt", NOISE), "data.path=a.txt line 1: ", "is not UTF-8"),
    Case(
        "lines of noise",
        file("a.jsonl", NOISE),
        "data.path=a.jsonl line 1: ",
        "is not UTF-8",
        sum(bool(part.strip()) for part in NOISE.splitlines()),
    ),
    line("NUL bytes as a line", bytes(100), "is not JSON: Expecting value, column 1 (it holds NUL"),
]

FIELDS = [
    line("no field", '{"body": "b", "id": 1}', "has no field 'text'; allowed: 'body', 'id'"),
    line("a near field", '{"Text": "b"}', "allowed: 'Text'; did you mean data.field=Text?"),
    line("another near field", '{"texts": "b"}', "did you mean data.field=texts?"),
    line("an empty object", "{}", "allowed: none, there are no fields"),
    line("a number", '{"text": 1}', "field 'text' holds a number; allowed: a string"),
    line("a fraction", '{"text": 1.5}', "field 'text' holds a number; allowed: a string"),
    line("null", '{"text": null}', "field 'text' holds null; allowed: a string"),
    line("a truth value", '{"text": true}', "field 'text' holds true or false; allowed: a string"),
    line("a list", '{"text": ["a"]}', "field 'text' holds an array; allowed: a string"),
    line("an object", '{"text": {"a": 1}}', "field 'text' holds an object; allowed: a string"),
    line("many fields", json.dumps({f"x{n}": n for n in range(20)}), "'x7', ..."),
    line("fields of strange names", r'{"a\nb": 1, "\u001b[2J": 2}', r"allowed: 'a\nb', '\x1b[2J'"),
    Case(
        "a field that was mistyped",
        file("a.jsonl", GOOD, field="tex"),
        "data.path=a.jsonl line 1: ",
        "has no field 'tex'; allowed: 'text'; did you mean data.field=text?",
        None,
    ),
    Case(
        "no name of a field", file("a.jsonl", GOOD, field=""), "data.field='': ", "is empty", None
    ),
]

LINES = [
    line("an array", '["text"]', "holds an array; allowed: one JSON object a line"),
    line("a string", '"text"', "holds a string; allowed: one JSON object a line"),
    line("a bare number", "3", "holds a number; allowed: one JSON object a line"),
    line("a bare null", "null", "holds null; allowed: one JSON object a line"),
    line("a bare true", "true", "holds true or false; allowed: one JSON object a line"),
    line(
        "a line cut off", '{"text": "goo', "is not JSON: Unterminated string starting at, column 10"
    ),
    line(
        "no brace at the end", '{"text": "goo"', "is not JSON: Expecting ',' delimiter, column 15"
    ),
    line("broken in the middle", f'{{"text" "b"}}\n{GOOD}', "is not JSON: Expecting ':' delimiter"),
    line("single quotes", "{'text': 'b'}", "is not JSON: Expecting property name"),
    line("a comma too many", '{"text": "b",}', "is not JSON: "),
    line("two objects", '{"text": "b"} {"text": "c"}', "is not JSON: Extra data, column 15"),
    line("a comment", "# text", "is not JSON: Expecting value, column 1"),
    line("a raw tabulator", '{"text": "a\tb"}', "is not JSON: Invalid control character"),
    line("an unknown escape", r'{"text": "\x41"}', r"is not JSON: Invalid \escape"),
    line("an object over two lines", '{"text":\n"b"}', "is not JSON: Expecting value")._replace(
        skipped=2
    ),
    line("a key twice", '{"text": "a", "text": "b"}', "the key 'text' stands twice in an object"),
    line("an inner key twice", '{"text": "a", "m": {"k": 1, "k": 1}}', "the key 'k' stands twice"),
    line(
        "not a number", '{"text": "a", "x": NaN}', "is not plain JSON: NaN is not in the standard"
    ),
    line("infinity", '{"text": "a", "x": -Infinity}', "is not plain JSON: -Infinity is not"),
    line("a number without end", f'{{"text": "a", "x": {"9" * 5000}}}', "is not plain JSON: "),
    line("a bomb of brackets", "[" * 100_000, "is nested too deeply; allowed: one JSON object"),
    line("a closed bomb", '{"text":' + "[" * 100_000 + "]" * 100_000 + "}", "is nested too deeply"),
    line("a bomb of braces", '{"a":' * 100_000, "is nested too deeply"),
    Case("50 MB in a line", long_line, "data.path=a.jsonl line 1: ", "is not JSON: "),
]

EMPTY = [
    Case("an empty file", file("a.txt", ""), "data.path={folder}/a.txt: ", "holds no text", 0),
    Case("no lines", file("a.jsonl", ""), "data.path={folder}/a.jsonl: ", "holds no text", 0),
    Case("empty gzip", file("a.txt.gz", b""), "data.path={folder}/a.txt.gz: ", "holds no text", 0),
    Case("gzip of nothing", file("a.jsonl.gz", gzip.compress(b"")), "data.path=", "no text", 0),
    Case("only a mark", file("a.txt", b"\xef\xbb\xbf"), "data.path={folder}/a.txt: ", "no text", 0),
    Case("blank lines", file("a.txt", "\n \r\n\t\n"), "data.path={folder}/a.txt: ", "no text", 0),
    Case("blank lines of JSON", file("a.jsonl", "\n\r\n  \n"), "data.path=", "holds no text", 0),
    Case("empty fields", file("a.jsonl", '{"text": ""}\n' * 9), "data.path=", "holds no text", 0),
    Case("blank fields", file("a.jsonl", '{"text": " \\n"}\n' * 9), "data.path=", "no text", 0),
    Case(
        "an empty folder",
        path("x", lambda folder: (folder / "x").mkdir()),
        "data.pattern=**/*: ",
        "matches no file in {folder}/x",
        None,
    ),
    Case(
        "only hidden files",
        path("x", lambda folder: ((folder / "x").mkdir(), (folder / "x" / ".a").write_text("a"))),
        "data.pattern=**/*: ",
        "hidden ones left out",
        None,
    ),
]

PLACES = [
    Case(
        "a missing path",
        path("none.txt"),
        "data.path={folder}/none.txt: ",
        "does not exist; allowed: a file or a folder",
        None,
    ),
    Case(
        "a mistyped path",
        path("note.txt", lambda folder: (folder / "notes.txt").write_text("a")),
        "data.path={folder}/note.txt: ",
        "did you mean 'notes.txt'?",
        None,
    ),
    Case(
        "a missing folder", path("none/a.txt"), "data.path={folder}/none/a.txt: ", "not exist", None
    ),
    Case("an empty path", lambda folder: load(""), "data.path='': ", "is empty", None),
    Case(
        "a path with NUL",
        lambda folder: load(f"{folder}/a\0b"),
        "data.path={folder}/a\\x00b: ",
        "cannot be read: ",
        None,
    ),
    Case("a path of two lines", path("a\nb.txt"), "data.path={folder}/a\\nb.txt: ", "exist", None),
    Case(
        "a path that is too long",
        path("a" * 5000),
        "data.path={folder}/aaa",
        "cannot be read: ",
        None,
    ),
    Case(
        "a file as a folder",
        path("a.txt/b.txt", lambda folder: (folder / "a.txt").write_text("a")),
        "data.path={folder}/a.txt/b.txt: ",
        "cannot be read: Not a directory",
        None,
    ),
    Case(
        "a dangling link",
        path("a", lambda folder: (folder / "a").symlink_to("b")),
        "data.path={folder}/a: ",
        "is a link to a file that does not exist",
        None,
    ),
    Case(
        "a link to itself",
        path("a", lambda folder: (folder / "a").symlink_to("a")),
        "data.path={folder}/a: ",
        "cannot be read: Too many levels of symbolic links",
        None,
    ),
    Case(
        "a named pipe",
        path("a", lambda folder: os.mkfifo(folder / "a")),
        "data.path={folder}/a: ",
        "is a named pipe; allowed: a file or a folder",
        None,
    ),
    Case(
        "a device", lambda folder: load("/dev/zero"), "data.path=/dev/zero: ", "is a device", None
    ),
    Case(
        "a dangling link within",
        special(lambda entry: entry.symlink_to("none")),
        "data.path=entry: ",
        "is a link to a file that does not exist",
    ),
    Case(
        "a link to itself within",
        special(lambda entry: entry.symlink_to("entry")),
        "data.path=entry: ",
        "cannot be read: Too many levels of symbolic links",
    ),
    Case(
        "a folder in a circle",
        special(lambda entry: entry.symlink_to(".")),
        "data.path=entry: ",
        "leads by a link to a folder around it",
    ),
    Case(
        "a named pipe within", special(os.mkfifo), "data.path=entry: ", "is a named pipe; allowed"
    ),
    Case("a socket within", special(unix_socket), "data.path=entry: ", "is a socket; allowed"),
    Case(
        "a device within",
        special(lambda entry: entry.symlink_to("/dev/zero")),
        "data.path=entry: ",
        "is a device; allowed",
    ),
    Case(
        "a name that is not UTF-8",
        special(lambda entry: open(os.fsencode(entry) + b"\xff", "w").close()),
        "data.path=entry\\udcff: ",
        "its name is not UTF-8",
    ),
    Case(
        "a pattern that matches nothing",
        path("", lambda folder: (folder / "a").write_text("a"), pattern="*.txt"),
        "data.pattern=*.txt: ",
        "matches no file in {folder}",
        None,
    ),
    Case("an empty pattern", path("", pattern=""), "data.pattern='': ", "has an empty part", None),
    Case(
        "a pattern from the root",
        path("", pattern="/etc/*"),
        "data.pattern=/etc/*: ",
        "empty",
        None,
    ),
    Case("a pattern that climbs", path("", pattern="../*"), "data.pattern=../*: ", "'..'", None),
    Case(
        "a fraction of 1",
        file("a.txt", "text", validation_fraction=1),
        "data.validation_fraction=1: ",
        "must be at least 0 and below 1",
        None,
    ),
]

TABLES = [
    Case(
        "no table", file("a.parquet", "text"), "data.path=a.parquet: ", "is damaged or not Parquet"
    ),
    Case(
        "an empty table", file("a.parquet", ""), "data.path=a.parquet: ", "damaged or not Parquet"
    ),
    Case("noise as a table", file("a.parquet", NOISE), "data.path=a.parquet: ", "not Parquet"),
    Case(
        "noise with the marks of a table",
        file("a.parquet", b"PAR1" + NOISE + b"PAR1"),
        "data.path=a.parquet: ",
        "is damaged or not Parquet",
    ),
    Case(
        "encrypted",
        file("a.parquet", b"PARE" + NOISE + b"\x10\0\0\0PARE"),
        "data.path=a.parquet: ",
        "is damaged or not Parquet",
    ),
    Case("a table cut off", cut_table, "data.path=a.parquet: ", "is damaged or not Parquet"),
    Case("a damaged table", damaged_table, "data.path=a.parquet: ", "is damaged or not Parquet"),
    Case(
        "a table under another name",
        file("a.txt", b"PAR1 and so on"),
        "data.path=a.txt: ",
        "is Parquet; allowed: names that end in .parquet",
    ),
    Case(
        "no column",
        table(lambda arrow: ["a", "b", "c"], field="txt"),
        "data.field=txt: ",
        "a.parquet has no such column; allowed: 'text', 'id'; did you mean data.field=text?",
        None,
    ),
    Case(
        "a column of numbers",
        table(lambda arrow: [1, 2, 3]),
        "data.field=text: ",
        "in a.parquet this column holds int64; allowed: strings",
        None,
    ),
    Case(
        "a column of bytes",
        table(lambda arrow: [b"a", b"b", b"c"]),
        "data.field=text: ",
        "in a.parquet this column holds binary; allowed: strings",
        None,
    ),
    Case(
        "a column of lists",
        table(lambda arrow: [["a"], [], ["b"]]),
        "data.field=text: ",
        "allowed: strings",
        None,
    ),
    Case(
        "a column of objects",
        table(lambda arrow: [{"a": "b"}] * 3),
        "data.field=text: ",
        "allowed: strings",
        None,
    ),
    Case(
        "a column of nulls",
        table(lambda arrow: [None] * 3),
        "data.field=text: ",
        "this column holds null; allowed: strings",
        None,
    ),
    Case(
        "a null",
        table(lambda arrow: ["a", None, "c"]),
        "data.path=a.parquet row 2: ",
        "column 'text' holds null; allowed: a string",
    ),
    Case(
        "a string that is not UTF-8",
        table(
            lambda arrow: arrow.array([b"a", b"b", b"\xff"], arrow.binary()).view(arrow.string())
        ),
        "data.path=a.parquet row 3: ",
        "0xff is not UTF-8",
    ),
    Case(
        "an empty column",
        table(lambda arrow: ["", " ", "\n"]),
        "data.path={folder}/a.parquet: ",
        "holds no text",
        0,
    ),
]

WHOLE_TOKENIZER = json.dumps(
    {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
)
TOKENIZERS = [
    Case(
        f"tokenizer: {name}",
        tokenizer(content),
        "data.tokenizer={folder}/tokenizer.json: ",
        words,
        None,
    )
    for name, content, words in [
        ("empty", "", "it is not JSON: Expecting value"),
        ("cut off", WHOLE_TOKENIZER[:-20], "it is not JSON: "),
        ("another object", '{"a": 1}', "there is no model in it"),
        ("a list", "[1, 2]", "there is no model in it"),
        ("no merges", '{"model": {"type": "BPE", "vocab": {}}}', "it is not a tokenizer: "),
        ("an unknown model", '{"model": {"type": "X"}}', "it is not a tokenizer: "),
        (
            "no separator",
            WHOLE_TOKENIZER,
            "it has no token <|endoftext|>; allowed: the tokenizer.json",
        ),
        ("latin-1", b'{"model": "\xe9"}', "is not UTF-8"),
        ("noise", NOISE, "is not UTF-8"),
        ("a bomb", "[" * 100_000, "it is nested too deeply"),
    ]
] + [
    Case(
        "no tokenizer",
        lambda folder: lambda **_: BpeTokenizer.load(folder / "none.json"),
        "data.tokenizer={folder}/none.json: ",
        "is missing; allowed: the tokenizer.json",
        None,
    ),
    Case(
        "a folder as a tokenizer",
        lambda folder: lambda **_: BpeTokenizer.load(folder),
        "data.tokenizer={folder}: ",
        "is not a file",
        None,
    ),
    *(
        Case(
            f"a vocabulary of {size!r}",
            training(size),
            f"data.vocab_size={size!r}: ",
            "must be a whole number from 257",
            None,
        )
        for size in (256, 0, -1, 2**20 + 1, 300.0, "300", True, None)
    ),
]

CASES = COMPRESSED + ENCODINGS + FIELDS + LINES + EMPTY + PLACES + TABLES + TOKENIZERS
assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.fixture(autouse=True)
def in_time():
    """A named pipe or a device must not hang the tests."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError("took more than 20 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    monkeypatch.setenv("JAXLAB_DATA_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def state(*folders: Path) -> dict[str, tuple[int, ...]]:
    """Everything in the folders with what changes when it is touched."""
    found = {}
    for top in folders:
        for folder, subfolders, files in os.walk(os.fsencode(top)):
            for name in [*subfolders, *files]:
                status = os.lstat(os.path.join(folder, name))
                place = os.fsdecode(os.path.join(folder, name))
                found[place] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def needs(case: Case) -> None:
    if case in TABLES:
        pytest.importorskip("pyarrow.parquet")
    if case in TOKENIZERS:
        pytest.importorskip("tokenizers")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_refused_in_one_line(case, folder, cache):
    needs(case)
    attempt = case.make(folder)
    before = state(folder, cache)
    with pytest.raises(UserError) as caught:
        attempt()
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(case.where.format(folder=folder))
    assert case.words.replace("{folder}", str(folder)) in message
    assert len(message) < 6000
    assert caught.value.exit_code == 2
    assert state(folder, cache) == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_passed_over_on_request_beside_good_files(case, folder, cache):
    needs(case)
    attempt = case.make(folder)
    if case.skipped is None:
        with pytest.raises(UserError):
            attempt(skip_bad=True)
        return
    (folder / "zz.txt").write_text("the end")
    places = []
    corpus = load_corpus(
        folder,
        tokenizer=ByteTokenizer(),
        validation_fraction=0.0,
        skip_bad=True,
        on_skip=lambda *place: places.append(place),
    )
    assert bytes(corpus.train).endswith(b"the end")
    assert len(places) == case.skipped
    assert all(where.isprintable() and reason.isprintable() for where, reason in places)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.parquet", "inner/a.txt"])
def test_what_may_not_be_read_is_named(folder, cache, name):
    target = folder / name
    target.parent.mkdir(exist_ok=True)
    target.write_text("text")
    (folder / "zz.txt").write_text("the end")
    closed = target.parent if name.startswith("inner") else target
    closed.chmod(0)
    try:
        if os.access(closed, os.R_OK):
            pytest.skip("running as root, to whom nothing is forbidden")
        before = state(folder, cache)
        with pytest.raises(UserError, match=r"data\.path=.*: .*Permission denied") as caught:
            load(folder)()
        assert str(caught.value).isprintable()
        assert state(folder, cache) == before
        found = [document.name for document in read_documents(folder, skip_bad=True)]
        assert found == ["zz.txt"]
    finally:
        closed.chmod(0o700)
