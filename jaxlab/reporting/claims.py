"""Claims of a paper, re-tested: an estimate, its 95 % interval, a bound and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from jaxlab.reporting.files import to_plain

__all__ = [
    "Claim",
    "Direction",
    "Kind",
    "Unit",
    "Verdict",
    "bootstrap_t_interval",
    "claim_from_bootstrap",
    "claim_from_values",
    "format_number",
    "paired_bootstrap",
    "t_interval",
]

Kind = Literal["claim", "finding"]
Unit = Literal["seed", "text", "prompt"]
Direction = Literal[">=", "<="]
Verdict = Literal["holds", "fails", "unclear", "finding"]

_LEVEL = 0.95
# Entries of the resampled array that are drawn at once: bounds the memory, not the result.
_BOOTSTRAP_CHUNK = 2_000_000


@dataclass(frozen=True)
class Claim:
    """One statement of a paper with what this project measured about it.

    Attributes:
      id: short name, unique in its experiment, e.g. `"trec.low_region_best"`.
      kind: `"claim"` is tested against a bound; a `"finding"` is only reported.
      statement: what was measured and what is claimed, as one sentence.
      source: where the paper says it (table or section), its value and its setting, as text.
      unit: what the interval generalises over: seeds, texts or prompts.
      values: the estimate per unit, [n]; empty where there are too many to be worth storing.
      mean: the estimate.
      low: lower end of the 95 % interval; -inf where there is none (a single seed).
      high: upper end of the 95 % interval; inf where there is none.
      bound: finite number that the estimate is compared with; may be None for a finding only.
      direction: `">="`: the estimate should reach the bound, `"<="`: stay below it.

    Raises:
      ValueError: an attribute is outside the above, or `low > high`.
    """

    id: str
    kind: Kind
    statement: str
    source: str
    unit: Unit
    values: tuple[float, ...]
    mean: float
    low: float
    high: float
    bound: float | None
    direction: Direction

    def __post_init__(self) -> None:
        for field, allowed in (("kind", Kind), ("unit", Unit), ("direction", Direction)):
            if getattr(self, field) not in get_args(allowed):
                raise ValueError(
                    f"claim {self.id!r}: {field}={getattr(self, field)!r} is none of "
                    f"{', '.join(map(repr, get_args(allowed)))}"
                )
        for field in ("id", "statement", "source"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field).strip():
                raise ValueError(f"claim {self.id!r}: {field} must be a text that is not empty")
        if self.bound is None and self.kind == "claim":
            raise ValueError(f"claim {self.id!r}: only a finding needs no bound")
        if self.bound is not None and not math.isfinite(self.bound):
            raise ValueError(f"claim {self.id!r}: bound={self.bound} is not finite")
        if self.low > self.high:
            raise ValueError(f"claim {self.id!r}: low={self.low} exceeds high={self.high}")

    @property
    def holds(self) -> bool | None:
        """Whether the mean satisfies the bound; None without a bound.

        A mean that is not finite satisfies none.
        """
        if self.bound is None:
            return None
        return math.isfinite(self.mean) and self._satisfies(self.mean)

    @property
    def verdict(self) -> Verdict:
        """`"holds"` or `"fails"` if the mean and the whole interval agree, else `"unclear"`.

        An estimate that is not finite, or whose interval reaches the bound from the other side
        or does not exist, is `"unclear"`. A finding has the verdict `"finding"`.
        """
        if self.kind == "finding":
            return "finding"
        if not all(map(math.isfinite, (self.mean, self.low, self.high))):
            return "unclear"
        sides = {self._satisfies(x) for x in (self.mean, self.low, self.high)}
        if len(sides) == 2:
            return "unclear"
        return "holds" if sides.pop() else "fails"

    @property
    def estimate_text(self) -> str:
        """The mean with its interval, for tables: `"0.83 [0.80, 0.86]"`."""
        if not math.isfinite(self.mean):
            return "not finite"
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return f"{format_number(self.mean)} (no interval)"
        ends = f"[{format_number(self.low)}, {format_number(self.high)}]"
        return f"{format_number(self.mean)} {ends}"

    @property
    def bound_text(self) -> str:
        """The bound with its direction, for tables: `">= 0.5"`, or `"-"` without a bound."""
        return "-" if self.bound is None else f"{self.direction} {format_number(self.bound)}"

    def to_dict(self) -> dict[str, Any]:
        """The claim in the types of JSON, with `holds` and `verdict`; not finite becomes None."""
        attributes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return to_plain({**attributes, "holds": self.holds, "verdict": self.verdict})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Claim:
        """The claim that `to_dict` wrote; `holds` and `verdict` are derived anew.

        Raises:
          ValueError: `data` lacks an attribute or holds one of the wrong type or range.
        """
        try:
            return cls(
                **{name: data[name] for name in ("id", "kind", "statement", "source", "unit")},
                values=tuple(_float_or(value, math.nan) for value in data["values"]),
                mean=_float_or(data["mean"], math.nan),
                low=_float_or(data["low"], -math.inf),
                high=_float_or(data["high"], math.inf),
                bound=None if data["bound"] is None else float(data["bound"]),
                direction=data["direction"],
            )
        except KeyError as error:
            raise ValueError(f"a claim lacks {error}") from error
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a claim has a value of the wrong type: {error}") from error

    def _satisfies(self, x: float) -> bool:
        assert self.bound is not None
        return x >= self.bound if self.direction == ">=" else x <= self.bound


def claim_from_values(
    id: str,
    values: ArrayLike,
    *,
    bound: float | None,
    direction: Direction,
    statement: str,
    source: str,
    unit: Unit = "seed",
    kind: Kind = "claim",
) -> Claim:
    """A claim about the mean of `values`, with the t interval of `t_interval`.

    Args:
      id: see `Claim`, as are `bound`, `direction`, `statement`, `source`, `unit` and `kind`.
      values: one number per independent replicate, [n], n >= 1: for a comparison of two arms
        the paired differences or ratios, one per seed.

    Raises:
      ValueError: `values` is empty or not a vector, or see `Claim`.

    >>> claim = claim_from_values(
    ...     "demo.gain", [0.11, 0.12, 0.13], bound=0.05, direction=">=",
    ...     statement="The gain is at least 0.05.", source="Table 1: 0.10",
    ... )
    >>> claim.verdict, claim.estimate_text
    ('holds', '0.12 [0.09516, 0.1448]')
    """
    vector = _vector(values, "values")
    low, high = t_interval(vector)
    return Claim(
        id=id,
        kind=kind,
        statement=statement,
        source=source,
        unit=unit,
        values=tuple(vector.tolist()),
        mean=_mean_and_deviation(vector)[0],
        low=low,
        high=high,
        bound=None if bound is None else float(bound),
        direction=direction,
    )


def claim_from_bootstrap(
    id: str,
    statistic_samples: ArrayLike,
    estimate: float,
    *,
    bound: float | None,
    direction: Direction,
    statement: str,
    source: str,
    unit: Unit = "text",
    kind: Kind = "claim",
    values: ArrayLike = (),
) -> Claim:
    """A claim about a statistic, with the percentile interval of its bootstrap distribution.

    Args:
      id: see `Claim`, as are `bound`, `direction`, `statement`, `source`, `unit` and `kind`.
      statistic_samples: the statistic on each resampled data set, [samples], e.g. from
        `paired_bootstrap`. If one of them is not finite there is no interval.
      estimate: the statistic on the data themselves.
      values: the numbers behind the estimate, if they are to be stored, [n].

    Raises:
      ValueError: `statistic_samples` is empty or not a vector, or see `Claim`.
    """
    samples = _vector(statistic_samples, "statistic_samples")
    low, high = -math.inf, math.inf
    if np.isfinite(samples).all():
        tail = (1 - _LEVEL) / 2
        low, high = map(float, np.quantile(samples, [tail, 1 - tail]))
    return Claim(
        id=id,
        kind=kind,
        statement=statement,
        source=source,
        unit=unit,
        values=tuple(np.asarray(values, dtype=np.float64).tolist()),
        mean=float(estimate),
        low=low,
        high=high,
        bound=None if bound is None else float(bound),
        direction=direction,
    )


def paired_bootstrap(
    differences: ArrayLike, *, num_samples: int = 10_000, seed: int = 0
) -> np.ndarray:
    """Bootstrap distribution of the mean of paired differences.

    Args:
      differences: arm minus baseline on the same item (text, prompt), [items].
      num_samples: number of resampled data sets, at least 1.
      seed: of the resampling; the same seed gives the same samples.

    Returns:
      The mean of each resampled data set, [num_samples], float64. A single item shows no
      spread, so its samples are NaN: a claim made of them is unclear.

    Raises:
      ValueError: `differences` is empty or not a vector, or `num_samples < 1`.
    """
    vector = _vector(differences, "differences")
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be at least 1")
    if len(vector) == 1:
        return np.full(num_samples, np.nan)
    generator = np.random.default_rng(seed)
    # Relative to the first item the mean of equal differences is exact.
    shifted = vector - vector[0]
    rows = max(1, _BOOTSTRAP_CHUNK // len(vector))
    means = [
        shifted[
            generator.integers(len(vector), size=(min(rows, num_samples - start), len(vector)))
        ].mean(axis=1)
        for start in range(0, num_samples, rows)
    ]
    return vector[0] + np.concatenate(means)


def bootstrap_t_interval(
    estimate: float, samples: ArrayLike, group_sizes: Sequence[int], *, transform: str = "none"
) -> tuple[float, float]:
    """A 95 % interval from the spread of a bootstrap over few units.

    With few units the percentiles of a bootstrap are far too narrow, and lie beside the estimate
    where noise lowers the statistic. Here only their standard deviation is used: corrected for
    resampling from `n` instead of from a population, by `sqrt(n / (n - 1))`, and widened by
    Student's t with as many degrees of freedom as the groups leave.

    Args:
      estimate: the statistic on the data themselves.
      samples: the statistic on resampled data, each group resampled within itself, [samples].
      group_sizes: units in each group, whose statistics are averaged.
      transform: `"fisher"` computes on the scale of `arctanh`, for correlations; `"none"`.

    Returns:
      (low, high); (-inf, inf) if a group has one unit or a number is not finite.

    Raises:
      ValueError: an unknown transform or no group.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", sections 5.3 and 12.5.
    """
    if transform not in ("none", "fisher") or not group_sizes:
        raise ValueError(
            f"transform={transform!r}, group_sizes={group_sizes}: none or fisher, >= 1"
        )
    vector = _vector(samples, "samples")
    if min(group_sizes) < 2 or not (np.isfinite(vector).all() and math.isfinite(estimate)):
        return -math.inf, math.inf
    from scipy.special import stdtrit  # far lighter to import than scipy.stats

    limit = 1 - 1e-12  # a correlation of 1 has no finite arctanh
    center = estimate
    if transform == "fisher":
        vector = np.arctanh(np.clip(vector, -limit, limit))
        center = math.atanh(min(max(estimate, -limit), limit))
    smallest = min(group_sizes)
    deviation = float(vector.std(ddof=1)) * math.sqrt(smallest / (smallest - 1))
    freedom = sum(group_sizes) - len(group_sizes)
    half = float(stdtrit(freedom, (1 + _LEVEL) / 2)) * deviation
    if transform == "fisher":
        return math.tanh(center - half), math.tanh(center + half)
    return center - half, center + half


def t_interval(values: ArrayLike) -> tuple[float, float]:
    """The 95 % interval of a normal mean from Student's t: mean -+ t(0.975, n-1) s / sqrt(n).

    Args:
      values: independent replicates, [n], n >= 1.

    Returns:
      (low, high); (-inf, inf) for one replicate or if one of them is not finite.

    Raises:
      ValueError: `values` is empty or not a vector.
    """
    vector = _vector(values, "values")
    mean, deviation = _mean_and_deviation(vector)
    if len(vector) == 1 or not math.isfinite(deviation):
        return -math.inf, math.inf
    from scipy.special import stdtrit  # far lighter to import than scipy.stats

    quantile = float(stdtrit(len(vector) - 1, (1 + _LEVEL) / 2))
    half = quantile * deviation / math.sqrt(len(vector))
    return mean - half, mean + half


def format_number(x: float) -> str:
    """`x` with at least four significant digits, as tables show it.

    >>> [format_number(x) for x in (0.123456, 2, 58227.4, 1.5e-7, float("nan"))]
    ['0.1235', '2', '58227', '1.5e-07', 'nan']
    """
    text = f"{x:.4g}"
    return f"{x:.0f}" if "e+" in text and abs(x) < 1e9 else text


def _mean_and_deviation(vector: np.ndarray) -> tuple[float, float]:
    """Mean and sample standard deviation, exact for equal values; the deviation of one is 0."""
    # Overflow and NaN are answers here, not accidents.
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = vector - vector[0]
        finite = bool(np.isfinite(shifted).all())
        mean = vector[0] + shifted.mean() if finite else vector.mean()
        deviation = shifted.std(ddof=1) if len(vector) > 1 else shifted[0]
    return float(mean), float(deviation)


def _vector(values: ArrayLike, name: str) -> np.ndarray:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or vector.size == 0:
        raise ValueError(f"{name} must be a vector that is not empty, got shape {vector.shape}")
    return vector


def _float_or(value: Any, missing: float) -> float:
    return missing if value is None else float(value)
