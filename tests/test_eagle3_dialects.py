"""Laws of EAGLE-3 heads: each writer's head computes what its writer means.

Letters: T tokens of a text, D draft vocabulary, V target vocabulary, H hidden width.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ecospec.errors import InputError
from ecospec.inference.drafters.eagle3.checkpoint import inspect_head, load_head
from tests import eagle3_heads as heads
from tests.eagle3_heads import DIALECTS, LAYER_IDS, USED, D, H, TinyHead, V, target_config
from tests.eagle3_reference import (
    N,
    Reference,
    Steps,
    assert_equal,
    computed,
    differs,
    expected,
    loaded,
    text,
    tiny_target,
)

SEEDS = (0, 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_head_of_each_writer_computes_what_its_writer_means_at_steps_1_and_2(
    dialect: str, seed: int, tmp_path: Path
) -> None:
    tiny = DIALECTS[dialect](seed)
    head = loaded(tiny, tmp_path / "head", seed)
    assert head.feature_layers == tiny.meaning.layers
    assert_equal(computed(head, seed), expected(tiny, seed))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_draft_ids_stand_for_the_target_s_ids(dialect: str, tmp_path: Path) -> None:
    head = loaded(DIALECTS[dialect](0), tmp_path / "head")
    D_here = computed(head)["logits2"].shape[-1]
    used = USED if D_here == D else torch.arange(V)
    assert torch.equal(head.target_ids(torch.arange(D_here)), used)
    assert torch.equal(head.t2d.nonzero().squeeze(1), used)


def with_v3_norm() -> TinyHead:
    """The same weights as `modelopt`, with the norm over all features that they come with off."""
    return heads.modelopt(0, {"norm_before_fc": True}).with_tensors(input_norm__weight=heads.numbers(300)(3 * H))


FLAGS: dict[str, tuple[TinyHead, TinyHead, int | None]] = {
    # flag: a head with it and its twin without, and the first step at which they differ
    "norm_before_residual, speculators": (
        heads.speculators(0),
        heads.speculators(0, norm_before_residual=False).understood(residual_normed=False),
        1,
    ),
    "norm_before_residual, SafeAILab": (
        heads.safeailab(0, norm_before_residual=True).understood(residual_normed=True),
        heads.safeailab(0),
        1,
    ),
    "norm_before_fc": (with_v3_norm().understood(input_norm=True), heads.modelopt(0), 1),
    "fc_norm": (
        heads.eagle31(0).having(norm_output=False).understood(feeds_normed=False),
        heads.specforge(0),
        1,
    ),
    "norm_output, EAGLE-3.1": (
        heads.eagle31(0),
        heads.eagle31(0).having(norm_output=False).understood(feeds_normed=False),
        2,
    ),
    "norm_output, EAGLE-3.1, absent": (
        heads.eagle31(0),
        heads.eagle31(0).having(norm_output=None).understood(feeds_normed=False),
        2,
    ),
    "norm_output, speculators": (
        heads.speculators(0, norm_output=True).understood(feeds_normed=True),
        heads.speculators(0),
        2,
    ),
    "norm_output, SpecForge": (heads.specforge(0, norm_output=True), heads.specforge(0), None),
    "norm_output, SpecForge, off": (heads.specforge(0, norm_output=False), heads.specforge(0), None),
    "return_hidden_post_norm, ModelOpt": (
        heads.modelopt(0, {"return_hidden_post_norm": True}).understood(feeds_normed=True),
        heads.modelopt(0),
        2,
    ),
    "logit_scale": (heads.safeailab(0, logit_scale=3.0).understood(logit_scale=3.0), heads.safeailab(0), 1),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_acts_at_its_step_and_not_before(flag: str, tmp_path: Path) -> None:
    one, other, step = FLAGS[flag]
    with_it, without = (computed(loaded(head, tmp_path / name)) for name, head in (("one", one), ("other", other)))
    assert_equal(with_it, expected(one), "with: ")
    assert_equal(without, expected(other), "without: ")
    assert differs(with_it, without, "logits1") == (step == 1)
    assert differs(with_it, without, "logits2") == (step is not None)


def test_an_output_without_last_norm_goes_to_lm_head_as_it_is(tmp_path: Path) -> None:
    tiny = heads.modelopt(0, {"use_last_layernorm": False}).with_tensors(norm__weight=None)
    steps = computed(loaded(tiny, tmp_path / "head"))
    torch.testing.assert_close(steps["logits1"], steps["out1"] @ tiny.tensors["lm_head.weight"].T)
    assert_equal(Steps(out1=steps["out1"]), Steps(out1=expected(heads.modelopt(0))["out1"]))


def test_a_short_context_head_that_has_a_hidden_norm_uses_it(tmp_path: Path) -> None:
    tiny = heads.modelopt_short(0).with_tensors(layers__0__hidden_norm__weight=heads.numbers(7)(H))
    assert_equal(computed(loaded(tiny, tmp_path / "head")), expected(tiny.understood(entry_norm=True)))


def rope(**values: object) -> TinyHead:
    return heads.safeailab(0, **values)


@pytest.mark.parametrize(
    ("values", "base"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}, "rope_scaling": None}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 2, 1]}}, 5e5),
    ],
)
def test_the_rotary_base_is_the_head_s_own_wherever_it_is_written(values: dict, base: float, tmp_path: Path) -> None:
    head = load_head(rope(**values).write(tmp_path), target_config(rope_parameters={"rope_theta": 77.0}))
    assert_equal(computed(head.attach(tiny_target())), expected(rope().understood(base=base)))
    assert differs(expected(rope().understood(base=5e5)), expected(rope()), "logits2")


def test_a_given_rotary_base_replaces_the_head_s(tmp_path: Path) -> None:
    head = loaded(rope(rope_theta=5e5), tmp_path, rope_theta=300.0)
    assert_equal(computed(head), expected(rope().understood(base=300.0)))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda scaling: scaling.get("rope_type", "dynamic"),
)
def test_scaled_rotations_load_and_keep_the_base(scaling: dict, tmp_path: Path) -> None:
    head = loaded(rope(rope_theta=5e5, rope_scaling=scaling), tmp_path)
    assert head.config.rope_parameters["rope_theta"] == 5e5
    unscaled = expected(rope().understood(base=5e5))
    beyond_the_text = "type" in scaling  # dynamic scaling begins where the head's positions end
    assert differs(computed(head), unscaled, "logits2") != beyond_the_text


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}}, "500000.0 and 1000000.0"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "by layer"),
    ],
)
def test_rotary_settings_that_cannot_be_followed_are_refused(values: dict, named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=named):
        inspect_head(rope(**values).write(tmp_path), target_config())


def test_a_head_may_take_other_than_three_layers(tmp_path: Path) -> None:
    tiny = rope(**{LAYER_IDS: [1, 2, 3, 36]}).with_tensors(fc__weight=heads.numbers(1)(H, 4 * H))
    assert_equal(computed(loaded(tiny, tmp_path)), expected(tiny.understood(layers=(1, 2, 3, 36))))


@torch.inference_mode()
def test_the_order_of_the_features_matters(tmp_path: Path) -> None:
    head = loaded(heads.safeailab(), tmp_path)
    ids, features = text(0, 3)
    permuted = torch.cat([features[:, H:], features[:, :H]], dim=1)
    outs = [
        head.forward(ids[None, :N], head.enter(each[None]), torch.arange(N)[None], None, head.new_cache())
        for each in (features, permuted)
    ]
    assert (head.logits(outs[0]) - head.logits(outs[1])).abs().max() > 1e-2


@torch.inference_mode()
def test_positions_past_the_head_s_limit_are_computed_and_noticed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = loaded(heads.specforge(max_position_embeddings=8), tmp_path)
    ids, features = text(0, 3, n=11)
    cache, notices = head.new_cache(), []
    for start, end in ((0, 8), (8, 9), (9, 11)):
        seen = torch.ones(1, end - start, end, dtype=torch.bool).tril(start)
        positions = torch.arange(start, end)[None]
        out = head.forward(ids[None, start:end], head.enter(features[None, start:end]), positions, seen, cache)
        assert head.logits(out).isfinite().all()
        notices.append(sum("8 positions" in record.message for record in caplog.records))
    assert notices == [0, 1, 1]


@torch.inference_mode()
def test_rows_of_a_batch_have_their_own_positions_and_equal_each_text_alone(tmp_path: Path) -> None:
    tiny = heads.specforge()
    head, target = loaded(tiny, tmp_path), tiny_target()
    lengths, width = (5, 2), 5
    texts = [text(seed, 3, n) for seed, n in enumerate(lengths)]
    ids_BT = nn.utils.rnn.pad_sequence([ids[:-1] for ids, _ in texts], batch_first=True)
    features = nn.utils.rnn.pad_sequence([features for _, features in texts], batch_first=True, padding_value=9.0)
    cache = head.new_cache()
    out = head.forward(ids_BT, head.enter(features), torch.arange(width).expand(2, -1), None, cache)
    last = out[torch.arange(2), torch.tensor(lengths) - 1][:, None]
    drafts = torch.stack([ids[-1:] for ids, _ in texts])
    seen = torch.arange(width) < torch.tensor(lengths)[:, None]
    seen = torch.cat([seen, torch.ones(2, 1, dtype=torch.bool)], dim=1)[:, None]
    second = head.forward(drafts, head.feedback(last), torch.tensor(lengths)[:, None], seen, cache)
    for row, (ids, row_features) in enumerate(texts):
        reference = Reference(tiny, target.get_input_embeddings().weight, target.get_output_embeddings().weight)
        outs = [reference.read(i, int(ids[i]), reference.enter(row_features[i])) for i in range(lengths[row])]
        torch.testing.assert_close(last[row, 0], outs[-1], atol=2e-5, rtol=2e-5)
        wanted = reference.read(lengths[row], int(ids[-1]), reference.feedback(outs[-1]))
        torch.testing.assert_close(second[row, 0], wanted, atol=2e-5, rtol=2e-5)


def test_a_head_with_its_own_embedding_never_looks_at_the_target_s(tmp_path: Path) -> None:
    own = load_head(heads.speculators().write(tmp_path / "own"), target_config())
    borrowed = load_head(heads.safeailab().write(tmp_path / "borrowed"), target_config())
    for head, depends in ((own, False), (borrowed, True)):
        one, other = (computed(head.attach(tiny_target(seed))) for seed in SEEDS)
        assert differs(one, other, "logits1") == depends


def test_an_embedding_or_output_matrix_of_another_size_is_refused(tmp_path: Path) -> None:
    stranger = SimpleNamespace(
        get_input_embeddings=lambda: nn.Embedding(V + 1, H), get_output_embeddings=lambda: nn.Linear(H, V + 1)
    )
    for index, tiny in enumerate((heads.safeailab(), heads.modelopt_short())):
        with pytest.raises(InputError, match=f"{V + 1}"):
            load_head(tiny.write(tmp_path / str(index)), target_config()).attach(stranger)


def test_half_precision_weights_load_in_the_precision_asked_for(tmp_path: Path) -> None:
    plain = heads.safeailab()
    halved = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in plain.tensors.items()}
    folder = TinyHead(plain.values, halved, file=plain.file).write(tmp_path)
    rounded = TinyHead(plain.values, {key: t.float() if t.is_floating_point() else t for key, t in halved.items()})
    assert_equal(computed(load_head(folder, target_config()).attach(tiny_target())), expected(rounded))
    head = load_head(folder, target_config(), dtype=torch.bfloat16).attach(tiny_target())
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(computed(head)["logits1"], expected(rounded)["logits1"], atol=0.3, rtol=0.1)


def test_casting_a_head_leaves_its_rotary_frequencies_exact(tmp_path: Path) -> None:
    head = loaded(heads.specforge(), tmp_path)
    hidden = torch.zeros(1, 60, H)
    before = head.positions(hidden, 0)
    after = head.to(torch.bfloat16).positions(hidden, 0)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_only_a_head_of_safeailab_s_kind_is_saved_and_comes_back_the_same(tmp_path: Path) -> None:
    head = loaded(heads.safeailab(rope_theta=500.0), tmp_path / "one")
    (tmp_path / "two").mkdir()
    head.save(tmp_path / "two")
    again = load_head(tmp_path / "two", target_config()).attach(tiny_target())
    assert_equal(computed(again), computed(head))
    for index, tiny in enumerate((heads.speculators(), heads.two_layers())):
        with pytest.raises(ValueError, match="SafeAILab"):
            loaded(tiny, tmp_path / f"other{index}").save(tmp_path / "two")
