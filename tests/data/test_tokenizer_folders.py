import json

import pytest

from jaxlab.data.tokenizer_folders import load_tokenizer
from jaxlab.errors import UserError
from tests.data.tiny_tokenizers import byte_level, definition


def written(folder, made=None, **files):
    """A model's folder; double underscores in a name stand for a dot."""
    (folder / "tokenizer.json").write_text(byte_level() if made is None else made)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_folder_and_its_file_are_the_same(tmp_path):
    folder = load_tokenizer(written(tmp_path))
    file = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert folder.digest == file.digest
    assert folder.settings.special_tokens == {}
    assert folder.settings.chat_templates == {}
    assert folder.settings.stop_ids == ()


def test_special_tokens_are_named_beside_it(tmp_path):
    tokenizer = load_tokenizer(
        written(
            tmp_path,
            tokenizer_config__json={
                "eos_token": {"content": "</s>", "lstrip": False},
                "pad_token": "<not there>",
                "unk_token": None,
            },
            special_tokens_map__json={"bos_token": "<s>", "eos_token": "<s>"},
        )
    )
    # What the configuration says goes before the map; what the vocabulary lacks is left out.
    assert tokenizer.settings.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert tokenizer.settings.stop_ids == (257,)


def test_generation_says_what_ends_a_text(tmp_path):
    tokenizer = load_tokenizer(
        written(
            tmp_path,
            tokenizer_config__json={"eos_token": "</s>"},
            generation_config__json={"eos_token_id": [3, 257], "bos_token_id": 256},
        )
    )
    assert tokenizer.settings.stop_ids == (3, 257)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    written(tmp_path, generation_config__json={"eos_token_id": 256})
    assert load_tokenizer(tmp_path).settings.stop_ids == (256,)
    # What the vocabulary does not have cannot end a text.
    written(tmp_path, generation_config__json={"eos_token_id": [256, 10**30], "bos_token_id": 9999})
    assert load_tokenizer(tmp_path).settings.stop_ids == (256,)


def test_the_post_processor_goes_before_the_flags(tmp_path):
    flags = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    bare = load_tokenizer(written(tmp_path, tokenizer_config__json=flags))
    assert bare.encode("a", add_special_tokens=True).tolist() == [256, 97, 257]
    framed = load_tokenizer(written(tmp_path, byte_level(begins=True)))
    assert framed.encode("a", add_special_tokens=True).tolist() == [256, 97]


def test_added_tokens_of_the_configuration_count(tmp_path):
    more = {"259": {"content": "<more>", "special": True, "rstrip": True}}
    tokenizer = load_tokenizer(
        written(
            tmp_path,
            tokenizer_config__json={
                "added_tokens_decoder": more,
                "mask_token": "aa",
                "pad_token": "b",
            },
        )
    )
    assert tokenizer.encode("<more> b", parse_special=True).tolist() == [259, 98]
    # A named token is a special one, if the vocabulary has it.
    assert tokenizer.special_ids == {98, 256, 257, 259}


def test_chat_templates_come_from_the_newest_place(tmp_path):
    def templates():
        return load_tokenizer(tmp_path).settings.chat_templates

    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    written(tmp_path, tokenizer_config__json={"chat_template": "one"})
    assert templates() == {"default": "one"}
    written(tmp_path, tokenizer_config__json={"chat_template": several})
    assert templates() == {"default": "a", "tool_use": "b"}
    written(tmp_path, chat_template__json={"chat_template": "c"})
    assert templates() == {"default": "c", "tool_use": "b"}
    written(tmp_path, chat_template__jinja="d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("e")
    assert templates() == {"default": "d", "tool_use": "b", "rag": "e"}


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match=r"model.path=.*none: is missing; allowed: a folder"):
        load_tokenizer(tmp_path / "none", field="model.path")
    with pytest.raises(UserError, match=r"has no tokenizer.json$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no tokenizer.json, only tokenizer.model: convert it"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("made", "files", "words"),
    [
        (byte_level()[:200], {}, "tokenizer.json: it is not JSON"),
        ("{}", {}, "there is no model in it; allowed: a tokenizer.json"),
        (definition({"type": "Mamba", "vocab": {}}), {}, "type 'Mamba'"),
        (None, {"tokenizer_config__json": '{"a": '}, "tokenizer_config.json: is not JSON"),
        (None, {"tokenizer_config__json": "[]"}, "must be a JSON object"),
        (None, {"generation_config__json": "[" * 99_999}, "nested too deeply"),
        (None, {"generation_config__json": {"eos_token_id": "2"}}, "an id or a list of ids"),
        (None, {"generation_config__json": {"eos_token_id": [2, -1]}}, "an id or a list of ids"),
        (None, {"tokenizer_config__json": {"eos_token": "</S>"}}, "did you mean </s>"),
        (None, {"tokenizer_config__json": {"eos_token": 2}}, "eos_token must be text"),
        (None, {"tokenizer_config__json": {"added_tokens_decoder": [1]}}, "added_tokens_decoder"),
        (
            None,
            {"tokenizer_config__json": {"added_tokens_decoder": {"x": {"content": "y"}}}},
            "must give ids an object with content",
        ),
        (None, {"tokenizer_config__json": {"chat_template": 5}}, "chat_template must be text"),
        (None, {"tokenizer_config__json": {"chat_template": [5]}}, "a list of objects"),
    ],
)
def test_bad_files_are_one_line(tmp_path, made, files, words):
    with pytest.raises(UserError, match=words) as caught:
        load_tokenizer(written(tmp_path, made, **files))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "</S>" in str(caught.value)


def test_what_is_not_text_is_refused(tmp_path):
    written(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"tokenizer.json: is not UTF-8"):
        load_tokenizer(tmp_path)
