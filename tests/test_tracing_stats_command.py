"""`ecospec-trace stats`: its files say what the trace holds, and what is wrong is said in one line."""

import base64
import html.parser
import json
import re
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from ecospec.data.lab import shipped
from ecospec.data.prompts import split_of
from ecospec.data.traces import read_traces
from ecospec.tracing.cli import main
from ecospec.tracing.stats.command import expert_load, tally_datasets
from ecospec.tracing.stats.counts import WIDTH
from ecospec.tracing.stats.heatmap import ABSENT, EVEN, load_indices, palette, png
from ecospec.tracing.store.folder import TraceFolder
from ecospec.tracing.store.layout import encode_experts, id_dtype
from ecospec.tracing.store.manifest import Header, PromptSource, TracedTarget

LAYERS, E, K = [1, 2, 4], 8, 2  # layers 0 and 3 are dense
EVIL = "lab/<b>code"
LENGTHS = {"lab/maths": (5, 30, 12), EVIL: (9, 20)}


def trace_folder(path: Path, lengths: dict = LENGTHS, seed: int = 0, dtype: str = "float32", **changes: dict) -> Path:
    """A trace folder of random routing; `changes`: sample id → columns to replace."""
    generator = np.random.default_rng(seed)
    rows = []
    for name, counts in lengths.items():
        for row, T in enumerate(counts):
            experts = generator.random((T, len(LAYERS), E)).argsort(-1)[..., :K]
            sample = {
                "key": f"{name} {row}",
                "sample_id": f"{name}/{row}/0",
                "dataset": name,
                "turn": 0,
                "input_ids": list(range(row, row + T)),
                "prompt_len": 2,
                "experts": encode_experts(experts, E),
                "split": split_of(name, row),
            }
            rows.append(sample | changes.get(sample["sample_id"], {}))
    header = Header(
        target=TracedTarget(name="tiny", dtype=dtype, config_sha256="c0ffee"),
        engine={"name": "none", "version": "1"},
        moe_layers=LAYERS,
        num_experts=E,
        top_k=K,
        id_dtype=id_dtype(E).name,
        prompts=[PromptSource(dataset=name, samples=len(counts)) for name, counts in lengths.items()],
    )
    folder = TraceFolder(path, header)
    for first in range(0, len(rows), 2):
        folder.add(rows[first : first + 2])
    folder.finalise([row["key"] for row in rows])
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trace_folder(tmp_path_factory.mktemp("traces") / "traces", **{"lab/maths/1/0": {"split": "test"}})


