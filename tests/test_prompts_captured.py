"""Prompts read by padded graphs, without a GPU: rows that follow give the tokens that they give after an ordinary prefill,
whatever else is, was or will be in the store."""

import pytest
import torch
from checkpoints import write_checkpoint
from fakes import record

from bass_cli.engine.batch import Row
from bass_cli.engine.lengths import Fixed
from bass_cli.model import prompts
from bass_cli.model.decoder import Decoder
from bass_cli.model.runner import Runner
from bass_cli.model.weights import load, open_checkpoint


LENGTHS = (1, 2, 3, 15, 16, 17, 18, 35)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    made = {}

    def decoder(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            write_checkpoint(family, folder, **({} if family == "gptj" else {"max_position_embeddings": 2048}))
            checkpoint = open_checkpoint(folder)
            made[family] = Decoder(checkpoint.spec, load(checkpoint, dtype=torch.float32, device=torch.device("cpu")))
        return made[family]

    return decoder


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Sizes are captured when they are first met, so that from the second time on they are replayed."""
    monkeypatch.setattr(prompts, "PATIENCE", 0)


def text(length, seed=0):
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def logits_of(runner, row, tokens, rows):
    """Logits after a prompt's last `lag` tokens, which rows compute themselves; other rows feed token 0 after theirs."""
    width = min(runner.lag, len(tokens))
    places = [runner.cache.base(other) for other in range(rows)]
    places[row] = len(tokens) - width
    fed = torch.zeros(rows, width, dtype=torch.int64)
    fed[row] = torch.tensor(tokens[-width:])
    positions = torch.tensor(places)[:, None] + torch.arange(width)
    return runner.forward(fed, positions, [place + width for place in places])[row]


def runners(decoder, lag, rows=2):
    return [Runner(decoder, rows=rows, span=60, lag=lag, record=how) for how in (None, record)]


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma3_text", "gptj"])
def test_rows_see_what_an_ordinary_prefill_stores(decoders, family, lag):
    """Twice each length: captured, then replayed at another place and with other tokens, a neighbour on either side."""
    eager, graphed = runners(decoders(family), lag, rows=3)
    for turn in range(2):
        for length in LENGTHS:
            given = [text(7), text(length, seed=turn + 1), text(20)]
            found = []
            for runner in (eager, graphed):
                for row, tokens in enumerate(given):
                    runner.open(str(row), tokens)
                    runner.attach(row, str(row))
                    runner.close(str(row))
                found.append(torch.stack([logits_of(runner, row, tokens, 3)[-1] for row, tokens in enumerate(given)]))
                for row in reversed(range(3)):
                    runner.cache.detach(row)
            torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    assert graphed._graphs.captures == 3
