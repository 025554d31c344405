"""Equations 3 to 6, the meter, and the simple predictors, each against an explicit reference.

Letters: B batch, T tokens, L MoE layers, E experts, K experts per token, V vocabulary.
"""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ecospec.data.module import Batch, collate
from ecospec.errors import InputError
from ecospec.predictor.kinds import kind_named
from ecospec.predictor.kinds.counting import ExpertTable
from ecospec.predictor.objective import loss, overlap
from ecospec.predictor.objective.loss import batch_loss, excess_loss, expert_loss
from ecospec.predictor.objective.metrics import (
    OverlapMeter,
    calibration,
    calibration_bins,
    measure,
    ranks,
    shared_experts,
    top_experts,
)
from tests.halves import ReadsTokens
from tests.loss_memory import peaks
from tests.stand_ins import tiny_predictor

L, E, K, V = 3, 10, 3, 17
SEEDS = range(3)


class MemoryTraces(list):
    """Trace items in memory, with the shape that a trace folder's manifest gives."""

    num_layers, num_experts, top_k = L, E, K


def random_item(
    rng: np.random.Generator,
    split: str = "train",
    dataset: str = "a",
    T: int | None = None,
    num_layers: int = L,
    num_experts: int = E,
) -> SimpleNamespace:
    T = T or int(rng.integers(4, 12))
    experts_TLK = np.sort(rng.random((T, num_layers, num_experts)).argsort(-1)[..., :K], axis=-1).astype(np.uint8)
    ids_T = rng.integers(0, V, T).astype(np.int32)
    name = {"sample_id": f"{dataset}/{rng.integers(1000)}/0", "dataset": dataset, "split": split}
    return SimpleNamespace(input_ids=ids_T, prompt_len=2, experts=experts_TLK, columns={}, **name)


def count(kind: str, traces: MemoryTraces, vocab_size: int = V) -> ExpertTable:
    return kind_named(kind).count(traces, vocab_size)


def random_traces(seed: int, size: int = 12) -> MemoryTraces:
    rng = np.random.default_rng(seed)
    return MemoryTraces(random_item(rng, "test" if i % 3 == 0 else "train", "ab"[i % 2]) for i in range(size))


class StandIn(ReadsTokens, nn.Module):
    """The two halves of a predictor: a table for the backbone, and a linear head."""

    def __init__(self, seed: int, num_layers: int = L, num_experts: int = E, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.sizes = nn.Embedding(V, width), (num_layers, num_experts)
        self.head = nn.Linear(width, num_layers * num_experts)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).unflatten(-1, self.sizes)


@pytest.fixture(params=[2, 1024], ids=["chunks of 2", "one chunk"])
def chunk_tokens(request, monkeypatch):
    """Batches in a chunk, and in many with a rest."""
    for place in (loss, overlap):
        monkeypatch.setattr(place, "CHUNK_TOKENS", request.param)


def ragged_batch(seed: int, num_layers: int = L, num_experts: int = E) -> Batch:
    rng = np.random.default_rng(seed)
    return collate([random_item(rng, T=T, num_layers=num_layers, num_experts=num_experts) for T in (3, 7, 5)])


@pytest.mark.usefixtures("chunk_tokens")
@pytest.mark.parametrize("sizes", [(3, 10), (10, 10)], ids=["L ≠ E", "L = E"])
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_is_equation_6_with_the_explicit_q_of_equation_5_summed_in_float64(seed, sizes):
    predictor, batch, total, count = StandIn(seed, *sizes), ragged_batch(seed, *sizes), 0.0, 0
    logits_BTLE = predictor.logits(predictor.hidden(batch.input_ids)).detach().double()
    for row, length in enumerate(batch.lengths.tolist()):
        for place in np.ndindex(length, sizes[0]):
            probability_E = logits_BTLE[row][place].softmax(-1)
            q_E = torch.zeros(sizes[1], dtype=torch.float64)
            for expert in batch.experts[row][place].tolist():
                q_E[expert] = 1 / K
            total, count = total - float((q_E * probability_E.log()).sum()), count + 1
    assert batch_loss(predictor, batch).item() == pytest.approx(total / count, rel=1e-6)


