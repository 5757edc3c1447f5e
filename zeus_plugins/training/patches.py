"""Changes to other people's objects that can be taken back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


class Patches:
    """Remembers what it changes, and undoes it in reverse order. Keeps no changed object alive."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, target: object, name: str, value: object) -> None:
        """Set an attribute past the class's own ``__setattr__``, which for a DataLoader forbids its batch size.

        Raises:
            AttributeError: It is a read-only property.
        """
        was_own = name in vars(target)
        before = getattr(target, name, None)
        object.__setattr__(target, name, value)
        reference = weakref.ref(target)

        def undo() -> None:
            alive = reference()
            if alive is None:
                return
            if not was_own and name in vars(alive):
                # Deleting it uncovers what the class provides, such as the method that a patched one hides.
                object.__delattr__(alive, name)
            else:
                object.__setattr__(alive, name, before)

        self._undo.append(undo)

    def set_item(self, target: dict[str, Any], key: str, value: object) -> None:
        """Set an item; a new one is removed again."""
        if key in target:
            before = target[key]
            self._undo.append(lambda: target.__setitem__(key, before))
        else:
            self._undo.append(lambda: target.pop(key, None))
        target[key] = value

    def extend(
        self,
        target: object,
        name: str,
        *,
        first: Callable[[], None] | None = None,
        then: Callable[[Any], object] | None = None,
    ) -> None:
        """Have a method of this object call `first` before it runs and `then` with what it returned, each time."""
        method = getattr(target, name)

        @functools.wraps(method)
        def extended(*args: Any, **kwargs: Any) -> Any:
            if first is not None:
                first()
            result = method(*args, **kwargs)
            if then is not None:
                then(result)
            return result

        self.set_attribute(target, name, extended)

    @property
    def has_changes(self) -> bool:
        """True if there is something to undo."""
        return bool(self._undo)

    def include(self, others: Patches) -> None:
        """Undo these, too; they may be undone before."""
        self._undo.append(others.undo)

    def undo(self) -> None:
        """Take every change back; safe to call again."""
        while self._undo:
            self._undo.pop()()
