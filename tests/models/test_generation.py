import dataclasses
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.models.beam_search import BeamSettings, beam_search
from jaxlab.models.caches import sliding_window_cache
from jaxlab.models.decoder import Decoder
from jaxlab.models.generation import GenerationSettings, decode, generate, start, stream
from jaxlab.models.prefill import DENSE_CACHE, mesh_of, pad_prompts, prefill
from jaxlab.ops.sampling import sampling_log_probs

VOCAB = 11
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
KEY = jax.random.key(7)
MODEL = Decoder(
    vocab_size=VOCAB, width=8, num_layers=1, num_heads=2, num_kv_heads=1, hidden_width=12
)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Compiling takes longer than running here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_params(model: Decoder, seed: int = 0) -> Any:
    """Weights with which every part matters to the logits."""
    draw = np.random.default_rng(seed).normal
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]

    def fill(leaf: Any) -> jax.Array:
        values = draw(1, 0.1, leaf.shape) if leaf.ndim == 1 else draw(0, 0.4, leaf.shape)
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(fill, nn.unbox(shapes))


PARAMS = make_params(MODEL)
FORWARD = jax.jit(lambda tokens: MODEL.apply({"params": PARAMS}, tokens))


def logits_of(texts: np.ndarray) -> np.ndarray:
    """Of the token after each token of texts `[batch, seq]`, all at once and without a cache."""
    batch, length = texts.shape
    padded = np.pad(texts, ((0, 30 - batch), (0, 16 - length)))
    return np.asarray(FORWARD(padded))[:batch, :length]


def log_softmax(x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(x.astype(np.float64), axis=-1))


def settings(**changes: Any) -> GenerationSettings:
    return GenerationSettings(**{"max_new_tokens": 5, **changes})


GREEDY = settings(sampling_log_probs=True)
SAMPLED = settings(temperature=1.5, num_samples=2, sampling_log_probs=True)


CALLS: list[tuple[int, int]] = []
TRACES: list[int] = []


def watch(layer: int, inputs: Any, state: Any, carry: Any) -> Any:
    """Notes each execution of the model, with its number of sequences and tokens."""
    TRACES.append(layer)
    shape = inputs.positions.shape
    jax.debug.callback(lambda: CALLS.append(shape), ordered=True)
    return DENSE_CACHE.attend(layer, inputs, state, carry)


WATCHED = dataclasses.replace(DENSE_CACHE, attend=watch)


def calls_of(task: Callable[[], Any]) -> tuple[Any, list[tuple[int, int]]]:
    CALLS.clear()
    found = task()
    jax.effects_barrier()
    return found, list(CALLS)


@pytest.fixture(scope="module")
def sampled() -> Any:
    return generate(MODEL, PARAMS, PROMPTS, KEY, settings=SAMPLED)


def test_log_probabilities_are_those_of_teacher_forcing(sampled):
    assert sampled.tokens.shape == (3, 2, 5)
    for prompt, texts, log_probs, drawn in zip(
        PROMPTS, sampled.tokens, sampled.log_probs, sampled.sampling_log_probs, strict=True
    ):
        for text, values, under_the_law in zip(texts, log_probs, drawn, strict=True):
            logits = logits_of(np.array([[*prompt, *text]]))[0, len(prompt) - 1 : -1]
            places = np.arange(5), text
            np.testing.assert_allclose(values, log_softmax(logits)[places], atol=1e-5, rtol=0)
            expected = log_softmax(logits / 1.5)[places]
            np.testing.assert_allclose(under_the_law, expected, atol=1e-5, rtol=0)


