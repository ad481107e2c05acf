"""The one exception a person ever sees: their mistake, told in one sentence.

Everything else that is raised is a fault of ours and keeps its traceback.
"""


class UserError(Exception):
    """What is wrong, where, and what to do about it, in one sentence.

    The command line prints the message on stderr and exits with code 2; callers from Python
    catch it like any exception.
    """
