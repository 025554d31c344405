"""Equations 3 to 6, the meter, and the simple predictors, each against an explicit reference.

Letters: B batch, T tokens, L MoE layers, E experts, K experts per token, V vocabulary.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ecospec.configs.errors import InputError
from ecospec.data.module import collate
from ecospec.predictor.loss import batch_loss, excess_loss, expert_loss
from ecospec.predictor.metrics import OverlapMeter, measure, top_experts
from ecospec.predictor.simple import fit_frequency, fit_token

L, E, K, V = 3, 10, 3, 17
SEEDS = range(3)


class MemoryTraces(list):
    """Trace items in memory, with the shape that a trace folder's manifest gives."""

    num_layers, num_experts, top_k = L, E, K


def random_item(
    rng: np.random.Generator, split: str = "train", dataset: str = "a", T: int | None = None
) -> SimpleNamespace:
    T = T or int(rng.integers(4, 12))
    experts_TLK = np.sort(rng.random((T, L, E)).argsort(-1)[..., :K], axis=-1).astype(np.uint8)
    ids_T = rng.integers(0, V, T).astype(np.int32)
    name = {"sample_id": f"{dataset}/{rng.integers(1000)}/0", "dataset": dataset, "split": split}
    return SimpleNamespace(input_ids=ids_T, prompt_len=2, experts=experts_TLK, **name)


def random_traces(seed: int, size: int = 12) -> MemoryTraces:
    rng = np.random.default_rng(seed)
    return MemoryTraces(random_item(rng, "test" if i % 3 == 0 else "train", "ab"[i % 2]) for i in range(size))


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_is_equation_6_with_the_explicit_q_of_equation_5(seed):
    torch.manual_seed(seed)
    logits_BTLE = torch.randn(2, 5, L, E)
    experts_BTLK = torch.rand(2, 5, L, E).argsort(-1)[..., :K]
    q_BTLE = torch.zeros(2, 5, L, E)
    for index in np.ndindex(2, 5, L):
        for expert in experts_BTLK[index].tolist():
            q_BTLE[(*index, expert)] = 1 / K
    expected = -(q_BTLE * logits_BTLE.softmax(-1).log()).sum() / (2 * 5 * L)
    torch.testing.assert_close(expert_loss(logits_BTLE, experts_BTLK), expected)


def test_excess_loss_is_zero_only_at_the_true_distribution():
    experts_BTLK = torch.arange(K).expand(1, 4, L, K)
    perfect = torch.full((1, 4, L, E), -1e4)
    perfect[..., :K] = 0.0
    assert excess_loss(expert_loss(perfect, experts_BTLK).item(), K) == pytest.approx(0.0, abs=1e-6)
    uneven = perfect.clone()
    uneven[..., 0] = 1.0
    assert excess_loss(expert_loss(uneven, experts_BTLK).item(), K) > 0.1


class StandIn(nn.Module):
    """The two halves of a predictor: a table for the backbone, and a linear head."""

    def __init__(self, seed: int, num_layers: int = L, num_experts: int = E) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.sizes = nn.Embedding(V, 6), (num_layers, num_experts)
        self.head = nn.Linear(6, num_layers * num_experts)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).unflatten(-1, self.sizes)


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


def test_top_experts_are_the_k_largest_and_ties_go_to_the_lower_id():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 1.0, 1.0]])
    assert top_experts(logits, 3).tolist() == [[1, 2, 3]]
    torch.manual_seed(0)
    random = torch.randn(50, E)
    assert torch.equal(top_experts(random, K), random.topk(K).indices.sort().values)


@pytest.mark.parametrize("seed", SEEDS)
def test_meter_equals_counting_with_python_sets(seed):
    traces, rng = random_traces(seed), np.random.default_rng(100 + seed)
    meter, shares = OverlapMeter(K), []
    for item in traces:
        logits_TLE = torch.from_numpy(rng.normal(size=(len(item.input_ids), L, E)))
        meter.add(item, logits_TLE)
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

    metrics = meter.metrics()
    assert metrics["overlap"] == pytest.approx(mean("test"))
    assert metrics["overlap_all"] == pytest.approx(mean("test", answer_only=False))
    assert metrics["overlap_train"] == pytest.approx(mean("train"))
    assert metrics["overlap_by_layer"] == pytest.approx([mean("test", layer=at) for at in range(L)])
    assert metrics["overlap_by_dataset"] == pytest.approx({d: mean("test", dataset=d) for d in "ab"})


def test_knowing_the_routing_gives_overlap_one_and_no_excess_loss():
    traces = random_traces(0)
    routing = {item.input_ids.tobytes(): item.experts for item in traces}

    def oracle(input_ids_T: np.ndarray) -> torch.Tensor:
        chosen = torch.from_numpy(routing[input_ids_T.tobytes()].astype(np.int64))
        return torch.full((*chosen.shape[:2], E), -1e4).scatter_(-1, chosen, 0.0)

    metrics = measure(oracle, traces)
    assert metrics["overlap"] == metrics["overlap_all"] == metrics["overlap_train"] == 1.0
    assert metrics["excess_loss"] == pytest.approx(0.0, abs=1e-5)


def test_traces_without_held_out_answers_are_refused():
    traces = MemoryTraces(item for item in random_traces(0) if item.split == "train")
    frequency = fit_frequency(traces)
    with pytest.raises(InputError, match="test samples have no answer positions"):
        measure(frequency.logits, traces)


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
    assert fit_frequency(traces).predict(ids_V).tolist() == [expected_frequency] * V
    unseen = [Counter()] * L
    expected_token = [
        [brute_force_top(by_token.get(v, unseen)[layer], overall[layer]) for layer in range(L)] for v in range(V)
    ]
    assert fit_token(traces, V).predict(ids_V).tolist() == expected_token


def test_a_token_never_seen_gets_the_frequent_experts():
    rng = np.random.default_rng(0)
    item = random_item(rng, T=40)
    item.input_ids = item.input_ids % 5
    traces = MemoryTraces([item])
    token, frequency = fit_token(traces, V), fit_frequency(traces)
    unseen = np.array([5, V - 1])
    assert np.array_equal(token.predict(unseen), frequency.predict(unseen))
    assert not np.array_equal(token.predict(np.arange(5)), frequency.predict(np.arange(5)))
    assert len(token.counts_SLE) == 6  # the ids seen and one row of zeros


@pytest.mark.parametrize("seed", SEEDS)
def test_simple_predictors_give_distributions(seed):
    traces, ids_V = random_traces(seed), np.arange(V)
    for simple in (fit_frequency(traces), fit_token(traces, V)):
        torch.testing.assert_close(simple.logits(ids_V).exp().sum(-1), torch.ones(V, L, dtype=torch.float64))


def test_counting_refuses_ids_beyond_the_vocabulary_and_missing_train_samples():
    traces = random_traces(0)
    with pytest.raises(InputError, match="beyond the target's 4 tokens"):
        fit_token(traces, 4)
    with pytest.raises(InputError, match="no train samples"):
        fit_frequency(MemoryTraces(item for item in traces if item.split == "test"))
