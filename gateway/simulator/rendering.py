"""Rendering and tokenising as vLLM's HF renderer does, independent of the gateway's own counter."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.exceptions import GatewayError
from gateway.simulator.errors import ApiError

_KNOWN_KWARGS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
BILLING = "x-anthropic-billing-header"
NO_TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the "
    "tokenizer does not define one."
)


class TokenizerUnusable(GatewayError):
    """The folder given as tokenizer cannot be read."""


class Renderer:
    """The tokenizer and chat template of one model folder."""

    def __init__(self, folder: Path) -> None:
        import fastokens

        self.folder = folder
        try:
            document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            self._tokenizer = fastokens.Tokenizer.from_file(str(folder / "tokenizer.json"))
            config_file = folder / "tokenizer_config.json"
            config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
            template_file = folder / "chat_template.jinja"
            template = template_file.read_text(encoding="utf-8") if template_file.is_file() else None
        except (OSError, ValueError) as error:
            raise TokenizerUnusable(f"cannot use {folder} as a tokenizer folder: {error}") from error
        self._tokenizer.encode("warm")
        self.vocabulary: dict[str, int] = document["model"]["vocab"]
        self.added = {token["content"]: int(token["id"]) for token in document.get("added_tokens", ())}
        self.longest_token_chars = max(map(len, [*self.vocabulary, *self.added]))
        self._templates = _templates(template if template is not None else config.get("chat_template"))
        self._special = {
            key: value if isinstance(value, str) else value.get("content")
            for key in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (value := config.get(key))
        }
        self._wants_parts = {name: _loops_over_content(source) for name, source in self._templates.items()}
        self._variables = {name: _variables(source) for name, source in self._templates.items()}

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-turn token, if the folder names one."""
        token = self._special.get("eos_token")
        return None if token is None else self.added.get(token, self.vocabulary.get(token))

    @functools.cached_property
    def wants_system_first(self) -> bool:
        """Whether a template fails on a system message in the middle, tried as bare as vLLM's /v1/messages tries it."""
        import jinja2

        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            for source in self._templates.values():
                environment.from_string(source).render(messages=messages, add_generation_prompt=False)
        except jinja2.TemplateError:
            return True
        return not self._templates

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Raises ``ApiError`` for text that is no Unicode (a lone surrogate)."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except UnicodeEncodeError as error:
            raise ApiError(f"'utf-8' codec can't encode character: {error.reason}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included. Raises ``ApiError`` for ids outside the vocabulary."""
        try:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError) as error:
            raise ApiError(f"cannot decode these tokens: {error}") from error

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each id (``return_token_strs``)."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: list[Any] | None = None,
    ) -> str:
        """The rendered prompt. Raises ``ApiError`` for whatever the template or the message parser refuses."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        source = self._templates.get(name)
        if source is None:
            raise ApiError(NO_TEMPLATE)
        if not messages:
            raise ApiError("The decoder prompt cannot be empty")
        variables = self._variables[name]
        extra = {key: value for key, value in (kwargs or {}).items() if key in variables - _KNOWN_KWARGS}
        try:
            rendered, _ = render_jinja_template(
                conversations=[_without_developer(_normalise(messages, parts=self._wants_parts[name]), source)],
                tools=[_tool(tool) for tool in tools] if tools else None,
                documents=documents,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **self._special,
                **extra,
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ApiError(str(error)) from error
        return str(rendered[0])


def open_renderer(folder: Path) -> Renderer:
    """The renderer of a folder, read once a process as long as its tokenizer file does not change."""
    try:
        changed_ns = (folder / "tokenizer.json").stat().st_mtime_ns
    except OSError as error:
        raise TokenizerUnusable(f"cannot use {folder} as a tokenizer folder: {error}") from error
    return _opened(folder.resolve(), changed_ns)


@functools.lru_cache(maxsize=4)
def _opened(folder: Path, changed_ns: int) -> Renderer:
    return Renderer(folder)


def _templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(item["name"]): str(item["template"]) for item in value}
    return {}


def _variables(source: str) -> frozenset[str]:
    """Names the template reads; vLLM drops template kwargs that are not among them."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # parsed, never rendered
    return frozenset(meta.find_undeclared_variables(environment.parse(_without_generation(source))))


