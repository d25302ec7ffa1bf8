"""What a person did wrong and can mend."""


class UserError(ValueError):
    """Bad input: the message is one line that names the file or key, what was found, and the fix.

    The command line prints it without a traceback and exits with 2. Everything else that is raised
    is a defect of ours or of the machine, and exits with 1.
    """
