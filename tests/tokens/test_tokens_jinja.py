"""The fast sandbox gives the slow one's answers: for every type a template meets, every attribute it may ask for."""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tokens.jinja import Environment

SLOW, FAST = jinja2.sandbox.ImmutableSandboxedEnvironment(), Environment()
VALUES: list[Any] = [
    {},
    {"role": "user", "items": 1, "get": 2, "_x": 3, "clear": 4},
    "text",
    "",
    [1],
    (1,),
    3,
    None,
    True,
]
NAMES = sorted(
    {name for value in VALUES for name in dir(value)}
    | {"role", "content", "_x", "index0", "index", "first", "last", "length", "revindex", "previtem", "nextitem"}
    | {"depth", "depth0", "cycle", "changed", "_length", "x", "y", "_Namespace__attrs", "format", "format_map"}
)


def answer(environment: jinja2.Environment, source: str, **variables: Any) -> str:
    try:
        return str(environment.from_string(source).render(**variables))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_attribute_of_a_value_is_answered_as_in_the_sandbox(value: Any) -> None:
    for name in NAMES:
        for source in (f"{{{{ v.{name} }}}}", f"{{{{ v.{name} is defined }}}}", f"{{{{ v['{name}'] is defined }}}}"):
            ours, theirs = answer(FAST, source, v=value), answer(SLOW, source, v=value)
            assert ours.split(" at 0x")[0] == theirs.split(" at 0x")[0], source


@pytest.mark.parametrize("name", NAMES)
def test_loops_and_namespaces_are_answered_as_in_the_sandbox(name: str) -> None:
    for source in (
        f"{{% for v in (4, 5, 6) %}}{{{{ loop.{name} is defined }}}}{{{{ loop.{name} is callable }}}},{{% endfor %}}",
        f"{{% for v in (4, 5, 6) %}}{{{{ loop.{name} is string }}}}{{{{ loop.{name} == 1 }}}},{{% endfor %}}",
        f"{{% set n = namespace(x=1, _x=2, role='a') %}}{{{{ n.{name} is defined }}}}{{{{ n.{name} == 1 }}}}",
    ):
        assert answer(FAST, source) == answer(SLOW, source)


CALLS = [
    "split('a')",
    "split('a', 1)",
    "split()",
    "strip('\\n')",
    "startswith('a')",
    "startswith()",
    "startswith(1)",
    "replace('a', 'b')",
    "join(['x', 'y'])",
    "format(1)",
    "format_map({})",
    "upper()",
    "nothing()",
    "splitlines(keepends=true)",
    "split(sep='a', maxsplit=1)[0]",
    "encode()",
    "partition('a')[2]",
    "get('a')",
    "get('a', 1)",
    "items() | list",
    "keys() | list",
    "pop('a')",
    "update({})",
    "append(1)",
]


@given(
    st.one_of(st.text("ab{}\n x"), st.dictionaries(st.text("ab", max_size=2), st.integers()), st.lists(st.integers()))
)
def test_methods_are_called_as_in_the_sandbox(value: Any) -> None:
    for call in CALLS:
        source = f"{{% for x in [1] %}}{{{{ v.{call} }}}}{{% endfor %}}"
        ours, theirs = answer(FAST, source, v=value), answer(SLOW, source, v=value)
        assert ours.split(" at 0x")[0] == theirs.split(" at 0x")[0], source
