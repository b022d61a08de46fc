"""The documents: generated parts are up to date, README's code runs, and what they name exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from pydml import cli, tables

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/losses.md", "docs/presets.md")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
#: Written by `python -m bench --publish`, from measurements.
NOT_ALWAYS_THERE = {"docs/benchmarks.md"}


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def test_generated_parts_are_up_to_date() -> None:
    assert tables.stale() == [], "run python -m pydml.tables"


def test_check_tells_and_writing_mends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for document in tables.PARTS:
        (tmp_path / document).parent.mkdir(exist_ok=True)
        (tmp_path / document).write_text(read(document).replace("MultiSimilarityLoss", "Nonsense"), encoding="utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables.stale, "__defaults__", (tmp_path,))
    assert tables.main(["--check"]) == 1
    assert "docs/losses.md: out of date" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert "| `MultiSimilarityLoss` |" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert tables.main(["--check"]) == 0


def test_a_document_without_its_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"README.md: no part between <!-- generated: losses -->"):
        tables.fill("README.md", "no markers")


def test_tables_outside_a_clone_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main([]) == 2
    assert "clone" in capsys.readouterr().err


def test_code_of_the_readme_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", read("README.md"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, Any] = {}
    for block in blocks:  # each goes on from the one before, as a reader would
        exec(compile(block, "README.md", "exec"), names)
    assert names["loss"].requires_grad


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document: str) -> None:
    text = read(document)
    files = re.findall(r"(?<![\w<>/:.-])((?:[\w.-]+/)*[\w.-]+\.(?:md|py|h|cpp|toml|txt))(?![\w<>])", text)
    folders = re.findall(r"(?<![\w<>/:.-])((?:[a-z_]{2,}/)+)(?=[\s`])", text)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    named = {*files, *folders, *links} - NOT_ALWAYS_THERE
    missing = {name for name in named if not any((base / name).exists() for base in (ROOT, (ROOT / document).parent))}
    assert not missing


@pytest.mark.parametrize("document", PAGES)
def test_links_of_a_page_lead_somewhere(document: str) -> None:
    links = set(re.findall(r"\]\(([^)#:]+)\)", read(document)))
    assert not {link for link in links if not ((ROOT / document).parent / link).exists()}


def test_every_picture_is_shown_on_a_page() -> None:
    shown = {link.rpartition("/")[2] for page in PAGES for link in re.findall(r"\]\(([^)]+\.png)\)", read(page))}
    assert {path.name for path in (ROOT / "docs" / "img").iterdir()} == shown


@pytest.mark.parametrize("document", PAGES)
def test_generated_parts_are_marked_alike(document: str) -> None:
    comments = re.findall(r"<!-- (.*?) -->", read(document))
    opened = [comment for comment in comments if comment != "end"]
    assert comments == [each for comment in opened for each in (comment, "end")]
    assert all(comment.startswith("generated: ") for comment in opened) or document == "docs/pml.md"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_that_a_document_names_exist(document: str) -> None:
    text = read(document)
    verbs = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= verbs
    for command in re.findall(r"`pydml (\w+)", text):
        assert command in cli.COMMANDS
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module
