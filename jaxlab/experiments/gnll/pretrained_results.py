"""What a pretrained model's answers say: AUROC of every measure, with questions as the unit."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxlab.data.questions import Question
from jaxlab.evaluation.ranking import (
    BootstrapAuroc,
    abstention_threshold,
    area_under_rejection_accuracy,
    auroc,
    paired_bootstrap,
    reliability,
)
from jaxlab.experiments.gnll.config import PretrainedConfig
from jaxlab.experiments.gnll.estimators import ESTIMATORS, Texts, estimate, generations
from jaxlab.experiments.gnll.pretrained import NAME
from jaxlab.reporting.claims import Claim, claim_from_bootstrap
from jaxlab.reporting.figures import Figure, Panel, Series
from jaxlab.reporting.report import Result

__all__ = ["conclude"]

_SETTING = "mean over 18 settings of 6 models of 7B to 70B parameters and 6 tasks"
_PAPER = {
    "g_nll": f"arXiv 2412.15176: 0.721, {_SETTING}",
    "d_se": f"arXiv 2412.15176: 0.707, {_SETTING}; the best with 10 samples",
}
_OTHER = "arXiv 2412.15176: at most 0.707 for measures of 10 samples"
_ABLATION = "arXiv 2412.15176, ablations, in words; no numbers known here"
_NOT_COMPARED = "not compared in arXiv 2412.15176"
_SOURCES = {
    **dict.fromkeys(ESTIMATORS, _OTHER),
    **dict.fromkeys(("ln_g_nll", "beam_nll", "sampled_nll"), _ABLATION),
    **dict.fromkeys(("best_of_n_nll", "mcp", "sent_sar"), _NOT_COMPARED),
    **_PAPER,
}
_SHOWN = ("g_nll", "d_se")
_BINS = 8
_TARGETS = (0.8, 0.9)


class _Found(NamedTuple):
    """All measures.

    Attributes:
      right: whether the greedy answers are, `[question]`.
      measures: by name, `[replicate, question]`.
      topics: of the questions.
    """

    right: np.ndarray
    measures: dict[str, np.ndarray]
    topics: list[str]


def conclude(config: PretrainedConfig, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Result:
    """AUROCs with intervals over questions, figures, and tables for other programs.

    Args:
      config: all settings.
      arrays: of the program `questions`, `[1, replicate, question, ...]`.
    """
    own = {name: value[0] for name, value in arrays[NAME].items()}
    questions = [_question(str(text)) for text in own["question"][0]]
    found = _measured(own, questions)
    accuracy = float(found.right.mean())
    metrics = {"accuracy": accuracy, "questions": float(len(questions))}
    for topic in dict.fromkeys(found.topics):
        if topic:
            members = np.array([name == topic for name in found.topics])
            metrics[f"accuracy.{topic}"] = float(found.right[members].mean())
    files = {
        "questions.jsonl": _lines(questions, own, found),
        "questions.csv": _question_table(questions, own, found),
    }
    notes = _notes(config, own, found)
    if found.right.all() or not found.right.any():
        which = "right" if found.right.all() else "wrong"
        notes.append(
            f"All {len(questions)} greedy answers are {which}: AUROC is undefined, and nothing can "
            "be said of the measures. Ask harder or easier questions."
        )
        return _result(config, metrics, files=files, notes=notes)
    boots = _bootstraps(config, found)
    for index, name in enumerate(found.measures):
        metrics[f"auroc.{name}"] = float(boots.auroc[index])
        metrics[f"rejection_area.{name}"] = float(
            np.mean(area_under_rejection_accuracy(found.right, found.measures[name]))
        )
    metrics |= _by_topic(found)
    files["measures.csv"] = _table(config, found, boots)
    return _result(
        config,
        metrics,
        claims=_findings(config, found, boots),
        figures=(_auroc_figure(config, found, boots), _reliability_figure(found)),
        files=files,
        notes=[*notes, *_thresholds(found)],
    )


def _question(text: str) -> Question:
    fields = json.loads(text)
    return Question(**{**fields, "answers": tuple(fields["answers"])})


def _result(config: PretrainedConfig, metrics: dict[str, float], **parts: Any) -> Result:
    parts["notes"] = tuple(parts["notes"])
    return Result(method="gnll", variant=config.variant, metrics=metrics, **parts)


def _measured(own: Mapping[str, np.ndarray], questions: Sequence[Question]) -> _Found:
    greedy = Texts(own["log_probs"][:, :, 0], own["lengths"][:, :, 0])
    samples = Texts(own["log_probs"][:, :, 1:], own["lengths"][:, :, 1:])
    beam = own["beam_nll"].astype(np.float64)
    measures = estimate(greedy, samples, own["clusters"], None if np.isnan(beam).any() else beam)
    topics = [question.topic for question in questions]
    return _Found(own["right"][0].astype(bool), measures, topics)


def _by_topic(found: _Found) -> dict[str, float]:
    """AUROC within each topic that has right and wrong answers."""
    metrics = {}
    for topic in sorted(set(found.topics) - {""}):
        members = np.array([name == topic for name in found.topics])
        right = found.right[members]
        if right.any() and not right.all():
            for name in _SHOWN:
                value = auroc(~right, found.measures[name][:, members])
                metrics[f"auroc.{name}.{topic}"] = float(np.mean(value))
    return metrics


def _bootstraps(config: PretrainedConfig, found: _Found) -> BootstrapAuroc:
    """Of the mean over replicates, which share their questions and so their resamples."""
    rows = np.stack(list(found.measures.values()))  # [measure, replicate, question]
    each = [
        paired_bootstrap(~found.right, rows[:, replicate], resamples=config.resamples)
        for replicate in range(rows.shape[1])
    ]
    samples = np.mean([boot.samples for boot in each], axis=0)
    value = np.mean([boot.auroc for boot in each], axis=0)
    low, high = np.quantile(samples, [0.025, 0.975], axis=1)
    gaps = samples - samples[0]
    gap_low, gap_high = np.quantile(gaps, [0.025, 0.975], axis=1)
    redrawn = sum(boot.redrawn for boot in each)
    return BootstrapAuroc(value, low, high, value - value[0], gap_low, gap_high, samples, redrawn)


def _generations(config: PretrainedConfig, name: str) -> int:
    return generations(name, config.num_samples, config.num_beams)


def _findings(config: PretrainedConfig, found: _Found, boots: BootstrapAuroc) -> tuple[Claim, ...]:
    claims = []
    for index, name in enumerate(found.measures):
        label, number = ESTIMATORS[name].label, _generations(config, name)
        statement = f"AUROC of {label} ({number} generation{'s' if number > 1 else ''} a question)"
        if index:
            gap = -boots.difference[index]
            low, high = -boots.difference_high[index], -boots.difference_low[index]
            statement += f"; G-NLL's less this: {gap:z.3f} [{low:z.3f}, {high:z.3f}]"
        claims.append(
            claim_from_bootstrap(
                f"gnll.model.{name}",
                boots.samples[index],
                float(boots.auroc[index]),
                bound=None,
                direction=">=",
                statement=statement + ".",
                source=_SOURCES[name],
                unit="prompt",
                kind="finding",
            )
        )
    return tuple(claims)


def _notes(config: PretrainedConfig, own: Mapping[str, np.ndarray], found: _Found) -> list[str]:
    number = len(found.right)
    notes = [
        f"{config.model} answers {found.right.sum()} of {number} questions right, judged by "
        f"{config.judge.kind}; intervals are over questions (paired bootstrap).",
    ]
    cut = 1 - own["finished"].mean(axis=(0, 1))
    if cut.any():
        notes.append(
            f"{cut[0]:.1%} of the greedy answers and {cut[1:].mean():.1%} of the samples were cut "
            f"off at max_new_tokens={config.max_new_tokens}; their probability is that of a "
            "beginning."
        )
    if doubts := int(own["doubts"].sum()):
        notes.append(
            f"{doubts} times the judge gave no answer: what it was asked counts as wrong, or its "
            "meanings as those of equal text (judge.unclear=wrong)."
        )
    return notes


def _thresholds(found: _Found) -> list[str]:
    """When to abstain, by G-NLL; chosen and measured on the same questions."""
    notes = []
    for target in _TARGETS:
        rule = abstention_threshold(found.right, found.measures["g_nll"][0], target)
        if rule.kept:
            notes.append(
                f"Answering only where G-NLL <= {rule.threshold:.3g} nats keeps {rule.coverage:.0%}"
                f" of these questions, {rule.accuracy:.0%} of them right (target {target:.0%}; "
                "check it on other questions)."
            )
        else:
            notes.append(f"No threshold of G-NLL makes {target:.0%} of the kept answers right.")
    return notes


def _lines(questions: Sequence[Question], own: Mapping[str, np.ndarray], found: _Found) -> str:
    """One line of JSON a question: its answers, and every measure of the first replicate."""
    lines = []
    for index, question in enumerate(questions):
        texts = [str(text) for text in own["texts"][0, index]]
        entry = {
            "id": question.id,
            "topic": question.topic,
            "question": question.question,
            "answers": list(question.answers),
            "answer": texts[0],
            "right": bool(found.right[index]),
            "cut_off": not bool(own["finished"][0, index, 0]),
            "samples": texts[1:],
            "clusters": [int(cluster) for cluster in own["clusters"][0, index]],
            "measures": {name: float(values[0, index]) for name, values in found.measures.items()},
        }
        lines.append(json.dumps(entry, ensure_ascii=False))
    return "\n".join(lines) + "\n"


def _question_table(
    questions: Sequence[Question], own: Mapping[str, np.ndarray], found: _Found
) -> str:
    """The same without the samples as CSV, for spreadsheets."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "topic", "question", "answer", "right", *found.measures])
    for index, question in enumerate(questions):
        measures = [f"{values[0, index]:.6f}" for values in found.measures.values()]
        answer, right = str(own["texts"][0, index, 0]), int(found.right[index])
        writer.writerow([question.id, question.topic, question.question, answer, right, *measures])
    return text.getvalue()


