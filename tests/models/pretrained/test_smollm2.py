"""SmolLM2-135M against the values that `transformers` computes from the same file.

The values are in `tests/golden/smollm2.json`: torch 2.13, transformers 5.24, float32.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.data.gguf_tokenizers import gguf_tokenizer
from jaxlab.data.pretrained_tokenizers import PretrainedTokenizer
from jaxlab.models.generation import GenerationSettings, generate
from jaxlab.models.int8_weights import quantize_weights
from jaxlab.models.pretrained.loading import Pretrained, load_pretrained
from jaxlab.models.pretrained.tensors import GgufVocabulary
from tests.goldens import FOLDER

pytestmark = pytest.mark.pretrained

NEW_TOKENS = 40
LICENSE = Path(__file__).parents[3] / "LICENSE"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def smollm2() -> Pretrained:
    return load_pretrained("smollm2-135m")


@functools.cache
def expected() -> dict[str, Any]:
    return json.loads((FOLDER / "smollm2.json").read_text(encoding="utf-8"))


def rows(lists: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    """Tokens of different lengths with padding behind them, and where they are valid."""
    length = max(len(row) for row in lists)
    tokens = np.array([row + [0] * (length - len(row)) for row in lists], np.int32)
    valid = np.array([[place < len(row) for place in range(length)] for row in lists])
    return jnp.asarray(tokens), jnp.asarray(valid)


def log_probabilities(model: Pretrained, lists: list[list[int]]) -> np.ndarray:
    tokens, valid = rows(lists)
    apply = jax.jit(lambda p, t, v: model.model.apply({"params": p}, t, valid=v))
    logits: Any = apply(model.params, tokens, valid)
    return np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float64)


def tokenizer_of(model: Pretrained) -> PretrainedTokenizer:
    assert isinstance(model.tokenizer, GgufVocabulary)
    return gguf_tokenizer(**vars(model.tokenizer))


def test_config_is_that_of_the_model(smollm2: Pretrained):
    config = smollm2.config
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == (
        "llama",
        30,
        576,
    )
    assert smollm2.generation_config["eos_token_id"] == 2


def test_next_token_losses_of_texts(smollm2: Pretrained):
    texts = expected()["text"]
    found = log_probabilities(smollm2, [text["ids"] for text in texts])
    for text, row in zip(texts, found, strict=True):
        ids = np.array(text["ids"])
        losses = -row[np.arange(ids.size - 1), ids[1:]]
        np.testing.assert_allclose(losses, text["next_token_nll"], rtol=0, atol=TOLERANCE)


def test_logits_and_likelihood_of_answers(smollm2: Pretrained):
    chats = expected()["chat"]
    whole = [chat["prompt_ids"] + chat["greedy_ids"] for chat in chats]
    found = log_probabilities(smollm2, whole)
    for chat, row in zip(chats, found, strict=True):
        last = len(chat["prompt_ids"]) - 1
        logits = np.array(chat["top5_logits"]) - chat["logsumexp"]
        np.testing.assert_allclose(row[last, chat["top5_ids"]], logits, rtol=0, atol=TOLERANCE)
        assert np.argsort(-row[last])[:5].tolist() == chat["top5_ids"]
        answer = chat["greedy_ids"]
        loss = -sum(row[last + place, token] for place, token in enumerate(answer))
        assert loss == pytest.approx(chat["greedy_nll"], abs=TOLERANCE)


def test_logits_themselves(smollm2: Pretrained):
    chat = expected()["chat"][0]
    logits: Any = smollm2.model.apply(
        {"params": smollm2.params}, jnp.asarray([chat["prompt_ids"]], jnp.int32)
    )
    found = np.asarray(logits)[0, -1]
    np.testing.assert_allclose(found[chat["top5_ids"]], chat["top5_logits"], rtol=0, atol=TOLERANCE)


def test_greedy_answers(smollm2: Pretrained):
    chats = expected()["chat"]
    settings = GenerationSettings(
        max_new_tokens=NEW_TOKENS, stop_ids=(smollm2.generation_config["eos_token_id"],)
    )
    prompts = [chat["prompt_ids"] for chat in chats]
    found = generate(smollm2.model, smollm2.params, prompts, settings=settings)
    tokenizer = tokenizer_of(smollm2)
    for index, chat in enumerate(chats):
        length = found.lengths[index, 0]
        answer = found.tokens[index, 0, :length].tolist()
        assert answer == chat["greedy_ids"]
        assert tokenizer.decode(answer) == chat["greedy_text"]
        loss = -found.log_probs[index, 0, :length].sum(dtype=np.float64)
        assert loss == pytest.approx(chat["greedy_nll"], abs=TOLERANCE)


def test_weights_in_8_bits(smollm2: Pretrained):
    text = LICENSE.read_text(encoding="utf-8")[:1500]
    ids = tokenizer_of(smollm2).encode(text).tolist()
    rounded = dataclasses.replace(smollm2, params=quantize_weights(smollm2.params))
    size = [sum(x.nbytes for x in jax.tree.leaves(m.params)) for m in (rounded, smollm2)]
    assert size[0] < 0.26 * size[1]
    losses = []
    for model in (smollm2, rounded):
        row = log_probabilities(model, [ids])[0]
        losses.append(-row[np.arange(len(ids) - 1), ids[1:]].mean())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_tokens_of_texts(smollm2: Pretrained):
    for text in expected()["text"]:
        assert tokenizer_of(smollm2).encode(text["text"]).tolist() == text["ids"]
