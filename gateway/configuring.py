"""Read the settings. Sources, strongest first: command-line flags, ``KVGATE_…`` environment, ``kvgate.yaml``.

Nested keys are joined by two underscores in the environment: ``KVGATE_PLACING__QUEUE_TIMEOUT_S=60``. An unknown key is
an error that names the nearest right one.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from gateway.config import PREFIX, BackendSettings, ModelSettings, Section, Settings

DEFAULT_FILE = Path("kvgate.yaml")


class ConfigError(ValueError):
    """The settings are wrong. The message has one line a mistake, each with its key."""


def load(file: Path | None = None, flags: dict[str, Any] | None = None) -> Settings:
    """Read the settings.

    ``file``: a YAML file that must exist; ``None`` takes ``kvgate.yaml`` of the current folder if there is one.
    ``flags``: a (nested) dict that overrides everything else. Raises ``ConfigError``.
    """
    tree = _merge(_merge(_read(file), _environment()), flags or {})
    nameless = sorted(str(key) for key in tree if not isinstance(key, str))
    if nameless:
        raise ConfigError("\n".join(f"unknown setting {key}" for key in nameless))
    try:
        return Settings(**tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def known_keys(model: type[BaseModel] | None = None, prefix: str = "") -> dict[str, str]:
    """Every key of the tree, dotted, with its description. Lists and maps show their element as ``[]`` and ``NAME``."""
    keys: dict[str, str] = {}
    elements: dict[str, tuple[str, type[BaseModel]]] = {
        "backends": ("backends[].", BackendSettings),
        "models": ("models.NAME.", ModelSettings),
    }
    for name, info in (model or Settings).model_fields.items():
        annotation = info.annotation
        if not prefix and name in elements:
            stem, element = elements[name]
            keys[name] = info.description or ""
            keys |= known_keys(element, stem)
        elif isinstance(annotation, type) and issubclass(annotation, Section):
            keys |= known_keys(annotation, f"{prefix}{name}.")
        else:
            keys[prefix + name] = info.description or ""
    return keys


def _read(file: Path | None) -> dict[str, Any]:
    path = file or DEFAULT_FILE
    if file is None and not path.is_file():
        return {}
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(tree).__name__}")
    return tree


def _environment() -> dict[str, Any]:
    """The ``KVGATE_…`` variables as a tree; a name that fits no setting is an error, as it is in the file."""
    tops = {PREFIX + name.upper() for name in Settings.model_fields}
    for variable in os.environ:
        name = variable.upper()
        if name.startswith(PREFIX) and name.split("__")[0] not in tops:
            leaves = {PREFIX + key.upper().replace(".", "__") for key in known_keys() if "[]" not in key}
            raise ConfigError(f"unknown environment variable {variable}{_hint(name, sorted(leaves | tops))}")
    try:
        return EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise ConfigError(f"cannot read the environment: {error}; write JSON, or one variable a key") from None


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        mine = merged.get(key)
        merged[key] = _merge(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged


def _explain(item: Any) -> str:
    parts = [str(part) for part in item["loc"]]
    of_key = parts[-1:] == ["[key]"]  # what pydantic calls the key of a mapping that is wrong itself
    path = ".".join(parts[:-1] if of_key else parts)
    if item["type"] == "extra_forbidden":
        return f"unknown setting {path}{_hint(str(item['loc'][-1]), _siblings(item['loc'][:-1]))}"
    message = item["msg"].removeprefix("Value error, ")
    if of_key:
        message = message.replace("Input", f"the key {parts[-2]}", 1)
        path = ".".join(parts[:-2])
    return f"{path}: {message}" if path else message


def _siblings(stem: tuple[Any, ...]) -> list[str]:
    """The right keys beside a wrong one: those that stand in its section, ``stem``."""
    marks = {"backends": "backends[].", "models": "models.NAME."}
    section = marks.get(str(stem[0]), f"{stem[0]}.") if stem else ""
    inside = (key.removeprefix(section) for key in known_keys() if key.startswith(section))
    return sorted({key.split(".")[0].removesuffix("[]") for key in inside})


def _hint(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
