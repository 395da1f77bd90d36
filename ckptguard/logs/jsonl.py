"""JSON lines: one object a step, whatever the keys are called."""

from __future__ import annotations

from ckptguard.logs._base import parse_json, row_of, whole
from ckptguard.model import LogRow


class JsonLines:
    """`*.jsonl`. Rows of another kind (events, evaluations) are kept where they name a step; junk lines are skipped."""

    name = "jsonl"

    def claims(self, name: str) -> bool:
        return name.endswith((".jsonl", ".ndjson"))

    def rows(self, data: bytes) -> tuple[LogRow, ...]:
        """Every line that names a step, in the order of the file. Never raises."""
        rows = []
        for line in data.splitlines():
            values = parse_json(line) if line.lstrip().startswith(b"{") else None
            if isinstance(values, dict):
                row = row_of(values, span=max(1, whole(values.get("span")) or 1))
                if row is not None:
                    rows.append(row)
        return tuple(rows)
