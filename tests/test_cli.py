"""Laws of the common front: short forms, YAML, one line a failure, and the exit codes."""

from dataclasses import dataclass, field

import pytest

from ecospec.configs import cli
from ecospec.configs.keys import override
from ecospec.errors import DamageError, InputError
from ecospec.files import read_json, replace_file, replace_folder, require_new_folder, write_json
from ecospec.inference.config import DecodeConfig, SelectionConfig


@dataclass
class Knobs:
    name: str = "x"
    """A name."""
    size: int = 1
    """A size."""


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
    config, _ = cli.parse("prog", DecodeConfig, ["--max-new-tokens", "7", "--footprints", "token"])
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
    with pytest.raises(InputError, match="--overwrite"):
        require_new_folder(tmp_path, False, "results.json")
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
