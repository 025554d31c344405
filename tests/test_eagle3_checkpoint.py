"""Laws of EAGLE-3 checkpoints: what does not fit is refused by name, and nothing is guessed in silence.

Letters: D draft vocabulary, V target vocabulary, H hidden width.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ecospec.errors import InputError
from ecospec.inference.drafters.eagle3.checkpoint import inspect_head, load_head
from ecospec.inference.target.features import FINAL
from ecospec.tracing.target.checkpoint import Checkpoint
from tests import eagle3_heads as heads
from tests.eagle3_heads import DIALECTS, LAYER_IDS, USED, D, H, TinyHead, V, target_config
from tests.eagle3_reference import assert_equal, computed, expected, loaded, tiny_target

IDS = [
    (94, {"eagle_config": {LAYER_IDS: [1, 46, 90]}}, (2, 47, 91)),
    (36, {"eagle_config": {LAYER_IDS: [1, 17, 33]}}, (2, 18, 34)),
    (36, {"eagle_config": {LAYER_IDS: [24, 30, 36]}}, (24, 30, 36)),
    (94, {LAYER_IDS: [2, 47, 91]}, (2, 47, 91)),
    (94, {LAYER_IDS: [1, 46, 90]}, (1, 46, 90)),
    (36, {LAYER_IDS: [24, 30, 36]}, (24, 30, 36)),
]


@pytest.mark.parametrize(("depth", "values", "boundaries"), IDS)
def test_layer_ids_are_read_as_their_place_means_them(
    depth: int, values: dict, boundaries: tuple, tmp_path: Path
) -> None:
    spec = inspect_head(heads.safeailab(0, **values).write(tmp_path), target_config(num_hidden_layers=depth))
    assert spec.feature_layers == boundaries
    assert spec.notes == ()


@pytest.mark.parametrize("values", [{}, {"eagle_config": {LAYER_IDS: []}}, {"eagle_config": None, LAYER_IDS: None}])
def test_a_head_that_names_no_layers_says_which_were_taken(
    values: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, target = heads.safeailab(0, **values).write(tmp_path), target_config(num_hidden_layers=94)
    (note,) = inspect_head(folder, target).notes
    assert "[2, 47, 91]" in note and "feature_layers" in note
    assert not caplog.records
    assert load_head(folder, target).feature_layers == (2, 47, 91)
    assert note in caplog.text and str(folder) in caplog.text


def test_layer_ids_in_both_places_that_differ_are_noted(tmp_path: Path) -> None:
    folder = heads.safeailab(0, **{"eagle_config": {LAYER_IDS: [1, 17, 32]}, LAYER_IDS: [1, 17, 32]}).write(tmp_path)
    spec = inspect_head(folder, target_config())
    assert spec.feature_layers == (2, 18, 33)
    assert "[2, 18, 33]" in spec.notes[0] and "[1, 17, 32]" in spec.notes[0]


@pytest.mark.parametrize("head", [heads.safeailab(), heads.specforge(), heads.modelopt_v3(), heads.speculators()])
@pytest.mark.parametrize("layers", [(0, 7, 36), (5, 6, FINAL)])
def test_given_feature_layers_win_and_silence_the_note(head: TinyHead, layers: tuple, tmp_path: Path) -> None:
    spec = inspect_head(head.write(tmp_path), target_config(), feature_layers=layers)
    assert spec.feature_layers == layers
    assert spec.notes == ()


@pytest.mark.parametrize(
    ("head", "given", "named"),
    [
        (heads.safeailab(), (1, 2), "the head takes 48 features"),
        (heads.safeailab(), (1, 2, 37), "feature_layers.*37"),
        (heads.safeailab(), (1, 2, -2), "feature_layers.*-2"),
        (heads.modelopt_short(), (1, 2), "the head takes 16 features"),
        (heads.specforge().having(eagle_config={LAYER_IDS: [1, 17, 40]}), None, LAYER_IDS),
        (heads.speculators().having(**{LAYER_IDS: [1, 2, 3, 4]}), None, LAYER_IDS),
    ],
)
def test_feature_layers_that_do_not_fit_are_refused(
    head: TinyHead, given: tuple | None, named: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=named):
        inspect_head(head.write(tmp_path), target_config(), feature_layers=given)


def test_a_head_dim_that_the_weights_do_not_have_is_noted(tmp_path: Path) -> None:
    notes = inspect_head(heads.angelslim().write(tmp_path), target_config()).notes
    assert any("80" in note and "8," in note for note in notes)


def test_heads_that_do_not_divide_the_attention_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"num_attention_heads 5.*32"):
        inspect_head(heads.safeailab().having(num_attention_heads=5).write(tmp_path), target_config())


OFFSETS = USED - torch.arange(D)
WRONG_MAPS: dict[str, tuple[Tensor, str]] = {
    "absolute": (USED.clone(), "absolute ids"),
    "arange": (torch.arange(D), "arange"),
    "descending": (OFFSETS.flip(0) - 2 * torch.arange(D), "ascending"),
    "repeated": (OFFSETS - torch.arange(D).clamp(max=1), "ascending"),
    "negative": (OFFSETS - 1, "ascending"),
    "out of range": (OFFSETS + 1, "ascending"),
}


@pytest.mark.parametrize("make", [heads.safeailab, heads.modelopt], ids=["with t2d", "without t2d"])
@pytest.mark.parametrize("fault", WRONG_MAPS)
def test_a_d2t_that_is_no_offset_is_refused(fault: str, make: Callable, tmp_path: Path) -> None:
    d2t, named = WRONG_MAPS[fault]
    folder = make().with_tensors(d2t=d2t).write(tmp_path)
    with pytest.raises(InputError, match=f"d2t.*{named}.*offset"):
        load_head(folder, target_config())


def test_maps_that_disagree_are_refused(tmp_path: Path) -> None:
    t2d = torch.zeros(V, dtype=torch.bool).index_fill(0, USED, True)
    t2d[3], t2d[2] = True, False
    with pytest.raises(InputError, match="disagree"):
        load_head(heads.safeailab().with_tensors(t2d=t2d).write(tmp_path), target_config())


def test_a_head_with_a_small_vocabulary_and_no_maps_is_refused(tmp_path: Path) -> None:
    for index, maps in enumerate(({"d2t": None}, {"d2t": None, "t2d": None})):
        with pytest.raises(InputError, match=r"missing keys: d2t$"):
            load_head(heads.safeailab().with_tensors(**maps).write(tmp_path / str(index)), target_config())


def test_offsets_that_are_all_zero_are_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = loaded(heads.modelopt().with_tensors(d2t=torch.zeros(D, dtype=torch.long)), tmp_path)
    assert torch.equal(head.target_ids(torch.arange(D)), torch.arange(D))
    assert f"first {D} tokens" in caplog.text


def test_maps_in_other_integer_types_are_read(tmp_path: Path) -> None:
    plain = heads.safeailab()
    tiny = plain.with_tensors(d2t=plain.tensors["d2t"].int(), t2d=plain.tensors["t2d"].to(torch.uint8))
    head = loaded(tiny, tmp_path)
    assert torch.equal(head.target_ids(torch.arange(D)), USED) and head.t2d.dtype == torch.bool


@pytest.mark.parametrize(
    ("head", "target", "named"),
    [
        (heads.safeailab(), {"vocab_size": V + 2}, f"rows of t2d {V}"),
        (heads.safeailab().having(vocab_size=V + 2), {}, f"vocab_size {V + 2}"),
        (heads.speculators(), {"vocab_size": V + 2}, f"rows of embed_tokens.weight {V}"),
        (heads.modelopt(), {"vocab_size": V + 2}, f"vocab_size {V}"),
        (heads.safeailab(), {"hidden_size": 32}, "width of the target 16"),
        (heads.narrow(), {"hidden_size": 32}, "width of the target 16"),
    ],
)
def test_a_head_of_another_target_is_refused(head: TinyHead, target: dict, named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        inspect_head(head.write(tmp_path), target_config(**target))


@pytest.mark.parametrize(("make", "layer"), [(heads.safeailab, "midlayer."), (heads.speculators, "layers.0.")])
def test_one_error_names_every_key_that_is_missing_unused_or_misshapen(
    make: Callable, layer: str, tmp_path: Path
) -> None:
    tiny = make()
    tensors = {
        key: tensor for key, tensor in tiny.tensors.items() if key not in ("fc.weight", f"{layer}mlp.up_proj.weight")
    }
    tensors |= {
        "eh_proj.weight": torch.ones(2, 2),
        f"{layer}enorm.weight": torch.ones(2),
        "norm.weight": torch.ones(H + 1),
    }
    folder = TinyHead(tiny.values, tensors, file=tiny.file).write(tmp_path)
    with pytest.raises(InputError) as caught:
        inspect_head(folder, target_config())
    message = str(caught.value)
    assert str(folder / tiny.file) in message
    assert f"missing keys: fc.weight, {layer}mlp.up_proj.weight;" in message
    assert all(key in message.split("unused keys: ")[1] for key in ("eh_proj.weight", f"{layer}enorm.weight"))
    assert f"norm.weight [{H + 1}] instead of [{H}]" in message
    assert message.count("weight") == 5


UNUSED = [
    (heads.eagle31().having(fc_norm=False), "fc_norm.0.weight"),
    (heads.modelopt_v3().having(norm_before_fc=False), "input_norm.weight"),
    (heads.two_layers().having(num_hidden_layers=1), "layers.1.mlp.down_proj.weight"),
    (heads.modelopt_short().with_tensors(fc__weight=torch.ones(H, H)), "fc.weight"),
    (heads.two_layers().with_tensors(layers__1__hidden_norm__weight=torch.ones(H)), "layers.1.hidden_norm.weight"),
]


@pytest.mark.parametrize(("head", "key"), UNUSED, ids=[key for _, key in UNUSED])
def test_weights_that_the_configuration_gives_no_place_are_refused(head: TinyHead, key: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"unused keys: .*{key}"):
        inspect_head(head.write(tmp_path), target_config())


MISSING = [
    (heads.specforge().having(fc_norm=True), "fc_norm.0.weight"),
    (heads.modelopt(0, {"norm_before_fc": True}), "input_norm.weight"),
    (heads.speculators(0, "qwen3").with_tensors(layers__0__self_attn__k_norm__weight=None), "k_norm"),
    (heads.modelopt().having(attention_bias=True), "q_proj.bias"),
    (heads.narrow().with_tensors(embed_tokens__weight=None), "embed_tokens.weight"),
    (heads.safeailab().with_tensors(lm_head__weight=None), "lm_head.weight"),
    (heads.modelopt().having(num_hidden_layers=2), "layers.1.mlp.down_proj.weight"),
    (heads.modelopt().with_tensors(layers__0__hidden_norm__weight=None), "layers.0.hidden_norm.weight"),
]


@pytest.mark.parametrize(("head", "key"), MISSING, ids=[key for _, key in MISSING])
def test_places_that_the_configuration_makes_and_no_weight_fills_are_refused(
    head: TinyHead, key: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"missing keys: .*{key}"):
        inspect_head(head.write(tmp_path), target_config())


@pytest.mark.parametrize("make", [heads.safeailab, heads.specforge, heads.angelslim])
@pytest.mark.parametrize("said", [40, 2, 0, None])
def test_a_safeailab_head_has_the_layers_that_its_weights_have(
    make: Callable, said: int | None, tmp_path: Path
) -> None:
    """A published one has its target's number of layers in its config.json."""
    plain, tiny = make(), make().having(num_hidden_layers=said)
    folder = tiny.write(tmp_path)
    notes = set(inspect_head(folder, target_config()).notes) - set(
        inspect_head(plain.write(tmp_path / "plain"), target_config()).notes
    )
    told = f"config.json says num_hidden_layers {said}; took 1, which the weights have"
    assert notes == (set() if said is None else {told})
    head = load_head(folder, target_config()).attach(tiny_target())
    assert head.config.num_hidden_layers == 1
    assert_equal(computed(head), expected(plain))


