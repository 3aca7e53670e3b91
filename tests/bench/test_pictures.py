"""The pictures of the documentation: drawn from the imports as they are."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pictures as drawing
import pytest


@pytest.mark.parametrize("name", drawing.PICTURES)
def test_the_committed_picture_is_fresh(name: str) -> None:
    again = "if this is meant: python bench/pictures.py"
    assert (drawing.IMAGES / name).read_text() == drawing.PICTURES[name](), again


def test_the_list_of_files_is_fresh() -> None:
    page = drawing.FILES.read_text()
    assert page == drawing.page_with_files(page), "if this is meant: python bench/pictures.py"
    for name in ("pack/fit.py", "data/tokenizers/bpe.py", "errors.py"):
        assert f"- `{name}`: " in page


@pytest.mark.long
def test_every_folder_is_drawn_with_its_purpose_and_the_arrows_point_down() -> None:
    svg = drawing.draw_folders()
    names, found, purposes = drawing.order(), drawing.imports(), drawing.purposes(drawing.order())
    text = [element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]
    for name in names:
        assert {name, f"{name}.py"} & set(text)
        assert len(purposes[name]) > 10
    arrows = re.findall(r'<path class="arrow" d="M[^,]+,(\d+).*?(\d+)"', svg)
    assert len(arrows) == sum(map(len, drawing.reduced({n: found[n] for n in names}).values()))
    assert all(int(begin) < int(end) for begin, end in arrows)


@pytest.mark.long
def test_cards_do_not_overlap_and_stay_within_the_picture() -> None:
    cards = re.findall(r'<rect class="box[^"]*" x="(\d+)" y="(\d+)" width="(\d+)"', drawing.draw_folders())
    rows: dict[str, list[tuple[int, int]]] = {}
    for x, y, width in cards:
        rows.setdefault(y, []).append((int(x), int(x) + int(width)))
    for row in rows.values():
        row.sort()
        assert row[0][0] >= 0
        assert row[-1][1] <= drawing.WIDTH
        assert all(left[1] < right[0] for left, right in pairwise(row))


def test_arrows_that_others_say_are_left_out() -> None:
    arrows = {"top": {"middle", "ground", "side"}, "middle": {"ground"}, "side": set(), "ground": set()}
    left = drawing.reduced({name: frozenset(others) for name, others in arrows.items()})
    assert left == {"top": {"middle", "side"}, "middle": {"ground"}, "side": frozenset(), "ground": frozenset()}


def test_a_run_leaves_the_files_of_the_figure(tiny_run: Any) -> None:
    left = {path.name for path in tiny_run.folder.iterdir()}
    for _, _, places, files in drawing.STAGES:
        for place in places.split(", "):
            assert (drawing.PACKAGE / place).is_dir() or (drawing.PACKAGE / f"{place}.py").is_file(), place
        assert {Path(file).name for file in files if file.startswith("data/")} <= {"manifest.json"}
        assert {file for file in files if not file.startswith("data/")} <= left
