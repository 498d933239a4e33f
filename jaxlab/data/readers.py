"""Documents from a user's files: text, JSON lines, Parquet, compressed or not, or folders of them.

Whatever cannot be read is named by file and line, and said in one line. Reading streams: memory
is bounded by the largest single record (for text files not even by that) and the names of files.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import importlib
import itertools
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from jaxlab.data.text import Document
from jaxlab.data.tokenizers import cut_place, text_pieces
from jaxlab.errors import UserError

__all__ = [
    "OnSkip",
    "Piece",
    "Source",
    "SourceFile",
    "find_source",
    "is_text",
    "read_documents",
    "read_json_lines",
    "read_pieces",
]

OnSkip = Callable[[str, str], None]

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_GZIP_SUFFIXES = (".txt.gz", ".jsonl.gz", ".ndjson.gz")
_PARQUET_SUFFIX = ".parquet"
_BLOCK = 1 << 18  # bytes
_PIECE = 1 << 18  # characters
_LONGEST_LINE = 1 << 28  # bytes; a compressed file can hold a line of any length
_PARQUET_ROWS = 64
_WHOLE_GZIP = "allowed: a whole gzip file under this name"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_SPECIAL_FILES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class SourceFile(NamedTuple):
    """A file to read.

    Attributes:
      name: relative to the folder that was given, with `/`; of a single file its own name.
      root: the folder that the name is relative to.
    """

    name: str
    root: str

    @property
    def path(self) -> str:
        """Where it lies."""
        return os.path.join(self.root, self.name)

    @property
    def shown(self) -> str:
        """The name in one line, whatever is in it."""
        return _shown(self.name)


class Source(NamedTuple):
    """What `find_source` has found.

    Attributes:
      path: the file or folder as the user gave it.
      files: in the order in which they are read.
    """

    path: str
    files: tuple[SourceFile, ...]

    @property
    def shown(self) -> str:
        """The path in one line, whatever is in it."""
        return _shown(self.path)


class Piece(NamedTuple):
    """A part of a document, or a whole one; the pieces of a document follow each other.

    Attributes:
      name: the document's; the same on every machine and unique within a source.
      text: not empty, with `\\n` at the ends of lines and without NUL.
      first: whether a document begins here.
    """

    name: str
    text: str
    first: bool


class _BadInputError(Exception):
    """A line or file that cannot be used; the place is within the file."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(reason)
        self.reason, self.place = reason, place


class _Skips:
    """What happens to bad input: an error, or a count."""

    def __init__(self, skip_bad: bool, on_skip: OnSkip | None) -> None:
        self._skip_bad, self._on_skip = skip_bad, on_skip
        self._count, self._first = 0, ""

    def bad(self, name: str, bad: _BadInputError) -> None:
        where = f"{_shown(name)} {bad.place}".rstrip()
        if not self._skip_bad:
            raise UserError("data.path", where, bad.reason) from bad
        self._first = self._first or f"{where}: {bad.reason}"
        self._count += 1
        if self._on_skip is not None:
            self._on_skip(where, bad.reason)

    def summary(self) -> str:
        if not self._count:
            return ""
        return f"; {self._count} bad lines or files were passed over, the first: {self._first}"


