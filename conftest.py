"""The tests of the builder and of the packages beside it share fixtures."""

import signal

pytest_plugins = ["tests.support.fixtures"]

# A job in the background ignores SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
