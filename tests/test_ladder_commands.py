"""The ladder by command: train every kind, measure them side by side, decode with them, leave a data set out."""

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ecospec.data.traces import read_traces
from ecospec.inference.cli import main as decode
from ecospec.predictor.cli import SUBCOMMANDS
from ecospec.predictor.cli import main as train
from ecospec.predictor.evaluation.generalisation import SHARES, part_of, without
from ecospec.predictor.kinds import trained_kinds
from ecospec.predictor.kinds.loading import kind_of
from ecospec.tracing.cli import main as trace
from ecospec.tracing.target.names import own_part
from tests.config_reads import assert_all_read, watch_reads
from tests.test_eval import save_head

KINDS = [kind.name for kind in trained_kinds()]
SMALL = {
    "predictor": ["--backbone.hidden_size", "32", "--backbone.num_layers", "1"],
    "linear": [],
    "draft_mlp": ["--mlp.hidden_size", "32", "--mlp.num_blocks", "1"],
}
SHORT = ["--max-steps", "15", "--tokens-per-batch", "128", "--threads", "1"]
ROUNDS = ("seen", "unseen", "token_seen", "token_unseen")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> SimpleNamespace:
    """A tiny target, traces of two data sets, two draft heads, and one trained folder of each kind."""
    root = tmp_path_factory.mktemp("ladder")
    for name in ("words", "verbs"):
        rows = [json.dumps({"prompt": f"{name} {i}"}) for i in range(12)]
        (root / f"{name}.jsonl").write_text("\n".join(rows))
    prompts = ["--data-dir", str(root), "--datasets", "words,verbs"]
    target = ["--target", str(tiny_target)]
    assert trace(["run", *target, *prompts, "--max-new-tokens", "10", "--output", str(root / "traces")]) == 0
    for name in ("head", "other"):
        (root / name).mkdir()
        save_head(root / name, seed=len(name))
    traces, drafter = [*target, "--traces", str(root / "traces")], ["--drafter", str(root / "head")]
    own = SMALL | {"draft_mlp": [*SMALL["draft_mlp"], *drafter]}
    for kind in KINDS:
        words = ["predictor", *traces, *SHORT, *own[kind], "--loggers", "csv"]
        assert train([*words, "--kind", kind, "--output", str(root / kind)]) == 0
    return SimpleNamespace(root=root, target=target, traces=traces, drafter=drafter, prompts=[*target, *prompts])


