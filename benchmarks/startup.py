"""Print a time line of `bass generate` in a new process, from its start to its first token, with
one prompt and a few tokens.

    python benchmarks/startup.py [--pair smollm2] [--prompt TEXT] [--tokens 4] [--repeats 3]
        [--json] [OPTIONS of bass generate ...]

Steps are timed by wrapping functions as their modules are imported, imports by their loaders. The
repeat with the median time to the first token is shown: when each step began, its wall-clock time,
its processor time (all threads), and the time of imports in it (in its own thread); + marks threads
other than the main one. The first process also reads from disk, compiles and converts: --repeats 1
shows it.
"""

import argparse
import atexit
import collections
import json
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_KERNEL = "kernel compiled or loaded"
# Functions that are timed, by module, and their names in the time line.
STEPS = {
    "bass_cli.system.threads": {"choose": "idle cores", "_load_libraries": "torch's libraries"},
    "bass_cli.system.host": {
        "_retain_context": "CUDA's context",
        "_read_ahead": "files read ahead",
    },
    "bass_cli.run.plan": {"make_plan": "plan"},
    "bass_cli.formats.checkpoint": {"open_checkpoint": "headers"},
    "bass_cli.formats.tokenizer": {
        "Tokenizer.load": "tokenizer",
        "Tokenizer.encode": "text encoded",
    },
    "bass_cli.run.manifest": {"describe": "manifest, fingerprints"},
    "bass_cli.run.build": {
        "load_models": "weights",
        "build": "loop",
        "warm_up": "warming up",
        "compile_kernels": "kernels compiled together",
    },
    "bass_cli.formats.weights": {"load": "weights of a model"},
    "bass_cli.engine.loop": {"Loop.open": "prompt read by the models", "Loop.round": "round"},
    "bass_cli.engine.graphs": {"Graphs.capture": "graph captured"},
    "torch.cuda": {"_lazy_init": "CUDA's context"},
    "triton.compiler.compiler": {"compile": _KERNEL},
}
WHOLE = (
    "numpy",
    "torch",
    "triton",
    "bass_cli.run.plan",
    "bass_cli.run.engine",
)  # imports shown as steps
_SHOWN = 3  # how many of each kind


class Watch:
    """Times imports and steps of this process. `began`: its start, on the monotonic clock."""

    def __init__(self, began):
        self.began, self.own = began, threading.local()
        self.steps: list[tuple] = []
        self.imports: collections.Counter[str] = collections.Counter()

    def timed(self, run):
        """Run a function; return its result, start, seconds, processor seconds and seconds of
        imports."""
        clocks = (time.monotonic, time.process_time, lambda: getattr(self.own, "imports", 0.0))
        before = [clock() for clock in clocks]
        found = run()
        took = (clock() - start for clock, start in zip(clocks, before, strict=True))
        return found, (before[0] - self.began, *took)

    def find_spec(self, name, path=None, target=None):
        """Find a module as importlib does, and time its loader."""
        others = (one for one in sys.meta_path if one is not self)
        specs = (one.find_spec(name, path, target) for one in others)
        spec = next((one for one in specs if one is not None), None)
        loader: Any = spec and spec.loader
        load = getattr(loader, "exec_module", None)
        if load is None or isinstance(loader, type):  # missing, or a built-in module
            return spec

        def exec_module(module):
            _, times = self.timed(lambda: load(module))
            _, seconds, _, within = times
            if name in WHOLE:
                self.note(times, f"import {name}")
            self.own.imports = getattr(self.own, "imports", 0.0) + seconds - within
            self.imports[name.partition(".")[0]] += seconds - within
            for path, label in STEPS.get(name, {}).items():
                holder, _, attribute = path.rpartition(".")
                self.wrap(getattr(module, holder) if holder else module, attribute, label)

        loader.exec_module = exec_module
        return spec

    def note(self, times, label, depth=1):
        other = threading.current_thread() is not threading.main_thread()
        self.steps.append((*times, "  " * depth + label + " +" * other))

    def wrap(self, holder, name, label):
        plain = vars(holder).get(name)
        function = getattr(plain, "__func__", plain)

        def call(*args, **named):
            depth = self.own.depth = getattr(self.own, "depth", 0) + 1
            found, times = self.timed(lambda: function(*args, **named))
            kernel = getattr(args[0], "name", None) if label == _KERNEL else None
            self.note(times, label if kernel is None else f"{label}: {kernel}", depth)
            self.own.depth -= 1
            return found

        if plain is not None:  # otherwise this version has no such step
            setattr(holder, name, call if function is plain else type(plain)(call))


def child(began, out, command):
    """Run the command in this process, with timing."""
    watch = Watch(began)
    watch.steps.append((0.0, time.monotonic() - began, time.process_time(), 0.0, "  Python"))
    sys.meta_path.insert(0, watch)
    sys.argv = ["bass", *command]

    def write():
        steps = sorted(watch.steps)
        Path(out).write_text(json.dumps({"steps": steps, "imports": watch.imports}))

    atexit.register(write)
    runpy.run_module("bass_cli", run_name="__main__")


def measure(command):
    """Run a process; return its time line, its first token and its end."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as out:
        began = time.monotonic()
        again = [sys.executable, __file__, "--child", str(began), out.name, *command]
        ended = subprocess.run(again, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            raise SystemExit(ended.stderr)
        found = json.load(out) | {"end": time.monotonic() - began}
    first = next(step for step in found["steps"] if step[4].strip() == "round")
    return found | {"first_token": first[0] + first[1]}


def show(found):
    """Print the time line."""
    print("  begins    takes      cpu  imports  step")
    seen: collections.Counter[str] = collections.Counter()
    for *seconds, label in found["steps"]:
        kind = label.partition(":")[0]
        seen[kind] += 1
        if seen[kind] <= _SHOWN:
            print("".join(f"{value:8.3f} " for value in seconds) + label)
    parts = sorted(found["imports"].items(), key=lambda item: -item[1])
    print("imports:", ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts[:16]))
    print(f"first token after {found['first_token']:.3f} s, the end after {found['end']:.3f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"pair": "smollm2", "prompt": "x = ", "tokens": 4, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--json", action="store_true")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text(json.dumps({"id": "one", "prompt": args.prompt}))
        given = ["--pair", args.pair, "--n", "1", "--max-new-tokens", str(args.tokens), *more]
        runs = [measure(["generate", str(prompts), *given]) for _ in range(args.repeats)]
    runs.sort(key=lambda found: found["first_token"])
    print(json.dumps(runs)) if args.json else show(runs[len(runs) // 2])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(float(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        main()
