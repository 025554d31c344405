"""Laws of the routing statistics: each fast count equals a slow one over Python sets, and chance is chance.

Letters: T tokens, L MoE layers, E experts, K experts per token.
"""

import numpy as np
import pytest

from ecospec import bootstrap
from ecospec.tracing.stats import agreement
from ecospec.tracing.stats import counts as statistics
from ecospec.tracing.stats.agreement import AgreementTally, shared_choices, summarise_agreement
from ecospec.tracing.stats.counts import (
    WIDTH,
    Tally,
    bit_sets,
    chance_experts,
    chance_reuse,
    count_loads,
    entropy_bits,
    experts_for_half,
    load_experts,
    load_reuse,
    pieces,
    pooled,
    ratios,
    set_sizes,
    summarise,
    window_sums,
)
from ecospec.tracing.store.layout import id_dtype

SHAPES = [(3, 8, 2), (2, 64, 8), (1, 65, 1), (2, 512, 22), (4, 256, 8)]  # L, E, K


def random_experts(T: int, shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """Ids [T, L, K], ascending, with low experts more likely and some tokens like the one before."""
    L, E, K = shape
    generator = np.random.default_rng(seed)
    scores = generator.random((T, L, E)) + np.linspace(0.5, 0, E)
    experts = np.sort(np.argpartition(-scores, K - 1, axis=-1)[..., :K], -1)
    for t in np.flatnonzero(generator.random(T) < 0.4):
        experts[t] = experts[max(t - 1, 0)]
    return experts.astype(id_dtype(E))


def slow_window_sums(experts_TLK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unions [W, L], windows [W] and reused experts [W], set by set."""
    T, L, _ = experts_TLK.shape
    unions, windows, reused = (np.zeros(s, np.int64) for s in ((WIDTH, L), WIDTH, WIDTH))
    for w in range(1, WIDTH + 1):
        for start in range(T - w + 1):
            windows[w - 1] += 1
            for layer in range(L):
                before = set(experts_TLK[start : start + w - 1, layer].ravel())
                last = set(experts_TLK[start + w - 1, layer])
                unions[w - 1, layer] += len(before | last)
                reused[w - 1] += len(before & last)
    return unions, windows, reused


def tally_of(samples: list[np.ndarray], shape: tuple[int, int, int]) -> Tally:
    tally = Tally.empty(*shape)
    for experts in samples:
        tally.add(experts)
    return tally


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_loads_are_exact(shape: tuple[int, int, int], seed: int) -> None:
    experts = random_experts(40, shape, seed)
    by_hand = np.zeros(shape[:2], int)
    for token in experts:
        for layer, chosen in enumerate(token):
            for expert in chosen:
                by_hand[layer, expert] += 1
    assert np.array_equal(count_loads(experts, shape[1]), by_hand)


def test_loads_do_not_depend_on_how_the_work_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = random_experts(50, SHAPES[1])
    whole = count_loads(experts, 64)
    monkeypatch.setattr(statistics, "CHUNK_CELLS", 8 * 2 * 8 * 7)
    assert np.array_equal(count_loads(experts, 64), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_bit_set_holds_its_experts_and_no_others(shape: tuple[int, int, int]) -> None:
    experts = random_experts(9, shape)
    sets_XTL = bit_sets(experts, shape[1])
    assert (set_sizes(sets_XTL) == shape[2]).all()
    bits = np.unpackbits(np.moveaxis(sets_XTL, 0, -1).copy().view(np.uint8), axis=-1)
    assert np.array_equal(np.flatnonzero(bits) % bits.shape[-1], experts.ravel())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [0, 1, 2, 7, 8, 9, 21])
def test_unions_and_reuse_are_those_of_sets(shape: tuple[int, int, int], T: int) -> None:
    experts = random_experts(T, shape, seed=T)
    sums = window_sums(experts, shape[1])
    for fast, slow in zip((sums.unions_WL, sums.windows_W, sums.reused_W), slow_window_sums(experts), strict=True):
        assert np.array_equal(fast, slow)


@pytest.mark.parametrize("seed", range(40))
def test_every_window_is_counted_in_exactly_one_stretch(seed: int) -> None:
    generator = np.random.default_rng(seed)
    T, stretches, longest = (int(generator.integers(low, high)) for low, high in ((0, 60), (1, 9), (1, 12)))
    seen = []
    for chosen in range(stretches):
        for first, end, starts in pieces(T, stretches, chosen, longest):
            begun = range(first, end if starts is None else first + starts)
            seen += [(start, w) for start in begun for w in range(1, WIDTH + 1) if start + w <= end]
            assert starts is None or (starts <= longest and end <= T)
    assert sorted(seen) == [(start, w) for start in range(T) for w in range(1, WIDTH + 1) if start + w <= T]


@pytest.mark.parametrize("stretches", [1, 2, 5])
def test_the_stretches_of_a_sample_add_up_to_the_whole(stretches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES[0]
    experts = random_experts(43, shape)
    whole = tally_of([experts], shape)
    monkeypatch.setattr(statistics, "CHUNK_CELLS", 3 * 8 * 6)  # pieces of six starts
    parts = [Tally.empty(*shape) for _ in range(stretches)]
    for chosen, tally in enumerate(parts):
        tally.add(experts, stretches, chosen)
        assert np.array_equal(tally.counts_LE, whole.counts_LE)
    assert np.array_equal(sum(tally.unions_WL for tally in parts), whole.unions_WL)
    assert np.array_equal(sum(tally.rows[0] for tally in parts), whole.rows[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_summary_holds_the_means_over_all_windows_of_all_samples(shape: tuple[int, int, int]) -> None:
    L, _, K = shape
    samples = [random_experts(T, shape, seed=T) for T in (3, 12, 30)]
    slow = [slow_window_sums(experts) for experts in samples]
    unions, windows, reused = (sum(part[i] for part in slow) for i in range(3))
    summary = summarise(tally_of(samples, shape))
    for w, row in enumerate(summary["union"]):
        assert row["mean"] == pytest.approx(unions[w].sum() / (L * windows[w]))
        assert row["by_layer"] == pytest.approx(unions[w] / windows[w])
        assert (row["tokens"], row["windows"]) == (w + 1, windows[w])
    for row in summary["reuse"]:
        w = row["previous"]
        assert row["mean"] == pytest.approx(reused[w] / (L * K * windows[w]))
    assert (summary["samples"], summary["tokens"]) == (3, 45)


def test_windows_that_no_sample_is_long_enough_for_have_no_mean() -> None:
    summary = summarise(tally_of([random_experts(5, SHAPES[0], seed) for seed in range(3)], SHAPES[0]))
    assert [row["mean"] is None for row in summary["union"]] == [False] * 5 + [True] * 3
    assert summary["union"][7]["by_layer"] is None and summary["union"][7]["interval"] is None
    assert [row["mean"] is None for row in summary["reuse"]] == [False] * 4 + [True] * 3


def test_pooling_forgets_nothing() -> None:
    samples = [random_experts(T, SHAPES[1], seed=T) for T in (9, 20, 11, 4)]
    together = tally_of(samples, SHAPES[1])
    apart = pooled([tally_of(samples[:3], SHAPES[1]), tally_of(samples[3:], SHAPES[1])])
    assert summarise(apart) == summarise(together)


def group_limited_draws(tokens: int, E: int, K: int, groups: int, kept: int, seed: int) -> np.ndarray:
    """Ids [tokens, 1, K]: K experts drawn from `kept` of `groups` equal groups, which are drawn first."""
    generator = np.random.default_rng(seed)
    open_groups = generator.permuted(np.tile(np.arange(groups), (tokens, 1)), axis=1)[:, :kept]
    is_open = np.zeros((tokens, groups), bool)
    np.put_along_axis(is_open, open_groups, True, axis=1)
    scores = generator.random((tokens, E)) + np.repeat(is_open, E // groups, axis=1)
    return np.sort(np.argpartition(-scores, K - 1, axis=1)[:, :K], 1)[:, None].astype(id_dtype(E))


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (8, 4), (8, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_chance_is_what_uniform_draws_give_with_group_limits_and_without(groups: int, kept: int, seed: int) -> None:
    E, K, samples = 256, 8, 2500
    draws = group_limited_draws(samples * WIDTH, E, K, groups, kept, seed).reshape(samples, WIDTH, 1, K)
    sums = [window_sums(tokens, E) for tokens in draws]
    for w in range(1, WIDTH + 1):
        unions = np.array([one.unions_WL[w - 1, 0] / one.windows_W[w - 1] for one in sums])
        error = unions.std() / samples**0.5
        assert abs(unions.mean() - chance_experts(w, E, K)) <= 4 * error
    reused = np.array([one.reused_W[1:] / one.windows_W[1:] / K for one in sums])
    chance = [chance_reuse(w, E, K) for w in range(1, WIDTH)]
    assert (abs(reused.mean(0) - chance) <= 4 * reused.std(0) / samples**0.5).all()


def test_chance_starts_at_k_and_fills_the_layer() -> None:
    assert chance_experts(1, 64, 8) == pytest.approx(8.0)
    assert chance_experts(4, 64, 8) == pytest.approx(26.5, abs=0.05)
    assert chance_experts(1000, 64, 8) == pytest.approx(64.0)
    assert chance_reuse(1, 64, 8) == pytest.approx(1 / 8)


@pytest.mark.parametrize("w", range(1, WIDTH))
def test_even_loads_leave_chance_as_it_is_and_uneven_ones_lower_unions_and_raise_reuse(w: int) -> None:
    even, uneven = np.full((2, 64), 10), np.tile(np.arange(1, 65), (2, 1))
    assert load_experts(even, w, 8) == pytest.approx(chance_experts(w, 64, 8))
    assert load_reuse(even, w, 8) == pytest.approx(chance_reuse(w, 64, 8))
    assert load_experts(uneven, w + 1, 8) < chance_experts(w + 1, 64, 8)
    assert load_reuse(uneven, w, 8) > chance_reuse(w, 64, 8)


@pytest.mark.parametrize("seed", range(3))
def test_shuffling_the_tokens_takes_away_all_locality_but_that_of_the_loads(seed: int) -> None:
    experts = random_experts(6000, (1, 64, 8), seed)
    shuffled = summarise(tally_of([np.random.default_rng(seed).permutation(experts)], (1, 64, 8)))
    for row in shuffled["union"] + shuffled["reuse"]:
        assert row["mean"] == pytest.approx(row["chance_of_loads"], rel=0.03)
    assert shuffled["union"][3]["mean"] < 0.99 * shuffled["union"][3]["chance"]
    assert summarise(tally_of([experts], (1, 64, 8)))["union"][3]["mean"] < 0.9 * shuffled["union"][3]["mean"]


def test_entropy_runs_from_one_expert_to_even_load_whatever_the_experts_are_called() -> None:
    counts = np.array([[0, 12, 0, 0], [3, 3, 3, 3], [1, 1, 0, 2]])
    assert entropy_bits(counts) == pytest.approx([0.0, 2.0, 1.5])
    assert entropy_bits(counts[:, [2, 0, 3, 1]]) == pytest.approx(entropy_bits(counts))


@pytest.mark.parametrize("seed", range(5))
def test_half_of_the_load_is_carried_by_the_fewest_experts_that_can(seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 20, (6, 12)) + 1
    for row, found in zip(counts, experts_for_half(counts), strict=True):
        ordered = sorted(row, reverse=True)
        assert found == next(n for n in range(1, 13) if 2 * sum(ordered[:n]) >= row.sum())


def test_load_by_layer_counts_experts_that_are_used_at_all() -> None:
    summary = summarise(tally_of([np.array([[[0, 1]], [[0, 2]]], np.uint8)], (1, 4, 2)))
    assert summary["by_layer"]["experts_used"] == [3]
    assert summary["by_layer"]["max_over_mean"] == [2.0]
    assert summary["entropy_share"] == pytest.approx(0.75)


def test_intervals_cover_the_true_mean_about_95_times_in_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 300)
    covered = []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        counts = generator.integers(1, 30, (40, 1))
        sums = counts * (5.0 + generator.normal(0, 1, (40, 1)))
        ((_, (low, high)),) = ratios(sums, counts)
        covered.append(low <= 5.0 <= high)
    assert 0.88 <= np.mean(covered) <= 0.99


def test_an_interval_needs_two_samples_and_has_no_width_where_they_agree() -> None:
    assert ratios(np.array([[6]]), np.array([[2]])) == [(3.0, None)]
    assert ratios(np.array([[6, 1], [3, 0]]), np.array([[2, 1], [1, 0]])) == [(3.0, [3.0, 3.0]), (1.0, None)]
    assert ratios(np.array([[0], [0]]), np.array([[0], [0]])) == [(None, None)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shared_choices_are_those_of_sets(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = random_experts(17, shape, 1), random_experts(17, shape, 2)
    by_hand = [
        [len(set(a) & set(b)) for a, b in zip(*layers, strict=True)] for layers in zip(ours, theirs, strict=True)
    ]
    assert shared_choices(ours, theirs, shape[1]).tolist() == by_hand
    monkeypatch.setattr(agreement, "CHUNK_CELLS", 1)
    assert shared_choices(ours, theirs, shape[1]).tolist() == by_hand


def test_agreement_is_that_of_a_case_by_hand() -> None:
    first, second = AgreementTally(), AgreementTally()
    first.add(np.array([[2, 2], [2, 1], [2, 2]]), top_k=2, prompt_len=1)
    second.add(np.array([[0, 2]]), top_k=2, prompt_len=1)
    found = summarise_agreement([first, second], top_k=2)
    means = [found[name]["mean"] for name in agreement.MEASURES]
    assert means == pytest.approx([7 / 8, 13 / 16, 6 / 8, 2 / 4])
    assert found["by_layer"] == pytest.approx([6 / 8, 7 / 8])
    assert (found["samples"], found["tokens"]) == (2, 4)


def test_a_trace_agrees_with_itself_wholly_and_with_disjoint_choices_not_at_all() -> None:
    low, high = np.tile([0, 1], (20, 3, 1)), np.tile([6, 7], (20, 3, 1))
    for other, share in ((low, 1.0), (high, 0.0)):
        tally = AgreementTally()
        tally.add(shared_choices(low, other, 8), top_k=2, prompt_len=5)
        found = summarise_agreement([tally], top_k=2)
        assert [found[name]["mean"] for name in agreement.MEASURES] == [share, share, share, 1 - share]
