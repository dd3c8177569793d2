"""First tokens against transformers on PyTorch: its recompute, and its suffix pass in memory.

    python -m bench.versus_transformers --json OUT

One random checkpoint of a published shape is written once in HF format and read by both sides. Ours
runs in bfloat16 and reads the prefix's KV from the store for every request, with no cache between
them (direct I/O where the file system has it). Theirs: `recompute` prefills prefix and suffix;
`suffix` runs the suffix over a `DynamicCache` that is already in memory; both in inference mode,
with scaled dot-product attention, logits of the last token alone and a thread for each core, in
bfloat16 and in float32: each of the two figures is that of the faster (`hf_dtype`). All times are
wall clock around the whole call, medians over requests with different suffixes, the sides taking
turns. No budget is asked what another was; theirs are asked what the largest budget is. Bars at
the smallest budget: 25 times faster than recompute, twice than the suffix pass.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import budget_share, existing_folder, finish, positive, result_file, whole
from bench.measure import Compilations
from ckv_jax import Engine, EngineConfig, Request
from ckv_jax.identity import random_fingerprint
from ckv_jax.model.config import PUBLISHED, ModelConfig
from ckv_jax.model.weights import load_pretrained, random_model, save_pretrained
from ckv_jax.storage.store import ChunkStore
from ckv_jax.systems import SYSTEMS

DTYPES = ("bfloat16", "float32")
BARS = {"recompute": 25.0, "suffix": 2.0}
Press = Callable[[Any], AbstractContextManager[Any]]


class Transformers:
    """`Qwen2ForCausalLM` with a prefix's KV in memory; gives ms and the token that came out."""

    def __init__(self, folder: Path, *, dtype: str) -> None:
        import torch
        from transformers import Qwen2ForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(os.cpu_count() or 1)
        self._torch = torch
        self._model = Qwen2ForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def hold(self, prefix: np.ndarray, *, press: Press = nullcontext) -> None:
        """Computes a prefix int32 [T], whose KV then stays in memory.

        `press`: takes the model and is entered around the pass; it may make the cache shorter.
        """
        from transformers import DynamicCache

        self._prefix = self._torch.from_numpy(prefix).long()[None]
        self._cache = DynamicCache(config=self._model.config)
        with self._torch.inference_mode(), press(self._model):
            self._pass(self._prefix, None)

    def _pass(self, tokens: Any, positions: Any) -> Any:
        """Logits of the last of `tokens` [1, n], behind and into the cache: transformers 5.24 has
        another name for it, at the same place."""
        return self._model(tokens, None, positions, self._cache, logits_to_keep=1).logits

    @property
    def kept(self) -> float:
        """Share of the prefix's keys and values that a later pass sees."""
        heads = seen = 0
        for layer, cached in zip(self._model.model.layers, self._cache.layers, strict=True):
            masked = getattr(layer.self_attn, "masked_key_indices", None)  # kvpress leaves them
            heads += cached.keys.shape[1]
            seen += cached.keys.shape[1] * cached.keys.shape[2]
            seen -= 0 if masked is None else len(masked[0])
        return seen / (heads * self._prefix.shape[1])

    def recompute(self, suffix: np.ndarray) -> tuple[float, int]:
        """A prefill of everything."""
        torch = self._torch
        with torch.inference_mode():
            tokens = torch.cat([self._prefix, torch.from_numpy(suffix).long()[None]], dim=1)
            return _timed(
                lambda: self._model(tokens, use_cache=False, logits_to_keep=1).logits.argmax()
            )

    def suffix(self, suffix: np.ndarray) -> tuple[float, int]:
        """A pass of the suffix over the cache, which is cut back to the prefix afterwards."""
        torch = self._torch
        with torch.inference_mode():
            tokens = torch.from_numpy(suffix).long()[None]
            end = self._prefix.shape[1]  # where the suffix stands, however short the cache is
            positions = torch.arange(end, end + len(suffix))[None]
            answer = _timed(lambda: self._pass(tokens, positions).argmax())
            self._cache.crop(-len(suffix))
            return answer

    def further(self, suffix: np.ndarray, text: np.ndarray) -> float:
        """ms of each token of `text` int32 [N] after the first, behind a suffix; mean of N - 1."""
        torch, end = self._torch, self._prefix.shape[1]
        tokens = torch.from_numpy(np.concatenate([suffix, text])).long()[None]
        times = []
        with torch.inference_mode():
            for first, stop in pairwise([0, *range(len(suffix), tokens.shape[1])]):
                places = torch.arange(end + first, end + stop)[None]
                likeliest = self._pass(tokens[:, first:stop], places).argmax()
                int(likeliest)  # as if it were the next one
                times.append(time.perf_counter())
            self._cache.crop(-(tokens.shape[1] - 1))
        return (times[-1] - times[0]) * 1e3 / (len(times) - 1)


def _timed(run: Callable[[], Any]) -> tuple[float, int]:
    start = time.perf_counter()
    token = int(run())
    return (time.perf_counter() - start) * 1e3, token


@contextmanager
def our_engine(folder: Path, store: Path, system: str) -> Iterator[Engine]:
    """An engine that keeps no KV from one request to the next."""
    model = load_pretrained(folder, dtype="bfloat16")
    config = EngineConfig(system=system, device_cache_bytes=0, host_cache_bytes=0)
    fingerprint = random_fingerprint(model)
    with Engine(model, None, ChunkStore.open(store), fingerprint, config) as engine:
        yield engine


