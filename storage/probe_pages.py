"""The probe keys of a prefix as pages of a pack's size: what caches hold of them."""

from __future__ import annotations

import itertools

import numpy as np

from ckv_jax.storage.prefix import Prefix


class ProbePages:
    """Which chunks of which segment each page has; the same in every probe layer.

    A page is a run of chunks of one segment, cut at every `Layout.probe_page_chunks` of them and
    where the prefix's span begins and ends, so that prefixes that share a segment share its pages
    but for such ends.

    Attributes (N pages, M chunks of the prefix):
      span: int [N], the span of each page.
      first, chunks: int [N], its first chunk within the segment, and how many it has.
      tokens: int [N], its tokens.
      start: int [N], its first token in the prefix.
      place: int32 [M], where each chunk of the prefix is: page * `probe_page_chunks` + place in it.
    """

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix
        layout = prefix.layout
        size, most = layout.chunk_tokens, layout.probe_page_chunks
        cuts = []  # (span, first, chunks)
        for index, span in enumerate(prefix.spans):
            first, end = span.first_chunk, span.first_chunk + span.num_chunks
            inner = range((first // most + 1) * most, end, most)
            edges = [first, *inner, end]
            cuts += [(index, a, b - a) for a, b in itertools.pairwise(edges)]
        table = np.array(cuts, np.int64).reshape(-1, 3)
        self.span, self.first, self.chunks = table.T
        self.start = (np.cumsum(self.chunks) - self.chunks) * size
        self.tokens = np.minimum(self.chunks * size, prefix.num_tokens - self.start)
        page = np.repeat(np.arange(len(self)), self.chunks)
        self.place = (page * most + np.arange(len(page)) - (self.start // size)[page]).astype(
            np.int32
        )

    def __len__(self) -> int:
        """N."""
        return len(self.span)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one probe layer."""
        layout = self.prefix.layout
        return layout.probe_heads * layout.head_dim * layout.disk_dtype.itemsize

    def whole(self, page: int) -> bool:
        """Whether a page is cut by its segment alone, not by the prefix's span."""
        most = self.prefix.layout.probe_page_chunks
        first = int(self.first[page])
        end = first + int(self.chunks[page])
        last = self.prefix.spans[int(self.span[page])].segment_chunks
        return first % most == 0 and (end % most == 0 or end == last)