@pytest.fixture(scope="module")
def results(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("results") / "stats"
    assert main(["stats", str(traces), "--output", str(output)]) == 0
    return output


def read(folder: Path, name: str = "stats.json") -> dict:
    return json.loads((folder / name).read_text())


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ecospec-trace:")]
    assert len(lines) == 1
    return lines[0]


def slow_unions(experts: list[np.ndarray], w: int) -> float:
    sizes = [
        len(set(one[t : t + w, layer].ravel()))
        for one in experts
        for t in range(len(one) - w + 1)
        for layer in range(len(LAYERS))
    ]
    return float(np.mean(sizes))


def test_every_token_of_both_splits_counts_once_by_data_set_and_over_all(traces: Path, results: Path) -> None:
    by_dataset = defaultdict(list)
    for trace in read_traces(traces):
        by_dataset[trace.dataset].append(trace.experts)
    stats = read(results)
    assert set(stats["datasets"]) == set(by_dataset) == set(LENGTHS)
    everything = [one for experts in by_dataset.values() for one in experts]
    for found, experts in [(stats["overall"], everything)] + [(stats["datasets"][n], by_dataset[n]) for n in LENGTHS]:
        assert (found["samples"], found["tokens"]) == (len(experts), sum(map(len, experts)))
        for w in range(1, WIDTH + 1):
            assert found["union"][w - 1]["mean"] == pytest.approx(slow_unions(experts, w))
    assert stats["windows"] == {"counted": 23 + 5 + 2 + 13, "one_in": 1}
    assert {trace.split for trace in read_traces(traces)} == {"train", "test"}


def test_means_lie_within_their_intervals(results: Path) -> None:
    for row in read(results)["overall"]["union"][1:] + read(results)["overall"]["reuse"]:
        low, high = row["interval"]
        assert low <= row["mean"] <= high


def test_expert_load_has_a_row_for_each_layer_of_the_model_and_zeros_in_dense_ones(traces: Path, results: Path) -> None:
    load = read(results, "expert_load.json")
    by_hand = np.zeros((5, E), int)
    for trace in read_traces(traces):
        for place, layer in enumerate(LAYERS):
            np.add.at(by_hand[layer], trace.experts[:, place].ravel(), 1)
    assert load["logical_count"] == by_hand.tolist()
    assert np.array_equal(sum(np.array(rows) for rows in load["datasets"].values()), by_hand)
    assert (load["moe_layers"], load["num_experts"], load["top_k"], load["tokens"]) == (LAYERS, E, K, 76)
    assert by_hand[LAYERS].sum(1).tolist() == [76 * K] * 3 and not by_hand[[0, 3]].any()


def test_counts_of_a_million_tokens_stay_whole_numbers() -> None:
    target = TracedTarget(name="tiny", config_sha256="c0ffee")
    header = Header(target=target, moe_layers=[0], num_experts=2, top_k=1, id_dtype="uint8", prompts=[])
    load = expert_load({"a": np.full((1, 2), 2**40)}, header, 2**41)
    assert load["logical_count"] == [[2**40, 2**40]]


class Page(html.parser.HTMLParser):
    """The tags, the text and the attributes that could point elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.links, self.text = [], set(), [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("href", "src")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_well_formed_self_contained_and_escaped(results: Path) -> None:
    text = (results / "stats.html").read_text()
    page = Page(text)
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "b" not in page.tags
    assert all(name in page.text for name in LENGTHS)
    assert "http" not in text.replace("http-equiv", "")
    assert "nan" not in text and "None" not in page.text


def test_a_sample_too_short_for_most_windows_leaves_dashes(tmp_path: Path) -> None:
    folder = trace_folder(tmp_path / "traces", {"lab/maths": (3,)})
    assert main(["stats", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert "–" in Page((tmp_path / "out" / "stats.html").read_text()).text
    assert read(tmp_path / "out")["overall"]["union"][7]["mean"] is None


def decode_png(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Indices [H, W] and palette [256, 4] of an 8-bit palette PNG without filters."""
    chunks, place = {}, 8
    while place < len(data):
        length, kind = int.from_bytes(data[place : place + 4]), data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        assert zlib.crc32(kind + body) == int.from_bytes(data[place + 8 + length : place + 12 + length])
        chunks[kind], place = body, place + 12 + length
    width, height = int.from_bytes(chunks[b"IHDR"][:4]), int.from_bytes(chunks[b"IHDR"][4:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    colours = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
    return lines[:, 1:], np.column_stack([colours, np.frombuffer(chunks[b"tRNS"], np.uint8)])


def test_the_heatmap_is_the_load_pixel_by_pixel(results: Path) -> None:
    counts = np.array(read(results, "expert_load.json")["logical_count"])[LAYERS]
    first = re.search(r"data:image/png;base64,([^\"]+)", (results / "stats.html").read_text())[1]
    indices, colours = decode_png(base64.b64decode(first))
    assert np.array_equal(indices, load_indices(counts, LAYERS))
    assert indices.shape == (4, E) and (indices[2] == ABSENT).all()  # layer 3 is dense
    assert np.array_equal(colours, palette())


def test_colours_follow_the_load_and_are_clear_where_it_is_even() -> None:
    shares = np.array([[0, 1, 2, 4, 8, 9]]) / 4  # mean one
    indices = load_indices(shares, [0])[0]
    assert indices[3] == EVEN and palette()[EVEN, 3] == 0 and palette()[ABSENT, 3] == 0
    assert (np.diff(indices.astype(int)) > 0).all() and indices[0] == 0
    assert load_indices(np.array([[1] + [0] * 63]), [0])[0, 0] == 254


def test_the_picture_of_94_layers_of_512_experts_stays_light() -> None:
    counts = np.random.default_rng(0).gamma(2.0, 50.0, (94, 512)).astype(int)
    assert len(png(load_indices(counts, list(range(94))))) < 64 * 1024


@pytest.mark.parametrize("seed", range(3))
def test_a_long_trace_is_sampled_evenly_and_its_intervals_hold_the_truth(seed: int, tmp_path: Path) -> None:
    lengths = {"lab/maths": tuple(np.random.default_rng(seed).integers(1, 60, 150).tolist())}
    opened = read_traces(trace_folder(tmp_path / "traces", lengths, seed))
    exact, all_counted = tally_datasets(opened)
    drawn, one_in = tally_datasets(opened, enough=1000)
    (whole,), (part,) = exact.values(), drawn.values()
    assert all_counted == 1 and one_in >= 2
    assert np.array_equal(whole.counts_LE, part.counts_LE)
    counted = int(part.windows_W[-1])
    assert 900 <= counted <= 2100 and counted < whole.windows_W[-1]
    means = [tally.unions_WL.sum(1) / tally.windows_W for tally in (whole, part)]
    assert means[0] == pytest.approx(means[1], rel=0.02)


def test_comparing_counts_only_samples_with_the_same_tokens(traces: Path, tmp_path: Path) -> None:
    lengths = LENGTHS | {"lab/maths": (5, 30), "lab/terms": (8,)}
    changed = {"lab/maths/0/0": {"input_ids": [7] * 5}}
    other = trace_folder(tmp_path / "other", lengths, seed=1, dtype="bfloat16", **changed)
    output = tmp_path / "out"
    assert main(["stats", str(traces), "--compare", str(other), "--output", str(output)]) == 0
    found = read(output)["agreement"]
    assert (found["only_here"], found["only_there"], found["other_text"]) == (1, 1, 1)
    assert found["with"]["target"]["dtype"] == "bfloat16"
    theirs = {trace.sample_id: trace.experts for trace in read_traces(other)}
    shares = [
        len(set(ours) & set(there)) / K
        for trace in read_traces(traces)
        if trace.sample_id in ("lab/maths/1/0", f"{EVIL}/0/0", f"{EVIL}/1/0")
        for ours, there in zip(
            trace.experts[2:].reshape(-1, K), theirs[trace.sample_id][2:].reshape(-1, K), strict=True
        )
    ]
    assert found["overall"]["overlap"]["mean"] == pytest.approx(np.mean(shares))
    assert "bfloat16" in Page((output / "stats.html").read_text()).text


def test_a_trace_agrees_wholly_with_itself(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["stats", str(traces), "--compare", str(traces), "--output", str(tmp_path / "out")]
    assert main(words) == 0
    assert read(tmp_path / "out")["agreement"]["overall"]["same_sets"]["mean"] == 1.0
    printed = capsys.readouterr().out
    assert "overlap 100.0 %" in printed and "changed tokens 0.0 %" in printed
    assert all(name in printed for name in ("all data sets", *LENGTHS))


def test_folders_with_nothing_in_common_are_refused(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["stats", str(traces), "--output", str(tmp_path / "out"), "--compare"]
    other = trace_folder(tmp_path / "other", {"lab/prose": (6,)})
    assert main([*words, str(other)]) == 2
    assert "no sample with the id and the tokens" in one_line(capsys)
    assert main([*words, str(shipped("lab", "traces"))]) == 2
    assert "moe_layers" in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_bad_input_and_damage_are_one_line_with_their_exit_codes(
    traces: Path, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "out")]
    assert main(["stats", str(traces)]) == 2
    assert "--output" in one_line(capsys)
    assert main(["stats", str(tmp_path), *output]) == 2
    assert "manifest.json" in one_line(capsys)
    assert main(["stats", str(traces), "--output", str(results)]) == 2
    assert "--overwrite" in one_line(capsys)
    empty = trace_folder(tmp_path / "empty", {})
    assert main(["stats", str(empty), *output]) == 2
    assert "no samples" in one_line(capsys)
    twice = np.full((5, len(LAYERS), K), 3, np.uint8).tobytes()
    damaged = trace_folder(tmp_path / "damaged", **{"lab/maths/0/0": {"experts": twice}})
    assert main(["stats", str(damaged), *output]) == 1
    assert "sample lab/maths/0/0" in one_line(capsys)


def test_a_second_run_gives_the_same_numbers(traces: Path, results: Path, tmp_path: Path) -> None:
    assert main(["stats", str(traces), "--output", str(tmp_path)]) == 0
    first, second = (read(folder) | {"provenance": None} for folder in (results, tmp_path))
    assert first == second
