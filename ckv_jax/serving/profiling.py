"""Widths of decode windows: made of what texts chose, kept for a model and system, and used."""

from __future__ import annotations

import numpy as np

from ckv_jax.cache.profile import Recorded, widths_of
from ckv_jax.cache.widths import Widths, load_widths, plain_name, save_widths
from ckv_jax.config import SystemConfig
from ckv_jax.decode.eviction import KEEP
from ckv_jax.pipeline.plan import Plan
from ckv_jax.storage.fingerprint import Fingerprint


class Profile:
    """How the windows of one engine's texts share their room. Engine thread only, but `made_of`."""

    def __init__(self, plan: Plan, system: SystemConfig, fingerprint: Fingerprint) -> None:
        choices = range(0, plan.choices, plan.parts)
        self.packs = np.array([len(plan.groups(choice)) for choice in choices])
        self.widths = Widths.even(2.0, groups=plan.periods, rows=plan.parts)
        """Of the texts that begin from now on."""
        self._parts = plan.parts
        self._system = system
        self._fingerprint = fingerprint
        self._texts: list[Recorded] | None = None
        self._name = plain_name(system.name)
        if system.decode is not None and system.widths == "profiled":
            found = load_widths(fingerprint, self._name, groups=plan.periods, rows=plan.parts)
            self.widths = found or self.widths

    def begin(self) -> None:
        """Writes down what texts choose that begin from now on."""
        self._texts = []

    def text(self) -> Recorded | None:
        """Where a text that begins is to write what it chooses."""
        if self._texts is None:
            return None
        self._texts.append(Recorded())
        return self._texts[-1]

    def end(self) -> list[Recorded]:
        """Nothing is written down from now on; what has been."""
        texts, self._texts = self._texts or [], None
        return texts

    def use(self, widths: Widths) -> None:
        """Texts that begin from now on have windows of these widths."""
        self.widths = widths

    def made_of(self, texts: list[Recorded]) -> Widths:
        """The widths that suit these texts, kept for engines to come (`save_widths`).

        Raises `ValueError` for texts or windows that nothing can be made of, OSError where nothing
        can be kept.
        """
        system = self._system
        widths = widths_of(texts, self.packs, system.window, KEEP[system.keep], rows=self._parts)
        save_widths(widths, self._fingerprint, self._name)
        return widths
