"""The fixture that the tests of Lightning's callbacks share."""

from tests.support.lightning_bench import make_bench  # noqa: F401 - pytest finds it by name
