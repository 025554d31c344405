"""Replayed steps as runs with the keys of `results.json`, and how they compare with EAGLE's rule and with oracle's.

Letters: P prompts, S steps, L MoE layers, R resamples of the prompts (the first: each prompt once).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ecospec.inference.replay.modelled_speed import modelled_speedups
from ecospec.inference.replay.stepping import Combination, Replay, Sources, Steps
from ecospec.inference.replay.treefile import TARGET, Identity, TreeSet
from ecospec.inference.selection.greedy import EPSILON
from ecospec.progress import progress

RESAMPLES = 1000
REFERENCE = "confidence"
ALL = "all"  # the data sets of a file together, where there are several
_NOT_MEASURED = (
    "tokens_per_second",
    "speedup_vs_ar",
    "interval",
    *(f"t_{phase}" for phase in ("draft", "predict", "select", "verify", "accept", "other", "step")),
    "prefill_seconds",
    "lossless",
)


def replay(trees: TreeSet, combinations: Sequence[Combination], sources: Sources | None = None) -> list[dict]:
    """A run for each data set and combination, in that order, and last for all data sets together.

    Raises InputError for a footprint source that is not there.
    """
    engine, identity = Replay(trees, sources), trees.identity
    needed = list(dict.fromkeys(one for c in combinations for one in (c, _eagles(c), _oracles(c)) if one))
    steps = {one: engine.steps(one) for one in progress(needed, "selections replayed")}
    runs = []
    for dataset, prompts in _groups(identity):
        groups = {one: [by_prompt[prompt_id] for prompt_id in prompts] for one, by_prompt in steps.items()}
        sums = {one: _sums(group) for one, group in groups.items()}
        for combination in combinations:
            known = _identity(identity, combination) | {"dataset": dataset, "samples": len(prompts)}
            run = known | dict.fromkeys(_NOT_MEASURED) | _means(groups[combination])
            run |= compared(*(sums.get(one) for one in (combination, _eagles(combination), _oracles(combination))))
            runs.append(run | _modelled(run, trees.seconds))
    return runs


def _eagles(combination: Combination) -> Combination:
    """EAGLE's rule at the same γ."""
    return Combination(REFERENCE, combination.gamma)


def _oracles(combination: Combination) -> Combination | None:
    """The same policy, γ and ε with the target's own experts; None for a policy that needs none."""
    return replace(combination, footprints="oracle") if combination.needs_footprints else None


def _groups(identity: Identity) -> list[tuple[str, list[str]]]:
    """Data sets with their prompts."""
    names = list(dict.fromkeys(identity.datasets.values()))
    groups = [(name, [prompt for prompt, home in identity.datasets.items() if home == name]) for name in names]
    return groups if len(groups) < 2 else [*groups, (ALL, list(identity.datasets))]


def _identity(identity: Identity, combination: Combination) -> dict:
    needs = combination.needs_footprints
    folders = {"predictor": identity.predictor, **identity.rungs}
    return {
        "label": label(combination),
        "target": identity.target,
        "drafter": identity.drafter,
        "selection": combination.policy,
        "footprints": combination.footprints if needs else None,
        "predictor": folders.get(combination.footprints) if needs else None,
        "temperature": identity.temperature,
        "gamma": combination.gamma,
        "epsilon": combination.epsilon if needs else None,
        "tree": identity.tree,
        "batch_size": 1,
        "num_experts": identity.num_experts,
        "top_k": identity.top_k,
    }


def label(combination: Combination) -> str:
    """`confidence`, `marginal/oracle`, `marginal/predictor ε=1`."""
    if not combination.needs_footprints:
        return combination.policy
    epsilon = "" if combination.epsilon == EPSILON else f" ε={combination.epsilon:g}"
    return f"{combination.policy}/{combination.footprints}{epsilon}"


def _means(group: list[Steps]) -> dict:
    """Means over the steps of all prompts; null where no text had a step."""
    emitted_S = np.concatenate([steps.emitted_S for steps in group])
    if not len(emitted_S):
        names = ("acceptance_length", "acceptance_by_depth", "emitted_histogram", "active_experts")
        return {"steps": 0} | dict.fromkeys((*names, "active_experts_by_layer", "verified_tokens_per_step"))
    active_SL = np.concatenate([steps.active_SL for steps in group])
    return {
        "steps": len(emitted_S),
        "acceptance_length": float(emitted_S.mean()),
        "acceptance_by_depth": [float((emitted_S > depth).mean()) for depth in range(1, int(emitted_S.max()))],
        "emitted_histogram": np.bincount(emitted_S)[1:].tolist(),
        "active_experts": float(active_SL.mean()),
        "active_experts_by_layer": active_SL.mean(0).tolist(),
        "verified_tokens_per_step": float(np.concatenate([steps.verified_S for steps in group]).mean()),
    }


