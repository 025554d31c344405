"""One reader for every checkpoint: folder or hub id, one file or shards, safetensors or PyTorch's own format."""

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError, first_few
from ecospec.inference.drafters.mtp.head import load_mtp_head
from ecospec.predictor.embedding import load_embedding
from ecospec.tracing.target.checkpoint import Checkpoint
from ecospec.tracing.target.loading import load_target
from tests.mtp_reference import random_layer, write_checkpoint
from tests.tiny import tiny_model, tiny_target_folder

TENSORS = {
    "embed.weight": torch.arange(12.0).view(4, 3),
    "layers.0.weight": torch.ones(2, 2, dtype=torch.bfloat16),
    "layers.1.bias": torch.arange(5),
    "layers.10.bias": torch.zeros(1, dtype=torch.bool),
}
REVISION = "0123456789abcdef0123456789abcdef01234567"


def single(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")


def sharded(folder: Path, name: str = "model-{}.safetensors", save: Callable = save_file) -> None:
    """Two tensors in each of two shards."""
    places = {key: name.format(number // 2) for number, key in enumerate(TENSORS)}
    for shard in set(places.values()):
        save({key: TENSORS[key] for key, place in places.items() if place == shard}, folder / shard)
    index = "pytorch_model.bin.index.json" if name.endswith(".bin") else "model.safetensors.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def pickled_shards(folder: Path) -> None:
    sharded(folder, "pytorch_model-{}.bin", torch.save)


FORMS = [single, pickled, sharded, pickled_shards]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the folder of a repository in a hub cache of its own; nothing is fetched."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))

    def repository(name: str) -> Path:
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(REVISION)
        (folder / "snapshots" / REVISION).mkdir(parents=True)
        return folder / "snapshots" / REVISION

    return repository


def check(checkpoint: Checkpoint) -> None:
    assert {key: tuple(tensor.shape) for key, tensor in TENSORS.items()} == checkpoint.shapes()
    assert checkpoint.shapes("layers.1.") == {"layers.1.bias": (5,)}
    assert checkpoint.dtypes("layers.0.") == {"layers.0.weight": "BF16"}
    assert "embed.weight" in checkpoint and "embed" not in checkpoint
    for key, tensor in TENSORS.items():
        got = checkpoint.read(key)
        assert got.dtype == tensor.dtype and torch.equal(got, tensor)
    everything = checkpoint.read_all()
    assert everything.keys() == TENSORS.keys()
    assert all(torch.equal(everything[key], tensor) for key, tensor in TENSORS.items())


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_read_in_every_form(form: Callable, tmp_path: Path) -> None:
    form(tmp_path)
    check(Checkpoint(tmp_path))
    files = Checkpoint(tmp_path).files()
    assert len(files) == (2 if "shard" in form.__name__ else 1)
    assert all(file.parent == tmp_path and file.suffix in (".safetensors", ".bin") for file in files)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("revision", [None, "main", REVISION])
def test_a_hub_id_is_read_in_every_form(form: Callable, revision: str | None, hub: Callable) -> None:
    folder = hub("some/model")
    form(folder)
    check(Checkpoint("some/model", revision))
    assert {file.parent for file in Checkpoint("some/model", revision).files()} == {folder}


def test_safetensors_win_over_pickled_weights(tmp_path: Path) -> None:
    torch.save({"other": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    sharded(tmp_path)
    check(Checkpoint(tmp_path))


def test_only_the_shards_that_hold_what_is_asked_for_are_opened(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shapes("embed.") == {"embed.weight": (4, 3)}
    assert torch.equal(checkpoint.read("layers.0.weight"), TENSORS["layers.0.weight"])
    for attempt in (checkpoint.shapes, checkpoint.files, checkpoint.read_all, lambda: checkpoint.read("layers.1.bias")):
        with pytest.raises(InputError, match=r"its index names model-1.safetensors, which cannot be found"):
            attempt()


def test_shapes_are_told_without_reading_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled(tmp_path)
    load, devices = torch.load, []

    def noted(path: Path, device: str, **options: object) -> dict:
        devices.append((device, options))
        return load(path, device, **options)

    monkeypatch.setattr(torch, "load", noted)
    Checkpoint(tmp_path).shapes()
    assert devices == [("meta", {"weights_only": True})]


def absent_key(folder: Path) -> None:
    single(folder)
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    places = dict.fromkeys([*TENSORS, "lost.weight"], "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[1, 2]")


def no_json(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def cut_short(folder: Path) -> None:
    single(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def no_tensors(folder: Path) -> None:
    torch.save({"weight": "a word"}, folder / "pytorch_model.bin")


def code(folder: Path) -> None:
    torch.save({"weight": Path("anything")}, folder / "pytorch_model.bin")


SPOILT = [
    (absent_key, r"its index names tensors that its files do not hold: lost.weight$"),
    (no_index, r"model.safetensors.index.json: is no index of weights"),
    (no_json, r"model.safetensors.index.json: not JSON"),
    (cut_short, r"model.safetensors: cannot be read"),
    (no_tensors, r"pytorch_model.bin: does not hold tensors by name"),
    (code, r"pytorch_model.bin: cannot be read"),
    (lambda _: None, r"the target: holds no weights \(model.safetensors or pytorch_model.bin"),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_what_cannot_be_read_is_named(spoil: Callable, message: str, tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(InputError, match=message):
        Checkpoint(tmp_path, name="the target").shapes()
    with pytest.raises(InputError, match=r"holds no tensor lost.weight|" + message):
        Checkpoint(tmp_path, name="the target").read("lost.weight")


def test_a_hub_id_that_is_not_to_be_had_holds_no_weights(hub: Callable) -> None:
    with pytest.raises(InputError, match=r"^some/thing: holds no weights .*couldn't connect"):
        Checkpoint("some/thing").shapes()


def test_targets_embeddings_and_mtp_layers_come_from_pickled_weights_and_from_the_hub(hub: Callable) -> None:
    folder = hub("some/target")
    tiny_target_folder(folder, "deepseek_v3")
    expected = tiny_model("deepseek_v3").get_input_embeddings().weight
    model = load_target(TargetConfig(name="some/target", dtype="float32")).model
    assert torch.equal(load_embedding(TargetConfig(name="some/target")), expected)
    stored = random_layer()
    (folder / "model.safetensors").unlink()
    write_checkpoint(folder, tiny_model("deepseek_v3"), stored)
    head = load_mtp_head("some/target", model)
    assert torch.equal(head.state_dict()["layers.0.eh_proj.weight"], stored["eh_proj.weight"])
    both = Checkpoint(folder).read_all()
    for path in folder.glob("model*"):
        path.unlink()
    torch.save(model.state_dict() | both, folder / "pytorch_model.bin")
    assert torch.equal(load_embedding(TargetConfig(name="some/target")), expected)
    again = load_mtp_head(folder, model).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("names", "shown"),
    [([], ""), (["a"], "a"), (["a", "b", "c"], "a, b, c"), (["a", "b", "c", "d"], "a, b, c and 1 more")],
)
def test_a_list_in_a_message_shows_the_first_few(names: list, shown: str) -> None:
    assert first_few(names) == shown
    assert first_few(name for name in names) == shown


def test_a_list_in_a_message_may_be_of_paths_and_show_more_or_less() -> None:
    assert first_few(map(Path, "abcde"), shown=2, separator="; ") == "a; b and 3 more"
    assert first_few(range(5), shown=5) == "0, 1, 2, 3, 4"
