"""Chat templates of pretrained models: from messages to the text that the model was trained on.

They are Jinja2 programs that come with the model, and run in a sandbox with a budget.
"""

from __future__ import annotations

import datetime
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2.exceptions import SecurityError

from jaxlab.data.definitions import first_line
from jaxlab.data.pretrained_tokenizers import PretrainedTokenizer, stop_ids
from jaxlab.data.template_sandbox import OutOfBudget, Rendering, Sandbox, rendering
from jaxlab.errors import UserError

__all__ = [
    "JinjaChatTemplate",
    "encode_answers",
    "encode_prompt",
    "tokenizer_chat_template",
]

_LONGEST_SOURCE = 1 << 20


class JinjaChatTemplate:
    """A chat template of a pretrained model.

    Attributes:
      source: the template.
      marks_answers: whether it has `{% generation %}` around what the model says, and nowhere in a
        macro, a variable or a filter, where its place in the text is not known.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "chat template",
        field: str = "tokenizer.chat_template",
    ) -> None:
        """Compiles it.

        Args:
          source: the template.
          special_tokens: texts of the model's special tokens, which it may use by their common
            names (`bos_token`, ...).
          name: what error messages call it.
          field: what the user calls it.

        Raises:
          UserError: it is not a template, or uses what none may use.
        """
        self.source, self._name, self._field = source, name, field
        self._special_tokens = dict(special_tokens or {})
        if len(source) > _LONGEST_SOURCE:
            raise UserError(field, name, f"is longer than {_LONGEST_SOURCE} characters")
        token = rendering.set(Rendering())
        try:
            sandbox = Sandbox()
            self._template = sandbox.compiled(source)
            self.marks_answers = sandbox.marks_answers(source)
        except Exception as error:
            line = getattr(error, "lineno", None)
            place = "" if line is None else f" in line {line}"
            raise UserError(field, name, f"is no template{place}: {first_line(error)}") from error
        finally:
            rendering.reset(token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: turns, most often with `role` and `content`; entries that are None are left
            out.
          add_generation_prompt: end with what comes before an answer of the model.
          tools: JSON schemas of functions that the model may call.
          documents: what the model may look things up in.
          now: the time for templates that write a date; the clock's by default.
          **variables: anything else that the template knows.

        Returns:
          The text, to be encoded with `parse_special=True` and without `add_special_tokens`,
          since templates write the special tokens themselves.

        Raises:
          UserError: the template refuses the messages, fails, tries what it may not, or does too
            much.
          ValueError: something is given that JSON could not hold.
        """
        return self.render_with_answers(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            now=now,
            **variables,
        )[0]

    def render_with_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        now: datetime.datetime | None = None,
        **variables: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where the model speaks in it.

        Args:
          messages: as for `render`.
          now: as for `render`.
          **variables: as for `render`.

        Returns:
          `(text, spans)`: the first character of each part that the template marks as said by the
          model, and the one after its last; no spans if it marks none (see `marks_answers`).

        Raises:
          UserError, ValueError: as for `render`.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
        plain = {name: _plain(name, value) for name, value in given.items()}
        turns = [
            {key: value for key, value in turn.items() if value is not None}
            for turn in _plain("messages", list(messages))
        ]
        state = Rendering(now=now)
        token = rendering.set(state)
        pieces: list[str] = []
        try:
            for piece in self._template.generate(
                **{**self._special_tokens, **plain, "messages": turns}
            ):
                pieces.append(piece)
                state.length += len(piece)
        except Exception as error:
            raise self._error(error) from error
        finally:
            rendering.reset(token)
        return "".join(pieces), state.answers if self.marks_answers else []

    def _error(self, error: Exception) -> UserError:
        problems = {OutOfBudget: "does too much", SecurityError: "tries what it may not"}
        problem = problems.get(type(error), "fails for these messages")
        lines = [
            line
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == "<template>"
        ]
        place = f" in line {lines[-1]}" if lines else ""
        return UserError(self._field, self._name, f"{problem}{place}: {first_line(error)}")


def tokenizer_chat_template(
    tokenizer: PretrainedTokenizer, *, name: str = "default", field: str = "tokenizer.chat_template"
) -> JinjaChatTemplate:
    """The chat template that came with a tokenizer.

    Args:
      tokenizer: of the model.
      name: which one, if there are several.
      field: what the user calls it, for error messages.

    Raises:
      UserError: there is none of that name, or it cannot be compiled.
    """
    templates = tokenizer.settings.chat_templates
    if name not in templates:
        others = f"; it has {', '.join(sorted(templates))}" if templates else ""
        wanted = "no chat template" if name == "default" else f"no chat template {name!r}"
        problem = f"has {wanted}{others}: it takes plain text, or give it a template"
        raise UserError(field, tokenizer.name, problem)
    return JinjaChatTemplate(
        templates[name],
        special_tokens=tokenizer.settings.special_tokens,
        name=tokenizer.name,
        field=field,
    )


