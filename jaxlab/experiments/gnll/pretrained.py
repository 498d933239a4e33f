"""Study: short questions to a pretrained model, one after the other.

A question's prompt is read once; the greedy answer and all samples follow from what is left of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.data.cache import cache_folder
from jaxlab.data.facts import fact_questions
from jaxlab.data.pretrained_tokenizers import PretrainedTokenizer, stop_ids
from jaxlab.data.questions import Question, few_shot_prompt, read_questions, split_examples
from jaxlab.errors import JaxlabError, UserError
from jaxlab.evaluation.chat_client import UnclearReply
from jaxlab.evaluation.judges import (
    EntailmentJudge,
    EqualityEntailment,
    ExactMatchJudge,
    Judge,
    OpenAICompatibleEntailment,
    OpenAICompatibleJudge,
    SquadF1Judge,
)
from jaxlab.experiments import machine
from jaxlab.experiments.generate.language_model import (
    LanguageModel,
    ModelFiles,
    check_context,
    load_language_model,
    open_model_files,
)
from jaxlab.experiments.gnll.config import JudgeConfig, PretrainedConfig, QuestionsConfig
from jaxlab.methods import gnll
from jaxlab.models.beam_search import BeamSettings, beam_search
from jaxlab.models.decoder import decoder_block
from jaxlab.models.generation import GenerationSettings, GenerationState, decode, start
from jaxlab.models.prefill import pad_prompts, prefill
from jaxlab.models.pretrained.families import decoder_from_config
from jaxlab.models.pretrained.folders import content_mark, open_source
from jaxlab.training.host import HostProgram, ItemFunction

__all__ = ["NAME", "Asked", "Round", "ask", "asked_questions", "build", "line_ends"]

NAME = "questions"
_NUM_FACTS = 240
_WIDTH_UNIT = 16  # prompts are padded to a multiple of it
_MEMORY_SHARE = 0.9


class Round(NamedTuple):
    """A question with what its prompt shows before it.

    Attributes:
      question: what is asked.
      examples: questions with their answers.
    """

    question: Question
    examples: tuple[Question, ...]


def asked_questions(config: QuestionsConfig) -> list[Round]:
    """What is asked, in order, with examples that are never asked.

    Examples are of the question's own topic where every topic has enough questions, else of all.

    Raises:
      UserError: the file cannot be used, a package is missing, or there are too few questions.
    """
    if config.path is not None:
        found = read_questions(config.path)
    else:
        found = fact_questions(config.topics)
    count = config.num_examples
    groups: dict[str, list[Question]] = {}
    for question in found:
        groups.setdefault(question.topic, []).append(question)
    if min(map(len, groups.values())) <= count:
        groups = {"": found}
    examples: dict[str, Round] = {}
    for group in groups.values():
        try:
            shown, others = split_examples(group, count)
        except ValueError as error:
            problem = str(error).partition(": ")[2]
            raise UserError("data.num_examples", count, problem) from None
        examples |= {question.id: Round(question, tuple(shown)) for question in others}
    rounds = [examples[question.id] for question in found if question.id in examples]
    most = len(rounds) if config.path is not None else min(_NUM_FACTS, len(rounds))
    number = config.num_questions or most
    if not 2 <= number <= len(rounds):
        used = len(found) - len(rounds)
        raise UserError(
            "data.num_questions",
            number,
            f"there are {len(rounds)} questions besides {used} examples; at least 2 are needed",
        )
    return rounds[:number]


def build(config: PretrainedConfig) -> HostProgram:
    """One program; its items are the questions.

    Raises:
      UserError: the questions or the model cannot be used, a prompt is too long, or the answers
        would not fit into memory.
    """
    rounds = asked_questions(config.data)
    files = open_model_files(config.model)
    judges = _judges(config.judge)
    prompts = [
        files.tokenizer.encode(few_shot_prompt(*shown), add_special_tokens=True) for shown in rounds
    ]
    longest = max(map(len, prompts))
    if files.context is not None:
        check_context(longest, config.max_new_tokens, files.context)
    width = _WIDTH_UNIT * -(-longest // _WIDTH_UNIT)
    _check_memory(config, files, width)
    said = [[q.question, q.answers] for shown in rounds for q in (shown.question, *shown.examples)]
    mark = hashlib.sha256(json.dumps(said).encode())

    def prepare() -> ItemFunction:
        model = load_language_model(files, dtype=config.dtype)
        stops = line_ends(files.tokenizer)

        def item(trial: int, seed: int, index: int) -> Mapping[str, Any]:
            del trial
            key = jax.random.fold_in(jax.random.key(seed), index)
            found = ask(model, prompts[index], key, config, stop_tokens=stops, width=width)
            return _judged(files, rounds[index].question, found, judges, config.judge.unclear)

        return item

    return HostProgram(
        NAME,
        num_trials=1,
        num_items=len(rounds),
        prepare=prepare,
        fingerprint=f"{len(rounds)} questions {mark.hexdigest()[:12]} to {files.name} "
        f"{content_mark(files.path)}",
    )


class Asked(NamedTuple):
    """Answers to one question.

    Attributes:
      tokens: `[1 + N, T]`, the greedy answer first; 0 behind the end.
      log_probs: of each token under the model, in nats, `[1 + N, T]`.
      lengths: tokens of each answer, the one that ended it included, `[1 + N]`.
      finished: whether a stop token ended it, `[1 + N]`.
      beam_nll: negative log-likelihood of the best text of a beam search; NaN without one.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    lengths: np.ndarray
    finished: np.ndarray
    beam_nll: float


