"""What a person did wrong and can mend, and a machine that is too small."""


class UserError(ValueError):
    """Bad input: the message is one line that names the file or key, what was found, and the fix.

    The command line prints it without a traceback and exits with 2. Everything else that is raised
    is a defect of ours or of the machine, and exits with 1.
    """


class MemoryExhaustedError(RuntimeError):
    """Memory ran out: the message is one line that names settings that need less.

    The command line treats it as a UserError; benchmarks make a row of it and go on.
    """


# as CUDA's, MPS's and the CPU's allocators say it, cuBLAS and cuDNN, C++ and the system
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate",
    "status_alloc_failed",
    "bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out."""
    if isinstance(error, MemoryError | MemoryExhaustedError):
        return True
    text = str(error).lower()
    return not isinstance(error, UserError) and any(sign in text for sign in OUT_OF_MEMORY)
