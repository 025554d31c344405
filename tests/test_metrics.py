"""Laws of the table of metrics: all that is reported of a run follows from it, and is what it was before it came."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ecospec.inference.evaluation.results import summarise, write_steps
from ecospec.inference.metrics.metric import REPLAY, RESULTS, Metric
from ecospec.inference.metrics.phases import OTHER, PHASES
from ecospec.inference.metrics.rows import RunRow
from ecospec.inference.metrics.table import METRICS, ORDERS, metrics_of
from ecospec.inference.replay.results import replay
from ecospec.inference.replay.table import replay_table
from ecospec.inference.report.document import glossary, read_runs, write_report
from ecospec.inference.report.numbers import name_methods, pool_methods
from tests import example_runs as example

OVERLAPS = {("predictor", name): overlap for name, overlap in example.OVERLAPS.items()}


def rows() -> list[RunRow]:
    """The example's runs."""
    outcomes = example.outcomes()
    plans = list({outcome.plan.label: outcome.plan for outcome in outcomes}.values())
    known = (plans, outcomes, example.differences(), example.SEEN, OVERLAPS)
    return summarise(example.CONFIG, example.TARGET, *known)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder of the example with its reports."""
    results = {"runs": [row.to_json(RESULTS) for row in rows()], "ladder": example.LADDER, "notice": example.NOTICE}
    (tmp_path / RESULTS).write_text(json.dumps(results))
    (tmp_path / "provenance.json").write_text(json.dumps(example.PROVENANCE))
    write_steps(tmp_path / "steps.parquet", example.outcomes())
    write_report([tmp_path], tmp_path, "example")
    return tmp_path


@pytest.fixture
def added() -> Iterator[tuple[Metric, Metric]]:
    """Two more metrics: one of emitted tokens, one that steps measure."""
    of_tokens = Metric(
        "steps_without_drafts",
        "steps",
        lambda emitted_R: float((emitted_R == 1).mean()),
        ("emitted_R",),
        heading="alone",
        terms={"alone": "share of steps that emit the bonus token alone"},
        replay_heading="steps alone",
    )
    of_steps = Metric("places", "steps", step=lambda step: len(step.rows), heading="texts", terms={"texts": "a pass"})
    METRICS.extend([of_tokens, of_steps])
    yield of_tokens, of_steps
    METRICS.remove(of_tokens)
    METRICS.remove(of_steps)


def stored(name: str) -> str:
    return (example.FOLDER / name).read_text()


def without_style(page: str) -> str:
    return re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)


def test_the_rows_have_the_keys_the_order_and_the_digits_that_they_had() -> None:
    found = [row.to_json(RESULTS) for row in rows()]
    assert json.dumps(found) == json.dumps([run | {"threads": found[0]["threads"]} for run in _stored_runs(RESULTS)])


def test_replayed_rows_have_the_keys_the_order_and_the_digits_that_they_had() -> None:
    runs = replay(example.trees(), example.combinations())
    assert json.dumps([run.to_json(REPLAY) for run in runs]) == json.dumps(_stored_runs(REPLAY))
    assert replay_table(runs) + "\n" == stored("replay.md")


def test_the_steps_file_is_what_it_was(folder: Path) -> None:
    table, known = pq.read_table(folder / "steps.parquet"), json.loads(stored("steps.json"))
    assert table.schema.field("source_id").type == "string"
    table = table.drop_columns("source_id")  # which came later
    assert [[column.name, str(column.type)] for column in table.schema] == known["schema"]
    assert table.slice(0, 40).to_pylist()[::2] == known["rows"]


def test_each_step_names_the_prompt_as_its_file_does(tmp_path: Path) -> None:
    outcome, other = example.outcomes()[0], example.outcomes()[1]
    named = replace(outcome, prompts=[replace(prompt, source_id="HumanEval/7") for prompt in outcome.prompts])
    write_steps(tmp_path / "steps.parquet", [named, other])
    steps = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert {(step["label"], step["source_id"]) for step in steps} == {("plain", "HumanEval/7"), ("stock", None)}


def test_reports_are_what_they_were_but_for_the_style_sheet(tmp_path: Path) -> None:
    paths = write_report([example.FOLDER], tmp_path, "example")
    for path in paths:
        assert without_style(path.read_text()) == without_style(stored(path.name)), path.name


def _stored_runs(file: str) -> list[dict]:
    return json.loads(stored(file))["runs"]


def test_a_row_read_is_the_row_written() -> None:
    for row in rows():
        written = row.to_json(RESULTS)
        assert RunRow.from_json(written).to_json(RESULTS) == written


def test_a_folder_of_another_version_is_read_for_what_it_has(tmp_path: Path) -> None:
    runs = _stored_runs(RESULTS)
    kept = ("label", "dataset", "temperature", "batch_size", "tokens", "steps", "acceptance_length", "lossless")
    old = [{key: run[key] for key in kept} | {"luck": 7} for run in runs]
    (tmp_path / RESULTS).write_text(json.dumps({"runs": old}))
    (tmp_path / "provenance.json").write_text(stored("provenance.json"))
    page, markdown, table = (path.read_text() for path in write_report([tmp_path], tmp_path / "out"))
    assert "1.00" in page
    assert "| maths | EAGLE-3 | – | 2.67 | – |" in markdown
    assert table.splitlines()[0] == ",".join(["run_folder", "notice", *kept, "luck"])


def test_a_column_is_one_entry(added: tuple[Metric, Metric], folder: Path) -> None:
    of_tokens, of_steps = added
    runs = rows()
    steps = pq.read_table(folder / "steps.parquet").to_pylist()
    assert {step["places"] for step in steps} == {1, 2}
    for run in runs:
        alone = None if run.dataset == "short" else _alone(steps, run)
        assert run.to_json(RESULTS)[of_tokens.key] == alone
    replayed = replay(example.trees(), example.combinations())[0].to_json(REPLAY)
    assert replayed[of_tokens.key] == replayed["emitted_histogram"][0] / replayed["steps"]
    assert replayed[of_steps.key] is None, "replay has no texts side by side"
    pooled = pool_methods(name_methods(read_runs([folder])))
    assert {row[of_steps.key] for row in pooled if row.batch_size == 1} == {1.0}
    assert all(0 <= row[of_tokens.key] <= 1 for row in pooled if row.batch_size == 1)
    assert {"alone", "texts"} <= set(glossary())
    page, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert page.count(">alone</th>") == page.count(">𝓔</th>") == 2
    assert "| verified | alone | texts | tokens/s |" in markdown
    header, *lines = csv.reader((folder / "report.csv").read_text().splitlines())
    assert {of_tokens.key, of_steps.key} <= set(header)
    assert len(lines) == len(runs)
    assert "| steps alone |" in replay_table(replay(example.trees(), example.combinations()))


def _alone(steps: list[dict], run: RunRow) -> float:
    where = ("label", "dataset", "temperature", "batch_size")
    emitted = [step["emitted"] for step in steps if all(step[name] == getattr(run, name) for name in where)]
    return emitted.count(1) / len(emitted)


def test_a_new_column_is_not_shown_where_no_run_has_it(added: tuple[Metric, Metric], tmp_path: Path) -> None:
    page, markdown, table = (path.read_text() for path in write_report([example.FOLDER], tmp_path))
    assert ">alone</th>" not in page
    assert "| alone |" not in markdown
    assert table == stored("report.csv").replace("\nexample,", "\nexample_run,")


def test_every_metric_has_one_key_and_a_place_in_its_files() -> None:
    keys = [metric.key for metric in METRICS]
    assert len(set(keys)) == len(keys)
    assert {key for file in ORDERS for key in (metric.key for metric in metrics_of(file))} == set(keys)
    with pytest.raises(ValueError, match="tuple"):
        METRICS.append(Metric("lost", "nowhere"))
        try:
            metrics_of(RESULTS)
        finally:
            METRICS.pop()


def test_what_was_not_measured_is_null_and_steps_are_none() -> None:
    for row in (row for row in rows() if row.dataset == "short"):
        known = {key for key, value in row.to_json(RESULTS).items() if value is not None}
        assert row["steps"] == 0
        assert known & {metric.key for metric in METRICS} - {"overlap"} == {
            "samples", "tokens", "decode_seconds", "prefill_seconds", "steps", "lossless",
        }  # fmt: skip


def test_phases_add_up_and_every_class_of_the_page_has_a_rule(folder: Path) -> None:
    for row in (row for row in rows() if row["t_step"] is not None):
        assert sum(row[phase.key] for phase in (*PHASES, OTHER)) == pytest.approx(row["t_step"])
    style, body = re.fullmatch(r".*<style>(.*)</style>(.*)", (folder / "report.html").read_text(), re.DOTALL).groups()
    drawn = {name for names in re.findall(r'<(?:rect|path)[^>]* class="([^"]+)"', body) for name in names.split()}
    assert {phase.key for phase in PHASES} <= drawn
    assert not [name for name in drawn if not re.search(rf"\.{name}\b[^{{]*{{[^}}]*fill:", style)]


def test_only_one_place_says_which_method_is_ours() -> None:
    assert {row.label for row in rows() if row.is_ecospec} == {"EcoSpec", "EcoSpec, small"}


def test_the_step_metrics_are_means_of_what_the_steps_file_has(folder: Path) -> None:
    steps = pq.read_table(folder / "steps.parquet").to_pylist()
    for row in (row for row in rows() if row.batch_size == 1 and row["steps"]):
        mine = [s for s in steps if (s["label"], s["dataset"], s["batch_size"]) == (row.label, row.dataset, 1)]
        assert row["active_experts"] == np.mean([step["active_experts"] for step in mine])
        if row["t_step"] is not None:
            assert row["t_verify"] == np.mean([step["t_verify"] for step in mine])
