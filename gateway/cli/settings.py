"""The flags that stand for settings, shared by the commands that read them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.config import Settings


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the settings most often given by hand; ``--set`` reaches every other."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings file (default: kvgate.yaml, if there is one)"
    )
    parser.add_argument("--backend", action="append", metavar="URL", help="base URL of a vLLM server; repeat for more")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8080)")
    parser.add_argument("--api-key", action="append", metavar="KEY", help="key that clients must show; repeat for more")
    parser.add_argument("--allow-public", action="store_true", help="listen on a public address without API keys")
    parser.add_argument(
        "--tokenizer",
        action="append",
        metavar="MODEL=FOLDER",
        help="folder or hub id of a model's tokenizer and chat template; repeat for more",
    )
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="least level logged")
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="any setting by its dotted key, such as relay.retries=1"
    )


def read(options: argparse.Namespace) -> Settings:
    """The settings of file, environment and flags. Raises ``gateway.configuring.ConfigError``."""
    import yaml

    from gateway.configuring import ConfigError, load

    flags: dict[str, Any] = {}
    for item in options.set or ():
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {item}: write KEY=VALUE")
        branch = flags
        *stems, leaf = key.split(".")
        for stem in stems:
            branch = branch.setdefault(stem, {})
            if not isinstance(branch, dict):
                raise ConfigError(f"--set {item}: {stem} was set to a value before")
        try:
            branch[leaf] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set {item}: the value is not valid YAML; put it in quotes") from None
    for item in options.tokenizer or ():
        model, equals, folder = item.partition("=")
        if not equals or not model or not folder:
            raise ConfigError(f"--tokenizer {item}: write MODEL=FOLDER")
        flags.setdefault("models", {}).setdefault(model, {})["tokenizer"] = folder
    given = {"backends": options.backend, "host": options.host, "port": options.port, "log_level": options.log_level}
    flags |= {key: value for key, value in given.items() if value is not None}
    if options.api_key:
        flags["api_keys"] = options.api_key
    if options.allow_public:
        flags["allow_public"] = True
    return load(options.config, flags)
