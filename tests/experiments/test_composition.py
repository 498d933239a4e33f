"""Every mistake on the command line is one line that names field, value and what is allowed."""

import pytest

from jaxlab.errors import UserError
from jaxlab.experiments import composition
from jaxlab.experiments.base import config_fields, flatten, identity_digest, to_dict
from jaxlab.experiments.registry import METHODS, config_class

MISTAKES = [
    (["method=trek"], "method=trek: unknown method; did you mean trec? Allowed: trec"),
    (["method=zzz"], "method=zzz: unknown method; allowed: trec"),
    (
        ["variant=txt"],
        "variant=txt: unknown variant of trec; did you mean text? Allowed: text, mlp",
    ),
    (
        ["preset=cpuu"],
        "preset=cpuu: unknown preset of trec; did you mean cpu? Allowed: test, cpu, paper",
    ),
    (["scale=gpu9"], "scale=gpu9: unknown choice; did you mean cpu? Allowed: cpu"),
    (["stpes=3"], "stpes=3: unknown field; did you mean steps?"),
    (["peak_lr=1"], "peak_lr=1: unknown field; did you mean optimizer.peak_lr?"),
    (
        ["optimizer.peek_lr=1"],
        "optimizer.peek_lr=1: unknown field; did you mean optimizer.peak_lr?",
    ),
    (["qqqq=1"], "qqqq=1: unknown field; see --help for the fields"),
    (["steps=abc"], "steps=abc: must be a valid integer"),
    (["steps=2.5"], "steps=2.5: must be a valid integer, got a number with a fractional part"),
    (["steps=1"], "steps=1: must be greater than or equal to 2"),
    (["optimizer.peak_lr=x"], "optimizer.peak_lr=x: must be a valid number"),
    (["optimizer.peak_lr=nan"], "optimizer.peak_lr=nan: must be a finite number"),
    (["optimizer.b1=1"], "optimizer.b1=1: must be less than 1"),
    (
        ["optimizer.schedule=cosin"],
        "optimizer.schedule=cosin: did you mean cosine? Allowed: d2z, constant, linear, cosine, "
        "step, wsd, inverse_sqrt, cyclic",
    ),
    (["quiet=maybe"], "quiet=maybe: must be a valid boolean"),
    (["steps_per_dispatch=few"], "steps_per_dispatch=few: must be a valid integer or be 'auto'"),
    (["seed=null"], "seed=None: must be a valid integer"),
    (["run_dir="], "run_dir=: must have at least 1 character"),
    (["steps=30"], "num_bins=20: must divide steps=30"),
    (
        ["replicates=1"],
        "replicates=1: at least 2 with reference=next, whose reference is the next replicate's "
        "model; or set reference=none",
    ),
    (
        ["optimizer.final_ratio=0.1"],
        "optimizer.final_ratio=0.1: must be 0 with schedule=d2z; use schedule=linear",
    ),
    (
        ["optimizer.schedule=inverse_sqrt", "optimizer.warmup_fraction=0"],
        "optimizer.warmup_fraction=0.0: must give at least one step of warm-up with "
        "schedule=inverse_sqrt",
    ),
    (
        ["optimizer.tau=0.001"],
        "optimizer.tau=0.001: must exceed 1/steps, the span of one step (0.00167)",
    ),
    (
        ["model.width=12", "model.num_heads=4"],
        "model.width=12: must be a multiple of 2 * model.num_heads=8, for rotary positions",
    ),
    (["model.num_kv_heads=3"], "model.num_kv_heads=3: must divide model.num_heads=4"),
    (["optimizer=3"], None),
    (["seed=1,2"], "seed=1,2: several values need -m (a sweep), or quotes if it is text"),
    (["steps"], "steps=: not an assignment; write field=value"),
    (["+steps=3"], "+steps=3: write the field without +"),
    (["~steps=3"], "~steps=3: write the field without ~"),
    (["steps=[1"], None),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(UserError) as caught:
        composition.compose_config(composition.prepare_overrides(words))
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code == 2
    assert caught.value.field
    if message is not None:
        assert text == message


def test_a_group_of_fields_lists_them():
    with pytest.raises(UserError, match=r"^optimizer=3: a group of fields: optimizer\.peak_lr, "):
        composition.prepare_overrides(["optimizer=3"])


def test_what_cannot_be_parsed_says_how_to_quote():
    with pytest.raises(UserError, match=r"^steps=\[1: cannot be read .*quote it"):
        composition.prepare_overrides(["steps=[1"])


@pytest.mark.parametrize(
    "path",
    ["a b,c (d)'s", "plain/path-1.2", "x=y", "ends with \\", "[brackets]", "${HOME}", "'q'x"],
)
def test_free_text_needs_no_quotes(path):
    config = composition.compose_config(composition.prepare_overrides([f"run_dir={path}"]))
    assert config.run_dir == path


def test_quoted_text_stays_as_it_is():
    config = composition.compose_config(composition.prepare_overrides(["run_dir='a, b'"]))
    assert config.run_dir == "a, b"


def test_the_preset_is_overridden_by_the_words():
    config = composition.compose_config(
        composition.prepare_overrides(["preset=test", "steps=60", "optimizer.peak_lr=1e-4"])
    )
    flat = flatten(to_dict(config))
    assert (flat["preset"], flat["steps"], flat["optimizer.peak_lr"]) == ("test", 60, 1e-4)
    assert flat["model.width"] == 16


def test_python_and_command_line_compose_the_same():
    words = ["variant=mlp", "preset=test", "optimizer.tau=0.3"]
    by_words = composition.compose_config(composition.prepare_overrides(words))
    by_call = composition.make_config("trec", variant="mlp", preset="test", optimizer={"tau": 0.3})
    assert by_words == by_call


def test_python_mistakes_read_alike():
    with pytest.raises(UserError, match="stpes=3: unknown field; did you mean steps"):
        composition.make_config("trec", stpes=3)
    with pytest.raises(UserError, match="steps=0: must be greater than or equal to 2"):
        composition.make_config("trec", steps=0)


def test_a_sweep_expands_to_its_product():
    overrides = composition.prepare_overrides(
        ["preset=test,cpu", "optimizer.tau=0.1,0.2", "seed=range(3)"], multirun=True
    )
    combinations = composition.expand_sweep(overrides)
    assert len(combinations) == 12
    assert combinations[0] == ["method=trec/test", "optimizer.tau=0.1", "seed=0"]
    assert composition.compose_config(combinations[-1]).seed == 2


def test_a_large_sweep_is_checked_value_by_value():
    overrides = composition.prepare_overrides(["seed=range(200)", "steps=40,60"], multirun=True)
    assert len(composition.expand_sweep(overrides)) == 1 + 200 + 2


def test_a_bad_sweep_value_is_named():
    overrides = composition.prepare_overrides(["optimizer.tau=0.1,-1"], multirun=True)
    good, bad = composition.expand_sweep(overrides)
    composition.compose_config(good)
    with pytest.raises(UserError, match=r"^optimizer\.tau=-1: must be greater than 0"):
        composition.compose_config(bad)


@pytest.mark.parametrize("slug", list(METHODS))
def test_every_preset_of_every_variant_composes(slug):
    for variant in METHODS[slug].variants:
        for preset in METHODS[slug].presets:
            path = variant if variant != METHODS[slug].variants[0] else ""
            file = composition.config_directory() / "method" / slug / path / f"{preset}.yaml"
            if not file.is_file():
                assert preset == "paper", file
                continue
            config = composition.make_config(slug, variant=variant, preset=preset)
            assert (config.variant, config.preset) == (variant, preset)
            assert "python -m jaxlab.run" in file.read_text(), "a preset names its command"


@pytest.mark.parametrize("slug", list(METHODS))
def test_every_field_is_described_and_bounded_in_role(slug):
    for name, info in config_fields(config_class(slug)).items():
        assert info.description, name
        assert not (info.traced and info.role != "identity"), name


def test_the_command_reproduces_the_configuration():
    config = composition.make_config(
        "trec", variant="mlp", preset="test", seed=3, optimizer={"tau": 0.4, "clip_norm": None}
    )
    words = composition.command_of(config).split()[3:]
    again = composition.compose_config(composition.prepare_overrides(words))
    assert identity_digest(again) == identity_digest(config)
    assert again.replicates == config.replicates
