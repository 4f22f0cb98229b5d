"""The tests of the builder and of the packages beside it share fixtures."""

import gc
import signal

pytest_plugins = ["tests.support.fixtures"]

# A job in the background ignores SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The imports of all tests make no garbage. Looking for it takes 40 % of the CPU time of their collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