def ask(
    model: LanguageModel,
    prompt: np.ndarray,
    key: jax.Array,
    config: PretrainedConfig,
    *,
    stop_tokens: tuple[int, ...],
    width: int,
) -> Asked:
    """The greedy answer and N samples, from one reading of the prompt.

    Args:
      model: who is asked.
      prompt: its tokens.
      key: of the samples.
      config: how many, and how long.
      stop_tokens: end an answer.
      width: to which the prompt is padded, so that all questions share one compiled program.

    Raises:
      JaxlabError: the logits held NaN or infinity.
    """
    size = min(model.tokenizer.vocab_size, model.model.vocab_size)
    new = config.max_new_tokens
    prompts = [prompt.tolist()]
    tokens, valid = pad_prompts(prompts, vocab_size=size, chunk=width)
    network, params = model.model, model.params
    done = prefill(network, params, tokens, valid, capacity=tokens.shape[1] + new)
    common: Any = {"max_new_tokens": new, "stop_ids": stop_tokens, "vocab_size": size}
    states: list[GenerationState] = []
    # The samples first: a single text takes over the prompt's caches.
    for number, temperature in ((config.num_samples, 1.0), (1, 0.0)):
        law = GenerationSettings(num_samples=number, temperature=temperature, **common)
        state = start(network, done, jnp.stack([key]), settings=law)
        states.append(decode(network, params, state, np.int32(new - 1), settings=law))
    drawn, greedy = jax.device_get([state._replace(caches=()) for state in states])
    if drawn.broken.any() or greedy.broken.any():
        raise JaxlabError(f"model={model.files.name}: its logits hold NaN or infinity")
    beam = np.nan
    if config.num_beams > 1:
        beams = BeamSettings(num_beams=config.num_beams, **common)
        found = beam_search(network, params, prompts, settings=beams, prefill_chunk=width)
        best, length = np.asarray(found.log_probs[0, 0]), int(found.lengths[0, 0])
        beam = float(gnll.sequence_nll(best[:length].astype(np.float64)))
    fields = ("tokens", "log_probs", "lengths", "finished")
    joined = [np.concatenate([getattr(greedy, f), getattr(drawn, f)]) for f in fields]
    return Asked(*joined, beam_nll=beam)


