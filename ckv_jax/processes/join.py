"""How processes become one engine: `lead` in one of them, `follow` in each of the others.

They first tell each other what they are by a connection of their own, so that whatever does not
fit is refused before JAX knows of any process, a weight is read or a byte of a device taken.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from ckv_jax.config import EngineConfig
from ckv_jax.engine import Engine
from ckv_jax.errors import ProcessFailed
from ckv_jax.fitting import system_for
from ckv_jax.identity import model_fingerprint
from ckv_jax.model.checkpoint import is_orbax
from ckv_jax.model.config import ModelConfig
from ckv_jax.model.shardings import check_divides
from ckv_jax.peers import Peers
from ckv_jax.processes.channel import Channel, Message, accept, address_of, connect, listen
from ckv_jax.processes.follower import Follower
from ckv_jax.processes.following import Following
from ckv_jax.processes.leading import Leading
from ckv_jax.storage.config import StoreConfig
from ckv_jax.storage.place import marker
from ckv_jax.storage.place.url import folder_of
from ckv_jax.storage.store import ChunkStore

__all__ = ["follow", "lead"]

Url = str | os.PathLike[str]

_HELLO_S = 5.0
"""How long who has connected may take to say that it is one of the processes."""


def lead(
    folder: Url,
    *,
    store: Url,
    address: str,
    config: EngineConfig,
    store_config: StoreConfig | None = None,
    wait_s: float = 60.0,
) -> Engine:
    """The engine of `config.processes` processes, of which this one takes the requests.

    Args:
      folder, store, config, store_config: as for `Engine.from_pretrained`; every process is given
        the same checkpoint, store and config.
      address: "host:port" of this process, at which all others reach it; JAX takes the port, the
        commands take the next one. Whoever can connect there is believed: no public network.
      wait_s: how long the others may take to come.

    Raises `ValueError` for a config that does not suit, or another process's that differs;
    `TimeoutError` for processes that do not come; `ProcessFailed` with what kept another one from
    loading. Before JAX has computed anything in this process.
    """
    mine = _facts(folder, config)
    address_of(address)
    until = time.monotonic() + wait_s
    channels: dict[int, Channel] = {}
    with listen(address) as listening:
        try:
            while len(channels) < config.processes - 1:
                try:
                    channel = accept(listening, until)
                except TimeoutError as error:
                    came = f"{1 + len(channels)} of {config.processes} processes came"
                    raise TimeoutError(f"{came} in {wait_s:g} s") from error
                process = _welcomed(channel, channels, mine, config.processes, until)
                if process is not None:
                    channels[process] = channel
            ordered = [channels[process] for process in sorted(channels)]
            ChunkStore.open(store, config=store_config).close()
            for channel in ordered:
                channel.send({"store": _mark(store)})
            for process, channel in enumerate(ordered, start=1):
                _accepted(channel.receive(), process)
            _initialize(address, config, 0, wait_s)
        except BaseException as error:
            for channel in channels.values():
                _refuse(channel, error)
            raise
    return _loaded(Leading(ordered), folder, store, config, store_config)


def follow(
    folder: Url,
    *,
    store: Url,
    address: str,
    process: int,
    config: EngineConfig,
    store_config: StoreConfig | None = None,
    wait_s: float = 60.0,
) -> None:
    """Computes what the leader at `address` says, as process number `process` (1, 2, …), until
    that one is closed.

    Raises like `lead`, and `ProcessLost` if the leader ends without a word, unless JAX's own
    runtime has ended the process before; where it waits for devices that will never answer, it is
    ended with status 1.
    """
    mine = _facts(folder, config)
    if not 0 < process < config.processes:
        raise ValueError(f"got process={process}, expected 1 to {config.processes - 1}")
    channel = connect(address, time.monotonic() + wait_s)
    try:
        channel.send({"process": process, "facts": mine})
        try:
            found, said = None, _accepted(channel.receive(), 0)
        except TimeoutError as error:
            raise TimeoutError(f"the leader had not found all in {wait_s:g} s") from error
        if (own := _mark(store)) != said["store"]:
            found = f"got store {os.fspath(store)} ({own}), expected the leader's ({said['store']})"
        channel.send({"refused": found})
        if found is not None:
            raise ValueError(found)
        _initialize(address, config, process, wait_s)
    except BaseException:
        channel.close()
        raise
    peers = Following(channel, config.processes)
    try:
        with _loaded(peers, folder, store, config, store_config) as engine:
            Follower(engine.worker, engine.store, engine.fingerprint, peers).run(peers.commands())
            _shutdown()  # before the leader, who serves this
    finally:
        peers.leave()


def _facts(folder: Url, config: EngineConfig) -> Message:
    """What has to be the same in all processes. Raises `ValueError` for what suits none."""
    if config.processes < 2:
        raise ValueError(f"got processes={config.processes}, expected 2 or more")
    path = Path(folder)
    if is_orbax(path):
        raise ValueError(
            f"got the Orbax checkpoint {path}, expected Hugging Face's files, of which each "
            "process reads its part: `ckv convert` writes them"
        )
    model = ModelConfig.from_hf(path)
    check_divides(model, config.tensor_parallel)
    system_for(config)
    settings = json.dumps(dataclasses.asdict(config), sort_keys=True, default=_named)
    return {
        "ckv-jax": version("ckv-jax"),
        "jax": jax.__version__,
        "model": dict(model_fingerprint(path, model, dtype=config.dtype).fields),
        "config": json.loads(settings),
    }


def _named(value: Any) -> str:
    """A function or an object of somebody's own, by its name."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _welcomed(
    channel: Channel, known: dict[int, Channel], mine: Message, processes: int, until: float
) -> int | None:
    """The number of a process that has come; None: something else has connected, and is let go.

    Raises `ValueError` for a process that does not fit.
    """
    channel.wait_until(min(until, time.monotonic() + _HELLO_S))
    try:
        said = channel.receive()
        process, theirs = int(said["process"]), dict(said["facts"])
    except Exception:  # a health check, a scan of ports: whatever it says
        channel.close()
        return None
    try:
        _same(mine, theirs, f"process {process}")
        if not 0 < process < processes:
            raise ValueError(f"got process {process}, expected 1 to {processes - 1}")
        if process in known:
            raise ValueError(f"got process {process} twice, expected each of them once")
    except BaseException as error:
        _refuse(channel, error)
        raise
    channel.wait_until(until)
    return process