@pytest.mark.usefixtures("chunk_tokens")
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_gradients_are_autograds_on_all_logits_at_once(seed):
    predictor, batch = StandIn(seed), ragged_batch(seed)
    logits_NLE = predictor.logits(predictor.hidden(batch.input_ids))[batch.tokens()]
    expected = expert_loss(logits_NLE, batch.experts[batch.tokens()])
    found = batch_loss(predictor, batch)
    torch.testing.assert_close(found, expected)
    of = [torch.autograd.grad(3 * value, list(predictor.parameters())) for value in (found, expected)]
    assert len(of[0]) == 3
    for one, other in zip(*of, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("chunk_tokens")
@pytest.mark.parametrize("seed", SEEDS)
def test_padding_changes_neither_loss_nor_gradient(seed):
    rng = np.random.default_rng(seed)
    items, predictor = [random_item(rng, T=T) for T in (3, 7, 5)], StandIn(seed)
    alone = [batch_loss(predictor, collate([item])) * len(item.input_ids) for item in items]
    padded = batch_loss(predictor, collate(items))
    torch.testing.assert_close(padded, sum(alone) / 15)
    gradients = [torch.autograd.grad(loss, list(predictor.parameters())) for loss in (padded, sum(alone) / 15)]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_batch_without_tokens_costs_nothing():
    predictor, batch = StandIn(0), ragged_batch(0)
    nothing = batch_loss(predictor, batch._replace(lengths=torch.zeros(3, dtype=torch.int64)))
    nothing.backward()
    assert nothing == 0
    assert not any(parameter.grad.any() for parameter in predictor.parameters())


def test_perfect_logits_give_log_k_and_only_those():
    experts_BTLK = torch.arange(K).expand(1, 4, L, K)
    perfect = torch.full((1, 4, L, E), -1e4)
    perfect[..., :K] = 0.0
    assert expert_loss(perfect, experts_BTLK).item() == pytest.approx(math.log(K))
    assert excess_loss(math.log(K), K) == 0
    uneven = perfect.clone()
    uneven[..., 0] = 1.0
    assert excess_loss(expert_loss(uneven, experts_BTLK).item(), K) > 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_one_batch_can_be_learned_by_heart(seed):
    torch.manual_seed(seed)
    predictor = tiny_predictor(nn.Embedding(V, 16), seed).requires_grad_(True)
    batch, meter = ragged_batch(seed, predictor.config.num_layers, predictor.config.num_experts), overlap.Overlap()
    optimizer = torch.optim.Adam(predictor.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        batch_loss(predictor, batch).backward()
        optimizer.step()
    with torch.no_grad():
        meter.update(predictor, batch)
    assert meter.compute() > 0.99


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process")
def test_no_more_logits_are_in_memory_than_the_stated_bound():
    of_loss, with_overlap, with_whole = peaks("loss,overlap,whole", 3, 1024, 24, 128)
    assert of_loss <= loss.LOSS_CHUNKS and with_overlap <= 5
    assert with_whole > 6  # what all logits at once would take


def test_top_experts_are_the_k_largest_and_ties_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 1.0, 1.0]])
    assert top_experts(logits, 3).tolist() == [[1, 2, 3]]
    torch.manual_seed(0)
    random = torch.randn(50, E)
    assert torch.equal(top_experts(random, K), random.topk(K).indices.sort().values)


