"""Prompt tokens as vLLM's own front end counts them, without an engine: the code that its servers run before one.

Runs in the vLLM environment: ``.venv-vllm/bin/python tests/vllm/families/render.py JOBS RESULTS``. ``JOBS`` is a JSON
list of ``{"model": folder, "flags": [...], "chats": [bodies], "responses": [bodies]}``; ``RESULTS`` becomes the same
list with a number, or vLLM's refusal as text, in the place of each body.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    """Do the jobs of the file named first, into the one named second."""
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    results = asyncio.run(render_all(jobs))
    Path(sys.argv[2]).write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")


async def render_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of all jobs."""
    results = []
    for job in jobs:
        renderer = front_end(job["model"], job.get("flags", []))
        results.append(
            {
                "chats": [await chat(renderer, body) for body in job.get("chats", [])],
                "responses": [await response(renderer, body) for body in job.get("responses", [])],
            }
        )
    return results


def front_end(model: str, flags: list[str]) -> OnlineRenderer:
    """What a server with these flags would render with."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, *flags])
    engine = AsyncEngineArgs.from_cli_args(args)
    model_config = engine.create_model_config()
    model_config.quantization = None
    structured = engine.create_structured_outputs_config()
    config = VllmConfig(model_config=model_config, structured_outputs_config=structured)
    return OnlineRenderer(
        model_config=model_config,
        renderer=renderer_from_config(config),
        request_logger=None,
        chat_template=load_chat_template(args.chat_template),
        chat_template_content_format=args.chat_template_content_format,
        trust_request_chat_template=True,
        enable_auto_tools=args.enable_auto_tool_choice,
        tool_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser or config.structured_outputs_config.reasoning_parser,
    )


async def chat(renderer: OnlineRenderer, body: dict[str, Any]) -> int | str:
    """Prompt tokens of a chat request, or the refusal."""
    try:
        rendered = await renderer.render_chat(ChatCompletionRequest(**{"model": "m", **body}))
    except Exception as error:  # a server answers 400 to most of them
        return refusal(error)
    if not isinstance(rendered, tuple):
        return refusal(rendered.error.message)
    ((engine_input,),) = (rendered[1],)
    return len(engine_input["prompt_token_ids"])


async def response(renderer: OnlineRenderer, body: dict[str, Any]) -> int | str:
    """Prompt tokens of a Responses request, or the refusal."""
    try:
        rendered = await renderer.render_responses(ResponsesRequest(**{"model": "m", **body}))
    except Exception as error:  # a server answers 400 to most of them
        return refusal(error)
    if not hasattr(rendered, "engine_input"):
        return refusal(rendered.error.message)
    return len(rendered.engine_input["prompt_token_ids"])


def refusal(error: object) -> str:
    """One line."""
    return f"refused: {' '.join(str(error).split())[:160] or type(error).__name__}"


if __name__ == "__main__":
    main()
