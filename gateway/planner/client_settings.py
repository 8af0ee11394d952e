"""The settings to paste into a coding agent so that it knows the true window and output limit.

Where each client looks was read in its source or documentation; clients that ask no server need it told.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

_OUTPUT_FLOOR = 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a client must know. ``base_url`` has no ``/v1``; ``window`` and ``output`` are tokens."""

    base_url: str
    model: str
    window: int
    output: int
    api_key: str = "none"

    @property
    def v1(self) -> str:
        return f"{self.base_url.rstrip('/')}/v1"


@dataclass(frozen=True, slots=True)
class Setting:
    """``where`` names the file or page, ``text`` is what to put there, ``notes`` what to mind."""

    where: str
    text: str
    notes: tuple[str, ...] = ()


def output_limit(window: int, wanted: int | None = None) -> int:
    """An output limit that leaves most of the window to the prompt: a quarter, at most 32,000, below the window."""
    chosen = wanted if wanted is not None else min(max(window // 4, _OUTPUT_FLOOR), 32_000)
    return max(1, min(chosen, window - 1))


def settings_for(client: str, endpoint: Endpoint) -> list[Setting]:
    """Settings of one client. KeyError for a name not in ``CLIENTS``."""
    return CLIENTS[client][1](endpoint)


def _cline(at: Endpoint) -> list[Setting]:
    return [
        Setting(
            "Cline: settings, API Provider: OpenAI Compatible",
            f"Base URL: {at.v1}\nAPI Key: {at.api_key}\nModel ID: {at.model}\n"
            f"Model Configuration > Context Window Size: {at.window}\nModel Configuration > Max Output Tokens: "
            f"{at.output}",
            ("Without these Cline assumes 128,000 tokens and never reads max_model_len from the server.",),
        ),
        Setting("Cline CLI", f"cline auth -p openai-compatible -k {at.api_key} -m {at.model} -b {at.v1}"),
    ]


def _roo(at: Endpoint) -> list[Setting]:
    return [
        Setting(
            "Roo Code: settings, API Provider: OpenAI Compatible",
            f"Base URL: {at.v1}\nAPI Key: {at.api_key}\nModel: {at.model}\nContext Window Size: {at.window}\n"
            f"Max Output Tokens: {at.output}   (set it: -1 is sent as it stands)",
        )
    ]


def _cursor(at: Endpoint) -> list[Setting]:
    return [
        Setting(
            "Cursor: Settings, Models, OpenAI API Key",
            f"OpenAI API Key: {at.api_key}\nOverride OpenAI Base URL: {at.v1}\nAdd model: {at.model}",
            (
                "Calls come from Cursor's servers: the URL must be public HTTPS.",
                f"Cursor has no field for the window; the gateway must clamp the output and trim to "
                f"{at.window:,} tokens.",
                "Built-in model names may ignore the base URL: serve an unusual name (--served-model-name).",
            ),
        )
    ]


def _claude_code(at: Endpoint) -> list[Setting]:
    environment = {
        "ANTHROPIC_BASE_URL": at.base_url.rstrip("/"),
        "ANTHROPIC_AUTH_TOKEN": at.api_key,
        "ANTHROPIC_MODEL": at.model,
        "ANTHROPIC_SMALL_FAST_MODEL": at.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(at.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(at.output),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(at.window),
    }
    notes = ["The base URL has no /v1. Without the limits 200,000 tokens and 32,000 output are assumed."]
    if at.window < 32_768:
        notes.append(f"The first turn alone is 15,000 to 24,000 tokens: {at.window:,} is too small to work with.")
    lines = "\n".join(f"export {name}={value}" for name, value in environment.items())
    return [
        Setting("Claude Code: shell", lines, tuple(notes)),
        Setting("Claude Code: ~/.claude/settings.json", json.dumps({"env": environment}, indent=2)),
    ]


def _opencode(at: Endpoint) -> list[Setting]:
    body = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "kvgate": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": at.v1, "apiKey": at.api_key},
                "models": {at.model: {"limit": {"context": at.window, "output": at.output}}},
            }
        },
        "model": f"kvgate/{at.model}",
    }
    return [
        Setting(
            "OpenCode: opencode.json",
            json.dumps(body, indent=2),
            (
                "Without limit.context OpenCode never compacts, and it always sends max_tokens = limit.output "
                "(32,000 unset).",
            ),
        )
    ]


def _codex(at: Endpoint) -> list[Setting]:
    text = (
        f'model = "{at.model}"\nmodel_provider = "kvgate"\nmodel_context_window = {at.window}\n'
        f"model_max_output_tokens = {at.output}\nmodel_auto_compact_token_limit = {at.window * 9 // 10}\n"
        'web_search = "disabled"\n\n'
        f'[model_providers.kvgate]\nname = "kvgate"\nbase_url = "{at.v1}"\nwire_api = "responses"\nenv_key = '
        f'"KVGATE_API_KEY"\n'
    )
    return [
        Setting(
            "Codex: ~/.codex/config.toml",
            text,
            (
                f"export KVGATE_API_KEY={at.api_key}",
                "Codex speaks only the Responses API and assumes 272,000 tokens for unknown models.",
            ),
        )
    ]


