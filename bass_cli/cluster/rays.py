"""Run the processes of a job on this machine (fleet.py), or as Ray actors on a cluster: one per
GPU, or on CPUs.

Only this file and bass_cli/ray.py use Ray, and they import it when it is needed. In order: the
options, the connection, the fleet of actors, and a watch over Ray itself. What actors draw:
worker_pool.py. What runs in an actor: worker.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bass_cli.cluster.fleet import Cluster, Lost, Place, Process, Request, ThisMachine
from bass_cli.cluster.worker import JobSpec, Worker
from bass_cli.cluster.worker_pool import WorkerPool
from bass_cli.config.job import Job
from bass_cli.config.machine_commands import DistillArgs
from bass_cli.config.sample_commands import BatchArgs, SampleArgs
from bass_cli.errors import MachineError, UserError, first_line
from bass_cli.io.console import Screen
from bass_cli.io.saving import is_stream
from bass_cli.system.children import Fault

_PATIENCE = 5.0  # seconds to wait for a connection to a port of Ray
_INTERVAL = 0.5  # seconds between two connection attempts of RayWatch
_REFUSED = 2  # attempts refused in a row: the process has died
_SILENCE = 20.0  # seconds without any answer: the host or the network is gone
_GRACE = 2.0  # seconds for the main thread to end the command


def read_request(args: SampleArgs | BatchArgs | DistillArgs, job: Job, out: str) -> Request | None:
    """Check --ray and --actors; return None without --ray.

    Raises:
        UserError: The options contradict each other, or Ray is not installed.
    """
    if args.ray is None:
        if args.actors is not None:
            raise UserError("`actors` needs `ray`")
        return None
    text = (args.actors or "all").strip()
    if text != "all" and not (
        text.isascii() and text.isdigit() and 1 <= len(text) <= 6 and int(text)
    ):
        raise UserError(f'`actors`: "{args.actors}" is neither all nor a whole number above 0')
    if job.budget is not None:
        raise UserError(
            "`ray` and `budget` exclude each other: if an actor dies and its samples are drawn "
            "again, a time limit truncates them elsewhere"
        )
    if job.tensor_parallel > 1:
        raise UserError(
            "`ray` and `tensor_parallel` exclude each other, because an actor has one GPU; leave "
            "`ray` out to use several GPUs of one machine"
        )
    if job.speculation.coupling == "maximal":
        raise UserError(
            "`ray` needs `speculation.coupling` shared: with maximal coupling, samples that are "
            "drawn again after an actor died would differ"
        )
    if is_stream(out):
        raise UserError("`ray` needs `out` FILE, so that a killed job can continue")
    if args.ray != "local" and importlib.util.find_spec("ray") is None:
        raise UserError(
            f"`ray` {args.ray} needs the package ray: pip install 'bass-cli[ray]'; `ray` local "
            "uses the GPUs of this machine without it"
        )
    return Request(args.ray, None if text == "all" else int(text))


class RayCluster(NamedTuple):
    """A connection to Ray, with the places of a job's actors."""

    ray: Any
    placement: Placement
    watch: RayWatch

    @property
    def job(self) -> Job:
        """See Cluster.job."""
        return self.placement.job

    def places(self) -> set[Place]:
        """See Fleet.places."""
        return self.placement.places()

    def fleet(self, kind: type[Process], spec: Any) -> contextlib.closing[RayFleet]:
        """See Cluster.fleet."""
        return contextlib.closing(RayFleet(self, kind, spec))


@contextlib.contextmanager
def cluster_of(request: Request, job: Job, screen: Screen) -> Iterator[Cluster]:
    """Yield this machine, or connect to the requested cluster.

    Raises:
        UserError: There is no cluster at the address.
        MachineError: This machine has fewer GPUs than processes.
    """
    if request.address == "local":
        yield ThisMachine(request, job)
        return
    screen.phase("joining the cluster")
    with (
        RayWatch(request.address, screen.error) as watch,
        open(os.devnull, "w") as discarded,
        # Ray prints reports about dead processes to standard output, which is for results.
        contextlib.redirect_stdout(discarded),
        _connected(request.address) as ray,
    ):
        watch.begin(_processes(ray))
        yield RayCluster(ray, Placement(ray.nodes, request, job), watch)


