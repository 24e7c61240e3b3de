"""On PYTHONPATH, it makes every Python process say what ``register()`` did to it.

One JSON line for each call that did something, appended to the file named by the
variable PROBE_FILE: the process, the modules that it loaded, and how long it took.
"""

import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import sys
import time

PACKAGE = "vllm_ascend_models"


def probed(register):
    """Wrap ``register`` so that its first call reports."""

    def wrapper():
        before, start = set(sys.modules), time.perf_counter()
        register()
        milliseconds = 1000 * (time.perf_counter() - start)
        if (loaded := set(sys.modules) - before) and not wrapper.reported:
            wrapper.reported = True
            report = {
                "process": multiprocessing.current_process().name,
                "argv": sys.argv,
                "loaded": sorted(loaded),
                "oracles": sorted({"mlx_lm", "openelm_pytorch"} & set(sys.modules)),
                "torch_npu": "torch_npu" in sys.modules,
                "model": f"{PACKAGE}.openelm.model" in sys.modules,
                "file": sys.modules[PACKAGE].__file__,
                "milliseconds": milliseconds,
            }
            with open(os.environ["PROBE_FILE"], "a") as file:
                file.write(json.dumps(report) + "\n")

    wrapper.reported = False
    return wrapper


class Finder(importlib.abc.MetaPathFinder):
    """Wraps ``register`` as its package is first imported."""

    def find_spec(self, name, path, target=None):
        if name != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.register = probed(module.register)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
