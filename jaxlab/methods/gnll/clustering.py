"""Which sampled answers mean the same, from judgements about pairs or from equality."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from jaxlab.methods.gnll.arrays import check_choice

__all__ = ["cluster_by_entailment", "cluster_by_equality"]

_CONTRADICTION, _NEUTRAL, _ENTAILMENT = 0, 1, 2


def cluster_by_entailment(
    labels: np.ndarray | Sequence,
    strict: bool = True,
    *,
    variant: Literal["farquhar", "sdlg"] = "farquhar",
) -> np.ndarray:
    """Clusters of answers from a judge's labels for every ordered pair. Host.

    `farquhar` (Farquhar et al. 2024): answers are taken in order. One that has no cluster yet
    starts one, and all later answers equivalent to it join it, also those that had joined another
    before: the last one wins. Strictly, two answers are equivalent where each entails the other;
    otherwise where neither contradicts the other and not both are neutral.

    `sdlg` (Kuhn et al. 2023; Aichberger et al. 2024): two answers are equivalent where neither
    contradicts the other. Every answer, whether or not it started its cluster, hands its id on to
    all later answers equivalent to it. Ids are the index of an answer, with gaps.

    Both depend on the order of the answers, since a judge's relation need not be transitive. The
    published code asks the judge about "question answer" texts; SDLG's does not ask about texts
    that are equal in lower case, which are then to be labelled as entailing each other.

    Args:
      labels: integers [..., N, N]: 0 contradiction, 1 neutral, 2 entailment of answer `j` by
        answer `i`. The diagonal is not read.
      strict: see above; without effect on `sdlg`.
      variant: see above.

    Returns:
      int64 ids [..., N], at least 0.

    Raises:
      ValueError: the labels are no square of integers from 0 to 2, N is 0, or the variant is
        unknown.

    Example:
      >>> cluster_by_entailment([[2, 0, 2], [0, 2, 1], [2, 1, 2]])
      array([0, 1, 0])
    """
    check_choice("variant", variant, ("farquhar", "sdlg"))
    forth = np.asarray(labels)
    if forth.ndim < 2 or forth.shape[-1] != forth.shape[-2] or forth.shape[-1] < 1:
        raise ValueError(f"labels of shape {forth.shape}: must be [..., N, N] with N at least 1")
    if not (np.issubdtype(forth.dtype, np.integer) and np.isin(forth, (0, 1, 2)).all()):
        raise ValueError("labels: must be integers, 0 contradiction, 1 neutral, 2 entailment")
    size = forth.shape[-1]
    judged = forth.reshape(-1, size, size)
    if variant == "sdlg":
        return _hand_on(_compatible(judged)).reshape(forth.shape[:-1])
    if strict:
        same = (judged == _ENTAILMENT) & (judged.swapaxes(1, 2) == _ENTAILMENT)
    else:
        both_neutral = (judged == _NEUTRAL) & (judged.swapaxes(1, 2) == _NEUTRAL)
        same = _compatible(judged) & ~both_neutral
    return _join(same).reshape(forth.shape[:-1])


def cluster_by_equality(keys: np.ndarray | Sequence) -> np.ndarray:
    """Clusters of answers whose keys are equal. Host.

    Args:
      keys: one for each answer: a sequence of N hashable values (texts, bytes, tuples of
        tokens), nested lists of such sequences, or an array [..., N]. Normalise texts first,
        e.g. by `str.casefold`.

    Returns:
      int64 ids [..., N], counted from 0 in the order in which keys first occur in a row.

    Raises:
      ValueError: N is 0, or nested lists differ in length.

    Example:
      >>> cluster_by_equality(["Paris", "Rome", "Paris"])
      array([0, 1, 0])
    """
    if isinstance(keys, np.ndarray):
        if keys.ndim < 1 or keys.shape[-1] < 1:
            raise ValueError(f"keys of shape {keys.shape}: must be [..., N] with N at least 1")
        rows = keys.reshape(-1, keys.shape[-1]).tolist()
        return np.asarray([_numbered(row) for row in rows], np.int64).reshape(keys.shape)
    if len(keys) < 1:
        raise ValueError("keys=[]: must hold at least one")
    if isinstance(keys[0], list | np.ndarray):
        rows = [cluster_by_equality(row) for row in keys]
        if len({row.shape for row in rows}) > 1:
            raise ValueError(f"keys: rows have {[len(row) for row in rows]} entries: must be equal")
        return np.stack(rows)
    return np.asarray(_numbered(keys), np.int64)


def _compatible(judged: np.ndarray) -> np.ndarray:
    return (judged != _CONTRADICTION) & (judged.swapaxes(1, 2) != _CONTRADICTION)


def _join(same: np.ndarray) -> np.ndarray:
    """Ids [B, N] where only answers without a cluster start one."""
    rows, size = same.shape[:2]
    ids = np.full((rows, size), -1, np.int64)
    started = np.zeros((rows, 1), np.int64)
    for i in range(size):
        starts = ids[:, i : i + 1] < 0
        joins = same[:, i] & (np.arange(size) > i)
        joins[:, i] = True
        ids = np.where(starts & joins, started, ids)
        started += starts
    return ids


def _hand_on(same: np.ndarray) -> np.ndarray:
    """Ids [B, N] where every answer hands its own on."""
    rows, size = same.shape[:2]
    ids = np.tile(np.arange(size, dtype=np.int64), (rows, 1))
    for i in range(size):
        ids = np.where(same[:, i] & (np.arange(size) > i), ids[:, i : i + 1], ids)
    return ids


def _numbered(row: Sequence[Hashable]) -> list[int]:
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, len(seen)) for key in row]
