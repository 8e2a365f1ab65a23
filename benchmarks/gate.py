"""What the gate takes, from what `make test` printed: the whole run, and the slowest 30 parts of tests.

    make test 2>&1 | tee gate.log
    python benchmarks/gate.py gate.log --markdown benchmarks/results/gate.md

The part of the page above its table is kept; it is written by hand.
"""

import argparse
import re
from pathlib import Path

SLOW = re.compile(r"^(?P<seconds>\d+\.\d+)s (?P<part>setup|call|teardown) +(?P<test>tests/\S.*)$", re.MULTILINE)
WHOLE = re.compile(r"^=+ (?P<summary>\d+ passed.*?) in (?P<seconds>\d+\.\d+)s.*=+$", re.MULTILINE)
TABLE = "<!-- from here written by benchmarks/gate.py -->\n"


def table(log: str) -> str:
    """The page's figures.

    Raises:
        ValueError: there is no whole run of pytest in what was printed.
    """
    whole = WHOLE.search(log)
    if whole is None:
        raise ValueError("there is no line like `= 4000 passed in 500.00s =`; the gate did not pass")
    rows = "".join(f"| {slow['seconds']} | {slow['part']} | `{slow['test']}` |\n" for slow in SLOW.finditer(log))
    return (
        f"\nThe tests: {whole['summary']}, {float(whole['seconds']):.0f} s.\n\n"
        f"| seconds | part | test |\n|---:|---|---|\n{rows}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="what `make test` printed")
    parser.add_argument("--markdown", type=Path, required=True, help="the page to fill")
    arguments = parser.parse_args()
    page = arguments.markdown.read_text()
    head, mark, _ = page.partition(TABLE)
    if not mark:
        parser.error(f"{arguments.markdown} has no line {TABLE.strip()}")
    arguments.markdown.write_text(head + mark + table(arguments.log.read_text()))


if __name__ == "__main__":
    main()