def compared(ours_P3: np.ndarray, eagles_P3: np.ndarray, oracles_P3: np.ndarray | None) -> dict:
    """Differences of α and 𝓔 from EAGLE's rule, and *regret*: those from oracle footprints, null without footprints.

    `saving_kept`: of the experts that oracle footprints save against EAGLE's rule the share that these save; null where
    oracle saves none, its interval where that may be so. Fewer experts alone are no merit, and footprints that merely
    repeat with the token id keep much of it, so read it beside α's regret and the modelled speed-up. Each with a 95 %
    interval over the same prompts, null for a single prompt.
    """
    P = len(ours_P3)
    picks_RP = np.concatenate([np.arange(P)[None], np.random.default_rng(0).integers(P, size=(RESAMPLES, P))])
    ours, eagles = _ratios(ours_P3, picks_RP), _ratios(eagles_P3, picks_RP)
    oracles = dict.fromkeys(ours) if oracles_P3 is None else _ratios(oracles_P3, picks_RP)
    found, nothing_R = {}, np.full(len(picks_RP), np.nan)
    for name, ours_R in ours.items():
        found |= _estimate(f"{name}_difference", ours_R - eagles[name], P)
        found |= _estimate(f"{name}_regret", nothing_R if oracles_P3 is None else ours_R - oracles[name], P)
    kept_R = nothing_R
    if oracles_P3 is not None:
        saved_R = eagles["active_experts"] - oracles["active_experts"]
        kept_R = (eagles["active_experts"] - ours["active_experts"]) / np.where(saved_R > 0, saved_R, np.nan)
        if not (saved_R > 0).all():
            kept_R[1:] = np.nan
    return found | _estimate("saving_kept", kept_R, P)


def _ratios(sums_P3: np.ndarray, picks_RP: np.ndarray) -> dict[str, np.ndarray]:
    """α and 𝓔 of each resample, [R]."""
    return {
        name: _ratio(sums_P3[picks_RP], column)
        for column, name in enumerate(("acceptance_length", "active_experts"), 1)
    }


def _estimate(name: str, values_R: np.ndarray, prompts: int) -> dict:
    """The first value and the middle 95 % of the others; null for what is NaN."""
    resampled_R = values_R[1:][~np.isnan(values_R[1:])]
    interval = None
    if prompts > 1 and len(resampled_R):
        interval = [float(edge) for edge in np.percentile(resampled_R, [2.5, 97.5])]
    return {name: None if np.isnan(values_R[0]) else float(values_R[0]), f"{name}_interval": interval}


def _modelled(run: dict, seconds: Mapping[str, float]) -> dict:
    """Modelled speed-ups; `source_share`: the footprint source's measured part of a plain step, null where unknown.

    On a target that is not bound by memory, as the lab's, that share says little of a large one.
    """
    share = 0.0 if run["footprints"] is None else None
    if run["footprints"] in seconds:
        share = seconds[run["footprints"]] / seconds[TARGET]
    found = {"source_share": share, "modelled_speedup": None, "modelled_speedup_with_source": None}
    if run["steps"]:
        known = (run["acceptance_length"], run["active_experts"], run["top_k"])
        found["modelled_speedup"] = modelled_speedups(*known)
        found["modelled_speedup_with_source"] = None if share is None else modelled_speedups(*known, share)
    return found


def _sums(group: list[Steps]) -> np.ndarray:
    """float64 [P, 3]: each prompt's steps, tokens, and active experts (mean over layers) summed over its steps."""
    return np.array([[len(s.emitted_S), s.emitted_S.sum(), s.active_SL.mean(-1).sum()] for s in group], float)


def _ratio(sums_XP3: np.ndarray, column: int) -> np.ndarray:
    """A mean over the steps of the prompts in [..., P, 3]; NaN without steps."""
    steps, total = sums_XP3[..., 0].sum(-1), sums_XP3[..., column].sum(-1)
    return np.divide(total, steps, out=np.full_like(total, np.nan), where=steps > 0)
