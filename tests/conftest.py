"""Options and fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    shared = ROOT.parent / "shared"
    parser.addoption("--parity", default=str(shared / "reference" / "parity"), help="folder of the parity data")
    parser.addoption("--data", default=str(shared / "data"), help="folder of real text and tokenizers")


def _folder(request: pytest.FixtureRequest, option: str) -> Path:
    folder = Path(request.config.getoption(option))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; name one with {option} DIR")
    return folder


@pytest.fixture(scope="session")
def parity(request: pytest.FixtureRequest) -> Path:
    """Folder with inputs and outputs of the public scripts."""
    return _folder(request, "--parity")


@pytest.fixture(scope="session")
def real_data(request: pytest.FixtureRequest) -> Path:
    """Folder with real text and the contest's tokenizers."""
    return _folder(request, "--data")