@contextlib.contextmanager
def workers_of(cluster: Cluster, screen: Screen, spec: JobSpec) -> Iterator[WorkerPool]:
    """Yield the workers of a job on the cluster; end all of them afterwards."""
    job, prompts, wanted = cluster.job, spec.prompts, spec.wanted
    workers = max(len(cluster.places()), 1)
    if prompts is not None:
        prompts = math.ceil(prompts / workers)
    if wanted is not None:
        wanted = wanted.share(workers)
    screen.phase("starting the actors, checking the models")
    with cluster.fleet(Worker, replace(spec, job=job, prompts=prompts, wanted=wanted)) as fleet:
        pool = WorkerPool(fleet, screen, n=job.n, alike=job.draws_one)
        pool.gather()
        yield pool


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Yield the module ray, connected. Signal handlers stay as they were."""
    _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (
        *(ConnectionError, RuntimeError, ValueError, TimeoutError, OSError),
        ray.exceptions.RayError,
    ) as error:
        first = first_line(error)
        raise UserError(f"`ray` {address}: {first}") from None
    try:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, handler)
        yield ray
    finally:
        ray.shutdown()


def _processes(ray: Any) -> dict[str, str]:
    """Return the addresses of the processes that the driver needs, by name."""
    context = ray.get_runtime_context()
    found, here = {"control store (GCS)": str(context.gcs_address)}, context.get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here:
            address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            found["process on this node (raylet)"] = address
    return found


def _check_address(address: str) -> None:
    """Raise UserError if nothing answers at the address.

    Ray itself would try for a minute and then end the process.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536) or "/" in host:
        raise UserError(
            f'`ray`: "{address}" is neither local, auto nor an address like '
            "10.0.0.1:6379; run the command on a node of the cluster"
        )
    try:
        _connect(address)
    except OSError as error:
        raise UserError(
            f"`ray` {address}: no cluster answers there: {error.strerror or error}"
        ) from None


def _connect(address: str) -> None:
    """Connect to an address and hang up; OSError if nothing answers."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()


class Placement:
    """The places for actors on a cluster, and the resources of one actor.

    An actor takes a GPU if the job allows it and the cluster has one, else CPUs.

    Args:
        nodes: ray.nodes.
    """

    def __init__(self, nodes: Callable[[], list[dict[str, Any]]], request: Request, job: Job):
        self._nodes, self._request, self._threads = nodes, request, job.threads
        found = [node["Resources"] for node in self._alive()]
        gpus = int(sum(each.get("GPU", 0) for each in found))
        self._gpu = job.device == "cuda" or (job.device == "auto" and gpus > 0)
        self._cpus = job.threads or 1  # of an actor that runs anywhere
        self.job = job.model_copy(update={"device": "cuda" if self._gpu else "cpu"})

    def places(self) -> set[Place]:
        """Return the places for actors: the requested number, or one per GPU.

        On CPUs there is one per node, or as many as fit with --threads.
        """
        if self._request.actors is not None:
            return {Place(None, number) for number in range(self._request.actors)}
        return {
            Place(node["NodeID"], number)
            for node in self._alive()
            for number in range(self._fitting(node["Resources"]))
        }

    def resources(self, place: Place) -> dict[str, Any]:
        """Return the resources of an actor, as Ray's options."""
        if place.node is None:
            return {"num_cpus": 1 if self._gpu else self._cpus, "num_gpus": int(self._gpu)}
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = next((one for one in self._alive() if one["NodeID"] == place.node), None)
        cpus = self._threads or int((node or {"Resources": {}})["Resources"].get("CPU", 1))
        return {
            "num_cpus": 0 if self._gpu else cpus,
            "num_gpus": int(self._gpu),
            "scheduling_strategy": NodeAffinitySchedulingStrategy(place.node, soft=False),
        }

    def _fitting(self, resources: Mapping[str, float]) -> int:
        if self._gpu:
            return int(resources.get("GPU", 0))
        cpus = int(resources.get("CPU", 0))
        return cpus // self._threads if self._threads else min(cpus, 1)

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._nodes() if node["Alive"]]


