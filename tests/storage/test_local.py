"""The local store keeps the contract of all stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptguard.ports import Store
from ckptguard.storage.local import LocalStore
from ckptguard.testing import MakeStore, WritableStoreContract


class TestLocalStore(WritableStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        def make(files: Mapping[str, bytes]) -> Store:
            for key, data in files.items():
                path = tmp_path / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            return LocalStore(tmp_path)

        return make
