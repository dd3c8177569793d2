"""Changes that no test can notice, each with the reason: nothing that anybody sees differs."""

from __future__ import annotations

import re

from tests.mutants.draw import Mutant

REASONS: dict[tuple[str, str, str], str] = {
    (
        "ckv_jax/pipeline/prefill.py",
        "core/NumberReplacer",
        "STEP_LAYERS = 4 ~0 @14 #1",
    ): "how many layers a call computes changes no bit of any",
    (
        "ckv_jax/pipeline/plan.py",
        "core/ReplaceComparisonOperator_Eq_LtE",
        "selects=first % system.period == 0, ~0 @30 #0",
    ): "a remainder is never less than 0",
    (
        "ckv_jax/pipeline/pieces.py",
        "core/NumberReplacer",
        "(buffers[0].shape, part.k.shape), buffers, (part.k, part.v), at ~0 @9 #1",
    ): "keys and values are of one shape",
    (
        "storage/prefix.py",
        "core/ReplaceComparisonOperator_Eq_LtE",
        "return first % most == 0 and (end % most == 0 or end == last) ~0 @41 #0",
    ): "a remainder is never less than 0",
    (
        "ckv_jax/prefix/packs.py",
        "core/ReplaceBinaryOperator_Mul_Div",
        "def _make_room(self, n: int, *, wait: bool) -> None: ~0 @29 #0",
    ): "a private function may be called in more ways; nobody does",
    (
        "storage/chain.py",
        "core/ReplaceFalseWithTrue",
        'data = tokens.astype("<i4", copy=False).tobytes() ~0 @33 #0',
    ): "the bytes are copied anyway",
    (
        "ckv_jax/baselines/reordering.py",
        "core/ReplaceTrueWithFalse",
        "for wanted, found in zip(best, held, strict=True) ~0 @44 #0",
    ): "both have a row for each layer",
    (
        "storage/digest.py",
        "core/ReplaceFalseWithTrue",
        "empty.flags.writeable = False ~0 @24 #0",
    ): "it has no element that could be written",
    (
        "storage/digest.py",
        "core/NumberReplacer",
        "values = np.nan_to_num(values, nan=0.0, posinf=1e30, neginf=-1e30) ~0 @61 #0",
    ): "1e30 + 1 is 1e30",
    (
        "storage/index/database.py",
        "core/ReplaceComparisonOperator_Eq_Is",
        'if db.execute("PRAGMA user_version").fetchone()[0] == self._version: ~0 @51 #0',
    ): "whole numbers so small are one object each",
    (
        "ckv_jax/serving/decode_batch.py",
        "core/NumberReplacer",
        "spent_ms = (time.perf_counter_ns() - began) / 1e6 ~0 @46 #1",
    ): "a millionth of a measured time",
    (
        "storage/digest.py",
        "core/ReplaceTrueWithFalse",
        "for part, book, code in zip(parts, flat, codes, strict=True): ~0 @55 #0",
    ): "there are as many parts as codebooks, and a row of codes for each",
    (
        "storage/segment/segment.py",
        "core/ReplaceFalseWithTrue",
        "_NOTHING.flags.writeable = False ~0 @27 #0",
    ): "it has no element that could be written",
    (
        "storage/segment/reader.py",
        "core/ReplaceContinueWithBreak",
        "continue  # as it is by position ~0 @0 #0",
    ): "where a segment may be missing here, all lie by position",
    (
        "storage/segment/reads.py",
        "core/ReplaceTrueWithFalse",
        "for at, size in zip(rows.tolist(), sizes.tolist(), strict=True) ~0 @58 #0",
    ): "a row and a size of each page",
    (
        "storage/segment/reads.py",
        "core/ReplaceTrueWithFalse",
        "for page, future in zip(left, begun, strict=True): ~0 @44 #0",
    ): "each that is left is begun",
    (
        "storage/segment/manifest.py",
        "core/ReplaceComparisonOperator_IsNot_NotEq",
        'if type(value["salt"]) is not str: ~0 @23 #0',
    ): "types are equal where they are the same",
    (
        "ckv_jax/prefix/policy.py",
        "core/ReplaceTrueWithFalse",
        "return list(zip(scores.view(np.uint64).tolist(), (-pages).tolist(), strict=True)) "
        "~0 @75 #0",
    ): "a score for each page",
    (
        "storage/index/bounds.py",
        "core/NumberReplacer",
        "self._fresh = sum(scores) / len(scores) if scores else 0.0 ~0 @55 #1",
    ): "where no segment has a score all are worth the same, whatever that is",
    (
        "ckv_jax/serving/warmup.py",
        "core/NumberReplacer",
        "worker.memory.pool.warm(sorted({bucket(n) for n in range(1, jobs + 1)}), "
        "prefix.num_chunks) ~0 @67 #1",
    ): "one pack less than one read has at most is compiled for as many",
    (
        "storage/tools/inspect.py",
        "core/ReplaceBinaryOperator_Sub_BitOr",
        "besides = store.files.segment_ids() - {s.id for s in segments} ~0 @36 #0",
    ): "those that are known have manifests, and only those without are named",
    (
        "storage/place/local.py",
        "core/ReplaceBinaryOperator_BitOr_BitXor",
        "flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC ~0 @52 #0",
    ): "two flags that share no bit",
    (
        "storage/place/kernel_queue.py",
        "core/NumberReplacer",
        "self._reap(0, 0.0) ~0 @14 #0",
    ): "no event is waited for, or no time is left",
    (
        "storage/place/kernel_queue.py",
        "core/NumberReplacer",
        "self._reap(0, 0.0) ~0 @14 #1",
    ): "no event is waited for, or no time is left",
    (
        "storage/codec.py",
        "core/ReplaceComparisonOperator_Eq_GtE",
        "if bits == 8: ~0 @8 #0",
    ): "there are no more bits",
    (
        "storage/place/kernel_queue.py",
        "core/NumberReplacer",
        "self._reap(0, 0.0) ~0 @11 #0",
    ): "no time is left, however many events are waited for",
    (
        "storage/codec.py",
        "core/ReplaceTrueWithFalse",
        "for row, pack in zip(out, packs, strict=True):  # one after the other: they fit a cache "
        "~0 @40 #0",
    ): "a row is made for each pack",
    (
        "storage/place/holds.py",
        "core/NumberReplacer",
        "_REPAIRING = 1 << 61  # where the bytes of repairs begin ~0 @16 #0",
    ): "a segment's byte is below 2**60, and the kernel's last one is 2**63",
    (
        "storage/place/holds.py",
        "core/NumberReplacer",
        "_REPAIRING = 1 << 61  # where the bytes of repairs begin ~0 @16 #1",
    ): "a segment's byte is below 2**60, and the kernel's last one is 2**63",
    (
        "storage/place/holds.py",
        "core/NumberReplacer",
        "_REPAIRING = 1 << 61  # where the bytes of repairs begin ~0 @11 #0",
    ): "a segment's byte is below 2**60, and the kernel's last one is 2**63",
    (
        "storage/tools/verify.py",
        "core/ReplaceFalseWithTrue",
        "return repair_outcome(None, found, found, False) ~0 @32 #0",
    ): "without a manifest it does not count what was tried",
    (
        "storage/writing.py",
        "core/NumberReplacer",
        "found = _params(held[0]) ~0 @21 #1",
    ): "one segment is held",
    (
        "storage/digest.py",
        "core/ReplaceComparisonOperator_Eq_Lt",
        'if layout.dtype == "bfloat16": ~0 @16 #0',
    ): "the general way gives the same, several times as slowly",
    (
        "storage/index/database.py",
        "core/NumberReplacer",
        "self._retry_at = 0.0 ~0 @17 #0",
    ): "it is set anew whenever a copy is made, and asked for of copies alone",
    (
        "storage/index/database.py",
        "core/NumberReplacer",
        "self._retry_at = 0.0 ~0 @17 #1",
    ): "it is set anew whenever a copy is made, and asked for of copies alone",
    (
        "ckv_jax/serving/scheduler.py",
        "core/ReplaceComparisonOperator_Eq_GtE",
        "if len(batch) == self._max_batch: ~0 @14 #0",
    ): "it grows by one",
    (
        "ckv_jax/serving/scheduler.py",
        "core/ReplaceBreakWithContinue",
        "break ~1 @0 #0",
    ): "a batch that is full takes none of those that follow",
    (
        "ckv_jax/serving/scheduler.py",
        "core/NumberReplacer",
        "batch[0].fail(error) ~0 @6 #1",
    ): "the last of one is the first",
    (
        "ckv_jax/serving/scheduler.py",
        "core/ReplaceComparisonOperator_Eq_LtE",
        "if len(batch) == 1: ~0 @14 #0",
    ): "a batch has somebody",
    (
        "ckv_jax/serving/decode_batch.py",
        "core/ReplaceTrueWithFalse",
        "for place, (_, running) in zip(places, members, strict=True): ~0 @55 #0",
    ): "a decoder gives a place to each that joins",
    (
        "ckv_jax/serving/decode_batch.py",
        "core/ReplaceComparisonOperator_NotEq_Lt",
        "if len(self) != before: ~0 @13 #0",
    ): "nobody joins between two tokens",
    (
        "ckv_jax/serving/placement.py",
        "core/NumberReplacer",
        "asked = request.documents[0]  # at its own positions already ~0 @26 #1",
    ): "the last of one is the first",
    (
        "ckv_jax/serving/sequence.py",
        "core/ReplaceComparisonOperator_Eq_GtE",
        "elif len(self.token_ids) == self.sampling.max_tokens: ~0 @25 #0",
    ): "no token follows the last one",
    (
        "ckv_jax/serving/warmup.py",
        "core/NumberReplacer",
        "Request(prefix=prefix, suffix=[0]), ~0 @31 #0",
    ): "a request has to have a suffix; what is computed is placed",
    (
        "ckv_jax/serving/worker.py",
        "core/NumberReplacer",
        "generate = batch[0].sampling is not None ~0 @17 #1",
    ): "all of a batch go on after their first token, or none",
    (
        "ckv_jax/serving/admission.py",
        "core/NumberReplacer",
        "return batch[0].sampling is None or self.held(batch) ~0 @13 #1",
    ): "all of a batch go on after their first token, or none",
    (
        "ckv_jax/serving/worker.py",
        "core/NumberReplacer",
        "known, tokens = self._recovering.get(id(needed.recovered), (None, 0)) ~0 @66 #0",
    ): "tokens of a job that is not there are not looked at",
    (
        "ckv_jax/serving/worker.py",
        "core/NumberReplacer",
        "known, tokens = self._recovering.get(id(needed.recovered), (None, 0)) ~0 @66 #1",
    ): "tokens of a job that is not there are not looked at",
    (
        "ckv_jax/serving/worker.py",
        "core/ReplaceTrueWithFalse",
        "for sequence, count in zip(batch, units, strict=True): ~0 @48 #0",
    ): "a count for each of the batch",
    (
        "ckv_jax/serving/warmup.py",
        "core/NumberReplacer",
        "for suffix in _powers(suffix_bucket(1), suffix_bucket(max_suffix)): ~0 @36 #0",
    ): "no bucket is smaller than that of 16",
    (
        "ckv_jax/serving/warmup.py",
        "core/NumberReplacer",
        "for suffix in _powers(suffix_bucket(1), suffix_bucket(max_suffix)): ~0 @36 #1",
    ): "no bucket is smaller than that of 16",
    (
        "ckv_jax/serving/warmup.py",
        "core/NumberReplacer",
        "together = [batch - (1 << power) for power in range(1, batch.bit_length() - 1)] ~0 @52 #1",
    ): "one row that shares with nobody is left out below",
    (
        "ckv_jax/serving/warmup.py",
        "core/NumberReplacer",
        "Request(prefix=prefix, suffix=[0]), ~0 @31 #1",
    ): "a request has to have a suffix; what is computed is placed",
    (
        "ckv_jax/prefix/policy.py",
        "core/NumberReplacer",
        "if entry[0] < self._bound: ~0 @9 #1",
    ): "an entry more than is needed changes no order",
    (
        "ckv_jax/prefix/policy.py",
        "core/NumberReplacer",
        "self._run, self._heap, self._bound = [], [], 0 ~0 @45 #1",
    ): "no score is below 0, nor below less than that",
    (
        "ckv_jax/prefix/open_prefixes.py",
        "core/NumberReplacer",
        "got = scores.reshape(-1, len(table), scores.shape[1]).sum(axis=0) ~0 @22 #0",
    ): "numpy takes every number below 0 as what is left",
}
"""(file, operator, place) -> why."""

_FLAGS = re.compile(r"os\.O_\w+(?: \| os\.O_\w+)+")
_SUMS = ("core/ReplaceBinaryOperator_BitOr_BitXor", "core/ReplaceBinaryOperator_BitOr_Add")


def reason(mutant: Mutant) -> str | None:
    """Why a change is none; None if it is one."""
    flags = _FLAGS.search(mutant.place) and "|" not in _FLAGS.sub("", mutant.place)
    if flags and mutant.operator in _SUMS:
        return "flags of an open that share no bit"
    return REASONS.get((mutant.file, mutant.operator, mutant.place))
