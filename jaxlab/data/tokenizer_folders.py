"""Reads the tokenizer of a pretrained model from the folder of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlab.data.definitions import first_line
from jaxlab.data.pretrained_tokenizers import PretrainedTokenizer, TokenizerSettings
from jaxlab.errors import UserError

__all__ = ["load_tokenizer"]

# Names under which templates and configurations speak of a model's special tokens.
_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def load_tokenizer(
    path: os.PathLike[str] | str, *, field: str = "tokenizer"
) -> PretrainedTokenizer:
    """Reads the tokenizer of a model from its folder.

    `tokenizer.json` has to be there. Beside it are read, where they exist:
    `tokenizer_config.json` and `special_tokens_map.json` (names of special tokens, flags of added
    ones), `generation_config.json` (tokens that end a text), and the chat template:
    `chat_template.jinja` and `additional_chat_templates/*.jinja`, or `chat_template.json`, or the
    entry in `tokenizer_config.json`. Which tokens are put around a text is said by the
    post-processor in `tokenizer.json`; where it has none, by `add_bos_token` and `add_eos_token`.

    Args:
      path: the folder, or the `tokenizer.json` in it.
      field: what the user calls this path, for error messages.

    Raises:
      UserError: a file is missing, cannot be read or does not hold what it should, or the package
        `tokenizers` is missing.
    """
    given = Path(path)
    folder, file = (given.parent, given) if given.is_file() else (given, given / "tokenizer.json")
    if not file.is_file():
        raise UserError(field, _shown(given), _missing(folder))
    definition = _read(file, field)
    config = _object(folder / "tokenizer_config.json", field)
    generation = _object(folder / "generation_config.json", field)
    named = {**_object(folder / "special_tokens_map.json", field), **config}
    try:
        bare = PretrainedTokenizer(definition, added_tokens=_added_tokens(named), name=_shown(file))
    except ValueError as error:
        raise UserError(field, _shown(file), f"{error}; allowed: a tokenizer.json") from error
    tokens, size = _special_tokens(named, bare, _shown(folder), field), bare.vocab_size
    for name in ("bos_token", "eos_token", "pad_token"):
        number = _generation_ids(generation, f"{name}_id", size, _shown(folder), field)[:1]
        spelled = bare.token(number[0]) if number else None
        if spelled is not None:
            tokens.setdefault(name, spelled)
    begin, end = (
        (bare.token_id(tokens[name]),) if name in tokens else ()
        for name in ("bos_token", "eos_token")
    )
    framed = json.loads(definition).get("post_processor") is not None
    return bare.with_settings(
        TokenizerSettings(
            special_tokens=tokens,
            stop_ids=_generation_ids(generation, "eos_token_id", size, _shown(folder), field)
            or end,
            prefix_ids=None if framed else begin if config.get("add_bos_token") else (),
            suffix_ids=end if not framed and config.get("add_eos_token") else (),
            chat_templates=_chat_templates(folder, config, field),
        )
    )


def _shown(path: Path) -> str:
    shown = os.fspath(path)
    return shown if shown.isprintable() else ascii(shown)[1:-1]


def _missing(folder: Path) -> str:
    if not folder.exists():
        return "is missing; allowed: a folder with a tokenizer.json"
    others = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    held = [name for name in others if (folder / name).is_file()]
    if held:
        return f"has no tokenizer.json, only {', '.join(held)}: convert it to a tokenizer.json"
    return "has no tokenizer.json"


def _read(file: Path, field: str) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(field, _shown(file), "is not UTF-8") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(field, _shown(file), f"cannot be read: {reason}") from error


def _object(file: Path, field: str) -> dict[str, Any]:
    """A JSON object from a file; an empty one where there is no file."""
    if not file.is_file():
        return {}
    try:
        fields = json.loads(_read(file, field))
    except RecursionError as error:
        raise UserError(field, _shown(file), "is nested too deeply") from error
    except ValueError as error:
        raise UserError(field, _shown(file), f"is not JSON: {first_line(error)}") from error
    if not isinstance(fields, dict):
        raise UserError(field, _shown(file), "must be a JSON object")
    return fields


def _added_tokens(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise ValueError("added_tokens_decoder in tokenizer_config.json is no object")
    found = []
    for number, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (number.isascii() and number.isdigit() and isinstance(content, str)):
            raise ValueError(
                "added_tokens_decoder in tokenizer_config.json must give ids an object with content"
            )
        found.append({**entry, "id": int(number)})
    held = {entry["content"] for entry in found}
    named = {_content(config.get(name)) for name in _NAMES}
    return found + [
        {"content": token, "special": True} for token in sorted(named - held - {None}, key=str)
    ]


def _content(token: Any) -> str | None:
    """The text of a token that is given as such, or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _special_tokens(
    config: Mapping[str, Any], tokenizer: PretrainedTokenizer, folder: str, field: str
) -> dict[str, str]:
    """The special tokens that are named, and that the vocabulary has."""
    tokens = {}
    for name in _NAMES:
        token = _content(config.get(name))
        if config.get(name) is None:
            continue
        if token is None:
            raise UserError(field, folder, f"{name} must be text or an object with content")
        try:
            tokenizer.token_id(token, field=f"{field}: {name}")
        except UserError:
            # Generation would never end, or never begin well; the others are rarely used.
            if name in ("bos_token", "eos_token"):
                raise
            continue
        tokens[name] = token
    return tokens


def _generation_ids(
    generation: Mapping[str, Any], key: str, size: int, folder: str, field: str
) -> tuple[int, ...]:
    """Ids that the file names, without those that the vocabulary does not have."""
    value = generation.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(number, int) and number >= 0 for number in values):
        problem = f"{key} in generation_config.json must be an id or a list of ids"
        raise UserError(field, folder, problem)
    return tuple(number for number in values if number < size)


def _chat_templates(folder: Path, config: Mapping[str, Any], field: str) -> dict[str, str]:
    entry = config.get("chat_template")
    named = entry if isinstance(entry, list) else [{"name": "default", "template": entry}]
    legacy = _object(folder / "chat_template.json", field).get("chat_template")
    try:
        templates = {each["name"]: each["template"] for each in named}
    except (TypeError, KeyError) as error:
        problem = "chat_template must be text or a list of objects with name and template"
        raise UserError(field, _shown(folder), problem) from error
    templates |= {} if legacy is None else {"default": legacy}
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    templates |= {name: _read(file, field) for name, file in files.items() if file.is_file()}
    templates = {name: source for name, source in templates.items() if source is not None}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise UserError(field, _shown(folder), "chat_template must be text")
    return templates
