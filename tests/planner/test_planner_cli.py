"""``kvgate plan`` from the outside: text, stable JSON keys, matrix, picture, clear answers to bad input."""

from __future__ import annotations

import csv
import io
import json
import shlex
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main

Printed = tuple[int, str, str]
STABLE = {
    "model",
    "card",
    "vllm_version",
    "max_model_len",
    "fits",
    "limited_by",
    "weights_gib",
    "kv_bytes_per_token",
    "kv_cache_memory_gib",
    "kv_cache_size_tokens",
    "max_concurrency",
    "largest_max_model_len",
    "activation_gib",
    "non_torch_gib",
    "cuda_graphs_gib",
    "num_gpu_blocks",
    "block_size",
    "kv_needed_gib",
    "kv_dtypes",
    "warnings",
    "command",
    "compose",
    "recommended_max_model_len",
}
FIGURES = (
    "weights_gib",
    "kv_bytes_per_token",
    "kv_cache_memory_gib",
    "kv_cache_size_tokens",
    "max_concurrency",
    "largest_max_model_len",
)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str) -> Printed:
        try:
            status = main(["plan", "--offline", *words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def _config(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value is not None}))
    return str(path)


def test_json_keys_are_stable_and_every_figure_has_kind_and_range(ask: Any) -> None:
    status, out, _ = ask("Qwen/Qwen3-8B", "--gpu", "RTX 4090", "--context", "16384", "--json")
    plan = json.loads(out)
    assert status == 0
    assert plan.keys() >= STABLE
    for name in FIGURES:
        figure = plan[name]
        assert figure["kind"] in ("exact", "measured", "estimated")
        assert figure["low"] <= figure["value"] <= figure["high"]
    assert plan["kv_bytes_per_token"] == {"value": 147456, "kind": "exact", "low": 147456, "high": 147456}


def test_the_owners_error_is_foreseen(ask: Any) -> None:
    status, out, _ = ask(
        "Qwen/Qwen2.5-32B-Instruct-AWQ", "--gpu", "4090", "--context", "131072", "--vllm-version", "0.24.0"
    )
    assert status == 1
    assert "256.0 KiB" in out
    assert "Does not fit" in out
    assert "exceeds the model's own 32,768" in out


def test_a_known_kv_budget_is_taken_as_it_is(ask: Any) -> None:
    _, out, _ = ask("Qwen/Qwen3-8B", "--kv-memory", "2.4", "--context", "40960", "--vllm-version", "0.11.0", "--json")
    plan = json.loads(out)
    assert plan["largest_max_model_len"] == {"value": 17472, "kind": "exact", "low": 17472, "high": 17472}
    assert plan["kv_needed_gib"]["value"] == 5.625


def test_a_budget_without_a_card_is_not_compared_with_one(ask: Any) -> None:
    status, out, _ = ask("Qwen/Qwen3-32B", "--kv-memory", "30", "--context", "32768")
    assert status == 0
    assert "KV budget given" in out


