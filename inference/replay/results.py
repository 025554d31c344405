"""Replayed steps as runs with the keys of `results.json`, and how they compare with EAGLE's rule and with oracle's.

Letters: P prompts, S steps, L MoE layers, R resamples of the prompts (the first: each prompt once).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ecospec.bootstrap import estimate, ratio, resampled_sums
from ecospec.inference.metrics.rows import RunRow
from ecospec.inference.replay.stepping import Combination, Replay, Sources, Steps
from ecospec.inference.replay.treefile import TARGET, Identity, TreeSet
from ecospec.inference.selection.config import EPSILON
from ecospec.progress import progress

REFERENCE = "confidence"
ALL = "all"  # the data sets of a file together, where there are several


def replay(trees: TreeSet, combinations: Sequence[Combination], sources: Sources | None = None) -> list[RunRow]:
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
            known = replace(_described(identity, combination), dataset=dataset)
            others = {"top_k": identity.top_k, "source_share": _source_share(known, trees.seconds)}
            others |= compared(*(sums.get(one) for one in (combination, _eagles(combination), _oracles(combination))))
            runs.append(known.measured(_measurements(groups[combination]) | others))
    return runs


def _eagles(combination: Combination) -> Combination:
    """EAGLE's rule at the same γ."""
    return Combination(REFERENCE, combination.gamma, options=combination.options)


def _oracles(combination: Combination) -> Combination | None:
    """The same policy, γ and ε with the target's own experts; None for a policy that needs none."""
    return replace(combination, footprints="oracle") if combination.needs_footprints else None


def _groups(identity: Identity) -> list[tuple[str, list[str]]]:
    """Data sets with their prompts."""
    names = list(dict.fromkeys(identity.datasets.values()))
    groups = [(name, [prompt for prompt, home in identity.datasets.items() if home == name]) for name in names]
    return groups if len(groups) < 2 else [*groups, (ALL, list(identity.datasets))]


def _described(identity: Identity, combination: Combination) -> RunRow:
    """What is replayed: what does not depend on a measurement."""
    needs = combination.needs_footprints
    folders = {"predictor": identity.predictor, **identity.rungs}
    return RunRow(
        label=label(combination),
        target=identity.target,
        drafter=identity.drafter,
        **combination.build().describe(),
        footprints=combination.footprints if needs else None,
        predictor=folders.get(combination.footprints) if needs else None,
        temperature=identity.temperature,
        tree=identity.tree,
        batch_size=1,
        num_experts=identity.num_experts,
        top_k=identity.top_k,
    )


def label(combination: Combination) -> str:
    """`confidence`, `marginal/oracle`, `marginal/predictor ε=1`."""
    if not combination.needs_footprints:
        return combination.policy
    epsilon = "" if combination.epsilon == EPSILON else f" ε={combination.epsilon:g}"
    options = "".join(f" {name}={value}" for name, value in combination.options if value is not None)
    return f"{combination.policy}/{combination.footprints}{epsilon}{options}"


def _measurements(group: list[Steps]) -> dict:
    """What the metrics are made of that replay knows; nothing of steps where no text had one."""
    known = {"samples": len(group), "steps": sum(len(steps.emitted_S) for steps in group)}
    if not known["steps"]:
        return known
    measured = [one for steps in group for one in steps.measured]
    return known | {
        **{key: np.array([one[key] for one in measured]) for key in (measured[0] if measured else ())},
        "emitted_R": np.concatenate([steps.emitted_S for steps in group]),
        "verified_R": np.concatenate([steps.verified_S for steps in group]),
        "active_experts": np.concatenate([steps.active_SL for steps in group]),
    }


def compared(ours_P3: np.ndarray, eagles_P3: np.ndarray, oracles_P3: np.ndarray | None) -> dict:
    """Differences of α and 𝓔 from EAGLE's rule, and *regret*: those from oracle footprints, null without footprints.

    `saving_kept`: of the experts that oracle footprints save against EAGLE's rule the share that these save; null where
    oracle saves none, its interval where that may be so. Fewer experts alone are no merit, and footprints that merely
    repeat with the token id keep much of it, so read it beside α's regret and the modelled speed-up. Each with a 95 %
    interval over the same prompts, null for a single prompt.
    """
    P, unknown_P3 = len(ours_P3), np.zeros_like(ours_P3)  # the means of which are NaN
    sums_PX = np.hstack([ours_P3, eagles_P3, unknown_P3 if oracles_P3 is None else oracles_P3])
    ours, eagles, oracles = (_means(sums_R3) for sums_R3 in np.split(resampled_sums(sums_PX), 3, axis=1))
    found = {}
    for name, ours_R in ours.items():
        found |= _estimate(f"{name}_difference", ours_R - eagles[name], P)
        found |= _estimate(f"{name}_regret", ours_R - oracles[name], P)
    saved_R = eagles["active_experts"] - oracles["active_experts"]
    kept_R = ratio(eagles["active_experts"] - ours["active_experts"], saved_R)
    if not (saved_R > 0).all():
        kept_R[1:] = np.nan
    return found | _estimate("saving_kept", kept_R, P)


def _means(sums_R3: np.ndarray) -> dict[str, np.ndarray]:
    """α and 𝓔 of each resample, [R]; NaN without steps."""
    steps_R, tokens_R, active_R = sums_R3.T
    return {"acceptance_length": ratio(tokens_R, steps_R), "active_experts": ratio(active_R, steps_R)}


def _estimate(name: str, values_R: np.ndarray, prompts: int) -> dict:
    """An estimate and its interval, which takes several prompts."""
    value, ends = estimate(values_R)
    return {name: value, f"{name}_interval": ends if prompts > 1 else None}


def _source_share(run: RunRow, seconds: Mapping[str, float]) -> float | None:
    """The footprint source's measured part of a plain step: none without a source, None where unknown.

    On a target that is not bound by memory, as the lab's, it says little of a large one.
    """
    if run.footprints is None:
        return 0.0
    return seconds[run.footprints] / seconds[TARGET] if run.footprints in seconds else None


def _sums(group: list[Steps]) -> np.ndarray:
    """float64 [P, 3]: each prompt's steps, tokens, and active experts (mean over layers) summed over its steps."""
    return np.array([[len(s.emitted_S), s.emitted_S.sum(), s.active_SL.mean(-1).sum()] for s in group], float)
