"""Tokenizers from the vocabulary that a GGUF file holds.

A GGUF file has no `tokenizer.json`. It holds the tokens with a type each, merges or scores, the
ids of special tokens, and the name of the rule that cuts text into words. What the rules are is
written down in llama.cpp, which defines the format; they are followed here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlab.data.pretrained_tokenizers import PretrainedTokenizer, TokenizerSettings
from jaxlab.errors import UserError

__all__ = ["gguf_tokenizer"]

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_SPACE = "\u2581"

# How text is cut into words before merges are looked for: regular expressions, one after another.
_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"(?i:{_ENDINGS})|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}"
_QWEN2 = rf"(?i:{_ENDINGS})|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}"
_QWEN35 = (
    rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
_GPT4O = (
    rf"{_START}{_UPPER}*{_LOWER}+(?i:{_ENDINGS})?|{_START}{_UPPER}+{_LOWER}*(?i:{_ENDINGS})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}""",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")

_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2")
_FAMILIES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    _DEFAULT: ("default",),
    (_GPT2,): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat"),
    (r"\p{N}", _GPT2): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    (_LLAMA3,): (*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    (_QWEN2,): ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "kormo"),
    (_QWEN35,): ("qwen35",),
    (_TEKKEN,): ("tekken",),
    (_GPT4O,): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    _DEEPSEEK3: ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    _DEEPSEEK_CODER: ("deepseek-coder",),
    _FALCON: ("falcon",),
}
_PRE_TOKENIZERS = {name: splits for splits, names in _FAMILIES.items() for name in names}
# A word that is a token as a whole is not put together from merges.
_WHOLE_WORDS = frozenset({*_LLAMA3_NAMES, "tekken", "glm4"})
_BEGINS = frozenset({*_LLAMA3_NAMES, "tekken"})


