"""Laws of the cheap trained predictors and of the hidden inputs that a draft MLP reads.

Letters: B batch, T tokens, A depths of a draft, F width of the draft head, L MoE layers, E experts, K experts per
token, V vocabulary, D width of the target's embeddings.
"""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from ecospec.data.module import collate
from ecospec.data.traces import Trace
from ecospec.errors import InputError
from ecospec.predictor.kinds.draft_mlp.head_inputs import (
    HeadInputTrace,
    inputs_at_depths,
    read_head_inputs,
    require_rollout,
)
from ecospec.predictor.kinds.draft_mlp.model import DraftMLP, DraftMLPConfig, fingerprint
from ecospec.predictor.kinds.linear.model import LinearConfig, LinearPredictor
from ecospec.predictor.kinds.loading import kind_of, load_predictor, predictor_values
from ecospec.predictor.kinds.routing import embedding_hash
from tests.test_drafter_rollout import H as F
from tests.test_drafter_rollout import V, random_batch, small_head
from tests.tiny import tiny_model

L, E, K, D, STEPS = 3, 8, 2, 12, 3
SEEDS = (0, 1, 2)


def routing(seed: int) -> tuple[dict, torch.Tensor]:
    """The fields that say which target a model belongs to, and that target's embedding table."""
    table_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(seed))
    shape = {"num_layers": L, "num_experts": E, "num_experts_per_tok": K, "vocab_size": V, "embedding_size": D}
    return shape | {"embedding_sha256": embedding_hash(table_VD)}, table_VD


def linear(seed: int) -> LinearPredictor:
    torch.manual_seed(seed)
    values, table_VD = routing(seed)
    return LinearPredictor(LinearConfig(**values)).attach_embedding(table_VD)


def draft_mlp(seed: int, **changes: object) -> DraftMLP:
    torch.manual_seed(seed)
    values, table_VD = routing(seed)
    sizes = {"draft_size": F, "hidden_size": 24, "intermediate_size": 16, "num_blocks": 2}
    return DraftMLP(DraftMLPConfig(**values, **sizes, **changes)).attach_embedding(table_VD)


def random_trace(seed: int, T: int, vocab_size: int = V) -> Trace:
    generator = np.random.default_rng(seed)
    experts = np.stack([np.sort(generator.permutation(E)[:K]) for _ in range(T * L)]).reshape(T, L, K)
    ids_T = generator.integers(vocab_size, size=T).astype(np.int32)
    return Trace(f"key{seed}", f"words/{seed}/0", "words", 0, "train", 2, ids_T, experts.astype(np.uint8))


