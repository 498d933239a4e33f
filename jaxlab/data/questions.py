"""Questions with short answers: read from a user's file, and put into prompts with examples.

`jaxlab.data.facts` makes questions without a file.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxlab.data.readers import OnSkip, is_text, read_json_lines
from jaxlab.errors import UserError

__all__ = ["Question", "few_shot_prompt", "read_questions", "split_examples"]

_FIELD = "data.path"
_INSTRUCTION = "Answer each question as briefly as possible."


@dataclass(frozen=True)
class Question:
    """A question and what counts as its answer.

    Attributes:
      question: its text.
      answers: accepted answers, at least one; the first is the one to show.
      id: unique within its source.
      topic: a group to balance or report by; empty if there are none.

    Raises:
      ValueError: the question or an answer is empty, or there is no answer.
    """

    question: str
    answers: tuple[str, ...]
    id: str
    topic: str = ""

    def __post_init__(self) -> None:
        if not self.question.strip() or not self.answers or not all(map(str.strip, self.answers)):
            raise ValueError(f"question {self.id!r}: neither it nor its answers may be empty")


def read_questions(
    path: os.PathLike[str] | str, *, skip_bad: bool = False, on_skip: OnSkip | None = None
) -> list[Question]:
    """The questions of a file of JSON lines, compressed if its name ends in `.gz`.

    A line holds `{"question": ..., "answers": [...]}`, where `answers` may also be a single text,
    and perhaps an `id` (text or whole number, by default the line's number) and a `topic`. Other
    keys are ignored, and so are blank lines. White space around texts is dropped.

    Args:
      path: the file.
      skip_bad: pass over lines that cannot be used, instead of stopping at the first.
      on_skip: then called with the place and the reason of each.

    Returns:
      At least one question, in the order of the file.

    Raises:
      UserError: the path is no file, a line holds no question or an id that was there before and
        `skip_bad` is not set, or there is no question at all.
    """
    questions: dict[str, Question] = {}
    skipped = 0
    for place, fields in read_json_lines(path, skip_bad=skip_bad, on_skip=on_skip):
        try:
            question = _question(place, fields)
            if question.id in questions:
                raise UserError(_FIELD, place, f"its id {question.id!r} was there before")
        except UserError as error:
            if not skip_bad:
                raise
            skipped += 1
            if on_skip is not None:
                on_skip(place, error.allowed)
            continue
        questions[question.id] = question
    if not questions:
        passed_over = f"; {skipped} bad lines were passed over" if skipped else ""
        raise UserError(_FIELD, os.fspath(path), f"holds no questions{passed_over}")
    return list(questions.values())


def split_examples(
    questions: Sequence[Question], num_examples: int, *, seed: int = 0
) -> tuple[list[Question], list[Question]]:
    """Questions to show with their answers, and the others, to ask.

    The examples are spread evenly over the topics. A question that has the same text as an example
    is in neither list.

    Args:
      questions: at least one more than the examples.
      num_examples: at least 0.
      seed: which questions are examples; follows from the seed and their ids.

    Returns:
      (examples, others); the others in their order.

    Raises:
      ValueError: there are not so many questions, or none is left to ask.
    """
    if not 0 <= num_examples < len(questions):
        raise ValueError(
            f"num_examples={num_examples}: must lie in [0, {len(questions)}), since "
            f"there are {len(questions)} questions"
        )

    def place(question: Question) -> bytes:
        return hashlib.sha256(f"examples/{seed}/{question.id}".encode()).digest()

    by_topic: dict[str, list[Question]] = {}
    for question in sorted(questions, key=place):
        by_topic.setdefault(question.topic, []).append(question)
    # Rounds over the topics: first each topic's first question, then the second ones.
    rounds = sorted(
        (
            (number, question)
            for group in by_topic.values()
            for number, question in enumerate(group)
        ),
        key=lambda turn: (turn[0], place(turn[1])),
    )
    examples: list[Question] = []
    shown: set[str] = set()
    for _, question in rounds:
        if len(examples) < num_examples and _same(question.question) not in shown:
            examples.append(question)
            shown.add(_same(question.question))
    others = [question for question in questions if _same(question.question) not in shown]
    if len(examples) < num_examples or not others:
        raise ValueError(
            f"num_examples={num_examples}: there are too few questions of different text"
        )
    return examples, others


def few_shot_prompt(
    question: Question | str,
    examples: Sequence[Question] = (),
    *,
    instruction: str = _INSTRUCTION,
) -> str:
    """A prompt for a language model that continues text: examples, then the question.

    The examples are `Q: ...` and `A: ...` lines with their first answer. The prompt ends with
    `A:` and no space, so that the answer's first token can be one that begins with a space.

    Args:
      question: what to ask.
      examples: see `split_examples`.
      instruction: the first line; left out if empty.

    Raises:
      ValueError: the question is among the examples.

    Example:
      >>> shown = Question("What is 1 plus 1?", ("2", "two"), "a")
      >>> print(few_shot_prompt("What is 1 plus 2?", [shown], instruction="Be brief."))
      Be brief.
      <BLANKLINE>
      Q: What is 1 plus 1?
      A: 2
      <BLANKLINE>
      Q: What is 1 plus 2?
      A:
    """
    text = question if isinstance(question, str) else question.question
    if _same(text) in {_same(example.question) for example in examples}:
        raise ValueError(f"examples: {text!r} is asked and must not be shown with its answer")
    parts = [instruction] if instruction else []
    parts += [f"Q: {example.question}\nA: {example.answers[0]}" for example in examples]
    return "\n\n".join([*parts, f"Q: {text}\nA:"])


def _same(text: str) -> str:
    """What makes two questions the same."""
    return " ".join(text.casefold().split())


def _question(place: str, fields: dict[str, Any]) -> Question:
    for name in ("question", "answers"):
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {near[0]!r} to be {name!r}?" if near else ""
            raise UserError(_FIELD, place, f"has no field {name!r}{hint}")
    text = _text(place, "question", fields["question"])
    given = fields["answers"]
    if isinstance(given, str):
        answers = (_text(place, "answers", given),)
    elif isinstance(given, list) and given:
        answers = tuple(_text(place, f"answers[{i}]", answer) for i, answer in enumerate(given))
    else:
        problem = f"answers must be a text or a list with at least one, not {given!r:.40}"
        raise UserError(_FIELD, place, problem)
    name = fields.get("id")
    if name is None:
        name = place.rpartition(" ")[2]
    elif isinstance(name, bool) or not isinstance(name, str | int):
        raise UserError(_FIELD, place, f"id must be a text or a whole number, not {name!r:.40}")
    topic = fields.get("topic")
    topic = "" if topic is None else _text(place, "topic", topic)
    return Question(text, answers, _text(place, "id", str(name)), topic)


def _text(place: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(_FIELD, place, f"{name} must be text, not {value!r:.40}")
    if not value.strip():
        raise UserError(_FIELD, place, f"{name} is empty; allowed: text")
    if not is_text(value):
        problem = f"{name} holds a character that no text has: NUL, or half a surrogate pair"
        raise UserError(_FIELD, place, problem)
    return value.strip()
