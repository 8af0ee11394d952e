"""One chat template: what it accepts, and the text it renders, as transformers 5.16–5.19 (vLLM 0.32's) do.

The installed transformers is not asked: from 5.20 on it drops keys that are null and adds aliases of the reasoning
before it renders, which a vLLM with an older one does not do. Same Jinja environment, same special variables.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes

from gateway.tokens.clock import LOCAL_CLOCK, BackendClock
from gateway.tokens.errors import CannotCount
from gateway.tokens.jinja import Environment
from gateway.tokens.lru import Lru
from gateway.tokens.messages import ContentFormat, Message
from gateway.tokens.printer import Printer
from gateway.tokens.resume import resumable
from gateway.tokens.session import Marks, Session, TrackedMessages, inputs

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "

# Of system messages that developer messages were rewritten to.
_FIRSTS_CHARS = 2 << 20

# Parameters of transformers' apply_chat_template: it keeps them for itself, whatever the template asks for.
_CONSUMED = frozenset(
    {
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


class ChatTemplate:
    """A compiled chat template. Raises ``jinja2.TemplateError`` when ``source`` is not one.

    ``content_format`` is what vLLM's ``--chat-template-content-format auto`` finds for it. ``clock``: for those that
    print the date.
    """

    def __init__(self, source: str, clock: BackendClock = LOCAL_CLOCK) -> None:
        self._printer = Printer()
        self._firsts: Lru[str, Message] = Lru(_FIRSTS_CHARS)
        environment = _environment(self._printer, clock)
        self.source = source
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        self._variables = jinja2.meta.find_undeclared_variables(tree)
        self.content_format: ContentFormat = _content_format(tree)
        self.knows_developer = "'developer'" in source or '"developer"' in source
        self.plan = resumable(tree, source)
        self._resumable = None
        if self.plan is not None:
            code = environment.compile(tree)
            self._resumable = environment.template_class.from_code(environment, code, environment.make_globals(None))

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        special_tokens: Mapping[str, Any],
    ) -> str:
        """The prompt as text.

        ``variables``: the template kwargs of a request, merged; those the template never reads are dropped. Raises
        ``CannotCount`` when the template refuses the conversation.
        """
        messages = self._without_developers(messages)
        chosen = self._chosen(variables, special_tokens)
        continued, documents = variables.get("continue_final_message", False), variables.get("documents")
        try:
            if continued:
                return self._render_open(messages, tools, documents, variables, chosen, continued)
            return self._render(messages, tools, documents, variables, chosen)
        except CannotCount:
            raise
        except Exception as error:  # a template may raise anything; vLLM answers 400 to all of it
            raise CannotCount(f"the chat template refuses the messages: {error}") from error

    def resume(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        special_tokens: Mapping[str, Any],
        known: Marks | None,
        restarts: Sequence[bool],
    ) -> Session | None:
        """Render like ``render``, but from the middle on if ``known``, an earlier render, allows it (see ``Session``).

        ``None`` where only ``render`` will do. ``messages`` are compared by identity with those of the earlier render.
        Raises ``CannotCount``.
        """
        if self.plan is None or self._resumable is None or variables.get("continue_final_message"):
            return None
        messages = self._without_developers(messages)
        chosen = self._chosen(variables, special_tokens)
        session = Session(self.plan, known, restarts)
        given = self._given(TrackedMessages(messages, session), tools, variables.get("documents"), variables, chosen)
        try:
            session.run(self._resumable.generate(**given, **inputs(session)))
        except Exception:  # whatever it raises: render will raise it, too, and word it
            return None
        return session

    def _without_developers(self, messages: list[Message]) -> list[Message]:
        """As vLLM rewrites them for a template that does not know the role. The first, if it is made for this, is the
        same object again when it is equal, so that a conversation can be seen to have grown."""
        if self.knows_developer or not any(message["role"] == "developer" for message in messages):
            return messages
        rewritten = _merged_systems([_as_system(message) for message in messages])
        written = repr(rewritten[0])
        first = self._firsts.get(written)
        if first is None:
            first = rewritten[0]
            self._firsts.put(written, first, len(written))
        return [first, *rewritten[1:]]

    def keep_printed(self, tools: Sequence[Any], size_bytes: int) -> None:
        """These objects will come again and not change: print each as JSON only once. ``size_bytes``: as JSON."""
        self._printer.keep(tools, size_bytes)

    def _chosen(self, variables: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> dict[str, Any]:
        """What the template reads of ``variables``, checked as vLLM checks it."""
        chosen = dict(special_tokens)
        chosen |= {key: value for key, value in variables.items() if key in self._variables and key not in _CONSUMED}
        documents = variables.get("documents")
        if documents is not None and not _are_objects(documents):
            raise CannotCount("documents must be a list of objects", refused=True)
        if variables.get("return_assistant_tokens_mask"):
            raise CannotCount("return_assistant_tokens_mask cannot be asked for here", refused=True)
        if variables.get("continue_final_message") and variables.get("add_generation_prompt"):
            raise CannotCount("continue_final_message and add_generation_prompt exclude each other", refused=True)
        return chosen

    @staticmethod
    def _given(
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        documents: Any,
        variables: Mapping[str, Any],
        chosen: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": variables.get("add_generation_prompt", False),
            **chosen,
        }

    def _render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        documents: Any,
        variables: Mapping[str, Any],
        chosen: Mapping[str, Any],
    ) -> str:
        text: str = self._template.render(**self._given(messages, tools, documents, variables, chosen))
        return text

    def _render_open(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        documents: Any,
        variables: Mapping[str, Any],
        chosen: Mapping[str, Any],
        continued: Any,
    ) -> str:
        """Render with the final message left open: a tag marks its end, and all from the tag on is cut off."""
        field = continued if isinstance(continued, str) else "content"
        messages = [*messages[:-1], copy.deepcopy(messages[-1])]
        final = messages[-1].get(field)
        if final is None or field not in self.source:
            raise CannotCount(f"the final message has no {field} that could be continued", refused=True)
        if isinstance(final, list):
            block = next((part for part in reversed(final) if "text" in part), None)
            if block is None:
                raise CannotCount("the final message has no text that could be continued", refused=True)
            final = block["text"]
            block["text"] += _CONTINUE_TAG
        else:
            messages[-1][field] = final + _CONTINUE_TAG
        text = self._render(messages, tools, documents, variables, chosen)
        place = text.rfind(_CONTINUE_TAG.rstrip())
        if place < 0 or final.strip() not in text:
            raise CannotCount("the chat template does not keep the final message, so it cannot be continued")
        if text.startswith(_CONTINUE_TAG, place):
            return text[:place]
        return text[:place].rstrip()  # the template strips messages


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _merged_systems(messages: Sequence[Message]) -> list[Message]:
    """All system messages as one, in front, as vLLM does once it has rewritten a developer message."""
    systems = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if systems in ([], [0]):
        return list(messages)
    texts = [_plain(messages[place].get("content")) for place in systems]
    merged: Message = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""


class _Generation(jinja2.ext.Extension):  # type: ignore[misc]
    """The ``{% generation %}`` block: its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _environment(printer: Printer, clock: BackendClock) -> Environment:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = printer
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: clock.now().strftime(pattern)
    return environment


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _content_format(tree: nodes.Template) -> ContentFormat:
    """``openai`` if the template loops over a message's content, else ``string``: vLLM 0.32's rule, oddities included.

    An assignment or loop that unpacks makes vLLM's search fail, and a failed search means ``string``.
    """
    try:
        return "openai" if next(_content_loops(tree), None) is not None else "string"
    except _SearchFailed:
        return "string"


