"""Stand-ins for what SGLang imports for GPUs alone, so that its own CPU engine starts where none of it can be installed.

On PYTHONPATH of a test's process, and so of every process that it starts. Nothing of a stand-in computes: all names are there,
and are classes that take anything. What is installed is not replaced.
"""

import importlib.abc
import importlib.machinery
import sys
import types

NAMES = ("IPython", "torchvision", "gguf", "sgl_kernel", "triton")


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)

    def __getitem__(cls, _):
        return cls

    def __or__(cls, other):
        return object

    __ror__ = __or__


def _thing(name):
    return _Anything(name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, *args, **kwargs: self})


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return "0.0.0" if name == "__version__" else _thing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    busy = False

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in NAMES or self.busy:
            return None
        if name == "triton":  # PyTorch does without, if it finds none when it looks
            self.busy = True
            import torch._inductor.compile_fx  # noqa: F401
            from torch.utils._triton import has_triton_package

            has_triton_package()
            self.busy = False
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
