"""Where the path of an output leads: devices, pipes, links, modes, and standard output."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sim.output.files import write_atomically
from traces.write.files import whole_file, write_pieces

# -- where a path leads ----------------------------------------------------------------------------------------


def test_a_device_is_written_to_and_stays_a_device(tmp_path: Path) -> None:
    link = tmp_path / "null.csv"
    link.symlink_to("/dev/null")
    for path in (Path("/dev/null"), link):
        write_atomically(path, b"rows")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode) and link.is_symlink()
    assert [p.name for p in tmp_path.iterdir()] == ["null.csv"]


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz"])
def test_a_pipe_gets_the_bytes_that_a_file_would(name: str, tmp_path: Path) -> None:
    pipe, file = tmp_path / name, tmp_path / f"file-{name}"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    pieces = [b"x" * 100_000, b"y"]
    write_pieces(pipe, pieces)
    reader.join()
    write_pieces(file, pieces)
    assert got == [file.read_bytes()] and stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("exists", [True, False])
def test_what_a_link_leads_to_is_replaced_and_the_link_stays(exists: bool, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link, way = tmp_path / "there/rows.csv", tmp_path / "rows.csv", tmp_path / "way.csv"
    link.symlink_to("there/rows.csv")
    way.symlink_to(link)
    if exists:
        target.write_bytes(b"old")
    write_atomically(way, b"new")
    assert link.is_symlink() and way.is_symlink()
    assert target.read_bytes() == b"new" and [p.name for p in target.parent.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_a_file_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_atomically(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_what_the_umask_leaves(mask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "a.csv", b"x")
        write_pieces(tmp_path / "b.json", [b"x"])
    finally:
        os.umask(before)
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {mode}


def test_the_file_of_standard_output_is_written_on_not_replaced(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sim.output.files import write_atomically; "
        "print('before', flush=True); write_atomically(Path('/dev/stdout'), b'table\\n'); print('after')"
    )
    with (tmp_path / "out.txt").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out.txt").read_text() == "before\ntable\nafter\n"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"] and path.read_bytes() == b"old"
