"""Decode on a real store: what transformers says, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_sharp import Sharp
from engine_support import SMALL, TIGHT, kept_kv, scale_error, tokens
from greedy import greedy_tokens
from transformers import Qwen2ForCausalLM

from ckv_jax import ContextOverflow, Engine, EngineConfig, Request
from ckv_jax.decode.decoder import Decoder
from ckv_jax.errors import CkvError
from ckv_jax.model.sampling import SamplingParams
from ckv_jax.prefix import open_prefixes
from ckv_jax.request import Generation
from ckv_jax.serving.decode_batch import DecodeBatches
from ckv_jax.serving.sequence import Sequence
from ckv_jax.storage.prefix import Prefix

SUFFIX = [1, 2, 3]


@pytest.fixture(scope="module")
def engine(sharp: Sharp, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with sharp.fresh(tmp_path_factory.mktemp("store"), max_batch=2) as made:
        yield made


@pytest.fixture(scope="module")
def prefix(engine: Engine) -> Prefix:
    return engine.ingest(tokens(140))


def one(engine: Engine, request: Request, **sampling: object) -> Generation:
    (generation,) = engine.generate(request, SamplingParams(**sampling)).results()
    return generation


def test_greedy_equals_transformers(
    engine: Engine, prefix: Prefix, sharp: Sharp, tmp_path: Path
) -> None:
    suffix = [1, 2, 45]
    request = Request(prefix=prefix, suffix=suffix, budget=1.0)
    began = time.perf_counter()
    got = one(engine, request, max_tokens=64)
    spent_ms = (time.perf_counter() - began) * 1e3
    sharp.model.save(tmp_path)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = greedy_tokens(model, [*prefix.tokens.tolist(), *suffix], 64)
    assert got.token_ids.tolist() == expected
    assert len(set(got.token_ids.tolist())) > 8
    assert got.finish_reason == "length"
    assert got.trace.end_ns is not None
    assert got.trace.ttft_ms + got.decode_ms <= spent_ms  # one after the other, of what it took


def test_without_a_stored_prefix_it_goes_on_from_a_dense_prefill(
    engine: Engine, prefix: Prefix
) -> None:
    expected = one(engine, Request(prefix=prefix, suffix=SUFFIX, budget=1.0), max_tokens=20)
    unstored = engine.variant(dataclasses.replace(engine.config, salt="other"))
    with unstored:
        got = one(unstored, Request(prefix=prefix.tokens.tolist(), suffix=SUFFIX), max_tokens=20)
    assert got.token_ids.tolist() == expected.token_ids.tolist()


def test_one_at_a_time_others_change_no_bit(engine: Engine, prefix: Prefix) -> None:
    """Programs have the same shapes then, whatever else waits or runs."""
    other = engine.ingest(tokens(90, 61))
    requests = [
        Request(prefix=p, suffix=tokens(3 + 9 * i, i).tolist(), budget=budget)
        for i, (p, budget) in enumerate([(prefix, 0.2), (other, 0.6), (prefix, 1.0)])
    ]
    with engine.variant(dataclasses.replace(engine.config, max_batch=1)) as single:
        together = kept_kv(single, requests, max_tokens=8)
        logits = [result.logits for result in single.reprefill(requests)]
        for request, kv, mine in zip(requests, together, logits, strict=True):
            (alone,) = kept_kv(single, [request], max_tokens=8)
            np.testing.assert_array_equal(kv, alone)
            (result,) = single.reprefill([request])
            np.testing.assert_array_equal(mine, result.logits)


@pytest.mark.parametrize("forced", [(), (5, 6, 7, 8)])
@pytest.mark.parametrize(("budget", "ahead"), [(1.0, True), (0.2, False)])
def test_the_next_token_is_dispatched_before_one_is_read(
    engine: Engine,
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
    budget: float,
    ahead: bool,
    forced: tuple[int, ...],
) -> None:
    """Where no selection needs what the token makes of the model."""
    order: list[str] = []
    for owner, name in [(Decoder, "step"), (Sequence, "push")]:
        whole = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *a, _do=whole, _name=name, **k: (order.append(_name), _do(*a, **k))[1],
        )
    request = Request(prefix=prefix, suffix=SUFFIX, budget=budget)
    one(engine, request, max_tokens=4, forced_ids=forced)
    steps = ["step", "step", "push", "step", "push", "push"] if ahead else 3 * ["step", "push"]
    assert order == ["push", *steps]


def test_what_was_dispatched_ahead_goes_on_with_the_rows_that_are_left(
    engine: Engine, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end by a token of theirs, which no length foretells; others move, or join."""
    requests = [Request(prefix=prefix, suffix=[i, 7], budget=1.0) for i in range(5)]
    ends = [5, 3, 24, 9, 4]

    def texts(wide: Engine, stops: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(max_tokens=24, seed=i, temperature=1.0, stop_token_ids=(stop,))
            for i, stop in enumerate(stops)
        ]
        with wide.generate(requests[:4], params[:4]) as stream:
            next(stream)
            later = wide.generate(requests[4], params[4])
            found = [*stream.results(), *later.results()]
        return [each.token_ids.tolist() for each in found]

    with engine.variant(dataclasses.replace(engine.config, max_batch=4)) as wide:
        never = texts(wide, [SMALL.vocab_size] * 5)
        stops = [ids[end - 1] for ids, end in zip(never, ends, strict=True)]
        ahead = texts(wide, stops)
        monkeypatch.setattr(DecodeBatches, "_following", lambda *_: None)
        assert texts(wide, stops) == ahead
    lengths = [len(ids) for ids in ahead]
    assert len(set(lengths)) > 3 and lengths[1] <= 3 and max(lengths) > 9


