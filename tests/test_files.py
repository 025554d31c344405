"""What is written is there whole, for those whom the umask lets read it, or not there at all."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ecospec.files import replace_file, replace_folder, write_json
from ecospec.inference.drafters.eagle3.checkpoint import load_head
from ecospec.predictor.training.checkpoints import save_predictor, write_folder
from tests import eagle3_heads as heads
from tests.stand_ins import tiny_predictor

UMASKS = {0o022: (0o644, 0o755), 0o077: (0o600, 0o700), 0o002: (0o664, 0o775)}  # modes of files and of folders


@pytest.fixture(params=UMASKS, ids=oct)
def modes(request):
    old = os.umask(request.param)
    yield UMASKS[request.param]
    os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes_within(folder: Path) -> tuple[set[int], set[int]]:
    """Of all files and of all folders, the given one included."""
    paths = [folder, *folder.rglob("*")]
    return {mode(path) for path in paths if path.is_file()}, {mode(path) for path in paths if path.is_dir()}


def test_a_file_is_for_those_whom_the_umask_lets_read_it(tmp_path, modes):
    path = tmp_path / "weights.safetensors"
    for _ in range(2):  # a new one, and one that replaces the old
        replace_file(path, lambda partial: save_file({"weight": torch.ones(2)}, partial))
        assert mode(path) == modes[0]
        path.chmod(0o640)


def test_all_of_a_folder_is_for_those_whom_the_umask_lets_read_it(tmp_path, modes):
    def write(folder):
        save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
        inner = Path(tempfile.mkdtemp(dir=folder))  # whose mode is 0700
        write_json(inner / "metrics.json", {})
        os.close(os.open(inner / "private", os.O_CREAT, 0o600))

    for _ in range(2):
        replace_folder(tmp_path / "out", write)
        assert modes_within(tmp_path / "out") == ({modes[0]}, {modes[1]})
        assert len(list((tmp_path / "out").iterdir())) == 2, "nothing but what was written"


def test_exported_predictors_and_heads_are_for_those_whom_the_umask_lets_read_them(tmp_path, modes):
    head = load_head(heads.safeailab().write(tmp_path / "given"), heads.target_config())
    predictor = tiny_predictor(torch.nn.Embedding(40, 32), 0)
    write_folder(tmp_path / "predictor", lambda folder: save_predictor(folder, predictor))
    write_folder(tmp_path / "head", head.save)
    (tmp_path / "plain").mkdir()
    head.save(tmp_path / "plain")
    for name in ("predictor", "head", "plain"):
        assert modes_within(tmp_path / name) == ({modes[0]}, {modes[1]})
        assert (tmp_path / name / "model.safetensors").is_file()


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write_json(tmp_path / "file", {"old": True})
    replace_folder(tmp_path / "folder", lambda folder: write_json(folder / "old", {}))

    def fail(_path):
        raise RuntimeError("no more")

    for replace, name in ((replace_file, "file"), (replace_folder, "folder")):
        with pytest.raises(RuntimeError, match="no more"):
            replace(tmp_path / name, fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == '{\n "old": true\n}\n'
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["old"]
