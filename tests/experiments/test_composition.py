"""Every mistake on the command line is one line that names field, value and what is allowed."""

import pathlib
from typing import Any

import pytest

from jaxlab.errors import UserError
from jaxlab.experiments import composition
from jaxlab.experiments.base import config_fields, flatten, identity_digest, to_dict
from jaxlab.experiments.registry import METHODS, config_class

MISTAKES = [
    (
        ["method=trek"],
        "method=trek: unknown method; did you mean trec? Allowed: trec, gnll, generate",
    ),
    (["method=zzz"], "method=zzz: unknown method; allowed: trec, gnll, generate"),
    (
        ["variant=txt"],
        "variant=txt: unknown variant of trec; did you mean text? Allowed: text, mlp, schedules, "
        "collapse, law, placement, cpt, recipes, plan, measure",
    ),
    (
        ["preset=cpuu"],
        "preset=cpuu: unknown preset of trec; did you mean cpu? Allowed: test, cpu",
    ),
    (
        ["scale=gpu9"],
        "scale=gpu9: unknown choice; did you mean gpu8? Allowed: cpu, gpu1, gpu8, "
        "tpu-v5e-8, tpu-v6e-64",
    ),
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
    (["steps=30"], "steps=30: must be a multiple of num_bins=20"),
    (["num_bins=7"], "num_bins=7: must divide steps=600"),
    (["scale=null"], "scale=null: unknown choice; allowed: cpu, gpu1, gpu8, tpu-v5e-8, tpu-v6e-64"),
    (
        ["steps_per_dispatch=0"],
        "steps_per_dispatch=0: must be greater than or equal to 1 or be 'auto'",
    ),
    (["optimizer.eps=inf"], "optimizer.eps=inf: must be a finite number"),
    (["optimizer.clip_norm=inf"], "optimizer.clip_norm=inf: must be a finite number"),
    (["data.concentration=inf"], "data.concentration=inf: must be a finite number"),
    (
        ["variant=mlp", "data.concentration=1e-4"],
        "data.concentration=0.0001: must be greater than or equal to 0.01",
    ),
    (
        ["variant=mlp", "data.concentration=0.05", "data.vocab_size=4"],
        "data.concentration=0.05: at least 0.1 with fewer than 32 states (data.vocab_size=4), "
        "whose chain could fall apart",
    ),
    (["model.width=100000"], "model.width=100000: must be less than or equal to 65536"),
    (["batch_size=10000000000"], None),
    (
        ["hydra.run.dir=foo"],
        "hydra.run.dir=foo: not used here; allowed of Hydra: hydra/launcher and hydra.launcher.*",
    ),
    (["hydra/sweeper=basic"], None),
    (["hydra/launcher=null"], None),
    (["steps=${foo}"], "steps=${foo}: Interpolation key 'foo' not found"),
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
    (["steps"], "argument=steps: not an assignment; write field=value"),
    (["=3"], "argument==3: not an assignment; write field=value"),
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
    with pytest.raises(UserError) as caught:
        composition.prepare_overrides(["steps=[1"])
    assert str(caught.value) == "steps=[1: cannot be read; quote text: steps='\"...\"'"


@pytest.mark.parametrize(
    "path",
    [
        "a b,c (d)'s",
        "plain/path-1.2",
        "x=y",
        "ends with \\",
        "[brackets]",
        "${HOME}",
        "'q'x",
        "42",
        "1.5",
        "true",
        "1e3",
    ],
)
def test_free_text_needs_no_quotes(path):
    config = composition.compose_config(composition.prepare_overrides([f"run_dir={path}"]))
    assert config.run_dir == path


def test_quoted_text_stays_as_it_is():
    config = composition.compose_config(composition.prepare_overrides(["run_dir='a, b'"]))
    assert config.run_dir == "a, b"


def test_text_that_yaml_reads_as_a_number_stays_text():
    words = ["method='trec'", "compilation_cache=1", "run_dir=null"]
    config = composition.compose_config(composition.prepare_overrides(words))
    assert (config.method, config.compilation_cache, config.run_dir) == ("trec", "1", None)


def test_a_home_folder_is_expanded_once(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = composition.compose_config(composition.prepare_overrides(["run_dir=~/x"]))
    assert config.run_dir == "/home/somebody/x"
    assert composition.make_config("trec", run_dir=pathlib.Path("~/x")).run_dir == config.run_dir


def test_values_may_refer_to_other_fields():
    words = ["eval_every=${steps}", "steps=40"]
    config = composition.compose_config(composition.prepare_overrides(words))
    assert flatten(to_dict(config))["eval_every"] == 40


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
    with pytest.raises(UserError, match="scale=foo: unknown choice; allowed: cpu"):
        composition.make_config("trec", scale="foo")


def test_a_sweep_expands_to_its_product():
    overrides = composition.prepare_overrides(
        ["preset=test,cpu", "optimizer.tau=0.1,0.2", "seed=range(3)"], multirun=True
    )
    combinations = composition.expand_sweep(overrides)
    assert len(combinations) == 12
    assert combinations[0] == ["method=trec/test", "optimizer.tau=0.1", "seed=0"]
    assert composition.compose_config(combinations[-1]).seed == 2


def sweep(*words):
    overrides = composition.prepare_overrides(words, multirun=True)
    return composition.compose_configs(composition.expand_sweep(overrides))


def test_a_large_sweep_is_composed_and_checked_in_full():
    configs = sweep("preset=test", "variant=mlp", "seed=range(200)", "steps=40,60")
    found = {(config.seed, flatten(to_dict(config))["steps"]) for config in configs}
    assert found == {(seed, steps) for seed in range(200) for steps in (40, 60)}
    words = ["preset=test", "seed=3", "steps=60", "variant=mlp"]
    assert composition.compose_config(composition.prepare_overrides(words)) in configs
    with pytest.raises(UserError, match=r"^num_bins=7: must divide steps=32$"):
        sweep("steps=range(28,260,4)", "num_bins=4,7")


def test_sweeps_of_several_files():
    configs = sweep("preset=test,cpu", "variant=text,mlp", "seed=1,2")
    assert len({(c.preset, c.variant, c.seed) for c in configs}) == 8
    assert {flatten(to_dict(c))["batch_size"] for c in configs} == {4, 16, 128}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "replicates=2,4",
            "one value; a sweep varies what is computed (identity), not extent fields",
        ),
        (
            "quiet=true,false",
            "one value; a sweep varies what is computed (identity), not execution fields",
        ),
        (
            "scale=cpu,gpu",
            "one value; a sweep varies what is computed (identity), not execution fields",
        ),
        (
            "hydra/launcher=basic,vmap",
            "one value; a sweep varies what is computed (identity), not execution fields",
        ),
        (
            "optimizer.schedule=glob(*)",
            "allowed in a sweep: a,b,c or choice(...) or range(...)",
        ),
        ("seed=interval(1,2)", "allowed in a sweep: a,b,c or choice(...) or range(...)"),
        ("seed=range(5,1)", "allowed in a sweep: a,b,c or choice(...) or range(...)"),
        ("seed=range(1,5,0)", "allowed in a sweep: a,b,c or choice(...) or range(...)"),
    ],
)
def test_what_a_sweep_cannot_vary(word, message):
    with pytest.raises(UserError) as caught:
        sweep(word)
    assert str(caught.value) == f"{word}: {message}"


