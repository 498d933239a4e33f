"""Questions to a chat model behind an OpenAI-compatible endpoint, and a record of its answers.

A reply that could be used is written to a file at once, so a run that stops goes on where it was,
and one that is repeated asks nothing. The key comes from the environment and goes into requests
and nowhere else.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from jaxlab.errors import StorageError, UserError

__all__ = ["ChatClient", "ReplyCache", "UnclearReply", "reply_key"]

T = TypeVar("T")

# The openai package wants a key; local servers that ask for none ignore this one.
_NO_KEY = "none"
_SHOWN = 120  # characters of a text in an error line


def reply_key(model: str, prompt: str) -> str:
    """The name of a reply in a `ReplyCache`: a hash of the model and the prompt, in hex."""
    return hashlib.sha256(json.dumps([model, prompt]).encode()).hexdigest()


class UnclearReply(UserError):
    """A model replied, but twice not what it was asked for."""


class ReplyCache:
    """Replies by model and prompt, in a file of JSON lines, or in memory only.

    A line is `{"key": ..., "model": ..., "prompt": ..., "reply": ...}`. Lines are only ever added,
    each in one write; the last one of a key counts. A line that was cut off at the end of the file
    (a crash, a full disk) counts as not written.
    """

    def __init__(self, path: os.PathLike[str] | str | None) -> None:
        """Reads what is there.

        Args:
          path: the file; it and its folder are created when the first reply comes.

        Raises:
          UserError: the file cannot be read, or a line of it is no reply.
        """
        self.path = None if path is None else os.path.expanduser(os.fspath(path))
        self._replies: dict[str, str] = {}
        self._checked_end = False
        if self.path is not None:
            self._read(self.path)

    def __len__(self) -> int:
        return len(self._replies)

    def get(self, key: str) -> str | None:
        """The reply under a key of `reply_key`."""
        return self._replies.get(key)

    def add(self, model: str, prompt: str, reply: str) -> None:
        """Keeps a reply.

        Raises:
          StorageError: the file cannot be written.
        """
        key = reply_key(model, prompt)
        self._replies[key] = reply
        if self.path is None:
            return
        record = {"key": key, "model": model, "prompt": prompt, "reply": reply}
        line = (json.dumps(record) + "\n").encode()
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            with open(self.path, "a+b", buffering=0) as file:
                if not self._checked_end:
                    _drop_cut_off_line(file)
                    self._checked_end = True
                if file.write(line) != len(line):
                    raise OSError("only a part was written")
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"cannot write {self.path}: {reason}") from error

    def _read(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
            raise UserError("judge.cache", path, reason) from error
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            recorded = _recorded(line)
            if recorded is None:
                problem = "is no recorded reply; allowed: lines that jaxlab wrote, unchanged"
                raise UserError("judge.cache", f"{path} line {number}", problem)
            self._replies.update([recorded])


def _recorded(line: bytes) -> tuple[str, str] | None:
    try:
        record = json.loads(line)
        key, reply = record["key"], record["reply"]
        good = isinstance(reply, str) and key == reply_key(record["model"], record["prompt"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (key, reply) if good else None


def _drop_cut_off_line(file: io.FileIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.readall().rfind(b"\n") + 1)


class _Reply(NamedTuple):
    text: str
    cut_off: bool


class _Failure(NamedTuple):
    """What an error line says; made where the request failed, raised away from it."""

    field: str
    value: object
    allowed: str


class ChatClient:
    """One model at one endpoint.

    Attributes:
      base_url: of the endpoint, without credentials and query.
      model: its name there.
      cache: the replies so far.
      offline: whether only recorded replies are used.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_variable: str = "OPENAI_API_KEY",
        cache: os.PathLike[str] | str | None = None,
        offline: bool = False,
        timeout: float = 60.0,
        max_retries: int = 4,
        temperature: float | None = 0.0,
        max_tokens: int | None = 16,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        """Opens no connection yet, and needs no `openai` package where all replies are recorded.

        Args:
          base_url: such as `http://127.0.0.1:8000/v1`.
          model: the name under which the endpoint knows it.
          api_key_variable: the environment variable that holds the key; read when it is needed.
            Where it is not set, requests carry a placeholder, which local servers accept.
          cache: file of recorded replies; None keeps them in memory.
          offline: answer from the record alone and never connect.
          timeout: seconds for one try.
          max_retries: further tries after a time-out, a lost connection, a 408, 409 or 429, or a
            server's error; the wait doubles from half a second to 8, or is what the server says.
          temperature: None leaves it out, for models that refuse it.
          max_tokens: the longest reply; None leaves it out. Models that think before they answer
            need more.
          extra_body: further fields of the request, e.g. `{"seed": 0}`.

        Raises:
          UserError: the address is not one, the model has no name, there is nothing to replay, or
            the record is damaged.
          ValueError: a number is out of its range.
        """
        if not model:
            raise UserError("judge.model", "''", "is empty; allowed: the model's name")
        if not timeout > 0 or max_retries < 0:
            raise ValueError(f"timeout={timeout}, max_retries={max_retries}: must be > 0 and >= 0")
        self.base_url, self.model, self.offline = _shown_url(base_url), model, offline
        self.cache = ReplyCache(cache)
        if offline and self.cache.path is None:
            raise UserError("judge.cache", None, "offline needs the file of recorded replies")
        self._given_url, self._api_key_variable = base_url, api_key_variable
        self._timeout, self._max_retries = timeout, max_retries
        fields = {"temperature": temperature, "max_tokens": max_tokens}
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._extra_body = dict(extra_body or {})
        self._max_tokens = max_tokens
        self._connection: Any = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.base_url!r}, {self.model!r}, cache={self.cache.path!r}, "
            f"offline={self.offline})"
        )

    def ask(self, prompt: str, parse: Callable[[str], T | None], *, allowed: str, about: str) -> T:
        """What the model replies to a prompt, from the record or from the endpoint.

        A reply that cannot be parsed is sent back once, with the reminder of what is allowed.

        Args:
          prompt: the whole prompt, as the user's message.
          parse: the meaning of a reply, or None for a reply that has none.
          allowed: the replies that `parse` knows, in words.
          about: what an error line shows of the prompt, such as the question.

        Raises:
          UnclearReply: the reply cannot be parsed twice.
          UserError: the endpoint cannot be reached or refuses; nothing is recorded and `offline`
            is set; or the `openai` package is missing.
          StorageError: the reply cannot be written.
        """
        recorded = self.cache.get(reply_key(self.model, prompt))
        meaning = None if recorded is None else parse(recorded)
        if meaning is not None:
            return meaning
        if self.offline:
            raise UserError(
                "judge.offline",
                True,
                f"{self.cache.path} holds no reply of {self.model} about {_brief(about)}",
            )
        messages = [{"role": "user", "content": prompt}]
        reply = self._complete(messages)
        meaning = parse(reply.text)
        if meaning is None:
            messages += [
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": f"Reply with nothing but {allowed}."},
            ]
            reply = self._complete(messages)
            meaning = parse(reply.text)
        if meaning is None:
            cut = f" (cut off at max_tokens={self._max_tokens})" if reply.cut_off else ""
            raise UnclearReply(
                "judge.model",
                self.model,
                f"replied twice without an answer about {_brief(about)}, at last "
                f"{self._safe(reply.text)!r}{cut}; allowed: {allowed}",
            )
        self.cache.add(self.model, prompt, reply.text)
        return meaning

    def _complete(self, messages: list[dict[str, str]]) -> _Reply:
        outcome = self._try_to_complete(messages)
        if isinstance(outcome, _Reply):
            return outcome
        # Raised out here, so that no request, whose headers hold the key, hangs on the error.
        raise UserError(*outcome)

    def _try_to_complete(self, messages: list[dict[str, str]]) -> _Reply | _Failure:
        openai = _package(self.base_url)
        if self._connection is None:
            key = self._key()
            if not (key.isascii() and key.isprintable()):  # others show up in errors of requests
                problem = "holds characters that no key has; allowed: printable ASCII"
                return _Failure("judge.api_key_variable", self._api_key_variable, problem)
            self._connection = openai.OpenAI(
                base_url=self._given_url,
                api_key=key or _NO_KEY,
                timeout=self._timeout,
                max_retries=self._max_retries,
            )
        try:
            completion = self._connection.chat.completions.create(
                model=self.model, messages=messages, extra_body=self._extra_body, **self._fields
            )
        except openai.APIStatusError as error:
            return self._refusal(error)
        except openai.APITimeoutError:
            return self._unreachable(f"gave no answer within {self._timeout:g} s")
        except openai.APIConnectionError as error:
            return self._unreachable(f"cannot be reached: {self._safe(_cause(error))}")
        except (openai.OpenAIError, ValueError) as error:
            return self._malformed(_cause(error))
        return self._read_completion(completion)

    def _read_completion(self, completion: Any) -> _Reply | _Failure:
        # The package builds this from whatever came, without checking it.
        choices = getattr(completion, "choices", None)
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = getattr(choice, "message", None)
        if message is None:
            return self._malformed("it has no choices")
        text = getattr(message, "content", None)
        cut_off = getattr(choice, "finish_reason", None) == "length"
        return _Reply(self._without_key(text) if isinstance(text, str) else "", cut_off)

    def _key(self) -> str:
        return os.environ.get(self._api_key_variable, "").strip()

    def _refusal(self, error: Any) -> _Failure:
        status, said = error.status_code, self._safe(_cause(error))
        if status in (401, 403):
            name = self._api_key_variable
            problem = "refused the key in this variable" if self._key() else "wants a key here"
            return _Failure(
                "judge.api_key_variable", name, f"{self.base_url} {problem} (status {status})"
            )
        if status == 404:
            problem = f"unknown at {self.base_url}, or this is not the endpoint's address: {said}"
            return _Failure("judge.model", self.model, problem)
        if status == 429 or status >= 500:
            return self._unreachable(f"failed: {said}")
        return _Failure("judge.base_url", self.base_url, f"refused the request: {said}")

    def _unreachable(self, problem: str) -> _Failure:
        if self._max_retries:
            problem += f", {self._max_retries + 1} times"
        if self.cache.path is not None:
            problem += f"; {len(self.cache)} replies are kept in {self.cache.path}"
        return _Failure("judge.base_url", self.base_url, problem)

    def _malformed(self, problem: str) -> _Failure:
        return _Failure(
            "judge.base_url",
            self.base_url,
            f"sent no chat completion: {self._safe(problem)}; allowed: an endpoint that is "
            "compatible with OpenAI's",
        )

    def _without_key(self, text: str) -> str:
        """A text from outside; a server may have echoed the key."""
        key = self._key()
        return text.replace(key, "[key]") if key else text

    def _safe(self, text: str) -> str:
        return _brief(self._without_key(text))


def _package(url: str) -> Any:
    try:
        return importlib.import_module("openai")
    except ImportError:
        problem = "asking an endpoint needs openai: pip install 'jaxlab[judge]'"
        raise UserError("judge.base_url", url, problem) from None


def _shown_url(url: str) -> str:
    """An address without what may be secret in it."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = named and url.isprintable() and " " not in url
    except ValueError:
        good = False
    if not good:
        shown = _brief(url.rpartition("@")[2].partition("?")[0])
        raise UserError(
            "judge.base_url", shown or "''", "allowed: an address such as http://127.0.0.1:8000/v1"
        )
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def _cause(error: BaseException) -> str:
    """What an error says, with the one below it, which often says more."""
    below = error.__cause__
    words = [str(error).rstrip(".")] + ([str(below)] if below is not None and str(below) else [])
    return ": ".join(words)


def _brief(text: str) -> str:
    line = " ".join(text.split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."
