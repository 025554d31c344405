"""The front of all three commands: short forms, YAML, and a parser generated from a typed dataclass.

`main` turns exceptions into exit codes: 0 success, 2 bad input, 1 anything else, 130 Ctrl-C.
"""

import dataclasses
import json
import logging
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import jsonargparse
import yaml

from ecospec.errors import DamageError, InputError

jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)

# A scalar given for a group of keys sets this key of the group.
SHORT_FORMS = {
    "target": "name",
    "drafter": "path",
    "predictor": "path",
    "selection": "policy",
    "engine": "kind",
}
SHORT_OPTIONS = {"footprints": "selection.footprints"}


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """`run(config)`, or `run(config, folders)` when `folders` says how many DIR arguments it takes."""

    name: str
    help: str
    run: Callable[..., object]
    folders: str | int | None = None  # argparse's nargs


def main(prog: str, schema: type, subcommands: Sequence[Subcommand], argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, run the subcommand, and return the exit code; every failure is one line on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    for client in ("httpx", "httpx2"):  # a line a request
        logging.getLogger(client).setLevel(logging.WARNING)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's Ctrl-C
    try:
        subcommand = _choose(prog, subcommands, argv)
        config, folders = parse(f"{prog} {subcommand.name}", schema, argv[1:], subcommand.folders)
        subcommand.run(config) if folders is None else subcommand.run(config, folders)
    except InputError as error:
        return _fail(prog, error, 2)
    except (DamageError, OSError) as error:
        return _fail(prog, error, 1)
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", 130)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def parse(prog: str, schema: type, argv: Sequence[str], folders: str | int | None = None) -> tuple:
    """An instance of `schema` from command line and YAML, and the DIR arguments (or None).

    Raises InputError for an unknown key, a value of the wrong type or an unreadable configuration file.
    """
    parser = _parser(prog, schema, folders)
    options = expand_options(schema, argv)
    for index, option in enumerate(options):
        if option == "--config" and index + 1 < len(options):
            options[index + 1] = _read_yaml(parser, schema, options[index + 1])
    try:
        namespace = parser.parse_args(options)
        values = parser.instantiate(namespace)
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise InputError(_reworded(error)) from None
    config = schema(**{field.name: values[field.name] for field in dataclasses.fields(schema)})
    return config, values["dir"] if folders else None


def override(base: object, changes: dict, where: str) -> object:
    """A copy of the instance `base` with `changes` applied, type-checked. Raises InputError naming `where`."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(type(base))
    try:
        values = parser.instantiate(parser.parse_object(dataclasses.asdict(base) | changes))
        return type(base)(**values.as_dict())
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise InputError(f"{where}: {_reworded(error)}") from None


def expand_options(schema: type, argv: Sequence[str]) -> list[str]:
    """Short options in full: `--target X`, `--gamma 4`, `--max-new-tokens 8`, `--datasets a,b`, in either spelling."""
    leaves = leaf_keys(schema)
    expanded = []
    for word in argv:
        if not word.startswith("--") or word in ("--config", "--help"):
            expanded.append(_listed(expanded, leaves, word))
            continue
        name, equals, value = word[2:].partition("=")
        key = _full_key(name.replace("-", "_"), leaves)
        expanded.append(f"--{key}")
        if equals:
            expanded.append(_listed(expanded, leaves, value))
        elif leaves.get(key) is bool:
            expanded[-1] += "=true" if _is_flag(argv, word) else ""
    return expanded


def leaf_keys(schema: type, prefix: str = "") -> dict[str, object]:
    """Dotted name → type of every key below a dataclass."""
    keys = {}
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            keys |= leaf_keys(hint, f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = hint
    return keys


def expand_short_forms(schema: type, values: dict) -> dict:
    """A YAML mapping in which `target: lab` has become `target: {name: lab}`, at every depth."""
    expanded = {}
    hints = typing.get_type_hints(schema)
    for name, value in values.items():
        hint = hints.get(str(name).replace("-", "_"))
        group = next((h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)), None)
        if group and isinstance(value, list):
            value = [expand_short_forms(group, item) if isinstance(item, dict) else item for item in value]
        elif group and isinstance(value, dict):
            value = expand_short_forms(group, value)
        elif group and name in SHORT_FORMS and value is not None:
            value = {SHORT_FORMS[name]: value}
        expanded[str(name).replace("-", "_")] = value
    return expanded


def shipped_config(name: str) -> Path:
    """The file of a shipped configuration such as `lab/trace`, or of a path. Raises InputError when there is none."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = Path(str(resources.files("ecospec.configs"))) / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    known = ", ".join(sorted(str(p.relative_to(shipped_root()))[:-5] for p in shipped_root().glob("*/*.yaml")))
    raise InputError(f"--config {name}: no such file, and no shipped configuration of that name (there are: {known})")


def shipped_root() -> Path:
    return Path(str(resources.files("ecospec.configs")))


def _choose(prog: str, subcommands: Sequence[Subcommand], argv: list[str]) -> Subcommand:
    by_name = {subcommand.name: subcommand for subcommand in subcommands}
    if argv and argv[0] in by_name:
        return by_name[argv[0]]
    lines = [f"usage: {prog} COMMAND [--config FILE] [--output DIR] [--key value ...]", ""]
    lines += [f"  {s.name:<10} {s.help}" for s in subcommands]
    lines += ["", f"'{prog} COMMAND --help' lists the keys."]
    if argv and argv[0] in ("-h", "--help"):
        print("\n".join(lines))
        raise SystemExit(0)
    raise InputError(f"expected a command: one of {', '.join(by_name)} (see {prog} --help)")


def _parser(prog: str, schema: type, folders: str | int | None) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, description=schema.__doc__)
    if folders:
        parser.add_argument("dir", nargs=folders, metavar="DIR", help="folder to read")
    parser.add_argument("--config", action="config", help="YAML file, or the name of a shipped one such as lab/trace")
    parser.add_class_arguments(schema, as_group=True)
    return parser


def _read_yaml(parser: jsonargparse.ArgumentParser, schema: type, name: str) -> str:
    """The configuration as one JSON text with short forms expanded, checked key by key."""
    path = shipped_config(name)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML ({_one_line(error)})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of keys, found {type(values).__name__}")
    text = json.dumps(expand_short_forms(schema, values), default=str)
    try:
        parser.parse_string(text)
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {_reworded(error)}") from None
    return text


def _full_key(name: str, leaves: dict[str, object]) -> str:
    """The dotted key that `name` stands for: itself, a short form, or the unique key with that last name."""
    if name in leaves:
        return name
    if name in SHORT_FORMS and f"{name}.{SHORT_FORMS[name]}" in leaves:
        return f"{name}.{SHORT_FORMS[name]}"
    if SHORT_OPTIONS.get(name) in leaves:
        return SHORT_OPTIONS[name]
    matches = [key for key in leaves if key.rsplit(".", 1)[-1] == name]
    return matches[0] if len(matches) == 1 else name


def _listed(words: list[str], leaves: dict[str, object], value: str) -> str:
    """`a,b` as a JSON list where the option before it takes a list."""
    key = words[-1][2:] if words and words[-1].startswith("--") else ""
    item = _list_item(leaves.get(key))
    if item is None or value.startswith("["):
        return value
    try:
        return json.dumps([part if item is str else yaml.safe_load(part) for part in value.split(",")])
    except yaml.YAMLError:
        raise InputError(f"--{key} {value}: expected values separated by commas") from None


def _list_item(hint: object) -> type | None:
    """The item type of `list[X]`, also inside a union with None; None for anything else."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is list:
            return typing.get_args(option)[0]
    return None


def _is_flag(argv: Sequence[str], word: str) -> bool:
    following = list(argv)[list(argv).index(word) + 1 :]
    return not following or following[0].startswith("--") or following[0].lower() not in ("true", "false")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _reworded(error: object) -> str:
    """A message of the parser with keys as the options that users type, and types by their names."""
    text = re.sub(r'Parser key "([\w.]+)": ', r"--\1: ", _one_line(error))
    return re.sub(r"<class '(\w+)'>", r"\1", text)


def _fail(prog: str, error: object, code: int) -> int:
    print(f"{prog}: {_one_line(error)}", file=sys.stderr)
    return code
