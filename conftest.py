"""The tests of the builder and of the packages beside it share fixtures."""

pytest_plugins = ["tests.support.fixtures"]
