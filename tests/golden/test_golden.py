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
    told = list(differences(golden.read(golden.expected_path(group)), recorded["steps"]))
    assert told == [], f"{group}: {len(told)} differences; the first: {told[0]}"
    expected = golden.read(golden.FINGERPRINTS)[group]
    if expected.get("models") != recorded["fingerprints"].get("models"):
        return  # made by other libraries or on another processor: every fingerprint differs
    assert list(differences(expected, recorded["fingerprints"], "fingerprints")) == []


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["similarity cosine/dot", "exemplars random/official"])
def test_another_argument_is_noticed(pair):
    """The control: what commands that differ in one value leave differs, and the place is named."""
    flag, values = pair.split()
    steps = golden.read(golden.expected_path("rerank"))
    one, other = (steps[f"{flag} {value}"] for value in values.split("/"))
    assert next(differences(one, other, pair)).startswith(f"{pair} / out / ")
    assert list(differences(one, one)) == []


def test_records_are_small_and_hold_nothing_of_a_machine():
    paths = sorted(golden.HERE.glob("*.json"))
    assert {path.stem for path in paths} == {*SCENARIOS, "fingerprints"}
    assert sum(path.stat().st_size for path in paths) < 300_000
    for path in paths:
        text = path.read_text()
        assert json.loads(text)
        assert not [word for word in ("/tmp", "/home", "/work", "/dev/shm") if word in text]


def test_every_command_is_recorded():
    """Of those that need no network, no person and no bundled model."""
    from pgra.cli import COMMANDS

    lines = [golden.expand(line) for group in SCENARIOS.values() for line in group.values()]
    words = {line.split()[0] for line in lines}
    assert {*COMMANDS} - words == {"demo", "list", "claims", "task"}
