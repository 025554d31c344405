"""The front of all three commands: options, YAML, and a parser generated from each subcommand's dataclass.

A subcommand knows the keys of its own dataclass only. In a YAML file, which may serve several subcommands, keys of its
siblings are passed over. `main` turns exceptions into exit codes: 0 success, 2 bad input, 1 anything else, 130 Ctrl-C.
"""

import dataclasses
import json
import logging
import signal
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

import docstring_parser
import jsonargparse
import yaml

from ecospec.configs.keys import (
    expand_short_forms,
    full_key,
    groups_of,
    leaf_keys,
    list_item,
    one_line,
    own_part,
    reworded,
)
from ecospec.configs.schema import OutputConfig
from ecospec.configs.shipped import shipped_config
from ecospec.errors import DamageError, InputError
from ecospec.files import require_new_folder

OWN_OPTIONS = ("config", "help", "print_config")  # of the parser itself, beside the keys


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """`run(config)`, or `run(config, folders)` when `folders` says how many DIR arguments it takes.

    `config` is an instance of the dataclass `schema`. A schema may have a method `given_on_command_line(keys)`, which
    is then called with the dotted keys that the command line itself names (a YAML file's are not among them). It may
    have a mapping INSTEAD from a key that it lacks on purpose to a word on what to do instead.
    """

    name: str
    help: str
    run: Callable[..., object]
    schema: type
    folders: str | int | None = None  # argparse's nargs


