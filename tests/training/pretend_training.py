"""Trainings that train nothing but claim, save and end as the real one does; they import no torch.

`pretend_training.py FOLDER` is the training: it claims FOLDER, writes run.json, and steps as often as FOLDER/steps
says; SIGUSR1 or SIGTERM has it save and exit with 75. With `--launcher` before, it is started as torchrun does: below a
process that takes no notice of exit codes, in a session of its own.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from training.claims import claim


def main(folder):
    asked = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    saved = folder / "saved"
    with claim(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, status="running")
        step = int(saved.read_text()) if saved.is_file() else 0
        while step < int((folder / "steps").read_text()):
            time.sleep(0.02)
            step += 1
            if asked:
                time.sleep(0.3)  # saving takes a while
                saved.write_text(str(step))
                return 75
        write(folder, status="finished", val_loss=1.0, run_id=folder.name, steps_done=step)
    return 0


def write(folder, **fields):
    partial = folder / "partial"
    partial.write_text(json.dumps(fields))
    partial.replace(folder / "run.json")


if __name__ == "__main__":
    if sys.argv[1] == "--launcher":
        process = subprocess.Popen([sys.executable, __file__, sys.argv[2]], start_new_session=True)
        process.wait()
        sys.exit(1)
    sys.exit(main(Path(sys.argv[1])))
