"""Jinja's sandbox as chat templates run in it, with short ways to what they do most, to the sandbox's own answers.

Two thirds of a render went into the sandbox checking each attribute (is it internal, does it change its object, does
it format?). For plain dicts, strings, namespaces and loops the answer is known from the attribute's name.
"""

from __future__ import annotations

import re
from types import BuiltinMethodType
from typing import Any

import jinja2.sandbox
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from gateway.tokens.resume import END, MARK
from gateway.tokens.session import TailLoop, loop_context

_DICT_ATTRIBUTES = frozenset(dir(dict))
# Neither internal (no underscore) nor changing their object, and not str.format, which the sandbox replaces.
_DICT_METHODS = frozenset({"get", "items", "keys", "values"})
_STRING_METHODS = frozenset(
    {
        "capitalize",
        "count",
        "endswith",
        "find",
        "index",
        "isalpha",
        "isdigit",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "title",
        "upper",
    }
)
_LOOP_ATTRIBUTES = frozenset(
    {"depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"}
)
_NONE: frozenset[str] = frozenset()
_ABSENT = object()
_SAFE: dict[type, frozenset[str]] = {
    LoopContext: _LOOP_ATTRIBUTES,
    TailLoop: _LOOP_ATTRIBUTES,
    str: _STRING_METHODS,
}
# ``join`` runs through what it is given, which might end with StopIteration: the sandbox has a rule for that.
_DIRECT_CALLS: dict[type, frozenset[str]] = {str: _STRING_METHODS - {"join"}, dict: _DICT_METHODS}


# ``resume`` puts these calls into the template, once a message: the sandbox has nothing to check about them.
_OUR_CALL = re.compile(
    rf"environment\.call\(context, \(undefined\(name='(?:{MARK}|{END})'\) if (\w+) is missing else \1\)"
    r"(?:, _loop_vars=_loop_vars)?\)"
)


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """The sandbox that transformers uses, faster, and with loops that may start in the middle (see ``session``)."""

    loop_context = staticmethod(loop_context)

    def _generate(self, source: Any, *args: Any, **kwargs: Any) -> str:
        """The template as Python source, with a ``loop`` of ours."""
        code: str = super()._generate(source, *args, **kwargs)
        code = code.replace(" in LoopContext(", " in environment.loop_context(")
        return _OUR_CALL.sub(r"\1()", code)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Same answer as the sandbox's: it, too, takes the item where a dict has no such attribute."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                found = obj.get(attribute, _ABSENT)
                return found if found is not _ABSENT else self.undefined(obj=obj, name=attribute)
            if attribute in _DICT_METHODS:
                return getattr(obj, attribute)
        elif attribute in _SAFE.get(kind, _NONE):
            return getattr(obj, attribute)
        elif kind is Namespace and attribute[:1] != "_":
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Methods of plain strings and dicts are called at once; the sandbox would find nothing against them."""
        if type(__obj) is BuiltinMethodType:
            methods = _DIRECT_CALLS.get(type(__obj.__self__))
            if methods is not None and __obj.__name__ in methods:
                kwargs.pop("_loop_vars", None)  # what jinja2 passes along for functions that ask for the context
                kwargs.pop("_block_vars", None)
                return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)
