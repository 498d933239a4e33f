"""Text in, text out: with models that write the alphabet."""

import io
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab import run
from jaxlab.errors import JaxlabError, UserError
from jaxlab.experiments.composition import compose_command, make_config, prepare_overrides
from jaxlab.experiments.generate.config import GenerateConfig, TextSettings
from jaxlab.experiments.generate.language_model import (
    load_language_model,
    open_model_files,
    prepare,
)
from jaxlab.experiments.registry import METHODS, TOOLS
from jaxlab.models.pretrained.families import decoder_from_config
from jaxlab.models.pretrained.loading import save_pretrained
from tests.data.tiny_tokenizers import added, definition
from tests.goldens import FOLDER

LETTERS = [chr(code) for code in range(0x20, 0x7F)]
END, BEGIN, VOCAB = 95, 96, 97
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 104,
    "intermediate_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TEMPLATE = (
    "{% for turn in messages %}<s>{{ turn['role'] }}:{{ turn['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def successors(following: dict[int, int], size: int) -> Any:
    """Weights with which each token, whatever came before it, is followed by a certain one."""
    model = decoder_from_config({**CONFIG, "vocab_size": size})
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int)))
    params: Any = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes["params"])
    params["final_norm"]["scale"][:] = 1
    params["embedding"][:, :size] = np.eye(size)
    for token, next_token in following.items():
        params["unembedding"][token, next_token] = 1
    return model, params


def write_model(folder: Path, *, size: int = VOCAB, context: int = 64, **settings: Any) -> Path:
    """The alphabet up to `~`, which `settings["after"]` follows: by default the end."""
    following = {code: code + 1 for code in range(94)}
    following |= {94: settings.pop("after", END), BEGIN: LETTERS.index("A")}
    model, params = successors(following, size)
    step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    spelled = ["Ġ", *LETTERS[1:]]
    tokenizer = definition(
        {"type": "BPE", "vocab": {token: n for n, token in enumerate(spelled)}, "merges": []},
        added_tokens=[added(END, "</s>"), added(BEGIN, "<s>")],
        pre_tokenizer={**step, "trim_offsets": True},
        decoder={**step, "trim_offsets": True},
    )
    described = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, **settings}
    save_pretrained(
        folder,
        params,
        model,
        {**CONFIG, "vocab_size": size, "max_position_embeddings": context},
        tokenizer={"tokenizer.json": tokenizer, "tokenizer_config.json": json.dumps(described)},
    )
    return folder


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "alphabet")


@pytest.fixture
def call(alphabet, capsys, tmp_path, monkeypatch):
    """A command line: its exit code and what it writes."""
    monkeypatch.chdir(tmp_path)

    def start(*words: str, model: Path = alphabet) -> tuple[int, str, str]:
        usual = ["method=generate", f"model={model}", "compilation_cache=off", "preset=test"]
        code = run.main([*usual, *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return start


def test_text_goes_to_stdout_and_status_to_stderr(call, tmp_path):
    code, out, err = call("prompt=abc")
    assert (code, out) == (0, "defghijk\n")
    loaded, speed = err.splitlines()
    assert "0.0 M parameters, float32, loaded in" in loaded
    assert speed.startswith("3 tokens of prompt; 8 new tokens in")
    assert call("prompt=abc", "quiet=true") == (0, "defghijk\n", "")
    assert list(tmp_path.iterdir()) == []


def test_text_is_written_as_it_comes(call, monkeypatch):
    written: list[str] = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            written.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert call("prompt=abc", "tokens_per_dispatch=3")[0] == 0
    assert written == ["d", "defg", "defghij", "defghijk", "defghijk\n"]


def test_the_model_ends_its_text(call):
    assert call("prompt=z", "quiet=true") == (0, "{|}~\n", "")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("stop=gh", "def"),
        ("stop=[hij,gh]", "def"),
        ("stop=['k l',fg,'x,y']", "de"),
        ("stop=kx", "defghijk"),
        ("stop_tokens=[i,h]", "defg"),
    ],
)
def test_stops(call, stop, text):
    assert call("prompt=abc", stop, "quiet=true") == (0, f"{text}\n", "")


