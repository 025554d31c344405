"""What a user calls a target or a trained part, turned into the folder or hub id that it stands for."""

from pathlib import Path

import yaml
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from ecospec.configs.shipped import shipped_root
from ecospec.data.lab import shipped
from ecospec.errors import InputError, brief
from ecospec.hub import hub_or_cache, is_hub_name


def resolve_target(name: str) -> str:
    """Hub id or folder behind a target name (`lab`, a folder of `configs/`, or the name itself)."""
    lab = shipped(name, "target")
    if lab is not None:
        return str(lab)
    config = shipped_root() / name / "trace.yaml"
    if config.is_file():
        target = yaml.safe_load(config.read_text())["target"]
        return target["name"] if isinstance(target, dict) else target
    return name


def own_part(path: str | None, target: str) -> str | None:
    """The `path` of a trained part; where none is given, that of the target itself, if it is shipped with its parts."""
    return target if path is None and shipped(target, "target") is not None else path


def part_folder(path: str | None, part: str, option: str | None = None) -> Path:
    """The folder of a `drafter`, or of a `predictor` or one of its kind; `lab` is the shipped one.

    Raises InputError, naming `option` (by default the part's own key), when there is none.
    """
    option = option or ("--drafter.path" if part == "drafter" else "--predictor.path")
    if path is None:
        raise InputError(f"{option}: not given")
    folder = shipped(path, part) or Path(path)
    if "/" in path and is_hub_name(folder):
        return _from_hub(path, option)
    if not (folder / "config.json").is_file():
        raise InputError(f"{option} {path}: the folder {folder} has no config.json")
    return folder


def _from_hub(name: str, option: str) -> Path:
    """The local copy of a hub repository, fetched where it is not cached. Raises InputError when it cannot be had."""
    try:
        with hub_or_cache(name):
            return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        why = f"no such folder, and not to be had from the hub ({brief(error)})"
        raise InputError(f"{option} {name}: {why}") from None
