"""Subcommands of `ecospec-decode` know only keys that they read; an option reaches every method or is refused."""

import json

import pyarrow.parquet as pq
import pytest

from ecospec.configs import cli
from ecospec.configs.keys import leaf_keys
from ecospec.configs.shipped import shipped_root
from ecospec.errors import InputError
from ecospec.inference.assemble import plan_methods
from ecospec.inference.cli import SUBCOMMANDS, main
from ecospec.inference.config import EvalConfig
from ecospec.inference.replay.command import TREES
from ecospec.inference.replay.treefile import read_trees
from ecospec.predictor.cli import main as train
from tests.config_reads import assert_all_read, watch_reads
from tests.decode_lab import BASELINES, options

DECODE = sorted(path.parent.name for path in shipped_root().glob("*/decode.yaml"))


def evaluated(*argv):
    config, _ = cli.parse("ecospec-decode eval", EvalConfig, argv, None, SUBCOMMANDS)
    return plan_methods(config, config.selection, config.methods)


@pytest.mark.parametrize("target", DECODE)
def test_gamma_reaches_every_method_of_every_shipped_configuration(target):
    changed = evaluated("--config", f"{target}/decode", "--gamma", "8")
    assert {plan.selection.gamma for plan in changed if plan.baseline is None} == {8}
    as_shipped = evaluated("--config", f"{target}/decode")
    assert {plan.selection.gamma for plan in as_shipped if plan.baseline is None} == {4}


@pytest.mark.parametrize("option", [("--policy", "random"), ("--footprints", "token")])
def test_an_option_that_methods_give_themselves_is_refused_naming_them(option):
    with pytest.raises(InputError, match=r"methods .*EcoSpec.* give their own"):
        evaluated("--config", "lab/decode", *option)


def test_a_method_s_own_gamma_is_not_passed_over_in_silence(tmp_path):
    config = tmp_path / "own.yaml"
    config.write_text("methods:\n- {label: plain, drafter: none}\n- {label: mine, selection: {gamma: 2}}\n")
    with pytest.raises(InputError, match=r"gamma: the methods mine give their own"):
        evaluated("--config", str(config), "--gamma", "8")
    assert evaluated("--config", str(config))[1].selection.gamma == 2


def test_a_predictor_stands_beside_those_that_methods_name_themselves():
    plans = {plan.label: plan for plan in evaluated("--config", "lab/demo", "--predictor", "somewhere")}
    assert plans["EcoSpec"].predictor.path == "somewhere"
    assert plans["EcoSpec shipped predictor"].predictor.path == "lab"


def test_a_method_of_another_kind_inherits_what_both_kinds_read_and_no_path(tmp_path):
    config = tmp_path / "kinds.yaml"
    method = "{label: lookup, drafter: {kind: prompt_lookup, topk: 1}}"
    config.write_text(f"drafter: {{path: somewhere, rope_theta: 5}}\nmethods: [{method}]\n")
    (plan,) = evaluated("--config", str(config), "--drafter.steps", "5")
    assert (plan.drafter.path, plan.drafter.steps, plan.drafter.topk) == (None, 5, 1)
    with pytest.raises(InputError, match=r"drafter.path somewhere: prompt_lookup does not read it"):
        evaluated("--drafter.path", "somewhere", "--drafter.kind", "prompt_lookup")
    with pytest.raises(InputError, match=r"rope_theta: the methods lookup give their own"):
        evaluated("--config", str(config), "--drafter.rope_theta", "7")


