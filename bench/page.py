"""Speed of the page of `caddie export --to html` in headless Chromium: opening, writing and measuring.

python bench/page.py runs/demo/artifact.html --tokens 400 --times 5
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

from browser import Browser

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "metric.md").read_text()


def main() -> None:
    """Print medians and ranges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, list[float]] = {
        "seconds to open": [],
        "tokens written per second": [],
        "tokens read per second": [],
    }
    opened, written, read = found.values()
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}  # nothing begins by itself
        browser.ask("Emulation.setEmulatedMedia", features=[motion])
        for seed in range(given.times):
            begin = time.perf_counter()
            browser.open(given.page.resolve().as_uri())
            browser.until("document.body?.dataset.ready", "yes")
            opened.append(time.perf_counter() - begin)
            settings = {"prompt": "def ", "tokens": given.tokens, "temperature": 0.8, "topK": 40, "seed": seed}
            written.append(browser.run(f"caddie.ask('write', {json.dumps(settings)}).then((x) => x.rate)"))
            begin = time.perf_counter()
            count = browser.run(
                f"caddie.ask('score', {{text: {json.dumps(TEXT[: 4 * given.tokens])}}}).then((x) => x.tokens.length)"
            )
            read.append(count / (time.perf_counter() - begin))
    size = given.page.stat().st_size
    print(f"{given.page}: {size:,} bytes, {given.tokens} tokens, {given.times} times; median (least to most)")
    for name, values in found.items():
        print(f"{name:26} {statistics.median(values):10,.1f}  ({min(values):,.1f} to {max(values):,.1f})")


if __name__ == "__main__":
    main()
