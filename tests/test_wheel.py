"""The wheel: all files of the package are in it, and the main job runs wherever pip has put it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import TINY

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, out: Path) -> Path:
    """Return the sdist or wheel that setuptools makes of a folder."""
    done = subprocess.run([sys.executable, "-c", BUILD, kind, out], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files of the checkout below `caddie`, as they will be tracked."""
    names = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "caddie")
    done = subprocess.run(["git", "-C", ROOT, *names], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git checkout")
    return sorted(name for name in done.stdout.split("\0") if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def wheel(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made from the sdist, which so has all that it needs; the sdist is made from what git knows."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in [*tracked, "pyproject.toml", "README.md", "LICENSE"]:
        (folder / "clean" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "clean" / name)
    with tarfile.open(build("sdist", folder / "clean", folder)) as sdist:
        sdist.extractall(folder, filter="data")
    (source,) = folder.glob("caddie-*/")
    return build("wheel", source, folder)


@pytest.mark.long
def test_every_file_of_the_package_is_in_the_wheel_and_no_other(wheel: Path, tracked: list[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("dist-info/METADATA")]
    assert sorted(name for name in names if ".dist-info/" not in name) == tracked
    assert "License-Expression: MIT" in metadata
    assert "Classifier: Typing :: Typed" in metadata
    assert "Project-URL: Parameter golf, https://" in metadata
    for version in ("3.11", "3.12", "3.13"):
        assert f"Classifier: Programming Language :: Python :: {version}" in metadata


def bare_python(folder: Path) -> Path:
    """Return the Python of a new environment that has this one's packages and not this checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    # A path is all that this file is: the .pth files of that folder, such as the checkout's, are not read.
    Path(packages, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def into_environment(python: Path, wheel: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """`pip install WHEEL`."""
    pip(python, wheel)
    return python.parent.parent, {}


def into_home(python: Path, wheel: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """`pip install --user WHEEL`."""
    home = {"HOME": str(folder / "home"), "PYTHONUSERBASE": str(folder / "home" / "base")}
    pip(python, wheel, "--user", **home)
    return folder / "home" / "base", home


def into_folder(python: Path, wheel: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """`pip install --target DIR WHEEL`."""
    pip(python, wheel, "--target", str(folder / "target"))
    return folder / "target", {"PYTHONPATH": str(folder / "target")}


def clean(**more: str) -> dict[str, str]:
    """Return the environment without anything that leads to the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def pip(python: Path, wheel: Path, *options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-compile", *options, wheel]
    done = subprocess.run(command, env=clean(**environment), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_main_job_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """Train, pack, score in a new process, and probe in the sandbox, by processes that find only what is installed."""
    text = "\n\n".join(f"Paragraph {number} of a text, with {number * 7} words or fewer." * 9 for number in range(300))

    def job(install: Callable[[Path, Path, Path], tuple[Path, dict[str, str]]]) -> None:
        folder = tmp_path / install.__name__
        python = bare_python(folder / "environment")
        place, environment = install(python, wheel, folder)
        empty = folder / "empty"
        empty.mkdir()
        (folder / "text.txt").write_text(text)
        shown = subprocess.run(
            [python, "-c", "import caddie; print(caddie.__file__)"],
            cwd=empty,
            env=clean(**environment),
            capture_output=True,
            text=True,
        )
        assert Path(shown.stdout.strip()).is_relative_to(place), f"{install.__doc__} {shown.stdout} {shown.stderr}"
        (program,) = place.rglob("bin/caddie")
        done = subprocess.run(
            [program, "run", "tiny", *TINY, "--data", "../text.txt", "--out", "run", "--json"],
            cwd=empty,
            env=clean(**environment),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{install.__doc__} {done.stderr}"
        result = json.loads(done.stdout)
        assert result["verified"] is True, install.__doc__
        probed = {check["name"] for check in result["checks"]}
        assert {"runs in a sandbox", "reads nothing else", "no look-ahead"} <= probed, "the probes ran in the sandbox"
        assert (empty / "run" / "report.html").exists()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(job, (into_environment, into_home, into_folder)))