def encode_prompt(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PretrainedTokenizer,
    template: JinjaChatTemplate,
    *,
    allow_special: bool = False,
    **options: Any,
) -> np.ndarray:
    """Tokens after which the model is to answer.

    Args:
      messages: turns, as for `JinjaChatTemplate.render`.
      tokenizer: the model's.
      template: the model's.
      allow_special: accept messages that spell a special token. It would be read as one, so that
        what a user writes could end the user's turn.
      **options: further arguments of `JinjaChatTemplate.render`.

    Returns:
      `[length]` in `token_dtype(vocab_size)`.

    Raises:
      UserError: a message spells a special token, or as for `render`.
      ValueError: as for `render`.
    """
    if not allow_special:
        _refuse_special(messages, tokenizer)
    text = template.render(messages, **{"add_generation_prompt": True, **options})
    return tokenizer.encode(text, parse_special=True)


def encode_answers(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PretrainedTokenizer,
    template: JinjaChatTemplate,
    *,
    allow_special: bool = False,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """A conversation as tokens, and which of them the model says: a row for `ChatBatches`.

    Where the template marks what the model says, that counts. Otherwise an answer is what the
    assistant's turn adds to the text that prompts for it, up to the last token that ends a text.

    Args:
      messages: turns, as for `JinjaChatTemplate.render`, some of role `assistant`.
      tokenizer: the model's.
      template: the model's.
      allow_special: as for `encode_prompt`.
      **options: further arguments of `JinjaChatTemplate.render`.

    Returns:
      `(tokens, loss_mask)`, each `[length]`: integers of the tokenizer's type, and True for
      tokens that begin in an answer.

    Raises:
      UserError: a message spells a special token; the template does not mark answers, and changes
        earlier turns when later ones follow; or as for `render`.
      ValueError: as for `render`.
    """
    if not allow_special:
        _refuse_special(messages, tokenizer)
    text, spans = template.render_with_answers(messages, **options)
    if not template.marks_answers:
        spans = _added_spans(text, messages, tokenizer, template, options)
    tokens, offsets = tokenizer.encode_with_offsets(text, parse_special=True)
    said = np.zeros(len(text) + 1, bool)
    for begin, end in spans:
        said[begin:end] = True
    return tokens, said[offsets[:, 0]] & (offsets[:, 1] > offsets[:, 0])


def _added_spans(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PretrainedTokenizer,
    template: JinjaChatTemplate,
    options: Mapping[str, Any],
) -> list[tuple[int, int]]:
    """Where the assistant's turns lie in a text, found by rendering the turns before them."""
    ends = [tokenizer.token(number) or "" for number in stop_ids(tokenizer)]
    spans = []
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = template.render(messages[:place], **{**options, "add_generation_prompt": True})
        through = template.render(messages[: place + 1], **options)
        if not (through.startswith(before) and text.startswith(through)):
            raise UserError(
                "messages",
                f"turn {place}",
                "the chat template changes earlier turns when later ones follow, so answers must "
                "be marked in it: {% generation %}...{% endgeneration %}",
            )
        last = max((through.rfind(end) + len(end) for end in ends if end in through), default=0)
        spans.append((len(before), last if last > len(before) else len(through)))
    return spans


def _refuse_special(messages: Sequence[Mapping[str, Any]], tokenizer: PretrainedTokenizer) -> None:
    tokens = [tokenizer.token(number) for number in sorted(tokenizer.special_ids)]
    pattern = re.compile("|".join(re.escape(token) for token in tokens if token) or r"(?!)")
    for place, message in enumerate(messages):
        waiting: list[Any] = [*message.values()]
        while waiting:
            value = waiting.pop()
            if isinstance(value, Mapping):
                waiting += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple):
                waiting += value
            elif isinstance(value, str) and (found := pattern.search(value)):
                problem = f"spells the special token {found[0]!r:.60}, which no message may"
                raise UserError("messages", f"turn {place}", problem)


def _plain(name: str, value: Any) -> Any:
    """A copy that is made of JSON's types only, so that a template sees nothing else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{place}]", item) for place, item in enumerate(value)]
    raise ValueError(f"{name} is of type {type(value).__name__}: must be what JSON can hold")