def _judged(
    files: ModelFiles,
    question: Question,
    found: Asked,
    judges: tuple[Judge, EntailmentJudge],
    unclear: str,
) -> dict[str, Any]:
    """The arrays of a question: itself, the answers, whether one is right, and which mean the same.

    The question is kept, since its file may be another one when the answers are read.
    """
    texts = []
    for tokens, length, ended in zip(found.tokens, found.lengths, found.finished, strict=True):
        said = tokens[: length - 1] if ended else tokens[:length]
        texts.append(files.tokenizer.decode(said, skip_special_tokens=True).strip())
    judge, entailment = judges
    doubts, right = 0, False
    try:
        right = judge.judge(question.question, texts[0], question.answers)
    except UnclearReply:
        if unclear == "stop":
            raise
        doubts += 1
    try:
        labels = entailment.judge_pairs(question.question, texts[1:])
    except UnclearReply:
        if unclear == "stop":
            raise
        doubts += 1
        labels = EqualityEntailment().judge_pairs(question.question, texts[1:])
    return {
        "question": json.dumps(dataclasses.asdict(question)),
        "log_probs": found.log_probs,
        "lengths": found.lengths,
        "finished": found.finished,
        "texts": np.array(texts),
        "beam_nll": found.beam_nll,
        "right": right,
        "doubts": doubts,
        "clusters": gnll.cluster_by_entailment(labels),
    }


def _judges(config: JudgeConfig) -> tuple[Judge, EntailmentJudge]:
    """What decides whether an answer is right, and what whether two mean the same."""
    local = ExactMatchJudge() if config.kind == "exact" else SquadF1Judge(config.f1_above)
    if "openai" not in (config.kind, config.meanings):
        return local, EqualityEntailment()
    assert config.base_url is not None
    assert config.model is not None
    options: Any = {
        "base_url": config.base_url,
        "model": config.model,
        "api_key_variable": config.api_key_variable,
        "timeout": config.timeout,
        "max_tokens": config.max_tokens,
        "cache": config.cache or str(cache_folder() / "judge" / "replies.jsonl"),
        "offline": config.offline,
    }
    return (
        OpenAICompatibleJudge(**options) if config.kind == "openai" else local,
        OpenAICompatibleEntailment(**options)
        if config.meanings == "openai"
        else EqualityEntailment(),
    )


def line_ends(tokenizer: PretrainedTokenizer) -> tuple[int, ...]:
    """The model's own stop tokens, and all that contain the end of a line."""
    lines = [i for i in range(tokenizer.vocab_size) if "\n" in tokenizer.decode([i])]
    return stop_ids(tokenizer, lines)


def _check_memory(config: PretrainedConfig, files: ModelFiles, width: int) -> None:
    """Whether the samples' caches and logits fit beside the weights.

    Raises:
      UserError: they do not.
    """
    free = machine.free_memory()
    if free is None:
        return
    source = open_source(files.path)
    kind = jnp.dtype(config.dtype)
    model = decoder_from_config(source.config, dtype=kind, param_dtype=kind)
    block = decoder_block(model)
    names = source.keys()
    weights = kind.itemsize * sum(math.prod(source.shape(name)) for name in names)
    token = 2 * kind.itemsize * model.num_layers * block.num_kv_heads * block.head_dim
    # Caches while rows are copied, and the logits with what is computed of them.
    row = 2 * token * (width + config.max_new_tokens) + 4 * 4 * model.vocab_size
    room = _MEMORY_SHARE * free - weights
    for name in ("num_samples", "num_beams"):
        rows = getattr(config, name)
        if rows > 1 and rows * row > room:
            most = int(room / row)
            allowed = f"allowed: at most {most}" if most > 1 else "allowed: a smaller model"
            raise UserError(
                name,
                rows,
                f"would take {(weights + rows * row) / 1e9:.1f} GB of memory with the weights, "
                f"{free / 1e9:.1f} GB are free; {allowed}",
            )
