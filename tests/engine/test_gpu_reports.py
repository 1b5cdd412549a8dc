"""Reports of captured rounds on a CUDA device, against log_softmax of transformers. Float32."""

import pytest
import torch
from checkpoints import shallow, write_checkpoint
from decoders import load_noisy_pair
from test_reports import check
from toys import AtOnce, drive, loop_for
from transformers import AutoModelForCausalLM

from bass_cli.engine.batch import Row
from bass_cli.engine.graphs import Shape
from bass_cli.engine.host_state import NO_REPORT, Report
from bass_cli.engine.sampling import RowSampling
from bass_cli.engine.verify import Cut
from bass_cli.models.capture import Graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CUDA = torch.device("cuda")
PROMPTS = ([7], [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """transformers' model, the target, and a draft: the target with noise on its weights."""
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", folder, **shallow("llama"))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return theirs, *load_noisy_pair(folder, noise=0.1, device=CUDA)


def rows(report, seed):
    sampling = [RowSampling(), RowSampling(temperature=0.7, top_k=20, top_p=0.9)]
    return [
        Row(f"{seed} {p}", s, seed, list(tokens), 24, sampling[s], report)
        for p, tokens in enumerate(PROMPTS)
        for s in range(2)
    ]


@pytest.mark.parametrize("coupling", ["shared", "maximal"])
@pytest.mark.parametrize("drafts", ["none", "lookup", "model", "parallel"])
def test_captured_reports_equal_log_softmax(models, drafts, coupling):
    """Jobs with and without reports take turns on one loop, and each has graphs of its own."""
    theirs, target, draft = models
    draft = {"model": draft, "parallel": AtOnce(draft, 300)}.get(drafts, drafts)
    cut = Cut(most=6, above=1, more=2) if isinstance(draft, AtOnce) else None
    loop = loop_for(target, draft, rows=6, coupling=coupling, graphs=Graphs(CUDA), cut=cut)
    for seed, report in enumerate((NO_REPORT, Report(20), Report(processed=5), NO_REPORT)):
        live = rows(report, seed)
        found = drive(loop, live, ahead=True)
        shapes = [shape for shape in loop.graphs.held() if isinstance(shape, Shape)]
        assert report in {shape.report for shape in shapes if shape.kind != "catch up"}
        for row in live:
            tokens = found[row.key, row.sample]
            check(theirs, row, tokens, atol=1e-3)
            if report.processed is not None:
                assert (row.entries()[: len(tokens), 0] >> 32).tolist() == tokens
