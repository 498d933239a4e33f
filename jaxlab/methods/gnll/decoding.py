"""Greedy decoding, sampling and beam search of any model that is a step function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxlab.ops.sampling import Number, Sample, beam_step, sample

__all__ = ["Decoded", "Step", "beam_decode", "greedy_decode", "sample_decode"]

Step = Callable[[Any, Array], tuple[Array, Any]]
"""`step(state, token [B]) -> (logits [B, V], state)`: takes a token in, gives the next one's law.

Every leaf of a state has the batch as its first axis, or no axis at all. Pure and traceable.
"""


class Decoded(NamedTuple):
    """Sequences after their prompts.

    Attributes:
      tokens: int32 ids [..., T]; the end of sequence behind an end.
      token_logprobs: under the plain softmax of the logits, whatever the temperature, in nats
        [..., T]; 0 behind an end.
      mask: True up to and including the end [..., T].
    """

    tokens: Int[Array, "*rows T"]
    token_logprobs: Float[Array, "*rows T"]
    mask: Bool[Array, "*rows T"]


class _Beams(NamedTuple):
    scores: Float[Array, "B W"]
    lengths: Int[Array, "B W"]
    finished: Bool[Array, "B W"]
    tokens: Int[Array, "B W T"]
    token_logprobs: Float[Array, "B W T"]
    mask: Bool[Array, "B W T"]


def greedy_decode(
    step: Step,
    state: PyTree,
    first_logits: Float[Array, "B V"],
    *,
    max_new_tokens: int,
    eos_id: int,
) -> Decoded:
    """The most probable token at every step; of equal ones that with the lowest id. Graph.

    The step function runs `max_new_tokens` times, also where all sequences have ended.

    Args:
      step: see `Step`.
      state: after the prompts.
      first_logits: of the token that follows the prompts.
      max_new_tokens: length T at which a sequence is cut, at least 1.
      eos_id: the token that ends a sequence.

    Returns:
      Sequences [B, T].

    Raises:
      ValueError: a number is out of its range, or the logits are not [B, V].
    """
    _check(first_logits, max_new_tokens=max_new_tokens, eos_id=eos_id)
    # A constant key: nothing is drawn at temperature 0.
    key = jax.random.key(0)

    def choose(_: None, logits: Array) -> Sample:
        return sample(key, logits, temperature=0.0)

    return _follow(step, state, first_logits, choose, None, max_new_tokens, eos_id)


def sample_decode(
    step: Step,
    state: PyTree,
    first_logits: Float[Array, "B V"],
    key: PRNGKeyArray,
    *,
    num_samples: int,
    max_new_tokens: int,
    eos_id: int,
    temperature: Number = 1.0,
) -> Decoded:
    """Independent random sequences, N after each prompt. Graph.

    The samples are rows of one batch of size `B N`. The step function runs `max_new_tokens`
    times.

    Args:
      step: see `Step`.
      state: after the prompts.
      first_logits: of the token that follows the prompts.
      key: of the random numbers.
      num_samples: N, at least 1.
      max_new_tokens: length T at which a sequence is cut, at least 1.
      eos_id: the token that ends a sequence.
      temperature: at least 0; of the draws only, not of the log-probabilities.

    Returns:
      Sequences [B, N, T].

    Raises:
      ValueError: a number is out of its range, or the logits are not [B, V].
    """
    _check(first_logits, max_new_tokens=max_new_tokens, eos_id=eos_id, num_samples=num_samples)

    def choose(key: PRNGKeyArray, logits: Array) -> Sample:
        return sample(key, logits, temperature=temperature)

    state, logits = _repeat((state, first_logits), num_samples)
    keys = jax.random.split(key, max_new_tokens)
    flat = _follow(step, state, logits, choose, keys, max_new_tokens, eos_id)
    shape = (first_logits.shape[0], num_samples, max_new_tokens)
    return Decoded(*(x.reshape(shape) for x in flat))


def beam_decode(
    step: Step,
    state: PyTree,
    first_logits: Float[Array, "B V"],
    *,
    beam_width: int,
    max_new_tokens: int,
    eos_id: int,
) -> Decoded:
    """Beam search without length penalty: the best W sequences, best first. Graph.

    Finished and open sequences compete on the sum of their log-probabilities; of equal ones the
    better parent and the lower id win. A beam at least as wide as the number of open prefixes
    finds the most probable sequence. The step function runs `max_new_tokens` times.

    Args:
      step: see `Step`.
      state: after the prompts.
      first_logits: of the token that follows the prompts.
      beam_width: W, at least 1.
      max_new_tokens: length T at which a sequence is cut, at least 1.
      eos_id: the token that ends a sequence.

    Returns:
      Sequences [B, W, T]. Where fewer than W exist, the last ones have one token of
      log-probability minus infinity.

    Raises:
      ValueError: a number is out of its range, or the logits are not [B, V].
    """
    _check(first_logits, max_new_tokens=max_new_tokens, eos_id=eos_id, beam_width=beam_width)
    shape = (first_logits.shape[0], beam_width)
    history = (*shape, max_new_tokens)
    alone = jnp.arange(beam_width, dtype=jnp.int32) == 0
    beams = _Beams(
        scores=jnp.broadcast_to(jnp.where(alone, 0.0, -jnp.inf)[None], shape),
        lengths=jnp.zeros(shape, jnp.int32),
        finished=jnp.zeros(shape, bool),
        tokens=jnp.full(history, eos_id, jnp.int32),
        token_logprobs=jnp.zeros(history, jnp.float32),
        mask=jnp.zeros(history, bool),
    )

    def advance(carry: tuple[_Beams, Any, Array], place: Array) -> tuple[Any, None]:
        beams, state, logits = carry
        beams, parents, newest = _extend(beams, logits, place, eos_id)
        logits, state = step(_rows_of(state, parents), newest.reshape(-1))
        return (beams, state, logits.astype(jnp.float32)), None

    state, logits = _repeat((state, first_logits.astype(jnp.float32)), beam_width)
    places = jnp.arange(max_new_tokens, dtype=jnp.int32)
    (beams, _, _), _ = jax.lax.scan(advance, (beams, state, logits), places)
    missing = (beams.scores == -jnp.inf)[..., None]
    first = (jnp.arange(max_new_tokens) == 0).reshape(1, 1, -1)
    return Decoded(
        tokens=jnp.where(missing, eos_id, beams.tokens),
        token_logprobs=jnp.where(missing, jnp.where(first, -jnp.inf, 0.0), beams.token_logprobs),
        mask=jnp.where(missing, first, beams.mask),
    )


def _extend(
    beams: _Beams, logits: Float[Array, "BW V"], place: Array, eos_id: int
) -> tuple[_Beams, Int[Array, "B W"], Int[Array, "B W"]]:
    """The best beams with one more token, their parents, and the new tokens."""
    law = logits.reshape(*beams.scores.shape, -1)
    found = beam_step(
        beams.scores, law, beams.lengths, beams.finished, end_tokens=(eos_id,), length_penalty=0.0
    )

    def of_parents(x: Array) -> Array:
        index = found.parents.reshape(*found.parents.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    # A beam's token is -1 where its model gave NaN: so is its log-probability.
    ids = jnp.maximum(found.tokens, 0)[..., None]
    log_probs = jax.nn.log_softmax(of_parents(law), axis=-1)
    chosen = jnp.take_along_axis(log_probs, ids, axis=-1)[..., 0]
    ended = of_parents(beams.finished)
    columns = (found.tokens, jnp.where(ended, 0.0, chosen), ~ended)
    histories = (beams.tokens, beams.token_logprobs, beams.mask)
    extended = (
        jax.lax.dynamic_update_index_in_dim(of_parents(history), column, place, axis=2)
        for history, column in zip(histories, columns, strict=True)
    )
    return (
        _Beams(found.scores, found.lengths, found.finished, *extended),
        found.parents,
        found.tokens,
    )


def _follow(
    step: Step,
    state: PyTree,
    first_logits: Float[Array, "B V"],
    choose: Callable[[Any, Array], Sample],
    keys: PRNGKeyArray | None,
    max_new_tokens: int,
    eos_id: int,
) -> Decoded:
    """One sequence for each row, by a rule that chooses each token."""

    def advance(carry: tuple[Any, Array, Array], key: Any) -> tuple[Any, Decoded]:
        state, logits, done = carry
        chosen = choose(key, logits)
        tokens = jnp.where(done, eos_id, chosen.tokens)
        new = Decoded(tokens, jnp.where(done, 0.0, chosen.log_probs), ~done)
        logits, state = step(state, tokens)
        return (state, logits.astype(jnp.float32), done | (tokens == eos_id)), new

    start = state, first_logits.astype(jnp.float32), jnp.zeros(first_logits.shape[0], bool)
    _, columns = jax.lax.scan(advance, start, keys, length=max_new_tokens)
    return Decoded(*(jnp.moveaxis(x, 0, -1) for x in columns))


def _repeat(tree: PyTree, times: int) -> PyTree:
    return jax.tree.map(lambda x: x if jnp.ndim(x) == 0 else jnp.repeat(x, times, axis=0), tree)


def _rows_of(state: PyTree, parents: Int[Array, "B W"]) -> PyTree:
    """The states of the parents, with batch and beams in one axis."""
    batch, width = parents.shape
    rows = (parents + jnp.arange(batch, dtype=parents.dtype)[:, None] * width).reshape(-1)
    return jax.tree.map(lambda x: x if jnp.ndim(x) == 0 else jnp.take(x, rows, axis=0), state)


def _check(
    first_logits: Float[Array, "B V"], *, max_new_tokens: int, eos_id: int, **counts: int
) -> None:
    if first_logits.ndim != 2:
        raise ValueError(f"first_logits has shape {first_logits.shape}: must be [batch, vocab]")
    vocab = first_logits.shape[1]
    if not 0 <= eos_id < vocab:
        raise ValueError(f"eos_id={eos_id}: must lie in [0, {vocab})")
    for name, value in {"max_new_tokens": max_new_tokens, **counts}.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