def test_a_fault_of_those_that_run_is_not_of_those_that_join(
    engine: Engine, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that joins has the others read what was dispatched ahead first."""
    request = Request(prefix=prefix, suffix=SUFFIX, budget=1.0)
    alone = one(engine, request, max_tokens=5).token_ids.tolist()
    read = DecodeBatches._read

    def faulty(self: DecodeBatches, *args: Any, further: bool = True) -> None:
        if not further:
            raise ValueError("a fault")
        read(self, *args)

    monkeypatch.setattr(DecodeBatches, "_read", faulty)
    with engine.generate(request, SamplingParams(max_tokens=800)) as stream:
        next(stream)
        assert one(engine, request, max_tokens=5).token_ids.tolist() == alone
        (failed,) = stream.results()
    assert str(failed.error) == "a fault"
    assert engine.stats().pinned_packs == 0


def test_seeds_decide_what_is_sampled(engine: Engine, prefix: Prefix) -> None:
    request = Request(prefix=prefix, suffix=SUFFIX, budget=0.2)
    first, again, other = (
        one(engine, request, max_tokens=8, temperature=1.5, seed=seed).token_ids.tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_stop_tokens_end_it(engine: Engine, prefix: Prefix) -> None:
    request = Request(prefix=prefix, suffix=SUFFIX, budget=1.0)
    free = one(engine, request, max_tokens=20).token_ids.tolist()
    stop = free[6]
    got = one(engine, request, max_tokens=20, stop_token_ids=(stop,))
    assert got.token_ids.tolist() == free[: free.index(stop) + 1]
    assert got.finish_reason == "stop"


def test_tokens_come_one_by_one(engine: Engine, prefix: Prefix) -> None:
    requests = [Request(prefix=prefix, suffix=[i], id=str(i)) for i in range(2)]
    with engine.generate(requests, SamplingParams(max_tokens=5)) as stream:
        events = list(stream)
    for index, generation in enumerate(stream.results()):
        mine = [event for event in events if event.index == index]
        assert [event.token_id for event in mine[:-1]] == generation.token_ids.tolist()
        assert mine[-1].generation is generation
        assert {event.request.id for event in mine} == {str(index)}


def test_a_running_text_can_be_cancelled(engine: Engine, prefix: Prefix) -> None:
    request = Request(prefix=prefix, suffix=SUFFIX)
    stream = engine.generate(request, SamplingParams(max_tokens=1500))
    seen = [event.token_id for event in itertools.islice(stream, 3)]
    stream.cancel()
    (generation,) = stream.results()
    assert generation.finish_reason == "cancelled"
    assert generation.token_ids.tolist()[:3] == seen
    assert len(generation.token_ids) < 1500


def test_a_deadline_ends_a_text_with_what_there_is(engine: Engine, prefix: Prefix) -> None:
    one(engine, Request(prefix=prefix, suffix=SUFFIX), max_tokens=2)  # compiles
    request = Request(prefix=prefix, suffix=SUFFIX, deadline_s=1.0)
    stream = engine.generate(request, SamplingParams(max_tokens=1500))
    next(stream)
    engine._scheduler.call(lambda: time.sleep(1.0))  # however fast the others would be
    (late,) = stream.results()
    late.raise_for_error()
    assert late.finish_reason == "deadline"
    assert 0 < len(late.token_ids) < 1500


@pytest.mark.parametrize("length", [140, 128, 7])
def test_turns_are_appended_and_never_computed_again(engine: Engine, length: int) -> None:
    history = engine.ingest(tokens(length, length))
    for turn in range(3):
        request = Request(prefix=history, suffix=[turn, 5], budget=1.0)
        (said,) = engine.generate(request, SamplingParams(max_tokens=9), keep_kv=True).results()
        before, history = history, engine.append(said)
        assert history.tokens.tolist() == [
            *before.tokens.tolist(), turn, 5, *said.token_ids.tolist(),
        ]  # fmt: skip
    assert len(history.spans) > 1 or length < 16
    request = Request(prefix=history, suffix=[9], budget=1.0)
    (result,) = engine.reprefill([request])
    assert scale_error(result.logits, engine.recompute(request).logits) < TIGHT
    assert engine.append(said) == history
    assert engine.ingest(history.tokens) == history


def test_texts_that_cannot_fit_are_refused_alone(engine: Engine, prefix: Prefix) -> None:
    requests = [Request(prefix=prefix, suffix=SUFFIX), Request(prefix="nowhere", suffix=SUFFIX)]
    sampling = [SamplingParams(max_tokens=4000), SamplingParams()]
    long, unknown = engine.generate(requests, sampling).results()
    assert isinstance(long.error, ContextOverflow) and "4000 new" in str(long.error)
    assert isinstance(unknown.error, CkvError)
    with pytest.raises(ContextOverflow):
        _ = long.text


def test_a_running_text_outlives_its_page_tables(
    engine: Engine, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_prefixes, "MOST_KNOWN", 1)
    config = dataclasses.replace(engine.config, device_cache_bytes=2**14, host_cache_bytes=0)
    request = Request(prefix=prefix, suffix=SUFFIX, budget=0.6)
    sampling = SamplingParams(max_tokens=40)
    with engine.variant(config) as small:
        (alone,) = small.generate(request, sampling).results()
        others = [small.ingest(tokens(140, seed)) for seed in (50, 51)]
        stream = small.generate(request, sampling)
        next(stream)
        for other in others * 3:
            small.reprefill([Request(prefix=other, suffix=[1])])
        (beside,) = stream.results()
        (after,) = small.generate(request, sampling).results()
    assert beside.token_ids.tolist() == after.token_ids.tolist() == alone.token_ids.tolist()


def test_texts_wait_for_each_others_device_slots(engine: Engine, prefix: Prefix) -> None:
    packs = prefix.num_chunks * engine.layout.groups
    config = dataclasses.replace(
        engine.config,
        device_cache_bytes=0,
        host_cache_bytes=0,
        prefetch_device_bytes=(packs + 4) * engine.layout.pack_bytes,
    )
    other = engine.ingest(tokens(140, 60))
    requests = [Request(prefix=p, suffix=SUFFIX, budget=1.0) for p in (prefix, other, prefix)]
    sampling = SamplingParams(max_tokens=20)
    with engine.variant(config) as tight:
        together = tight.generate(requests, sampling).results()
        first = tight.reprefill([dataclasses.replace(requests[1], deadline_s=60.0)])[0]
    for request, generation in zip(requests, together, strict=True):
        (alone,) = engine.generate(request, sampling).results()
        assert generation.token_ids.tolist() == alone.token_ids.tolist()
    assert first.token_id == together[1].token_ids[0]


def test_baselines_serve_first_tokens_only(engine: Engine, prefix: Prefix) -> None:
    with engine.variant(EngineConfig(system="as-lru", dtype="float32")) as baseline:
        stored = baseline.ingest(prefix.tokens[:32])
        assert isinstance(one(baseline, Request(prefix=stored, suffix=SUFFIX)).error, ValueError)


def test_logprobs_are_the_models_own(engine: Engine, prefix: Prefix) -> None:
    request = Request(prefix=prefix, suffix=SUFFIX)
    plain = SamplingParams(max_tokens=4, temperature=0.7, top_k=5, seed=3)
    sampling = dataclasses.replace(plain, logprobs=2)
    (first,) = engine.reprefill([request])
    events = list(stream := engine.generate([request] * 2, [sampling, plain]))
    told, silent = stream.results()
    assert told.token_ids.tolist() == silent.token_ids.tolist()
    assert silent.completion().logprobs == ()
    found = told.completion().logprobs
    assert len(found) == 4
    assert [e.logprobs for e in events if e.token_id is not None and e.index == 0] == list(found)
    expected = torch.log_softmax(torch.from_numpy(first.logits.copy()).double(), 0)
    assert found[0].token == pytest.approx(float(expected[told.token_ids[0]]), abs=TIGHT)
    values, ids = torch.topk(expected, 2)
    assert [token for token, _ in found[0].top] == ids.tolist()
    assert [value for _, value in found[0].top] == pytest.approx(values.tolist(), abs=TIGHT)
    with pytest.raises(ValueError, match="logprobs"):
        SamplingParams(logprobs=21)


def test_kv_that_was_stored_meanwhile_is_not_stored_again(engine: Engine) -> None:
    text = tokens(100, 70)
    requests = [Request(prefix=text, suffix=tokens(20, seed), budget=1.0) for seed in (71, 72)]
    first, second, third = engine.generate(
        [*requests, requests[0]], SamplingParams(max_tokens=5), keep_kv=[True, True, False]
    ).results()
    assert third.completion().kv is None
    alone = engine.submit(requests[0], SamplingParams(max_tokens=2)).result()
    assert isinstance(alone, Generation) and alone.completion().kv is None
    one, two = engine.append(first), engine.append(second)
    assert one.spans[0].segment_id == two.spans[0].segment_id
    assert two.spans[0].num_chunks == 100 // 16
    assert len(two.spans) == 2
    stored = engine.store.prefix(two.id)
    asked = Request(prefix=stored, suffix=SUFFIX, budget=1.0)
    (over,) = engine.reprefill([asked])
    assert scale_error(over.logits, engine.recompute(asked).logits) < TIGHT


def test_stop_strings_need_a_tokenizer(engine: Engine, prefix: Prefix) -> None:
    generation = one(engine, Request(prefix=prefix, suffix=SUFFIX), stop=("\n",))
    with pytest.raises(ValueError, match="no tokenizer"):
        generation.raise_for_error()
