"""Keys as names and types: the dotted names below a dataclass, their short forms, and changed copies of a group.

Sets nothing of jsonargparse, whose settings are global: the Python API leaves a user's own parsers alone.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import jsonargparse

from ecospec.errors import InputError

# A scalar given for a group of keys sets this key of the group.
SHORT_FORMS = {
    "target": "name",
    "drafter": "path",
    "predictor": "path",
    "selection": "policy",
    "engine": "kind",
}
SHORT_OPTIONS = {"footprints": "selection.footprints"}


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


def groups_of(leaves: Iterable[str]) -> set[str]:
    """The dotted names of the groups that hold these keys."""
    names = set()
    for key in leaves:
        while "." in key:
            key = key.rpartition(".")[0]
            names.add(key)
    return names


def full_key(name: str, leaves: Mapping[str, object]) -> str:
    """The dotted key that `name` stands for: itself, a short form, or the key with that last name; else `name`.

    Raises InputError where several keys have that last name.
    """
    if name in leaves:
        return name
    if name in SHORT_FORMS and f"{name}.{SHORT_FORMS[name]}" in leaves:
        return f"{name}.{SHORT_FORMS[name]}"
    if SHORT_OPTIONS.get(name) in leaves:
        return SHORT_OPTIONS[name]
    matches = [key for key in leaves if key.rsplit(".", 1)[-1] == name]
    if len(matches) > 1:
        raise InputError(f"--{name}: say which one: {', '.join(f'--{key}' for key in matches)}")
    return matches[0] if matches else name


def list_item(hint: object) -> type | None:
    """The item type of `list[X]`, also inside a union with None; None for anything else."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is list:
            return typing.get_args(option)[0]
    return None


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
            value = expand_short_forms(group, {SHORT_FORMS[name]: value})
        elif list_item(hint) and value is not None and not isinstance(value, list):
            value = [value]  # one subcommand's list may be another's single value
        expanded[str(name).replace("-", "_")] = value
    return expanded


def own_part(values: dict, own: Mapping[str, object], known: Mapping[str, object], prefix: str = "") -> dict:
    """What of a mapping belongs to the keys `own`; keys that are merely `known` are left out.

    Raises InputError for a key that is neither.
    """
    kept = {}
    for name, value in values.items():
        name = str(name).replace("-", "_")
        key = prefix + name
        if key not in own and key in groups_of([*own, *known]) and isinstance(value, dict):
            inner = own_part(value, own, known, f"{key}.")
            kept |= {name: inner} if inner else {}
        elif key in own or key in groups_of(own):
            kept[name] = value
        elif key not in known and key not in groups_of(known):
            raise InputError(f"{key}: no such key")
    return kept


def override(base: object, changes: dict, where: str) -> object:
    """A copy of the instance `base` with `changes` applied, type-checked. Raises InputError naming `where`."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(type(base))
    with renamed(where):  # for checks in the group itself
        try:
            values = parser.instantiate(parser.parse_object(dataclasses.asdict(base) | changes))
            return type(base)(**values.as_dict())
        except InputError:
            raise
        except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
            raise InputError(f"{where}: {reworded(error)}") from None


@contextmanager
def renamed(where: str) -> Iterator[None]:
    """Let an InputError that names a key of a group name it as a key of `where`."""
    try:
        yield
    except InputError as error:
        if error.key is None:
            raise
        raise InputError(f"{where}.{error.key.rpartition('.')[2]} {error.value}: {error.rule}") from None


def one_line(error: object) -> str:
    return " ".join(str(error).split())


def reworded(error: object) -> str:
    """A message of the parser with keys as the options that users type, and types by their names."""
    text = re.sub(r'Parser key "([\w.]+)": ', r"--\1: ", one_line(error))
    return re.sub(r"<class '(\w+)'>", r"\1", text)
