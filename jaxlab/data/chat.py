"""Conversations for instruction tuning: read, written as tokens, and cut into batches.

Only what the assistant says counts in the loss: its words and the token that ends them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from jaxlab.data.batches import EndlessBatches, EpochOrder
from jaxlab.data.readers import OnSkip, is_text, read_json_lines
from jaxlab.data.tokenizers import Tokenizer
from jaxlab.errors import UserError

__all__ = [
    "ChatBatches",
    "ChatTemplate",
    "Message",
    "encode_conversation",
    "read_conversations",
]

_FIELD = "data.path"
_ROLES = ("system", "user", "assistant")
_ANSWER = "assistant"


class Message(TypedDict):
    """One turn of a conversation.

    Attributes:
      role: `system`, `user` or `assistant`.
      content: its text.
    """

    role: str
    content: str


@dataclass(frozen=True)
class ChatTemplate:
    """How turns become text: a header that names the role, then the content as it is.

    A turn ends with the tokenizer's separator, a token that no text contains, so no content can
    pass for the turn of another role.

    Attributes:
      header: text before the content, in which `{role}` stands for the role.

    Raises:
      ValueError: the header does not hold `{role}`.
    """

    header: str = "[{role}]\n"

    def __post_init__(self) -> None:
        if "{role}" not in self.header:
            raise ValueError(f"header={self.header!r}: must hold {{role}}")


_DEFAULT_TEMPLATE = ChatTemplate()


def read_conversations(
    path: os.PathLike[str] | str, *, skip_bad: bool = False, on_skip: OnSkip | None = None
) -> Iterator[list[Message]]:
    """Conversations of a file of JSON lines, compressed if its name ends in `.gz`.

    A line holds `{"messages": [{"role": ..., "content": ...}, ...]}` or
    `{"prompt": ..., "response": ...}`; other keys are ignored, and so are blank lines.

    Args:
      path: the file.
      skip_bad: pass over lines that cannot be used, instead of stopping at the first.
      on_skip: then called with the place and the reason of each.

    Returns:
      An iterator over messages, among them at least one answer, that is a turn of the assistant;
      errors within the file come when it gets there.

    Raises:
      UserError: the path is no file, or a line holds no conversation and `skip_bad` is not set.
    """
    lines = read_json_lines(path, skip_bad=skip_bad, on_skip=on_skip)
    return _conversations(lines, skip_bad, on_skip)


def encode_conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    template: ChatTemplate = _DEFAULT_TEMPLATE,
) -> tuple[np.ndarray, np.ndarray]:
    """A conversation as one row of tokens, and which of them are the assistant's.

    Each turn is its header, its content and the separator, encoded one by one, so that no token
    belongs to two of them.

    Args:
      messages: at least one.
      tokenizer: its separator must not occur in what it makes of a text.
      template: the headers.

    Returns:
      `(tokens, loss_mask)`, each `[length]`: integers of the tokenizer's type, and True for the
      contents of the assistant's turns and the separators after them. The mask is of targets:
      a token counts where it is to be predicted.

    Raises:
      ValueError: there are no messages, a role is unknown, or the separator occurs in a text.
    """
    if not messages:
        raise ValueError("messages: there must be at least one")
    parts: list[np.ndarray] = []
    counted: list[bool] = []
    for place, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLES:
            raise ValueError(f"messages[{place}] has role {role!r}: allowed: {', '.join(_ROLES)}")
        texts = template.header.replace("{role}", role), message["content"]
        header, content = (tokenizer.encode(text) for text in texts)
        if (header == tokenizer.separator).any() or (content == tokenizer.separator).any():
            raise ValueError(
                f"messages[{place}] holds the separator, token {tokenizer.separator}, "
                "which ends a turn"
            )
        parts += [header, content, np.array([tokenizer.separator], header.dtype)]
        counted += [False, role == _ANSWER, role == _ANSWER]
    return np.concatenate(parts), np.repeat(counted, [len(part) for part in parts])


class ChatBatches(EndlessBatches[dict[str, np.ndarray]]):
    """Batches of conversations, one a row, in the orders of `EpochOrder`.

    A batch is a dict of int32 `tokens` and boolean `loss_mask`, each `[batch_size, length]`; rows
    are padded at their end with token 0, which the mask leaves out. What comes after the newest
    answer is dropped, since nothing in it counts. A conversation that is then longer than a row
    loses its oldest tokens, but never a part of its newest answer.

    With logits of `tokens[:, :-1]`, targets are `tokens[:, 1:]` under `loss_mask[:, 1:]`.

    Attributes:
      length: tokens in a row.
      batch_size: rows in a batch.
      seed: of the orders.
      steps_per_epoch: batches in a pass over the conversations.
      num_conversations: those that are used.
      num_skipped: those that were left out.
    """

    def __init__(
        self,
        conversations: Iterable[tuple[np.ndarray, np.ndarray]],
        *,
        length: int,
        batch_size: int,
        seed: int,
        skip_bad: bool = False,
    ) -> None:
        """Cuts the conversations and keeps them in memory, without padding.

        Args:
          conversations: `(tokens, loss_mask)` of each, as `encode_conversation` gives them.
          length: tokens in a row, at least 2.
          batch_size: rows in a batch, at least 1.
          seed: of the orders, at least 0.
          skip_bad: leave conversations out instead of refusing them.

        Raises:
          ValueError: a conversation's arrays do not fit together, or a number is out of its range.
          UserError: a conversation has no answer, or its newest one does not fit into a row after
            at least one other token; or there are too few conversations for one batch.
        """
        if length < 2:
            raise ValueError(f"length={length}: must be at least 2")
        kept: list[tuple[np.ndarray, np.ndarray]] = []
        self.num_skipped = 0
        for number, (tokens, loss_mask) in enumerate(conversations, start=1):
            try:
                kept.append(_cut(f"conversation {number}", tokens, loss_mask, length))
            except UserError:
                if not skip_bad:
                    raise
                self.num_skipped += 1
        if len(kept) < batch_size:
            problem = f"too few for one batch: batch_size={batch_size}"
            raise UserError("data", f"{len(kept)} conversations", problem)
        self._order = EpochOrder(len(kept), batch_size=batch_size, seed=seed)
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.steps_per_epoch = self._order.steps_per_epoch
        self.num_conversations = len(kept)
        self._sizes = np.array([len(tokens) for tokens, _ in kept])
        self._begins = np.cumsum(self._sizes) - self._sizes
        self._tokens = np.concatenate([tokens for tokens, _ in kept])
        self._loss_mask = np.concatenate([loss_mask for _, loss_mask in kept])

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step."""
        rows = self._order.rows(step)
        places = np.arange(self.length)[None, :]
        held = places < self._sizes[rows][:, None]
        index = np.where(held, self._begins[rows][:, None] + places, 0)
        return {
            "tokens": self._tokens[index].astype(np.int32) * held,
            "loss_mask": self._loss_mask[index] & held,
        }


