"""Trace folders keep every id, come back as they were written, and give away any damage."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ecospec.data.prompts import split_of
from ecospec.data.traces import read_traces
from ecospec.errors import DamageError, InputError
from ecospec.files import read_json, write_json
from ecospec.tracing.store import folder as store
from ecospec.tracing.store.check import check_folder
from ecospec.tracing.store.export import export_tokens
from ecospec.tracing.store.folder import TraceFolder
from ecospec.tracing.store.layout import COLUMNS, decode_experts, encode_experts, id_dtype, reading
from ecospec.tracing.store.manifest import SampleCounts
from tests.trace_folders import KEYS, K, L, complete_folder, header, random_experts, refused, rewrite_part, row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return complete_folder(tmp_path / "traces")


def first_row(**changes: object) -> Callable[[list[dict]], list[dict]]:
    return lambda rows: [rows[0] | changes, *rows[1:]]


def bytes_of(experts_TLK: np.ndarray) -> bytes:
    return experts_TLK.astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("num_experts", "name"), [(2, "uint8"), (64, "uint8"), (256, "uint8"), (257, "uint16"), (300, "uint16")]
)
def test_ids_take_the_narrowest_unsigned_type_and_come_back_ascending(num_experts: int, name: str) -> None:
    assert id_dtype(num_experts).name == name
    for seed in range(5):
        experts = random_experts(7, num_experts, seed)
        value = encode_experts(experts, num_experts)
        assert len(value) == 7 * L * K * id_dtype(num_experts).itemsize
        decoded = decode_experts(value, L, K, num_experts)
        assert np.array_equal(decoded, np.sort(experts, -1))
        assert (decoded[..., 0] < decoded[..., 1]).all()


def test_values_that_end_in_zero_bytes_survive_the_file(tmp_path: Path) -> None:
    low = np.tile([3, 255], (5, L, 1))  # in uint16 every group ends in a zero byte
    opened = TraceFolder(tmp_path, header(300, samples=1))
    value = encode_experts(low, 300)
    assert value[-1] == 0
    opened.add([row(1, 300) | {"experts": value}])
    opened.finalise(KEYS[1:2])
    check_folder(tmp_path)
    (trace,) = read_traces(tmp_path)
    assert trace.experts.dtype == np.uint16
    assert np.array_equal(trace.experts, low)


@pytest.mark.parametrize("ids", [[0, 8], [-1, 3], [3, 3]])
def test_unsound_ids_are_never_written(ids: list[int]) -> None:
    with pytest.raises(DamageError):
        encode_experts(np.tile(ids, (2, L, 1)), 8)


def test_traces_read_back_are_those_written(folder: Path) -> None:
    check_folder(folder)
    traces = read_traces(folder)
    assert (len(traces), traces.num_layers, traces.num_experts, traces.top_k) == (6, L, 8, K)
    by_key = {trace.key: trace for trace in traces}
    assert sorted(by_key) == KEYS
    for index, key in enumerate(KEYS):
        trace, written = by_key[key], row(index)
        assert trace.input_ids.dtype == np.int32
        assert trace.input_ids.tolist() == written["input_ids"]
        assert np.array_equal(trace.experts, np.sort(random_experts(4 + index, seed=index), -1))
        for name in ("sample_id", "dataset", "turn", "prompt_len", "split"):
            assert getattr(trace, name) == written[name]
    assert traces[-1].key == list(traces)[-1].key
    with pytest.raises(IndexError):
        traces[6]


def test_splits_are_complementary_stable_and_about_80_to_20(folder: Path) -> None:
    train, test = ({t.key for t in read_traces(folder, split)} for split in ("train", "test"))
    assert train | test == set(KEYS) and not train & test and test
    share = np.mean([split_of("lab/maths", i) == "train" for i in range(5000)])
    assert 0.78 < share < 0.82
    with pytest.raises(InputError, match="split"):
        read_traces(folder, "valid")


def test_the_binary_column_has_no_dictionary_and_is_compressed(folder: Path) -> None:
    for path in folder.glob("part-*.parquet"):
        group = pq.ParquetFile(path).metadata.row_group(0)
        column = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == "experts")
        assert column.compression == "ZSTD"
        assert not column.has_dictionary_page


def test_a_part_may_hold_several_batches_each_its_own_row_group(tmp_path: Path) -> None:
    opened = TraceFolder(tmp_path, header(samples=3))
    opened.add([row(0), row(1)])
    opened.add([row(2)])
    assert not list(tmp_path.glob("part-*"))
    opened.finalise(KEYS[:3])
    (part,) = tmp_path.glob("part-*")
    assert pq.ParquetFile(part).num_row_groups == 2
    check_folder(tmp_path)


def test_a_large_batch_commits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "COMMIT_BYTES", 20)
    TraceFolder(tmp_path, header()).add([row(0)])
    assert TraceFolder(tmp_path, header()).done == {KEYS[0]}


def test_resuming_finds_finished_keys_and_removes_leftovers(tmp_path: Path) -> None:
    opened = TraceFolder(tmp_path, header(samples=3))
    opened.add([row(0), row(1)])
    opened.commit()
    opened.add([row(2)])  # never committed
    (tmp_path / ".part-0.parquet.77.partial").write_bytes(b"PAR1")
    resumed = TraceFolder(tmp_path, header(samples=3))
    assert resumed.done == set(KEYS[:2])
    assert not resumed.complete
    assert not list(tmp_path.glob(".part-*")), "whoever writes one holds the lock"
    resumed.add([row(2)])
    assert resumed.finalise(KEYS[:3])
    assert not list(tmp_path.glob(".*"))
    assert check_folder(tmp_path).samples == SampleCounts(3, 0)


def test_without_locks_a_young_half_written_file_is_left_to_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store.fcntl, "flock", no_locks)
    old, young = (tmp_path / f".part-{n}.parquet.77.partial" for n in "01")
    for path in (old, young):
        path.write_bytes(b"PAR1")
    os.utime(old, (0, 0))
    opened = TraceFolder(tmp_path, header(samples=1))
    assert list(tmp_path.glob(".part-*")) == [young]
    assert "no file locks here" in caplog.text
    opened.add([row(0)])
    assert opened.finalise(KEYS[:1])


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_overlap_and_finish_together_leave_a_sound_folder(tmp_path: Path, seed: int) -> None:
    def work(indices: list[int]) -> None:
        opened = TraceFolder(tmp_path, header())
        start.wait()
        for index in indices:
            opened.add([row(index)])
            if seed % 2:
                opened.commit()
        opened.finalise(KEYS)

    start = threading.Barrier(3)
    workers = [threading.Thread(target=work, args=[indices]) for indices in ([*range(6)], [0, 2, 4], [5, 4, 3])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert check_folder(tmp_path).samples == SampleCounts(6, 0)


def test_a_flipped_bit_of_the_ids_never_comes_back_as_other_ids(folder: Path) -> None:
    expected = [trace.experts.tolist() for trace in read_traces(folder)]
    part, caught = min(folder.glob("part-*")), 0
    column = pq.ParquetFile(part).metadata.row_group(0).column(COLUMNS.get_field_index("experts"))
    sound = part.read_bytes()
    start = column.data_page_offset
    for place in range(start, start + column.total_compressed_size):
        content = bytearray(sound)
        content[place] ^= 1
        part.write_bytes(content)
        try:
            assert [trace.experts.tolist() for trace in read_traces(folder)] == expected
        except DamageError as error:
            assert part.name in str(error)
            caught += 1
    assert caught > column.total_compressed_size / 2


def test_a_folder_of_another_configuration_is_refused_finished_or_not(folder: Path) -> None:
    with pytest.raises(InputError, match=r"generation\.seed is 0, not 1"):
        TraceFolder(folder, header(seed=1))
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"generation\.seed is 0, not 1"):
        TraceFolder(folder, header(seed=1))


def test_a_folder_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / ".draft.partial").write_text("mine")
    with pytest.raises(InputError, match=r"draft\.partial"):
        TraceFolder(tmp_path, header())
    (tmp_path / "thesis.tex").write_text("mine too")
    with pytest.raises(InputError, match="no trace folder"):
        TraceFolder(tmp_path, header())
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(InputError, match="is a file"):
        TraceFolder(tmp_path / "thesis.tex", header())


def test_a_folder_is_complete_only_with_every_sample_once_and_no_other(tmp_path: Path) -> None:
    opened = TraceFolder(tmp_path, header())
    opened.add([row(0)])
    assert not opened.finalise(KEYS[:2])
    with pytest.raises(InputError, match="samples of another job"):
        opened.finalise(KEYS[1:2])
    (part,) = tmp_path.glob("part-*")
    copy = shutil.copy(part, tmp_path / "part-copied.parquet")
    with pytest.raises(DamageError, match=f"{part.name} and part-copied.parquet hold the same sample"):
        opened.finalise(KEYS[:1])
    assert not opened.complete
    Path(copy).unlink()
    assert TraceFolder(tmp_path, header()).finalise(KEYS[:1])


def test_a_sample_that_another_worker_finished_is_not_written_again(tmp_path: Path) -> None:
    first, second = (TraceFolder(tmp_path, header(samples=3)) for _ in range(2))
    first.add([row(0), row(1)])
    second.add([row(1), row(2)], [refused(0)])
    first.commit()
    assert second.finalise(KEYS[:3])
    assert check_folder(tmp_path).samples == SampleCounts(3, 0)


def test_rejected_samples_are_kept_apart_counted_and_tried_again_when_asked(tmp_path: Path) -> None:
    opened = TraceFolder(tmp_path, header(samples=3))
    opened.add([row(0)], [refused(1), refused(2)])
    assert opened.finalise(KEYS[:3])
    assert check_folder(tmp_path).samples == SampleCounts(1, 2)
    assert [trace.key for trace in read_traces(tmp_path)] == [KEYS[0]]
    assert opened.rejected() == {f"lab/maths/{n}/0": "too long" for n in (1, 2)}
    again = TraceFolder(tmp_path, header(samples=3))
    assert again.done == set(KEYS[:3])
    again.forget_rejected()
    assert again.done == {KEYS[0]} and again.complete
    again.delete_rejected()
    assert not again.complete
    again.add([row(1)], [refused(2)])
    assert again.finalise(KEYS[:3])
    assert check_folder(tmp_path).samples == SampleCounts(2, 1)


def test_a_lost_or_changed_part_of_rejected_samples_is_damage(tmp_path: Path) -> None:
    opened = TraceFolder(tmp_path, header(samples=2))
    opened.add([row(0)], [refused(1)])
    opened.finalise(KEYS[:2])
    (part,) = tmp_path.glob("rejected-*")
    content = part.read_bytes()
    part.write_bytes(content + b"x")
    with pytest.raises(DamageError, match="sha256"):
        check_folder(tmp_path)
    part.unlink()
    with pytest.raises(DamageError, match="missing"):
        check_folder(tmp_path)
    part.write_bytes(content)
    manifest = read_json(tmp_path / "manifest.json")
    write_json(tmp_path / "manifest.json", manifest | {"samples": {"written": 1, "rejected": 0}})
    with pytest.raises(DamageError, match="1 rejected samples where the manifest says 0"):
        check_folder(tmp_path)


def test_a_part_that_cannot_be_read_is_damage_with_a_remedy(folder: Path) -> None:
    part = min(folder.glob("part-*"))
    part.write_bytes(part.read_bytes()[:40])
    for read in (lambda: TraceFolder(folder, header()), lambda: read_traces(folder)):
        with pytest.raises(DamageError, match=f"{part.name}.*run the same ecospec-trace command again"):
            read()


def test_damage_inside_a_part_is_named_by_whatever_reads_it(folder: Path, tmp_path: Path) -> None:
    part = min(folder.glob("part-*"))
    column = pq.ParquetFile(part).metadata.row_group(0).column(COLUMNS.get_field_index("experts"))
    content = bytearray(part.read_bytes())
    start = column.data_page_offset
    content[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    part.write_bytes(content)
    for read in (list, lambda traces: export_tokens(traces.folder, tmp_path / "sql")):
        with pytest.raises(DamageError, match=part.name):
            read(read_traces(folder))


def test_what_the_system_refuses_is_not_called_damage(folder: Path) -> None:
    with pytest.raises(PermissionError), reading(folder / "part-0.parquet"):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_expert_ids_that_are_cut_short_are_named_with_their_part(folder: Path) -> None:
    rewrite_part(folder, first_row(experts=bytes(5)))
    with pytest.raises(DamageError, match=min(folder.glob("part-*")).name):
        list(read_traces(folder))


def test_a_complete_folder_that_lost_a_part_says_how_to_mend_it(folder: Path) -> None:
    TraceFolder(folder, header()).require_finished(KEYS)
    min(folder.glob("part-*")).unlink()
    with pytest.raises(DamageError, match=r"2 of 6 samples are missing; delete manifest\.json"):
        TraceFolder(folder, header()).require_finished(KEYS)
    (folder / "manifest.json").unlink()
    resumed = TraceFolder(folder, header())
    for index in range(6):
        if KEYS[index] not in resumed.done:
            resumed.add([row(index)])
    resumed.finalise(KEYS)
    check_folder(folder)


def test_check_accepts_a_sound_folder(folder: Path) -> None:
    assert len(check_folder(folder).parts) == 3


def test_check_tells_no_trace_folder_from_an_unfinished_one(folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(DamageError, match="run the same ecospec-trace command again"):
        check_folder(folder)
    with pytest.raises(InputError, match="run the same ecospec-trace command again"):
        read_traces(folder)
    (tmp_path / "empty").mkdir()
    for other in (tmp_path / "empty", tmp_path / "absent", Path(__file__)):
        with pytest.raises(InputError):
            check_folder(other)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", json.dumps(asdict(header()) | {"schema": 99, "samples": {}, "parts": []})]
)
def test_a_manifest_that_is_none_is_bad_input(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json"):
        check_folder(folder)


@pytest.mark.parametrize(
    "change", [{"samples": {}}, {"samples": 6}, {"parts": [{"file": "a"}]}, {"prompts": [{}]}, {"target": {}}]
)
def test_a_manifest_with_holes_is_damage(folder: Path, change: dict) -> None:
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | change)
    with pytest.raises(DamageError, match=rf"manifest\.json.*{next(iter(change))} without"):
        check_folder(folder)


def test_a_flipped_byte_is_damage(folder: Path) -> None:
    part = min(folder.glob("part-*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(DamageError, match="sha256"):
        check_folder(folder)


def test_a_missing_and_an_unlisted_part_are_damage(folder: Path) -> None:
    part = min(folder.glob("part-*"))
    stray = part.with_name("part-stray.parquet")
    stray.write_bytes(part.read_bytes())
    with pytest.raises(DamageError, match="not listed"):
        check_folder(folder)
    part.unlink()
    with pytest.raises(DamageError, match="missing"):
        check_folder(folder)
    with pytest.raises(DamageError, match="missing"):
        read_traces(folder)


ASCENDING = np.tile([1, 5], (4, L, 1))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (first_row(experts=bytes_of(ASCENDING)[:-1]), "no whole number of tokens"),
        (first_row(experts=bytes_of(ASCENDING)[: -L * K]), "3 tokens beside 4"),
        (first_row(experts=bytes_of(np.tile([1, 8], (4, L, 1)))), "outside 0..7"),
        (first_row(experts=bytes_of(np.tile([5, 1], (4, L, 1)))), "do not ascend"),
        (first_row(experts=bytes_of(np.tile([5, 5], (4, L, 1)))), "twice in a layer"),
        (first_row(experts=bytes(4 * L * K)), "twice in a layer"),
        (first_row(prompt_len=0), "prompt_len"),
        (first_row(prompt_len=99), "prompt_len"),
        (first_row(split="valid"), "split"),
        (first_row(dataset="lab/code"), "dataset"),
        (first_row(key=None), "missing"),
        (first_row(sample_id="maths-0"), "not dataset/row/turn"),
        (first_row(sample_id="lab/maths/first/0"), "not dataset/row/turn"),
        (lambda rows: [rows[1], rows[1]], "key occurs twice"),
        (lambda rows: pa.table({"key": ["a", "b"]}), "columns"),
    ],
)
def test_check_finds_what_a_faulty_writer_left(folder: Path, change: Callable, problem: str) -> None:
    first = read_json(folder / "manifest.json")["parts"][0]["file"]

    def on_four_tokens(rows: list[dict]) -> object:
        rows[0] |= {"input_ids": [0, 1, 2, 3], "prompt_len": 3, "experts": bytes_of(ASCENDING)}
        return change(rows)

    rewrite_part(folder, list)  # rewriting alone leaves a sound folder
    check_folder(folder)
    rewrite_part(folder, on_four_tokens)
    with pytest.raises(DamageError, match=problem) as caught:
        check_folder(folder)
    assert first in str(caught.value)


def test_counts_that_disagree_with_the_manifest_are_damage(folder: Path) -> None:
    manifest = read_json(folder / "manifest.json")
    manifest["samples"]["written"] = 7
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(DamageError, match="6 samples where the manifest says 7"):
        check_folder(folder)
    manifest["parts"][1]["rows"] = 3
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(DamageError, match="2 rows where the manifest says 3"):
        check_folder(folder)


def test_a_prompt_without_a_sample_is_damage(folder: Path) -> None:
    manifest = read_json(folder / "manifest.json")
    manifest["prompts"][0]["samples"] = 7
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(DamageError, match=r"manifest.json: is not what part-.* was written for .prompts differs"):
        check_folder(folder)