def test_greedy_takes_the_most_probable_token():
    found = generate(MODEL, PARAMS, PROMPTS, settings=GREEDY)
    for prompt, text in zip(PROMPTS, found.tokens[:, 0].tolist(), strict=True):
        best = logits_of(np.array([prompt + text]))[0, len(prompt) - 1 : -1].argmax(-1)
        assert text == best.tolist()
    assert found.sampling_log_probs is not None
    assert not found.sampling_log_probs.any()


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_changes_nothing(sampled, side):
    width, valid = 9, np.zeros((3, 9), bool)
    tokens = np.full((3, width), 9)
    for row, prompt in enumerate(PROMPTS):
        room = width - len(prompt)
        first = {"left": room, "right": 0, "both": room // 2}[side]
        tokens[row, first : first + len(prompt)] = prompt
        valid[row, first : first + len(prompt)] = True
    found = generate(MODEL, PARAMS, tokens, KEY, settings=SAMPLED, valid=valid)
    np.testing.assert_array_equal(found.tokens, sampled.tokens)
    np.testing.assert_allclose(found.log_probs, sampled.log_probs, atol=1e-5, rtol=0)


def test_prompts_in_chunks(sampled):
    found = generate(MODEL, PARAMS, PROMPTS, KEY, settings=SAMPLED, prefill_chunk=3)
    np.testing.assert_array_equal(found.tokens, sampled.tokens)
    np.testing.assert_allclose(found.log_probs, sampled.log_probs, atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_its_batch(sampled):
    keys = jnp.stack([jax.random.fold_in(KEY, row) for row in range(3)])
    for row in (0, 2):
        alone = generate(
            MODEL, PARAMS, PROMPTS[row : row + 1], keys[row : row + 1], settings=SAMPLED
        )
        np.testing.assert_array_equal(alone.tokens[0], sampled.tokens[row])
        np.testing.assert_allclose(alone.log_probs[0], sampled.log_probs[row], atol=1e-5, rtol=0)


def test_more_samples_begin_with_the_same(sampled):
    three = dataclasses.replace(SAMPLED, num_samples=3)
    found = generate(MODEL, PARAMS, PROMPTS, KEY, settings=three)
    np.testing.assert_array_equal(found.tokens[:, :2], sampled.tokens)
    assert len({tuple(text) for text in found.tokens[0].tolist()}) == 3


def test_stream_gives_the_tokens_of_generate(sampled):
    parts = list(stream(MODEL, PARAMS, PROMPTS, KEY, settings=SAMPLED, tokens_per_dispatch=3))
    assert [part.lengths.max() for part in parts] == [1, 4, 5]
    for part in parts:
        length = part.lengths.max()
        np.testing.assert_array_equal(part.tokens[..., :length], sampled.tokens[..., :length])
        assert not part.tokens[..., length:].any()
    np.testing.assert_array_equal(parts[-1].log_probs, sampled.log_probs)


def test_samples_share_one_prefill():
    _, calls = calls_of(
        lambda: generate(MODEL, PARAMS, PROMPTS, KEY, settings=SAMPLED, attention=WATCHED)
    )
    assert calls == [(3, 16), *[(6, 1)] * 4]


def test_nothing_is_compiled_again():
    options: Any = {"settings": SAMPLED, "attention": WATCHED}
    generate(MODEL, PARAMS, PROMPTS, KEY, **options)
    assert TRACES
    TRACES.clear()
    longer, others, key = [[1] * 16, [2], [3] * 9], make_params(MODEL, 1), jax.random.key(3)
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        generate(MODEL, others, longer, key, **options)
        for steps in (1, 2):
            parts = stream(MODEL, PARAMS, longer, KEY, **options, tokens_per_dispatch=steps)
            assert len(list(parts)) > 2
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not TRACES
    assert not compiled


def test_states_are_given_back():
    done = prefill(MODEL, PARAMS, *pad_prompts(PROMPTS, vocab_size=VOCAB), capacity=21)
    keys = jax.random.split(KEY, 3)
    first = start(MODEL, done, keys, settings=GREEDY)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(done.caches))
    options: Any = {"settings": GREEDY, "attention": DENSE_CACHE, "mesh": None}
    second = decode(MODEL, PARAMS, first, np.int32(2), **options)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert int(second.step) == 3


def test_all_of_it_can_be_traced(sampled):
    """As part of a larger program, such as a step of reinforcement learning."""

    @jax.jit
    def texts(params: Any, tokens: Any, valid: Any, keys: Any) -> Any:
        done = prefill(MODEL, params, tokens, valid, capacity=21)
        state = start(MODEL, done, keys, settings=SAMPLED)
        return decode(MODEL, params, state, 4, settings=SAMPLED).tokens

    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(3))
    found = texts(PARAMS, *pad_prompts(PROMPTS, vocab_size=VOCAB), keys)
    np.testing.assert_array_equal(found, sampled.tokens.reshape(6, 5))


def test_stop_tokens_end_each_text_for_itself():
    free = generate(MODEL, PARAMS, PROMPTS, settings=GREEDY).tokens[:, 0].tolist()
    stop = next(token for token in free[0][1:] if token != free[0][0])
    stops = dataclasses.replace(GREEDY, stop_ids=(stop,))
    found, calls = calls_of(
        lambda: generate(MODEL, PARAMS, PROMPTS, settings=stops, attention=WATCHED)
    )
    for row, text in enumerate(free):
        length = text.index(stop) + 1 if stop in text else 5
        assert found.lengths[row, 0] == length
        assert found.finished[row, 0] == (stop in text)
        assert found.tokens[row, 0].tolist() == text[:length] + [0] * (5 - length)
        assert not found.log_probs[row, 0, length:].any()
    assert len(calls) == found.lengths.max()
    assert found.lengths.min() < found.lengths.max()


