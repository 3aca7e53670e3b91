"""Bits of each held-out document, in one file for a run, and in one for all runs of a study.

`documents.csv` has a line for each document, in the order of the held-out text: its bytes, then the bits that each run
spent on it. The bits are rounded to thousandths, so a sum over 2,000 documents is off by less than a bit.
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from caddie.errors import UserError
from caddie.files import reason, replacing
from caddie.report.run_files import DOCUMENTS

Figures = npt.NDArray[np.float64]
"""A figure of each document, (documents,)."""
BYTES, BITS = "bytes", "bits"
"""Names of the columns in the file of a run."""


def write_documents(path: Path, sizes: npt.ArrayLike, bits: Mapping[str, npt.ArrayLike]) -> None:
    """Write the bytes of each document, and its bits by column name; complete or not at all."""
    names = io.StringIO()
    csv.writer(names, lineterminator="\n").writerow([BYTES, *bits])
    table = np.column_stack([sizes, *bits.values()])
    form = ["%d", *["%.3f"] * len(bits)]
    with replacing(path) as temporary:
        np.savetxt(temporary, table, form, ",", header=names.getvalue()[:-1], comments="", encoding="utf-8")


def read_documents(path: Path) -> tuple[Figures, dict[str, Figures]]:
    """Return the bytes of each document, and its bits by column name; `UserError` if the file is damaged."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            _, *names = next(csv.reader(file))
            if not (lines := file.readlines()):
                raise ValueError("no documents")
            sizes, *bits = np.loadtxt(lines, delimiter=",", ndmin=2, unpack=True)
        return sizes, dict(zip(names, bits, strict=True))
    except (OSError, ValueError, StopIteration, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)}); remove it, or run the recipe again") from None


def run_documents(folder: Path) -> tuple[Figures, Figures] | None:
    """Return bytes and bits of each document of a run folder; None for a run of an older version."""
    if not (folder / DOCUMENTS).exists():
        return None
    sizes, columns = read_documents(folder / DOCUMENTS)
    if BITS not in columns:
        raise UserError(f"{folder / DOCUMENTS}: no column {BITS}; remove it, or run the recipe again")
    return sizes, columns[BITS]
