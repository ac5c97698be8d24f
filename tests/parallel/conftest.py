from __future__ import annotations

from collections.abc import Iterator

import pytest

from labsupport import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    """Two ranks that all tests of this folder share: every test leaves them usable."""
    with Ranks(2, device="cpu", threads_per_rank=1, collective_timeout_s=10) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    """Four ranks, likewise."""
    with Ranks(4, device="cpu", threads_per_rank=1, collective_timeout_s=20) as ranks:
        yield ranks