def test_the_prompt_comes_from_standard_input(call, monkeypatch):
    for data, expected in ((b"a\nxc\n", "defghijk\n"), (b"c\r\n", "defghijk\n")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert call("prompt=-", "quiet=true") == (0, expected, "")
    for data, problem in ((b"\n", "standard input is empty"), (b"\xff", "standard input is not ")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code, out, err = call("prompt=-")
        assert (code, out) == (2, "")
        assert err.startswith(f"jaxlab: prompt=-: {problem}")


def test_log_probabilities(call, tmp_path):
    code, out, err = call("prompt=~", "log_probs=true", "quiet=true")
    lines = out.splitlines()
    assert (code, err, lines[:2]) == (0, "", ["", ""])
    assert lines[2].split() == ["place", "log-probability", "id", "token"]
    assert lines[3].split()[0::2] == ["0", "95"]
    assert lines[3].endswith('"</s>"')
    expected = -np.log1p(96 * np.exp(-np.sqrt(104)))
    assert float(lines[3].split()[1]) == pytest.approx(expected, abs=1e-4)
    assert lines[4].split()[0] == "sum"

    code, out, _ = call("prompt=}", "log_probs=true", "quiet=true", "output=out.jsonl")
    assert (code, out) == (0, "~\n")
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry.pop("log_probs") == pytest.approx([expected] * 2, abs=1e-4)
    assert entry == {
        "prompt": "}",
        "sample": 0,
        "text": "~",
        "tokens": [94, 95],
        "ended_by": "</s>",
    }


def test_several_samples(call):
    words = ("prompt=a", "temperature=4", "num_samples=3", "quiet=true")
    code, out, _ = call(*words, "seed=1")
    texts = out.removesuffix("\n").split("\n---\n")
    assert (code, len(texts), len(set(texts))) == (0, 3, 3)
    assert call(*words, "seed=1")[1] == out
    assert call(*words, "seed=2")[1] != out


def test_beams(call):
    assert call("prompt=abc", "num_beams=3", "quiet=true") == (0, "defghijk\n", "")


def test_the_chat_template(call, alphabet):
    code, out, _ = call("prompt=hi", "chat=true", "quiet=true")
    assert (code, out) == (0, "ABCDEFGH\n")
    files = open_model_files(alphabet)
    settings = TextSettings(chat=True, system="S", max_new_tokens=1)
    tokens = prepare(files, "hi", settings).tokens
    assert files.tokenizer.decode(tokens) == "<s>system:S<s>user:hi<s>"
    assert tokens.count(BEGIN) == 3
    plain = prepare(files, "<s>", TextSettings(max_new_tokens=1)).tokens
    assert BEGIN not in plain


@pytest.mark.parametrize("prompt", ["a\nb c", "it's ${HOME}", 'a, "b" [c] {d}=e', "42", "null "])
def test_any_text_is_a_prompt(prompt):
    words = ["method=generate", f"prompt={prompt}"]
    config = compose_command(prepare_overrides(words))
    assert isinstance(config, GenerateConfig)
    assert config.prompt == prompt


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "prompt=null: needed: the text to go on from, or - for standard input"),
        (["prompt="], "prompt=: must have at least 1 character"),
        (["prompt=\u00e9"], "prompt=\u00e9: is empty; allowed: some text"),
        (
            ["prompt=a", "max_new_tokens=64"],
            "max_new_tokens=64: must be at most 63 after a prompt of 1 tokens: the model's context "
            "is 64",
        ),
        (
            [f"prompt={'a' * 64}"],
            "prompt=(64 tokens): the model's context is 64; allowed: a shorter prompt",
        ),
        (["prompt=a", "stop_tokens=<e>"], None),
        (["prompt=a", "stop="], "stop=: must have at least 1 character"),
        (["prompt=a", "stop=[x,'']"], "stop=: must have at least 1 character"),
        (["prompt=a", "system=b"], "system=b: needs chat=true"),
        (["prompt=a", "top_k=4"], "top_k=4: needs temperature above 0"),
        (["prompt=a", "num_samples=2"], "num_samples=2: needs temperature above 0"),
        (
            ["prompt=a", "num_beams=2", "temperature=1"],
            "num_beams=2: must be 1 with temperature=1.0, which is for sampling",
        ),
        (["prompt=a", "length_penalty=1"], "length_penalty=1.0: needs num_beams above 1"),
        (["prompt=a", "temperature=-1"], "temperature=-1: must be greater than or equal to 0"),
        (["prompt=a", "dtype=float16"], None),
        (["prompt=a", "replicates=2"], "replicates=2: unknown field; see --help for the fields"),
        (["prompt=a", "output=no/where"], None),
        (["prompt=a", "mesh.model=3"], None),
        (["prompt=a", "model=smollm2-135n"], None),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(call, tmp_path, words, message):
    code, out, err = call(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []
    if message is None:
        name = words[-1].partition("=")[0]
        assert err.startswith(f"jaxlab: {name.partition('.')[0]}")
    else:
        assert err == f"jaxlab: {message}\n"


def test_a_stop_token_names_what_is_like_it(call):
    assert "did you mean </s>" in call("prompt=a", "stop_tokens=</S>")[2]


def test_models_that_lack_something(call, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    bare = write_model(folder / "bare", chat_template=None)
    code, out, err = call("prompt=a", "chat=true", model=bare)
    assert (code, out) == (2, "")
    assert "has no chat template" in err
    (bare / "tokenizer.json").unlink()
    code, _, err = call("prompt=a", model=bare)
    assert (code, err.count("\n")) == (2, 1)
    small = write_model(folder / "small", size=BEGIN)
    code, out, err = call("prompt=a", model=small)
    assert (code, out) == (2, "")
    assert "has ids up to 96, but the model has embeddings for 96 tokens" in err


def test_padding_of_the_vocabulary_is_never_drawn(call, tmp_path_factory):
    padded = write_model(tmp_path_factory.mktemp("models") / "padded", size=104)
    words = ["temperature=100", "num_samples=64", "output=out.jsonl"]
    assert call("prompt=a", *words, model=padded)[0] == 0
    entries = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert max(token for entry in entries for token in entry["tokens"]) < VOCAB
    assert len(entries) == 64


def test_weights_that_give_nan(call, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "broken"
    write_model(folder)
    model, params = successors({}, VOCAB)
    params["final_norm"]["scale"][:] = np.nan
    described = json.loads((folder / "config.json").read_text())
    files = {name: (folder / name).read_text() for name in ("tokenizer.json",)}
    save_pretrained(folder, params, model, described, tokenizer=files)
    code, out, err = call("prompt=a", "quiet=true", model=folder)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "hold NaN or infinity" in err


def start_endless(tmp_path: Path, cache_folder: Path) -> subprocess.Popen[bytes]:
    endless = write_model(tmp_path / "endless", context=1_000_000, after=0)
    words = ["prompt=a", f"model={endless}", "max_new_tokens=900000", "quiet=true"]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxlab.run", "method=generate", *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_ctrl_c_ends_with_130(tmp_path, cache_folder):
    process = start_endless(tmp_path, cache_folder)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"bc"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"jaxlab: stopped\n")
    assert out.endswith(b"\n")


def test_a_closed_pipe_ends_quietly(tmp_path, cache_folder):
    process = start_endless(tmp_path, cache_folder)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"bc"
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_help_lists_tools_apart(capsys):
    assert run.main(["--help"]) == 0
    before, _, after = capsys.readouterr().out.partition("tools:\n")
    assert "  generate" not in before
    assert after.startswith("  generate  Text from")
    assert not METHODS.keys() & TOOLS.keys()
    assert run.main(["method=generate", "--help"]) == 0
    text = capsys.readouterr().out
    assert " temperature=0.0  Of the draws" in text
    assert "replicates" not in text
    assert "sweep" not in text


def test_a_tool_has_no_sweep_and_no_run(capsys):
    assert run.main(["-m", "method=generate", "seed=1,2", "prompt=x"]) == 2
    message = "jaxlab: method=generate: is a tool; allowed: python -m jaxlab.run method=generate, "
    assert capsys.readouterr().err.startswith(message)
    with pytest.raises(UserError, match="is a tool"):
        make_config("generate")


def test_presets_compose():
    words = ["method=generate", "stop_tokens=g", "stop='[x]'", "chat=true"]
    config = compose_command(prepare_overrides(words))
    assert isinstance(config, GenerateConfig)
    assert (config.stop_tokens, config.stop) == (("g",), ("[x]",))
    for preset, tokens in (("cpu", 256), ("test", 8)):
        config = compose_command(prepare_overrides(["method=generate", f"preset={preset}"]))
        assert isinstance(config, GenerateConfig)
        assert (config.preset, config.max_new_tokens) == (preset, tokens)


def test_from_python(alphabet):
    model = jaxlab.load_language_model(alphabet)
    assert jaxlab.generate(model, "abc", max_new_tokens=8) == "defghijk"
    assert jaxlab.generate(alphabet, "abc", max_new_tokens=8, stop="f") == "de"
    settings = TextSettings(max_new_tokens=8, stop=("f",), tokens_per_dispatch=1)
    parts = model.stream(prepare(model.files, "abc", settings), settings)
    assert [part.text for (part,) in parts] == ["d", "de", "de"], "and nothing after the stop"
    (found,) = model.complete("y", max_new_tokens=8)
    assert (found.text, found.ended_by) == ("z{|}~", "</s>")
    assert len(found.tokens) == len(found.log_probs) == 6
    with pytest.raises(TypeError, match="maximum"):
        jaxlab.generate(model, "abc", maximum=5)
    with pytest.raises(ValueError, match="num_beams=2: must be 1 with top_k=3"):
        jaxlab.generate(model, "abc", num_beams=2, top_k=3)
    with pytest.raises(JaxlabError, match="dtype=int4: allowed: float32, bfloat16, int8"):
        jaxlab.load_language_model(alphabet, dtype="int4")


def test_weights_in_8_bits(call, alphabet):
    code, out, err = call("prompt=abc", "max_new_tokens=8", "dtype=int8")
    assert (code, out) == (0, "defghijk\n")
    assert "int8, loaded in" in err
    mesh = types.SimpleNamespace(size=2)  # of which nothing but the size matters
    with pytest.raises(UserError, match="dtype=int8: allowed on several devices: float32"):
        load_language_model(alphabet, dtype="int8", mesh=mesh)  # pyright: ignore[reportArgumentType]


@pytest.mark.pretrained
def test_greedy_answers_of_smollm2():
    expected = json.loads((FOLDER / "smollm2.json").read_text(encoding="utf-8"))
    model = jaxlab.load_language_model("smollm2-135m")
    for entry in expected["chat"]:
        (found,) = model.complete(entry["user"], chat=True, max_new_tokens=40)
        assert list(found.tokens) == entry["greedy_ids"]
        assert model.tokenizer.decode(found.tokens) == entry["greedy_text"]
        assert -sum(found.log_probs) == pytest.approx(entry["greedy_nll"], abs=1e-3)


@pytest.mark.parametrize("stop", ["E", "[E]", '["DE"]'])
def test_a_stop_string_is_left_out(call, stop):
    assert call("prompt=A", f"stop={stop}")[:2] == (0, "BCD\n" if stop != '["DE"]' else "BC\n")


@pytest.mark.parametrize("words", [[r"stop=\n"], [r'stop=["\n"]'], [r"stop=[x,'\n']"]])
def test_the_end_of_a_line_can_be_spelled(words):
    config: Any = compose_command(prepare_overrides(["method=generate", "prompt=A", *words]))
    assert config.stop[-1] == "\n"


def test_a_user_cannot_end_the_turn(call):
    code, out, err = call("prompt=A</s>B", "chat=true")
    assert (code, out) == (2, "")
    assert "prompt=(in a chat): turn 0 spells the special token '</s>'" in err
