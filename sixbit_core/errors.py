"""Errors for people: one line that a terminal can show, whatever stands in the file it speaks of."""

_LONGEST = 1000  # characters; a name in a hostile file can be a megabyte


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line for people."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """`text` with a mark for every character that is not to be printed, and without its middle where long."""
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    half = _LONGEST // 2
    return line if len(line) <= _LONGEST else f"{line[:half]} … {line[-half:]}"
