"""Laws of the common front: short forms, YAML, one line a failure, and the exit codes."""

import pickle
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import pytest

from ecospec.configs import cli
from ecospec.configs.keys import override
from ecospec.errors import DamageError, InputError
from ecospec.files import read_json, replace_file, replace_folder, require_new_folder, write_json
from ecospec.inference.config import EvalConfig, SelectionConfig
from ecospec.tracing.config import EngineConfig
from tests.config_reads import assert_all_read, watch_reads


@dataclass
class Knobs:
    name: str = "x"
    """A name."""
    size: int = 1
    """A size."""


@dataclass
class Inner:
    policy: str = "p"
    """A policy."""
    gamma: int = 4
    """A number."""


@dataclass
class Config:
    """A command."""

    target: Knobs = field(default_factory=Knobs)
    sizes: list[int] = field(default_factory=list)
    """Sizes."""
    names: list[str] | None = None
    """Names."""
    overwrite: bool = False
    """A flag."""


def parsed(*argv: str):
    return cli.parse("prog", Config, argv)[0]


def test_short_forms_mean_their_full_keys():
    assert parsed("--target", "lab").target.name == "lab"
    assert parsed("--size", "3").target.size == 3
    assert parsed("--target.size=4").target.size == 4
    assert parsed("--sizes", "1,2").sizes == [1, 2]
    assert parsed("--names", "a,b").names == ["a", "b"]
    assert parsed("--overwrite").overwrite is True
    assert parsed("--overwrite", "false").overwrite is False


def test_dashes_and_underscores_are_the_same():
    config, _ = cli.parse("prog", EvalConfig, ["--max-new-tokens", "7", "--footprints", "token"])
    assert (config.max_new_tokens, config.selection.footprints) == (7, "token")


