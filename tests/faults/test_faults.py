"""The short form of `benchmarks/faults.py`: some cases of each kind."""

import damage
import kills
import pytest
from world import Fault, World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def unbroken(world):
    return kills.Unbroken(world)


@pytest.mark.parametrize("name", ["index", "train", "icl", "memory", "erase"])
def test_a_command_killed_before_any_write_goes_on_to_the_same_product(world, unbroken, name):
    writes = unbroken[name].once.writes
    for number in range(1, writes + 1, max(1, writes // 4)):
        assert not kills.kill(world, name, 0, unbroken, at_write=number), number


@pytest.mark.parametrize("kind", damage.KINDS)
def test_damage_is_named_or_made_good_or_changes_nothing(world, kind):
    whole = {}
    for seed in range(3):
        case = damage.draw(world, kind, seed)
        assert not damage.run(world, case, whole), case


@pytest.mark.parametrize("name", ["index", "train", "import"])
def test_two_writers_of_one_product_leave_it_whole(world, unbroken, name):
    assert not kills.two_at_once(world, name, 0, unbroken)


def test_a_disk_that_fills_up_is_one_line(world, unbroken):
    whole = unbroken["train"]
    world.after("train")
    sizes = {path.stat().st_size for path in world.here.rglob("*") if path.is_file()}
    for size in sorted(sizes)[-4:]:
        world.after()
        ended = world.call(kills.JOBS["train"].words, Fault(room=size - 1))
        assert ended.is_refused, (size, ended)
        assert not kills.again(world, "train", whole.files), size
