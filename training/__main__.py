"""`accelerate launch -m training --config RECIPE [field=value …]`: see `command`.

Importing takes seconds, on clusters minutes. A signal that comes meanwhile ends the process with the status that it
would have later, there being nothing to save.
"""

import os
import signal
import sys

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}

if __name__ == "__main__":
    for number in STATUS:
        signal.signal(number, lambda number, frame: os._exit(STATUS[signal.Signals(number)]))
    from .command import main

    sys.exit(main())
