"""Expert load as a small picture: a palette that is clear at even load, and a PNG writer for it.

Blue is less than an expert's even share of its layer's load, orange is more; an even share lets the page through, so
that one picture serves light and dark. The scale is the logarithm of load over even share, from 1/8 to 8.

Letters: H rows, W columns, L MoE layers, E experts.
"""

import struct
import zlib

import numpy as np

DOUBLINGS = 3  # of the even share, up and down, that the palette reaches
EVEN = 127  # palette index of the even share; 0 is 1/8 or less (also never used), 254 is 8 or more
ABSENT = 255  # clear: the row of a layer without experts
LESS, MORE = (32, 116, 196), (226, 98, 18)


def load_indices(counts_LE: np.ndarray, moe_layers: list[int]) -> np.ndarray:
    """uint8 [H, E] palette indices, a row for each layer of the model from the first MoE layer to the last."""
    first = min(moe_layers)
    indices_HE = np.full((max(moe_layers) - first + 1, counts_LE.shape[1]), ABSENT, np.uint8)
    indices_HE[np.array(moe_layers) - first] = index_of(counts_LE / counts_LE.mean(-1, keepdims=True))
    return indices_HE


def index_of(relative: np.ndarray) -> np.ndarray:
    """The palette index of load over even share."""
    doublings = np.log2(np.maximum(relative, 2.0**-DOUBLINGS)).clip(max=DOUBLINGS)
    return np.rint(EVEN + doublings * EVEN / DOUBLINGS).astype(np.uint8)


def palette() -> np.ndarray:
    """uint8 [256, 4]: red, green, blue, opacity of each index."""
    strength = np.abs(np.arange(256) - EVEN) / EVEN
    colours = np.where((np.arange(256) < EVEN)[:, None], LESS, MORE)
    opacity = np.rint(255 * strength.clip(max=1) ** 0.8)
    opacity[ABSENT] = 0
    return np.column_stack([colours, opacity]).astype(np.uint8)


def png(indices_HW: np.ndarray) -> bytes:
    """An 8-bit palette PNG; deterministic."""
    height, width = indices_HW.shape
    colours = palette()
    lines = np.zeros((height, width + 1), np.uint8)  # each line begins with filter type 0
    lines[:, 1:] = indices_HW
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours[:, :3].tobytes()),
        (b"tRNS", colours[:, 3].tobytes()),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
