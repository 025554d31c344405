"""Progress of long work: a bar on a terminal, plain log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

LOG_SECONDS = 10.0
Item = TypeVar("Item")
log = logging.getLogger(__name__)


def progress(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items, one after the other, while the number of those finished is shown on stderr."""
    if sys.stderr.isatty():
        yield from tqdm(items, desc=what, file=sys.stderr)
        return
    last = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - last >= LOG_SECONDS or done == len(items):
            log.info("%s: %d of %d", what, done, len(items))
            last = time.monotonic()
