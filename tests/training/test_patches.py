from __future__ import annotations

import gc
import weakref

from zeus_plugins.training.patches import Patches


class Thing:
    size = 16

    def __init__(self) -> None:
        self.own = 16

    def method(self) -> str:
        return "original"


class WithProperties:
    def __init__(self) -> None:
        self._size = 16

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size


def test_attributes_of_the_class_reappear_after_undo() -> None:
    thing, patches = Thing(), Patches()
    patches.set_attribute(thing, "size", 48)
    patches.set_attribute(thing, "method", lambda: "patched")
    patches.set_attribute(thing, "fresh", 1)
    assert (thing.size, thing.method()) == (48, "patched")
    patches.undo()
    assert (thing.size, thing.method(), hasattr(thing, "fresh")) == (16, "original", False)
    assert vars(thing) == {"own": 16}


def test_property_is_set_and_restored_through_the_setter() -> None:
    thing, patches = WithProperties(), Patches()
    patches.set_attribute(thing, "size", 48)
    assert thing._size == 48
    patches.undo()
    assert vars(thing) == {"_size": 16}


def test_changes_of_an_attribute_are_undone_in_reverse_order() -> None:
    thing, patches = Thing(), Patches()
    for size in (24, 48):
        patches.set_attribute(thing, "own", size)
        patches.set_attribute(thing, "size", size)
    patches.undo()
    assert (thing.own, thing.size) == (16, 16)


def test_method_of_a_single_object_is_extended_until_undone() -> None:
    thing, other, patches = Thing(), Thing(), Patches()
    seen: list[str] = []
    patches.extend(thing, "method", first=lambda: seen.append("first"), then=seen.append)
    patches.extend(thing, "method", then=seen.append)
    assert (thing.method(), other.method()) == ("original", "original")
    assert seen == ["first", "original", "original"]
    patches.undo()
    thing.method()
    assert len(seen) == 3
    assert vars(thing) == {"own": 16}


def test_item_of_a_mapping_is_restored() -> None:
    hyperparameters, patches = {"batch_size": 16, "depth": 3}, Patches()
    patches.set_item(hyperparameters, "batch_size", 48)
    patches.set_item(hyperparameters, "zeus/batch_size", 48)
    assert hyperparameters == {"batch_size": 48, "depth": 3, "zeus/batch_size": 48}
    patches.undo()
    assert hyperparameters == {"batch_size": 16, "depth": 3}


def test_second_undo_preserves_later_changes() -> None:
    thing, patches = Thing(), Patches()
    patches.set_attribute(thing, "own", 48)
    assert thing.own == 48
    patches.undo()
    assert thing.own == 16
    thing.own = 5
    patches.undo()
    assert thing.own == 5


def test_changed_objects_can_be_garbage_collected() -> None:
    thing, patches = Thing(), Patches()
    patches.set_attribute(thing, "own", 48)
    alive = weakref.ref(thing)
    del thing
    gc.collect()
    assert alive() is None
    patches.undo()
