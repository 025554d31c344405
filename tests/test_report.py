"""Laws of the report: complete, self-contained, escaped, and right about means.

The fixture: two data sets at two temperatures, five methods, one of them without times (oracle footprints).
"""

import csv
import html
import html.parser
import json
import re
from pathlib import Path

import pytest

from ecospec.errors import InputError
from ecospec.inference.report.document import markdown_table, read_runs, render_html, write_report
from ecospec.inference.report.numbers import ReportRow, by_setting, name_methods, pool_methods
from ecospec.inference.report.tables import csv_text
from ecospec.report.svg import nice_axis

LAYERS = 8
TIMES = ("t_draft", "t_predict", "t_select", "t_verify", "t_accept", "t_other")
# label, drafter, selection, footprints, alpha, active experts, verify ms
METHODS = (
    ("plain", "none", None, None, 1.0, 8.0, 41.0),
    ("EAGLE-3", "eagle3", "confidence", None, 2.41, 23.7, 63.0),
    ("EcoSpec", "eagle3", "marginal", "predictor", 2.32, 20.5, 54.0),
    ("global", "eagle3", "global", "predictor", 2.21, 20.9, 55.5),
    ("random", "eagle3", "random", None, 1.48, 24.6, 64.5),
    ("EcoSpec, oracle", "eagle3", "marginal", "oracle", 2.36, 19.8, None),
)
WEIGHTS = {"lab/maths": (1280, 1.0), "lab/code": (960, 1.15)}
LADDER = {"predictor": {"overlap": 0.82}, "token": {"overlap": 0.61}, "frequency": {"overlap": 0.34}}
NOTICE = "Speed is measured in fp32 on an unwidened model: the speed columns make no claim."
PROVENANCE = {
    "command": ["ecospec-decode", "eval", "--config", "lab/demo", "--output", "demo out"],
    "git_revision": None,
    "packages": {"ecospec": "0.1.0", "torch": "2.13.0"},
    "python": "3.12.3",
    "machine": {"processor": "Example CPU", "cores": 2, "system": "Linux", "caches": {"L2": "2 MiB", "L3": "32 MiB"}},
    "threads": 2,
}


def make_run(method: tuple, dataset: str, temperature: float, gamma: int | None = 4) -> dict:
    """A run as `ecospec-decode eval` writes it, with numbers that hang together."""
    label, drafter, selection, footprints, alpha, active, verify = method
    tokens, scale = WEIGHTS[dataset]
    alpha = 1.0 if label == "plain" else alpha * scale - 0.2 * temperature
    drafts, timed = label != "plain", verify is not None
    predict, select = (1.9, 0.6) if footprints == "predictor" else (0.0, 0.0)
    parts = [6.0, predict, select, verify or 0.0, 1.1, 0.8] if drafts else [0.0, 0.0, 0.0, verify, 0.0, 0.7]
    step, plain = sum(parts) / 1000, 0.0417
    return {
        "label": label,
        "drafter": drafter,
        "selection": selection,
        "footprints": footprints,
        "predictor": "lab" if footprints == "predictor" else None,
        "dataset": dataset,
        "seen": False,
        "temperature": temperature,
        "gamma": gamma if drafts else None,
        "epsilon": 1e-6 if selection in ("marginal", "global") else None,
        "tree": {"steps": 3, "topk": 2} if drafts else None,
        "batch_size": 1,
        "dtype": "float32",
        "expert_mib": None,
        "threads": 2,
        "num_experts": 64,
        "top_k": 8,
        "moe_layers": list(range(LAYERS)),
        "samples": 20,
        "tokens": tokens,
        "steps": tokens / alpha,
        "decode_seconds": tokens / alpha * step if timed else None,
        "tokens_per_second": alpha / step if timed else None,
        "speedup_vs_ar": alpha / step * plain if timed else None,
        "interval": [alpha / step * plain * 0.95, alpha / step * plain * 1.05] if timed else None,
        "acceptance_length": alpha,
        "acceptance_by_depth": [share * (alpha - 1) for share in (0.5, 0.3, 0.2)] if drafts else [],
        "active_experts": active * scale if drafts else 8.0,
        "active_experts_by_layer": [
            8.0 if not drafts else active * scale * (0.85 + 0.3 * layer / (LAYERS - 1)) for layer in range(LAYERS)
        ],
        "verified_tokens_per_step": 4.0 if drafts else 1.0,
        **{key: value / 1000 if timed else None for key, value in zip(TIMES, parts, strict=True)},
        "t_step": step if timed else None,
        "lossless": "exact" if drafts else "reference",
    }


def make_runs() -> list[dict]:
    return [make_run(method, dataset, t) for t in (0.0, 1.0) for dataset in WEIGHTS for method in METHODS]


