"""Re-exports the package in the parent directory, for old clients that import a subdirectory of the variant."""

import importlib.util
import sys
from pathlib import Path

_name = "$namespace"
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).resolve().parent.parent / "__init__.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
_module = sys.modules[_name]
__all__ = getattr(_module, "__all__", [name for name in vars(_module) if not name.startswith("_")])
# A name in `__all__` that the module lacks breaks `import *` of the module, and nothing else.
globals().update({name: getattr(_module, name) for name in __all__ if hasattr(_module, name)})
