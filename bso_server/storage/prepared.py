"""Statements that are compiled once for each kind of database and then handed to its driver.

What a request asks of the database is a handful of statements that are always the same. SQLAlchemy looks each of them
up in its cache of compiled statements, makes a context for it and a result with its columns, which costs several times
what SQLite takes to run it. `Prepared` keeps the compiled text, the order of its parameters, and the conversions
between Python's values and the driver's, all of them SQLAlchemy's, and leaves out what is between.

Errors are SQLAlchemy's, too. Where somebody listens to statements or has them logged, they go through SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NoReturn

from sqlalchemy import CompoundSelect, Connection, Delete, Dialect, Insert, Select, SelectBase, Update
from sqlalchemy.engine.interfaces import DBAPICursor
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

_Converter = Callable[[Any], Any]
_Converters = tuple[tuple[int, _Converter], ...]


@dataclass(slots=True)
class _Plan:
    """A statement as one kind of database takes it.

    Attributes:
        sql: Its text, with the driver's placeholders.
        values_of: Picks the values of the placeholders, in order, from parameters by name.
        binds: Converters of these values, by position, where one is needed.
        results: Converters of the columns of its rows, likewise; None before its first rows.
    """

    sql: str
    values_of: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    binds: _Converters
    results: _Converters | None = None


class Prepared:
    """A statement of the server's own, made once and kept: its compiled forms are remembered by its identity.

    Its parameters have names; some may have values already. A list of values (``IN``) must be spelled out, one
    parameter for each value. An insertion names all columns, unless it is said which it `inserts`.
    """

    def __init__(
        self,
        statement: Select[Any] | CompoundSelect[Any] | Insert | Update | Delete,
        *,
        inserts: Sequence[str] | None = None,
    ) -> None:
        self._statement = statement
        self._inserts = inserts
        self._columns = statement.selected_columns if isinstance(statement, SelectBase) else ()
        self._names = tuple(str(column.key) for column in self._columns)

    def rows(self, connection: Connection, parameters: Mapping[str, Any]) -> list[Sequence[Any]]:
        """The rows of a query, in the order of its columns; errors as of `Connection.execute`."""
        if _is_listened_to(connection):
            return list(connection.execute(self._statement, parameters).all())
        plan = _plan(self, connection.dialect)
        cursor = _open(connection)
        try:
            cursor.execute(plan.sql, _converted(plan.values_of(parameters), plan.binds))
            rows = cursor.fetchall()
            if plan.results is None:
                plan.results = self._results(connection.dialect, cursor)
            cursor.close()
        except BaseException as error:
            _refuse(connection, cursor, plan.sql, error)
        return [_converted(row, plan.results) for row in rows]

    def mappings(self, connection: Connection, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The same, each row by the names of its columns, which must differ."""
        return [dict(zip(self._names, row, strict=True)) for row in self.rows(connection, parameters)]

    def run(self, connection: Connection, parameters: Sequence[Mapping[str, Any]]) -> int:
        """Run a statement that writes once for each of these sets of parameters; errors as of `Connection.execute`.

        The number of rows that it found, which most drivers know of one set of parameters only.
        """
        if _is_listened_to(connection):
            return connection.execute(self._statement, parameters).rowcount
        plan = _plan(self, connection.dialect)
        values = [_converted(plan.values_of(each), plan.binds) for each in parameters]
        cursor = _open(connection)
        try:
            if len(values) == 1:
                cursor.execute(plan.sql, values[0])
            else:
                cursor.executemany(plan.sql, values)
            found = cursor.rowcount
            cursor.close()
        except BaseException as error:
            _refuse(connection, cursor, plan.sql, error)
        return found

    def compiled(self, dialect: Dialect) -> _Plan:
        """The statement for this kind of database."""
        compiled = self._statement.compile(dialect=dialect, column_keys=self._inserts)
        if not isinstance(compiled, SQLCompiler) or compiled.positiontup is None:
            raise TypeError(f"{dialect.name}+{dialect.driver} takes parameters by name, which is not provided for")
        names, binds = compiled.positiontup, [compiled.binds[name] for name in compiled.positiontup]
        known = {name: bind.value for name, bind in zip(names, binds, strict=True) if not bind.required}
        return _Plan(
            str(compiled),
            _picker(names, known),
            _numbered(bind.type.dialect_impl(dialect).bind_processor(dialect) for bind in binds),
        )

    def _results(self, dialect: Dialect, cursor: DBAPICursor) -> _Converters:
        # By what the driver calls the column's type: some need none for what they convert themselves.
        described = zip(self._columns, cursor.description or (), strict=True)
        return _numbered(
            column.type.dialect_impl(dialect).result_processor(dialect, said[1]) for column, said in described
        )


def _picker(names: Sequence[str], known: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if known:
        return lambda parameters: tuple(known[name] if name in known else parameters[name] for name in names)
    # One name alone would be picked without a tuple around it.
    return itemgetter(*names) if len(names) > 1 else lambda parameters: tuple(parameters[name] for name in names)


@lru_cache(maxsize=512)
def _plan(prepared: Prepared, dialect: Dialect) -> _Plan:
    # By the dialect of the engine: what it may write depends on the version that its database has told.
    return prepared.compiled(dialect)


def _numbered(converters: Iterable[_Converter | None]) -> _Converters:
    return tuple((n, converter) for n, converter in enumerate(converters) if converter is not None)


def _converted(values: Sequence[Any], converters: _Converters) -> Sequence[Any]:
    if not converters:
        return values
    converted = list(values)
    for n, converter in converters:
        converted[n] = converter(converted[n])
    return tuple(converted)


def _is_listened_to(connection: Connection) -> bool:
    return bool(connection.dispatch.before_cursor_execute) or bool(connection.engine.echo)


def _open(connection: Connection) -> DBAPICursor:
    try:
        return connection.connection.cursor()
    except connection.dialect.loaded_dbapi.Error as error:
        _refuse(connection, None, "", error)


def _refuse(connection: Connection, cursor: DBAPICursor | None, sql: str, error: BaseException) -> NoReturn:
    """Raise what SQLAlchemy would, and give up a connection that is lost or was left in the middle of a statement."""
    dialect = connection.dialect
    driver_error = dialect.loaded_dbapi.Error
    if not isinstance(error, Exception):
        connection.invalidate(error)
        raise error
    if not isinstance(error, driver_error):
        raise error
    is_lost = not connection.closed and dialect.is_disconnect(error, connection.connection, cursor)
    if is_lost:
        connection.invalidate(error)
    raise DBAPIError.instance(
        sql, None, error, driver_error, connection_invalidated=is_lost, dialect=dialect
    ) from error
