"""Jobs on a CUDA device that run out of memory finish with the same lines. Float32."""

import itertools

import pytest
import torch

import bass_kernels as ops
from bass_cli.config.job import Job, load_pair
from bass_cli.config.sampling import Sampling
from bass_cli.models.runner import Runner
from bass_cli.run.generate import generate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = torch.device("cuda")


class Thief:
    """Take the device's memory when the passes number `calls` of any model begin, and give it
    back when an allocation was refused. Passes that only compile kernels do not count. During a
    capture nothing can be taken, so there more is requested than exists."""

    def __init__(self, monkeypatch, calls):
        self.refused, forward, count = 0, Runner.forward, itertools.count(1)

        def short(runner, *given, **named):
            if ops.compiling() or next(count) not in calls:
                return forward(runner, *given, **named)
            taken, asked = None, 1 << 50
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.empty_cache()
                free = torch.cuda.mem_get_info()[0]
                asked = 1 << 28
                taken = torch.empty(max(free - asked // 2, 1), dtype=torch.uint8, device=CUDA)
            with pytest.raises(torch.OutOfMemoryError) as found:
                torch.empty(asked, dtype=torch.uint8, device=CUDA)
            self.refused += 1
            del taken
            raise found.value

        monkeypatch.setattr(Runner, "forward", short)


@pytest.mark.parametrize("calls", [(3, 10), (1, 2), (7, 8)], ids=str)
def test_job_that_runs_out_of_memory_twice_gives_the_same_lines(pair_folder, monkeypatch, calls):
    """In uncaptured rounds and in captures: rows are halved, and unfinished samples are drawn
    again."""
    pair_folder(prompts=5)
    job = Job(
        pair=load_pair("pair.yaml"),
        n=6,
        sampling=Sampling(max_new_tokens=40),
        device="cuda",
        dtype="fp32",
        token_ids=True,
    )
    texts = [f"the cat number {i} sat" for i in range(5)]

    def lines(note=lambda text: None):
        drawn = list(generate(texts, job, on_note=note))
        found = {(one.id, one.sample): (one.token_ids, one.finish_reason) for one in drawn}
        assert len(found) == len(drawn) == 30
        return found

    due, notes = lines(), []
    thief = Thief(monkeypatch, calls)
    assert lines(notes.append) == due
    assert thief.refused == len(notes) == 2
    assert ["with 30 rows" in notes[0], "with 15 rows" in notes[1]] == [True, True]
