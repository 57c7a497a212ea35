"""The store: what is written whole, built once, named by its fingerprint, and checked when read."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pgra.artifacts import (
    FORMAT,
    Inputs,
    _warn_of_no_locks,
    artifact_dir,
    build_once,
    canonical_json,
    digest,
    is_finished,
    load_manifest,
    read_manifest,
    read_sealed,
    without_home,
    write_array,
    write_aside,
    write_manifest,
    write_sealed,
    write_text,
)
from pgra.errors import ArtifactError, DamageError

FIELDS = {"pooling": "mean", "rows": 3}


@pytest.fixture
def folder(tmp_path):
    """A finished artifact of two files."""
    path = tmp_path / "made"
    write_array(path / "rows.npy", np.arange(6).reshape(2, 3))
    write_text(path / "deep" / "note.txt", "né\n")
    write_manifest(path, stage="index", fingerprint=FIELDS, counts={"rows": 3}, seconds=1.23456)
    return path


def test_a_digest_is_the_sha256_of_plain_json_and_names_a_folder(tmp_path):
    assert canonical_json({"b": 1, "a": [True, None, "é"]}) == '{"a":[true,null,"é"],"b":1}'
    whole = "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    assert digest({"a": 1}) == whole  # of '{"a":1}'
    made_as = digest({"format": FORMAT, "kind": "facebook-opt-1.3b", "fields": {"a": 1}})
    path = artifact_dir(tmp_path, "facebook/opt 1.3b", {"a": 1})
    assert path == tmp_path / f"facebook-opt-1.3b-{made_as[:12]}"


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(KeyError), write_aside(tmp_path / "a.txt") as aside:  # noqa: PT012
        aside.write_text("new")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_manifest_is_read_back(folder):
    manifest = read_manifest(folder, stage="index", fingerprint=FIELDS)
    assert (manifest.fingerprint, manifest.counts, manifest.seconds) == (FIELDS, {"rows": 3}, 1.235)
    assert set(manifest.files) == {"rows.npy", "deep/note.txt"}
    assert load_manifest(folder) == manifest
    with pytest.raises(ArtifactError, match="pooling"):
        read_manifest(folder, stage="index", fingerprint={**FIELDS, "pooling": "cls", "rows": 4})


def test_an_artifact_that_is_not_whole_or_another_is_refused(folder, tmp_path):
    path, read = folder / "deep" / "note.txt", partial(read_manifest, folder, stage="index")
    with pytest.raises(ArtifactError, match="none"):
        read_manifest(tmp_path / "none", stage="index")
    for text in ("ne!\n", "longer than that\n", None):  # the first has as many bytes
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(DamageError, match="note.txt"):
            read()
    manifest = folder / "manifest.json"
    write_sealed(manifest, {**read_sealed(manifest), "format": 9, "tiers": ["new"]})
    with pytest.raises(ArtifactError, match="format 9") as caught:
        read()
    assert not isinstance(caught.value, DamageError)
    manifest.write_text("{")
    with pytest.raises(DamageError, match="manifest.json"):
        load_manifest(folder)


def build(folder):
    write_text(folder / "a.txt", "whole")
    return {"rows": 1}


@pytest.mark.parametrize("text", [None, "", "other", "wh"])
def test_what_is_damaged_is_kept_beside_and_made_again(text, tmp_path, caplog):
    make = partial(build_once, tmp_path / "x", stage="s", fingerprint=FIELDS, build=build)
    make()
    assert make().reused  # the control
    assert not caplog.text
    for _ in range(2):
        path = tmp_path / "x" / "a.txt"
        path.unlink() if text is None else path.write_text(text)
        assert not make().reused
        assert path.read_text() == "whole"
        assert f"{path} is " in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.damaged"]
    assert make().reused


def test_an_error_of_the_system_is_no_damage(folder, monkeypatch):
    def fail(path, *args, **how):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    make = partial(build_once, folder, stage="index", fingerprint=FIELDS, build=build)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        with pytest.raises(OSError, match=str(folder)):
            make()
    assert make().reused


@pytest.mark.parametrize("change", ["content", "replace", "remove", None])
def test_nothing_is_kept_of_an_input_that_changed_while_it_was_read(change, tmp_path):
    source = tmp_path / "source.txt"
    source.write_text("first")

    def build(folder):
        write_text(folder / "a.txt", source.read_text())
        if change == "content":
            source.write_text("other")
        elif change == "replace":
            (tmp_path / "new").write_text("first")
            (tmp_path / "new").replace(source)
        elif change == "remove":
            source.unlink()
        return {}

    inputs = [Inputs.of([source])]
    make = partial(build_once, tmp_path / "x", stage="s", fingerprint={}, inputs=inputs)
    if change is None:  # the control
        assert is_finished(make(build=build).folder)
        return
    with pytest.raises(ArtifactError, match="source.txt"):
        make(build=build)
    assert {path.name for path in tmp_path.iterdir()} <= {"source.txt"}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_write_replaces_a_plain_file_and_nothing_else(kind, tmp_path):
    path, linked = tmp_path / "out.json", tmp_path / "linked"
    write_text(linked, "old")
    path.symlink_to(linked) if kind == "link" else os.mkfifo(path)
    before = path.lstat()
    with pytest.raises(ArtifactError, match=str(path)):
        write_text(path, "new")
    assert path.lstat() == before
    assert linked.read_text() == "old"
    write_text(linked, "new")  # the control
    assert linked.read_text() == "new"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_a_disk_without_locks_is_warned_of_once(code, tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    _warn_of_no_locks.cache_clear()
    for name in ("x", "y"):
        made = build_once(tmp_path / name, stage="s", fingerprint=FIELDS, build=build)
        assert is_finished(made.folder)
    assert caplog.text.count("this disk has no locks") == 1


def test_what_two_jobs_ask_for_is_built_once(tmp_path):
    built = []

    def once(folder):
        built.append(folder)
        return build(folder)

    def job(_):
        return build_once(tmp_path / "thing-1", stage="s", fingerprint=FIELDS, build=once)

    write_text(tmp_path / ".thing-1.01234567.partial/old.txt", "half")  # of a killed job
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(job, range(4)))
    assert len(built) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thing-1"]
    assert [list(one.manifest.files) for one in found] == [["a.txt"]] * 4
    assert job(0).reused


def test_a_path_below_the_home_folder_does_not_say_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert without_home(str(tmp_path / "texts" / "a corpus.txt")) == "~/texts/a corpus.txt"
    for name in ("/elsewhere/corpus.txt", "corpus.txt", "facebook/opt-13b"):
        assert without_home(name) == name
