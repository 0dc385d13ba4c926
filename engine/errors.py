"""What a person can mend: shown as one line, exit code 2."""


class InputError(ValueError):
    """A request that cannot be carried out as given. The message is one line: needed, came, what to do."""
