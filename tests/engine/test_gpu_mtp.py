"""Drafts of the multi-token-prediction layer on a CUDA device: rounds that were compiled ahead,
captured and launched ahead give the tokens of plain, uncaptured decoding. Float32."""

from __future__ import annotations

import functools

import pytest
import torch
from checkpoints import HYBRID
from test_mtp import rows, write
from toys import SPAN, drive

from bass_cli.drafts.factory import DraftParts, make_drafter
from bass_cli.engine.batch import Batch
from bass_cli.engine.clock import Clock
from bass_cli.engine.loop import Loop
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.draft_heads import open_mtp
from bass_cli.formats.weights import load
from bass_cli.lengths.controllers import Bass, Fixed
from bass_cli.models.capture import Graphs
from bass_cli.models.decoder import Decoder
from bass_cli.models.heads import make_head
from bass_cli.models.runner import Runner
from bass_cli.models.spec import Layouts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = torch.device("cuda")


def loop_of(target, head, *, batch, lengths):
    """Return a loop; without a head one of plain, uncaptured decoding."""
    runner = Runner(
        target if head is None else target.read_by(head), rows=batch, span=SPAN, pending=1
    )
    words = {"runner": runner, "head": head, "coupling": "shared", "temperature": None}
    return Loop(
        batch=Batch(rows=batch, context=128, device=DEVICE, vocab=target.vocab),
        target=runner,
        drafter=make_drafter("none" if head is None else "mtp", DraftParts(**words)),
        lengths=lengths,
        coupling="shared",
        clock=Clock(),
        graphs=None if head is None else Graphs(DEVICE),
    )


@pytest.mark.parametrize("family", HYBRID[:2])
@pytest.mark.parametrize("layout", [None, "fp8"])
def test_captured_rounds_equal_plain_decoding(tmp_path, family, layout):
    write(tmp_path, family, near=0.5)
    checkpoint = open_checkpoint(tmp_path)
    words = {"dtype": torch.float32, "device": DEVICE}
    target, layer = Decoder(checkpoint.spec, load(checkpoint, **words)), open_mtp(checkpoint)
    layouts = Layouts(layout, layout)
    head = make_head(layer.head, load(layer, layouts=layouts, **words), target, layouts)
    due, accepted = drive(loop_of(target, None, batch=1, lengths=Fixed(0)), rows()), 0
    for batch, lengths in ((1, Fixed(3)), (3, Fixed(2)), (8, Bass())):
        loop, live = loop_of(target, head, batch=batch, lengths=lengths), rows()
        prepare = functools.partial(loop.prepare, range(1, batch + 1), (0, 2, 3))
        loop.graphs.compile([functools.partial(prepare, only_compile=True)])
        prepare()
        loop._ahead_policy.pays = lambda waiting: True
        assert drive(loop, live, ahead=True) == due, f"batch {batch}"
        accepted += sum(row.accepted for row in live)
        assert loop.graphs.captures > 0
    assert accepted > 0
