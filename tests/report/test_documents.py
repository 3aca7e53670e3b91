"""The file of held-out documents: what is written is read, and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from caddie.errors import UserError
from caddie.report.documents import read_documents, run_documents, write_documents
from caddie.report.run_files import DOCUMENTS


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Sums agree to a millionth of a bit per byte, and names may be anything."""
    chance = np.random.default_rng(0)
    sizes = chance.integers(1, 24_000, 300)
    bits = {name: sizes * chance.uniform(1, 3, 300) for name in ('a, "b" s1', "größer\n s2")}
    write_documents(tmp_path / "d.csv", sizes, bits)
    of_text, found = read_documents(tmp_path / "d.csv")
    assert of_text.tolist() == sizes.tolist()
    assert found.keys() == bits.keys()
    for name, column in found.items():
        assert abs(column.sum() - bits[name].sum()) / sizes.sum() < 1e-6
    assert (tmp_path / "d.csv").stat().st_size < 13 * 2 * 300, "small enough to commit"
    write_documents(tmp_path / "d.csv", [5], {"bits": [9.5]})
    assert (tmp_path / "d.csv").read_text() == "bytes,bits\n5,9.500\n"
    assert [one.tolist() for one in read_documents(tmp_path / "d.csv")[1].values()] == [[9.5]]


@pytest.mark.parametrize(
    "text",
    ["", "bytes,bits\n", "bytes,bits\n1,2,3\n", "bytes,bits\n1,2\n3\n", "bytes,bits\n1,x\n", "\0", "bytes,b\n1,2\n"],
)
@pytest.mark.filterwarnings("error")
def test_a_damaged_file_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / DOCUMENTS).write_text(text)
    with pytest.raises(UserError, match=r"documents.csv: .*; remove it, or run the recipe again"):
        run_documents(tmp_path)


def test_a_run_of_an_older_version_has_none(tmp_path: Path) -> None:
    assert run_documents(tmp_path) is None