def write_run_folder(folder: Path, runs: list[dict], **others: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"runs": runs, **others}))
    (folder / "provenance.json").write_text(json.dumps(PROVENANCE))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run_folder(tmp_path / "run", make_runs(), ladder=LADDER, notice=NOTICE)


def as_rows(runs: list[dict]) -> list[ReportRow]:
    """The runs as reports read them; a run may say itself which notice its folder has."""
    return [ReportRow.from_json(run, run_folder="run", notice=run.get("notice"), raw=run) for run in runs]


class Page(html.parser.HTMLParser):
    """Checks that tags balance, and collects table rows, attributes and text."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.rows, self.attributes, self.tags = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and "tr" in self.open:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open) and "tr" in self.open:
            self.rows[-1][-1] += data


def rows_titled(page: Page, title: str) -> list[list[str]]:
    return [row for row in page.rows if row[0] == title]


def rendered(runs: list[dict]) -> str:
    return render_html(as_rows(runs), {"run": PROVENANCE}, LADDER)


def test_three_files_are_written(folder: Path, tmp_path: Path) -> None:
    paths = write_report([folder], tmp_path / "out")
    assert [path.name for path in paths] == ["report.html", "report.md", "report.csv"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.csv", "report.html", "report.md"]


def test_the_page_refers_to_no_other_file_or_host(folder: Path, tmp_path: Path) -> None:
    text = write_report([folder], tmp_path)[0].read_text()
    assert not re.search(r"https?:|//\w|@import|url\(|\bimport\b|fetch\(", text)
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "use"} & set(page.tags)
    assert not {"src", "href", "xlink:href", "srcset", "data", "action"} & {name for name, _ in page.attributes}


def test_the_page_parses_and_every_run_appears_in_it() -> None:
    runs = make_runs()
    page = Page(rendered(runs))
    for label, *_ in METHODS:
        row_count = sum(run["label"] == label for run in runs)
        pooled_and_times = 2 + 2  # a pooled row and a row of step times for each temperature
        assert len([row for row in page.rows if re.split(", γ", row[0])[0] == label]) == row_count + pooled_and_times
    for run in runs:
        assert any(row[2:4] == [f"{run['acceptance_length']:.2f}", f"{run['active_experts']:.1f}"]
                   for row in rows_titled(page, run["label"]))  # fmt: skip


def test_every_drawing_is_named_and_its_marks_lie_inside_it() -> None:
    text = rendered(make_runs())
    drawings = re.findall(r'<svg viewBox="0 0 400 (\d+)" role="img" aria-label="([^"]+)">(.*?)</svg>', text)
    assert len(drawings) == 4 * 2 + 1  # four figures at two temperatures, and the ladder
    places = [tuple(map(float, place)) for _, _, inside in drawings
              for place in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", inside)]  # fmt: skip
    assert len(places) > 100
    assert all(40 <= x <= 400 and 0 <= y <= 280 for x, y in places)
    for _, _, inside in drawings:
        widths = re.findall(r'<rect x="([-\d.]+)" y="[\d.]+" width="([-\d.]+)"', inside)
        assert all(float(x) >= 0 and float(w) >= 0 and float(x) + float(w) <= 400.2 for x, w in widths)


def test_pooled_numbers_are_totals_over_totals() -> None:
    pooled = pool_methods(name_methods(as_rows(make_runs())))
    eco = next(row for row in pooled if row.label == "EcoSpec" and row.temperature == 0.0)
    alphas = (2.32, 2.32 * 1.15)
    steps = (1280 / alphas[0], 960 / alphas[1])
    step_seconds = (6.0 + 1.9 + 0.6 + 54.0 + 1.1 + 0.8) / 1000
    assert eco["tokens"] == 2240
    assert eco["samples"] == 40
    assert eco["acceptance_length"] == pytest.approx(2240 / sum(steps))
    assert eco["active_experts"] == pytest.approx((20.5 * steps[0] + 20.5 * 1.15 * steps[1]) / sum(steps))
    assert eco["active_experts_by_layer"][0] == pytest.approx(0.85 * eco["active_experts"])
    assert eco["tokens_per_second"] == pytest.approx(2240 / (sum(steps) * step_seconds))
    assert eco["speedup_vs_ar"] == pytest.approx((2240 / (sum(steps) * step_seconds)) / (1 / 0.0417))
    assert eco["t_verify"] == pytest.approx(0.054)
    assert eco["lossless"] == "exact"


def test_a_pooled_speedup_of_unequal_texts_is_the_ratio_of_two_throughputs() -> None:
    fast = [make_run(METHODS[1], dataset, 0.0) for dataset in WEIGHTS]
    plain = [make_run(METHODS[0], dataset, 0.0) for dataset in WEIGHTS]
    plain[0]["decode_seconds"], plain[0]["tokens_per_second"] = 10.0, 10.0
    plain[1]["decode_seconds"], plain[1]["tokens_per_second"] = 5.0, 60.0
    pooled = {row.label: row for row in pool_methods(name_methods(as_rows(fast + plain)))}
    assert pooled["plain"]["tokens_per_second"] == pytest.approx(400 / 15)
    assert pooled["plain"]["speedup_vs_ar"] == pytest.approx(1.0)
    assert pooled["EAGLE-3"]["speedup_vs_ar"] == pytest.approx(pooled["EAGLE-3"]["tokens_per_second"] / (400 / 15))


def test_without_plain_decoding_there_is_no_pooled_speedup() -> None:
    runs = [run for run in make_runs() if run["label"] != "plain"]
    assert all(row["speedup_vs_ar"] is None for row in pool_methods(name_methods(as_rows(runs))))


def test_prompts_seen_in_training_are_shown_but_not_pooled() -> None:
    runs = [run | {"seen": run["dataset"] == "lab/code"} for run in make_runs()]
    pooled = pool_methods(name_methods(as_rows(runs)))
    assert {row.datasets for row in pooled} == {("lab/maths",)}
    assert len(rows_titled(Page(rendered(runs)), "EcoSpec (seen in training)")) == 2


def test_different_budgets_settings_and_predictors_are_never_pooled_together() -> None:
    budgets = [make_run(METHODS[2], dataset, 0.0, gamma) for dataset in WEIGHTS for gamma in (3, 4, 5)]
    assert sorted(row.gamma for row in pool_methods(name_methods(as_rows(budgets)))) == [3, 4, 5]
    predictors = [make_run(METHODS[2], d, 0.0) | {"predictor": name} for d in WEIGHTS for name in ("lab", "demo")]
    names = [row.name for row in pool_methods(name_methods(as_rows(predictors)))]
    assert names == ["EcoSpec (predictor lab)", "EcoSpec (predictor demo)"]
    batches = [make_run(METHODS[2], dataset, 0.0) | {"batch_size": b} for dataset in WEIGHTS for b in (1, 2)]
    assert len(by_setting(name_methods(as_rows(batches)))) == 2


def test_a_row_pooled_over_fewer_data_sets_says_so() -> None:
    runs = [run for run in make_runs() if not (run["label"] == "random" and run["dataset"] == "lab/code")]
    assert "random (1 of 2 sets)" in markdown_table(as_rows(runs))
    assert "EcoSpec (" not in markdown_table(as_rows(runs))


def test_null_fields_are_dashes() -> None:
    page = Page(rendered(make_runs()))
    oracle = rows_titled(page, "EcoSpec, oracle")
    assert len(oracle) == 6
    assert all(row[5:9] == ["–"] * 4 for row in oracle)  # tokens/s, speedup, interval, step
    assert all(row[1] == "–" for row in rows_titled(page, "plain")[:6])  # gamma
    assert "None" not in rendered(make_runs())
    assert "nan" not in rendered(make_runs())


def test_plain_decoding_alone_makes_a_report() -> None:
    page = Page(rendered([make_run(METHODS[0], "lab/maths", 0.0)]))
    assert len(rows_titled(page, "plain")) == 2


def test_a_run_without_steps_makes_a_report() -> None:
    run = make_run(METHODS[2], "lab/maths", 0.0)
    run |= {"steps": 0, "acceptance_length": None, "active_experts": None, "tokens": 20}
    assert pool_methods(name_methods(as_rows([run])))[0]["acceptance_length"] is None
    Page(rendered([run]))


def test_without_unseen_prompts_there_is_no_pooled_row_and_no_plot() -> None:
    text = rendered([run | {"seen": True} for run in make_runs()])
    assert "All data sets" not in text
    assert "Where a step" not in text
    assert len(rows_titled(Page(text), "EcoSpec (seen in training)")) == 4


def test_each_budget_has_its_own_panel_with_plain_decoding_in_it() -> None:
    runs = [make_run(METHODS[0], "lab/maths", 0.0), *(make_run(METHODS[1], "lab/maths", 0.0, g) for g in (3, 5))]
    panels = re.findall(r'aria-label="Where a step&#x27;s time goes: ([^"]+)">(.*?)</svg>', rendered(runs))
    assert [title for title, _ in panels] == ["T = 0, batch size 1, γ = 3", "T = 0, batch size 1, γ = 5"]
    assert all(">plain<" in inside and ">EAGLE-3<" in inside for _, inside in panels)


def test_text_from_runs_is_escaped_everywhere() -> None:
    evil = '<b>"bold" | & co</b>'
    runs = [run | {"label": evil if run["label"] == "EcoSpec" else run["label"]} for run in make_runs()]
    runs = [run | {"dataset": f"{run['dataset']}<i>", "notice": "<u>"} for run in runs]
    page = Page(rendered(runs))
    assert not {"b", "u"} & set(page.tags)
    assert len(rows_titled(page, evil)) == 6
    table = markdown_table(as_rows(runs))
    assert "<b>" not in table
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines() if line.startswith("|")}
    assert len(cells) == 1


def test_csv_gives_back_every_run(folder: Path) -> None:
    rows = read_runs([folder])
    runs = [{"run_folder": "run", "notice": NOTICE, **run} for run in make_runs()]
    texts = {key for run in runs for key, value in run.items() if isinstance(value, str)}
    back = [
        {key: None if cell == "" else cell if key in texts else json.loads(cell) for key, cell in row.items()}
        for row in csv.DictReader(csv_text(rows).splitlines())
    ]
    assert back == [{key: run.get(key) for key in back[0]} for run in runs]


def test_markdown_has_a_row_for_each_run_and_each_pooled_method() -> None:
    lines = markdown_table(as_rows(make_runs())).splitlines()
    assert sum(line.startswith("| lab/") for line in lines) == len(make_runs())
    assert sum(line.startswith("| All data sets (2)") for line in lines) == 2 * len(METHODS)


def test_only_ecospec_rows_are_highlighted() -> None:
    highlighted = re.findall(r'<tr class="ours"><th scope="row">([^<]+)', rendered(make_runs()))
    assert {name.split(",")[0] for name in highlighted} == {"EcoSpec"}


def test_the_notice_is_shown_as_it_is_and_marks_the_speed_columns(folder: Path, tmp_path: Path) -> None:
    paths = write_report([folder], tmp_path)
    assert NOTICE in paths[0].read_text()
    assert NOTICE in paths[1].read_text()
    assert "speedup<sup>†</sup>" in paths[0].read_text()
    assert "†" not in rendered(make_runs())


def test_command_machine_and_ladder_are_in_page_and_markdown(folder: Path, tmp_path: Path) -> None:
    for path in write_report([folder], tmp_path)[:2]:
        text = html.unescape(path.read_text())
        assert "ecospec-decode eval --config lab/demo --output 'demo out'" in text
        assert "82.0 %" in text
        assert "34.0 %" in text
    assert "Example CPU" in (tmp_path / "report.html").read_text()
    assert "torch 2.13.0" in (tmp_path / "report.html").read_text()


def test_differences_are_counted_in_the_table_and_listed_below() -> None:
    differences = [{"sample_id": "lab/maths/3/0", "position": 17, "gap": 0.001}]
    runs = [make_run(METHODS[1], dataset, 0.0) | {"lossless": differences} for dataset in WEIGHTS]
    text = rendered(runs)
    assert "2 differences" in text  # pooled
    assert text.count("1 difference<") == 2
    assert html.unescape(text).count('"sample_id": "lab/maths/3/0"') == 2


def test_runs_of_several_folders_stay_apart(tmp_path: Path) -> None:
    first = write_run_folder(tmp_path / "a" / "run", make_runs(), ladder=LADDER)
    second = write_run_folder(tmp_path / "b" / "run", make_runs(), ladder=LADDER)
    runs = read_runs([first, second])
    assert len(runs) == 2 * len(make_runs())
    assert {run.run_folder for run in runs} == {str(first), str(second)}
    Page(write_report([first, second], tmp_path / "out")[0].read_text())


def test_a_folder_that_is_no_run_folder_is_refused_by_name(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(InputError, match=f"{wrong.name}: no run folder"):
            read_runs([folder, wrong])
    with pytest.raises(InputError, match="each once"):
        read_runs([folder, folder])


@pytest.mark.parametrize("content", ["[]", "{}", '{"runs": []}', "no json"])
def test_results_that_are_no_results_are_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InputError, match=r"results\.json"):
        read_runs([tmp_path])


def test_a_run_that_lacks_a_key_is_refused_by_number_and_key(tmp_path: Path) -> None:
    broken = make_run(METHODS[1], "lab/code", 0.0) | {"tokens": None}
    folder = write_run_folder(tmp_path / "run", [make_run(METHODS[0], "lab/code", 0.0), broken])
    with pytest.raises(InputError, match="run 1 lacks tokens"):
        read_runs([folder])


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [1.0, 2.41], [8.0, 30.5], [0.001, 0.002], [3, 90_000]])
@pytest.mark.parametrize("from_zero", [True, False])
def test_an_axis_has_few_round_ticks_and_holds_its_values(values: list[float], from_zero: bool) -> None:
    axis = nice_axis("x", values, from_zero)
    assert axis.low <= min(values) <= max(values) < axis.high
    assert 3 <= len(axis.ticks) <= 9
    assert all(axis.low - 1e-9 <= tick <= axis.high + 1e-9 for tick in axis.ticks)
