"""CSV files with a header line, as Lightning's CSVLogger, Keras and most home-made loggers write them."""

from __future__ import annotations

import csv
import io

from ckptguard.logs._base import number, row_of
from ckptguard.model import LogRow


class Csv:
    """`*.csv`. A column for every metric; an empty cell means that the row has none of it."""

    name = "csv"

    def claims(self, name: str) -> bool:
        return name.endswith((".csv", ".tsv"))

    def rows(self, data: bytes) -> tuple[LogRow, ...]:
        """Every line that names a step, in the order of the file. Never raises."""
        text = data.decode("utf-8-sig", errors="replace").replace("\0", "")
        head = text.partition("\n")[0]
        delimiter = max(",\t;", key=head.count)
        rows = []
        try:
            for record in csv.DictReader(io.StringIO(text), delimiter=delimiter):
                values = {key: _value(cell) for key, cell in record.items() if isinstance(key, str) and cell}
                row = row_of(values)
                if row is not None:
                    rows.append(row)
        except csv.Error:
            pass  # A field beyond the reader's limit: the rows before it stand.
        return tuple(rows)


def _value(cell: str) -> float | str:
    found = number(cell)
    return cell if found is None else found
