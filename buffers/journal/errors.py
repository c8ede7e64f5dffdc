"""What can go wrong with a journal. Every message says what is wrong, where, and what to do."""


class JournalError(Exception):
    """The journal cannot be opened, read or written."""


class JournalInUse(JournalError):
    """Another job has the journal open."""


class JournalDamaged(JournalError):
    """What the journal holds is not what was put into it."""


class OwnershipError(JournalError):
    """A group is not where the caller takes it to be: two would own it, or nobody."""
