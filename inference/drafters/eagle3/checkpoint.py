"""EAGLE-3 checkpoints on disk: headers, tensors, vocabulary maps; `load_head` makes a head of them.

Every key must have its place and every place its key, in the shape that the configuration implies.

Letters: D draft vocabulary, V target vocabulary.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ecospec.errors import InputError, first_few
from ecospec.files import read_json
from ecospec.inference.drafters.eagle3.dialects import HeadSpec, key_of, resolve
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.tracing.target.checkpoint import Checkpoint, key_faults

log = logging.getLogger(__name__)


def load_head(
    folder: Path,
    target: PreTrainedConfig,
    feature_layers: Sequence[int] | None = None,
    rope_theta: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Eagle3Head:
    """The head in `folder` for a target of this configuration; attach the target to it before use.

    `feature_layers` (boundaries) and `rope_theta` replace what the checkpoint says. Notes for the user are logged.
    Raises InputError as `inspect_head` does, and when a file cannot be read or the vocabulary maps are wrong.
    """
    spec = inspect_head(folder, target, feature_layers, rope_theta)
    for note in spec.notes:
        log.warning("%s: %s", folder, note)
    stored = Checkpoint(folder).read_all()
    state = {name: stored[key] for key, name in spec.names.items()}
    state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    d2t_D = state.get("d2t", torch.zeros(spec.config.draft_vocab_size)).long()
    state |= {"d2t": d2t_D, "t2d": check_maps(d2t_D, state.get("t2d"), spec.config.vocab_size, folder)}
    if "t2d" not in spec.shapes and len(d2t_D) < spec.config.vocab_size and not d2t_D.any():
        log.warning("%s: d2t is all zeros, so only the target's first %d tokens are drafted", folder, len(d2t_D))
    with torch.device("meta"):
        head = Eagle3Head(spec.config, spec.flags, spec.feature_layers)
    head.load_state_dict(state, assign=True)
    return head.eval()


def inspect_head(
    folder: Path,
    target: PreTrainedConfig,
    feature_layers: Sequence[int] | None = None,
    rope_theta: float | None = None,
) -> HeadSpec:
    """What `load_head` would load, from headers alone.

    Raises InputError as `resolve` does, when a file is absent or unreadable, and, naming all of them, when keys are
    missing, unused or of the wrong shape.
    """
    values = read_json(folder / "config.json")
    if not isinstance(values, dict):
        raise InputError(f"{folder / 'config.json'}: is no configuration of a draft head")
    checkpoint = Checkpoint(folder)
    spec = resolve(folder, values, checkpoint.shapes(), target.get_text_config(), feature_layers, rope_theta)
    _check_keys(spec, checkpoint.files())
    return spec


def check_maps(d2t_D: Tensor, t2d_V: Tensor | None, vocab_size: int, where: Path) -> Tensor:
    """The mask t2d, bool [V], that belongs to the offsets `d2t_D`; where `t2d_V` is given, it is that.

    Raises InputError unless draft ids + d2t are, in ascending order, exactly the ids that t2d marks. Without t2d,
    offsets that rise with every draft id are refused as well: that is how absolute ids and a mere count look.
    """
    ids_D = torch.arange(len(d2t_D)) + d2t_D
    valid = bool((ids_D.diff() > 0).all()) and ids_D[0] >= 0 and ids_D[-1] < vocab_size
    marked_V = torch.zeros(vocab_size, dtype=torch.bool)
    if valid:
        marked_V[ids_D] = True
    agrees = torch.equal(marked_V, t2d_V.bool()) if t2d_V is not None else not _rises(d2t_D)
    if valid and agrees:
        return marked_V
    if torch.equal(d2t_D, torch.arange(len(d2t_D))):
        fault = "d2t is a mere count (arange)"
    elif _rises(d2t_D) and (t2d_V is None or torch.equal(d2t_D, t2d_V.nonzero().squeeze(1))):
        fault = "d2t holds absolute ids"
    else:
        fault = "d2t and t2d disagree" if valid else f"d2t does not lead to ascending ids below {vocab_size}"
    raise InputError(f"{where}: {fault}; it must hold the offset from each draft id to its target id")


def _rises(values: Tensor) -> bool:
    return len(values) > 1 and bool((values.diff() > 0).all())


def _check_keys(spec: HeadSpec, files: list[Path]) -> None:
    """Raises one InputError for the keys that are missing, unused or of another shape."""
    with torch.device("meta"):
        head = Eagle3Head(spec.config, spec.flags)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    optional = {"t2d", "d2t"} if spec.config.draft_vocab_size == spec.config.vocab_size else {"t2d"}
    first_layer = "layers.0." if any(key.startswith("layers.0.") for key in spec.shapes) else "midlayer."
    by_key = {key: expected[name] for key, name in spec.names.items() if name in expected}
    absent = expected.keys() - spec.names.values() - optional
    faults = key_faults(by_key | {key_of(name, first_layer): expected[name] for name in absent}, spec.shapes)
    if faults:
        raise InputError(f"{first_few(files)}: {faults}")
