"""The choice of the next token: penalties, filters, random draws and beam search.

Everything is pure, traceable and batched over the leading axes of the logits, and computes in
float32. Parameters are numbers, or arrays with one value a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray

__all__ = [
    "BeamStep",
    "Sample",
    "beam_step",
    "min_p_mask",
    "penalize_seen",
    "sample",
    "sampling_log_probs",
    "top_k_mask",
    "top_p_mask",
]

Number = float | Float[Array, "*rows"]
Count = int | Int[Array, "*rows"]

# A static top_k up to this share of the vocabulary is cheaper as a partial sort than as a search
# for its threshold; both were measured on a CPU with a vocabulary of 49152.
_PARTIAL_SORT_SHARE = 64


class Sample(NamedTuple):
    """Tokens that were chosen.

    Attributes:
      tokens: int32 ids; -1 where the logits gave no law.
      log_probs: log-probability of each under the softmax of the logits as they were given,
        before penalties, temperature and filters, in nats; NaN where the token is -1.
    """

    tokens: Int[Array, "*rows"]
    log_probs: Float[Array, "*rows"]


class BeamStep(NamedTuple):
    """Beams after one more token, best first.

    Attributes:
      parents: the beam that each continues.
      tokens: its new token; -1 where the logits gave no law.
      scores: sum of the log-probabilities of its tokens; NaN where the token is -1.
      lengths: number of its tokens.
      finished: whether it has ended.
    """

    parents: Int[Array, "*rows beams"]
    tokens: Int[Array, "*rows beams"]
    scores: Float[Array, "*rows beams"]
    lengths: Int[Array, "*rows beams"]
    finished: Bool[Array, "*rows beams"]


def penalize_seen(
    logits: Float[Array, "*rows vocab"],
    seen: Bool[Array, "*rows vocab"] | Integer[Array, "*rows vocab"],
    *,
    repetition_penalty: Number = 1.0,
    presence_penalty: Number = 0.0,
    frequency_penalty: Number = 0.0,
) -> Float[Array, "*rows vocab"]:
    """Makes tokens less likely that have been seen.

    A seen token's logit is divided by `repetition_penalty` where it is positive and multiplied by
    it where it is negative (Keskar et al. 2019, section 4.1, in the form that does not reward
    negative logits). Then `presence_penalty` is taken off once, and `frequency_penalty` once for
    every time that the token was seen.

    Args:
      logits: unnormalised log-probabilities.
      seen: how often each token was seen, or whether it was.
      repetition_penalty: above 0; 1 changes nothing.
      presence_penalty: in nats; 0 changes nothing.
      frequency_penalty: in nats for each time; 0 changes nothing.

    Returns:
      Logits in float32.

    Raises:
      ValueError: a number is out of its range, or the shapes do not fit together.

    >>> logits, seen = jnp.array([2.0, -2.0, 2.0]), jnp.array([True, True, False])
    >>> penalize_seen(logits, seen, repetition_penalty=2.0).tolist()
    [1.0, -4.0, 2.0]
    """
    if seen.shape != logits.shape:
        raise ValueError(f"seen has shape {seen.shape}; logits has {logits.shape}")
    _check("repetition_penalty", repetition_penalty, above=0.0)
    rows = logits.shape[:-1]
    values = logits.astype(jnp.float32)
    repetition = _column("repetition_penalty", repetition_penalty, rows)
    scaled = jnp.where(values > 0, values / repetition, values * repetition)
    counts = seen.astype(jnp.float32)
    lowered = scaled - _column("presence_penalty", presence_penalty, rows)
    lowered -= counts * _column("frequency_penalty", frequency_penalty, rows)
    return jnp.where(counts > 0, lowered, values)


def top_k_mask(logits: Float[Array, "*rows vocab"], top_k: Count) -> Bool[Array, "*rows vocab"]:
    """True for the `top_k` largest logits of every row; of equal ones the first count.

    Args:
      logits: unnormalised log-probabilities.
      top_k: how many; 0 and below, or the size of the vocabulary and above, for all.

    >>> top_k_mask(jnp.array([1.0, 3.0, 2.0, 2.0]), 2).tolist()
    [False, True, True, False]
    """
    values = logits.astype(jnp.float32)
    rows, vocab = values.shape[:-1], values.shape[-1]
    wanted = _column("top_k", top_k, rows, jnp.int32)
    wanted = jnp.where((wanted <= 0) | (wanted > vocab), jnp.full_like(wanted, vocab), wanted)
    order = _ordered(values)
    threshold = _largest_reaching(
        order, lambda above: jnp.sum(above, -1, keepdims=True, dtype=jnp.int32) >= wanted
    )
    larger = order > threshold
    missing = wanted - jnp.sum(larger, -1, keepdims=True, dtype=jnp.int32)
    return larger | _first(order == threshold, missing)


def top_p_mask(logits: Float[Array, "*rows vocab"], top_p: Number) -> Bool[Array, "*rows vocab"]:
    """True for the nucleus of every row (Holtzman et al. 2020).

    That is the smallest set of tokens whose probability reaches `top_p`, the most probable first
    and of equally probable ones the first in the vocabulary. It has at least one token. No token
    is sorted: the probability of the least probable of them is found by bisection.

    Args:
      logits: unnormalised log-probabilities.
      top_p: from 0 to 1; 1 and above for all tokens.

    >>> top_p_mask(jnp.log(jnp.array([0.2, 0.5, 0.3])), 0.6).tolist()
    [False, True, True]
    """
    values = logits.astype(jnp.float32)
    wanted = _column("top_p", top_p, values.shape[:-1])
    probabilities = jax.nn.softmax(values, axis=-1)
    order = _ordered(probabilities)

    def mass(chosen: Array) -> Array:
        return jnp.sum(jnp.where(chosen, probabilities, 0.0), -1, keepdims=True)

    threshold = _largest_reaching(order, lambda above: mass(above) >= wanted)
    larger, equal = order > threshold, order == threshold
    least = jnp.max(jnp.where(equal, probabilities, 0.0), -1, keepdims=True)
    missing = jnp.ceil((wanted - mass(larger)) / least)
    # NaN and infinity have no integer; rows without a law are marked where a token is chosen.
    missing = jnp.where(missing > 1, jnp.minimum(missing, values.shape[-1]), 1.0)
    return (wanted >= 1) | larger | _first(equal, missing.astype(jnp.int32))


def min_p_mask(logits: Float[Array, "*rows vocab"], min_p: Number) -> Bool[Array, "*rows vocab"]:
    """True for tokens at least `min_p` times as probable as the most probable one.

    Nguyen et al. 2025, "Turning up the heat: min-p sampling".

    Args:
      logits: unnormalised log-probabilities.
      min_p: from 0, for all tokens, to 1, for the most probable ones alone.

    >>> min_p_mask(jnp.log(jnp.array([0.1, 0.6, 0.3])), 0.4).tolist()
    [False, True, True]
    """
    values = logits.astype(jnp.float32)
    share = jnp.clip(_column("min_p", min_p, values.shape[:-1]), 0.0, 1.0)
    return values >= jnp.max(values, -1, keepdims=True) + jnp.log(share)


def sampling_log_probs(
    logits: Float[Array, "*rows vocab"],
    *,
    temperature: Number = 1.0,
    top_k: Count = 0,
    top_p: Number = 1.0,
    min_p: Number = 0.0,
    seen: Bool[Array, "*rows vocab"] | Integer[Array, "*rows vocab"] | None = None,
    repetition_penalty: Number = 1.0,
    presence_penalty: Number = 0.0,
    frequency_penalty: Number = 0.0,
) -> Float[Array, "*rows vocab"]:
    """The law that `sample` draws from, of the same arguments, as log-probabilities.

    Returns:
      Nats in float32; minus infinity for tokens that are never drawn. At temperature 0 all mass
      is on one token. A row without a law is NaN.

    Raises:
      ValueError: a number is out of its range, or the shapes do not fit together.
    """
    values = logits.astype(jnp.float32)
    if seen is not None:
        values = penalize_seen(
            values,
            seen,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
    rows = values.shape[:-1]
    _check_filters(temperature, top_p, min_p)
    heat = _column("temperature", temperature, rows)
    kept = _filtered(values, heat, top_k=top_k, top_p=top_p, min_p=min_p)
    best = jnp.argmax(values, -1, keepdims=True)
    places = jnp.arange(values.shape[-1]).reshape((1,) * len(rows) + (-1,))
    greedy = jnp.where(places == best, 0.0, -jnp.inf)
    law = jnp.where(heat > 0, jax.nn.log_softmax(kept, axis=-1), greedy)
    return jnp.where(_has_law(logits)[..., None], law, jnp.nan)


def sample(
    key: PRNGKeyArray,
    logits: Float[Array, "*rows vocab"],
    *,
    temperature: Number = 1.0,
    top_k: Count = 0,
    top_p: Number = 1.0,
    min_p: Number = 0.0,
    seen: Bool[Array, "*rows vocab"] | Integer[Array, "*rows vocab"] | None = None,
    repetition_penalty: Number = 1.0,
    presence_penalty: Number = 0.0,
    frequency_penalty: Number = 0.0,
    choice: Literal["inverse_cdf", "gumbel"] = "inverse_cdf",
) -> Sample:
    """Draws one token for every row.

    The order is penalties, temperature, top-k, top-p, min-p; each filter sees the law that the
    ones before it left. Python numbers are known when it is compiled, and what they switch off
    costs nothing; arrays, traced ones too, may differ between rows. Both draw the same tokens of
    the same key, but for rounding where two tokens' shares of the unit interval meet. A row of
    the batch does not depend on the values of the others, but its random number depends on its
    place; with a key for every row, `jax.vmap` over keys and rows makes them independent.

    Args:
      key: of the random numbers; not used where every row is greedy.
      logits: unnormalised log-probabilities; minus infinity for what may not be drawn.
      temperature: at least 0; 0 takes the most probable token, the first of equal ones.
      top_k: see `top_k_mask`.
      top_p: see `top_p_mask`.
      min_p: see `min_p_mask`.
      seen: for the penalties: how often each token was seen, or whether it was.
      repetition_penalty: see `penalize_seen`; has no effect without `seen`, as the next two.
      presence_penalty: see `penalize_seen`.
      frequency_penalty: see `penalize_seen`.
      choice: `inverse_cdf` takes one uniform number a row; `gumbel` takes the largest of
        the logits plus a Gumbel variable for each token, so that two similar laws given one key
        mostly draw the same token.

    Returns:
      The tokens, and their log-probabilities under the plain softmax of `logits`. A row whose
      logits hold NaN or plus infinity, or are minus infinity throughout, gives token -1 and NaN.

    Raises:
      ValueError: a number is out of its range, or the shapes do not fit together.

    >>> logits = jnp.log(jnp.array([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]]))
    >>> drawn = sample(jax.random.key(0), logits, temperature=jnp.array([0.0, 1.0]), top_k=1)
    >>> drawn.tokens.tolist(), [round(value, 3) for value in drawn.log_probs.tolist()]
    ([1, 0], [-0.693, -0.357])
    """
    if choice not in ("inverse_cdf", "gumbel"):
        raise ValueError(f"choice={choice!r}: allowed: inverse_cdf, gumbel")
    _check_filters(temperature, top_p, min_p)
    values = logits.astype(jnp.float32)
    rows = values.shape[:-1]
    if seen is not None:
        values = penalize_seen(
            values,
            seen,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )
    if _is_static(temperature) and temperature == 0:
        tokens = jnp.argmax(values, -1)
    else:
        heat = _column("temperature", temperature, rows)
        places = None
        if _is_static(top_k) and 0 < top_k <= max(64, values.shape[-1] // _PARTIAL_SORT_SHARE):
            # In the order of the vocabulary, so that a draw means the same token either way.
            places = jnp.sort(jax.lax.top_k(values, min(int(top_k), values.shape[-1]))[1], axis=-1)
            candidates, top_k = jnp.take_along_axis(values, places, axis=-1), 0
        else:
            candidates = values
        kept = _filtered(candidates, heat, top_k=top_k, top_p=top_p, min_p=min_p)
        if choice == "gumbel":
            noise = jax.random.gumbel(key, values.shape, jnp.float32)
            noise = noise if places is None else jnp.take_along_axis(noise, places, axis=-1)
            tokens = jnp.argmax(kept + noise, -1)
        else:
            tokens = _inverse_cdf(kept, jax.random.uniform(key, rows, jnp.float32))
        if places is not None:
            tokens = jnp.take_along_axis(places, tokens[..., None], axis=-1)[..., 0]
        if not _is_static(temperature):
            tokens = jnp.where(heat[..., 0] > 0, tokens, jnp.argmax(values, -1))
    return _with_log_probs(tokens.astype(jnp.int32), logits)


def beam_step(
    scores: Float[Array, "*rows beams"],
    logits: Float[Array, "*rows beams vocab"],
    lengths: Int[Array, "*rows beams"],
    finished: Bool[Array, "*rows beams"],
    *,
    end_tokens: tuple[int, ...],
    length_penalty: Number = 0.0,
) -> BeamStep:
    """One step of beam search: the best continuations of all beams together.

    A finished beam stays as it is and competes with the continuations of the others; its new
    token is the first of `end_tokens`. Beams are ranked by `score / length ** length_penalty`, of
    equal ones the first. A search begins with scores `[0, -inf, ...]`, lengths 0 and none
    finished, so that the first step does not take one token several times.

    Args:
      scores: sum of the log-probabilities of the tokens of each beam; minus infinity for one
        that does not exist.
      logits: unnormalised log-probabilities of each beam's next token; of a finished beam's they
        may be anything.
      lengths: number of tokens in each beam.
      finished: beams that have ended.
      end_tokens: ids that end a beam, at least one.
      length_penalty: 0 ranks by the sum, 1 by the mean for each token.

    Returns:
      As many beams, best first. Where a beam that exists has logits without a law (see
      `sample`), the tokens of all beams of its row are -1 and their scores NaN.

    Raises:
      ValueError: there is no token in `end_tokens`, one is not in the vocabulary, or the shapes do
        not fit together.

    >>> logits = jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.2, 0.4, 0.4]]))
    >>> state = jnp.array([0.0, -jnp.inf]), logits, jnp.zeros(2, int), jnp.zeros(2, bool)
    >>> step = beam_step(*state, end_tokens=(0,))
    >>> step.parents.tolist(), step.tokens.tolist(), step.finished.tolist()
    ([0, 0], [1, 2], [False, False])
    """
    rows, beams, vocab = scores.shape[:-1], scores.shape[-1], logits.shape[-1]
    for name, array in (("lengths", lengths), ("finished", finished)):
        if array.shape != scores.shape:
            raise ValueError(f"{name} has shape {array.shape}; scores has {scores.shape}")
    if logits.shape[:-1] != scores.shape:
        raise ValueError(f"logits has shape {logits.shape}; scores has {scores.shape}")
    if not end_tokens or not all(0 <= token < vocab for token in end_tokens):
        raise ValueError(f"end_tokens={end_tokens!r}: must be ids in [0, {vocab}), at least one")
    scores = scores.astype(jnp.float32)
    alive = ~finished & (scores > -jnp.inf)
    broken = jnp.isnan(scores) | (alive & ~_has_law(logits))

    law = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    law = jnp.where(alive[..., None], law, -jnp.inf)
    # The best of all beams are among the best of each.
    found, tokens = jax.lax.top_k(law, min(beams, vocab))
    width = found.shape[-1]
    first = (jnp.arange(width) == 0).reshape((1,) * scores.ndim + (-1,))
    sums = scores[..., None] + jnp.where(
        finished[..., None], jnp.where(first, 0.0, -jnp.inf), found
    )
    tokens = jnp.where(finished[..., None], end_tokens[0], tokens)
    longer = lengths + (~finished).astype(lengths.dtype)

    power = _column("length_penalty", length_penalty, rows)
    divisor = jnp.maximum(longer, 1).astype(jnp.float32) ** power
    ranks = (sums / divisor[..., None]).reshape(*rows, beams * width)
    _, best = jax.lax.top_k(ranks, beams)
    parents = best // width

    def of_best(candidates: Array) -> Array:
        return jnp.take_along_axis(candidates.reshape(*rows, beams * width), best, axis=-1)

    new_tokens, new_scores = of_best(tokens).astype(jnp.int32), of_best(sums)
    ended = jnp.take_along_axis(finished, parents, axis=-1)
    for token in end_tokens:
        ended |= (new_tokens == token) & (new_scores > -jnp.inf)
    row_broken = jnp.any(broken, axis=-1, keepdims=True)
    return BeamStep(
        parents=parents.astype(jnp.int32),
        tokens=jnp.where(row_broken, -1, new_tokens),
        scores=jnp.where(row_broken, jnp.nan, new_scores),
        lengths=jnp.take_along_axis(longer, parents, axis=-1),
        finished=ended & ~row_broken,
    )


def _is_static(value: Number | Count) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


def _check(name: str, value: Number, *, above: float | None = None, least: float = 0.0) -> None:
    if not _is_static(value):
        return
    if above is not None and not value > above:
        raise ValueError(f"{name}={value}: must be above {above:g}")
    if above is None and not value >= least:
        raise ValueError(f"{name}={value}: must be at least {least:g}")


def _check_filters(temperature: Number, top_p: Number, min_p: Number) -> None:
    _check("temperature", temperature)
    _check("top_p", top_p)
    _check("min_p", min_p)
    if _is_static(min_p) and min_p > 1:
        raise ValueError(f"min_p={min_p}: must be at most 1")


def _column(
    name: str, value: Number | Count, rows: tuple[int, ...], dtype: jnp.dtype | type = jnp.float32
) -> Array:
    """A parameter as an array `[*rows, 1]`."""
    array = jnp.asarray(value, dtype)
    if array.shape not in ((), rows):
        raise ValueError(f"{name} has shape {array.shape}; the rows of the logits have {rows}")
    return jnp.broadcast_to(array, rows)[..., None]


def _has_law(logits: Float[Array, "*rows vocab"]) -> Bool[Array, "*rows"]:
    return jnp.isfinite(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))


def _with_log_probs(tokens: Int[Array, "*rows"], logits: Float[Array, "*rows vocab"]) -> Sample:
    values = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(values, axis=-1)
    chosen = jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]
    valid = jnp.isfinite(normalizer)
    return Sample(
        tokens=jnp.where(valid, tokens, -1),
        log_probs=jnp.where(valid, chosen - normalizer, jnp.nan),
    )


def _filtered(
    values: Float[Array, "*rows vocab"],
    heat: Float[Array, "*rows 1"],
    *,
    top_k: Count,
    top_p: Number,
    min_p: Number,
) -> Float[Array, "*rows vocab"]:
    """Logits over the temperature, minus infinity for what a filter takes out."""
    kept = values
    if not (_is_static(top_k) and not 0 < top_k < values.shape[-1]):
        # The temperature keeps the order, but may round different logits to one value.
        kept = jnp.where(top_k_mask(values, top_k), values, -jnp.inf)
    # The largest becomes 0, so that a tiny temperature overflows downwards only.
    kept = (kept - jnp.max(kept, -1, keepdims=True)) / jnp.where(heat > 0, heat, 1.0)
    if not (_is_static(top_p) and top_p >= 1):
        kept = jnp.where(top_p_mask(kept, top_p), kept, -jnp.inf)
    if not (_is_static(min_p) and min_p <= 0):
        kept = jnp.where(min_p_mask(kept, min_p), kept, -jnp.inf)
    return kept


def _ordered(values: Float[Array, "*rows vocab"]) -> Integer[Array, "*rows vocab"]:
    """uint32 in the order of float32 values, equal for equal ones."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits < top, bits | top, ~bits)


