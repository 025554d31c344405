"""A target split over processes is traced as in one: global expert ids on every process, one of which writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedConfig

from ecospec.configs.schema import TargetConfig
from ecospec.data.traces import read_traces
from ecospec.errors import InputError
from ecospec.tracing.cli import main
from ecospec.tracing.store.check import check_folder
from ecospec.tracing.store.manifest import SampleCounts
from ecospec.tracing.target.loading import load_target
from ecospec.tracing.target.replicas import Replica, model_parallel_size, replica_of, split_options
from tests.split_tracing import record
from tests.tiny import tiny_config, tiny_target_folder

ROOT = Path(__file__).resolve().parent.parent
SPLITS = [("qwen3_moe", "tp"), ("qwen3_moe", "ep"), ("gpt_oss", "ep"), ("deepseek_v3", "tp"), ("deepseek_v3", "ep")]


def torchrun(target: Path, kind: str, output: Path) -> list[dict[str, np.ndarray]]:
    """What each of two processes recorded."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.split_tracing", str(target), kind, str(output)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=240)
    return [dict(np.load(output / f"{process}.npz")) for process in range(2)]


@pytest.mark.slow
@pytest.mark.usefixtures("both_cores")
@pytest.mark.parametrize(("family", "kind"), SPLITS)
def test_a_split_target_has_the_routing_of_a_whole_one_on_every_process(family: str, kind: str, tmp_path: Path) -> None:
    """transformers#45473 and #40545: expert-parallel routers once gave each process ids of its own experts."""
    target = tiny_target_folder(tmp_path / "target", family, seed=3)
    whole = record(TargetConfig(name=str(target), dtype="float32", experts_implementation="grouped_mm"))
    found = torchrun(target, kind, tmp_path)
    assert [process.pop("replica").tolist() for process in found] == [[0, 1, 1], [0, 1, 0]]
    assert whole.pop("split") == 0
    for process in found:
        assert process.pop("split") > 3
        assert process.keys() == whole.keys()
        for name, values in whole.items():
            assert np.array_equal(process[name], values), name


@pytest.mark.slow
@pytest.mark.usefixtures("both_cores")
def test_replicas_each_have_the_whole_target_and_write(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path / "target", seed=3)
    found = torchrun(target, "replicas", tmp_path)
    assert [process["replica"].tolist() for process in found] == [[0, 2, 1], [1, 2, 1]]
    assert [int(process["split"]) for process in found] == [0, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("both_cores")
@pytest.mark.parametrize("options", [["--target.tp_size", "2"], ["--target.ep_size", "2"], []], ids=str)
def test_the_command_traces_the_same_conversations_split_or_as_replicas(options: list[str], tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path / "target", seed=3)
    rows = [{"prompt": f"question {n}", "turns": [f"question {n}", "and then?"]} for n in range(6)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", "--target", str(target), "--prompts", str(tmp_path / "c.jsonl"), "--max-new-tokens", "5"]
    command += ["--batch-size", "2", "--target.experts_implementation", "grouped_mm"]
    assert main([*command, "--output", str(tmp_path / "one")]) == 0
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words += [
        str(Path(sys.executable).with_name("ecospec-trace")),
        *command,
        *options,
        "--output",
        str(tmp_path / "two"),
    ]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    one, two = (
        {t.sample_id: (t.input_ids.tolist(), t.experts.tolist()) for t in read_traces(tmp_path / name)}
        for name in ("one", "two")
    )
    assert len(one) == 12 and one == two
    assert check_folder(tmp_path / "two").samples == SampleCounts(12, 0)


@pytest.mark.parametrize(
    ("sizes", "rank", "world", "expected"),
    [
        ({}, 0, 1, Replica(0, 1, True)),
        ({}, 2, 4, Replica(2, 4, True)),
        ({"tp_size": 4}, 0, 4, Replica(0, 1, True)),
        ({"tp_size": 4}, 3, 4, Replica(0, 1, False)),
        ({"ep_size": 2}, 1, 2, Replica(0, 1, False)),
        ({"tp_size": 2, "ep_size": 2}, 0, 2, Replica(0, 1, True)),
        ({"tp_size": 1}, 1, 2, Replica(1, 2, True)),
    ],
)
def test_one_process_of_each_copy_writes(sizes: dict, rank: int, world: int, expected: Replica) -> None:
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    assert replica_of(TargetConfig(**sizes), environment) == expected


def test_without_torchrun_there_is_one_process() -> None:
    assert replica_of(TargetConfig(), {}) == Replica(0, 1, True)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_split_over_another_number_of_processes_names_torchrun(world: int) -> None:
    with pytest.raises(InputError, match=r"started as .* start 4 with torchrun"):
        replica_of(TargetConfig(tp_size=4), {"RANK": "0", "WORLD_SIZE": str(world)})


@pytest.mark.parametrize("sizes", [{"tp_size": 2, "ep_size": 4}, {"tp_size": 0}, {"ep_size": -1}])
def test_sizes_that_make_no_sense_are_refused(sizes: dict) -> None:
    with pytest.raises(InputError, match="_size"):
        model_parallel_size(TargetConfig(**sizes))


def test_a_family_without_a_plan_is_refused_before_any_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec.tracing.target.replicas.replica_of", lambda _: Replica(0, 1, True))
    config: PreTrainedConfig = tiny_config("olmoe")
    config.base_model_ep_plan = None
    with pytest.raises(InputError, match=r"ep_size 2: Transformers has no plan to split olmoe"):
        split_options(TargetConfig(ep_size=2), config)


def test_split_experts_are_not_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec.tracing.target.replicas.replica_of", lambda _: Replica(0, 1, True))
    with pytest.raises(InputError, match="experts_implementation grouped_mm"):
        split_options(TargetConfig(ep_size=2, experts_implementation="eager"), tiny_config("gpt_oss"))


def test_a_split_target_takes_no_device_map(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec.tracing.target.replicas.replica_of", lambda _: Replica(0, 1, True))
    with pytest.raises(InputError, match="leave out device_map"):
        load_target(TargetConfig(name=str(tiny_target), tp_size=2, device_map="auto"))