def read_documents(
    path: os.PathLike[str] | str,
    *,
    field: str = "text",
    pattern: str = "**/*",
    skip_bad: bool = False,
    on_skip: OnSkip | None = None,
) -> Iterator[Document]:
    """The documents of a file or of all files in a folder.

    What a file holds is told by its name: `.jsonl` and `.ndjson` an object a line, `.parquet` a
    table, anything else is one document of text. `.jsonl.gz`, `.ndjson.gz` and `.txt.gz` are
    compressed. Text is UTF-8, with or without its byte order mark; line ends become `\\n`.
    Documents of white space alone are left out. Files come in the order of their names; hidden
    ones are left out; links are followed. Documents are named by their file, and those of a file
    that holds several also by line or row (`books/a.jsonl/17`).

    Args:
      path: a file or a folder.
      field: of the JSON objects, or column of the tables, that holds the text.
      pattern: which files of a folder to take; `*`, `?` and `[...]` match within a name, `**`
        any number of folders.
      skip_bad: pass over lines and files that cannot be used, instead of stopping at the first.
      on_skip: then called with the place and the reason of each.

    Returns:
      An iterator; errors within the files come when it gets there.

    Raises:
      UserError: the path is missing or of a wrong kind, no file matches, a file or line cannot be
        used and `skip_bad` is not set, a table has no such column of strings, there is no text at
        all, or Parquet was met and `pyarrow` is missing.
    """
    source = find_source(path, pattern=pattern, skip_bad=skip_bad, on_skip=on_skip)
    return _joined(read_pieces(source, field=field, skip_bad=skip_bad, on_skip=on_skip))


def find_source(
    path: os.PathLike[str] | str,
    *,
    pattern: str = "**/*",
    skip_bad: bool = False,
    on_skip: OnSkip | None = None,
) -> Source:
    """The files that `read_documents` would read, in their order.

    Raises:
      UserError: as for `read_documents`, as far as it shows without opening files.
    """
    given = os.fspath(path)
    shown = _shown(given) or "''"
    place = os.path.expanduser(given)
    try:
        mode = os.stat(place).st_mode
    except (OSError, ValueError) as error:
        raise UserError("data.path", shown, _why_missing(place, error)) from error
    if stat.S_ISREG(mode):
        root, name = os.path.split(place)
        return Source(given, (SourceFile(name, root),))
    if not stat.S_ISDIR(mode):
        raise UserError("data.path", shown, f"is {_special(mode)}; allowed: a file or a folder")
    wanted = _checked_pattern(pattern)
    skips = _Skips(skip_bad, on_skip)
    problems: list[tuple[str, _BadInputError]] = []
    files = tuple(sorted(_walk(place, wanted, problems)))
    for name, bad in sorted(problems, key=lambda problem: problem[0]):
        skips.bad(name, bad)
    if not files:
        if skips.summary():
            raise UserError("data.path", shown, f"has no readable file{skips.summary()}")
        raise UserError(
            "data.pattern", _shown(pattern), f"matches no file in {shown} (hidden ones left out)"
        )
    return Source(given, files)


def read_pieces(
    source: Source,
    *,
    field: str = "text",
    skip_bad: bool = False,
    on_skip: OnSkip | None = None,
) -> Iterator[Piece]:
    """What `read_documents` reads, in pieces: for documents too long to hold as a whole.

    A piece has at most 262144 characters and ends where `tokenizers.cut_place` says.

    Args:
      source: from `find_source`.
      field: as for `read_documents`.
      skip_bad: as for `read_documents`; nothing of a bad text file is given out, since each is
        then read twice.
      on_skip: as for `read_documents`.

    Raises:
      UserError: as for `read_documents`.
    """
    if not field:
        raise UserError("data.field", "''", "is empty; allowed: the name of a field")
    skips = _Skips(skip_bad, on_skip)
    found = False
    for file in source.files:
        try:
            for piece in _file_pieces(file, field, skips, careful=skip_bad):
                found = True
                yield piece
        except _BadInputError as bad:
            skips.bad(file.name, bad)
    if not found:
        raise UserError(
            "data.path",
            source.shown,
            f"holds no text; allowed: at least one document{skips.summary()}",
        )