def _largest_reaching(
    order: Integer[Array, "*rows vocab"], reaches: Callable[[Array], Array]
) -> Integer[Array, "*rows 1"]:
    """The largest value for which the tokens at or above it suffice, by bisection.

    Args:
      order: what `_ordered` gives.
      reaches: from `[*rows, vocab]` of bool to `[*rows, 1]`: whether those tokens suffice. More
        tokens are never worse.

    Returns:
      One of the values of each row; the smallest where all tokens do not suffice.
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = high - (high - low) // jnp.uint32(2)
        enough = reaches(order >= middle)
        below = jnp.maximum(middle, jnp.uint32(1)) - jnp.uint32(1)
        return jnp.where(enough, middle, low), jnp.where(enough, high, jnp.maximum(below, low))

    bounds = jnp.min(order, -1, keepdims=True), jnp.max(order, -1, keepdims=True)
    return jax.lax.fori_loop(0, 32, halve, bounds)[0]


def _first(
    mask: Bool[Array, "*rows vocab"], count: Integer[Array, "*rows 1"]
) -> Bool[Array, "*rows vocab"]:
    """The first `count` places of each row where the mask is True."""
    held = jnp.sum(mask, -1, keepdims=True, dtype=jnp.int32)

    def cut() -> Array:
        return mask & (jnp.cumsum(mask, -1, dtype=jnp.int32) <= count)

    # Ties at the threshold are rare, and the sum over the vocabulary is not cheap.
    return jax.lax.cond(jnp.any(held > count), cut, lambda: mask)


def _inverse_cdf(
    logits: Float[Array, "*rows vocab"], uniform: Float[Array, "*rows"]
) -> Int[Array, "*rows"]:
    """The token in whose share of the unit interval the uniform number lies."""
    weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
    reached = jnp.cumsum(weights, -1)
    # Rounding makes these sums neither quite increasing nor quite equal to any other sum.
    reached = jnp.where(weights > 0, reached, -1.0)
    target = uniform[..., None] * jnp.max(reached, -1, keepdims=True)
    return jnp.argmax(reached > target, -1)