def test_weights_are_exact_from_safetensors_headers(ask: Any, tmp_path: Path) -> None:
    _config(tmp_path)
    header = json.dumps(
        {"__metadata__": {}, "w": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64 << 20]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    _, out, _ = ask(str(tmp_path), "--vram", "8", "--json")
    assert json.loads(out)["weights_gib"] == {"value": 0.062, "kind": "exact", "low": 0.062, "high": 0.062}


def test_a_broken_safetensors_file_is_named(ask: Any, tmp_path: Path) -> None:
    _config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02")
    status, _, err = ask(str(tmp_path), "--vram", "8")
    assert status == 2
    assert "model.safetensors" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": None, "hidden_size": None}, "num_hidden_layers and no hidden_size"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"layer_types": ["mamba", "attention"] * 2, "model_type": "brandnew"}, "recurrent layers of a kind"),
    ],
)
def test_a_config_without_the_needed_fields_says_which(
    ask: Any, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    status, _, err = ask(_config(tmp_path, **changes), "--vram", "8")
    assert status == 2
    assert words in err


def test_an_unknown_architecture_is_planned_from_its_fields(ask: Any, tmp_path: Path) -> None:
    status, out, _ = ask(_config(tmp_path, model_type="brandnew"), "--vram", "8", "--json")
    assert status == 0
    assert json.loads(out)["kv_bytes_per_token"]["value"] == 4 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody/nothing-7b", "--vram", "8"], "not in the catalogue"),
        (["Qwen/Qwen3-8B", "--gpu", "RTX 9999"], "No card named"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--tp", "3"], "does not divide"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--dcp", "2"], "must divide --tp"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--pp", "99"], "more stages"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--gpu-memory-utilization", "1.4"], "between 0 and 1"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--kv-dtype", "fp7"], "Unknown KV dtype"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--quant", "fp7"], "Unknown quantisation"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--speculative", "magic:3"], "Unknown speculative"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--speculative", "draft_model:3"], "needs the draft model"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--vllm-version", "latest"], "not a vLLM version"),
        (["Qwen/Qwen3-8B", "--vram", "-1"], "memory in GiB, above 0"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--lora", "x"], "number of adapters"),
        (["Qwen/Qwen3-8B", "--vram", "nan"], "memory in GiB"),
        (["Qwen/Qwen3-8B", "--kv-memory", "-1"], "in GiB, above 0"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--max-num-seqs", "-1"], "--max-num-seqs must be at least 1"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--max-num-batched-tokens", "0"], "must be at least 1"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--block-size", "0"], "--block-size must be at least 1"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "vLLM refuses"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--speculative", '{"method":"mtp","num_speculative_tokens":"x"}'], "whole"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--speculative", "mtp:0"], "at least 1 token"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--picture", "/nowhere/at/all.svg"], "cannot write"),
        (["Qwen/Qwen3-8B", "--vram", "8", "--csv"], "belong to --matrix"),
        (["--vram", "8"], "give one MODEL"),
        (["openai/gpt-oss-20b", "--gpu", "H100", "--tp", "2", "--dcp", "2"], "sliding-window"),
    ],
)
def test_bad_input_gets_one_clear_sentence(ask: Any, words: list[str], said: str) -> None:
    status, out, err = ask(*words)
    assert status == 2
    assert said in err
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_a_json_list_is_not_a_config(ask: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1]")
    assert "not a model config" in ask(str(path), "--vram", "8")[2]
    path.write_text("{")
    assert "not readable JSON" in ask(str(path), "--vram", "8")[2]


def test_the_command_carries_the_flags_that_matter(ask: Any) -> None:
    _, out, _ = ask(
        "Qwen/Qwen3.6-27B-FP8",
        "--gpu",
        "RTX 3090",
        "--tp",
        "2",
        "--context",
        "65536",
        "--kv-dtype",
        "fp8",
        "--max-num-seqs",
        "4",
        "--speculative",
        "mtp:2",
        "--lora",
        "2:32",
        "--json",
    )
    plan = json.loads(out)
    for words in (
        "--tensor-parallel-size 2",
        "--kv-cache-dtype fp8",
        "--attention-backend FLASHINFER",
        "--max-num-seqs 4",
        '"method": "mtp"',
        "--max-loras 2 --max-lora-rank 32",
    ):
        assert words in plan["command"]
    assert "count: 2" in plan["compose"]


def test_old_releases_select_the_backend_by_environment(ask: Any) -> None:
    _, out, _ = ask(
        "Qwen/Qwen3-8B",
        "--gpu",
        "RTX 3090",
        "--context",
        "8192",
        "--kv-dtype",
        "fp8",
        "--vllm-version",
        "0.10.0",
        "--json",
    )
    assert json.loads(out)["command"].startswith("VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve")


def test_a_longer_window_than_trained_brings_its_rope_scaling(ask: Any) -> None:
    _, out, _ = ask("Qwen/Qwen2.5-Coder-7B-Instruct", "--gpu", "H100", "--context", "131072", "--json")
    plan = json.loads(out)
    assert '"factor": 4.0' in plan["command"]
    assert any("rope" in warning for warning in plan["warnings"])


def test_nothing_fits_means_no_command(ask: Any) -> None:
    status, out, _ = ask("Qwen/Qwen3-32B", "--gpu", "RTX 3060", "--json")
    plan = json.loads(out)
    assert status == 1
    assert plan["command"] is None
    assert "weights" in plan["limited_by"]


