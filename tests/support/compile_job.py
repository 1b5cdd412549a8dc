"""Compile the kernels of a job's loop for a GPU that is not present, as the engine does before the
first prompt. Run as a script, without the interpreter: FOLDER. One line for each step.
"""

import sys

import triton
from compile_ahead import Absent, Uncapturable, forget_all, noting, skip_code

import bass_kernels as ops
from bass_cli.config.job import Job
from bass_cli.engine.batch import Row
from bass_cli.engine.sampling import RowSampling
from bass_cli.run import build
from bass_cli.run.plan import make_plan


def rounds_of(loop, rows, widths, *, prompts=True):
    """Return the kernels that are compiled for a prompt, unless `prompts` is False, and for rounds
    of these rows and draft lengths."""
    compiled.clear()

    def work():
        loop.open("a", [5] * 33)
        loop.admit(Row("a", 0, 0, [5] * 33, 40, sampling=RowSampling(temperature=0.8, top_p=0.95)))
        if not prompts:
            compiled.clear()
        loop.prepare(rows, widths, catching_up=False, only_compile=True)
        loop.retire(0)
        loop.close("a")

    loop.graphs.compile([work])
    return list(compiled)


def empty_of(loop):
    """Compile rounds with no row, as the bench does. Return how many kernels that compiled, and the
    kernels that the same rounds with a row need then."""
    forget_all()
    compiled.clear()
    loop.graphs.compile([lambda: loop.prepare((1, 8), (0, 3), only_compile=True)])
    return len(compiled), rounds_of(loop, (1, 8), (0, 3), prompts=False)


def main(folder):
    job = Job(
        pair={"name": "pair", "target": folder, "draft": folder},
        n=72,  # the batch's own rounds have no passes of 33 to 64 tokens; those of its last rows have
        batch_size=72,
        dtype="bf16",
        device="cpu",
        speculation={"length": 9},
        sampling={"max_new_tokens": 16},
    )
    plan = make_plan(job)
    models = build.load_models(plan)
    ops.use("triton")
    loop = ready(plan, models)
    ready(make_plan(job.model_copy(update={"batch_size": 68})), models)
    print({"kernels": rounds_of(loop, (1, 8, 20), (0, 9))})
    print({"empty": empty_of(loop)})
    forget_all()
    ready(plan, models)
    triton.JITFunction._do_compile = refuse
    ready(make_plan(job.model_copy(update={"batch_size": 4})), models, times=2)


def ready(plan, models, *, times=1):
    """Build loops, print what that compiled, and return the last one."""
    for counted in (compiled, launchers, submitted):
        counted.clear()
    phases, notes = [], []
    for _ in range(times):
        loop = build.ready_loop(plan, models, phases.append, notes.append)
    kernels, rows = len(compiled), len(loop.batch)
    print(
        {"kernels": kernels, "rows": rows, "phases": phases, "notes": notes}
        | {"launchers": len(launchers), "submitted": len(submitted), "alone": all(launchers)}
    )
    return loop


def noting_submitted():
    """Record the kernels given to the compilers, each once: Triton 3.6 requests some again."""
    submitted, leave = [], triton.AsyncCompileMode.__exit__

    def noted(mode, *error):
        submitted.extend(mode.future_kernels)
        return leave(mode, *error)

    triton.AsyncCompileMode.__exit__ = noted
    return submitted


def refuse(*given, **named):
    raise RuntimeError("no compiler")


if __name__ == "__main__":
    launchers, parse = [], triton.JITFunction.parse  # whether kernels were parsed one at a time
    driver = Absent()
    driver.launcher_cls = lambda *given: launchers.append(triton.JITFunction.parse is not parse)
    triton.runtime.driver.set_active(driver)
    skip_code()
    compiled, submitted = noting("_do_compile"), noting_submitted()
    build.graphs_for = lambda models: Uncapturable()
    main(sys.argv[1])