def _continue(at: Endpoint) -> list[Setting]:
    text = (
        "name: kvgate\nversion: 1.0.0\nschema: v1\nmodels:\n"
        f"  - name: {at.model}\n    provider: vllm\n    model: {at.model}\n    apiBase: {at.v1}\n    apiKey: "
        f"{at.api_key}\n"
        f"    roles: [chat, edit, apply]\n    defaultCompletionOptions:\n      contextLength: {at.window}\n      "
        f"maxTokens: {at.output}\n"
    )
    return [
        Setting("Continue: ~/.continue/config.yaml", text, ("Provider vllm reads only the first entry of /v1/models.",))
    ]


def _open_webui(at: Endpoint) -> list[Setting]:
    return [
        Setting(
            "Open WebUI: Admin Settings, Connections, OpenAI API",
            f"URL: {at.v1}\nKey: {at.api_key}\nModel params of {at.model} > Max Tokens: {at.output}",
            (
                f"Open WebUI knows no window and sends the whole chat: let the gateway trim to {at.window:,} tokens.",
                "No trailing slash after /v1: it calls //models.",
            ),
        ),
        Setting("Open WebUI: environment", f"OPENAI_API_BASE_URL={at.v1}\nOPENAI_API_KEY={at.api_key}"),
    ]


def _aider(at: Endpoint) -> list[Setting]:
    metadata = {
        f"openai/{at.model}": {
            "max_input_tokens": at.window - at.output,
            "max_output_tokens": at.output,
            "max_tokens": at.output,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    return [
        Setting("Aider: .aider.model.metadata.json", json.dumps(metadata, indent=2)),
        Setting(
            "Aider: shell", f"aider --model openai/{at.model} --openai-api-base {at.v1} --openai-api-key {at.api_key}"
        ),
    ]


def _goose(at: Endpoint) -> list[Setting]:
    lines = (
        f"GOOSE_PROVIDER=openai\nGOOSE_MODEL={at.model}\nOPENAI_HOST={at.base_url.rstrip('/')}\nOPENAI_API_KEY={at.api_key}\n"
        f"GOOSE_CONTEXT_LIMIT={at.window}\nGOOSE_MAX_TOKENS={at.output}"
    )
    return [Setting("Goose: environment", lines, ("Without GOOSE_CONTEXT_LIMIT 128,000 tokens are assumed.",))]


def _crush(at: Endpoint) -> list[Setting]:
    body = {
        "providers": {
            "kvgate": {
                "type": "openai-compat",
                "base_url": at.v1,
                "api_key": at.api_key,
                "models": [
                    {
                        "id": at.model,
                        "name": at.model,
                        "context_window": at.window,
                        "default_max_tokens": at.output,
                    }
                ],
            }
        }
    }
    return [Setting("Crush: crush.json", json.dumps(body, indent=2), ("context_window 0 means it never summarises.",))]


def _qwen_code(at: Endpoint) -> list[Setting]:
    body = {
        "model": {
            "name": at.model,
            "generationConfig": {"contextWindowSize": at.window, "samplingParams": {"max_tokens": at.output}},
        }
    }
    return [
        Setting("Qwen Code: ~/.qwen/settings.json", json.dumps(body, indent=2)),
        Setting(
            "Qwen Code: shell",
            f"qwen --auth-type openai --openai-api-key {at.api_key} --openai-base-url {at.v1} -m {at.model}",
            ("It guesses the window from the model's name; 131,072 when unknown.",),
        ),
    ]


def _zed(at: Endpoint) -> list[Setting]:
    body = {
        "language_models": {
            "openai_compatible": {
                "kvgate": {
                    "api_url": at.v1,
                    "available_models": [
                        {
                            "name": at.model,
                            "display_name": at.model,
                            "max_tokens": at.window,
                            "max_output_tokens": at.output,
                        }
                    ],
                }
            }
        }
    }
    return [
        Setting("Zed: settings.json", json.dumps(body, indent=2), ("The key must not be empty: KVGATE_API_KEY=none.",))
    ]


def _librechat(at: Endpoint) -> list[Setting]:
    text = (
        "endpoints:\n  custom:\n    - name: kvgate\n"
        f'      apiKey: "{at.api_key}"\n      baseURL: "{at.v1}"\n      models:\n        default: '
        f'["{at.model}"]\n        fetch: true\n'
        f"      tokenConfig:\n        {at.model}:\n          prompt: 0\n          completion: 0\n          "
        f"context: {at.window}\n"
    )
    return [Setting("LibreChat: librechat.yaml", text)]


def _copilot(at: Endpoint) -> list[Setting]:
    body = {
        "github.copilot.chat.customOAIModels": {
            at.model: {
                "name": at.model,
                "url": at.v1,
                "maxInputTokens": at.window - at.output,
                "maxOutputTokens": at.output,
                "toolCalling": True,
                "vision": False,
            }
        }
    }
    return [Setting("GitHub Copilot (own key): VS Code settings.json", json.dumps(body, indent=2))]


CLIENTS: dict[str, tuple[str, Callable[[Endpoint], list[Setting]]]] = {
    "aider": ("Aider", _aider),
    "claude-code": ("Claude Code", _claude_code),
    "cline": ("Cline", _cline),
    "codex": ("Codex", _codex),
    "continue": ("Continue", _continue),
    "copilot": ("GitHub Copilot", _copilot),
    "crush": ("Crush", _crush),
    "cursor": ("Cursor", _cursor),
    "goose": ("Goose", _goose),
    "librechat": ("LibreChat", _librechat),
    "open-webui": ("Open WebUI", _open_webui),
    "opencode": ("OpenCode", _opencode),
    "qwen-code": ("Qwen Code", _qwen_code),
    "roo": ("Roo Code", _roo),
    "zed": ("Zed", _zed),
}
