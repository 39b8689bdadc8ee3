"""`python -m ui` is `dspark demo`."""

import sys

from local_runner.cli import app

if __name__ == "__main__":
    app(["demo", *sys.argv[1:]], prog_name="dspark")