def _without_generation(source: str) -> str:
    return re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source)


def _loops_over_content(source: str) -> bool:
    """Whether the template iterates over a message's content, i.e. wants its parts and not one string."""
    from jinja2 import Environment, nodes

    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation(source))
    aliases = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: Any) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return bool(node.attr == "content")
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and bool(node.arg.value == "content")


def _unbilled(content: Any) -> Any:
    """A system message without Claude Code's billing line, which vLLM drops for the sake of its prefix cache."""
    if isinstance(content, list):
        return [left for part in content if (left := _unbilled(part)) is not None]
    text = content.get("text") if isinstance(content, Mapping) and content.get("type") == "text" else content
    if not isinstance(text, str) or not text.startswith(BILLING):
        return content
    rest = text.partition("\n")[2]
    if isinstance(content, str):
        return rest
    return {**content, "text": rest} if rest else None


def _normalise(messages: Sequence[Mapping[str, Any]], *, parts: bool) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to the template: text parts joined, tool arguments parsed."""
    normal: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ApiError(f"message {index} needs a role")
        role = message["role"]
        entry: dict[str, Any] = {"role": role}
        content = _unbilled(message.get("content")) if role == "system" else message.get("content")
        if content is None:
            entry["content"] = [] if parts else ""
        elif isinstance(content, str):
            entry["content"] = [{"type": "text", "text": content}] if parts else content
        elif isinstance(content, list):
            texts = [_text_part(part) for part in content]
            joined = "\n".join(text for text in texts if text)  # vLLM joins what is truthy
            entry["content"] = [{"type": "text", "text": text} for text in texts] if parts else joined
        else:
            raise ApiError(f"message {index}: content must be a string or a list of parts")
        if role == "assistant":
            if calls := message.get("tool_calls"):
                entry["tool_calls"] = [_tool_call(call) for call in calls]
            reasoning = message.get("reasoning") or message.get("reasoning_content")
            if reasoning is not None:
                entry["reasoning"] = entry["reasoning_content"] = reasoning
        elif role == "tool":
            entry["content"] = _flat(entry["content"])  # most templates handle only text here
            if message.get("tool_call_id") is not None:
                entry["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            entry["name"] = message["name"]
        normal.append(entry)
    return normal


def _text_part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text", "refusal", "thinking"):
        return str(part.get("text") or part.get("refusal") or part.get("thinking") or "")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ApiError(f"At most 0 {str(kind).removesuffix('_url')}(s) may be provided in one prompt.")


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:  # it lives in history: refusing it would end the conversation (vLLM 0.32)
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


def _without_developer(messages: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Developer messages become system ones, all merged into the first, if the template knows no such role."""
    roles = [message["role"] for message in messages]
    if "developer" not in roles or '"developer"' in source or "'developer'" in source:
        return messages
    system = [message for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    if len(system) == 1 and system[0] is messages[0]:
        return [{**system[0], "role": "system"}, *rest]
    texts = [_flat(message.get("content")) for message in system]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *rest]


def _flat(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as pydantic dumps it: known keys in its order, a missing description or parameters as null."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise ApiError("each tool needs a function")
    given = tool["function"]
    if not isinstance(given.get("name"), str):
        raise ApiError("each tool's function needs a name")
    function = {"name": given["name"], "description": given.get("description"), "parameters": given.get("parameters")}
    for key in ("strict", "defer_loading"):
        if given.get(key) is not None:
            function[key] = given[key]
    return {"type": tool.get("type", "function"), "function": function}
