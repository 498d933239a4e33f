import tracemalloc

import pytest

pytest.importorskip("jinja2")

from jaxlab.data import template_sandbox
from jaxlab.data.template_sandbox import OutOfBudget, Rendering, Sandbox, rendering

BUDGET = 20_000
_DOUBLED = "{% set n = namespace(x=(1,), y=(1,), z='aa') %}{% for i in range(40) %}"
PAIRS = _DOUBLED + "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
KEYS = _DOUBLED + "{% set n.x = (n.x, n.x) %}{% endfor %}"
LONG = "{% set x = 'a' * 50000 %}"
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"


def run(source, budget=BUDGET, **variables):
    state = Rendering(left=budget)
    token = rendering.set(state)
    try:
        return Sandbox().compiled(source).render(**variables), budget - state.left
    finally:
        rendering.reset(token)


@pytest.mark.parametrize(
    "source",
    [
        FOREVER,
        "{% for i in range(99999) %}{% for j in range(99999) if false %}x{% endfor %}{% endfor %}",
        "{% filter upper %}" + FOREVER + "{% endfilter %}",
        "{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}",
        "{% macro f() %}"
        + "x" * 9999
        + "{% endmacro %}{% for i in range(999) %}{{ f() }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(50) }}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call f() %}" * 50
        + "x"
        + "{% endcall %}" * 50,
        "{% set x %}aaaaaaaa{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 50,
        "{% for x in range(999) recursive %}"
        "{% if not loop.depth0 %}{{ loop(range(999)) }}{% endif %}{% endfor %}",
        "{% for x in range(9) if not x recursive %}"
        "{% if not loop.depth0 %}{{ loop(iterable=range(99999)) }}{% endif %}{% endfor %}",
        "{% set x = 'a' * 99999 %}{% for i in range(500) %}{{ loop.changed(x) }}{% endfor %}",
        "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    ],
)
def test_what_goes_on_for_ever_is_ended(source):
    with pytest.raises(OutOfBudget, match="steps"):
        run(source)


def test_the_text_of_a_recursive_loop_is_paid_before_it_is_there():
    source = "{% for x in [1] recursive %}{% if loop.depth0 %}" + "x" * 9999
    source += "{% else %}{{ loop(range(9999)) }}{% endif %}{% endfor %}"
    tracemalloc.start()
    try:
        with pytest.raises(OutOfBudget):
            run(source)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000  # not 100 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [1] }}",
        "{{ 9 ** 99999 }}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        _DOUBLED + "{% set n.z = n.z ~ n.z %}{% endfor %}",
        _DOUBLED + "{% set n.z = n.z + n.z %}{% endfor %}",
        _DOUBLED + "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}",
        PAIRS + "{{ n.x }}",
        PAIRS + "{{ n.x | tojson }}",
        PAIRS + "{{ n.x == n.y }}",
        PAIRS + "{{ [n.x] | select('eq', n.y) | list }}",
        PAIRS + "{{ [n.x].count(n.y) }}",
        KEYS + "{{ {n.x: 1} }}",
        KEYS + "{{ {1: 1}.get(n.x) }}",
        KEYS + "{{ {1: 1}[n.x] }}",
        LONG + "{{ x.replace('a', x) }}",
        LONG + "{{ x | replace('', x) }}",
        LONG + "{{ x.join(x) }}",
        LONG + "{{ range(9999) | join(x) }}",
        LONG + "{{ ([{'a': x}] * 999) | join(attribute='a') }}",
        LONG + "{{ range(999) | map('string') | map('replace', '1', x) | list }}",
        LONG + "{% for i in range(999) %}{% set y = x[1:] %}{% endfor %}",
        LONG + "{% for i in range(999) %}{% set y = x.count('ab') %}{% endfor %}",
        LONG + "{% for i in range(999) %}{{ 'b' in x }}{% endfor %}",
        LONG + "{{ ('%s' * 9999) % ((x,) * 9999) }}",
        "{{ ('\n' * 9999) | indent(9999) }}",
        "{{ '%9999d' % 1 }}",
        "{{ '%*d' | format(99999, 1) }}",
        "{{ [1] | tojson(indent=999) }}",
        "{{ 1.5 | round(99999, 'ceil') }}",
        "{{ [1] | batch(99999, 'x') | list }}",
        "{% set l = range(9999) | list %}{{ l | select('in', l) | list }}",
    ],
)
def test_what_grows_without_bound_is_ended(source):
    with pytest.raises(OutOfBudget):
        run(source)


def test_a_usual_template_costs_little():
    source = (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | trim + '\n' }}"
        "{% if loop.index0 == messages | length - 1 %}end{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 2000}] * 20
    text, cost = run(source, template_sandbox.BUDGET, messages=messages)
    assert len(text) > 20 * 9999 - 20
    assert cost < template_sandbox.BUDGET / 25


def test_the_budget_is_of_one_rendering():
    source = "{% for i in range(3000) %}x{% endfor %}"
    assert run(source)[1] == run(source)[1]
    with pytest.raises(OutOfBudget):
        run(source, budget=2999)