def test_all_texts_ended():
    first = generate(MODEL, PARAMS, PROMPTS, settings=GREEDY).tokens[:, 0, 0]
    ends = settings(stop_ids=tuple({*first.tolist()}))
    parts = list(stream(MODEL, PARAMS, PROMPTS, settings=ends))
    assert len(parts) == 1
    assert parts[0].finished.all()
    assert parts[0].lengths.tolist() == [[1], [1], [1]]


def test_filters_and_penalties_over_prompt_and_text():
    law: dict[str, Any] = {
        "temperature": 2.0,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.4,
        "repetition_penalty": 1.7,
    }
    matters = set()
    found = generate(
        *(MODEL, PARAMS, PROMPTS, KEY), settings=settings(**law, sampling_log_probs=True)
    )
    assert found.sampling_log_probs is not None
    for row, prompt in enumerate(PROMPTS):
        text, places = prompt + found.tokens[row, 0].tolist(), range(len(prompt), len(prompt) + 5)
        seen = np.array([[token in text[:place] for token in range(VOCAB)] for place in places])
        logits = jnp.asarray(logits_of(np.array([text]))[0, len(prompt) - 1 : -1])
        expected = np.asarray(sampling_log_probs(logits, seen=jnp.asarray(seen), **law))
        chosen = expected[np.arange(5), text[len(prompt) :]]
        np.testing.assert_allclose(found.sampling_log_probs[row, 0], chosen, atol=1e-4, rtol=0)
        assert np.isfinite(chosen).all()
        for name in law:
            others = {key: value for key, value in law.items() if key != name}
            without = np.asarray(sampling_log_probs(logits, seen=jnp.asarray(seen), **others))
            if not np.allclose(without[np.arange(5), text[len(prompt) :]], chosen, atol=1e-2):
                matters.add(name)
    assert matters == set(law)


def test_samples_follow_the_law_of_the_first_ids():
    """Pearson's statistic of 4000 pairs of tokens; a false alarm in one of 10^4 keys."""
    number, prompt = 4000, [1, 2]
    drawn = settings(max_new_tokens=2, num_samples=number, temperature=1.0, vocab_size=4)
    found = generate(MODEL, PARAMS, [prompt], KEY, settings=drawn)
    pairs = np.array(list(itertools.product(range(4), repeat=2)))
    law = log_softmax(logits_of(np.array([[*prompt, a] for a in range(4)]))[:, 1:, :4])
    log_probs = np.stack([law[0, 0, pairs[:, 0]], law[pairs[:, 0], 1, pairs[:, 1]]], axis=1)
    expected = number * np.exp(log_probs.sum(1))
    same = (found.tokens[0][:, None] == pairs).all(axis=2)
    assert same.any(axis=1).all()
    np.testing.assert_allclose(found.log_probs[0], log_probs[same.argmax(1)], atol=1e-5, rtol=0)
    assert expected.min() > 10
    assert (((same.sum(0) - expected) ** 2) / expected).sum() < 44.3  # chi-square, 15 degrees


def test_one_beam_is_greedy():
    stops = (4, 6)
    greedy = generate(MODEL, PARAMS, PROMPTS, settings=settings(stop_ids=stops))
    one = BeamSettings(num_beams=1, max_new_tokens=5, stop_ids=stops)
    found = beam_search(MODEL, PARAMS, PROMPTS, settings=one, prefill_chunk=2)
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(greedy, name))
    np.testing.assert_allclose(found.log_probs, greedy.log_probs, atol=1e-5, rtol=0)


