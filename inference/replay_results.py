"""Replayed steps as runs with the keys of `results.json`, and paired intervals against EAGLE's rule.

Letters: P prompts, S steps, L MoE layers, R resamples.
"""

from collections.abc import Sequence

import numpy as np

from ecospec.configs.progress import progress
from ecospec.inference.replay import Combination, Replay, Steps, Tables
from ecospec.inference.selection import EPSILON, NEEDS_FOOTPRINTS
from ecospec.inference.treefile import Identity, TreeSet

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


def replay(trees: TreeSet, combinations: Sequence[Combination], tables: Tables | None = None) -> list[dict]:
    """A run for each data set and combination, in that order, and last for all data sets together.

    Raises InputError for a footprint source that is not there.
    """
    engine, identity = Replay(trees, tables), trees.identity
    references = {
        gamma: engine.steps(Combination(REFERENCE, gamma)) for gamma in sorted({c.gamma for c in combinations})
    }
    steps = [engine.steps(combination) for combination in progress(list(combinations), "selections replayed")]
    runs = []
    for dataset, prompts in _groups(identity):
        for combination, by_prompt in zip(combinations, steps, strict=True):
            group = [by_prompt[prompt_id] for prompt_id in prompts]
            reference = [references[combination.gamma][prompt_id] for prompt_id in prompts]
            known = _identity(identity, combination) | {"dataset": dataset, "samples": len(prompts)}
            runs.append(known | dict.fromkeys(_NOT_MEASURED) | _means(group) | _against(group, reference))
    return runs


def _groups(identity: Identity) -> list[tuple[str, list[str]]]:
    """Data sets with their prompts."""
    names = list(dict.fromkeys(identity.datasets.values()))
    groups = [(name, [prompt for prompt, home in identity.datasets.items() if home == name]) for name in names]
    return groups if len(groups) < 2 else [*groups, (ALL, list(identity.datasets))]


def _identity(identity: Identity, combination: Combination) -> dict:
    needs = combination.policy in NEEDS_FOOTPRINTS
    return {
        "label": label(combination),
        "target": identity.target,
        "drafter": identity.drafter,
        "selection": combination.policy,
        "footprints": combination.footprints if needs else None,
        "predictor": identity.predictor if combination.footprints == "predictor" and needs else None,
        "temperature": identity.temperature,
        "gamma": combination.gamma,
        "epsilon": combination.epsilon if needs else None,
        "tree": {"steps": identity.steps, "topk": identity.topk},
        "batch_size": 1,
        "num_experts": identity.num_experts,
        "top_k": identity.top_k,
    }


def label(combination: Combination) -> str:
    """`confidence`, `marginal/oracle`, `marginal/predictor ε=1`."""
    if combination.policy not in NEEDS_FOOTPRINTS:
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


def _against(group: list[Steps], reference: list[Steps]) -> dict:
    """Differences of α and 𝓔 from those of `confidence` at the same γ, with 95 % intervals over the same prompts.

    An interval is null for a single prompt, a difference too where no text had a step.
    """
    ours, theirs = _sums(group), _sums(reference)
    picks = np.random.default_rng(0).integers(len(group), size=(RESAMPLES, len(group)))
    found = {}
    for name, column in (("acceptance_length", 1), ("active_experts", 2)):
        values = [_ratio(ours[some], column) - _ratio(theirs[some], column) for some in (np.arange(len(group)), picks)]
        resampled_R = values[1][~np.isnan(values[1])]
        interval = [float(edge) for edge in np.percentile(resampled_R, [2.5, 97.5])] if len(resampled_R) else None
        found[f"{name}_difference"] = None if np.isnan(values[0]) else float(values[0])
        found[f"{name}_difference_interval"] = interval if len(group) > 1 else None
    return found


def _sums(group: list[Steps]) -> np.ndarray:
    """float64 [P, 3]: each prompt's steps, tokens, and active experts (mean over layers) summed over its steps."""
    return np.array([[len(s.emitted_S), s.emitted_S.sum(), s.active_SL.mean(-1).sum()] for s in group], float)


def _ratio(sums_XP3: np.ndarray, column: int) -> np.ndarray:
    """A mean over the steps of the prompts in [..., P, 3]; NaN without steps."""
    steps, total = sums_XP3[..., 0].sum(-1), sums_XP3[..., column].sum(-1)
    return np.divide(total, steps, out=np.full_like(total, np.nan), where=steps > 0)
