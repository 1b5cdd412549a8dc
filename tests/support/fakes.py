"""Graphs without a GPU. For rounds, a replay calls the function and advances a clock by a real
device's time. For prompts, the operations of a run are recorded and repeated on the same
tensors. No tests."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bass_cli.models.capture import Graphs, Running


class Ticks:
    """A clock that only moves explicitly."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class FakeGraphs(Graphs):
    """Advance `ticks` for capturing (0.13 s), running uncaptured (0.05 s) and replaying (2.1 ms
    a pass of the target, 9 us for each draft from the host, 0.45 ms a pass of the draft), and
    record what was done."""

    def __init__(self, ticks=None):
        super().__init__(torch.device("cpu"))
        self.enabled, self.ticks, self.done = True, ticks or Ticks(), []
        self._free = 0.0  # when the device will have finished its work

    def compile(self, functions, note=None):
        return False

    def run(self, key, function):
        self.ticks.seconds += 0.05
        self.done.append(("run", key))
        self._warm[key] = function()
        return self._warm[key]

    def capture(self, key, function):
        assert self.is_warm(_shape(key)), "a function must run before it is captured"
        self.ticks.seconds += 0.13
        self.done.append(("capture", key))
        self._held[key] = function
        self.captures += 1

    def launch(self, key):
        """The device runs it after its earlier work; the host sees the result when the clock has
        advanced."""
        over = self._free = max(self._free, self.ticks.seconds) + self.pass_seconds(key)
        self.done.append(("replay", key))
        found = self._held[key]()

        def wait():
            self.ticks.seconds = max(self.ticks.seconds, over)
            return found

        return Running(lambda: self.ticks.seconds >= over, wait)

    def replay(self, key):
        """Launch a stage whose result stays on the device."""
        self.launch(key)

    def pass_seconds(self, key):
        if key != _shape(key):
            return 0.0  # all of the round's time is that of its last stage
        return {
            "round": 0.0021 + 0.00045 * key.width,
            "block": 0.0021 + 0.00045,
            "cut": 0.0021 + 0.00045,
            "given": 0.0021 + 0.000009 * key.rows * key.width,
            "catch up": 0.00045,
        }[key.kind]

    def count(self, how, kind=None):
        return sum(done == how and kind in (None, _shape(key).kind) for done, key in self.done)


def _shape(key):
    """Return the shape of a graph or of a stage of a round."""
    return key if hasattr(key, "kind") else key[0]


class Tape(TorchDispatchMode):
    """Record every operation that runs, so that `replay` repeats them as a graph would: on the
    same tensors and addresses, with the numbers that the host passed then."""

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


def record(function, pool=None):
    """Stand in for capture.capture."""
    with Tape() as tape:
        function()
    return tape


def recorded(record=record):
    """Return Graphs without a GPU, for prompts: functions without a result."""
    graphs = Graphs(torch.device("cpu"), record=record)
    graphs.enabled = True
    return graphs


def count_operations(function):
    """Return how many device operations a call takes (on a GPU each is a launch or a copy),
    without views."""
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
