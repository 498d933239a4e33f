import json

import numpy as np
import pytest

from jaxlab.data.definitions import canonical_json, checked_ids, first_line, plain_definition


def test_a_definition_loses_what_varies():
    text = json.dumps({"model": {"dropout": 0.1, "x": 1}, "truncation": {}, "padding": {}})
    assert plain_definition(text) == {
        "model": {"dropout": None, "x": 1},
        "truncation": None,
        "padding": None,
    }
    for bad, words in (
        ("{", "not JSON"),
        ("[]", "no model"),
        ('{"model": 1}', "no model"),
        ("[" * 100_000, "nested"),
    ):
        with pytest.raises(ValueError, match=words):
            plain_definition(bad)


def test_json_is_canonical_whatever_the_order():
    assert canonical_json({"b": 1, "a": [1, 2]}) == canonical_json({"a": [1, 2], "b": 1})
    assert canonical_json({"b": 1, "a": [1, 2]}) == '{"a":[1,2],"b":1}'


def test_errors_become_one_line():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"
    assert len(first_line(ValueError("x" * 999))) == 200


def test_ids_are_whole_numbers_in_range():
    assert checked_ids(np.array([0, 4]), 5) == checked_ids(iter([0, 4]), 5) == [0, 4]
    with pytest.raises(ValueError, match="must be in"):
        checked_ids([5], 5)
    with pytest.raises(TypeError, match="integers"):
        checked_ids(np.array([0.5]), 5)
