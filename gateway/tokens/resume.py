"""Which chat templates can go on rendering in the middle of a conversation, and the form in which they do.

A template that loops over the messages renders each from the message itself, from what was set before the loop, from
the loop's position, and at times from neighbours. ``resumable`` finds such a loop in the template's syntax tree and
proves from the tree that nothing else can enter; then it puts three calls in: ``tail`` gives the loop only the messages
from some point on, ``mark`` notes where each message's text begins, ``end`` where the loop's does. What these calls see
decides at each render whether the text before that point is the one rendered last time (see ``session``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jinja2 import nodes

NodeT = TypeVar("NodeT", bound=nodes.Node)

TAIL, MARK, END = "kvgate_tail", "kvgate_mark", "kvgate_end"

# Of the loop only what depends on the messages up to the current one; these two look one further.
_LOOP_BEHIND = frozenset({"first", "index", "index0", "previtem", "depth", "depth0"})
_LOOP_AHEAD = frozenset({"last", "nextitem"})
# They would render differently with the hour or the dice, or bring text from elsewhere.
_IMPURE = frozenset({"strftime_now", "lipsum", "cycler", "joiner", "caller", "self", "varargs", "kwargs"})
_IMPURE_FILTERS = frozenset({"random"})
_STRANGE = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.ScopedEvalContextModifier)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a resumable loop depends on. ``lookahead``: how many messages ahead its position lets it see.

    ``lists`` are names that the loop reads element by element, ``captured`` all other names it reads, ``namespaces``
    those among them that it writes.
    """

    lookahead: int
    lists: tuple[str, ...]
    captured: tuple[str, ...]
    namespaces: tuple[str, ...]


def resumable(tree: nodes.Template, source: str) -> Plan | None:
    """Put the calls into ``tree`` if the template can be resumed. ``None`` (and no change) if that cannot be proven."""
    if "kvgate_" in source or "LoopContext" in source or any(True for _ in tree.find_all(_STRANGE)):
        return None
    place = _main_loop(tree.body)
    if place is None:
        return None
    siblings, loop = place
    if loop.recursive or loop.test is not None or loop.else_ or not isinstance(loop.target, nodes.Name):
        return None
    macros = _pure_macros(tree)
    plan = _plan(_reached(loop.body, macros), set(macros), loop.target.name)
    if plan is None:
        return None
    _insert(siblings, loop, plan)
    return plan


def _main_loop(body: list[nodes.Node]) -> tuple[list[nodes.Node], nodes.For] | None:
    """The loop with the largest body of those that run at most once a render, and the list it stands in."""
    loops = [
        (siblings, loop)
        for siblings, loop in _top_loops(body)
        if any("messages" in name.name for name in _all(loop.iter, nodes.Name))
    ]
    return max(loops, key=lambda place: sum(1 for _ in place[1].find_all(nodes.Node)), default=None)


def _top_loops(body: list[nodes.Node]) -> Iterator[tuple[list[nodes.Node], nodes.For]]:
    for node in body:
        if isinstance(node, nodes.For):
            yield body, node
        elif isinstance(node, nodes.If):
            for inner in (node.body, node.else_, *(branch.body for branch in node.elif_)):
                yield from _top_loops(inner)


def _pure_macros(tree: nodes.Template) -> dict[str, nodes.Macro]:
    """Macros that are defined once, at the top, under a name that nothing else is stored to."""
    macros = [node for node in tree.body if isinstance(node, nodes.Macro)]
    stored = [name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"]
    every = [node.name for node in tree.find_all(nodes.Macro)]
    return {macro.name: macro for macro in macros if every.count(macro.name) == 1 and macro.name not in stored}


def _reached(body: Sequence[nodes.Node], macros: dict[str, nodes.Macro]) -> list[nodes.Node]:
    """The nodes of ``body`` and of every macro called from there, directly or not."""
    reached: dict[str, nodes.Macro] = {}
    pending: list[nodes.Node] = list(body)
    while pending:
        for name in _all(pending.pop(), nodes.Name):
            if name.name in macros and name.name not in reached:
                reached[name.name] = macros[name.name]
                pending.append(macros[name.name])
    return [*body, *reached.values()]


def _plan(bodies: Sequence[nodes.Node], macros: set[str], target: str) -> Plan | None:
    loads = {name.name for node in bodies for name in _all(node, nodes.Name) if name.ctx == "load"}
    filters = {each.name for node in bodies for each in _all(node, nodes.Filter)}
    used = {attribute for node in bodies for attribute in _loop_attributes(node)}
    if loads & _IMPURE or filters & _IMPURE_FILTERS or used - _LOOP_BEHIND - _LOOP_AHEAD:
        return None
    lists = sorted(name for name in loads if "messages" in name and name not in macros and name != target)
    for name in lists:
        reads = sum(_is_name(each, name) for node in bodies for each in _all(node, nodes.Name))
        if reads != sum(_is_element(each, name) for node in bodies for each in _all(node, nodes.Getitem)):
            return None
    written = {reference.name for node in bodies for reference in _all(node, nodes.NSRef)}
    captured = sorted((loads | written) - macros - set(lists) - {"loop", target})
    return Plan(1 if used & _LOOP_AHEAD else 0, tuple(lists), tuple(captured), tuple(sorted(written)))


def _loop_attributes(node: nodes.Node) -> Iterator[str]:
    """What is read of the loop that ``node`` stands in, not of loops within; empty for the loop as a whole."""
    if isinstance(node, nodes.Getattr) and _is_name(node.node, "loop"):
        yield node.attr
    elif _is_name(node, "loop"):
        yield ""
    elif isinstance(node, nodes.For):
        yield from _loop_attributes(node.iter)
        for child in node.else_:
            yield from _loop_attributes(child)
    else:
        for child in node.iter_child_nodes():
            yield from _loop_attributes(child)


def _is_element(node: nodes.Getitem, name: str) -> bool:
    return _is_name(node.node, name) and not isinstance(node.arg, nodes.Slice)


def _insert(siblings: list[nodes.Node], loop: nodes.For, plan: Plan) -> None:
    def call(function: str, *arguments: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.Name(function, "load"), list(arguments), [], None, None)

    def names(wanted: Sequence[str]) -> nodes.List:
        return nodes.List([nodes.Name(name, "load") for name in wanted])

    loop.iter = call(TAIL, loop.iter, names(plan.lists), names(plan.captured), names(plan.namespaces))
    loop.body.insert(0, nodes.ExprStmt(call(MARK)))
    siblings.insert(siblings.index(loop) + 1, nodes.ExprStmt(call(END)))


def _all(node: nodes.Node, kind: type[NodeT]) -> Iterator[NodeT]:
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name
