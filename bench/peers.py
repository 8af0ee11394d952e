"""``python -m bench.peers``: ten questions about KV memory to this planner and to others, against what vLLM logged.

python3.11 -m venv .venv-peers && .venv-peers/bin/pip install hf-mem kvfit llm-d-planner vllm-wizard
python -m bench.peers --python .venv-peers/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gateway.planner.cards import card_of_memory
from gateway.planner.catalogue import find
from gateway.planner.geometry import read_geometry
from gateway.planner.plan import make_plan
from gateway.planner.speculation import parse_speculation
from gateway.planner.versions import behaviour_of
from gateway.planner.wish import Subject, Wish

PACKAGES = ("hf-mem", "kvfit", "llm-d-planner", "vllm-wizard")


@dataclass(frozen=True, slots=True)
class Question:
    """GiB on one GPU for one request of ``tokens``. ``logged``: vLLM's own words, from reports and error texts."""

    title: str
    model: str
    architecture: str
    tokens: int
    logged: float
    version: str = "0.24.0"
    kv_dtype: str = "auto"
    tp: int = 1
    batched_tokens: int = 2048
    speculative: str | None = None


QUESTIONS = (
    Question("Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", "LlamaForCausalLM", 20_000, 2.44),
    Question("Qwen3-1.7B", "Qwen/Qwen3-1.7B", "Qwen3ForCausalLM", 1024, 0.109),
    Question("Qwen2.5-32B", "Qwen/Qwen2.5-32B-Instruct", "Qwen2ForCausalLM", 4096, 1.0),
    Question("Qwen3-VL-30B-A3B", "Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3VLMoeForConditionalGeneration", 32_768, 3.0),
    Question("DeepSeek-V2-Lite (MLA)", "deepseek-ai/DeepSeek-V2-Lite", "DeepseekV2ForCausalLM", 1024, 0.0297),
    Question("Gemma-4-26B-A4B, fp8 (sliding)", "google/gemma-4-26B-A4B", "Gemma4ForConditionalGeneration", 131_072,
             1.54, version="0.19.0", kv_dtype="fp8"),
    Question("gpt-oss-20b (sliding)", "openai/gpt-oss-20b", "GptOssForCausalLM", 131_072, 3.10, version="0.32.0"),
    Question("Qwen3.6-27B, fp8 (hybrid)", "Qwen/Qwen3.6-27B", "Qwen3_5ForConditionalGeneration", 204_800, 6.56,
             kv_dtype="fp8"),
    Question("Qwen3-235B, `--tp 4`", "Qwen/Qwen3-235B-A22B", "Qwen3MoeForCausalLM", 40_960, 1.86, tp=4),
    Question("GLM-5.2, `--tp 8`, fp8, MTP (sparse)", "zai-org/GLM-5.2", "GlmMoeDsaForCausalLM", 1_048_576, 60.79,
             kv_dtype="fp8_ds_mla", tp=8, speculative="mtp:1"),
)  # fmt: skip


def ours(question: Question) -> float:
    """This planner's answer."""
    entry = find(question.model)
    assert entry is not None, question.model
    wish = Wish(
        tp=question.tp,
        context=question.tokens,
        kv_dtype=question.kv_dtype,
        batched_tokens=question.batched_tokens,
        speculation=parse_speculation(question.speculative),
        kv_memory_gib=1.0,
    )
    subject = Subject(read_geometry(entry.as_config(), entry.name), entry.parameters, entry.vision_parameters)
    plan = make_plan(subject, card_of_memory(80.0, "9.0"), wish, behaviour_of(question.version), compare=False)
    return plan.needed_gib


def asked(question: Question) -> dict[str, object]:
    """The question as the others get it: the text config, flat, as most of them want it."""
    entry = find(question.model)
    assert entry is not None, question.model
    config = {key: value for key, value in entry.config.items() if key != "multimodal"}
    config["architectures"] = [question.architecture]
    return {"model": question.model, "config": config, "tokens": question.tokens, "kv_dtype": question.kv_dtype}


def table(others: dict[str, list[float | str]]) -> str:
    """Markdown: every answer with its error against vLLM."""
    lines = [
        f"| One request, GiB a GPU | vLLM | kvgate | {' | '.join(others)} |",
        "|---|--:" + "|--:" * (len(others) + 1) + "|",
    ]
    for index, question in enumerate(QUESTIONS):
        cells = [_cell(ours(question), question)]
        for found in others.values():
            answer = found[index]
            # Grouped attention is divided by tensor parallelism; a latent cache is not.
            share = question.tp if "sparse" not in question.title else 1
            cells.append("no answer" if isinstance(answer, str) else _cell(answer / share, question))
        lines.append(f"| {question.title}, {question.tokens:,} | {question.logged:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def reasons(others: dict[str, list[float | str]]) -> str:
    """Why there was no answer, in the peers' own words."""
    return "\n".join(
        f"{name}, {QUESTIONS[index].title}: {answer}"
        for name, found in others.items()
        for index, answer in enumerate(found)
        if isinstance(answer, str)
    )


def _cell(gib: float, question: Question) -> str:
    error = gib / question.logged - 1
    return f"{gib:.3g}" if abs(error) < 0.01 else f"{gib:.3g} ({error:+.0%})"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; answers that failed go to stderr with their reason."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help=f"Python of a venv with {', '.join(PACKAGES)}")
    options = parser.parse_args(arguments)
    done = subprocess.run(
        [options.python, Path(__file__).with_name("peer_answers.py")],
        input=json.dumps([asked(question) for question in QUESTIONS]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    others = json.loads(done.stdout.splitlines()[-1])
    print(table(others))
    print(reasons(others), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
