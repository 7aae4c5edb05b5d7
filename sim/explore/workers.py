"""Where batches run: this machine's cores, a Dask cluster or a Ray cluster, all through joblib."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, assert_never

import joblib
from joblib.externals.loky.process_executor import BrokenProcessPool

from sim.errors import SimError

Batch = TypeVar("Batch")
Lines = TypeVar("Lines")
# Batches in flight for every worker of a backend that returns whole rounds.
ROUND = 4
# What loky's tracker of semaphores may not print: a sweep that is stopped while a worker starts leaves one semaphore
# registered, which the tracker removes at once and warns of after the command's own last line.
QUIET_TRACKER = "ignore:resource_tracker:UserWarning"
# How often a worker looks whether the process that started it still lives.
WATCH_S = 0.2


class WorkerDied(Exception):  # noqa: N818 - it is an event, handled by handing the work out again
    """A worker process ended in the middle of its batch."""


Backend = Literal["processes", "dask", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers: ``jobs`` processes on this machine, or those of the cluster at ``address``."""

    backend: Backend = "processes"
    jobs: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    address: str | None = None

    def map(self, function: Callable[[Batch], Lines], batches: Sequence[Batch]) -> Iterator[Lines]:
        """Results as they come, in any order. Raises :class:`WorkerDied`; results so far stay valid."""
        with self._backend() as streams:
            size = len(batches) if streams else self.jobs * ROUND
            for at in range(0, len(batches), size):
                parallel = joblib.Parallel(
                    n_jobs=self.jobs, batch_size=1, return_as="generator_unordered" if streams else "list"
                )
                try:
                    yield from parallel(joblib.delayed(function)(batch) for batch in batches[at : at + size])
                except BrokenProcessPool as error:
                    raise WorkerDied(type(error).__name__) from None

    @contextmanager
    def _backend(self) -> Iterator[bool]:
        """Set joblib up; yields whether results stream back, or come in whole rounds."""
        match self.backend:
            case "processes":
                with (
                    _environment(PYTHONWARNINGS=QUIET_TRACKER),
                    joblib.parallel_config(
                        backend="loky", inner_max_num_threads=1, initializer=_end_with, initargs=(os.getpid(),)
                    ),
                ):
                    yield True
            case "dask":
                with _dask_client(self.address) as client, joblib.parallel_config(backend="dask", client=client):
                    yield True
            case "ray":
                _join_ray(self.address)
                with joblib.parallel_config(backend="ray"):
                    yield False
            case _:
                assert_never(self.backend)


@contextmanager
def _environment(**added: str) -> Iterator[None]:
    """Processes started meanwhile get ``added`` in their environment, after a value of the user's own."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update({name: ",".join(filter(None, (before[name], value))) for name, value in added.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end_with(parent: int) -> None:
    """In a worker: end when the process ``parent`` that started it has, however it ended.

    A worker of loky whose parent was killed waits for work for five minutes, and holds the parent's pipes. The
    kernel's own signal for this (``PR_SET_PDEATHSIG``) comes when the thread that started the worker ends: too early
    where a sweep runs in a thread of a longer program, whose workers the next sweep takes over.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()


def connected(pool: Pool) -> Pool:
    """``pool`` with the number of workers that its cluster has; :class:`SimError` when there is none to reach."""
    match pool.backend:
        case "processes":
            return pool
        case "dask":
            with _dask_client(pool.address) as client:
                workers = client.scheduler_info(n_workers=-1)["workers"]
                threads = sum(worker["nthreads"] for worker in workers.values())
            if not threads:
                raise SimError(f"the Dask cluster at {pool.address} has no workers: start 'dask worker {pool.address}'")
            return replace(pool, jobs=threads)
        case "ray":
            return replace(pool, jobs=_join_ray(pool.address))
    assert_never(pool.backend)


def _dask_client(address: str | None) -> Any:
    try:
        import distributed
    except ImportError:
        raise SimError("--backend dask needs the extra: pip install 'wattline[dask]'") from None
    if address is None:
        raise SimError("--backend dask needs --address tcp://HOST:PORT of its scheduler")
    try:
        return distributed.Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SimError(f"--address {address}: no Dask scheduler answers there ({type(error).__name__})") from None


def _join_ray(address: str | None) -> int:
    """Connect once; the number of cores that the cluster lends."""
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise SimError("--backend ray needs the extra: pip install 'wattline[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError) as error:
            raise SimError(f"--address {address}: no Ray cluster answers there ({type(error).__name__})") from None
    register_ray()
    return max(1, int(ray.cluster_resources().get("CPU", 1)))
