"""Draft mtp: the multi-token-prediction layer of a checkpoint drafts what its definition says, and
tokens equal those of plain decoding. What is refused, and what a plan counts."""

from __future__ import annotations

import functools
import importlib
import json

import pytest
import torch
from checkpoints import HYBRID, shallow, write_checkpoint, write_tokenizer
from command_line import rows_in
from decoders import load_decoder, load_head
from reading import FLAGS, Compared, has_the_targets_law
from safetensors.torch import load_file, save_file
from test_captured import Tour
from test_hybrids import InTurn
from test_parallel import bass, lines
from test_pieces import finish
from test_pieces import loop_of as loop_of_blocks
from toys import again, drive, loop_for, plain, rows_for

import bass_kernels as ops
from bass_cli.config.job import Job, Pair
from bass_cli.errors import UserError
from bass_cli.formats.checkpoint import open_checkpoint
from bass_cli.formats.draft_heads import open_mtp
from bass_cli.lengths.controllers import Fixed
from bass_cli.models.runner import Runner
from bass_cli.run.build import load_models
from bass_cli.run.memory import footprint
from bass_cli.run.plan import make_plan
from bass_cli.run.updates import Updates

CPU = torch.device("cpu")
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# Matrices that add to the residual stream
ADDING = ("o_proj", "down_proj", "out_proj")


class Layer:
    """The layer by its definition, in full passes without a cache: plain torch around
    transformers' own layer with gated attention.

    The pair of the target's hidden state at position i (after its final norm) and token i + 1 is
    at position i. The layer's own normed output stands in for the hidden states of drafts.
    """

    def __init__(self, model, seed=1):
        self.model, config = model.model, model.config
        module = importlib.import_module(type(model).__module__)
        kind = next(
            one for name, one in vars(module).items()
            if name.endswith("DecoderLayer") and "GradientCheckpointing" not in name
        )  # fmt: skip
        self.block = kind(config, config.layer_types.index("full_attention")).eval()
        self.head, self.eps = model.lm_head, config.rms_norm_eps
        generator, width = torch.Generator().manual_seed(seed), config.hidden_size

        def noise(*shape):
            return torch.randn(shape, generator=generator)

        with torch.no_grad():
            for name, one in self.block.named_parameters():
                one.copy_(noise(*one.shape) * (0.3 if "norm" in name else one.shape[-1] ** -0.5))
        self.norms = {name: 0.3 * noise(width) for name in NORMS}
        self.fc = noise(width, 2 * width) * width**-0.5

    def tensors(self):
        """Return the tensors by their published names."""
        found = {f"mtp.layers.0.{name}": one for name, one in self.block.state_dict().items()}
        found |= {f"mtp.{name}.weight": one for name, one in self.norms.items()}
        return found | {"mtp.fc.weight": self.fc}

    def drafts(self, _, tokens, chosen):
        """Return logits [k, V] at the places of `chosen` [k] after `tokens`, each given those
        before it. A text of one token has no hidden state: zeros, and that pair is forgotten."""
        width, ids, alone = len(self.fc), tokens[1:], len(tokens) == 1
        hidden = torch.zeros(1, width)
        if alone:
            ids = tokens
        else:
            hidden = self.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        found = []
        for following in chosen:
            output = self.outputs(torch.tensor(ids), hidden)[-1:]
            found.append(self.head(output)[0])
            if alone:
                ids, hidden, alone = [], hidden[:0], False
            ids, hidden = [*ids, following], torch.cat((hidden, output))
        return torch.stack(found)

    def outputs(self, ids, hidden):
        """Return the normed outputs [N, width] of pairs of tokens [N] and hidden states."""
        embedded = self._norm(self.model.embed_tokens(ids), "pre_fc_norm_embedding")
        pairs = torch.cat((embedded, self._norm(hidden, "pre_fc_norm_hidden")), -1)
        x, places = (pairs @ self.fc.T)[None], torch.arange(len(ids))[None]
        later = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        angles = self.model.rotary_emb(x, places)
        output = self.block(x, position_embeddings=angles, attention_mask=later)
        return self._norm(output[0], "norm")

    def whole(self, line):
        return line

    def bias(self, token):
        return 0.0

    def _norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.norms[name])

    def copy_target(self, noise):
        """Make the layer predict what the target predicts from its last token alone, with this
        share of everything else."""
        with torch.no_grad():
            for name, one in self.block.named_parameters():
                if any(part in name for part in ADDING):
                    one.mul_(noise)
        width = len(self.fc)
        self.fc = noise * self.fc + torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
        self.norms["pre_fc_norm_embedding"] = torch.zeros(width)
        self.norms["norm"] = self.model.norm.weight.detach()


