"""Run workers as Ray actors on this machine or on a cluster: one per GPU, or on CPUs.

Only this file and bass_cli/ray.py use Ray, and they import it when it is needed. What actors draw:
worker_pool.py and pool.py. What runs in an actor: worker.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bass_cli.cluster.ray_watch import RayWatch
from bass_cli.cluster.worker import Fault, JobSpec, Worker
from bass_cli.cluster.worker_pool import Lost, Place, WorkerPool
from bass_cli.config.args import DistillArgs, SampleArgs
from bass_cli.config.job import Job
from bass_cli.errors import MachineError, UserError
from bass_cli.io.console import Screen
from bass_cli.io.saving import is_stream
from bass_cli.io.shards import Shard
from bass_cli.system.threads import usable_cores

_PATIENCE = 5.0  # seconds to wait for a cluster's port
_STORE = 100 * 2**20  # bytes of a local object store, for messages over 100 kB


class Request(NamedTuple):
    """The values of --ray and --actors.

    Attributes:
        address: "local", "auto" or HOST:PORT.
        actors: The number of actors; None for all.
    """

    address: str
    actors: int | None


def read_request(args: SampleArgs | DistillArgs, job: Job, out: str) -> Request | None:
    """Check --ray and --actors; return None without --ray.

    Raises:
        UserError: The options contradict each other, or Ray is not installed.
    """
    if args.ray is None:
        if args.actors is not None:
            raise UserError("--actors (or BASS_ACTORS) needs --ray")
        return None
    text = (args.actors or "all").strip()
    if text != "all" and not (
        text.isascii() and text.isdigit() and 1 <= len(text) <= 6 and int(text)
    ):
        raise UserError(
            f'--actors (or BASS_ACTORS): "{args.actors}" is neither all nor a whole number above 0'
        )
    if job.budget is not None:
        raise UserError(
            "--ray and --budget exclude each other: if an actor dies and its samples are drawn "
            "again, a time limit truncates them elsewhere"
        )
    if job.tensor_parallel > 1:
        raise UserError(
            "--ray and --tensor-parallel exclude each other, because an actor has one GPU; leave "
            "--ray out to use several GPUs of one machine"
        )
    if job.speculation.coupling == "maximal":
        raise UserError(
            "--ray needs --coupling shared: with maximal coupling, samples that are drawn again "
            "after an actor died would differ"
        )
    if is_stream(out):
        raise UserError("--ray needs --out FILE, so that a killed job can continue")
    if importlib.util.find_spec("ray") is None:
        raise UserError("--ray needs the package ray: pip install 'bass-cli[ray]'")
    return Request(args.ray, None if text == "all" else int(text))


class Cluster(NamedTuple):
    """A connection to Ray, with the rooms for a job's actors."""

    ray: Any
    rooms: Rooms
    watch: RayWatch

    @contextlib.contextmanager
    def fleet(self, kind: type, order: Any) -> Iterator[RayFleet]:
        """Yield a fleet without actors; end its actors afterwards.

        Args:
            kind: The class of the actors.
            order: The argument of its constructor.
        """
        fleet = RayFleet(self.ray, self.rooms, kind, order, self.watch.check)
        try:
            yield fleet
        finally:
            fleet.close()


@contextlib.contextmanager
def cluster_of(request: Request, job: Job, screen: Screen) -> Iterator[Cluster]:
    """Connect to the requested cluster; a local one is started, and ends with the block.

    Raises:
        UserError: There is no cluster at the address.
    """
    screen.phase("starting Ray" if request.address == "local" else "joining the cluster")
    with (
        RayWatch(request.address, screen.error) as watch,
        open(os.devnull, "w") as nowhere,
        # Ray prints reports about dead processes to standard output, which is for results.
        contextlib.redirect_stdout(nowhere),
        _connected(request, job.threads or 1) as ray,
    ):
        watch.begin(_processes(ray))
        yield Cluster(ray, Rooms(ray.nodes, request, job), watch)


@contextlib.contextmanager
def workers_on_ray(
    cluster: Cluster,
    screen: Screen,
    *,
    source: Mapping[str, Any],
    prompts: int | None = None,
    longest: str = "",
    shard: Shard | None = None,
) -> Iterator[WorkerPool]:
    """Yield the workers of the cluster's job; end all actors afterwards.

    Args:
        source, longest, shard: See JobSpec.
        prompts: The number of prompts, None if unknown.
    """
    rooms, share = cluster.rooms, None
    if prompts is not None:
        share = math.ceil(prompts / max(len(rooms.places()), 1))
    screen.phase("starting the actors, checking the models")
    order = JobSpec(rooms.job, dict(source), share, longest, shard)
    with cluster.fleet(Worker, order) as fleet:
        yield WorkerPool(fleet, screen, n=rooms.job.n, alike=rooms.job.draws_one)


