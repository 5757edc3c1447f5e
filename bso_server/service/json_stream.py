"""A JSON object that is read in pieces: what it holds is handed on as soon as it is there, and not kept.

Values are the standard library's, which reads ``NaN`` and numbers without end for what they are, so that the model can
name the field that holds one. ijson, which reads in pieces too, calls that no JSON and cannot say where it stands.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

# Characters that one value may have: those of a trial with some hundred thousand reports.
_LONGEST_VALUE = 32 * 1024 * 1024

# Where a value is cut off, the decoder fails at most so many characters before, but for strings.
_LONGEST_WORD = 16

_NUMBER_GOES_ON = ".eE+-0123456789"

_decoder = json.JSONDecoder()


class MalformedJsonError(ValueError):
    """The text is no JSON, or has a value that is too large to be read."""


class NotAnObjectError(ValueError):
    """The text is JSON and no object, or empty."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the object, but for its list."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class ListBegin:
    """The list begins; its elements follow."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element of the list."""

    value: Any


Part = Field | ListBegin | Element


class ObjectReader:
    """Reads a JSON object of which one field holds a list that may be long.

    Args:
        list_name: That field.
    """

    def __init__(self, list_name: str) -> None:
        self._list_name = list_name
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text, self._at, self._is_whole = "", 0, False
        self._parts = self._object()

    def feed(self, piece: bytes) -> list[Part]:
        """The parts that end with this piece of the text; an empty piece is the end.

        Raises:
            MalformedJsonError: It is no JSON.
            NotAnObjectError: It is something else.
        """
        try:
            self._text = self._text[self._at :] + self._decode(piece, not piece)
        except UnicodeDecodeError as error:
            raise MalformedJsonError(str(error)) from error
        self._at, self._is_whole = 0, not piece
        parts: list[Part] = []
        for part in self._parts:
            if part is None:
                break
            parts.append(part)
        return parts

    # The generators below yield None where the text so far is too short, and go on when there is more.

    def _object(self) -> Generator[Part | None, None, None]:
        if not (yield from self._takes("{")):
            if self._at < len(self._text):
                yield from self._value()
            raise NotAnObjectError
        if not (yield from self._takes("}")):
            while True:
                name = yield from self._value()
                yield from self._expect(":")
                if name == self._list_name and (yield from self._takes("[")):
                    yield ListBegin()
                    yield from self._list()
                else:
                    yield Field(str(name), (yield from self._value()))
                if not (yield from self._takes(",")):
                    break
            yield from self._expect("}")
        if (yield from self._next()):
            raise MalformedJsonError("something follows the end of the object")

    def _list(self) -> Generator[Part | None, None, None]:
        if (yield from self._takes("]")):
            return
        while True:
            yield Element((yield from self._value()))
            if not (yield from self._takes(",")):
                break
        yield from self._expect("]")

    def _value(self) -> Generator[None, None, Any]:
        yield from self._next()
        # Each attempt reads the value from its beginning, so that there must be twice as much before the next one.
        least = 0
        while True:
            length = len(self._text) - self._at
            if length >= least or self._is_whole:
                try:
                    value, end = _decoder.raw_decode(self._text, self._at)
                    # A number may go on, also where it was cut off behind its point or in its exponent.
                    if self._is_whole or (end < len(self._text) and self._text[end] not in _NUMBER_GOES_ON):
                        self._at = end
                        return value
                except (ValueError, RecursionError) as error:
                    if self._is_whole or not _is_cut_off(error, self._text):
                        raise MalformedJsonError(str(error)) from error
                least = 2 * length
            if length > _LONGEST_VALUE:
                raise MalformedJsonError(f"a value is longer than {_LONGEST_VALUE} characters")
            yield None

    def _next(self) -> Generator[None, None, str]:
        """The next character that is no blank; nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\n\r":
                self._at += 1
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            yield None

    def _takes(self, mark: str) -> Generator[None, None, bool]:
        """True if this character is next; it is then done with."""
        is_next = (yield from self._next()) == mark
        self._at += is_next
        return is_next

    def _expect(self, mark: str) -> Generator[None, None, None]:
        if not (yield from self._takes(mark)):
            found = self._text[self._at : self._at + 1]
            raise MalformedJsonError(f"{mark!r} is expected, and {f'{found!r} is there' if found else 'the text ends'}")


def _is_cut_off(error: Exception, text: str) -> bool:
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos >= len(text) - _LONGEST_WORD or error.msg.startswith("Unterminated string")
