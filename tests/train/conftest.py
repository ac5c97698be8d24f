from __future__ import annotations

from collections.abc import Iterator

import pytest

from labsupport import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two ranks that the trainer's tests share: every test leaves them usable."""
    with Ranks(2, threads_per_rank=1, collective_timeout_s=20) as ranks:
        yield ranks