def test_a_message_names_the_first_few_of_many_keys(tmp_path: Path) -> None:
    folder = heads.modelopt().having(num_hidden_layers=40).write(tmp_path)
    with pytest.raises(InputError, match=r"missing keys: layers\.1\..* and \d{3} more$") as caught:
        inspect_head(folder, target_config())
    assert len(str(caught.value)) < 400


def quantized(folder: Path) -> None:
    heads.modelopt(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"}).write(folder)


def without_weights(folder: Path) -> None:
    (heads.safeailab().write(folder) / "pytorch_model.bin").unlink()


def cut_short(folder: Path) -> None:
    path = heads.specforge().write(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def no_archive(folder: Path) -> None:
    (heads.safeailab().write(folder) / "pytorch_model.bin").write_bytes(b"not an archive")


def with_code(folder: Path) -> None:
    torch.save({"fc.weight": Path("anything but a tensor")}, heads.safeailab().write(folder) / "pytorch_model.bin")


def no_head(folder: Path) -> None:
    TinyHead(heads.safeailab().values, {"weight": torch.ones(2)}).write(folder)


def without_numbers(folder: Path) -> None:
    heads.safeailab().having(num_attention_heads=None, hidden_size="16").write(folder)


def lost_shard(folder: Path) -> None:
    in_shards(heads.specforge(), folder)
    (folder / "model-1.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (quantized, "config.json: quantization_config"),
        (without_weights, "holds no weights"),
        (cut_short, "model.safetensors: cannot be read"),
        (no_archive, "pytorch_model.bin: cannot be read"),
        (with_code, "pytorch_model.bin: cannot be read"),
        (no_head, "not an EAGLE-3 head"),
        (without_numbers, "config.json: .*hidden_size, num_attention_heads"),
        (lost_shard, "model-1.safetensors"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_by_name(spoil: Callable, named: str, tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(InputError, match=named):
        load_head(tmp_path, target_config())


def in_shards(head: TinyHead, folder: Path) -> None:
    """Every other tensor in another file, and an index."""
    (folder / "config.json").write_text(json.dumps(head.values))
    places = {key: f"model-{number % 2}.safetensors" for number, key in enumerate(head.tensors)}
    for name in set(places.values()):
        save_file({key: head.tensors[key] for key, place in places.items() if place == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_a_sharded_head_is_the_same_head(tmp_path: Path) -> None:
    in_shards(heads.specforge(), tmp_path)
    head = load_head(tmp_path, target_config()).attach(tiny_target())
    assert_equal(computed(head), expected(heads.specforge()))


@pytest.mark.parametrize("make", [heads.safeailab, heads.speculators], ids=["bin", "safetensors"])
def test_inspection_reads_no_weights_and_tells_what_loading_does(
    make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make()
    folder = tiny.write(tmp_path)
    head = load_head(folder, target_config())
    monkeypatch.setattr(Checkpoint, "read", None)
    monkeypatch.setattr(Checkpoint, "read_all", None)
    spec = inspect_head(folder, target_config())
    assert spec.shapes == {key: tuple(tensor.shape) for key, tensor in tiny.tensors.items()}
    assert (spec.flags, spec.feature_layers, spec.config.draft_vocab_size) == (head.flags, head.feature_layers, D)


def test_writers_are_told_apart(tmp_path: Path) -> None:
    writers = {
        name: inspect_head(DIALECTS[name](0).write(tmp_path / name), target_config()).writer
        for name in ("SafeAILab and GTO", "SpecForge", "EAGLE-3.1", "speculators, llama", "ModelOpt, v3", "AngelSlim")
    }
    assert list(writers.values()) == ["SafeAILab", "SafeAILab", "EAGLE-3.1", "speculators", "ModelOpt", "SafeAILab"]


def test_what_a_user_should_know_is_noted_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    silent = ("SpecForge", "EAGLE-3.1", "speculators, llama", "ModelOpt, v3", "ModelOpt, short context")
    for name in silent:
        load_head(DIALECTS[name](0).write(tmp_path / name), target_config())
    assert not caplog.records
    sliding = heads.speculators()
    sliding.values["transformer_layer_config"]["layer_types"] = ["sliding_attention"]
    for index, (head, named) in enumerate(((heads.specforge(norm_output=True), "norm_output"), (sliding, "window"))):
        (note,) = inspect_head(head.write(tmp_path / str(index)), target_config()).notes
        assert named in note