def _cut(
    name: str, tokens: np.ndarray, loss_mask: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The end of a conversation up to its newest answer, at most `length` tokens."""
    if tokens.ndim != 1 or tokens.shape != loss_mask.shape or loss_mask.dtype != np.bool_:
        raise ValueError(
            f"{name} has tokens {tokens.shape} and a loss_mask {loss_mask.shape} of type "
            f"{loss_mask.dtype}: must be two rows of one length, the second boolean"
        )
    answers = np.flatnonzero(loss_mask)
    if not len(answers):
        raise UserError("data", name, "has no answer of the assistant")
    stop = int(answers[-1]) + 1
    before = np.flatnonzero(~loss_mask[:stop])
    size = stop - (int(before[-1]) + 1 if len(before) else 0)
    if size >= length:
        raise UserError(
            "data",
            name,
            f"its newest answer has {size} tokens; rows of length={length} hold {length - 1} "
            "after a token of what it answers",
        )
    kept = slice(max(0, stop - length), stop)
    return tokens[kept], loss_mask[kept]


def _conversations(
    lines: Iterable[tuple[str, dict[str, Any]]], skip_bad: bool, on_skip: OnSkip | None
) -> Iterator[list[Message]]:
    for place, fields in lines:
        try:
            messages = _messages(place, fields)
        except UserError as error:
            if not skip_bad:
                raise
            if on_skip is not None:
                on_skip(place, error.allowed)
            continue
        yield messages


def _messages(place: str, fields: dict[str, Any]) -> list[Message]:
    if "messages" in fields:
        turns = fields["messages"]
        if not isinstance(turns, list) or not turns:
            raise UserError(_FIELD, place, "messages must be a list with at least one message")
        messages = [_message(place, f"messages[{i}]", turn) for i, turn in enumerate(turns)]
    elif {"prompt", "response"} <= fields.keys():
        pairs = ("prompt", "user"), ("response", _ANSWER)
        messages = [
            _message(place, key, {"role": role, "content": fields[key]}) for key, role in pairs
        ]
    else:
        raise UserError(_FIELD, place, "needs the key messages, or both prompt and response")
    if all(message["role"] != _ANSWER for message in messages):
        raise UserError(_FIELD, place, f"has no message of role {_ANSWER}")
    return messages


def _message(place: str, name: str, turn: Any) -> Message:
    if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
        raise UserError(_FIELD, place, f"{name} must be an object with role and content")
    role, content = turn["role"], turn["content"]
    if role not in _ROLES:
        close = difflib.get_close_matches(str(role).lower(), _ROLES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        allowed = ", ".join(_ROLES)
        raise UserError(_FIELD, place, f"{name} has role {role!r}; {hint}allowed: {allowed}")
    if not isinstance(content, str):
        raise UserError(_FIELD, place, f"the content of {name} must be text, not {content!r:.40}")
    if not is_text(content):
        problem = f"{name} holds a character that no text has: NUL, or half a surrogate pair"
        raise UserError(_FIELD, place, problem)
    return {"role": role, "content": content}
