"""Progress of long work: a bar on a terminal, plain log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

LOG_SECONDS = 10.0
Item = TypeVar("Item")
log = logging.getLogger(__name__)


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """The items, one after the other, while the number of those finished is shown on stderr.

    `total` says how many there are where `items` has no length.
    """
    total = len(items) if total is None else total
    if sys.stderr.isatty():
        yield from tqdm(items, desc=what, total=total, file=sys.stderr)
        return
    last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last >= LOG_SECONDS or done == total:
            log.info("%s: %d of %d", what, done, total)
            last = time.monotonic()
