"""The doctor on logs: every text vLLM prints about start-up memory from 0.6 to 0.32, and the advice it must give.

The lines are made here after the documented formats, with numbers of our own.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.planner.diagnosis import diagnose, facts
from gateway.planner.startup_log import read_startup

V0 = "INFO 01-05 10:00:00 worker.py:266] vLLM "
V1 = "(EngineCore_0 pid=77) INFO 11-30 10:00:00 [gpu_worker.py:300] "
ERR = "(EngineCore_0 pid=77) ERROR 11-30 10:00:00 [core.py:840] ValueError: "
MORE = " Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."

ERRORS: list[tuple[str, str, str, list[str]]] = [
    (
        "V0 window",
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be "
        "stored in "
        "KV cache (32480)." + MORE,
        "window_exceeds_kv_tokens",
        ["--max-model-len 32480", "32,480"],
    ),
    (
        "V0 nothing left",
        "ValueError: No available memory for the cache blocks." + MORE,
        "no_kv_memory",
        ["--enforce-eager"],
    ),
    (
        "V1 0.7 in GB",
        ERR
        + "To serve at least one request with the models's max seq len (32768), (8.00 GB KV cache is needed, which is "
        "larger than the available KV cache memory (5.11 GB)." + MORE,
        "window_needs_more_kv",
        ["--max-model-len 20928", "8 GiB"],
    ),
    (
        "V1 0.8 without the number",
        ERR
        + "To serve at least one request with the models's max seq len (32768), (8.00 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (5.11 GiB). Based on the available memory, " + MORE,
        "window_needs_more_kv",
        ["--max-model-len 20928"],
    ),
    (
        "V1 0.9 to 0.13",
        ERR
        + "To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (2.40 GiB). Based on the available memory, the estimated "
        "maximum model "
        "length is 17472." + MORE,
        "window_needs_more_kv",
        ["--max-model-len 17472"],
    ),
    (
        "V1 0.32",
        ERR
        + "To serve at least one request with the model's max seq len (204800), (6.56 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (5.42 GiB). Based on the available memory, the estimated "
        "maximum model "
        "length is 167776. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU "
        "backend) or "
        "decreasing `max_model_len` when initializing the engine. See the documentation for more details.",
        "window_needs_more_kv",
        ["--max-model-len 167776", "--kv-cache-dtype fp8"],
    ),
    (
        "V1 nothing left",
        ERR + "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
        "engine (this flag also controls CPU memory reservation on the CPU backend, despite its name).",
        "no_kv_memory",
        ["--gpu-memory-utilization 0.95"],
    ),
    (
        "others hold the card",
        ERR + "Free memory on device cuda:0 (17.31/23.52 GiB) on startup is less than desired GPU memory utilization "
        "(0.92, "
        "21.64 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "not_enough_free_memory",
        ["--gpu-memory-utilization 0.73", "6.21 GiB"],
    ),
    (
        "others hold the card, before 0.14",
        ERR + "Free memory on device (17.31/23.52 GiB) on startup is less than desired GPU memory utilization (0.9, "
        "21.17 GiB).",
        "not_enough_free_memory",
        ["kvgate gpus"],
    ),
    (
        "profiling disturbed",
        "AssertionError: Error in memory profiling. Initial free memory 20.10 GiB, current free memory 21.90 GiB. This "
        "happens when other processes sharing the same container release GPU memory while vLLM is profiling.",
        "memory_changed_while_profiling",
        ["start again", "21.9"],
    ),
    (
        "too many sequences for a hybrid",
        ERR + "max_num_seqs (1024) exceeds available Mamba cache blocks (939). Each decode sequence requires one "
        "Mamba cache "
        "block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most 939.",
        "too_many_seqs_for_states",
        ["--max-num-seqs 939"],
    ),
    (
        "sampler",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering "
        "`max_num_seqs` or `gpu_memory_utilization` when initializing the engine. vLLM",
        "sampler_out_of_memory",
        ["--max-num-seqs 256"],
    ),
    (
        "weights",
        ERR + "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory "
        "for weights",
        "weights_do_not_fit",
        ["--tensor-parallel-size 2"],
    ),
    (
        "window above the model's",
        "pydantic_core ValidationError: vLLM User-specified max_model_len (65536) is greater than the derived "
        "max_model_len "
        "(max_position_embeddings=32768 or model_max_length=None in model's config.json). To allow overriding "
        "this maximum",
        "window_above_model",
        ["--max-model-len 32768", '"factor": 2.0'],
    ),
    (
        "fp8 on an old card",
        "ValueError: vllm attention: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are "
        "('fp8e4b15', 'fp8e5')",
        "fp8_needs_newer_card",
        ["--attention-backend FLASHINFER"],
    ),
    (
        "auto fit fails",
        ERR + "Cannot auto-fit max_model_len: not enough GPU memory available",
        "cannot_auto_fit",
        ["Not even"],
    ),
    (
        "plain out of memory",
        "(EngineCore_0 pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has "
        "a total "
        "capacity of 23.52 GiB of which 1.01 GiB is free.",
        "cuda_out_of_memory",
        ["--max-num-batched-tokens"],
    ),
    (
        "V1 0.14 to 0.21",
        ERR
        + "To serve at least one request with the models's max seq len (32768), (8 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (5.11 GiB). Based on the available memory, the estimated "
        "maximum model length is 20912." + MORE + " See the conserving_memory page for more details.",
        "window_needs_more_kv",
        ["--max-model-len 20912", "8 GiB"],
    ),
    (
        "V1 with nothing that fits",
        ERR
        + "To serve at least one request with the model's max seq len (32768), (8.0 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (0.01 GiB)." + MORE,
        "window_needs_more_kv",
        ["--max-num-seqs 16 --enforce-eager"],
    ),
    (
        "window above the model's, by tokenizer",
        "vllm ValueError: User-specified max_model_len (9000) is greater than the derived max_model_len "
        "(model_max_length=8192 in model's config.json). To allow overriding this maximum",
        "window_above_model",
        ["--max-model-len 8192"],
    ),
    (
        "the wrapper alone",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s)",
        "engine_failed",
        ["whole log"],
    ),
]


@pytest.mark.parametrize(("line", "code", "said"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_every_failure_gets_its_cause_and_the_smallest_change(line: str, code: str, said: list[str]) -> None:
    found = diagnose(read_startup(f"INFO vLLM API server version 0.0\n{line}\n"))
    assert found[0].code == code
    assert found[0].severity == "error"
    for words in said:
        assert words in f"{found[0].cause} {found[0].change}"


SUCCESS: list[tuple[str, str, dict[str, Any]]] = [
    ("weights of 0.6", V0 + "Loading model weights took 14.9888 GB", {"weights_gib": 14.9888}),
    ("weights of 0.8", V1 + "Model loading took 18.1494 GiB and 12.345678 seconds", {"weights_gib": 18.1494}),
    ("weights of 0.32", V1 + "Model loading took 18.14 GiB memory and 12.3 seconds", {"weights_gib": 18.14}),
    (
        "profile of V0",
        V0 + "Memory profiling takes 1.11 seconds the current vLLM instance can use total_gpu_memory (23.58GiB) x "
        "gpu_memory_utilization (0.90) = 21.22GiB model weights take 14.99GiB; non_torch_memory takes 0.35GiB; PyTorch "
        "activation peak memory takes 2.07GiB; the rest of the memory reserved for KV Cache is 3.81GiB.",
        {"gpu_memory_gib": 23.58, "kv_cache_memory_gib": 3.81, "activation_gib": 2.07, "non_torch_gib": 0.35},
    ),
    (
        "blocks of V0",
        V0 + "# GPU blocks: 1952, # CPU blocks: 2048",
        {"num_gpu_blocks": 1952, "kv_cache_size_tokens": 31232},
    ),
    ("blocks of V1", V1 + "# GPU blocks: 1381", {"num_gpu_blocks": 1381}),
    (
        "concurrency of V0",
        V0 + "Maximum concurrency for 20000 tokens per request: 1.56x",
        {"max_model_len": 20000, "max_concurrency": 1.56},
    ),
    ("KV size", V1 + "GPU KV cache size: 366,880 tokens", {"kv_cache_size_tokens": 366880}),
    (
        "one line since 0.28",
        V1 + "CPU KV cache size: 32,768 tokens, Maximum concurrency for 4,096 tokens per request: 8.00x",
        {"kv_cache_size_tokens": 32768, "max_model_len": 4096, "max_concurrency": 8.0},
    ),
    ("KV memory", V1 + "Available KV cache memory: 33.59 GiB", {"kv_cache_memory_gib": 33.59}),
    ("graphs", V1 + "Graph capturing finished in 22 secs, took 0.51 GiB", {"cuda_graphs_gib": 0.51}),
    (
        "summary of 0.10.2",
        V1 + "Free memory on device (22.99/23.52 GiB) on startup. Desired GPU memory utilization is (0.9, 21.17 "
        "GiB). Actual "
        "usage is 14.26 GiB for weight, 1.09 GiB for peak activation, 0.11 GiB for non-torch memory, and 0.71 GiB for "
        "CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=7000000000` to fit.",
        {"gpu_memory_utilization": 0.9, "activation_gib": 1.09, "non_torch_gib": 0.11, "cuda_graphs_gib": 0.71},
    ),
    (
        "summary of 0.28",
        V1 + "Free memory on device cuda:0 (23.05/23.56 GiB) on startup. Desired GPU memory utilization is (0.972, "
        "22.9 GiB). "
        "Actual usage is 14.73 GiB for consumed memory (weights + non-torch), 1.09 GiB for peak activation, and "
        "0.71 GiB for "
        "CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=7000000000`",
        {"gpu_memory_gib": 23.56, "activation_gib": 1.09, "cuda_graphs_gib": 0.71},
    ),
    (
        "graph estimate",
        V1 + "CUDA graph pool memory: 0.24 GiB (actual), 0.58 GiB (estimated), difference: 0.34 GiB (58.6%).",
        {"cuda_graphs_gib": 0.24, "cuda_graphs_estimated_gib": 0.58},
    ),
    (
        "hybrid block",
        V1
        + "Setting attention block size to 1568 tokens to ensure that attention page size is >= mamba page size. vllm",
        {"block_size": 1568},
    ),
    ("weights of 0.11", V1 + "Model loading took 18.1494 GiB memory and 12.3 seconds", {"weights_gib": 18.1494}),
    (
        "profile of V0 over several lines",
        V0 + "Memory profiling takes 1.11 seconds\n" + V0 + "the current vLLM instance can use total_gpu_memory "
        "(23.58GiB) x gpu_memory_utilization (0.90) = 21.22GiB\n"
        + V0
        + "model weights take 14.99GiB; non_torch_memory "
        "takes 0.35GiB; PyTorch activation peak memory takes 2.07GiB; the rest of the memory reserved for KV Cache is "
        "3.81GiB.",
        {"gpu_memory_gib": 23.58, "kv_cache_memory_gib": 3.81, "activation_gib": 2.07, "non_torch_gib": 0.35},
    ),
]


@pytest.mark.parametrize(("line", "expected"), [case[1:] for case in SUCCESS], ids=[case[0] for case in SUCCESS])
def test_every_success_line_is_read(line: str, expected: dict[str, Any]) -> None:
    read = facts(read_startup(line))
    assert {name: read[name] for name in expected} == expected


def _good_log(tokens: str = "222,822", window: str = "131,072", times: str = "1.70") -> str:
    return (
        "INFO 11-30 [api_server.py:100] vLLM API server version 0.31.0\n"
        f"{V1}Model loading took 14.26 GiB memory and 9.1 seconds\n"
        f"{V1}Available KV cache memory: 7.08 GiB\n"
        f"{V1}GPU KV cache size: {tokens} tokens, Maximum concurrency for {window} tokens per request: {times}x\n"
        "INFO:     Application startup complete.\n"
    )


def test_a_good_start_reports_capacity() -> None:
    findings = diagnose(read_startup(_good_log()))
    assert findings[0].code == "capacity"
    assert "222,822" in findings[0].cause
    assert "1.70 requests" in findings[0].cause


def test_a_start_that_barely_fits_is_warned_about() -> None:
    codes = [finding.code for finding in diagnose(read_startup(_good_log("132,096", "131,072", "1.01")))]
    assert codes[:2] == ["capacity", "no_headroom"]


def test_hybrids_before_0_20_are_read_by_their_concurrency() -> None:
    log = f"{V1}GPU KV cache size: 199,136 tokens\n{V1}Maximum concurrency for 65,536 tokens per request: 11.32x\n"
    assert facts(read_startup(log))["kv_cache_size_tokens"] == int(11.32 * 65536)


def test_unused_memory_is_pointed_out() -> None:
    line = SUCCESS[11][1].replace("0.9, 21.17", "0.8, 18.82")
    headroom = [finding for finding in diagnose(read_startup(_good_log() + line)) if finding.code == "headroom"]
    assert headroom
    assert headroom[0].change.startswith("--gpu-memory-utilization 0.9")


def test_ansi_colours_and_container_prefixes_do_not_hide_a_line() -> None:
    plain = ERRORS[4][1]
    coloured = "vllm-1  | \x1b[1;31m" + plain.replace("GiB", "\x1b[0mGiB") + "\x1b[0m\r"
    assert diagnose(read_startup(coloured))[0].code == "window_needs_more_kv"


def test_ranks_speaking_at_once_are_told_apart() -> None:
    log = "".join(
        f"(Worker_TP{rank} pid={rank}) INFO [gpu_worker.py:298] Available KV cache memory: {gib} GiB\n"
        for rank, gib in enumerate((12.13, 12.13, 11.33, 11.33))
    )
    read = read_startup(log + f"{V1}GPU KV cache size: 807,792 tokens\n")
    assert facts(read)["kv_cache_memory_gib"] == 11.33
    assert "uneven_ranks" in [finding.code for finding in diagnose(read)]


def test_the_same_error_from_every_rank_is_one_finding() -> None:
    errors = [
        finding for finding in diagnose(read_startup("\n".join([ERRORS[5][1]] * 4))) if finding.severity == "error"
    ]
    assert len(errors) == 1


def test_a_second_start_in_one_log_replaces_the_first() -> None:
    first = f"INFO vLLM API server version 0.31.0\n{ERRORS[5][1]}\n"
    findings = diagnose(read_startup(first + _good_log()))
    assert findings[0].code == "capacity"


def test_a_cut_off_log_gives_the_best_partial_answer() -> None:
    log = "\n".join(_good_log().splitlines()[:2])
    findings = diagnose(read_startup(log))
    assert findings[-1].code == "truncated"
    assert findings[-1].partial


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty"),
        ("nginx: [emerg] bind() to 0.0.0.0:80 failed\nuwsgi started\n", "not_vllm"),
        ("llama_model_load: error loading model\nggml_cuda_init: found 1 device\n", "not_vllm"),
    ],
)
def test_other_logs_are_named_as_such(text: str, code: str) -> None:
    assert diagnose(read_startup(text))[0].code == code


def test_a_raised_utilisation_is_offered_when_it_is_enough() -> None:
    log = SUCCESS[11][1] + "\n" + ERRORS[4][1].replace("5.62", "2.90")
    change = diagnose(read_startup(log))[0].change
    assert "--gpu-memory-utilization 0.93" in change


def test_the_command_reads_files_and_stdin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(ERRORS[5][1])
    assert main(["doctor", str(log)]) == 1
    assert "--max-model-len 167776" in capsys.readouterr().out

    class Stdin:
        buffer = io.BytesIO(_good_log().encode() + b"\xff\xfe")

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr("sys.stdin", Stdin())
    assert main(["doctor", "-", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["facts"]["kv_cache_size_tokens"] == 222822
    assert main(["doctor", str(tmp_path / "absent.log")]) == 2


def _docker(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A stand-in for the docker program, first on PATH."""
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_containers_log_is_read_through_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization."
    said = f'echo "$@" > {tmp_path}/asked; echo "INFO vLLM API server version 0.24.0"; echo "{line}" >&2'
    _docker(tmp_path, monkeypatch, said)
    assert main(["doctor", "--container", "my-vllm"]) == 1
    assert "nothing is left for the KV cache" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "asked").read_text().split() == ["logs", "--tail", "5000", "my-vllm"]


