"""`ecospec-trace stats`: a trace folder in, `stats.json`, `expert_load.json` and `stats.html` out.

One pass over the ids, a row group in memory at a time. The numbers are `statistics`' and `agreement`'s.

`expert_load.json`, for tools that place experts on devices: `logical_count` is a list with a row for each layer of the
model from 0 to its last MoE layer, and in each row a count per expert (tokens that used it; zeros in a dense layer), as
the file of SGLang's `--init-expert-location` has it; `datasets` has the same for each data set; `moe_layers` names
the rows that are MoE layers; `num_experts`, `top_k`, `tokens` say the rest.

Letters: T tokens, L MoE layers, E experts, K experts per token.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa

from ecospec.data.traces import Trace, TraceSet, read_traces
from ecospec.errors import DamageError, InputError
from ecospec.files import replace_folder, write_json, write_text
from ecospec.progress import progress
from ecospec.provenance import Provenance
from ecospec.tracing.stats.agreement import AgreementTally, shared_choices, summarise_agreement
from ecospec.tracing.stats.counts import WIDTH, Tally, pooled, summarise
from ecospec.tracing.stats.page import render_stats
from ecospec.tracing.store.layout import open_part, reading, require_sound_ids
from ecospec.tracing.store.manifest import Header

STATS_FILE, LOAD_FILE, PAGE_FILE = "stats.json", "expert_load.json", "stats.html"
WINDOWS = 250_000  # of WIDTH tokens; traces with up to twice as many are counted whole


def write_stats(folder: str | Path, output: str | Path, compare: str | Path | None = None) -> dict:
    """Write the three files as the folder `output` and return what `stats.json` holds.

    Raises InputError when `folder` or `compare` is no trace folder, is empty, or has nothing in common with the other;
    DamageError for what is damaged.
    """
    traces, output = read_traces(folder), Path(output)
    others = None if compare is None else _comparable(traces, read_traces(compare))
    tallies, stretches = tally_datasets(traces)
    overall = pooled(list(tallies.values()))
    stats = {
        "schema": 1,
        "trace": identity(traces.manifest),
        "windows": {"counted": int(overall.windows_W[-1]), "one_in": stretches},
        "overall": summarise(overall),
        "datasets": {name: summarise(tally) for name, tally in tallies.items()},
    }
    if others is not None:
        stats["agreement"] = compare_traces(traces, others)
    stats["provenance"] = Provenance.of().to_json()
    loads = {name: tally.counts_LE for name, tally in tallies.items()}

    def write(target: Path) -> None:
        write_text(target / LOAD_FILE, json.dumps(expert_load(loads, traces.manifest, overall.tokens)) + "\n")
        write_text(target / PAGE_FILE, render_stats(stats, loads))
        write_json(target / STATS_FILE, stats)

    replace_folder(output, write)
    return stats


def tally_datasets(traces: TraceSet, enough: int = WINDOWS) -> tuple[dict[str, Tally], int]:
    """A tally for each data set in order of appearance, and m: of each sample's windows one stretch in m is counted.

    m is 1, so that every window counts, unless the trace has `enough` windows twice or more.
    """
    if not len(traces):
        raise InputError(f"{traces.folder}: holds no samples; trace some prompts first")
    stretches = max(1, _count_windows(traces) // enough)
    generator = np.random.default_rng(0)
    tallies: dict[str, Tally] = {}
    for trace in progress(traces, "statistics"):
        empty = Tally.empty(traces.num_layers, traces.num_experts, traces.top_k)
        _require_sound(trace, traces)
        chosen = int(generator.integers(stretches))
        tallies.setdefault(trace.dataset, empty).add(trace.experts, stretches, chosen)
    return tallies, stretches


def compare_traces(traces: TraceSet, others: TraceSet) -> dict:
    """Agreement over the samples that both have with equal input ids, pooled and by data set, and what was left out.

    Raises InputError when no sample is left.
    """
    index = {sample_id: row for row, sample_id in enumerate(_column(others, "sample_id"))}
    counts = {"only_here": 0, "other_text": 0}
    tallies: dict[str, AgreementTally] = {}
    for trace in progress(traces, "agreement"):
        other = others[index.pop(trace.sample_id)] if trace.sample_id in index else None
        if other is None:
            counts["only_here"] += 1
        elif not np.array_equal(trace.input_ids, other.input_ids):
            counts["other_text"] += 1
        else:
            _require_sound(other, others)
            shared_TL = shared_choices(trace.experts, other.experts, traces.num_experts)
            tallies.setdefault(trace.dataset, AgreementTally()).add(shared_TL, traces.top_k, trace.prompt_len)
    if not tallies:
        raise InputError(
            f"--compare {others.folder}: has no sample with the id and the tokens of one of {traces.folder}; "
            "trace the same text in both, for instance with --teacher-force"
        )
    return {
        "with": identity(others.manifest),
        **counts,
        "only_there": len(index),
        "overall": summarise_agreement(list(tallies.values()), traces.top_k),
        "datasets": {name: summarise_agreement([tally], traces.top_k) for name, tally in tallies.items()},
    }


def identity(manifest: Header) -> dict:
    """What of a manifest says whose routing this is."""
    keys = ("target", "engine", "family", "moe_layers", "num_experts", "top_k")
    values = asdict(manifest)
    return {key: values[key] for key in keys}


def expert_load(loads: dict[str, np.ndarray], manifest: Header, tokens: int) -> dict:
    """The content of `expert_load.json`, given counts [L, E] of each data set."""
    layers = manifest.moe_layers

    def rows(counts_LE: np.ndarray) -> list[list[int]]:
        by_layer = np.zeros((max(layers) + 1, counts_LE.shape[1]), np.int64)
        by_layer[layers] = counts_LE
        return by_layer.tolist()

    return {
        "moe_layers": layers,
        "num_experts": manifest.num_experts,
        "top_k": manifest.top_k,
        "tokens": tokens,
        "logical_count": rows(sum(loads.values())),
        "datasets": {name: rows(counts_LE) for name, counts_LE in loads.items()},
    }


def _comparable(traces: TraceSet, others: TraceSet) -> TraceSet:
    for key in ("moe_layers", "num_experts", "top_k"):
        ours, theirs = getattr(traces.manifest, key), getattr(others.manifest, key)
        if ours != theirs:
            raise InputError(
                f"--compare {others.folder}: its {key} ({theirs}) is not that of {traces.folder} ({ours}); "
                "compare traces of one model"
            )
    return others


def _require_sound(trace: Trace, traces: TraceSet) -> None:
    try:
        require_sound_ids(trace.experts, traces.num_experts)
    except DamageError as error:
        raise DamageError(f"{traces.folder}, sample {trace.sample_id}: {error}") from None


def _count_windows(traces: TraceSet) -> int:
    return sum(max(len(ids) - WIDTH + 1, 0) for ids in _column(traces, "input_ids"))


def _column(traces: TraceSet, name: str) -> Iterator:
    """One column's values in the order of `traces`, without reading the expert ids; lists stay Arrow's."""
    for part in traces.manifest.parts:
        path = traces.folder / part.file
        file = open_part(path)
        for group in range(file.num_row_groups):
            with reading(path):
                values = file.read_row_group(group, columns=[name])[name]
            yield from (value.values if isinstance(value, pa.ListScalar) else value.as_py() for value in values)