def test_a_yaml_file_and_the_command_line_say_the_same_thing(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("target: lab\nsizes: [1, 2]\n")
    assert parsed("--config", str(path)) == parsed("--target", "lab", "--sizes", "1,2")
    assert parsed("--config", str(path), "--target", "other").target.name == "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour: 3", "colour"),
        ("target: {nme: 3}", "nme"),
        ("sizes: [a]", "sizes"),
        ("[1, 2]", "expected a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_configuration_is_refused_naming_file_and_key(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as error:
        parsed("--config", str(path))
    assert str(path) in str(error.value)


def test_unknown_options_and_missing_configurations_are_refused():
    with pytest.raises(InputError, match="colour"):
        parsed("--colour", "3")
    with pytest.raises(InputError, match="no such file, and no shipped configuration"):
        parsed("--config", "nowhere/nothing")


@dataclass
class Part:
    policy: str = "p"
    """A policy, and no number."""


@dataclass
class Small:
    """Another subcommand of the same command."""

    INSTEAD: ClassVar = {"overwrite": "give another folder"}
    selection: Part = field(default_factory=Part)
    kept: int = 0
    """A key of its own."""


@dataclass
class Large:
    """A third, with keys that the others lack."""

    selection: Inner = field(default_factory=Inner)
    target: Knobs = field(default_factory=Knobs)
    first: Knobs = field(default_factory=Knobs)
    overwrite: bool = False
    """A flag."""

    def given_on_command_line(self, keys: frozenset[str]) -> None:
        self.given = keys


COMMAND = (cli.Subcommand("small", "", print, Small), cli.Subcommand("large", "", print, Large))


def small(*argv: str) -> Small:
    return cli.parse("prog small", Small, argv, None, COMMAND)[0]


def large(*argv: str) -> Large:
    return cli.parse("prog large", Large, argv, None, COMMAND)[0]


@pytest.mark.parametrize("option", ["--gamma", "--selection.gamma", "--target", "--target.name", "--first.size=3"])
def test_an_option_of_a_sibling_is_refused_by_name(option):
    expected = f"{option.partition('=')[0]}: prog small does not read it (only large)"
    with pytest.raises(InputError, check=lambda error: expected in error.as_typed):
        small(option, "8")


def test_an_option_of_nobody_is_refused_by_name_and_never_guessed():
    with pytest.raises(InputError, check=lambda error: "--colour: prog small has no such key" in error.as_typed):
        small("--colour", "8")
    with pytest.raises(InputError, check=lambda error: "--kep: prog small has no such key" in error.as_typed):
        small("--kep", "8")


def test_an_option_that_is_lacking_on_purpose_comes_with_a_remedy():
    with pytest.raises(InputError, check=lambda error: "--overwrite: give another folder" in error.as_typed):
        small("--overwrite")


def test_a_short_name_is_resolved_within_the_subcommand_and_never_at_random():
    assert small("--policy", "x").selection.policy == small("--selection", "x").selection.policy == "x"
    with pytest.raises(
        InputError, check=lambda error: "--size: say which one: --target.size, --first.size" in error.as_typed
    ):
        large("--size", "3")


def test_one_yaml_serves_all_subcommands_of_a_command(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("selection: {policy: x, gamma: 8}\ntarget: lab\nkept: 3\nfirst: {size: 2}\n")
    assert small("--config", str(path)) == Small(selection=Part("x"), kept=3)
    assert large("--config", str(path)) == Large(Inner("x", 8), Knobs("lab"), Knobs(size=2))


@pytest.mark.parametrize(
    ("text", "key"), [("colour: 3", "colour"), ("first: {colour: 3}", "first.colour"), ("selection: {size: 1}", "size")]
)
def test_a_key_that_no_subcommand_knows_is_refused_naming_the_file(tmp_path, text, key):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    for parse in (small, large):
        with pytest.raises(InputError, match=rf"{path}: .*{key}: no such key"):
            parse("--config", str(path))


def test_a_command_can_tell_what_was_given_on_the_command_line_itself(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("selection: {policy: x}\n")
    config = large("--config", str(path), "--gamma=3", "--target", "lab", "--overwrite")
    assert config.given == {"selection.gamma", "target.name", "overwrite"}
    assert "given" not in asdict(config)


def test_a_key_counts_as_read_only_where_a_command_takes_it(monkeypatch):
    def run(config):
        assert asdict(config) == asdict(replace(config)) == asdict(Large())
        group = override(config.selection, {"gamma": 3}, "there")
        assert (group.gamma, config.target, replace(config).first.size) == (3, Knobs(), 1)

    reads = watch_reads(monkeypatch)
    commands = [cli.Subcommand("go", "", run, Large)]
    assert cli.main("prog", commands, ["go"]) == 0
    assert reads == {"go": {"selection", "selection.gamma", "target", "first", "first.size"}}
    with pytest.raises(AssertionError, match=r"first\.name, overwrite, selection\.policy, target\.name, target\.size"):
        assert_all_read(commands, "go", reads)


def test_a_flag_may_be_given_again_with_a_value():
    assert parsed("--overwrite", "--overwrite", "false").overwrite is False
    assert parsed("--overwrite", "false", "--overwrite").overwrite is True


def test_changes_to_a_group_are_checked_like_the_group_itself():
    base = SelectionConfig()
    assert override(base, {"gamma": 2}, "methods[0].selection").gamma == 2
    with pytest.raises(InputError, match=r"methods\[0\].selection"):
        override(base, {"gama": 2}, "methods[0].selection")
    with pytest.raises(InputError, match=r"methods\[0\].selection"):
        override(base, {"gamma": "many"}, "methods[0].selection")


@pytest.mark.parametrize(
    ("error", "code"),
    [(InputError("a\nb"), 2), (DamageError("a b"), 1), (OSError("a b"), 1), (KeyboardInterrupt(), 130)],
)
def test_every_failure_is_one_line_and_an_exit_code(capsys, error, code):
    def run(_config):
        raise error

    assert cli.main("prog", [cli.Subcommand("go", "", run, Config)], ["go"]) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_an_error_speaks_of_options_to_users_of_commands_and_of_arguments_in_python(capsys):
    def run(_config):
        raise InputError("must be p, unless --overwrite", key="selection.policy", value="x")

    with pytest.raises(InputError, match=r"^policy 'x': must be p, unless overwrite$"):
        run(None)
    assert cli.main("prog", [cli.Subcommand("go", "", run, Config)], ["go"]) == 2
    assert capsys.readouterr().err == "prog: --selection.policy x: must be p, unless --overwrite\n"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("gamma", 0, "gamma 0: rule"),
        ("selection.gamma", None, "gamma: rule"),
        ("target.name", "lab", "target 'lab': rule"),
        ("drafter.path", None, "drafter: rule"),
        ("path", "a b", "path 'a b': rule"),
        (None, None, "rule"),
    ],
)
def test_python_names_an_argument_by_the_last_part_of_its_key_that_says_something(key, value, text):
    error = InputError("rule", key=key, value=value)
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == text
    assert pickle.loads(pickle.dumps(error)).as_typed == error.as_typed


def test_a_check_of_a_changed_group_names_the_place_of_the_change():
    with pytest.raises(InputError, match=r"^methods\[0\]\.engine\.in_flight 0: must be at least 1$"):
        override(EngineConfig(), {"in_flight": 0}, "methods[0].engine")


def test_errors_speak_of_arguments_in_python_and_of_options_on_the_command_line():
    error = InputError("--selection.gamma 0: must be 1 or more; --drafter.path names the head, gamma-4--x stays")
    assert str(error) == "gamma 0: must be 1 or more; drafter names the head, gamma-4--x stays"
    assert error.as_typed.startswith("--selection.gamma 0: ") and "--drafter.path names" in error.as_typed


def test_a_missing_command_names_those_there_are(capsys):
    assert cli.main("prog", [cli.Subcommand("go", "", print, Config)], []) == 2
    assert "go" in capsys.readouterr().err


def test_a_failed_write_leaves_the_old_content(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})

    def fail(partial):
        partial.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]


def test_a_folder_in_use_is_refused_unless_overwritten(tmp_path):
    (tmp_path / "results.json").touch()
    with pytest.raises(InputError, match=rf"^output '{tmp_path}': .* add overwrite$") as error:
        require_new_folder(tmp_path, False, "results.json")
    assert error.value.as_typed.startswith(f"--output {tmp_path}: ")
    assert error.value.as_typed.endswith("add --overwrite")
    require_new_folder(tmp_path, True, "results.json")
    with pytest.raises(InputError, match="is a file"):
        require_new_folder(tmp_path / "results.json", True, "results.json")


def test_a_folder_that_no_command_wrote_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for overwrite in (False, True):
        with pytest.raises(InputError, match="not ours"):
            require_new_folder(tmp_path, overwrite, "results.json")


def test_a_folder_that_another_command_wrote_is_not_replaced_either(tmp_path):
    (tmp_path / "trees.parquet").touch()
    (tmp_path / "provenance.json").touch()
    with pytest.raises(InputError, match=r"not ours to replace \(no report.html\)"):
        require_new_folder(tmp_path, True, "report.html")
    require_new_folder(tmp_path, True, "trees.parquet")


def test_replacing_a_folder_is_all_or_nothing(tmp_path):
    folder = tmp_path / "out"
    replace_folder(folder, lambda partial: (partial / "a").write_text("old"))

    def fail(partial):
        (partial / "a").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_folder(folder, fail)
    assert (folder / "a").read_text() == "old"
    replace_folder(folder, lambda partial: (partial / "b").write_text("new"))
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [folder]
