"""MODEL on the command line: a config.json, a model folder, a catalogue name, or a hub id when the network is there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.planner import catalogue
from gateway.planner.errors import ModelNotFound, PlannerError
from gateway.planner.geometry import read_geometry
from gateway.planner.speculation import Speculation
from gateway.planner.weights import safetensors_bytes
from gateway.planner.wish import Subject


def load_subject(model: str, *, offline: bool = False) -> Subject:
    """What is known of ``model``. Raises ModelNotFound, GeometryMissing or PlannerError, each in one clear sentence."""
    path = Path(model).expanduser()
    if _exists(path.is_dir):
        return _from_folder(path)
    if _exists(path.is_file):
        return Subject(read_geometry(read_config(path), path.parent.name or path.name))
    entry = catalogue.find(model)
    if entry is not None:
        return _from_catalogue(entry, model)
    relative = catalogue.find_relative(model)
    if "/" in model and not offline:
        try:
            return _from_hub(model)
        except ModelNotFound:
            if relative is None:
                raise
    if relative is not None:
        return _from_catalogue(
            relative,
            model,
            f"Planned with the geometry of {relative.name}, which {model} should share by its name; its own window may "
            "differ, as its config.json tells.",
        )
    near = ", ".join(catalogue.nearest(model))
    raise ModelNotFound(
        f"{model!r} is no file or folder here and not in the catalogue{f' (near: {near})' if near else ''}. "
        "Give a config.json, a model folder, or owner/name of a hub model while online."
    )


def _exists(test: Callable[[], bool]) -> bool:
    """False also for what no file can be called (too long, a null byte)."""
    try:
        return test()
    except (OSError, ValueError):
        return False


def _from_catalogue(entry: catalogue.Entry, model: str, *notes: str) -> Subject:
    geometry = read_geometry(entry.as_config(), model if "/" in model else entry.name)
    if not entry.source:
        unsure = "The catalogue's geometry of this model was held against no source: give its config.json to be sure."
        notes = (*notes, unsure)
    return Subject(
        replace(geometry, notes=(*geometry.notes, *notes)),
        parameters=entry.parameters,
        vision_parameters=entry.vision_parameters,
        quant_from_name=catalogue.suffix_quant(model),
    )


def with_draft(subject: Subject, speculation: Speculation | None, *, offline: bool = False) -> Subject:
    """``subject`` with the geometry of the draft model a speculation names."""
    if speculation is None or not speculation.draft or speculation.method.startswith("eagle"):
        return subject
    return replace(subject, draft=load_subject(speculation.draft, offline=offline).geometry)


def read_config(path: Path) -> Mapping[str, Any]:
    """The JSON object in ``path``. Raises PlannerError when it is something else."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PlannerError(f"{path} cannot be read: {error.strerror}.") from error
    return _object(content, str(path))


def _from_folder(folder: Path) -> Subject:
    config = folder / "config.json"
    if not config.is_file():
        params = folder / "params.json"
        hint = (
            " (params.json alone is Mistral's own format: convert it or use the catalogue)" if params.is_file() else ""
        )
        raise ModelNotFound(f"{folder} has no config.json{hint}.")
    raw = dict(read_config(config))
    quant = folder / "hf_quant_config.json"
    if quant.is_file() and "quantization_config" not in raw:
        raw["quantization_config"] = read_config(quant)
    geometry = read_geometry(raw, folder.resolve().name)
    shards = sorted(folder.glob("*.safetensors"))
    whole = [shard for shard in shards if not shard.name.startswith("consolidated")] or shards
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = read_config(index).get("weight_map") or {}
        if not isinstance(listed, Mapping):
            raise PlannerError(f"{index} is no weight index: its weight_map is not an object.")
        named = {str(shard) for shard in listed.values()}
        missing = sorted(named - {shard.name for shard in whole})
        if missing:
            return Subject(geometry, exact_bytes=_index_total(read_config(index)))
        whole = [shard for shard in whole if shard.name in named] or whole
    return Subject(geometry, exact_bytes=safetensors_bytes(whole) if whole else None)


def _from_hub(model: str) -> Subject:
    """Config and weight index from the hub's cache or the hub itself (``HF_ENDPOINT``, ``HF_TOKEN`` as everywhere)."""
    from gateway.planner.hub import HubError, hub_file

    near = ", ".join(catalogue.nearest(model))
    try:
        config = _object(hub_file(model, "config.json"), f"config.json of {model}")
    except HubError as error:
        raise ModelNotFound(
            f"{model!r} is not in the catalogue{f' (near: {near})' if near else ''} and its config.json could not be "
            f"fetched: {error}. Download config.json and give its path."
        ) from error
    total: int | None = None
    try:
        total = _index_total(_object(hub_file(model, "model.safetensors.index.json"), "the weight index"))
    except (HubError, PlannerError):
        total = None  # one file without an index, or another format: weights are estimated
    if "quantization_config" not in config:
        with contextlib.suppress(HubError, PlannerError):  # only ModelOpt's checkpoints have one
            quant = _object(hub_file(model, "hf_quant_config.json"), "hf_quant_config.json")
            config = {**config, "quantization_config": quant}
    return Subject(read_geometry(config, model), exact_bytes=total, quant_from_name=catalogue.suffix_quant(model))


def _object(content: bytes, what: str) -> Mapping[str, Any]:
    try:
        parsed = json.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise PlannerError(f"{what} is nested too deeply to be a model config.") from error
    except ValueError as error:
        raise PlannerError(f"{what} is not readable JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise PlannerError(f"{what} holds a JSON {type(parsed).__name__}, not a model config object.")
    return parsed


def _index_total(index: Mapping[str, Any]) -> int | None:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    return int(total) if isinstance(total, int | float) else None