@pytest.mark.parametrize("seed", SEEDS)
def test_meter_equals_counting_with_python_sets(seed):
    traces, rng = random_traces(seed), np.random.default_rng(100 + seed)
    meter, shares = OverlapMeter(K, E), []
    for item in traces:
        logits_TLE = torch.from_numpy(rng.normal(size=(len(item.input_ids), L, E)))
        meter.add(item, logits_TLE.split(3))
        for t, layer in np.ndindex(len(item.input_ids), L):
            predicted = set(np.argsort(-logits_TLE[t, layer].numpy())[:K].tolist())
            share = len(predicted & set(item.experts[t, layer].tolist())) / K
            shares.append((item.split, item.dataset, t >= item.prompt_len, layer, share))

    def mean(split: str, answer_only: bool = True, dataset: str | None = None, layer: int | None = None) -> float:
        chosen = [
            share
            for s, d, answer, at, share in shares
            if s == split and (answer or not answer_only) and dataset in (None, d) and layer in (None, at)
        ]
        return sum(chosen) / len(chosen)

    metrics = meter.numbers()
    assert metrics.overlap == pytest.approx(mean("test"))
    assert metrics.overlap_all == pytest.approx(mean("test", answer_only=False))
    assert metrics.overlap_train == pytest.approx(mean("train"))
    assert metrics.overlap_by_layer == pytest.approx([mean("test", layer=at) for at in range(L)])
    assert metrics.overlap_by_dataset == pytest.approx({d: mean("test", dataset=d) for d in "ab"})


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_are_places_in_a_stable_sort(seed):
    rng = np.random.default_rng(seed)
    logits_TE = torch.from_numpy(rng.integers(0, 4, (30, E)).astype(np.float32))  # many ties
    experts_TK = torch.from_numpy(rng.random((30, E)).argsort(-1)[:, :K])
    for row in range(30):
        order = sorted(range(E), key=lambda e: (-logits_TE[row, e].item(), e))
        assert ranks(logits_TE[row], experts_TK[row]).tolist() == [order.index(e) for e in experts_TK[row].tolist()]
    assert torch.equal(
        (ranks(logits_TE, experts_TK) < K).sum(-1), shared_experts(top_experts(logits_TE, K), experts_TK, E)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_recall_and_calibration_equal_counting_one_by_one(seed):
    traces, rng = random_traces(seed), np.random.default_rng(100 + seed)
    meter, recalled, triples = OverlapMeter(K, E), {size: [] for size in (3, 5, 7, 10)}, []
    for item in traces:
        logits_TLE = torch.from_numpy(2 * rng.normal(size=(len(item.input_ids), L, E)))
        meter.add(item, logits_TLE.split(5))
        for t, layer in np.ndindex(len(item.input_ids), L):
            if item.split == "train" or t < item.prompt_len:
                continue
            best, true = np.argsort(-logits_TLE[t, layer].numpy()).tolist(), item.experts[t, layer].tolist()
            for size, shares in recalled.items():
                shares.append(len(set(best[:size]) & set(true)) / K)
            probability_E = logits_TLE[t, layer].softmax(-1).tolist()
            triples += [(min(1.0, K * p), expert in true) for expert, p in enumerate(probability_E)]
    metrics = meter.numbers()
    assert metrics.recall_at == pytest.approx({str(size): np.mean(shares) for size, shares in recalled.items()})
    assert metrics.recall_at["3"] == pytest.approx(metrics.overlap)
    bins = [[triple for triple in triples if min(9, int(10 * triple[0])) == number] for number in range(10)]
    bins = [np.array(inside) for inside in bins if inside]
    expected = {"predicted": [b[:, 0].mean() for b in bins], "observed": [b[:, 1].mean() for b in bins]}
    found = metrics.calibration
    assert found["bins"]["number"] == [len(b) for b in bins]
    assert all(found["bins"][name] == pytest.approx(values) for name, values in expected.items())
    distances = [len(b) * abs(b[:, 0].mean() - b[:, 1].mean()) for b in bins]
    assert found["error"] == pytest.approx(sum(distances) / len(triples))


def test_only_true_probabilities_are_calibrated():
    """Experts drawn evenly and predicted so have no error; sure predictions of what is drawn evenly have one."""
    torch.manual_seed(0)
    logits_TLE = torch.randn(4000, 1, E)
    chosen_TLE = torch.rand(4000, 1, E).argsort(-1)[..., :1]
    uniform = calibration(calibration_bins(torch.zeros(4000, 1, E), chosen_TLE).numpy())
    overconfident = calibration(calibration_bins(4 * logits_TLE, chosen_TLE).numpy())
    assert uniform["error"] < 0.01 < 0.1 < overconfident["error"]


def test_knowing_the_routing_gives_overlap_one_and_no_excess_loss():
    traces = random_traces(0)

    def oracle(item: SimpleNamespace) -> tuple[torch.Tensor, ...]:
        chosen = torch.from_numpy(item.experts.astype(np.int64))
        return [torch.full((*chosen.shape[:2], E), -1e4).scatter_(-1, chosen, 0.0).split(4)]

    metrics = measure(oracle, traces)
    assert metrics.overlap == metrics.overlap_all == metrics.overlap_train == 1.0
    assert metrics.excess_loss == pytest.approx(0.0, abs=1e-5)
    assert metrics.recall_at == dict.fromkeys(["3", "5", "7", "10"], 1.0)
    assert metrics.calibration["error"] == pytest.approx(0.0, abs=1e-6)
    assert metrics.calibration["bins"]["observed"] == [0.0, 1.0]


def test_traces_without_held_out_answers_are_refused():
    traces = MemoryTraces(item for item in random_traces(0) if item.split == "train")
    frequency = count("frequency", traces)
    with pytest.raises(InputError, match="test samples have no answer positions"):
        measure(lambda item: [[frequency.logits(item.input_ids)]], traces)


def brute_force_top(counts: Counter, ties: Counter) -> list[int]:
    return sorted(sorted(range(E), key=lambda e: (-counts[e], -ties[e], e))[:K])


def brute_force_counts(traces: MemoryTraces) -> tuple[list[Counter], dict[int, list[Counter]]]:
    """Counts of each layer's experts over the train samples, in all and per token id."""
    overall, by_token = [Counter() for _ in range(L)], {}
    for item in traces:
        if item.split != "train":
            continue
        for token, experts_LK in zip(item.input_ids.tolist(), item.experts.tolist(), strict=True):
            for layer in range(L):
                overall[layer].update(experts_LK[layer])
                by_token.setdefault(token, [Counter() for _ in range(L)])[layer].update(experts_LK[layer])
    return overall, by_token


@pytest.mark.parametrize("seed", SEEDS)
def test_frequency_and_token_equal_brute_force_counting(seed):
    traces = random_traces(seed, size=9)
    overall, by_token = brute_force_counts(traces)
    ids_V = np.arange(V, dtype=np.int32)
    expected_frequency = [brute_force_top(overall[layer], Counter()) for layer in range(L)]
    assert count("frequency", traces).predict(ids_V).tolist() == [expected_frequency] * V
    unseen = [Counter()] * L
    expected_token = [
        [brute_force_top(by_token.get(v, unseen)[layer], overall[layer]) for layer in range(L)] for v in range(V)
    ]
    assert count("token", traces).predict(ids_V).tolist() == expected_token


def test_a_token_never_seen_gets_the_frequent_experts():
    rng = np.random.default_rng(0)
    item = random_item(rng, T=40)
    item.input_ids = item.input_ids % 5
    traces = MemoryTraces([item])
    token, frequency = count("token", traces), count("frequency", traces)
    unseen = np.array([5, V - 1])
    assert np.array_equal(token.predict(unseen), frequency.predict(unseen))
    assert not np.array_equal(token.predict(np.arange(5)), frequency.predict(np.arange(5)))
    assert len(token.counts_SLE) == 6  # the ids seen and one row of zeros


@pytest.mark.parametrize("seed", SEEDS)
def test_simple_predictors_give_distributions(seed):
    traces, ids_V = random_traces(seed), np.arange(V)
    for simple in (count("frequency", traces), count("token", traces)):
        torch.testing.assert_close(simple.logits(ids_V).exp().sum(-1), torch.ones(V, L, dtype=torch.float64))


def test_counting_refuses_ids_beyond_the_vocabulary_and_missing_train_samples():
    traces = random_traces(0)
    with pytest.raises(InputError, match="beyond the target's 4 tokens"):
        count("token", traces, 4)
    with pytest.raises(InputError, match="no train samples"):
        count("frequency", MemoryTraces(item for item in traces if item.split == "test"))
