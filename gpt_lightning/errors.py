"""Exceptions: user errors (exit code 2) and out-of-memory."""


class UserError(ValueError):
    """Bad input. The message is one line: the file or key, what was found, and the fix.

    The command line prints the message without a traceback and exits with 2. Any other exception is
    a defect of the program or of the machine, and exits with 1.
    """


class MemoryExhaustedError(RuntimeError):
    """Out of memory. The message is one line that names settings with a smaller need.

    The command line treats it like a UserError; benchmarks record a failed row and continue.
    """


# messages of the allocators of CUDA, MPS and the CPU, of cuBLAS and cuDNN, of C++ and the system
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate",
    "status_alloc_failed",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out."""
    if isinstance(error, MemoryError | MemoryExhaustedError):
        return True
    text = str(error).lower()
    return not isinstance(error, UserError) and any(sign in text for sign in OUT_OF_MEMORY)