def all_texts(prompt: list[int], vocab: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Every text of a length, and its log-probability, best first."""
    texts = np.array(list(itertools.product(range(vocab), repeat=length)))
    whole = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    logits = logits_of(whole)[:, len(prompt) - 1 : -1, :vocab]
    scores = np.take_along_axis(log_softmax(logits), texts[..., None], axis=-1).sum((1, 2))
    order = np.argsort(-scores)
    return texts[order], scores[order]


def test_enough_beams_find_every_text_in_order():
    vocab, length = 3, 3
    wide = BeamSettings(num_beams=vocab**length + 2, max_new_tokens=length, vocab_size=vocab)
    found = beam_search(MODEL, PARAMS, [[1, 2], [0]], settings=wide)
    for row, prompt in enumerate([[1, 2], [0]]):
        texts, scores = all_texts(prompt, vocab, length)
        np.testing.assert_array_equal(found.tokens[row, :-2], texts)
        np.testing.assert_allclose(found.log_probs[row, :-2].sum(-1), scores, atol=1e-5, rtol=0)
    assert found.lengths[:, -2:].tolist() == [[0, 0], [0, 0]]
    assert (found.log_probs[:, -2:] == -math.inf).all()


def test_beams_end_and_are_ranked_by_length():
    prompt, stop, length = [1, 2], 0, 3
    for penalty in (0.0, 1.0):
        wide = BeamSettings(
            num_beams=40,
            max_new_tokens=length,
            vocab_size=3,
            stop_ids=(stop,),
            length_penalty=penalty,
        )
        found = beam_search(MODEL, PARAMS, [prompt], settings=wide)
        expected = {}
        for size in range(1, length + 1):
            for text, score in zip(*all_texts(prompt, 3, size), strict=True):
                inner, last = text[:-1].tolist(), text[-1]
                if stop not in inner and (last == stop or size == length):
                    expected[*inner, int(last)] = score / size**penalty
        ranked = sorted(expected, key=lambda text: -expected[text])
        texts = [
            tuple(text[:size])
            for text, size in zip(found.tokens[0].tolist(), found.lengths[0], strict=True)
            if size
        ]
        assert texts == ranked
        assert found.finished[0, : len(texts)].tolist() == [stop in text for text in ranked]


def test_another_attention():
    model = dataclasses.replace(MODEL, sliding_window=4)
    ring = sliding_window_cache()
    found = generate(model, PARAMS, PROMPTS, settings=GREEDY, attention=ring, prefill_chunk=3)
    text = np.array([[*PROMPTS[1], *found.tokens[1, 0]]])
    logits = jax.jit(lambda tokens: model.apply({"params": PARAMS}, tokens))(text)[0, 6:-1]
    np.testing.assert_array_equal(logits.argmax(-1), text[0, 7:])
    expected = log_softmax(np.asarray(logits))[np.arange(5), text[0, 7:]]
    np.testing.assert_allclose(found.log_probs[1, 0], expected, atol=1e-5, rtol=0)
    blind = dataclasses.replace(DENSE_CACHE, windows=False)
    with pytest.raises(ValueError, match="sliding_window=4 of layer 0: not supported"):
        generate(model, PARAMS, PROMPTS, attention=blind)
    single = dataclasses.replace(DENSE_CACHE, chunks=False)
    with pytest.raises(ValueError, match="a chunk of 16 tokens: attention takes one at a time"):
        generate(MODEL, PARAMS, PROMPTS, attention=single)


def test_states_must_begin_with_the_batch():
    other = dataclasses.replace(
        DENSE_CACHE,
        init=lambda layer, shape: (DENSE_CACHE.init(layer, shape), jnp.zeros((5, 1))),
        attend=lambda layer, inputs, state, carry: (
            inputs.query,
            state,
            carry,
            None,
        ),
    )
    with pytest.raises(
        ValueError, match=r"a state of shape \(5, 1\) does not begin with the batch"
    ):
        generate(MODEL, PARAMS, PROMPTS, KEY, settings=SAMPLED, attention=other)


def test_learned_positions_and_the_context():
    model = dataclasses.replace(MODEL, num_positions=12)
    params = make_params(model)
    few = settings(max_new_tokens=5)
    traces: list[int] = []
    spy = dataclasses.replace(
        DENSE_CACHE,
        init=lambda layer, shape: traces.append(layer) or DENSE_CACHE.init(layer, shape),
    )
    found = generate(model, params, [[1] * 7], settings=few)
    text = [1] * 7 + found.tokens[0, 0].tolist()
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    logits = np.asarray(forward(np.array([text])))[0, 6:-1]
    assert logits.argmax(-1).tolist() == text[7:]
    limits: dict[str, Any]
    for prompt, limits, message in (
        ([1] * 8, {}, "max_new_tokens=5: must be at most 4 after a prompt of 8 tokens, in a "),
        ([1] * 12, {}, "one has 12 tokens; the model's context is 12"),
        ([1] * 4, {"context": 6}, "must be at most 2 after a prompt of 4 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, params, [[1], prompt], settings=few, attention=spy, **limits)
        with pytest.raises(ValueError, match=message):
            beam_search(
                *(model, params, [[1], prompt]),
                settings=BeamSettings(max_new_tokens=5),
                attention=spy,
                **limits,
            )
    assert not traces


def test_nan_is_one_clear_error():
    damaged = {**PARAMS, "final_norm": {"scale": jnp.full(8, jnp.nan)}}
    message = "logits of new token 0 of prompt 0, sample 0, hold NaN or infinity"
    CALLS.clear()
    with pytest.raises(FloatingPointError, match=message):
        generate(MODEL, damaged, PROMPTS, KEY, settings=SAMPLED, attention=WATCHED)
    jax.effects_barrier()
    assert len(CALLS) == 1, "nothing is generated after it"
    with pytest.raises(FloatingPointError, match="logits of new token 0 of prompt 0 hold NaN"):
        beam_search(MODEL, damaged, PROMPTS, settings=BeamSettings(max_new_tokens=5))
    # Only what is generated leads to the part that is damaged.
    prompts = [[1], [2], [1]]
    first = generate(MODEL, PARAMS, prompts, settings=GREEDY).tokens[1, 0, 0]
    assert first not in (1, 2)
    damaged = {**PARAMS, "embedding": PARAMS["embedding"].at[first].set(jnp.nan)}
    with pytest.raises(FloatingPointError, match=r"new token 1 of prompt [01], sample 0"):
        generate(MODEL, damaged, prompts, settings=GREEDY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "prompts: at least one is needed"),
        ({"prompts": [[1], []]}, r"prompts\[1\]: is empty"),
        ({"prompts": [[1, 11]]}, r"prompts\[0\] has id 11: must be in \[0, 11\)"),
        ({"prompts": [[1, -1]]}, r"prompts\[0\] has id -1"),
        ({"prompts": [[0.5]]}, r"prompts\[0\] has type float64: must be whole numbers"),
        ({"prompts": np.ones((1, 2, 2), int)}, r"prompts\[0\] and its row of valid have shapes"),
        ({"valid": np.ones((2, 3), bool)}, "valid has 2 rows: these prompts need 1"),
        ({"valid": np.ones((1, 3), bool)}, r"have shapes \(2,\) and \(3,\)"),
        ({"valid": np.zeros((1, 2), bool)}, r"prompts\[0\]: is empty"),
        ({"prefill_chunk": 0}, "chunk=0: must be at least 1"),
        ({"settings": settings(vocab_size=12)}, "vocab_size=12: must be from 1 to the model's 11"),
        ({"settings": settings(stop_ids=(2, 11))}, r"stop_ids=\(2, 11\): must be in \[0, 11\)"),
        ({"settings": settings(temperature=1.0)}, "key=None: temperature=1.0 needs random numbers"),
        ({"key": jax.random.split(KEY, 3)}, r"key has shape \(3,\): needs one key, or one for "),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes, message):
    arguments = {"prompts": [[1, 2]], **changes}
    with pytest.raises(ValueError, match=message):
        generate(MODEL, PARAMS, **arguments)


@pytest.mark.parametrize(
    ("kind", "field", "value", "allowed"),
    [
        (GenerationSettings, "max_new_tokens", 0, "must be at least 1"),
        (GenerationSettings, "num_samples", 0, "must be at least 1"),
        (GenerationSettings, "top_k", -1, "must be at least 0"),
        (GenerationSettings, "top_p", 1.5, "must be from 0 to 1"),
        (GenerationSettings, "min_p", -0.5, "must be from 0 to 1"),
        (GenerationSettings, "temperature", -1.0, "must be at least 0, and finite"),
        (GenerationSettings, "temperature", math.nan, "must be at least 0, and finite"),
        (GenerationSettings, "repetition_penalty", 0.0, "must be above 0"),
        (BeamSettings, "num_beams", 0, "must be at least 1"),
        (BeamSettings, "length_penalty", math.inf, "must be finite"),
    ],
)
def test_settings_have_ranges(kind, field, value, allowed):
    with pytest.raises(ValueError, match=f"{field}={value}: {allowed}"):
        kind(**{field: value})


def test_the_capacity_holds_the_prompts():
    with pytest.raises(ValueError, match="capacity=5: must be at least 6, the prompts' width"):
        prefill(MODEL, PARAMS, np.ones((1, 5), np.int32), capacity=5, chunk=3)


def test_widths_are_powers_of_two_or_multiples_of_the_chunk():
    for length, chunk, width in ((1, None, 16), (16, None, 16), (17, None, 32), (17, 5, 20)):
        tokens, valid = pad_prompts([[1] * length], vocab_size=VOCAB, chunk=chunk)
        assert tokens.shape == valid.shape == (1, width)
        assert valid.sum() == length


def test_eight_devices(cache_folder):
    assert mesh_of(PARAMS) is None
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.generation_on_a_mesh"],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache_folder),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
