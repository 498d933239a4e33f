"""Study: what few decodings tell of a law whose sequences are all known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.experiments.gnll.config import TreeConfig
from jaxlab.methods import gnll
from jaxlab.reporting.claims import Claim, claim_from_values, t_interval
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.training.host import HostProgram, measure_program

__all__ = ["build", "claims", "errors", "figure", "metrics"]

NAME = "tree"
_SAMPLES = 10
_LEAST_NATS = 1e-3
_PAPER = (
    "arXiv 2412.15176, synthetic study (Fig. 2): greedy, beam search and sampling approximate the "
    "maximum closely while PE's error stays large; no numbers given; piloted here"
)
_LABELS = {
    "greedy": "greedy (1), of the maximum",
    "beam": "beam search, of the maximum",
    "best": f"best of {_SAMPLES} samples, of the maximum",
    "entropy": f"PE ({_SAMPLES} samples), of the entropy",
}


def build(config: TreeConfig) -> HostProgram:
    """One program; its trials are the standard deviations of the logits."""

    def measure(trial: Any, key: jax.Array) -> dict[str, jax.Array]:
        return _measure(config, trial["logit_std"], key)

    trials = {"logit_std": np.array(config.logit_stds, np.float32)}
    return measure_program(NAME, trials, measure, examples=config.num_chains)


def _measure(config: TreeConfig, logit_std: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    """Random chains: `[chain]` of what is exact and of what is estimated."""
    chain_key, sample_key = jax.random.split(key)
    vocab, length = config.vocab_size, config.max_length
    shape = (config.num_chains, vocab + 1, vocab)
    logits = logit_std * jax.random.normal(chain_key, shape, jnp.float32)
    law = gnll.exact_sequence_distribution(logits, length).log_probs
    entropy, maximum = gnll.sequence_entropy(law), gnll.min_entropy(law)

    def decode(chain: jax.Array) -> tuple[jax.Array, jax.Array]:
        options: Any = {"max_new_tokens": length, "eos_id": 0}
        start = gnll.markov_start(chain)
        greedy = gnll.greedy_decode(*start, **options)
        beam = gnll.beam_decode(*start, beam_width=config.beam_width, **options)
        return (
            gnll.g_nll(greedy.token_logprobs, greedy.mask)[0],
            gnll.beam_nll(beam.token_logprobs, beam.mask)[0],
        )

    greedy, beam = jax.vmap(decode)(logits)

    def sampled(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = jax.random.categorical(key, law[None], shape=(_SAMPLES, config.num_chains))
        found = jnp.take_along_axis(law, drawn.T, axis=1)
        error = jnp.abs(gnll.predictive_entropy(found) - entropy)
        return error, gnll.best_of_n_nll(found)

    keys = jax.random.split(sample_key, config.repetitions)
    error, best = jax.lax.map(sampled, keys)
    return {
        "entropy": entropy,
        "maximum": maximum,
        "greedy": greedy,
        "beam": beam,
        "best": best.mean(axis=0),
        "entropy_error": error.mean(axis=0),
        "variance": gnll.surprisal_variance(law),
    }


def errors(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mean relative errors over chains by way of estimating, `[deviation, replicate]`.

    What is below a thousandth of a nat is taken as that: a chain may be all but certain, and
    float32 knows its entropies to about 1e-6 only.
    """
    maximum, entropy = (np.maximum(arrays[name], _LEAST_NATS) for name in ("maximum", "entropy"))
    found = {
        name: np.abs(arrays[name] - arrays["maximum"]) / maximum
        for name in ("greedy", "beam", "best")
    }
    found["entropy"] = arrays["entropy_error"] / entropy
    return {name: value.mean(axis=-1) for name, value in found.items()}


def claims(config: TreeConfig, arrays: Mapping[str, np.ndarray]) -> list[Claim]:
    """Where the maximum is easier to estimate than the entropy, and where not."""
    found = errors(arrays)
    stds = np.array(config.logit_stds)
    peaked, flat = stds >= config.peaked_from, int(np.argmin(stds))
    gain = found["entropy"] - found["greedy"]

    def claim(name: str, values: np.ndarray, statement: str, bound: float | None = None) -> Claim:
        return claim_from_values(
            f"gnll.tree.{name}",
            values,
            bound=bound,
            direction=">=",
            kind="finding" if bound is None else "claim",
            statement=statement,
            source=_PAPER,
        )

    return [
        claim(
            "variance",
            gain[peaked].mean(axis=0),
            f"On peaked chains (logits of deviation {config.peaked_from:g} or more): relative "
            f"error of PE with {_SAMPLES} samples less that of one greedy decoding as the "
            "min-entropy.",
            bound=0.0,
        ),
        claim(
            "variance.flat",
            gain[flat],
            f"The same on the flattest chains (deviation {stds[flat]:g}), where greedy decoding "
            "often misses the most probable sequence.",
        ),
        claim(
            "beam",
            (found["entropy"] - found["beam"]).mean(axis=0),
            f"On all chains: relative error of PE less that of a beam of width {config.beam_width} "
            "as the min-entropy.",
        ),
        claim(
            "samples",
            (found["greedy"] - found["best"]).mean(axis=0),
            "On all chains: relative error of one greedy decoding as the min-entropy less that of "
            f"the best of {_SAMPLES} samples.",
        ),
    ]


def metrics(config: TreeConfig, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Errors and how often greedy decoding finds the most probable sequence."""
    hit = np.isclose(arrays["greedy"], arrays["maximum"], rtol=1e-5, atol=1e-6)
    found: dict[str, float] = {}
    for index, std in enumerate(config.logit_stds):
        mark = f"tree.std_{std:g}"
        found[f"{mark}.greedy_is_best"] = float(hit[index].mean())
        for name, value in errors(arrays).items():
            found[f"{mark}.error.{name}"] = float(value[index].mean())
    return found


def figure(config: TreeConfig, arrays: Mapping[str, np.ndarray]) -> Figure:
    """Relative errors over the deviation of the logits."""
    found, order = errors(arrays), np.argsort(config.logit_stds)
    stds = np.array(config.logit_stds)[order]
    lines = []
    for name, label in _LABELS.items():
        low, high = np.array([t_interval(found[name][i]) for i in order]).T
        style = "dashed" if name == "entropy" else "line"
        lines.append(Series(label, stds, found[name][order].mean(axis=1), low, high, style=style))
    panel = Panel(
        "deviation of the logits (flat to peaked)",
        "mean relative error",
        lines,
        yscale="log",
    )
    return Figure(
        "tree",
        "What a few decodings tell of a law",
        [panel],
        f"Error of the min-entropy from one greedy decoding, a beam of {config.beam_width}, and "
        f"{_SAMPLES} samples, and of the entropy from {_SAMPLES} samples, relative to the exact "
        "value; mean and 95 % interval over seeds. A point is missing where an error is 0.",
    )
