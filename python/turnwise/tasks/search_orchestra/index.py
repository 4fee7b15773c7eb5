"""Search passages with BM25, through the library ``bm25s``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.tasks.search_orchestra.corpus import Passage


class SearchIndex:
    """Finds passages by words (Okapi BM25 in Lucene's form, k1 1.5, b 0.75; English stop words are ignored).

    Titles count as text. Raises ``ImportError`` if ``bm25s`` is missing.

    Example: ``SearchIndex([Passage("dun", "The river Dun."), Passage("osk", "A province.")]).search("river", 1)``
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        try:
            import bm25s
        except ImportError:
            raise ImportError("search needs bm25s: pip install 'turnwise[search]'") from None
        if not passages:
            raise ValueError("passages=(): expected at least one")
        self.passages = tuple(passages)
        self._bm25s: Any = bm25s
        self._index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        self._index.index(self._tokens([f"{title} {text}" for title, text in passages]), show_progress=False)
        self._words = set(self._index.vocab_dict)

    def search(self, query: str, k: int) -> list[Passage]:
        """Find up to ``k`` passages that share a word with ``query``, best first. Ties keep the passages' order."""
        (words,) = self._tokens([query], return_ids=False)
        known = [word for word in words if word in self._words]
        if not known:
            return []
        scores = np.asarray(self._index.get_scores(known))
        ranked = np.argsort(-scores, kind="stable")[:k]
        return [self.passages[place] for place in ranked if scores[place] > 0]

    def _tokens(self, texts: list[str], **options: Any) -> Any:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False, **options)