def _same(mine: Message, theirs: Message, who: str, at: str = "") -> None:
    """Raises `ValueError` with the first fact that differs."""
    for name, value in mine.items():
        other = theirs.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            _same(value, other, who, f"{at}{name}.")
        elif value != other:
            raise ValueError(f"got {at}{name}={other!r} in {who}, expected {value!r}, the leader's")


def _refuse(channel: Channel, error: BaseException) -> None:
    with suppress(OSError):  # it may be gone
        channel.send({"refused": str(error)})
    channel.close()


def _accepted(said: Message, process: int) -> Message:
    if said.get("refused") is not None:
        raise ValueError(f"process {process}: {said['refused']}")
    return said


def _mark(store: Url) -> str | list[int]:
    """What tells a store from others: of a folder its marker file, else the URL."""
    folder = folder_of(store)
    if folder is None:
        return os.fspath(store)
    try:
        found = (folder / marker.FILE).stat()
    except OSError as error:
        return f"no store: {error}"
    return [found.st_ino, found.st_mtime_ns]


def _initialize(address: str, config: EngineConfig, process: int, wait_s: float) -> None:
    """Makes JAX know the processes."""
    set_: Callable[[str, Any], None] = jax.config.update
    set_("jax_cpu_collectives_implementation", "gloo")
    set_("jax_enable_recoverability", True)  # who is left says what happened
    set_("jax_enable_preemption_service", False)  # it swallows SIGTERM
    jax.distributed.initialize(
        address,
        config.processes,
        process,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
        initialization_timeout=max(1, int(wait_s)),
    )


def _shutdown() -> None:
    end: Callable[[], None] = jax.distributed.shutdown
    end()


def _loaded(
    peers: Peers, folder: Url, store: Url, config: EngineConfig, store_config: StoreConfig | None
) -> Engine:
    """The engine, once all processes have loaded; or what kept this one or another from it."""
    made: Sequence[Engine] = ()
    try:
        with peers.local():
            made = [
                Engine.from_pretrained(
                    folder, store=store, config=config, store_config=store_config, peers=peers
                )
            ]
    except BaseException as error:
        for engine in made:
            engine.close()
        peers.leave()
        if isinstance(error, ProcessFailed) and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
    return made[0]