class RayFleet:
    """A Fleet of Ray actors. The results of `prepare` and `exchange` are its events.

    Ray does not restart an actor that dies; the driver of the job does.
    """

    def __init__(self, cluster: RayCluster, kind: type[Process], spec: Any):
        self._ray, self._placement, self._watch = cluster
        self._kind, self._spec = kind, spec
        self._actors: dict[Place, Any] = {}
        self._pending: dict[Any, Place] = {}  # by the reference to the result
        self.places = self._placement.places

    def start(self, place: Place) -> None:
        remote = self._ray.remote(
            max_restarts=0, max_task_retries=0, **self._placement.resources(place)
        )
        actor = self._actors[place] = remote(self._kind).remote(self._spec)
        self._pending[actor.prepare.remote()] = place

    def ask(self, place: Place, given: Any, beat: float) -> None:
        self._pending[self._actors[place].exchange.remote(given, beat)] = place

    def wait(self, timeout: float) -> list[tuple[Place, Any]]:
        self._watch.check()
        pending = list(self._pending)
        if not pending:
            time.sleep(timeout)
            return []
        ready, _ = self._ray.wait(pending, num_returns=1, timeout=timeout)
        if ready:  # and all other results that are there
            ready, _ = self._ray.wait(pending, num_returns=len(pending), timeout=0)
        return [(self._pending.pop(one), self._result(one)) for one in ready]

    def stop(self, place: Place) -> None:
        actor = self._actors.pop(place, None)
        self._pending = {one: where for one, where in self._pending.items() if where != place}
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        """End all actors."""
        for place in list(self._actors):
            self.stop(place)

    def _result(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            return Fault("bug", str(error))
        except errors.RayError as error:
            text = str(error).strip()
            if "creation task" in text or "failed to import" in text:
                why = text.splitlines()[-1]
                return Fault(
                    "user",
                    f"bass cannot start there; install the same version on every node: {why}",
                )
            return Lost((text.splitlines() or [type(error).__name__])[0])


def address_here() -> str:
    """Return the address at which the job's other processes reach this one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():  # a process of ThisMachine
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())


class RayWatch:
    """Connect to Ray's processes every 0.5 s, from `begin` to the end of the block.

    When one is gone, `check` raises MachineError. If the block does not end within 2 s, a thread
    calls `say` with the error and ends the process with exit code 3. Written result lines are
    complete.

    Args:
        address: The value of --ray.
        say: Writes an error.
    """

    def __init__(self, address: str, say: Callable[[str], None]):
        self._address, self._say = address, say
        self._over, self.fault = threading.Event(), ""
        self._addresses: Mapping[str, str] = {}

    def __enter__(self) -> RayWatch:
        return self

    def begin(self, addresses: Mapping[str, str]) -> None:
        """Start to watch these addresses (host:port), by the name of the process."""
        self._addresses = addresses
        threading.Thread(target=self._watch, daemon=True, name="watching Ray").start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def check(self) -> None:
        """Raise MachineError if one of the processes is gone."""
        if self.fault:
            raise MachineError(self.fault)

    def _watch(self) -> None:
        refused = dict.fromkeys(self._addresses, 0)
        answered = dict.fromkeys(self._addresses, time.monotonic())
        while not self._over.wait(_INTERVAL):
            for name, address in self._addresses.items():
                try:
                    _connect(address)
                except ConnectionRefusedError:
                    refused[name] += 1
                except OSError:
                    refused[name] = 0
                else:
                    refused[name], answered[name] = 0, time.monotonic()
                if refused[name] >= _REFUSED or time.monotonic() - answered[name] > _SILENCE:
                    self._end(f"`ray` {self._address}: Ray's {name} at {address} has died, or "
                              "cannot be reached")  # fmt: skip
                    return

    def _end(self, fault: str) -> None:
        self.fault = fault
        if not self._over.wait(_GRACE):
            self._say(fault)
            os._exit(3)
