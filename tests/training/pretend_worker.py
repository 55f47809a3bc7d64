"""A worker process that trains nothing: what a run's `name` says happens. Starts in 0.1 s, as it imports no torch."""

import os
import signal
import time
from pathlib import Path


def work(pipe):
    """Like `training.workers._work`: takes configs from the pipe, None is the end."""
    while (config := pipe.recv()) is not None:
        notes = Path(config.out)
        with (notes / config.name).open("a") as file:
            file.write(f"{os.getpid()}\n")
        tries = len((notes / config.name).read_text().splitlines())
        if config.name == "killed" or (config.name == "killed-once" and tries == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if config.name == "exits":
            os._exit(3)
        if config.name == "claimed":
            pipe.send(("claimed", "claimed elsewhere"))
        elif config.name == "threads":
            pipe.send(("ended", os.environ["OMP_NUM_THREADS"]))
        elif config.name == "long":
            while not pipe.poll():
                time.sleep(0.01)
            (notes / "saved").touch()
            pipe.send(("ended", "interrupted"))
        else:
            pipe.send(("ended", "finished" if config.name != "fails" else "ValueError: no"))
