"""From text to tokens and back: bytes, or byte-level BPE.

Both are lossless: every text has tokens, and they decode to that same text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxlab.data.definitions import (
    canonical_json,
    checked_ids,
    first_line,
    plain_definition,
    tokenizers_library,
)
from jaxlab.data.text import BYTE_VOCABULARY_SIZE, SEPARATOR, Document
from jaxlab.errors import StorageError, UserError

__all__ = [
    "END_OF_TEXT",
    "BpeTokenizer",
    "ByteTokenizer",
    "Tokenizer",
    "cut_place",
    "text_pieces",
    "token_dtype",
]

END_OF_TEXT = "<|endoftext|>"

_SMALLEST_BPE = BYTE_VOCABULARY_SIZE + 1
_LARGEST_BPE = 2**20
# Characters that BPE takes at once: longer strings are slower, through its lists of offsets.
_BPE_PIECE = 1 << 13
# Pieces that are spread over the processors together.
_BPE_PIECES = 64
# Has to come back as it is: spaces at the start and in a row, line ends, accents, other scripts,
# and what looks like the separator but is only text.
_PROBE = f"a  B\n\n c\t'd 12 é 文字 \U0001f600{END_OF_TEXT}."


class Tokenizer(Protocol):
    """What the sources of batches need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are below it."""
        ...

    @property
    def separator(self) -> int:
        """Token that stands between two documents and never within one."""
        ...

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 that tells this tokenizer from any other."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: `[length]` in `token_dtype(vocab_size)`."""
        ...

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        ...


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and uint32 that holds all ids below `vocab_size`.

    Raises:
      ValueError: the size is not in `[1, 2**32]`.

    >>> token_dtype(256), token_dtype(257)
    (dtype('uint8'), dtype('uint16'))
    """
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size={vocab_size}: must be from 1 to 2**32")
    return np.min_scalar_type(vocab_size - 1)


def cut_place(text: str, start: int, size: int) -> int:
    """Where a piece that begins at `start` ends, so that cutting there changes no tokens.

    Byte-level BPE splits text into words before it looks for tokens. Between two visible
    characters, a line end alone is the last of its word and a space alone the first. The last
    such place in the second half of the piece is taken, a line's rather than a space's. Where
    there is none, the piece is cut at its full size, between any two characters.

    Args:
      text: long text.
      start: where the piece begins.
      size: characters in a piece at most, at least 2.

    Returns:
      The index of the first character after the piece.

    >>> cut_place("one two\\nthree four", 0, 12), cut_place("one two", 0, 5)
    (8, 3)
    """
    stop = start + size
    if len(text) <= stop:
        return len(text)
    for mark, after in (("\n", 1), (" ", 0)):
        place = stop
        while (place := text.rfind(mark, start + size // 2, place)) >= 0:
            if not (text[place - 1].isspace() or text[place + 1].isspace()):
                return place + after
    return stop


def text_pieces(text: str, size: int) -> Iterator[str]:
    """Cuts a text at the places that `cut_place` chooses.

    >>> list(text_pieces("one two three", 8))
    ['one two', ' three']
    """
    start = 0
    while start < len(text):
        end = cut_place(text, start, size)
        yield text[start:end]
        start = end


class ByteTokenizer:
    """The bytes of UTF-8 as tokens; NUL, which text does not hold, is the separator.

    >>> tokens = ByteTokenizer().encode("Hé")
    >>> tokens.tolist(), ByteTokenizer().decode(tokens)
    ([72, 195, 169], 'Hé')
    """

    @property
    def vocab_size(self) -> int:
        """256."""
        return BYTE_VOCABULARY_SIZE

    @property
    def separator(self) -> int:
        """0."""
        return SEPARATOR

    @property
    def digest(self) -> str:
        """Always the same."""
        return hashlib.sha256(b"bytes of UTF-8, separator 0").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: uint8 `[length]`, read-only.

        Raises:
          ValueError: the text holds NUL, or half of a surrogate pair.
        """
        if "\0" in text:
            raise ValueError("text holds a NUL character, which is the separator's token")
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD, a separator NUL.

        Raises:
          TypeError, ValueError: the ids are not whole numbers from 0 to 255.
        """
        return bytes(checked_ids(ids, self.vocab_size)).decode(errors="replace")


class BpeTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; on bytes: Radford et al. 2019).

    Texts are split into words (with the space before them), and pairs of neighbouring tokens are
    merged within words in the order in which training found them to be frequent. It runs in the
    package `tokenizers`. Text that spells `<|endoftext|>` is encoded like any other, so a
    document cannot hold the separator.

    Attributes:
      vocab_size: number of tokens, the separator among them.
      separator: id of `<|endoftext|>`.
      digest: hexadecimal SHA-256 of the canonical JSON of its `tokenizer.json`.
    """

    def __init__(self, definition: str) -> None:
        """From the text of a `tokenizer.json`; truncation, padding and dropout are left out.

        Raises:
          ValueError: it is not JSON, or not a lossless byte-level BPE tokenizer with a token
            `<|endoftext|>`.
          UserError: the package `tokenizers` is missing.
        """
        library = tokenizers_library()
        plain = json.dumps(plain_definition(definition))
        try:
            self._tokenizer = library.Tokenizer.from_str(plain)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"it is not a tokenizer: {first_line(error)}") from error
        self._tokenizer.encode_special_tokens = True
        if not isinstance(self._tokenizer.model, library.models.BPE):
            raise ValueError(f"its model is {type(self._tokenizer.model).__name__}")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if END_OF_TEXT not in vocabulary:
            raise ValueError(f"it has no token {END_OF_TEXT}")
        self.separator: int = vocabulary[END_OF_TEXT]
        self.vocab_size: int = max(vocabulary.values()) + 1
        if self.vocab_size > _LARGEST_BPE:
            raise ValueError(f"it has the token {self.vocab_size - 1}, above {_LARGEST_BPE - 1}")
        self._check_lossless(library, vocabulary)
        self._definition = canonical_json(json.loads(self._tokenizer.to_str()))
        self.digest: str = hashlib.sha256(self._definition.encode()).hexdigest()

    @classmethod
    def train(cls, documents: Iterable[Document], vocab_size: int) -> BpeTokenizer:
        """Learns the merges of documents; the same documents give the same tokenizer.

        Memory grows with the number of different words, not with the length of the text.

        Args:
          documents: UTF-8; read once.
          vocab_size: from 257 (the bytes and the separator) to 2**20. Pairs that occur only once
            are not merged, so that little text gives fewer tokens.

        Raises:
          UserError: `vocab_size` is out of range, or the package `tokenizers` is missing.
        """
        if (
            not isinstance(vocab_size, int)
            or isinstance(vocab_size, bool)
            or not _SMALLEST_BPE <= vocab_size <= _LARGEST_BPE
        ):
            raise UserError(
                "data.vocab_size",
                f"{vocab_size!r:.40}",
                f"must be a whole number from {_SMALLEST_BPE} (the 256 bytes and the separator) "
                f"to {_LARGEST_BPE}",
            )
        library = tokenizers_library()
        alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=alphabet,
        )
        pieces = (
            piece
            for document in documents
            for piece in text_pieces(document.text.decode(), _BPE_PIECE)
        )
        tokenizer.train_from_iterator(pieces, trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, path: os.PathLike[str] | str) -> BpeTokenizer:
        """Reads a `tokenizer.json`, as `save` and the package `tokenizers` write it.

        Raises:
          UserError: the file cannot be read or holds no tokenizer of this kind, or the package
            `tokenizers` is missing.
        """
        shown = os.fspath(path)
        shown = shown if shown.isprintable() else ascii(shown)[1:-1]
        allowed = "allowed: the tokenizer.json of a lossless byte-level BPE tokenizer"
        try:
            if not os.path.isfile(path):
                kind = "not a file" if os.path.lexists(path) else "missing"
                raise UserError("data.tokenizer", shown, f"is {kind}; {allowed}")
            return cls(Path(path).read_bytes().decode())
        except UnicodeDecodeError as error:
            raise UserError("data.tokenizer", shown, f"is not UTF-8; {allowed}") from error
        except ValueError as error:
            raise UserError("data.tokenizer", shown, f"{error}; {allowed}") from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UserError("data.tokenizer", shown, f"cannot be read: {reason}") from error

    def save(self, path: os.PathLike[str] | str) -> None:
        """Writes a `tokenizer.json`, whole or not at all.

        Raises:
          StorageError: it could not be written.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            temporary.write_text(self._definition + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StorageError(f"cannot write {path}: {reason}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: `[length]` in `token_dtype(vocab_size)`.

        Long texts are encoded in pieces that end where a word does (see `cut_place`), which
        bounds the memory it takes.

        Raises:
          ValueError: the text holds half of a surrogate pair.
        """
        dtype = token_dtype(self.vocab_size)
        pieces = list(text_pieces(text, _BPE_PIECE))
        found = [np.empty(0, dtype)]
        for start in range(0, len(pieces), _BPE_PIECES):
            batch = pieces[start : start + _BPE_PIECES]
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            found.extend(np.array(encoding.ids, dtype) for encoding in encodings)
        return np.concatenate(found)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD, a separator its name.

        Raises:
          TypeError, ValueError: the ids are not whole numbers from 0 to `vocab_size - 1`.
        """
        checked = checked_ids(ids, self.vocab_size)
        return self._tokenizer.decode(checked, skip_special_tokens=False)

    def _check_lossless(self, library: Any, vocabulary: dict[str, int]) -> None:
        missing = [
            byte for byte in library.pre_tokenizers.ByteLevel.alphabet() if byte not in vocabulary
        ]
        if missing:
            raise ValueError(f"it has no tokens for {len(missing)} of the 256 bytes")
        ids = self._tokenizer.encode(_PROBE, add_special_tokens=False).ids
        back = self._tokenizer.decode(ids, skip_special_tokens=False)
        if back != _PROBE or self.separator in ids:
            raise ValueError("it does not give every text back as it was")
