"""What one token of a text that chooses came from, and what it waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TokenTrace:
    """One token of a text that chose what it attends to: where that was, and what it waited for.

    Packs are those that the text's own windows need; times are common to the batch.
    """

    device_hits: int = 0
    """Packs that were in device slots: of the window, or cached."""
    host_hits: int = 0
    """Packs that came from host memory."""
    ssd_reads: int = 0
    """Packs that came from SSD, read ahead or now."""
    recomputed: int = 0
    """Packs of the batch that the store could not give."""
    ahead: int = 0
    """Packs of the batch that a read ahead had, or was bringing, when they were chosen."""
    unused: int = 0
    """Packs of the batch that were read ahead and given up, since nobody chose them."""
    pack_bytes: int = 0
    """Bytes of one pack."""
    attention_mass: float = 1.0
    """Share of the probe's attention that the chosen chunks hold, averaged over periods."""
    select_ms: float = 0.0
    """Waiting for choices once what they depend on was computed."""
    fetch_ms: float = 0.0
    """Waiting for packs."""
    ms: float = 0.0
    """The token as a whole."""