def _table(config: PretrainedConfig, found: _Found, boots: BootstrapAuroc) -> str:
    """The measures as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["measure", "generations", "auroc", "low", "high", "less_g_nll", "less_low", "less_high"]
    )
    for index, name in enumerate(found.measures):
        numbers = (
            boots.auroc,
            boots.low,
            boots.high,
            boots.difference,
            boots.difference_low,
            boots.difference_high,
        )
        values = [f"{column[index]:.6f}" for column in numbers]
        writer.writerow([name, _generations(config, name), *values])
    return text.getvalue()


def _auroc_figure(config: PretrainedConfig, found: _Found, boots: BootstrapAuroc) -> Figure:
    labels = [f"{ESTIMATORS[name].label} ({_generations(config, name)})" for name in found.measures]
    points = Series("measured", labels, boots.auroc, boots.low, boots.high, style="points")
    chance = Series("chance", labels, [0.5] * len(labels), style="dashed")
    return Figure(
        "auroc",
        f"{config.model}: which measure tells wrong answers from right ones",
        [Panel("measure", "AUROC", [points, chance])],
        f"{len(found.right)} questions, {found.right.mean():.0%} of them answered right; 95 % "
        "interval over questions; in brackets the generations a question.",
    )


def _reliability_figure(found: _Found) -> Figure:
    """Accuracy in bins of rising uncertainty, and among the surest answers."""
    fractions = np.linspace(0.1, 1, 19)
    bins, kept = [], []
    for name in _SHOWN:
        label, score = ESTIMATORS[name].label, found.measures[name][0]
        made = reliability(found.right, score, _BINS)
        middle = (np.cumsum(made.count) - made.count / 2) / len(found.right)
        bins.append(Series(label, middle, made.accuracy, made.low, made.high, style="points"))
        # Equal scores are answered together, so the share is often larger than the fraction.
        answered = score <= np.quantile(score, fractions, method="lower")[:, None]
        count = answered.sum(axis=1)
        accuracy = (answered & found.right).sum(axis=1) / count
        kept.append(Series(label, count / len(score), accuracy))
    everyone = [found.right.mean()] * 2
    for panel in (bins, kept):
        panel.append(Series("all answers", [0.0, 1.0], everyone, style="dashed"))
    return Figure(
        "reliability",
        "How accuracy goes with uncertainty",
        [
            Panel("questions, from the surest to the least sure", "accuracy in a bin", bins),
            Panel("share of questions that are answered", "accuracy of these answers", kept),
        ],
        "(a) Accuracy in bins of rising uncertainty, with Wilson's 95 % interval; (b) accuracy if "
        "only the surest answers are given; equally sure ones are given together.",
    )
