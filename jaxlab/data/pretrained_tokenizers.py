"""Tokenizers of pretrained language models, read from the files beside their weights.

A repository of a model holds a `tokenizer.json` (the vocabulary and the rules, of whatever kind
the package `tokenizers` runs: byte-level BPE, BPE with byte fallback, Unigram, WordPiece) and
small files that name the special tokens and hold the chat template. `tokenizer_folders` reads
them; `gguf_tokenizers` makes the same object from the vocabulary of a GGUF file.
"""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxlab.data.definitions import (
    canonical_json,
    checked_ids,
    first_line,
    plain_definition,
    tokenizers_library,
)
from jaxlab.data.tokenizers import token_dtype
from jaxlab.errors import UserError

__all__ = [
    "PretrainedTokenizer",
    "TokenizerSettings",
    "check_vocabulary_size",
    "stop_ids",
]

_MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerSettings:
    """What a model's files say about its tokens, beside the vocabulary and the rules.

    Attributes:
      special_tokens: texts of the special tokens by their common names (`bos_token`, ...).
      stop_ids: tokens after which the model has ended its text.
      prefix_ids: tokens that `add_special_tokens` puts before a text; None leaves this, and what
        it puts after a text, to the definition of the tokenizer.
      suffix_ids: tokens that `add_special_tokens` puts after a text.
      chat_templates: sources of chat templates by name; the usual one is called `default`.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] | None = None
    suffix_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class PretrainedTokenizer:
    """The tokenizer of a pretrained model.

    Unlike `BpeTokenizer` it need not be lossless: some put a space before a text, drop accents or
    know no token for some characters. It can be used by several threads.

    Attributes:
      name: what error messages call it.
      vocab_size: one more than the largest id.
      settings: special tokens, stop tokens and chat templates.
      special_ids: ids that stand for no text.
    """

    def __init__(
        self,
        definition: str,
        settings: TokenizerSettings | None = None,
        *,
        added_tokens: Iterable[Mapping[str, Any]] = (),
        name: str = "tokenizer.json",
    ) -> None:
        """From the text of a `tokenizer.json`; truncation, padding and dropout are left out.

        Args:
          definition: the JSON.
          settings: see `TokenizerSettings`.
          added_tokens: tokens that are to be found in a text as a whole, each with its `content`
            and the flags that a `tokenizer.json` gives to added tokens. One with its `id` goes
            before what the definition says; one without only makes a token of the vocabulary an
            added one.
          name: what error messages call it.

        Raises:
          ValueError: the definition is no tokenizer, or an added token has no such id.
          UserError: the package `tokenizers` is missing.
        """
        library = tokenizers_library()
        fields = plain_definition(definition)
        kind = fields["model"].get("type", _MODELS[0])
        if kind not in _MODELS:
            raise ValueError(f"its model is of type {kind!r:.40}; allowed: {', '.join(_MODELS)}")
        self._tokenizer = _built(library, json.dumps(fields))
        self._lock = threading.Lock()
        self._add(library, added_tokens)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("it has no tokens")
        self.name = name
        self.settings = settings or TokenizerSettings()
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.special_ids: frozenset[int] = frozenset(
            number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text, if there is one."""
        return self._named("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text, if there is one."""
        return self._named("eos_token")

    @property
    def pad_id(self) -> int | None:
        """Token that fills rows, if there is one."""
        return self._named("pad_token")

    @property
    def separator(self) -> int:
        """Token that stands between two documents: the one that ends a text.

        Raises:
          UserError: there is none.
        """
        if self.eos_id is None:
            raise UserError("tokenizer", self.name, "names no token that ends a text (eos_token)")
        return self.eos_id

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of its canonical definition and special tokens."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        definition = json.loads(self._tokenizer.to_str())
        settings = self.settings
        said = [
            dict(settings.special_tokens),
            settings.stop_ids,
            settings.prefix_ids,
            settings.suffix_ids,
        ]
        return hashlib.sha256(canonical_json([definition, said]).encode()).hexdigest()

    @functools.cached_property
    def decoder(self) -> dict[str, Any] | None:
        """How tokens become text, as in the `decoder` of a `tokenizer.json`."""
        return json.loads(self._tokenizer.to_str())["decoder"]

    def encode(
        self, text: str, *, add_special_tokens: bool = False, parse_special: bool = False
    ) -> np.ndarray:
        """Tokens of a text: `[length]` in `token_dtype(vocab_size)`.

        Args:
          text: any text.
          add_special_tokens: put the tokens before and after it that the model expects.
          parse_special: read text that spells a special token as that token, as prompts made by
            a chat template need it. Otherwise such text is encoded like any other, so that no
            text of a user can pass for a special token.

        Raises:
          ValueError: the text holds half of a surrogate pair.
        """
        ids = self._encode(text, add_special_tokens, parse_special).ids
        return np.array(self._framed(ids, add_special_tokens), token_dtype(self.vocab_size))

    def encode_with_offsets(
        self, text: str, *, parse_special: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a text, and where each lies in it.

        Returns:
          `(tokens, offsets)`: as `encode` gives them, and int64 `[length, 2]`: the first
          character of each token and the one after its last. Tokens that are parts of one
          character have the same offsets.

        Raises:
          ValueError: the text holds half of a surrogate pair.
        """
        encoding = self._encode(text, False, parse_special, offsets=True)
        tokens = np.array(encoding.ids, token_dtype(self.vocab_size))
        return tokens, np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int] | np.ndarray, *, skip_special_tokens: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
          TypeError, ValueError: the ids are not whole numbers from 0 to `vocab_size - 1`.
        """
        checked = checked_ids(ids, self.vocab_size)
        return self._tokenizer.decode(checked, skip_special_tokens=skip_special_tokens)

    def with_settings(self, settings: TokenizerSettings) -> PretrainedTokenizer:
        """The same tokenizer with other settings; both share the vocabulary in memory."""
        other = copy.copy(self)
        other.settings = settings
        other.__dict__.pop("_digest", None)
        return other

    def token(self, number: int) -> str | None:
        """How the vocabulary spells an id; None where it has none."""
        return self._tokenizer.id_to_token(number) if 0 <= number < self.vocab_size else None

    def token_id(self, token: str, *, field: str = "tokenizer") -> int:
        """The id of a token, spelled as the vocabulary spells it.

        Raises:
          UserError: there is no such token; the message names those that are like it.
        """
        number = self._tokenizer.token_to_id(token)
        if number is not None:
            return number
        added = [known.content for known in self._tokenizer.get_added_tokens_decoder().values()]
        close = difflib.get_close_matches(token, added, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UserError(field, f"{token!r:.80}", f"is no token of {self.name}{hint}")

    def _add(self, library: Any, added_tokens: Iterable[Mapping[str, Any]]) -> None:
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        entries = [
            entry
            for entry in added_tokens
            if "id" in entry
            or (
                entry["content"] not in known
                and self._tokenizer.token_to_id(entry["content"]) is not None
            )
        ]
        entries.sort(key=lambda entry: entry.get("id", -1))
        self._tokenizer.add_tokens(
            [
                library.AddedToken(
                    entry["content"],
                    **{flag: bool(entry[flag]) for flag in _FLAGS if flag in entry},
                )
                for entry in entries
            ]
        )
        for entry in entries:
            number = self._tokenizer.token_to_id(entry["content"])
            if number != entry.get("id", number):
                raise ValueError(
                    f"the token {entry['content']!r:.60} is to have the id {entry['id']}, but the "
                    f"vocabulary gives it {number}"
                )

    def _named(self, name: str) -> int | None:
        token = self.settings.special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _framed(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        settings = self.settings
        if not add_special_tokens or settings.prefix_ids is None:
            return ids
        return [*settings.prefix_ids, *ids, *settings.suffix_ids]

    def _encode(
        self, text: str, add_special_tokens: bool, parse_special: bool, *, offsets: bool = False
    ) -> Any:
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
        by_definition = add_special_tokens and self.settings.prefix_ids is None
        with self._lock:
            self._tokenizer.encode_special_tokens = not parse_special
            try:
                return encode([text], add_special_tokens=by_definition)[0]
            except TypeError as error:
                raise ValueError("text holds half of a surrogate pair") from error


def check_vocabulary_size(
    tokenizer_size: int, model_size: int, *, name: str = "tokenizer", field: str = "tokenizer"
) -> None:
    """Refuses a tokenizer that has tokens for which the model has no embedding.

    A tokenizer with fewer tokens is fine: the embeddings of many models are padded.

    Args:
      tokenizer_size: `vocab_size` of the tokenizer.
      model_size: rows of the model's embedding.
      name: what error messages call the tokenizer.
      field: what the user calls it.

    Raises:
      UserError: the tokenizer is larger.
    """
    if tokenizer_size > model_size:
        problem = (
            f"has ids up to {tokenizer_size - 1}, but the model has embeddings for {model_size} "
            "tokens: they do not belong together"
        )
        raise UserError(field, name, problem)


def stop_ids(
    tokenizer: PretrainedTokenizer,
    tokens: Iterable[str | int] = (),
    *,
    field: str = "stop_tokens",
) -> tuple[int, ...]:
    """Tokens that end a text: those the model's files name, and more.

    Args:
      tokenizer: the model's.
      tokens: more of them, by id or as the vocabulary spells them.
      field: what the user calls them, for error messages.

    Returns:
      Ids in increasing order, each once.

    Raises:
      UserError: one is not in the vocabulary; the message names the nearest ones.
    """
    found = set(tokenizer.settings.stop_ids)
    for token in tokens:
        if isinstance(token, str):
            found.add(tokenizer.token_id(token, field=field))
        elif 0 <= token < tokenizer.vocab_size:
            found.add(int(token))
        else:
            problem = (
                f"is no token of {tokenizer.name}: ids are from 0 to {tokenizer.vocab_size - 1}"
            )
            raise UserError(field, token, problem)
    return tuple(sorted(found))


def _built(library: Any, definition: str) -> Any:
    try:
        return library.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"it is not a tokenizer: {first_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"it is not a tokenizer: {first_line(error)}") from error
