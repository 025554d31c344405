"""Atomic writes and hashes: the only place that puts results on disk."""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from ecospec.errors import InputError


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to disk, then rename it over `path`.

    A reader sees the old content or the new, never a part; a failed write leaves nothing behind. Who may read it is for
    the umask to say.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.touch()
        mode = _mode_of(partial)
        write(partial)
        _set_mode(partial, mode)  # safetensors makes its files the user's alone
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, f"{path} cannot be written: {os.strerror(error.errno)}") from error
    finally:
        partial.unlink(missing_ok=True)


def _mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _set_mode(path: Path, mode: int) -> None:
    if _mode_of(path) != mode:  # some file systems have one mode for all and refuse to be told
        path.chmod(mode)


def write_text(path: Path, text: str) -> None:
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict:
    """Raises InputError when the file is absent or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON ({error})") from None


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def require_new_folder(folder: Path, overwrite: bool, artifact: str) -> None:
    """Make sure that `folder` can be written, before long work begins. `artifact`: what the command always writes.

    Raises InputError when it holds anything and `overwrite` is off, when it holds something that the same command did
    not write, or when it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise _refused(folder, "is a file, not a folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / artifact).exists():
            raise _refused(folder, f"holds files that are not ours to replace (no {artifact}); choose another folder")
        if not overwrite:
            raise _refused(folder, "the folder is not empty; choose another or add --overwrite")
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(folder, f"cannot be made ({error.strerror})") from None
    if not os.access(folder.absolute().parent, os.W_OK):
        raise _refused(folder, "its parent folder is not writable")


def _refused(output: Path, why: str) -> InputError:
    return InputError(why, key="output", value=str(output))


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary folder beside `folder`, then put it in its place.

    A reader sees the old folder, or none for an instant, or the new one whole; a failed write leaves the old one. Who
    may read it is for the umask to say.
    """
    folder = folder.absolute()
    partial, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("partial", "old"))
    partial.mkdir(parents=True)
    try:
        write(partial)
        _follow_umask(partial)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _follow_umask(folder: Path) -> None:
    """Give all that is in `folder` the modes of what this process makes there: the folder's own, and a new file's."""
    probe = folder / ".mode"
    probe.touch()
    folder_mode, file_mode = _mode_of(folder), _mode_of(probe)
    probe.unlink()
    for path in folder.rglob("*"):
        if not path.is_symlink():
            _set_mode(path, folder_mode if path.is_dir() else file_mode)
