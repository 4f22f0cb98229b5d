

def get_kernel_dep(repo_id: str):
    """Return a kernel of `kernel-depends`, while the client or a wheel loads this package."""
    import sys

    wheel = sys.modules.get("$python_name")
    if getattr(wheel, "loading", None) == "$namespace":
        return wheel.get_kernel_dep(repo_id)
    import kernels

    return kernels.get_kernel_dep(repo_id)
