"""Simulate power cuts in the middle of jobs, resume from what a disk may hold afterwards, and
compare the files with those of undisturbed runs.

    python benchmarks/power_cuts.py [--cuts 200] [--seed 0] [--json]

A run's writes, truncations, renames, removals and fsyncs are recorded. At a random moment only what
was synced is certain: content by an fsync of the file, names by one of the folder. Any other write
may be there, be missing, be cut anywhere or be there only in some of its blocks, with zeros in
place of the others; a file may be longer than its content; a name may be missing, or belong to the
new file before that has content; all of it in any order. The same command then has to finish. Each
of these runs is recorded too, and may be cut again. A line is lost if it was certain and is missing
at the end; doubled if it is there twice; changed if it differs from the undisturbed run (times
excepted). Exit code 1 for any such line, or a state from which the command cannot resume.
"""

import contextlib
import os
import pickle

import small_jobs as jobs
from simulated_disk import Disk, Recorder
from small_jobs import Differences, compare, whole_lines


def recorded(job, folder, place, seconds):
    """Run the job to its end, with an fsync every `seconds`; return exit code, output and
    operations."""
    trace, log = place / "trace", place / "log"
    trace.unlink(missing_ok=True)

    def before():
        import bass_cli.io.results

        bass_cli.io.results.SYNC_SECONDS = seconds
        Recorder(folder, trace).install()

    code = jobs.finish(jobs.start(job, folder, log, before))
    return code, log.read_text(), operations_in(trace)


def operations_in(trace):
    operations = []
    with open(trace, "rb") as stream, contextlib.suppress(EOFError):
        while True:
            operations.append(pickle.load(stream))
    return operations


def files_in(folder):
    """Return {name: (content, attributes)} of the regular files."""
    return {
        path.name: (
            path.read_bytes(),
            {name: os.getxattr(path, name) for name in os.listxattr(path)},
        )
        for path in folder.iterdir()
        if not path.is_symlink()
    }


def cut(operations, before, chance):
    """Make a Disk at a random moment, preferably near operations that are not writes; return it
    with the number of operations before."""
    rare = [number for number, operation in enumerate(operations) if operation[0] != "write"]
    end = chance.choice(
        (chance.randrange(len(operations) + 1), chance.choice(rare) + chance.randrange(2))
    )
    disk = Disk(before)
    for operation in operations[:end]:
        disk.do(*operation)
    for operation in operations[end:]:
        if operation[0] == "there":  # known from the beginning
            disk.do(*operation)
    return disk, end


def put(folder, state):
    for name, (content, attributes) in state.items():
        (folder / name).write_bytes(content)
        for attribute, value in attributes.items():
            os.setxattr(folder / name, attribute, value)


def disturb(job, place, counts, cuts, chance):
    """Run one job undisturbed and then cut; return the differences of its files, and errors."""
    undisturbed = jobs.inputs_for(place / f"{counts['jobs']}-undisturbed", place)
    code, output, operations = recorded(job, undisturbed, place, chance.choice((0.0, 0.02, 5.0)))
    if code not in (0, 1):
        return Differences(), [f"undisturbed, exit code {code}: {output}"]
    end = files_in(undisturbed)
    traces: list[tuple[dict, list]] = [({}, operations)]
    disk = Disk({})
    for operation in operations:
        disk.do(*operation)
    for name in job.files:
        if whole_lines(disk.certain(name)) != whole_lines(end[name][0]):
            return Differences(lost=1), [f"{name} was not on the disk when the command ended"]
    for _ in range(min(6, cuts - counts["cuts"])):
        before, operations = chance.choice(traces[-2:])
        disk, moment = cut(operations, before, chance)
        state = disk.after_cut(chance)
        held = {name: whole_lines(disk.certain(name)) for name in job.files}
        folder = jobs.inputs_for(place / f"{counts['jobs']}-{counts['cuts']}", place)
        put(folder, state)
        counts["cuts"] += 1
        counts["of a run that was cut before"] += bool(before)
        counts["with lines that were certain"] += any(held.values())
        ended, output, after = recorded(job, folder, place, chance.choice((0.0, 0.02, 5.0)))
        fault = f"after operation {moment} of {len(operations)}, state {state}"
        if ended != code or "Traceback" in output:
            return Differences(), [f"{fault}: exit code {ended} instead of {code}: {output}"]
        found = compare(job, folder, undisturbed, held)
        if any(found):
            return found, [f"{fault}: {found}"]
        traces.append((state, after))
    return Differences(), []


if __name__ == "__main__":
    jobs.disturb_many(disturb, __doc__, unit="cuts", count=200, others=6)
