"""Serves the package in the parent directory under its Python name, and clients that load this file by its path.

The public client loads that package as `$namespace`. So does this file, and submodules of this file's module are those
of `$namespace`. Each module is loaded once, by whichever name it is imported first, and registers its ops once.
"""


def _load(name, file):
    import importlib.util
    import sys
    from pathlib import Path

    class Finder:
        @staticmethod
        def find_spec(full_name, path=None, target=None):
            if full_name == "$namespace":
                return importlib.util.spec_from_file_location(
                    full_name, Path(file).resolve().parent.parent / "__init__.py"
                )
            if full_name.startswith(f"{name}.") and importlib.util.find_spec(Finder.real_name(full_name)):
                return importlib.util.spec_from_loader(full_name, Finder)
            return None

        @staticmethod
        def real_name(full_name):
            return "$namespace" + full_name[len(name) :]

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            sys.modules[module.__name__] = importlib.import_module(Finder.real_name(module.__name__))

    sys.meta_path.insert(0, Finder)
    package = importlib.import_module("$namespace")
    if name in sys.modules:
        sys.modules[name] = package
    return package


# A client that loads this file by its path uses the module that it made, and not the one in `sys.modules`.
globals().update({name: value for name, value in vars(_load(__name__, __file__)).items() if name not in globals()})
