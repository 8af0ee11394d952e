"""Chat templates as models ship them, out of the packages trl (Apache-2.0) and llama-cpp-python (MIT)."""

from __future__ import annotations

from pathlib import Path

from families import packages
from families.packages import CACHE
from families.vocabularies import LLAMA_CPP_PYTHON

_TRL = "1.16.0"


def template_file(name: str) -> Path:
    """``trl/NAME`` or ``llama.cpp/NAME`` as a file. Raises ``packages.CannotFetch``."""
    file = CACHE / "templates" / f"{name}.jinja"
    if not file.is_file():
        origin, _, stem = name.partition("/")
        if origin == "trl":
            text = packages.zip_member(packages.wheel("trl", _TRL), f"trl/chat_templates/{stem}.jinja")
        else:
            folder = f"llama_cpp_python-{LLAMA_CPP_PYTHON}/vendor/llama.cpp/models/templates"
            archive = packages.source("llama-cpp-python", LLAMA_CPP_PYTHON)
            text = packages.tar_member(archive, f"{folder}/{stem}.jinja")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    return file
