"""Laws of EAGLE-3's training-time test: training sees exactly what decoding will.

Letters: B batch, T tokens, S starts of a step, H draft hidden width, D draft vocabulary.
"""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.inference.drafters.eagle3.rollout import DraftBatch, rollout, rollout_losses, score, weighted_loss
from ecospec.inference.drafters.growth import TreeDrafter

V, D, H, STEPS = 60, 20, 32, 3
SEEDS = (0, 1, 2)


def small_head(seed: int) -> Eagle3Head:
    """A random head whose head_dim is not H / heads and whose draft vocabulary is scattered."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V,
        draft_vocab_size=D,
        hidden_size=H,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=1,
        max_position_embeddings=64,
    )
    head = Eagle3Head(config).attach_embedding(torch.nn.Embedding(V, H).requires_grad_(False))
    used_D = torch.randperm(V)[:D].sort().values
    head.d2t.copy_(used_D - torch.arange(D))
    head.t2d.fill_(False)[used_D] = True
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def random_batch(seed: int, lengths: list[int], padded: int | None = None) -> DraftBatch:
    """Texts of these lengths; their content does not depend on `padded`, the padding is noise."""
    B, T = len(lengths), max(lengths)
    generator = torch.Generator().manual_seed(seed)

    def wider(values: Tensor, fill: Tensor) -> Tensor:
        return torch.cat([values, fill], dim=1)

    extra = (padded or T) - T
    ids_BT = torch.randint(0, V, (B, T), generator=generator)
    features = torch.randn(B, T, 3 * H, generator=generator)
    final = torch.randn(B, T, H, generator=generator)
    best_BT = torch.randint(0, V, (B, T), generator=generator)
    return DraftBatch(
        wider(ids_BT, torch.randint(0, V, (B, extra))),
        wider(features, 9 * torch.randn(B, extra, 3 * H)),
        wider(final, 9 * torch.randn(B, extra, H)),
        wider(best_BT, torch.randint(0, V, (B, extra))),
        torch.tensor(lengths),
        torch.full((B,), 3),
    )


def decode_chain(head: Eagle3Head, ids_T: Tensor, features_TF: Tensor, start: int, rounds: list[int]) -> list[Tensor]:
    """Logits of each step from `start`, by the decoder's own cache and positions.

    The pairs before `start` come in extends that end at `rounds`, as accepted text would, each followed by a tree.
    """
    drafter, done = TreeDrafter(head, STEPS, topk=2), 0
    for end in [*rounds, start + 1]:
        _, out = drafter._extend([ids_T[: end + 1]], [features_TF[done:end]])
        if end <= start:
            drafter._grow(out)
            drafter.cache.keep([[]], 2 * (STEPS - 1))
        done = end
    cache = drafter.cache.cache
    parent, logits = out, [head.logits(out[0, -1])]
    for step in range(2, STEPS + 1):
        sees_all = torch.ones(1, 1, done + step - 1, dtype=torch.bool)
        token, position = ids_T[None, start + step : start + step + 1], torch.tensor([[done + step - 2]])
        parent = head.forward(token, head.feedback(parent), position, sees_all, cache)
        logits.append(head.logits(parent[0, -1]))
    return logits


def recompute_chain(head: Eagle3Head, ids_T: Tensor, features_TF: Tensor, start: int) -> list[Tensor]:
    """The slow reference, without a cache or a mask: each step recomputes every key it may see, head by head."""
    attention = head.midlayer.self_attn
    group = head.config.num_attention_heads // head.config.num_key_value_heads

    def project(hidden_1H: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        embedded = head.embed(ids_T[position + 1])[None, None]
        query, key, value = attention.project(
            head.midlayer.inputs(embedded, hidden_1H[None]), head.positions(hidden_1H[None], position)
        )
        return query[0, :, 0], key[0, :, 0], value[0, :, 0]

    hiddens = [head.fc(features_TF[i : i + 1]) for i in range(start + 1)]
    logits = []
    for _ in range(STEPS):
        rows = [project(hidden, position) for position, hidden in enumerate(hiddens)]
        query = rows[-1][0]
        heads = []
        for number in range(len(query)):
            keys = torch.stack([row[1][number // group] for row in rows])
            values = torch.stack([row[2][number // group] for row in rows])
            heads.append(((keys @ query[number]) / 16**0.5).softmax(0) @ values)
        out_1H = head.midlayer.finish(hiddens[-1], attention.o_proj(torch.cat(heads))[None])
        logits.append(head.logits(out_1H)[0])
        hiddens.append(out_1H)
    return logits


def teacher_forced(head: Eagle3Head, batch: DraftBatch) -> list[Tensor]:
    return [head.logits(hidden) for hidden in rollout(head, batch.ids_BT, batch.features_BTF, STEPS)]


def drafted_tokens(head: Eagle3Head, batch: DraftBatch) -> list[Tensor]:
    return [head.target_ids(logits.argmax(-1)) for logits in teacher_forced(head, batch)]


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_every_step_of_the_rollout_equals_decoding_with_its_cache(seed: int) -> None:
    head, batch = small_head(seed), random_batch(seed, [14])
    steps = teacher_forced(head, batch)
    for start in range(14 - STEPS):
        for rounds in ([], [n for n in (2, 3, 7) if n <= start]):
            decoded = decode_chain(head, batch.ids_BT[0], batch.features_BTF[0], start, rounds)
            for logits_BSD, expected_D in zip(steps, decoded, strict=True):
                torch.testing.assert_close(logits_BSD[0, start], expected_D, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_every_step_of_the_rollout_equals_a_recomputation_without_cache(seed: int) -> None:
    head, batch = small_head(seed), random_batch(seed, [12])
    steps = teacher_forced(head, batch)
    for start in range(12 - STEPS):
        expected = recompute_chain(head, batch.ids_BT[0], batch.features_BTF[0], start)
        for logits_BSD, expected_D in zip(steps, expected, strict=True):
            torch.testing.assert_close(logits_BSD[0, start], expected_D, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_the_rollout_along_a_drafted_chain_gives_the_drafter_s_own_probabilities(seed: int) -> None:
    head, batch = small_head(seed), random_batch(seed, [9])
    drafter = TreeDrafter(head, STEPS, topk=1)
    tree = drafter.draft([batch.ids_BT[0]], [batch.features_BTF[0, :8]]).row(0)
    ids_BT = torch.cat([batch.ids_BT, tree.tokens_N[None, 1:]], dim=1)
    unseen = 9 * torch.randn(1, 1 + STEPS, 3 * H)  # neither the root nor the drafts have been through the target
    features_BTF = torch.cat([batch.features_BTF[:, :8], unseen], dim=1)
    chain = [head.logits(hidden)[0, 7].softmax(-1).max() for hidden in rollout(head, ids_BT, features_BTF, STEPS)]
    torch.testing.assert_close(torch.stack(chain).cumprod(0), tree.prob_N[1:], atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_a_step_depends_on_the_output_of_the_step_before() -> None:
    head, batch = small_head(0), random_batch(0, [10])
    features_twice = batch.features_BTF.clone()
    features_twice[:, 4] += 1
    one, other = (rollout(head, batch.ids_BT, features, STEPS) for features in (batch.features_BTF, features_twice))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a[:, :4], b[:, :4])
        assert not torch.allclose(a[:, 4], b[:, 4])


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_and_neighbours_never_change_the_loss_or_its_gradient(seed: int) -> None:
    lengths, weight_DH = [6, 13, 9], torch.randn(D, H, generator=torch.Generator().manual_seed(seed))
    results = []
    for padded in (None, 21):
        head = small_head(seed)
        losses = rollout_losses(head, random_batch(seed, lengths, padded), weight_DH, STEPS)
        weighted_loss(losses).backward()
        results.append((torch.stack(losses).detach(), head.fc.weight.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_a_batch_s_loss_is_the_mean_over_the_counted_starts_of_each_text_alone(seed: int) -> None:
    head, lengths = small_head(seed), [5, 11, 8]
    weight_DH = torch.randn(D, H)
    batch = random_batch(seed, lengths)
    totals, counts = torch.zeros(STEPS), torch.zeros(STEPS)
    for row, length in enumerate(lengths):
        steps = rollout(head, batch.ids_BT[row : row + 1, :length], batch.features_BTF[row : row + 1, :length], STEPS)
        for step, hidden in enumerate(steps, 1):
            for start in range(length - step):
                if head.t2d[batch.best_BT[row, start + step]]:
                    target_D = (weight_DH @ batch.final_BTH[row, start + step]).softmax(0)
                    totals[step - 1] -= target_D @ head.logits(hidden[0, start]).log_softmax(0)
                    counts[step - 1] += 1
    assert counts.min() > 0
    losses = torch.stack(rollout_losses(head, batch, weight_DH, STEPS))
    torch.testing.assert_close(losses, totals / counts, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_scores_count_answer_rounds_one_by_one(seed: int) -> None:
    head, lengths = small_head(seed), [7, 12, 10]
    batch = random_batch(seed, lengths)
    for row, start in ((1, 4), (2, 3)):  # make the text follow the draft at two places, the target at a third
        for step in (1, 2):
            batch.ids_BT[row, start + step + 1] = drafted_tokens(head, batch)[step - 1][row, start]
    drafted = drafted_tokens(head, batch)
    batch.best_BT[1, 6] = drafted[0][1, 5]
    scores = score(head, batch, STEPS)
    agreed, rounds, accepted, full = (torch.zeros(STEPS, dtype=torch.long) for _ in range(4))
    for row, length in enumerate(lengths):
        for start in range(int(batch.prompt_lens_B[row]) - 1, length):
            whole, following = start + STEPS + 1 < length, True
            for step in range(1, STEPS + 1):
                if start + step < length:
                    token = drafted[step - 1][row, start]
                    rounds[step - 1] += 1
                    agreed[step - 1] += int(token == batch.best_BT[row, start + step])
                if whole:
                    following = following and bool(drafted[step - 1][row, start] == batch.ids_BT[row, start + step + 1])
                    full[step - 1] += 1
                    accepted[step - 1] += int(following)
    assert accepted[1] >= 2 and agreed[0] >= 1
    for found, expected in zip(scores, (agreed, rounds, accepted, full), strict=True):
        assert torch.equal(found, expected)


def test_later_steps_weigh_four_fifths_of_the_step_before() -> None:
    assert weighted_loss([torch.tensor(1.0), torch.tensor(10.0), torch.tensor(100.0)]).item() == pytest.approx(73.0)
