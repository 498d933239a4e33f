from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlab.errors import UserError
from jaxlab.models.pretrained.folders import FolderSource, content_mark, open_source
from jaxlab.models.pretrained.gguf_source import GgufSource
from jaxlab.models.pretrained.safetensors_files import save_safetensors
from tests.models.pretrained.gguf_writer import llama_metadata, llama_tensors, write_gguf

TENSORS = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float16)}


def folder_of(path: Path, config: Any = None, **save: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_safetensors(path, TENSORS, **save)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    return path


@pytest.mark.parametrize("size", [10, 1000])
def test_folder_with_one_file_or_several(tmp_path: Path, size: int):
    source = open_source(folder_of(tmp_path, max_shard_bytes=size))
    assert isinstance(source, FolderSource)
    assert source.config == {"model_type": "llama"}
    assert (source.generation_config, source.tokenizer) == ({}, None)
    assert list(source.keys()) == ["a", "b"]
    assert (source.shape("b"), source.dtype("b")) == ((2, 2), np.float16)
    np.testing.assert_array_equal(source.read("a"), [0, 1, 2])


def test_tokenizer_and_generation_config_are_found(tmp_path: Path):
    folder_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    source = open_source(tmp_path)
    assert source.tokenizer == tmp_path
    assert source.generation_config == {"eos_token_id": [1, 2]}


def test_gguf_file_and_folder_with_one(tmp_path: Path):
    path = write_gguf(tmp_path / "tiny.GGUF", llama_metadata(), llama_tensors())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for given in (path, tmp_path):
        source = open_source(given)
        assert isinstance(source, GgufSource)
        assert source.path == path
    write_gguf(tmp_path / "other.gguf", llama_metadata(), llama_tensors())
    with pytest.raises(UserError, match=r"has 2 .gguf files; name one of them: other.gguf, tiny"):
        open_source(tmp_path)
    folder_of(tmp_path)
    assert isinstance(open_source(tmp_path), FolderSource)


def test_run_with_an_export(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="is a run without an export folder"):
        open_source(tmp_path)
    folder_of(tmp_path / "export")
    assert open_source(tmp_path).path == tmp_path / "export"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, r"config\.json: is missing"),
        ({"config.json": "{}"}, "has neither model.safetensors nor model.safetensors.index.json$"),
        (
            {"config.json": "{}", "pytorch_model.bin": "x"},
            "; pytorch_model.bin is pickled, which is never read",
        ),
        ({"config.json": "{"}, r"config\.json: the file is not valid JSON"),
        ({"config.json": "[]"}, r"config\.json: the file is not a JSON object"),
        ({"config.json": ""}, r"config\.json: is empty"),
        ({"config.json": "{}", "model.safetensors": "garbage"}, r"model\.safetensors: is not a"),
        (
            {"config.json": "{}", "generation_config.json": "no"},
            r"generation_config\.json: the file is not valid JSON",
        ),
    ],
)
def test_folders_that_are_not_whole_are_one_line(tmp_path: Path, files: dict[str, str], words: str):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        open_source(tmp_path)
    assert "\n" not in str(caught.value)


def test_quantised_folder_names_method_and_tensor(tmp_path: Path):
    folder_of(tmp_path, {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(UserError, match="is quantised by gptq, which is not supported; allowed"):
        open_source(tmp_path)
    save_safetensors(tmp_path, TENSORS | {"q.qweight": np.ones(2, np.int32)})
    with pytest.raises(UserError, match=r"by gptq, e\.g\. its tensor q\.qweight, which"):
        open_source(tmp_path)


def test_other_files_are_refused(tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"weights\.bin: allowed: a \.gguf file, or a folder"):
        open_source(tmp_path / "weights.bin")
    with pytest.raises(UserError, match=r"none\.gguf: is missing"):
        open_source(tmp_path / "none.gguf")


def test_a_mark_follows_from_content_alone(tmp_path: Path):
    one, other = folder_of(tmp_path / "one"), folder_of(tmp_path / "other")
    (other / "log.json").write_text("no part of the model")
    first = content_mark(one)
    assert content_mark(other) == first
    (other / "tokenizer.json").write_text("{}")
    assert content_mark(other) != first
    (one / "config.json").write_text('{"model_type": "gpt2!"}')
    assert content_mark(one) != first
    big = tmp_path / "big.gguf"
    big.write_bytes(bytes(1 << 20))
    before = content_mark(big)
    content = np.zeros(1 << 20, np.uint8)
    content[::777] = 1
    big.write_bytes(content.tobytes())
    assert content_mark(big) != before