def gguf_tokenizer(
    model: str,
    tokens: Sequence[str],
    *,
    merges: Sequence[str] = (),
    scores: Sequence[float] | np.ndarray = (),
    token_types: Sequence[int] | np.ndarray = (),
    pre: str = "default",
    bos_id: int | None = None,
    eos_id: int | None = None,
    unk_id: int | None = None,
    pad_id: int | None = None,
    more_stop_ids: Sequence[int] = (),
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    add_space_prefix: bool | None = None,
    chat_template: str | None = None,
    name: str = "GGUF file",
    field: str = "tokenizer",
) -> PretrainedTokenizer:
    """The tokenizer of a GGUF file, from the entries `tokenizer.ggml.*` of its header.

    What the header does not say is not done: the normalisation of Unicode that some models'
    `tokenizer.json` asks for.

    Args:
      model: `gpt2` for byte-level BPE with merges, `llama` for the BPE of SentencePiece, with
        scores and tokens for the bytes of what it does not know.
      tokens: spelling of every token.
      merges: for `gpt2`: pairs of tokens with a space between, the earliest first.
      scores: for `llama`: of every token; of the pairs that can be merged the one that makes the
        token of the highest score is.
      token_types: of every token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
        6 byte; all normal by default.
      pre: for `gpt2`: name of the rule that cuts text into words.
      bos_id: token that begins a text.
      eos_id: token that ends a text.
      unk_id: token for what has none.
      pad_id: token that fills rows.
      more_stop_ids: further tokens that end a text (`eot_token_id`, `eom_token_id`).
      add_bos: whether the model expects `bos_id` before a text; if it is not said, for `llama`
        and some of the names in `pre`.
      add_eos: whether the model expects `eos_id` after a text; if it is not said, not.
      add_space_prefix: for `llama`: whether a space is put before a text and after each special
        token; if it is not said, it is.
      chat_template: source of the chat template.
      name: what error messages call the file.
      field: what the user calls it.

    Raises:
      UserError: an entry is not of its kind or does not fit to the others, or the package
        `tokenizers` is missing.
    """
    types = [int(kind) for kind in token_types] or [_NORMAL] * len(tokens)
    _check_entries(tokens, types, field, name)
    ids = {"bos_token": bos_id, "eos_token": eos_id, "unk_token": unk_id, "pad_token": pad_id}
    for key, number in ids.items():
        if number is not None and not 0 <= number < len(tokens):
            raise UserError(field, name, f"{key}_id is {number}; it has {len(tokens)} tokens")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = None if unk_id is None else tokens[unk_id]
    if model == "gpt2":
        rules = _byte_level(vocabulary, merges, pre, field, name)
        begins = pre in _BEGINS
    elif model == "llama":
        prefix = True if add_space_prefix is None else bool(add_space_prefix)
        rules = _sentencepiece(vocabulary, scores, types, unknown, prefix, field, name)
        begins = True
    else:
        allowed = "allowed: gpt2 (byte-level BPE), llama (SentencePiece BPE)"
        raise UserError(field, name, f"has a tokenizer of model {model!r:.40}; {allowed}")
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "post_processor": None,
        **rules,
    }
    begin = begins if add_bos is None else add_bos
    settings = TokenizerSettings(
        special_tokens={key: tokens[number] for key, number in ids.items() if number is not None},
        stop_ids=tuple(dict.fromkeys([*_known(eos_id), *map(int, more_stop_ids)])),
        prefix_ids=_known(bos_id) if begin else (),
        suffix_ids=_known(eos_id) if add_eos else (),
        chat_templates={} if chat_template is None else {"default": chat_template},
    )
    try:
        return PretrainedTokenizer(json.dumps(definition), settings, name=name)
    except ValueError as error:
        raise UserError(field, name, str(error)) from error


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found in a text as a whole; user-defined ones stand for text."""
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]


def _check_entries(tokens: Sequence[str], types: Sequence[int], field: str, name: str) -> None:
    if not len(tokens):
        raise UserError(field, name, "has no tokens")
    if len(types) != len(tokens):
        problem = f"has {len(tokens)} tokens, but types for {len(types)}"
        raise UserError(field, name, problem)
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise UserError(field, name, f"has the token {twice!r:.60} twice")


def _known(number: int | None) -> tuple[int, ...]:
    return () if number is None else (int(number),)


def _byte_level(
    vocabulary: Mapping[str, int], merges: Sequence[str], pre: str, field: str, name: str
) -> dict[str, Any]:
    splits = _PRE_TOKENIZERS.get(pre)
    if splits is None:
        close = difflib.get_close_matches(pre, _PRE_TOKENIZERS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        allowed = ", ".join(sorted(_PRE_TOKENIZERS))
        raise UserError(field, name, f"has a pre-tokenizer {pre!r:.40}; {hint}allowed: {allowed}")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        # Joined, since a merge makes a token.
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            problem = f"has the merge {' '.join(pair)!r:.60}, which is not one of two tokens to one"
            raise UserError(field, name, problem)
    cuts = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in splits
    ]
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, bytes_]},
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "ignore_merges": pre in _WHOLE_WORDS,
            "vocab": vocabulary,
            "merges": pairs,
        },
    }


def _sentencepiece(
    vocabulary: Mapping[str, int],
    scores: Sequence[float] | np.ndarray,
    types: Sequence[int],
    unknown: str | None,
    prefix: bool,
    field: str,
    name: str,
) -> dict[str, Any]:
    if len(scores) != len(vocabulary):
        problem = f"has {len(vocabulary)} tokens, but scores for {len(scores)}"
        raise UserError(field, name, problem)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *after,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": _merges_of_scores(vocabulary, scores, types),
        },
    }


def _merges_of_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float] | np.ndarray, types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the one with the highest score first.

    Of the pairs that make one token, the one with the longer first half goes before the others.
    """
    normal = {token for token, kind in zip(vocabulary, types, strict=True) if kind == _NORMAL}
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    tokens = list(vocabulary)
    return [
        (token[:cut], token[cut:])
        for token in (tokens[number] for number in order)
        if token in normal
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in normal and token[cut:] in normal
    ]