def test_hybrids_cap_the_sequences_at_their_state_blocks(ask: Any) -> None:
    _, out, _ = ask("Qwen/Qwen3.6-27B", "--gpu", "RTX PRO 6000", "--vllm-version", "0.27.0", "--json")
    plan = json.loads(out)
    assert any("state blocks" in warning for warning in plan["warnings"])
    assert "--max-num-seqs" in plan["command"]


def test_the_default_utilisation_and_graphs_follow_the_release(ask: Any) -> None:
    plans = [
        json.loads(ask("Qwen/Qwen3-8B", "--gpu", "A10", "--context", "4096", "--vllm-version", release, "--json")[1])
        for release in ("0.19.0", "0.20.0")
    ]
    assert [plan["gpu_memory_utilization"] for plan in plans] == [0.9, 0.92]
    assert plans[0]["kv_cache_memory_gib"]["value"] > plans[1]["kv_cache_memory_gib"]["value"]


def test_the_matrix_prints_as_text_markdown_csv_json_and_a_picture(ask: Any, tmp_path: Path) -> None:
    words = ("Qwen/Qwen3-8B", "openai/gpt-oss-20b", "--matrix", "--gpu", "RTX 4090", "--kv-dtypes", "auto,fp8")
    assert ask(*words)[1].count("gpt-oss-20b") >= 3
    assert ask(*words, "--markdown")[1].splitlines()[1].startswith("|---|")
    rows = list(csv.DictReader(io.StringIO(ask(*words, "--csv")[1])))
    assert [row["kv_dtype"] for row in rows] == ["auto", "fp8"] * 2
    assert int(rows[1]["max_window"]) >= int(rows[0]["max_window"])
    records = json.loads(ask(*words, "--json")[1])
    assert records[0]["weights_gib"]["kind"] == "estimated"
    picture = tmp_path / "matrix.svg"
    ask(*words, "--picture", str(picture))
    root = ElementTree.fromstring(picture.read_text())
    names = [element.tag.split("}")[-1] for element in root.iter()]
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert names.count("polyline") == 4
    assert texts.count("gpt-oss-20b") == 1  # one bar a model: both dtypes split the card alike
    assert any(text.startswith("KV 5.") for text in texts)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_the_page_keeps_to_the_terminal(ask: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (
        ("Qwen/Qwen3.6-27B-AWQ", "--gpu", "RTX 5090", "--kv-dtype", "fp8", "--speculative", "mtp:3"),
        ("Qwen/Qwen2.5-32B-Instruct-AWQ", "--gpu", "4090", "--context", "131072"),
        ("zai-org/GLM-5.2-FP8", "--gpu", "H200", "--tp", "8", "--dcp", "4", "--context", "200000"),
        ("--matrix", "--gpu", "RTX 3090", "--kv-dtypes", "auto,int8_per_token_head"),
    ):
        lines = ask(*words)[1].splitlines()
        assert [line for line in lines if len(line) > columns] == []


def test_a_command_over_several_lines_is_the_same_command(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    words = ("Qwen/Qwen3.6-27B-AWQ", "--gpu", "RTX 5090", "--kv-dtype", "fp8", "--speculative", "mtp:3")
    shown = ask(*words)[1].split("\nCommand\n")[1].split("\n\n")[0]
    assert shown.count("\\\n") >= 1
    done = subprocess.run(["sh", "-c", f"vllm() {{ printf '%s\\n' \"$@\"; }}\n{shown}"], capture_output=True, text=True)
    command = json.loads(ask(*words, "--json")[1])["command"]
    assert ["vllm", *done.stdout.splitlines()] == shlex.split(command)


def test_a_drafter_that_is_not_modelled_makes_the_answer_partial(ask: Any) -> None:
    words = ("Qwen/Qwen3-8B", "--gpu", "RTX 4090", "--context", "8192", "--speculative", "dflash:4")
    status, out, _ = ask(*words)
    assert status == 0
    assert "Partial answer: the weights and the cache of the dflash drafter are not counted" in " ".join(out.split())
    assert "not counted" in json.loads(ask(*words, "--json")[1])["partial"]
    assert json.loads(ask(*words[:-2], "--json")[1])["partial"] is None


def test_flags_that_leave_more_to_the_cache_are_named_when_a_window_does_not_fit(ask: Any) -> None:
    words = ("Qwen/Qwen3.6-27B-AWQ", "--gpu", "RTX 3090", "--context", "65536", "--kv-dtype", "fp8")
    status, out, _ = ask(*words)
    assert status == 1
    assert "With --max-num-seqs 16 --language-model-only it fits" in " ".join(out.split())
    found = json.loads(ask(*words, "--json")[1])["leaner"]
    assert found["fits"]
    assert ask(*words, *" ".join(found["flags"]).split())[0] == 0
    assert "--language-model-only" in found["command"]


def test_a_picture_must_be_svg(ask: Any, tmp_path: Path) -> None:
    status, _, err = ask("Qwen/Qwen3-8B", "--vram", "24", "--picture", str(tmp_path / "p.png"))
    assert status == 2
    assert "p.svg" in err


def test_the_card_table_has_more_than_forty_cards(ask: Any) -> None:
    assert len(ask("--list-gpus")[1].splitlines()) >= 40
    assert len(ask("--list-models")[1].splitlines()) >= 100


def test_help_is_instant_and_a_plan_loads_no_model_library() -> None:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gateway", "--help"], check=True, capture_output=True, timeout=30)
    first = time.perf_counter() - started
    code = (
        "import sys; from gateway.cli import main; main(['plan', 'Qwen/Qwen3-8B', '--vram', '24', '--json']); "
        "assert not {'torch', 'transformers', 'tokenizers', 'numpy', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
    assert first < 2.0


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B"),
        ("llama 3.1 8b instruct", "meta-llama/Meta-Llama-3.1-8B"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507-FP8", "Qwen/Qwen3-30B-A3B"),
    ],
)
def test_a_tuned_model_is_planned_by_its_base_and_says_so(ask: Any, name: str, shares: str) -> None:
    status, out, _ = ask(name, "--gpu", "RTX 4090", "--context", "2048", "--json")
    assert status in (0, 1)
    assert any(f"geometry of {shares}" in warning for warning in json.loads(out)["warnings"])


def test_several_cards_in_one_word_are_explained(ask: Any) -> None:
    status, _, err = ask("Qwen/Qwen3-8B", "--gpu", "2x4090")
    assert status == 2
    assert "add --tp 2 to --gpu '4090'" in err


def test_a_concurrency_that_is_not_held_is_no_success(ask: Any) -> None:
    words = ("Qwen/Qwen3-8B", "--gpu", "RTX 4090", "--context", "16384")
    assert ask(*words)[0] == 0
    status, out, _ = ask(*words, "--concurrency", "8")
    assert status == 1
    assert "of the 8 requests asked for" in " ".join(out.split())
    assert json.loads(ask(*words, "--concurrency", "2", "--json")[1])["holds_concurrency"]


def test_an_unknown_architecture_gives_a_marked_partial_answer(ask: Any, tmp_path: Path) -> None:
    config = _config(tmp_path, architectures=["WhoKnowsForCausalLM"], model_type="whoknows")
    status, out, _ = ask(config, "--kv-memory", "1", "--json")
    plan = json.loads(out)
    assert status == 0
    assert "no architecture WhoKnowsForCausalLM" in plan["partial"]
    assert {plan[name]["kind"] for name in ("kv_bytes_per_token", "kv_cache_size_tokens")} == {"estimated"}
    known = _config(tmp_path, architectures=["LlamaForCausalLM"])
    assert json.loads(ask(known, "--kv-memory", "1", "--json")[1])["kv_cache_size_tokens"]["kind"] == "exact"


def test_a_release_outside_what_is_known_is_said(ask: Any) -> None:
    for version, words in (("9.9", "newer than"), ("0.3.0", "older than")):
        out = ask("Qwen/Qwen3-8B", "--gpu", "RTX 4090", "--vllm-version", version, "--json")[1]
        assert any(words in warning for warning in json.loads(out)["warnings"])
