"""What every command leaves on tiny models is what was recorded; see README.md here."""

import json

import golden
import pytest
from golden import SCENARIOS
from golden_compare import differences


@pytest.mark.slow
@pytest.mark.parametrize("group", SCENARIOS)
def test_commands_leave_what_was_recorded(group, tmp_path):
    recorded = golden.record(group, tmp_path)
    found = list(differences(golden.read(golden.expected_path(group)), recorded["steps"]))
    assert found == [], f"{group}: {len(found)} differences; the first: {found[0]}"
    expected = golden.read(golden.FINGERPRINTS)[group]
    if expected["models"] == recorded["fingerprints"]["models"]:
        # else made by other libraries or on another processor: every fingerprint differs
        assert recorded["fingerprints"] == expected


@pytest.mark.parametrize("pair", ["similarity cosine/dot", "exemplars random/official"])
def test_another_argument_is_noticed(pair):
    """The control: what commands that differ in one value leave differs, and the place is named."""
    flag, values = pair.split()
    steps = golden.read(golden.expected_path("rerank"))
    one, other = (steps[f"{flag} {value}"]["contents"] for value in values.split("/"))
    assert next(differences(one, other)).startswith(" / found.trec / ")
    assert list(differences(one, one)) == []


def test_records_are_small_and_hold_nothing_of_a_machine():
    paths = sorted(golden.HERE.glob("*.json"))
    assert {path.stem for path in paths} == {*SCENARIOS, "fingerprints"}
    assert sum(path.stat().st_size for path in paths) < 200_000
    for path in paths:
        text = path.read_text()
        assert json.loads(text)
        assert not [word for word in ("/tmp", "/home", "/work", "/dev/shm") if word in text]


def test_every_command_is_recorded():
    """Of those that need no network, no person and no bundled model; servers have their own."""
    from pgra.cli import COMMANDS

    lines = [golden.expand(line) for group in SCENARIOS.values() for line in group.values()]
    words = {line.split()[0] for line in lines}
    assert {*COMMANDS} - words <= {"demo", "list", "task", "push", "serve", "mcp", "lm", "worth"}
