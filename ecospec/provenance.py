"""How an artefact came about: the `provenance.json` beside everything that the commands write."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ecospec.files import write_json

FILE = "provenance.json"


@dataclass(frozen=True)
class Provenance:
    """Command line, source revision, package versions and machine; `config` holds the keys of the command.

    `more` is what else is known of the artefact, by name: `datasets` whose prompts were seen, `traces` learnt from, ….
    """

    command: list[str]
    git_revision: str | None
    packages: dict[str, str]
    python: str
    machine: dict
    config: dict | None
    more: dict

    @classmethod
    def of(cls, config: object = None, **more: object) -> "Provenance":
        """That of this process. `config`: the dataclass of the command's keys, where it has any to tell."""
        return cls(
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            git_revision=_git_revision(),
            packages=package_versions(),
            python=platform.python_version(),
            machine={"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()},
            config=None if config is None else asdict(config),
            more=more,
        )

    def to_json(self) -> dict:
        """The content of `provenance.json`."""
        known = {name: value for name, value in vars(self).items() if name not in ("config", "more")}
        return known | ({} if self.config is None else {"config": self.config}) | self.more

    def write(self, folder: Path) -> None:
        """Write `provenance.json` into `folder`."""
        write_json(folder / FILE, self.to_json())


def package_versions() -> dict[str, str]:
    """Of the packages that are installed: decoding needs no Lightning."""
    names = ("ecospec", "torch", "transformers", "lightning", "pyarrow", "tokenizers", "numpy")
    installed = {found.name.lower() for found in importlib.metadata.distributions()}
    return {name: importlib.metadata.version(name) for name in names if name in installed}


def _git_revision() -> str | None:
    here = Path(__file__).resolve().parent
    result = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