def measure(args: argparse.Namespace, folder: Path, store: Path) -> dict[str, Any]:
    """Every time of one run, by side and budget."""
    load = os.getloadavg()[0]  # other people's work, which torch suffers from most
    rng = np.random.default_rng(args.seed)
    vocabulary = ModelConfig.from_hf(folder).vocab_size
    prefix_tokens = rng.integers(0, vocabulary, args.prefix_tokens).astype(np.int32)
    shape = (args.repeats + 1, len(args.budgets), args.suffix_tokens)
    unmeasured, *suffixes = rng.integers(0, vocabulary, shape).astype(np.int32)
    largest = max(range(len(args.budgets)), key=args.budgets.__getitem__)
    times: dict[str, list[float]] = defaultdict(list)
    ssd: dict[str, list[int]] = defaultdict(list)
    agree: list[bool] = []
    theirs = {dtype: Transformers(folder, dtype=dtype) for dtype in DTYPES}
    for hf in theirs.values():
        hf.hold(prefix_tokens)
    with our_engine(folder, store, args.system) as engine:
        prefix = engine.ingest(prefix_tokens)
        engine.warmup(prefix, max_suffix=args.suffix_tokens, budgets=args.budgets)
        for suffix, budget in zip(unmeasured, args.budgets, strict=True):
            engine.reprefill([Request(prefix=prefix, suffix=suffix.tolist(), budget=budget)])
        for hf in theirs.values():
            hf.suffix(unmeasured[largest])
        gc.collect()
        with Compilations() as compiled:
            for turn, asked in enumerate(suffixes):
                tokens = {}
                for suffix, budget in zip(asked, args.budgets, strict=True):
                    request = Request(prefix=prefix, suffix=suffix.tolist(), budget=budget)
                    start = time.perf_counter()
                    [result] = engine.reprefill([request])
                    times[f"{budget:g}"].append((time.perf_counter() - start) * 1e3)
                    ssd[f"{budget:g}"].append(result.trace.bytes["ssd"])
                    tokens[budget] = result.token_id
                suffix = asked[largest]
                for dtype, hf in theirs.items():
                    spent, token = hf.suffix(suffix)
                    times[f"suffix {dtype}"].append(spent)
                    if turn < args.recomputes:
                        times[f"recompute {dtype}"].append(hf.recompute(suffix)[0])
                    if 1.0 in tokens and dtype == "bfloat16":
                        agree.append(token == tokens[1.0])
    budgets = [f"{budget:g}" for budget in args.budgets]
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "model": args.model,
        "system": args.system,
        "dtype": "bfloat16",
        "prefix_tokens": args.prefix_tokens,
        "suffix_tokens": args.suffix_tokens,
        "repeats": args.repeats,
        "cpus": os.cpu_count(),
        "load_average": load,
        "ours_ms": {budget: median[budget] for budget in budgets},
        **against(median, budgets),
        "ssd_bytes": {budget: statistics.median(ssd[budget]) for budget in budgets},
        "top1_agrees_at_full_budget": statistics.mean(agree) if agree else None,
        "recompilations": compiled.count,
        "samples_ms": dict(times),
    }


def against(median: dict[str, float], budgets: Sequence[str]) -> dict[str, Any]:
    """Their best times beside ours at each budget; the bars are for the smallest."""
    hf_ms = {way: {dtype: median[f"{way} {dtype}"] for dtype in DTYPES} for way in BARS}
    best = {way: min(times.values()) for way, times in hf_ms.items()}
    faster = {way: {b: ms / median[b] for b in budgets} for way, ms in best.items()}
    smallest = min(budgets, key=float)
    return {
        "hf_recompute_ms": best["recompute"],
        "hf_suffix_ms": best["suffix"],
        "hf_dtype": {way: min(times, key=times.__getitem__) for way, times in hf_ms.items()},
        "hf_ms": hf_ms,
        "faster_than_recompute": faster["recompute"],
        "faster_than_suffix": faster["suffix"],
        "bars": {
            way: {"bar": bar, "got": faster[way][smallest], "met": faster[way][smallest] >= bar}
            for way, bar in BARS.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=result_file, metavar="OUT", help="write all figures to this file"
    )
    parser.add_argument("--model", choices=PUBLISHED, default="0.5B")
    parser.add_argument("--system", choices=SYSTEMS, default="ckv")
    parser.add_argument("--budgets", type=budget_share, nargs="+", default=[0.05, 0.25, 1.0])
    parser.add_argument("--prefix-tokens", type=positive, default=5000)
    parser.add_argument("--suffix-tokens", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=15)
    parser.add_argument(
        "--recomputes", type=positive, default=3, help="of the repeats, for recompute"
    )
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument(
        "--work", type=existing_folder, help="where checkpoint and store go (on the SSD to measure)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work, prefix="versus-") as work:
        folder = Path(work) / "checkpoint"
        save_pretrained(random_model(PUBLISHED[args.model], seed=args.seed), folder)
        figures = measure(args, folder, Path(work) / "store")
    finish(args, None, figures)
    for budget, ours in figures["ours_ms"].items():
        print(
            f"ours at {float(budget):4.0%}: {ours:8.1f} ms, "
            f"{figures['faster_than_recompute'][budget]:5.1f}x its recompute, "
            f"{figures['faster_than_suffix'][budget]:4.1f}x its suffix pass in memory"
        )
    for way, bar in figures["bars"].items():
        by_dtype = ", ".join(
            f"{ms:.1f} ms in {dtype}" for dtype, ms in figures["hf_ms"][way].items()
        )
        said = "met" if bar["met"] else "missed"
        print(f"transformers {way}: {by_dtype}; {bar['got']:.1f}x, bar {bar['bar']:g}x: {said}")


if __name__ == "__main__":
    main()
