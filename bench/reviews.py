"""Review many submission folders and print a table of what was found.

    python bench/reviews.py records/track_10min_16mb/* records/track_non_record_16mb/*

One row for each folder: its errors by rule, then its warnings, each with the number of findings.
"""

import sys
from collections import Counter
from pathlib import Path

from caddie.submit.review import review


def main(folders: list[str]) -> None:
    """Print the table in Markdown."""
    print("| folder | errors | warnings |\n|---|---|---|")
    for folder in folders:
        if Path(folder).is_dir():
            result = review(Path(folder))
            cells = []
            for severity in ("error", "warning"):
                counts = Counter(one.rule for one in result.findings if one.severity == severity)
                cells.append(", ".join(f"{rule} {count}" if count > 1 else rule for rule, count in counts.items()))
            print(f"| {Path(folder).name} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