def numbers(path: Path) -> dict:
    return json.loads((path / "metrics.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_exported_as_itself_with_the_same_numbers(made, kind):
    metrics = numbers(made.root / kind)
    assert kind_of(made.root / kind).name == metrics["kind"] == kind
    assert metrics.keys() == numbers(made.root / "predictor").keys()
    assert 0 < metrics["overlap"] < 1 and metrics["seconds_per_step"] > 0


def test_measured_together_all_kinds_have_the_numbers_of_their_own_export(made, tmp_path, capsys):
    rungs = f"{made.root / 'linear'},{made.root / 'draft_mlp'}"
    words = ["evaluate", *made.traces, *made.drafter, "--predictor", str(made.root / "predictor"), "--rungs", rungs]
    assert train([*words, "--output", str(tmp_path / "out")]) == 0
    found = numbers(tmp_path / "out")
    together = {"predictor": found, **{kind: found["ladder"][kind] for kind in ("linear", "draft_mlp")}}
    for kind, metrics in together.items():
        assert metrics["overlap"] == pytest.approx(numbers(made.root / kind)["overlap"], abs=1e-6)
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert printed == ["predictor", "frequency", "last_step", "token", "linear", "draft_mlp"]


@pytest.mark.parametrize("subcommand", ["predictor", "generalise"])
def test_training_reads_every_key_that_it_knows(made, subcommand, tmp_path, monkeypatch):
    reads = watch_reads(monkeypatch)
    for kind, own in {**SMALL, "draft_mlp": [*SMALL["draft_mlp"], *made.drafter]}.items():
        words = [subcommand, *made.traces, *own, "--kind", kind, "--max-steps", "2", "--output", str(tmp_path / kind)]
        assert train(words) == 0
    assert_all_read(SUBCOMMANDS, subcommand, reads)


def test_evaluation_reads_every_key_that_it_knows(made, tmp_path, monkeypatch):
    reads = watch_reads(monkeypatch)
    words = [
        *made.traces,
        *made.drafter,
        "--predictor",
        str(made.root / "draft_mlp"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert train(["evaluate", *words]) == 0
    assert_all_read(SUBCOMMANDS, "evaluate", reads)


def test_two_rungs_of_a_kind_are_refused(made, capsys):
    words = ["evaluate", *made.traces, "--predictor", str(made.root / "linear"), "--rungs", str(made.root / "linear")]
    assert train(words) == 2
    assert "a linear, of which there is another one" in capsys.readouterr().err


def test_a_draft_head_that_no_measured_model_reads_is_refused(made, capsys):
    words = ["evaluate", *made.traces, *made.drafter, "--predictor", str(made.root / "linear")]
    assert train(words) == 2
    assert "--drafter.path: no model that is measured reads it" in capsys.readouterr().err


def test_a_draft_mlp_takes_the_labs_head_on_the_lab_alone(made, tmp_path, capsys):
    words = ["predictor", *made.traces, *SHORT, "--kind", "draft_mlp", "--output", str(tmp_path / "out")]
    assert train(words) == 2
    assert "--drafter.path: not given" in capsys.readouterr().err
    assert own_part(None, "lab") == "lab" and own_part("mine", "lab") == "mine"


def test_a_draft_mlp_is_measured_and_decodes_only_with_its_own_head(made, tmp_path, capsys):
    other = ["--drafter", str(made.root / "other")]
    assert train(["evaluate", *made.traces, *other, "--predictor", str(made.root / "draft_mlp")]) == 2
    assert "another draft head" in capsys.readouterr().err
    words = [*made.prompts, *other, "--predictor", str(made.root / "draft_mlp"), "--footprints", "draft_mlp"]
    for command in (["generate"], ["record", "--output", str(tmp_path / "trees")]):
        assert decode([*command, *words, "--samples", "1", "--max-new-tokens", "4"]) == 2
        assert "another draft head" in capsys.readouterr().err


def test_every_kind_decodes_plain_decodings_text(made, tmp_path):
    (tmp_path / "eval.yaml").write_text(
        "methods:\n- {label: plain, drafter: none}\n"
        + "".join(
            f"- {{label: {kind}, predictor: {made.root / kind}, selection: {{footprints: {kind}}}}}\n" for kind in KINDS
        )
    )
    words = ["--drafter", str(made.root / "head"), "--samples", "2", "--max-new-tokens", "8"]
    words += ["--target.dtype", "float32", "--temperature", "0.0,1.0", "--output", str(tmp_path / "run")]
    assert decode(["eval", "--config", str(tmp_path / "eval.yaml"), *made.prompts, *words]) == 0
    runs = json.loads((tmp_path / "run" / "results.json").read_text())["runs"]
    ours = [run for run in runs if run["label"] in KINDS]
    assert {run["footprints"] for run in ours} == set(KINDS)
    assert {run["lossless"] for run in ours} == {"exact"}


def test_leaving_data_sets_out_is_measured_for_each_and_beside_a_learning_curve(made, tmp_path, capsys):
    assert train(["generalise", *made.traces, *SHORT, *SMALL["predictor"], "--output", str(tmp_path / "out")]) == 0
    metrics = numbers(tmp_path / "out")
    assert metrics["generalisation"].keys() == {"words", "verbs"}
    assert all(row.keys() == set(ROUNDS) for row in metrics["generalisation"].values())
    tokens = [point["tokens"] for point in metrics["learning_curve"]]
    assert tokens == sorted(tokens) and metrics["learning_curve"][-1]["overlap"] == metrics["overlap"]
    for name, row in metrics["generalisation"].items():
        assert row["seen"] == metrics["overlap_by_dataset"][name]
        assert row["token_seen"] >= row["token_unseen"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "words" in page and "<svg" in page and "How many traced tokens it takes" in page
    assert "left out" in capsys.readouterr().out


def test_a_left_out_data_set_has_no_sample_to_train_on_and_all_to_be_measured_on(made):
    traces = read_traces(made.root / "traces")
    held_out = {item.key for item in traces if item.split == "test"}
    for name in ("words", "verbs"):
        left = without(traces, name)
        assert {item.dataset for item in left if item.split == "train"} == {"words", "verbs"} - {name}
        assert {item.key for item in left if item.split == "test"} == held_out


@pytest.mark.parametrize("seed", range(3))
def test_each_part_of_the_samples_lies_in_the_larger_ones(made, seed):
    traces = read_traces(made.root / "traces")
    parts = [{item.key for item in part_of(traces, share, seed) if item.split == "train"} for share in SHARES]
    assert all(small < large for small, large in itertools.pairwise(parts))
    assert parts[-1] == {item.key for item in traces if item.split == "train"}
    for share in SHARES:
        assert sum(item.split == "test" for item in part_of(traces, share, seed)) == len(traces) - len(parts[-1])


@pytest.mark.parametrize(
    "changes", [{"num_experts": 6}, {"num_layers": 2}, {"num_experts_per_tok": 1}, {"target_config_sha256": "other"}]
)
def test_a_predictor_of_another_target_is_not_measured(made, tmp_path, changes, capsys):
    folder = shutil.copytree(made.root / "linear", tmp_path / "linear")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    assert train(["evaluate", *made.traces, "--predictor", str(folder)]) == 2
    assert "another target" in (line := capsys.readouterr().err) or "this target has" in line


def test_a_single_data_set_cannot_be_left_out(made, tmp_path, capsys):
    rows = "\n".join(json.dumps({"prompt": f"noun {i}"}) for i in range(8))
    (tmp_path / "nouns.jsonl").write_text(rows)
    words = ["run", *made.target, "--prompts", str(tmp_path / "nouns.jsonl"), "--max-new-tokens", "6"]
    assert trace([*words, "--output", str(tmp_path / "traces")]) == 0
    words = ["generalise", *made.target, "--traces", str(tmp_path / "traces"), *SHORT]
    assert train([*words, "--output", str(tmp_path / "out")]) == 2
    assert "all samples are of nouns" in capsys.readouterr().err
