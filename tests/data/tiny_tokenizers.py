"""Definitions of small tokenizers, of every kind that language models use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
# What byte-level vocabularies write for each byte.
LETTERS = [chr(byte) if byte in _VISIBLE else chr(256 + _HIDDEN.index(byte)) for byte in range(256)]


def spelled(data: bytes) -> str:
    """Bytes as a byte-level vocabulary writes them."""
    return "".join(LETTERS[byte] for byte in data)


def added(number: int, content: str, *, special: bool = True) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def definition(model: dict[str, Any], **parts: Any) -> str:
    empty = dict.fromkeys(
        ["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"]
    )
    return json.dumps({"version": "1.0", "added_tokens": [], **empty, **parts, "model": model})


def byte_level(more: Sequence[bytes] = (), *, begins: bool = False) -> str:
    """Bytes, some longer tokens, and `<s>`, `</s>`, `<tool>` at the end."""
    tokens = [*LETTERS, *(spelled(data) for data in more)]
    size = len(tokens)
    step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [size], "tokens": ["<s>"]}},
    }
    return definition(
        {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}, "merges": []},
        added_tokens=[
            added(size, "<s>"),
            added(size + 1, "</s>"),
            added(size + 2, "<tool>", special=False),
        ],
        pre_tokenizer=step,
        decoder=step,
        post_processor=template if begins else None,
    )


def byte_fallback(*, strip: int = 1, more: Sequence[str] = ()) -> str:
    """As SentencePiece: `▁` for a space, and tokens for the bytes of what is unknown."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "▁▁", "文", *more]
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    chain = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if strip:
        chain.append({"type": "Strip", "content": " ", "start": strip, "stop": 0})
    return definition(
        {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: n for n, token in enumerate(tokens)},
            "merges": [["▁", "a"], ["▁", "▁"]],
        },
        added_tokens=[added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        decoder={"type": "Sequence", "decoders": chain},
    )


def unigram() -> str:
    """As T5: pieces with probabilities, the unknown one among them."""
    pieces = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["▁", -2.0], ["▁ab", -3.0]]
    pieces += [["a", -4.0], ["b", -4.5], ["▁b", -5.0]]
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return definition(
        {"type": "Unigram", "unk_id": 2, "vocab": pieces, "byte_fallback": False},
        added_tokens=[added(0, "<pad>"), added(1, "</s>"), added(2, "<unk>")],
        pre_tokenizer=step,
        decoder=step,
    )


def word_piece() -> str:
    """As BERT: words, and pieces that continue one."""
    tokens = ["[UNK]", "[SEP]", "ab", "##a", "##b", "a", ",", ".", "don", "'", "t", "do", "not"]
    return definition(
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: n for n, token in enumerate(tokens)},
        },
        added_tokens=[added(1, "[SEP]")],
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
