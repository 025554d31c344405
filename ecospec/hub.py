"""The Hugging Face hub, or its cache alone where the hub does not answer."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_session

ANSWER_SECONDS = 3.0
_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


def is_hub_name(name: str | Path) -> bool:
    """Whether `name` is no file or folder here and may be a repository of the hub."""
    return not Path(name).exists() and _NAME.fullmatch(str(name)) is not None


@contextmanager
def hub_or_cache(name: str | Path) -> Iterator[None]:
    """While entered, libraries that look for `name` on the hub search their cache alone if the hub does not answer.

    Does nothing where `name` is a folder, or the user has set HF_HUB_OFFLINE. Raises OSError, saying that the hub does
    not answer, for what the cache lacks.
    """
    if not is_hub_name(name) or constants.is_offline_mode() or _answers():
        yield
        return
    # Left to themselves, the libraries retry for 23 seconds. They read this switch of theirs at each request.
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise OSError(f"the hub ({constants.ENDPOINT}) does not answer, and its cache here lacks {name}") from error
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers() -> bool:
    """One attempt, through the proxy that the libraries would use; any answer counts."""
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except httpx2.RequestError:
        return False
    return True
