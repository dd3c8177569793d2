"""Several stored documents in one request, in any order: each moved to its place, the most needed
of it computed again.

A document's keys and values know nothing of the documents before it. Keys are rotated to their new
places, which is exact; what documents should know of each other is computed again for a share of
the tokens (CacheBlend's frame, Yao et al., EuroSys 2025): the first of each document (EPIC's
choice) and those that the question attends to most (ProphetKV's).
"""
