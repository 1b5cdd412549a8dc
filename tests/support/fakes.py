"""Graphs without a GPU: for rounds, replaying calls the function, and a clock is charged what a
real device would take; for prompts, the operations of a run are noted and done again on the same
tensors. No tests."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bass_cli.engine.graphs import Graphs, Running


class Ticks:
    """A clock that moves only when told."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class FakeGraphs(Graphs):
    """Charges `ticks` for capturing (0.13 s), running uncaptured (0.05 s) and replaying (2.1 ms
    a pass of the target, 9 us for each draft that comes from the host, and 0.45 ms a pass of the
    draft), and keeps a list of what was done."""

    def __init__(self, ticks=None):
        super().__init__(torch.device("cpu"))
        self.enabled, self.ticks, self.done = True, ticks or Ticks(), []
        self._free = 0.0  # when the device will have done all that it was given

    def compile(self, functions):
        pass

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

    def launch(self, key):
        """The device does it at once, behind what it was given before; the host hears of it when
        the time has come."""
        over = self._free = max(self._free, self.ticks.seconds) + self.pass_seconds(key)
        self.done.append(("replay", key))
        found = self._held[key]()

        def wait():
            self.ticks.seconds = max(self.ticks.seconds, over)
            return found

        return Running(lambda: self.ticks.seconds >= over, wait)

    def pass_seconds(self, key):
        return {
            "round": 0.0021 + 0.00045 * key.width,
            "block": 0.0021 + 0.00045,
            "cut": 0.0021 + 0.00045,
            "given": 0.0021 + 0.000009 * key.rows * key.width,
            "catch up": 0.00045,
        }[key.kind]

    def count(self, how, kind=None):
        return sum(done == how and kind in (None, key.kind) for done, key in self.done)


class Tape(TorchDispatchMode):
    """Notes every operation that runs, so that `replay` does them again, as a graph would: on
    the tensors of that time, at the addresses of that time, with the numbers that the host gave
    then."""

    def __init__(self):
        super().__init__()
        self._done = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        self._done.append((function, arguments, options or {}, found))
        return found

    @torch.inference_mode()
    def replay(self):
        for function, arguments, options, found in self._done:
            given = {
                _address(t)
                for t in tree_leaves((arguments, options))
                if isinstance(t, torch.Tensor)
            }
            for old, new in zip(
                tree_leaves(found), tree_leaves(function(*arguments, **options)), strict=True
            ):
                if (
                    isinstance(old, torch.Tensor) and _address(old) not in given
                ):  # else a view, or written in place
                    old.copy_(new)


def _address(tensor):
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def record(function):
    """What capture.recorder gives on a CUDA device."""
    with Tape() as tape:
        function()
    return tape.replay


def count_operations(function):
    """How many operations on devices a call takes (on a GPU each is a launch or a copy), views
    left out."""
    with Tape() as tape:
        function()
    names = [done[0].overloadpacket.__name__ for done in tape._done]
    return sum(name not in _VIEWS for name in names)


_VIEWS = {
    "view",
    "slice",
    "select",
    "unsqueeze",
    "expand",
    "t",
    "transpose",
    "detach",
    "alias",
    "permute",
    "as_strided",
    "_unsafe_view",
    "split",
    "unbind",
    "empty",
    "lift_fresh",
    "split_with_sizes",
}
