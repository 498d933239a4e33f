"""The tool that generates text: the text on standard output, all else on standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jaxlab.errors import UserError
from jaxlab.experiments import machine
from jaxlab.experiments.generate.config import GenerateConfig, TextSettings
from jaxlab.experiments.generate.language_model import (
    Completion,
    LanguageModel,
    Request,
    load_language_model,
    open_model_files,
    prepare,
)
from jaxlab.models.decoder import parameter_count
from jaxlab.parallel.processes import ProcessSettings, is_main, start_processes
from jaxlab.reporting.files import write_atomic

__all__ = ["run"]

_SEPARATOR = "---"  # between several texts


def run(config: GenerateConfig) -> int:
    """Generates what is asked for.

    Args:
      config: validated settings.

    Returns:
      The exit code, 0.

    Raises:
      jaxlab.errors.JaxlabError: see the errors' own texts.
    """
    prompt = _read_prompt(config.prompt)
    _check_output(config.output)
    start_processes(ProcessSettings(**dataclasses.asdict(config.distributed)))
    settings = config.text_settings()
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision(config.precision))
        stack.enter_context(machine.compilation_cache(config.compilation_cache))
        mesh = machine.chosen_mesh(config)
        start = time.perf_counter()
        files = open_model_files(config.model)
        request = prepare(files, prompt, settings)
        model = load_language_model(files, dtype=config.dtype, mesh=mesh)
        show = Status(is_main() and not config.quiet)
        show(
            f"{config.model}: {parameter_count(model.params) / 1e6:.1f} M parameters, "
            f"{config.dtype}, loaded in {time.perf_counter() - start:.1f} s"
        )
        completions = _generate(model, request, settings, show)
    if is_main():
        if config.output is not None:
            write_atomic(config.output, _as_lines(prompt, completions))
        elif config.log_probs:
            _print_log_probs(model, completions)
    return 0


class Status:
    """Lines on standard error, if there are to be any."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def __call__(self, line: str) -> None:
        if self._enabled:
            print(line, file=sys.stderr, flush=True)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None:
        raise UserError("prompt", "null", "needed: the text to go on from, or - for standard input")
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise UserError("prompt", "-", "standard input is not UTF-8") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise UserError("prompt", "-", "standard input is empty")
    return text


def _check_output(output: str | None) -> None:
    if output is None:
        return
    folder = Path(output).absolute().parent
    if not folder.is_dir() or Path(output).is_dir() or not os.access(folder, os.W_OK):
        raise UserError("output", output, "allowed: a file in a folder that can be written")


def _generate(
    model: LanguageModel, request: Request, settings: TextSettings, show: Status
) -> list[Completion]:
    """Generates, and prints as much as there is of the text whenever there is more."""
    clock = _Clock()
    completions: list[Completion] = []
    # A flag instead of an exception, which a callback of the compiled program could swallow.
    with _written() as write, machine.stop_requests(is_main(), notice="stopping") as stop:
        for completions in model.stream(request, settings):
            clock.note(sum(len(completion.tokens) for completion in completions))
            if len(completions) == 1:
                write(completions[0].text)
            if (number := stop()) is not None:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if len(completions) > 1:
            write(f"\n{_SEPARATOR}\n".join(completion.text for completion in completions))
    show(f"{len(request.tokens)} tokens of prompt; {clock.summary()}")
    return completions


@contextlib.contextmanager
def _written() -> Iterator[_Writer]:
    """Ends what was written with a new line, also after Ctrl-C."""
    writer = _Writer(is_main())
    try:
        yield writer
    except BrokenPipeError:
        raise
    except BaseException:
        if writer.length:
            writer.end()
        raise
    writer.end()


class _Writer:
    """Writes what is new of a growing text."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.length = 0

    def __call__(self, text: str) -> None:
        new, self.length = text[self.length :], len(text)
        if new and self._enabled:
            sys.stdout.write(new)
            sys.stdout.flush()

    def end(self) -> None:
        if self._enabled:
            print(flush=True)


class _Clock:
    """How fast tokens come, without what happens once: compilation and the prompt."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._marks: list[tuple[float, int]] = []

    def note(self, tokens: int) -> None:
        self._marks.append((time.perf_counter(), tokens))

    def summary(self) -> str:
        (first, _), (last, total) = self._marks[0], self._marks[-1]
        text = f"{total} new tokens in {last - self._start:.1f} s"
        text += f", the first after {first - self._start:.1f} s"
        if len(self._marks) < 3 or self._marks[-1][1] == self._marks[1][1]:
            return text
        second, count = self._marks[1]
        return f"{text}; then {(total - count) / (last - second):.1f} tokens/s"


def _as_lines(prompt: str, completions: Sequence[Completion]) -> str:
    entries = [
        {"prompt": prompt, "sample": number, **completion._asdict()}
        for number, completion in enumerate(completions)
    ]
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def _print_log_probs(model: LanguageModel, completions: Sequence[Completion]) -> None:
    """A line for each token: its number, log-probability, id and text."""
    for number, completion in enumerate(completions):
        print(f"\n{_SEPARATOR} {number}" if len(completions) > 1 else "")
        print("place  log-probability      id  token")
        for place, (token, value) in enumerate(
            zip(completion.tokens, completion.log_probs, strict=True)
        ):
            text = json.dumps(model.tokenizer.decode([token]), ensure_ascii=False)
            print(f"{place:>5}  {value:>15.4f}  {token:>6}  {text}")
        print(f"sum    {sum(completion.log_probs):>15.4f}", flush=True)