def test_what_docker_cannot_do_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _docker(tmp_path, monkeypatch, "echo 'Error response from daemon: No such container: x' >&2; exit 1")
    assert main(["doctor", "--container", "x"]) == 2
    assert capsys.readouterr().err == "kvgate doctor: Error response from daemon: No such container: x\n"
    _docker(tmp_path, monkeypatch, "exec sleep 30")
    assert main(["doctor", "--container", "x", "--timeout", "0.3"]) == 2
    assert "did not answer within 0.3 s" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert main(["doctor", "--container", "x"]) == 2
    assert "docker is not installed" in capsys.readouterr().err


def test_a_wrapper_says_nothing_beside_the_cause() -> None:
    log = f"{ERRORS[0][1]}\nRuntimeError: Engine core initialization failed. See root cause above.\n"
    assert [finding.code for finding in diagnose(read_startup(log))] == ["window_exceeds_kv_tokens"]


@pytest.mark.parametrize(
    "line",
    [
        "2026/11/30 10:00:00 [error] connect() failed, upstream: http://vllm:8000/v1/chat/completions",
        "level=warn msg=retry target=vllm:8000",
        "server_args=ServerArgs(model_path='x') RuntimeError: Not enough memory. Increase --mem-fraction-static.",
    ],
)
def test_a_log_of_another_program_that_names_vllm_is_not_one_of_vllm(line: str) -> None:
    (found,) = diagnose(read_startup(line))
    assert found.code == "not_vllm"


def test_an_automatic_window_that_fits_whole_is_said() -> None:
    log = "vLLM API server version 0.32.0\nfull model context length 262144 fits in available KV cache memory\n"
    assert any("whole window of 262,144" in finding.cause for finding in diagnose(read_startup(log)))


@pytest.mark.parametrize("argument", ["'method': 'dflash'", "'attention_config': {'hisparse_config': {}}"])
def test_what_the_planner_does_not_model_is_said_beside_a_good_log(argument: str) -> None:
    log = f"{_good_log()}\nINFO vLLM non-default args: {{'model': 'a/b', {argument}}}\n"
    found = {finding.code: finding for finding in diagnose(read_startup(log))}
    assert found["not_modelled"].partial
    assert "capacity" in found