def write(folder, family, *, near=None, tokenizer=False, layer_seed=1, **keys):
    """Save a target with its layer in one checkpoint; return both.

    near: share of noise in target and layer whose other part depends on the last token alone.
    """
    model = write_checkpoint(family, folder, shards=False, **shallow(family), **keys)
    layer = Layer(model, layer_seed)
    if near is not None:
        with torch.no_grad():
            for name, one in model.named_parameters():
                if any(part in name for part in ADDING):
                    one.mul_(near)
        layer.copy_target(near)
        model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | layer.tensors()
    save_file({name: one.clone() for name, one in tensors.items()}, folder / "model.safetensors")
    if tokenizer:
        write_tokenizer(folder)
    return model, layer


def opened(folder):
    """Return the target and the layer of a folder, float32."""
    target = load_decoder(folder)
    return target, load_head(open_mtp(open_checkpoint(folder)), target)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function from a family to its model and layer, as transformers and as bass run them."""

    @functools.cache
    def made(family, **keys):
        folder = tmp_path_factory.mktemp(family)
        return *write(folder, family, **keys), *opened(folder)

    return made


def rows(limit=9):
    """Return two samples of four prompts of unequal lengths, the first of one token."""
    return rows_for(
        [[3 + (7 * p + 3 * t) % 290 for t in range(1 + 4 * p)] for p in range(4)],
        seed=5,
        limit=limit,
        temperature=lambda p, s: 0.9 * s,
        top_p=0.98,
    )


@pytest.mark.parametrize("family", HYBRID)
def test_drafts_equal_the_definition(models, family):
    """Logits and tokens of every step: of rows that have just begun, of one token, of samples of
    a prompt, and after plain rounds."""
    model, layer, target, head = models(family, near=0.5)
    loop = loop_for(target, head, rows=5, lengths=InTurn(3, 0, 1, 2))
    compared = Compared(loop, model, layer)
    assert drive(loop, rows(limit=7)) == plain(target, rows(limit=7))
    assert {1, 2, 3} == {length for length, *_ in compared.seen}
    assert any(end == 1 for *_, end in compared.seen)


@pytest.mark.parametrize("width", [1, 3, 5])
def test_tokens_equal_plain_decoding_with_ragged_acceptance(models, width):
    _, _, target, head = models(HYBRID[0], near=0.5)
    seen = []
    loop = loop_for(target, head, rows=6, lengths=Fixed(width))
    found = drive(loop, rows(), on_round=lambda done, _: seen.append(done))
    assert found == plain(target, rows())
    assert len({kept for done in seen for kept in done.accepted}) > 1
    assert any(len(set(done.accepted)) > 1 for done in seen), "all rows accepted equally many"


def test_layer_that_predicts_as_the_target_is_accepted(models):
    """A target whose layers add nothing, and a layer that copies it: a shift by one token, or
    another norm, would reject drafts."""
    _, _, target, head = models(HYBRID[0], near=0.0)
    seen = []
    loop = loop_for(target, head, rows=4, lengths=Fixed(4))
    assert drive(loop, rows(), on_round=lambda done, _: seen.append(done)) == plain(target, rows())
    assert all(kept == done.width for done in seen for kept in done.accepted)
    assert sum(kept for done in seen for kept in done.accepted) > 40


def test_rows_that_are_put_back_are_drawn_again(models):
    """Blocks of private keys are shared, rounds are captured and launched ahead."""
    _, _, target, head = models(HYBRID[0], near=0.5)
    given = rows(limit=30)[2:8]
    wanted = plain(target, [again(row) for row in given])
    loop = loop_of_blocks(target, head, lengths=Tour(), total=9)
    live = [again(row) for row in given]
    found, *_ = finish(loop, live)
    assert found == wanted
    assert sum(row.accepted for row in live) > 10


@pytest.mark.slow
def test_gpu_kernels_give_the_same_tokens(models):
    """In Triton's interpreter, with keys of the layer and hidden states in the store."""
    _, _, target, head = models(HYBRID[0], near=0.5)
    given = rows(limit=6)[2:5]
    wanted = plain(target, [again(row) for row in given])
    ops.use("triton")
    loop = loop_for(target, head, rows=3, lengths=InTurn(2, 3))
    assert drive(loop, [again(row) for row in given]) == wanted


def test_maximal_coupling_gives_the_targets_distribution(models):
    small = models(HYBRID[0], near=0.5, vocab_size=12)
    has_the_targets_law(small[0], *small[2:])