class _SearchFailed(Exception):
    """vLLM's search would have met something it does not expect."""


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    message_names = list(_message_names(tree))
    inside_macros: set[int] = set()
    bound: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = _content_parameters(tree, macro, message_names)
        for loop in macro.find_all(nodes.For):
            inside_macros.add(id(loop))
            if parameters:
                bound[id(loop)] = parameters
    for loop in tree.find_all(nodes.For):
        iterated = loop.iter
        if any(_reads(iterated, name, "content") for name in message_names) or (
            isinstance(iterated, nodes.Name)
            and (
                iterated.name in bound.get(id(loop), ())
                or (iterated.name == "content" and id(loop) not in inside_macros)
            )
        ):
            _target(loop)
            yield loop


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Names that loops give to the elements of ``messages`` or of a variable assigned from it."""
    lists = list(_aliases_of_messages(tree))
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            yield _target(loop)


def _aliases_of_messages(tree: nodes.Template) -> Iterator[str]:
    yield "messages"
    pending = ["messages"]
    while pending:
        source = pending.pop(0)
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, source):
                name = _target(assignment)
                yield name
                if name != source:
                    pending.append(name)
                    if len(pending) > 1000:  # two variables assigned from each other: vLLM would never end
                        raise _SearchFailed


def _target(node: nodes.For | nodes.Assign) -> str:
    if not isinstance(node.target, nodes.Name):
        raise _SearchFailed
    return str(node.target.name)


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: Sequence[str]) -> set[str]:
    """Parameters of ``macro`` that some call fills with a message's content."""
    names = [argument.name for argument in macro.args]
    filled: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
        filled |= {
            name
            for name, value in given
            if name in names and any(_reads(value, message, "content") for message in message_names)
        }
    return filled


def _reads(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether ``node`` is the variable (or its attribute ``key``), perhaps sliced, filtered or tested."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _reads(node.node, variable, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, variable, key)
    if key is None:
        return _is_name(node, variable)
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _is_name(node.node, variable)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _is_name(node.node, variable)
    return False


def _is_name(node: nodes.Node | None, variable: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
