"""Continuous-time peaks and valleys against closed forms and against discrete curves."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from jaxlab.methods import trec

# Shapes whose peaks are apart enough that rounding a step does not decide between them.
SHAPES: list[Any] = [
    ("constant", {}),
    ("d2z", {}),
    ("linear", {"final_ratio": 0.1}),
    ("linear", {"final_ratio": 0.4}),
    ("cosine", {}),
    ("cosine", {"final_ratio": 0.01}),
    ("cosine", {"final_ratio": 0.1}),
    ("step", {"final_ratio": 0.1}),
    ("step", {"final_ratio": 0.0, "step_at": 0.5}),
    ("wsd", {"decay_fraction": 0.1}),
    ("wsd", {"final_ratio": 0.1, "decay_fraction": 0.5}),
    ("inverse_sqrt", {}),
    ("cyclic", {"final_ratio": 0.2, "num_cycles": 3}),
]


@pytest.mark.parametrize(
    ("name", "options", "warmup"),
    [(*shape, w) for shape in SHAPES for w in (0.0, 0.1) if w or shape[0] != "inverse_sqrt"],
)
@pytest.mark.parametrize("scaled", [True, False])
def test_valleys_agree_with_discrete_curves(name, options, warmup, scaled):
    num_steps = 2000
    lrs = trec.schedule_values(name, num_steps, 0.01, round(warmup * num_steps), **options)
    for tau in (0.02, 0.07, 0.2, 0.6, 2.0):
        decay = trec.weight_decay_for_timescale(tau, 0.01, num_steps, decay_scaled_by_lr=scaled)
        c = trec.coefficients_from_schedule(lrs, decay, decay_scaled_by_lr=scaled)
        for m in (0.0, 0.5, 2.0, 6.0):
            for p in (0.5, 1.0):
                valley = trec.predicted_valley(
                    name,
                    tau,
                    m,
                    p=p,
                    warmup_fraction=warmup,
                    decay_scaled_by_lr=scaled,
                    **options,
                )
                got = trec.valley(trec.predict_trec(c, m=m, p=p))
                assert abs(got - valley) <= 2 / num_steps + 1 / (tau * num_steps), (tau, m, p)


@pytest.mark.parametrize(("name", "options"), SHAPES)
def test_valleys_without_weight_decay(name, options):
    num_steps, warmup = 2000, 0.1
    lrs = trec.schedule_values(name, num_steps, 0.01, round(warmup * num_steps), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        c = trec.coefficients_from_schedule(lrs, 0.0)
    for m in (0.3, 1.0, 4.0):
        valley = trec.predicted_valley(name, np.inf, m, warmup_fraction=warmup, **options)
        got = trec.valley(trec.predict_trec(c, m=m))
        np.testing.assert_allclose(got, valley, atol=2 / num_steps)
    for scaled in (True, False):
        peaks = [
            trec.ema_peak(name, tau, warmup_fraction=warmup, decay_scaled_by_lr=scaled, **options)
            for tau in (1e9, np.inf)
        ]
        np.testing.assert_allclose(peaks[0], peaks[1], atol=1e-3)
    # Where the rate is flat at its highest, the last point of that.
    best = lrs[round(peaks[1] * num_steps) - 1]
    np.testing.assert_allclose(best, lrs.max(), rtol=1e-3)


def test_peaks_match_closed_forms():
    tau = np.geomspace(0.01, 3.0, 12)
    expected = 1 - np.minimum(1, np.sqrt(tau))
    np.testing.assert_allclose(trec.ema_peak("d2z", tau), expected, atol=1e-9)
    for ratio in (0.05, 0.5):
        got = trec.ema_peak("linear", tau, final_ratio=ratio)
        np.testing.assert_allclose(got, trec.linear_ema_peak(tau, ratio), atol=1e-9)
    for share in (0.1, 0.6):
        got = trec.ema_peak("wsd", tau, decay_fraction=share)
        np.testing.assert_allclose(got, trec.wsd_ema_peak(tau, share), atol=1e-9)
    critical = trec.step_critical_timescale(0.1, 0.7)
    for factor, expected in ((0.99, 1.0), (1.01, 0.7)):
        assert trec.ema_peak("step", critical * factor, final_ratio=0.1) == expected
    # Cosine to zero after warm-up: tan(pi x / 2)^3 + tan(pi x / 2) = (1 - w) / (pi tau).
    for warmup in (0.0, 0.2):
        root = 2 / np.sqrt(3)
        right = (1 - warmup) / (np.pi * tau)
        tangent = root * np.sinh(np.arcsinh(right * 3 * np.sqrt(3) / 2) / 3)
        expected = warmup + (1 - warmup) * 2 / np.pi * np.arctan(tangent)
        got = trec.ema_peak("cosine", tau, warmup_fraction=warmup)
        np.testing.assert_allclose(got, expected, atol=1e-9)
    # Inverse square root: t^-1/2 exp(2 sqrt(w t) / tau) is larger at one of its ends.
    for t in (0.02, 0.2, 2.0):
        value = [s**-0.5 * np.exp(2 * np.sqrt(0.1 * s) / t) for s in (0.1, 1.0)]
        got = trec.ema_peak("inverse_sqrt", t, warmup_fraction=0.1)
        assert got == (0.1 if value[0] > value[1] else 1.0)
    assert trec.ema_peak("constant", 0.3) == trec.ema_peak("cyclic", 0.3) == 1.0


def test_valleys_match_the_closed_form_of_linear_decay_to_zero():
    tau, m = np.array([0.03, 0.2, 1.0])[:, None], np.array([0.0, 0.5, 2.0, 8.0])
    got = trec.predicted_valley("d2z", tau, m, p=0.7)
    assert got.shape == (3, 4)
    np.testing.assert_allclose(got, trec.d2z_valley(tau, m, p=0.7), atol=1e-9)
    assert isinstance(trec.predicted_valley("d2z", 0.2, 1.0), float)


def test_valley_misuse():
    cases: Any = (
        (("linea", 0.1, 0.0), {}, "schedule='linea': must be one of constant"),
        (("d2z", 0.0, 0.0), {}, r"tau=0\.0: must be positive"),
        (("d2z", 0.1, -1.0), {}, r"m=-1\.0: must not be negative"),
        (("d2z", 0.1, 0.0), {"p": 0.0}, r"p=0\.0: must be positive"),
        (("d2z", 0.1, 0.0), {"final_ratio": 0.1}, r"final_ratio=0\.1: must be 0"),
        (("cosine", 0.1, 0.0), {"final_ratio": 1.1}, r"final_ratio=1\.1: must lie in \[0, 1\]"),
        (("step", 0.1, 0.0), {"step_at": 1.2}, r"step_at=1\.2: must lie in"),
        (("wsd", 0.1, 0.0), {"warmup_fraction": 0.9}, r"decay_fraction=0\.2: .*\(0, 0\.1\]"),
        (("inverse_sqrt", 0.1, 0.0), {}, "warmup_fraction=0: must be positive"),
        (("cyclic", 0.1, 0.0), {"num_cycles": 0}, "num_cycles=0: must be positive"),
    )
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            trec.predicted_valley(*arguments, **options)
