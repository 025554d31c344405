"""One judge for whatever an engine reports: a sample's true routing, or the reason why it is refused. Pure.

Public tools have recorded every one of these faults in silence: rows of zeros, a last row lost, dense layers that shift
all others, rows of another request, ids of physical expert copies. What cannot be seen here: ids that are in range and
distinct, under the right prompt and in the right number, and still wrong.

Letters: T tokens, L MoE layers, E experts, K experts per token, D decoder layers, dense ones included.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ecospec.errors import DamageError
from ecospec.tracing.target.loading import MoeShape

BELIEVABLE = 1e-9  # rows of zeros less likely than this under K = 1 are a fault, not a choice


class EngineError(DamageError):
    """An engine is beyond retry; what it traced before is sound. Commands exit with code 1."""


@dataclass(frozen=True, eq=False)
class Routed:
    """Tokens that went through the model, int32 [T], and the experts each used, as executed, integers [T, L, K]."""

    input_ids: np.ndarray
    prompt_len: int
    experts: np.ndarray


@dataclass(frozen=True)
class Rejected:
    """A sample that has no trustworthy routing, and why."""

    reason: str


@dataclass(frozen=True, eq=False)
class Report:
    """What an engine says about one sequence.

    `read_ids` are the ids that it read, `new_ids` those that it chose after them, the last of which never went through
    the model. `experts`: integers [T, D, K] over all decoder layers, or [T, L, K] over the MoE layers.
    """

    read_ids: list[int]
    new_ids: list[int]
    experts: np.ndarray


def validate(sent_ids: list[int], prompt_len: int, report: Report, shape: MoeShape) -> Routed | Rejected:
    """The routing of `sent_ids` and of the new ids but the last, dense layers dropped; else the first fault found."""
    fault = next(_faults(sent_ids, report, shape), None)
    if fault is not None:
        return Rejected(fault)
    input_ids = np.array(sent_ids + report.new_ids[:-1], np.int32)
    return Routed(input_ids, prompt_len, _moe_rows(report.experts, shape))


def prompt_fault(read_ids: list[int], sent_ids: list[int]) -> str | None:
    """How the ids that an engine read differ from those that it was sent; None where they do not."""
    if read_ids == sent_ids:
        return None
    if len(read_ids) != len(sent_ids):
        return f"the engine read {len(read_ids)} prompt ids where {len(sent_ids)} were sent"
    place = next(index for index, pair in enumerate(zip(read_ids, sent_ids, strict=True)) if pair[0] != pair[1])
    return f"the engine read id {read_ids[place]} at place {place} where {sent_ids[place]} was sent"


def outgrown(tokens: int, context: int | None) -> Rejected | None:
    """The refusal of a sequence of `tokens` tokens that a context of `context` cannot hold; None where it fits."""
    if context is None or tokens <= context:
        return None
    return Rejected(f"needs {tokens} tokens but the target's context is {context}")


def _faults(sent_ids: list[int], report: Report, shape: MoeShape) -> Iterator[str]:
    """Each check may rely on those before it: read the first fault only."""
    prompt = prompt_fault(report.read_ids, sent_ids)
    if prompt is not None:
        yield prompt
    experts = report.experts
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        yield f"the routing is {experts.dtype} {list(experts.shape)}, not integers [tokens, layers, K]"
    T = len(sent_ids) + max(len(report.new_ids) - 1, 0)
    if len(experts) != T:
        yield f"routing of {len(experts)} tokens where {T} went through the model"
    if experts.shape[1] not in (shape.num_layers, len(shape.layers)):
        yield f"routing of {experts.shape[1]} layers where the model has {shape.num_layers}"
    if experts.shape[2] != shape.top_k:
        yield f"routing to {experts.shape[2]} experts a token where the model uses {shape.top_k}"
    yield from _dense_faults(experts, shape)
    yield from _id_faults(_moe_rows(experts, shape), shape)


def _dense_faults(experts: np.ndarray, shape: MoeShape) -> Iterator[str]:
    if experts.shape[1] == len(shape.layers):
        return
    for layer in sorted(set(range(shape.num_layers)) - set(shape.layers)):
        if experts[:, layer].any():
            yield f"layer {layer} is dense but has routing: the layers are shifted"


def _id_faults(experts_TLK: np.ndarray, shape: MoeShape) -> Iterator[str]:
    E = shape.num_experts
    lowest, highest = int(experts_TLK.min()), int(experts_TLK.max())
    if lowest < 0 or highest >= E:
        yield f"expert id {lowest if lowest < 0 else highest} is outside 0..{E - 1}"
    empty = _empty_row(experts_TLK, E)
    if empty is not None:
        yield f"token {empty} of {len(experts_TLK)} has rows of zeros: its routing was not recorded"
    sorted_TLK = np.sort(experts_TLK, axis=-1)
    twice_TLK = sorted_TLK[..., 1:] == sorted_TLK[..., :-1]
    if twice_TLK.any():
        token, layer = np.argwhere(twice_TLK)[0][:2]
        yield f"token {token} uses one expert twice in layer {shape.layers[layer]}"


def _empty_row(experts_TLK: np.ndarray, num_experts: int) -> int | None:
    """The first token with a MoE row of zeros, which for K = 1 may be a true choice of expert 0.

    There, only a token with zeros in all layers counts, and only where so many zeros would not be believable: those of
    all T tokens together if every token has them, of one token otherwise.
    """
    T, L, K = experts_TLK.shape
    if K > 1:
        empty_T = ~experts_TLK.any(axis=2).all(axis=1)
        return int(empty_T.argmax()) if empty_T.any() else None
    empty_T = ~experts_TLK.any(axis=(1, 2))
    zeros = L * (T if empty_T.all() else 1)
    if not empty_T.any() or zeros * math.log(num_experts) < -math.log(BELIEVABLE):
        return None
    return int(empty_T.argmax())


def _moe_rows(experts: np.ndarray, shape: MoeShape) -> np.ndarray:
    return experts if experts.shape[1] == len(shape.layers) else experts[:, list(shape.layers)]