@contextlib.contextmanager
def _connected(request: Request, threads: int) -> Iterator[Any]:
    """Yield the module ray, connected. Signal handlers stay as they were.

    Args:
        threads: CPU threads of an actor.
    """
    local = request.address == "local"
    if not local:
        _check_address(request.address)
    with contextlib.ExitStack() as stack:
        yield from _init(request, threads, stack.enter_context(_alone()) if local else {})


@contextlib.contextmanager
def _alone() -> Iterator[dict[str, Any]]:
    """Set up a cluster that only this command can use; yield arguments for ray.init.

    It listens on the loopback interface and requires a token. Token, sockets and logs are in a
    private folder.
    """
    short = "/tmp" if os.access("/tmp", os.W_OK) else None  # a socket path has at most 107 bytes
    with tempfile.TemporaryDirectory("", "bass-ray-", short, ignore_cleanup_errors=True) as folder:
        token = Path(folder, "token")
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        given: dict[str, str | None] = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_AUTH_TOKEN": None,  # it would take precedence
            # With 1, which is Linux's default, Ray listens on all interfaces.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        if "ray" in sys.modules:  # Ray has read the variables already (only in tests)
            given = {}
        before = {name: os.environ.get(name) for name in given}
        _set(given)
        try:
            yield {"_temp_dir": str(Path(folder, "ray"))}  # Ray lets all users read this folder
        finally:
            _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _init(request: Request, threads: int, more: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the module ray, connected; see _connected."""
    local = request.address == "local"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that is started here
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    given: dict[str, Any] = {"address": request.address, **more}
    if local:
        cores = usable_cores().most
        given |= {
            "num_cpus": max(cores, (request.actors or 1) * threads),
            "object_store_memory": _STORE,
        }
        given |= {"include_dashboard": False}
    try:
        ray.init(**given, log_to_driver=False, logging_level="ERROR")
    except (
        *(ConnectionError, RuntimeError, ValueError, TimeoutError, OSError),
        ray.exceptions.RayError,
    ) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--ray {request.address}: {first}") from None
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
            f'--ray (or BASS_RAY): "{address}" is neither local, auto nor an address like '
            "10.0.0.1:6379; run the command on a node of the cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
    except OSError as error:
        raise UserError(
            f"--ray {address}: no cluster answers there: {error.strerror or error}"
        ) from None


class Rooms:
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
        local, most = request.address == "local", request.actors or 1
        if local and self._gpu and gpus < most:
            raise MachineError(
                f"--actors {most}: Ray sees {gpus} GPUs on this machine, and each actor takes one; "
                "use fewer actors or --device cpu"
            )
        # Actors of a local Ray share its cores. On a cluster their places are unknown.
        self._cpus = job.threads or (max(usable_cores().most // most, 1) if local else 1)
        self.job = job.model_copy(update={"device": "cuda" if self._gpu else "cpu"})

    def places(self) -> set[Place]:
        """Return the places for actors: the requested number, or one per GPU.

        On CPUs there is one per node, or as many as fit with --threads.

        Raises:
            MachineError: The local Ray's only node has died.
        """
        if self._request.address == "local" and not self._alive():
            raise MachineError("--ray local: Ray's process on this machine (raylet) has died")
        if self._request.actors is not None:
            return {Place(None, number) for number in range(self._request.actors)}
        return {
            Place(node["NodeID"], number)
            for node in self._alive()
            for number in range(self._fitting(node["Resources"]))
        }

    def taken(self, place: Place) -> dict[str, Any]:
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

    Ray does not restart an actor that dies; the worker pool does.

    Args:
        kind: The class of the actors.
        order: The argument of its constructor.
        check: Raises MachineError if Ray itself is gone.
    """

    def __init__(self, ray: Any, rooms: Rooms, kind: type, order: Any, check: Callable[[], None]):
        self._ray, self._rooms, self._kind, self._order = ray, rooms, kind, order
        self._check = check
        self._actors: dict[Place, Any] = {}
        self._pending: dict[Any, Place] = {}  # by the reference to the result
        self.places = rooms.places

    def start(self, place: Place) -> None:
        remote = self._ray.remote(max_restarts=0, max_task_retries=0, **self._rooms.taken(place))
        actor = self._actors[place] = remote(self._kind).remote(self._order)
        self._pending[actor.prepare.remote()] = place

    def ask(self, place: Place, given: Any, beat: float) -> None:
        self._pending[self._actors[place].exchange.remote(given, beat)] = place

    def wait(self, timeout: float) -> list[tuple[Place, Any]]:
        self._check()
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
    """Return the address at which other nodes reach this actor's node."""
    import ray

    return str(ray.util.get_node_ip_address())
