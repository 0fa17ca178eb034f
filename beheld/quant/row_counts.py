"""Few distinct numbers of rows for products on a CPU, so that libraries compile and cache few of them."""

from __future__ import annotations

# From this many rows on, a product takes long.
MANY_ROWS = 512


def padded_rows(rows: int) -> int:
    """Return the number of rows to which `rows` is padded.

    It is `rows` itself up to 16, then one of 8 sizes per doubling, and one of 16 from `MANY_ROWS` on, where a product
    takes long.

    oneDNN compiles a product for each number of rows, and PyTorch and oneDNN cache a thousand of them: 0.6 MiB each
    with torch 2.15, which is half a gigabyte after prompts of two hundred lengths.
    """
    if rows <= 16:
        return rows
    return rows + -rows % row_step(rows)


def row_step(rows: int) -> int:
    """Return the step between padded sizes near `rows`."""
    return 1 << (rows.bit_length() - (4 if rows < MANY_ROWS else 5))
