"""Benchmark: `make demo` from an empty demo folder, packages installed. Run it from the repository's root.

    python tests/benchmarks/demo_time.py

Prints the seconds it took against the limit, and whether every row of its table decoded plain decoding's very tokens.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

LIMIT_SECONDS = 8 * 60


def main() -> int:
    began = time.monotonic()
    subprocess.run(["make", "demo"], check=True)
    seconds = time.monotonic() - began
    runs = json.loads(Path("demo-out/run/results.json").read_text())["runs"]
    different = [run["label"] for run in runs if run["lossless"] not in ("exact", "reference")]
    print(
        f"make demo: {seconds:.0f} s of {LIMIT_SECONDS} s; rows that differ from plain decoding: {different or 'none'}"
    )
    return int(seconds > LIMIT_SECONDS or bool(different))


if __name__ == "__main__":
    sys.exit(main())
