"""A process of a fleet that only returns what it is given. It imports no heavy module."""

import os
import signal

from bass_cli.cluster.fleet import Process


class Echo(Process):
    """Returns what it is given; "fail" raises, "die" ends the process."""

    def __init__(self, spec):
        super().__init__()
        self._spec = spec

    def _check(self):
        print("a stray line", flush=True)
        return self._spec, os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")

    def exchange(self, given, beat):
        if given == "fail":
            raise ValueError("no such sample")
        if given == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return given
