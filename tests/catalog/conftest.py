"""Every test of the catalog runs on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptguard.catalog import Catalog, open_catalog


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalog.db'}"
    database: str = request.getfixturevalue("postgres").database()
    return database


@pytest.fixture
def catalog(url: str) -> Iterator[Catalog]:
    opened = open_catalog(url)
    yield opened
    opened.close()