def test_a_sweep_has_a_largest_size():
    with pytest.raises(UserError, match=r"^sweep=seed x steps: more than 10000 combinations"):
        sweep("seed=range(1000000000)", "steps=40,80")


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
            assert file.is_file(), file
            config = composition.make_config(slug, variant=variant, preset=preset)
            assert (config.variant, config.preset) == (variant, preset)
            assert "python -m jaxlab.run" in file.read_text(), "a preset names its command"


@pytest.mark.parametrize("slug", list(METHODS))
def test_every_field_is_described_and_bounded_in_role(slug):
    for variant in METHODS[slug].variants:
        for name, info in config_fields(config_class(slug, variant)).items():
            assert info.description, name
            assert info.allowed, name
            assert not (info.traced and info.role != "identity"), name


def composed(*words) -> Any:
    return composition.compose_config(composition.prepare_overrides(words))


def test_studies_have_fields_of_their_own():
    config = composed("variant=schedules", "taus=[0.1,0.4]", "schedules=[step]")
    assert config.taus == (0.1, 0.4)
    assert config.schedules == ("step",)
    for words, message in {
        ("variant=plan", "optimizer.peak_lr=1"): r"^optimizer\.peak_lr=1: unknown field",
        ("variant=schedules", "taus=[0.1,-1]"): r"^taus=-1: must be a list of number > 0",
        ("variant=schedules", "taus=[]"): r"^taus=\[\]: must be a list",
        ("variant=schedules", "schedules=[setp]"): r"^schedules=setp: did you mean step\?",
        ("variant=schedules", "schedules=[d2z,d2z]"): r"must differ from each other",
        ("variant=law", "other_schedules=[d2z]"): r"^other_schedules=d2z: must be other",
        ("variant=placement", "optimizer.step_at=0.65"): r"^optimizer\.step_at=0\.65: must be the",
        ("variant=cpt", "pretrain_tau=0.001"): r"^pretrain_tau=0\.001: must exceed the span",
        ("variant=law", "taus=[0.1,0.1]"): r"^taus=\[0\.1, 0\.1\]: must differ",
        ("variant=collapse", "batch_size=33"): r"^batch_size=33: must be even",
        ("variant=placement", "num_segments=7"): r"^num_segments=7: must divide steps=1000",
    }.items():
        with pytest.raises(UserError, match=message):
            composed(*words)


def test_the_command_reproduces_the_configuration():
    config = composition.make_config(
        "trec", variant="mlp", preset="test", seed=3, optimizer={"tau": 0.4, "clip_norm": None}
    )
    words = composition.command_of(config).split()[3:]
    again = composition.compose_config(composition.prepare_overrides(words))
    assert identity_digest(again) == identity_digest(config)
    assert again.replicates == config.replicates


@pytest.mark.parametrize("word", ["model=x", "data.num_questions=5", "judge.kind=exact"])
def test_a_field_of_one_study_alone_chooses_it(word):
    words = composition.prepare_overrides(["method=gnll", word])
    assert composition.compose_config(words).variant == "model"
    assert composition.make_config("gnll", data={"num_questions": 5}).variant == "model"
    with pytest.raises(UserError, match="unknown field"):
        composition.prepare_overrides(["method=gnll", "variant=stress", word])
