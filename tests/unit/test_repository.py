"""What holds for every file of the repository."""

import re
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS

ROOT = Path(__file__).parents[2]
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
    *(r"trust_remote_code\W+Tr" + "ue", "NotImplemented" + "Error", r"\bexcept\s*:"),
    *(r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bX" + r"XX\b"),
]


def relative(path):
    return str(path.relative_to(ROOT))


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def banned_in(text):
    return [line for line in text.splitlines() if any(re.search(word, line) for word in BANNED)]


def test_no_source_holds_anything_banned():
    assert len(PROGRAMS) > 100
    found = {relative(path): banned_in(path.read_text()) for path in PROGRAMS}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_models_are_read_by_one_function():
    callers = [
        relative(path)
        for path in (ROOT / "pgra").rglob("*.py")
        if "from_pretrained(" in path.read_text()
    ]
    assert callers == ["pgra/data/bundled.py"]  # whose files' sha256 the code names


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
    versions["pgra"] = "0"  # an extra that another brings
    extras = project["optional-dependencies"]
    for text in chain(project["dependencies"], *map(extras.get, ("lm", "reports", "demo", "dev"))):
        requirement = Requirement(text)
        pin = versions[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert requirement.specifier.contains(pin), text
