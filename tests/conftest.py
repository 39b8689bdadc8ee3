"""What all tests need."""

import signal

# A shell starts background jobs with interrupts ignored, and children inherit that: Ctrl-C could not be tested in them.
signal.signal(signal.SIGINT, signal.default_int_handler)
