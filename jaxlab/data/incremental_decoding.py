"""Text while it is generated: tokens decoded one by one, and strings at which to stop.

Both are pure: a state goes in, a piece of text and the next state come out. What has been given
out never changes, and together the pieces are what decoding all tokens at once gives.
"""

from __future__ import annotations

import codecs
import functools
import re
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from jaxlab.data.pretrained_tokenizers import PretrainedTokenizer
from jaxlab.data.tokenizers import ByteTokenizer

__all__ = [
    "DecodingState",
    "IncrementalDecoder",
    "StopStrings",
    "StoppedText",
    "incremental_decoder",
]


class DecodingState(NamedTuple):
    """What an `IncrementalDecoder` has to remember between two tokens.

    Attributes:
      held: bytes, or tokens, whose text is not settled yet.
      previous: the last token that was settled, where the next one's text depends on it.
      strip: spaces that are still to be left out at the start of the text.
    """

    held: tuple[int, ...] = ()
    previous: int | None = None
    strip: int = 0


class IncrementalDecoder(Protocol):
    """Decodes tokens one by one."""

    def start(self) -> DecodingState:
        """The state before the first token."""
        ...

    def step(self, state: DecodingState, token: int) -> tuple[str, DecodingState]:
        """The text that one more token settles, which may be empty, and the next state.

        Raises:
          ValueError: the tokenizer has no such id.
        """
        ...

    def finish(self, state: DecodingState) -> str:
        """The text that is still held when no token follows."""
        ...


def incremental_decoder(
    tokenizer: PretrainedTokenizer | ByteTokenizer, *, skip_special_tokens: bool = False
) -> IncrementalDecoder:
    """Decodes the tokens of one text as they come.

    With byte-level vocabularies an unfinished character is held back. With byte fallback all
    bytes in a row are, since one that does not fit makes each of them a U+FFFD. Where the text of
    a token depends on later ones in another way, all text comes at the end.

    Args:
      tokenizer: of the model.
      skip_special_tokens: leave out tokens that stand for no text.

    Returns:
      A decoder. The pieces of its text, joined, are `tokenizer.decode` of all tokens.

    >>> decoder = incremental_decoder(ByteTokenizer())
    >>> text, state = decoder.step(decoder.start(), 0xC3)
    >>> decoder.step(state, 0xA9)[0]
    'é'
    """
    if isinstance(tokenizer, ByteTokenizer):
        return _Bytes([bytes([byte]) for byte in range(256)], frozenset())
    special = tokenizer.special_ids if skip_special_tokens else frozenset()
    chain = _chain(tokenizer.decoder)
    kinds = [step["type"] for step in chain]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return _Bytes(_spellings(tokenizer), special)
    if _is_fallback(chain):
        return _Fallback(tokenizer, chain, special)
    if kinds in ([], ["WordPiece"], ["Metaspace"]):
        return _Separate(tokenizer, special)
    return _Whole(tokenizer, skip_special_tokens)


class StoppedText(NamedTuple):
    """One step of `StopStrings`.

    Attributes:
      text: what may be shown.
      held: what could be the beginning of a stop string; goes into the next step.
      stop: the stop string that came, or None.
    """

    text: str
    held: str
    stop: str | None


