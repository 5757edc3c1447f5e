"""Changes to other objects that can be undone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


class Patches:
    """Recorded changes, which `undo` takes back in reverse order. Keeps no changed object alive."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, target: object, name: str, value: object) -> None:
        """Set an attribute without ``__setattr__``, because a DataLoader's refuses to change the batch size."""
        was_own = name in vars(target)
        before = getattr(target, name, None)
        object.__setattr__(target, name, value)
        reference = weakref.ref(target)

        def undo() -> None:
            alive = reference()
            if alive is None:
                return
            if not was_own and name in vars(alive):
                # Delete it to uncover the class's attribute, such as the method that a patched one hides.
                object.__delattr__(alive, name)
            else:
                object.__setattr__(alive, name, before)

        self._undo.append(undo)

    def set_item(self, target: dict[str, Any], key: str, value: object) -> None:
        """Set an item; `undo` restores its old value, or removes the item if it was new."""
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
        """Change the method `name` so that each call first calls `first`, and afterwards `then` with the result."""
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
        """Whether there are changes to undo."""
        return bool(self._undo)

    def include(self, others: Patches) -> None:
        """Undo the changes of `others`, too, when `undo` is called; they may have been undone before."""
        self._undo.append(others.undo)

    def undo(self) -> None:
        """Undo all changes in reverse order; safe to call again."""
        while self._undo:
            self._undo.pop()()
