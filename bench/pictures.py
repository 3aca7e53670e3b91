"""Draw the pictures of the README and of `docs/architecture.md`, and list every file in `docs/files.md`.

    python bench/pictures.py        # writes docs/images/*.svg and the list

`architecture.svg`: the folders in the page's order, each with the first sentence of its docstring; the arrows are the
imports found in the code, less those that a chain of other arrows implies. `run.svg`: the stages of a run. `demo.svg`:
the table of a real `make demo`, kept in `demo.txt`. `rivals.svg`: bits per byte of caddie, other programs and
compressors, from the rows of `bench/rivals.py` and `bench/compressors.py` (`rival_chart.py`). `ladder.svg`: the twins
of the records by their public scores, from the rows of `studies/ladder` (`ladder_chart.py`).
"""

import ast
import random
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

from ladder_chart import draw_ladder
from rival_chart import draw_rivals
from svg import box, picture, words

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "caddie"
PAGE = ROOT / "docs" / "architecture.md"
FILES = ROOT / "docs" / "files.md"
IMAGES = ROOT / "docs" / "images"
LIST = "## Every Python file in a line"
"""Heading of the list, the last of `FILES`."""

LINE = ("data", "model", "train", "pack", "score", "verify", "inference", "run")
"""Folders through which a run goes; drawn in colour."""

STAGES = (
    (
        "open corpus",
        "tokenize and split; count bytes; prove that no document is in both",
        "run/resolve_corpus, data",
        ("data/…/manifest.json",),
    ),
    ("check", "revert each changed setting alone: it must change something", "run/dead_settings", ()),
    (
        "train",
        "warm up every shape, then steps until the clock ends",
        "train",
        ("recipe.json", "log.jsonl", "checkpoint.safetensors", "weights.safetensors"),
    ),
    ("calibrate", "measure the cost of an error in each weight", "pack/calibrate", ()),
    ("pack", "quantize, code, and fill the cap", "pack", ("artifact.caddie",)),
    ("score", "read the file in a fresh process; bits per byte", "score", ()),
    ("verify", "probe the scorer in a sandbox", "verify", ()),
    ("result", "state size, score and seconds under each policy", "run/result, report", ("result.json", "report.html")),
)
"""Stages of a run: name, purpose, place in the package, files left in the run folder (in `data/` for the corpus)."""

WIDTH, MARGIN, GAP = 920, 10, 16
CARD, LANE = 206, 14
"""Widths of a folder's card and of an arrow that passes a row."""
HEIGHT, BETWEEN = 76, 42
"""Height of a row, and the room for arrows below it."""
TRIES = 100
"""Random orders from which an arrangement is tried."""

Arrows = Mapping[str, frozenset[str]]


# Reading the package


def order() -> tuple[str, ...]:
    """The folders from the ground up, as the page states them and `tests/test_house.py` holds them."""
    (line,) = re.findall(r"^ {4}(errors < .*)$", PAGE.read_text(), re.MULTILINE)
    return tuple(line.split(" < "))


def purposes(names: Iterable[str]) -> dict[str, str]:
    """The first sentence of each folder's docstring; of one that begins "The doctor: …", what follows."""
    found = {}
    for name in names:
        path = PACKAGE / name / "__init__.py" if (PACKAGE / name).is_dir() else PACKAGE / f"{name}.py"
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        sentence = re.split(r"[.;](?:\s|$)", docstring, maxsplit=1)[0]
        sentence = re.sub(r"^(The|A) (\S+ )?\S+: ", "", sentence)
        found[name] = sentence[:1].upper() + sentence[1:]
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """For each folder or file directly below the package, the others that it imports anywhere."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        own = found.setdefault(inside.parts[0].removesuffix(".py"), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            own |= {name.split(".")[1] for name in names if name.startswith("caddie.")}
    return {name: frozenset((others & set(found)) - {name}) for name, others in found.items()}


def reduced(arrows: Arrows) -> dict[str, frozenset[str]]:
    """The fewest arrows that reach the same folders."""

    def reach(name: str) -> set[str]:
        return set().union(*({other} | reach(other) for other in arrows[name]))

    return {
        name: frozenset(other for other in others if not any(other in reach(between) for between in others))
        for name, others in arrows.items()
    }


# Placing the folders


class Node(NamedTuple):
    """A folder in its row, or an arrow's passage through it."""

    name: str
    row: int


def rows_of(names: Sequence[str], arrows: Arrows) -> list[list[str]]:
    """The order cut into rows from the ground up, a new one where a folder imports from the row."""
    rows: list[list[str]] = [[]]
    for name in names:
        if arrows[name] & set(rows[-1]):
            rows.append([])
        rows[-1].append(name)
    return rows


