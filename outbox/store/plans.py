"""Conditions written so that the planner has one good choice, whatever its statistics say.

An outbox is empty most of the time, and then suddenly is not: statistics are about another table than the one that is there.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def exactly(column: sa.ColumnElement[Any], value: Any) -> sa.ColumnElement[bool]:
    """Return `column = value`, written as a range, for a query ordered by `column, id` with a LIMIT.

    Written as an equation, the planner takes `column` out of the order; what is left, `id`, is also the order of the
    primary key, which it may then walk past everything that waits. In this form only an index on (column, id) has that order.
    """
    return sa.and_(column >= value, column <= value)


def first_id(
    row: sa.FromClause, column: sa.ColumnElement[Any], value: Any, *conditions: sa.ColumnElement[bool] | sa.TextClause
) -> sa.ScalarSelect[int]:
    """Return the lowest id among the rows with that value of `column`, as a subquery: one probe of the index on (column, id).

    Neither EXISTS, which may become a join over all that is pending, nor min(id), which may read all rows of a key.
    """
    found: sa.Select[tuple[int]] = sa.select(row.c.id).where(exactly(column, value), *conditions)
    return found.order_by(column, row.c.id).limit(1).scalar_subquery()


WALKING = dict.fromkeys(("enable_sort", "enable_incremental_sort", "jit"), "off")
"""Settings of PostgreSQL with which it walks an index up to a LIMIT, and never collects and sorts what it selects.

Of a table that has no statistics yet the planner believes that there is less than the limit, and would read all of it.
"""
