"""What a command cannot go on with, as one line for the terminal."""


class Refusal(Exception):  # noqa: N818 - not an error of ours
    """The caller asked for what cannot be done; the message says what would work."""