def routes(rows: Sequence[Sequence[str]], arrows: Arrows) -> list[list[Node]]:
    """Each arrow as the nodes it goes through, from the importing folder down, one in each row."""
    place = {name: number for number, row in enumerate(rows) for name in row}
    found = []
    for name in sorted(place, key=lambda name: -place[name]):
        for other in sorted(arrows[name], key=lambda other: (-place[other], other)):
            passed = [Node(f"{name}-{other}", row) for row in range(place[name] - 1, place[other], -1)]
            found.append([Node(name, place[name]), *passed, Node(other, place[other])])
    return found


def wide(node: Node) -> int:
    """The room that a node takes in its row."""
    return LANE if "-" in node.name else CARD


def placed(rows: Sequence[Sequence[str]], ways: Sequence[Sequence[Node]]) -> dict[Node, float]:
    """The middle of every node, from the best of many tries: few crossings first, then short arrows."""
    layers = [[Node(name, number) for name in row] for number, row in enumerate(rows)]
    for way in ways:
        for node in way[1:-1]:
            layers[node.row].append(node)
    pairs = [pair for way in ways for pair in pairwise(way)]
    chance = random.Random(0)
    tries = [_settled([chance.sample(layer, len(layer)) for layer in layers], pairs) for _ in range(TRIES)]
    return min(tries, key=lambda at: _cost(at, pairs))


def _settled(layers: list[list[Node]], pairs: Sequence[tuple[Node, Node]]) -> dict[Node, float]:
    """Move the nodes of each row near to the mean of their neighbours, in turns, from the order given."""
    joined: dict[Node, list[Node]] = {node: [] for layer in layers for node in layer}
    for upper, lower in pairs:
        joined[upper].append(lower)
        joined[lower].append(upper)
    at = dict.fromkeys(joined, WIDTH / 2)
    for layer in layers:
        _spread(layer, at, [])
    for turn in range(12):
        for layer in layers if turn % 2 else reversed(layers):
            wanted = {node: sum(at[other] for other in joined[node]) / len(joined[node]) for node in layer}
            layer.sort(key=lambda node: (round(wanted[node]), node.name))
            at |= wanted
            _spread(layer, at, layer)
    return at


def _cost(at: Mapping[Node, float], pairs: Sequence[tuple[Node, Node]]) -> tuple[int, float]:
    """Crossings of arrows between neighbouring rows, and the sum of their shifts to the side, in whole pixels."""
    crossings = sum(
        (at[upper] - at[other]) * (at[lower] - at[below]) < 0
        for (upper, lower), (other, below) in combinations(pairs, 2)
        if upper.row == other.row
    )
    return crossings, sum(round(abs(at[upper] - at[lower])) for upper, lower in pairs)


def _spread(layer: Sequence[Node], at: dict[Node, float], wanted: Sequence[Node]) -> None:
    """Push the nodes of a row apart, about the mean of where they want to be and within the picture."""
    middle = sum(at[node] for node in wanted) / len(wanted) if wanted else WIDTH / 2
    for left, right in pairwise(layer):
        at[right] = max(at[right], at[left] + (wide(left) + wide(right)) / 2 + GAP)
    shift = middle - sum(at[node] for node in layer) / len(layer)
    least = MARGIN - min(at[node] - wide(node) / 2 for node in layer)
    most = WIDTH - MARGIN - max(at[node] + wide(node) / 2 for node in layer)
    for node in layer:
        at[node] += max(least, min(most, shift))


# Drawing


def wrapped(text: str) -> list[str]:
    """At most three lines; of a longer text, its last clauses are left out."""
    lines = textwrap.wrap(text, 30, break_on_hyphens=False)
    shorter = re.sub(r"[,:][^,:]*$", "", text)
    return wrapped(shorter) if len(lines) > 3 and shorter != text else lines[:3]


def draw_folders() -> str:
    """The folders in rows, the command line on top, with arrows down to what each imports."""
    names, arrows = order(), imports()
    rows = rows_of(names, arrows)
    ways = routes(rows, {name: others for name, others in reduced(arrows).items() if name in names})
    at, purpose = placed(rows, ways), purposes(names)

    def top(node: Node) -> float:
        return MARGIN + (len(rows) - 1 - node.row) * (HEIGHT + BETWEEN)

    parts = []
    for way in ways:
        first, last = way[0], way[-1]
        x, y = at[first] + _port(at, ways, way, 0), top(first) + HEIGHT
        path = f"M{x:.0f},{y:.0f}"
        for node in way[1:]:
            to = at[node] + (_port(at, ways, way, -1) if node == last else 0)
            half = BETWEEN / 2
            path += f"C{x:.0f},{y + half:.0f} {to:.0f},{top(node) - half:.0f} {to:.0f},{top(node):.0f}"
            x, y = to, top(node) + HEIGHT
            if node != last:
                path += f"V{y:.0f}"
        parts.append(f'<path class="arrow" d="{path}" marker-end="url(#end)"/>')
    for row, members in enumerate(rows):
        for name in members:
            node = Node(name, row)
            x, y = at[node], top(node)
            parts.append(box(x - CARD / 2, y, CARD, HEIGHT, "box line" if name in LINE else "box"))
            parts.append(words(x, y + 19, name if (PACKAGE / name).is_dir() else f"{name}.py", "name"))
            lines = wrapped(purpose[name])
            parts += [words(x, y + 37 + 14 * number, line) for number, line in enumerate(lines)]
    return picture(WIDTH, top(Node("", 0)) + HEIGHT + MARGIN, "Folders of caddie and what each imports", parts)


