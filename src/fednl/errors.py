"""The errors a user can cause, each with the exit code of the command line.

A message is one sentence: the key or file, the value, the remedy. It never holds private text, so it may
travel from a client to the server.
"""

from __future__ import annotations


class FednlError(Exception):
    """Anything a user can cause and mend; the command line prints the message and leaves with `exit_code`."""

    exit_code = 1


class SettingsError(FednlError):
    """An argument or a setting is wrong, or a file that was named does not exist."""

    exit_code = 2


class DataError(FednlError):
    """The data cannot be used as it is."""


class BackboneError(FednlError):
    """The model cannot be loaded, recognised or adapted."""


class NonFiniteError(BackboneError):
    """A model came to NaN or infinity; a conversation with memory is as it was before the pass."""


class CheckpointError(FednlError):
    """A checkpoint or a saved set of rules is missing, torn, or belongs to something else."""


class MessageError(FednlError):
    """A message between client and server is refused.

    Args:
        code: the short reason that is counted and reported, for example `"non-finite"`.
        message: one sentence for a person.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Interrupted(FednlError):
    """The user stopped the run; what was done is saved and can be resumed."""