def read_json_lines(
    path: os.PathLike[str] | str, *, skip_bad: bool = False, on_skip: OnSkip | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place in words (`chat.jsonl line 3`).

    Blank lines are left out.

    Args:
      path: a file, `.gz` if it is compressed.
      skip_bad: as for `read_documents`.
      on_skip: as for `read_documents`.

    Raises:
      UserError: the path is no file, or a line of it is not a JSON object in UTF-8 and `skip_bad`
        is not set.
    """
    source = find_source(path, skip_bad=skip_bad, on_skip=on_skip)
    if os.path.isdir(os.path.expanduser(source.path)):
        raise UserError("data.path", source.shown, "is a folder; allowed: a file")
    return _placed_objects(source.files[0], _Skips(skip_bad, on_skip))


def is_text(value: str) -> bool:
    """Whether a string is text that a file can hold: no NUL, and no half of a surrogate pair."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def _placed_objects(file: SourceFile, skips: _Skips) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        for number, fields in _json_objects(file, skips):
            yield f"{file.shown} line {number}", fields
    except _BadInputError as bad:
        skips.bad(file.name, bad)


def _joined(pieces: Iterable[Piece]) -> Iterator[Document]:
    name, parts = "", []
    for piece in pieces:
        if piece.first and parts:
            yield Document(name, b"".join(parts))
            parts = []
        name = piece.name
        parts.append(piece.text.encode())
    if parts:
        yield Document(name, b"".join(parts))


def _why_missing(place: str, error: OSError | ValueError) -> str:
    allowed = "allowed: a file or a folder"
    if not place:
        return f"is empty; {allowed}"
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read: {_reason(error)}"
    if os.path.islink(place):
        return f"is a link to a file that does not exist; {allowed}"
    folder, name = os.path.split(os.path.abspath(place))
    try:
        near = difflib.get_close_matches(name, itertools.islice(os.listdir(folder), 1000), n=1)
    except OSError:
        near = []
    return f"does not exist; {allowed}" + (f"; did you mean {near[0]!r}?" if near else "")


def _special(mode: int) -> str:
    return next((words for test, words in _SPECIAL_FILES if test(mode)), "a special file")


def _reason(error: Exception) -> str:
    words = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()
    return _shown(words[0])[:200]


def _shown(text: str) -> str:
    return text if text.isprintable() else ascii(text)[1:-1]


def _checked_pattern(pattern: str) -> tuple[str, ...]:
    wanted = tuple(pattern.split("/"))
    if not {"", ".", ".."}.isdisjoint(wanted):
        raise UserError(
            "data.pattern",
            _shown(pattern) or "''",
            "has an empty part, '.' or '..'; allowed: names below the folder, such as '**/*.jsonl'",
        )
    return wanted


def _walk(
    root: str, wanted: tuple[str, ...], problems: list[tuple[str, _BadInputError]]
) -> Iterator[SourceFile]:
    """The regular files that match, in any order; what cannot be used goes to `problems`."""
    folders = [("", _after_folders({0}, wanted), frozenset({_identity(root)}))]
    while folders:
        prefix, states, around = folders.pop()
        try:
            with os.scandir(os.path.join(root, prefix)) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    following = _following(states, entry.name, wanted)
                    matches, below = len(wanted) in following, following - {len(wanted)}
                    name = prefix + entry.name
                    try:
                        kind = _kind_of(entry, around, matches=matches, enters=bool(below))
                    except _BadInputError as bad:
                        problems.append((name, bad))
                        continue
                    if kind == "file":
                        yield SourceFile(name, root)
                    elif kind == "folder":
                        folders.append((f"{name}/", below, around | {_identity(entry.path)}))
        except OSError as error:
            reason = f"cannot be read: {_reason(error)}"
            problems.append((prefix or os.path.join(root, ""), _BadInputError(reason)))


def _kind_of(
    entry: os.DirEntry[str],
    around: frozenset[tuple[int, int]],
    *,
    matches: bool,
    enters: bool,
) -> str:
    """`file`, `folder`, or nothing for what the pattern does not ask for."""
    try:
        status = entry.stat()
    except OSError as error:
        if not matches:
            return ""
        if isinstance(error, FileNotFoundError):
            raise _BadInputError("is a link to a file that does not exist") from error
        raise _BadInputError(f"cannot be read: {_reason(error)}") from error
    if stat.S_ISDIR(status.st_mode):
        if not enters:
            return ""
        if (status.st_dev, status.st_ino) in around:
            raise _BadInputError("leads by a link to a folder around it; allowed: no loops")
        return "folder"
    if not matches:
        return ""
    if not stat.S_ISREG(status.st_mode):
        raise _BadInputError(f"is {_special(status.st_mode)}; allowed: files and folders")
    if any("\ud800" <= letter <= "\udfff" for letter in entry.name):
        raise _BadInputError("its name is not UTF-8; allowed: UTF-8")
    return "file"


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError:
        return (-1, -1)
    return status.st_dev, status.st_ino


def _after_folders(states: Iterable[int], wanted: tuple[str, ...]) -> frozenset[int]:
    """Places in the pattern, and those behind each `**`, which may stand for no folder."""
    reached: set[int] = set()
    for state in states:
        reached.add(state)
        while state < len(wanted) and wanted[state] == "**":
            state += 1
            reached.add(state)
    return frozenset(reached)


def _following(states: Iterable[int], name: str, wanted: tuple[str, ...]) -> frozenset[int]:
    """Places in the pattern after one more name; `len(wanted)` means that it has matched."""
    reached = set()
    for state in states:
        if state < len(wanted):
            if wanted[state] == "**":
                reached.add(state)
            elif fnmatchcase(name, wanted[state]):
                reached.add(state + 1)
    return _after_folders(reached, wanted)


def _file_pieces(file: SourceFile, field: str, skips: _Skips, *, careful: bool) -> Iterator[Piece]:
    lowered = file.name.lower()
    if lowered.endswith(_JSON_SUFFIXES):
        records = _json_texts(file, field, skips)
    elif lowered.endswith(_PARQUET_SUFFIX):
        records = _parquet_texts(file, field, skips)
    else:
        yield from _text_file_pieces(file, careful=careful)
        return
    for number, text in records:
        name = f"{file.name}/{number}"
        if len(text) <= _PIECE:
            yield Piece(name, text, True)
            continue
        for place, part in enumerate(text_pieces(text, _PIECE)):
            yield Piece(name, part, place == 0)


def _text_file_pieces(file: SourceFile, *, careful: bool) -> Iterator[Piece]:
    if careful:
        for _ in _text(file):
            pass
    first = True
    for text in _text(file):
        # Reads again only what begins with a whole piece of white space.
        if first and text.isspace() and all(part.isspace() for part in _text(file)):
            return
        yield Piece(file.name, text, first)
        first = False


def _blocks(file: SourceFile) -> Iterator[bytes]:
    """The content of a file, decompressed, without a byte order mark."""
    compressed = file.name.lower().endswith(_GZIP_SUFFIXES)
    first = True
    try:
        with open(file.path, "rb", buffering=0) as raw:
            stream = gzip.GzipFile(fileobj=raw) if compressed else raw
            # read1 gives what there is before a damaged place, so that its line is known.
            read = stream.read1 if isinstance(stream, gzip.GzipFile) else raw.read
            while block := read(_BLOCK):
                if first:
                    _check_signature(block)
                    block = block.removeprefix(codecs.BOM_UTF8)
                    first = False
                yield block
    except EOFError as error:
        raise _BadInputError(f"is cut off: its gzip data have no end; {_WHOLE_GZIP}") from error
    except gzip.BadGzipFile as error:
        if first:
            raise _BadInputError(f"is not gzip data; {_WHOLE_GZIP}") from error
        reason = f"is damaged: its gzip checksum or what follows is wrong; {_WHOLE_GZIP}"
        raise _BadInputError(reason) from error
    except zlib.error as error:
        reason = f"is damaged: its gzip data cannot be decompressed; {_WHOLE_GZIP}"
        raise _BadInputError(reason) from error
    except OSError as error:
        raise _BadInputError(f"cannot be read: {_reason(error)}") from error


def _check_signature(block: bytes) -> None:
    if block.startswith(_UTF16_MARKS):
        raise _BadInputError("is UTF-16 or UTF-32 by its byte order mark; allowed: UTF-8")
    if block.startswith(b"\x1f\x8b"):
        raise _BadInputError("is gzip data; allowed: names that end in .txt.gz or .jsonl.gz")
    if block.startswith(b"PAR1"):
        raise _BadInputError("is Parquet; allowed: names that end in .parquet")


def _text(file: SourceFile) -> Iterator[str]:
    """The text of a file in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, held, rest = 1, "", ""
    try:
        for block in itertools.chain(_blocks(file), [b""]):
            try:
                text = held + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                good = _with_newlines(held + error.object[: error.start].decode())
                line += good.count("\n")
                raise _BadInputError(_not_utf8(error), f"line {line}") from error
            # A line end of two characters may be cut here.
            held = "\r" if block and text.endswith("\r") else ""
            text = _with_newlines(text[: len(text) - len(held)])
            if (nul := text.find("\0")) >= 0:
                line += text.count("\n", 0, nul)
                raise _BadInputError(
                    "holds a NUL byte, so it is no text; allowed: UTF-8", f"line {line}"
                )
            line += text.count("\n")
            rest += text
            start = 0
            while len(rest) - start > _PIECE:
                end = cut_place(rest, start, _PIECE)
                yield rest[start:end]
                start = end
            rest = rest[start:]
    except _BadInputError as bad:
        bad.place = bad.place or (f"line {line}" if line > 1 else "")
        raise
    if rest:
        yield rest


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} is not UTF-8; allowed: UTF-8"


def _lines(file: SourceFile) -> Iterator[bytes | None]:
    """Lines without their ends; None for one that is too long."""
    parts: list[bytes] = []
    length, held = 0, b""
    for block in itertools.chain(_blocks(file), [b""]):
        text = held + block
        held = b"\r" if block and text.endswith(b"\r") else b""
        text = text[: len(text) - len(held)]
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        head, *whole = text.split(b"\n")
        parts.append(head)
        length += len(head)
        if length > _LONGEST_LINE:
            parts = []
        if whole:
            yield b"".join(parts) if length <= _LONGEST_LINE else None
            yield from itertools.islice(whole, len(whole) - 1)
            parts, length = [whole[-1]], len(whole[-1])
    if length:
        yield b"".join(parts) if length <= _LONGEST_LINE else None


def _json_objects(file: SourceFile, skips: _Skips) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with the numbers of their lines."""
    number = 0
    try:
        for line in _lines(file):
            number += 1
            if line is not None and (not line or line.isspace()):
                continue
            try:
                fields = _parsed(line)
            except _BadInputError as bad:
                skips.bad(file.name, _BadInputError(bad.reason, f"line {number}"))
                continue
            del line  # it may be large
            yield number, fields
    except _BadInputError as bad:
        bad.place = bad.place or (f"line {number + 1}" if number else "")
        raise


def _parsed(line: bytes | None) -> dict[str, Any]:
    allowed = "allowed: one JSON object a line"
    if line is None:
        raise _BadInputError(f"is longer than {_LONGEST_LINE} bytes; allowed: shorter lines")
    try:
        value = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise _BadInputError(f"{_not_utf8(error)} (column {error.start + 1})") from error
    except RecursionError as error:
        raise _BadInputError(f"is nested too deeply; {allowed}") from error
    except json.JSONDecodeError as error:
        nul = " (it holds NUL bytes)" if b"\0" in line else ""
        reason = f"is not JSON: {error.msg}, column {error.colno}{nul}; {allowed}"
        raise _BadInputError(reason) from error
    except ValueError as error:  # what the decoder's hooks refuse, and numbers without end
        raise _BadInputError(f"is not plain JSON: {_reason(error)}; {allowed}") from error
    if not isinstance(value, dict):
        raise _BadInputError(f"holds {_KINDS[type(value)]}; {allowed}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {_quoted(twice)} stands twice in an object")
    return fields


def _refused(word: str) -> None:
    raise ValueError(f"{word} is not in the standard")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refused)


