"""Which keys of its configuration a subcommand reads: to prove that it knows none that it does not.

    reads = watch_reads(monkeypatch)
    assert main(["export", ...]) == 0
    assert_all_read(SUBCOMMANDS, "export", reads)

A key counts as read when it is taken, as an attribute, from the configuration that `cli.parse` returned, from a group
in it, or from a copy that `dataclasses.replace` or `override` made of either. Checks in `__post_init__`, copying,
comparing, and writing all keys down (`dataclasses.asdict`) do not count.
"""

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Sequence

import pytest

from ecospec.configs import cli
from ecospec.configs.keys import leaf_keys

GENERATED = "<string>"  # the file name of code that dataclasses wrote
Reads = dict[str, set[str]]  # subcommand → dotted keys


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """A record, filled as commands run in this process, of the keys that each subcommand reads."""
    reads: Reads = defaultdict(set)
    parse = cli.parse

    def watched(prog: str, *arguments: object) -> tuple:
        config, folders = parse(prog, *arguments)
        _watch(config, reads[prog.split()[-1]], "")
        return config, folders

    monkeypatch.setattr(cli, "parse", watched)
    return reads


def assert_all_read(subcommands: Sequence[cli.Subcommand], name: str, reads: Reads) -> None:
    """Each leaf key of the subcommand's schema was read."""
    (schema,) = (subcommand.schema for subcommand in subcommands if subcommand.name == name)
    unread = sorted(leaf_keys(schema).keys() - reads[name])
    assert not unread, f"{name} knows keys that it does not read: {', '.join(unread)}"


def _watch(config: object, read: set[str], prefix: str) -> None:
    """Make `config` and its groups report their reads, by giving them a class that does."""
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            _watch(value, read, f"{prefix}{name}.")
    config.__class__ = _reporting(type(config), read, prefix)


def _reporting(schema: type, read: set[str], prefix: str) -> type:
    """A subclass whose instances, copies included, note in `read` which of their fields are taken."""
    names = {field.name for field in dataclasses.fields(schema)}

    def __getattribute__(self: object, name: str) -> object:
        if name in names and not _by_machinery():
            read.add(prefix + name)
        if name == "__class__" and sys._getframe(1).f_code.co_filename == GENERATED:
            return schema  # to the generated `__eq__`, which compares with configurations that are not watched
        return schema.__getattribute__(self, name)

    body = {"__getattribute__": __getattribute__, "__module__": schema.__module__, "__doc__": schema.__doc__}
    return type(schema.__name__, (schema,), body)


def _by_machinery() -> bool:
    """Whether dataclasses itself, code that it generated, or a check in `__post_init__` is reading."""
    frame = sys._getframe(2)
    if frame.f_code.co_filename in (dataclasses.__file__, GENERATED):
        return True
    while frame is not None:
        if frame.f_code.co_name == "__post_init__":
            return True
        frame = frame.f_back
    return False