def main(prog: str, subcommands: Sequence[Subcommand], argv: Sequence[str] | None = None) -> int:
    """Parse `argv`, run the subcommand, and return the exit code; every failure is one line on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("ecospec").setLevel(logging.INFO)  # other libraries' news would be a line a request
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's Ctrl-C
    try:
        chosen = _choose(prog, subcommands, argv)
        config, folders = parse(f"{prog} {chosen.name}", chosen.schema, argv[1:], chosen.folders, subcommands)
        chosen.run(config) if folders is None else chosen.run(config, folders)
    except InputError as error:
        return _fail(prog, error.as_typed, 2)
    except (DamageError, OSError) as error:
        return _fail(prog, error, 1)
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", 130)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def new_output(config: OutputConfig, artifact: str) -> Path:
    """The folder of `--output`, where the file `artifact` will be written. Raises InputError where that cannot be."""
    if config.output is None:
        raise InputError("--output: not given; say which folder to write")
    require_new_folder(Path(config.output), config.overwrite, artifact)
    return Path(config.output)


def parse(
    prog: str,
    schema: type,
    argv: Sequence[str],
    folders: str | int | None = None,
    siblings: Sequence[Subcommand] = (),
) -> tuple:
    """An instance of `schema` from command line and YAML, and the DIR arguments (or None).

    `siblings`: all subcommands of the command, whose keys a YAML file may hold beside the schema's own. Raises
    InputError for an unknown key, a value of the wrong type or an unreadable configuration file.
    """
    parser = _parser(prog, schema, folders, describe="--help" in argv or "-h" in argv)
    options = expand_options(prog, schema, argv, siblings)
    for index, option in enumerate(options):
        if option == "--config" and index + 1 < len(options):
            options[index + 1] = _read_yaml(schema, siblings, options[index + 1])
    try:
        namespace = parser.parse_args(options)
        values = parser.instantiate(namespace)
    except InputError:  # from a check in the schema
        raise
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise InputError(reworded(error)) from None
    config = schema(**{field.name: values[field.name] for field in dataclasses.fields(schema)})
    if hasattr(config, "given_on_command_line"):
        config.given_on_command_line(_given(options) & leaf_keys(schema).keys())
    return config, values["dir"] if folders else None


def _given(options: Sequence[str]) -> frozenset[str]:
    """The names of options written in full."""
    return frozenset(word[2:].partition("=")[0].removesuffix("+") for word in options if word.startswith("--"))


def expand_options(prog: str, schema: type, argv: Sequence[str], siblings: Sequence[Subcommand] = ()) -> list[str]:
    """Short options in full: `--target X`, `--gamma 4`, `--max-new-tokens 8`, `--datasets a,b`, in either spelling.

    Raises InputError for an option that is no key of `schema`; where it is one of a sibling's, the message says so.
    """
    leaves = leaf_keys(schema)
    expanded = []
    for index, word in enumerate(argv):
        if not word.startswith("--"):
            expanded.append(_listed(expanded, leaves, word))
            continue
        name, equals, value = word[2:].partition("=")
        key = _key(prog, name.replace("-", "_"), schema, siblings)
        expanded.append(f"--{key}")
        if equals:
            expanded.append(_listed(expanded, leaves, value))
        elif leaves.get(key) is bool and _is_flag(argv[index + 1 :]):
            expanded[-1] += "=true"
    return expanded


def _key(prog: str, name: str, schema: type, siblings: Sequence[Subcommand]) -> str:
    """The key that the option `name` means. Raises InputError for a key of a sibling alone, or of nobody."""
    if name in OWN_OPTIONS:
        return name
    leaves = leaf_keys(schema)
    name, append = name.removesuffix("+"), name.endswith("+")  # `--key+ value` appends to a list
    key = full_key(name, leaves)
    if key in leaves or key in groups_of(leaves):
        return f"{key}+" if append else key
    if name in getattr(schema, "INSTEAD", {}):
        raise InputError(f"--{name}: {schema.INSTEAD[name]}")
    readers = [sibling.name for sibling in siblings if _knows(sibling.schema, name)]
    if readers:
        raise InputError(f"--{name}: {prog} does not read it (only {', '.join(readers)})")
    raise InputError(f"--{name}: {prog} has no such key; --help lists those it has")


def _knows(schema: type, name: str) -> bool:
    leaves = leaf_keys(schema)
    return name in groups_of(leaves) or any(name in (key, key.rsplit(".", 1)[-1]) for key in leaves)


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


def _parser(
    prog: str, schema: type, folders: str | int | None = None, describe: bool = False
) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(prog=prog, exit_on_error=False, allow_abbrev=False, description=schema.__doc__)
    if folders:
        parser.add_argument("dir", nargs=folders, metavar="DIR", help="folder to read")
    parser.add_argument("--config", action="config", help="YAML file, or the name of a shipped one such as lab/trace")
    parser.add_class_arguments(schema, as_group=True)
    if describe:
        _describe(parser, field_docstrings(schema))
    return parser


def _describe(parser: jsonargparse.ArgumentParser, docstrings: dict[str, str]) -> None:
    # jsonargparse would read the docstrings itself, but by a setting that changes every parser of the process.
    for action in parser._actions:
        if action.dest not in parser.groups:
            action.help = docstrings.get(action.dest, action.help)
    for key, group in parser.groups.items():
        group.title = docstrings.get(key, group.title).removesuffix(".")


def field_docstrings(schema: type, prefix: str = "") -> dict[str, str]:
    """Dotted name → the docstring below that field, of all keys and groups of a dataclass that have one."""
    found = {}
    for source in reversed([base for base in schema.__mro__ if dataclasses.is_dataclass(base)]):
        params = docstring_parser.parse_from_object(source).params
        found |= {prefix + param.arg_name: (param.description or "").replace("%", "%%") for param in params}
    for name, hint in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint):
            found |= field_docstrings(hint, f"{prefix}{name}.")
    return found


def _read_yaml(schema: type, siblings: Sequence[Subcommand], name: str) -> str:
    """The schema's part of the configuration as one JSON text with short forms expanded, checked key by key."""
    path = shipped_config(name)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML ({one_line(error)})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of keys, found {type(values).__name__}")
    own = leaf_keys(schema)
    known = own | {key: hint for sibling in siblings for key, hint in leaf_keys(sibling.schema).items()}
    try:
        text = json.dumps(own_part(expand_short_forms(schema, values), own, known), default=str)
        _parser("", schema).parse_string(text)
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise InputError(f"{path}: {reworded(error)}") from None
    return text


def _listed(words: list[str], leaves: dict[str, object], value: str) -> str:
    """`a,b` as a JSON list where the option before it takes a list."""
    key = words[-1][2:] if words and words[-1].startswith("--") else ""
    item = list_item(leaves.get(key))
    if item is None or value.startswith("["):
        return value
    try:
        return json.dumps([part if item is str else yaml.safe_load(part) for part in value.split(",")])
    except yaml.YAMLError:
        raise InputError(f"--{key} {value}: expected values separated by commas") from None


def _is_flag(following: Sequence[str]) -> bool:
    """Whether the option of a yes-or-no key before these words has no value among them."""
    return not following or following[0].startswith("--") or following[0].lower() not in ("true", "false")


def _fail(prog: str, error: object, code: int) -> int:
    print(f"{prog}: {one_line(error)}", file=sys.stderr)
    return code