def _json_texts(file: SourceFile, field: str, skips: _Skips) -> Iterator[tuple[int, str]]:
    for number, fields in _json_objects(file, skips):
        try:
            if field not in fields:
                raise _BadInputError(f"has no field {field!r}; {_choices(field, fields)}")
            text = fields[field]
            if not isinstance(text, str):
                kind = _KINDS[type(text)]
                raise _BadInputError(f"field {field!r} holds {kind}; allowed: a string")
            text = _checked_text(text)
        except _BadInputError as bad:
            skips.bad(file.name, _BadInputError(bad.reason, f"line {number}"))
            continue
        if text and not text.isspace():
            yield number, text


def _checked_text(text: str) -> str:
    """The text of a record, with the line ends of a document."""
    if "\0" in text:
        raise _BadInputError("its text holds a NUL character; allowed: text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _BadInputError(
                f"its text holds half of a surrogate pair, \\u{ord(text[error.start]):04x}; "
                "allowed: whole characters"
            ) from error
    return _with_newlines(text)


def _choices(field: str, names: Iterable[str]) -> str:
    """The fields there are, in brief, and the one that was probably meant."""
    few = [name for name in itertools.islice(names, 100) if len(name) <= 60]
    near = difflib.get_close_matches(field, few, n=1) or [
        name for name in few if name.lower() == field.lower()
    ]
    listed = ", ".join(_quoted(name) for name in few[:8]) + (", ..." if len(few) > 8 else "")
    hint = f"; did you mean data.field={_shown(near[0])}?" if near else ""
    return f"allowed: {listed or 'none, there are no fields'}{hint}"


