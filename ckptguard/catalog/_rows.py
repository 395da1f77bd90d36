"""Rows as plain dictionaries: what leaves the catalog does not know where it came from."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Executable, Insert

Row = dict[str, Any]


def rows(connection: Connection, query: Executable) -> list[Row]:
    return [dict(row) for row in connection.execute(query).mappings()]


def first(connection: Connection, query: Executable) -> Row | None:
    row = connection.execute(query).mappings().first()
    return None if row is None else dict(row)


def insert_one(connection: Connection, statement: Insert) -> int:
    """Insert one row; returns its id."""
    key = connection.execute(statement).inserted_primary_key
    assert key is not None
    return int(key[0])