@pytest.mark.parametrize("command", ["check", "generate", "eval", "record"])
def test_help_lists_every_key_that_a_subcommand_knows(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    (schema,) = (one.schema for one in SUBCOMMANDS if one.name == command)
    assert not [key for key in leaf_keys(schema) if f"--{key}" not in shown]


def test_a_shipped_configuration_takes_another_drafter():
    changed = evaluated("--config", "lab/decode", "--drafter.kind", "prompt_lookup")
    assert {plan.drafter.kind for plan in changed if plan.baseline is None} == {"prompt_lookup"}


def test_the_lab_s_own_parts_are_taken_for_the_lab_alone():
    (plan,) = evaluated("--target", "lab")
    assert (plan.drafter.path, plan.predictor.path) == ("lab", "lab")
    (plan,) = evaluated("--target", "another")
    assert (plan.drafter.path, plan.predictor.path) == (None, None)


def replayed(lab, tmp_path, *chosen):
    trees = tmp_path / "trees"
    if not trees.exists():
        recorded = options(lab, output=trees, **{"max-new-tokens": 8})
        assert main(["record", *recorded]) == 0
    assert main(["replay", "--trees", str(trees), *chosen, "--output", str(tmp_path / "out"), "--overwrite"]) == 0
    return json.loads((tmp_path / "out" / "replay.json").read_text())["runs"]


def test_replay_takes_policies_sources_gammas_and_epsilons(lab, tmp_path):
    words = ["--policy", "marginal,confidence", "--footprints", "oracle", "--gamma", "3,5", "--epsilon", "1e-6,1"]
    runs = replayed(lab, tmp_path, *words)
    assert {run["selection"] for run in runs} == {"marginal", "confidence"}
    assert {run["footprints"] for run in runs} == {"oracle", None}
    assert {run["gamma"] for run in runs} == {3, 5}
    assert {run["epsilon"] for run in runs} == {1e-6, 1.0, None}
    assert {run["gamma"] for run in replayed(lab, tmp_path)} == set(range(1, 8))


def test_a_prompt_s_own_id_stands_in_steps_and_trees(lab, tmp_path):
    prompts = tmp_path / "own.jsonl"
    rows = [{"prompt": "Say why.", "id": "why/1"}, {"prompt": "Name a colour.", "question_id": 7}, {"prompt": "Go."}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = {"prompts": prompts, "samples": None, "max-new-tokens": 4}
    chosen = f'[{BASELINES}, {{"label": "a"}}]'
    assert main(["eval", *options(lab, **few, methods=chosen, output=tmp_path / "run")]) == 0
    assert main(["record", *options(lab, **few, output=tmp_path / "trees")]) == 0
    expected = {("own/0/0", "why/1"), ("own/1/0", "7"), ("own/2/0", None)}
    for file, name in ((tmp_path / "run" / "steps.parquet", "prompt"), (tmp_path / "trees" / TREES, "prompt_id")):
        rows = pq.read_table(file, columns=[name, "source_id"]).to_pylist()
        assert {(row[name], row["source_id"]) for row in rows} == expected
    positions = read_trees(tmp_path / "trees" / TREES).positions
    assert {(position.prompt_id, position.source_id) for position in positions} == expected


@pytest.mark.parametrize("name", ["demo", "decode", "ladder"])
def test_every_lab_configuration_that_decodes_is_checked_as_it_stands(name, capsys):
    assert main(["check", "--config", f"lab/{name}"]) == 0
    assert "everything fits" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), [("predictor", "predictor"), ("drafter", "drafter")])
def test_every_lab_configuration_that_trains_runs_as_it_stands(command, name, tmp_path):
    assert train([command, "--config", f"lab/{name}", "--max-steps", "1", "--output", str(tmp_path / "out")]) == 0


def test_every_key_of_every_subcommand_is_read(lab, tmp_path, monkeypatch, capsys):
    """Over a few small runs; the path of a data folder and of a head's own keys included."""
    reads = watch_reads(monkeypatch)
    few = {"max-new-tokens": 4, "samples": 1, "traces": lab.root / "traces"}
    named = {"prompts": None, "datasets": "more", "data-dir": lab.root}
    (lab.root / "more.jsonl").write_text(lab.prompts.read_text())
    chosen = f'[{BASELINES}, {{"label": "a"}}]'
    assert main(["check", *options(lab, **few, **named, threads=None, methods=chosen)]) == 0
    assert main(["check", *options(lab, **few, threads=None, footprints="token", **{"batch-size": "1,2"})]) == 0
    for number, footprints in enumerate(("predictor", "token")):
        values = few | (named if number else {}) | {"footprints": footprints}
        assert main(["generate", *options(lab, **values)]) == 0
        run = {"methods": chosen, "output": tmp_path / f"run{number}"}
        assert main(["eval", *options(lab, **values, **run)]) == 0
        assert main(["record", *options(lab, **values, output=tmp_path / f"trees{number}")]) == 0
    words = ["--trees", str(tmp_path / "trees0"), "--traces", str(lab.root / "traces"), "--gamma", "2"]
    assert main(["replay", *words, "--output", str(tmp_path / "replayed")]) == 0
    assert main(["report", str(tmp_path / "run0"), "--output", str(tmp_path / "report")]) == 0
    for subcommand in SUBCOMMANDS:
        assert_all_read(SUBCOMMANDS, subcommand.name, reads)
