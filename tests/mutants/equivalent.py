"""Changes that no test can notice, each with the reason: nothing that anybody sees differs."""

from __future__ import annotations

from tests.mutants.draw import Mutant

REASONS: dict[tuple[str, str, str], str] = {
    (
        "storage/probe_pages.py",
        "core/ReplaceComparisonOperator_Eq_LtE",
        "return first % most == 0 and (end % most == 0 or end == last) ~0 @41 #0",
    ): "a remainder is never less than 0",
    (
        "ckv_jax/pipeline/choices.py",
        "core/NumberReplacer",
        "sources = [member.choosers[0].source for member in self._members] ~0 @27 #1",
    ): "the last row instead of the first: all rows of a member stand on one prefix",
    (
        "ckv_jax/pipeline/decode.py",
        "core/NumberReplacer",
        "at = np.array([row.length if row else 0 for row in self.rows], np.int32) ~0 @38 #1",
    ): "where no row is, what is computed means nothing, wherever it is written",
    (
        "ckv_jax/reads/packs.py",
        "core/ReplaceBinaryOperator_Mul_Div",
        "def _make_room(self, n: int, *, wait: bool) -> None: ~0 @29 #0",
    ): "a private function may be called in more ways; nobody does",
    (
        "storage/bits_table.py",
        "core/ReplaceComparisonOperator_Eq_LtE",
        "widths = [bits for bits in BITS if layout.head_dim % (8 // bits) == 0] ~0 @65 #0",
    ): "a remainder is never less than 0",
    (
        "storage/chain.py",
        "core/ReplaceFalseWithTrue",
        'data = tokens.astype("<i4", copy=False).tobytes() ~0 @33 #0',
    ): "the bytes are copied anyway",
    (
        "ckv_jax/rivals/importance.py",
        "core/ReplaceTrueWithFalse",
        "for wanted, found in zip(best, held, strict=True) ~0 @44 #0",
    ): "both have a row for each layer",
    (
        "storage/digest/writer.py",
        "core/ReplaceFalseWithTrue",
        "empty.flags.writeable = False ~0 @24 #0",
    ): "it has no element that could be written",
    (
        "storage/digest/data.py",
        "core/NumberReplacer",
        "values = np.nan_to_num(values, nan=0.0, posinf=1e30, neginf=-1e30) ~0 @61 #0",
    ): "1e30 + 1 is 1e30",
    (
        "ckv_jax/selection/two_stages.py",
        "core/NumberReplacer",
        "if rows[0].shape[0] == 1: ~0 @8 #0",
    ): "all arrays have as many rows",
    (
        "ckv_jax/selection/two_stages.py",
        "core/ReplaceComparisonOperator_Eq_LtE",
        "if rows[0].shape[0] == 1: ~0 @20 #0",
    ): "there is a row at least",
    (
        "storage/index/database.py",
        "core/ReplaceComparisonOperator_Eq_Is",
        'if db.execute("PRAGMA user_version").fetchone()[0] == self._version: ~0 @51 #0',
    ): "whole numbers so small are one object each",
    (
        "ckv_jax/serving/running.py",
        "core/NumberReplacer",
        "spent_ms = (time.perf_counter_ns() - began) / 1e6 ~0 @46 #1",
    ): "a millionth of a measured time",
    (
        "ckv_jax/selection/base.py",
        "core/ReplaceComparisonOperator_Eq_GtE",
        'value = jnp.where(real, scores, 0.0 if pool == "mean" else -jnp.inf) ~0 @44 #0',
    ): "of the names that come here only mean is no less than mean",
}
"""(file, operator, place) -> why."""


def reason(mutant: Mutant) -> str | None:
    """Why a change is none; None if it is one."""
    return REASONS.get((mutant.file, mutant.operator, mutant.place))