def _quoted(text: str) -> str:
    return ascii(text[:60]) if not text[:60].isprintable() else repr(text[:60])


def _parquet_texts(file: SourceFile, field: str, skips: _Skips) -> Iterator[tuple[int, str]]:
    for number, value in _parquet_values(file, field):
        try:
            if value is None:
                raise _BadInputError(f"column {field!r} holds null; allowed: a string")
            text = _checked_text(value.decode())
        except UnicodeDecodeError as error:
            skips.bad(file.name, _BadInputError(_not_utf8(error), f"row {number}"))
        except _BadInputError as bad:
            skips.bad(file.name, _BadInputError(bad.reason, f"row {number}"))
        else:
            if text and not text.isspace():
                yield number, text


def _parquet_values(file: SourceFile, field: str) -> Iterator[tuple[int, bytes | None]]:
    """What the rows hold, by batches; rows count from 1."""
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UserError(
            "data.path",
            file.shown,
            "reading Parquet needs pyarrow: pip install 'jaxlab[parquet]'",
        ) from error
    row = 0
    try:
        # Buffered without read-ahead, a row group is read by pages and not as a whole.
        with parquet.ParquetFile(
            file.path, buffer_size=_BLOCK, pre_buffer=False, page_checksum_verification=True
        ) as table:
            _check_column(arrow, table.schema_arrow, field, file)
            for batch in table.iter_batches(_PARQUET_ROWS, columns=[field], use_threads=False):
                values = batch.column(0).cast(arrow.large_string()).cast(arrow.large_binary())
                for value in values:
                    row += 1
                    yield row, value.as_py()
    except (arrow.ArrowException, OSError) as error:
        place = f"row {row + 1}" if row else ""
        reason = f"is damaged or not Parquet: {_reason(error)}; allowed: a whole Parquet file"
        raise _BadInputError(reason, place) from error


def _check_column(arrow: Any, schema: Any, field: str, file: SourceFile) -> None:
    known = schema.names.count(field)
    if known != 1:
        problem = "several such columns" if known else "no such column"
        raise UserError(
            "data.field",
            _shown(field),
            f"{file.shown} has {problem}; {_choices(field, schema.names)}",
        )
    kind = schema.field(field).type
    inner = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not any(
        test(inner)
        for test in (
            arrow.types.is_string,
            arrow.types.is_large_string,
            arrow.types.is_string_view,
        )
    ):
        raise UserError(
            "data.field",
            _shown(field),
            f"in {file.shown} this column holds {_reason(Exception(str(kind)))}; allowed: strings",
        )
