"""Graphs without a GPU: replaying calls the function, and a clock is charged what a real device would take. No tests."""

import torch

from bass_cli.engine.graphs import Graphs


class Ticks:
    """A clock that moves only when told."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class FakeGraphs(Graphs):
    """Charges `ticks` for capturing (0.13 s), running uncaptured (0.05 s) and replaying (2.1 ms a pass of the target and
    0.45 ms a draft step or a pass of the draft), and keeps a list of what was done."""

    def __init__(self, ticks=None):
        super().__init__(torch.device("cpu"))
        self.enabled, self.ticks, self.done = True, ticks or Ticks(), []

    def run(self, key, function):
        self.ticks.seconds += 0.05
        self.done.append(("run", key))
        self._warm[key] = function()
        return self._warm[key]

    def capture(self, key, function):
        assert self.is_warm(key), "nothing is captured that has not run"
        self.ticks.seconds += 0.13
        self.done.append(("capture", key))
        self._held[key] = function
        self.captures += 1

    def replay(self, key):
        self.ticks.seconds += 0.0021 + 0.00045 * key.width if key.kind == "round" else 0.00045
        self.done.append(("replay", key))
        return self._held[key]()

    def count(self, how, kind=None):
        return sum(done == how and kind in (None, key.kind) for done, key in self.done)
