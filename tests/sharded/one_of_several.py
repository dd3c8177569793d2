"""One process of two, each of which sees its CPU as two devices: what they answer together, what
becomes of packs that cannot be read, of a process that is killed, and of a fault of the leader's.

    python one_of_several.py FOLDER ADDRESS PROCESS answers|killed|fault

The leader (process 0) prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from checkpoint import config

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
from answers import answers, texts

from ckv_jax import Engine, Request, SamplingParams
from ckv_jax.errors import ProcessLost
from ckv_jax.processes.join import follow, lead


def led(engine: Engine) -> dict[str, Any]:
    """What a leader can be asked for."""
    text, suffix = texts()
    engine.ingest(text[:96])
    prefix = engine.ingest(text)  # after the first part, which every process reads
    found: dict[str, Any] = {"id": prefix.id, "answers": answers(engine, prefix, suffix)}
    new = Request(prefix=[], suffix=suffix)
    asked = [Request(prefix=prefix, suffix=suffix, budget=0.2), new, new]
    together = engine.generate(asked, SamplingParams(max_tokens=3)).results()
    found["together"] = [one.token_ids.tolist() for one in together]
    stream = engine.generate(new, SamplingParams(max_tokens=5000))
    next(iter(stream))
    stream.cancel()
    found["cancelled"] = stream.results()[0].finish_reason
    found["refused"] = str(engine.generate(new, keep_kv=True).results()[0].error)
    try:
        engine.ingest(np.tile(text, 3))
    except ValueError as error:
        found["too long"] = str(error)
    return found


def damaged(engine: Engine, store: Path) -> dict[str, Any]:
    """A text whose packs are overwritten before anybody has read them."""
    text, suffix = texts()
    known = set(store.glob("segments/*/*"))
    prefix = engine.ingest(text[::-1])
    [fresh] = set(store.glob("segments/*/*")) - known
    for file in fresh.rglob("*"):
        if file.is_file() and file.stat().st_size > 10_000:
            file.write_bytes(bytes(file.stat().st_size))
    request = Request(prefix=prefix, suffix=suffix, budget=0.2)
    return {
        "segment": fresh.name,
        "sparse": engine.reprefill([request])[0].logits.tolist(),
        "dense": engine.recompute(request).logits.tolist(),
    }


def starved(engine: Engine, follower: int) -> dict[str, Any]:
    """A text that the other process alone cannot read, for want of descriptors, and then can."""
    text, suffix = texts()
    request = Request(prefix=engine.ingest(text[5:]), suffix=suffix, budget=0.2)
    dense = engine.recompute(request)
    few, most = 3, resource.prlimit(follower, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(follower, resource.RLIMIT_NOFILE, (few, most))
    without = engine.reprefill([request])[0]
    resource.prlimit(follower, resource.RLIMIT_NOFILE, (most, most))
    after = engine.reprefill([request])[0]
    return {
        "dense": dense.logits.tolist(),
        "without": without.logits.tolist(),
        "after": after.logits.tolist(),
    }


def lost(engine: Engine, follower: int) -> dict[str, Any]:
    """What becomes of a long text whose second token never comes, and of everything after."""
    text, suffix = texts()
    engine.ingest(text[:20])
    stream = engine.generate(Request(prefix=[], suffix=suffix), SamplingParams(max_tokens=5000))
    next(iter(stream))
    os.kill(follower, signal.SIGKILL)
    began = time.monotonic()
    error = stream.results()[0].error
    found = {"seconds": time.monotonic() - began, "error": [type(error).__name__, str(error)]}
    try:
        engine.ingest(text[10:])
    except ProcessLost as again:
        found["again"] = str(again)
    return found


def faulty(engine: Engine) -> dict[str, Any]:
    """What becomes of a text in the middle of which the leader alone fails, and of others."""
    _, suffix = texts()
    new = Request(prefix=[], suffix=suffix)
    with mock.patch.object(engine.layers, "embed", side_effect=MemoryError("no room")):
        error = engine.generate(new).results()[0].error
    found: dict[str, Any] = {"error": [type(error).__name__, str(error)]}
    try:
        engine.generate(new)
    except ProcessLost as again:
        found["again"] = str(again)
    return found


def main(folder: Path, address: str, process: int, what: str) -> None:
    """What this process does."""
    store = folder / ("store" if what == "answers" else f"store-{what}")
    place: dict[str, Any] = {"folder": folder / "model", "store": store, "address": address}
    told = config("ckv", 4, processes=2)
    if process:
        (folder / f"follower-{what}").write_text(str(os.getpid()))
        follow(**place, process=process, config=told)
        return
    with lead(**place, config=told) as engine:
        follower = int((folder / f"follower-{what}").read_text())
        if what == "answers":
            found = led(engine)
            found["starved"] = starved(engine, follower)
            found["damaged"] = damaged(engine, store)
        else:
            found = lost(engine, follower) if what == "killed" else faulty(engine)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
