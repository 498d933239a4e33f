"""Nineteen ICLR 2026 papers as pure JAX functions, and one command that re-tests their claims.

The mathematics is in `jaxlab.methods` (`from jaxlab.methods import trec`); a whole study is
`jaxlab.run_experiment("trec", steps=200)`, or `python -m jaxlab.run method=trec` in a terminal.
`jaxlab.generate("smollm2-135m", "Once upon a time")` continues a text with a pretrained model.
Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from jaxlab.experiments.generate.language_model import LanguageModel
    from jaxlab.reporting.report import Result

__all__ = ["__version__", "generate", "load_language_model", "run_experiment"]

__version__ = "0.1.0"


def run_experiment(
    method: str, *, variant: str | None = None, preset: str = "cpu", **overrides: Any
) -> Result:
    """Runs a method's study in this process and returns what it found.

    Writes no files unless `run_dir=` is among the overrides.

    Args:
      method: a registered method, e.g. `"trec"`.
      variant: one of its studies; by default the first.
      preset: `test`, `cpu` or `paper`.
      **overrides: fields of its configuration (`steps=200`, `optimizer={"peak_lr": 1e-3}`).

    Returns:
      Metrics, claims and figures; a notebook shows them as they are.

    Raises:
      jaxlab.errors.UserError: an unknown field or a value that is not allowed.
    """
    from jaxlab.experiments.composition import make_config
    from jaxlab.experiments.runner import run

    config = make_config(method, variant=variant, preset=preset, **overrides)
    return run(config, run_dir=None if config.run_dir is None else config.output_folder())


def load_language_model(model: str | os.PathLike[str], *, dtype: str = "float32") -> LanguageModel:
    """Reads a pretrained decoder and its tokenizer.

    Args:
      model: a name such as `smollm2-135m`, a folder, a GGUF file, or a model on the Hugging Face
        Hub.
      dtype: `float32` or `bfloat16`, of weights and computation; or `int8`, of the weights.

    Returns:
      A model whose `complete` gives texts with their tokens and log-probabilities.

    Raises:
      jaxlab.errors.UserError: there is no such model, or its files cannot be used.
    """
    from jaxlab.experiments.generate.language_model import load_language_model

    return load_language_model(model, dtype=dtype)


def generate(model: str | os.PathLike[str] | LanguageModel, prompt: str, **settings: Any) -> str:
    """The text with which a language model continues a prompt.

    Args:
      model: what `load_language_model` takes, or what it gave, which saves loading it again.
      prompt: any text.
      **settings: fields of `jaxlab.experiments.generate.config.TextSettings`
        (`max_new_tokens=50`, `temperature=0.8`, `chat=True`).

    Returns:
      The text, without the prompt and without what ended it; of several samples the first.

    Raises:
      jaxlab.errors.UserError: the model or the prompt cannot be used, or not with these settings.
      TypeError, ValueError: there is no such setting, or it is out of its range.
    """
    from jaxlab.experiments.generate.language_model import LanguageModel, load_language_model

    loaded = model if isinstance(model, LanguageModel) else load_language_model(model)
    return loaded.complete(prompt, **settings)[0].text
