"""Files that are never half-written, and folders that can be written to."""

import errno
import subprocess
import sys

import pytest

from tfmulti.runtime import files


def test_a_folder_is_made_and_left_as_it_was(tmp_path):
    files.check_folder("workdir", tmp_path / "one" / "two")
    assert list((tmp_path / "one" / "two").iterdir()) == []


@pytest.mark.parametrize("below", [False, True])
def test_a_file_is_no_folder(tmp_path, below):
    (tmp_path / "file").write_text("kept")
    path = tmp_path / "file" / "folder" if below else tmp_path / "file"
    with pytest.raises(ValueError, match="`workdir` must.*Received.*is a file.*Name another"):
        files.check_folder("workdir", path)
    assert (tmp_path / "file").read_text() == "kept"


def test_what_the_system_refuses_is_told():
    # Nobody makes a folder there, not root either.
    with pytest.raises(ValueError, match="may not write there|read-only"):
        files.check_folder("workdir", "/sys/tfmulti")


def test_a_full_file_system_is_told(tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(files.os, "statvfs", lambda folder: Full)
    with pytest.raises(ValueError, match="is full"):
        files.check_folder("workdir", tmp_path)


def test_a_folder_in_which_nothing_can_be_renamed_is_told(tmp_path, monkeypatch):
    """A checkpoint is written under another name first."""

    def refuse(*_):
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(ValueError, match="may not write there"):
        files.check_folder("workdir", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_train_says_so_before_tensorflow_is_imported(tmp_path):
    (tmp_path / "file").write_text("")
    code = (
        "import sys; from tfmulti.train import __main__; "
        f"code = __main__.main(['train', '--strategy=one_device', '--workdir={tmp_path}/file']); "
        "print(code, 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 False"
    assert "`workdir` must be a folder" in done.stderr


def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    def write(path):
        path.write_text("a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="a.txt': its file system is full. Free disk space"):
        files.write_atomically(tmp_path / "a.txt", write)
    assert list(tmp_path.iterdir()) == []