class StopStrings:
    """Ends a text before the first of some strings, wherever its pieces are cut.

    Of several the one that is complete first counts, of those that end together the longest.

    >>> stops = StopStrings(["\\n\\n"])
    >>> stops.step("", "a\\n")
    StoppedText(text='a', held='\\n', stop=None)
    >>> stops.step("\\n", "\\nb")
    StoppedText(text='', held='', stop='\\n\\n')
    """

    def __init__(self, strings: Iterable[str]) -> None:
        """From the strings.

        Raises:
          ValueError: one is empty.
        """
        self.strings = tuple(dict.fromkeys(strings))
        if "" in self.strings:
            raise ValueError("strings: an empty stop string would stop everything")

    def step(self, held: str, text: str) -> StoppedText:
        """Takes one more piece of text.

        Args:
          held: of the step before; empty in the first.
          text: the piece.

        Returns:
          What may be shown and what may not yet. After a stop nothing is held, and what follows
          the stop string is dropped. When the text ends without one, what is held belongs to it.
        """
        text = held + text
        found = [
            (place + len(stop), place, stop)
            for stop in self.strings
            if (place := text.find(stop)) >= 0
        ]
        if found:
            _, place, stop = min(found)
            return StoppedText(text[:place], "", stop)
        kept = max((_overlap(text, stop) for stop in self.strings), default=0)
        return StoppedText(text[: len(text) - kept], text[len(text) - kept :], None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def _chain(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder, sequences within sequences laid out flat."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _chain(inner)]


def _is_fallback(chain: list[dict[str, Any]]) -> bool:
    """Whether tokens are spelled by replacements, bytes, one join and leading spaces left out."""
    letters = {"Replace": "r", "ByteFallback": "b", "Fuse": "f", "Strip": "s"}
    order = "".join(letters.get(step["type"], "?") for step in chain)
    return (
        re.fullmatch("r*b?(fs?)?", order) is not None
        and order != ""
        and all("String" in step["pattern"] for step in chain if step["type"] == "Replace")
        and all(step["stop"] == 0 for step in chain if step["type"] == "Strip")
    )


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (Radford et al. 2019).

    Visible characters of Latin-1 stand for their own byte, and the others, in order, have the
    characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode()


_KNOWN: weakref.WeakKeyDictionary[PretrainedTokenizer, list[bytes]] = weakref.WeakKeyDictionary()


def _spellings(tokenizer: PretrainedTokenizer) -> list[bytes]:
    """The bytes of every token; kept with the tokenizer, since a vocabulary is large."""
    if tokenizer not in _KNOWN:
        spelled = (tokenizer.token(number) for number in range(tokenizer.vocab_size))
        _KNOWN[tokenizer] = [_byte_level(token or "") for token in spelled]
    return _KNOWN[tokenizer]


def _check_token(token: int, size: int) -> None:
    if not 0 <= token < size:
        raise ValueError(f"token={token}: must be in [0, {size})")


class _Bytes:
    """Tokens are bytes of UTF-8."""

    def __init__(self, spellings: list[bytes], special: frozenset[int]) -> None:
        self._spellings, self._special = spellings, special

    def start(self) -> DecodingState:
        return DecodingState()

    def step(self, state: DecodingState, token: int) -> tuple[str, DecodingState]:
        _check_token(token, len(self._spellings))
        if token in self._special:
            return "", state
        data = bytes(state.held) + self._spellings[token]
        text, used = codecs.utf_8_decode(data, "replace", False)
        return text, state._replace(held=tuple(data[used:]))

    def finish(self, state: DecodingState) -> str:
        return bytes(state.held).decode(errors="replace")


class _Fallback:
    """Tokens are text, in which something stands for a space, or a single byte."""

    def __init__(
        self,
        tokenizer: PretrainedTokenizer,
        chain: list[dict[str, Any]],
        special: frozenset[int],
    ) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._replaced = [
            (step["pattern"]["String"], step["content"])
            for step in chain
            if step["type"] == "Replace"
        ]
        self._with_bytes = any(step["type"] == "ByteFallback" for step in chain)
        strips = [step for step in chain if step["type"] == "Strip"]
        self._stripped = strips[0]["content"] if strips else ""
        self._strip = strips[0]["start"] if strips else 0

    def start(self) -> DecodingState:
        return DecodingState(strip=self._strip)

    def step(self, state: DecodingState, token: int) -> tuple[str, DecodingState]:
        _check_token(token, self._tokenizer.vocab_size)
        spelled = self._tokenizer.token(token)
        if spelled is None or token in self._special:
            return "", state
        for old, new in self._replaced:
            spelled = spelled.replace(old, new)
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", spelled) if self._with_bytes else None
        if byte:
            return "", state._replace(held=(*state.held, int(byte[1], 16)))
        return self._stripped_text(_run(state.held) + spelled, state.strip)

    def finish(self, state: DecodingState) -> str:
        return self._stripped_text(_run(state.held), state.strip)[0]

    def _stripped_text(self, text: str, strip: int) -> tuple[str, DecodingState]:
        while text and strip and text[0] == self._stripped:
            text, strip = text[1:], strip - 1
        return text, DecodingState(strip=0 if text else strip)


def _run(values: tuple[int, ...]) -> str:
    """Bytes in a row: their text, or U+FFFD for each of them if they have none."""
    try:
        return bytes(values).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(values)


class _Separate:
    """The text of a token depends only on whether it is the first."""

    def __init__(self, tokenizer: PretrainedTokenizer, special: frozenset[int]) -> None:
        self._tokenizer, self._special = tokenizer, special

    def start(self) -> DecodingState:
        return DecodingState()

    def step(self, state: DecodingState, token: int) -> tuple[str, DecodingState]:
        _check_token(token, self._tokenizer.vocab_size)
        if token in self._special or self._tokenizer.token(token) is None:
            return "", state
        before = [] if state.previous is None else [state.previous]
        known = len(self._tokenizer.decode(before))
        text = self._tokenizer.decode([*before, token])[known:]
        return text, DecodingState(previous=token)

    def finish(self, state: DecodingState) -> str:
        return ""


class _Whole:
    """The text of a token may depend on all others."""

    def __init__(self, tokenizer: PretrainedTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens

    def start(self) -> DecodingState:
        return DecodingState()

    def step(self, state: DecodingState, token: int) -> tuple[str, DecodingState]:
        _check_token(token, self._tokenizer.vocab_size)
        return "", state._replace(held=(*state.held, token))

    def finish(self, state: DecodingState) -> str:
        return self._tokenizer.decode(state.held, skip_special_tokens=self._skip)
