"""Data parallelism: processes with unequal parts get the gradients, steps and sums of one process,
and report lost peers."""

from __future__ import annotations

import os
import socket

import peers
import pytest
import torch
from checkpoints import write_checkpoint

from bass_cli.distill import exchange
from bass_cli.distill.exchange import Buckets, PeerLostError, Peers

SIZES = [5, 1]  # windows of a batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    write_checkpoint("qwen3", place / "target", seed=0, shards=False)
    write_checkpoint("qwen2", place / "small", seed=1, shards=False, num_hidden_layers=1)
    return place


@pytest.fixture(scope="module")
def two(folder):
    """Return the results of two processes."""
    return peers.train(folder, 2, SIZES)


def alone(folder, size, device="cpu"):
    trainer, grads = peers.trainer(folder, device, size=size), []
    with pytest.MonkeyPatch.context() as patch:
        cut = torch.nn.utils.clip_grad_norm_
        patch.setattr(torch.nn.utils, "clip_grad_norm_", peers.watch(grads, trainer, cut))
        trainer.run(lambda done: None)
    return trainer, grads


@pytest.mark.parametrize("size", SIZES)
def test_unequal_parts_give_the_step_of_the_whole_batch(folder, two, size):
    """Five windows for two processes, with unequal numbers of guesses; and one window, so that one
    process has none. A mean of the processes' means would be another gradient."""
    one, grads = alone(folder, size)
    for theirs, weights, done in two[size]:
        for name, expected in grads[0].items():
            torch.testing.assert_close(theirs[0][name], expected, atol=1e-6, rtol=1e-4)
        assert (done["guesses"], done["tokens"]) == (one.progress.guesses, one.progress.tokens)
        assert done["loss"] == pytest.approx(one.progress.loss, rel=1e-4)
        for name, weight in one.weights.items():
            torch.testing.assert_close(weights[name], weight, atol=2e-4, rtol=1e-3)
            assert torch.equal(weights[name], two[size][0][1][name]), name
    fewer, more = sorted(done["own"][0] for *_, done in two[size])
    assert more > 1.3 * fewer
    assert (fewer == 0) == (size == 1)
    naive = mean_of_means(folder, size)
    apart = [
        (naive[name] - expected).norm() / expected.norm() for name, expected in grads[0].items()
    ]
    assert min(apart) > 0.01


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_gpus_train_what_one_gpu_trains(folder, tmp_path, ranks):
    """Over NCCL, with gradients exchanged during the backward pass; also a group of one."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} CUDA devices are needed")
    for name in ("target", "small"):
        (tmp_path / name).symlink_to(folder / name)
    several = peers.train(tmp_path, ranks, SIZES, "cuda")
    for size in SIZES:
        one, grads = alone(folder, size, "cuda")
        for theirs, weights, done in several[size]:
            for name, expected in grads[0].items():
                torch.testing.assert_close(theirs[0][name], expected, atol=1e-5, rtol=1e-3)
            assert done["guesses"] == one.progress.guesses
            assert done["loss"] == pytest.approx(one.progress.loss, rel=1e-3)
            for name, weight in weights.items():
                assert torch.equal(weight, several[size][0][1][name]), name


def mean_of_means(folder, size):
    """Return the wrong gradient in which each process divides by its own guesses, then by two."""
    found = []
    for rank in range(2):
        one = peers.trainer(folder, size=size, rank=rank, ranks=2)
        for windows in one._batches.at(0):
            one._learn(windows, 2 * len(windows.student))
        found.append(one.weights)
    return {name: sum(weights[name].grad for weights in found if weights[name].grad is not None)
            for name in found[0]}  # fmt: skip


def test_a_checkpoint_of_two_processes_resumes_with_one(folder, two):
    """Rank 0 writes the checkpoint, and it is complete."""
    whole, _ = alone(folder, 5)
    again = peers.trainer(folder)
    again.restore(folder / "5.checkpoint")
    assert again.progress.step == peers.STEPS
    for name, weight in two[5][0][1].items():
        assert torch.equal(again.weights[name], weight)
    whole.save(folder / "whole.checkpoint")
    moments, complete = (
        torch.load(folder / f"{name}.checkpoint", weights_only=True)["optimiser"]["state"]
        for name in ("5", "whole")
    )
    assert moments.keys() == complete.keys()


def test_buckets_are_sent_in_a_fixed_order(monkeypatch):
    sent = []

    class Work:
        def wait(self):
            pass

    def reduce(flat, async_op):
        sent.append(len(flat))
        return Work()

    monkeypatch.setattr(exchange.distributed, "all_reduce", reduce)
    weights = [torch.zeros(size, requires_grad=True) for size in (3, 5, 2, 9)]
    buckets = Buckets(weights, size=32)  # by eight: 9, 2 and 5, 3
    (weights[0].sum() * 2).backward()
    assert sent == []  # not the last pass
    buckets.last()
    (weights[0].sum() + weights[2].sum() + weights[1].sum()).backward()
    assert sent == []  # the first bucket is not whole
    buckets.finish()
    assert sent == [9, 7, 3]
    assert weights[0].grad.tolist() == [3.0] * 3
    assert weights[3].grad.tolist() == [0.0] * 9
    buckets.clear()
    buckets.last()
    sum(weight.sum() for weight in weights).backward()
    assert sent[3:] == [9, 7, 3]  # under backward
    buckets.finish()
    assert all(weight.grad.eq(1).all() for weight in weights)


def test_a_failed_exchange_raises_peer_lost(monkeypatch):
    def fail(*given, **words):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(exchange.distributed, "all_reduce", fail)
    with pytest.raises(PeerLostError, match="closed by peer"):
        exchange.Peers(0, 2).add([1.0])
    weight = torch.zeros(3, requires_grad=True)
    Buckets([weight]).last()
    with pytest.raises(PeerLostError):  # out of backward
        weight.sum().backward()
    assert Peers().add([1, 2.5]) == [1, 2.5]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux names them so")
def test_the_interface_towards_a_host_is_found():
    assert exchange.interface_towards("127.0.0.1", 9) == "lo"
    assert exchange.interface_towards("127.0.0.1", 9) in {name for _, name in socket.if_nameindex()}
    assert exchange.interface_towards("no such host", 9) is None