def head_input_items(seed: int, lengths: tuple[int, ...] = (9, 5, 12)) -> list[HeadInputTrace]:
    generator = torch.Generator().manual_seed(seed)
    items = [random_trace(seed + n, T) for n, T in enumerate(lengths)]
    return [
        HeadInputTrace(
            **vars(item), head_inputs=torch.randn(len(item.input_ids), STEPS + 1, F, generator=generator).bfloat16()
        )
        for item in items
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_linear_probe_sees_each_token_alone(seed):
    model = linear(seed)
    ids_BT = torch.randint(0, V, (2, 7), generator=torch.Generator().manual_seed(seed))
    logits_BTLE = model(ids_BT)
    assert logits_BTLE.shape == (2, 7, L, E)
    for b, t in ((0, 0), (1, 6)):
        assert torch.allclose(logits_BTLE[b, t], model(ids_BT[b, t].view(1, 1))[0, 0], atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_draft_mlp_sees_each_node_alone(seed):
    model = draft_mlp(seed)
    ids_BN = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(seed))
    inputs_BNF = torch.randn(2, 5, F)
    whole_BNLE = model(ids_BN, inputs_BNF)
    assert torch.allclose(whole_BNLE[1, 3], model(ids_BN[1, 3], inputs_BNF[1, 3]), atol=1e-6)
    assert not torch.allclose(whole_BNLE[1, 3], model(ids_BN[1, 3], inputs_BNF[1, 2]), atol=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", (linear, draft_mlp))
def test_what_is_learnt_of_a_padded_batch_is_what_is_learnt_of_its_samples(make, seed):
    model, items = make(seed).eval(), head_input_items(seed)
    together, experts = model.read(batch := collate(items), batch.tokens())
    apart = [model.read(batch := collate([item]), batch.tokens()) for item in items]
    copies = len(together) // sum(len(item.input_ids) for item in items)
    assert copies == (STEPS + 1 if make is draft_mlp else 1)
    for found, parts in ((together, [h for h, _ in apart]), (experts, [e for _, e in apart])):
        by_copy = torch.cat([part.unflatten(0, (copies, -1)) for part in parts], dim=1).flatten(0, 1)
        assert torch.allclose(found.float(), by_copy.float(), atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_in_training_a_draft_mlp_reads_each_position_at_one_depth_and_in_time_at_all(seed):
    model, batch = draft_mlp(seed), collate(head_input_items(seed))
    every, experts_XLK = model.eval().read(batch, batch.tokens())
    by_depth_ANH = every.unflatten(0, (STEPS + 1, -1))
    depths = set()
    for _ in range(20):
        hidden_NH, experts_NLK = model.train().read(batch, batch.tokens())
        assert torch.equal(experts_NLK, experts_XLK[: len(hidden_NH)])
        distance_AN = (by_depth_ANH - hidden_NH).abs().amax(-1)
        assert (distance_AN.amin(0) < 1e-5).all()
        depths |= set(distance_AN.argmin(0).tolist())
    assert depths == set(range(STEPS + 1))


@pytest.mark.parametrize("make", (linear, draft_mlp))
def test_a_saved_model_loads_as_its_kind_without_the_embedding_table(make, tmp_path):
    model = make(1)
    model.save_pretrained(tmp_path)
    kind = {linear: "linear", draft_mlp: "draft_mlp"}[make]
    assert kind_of(tmp_path).name == kind
    assert predictor_values(tmp_path, kind)["num_experts"] == E
    with pytest.raises(InputError, match=f"holds a {kind} where footprints predictor need a predictor"):
        predictor_values(tmp_path, "predictor")
    loaded = load_predictor(tmp_path).attach_embedding(routing(1)[1])
    ids_BN, inputs_BNF = torch.arange(6)[None], torch.randn(1, 6, F)
    arguments = (ids_BN, inputs_BNF) if make is draft_mlp else (ids_BN,)
    assert torch.equal(loaded(*arguments), model(*arguments))
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())


def test_another_draft_head_is_refused():
    model = draft_mlp(0, drafter_fingerprint=fingerprint(small_head(0)))
    model.require_head(small_head(0), STEPS)
    fed_otherwise = small_head(0)
    fed_otherwise.feature_layers = (1, 2, 3)
    for head in (small_head(1), fed_otherwise, torch.nn.Linear(2, 2)):
        with pytest.raises(InputError, match="another draft head"):
            model.require_head(head, STEPS)
    with pytest.raises(InputError, match="draft no deeper"):
        model.require_head(small_head(0), STEPS + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fingerprint_is_the_same_in_bfloat16(seed):
    head = small_head(seed)
    assert fingerprint(head) == fingerprint(small_head(seed).bfloat16())


def input_by_hand(head, ids_T, features_TF, token: int, depth: int):
    """What the head is fed at `token` when the text ends `depth` tokens earlier, one forward of the head at a time."""
    root = token - depth
    entered_TF, cache = head.enter(features_TF)[None], DynamicCache()
    if depth == 0:
        return entered_TF[0, root - 1]
    out = head.forward(ids_T[None, 1 : root + 1], entered_TF[:, :root], torch.arange(root)[None], None, cache)[:, -1:]
    for position in range(root, token - 1):
        sees_all = torch.ones(1, 1, position + 1, dtype=torch.bool)
        ids_11, at_11 = ids_T[None, position + 1, None], torch.tensor([[position]])
        out = head.forward(ids_11, head.feedback(out), at_11, sees_all, cache)
    return head.feedback(out)[0, 0]


@torch.no_grad()
@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_head_is_fed_along_a_text_is_what_a_decoder_feeds_it(seed):
    head, batch = small_head(seed), random_batch(seed, [8, 6])
    inputs_BTAF = inputs_at_depths(head, batch.ids_BT, batch.features_BTF, STEPS)
    for b, length in enumerate(batch.lengths_B.tolist()):
        for depth in range(STEPS + 1):
            assert not inputs_BTAF[b, : depth + 1, depth].any()
            for token in range(depth + 1, length):
                expected_F = input_by_hand(head, batch.ids_BT[b], batch.features_BTF[b], token, depth)
                assert torch.allclose(inputs_BTAF[b, token, depth], expected_F, atol=1e-4), (b, depth, token)


@pytest.mark.parametrize("tokens", (1, 2, 3))
def test_texts_shorter_than_a_draft_are_fed_as_far_as_they_go(tokens):
    head, batch = small_head(0), random_batch(0, [tokens])
    inputs_BTAF = inputs_at_depths(head, batch.ids_BT, batch.features_BTF, STEPS)
    assert inputs_BTAF.shape == (1, tokens, STEPS + 1, F)
    assert inputs_BTAF.isfinite().all()


def test_reading_gives_every_sample_its_own_rows():
    model, head = tiny_model("qwen3_moe"), small_head(0)
    head.feature_layers = (1, 2, 3)
    items = [random_trace(n, T) for n, T in enumerate((11, 4, 7))]
    read = read_head_inputs(model, head, items, STEPS)
    assert [item.sample_id for item in read] == [item.sample_id for item in items]
    for item in read:
        (alone,) = read_head_inputs(model, head, [bare(item)], STEPS)
        assert torch.allclose(item.head_inputs.float(), alone.head_inputs.float(), atol=2e-2)


def bare(item: HeadInputTrace) -> Trace:
    return Trace(**{name: value for name, value in vars(item).items() if name != "head_inputs"})


def test_a_head_whose_feedback_is_normed_cannot_be_rolled_out():
    head = small_head(0)
    head.flags = type(head.flags)(post_norm_feedback=True)
    with pytest.raises(InputError, match="EAGLE-3 heads of one layer"):
        require_rollout(head)
    with pytest.raises(InputError, match="EAGLE-3 heads of one layer"):
        require_rollout(torch.nn.Linear(2, 2))
