import errno
import json
import subprocess
import sys

import numpy as np
import pytest

from pgra.artifacts import (
    artifact_dir,
    canonical_json,
    check_fingerprint,
    digest,
    file_checksum,
    is_finished,
    lock_folder,
    package_versions,
    read_array,
    read_manifest,
    write_array,
    write_aside,
    write_json,
    write_lines,
    write_manifest,
    write_text,
)
from pgra.errors import ArtifactError

FIELDS = {"pooling": "mean", "rows": 3}


@pytest.fixture
def folder(tmp_path):
    """A finished artefact of two files."""
    path = tmp_path / "made"
    write_array(path / "rows.npy", np.arange(6).reshape(2, 3))
    write_text(path / "deep" / "note.txt", "né\n")
    write_manifest(path, stage="index", fingerprint=FIELDS, counts={"rows": 3}, seconds=1.23456)
    return path


def test_equal_values_give_equal_text_and_digest():
    assert canonical_json({"b": 1, "a": [True, None, "é"]}) == '{"a":[true,null,"é"],"b":1}'
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    # sha256 of '{"a":1}'
    assert digest({"a": 1}).startswith(
        "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    )


def test_no_number_that_json_lacks_is_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("inf")})
    assert list(tmp_path.iterdir()) == []


def test_a_folders_name_is_clean_and_holds_the_digest(tmp_path):
    path = artifact_dir(tmp_path, "facebook/opt 1.3b", FIELDS)
    assert path == tmp_path / f"facebook-opt-1.3b-{digest(FIELDS)[:12]}"


def test_a_checksum_follows_the_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    first = file_checksum(path)
    assert first.startswith("xxh3:")
    path.write_bytes(b"abd")
    assert file_checksum(path) != first


def test_what_is_written_is_read(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1, 2.5, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"é": [1, 2.5, None]}
    write_lines(tmp_path / "a.jsonl", [{"a": 1}, {"a": "é\n"}])
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 1}, {"a": "é\n"}]
    array = np.arange(4, dtype=np.float16)
    write_array(tmp_path / "a.npy", array)
    found = read_array(tmp_path / "a.npy")
    np.testing.assert_array_equal(found, array)
    assert found.dtype == np.float16
    assert not found.flags.writeable


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(KeyError), write_aside(tmp_path / "a.txt") as aside:  # noqa: PT012
        aside.write_text("new")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(OSError, match="No space") as caught, write_aside(path) as aside:  # noqa: PT012
        aside.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_is_read_back(folder):
    manifest = read_manifest(folder, stage="index", fingerprint=FIELDS)
    assert manifest.fingerprint == FIELDS
    assert manifest.counts == {"rows": 3}
    assert set(manifest.files) == {"rows.npy", "deep/note.txt"}
    assert manifest.files["deep/note.txt"]["bytes"] == 4
    assert manifest.seconds == 1.235
    assert {"python", "numpy", "torch"} <= set(package_versions())
    assert is_finished(folder)


def test_the_first_field_that_differs_is_named_with_both_values(folder):
    message = r'made was made with pooling "mean", this run asks for "cls": use another folder'
    with pytest.raises(ArtifactError, match=message):
        read_manifest(folder, stage="index", fingerprint={**FIELDS, "pooling": "cls", "rows": 4})
    with pytest.raises(ArtifactError, match="was made with dtype null, this run asks for 1"):
        read_manifest(folder, stage="index", fingerprint={**FIELDS, "dtype": 1})
    check_fingerprint(folder, made={"a": [1, 2]}, asked={"a": (1, 2)})


def test_long_values_are_shown_where_they_differ(folder):
    made, asked = "a" * 3000 + "b" + "c" * 3000, "a" * 3000 + "d"
    with pytest.raises(ArtifactError) as caught:
        check_fingerprint(folder, made={"prefix": made}, asked={"prefix": asked})
    assert f"made with prefix …{'a' * 50}b{'c' * 49}…, this run asks for …" in str(caught.value)
    assert f'{"a" * 98}d": use another' in str(caught.value)
    with pytest.raises(ArtifactError) as caught:  # the control: what is short stands whole
        check_fingerprint(folder, made={"prefix": "e" * 98}, asked={"prefix": None})
    assert f'prefix "{"e" * 98}", this run asks for null' in str(caught.value)


def test_another_stage_or_format_is_refused(folder):
    with pytest.raises(ArtifactError, match="was made by stage 'index', not by 'bank'"):
        read_manifest(folder, stage="bank")
    values = json.loads((folder / "manifest.json").read_text())
    write_json(folder / "manifest.json", {**values, "format": 9})
    with pytest.raises(ArtifactError, match="has format 9, this pgra reads 1: build it again"):
        read_manifest(folder, stage="index")


def test_an_artefact_that_is_not_whole_is_refused(folder, tmp_path):
    with pytest.raises(
        ArtifactError, match="none does not exist: it has no manifest.json: run the 'index' stage"
    ):
        read_manifest(tmp_path / "none", stage="index")
    (tmp_path / "begun").mkdir()
    with pytest.raises(
        ArtifactError, match="begun is not finished: it has no manifest.json: run the 'index'"
    ):
        read_manifest(tmp_path / "begun", stage="index")
    (folder / "deep" / "note.txt").unlink()
    with pytest.raises(ArtifactError, match=r"note.txt is missing: delete .* run the stage again"):
        read_manifest(folder, stage="index")


def test_a_changed_byte_is_seen_and_a_changed_size_even_unverified(folder):
    path = folder / "deep" / "note.txt"
    path.write_text("ne!\n")  # as many bytes
    read_manifest(folder, stage="index", verify=False)
    with pytest.raises(ArtifactError, match="note.txt is damaged"):
        read_manifest(folder, stage="index")
    path.write_text("longer than that\n")
    with pytest.raises(ArtifactError, match="note.txt is damaged"):
        read_manifest(folder, stage="index", verify=False)


def test_every_changed_byte_of_a_manifest_is_refused_or_harmless(folder):
    path = folder / "manifest.json"
    good = path.read_bytes()
    refused = 0
    for place in range(len(good)):
        with path.open("r+b") as file:
            file.write(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            read_manifest(folder, stage="index", fingerprint=FIELDS)
        except ArtifactError:
            refused += 1
    assert refused > len(good) / 4  # the rest stands in times, versions and spaces


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY", b"text", None])
def test_an_array_that_is_none_is_named(tmp_path, data):
    if data is not None:
        (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(ArtifactError, match="a.npy cannot be read .*: delete its folder"):
        read_array(tmp_path / "a.npy")


def test_a_folder_is_held_by_one_job(tmp_path):
    code = "import sys; from pathlib import Path; from pgra.artifacts import lock_folder\n"
    code += "with lock_folder(Path(sys.argv[1])): pass"
    words = [sys.executable, "-c", code, str(tmp_path)]
    with lock_folder(tmp_path):
        in_use = pytest.raises(ArtifactError, match="is in use by another pgra job: wait for it")
        with in_use, lock_folder(tmp_path):
            pass
        assert b"in use" in subprocess.run(words, capture_output=True, check=False).stderr
    subprocess.run(words, check=True)
