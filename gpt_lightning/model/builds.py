"""C++ builds of code compiled for CPUs: few, begun early, and kept.

Inductor writes a C++ function, a kernel, for each loop of a graph. Building it with g++ reads
PyTorch's header and links a library, which takes as long as the kernel itself. `build_by_graph`
builds the kernels of a graph together. benchmarks/speed.md has the times.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs
import torch
import torch._functorch.config
from torch import nn

from gpt_lightning.model.gpt import GPT


def prepare_builds(model: nn.Module) -> None:
    """Make PyTorch's builds for a CPU fast, and begin those that a model surely needs."""
    trust_vector_instructions()
    build_by_graph()
    build_ahead(model)


def keep_compiled_code() -> None:
    """Let compiled code survive a restart: PyTorch's own folder is in the temporary folder.

    The code is for the processor at hand (-march=native), and machines may share a home folder. A
    folder without write or execute permission leaves PyTorch's choice, as does
    TORCHINDUCTOR_CACHE_DIR.
    """
    capabilities = repr(sorted(torch.cpu.get_capabilities().items()))
    processor = hashlib.sha256(capabilities.encode()).hexdigest()[:8]
    folder = Path(platformdirs.user_cache_dir("gpt-lightning")) / "compiled" / processor
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):  # Linux has it
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def trust_vector_instructions() -> None:
    """Let Inductor take AVX-512 without test programs, which take 5 s before its first loop.

    They ask whether PyTorch was built for it, too, which its own kernels' choice tells. A compiler
    of C++20, which PyTorch's headers need, knows the instructions. AMX is younger: its test stays.
    """
    import torch._inductor.config  # chooses Inductor's folder, after keep_compiled_code has

    config = torch._inductor.config.cpp
    if config.vec_isa_ok is None and torch.backends.cpu.get_cpu_capability() == "AVX512":
        config.vec_isa_ok = True
        skip_known_tests()


@functools.cache
def skip_known_tests() -> None:
    """Skip the programs that test BF16 and VNNI, also with warm caches; PyTorch asks the CPU."""
    from torch._inductor.cpu_vec_isa import VecAVX512, VecISA

    test = VecISA.check_build

    def check_build(self: VecISA, code: str) -> bool:
        return code in known or test(self, code)

    names = "_avx512_bf16_code", "_avx512_vnni_code"
    known = {
        getattr(cls, name, None)
        for cls in (VecAVX512, *VecAVX512.__subclasses__())
        for name in names
    }
    VecISA.check_build = check_build  # type: ignore[method-assign]


def build_ahead(model: nn.Module) -> None:
    """Build in threads what a model needs, while it is traced.

    That is PyTorch's header, and the kernel of attention for a GPT that it fits: one core would be
    idle meanwhile. A failed background build raises its error when the model needs the result.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    from gpt_lightning.model import cpu_attention  # loads Inductor, which then chooses its folder

    # the marker asks for vector instructions, which all loops have
    header = "// at::vec::\n#include <torch/csrc/inductor/cpp_prefix.h>\n"
    source = header + 'extern "C" void kernel(float*) {}'
    tasks: list[Callable[[], Any]] = [
        functools.partial(CppPythonBindingsCodeCache.load_pybinding, ["float*"], source)
    ]
    config = model.config if isinstance(model, GPT) else None
    if config and cpu_attention.runs(
        config.block_size, config.n_embd // config.n_head, torch.bfloat16
    ):
        tasks.append(cpu_attention.library)

    def run(task: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            trust_vector_instructions()  # each thread has its own settings
            task()

    for task in tasks:
        threading.Thread(target=run, args=(task,), daemon=True).start()


# ---- the kernels of a graph together -------------------------------------------------------------

BINDINGS = r"""
#include <Python.h>
#include <cstdlib>
#include <stdexcept>
#include <utility>

static void* (*data_pointer)(PyObject*);  // of a tensor; PyTorch has its address in the environment

template <typename... T, std::size_t... i>
void spread(void (*kernel)(T...), PyObject* const* arguments, std::index_sequence<i...>) {
    kernel(static_cast<T>(data_pointer(arguments[i]))...);
}

