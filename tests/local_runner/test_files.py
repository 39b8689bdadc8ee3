import os
from pathlib import Path

import pytest

from local_runner.files import whole_file
from sglang_dspark.errors import InputError


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "out.txt"
    with whole_file(file) as stream:
        stream.write("new")
        assert not file.exists()
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_what_was_there_stays_when_writing_fails(tmp_path: Path) -> None:
    file = tmp_path / "out.txt"
    file.write_text("old")
    with pytest.raises(RuntimeError), whole_file(file) as stream:
        stream.write("half")
        raise RuntimeError
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_links_are_followed_and_devices_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    with whole_file(tmp_path / "link.txt") as stream:
        stream.write("new")
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "real.txt").read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as stream:
        stream.write("through")
    assert os.read(reader, 20) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("place", ["missing/out.txt", "file.txt/out.txt", "."])
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(InputError, match="cannot be written"), whole_file(tmp_path / place):
        pass
