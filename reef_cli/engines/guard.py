"""Become another program that dies with the process that started it. A program of its own, standard library only.

    python guard.py PARENT_PID COMMAND [ARGUMENT ...]

For engines that do not watch over their parent themselves. The signal is Linux's; elsewhere the program only starts. It is
set for this process alone: what the program starts must see to itself.
"""

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the signal was set
        sys.exit("the process that started this engine is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
