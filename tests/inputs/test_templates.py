"""Chat templates render within bounds, and within them as before."""

import json
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

import pagedserve.inputs.templates as templates
from pagedserve import RequestError
from pagedserve.inputs.chat import chat_prompt
from pagedserve.inputs.templates import bounded

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you\nthere"}]


def repeated(expression: str, first: str, times: int = 60) -> str:
    """A template that sets a value again and again."""
    return (
        f"{{% set ns = namespace(x={first}) %}}{{% for i in range({times}) %}}"
        f"{{% set ns.x = {expression} %}}{{% endfor %}}"
    )


def json_of(value: Any, indent: int | None = None) -> str:
    """As transformers writes it: no character is escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999)|sum %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% for i in range(999) recursive %}{{ loop(range(999)) if loop.depth < 9 }}{% endfor %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [1] * 10**10 }}",
        "{{ 10**10**10**10 }}",
        repeated("ns.x * ns.x", "7**300"),
        "{{ 'a'|center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%10000000000d'|format(1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**10) }}",
        "{{ ('a\\n' * 1000)|indent(10**7) }}",
        "{{ ('\\t' * 1000).expandtabs(10**7) }}",
        "{{ ('a' * 10**5)|replace('a', 'b' * 10**5) }}",
        "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
        "{{ range(99999)|list|join('a' * 10**5) }}",
        "{{ ('a' * 10**5).join(range(99999)|map('string')|list) }}",
        "{{ messages|tojson(indent=10**10) }}",
        "{{ lipsum(10**6) }}",
        repeated("ns.x ~ ns.x", "'a'"),
        repeated("ns.x + ns.x", "'a'"),
        "{% set x = 'a' * 10**6 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "{% for i in range(99999) %}" + "a" * 10**5 + "{% endfor %}",
        "{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}",
        "a" * 10**6 + "{{ 1 }}",
        "{{ raise_exception('not today') }}",
        "{{ messages[0].content.no.such.thing }}",
        "{% for",
    ],
)
def test_a_template_that_takes_too_much_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_STEPS", 100_000)
    with pytest.raises(RequestError, match=r"the chat template does not take the messages: .+"):
        chat_prompt(tokenizer, HELLO, chat_template=template)
    assert chat_prompt(tokenizer, HELLO, chat_template="a").get("prompt") == "a"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role }};{% endfor %}",
            None,
        ),
        ("{% for m in messages %}{{ loop.last }}{{ loop.nextitem }}{% endfor %}", None),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}no{% endfor %}",
            None,
        ),
        ("{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v }}{% endfor %}", None),
        ("{% for m in nothing %}x{% else %}empty{% endfor %}", "empty"),
        (
            "{% for c in 'ab' %}{{ c }}{% if loop.first %}{% continue %}{% endif %}{% endfor %}",
            "ab",
        ),
        ("{% for m in messages|map(attribute='role') %}{{ m }}{% break %}{% endfor %}", "user"),
        ("{{ messages|tojson(indent=2) }}", None),
        ("{{ messages[1].content|trim|upper|indent(4, true) }}", None),
        ("{{ '%-5s|' % 'ab' }}{{ '{:>4}'.format(1) }}{{ 'a'|center(5) }}", "ab   |   1  a  "),
        ("{{ messages|length * 3 + 2 ** 5 }}{{ 'ab' * 2 }}{{ 7 % 4 }}", "38abab3"),
        ("{{ messages|map(attribute='role')|join(', ')|replace('user', 'you') }}", None),
        ("{% macro f(m) %}<{{ m.role }}>{% endmacro %}{{ f(messages[0]) }}", "<user>"),
        (repeated("ns.x + 'ab'", "''", 2) + "{{ 5 }}", "5"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
        ("{{ 'there' in messages[1].content }}{{ messages[1].content.split('\\n')|last }}", None),
        (
            "{% for a in [[1, [2]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
            "12",
        ),
    ],
)
def test_within_the_bounds_nothing_changes(template: str, expected: str | None) -> None:
    found = bounded(render_jinja_template)([HELLO], chat_template=template)[0][0]
    environment = jinja2.Environment(  # noqa: S701  # prompts are no HTML
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = json_of
    plain = environment.from_string(template).render(messages=HELLO)
    assert found == plain
    assert expected is None or found == expected


def test_the_bounds_are_of_one_rendering(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for i in range(900) %}{% endfor %}a"
    monkeypatch.setattr(templates, "MAX_STEPS", 1000)
    for _ in range(5):
        prompt: Any = chat_prompt(tokenizer, HELLO, chat_template=template)
        assert prompt["prompt"] == "a"