def test_plan_counts_weights_keys_and_hidden_states(models):
    for family in HYBRID[:2]:
        _, _, target, head = models(family, near=0.5)
        words = {"dtype": torch.float32, "device": CPU, "longest": 4}
        without = footprint(target.spec, None, **words)
        found = footprint(target.spec, head.spec.body, head=head.spec, **words)
        held, plainly = (
            Runner(one, rows=3, span=20, pending=1).cache.bytes()
            for one in (target.read_by(head), target)
        )
        stored = 3 * 20
        assert held > plainly + stored * (found.token.cache - without.token.cache)
        body = head.spec.body
        keys = 2 * body.kv_heads * body.head_size + body.width
        assert found.token.cache - without.token.cache == 4 * keys
        own = sum(one.numel() for one in Layer(models(family, near=0.5)[0]).tensors().values())
        assert found.weights - without.weights >= 4 * own


def test_command_draws_the_tokens_of_plain_decoding(here):
    write(here / "target", HYBRID[0], near=0.5, tokenizer=True)
    (here / "pair.yaml").write_text("target: target\ndraft: mtp\n")
    (here / "p.txt").write_text("".join(f"the cat number {n} sat\n" for n in range(5)))
    for out, *flags in (("plain.jsonl", "--draft", "none"), ("mtp.jsonl", "--draft-length", "3")):
        found = bass(*FLAGS, *flags, "--out", out, code=0)
    assert lines(here / "mtp.jsonl") == lines(here / "plain.jsonl")
    found = rows_in(here / "mtp.jsonl")
    assert 0 < sum(one["accepted"] for one in found) < sum(one["drafted"] for one in found)


def test_layer_of_another_checkpoint_is_written_in_place(tmp_path):
    """By its folder and by tensors. With 8-bit numbers the layer is stored in them."""
    for seed, name in enumerate(("one", "two")):
        write(tmp_path / name, HYBRID[0], layer_seed=seed, tokenizer=True)
    pair = Pair(name="x", target=str(tmp_path / "one"), draft="mtp")
    plan = make_plan(Job(pair=pair, device="cpu", batch_size=2), prompts=1)
    models = load_models(plan)
    updates, name = Updates(models, plan.files), "layers.0.up.weight"
    loaded = models.head.body.weights.whole(name).clone()
    updates.update(str(tmp_path / "two"), "draft")
    written = models.head.body.weights.whole(name)
    tensors = load_file(tmp_path / "two" / "model.safetensors")
    parts = [tensors[f"mtp.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(written, torch.cat(parts))
    assert not torch.equal(written, loaded)
    updates.update({"mtp.layers.0.mlp.up_proj.weight": torch.zeros(80, 48)}, "draft")
    assert not models.head.body.weights.whole(name)[80:].any()
    small = make_plan(Job(pair=pair, device="cpu", batch_size=2, draft_dtype="int8"), prompts=1)
    assert load_models(small).head.body.weights[name].layout == "int8"


def test_checkpoint_without_the_layer_is_refused(tmp_path):
    write_checkpoint(HYBRID[0], tmp_path / "a", **shallow(HYBRID[0]))
    with pytest.raises(UserError, match=r'no multi-token-prediction layer \(tensors "mtp\.\*"\)'):
        open_mtp(open_checkpoint(tmp_path / "a"))
    write_checkpoint("llama", tmp_path / "b", **shallow("llama"))
    with pytest.raises(UserError, match=r"of the families qwen3_5_text, .*, not for llama"):
        open_mtp(open_checkpoint(tmp_path / "b"))


def test_faults_of_the_layer_are_named(tmp_path):
    write(tmp_path, HYBRID[0])
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, keys = load_file(file), json.loads(config.read_text())
    for key, value in (("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)):
        config.write_text(json.dumps(keys | {key: value}))
        with pytest.raises(UserError, match=f'config.json: key "{key}": .* not {value}'):
            open_mtp(open_checkpoint(tmp_path))
    config.write_text(json.dumps(keys))
    less = {name: one for name, one in tensors.items() if name != "mtp.fc.weight"}
    save_file(less, file)
    with pytest.raises(UserError, match=r'"mtp.fc.weight" is? ?missing'):
        open_mtp(open_checkpoint(tmp_path))
    save_file(tensors | {"mtp.layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(UserError, match=r"mtp.layers.1.mlp.up_proj.weight.* unknown"):
        open_mtp(open_checkpoint(tmp_path))
    save_file(tensors | {"mtp.fc.weight": torch.zeros(48, 48)}, file)
    with pytest.raises(UserError, match=r'"mtp.fc.weight" has shape \[48, 48\], not \[48, 96\]'):
        open_mtp(open_checkpoint(tmp_path))
