"""Claims: one holder at a time, freed by the kernel, and not disturbed by those who ask. Processes import no torch."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import training
from training.claims import ClaimedElsewhere, claim, holder

ROOT = Path(training.__file__).parents[1]
HOLD = """
import sys, time
from pathlib import Path
from training.claims import claim
with claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
# Adds to a counter in a file without any care, as often as it gets the claim, and says how often.
COUNT = """
import sys, time
from pathlib import Path
from training.claims import ClaimedElsewhere, claim
folder, count = Path(sys.argv[1]), Path(sys.argv[2])
done = 0
for _ in range(15):
    try:
        with claim(folder):
            value = int(count.read_text())
            time.sleep(0.002)
            count.write_text(str(value + 1))
            done += 1
    except ClaimedElsewhere:
        pass
print(done)
"""


def start(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "run"


@pytest.fixture
def elsewhere(folder):
    """A process that holds the run."""
    with start(HOLD, folder) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_claimed_run_is_refused_with_who_holds_it_and_since_when(folder, elsewhere):
    begin = time.monotonic()
    with pytest.raises(ClaimedElsewhere) as error, claim(folder):
        pytest.fail("claimed twice")
    assert 0.5 < time.monotonic() - begin < 10  # patient for a moment, but it does not wait
    for words in ("run is being trained", socket.gethostname(), f"process {elsewhere.pid}"):
        assert words in str(error.value)
    held = holder(folder)
    assert (held.host, held.pid) == (socket.gethostname(), elsewhere.pid)
    assert 0 < time.time() - held.since < 60


def test_a_killed_process_leaves_no_claim(folder, elsewhere):
    os.kill(elsewhere.pid, signal.SIGKILL)
    elsewhere.wait()
    assert holder(folder) is None
    with claim(folder):
        assert holder(folder).pid == os.getpid()


def test_a_claim_ends_with_its_block_also_after_an_error(folder):
    assert holder(folder) is None
    with pytest.raises(ZeroDivisionError), claim(folder):
        1 / 0  # noqa: B018
    assert holder(folder) is None
    with claim(folder), pytest.raises(ClaimedElsewhere), claim(folder):
        pytest.fail("claimed twice by one process")


def test_runs_of_a_folder_are_claimed_apart(folder):
    with claim(folder), claim(folder.with_name("other")):
        assert holder(folder) and holder(folder.with_name("other"))


def test_processes_that_race_for_a_claim_hold_it_one_after_another(folder, tmp_path):
    """Every addition to a counter that is read and written without care is kept."""
    count = tmp_path / "count"
    count.write_text("0")
    processes = [start(COUNT, folder, count) for _ in range(3)]
    done = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert int(count.read_text()) == sum(done) and all(done)


def test_asking_who_holds_a_run_never_keeps_it_from_being_claimed(folder):
    asked, over = 0, threading.Event()

    def ask():
        nonlocal asked
        while not over.is_set():
            holder(folder)
            asked += 1

    thread = threading.Thread(target=ask)
    with claim(folder):
        thread.start()
    try:
        for _ in range(50):
            with claim(folder):
                pass
    finally:
        over.set()
        thread.join()
    assert asked > 50


@pytest.mark.parametrize("note", ["", '{"host": "a"', '{"host": "a"}', "[]"])
def test_a_torn_note_does_not_hide_the_claim(folder, note):
    with claim(folder):
        (folder.parent / ".claims" / "run.holder").write_text(note)
        with pytest.raises(ClaimedElsewhere, match="trained by another process"), claim(folder):
            pytest.fail("claimed twice")


def test_no_file_of_a_claim_passes_for_a_run_record(folder):
    """The run table takes every */run.json; a run may well be named "run"."""
    with claim(folder):
        assert list(folder.parent.glob("*/run.json")) == []
