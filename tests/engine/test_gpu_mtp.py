"""Drafts of the multi-token-prediction layer on a CUDA device: rounds that were compiled ahead,
captured and launched ahead give the tokens of plain, uncaptured decoding. Float32."""

from __future__ import annotations

import functools

import pytest
import torch
from checkpoints import HYBRID
from decoders import load_decoder
from test_mtp import rows, write
from toys import drive, loop_for

from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.draft_heads import open_mtp
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.models.capture import Graphs
from bass_cli.models.heads import make_head
from bass_cli.models.spec import Layouts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("family", HYBRID[:2])
@pytest.mark.parametrize("layout", [None, "fp8"])
def test_captured_rounds_equal_plain_decoding(tmp_path, family, layout):
    write(tmp_path, family, near=0.5)
    target, layer = load_decoder(tmp_path, device=DEVICE), open_mtp(open_checkpoint(tmp_path))
    layouts = Layouts(layout, layout)
    weights = load(layer, layouts=layouts, dtype=torch.float32, device=DEVICE)
    head = make_head(layer.head, weights, target, layouts)
    due, accepted = drive(loop_for(target, "none", rows=1, lengths=Fixed(0)), rows()), 0
    for batch, lengths in ((1, Fixed(3)), (3, Fixed(2)), (8, Bass())):
        graphs, live = Graphs(DEVICE), rows()
        loop = loop_for(target, head, rows=batch, lengths=lengths, graphs=graphs)
        prepare = functools.partial(loop.prepare, range(1, batch + 1), (0, 2, 3))
        loop.graphs.compile([functools.partial(prepare, only_compile=True)])
        prepare()
        loop._ahead_policy.pays = lambda waiting: True
        assert drive(loop, live, ahead=True) == due, f"batch {batch}"
        accepted += sum(row.accepted for row in live)
        assert loop.graphs.captures > 0
    assert accepted > 0
