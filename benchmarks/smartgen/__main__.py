"""All figures, one after another, each in a process of its own:

python -m benchmarks.smartgen [--only 2,9] [--out results/smartgen] [options of the figures, such as --quick]
"""

import argparse
import subprocess
import sys
from pathlib import Path

FIGURES = (2, 3, 9, 10, 11, 12, 13, 14, 15, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(map(str, FIGURES)), help="numbers of figures (default: all)")
    parser.add_argument("--out", type=Path, default=Path("results/smartgen"), help="folder for JSON and PNG")
    given, options = parser.parse_known_args()
    numbers = [int(part) for part in given.only.split(",")]
    if unknown := set(numbers) - set(FIGURES):
        parser.error(f"--only: {sorted(unknown)} are not made here; choose from {FIGURES}")
    given.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for number in numbers:
        name = f"fig{number:02}"
        files = ["--json", str(given.out / f"{name}.json"), "--png", str(given.out / f"{name}.png")]
        command = [sys.executable, "-m", f"benchmarks.smartgen.{name}", *files, *options]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