def _port(at: Mapping[Node, float], ways: Sequence[Sequence[Node]], way: Sequence[Node], end: int) -> float:
    """Offset from a card's middle where an arrow leaves (`end` 0) or arrives (`end` -1), beside the card's others."""
    beside = 1 if end == 0 else -2
    sharing = sorted((other for other in ways if other[end] == way[end]), key=lambda other: at[other[beside]])
    return 26 * (sharing.index(way) - (len(sharing) - 1) / 2)


def draw_run() -> str:
    """The stages of a run from top to bottom, each with the files that it leaves."""
    height, between, left, right = 56, 24, 440, 310
    start = MARGIN + 40
    parts = [
        box(MARGIN, MARGIN, left, 32, "box made"),
        words(MARGIN + left / 2, MARGIN + 21, "recipe + text", "name"),
    ]
    y = start + between - 8
    for name, purpose, place, files in STAGES:
        middle = MARGIN + left / 2
        parts.append(f'<path class="arrow" d="M{middle:.0f},{y - between:.0f}V{y:.0f}" marker-end="url(#end)"/>')
        parts.append(box(MARGIN, y, left, height, "box line"))
        parts.append(words(MARGIN + 14, y + 23, name, "name", "start"))
        parts.append(words(MARGIN + left - 14, y + 23, place, "place", "end"))
        parts.append(words(MARGIN + 14, y + 43, purpose, "", "start"))
        if files:
            x = MARGIN + left + 60
            parts.append(
                f'<path class="arrow" d="M{MARGIN + left:.0f},{y + height / 2:.0f}H{x:.0f}" marker-end="url(#end)"/>'
            )
            parts.append(box(x, y, right, height, "box made"))
            for number, file in enumerate(files):
                column, row = divmod(number, 2)
                at = y + (35 if len(files) == 1 else 25 + 20 * row)
                parts.append(words(x + 14 + column * 115, at, file, "file", "start"))
        y += height + between
    return picture(2 * MARGIN + left + 60 + right, y - between + MARGIN, "How a run flows", parts)


def draw_demo() -> str:
    """The table that a demo ended with, as on a terminal."""
    lines = (IMAGES / "demo.txt").read_text().splitlines()
    pitch, step, top = 8.1, 18, 46
    width, height = 2 * 20 + pitch * max(map(len, lines)), top + step * len(lines) + 4
    parts = [f'<rect class="screen" width="{width:.0f}" height="{height:.0f}" rx="9"/>']
    parts += [f'<circle cx="{22 + 18 * number}" cy="20" r="5.5" fill="#4b5563"/>' for number in range(3)]
    for number, line in enumerate(lines):
        kind = "shell" if number and re.match(r" |$", line) else "shell strong"
        parts += [words(20, top + step * number, line.replace(" ", "\u00a0"), kind, "start")] if line else []
    return picture(width, height, "The end of make demo", parts)


PICTURES = {
    "architecture.svg": draw_folders,
    "run.svg": draw_run,
    "demo.svg": draw_demo,
    "rivals.svg": draw_rivals,
    "ladder.svg": draw_ladder,
}
"""Each picture by its file."""


def page_with_files(page: str) -> str:
    """The page of files with its last section made anew: every module and the first sentence of its docstring."""
    parts = []
    for folder in order():
        modules = sorted((PACKAGE / folder).rglob("*.py")) or [PACKAGE / f"{folder}.py"]
        for path in modules:
            sentence = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
            if path.name != "__init__.py" or path.parent.name == "tokenizers":
                parts.append(f"- `{path.relative_to(PACKAGE)}`: {sentence}")
    return page.partition(LIST)[0] + LIST + "\n\n" + "\n".join(parts) + "\n"


def main() -> None:
    """Write all pictures and the list of files."""
    FILES.write_text(page_with_files(FILES.read_text()))
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())
        print(IMAGES / name)


if __name__ == "__main__":
    main()
