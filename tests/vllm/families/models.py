"""Folders that vLLM and the gateway load: a tiny model's ``config.json`` with a real tokenizer, and no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from families.catalogue import Model
from families.packages import CACHE
from families.vocabularies import tokenizer_folder


def model_folder(model: Model, architecture: str | None = None) -> Path:
    """The folder of a tiny model, written anew, perhaps under another architecture's name. Raises ``CannotFetch``."""
    folder = CACHE / "models" / (f"{model.name}-{architecture}" if architecture else model.name)
    source = tokenizer_folder(model.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "complete":
            shutil.copy(file, folder)
    config = json.dumps(model.config_json(architecture), indent=1)
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder
