"""Work for `benchmarks/gpu.py` to do in processes of their own."""

import os
import time

from harness import Result


def tells(line, name, value):
    line.send(Result(name, value, "s"))


def dies(line, name):
    line.send(Result(name, 1.0, "s"))
    os._exit(3)


def hangs(_line, _name):
    time.sleep(600)
