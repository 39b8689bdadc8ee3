"""The one exception that people see: a sentence saying what is wrong, where, and what to do."""


class InputError(Exception):
    """Wrong input or usage. Programs print its text as one line and exit with code 2."""


class CheckFailed(Exception):
    """The thing that was checked is not so. Programs print its text as one line and exit with code 1."""