template <typename... T>
PyObject* call(void (*kernel)(T...), PyObject* const* arguments, Py_ssize_t given) {
    if (given != sizeof...(T))
        return PyErr_Format(PyExc_TypeError, "%zd arguments for %zu", given, sizeof...(T));
    try {
        spread(kernel, arguments, std::index_sequence_for<T...>());
    } catch (const std::exception& error) {
        return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
    Py_RETURN_NONE;
}

template <auto kernel>
PyObject* method(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
    return call(kernel, arguments, given);
}

#define METHOD(name) {#name, reinterpret_cast<PyCFunction>(method<name>), METH_FASTCALL, nullptr}
static PyMethodDef methods[] = {@METHODS@, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_kernel() {
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (!address) return PyErr_Format(PyExc_ImportError, "PyTorch has set no address");
    data_pointer = reinterpret_cast<void* (*)(PyObject*)>(std::strtoull(address, nullptr, 10));
    return PyModule_Create(&definition);
}
"""


class Builds:
    """The kernels of one graph, built in as many pieces as threads compile."""

    def __init__(self, submit: Callable[[Callable[[], Any]], Future[Any]], pieces: int) -> None:
        self.submit = submit
        self.pieces = pieces
        self.sources: list[str] = []

    def add(self, source: str) -> "Kernel":
        """Return a kernel of the graph, whose function has the name `kernel` in its source."""
        self.sources.append(source)
        return Kernel(self, len(self.sources) - 1)

    @functools.cached_property
    def modules(self) -> dict[int, Callable[[], ModuleType]]:
        """A function for each kernel that waits for its module; asking for it begins to build."""
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        modules: dict[int, Callable[[], ModuleType]] = {}
        for piece in self.split():
            load = CppPythonBindingsCodeCache.load_async(self.text(piece), submit_fn=self.submit)
            modules.update(dict.fromkeys(piece, load))
        return modules

    def split(self) -> list[list[int]]:
        """Return the kernels' numbers by piece: the longest source goes to the shortest piece."""
        pieces: list[list[int]] = [[] for _ in range(min(self.pieces, len(self.sources)))]
        lengths = [0] * len(pieces)
        for number in sorted(range(len(self.sources)), key=lambda i: -len(self.sources[i])):
            shortest = lengths.index(min(lengths))
            pieces[shortest].append(number)
            lengths[shortest] += len(self.sources[number])
        return pieces

    def text(self, piece: list[int]) -> str:
        """Return the program of some kernels: each is renamed to have its number."""
        includes = dict.fromkeys(
            line for i in piece for line in self.sources[i].splitlines() if line[:8] == "#include"
        )
        kernels = (f"#define kernel kernel_{i}\n{self.sources[i]}\n#undef kernel" for i in piece)
        methods = ", ".join(f"METHOD(kernel_{i})" for i in piece)
        return "\n".join((*includes, *kernels, BINDINGS.replace("@METHODS@", methods)))


class Kernel:
    """A kernel that waits for its build when it is first called.

    Meanwhile the compiler goes on with the next graph.
    """

    def __init__(self, builds: Builds, number: int) -> None:
        self.builds = builds
        self.number = number

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.function(*tensors)

    @functools.cached_property
    def function(self) -> Callable[..., None]:
        """The function in the built module; a failed build is a failed compilation."""
        try:
            module = self.builds.modules[self.number]()
        except Exception as error:
            from torch._inductor.exc import InductorError

            raise InductorError(error, None) from error
        function: Callable[..., None] = getattr(module, f"kernel_{self.number}")
        return function


@functools.cache
def build_by_graph() -> None:
    """Let PyTorch build the kernels of one graph together, in all later compilations.

    A forward graph is built while its backward graph is written. PyTorch's own way is left to
    kernels with numbers as arguments (dynamic shapes), kernels with functions of their own, one
    compiling thread, and another PyTorch whose function has other arguments.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    alone, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    if list(inspect.signature(alone).parameters) != ["self", "argtypes", "source_code"]:
        return

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        one_function = re.match(r'(\s*(#|//).*\n)*\s*extern "C"', source_code)
        only_tensors = all(argtype.endswith("*") for argtype in argtypes)
        threads = get_compile_threads()
        if threads <= 1 or not one_function or not only_tensors:
            return alone(self, argtypes, source_code)
        if not hasattr(self, "builds"):
            self.builds = Builds(self.submit, threads)
        return self.builds.add(source_code)

    def begin_and_wait(self: Any, scope: dict[str, Any]) -> None:
        if hasattr(self, "builds"):
            self.builds.modules  # noqa: B018
        wait(self, scope)

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    AsyncCompile.wait = begin_and_wait  # type: ignore[method-assign]
    torch._functorch.config.force_non_lazy_backward_lowering = True
