"""Let checks of the null GPU's numbers succeed: guards would end a run of what its memory holds.

`isfinite` is true for tensors of the device. With NULL_GPU_TRUE=1 so is each of their comparisons,
for programs that compare tokens with a vocabulary.
"""

import importlib.abc
import importlib.util
import os
import sys


class Finder(importlib.abc.MetaPathFinder):
    """Changes torch when it is imported first."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        spec.loader = Loader(spec.loader)
        return spec


class Loader(importlib.abc.Loader):
    """The loader of torch, and methods of tensors that are true on the device."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, torch):
        self.loader.exec_module(torch)
        isfinite, is_true = torch.Tensor.isfinite, torch.Tensor.__bool__

        def on_device(tensor):
            traced = torch.compiler.is_compiling() or type(tensor).__name__ == "FakeTensor"
            return tensor.device.type == "cuda" and not traced

        def finite(tensor):
            true = on_device(tensor)
            return torch.ones(tensor.shape, dtype=torch.bool) if true else isfinite(tensor)

        torch.Tensor.isfinite = finite
        if "NULL_GPU_TRUE" in os.environ:
            torch.Tensor.__bool__ = lambda tensor: on_device(tensor) or is_true(tensor)


sys.meta_path.insert(0, Finder())
