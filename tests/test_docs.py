"""The documentation: its links, its names of files, verbs and options, and the site that is made of it."""

import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import caddie
from caddie.cli import app

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
LIVE = [page for page in PAGES if page != DOCS / "log.md" and page.parent.name != "results"]
"""Pages that speak of the program as it is; the log and the results keep the names of their day."""


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*)$", prose(page), flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found[slug] = found.get(slug, 0) + 1
    return set(found)


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in links(page):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        inside = not name or target.is_relative_to(DOCS) or page.parent == ROOT  # the site holds docs/ alone
        if not (target.is_file() and inside) or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](#one-two) [b](#three) [c](page.md) [d](https://x.org)\n```\n[e](f)\n```\n`[g](h)`\n"
    )
    assert broken(page) == ["#three", "page.md"], "the second, because it lies outside docs/"


def test_every_page_stands_in_the_site_once() -> None:
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES if page.parent != ROOT)


def test_every_page_is_linked_from_the_first_one() -> None:
    reached, ahead = set(), [DOCS / "index.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            ahead += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if ".md" in link]
    assert set(PAGES) - {ROOT / "README.md"} <= reached


def test_the_api_reference_has_every_public_name() -> None:
    documented = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    assert {name.rpartition(".")[2] for name in documented} >= set(caddie.__all__)


def test_the_pages_of_the_source_name_files_that_exist() -> None:
    page = (DOCS / "architecture.md").read_text()
    named = re.findall(r"`([a-z]+/[\w/]*(?:\.py|\.json|\.toml|/))`", page + (DOCS / "files.md").read_text())
    assert len(named) > 50
    tops = {"tests/", "bench/", "studies/", "data/", "caddie/"}
    missing = [name for name in named if not ((ROOT / "caddie" / name).exists() or (ROOT / name).exists())]
    assert set(missing) <= tops
    for folder in (path for path in (ROOT / "caddie").iterdir() if (path / "__init__.py").exists()):
        assert f"`{folder.name}`" in page or f"`{folder.name}/" in page, folder.name


def commands(page: Path) -> list[str]:
    """The commands `caddie …` on a page, in code of a line and in blocks."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^ {4}.*$", text, flags=re.MULTILINE)
    lines = [line for block in blocks for line in re.findall(r"^\s*(caddie [a-z].*)$", block, flags=re.MULTILINE)]
    return [*re.findall(r"`(caddie [a-z][^`\n]*)`", text), *(re.sub(r"\s+#.*", "", line) for line in lines)]


@pytest.mark.parametrize("page", LIVE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_name_verbs_and_options_that_exist(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command)
        assert words[1] in app.commands, command
        known = {option for parameter in app.commands[words[1]].params for option in parameter.opts} | {"--help"}
        others = app.commands[words[1]].context_settings.get("ignore_unknown_options")  # those of another program
        assert others or {word.partition("=")[0] for word in words if word.startswith("--")} <= known, command


def test_each_command_has_a_line_of_its_own() -> None:
    """Filling the lines of a page anew joins them: a backslash stands before a space then, a command in a comment."""
    joined = re.compile(r"^(?: {4}|\w).*(?:\\ |  # .*\b(?:caddie|make) [a-z-]+$).*$", flags=re.MULTILINE)
    assert {page.name: joined.findall(page.read_text()) for page in LIVE if joined.search(page.read_text())} == {}


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings_handlers")):
        pytest.skip("no MkDocs: pip install '.[docs]', or make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {"PATH": "", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text()
    assert "caddie.recipes.recipe.Recipe" in page
    fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?:[^"]*"', (tmp_path / "index.html").read_text())
    assert not fetched, "a reader's browser asks nobody else"
