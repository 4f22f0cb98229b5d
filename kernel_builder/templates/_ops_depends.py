

def get_kernel_dep(repo_id: str):
    """Return a kernel of `kernel-depends`, while the client or a wheel loads this package."""
    import sys
    from importlib import import_module

    wheel = sys.modules.get("$python_name")
    is_loading = getattr(wheel, "loading", None) == "$namespace"
    return (wheel if is_loading else import_module("kernels")).get_kernel_dep(repo_id)
