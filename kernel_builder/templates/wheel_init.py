"""Loads the variant of this kernel that fits the installed Torch.

`build/` has the packages of the Kernel Hub for this platform. The choice is that of the Hub's client, which need not be
installed. A kernel that the client has loaded already is used as it is, and the client uses the modules of this one.
"""

# The kernels that this one depends on: repository -> requirement in the package index, and version.
DEPENDS = {}


def get_kernel_dep(repo_id):
    """Import the wheel of a kernel that this one depends on, but no other module of its name."""
    import importlib.util
    import json
    from pathlib import Path

    if repo_id not in DEPENDS:
        raise ImportError(f"{repo_id} is not in this wheel's kernel-depends: add it to build.toml, and build again")
    (requirement, version), module = DEPENDS[repo_id], repo_id.rpartition("/")[2].replace("-", "_")
    spec = importlib.util.find_spec(module)
    found = Path(spec.origin or module) if spec else None
    # The directory of a wheel's loader, or of the loader whose place a package takes when it is loaded.
    folder = found and (found.parents[2] if found.parents[1].name == "build" else found.parent)
    packages = [json.loads(file.read_bytes()) for file in folder.glob("build/*/metadata.json")] if folder else []
    seen = {(of.get("provenance", {}).get("built-for", {}).get("repo-id"), of.get("version")) for of in packages}
    if seen != {(repo_id, version)}:
        kind = " and ".join(f"{name or 'of no owner'}, version {n}" for name, n in seen) or "not the wheel of a kernel"
        raise ImportError(
            f"{repo_id}, version {version}, is needed.\n"
            f"  `import {module}` finds: {f'{found}, which is {kind}' if found else 'no module'}\n"
            f'  install it: pip install --force-reinstall "{requirement}"; a module earlier in sys.path hides it',
            name=module,
        )
    return importlib.import_module(module)


def _parse(name):
    """Return (framework, Torch release, backend, CUDA release, platform) of a variant; None stands for any."""
    import re

    noarch = re.fullmatch(r"torch-([a-z]+)", name)
    if noarch:
        return "noarch", None, noarch[1], None, None
    match = re.fullmatch(r"(torch-stable-abi|torch)(\d)(\d+)(?:-cxx11)?-(?:cu(\d+)(\d)|([a-z]+))-(\w+-\w+)", name)
    if not match:
        return None
    kind, major, minor, cuda_major, cuda_minor, backend, platform = match.groups()
    framework = "stable" if kind == "torch-stable-abi" else "full"
    cuda = (int(cuda_major), int(cuda_minor)) if cuda_major else None
    return framework, (int(major), int(minor)), backend or "cuda", cuda, platform


def _release(version):
    """Return major and minor of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))


def _backend(torch):
    """Return the backend of a Torch, and its CUDA release or None, as the client does."""
    if hasattr(torch.backends, "tpu"):
        return "tpu", None
    if hasattr(torch, "neuron"):
        return "neuron", None
    if torch.version.cuda is not None:
        return "cuda", _release(torch.version.cuda)
    if torch.version.hip is not None:
        return "rocm", None
    if torch.backends.mps.is_available():
        return "metal", None
    if getattr(torch.version, "xpu", None) is not None:
        return "xpu", None
    privateuse = getattr(torch._C, "_get_privateuse1_backend_name", lambda: None)()
    return ("npu" if privateuse == "npu" else "cpu"), None


def _fits(variant, torch_release, backend, cuda, platform, limited_api, cxx11):
    framework, release, of, of_cuda, on = variant
    if of != backend:
        return False
    if framework == "noarch":
        return True
    if on != platform or not limited_api:
        return False
    if release > torch_release or (framework == "full" and (release != torch_release or not cxx11)):
        return False
    return of_cuda is None or (cuda is not None and of_cuda[0] == cuda[0] and of_cuda[1] <= cuda[1])


def choose(names, torch_release, backend, cuda, platform, limited_api=True, cxx11=True):
    """Return the name of the variant that the client loads, or None.

    `cuda` is Torch's CUDA release or None, `platform` for example `x86_64-linux`, `limited_api` whether this Python
    loads modules of the limited API, and `cxx11` whether Torch was built with the C++11 ABI of libstdc++.
    """

    def order(name):
        framework, release, _, of_cuda, _ = _parse(name)
        newest = [-part for part in release] if framework == "stable" else [0, 0]
        return ["stable", "full", "noarch"].index(framework), newest, -of_cuda[1] if of_cuda else 0, name

    system = (torch_release, backend, cuda, platform, limited_api, cxx11)
    fitting = [name for name in names if _parse(name) and _fits(_parse(name), *system)]
    return min(fitting, key=order, default=None)


def has_code(archs, capability):
    """Return whether a GPU runs code for one of the architectures, by the rule of the client.

    Architectures are as in metadata.json: "8.0", "9.0a", "10.0f" or "12.0+PTX". Without a known one the result is True.
    """
    import re

    matches = [re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch) for arch in archs]
    results = []
    for major, minor, suffix, ptx in (match.groups() for match in matches if match):
        compiled = (int(major), int(minor))
        if suffix == "a":
            results.append(capability == compiled)
        elif ptx and not suffix:
            results.append(capability >= compiled)
        else:
            results.append(capability[0] == compiled[0] and capability >= compiled)
    return not results or any(results)


def _capabilities(torch):
    """Return the capabilities of the current GPU if CUDA is in use, or else of all GPUs; none if they are not known.

    The driver's library is asked, since an import must not initialize CUDA: later forks could not use it.
    """
    import ctypes

    if torch.cuda.is_initialized():
        return [torch.cuda.get_device_capability()]
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if not torch.cuda.device_count() or nvml.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = []
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                found.append((major.value, minor.value))
    return found


def _check_gpu(name, variant, archs, torch):
    """Raise an ImportError if the package has code for none of the GPUs: its first launch would fail."""
    gpus = _capabilities(torch) if archs else []
    if gpus and not any(has_code(archs, gpu) for gpu in gpus):
        listed = ", ".join(sorted({f"{major}.{minor}" for major, minor in gpus}))
        raise ImportError(
            f"{name} has no code for this machine's GPU.\n"
            f"  {variant} has code for: {', '.join(archs)}\n"
            f"  capability of the GPU: {listed}\n"
            "  install a newer wheel; or add the capability to cuda-capabilities in build.toml, and build one: "
            "kernel-builder build, then kernel-builder wheel",
            name=name,
        )


def _load(name, file):
    import importlib.util
    import json
    import os
    import platform
    import sys
    import sysconfig
    from pathlib import Path

    import torch

    directory = Path(file).resolve().parent / "build"
    names = sorted(path.name for path in directory.iterdir() if path.is_dir())
    backend, cuda = _backend(torch)
    wanted = os.environ.get("KERNEL_BACKEND", backend)
    if wanted != backend:
        backend, cuda = wanted, None
    here = f"{platform.machine()}-{platform.system().lower()}"
    limited_api = sys.version_info >= (3, 15) or not sysconfig.get_config_var("Py_GIL_DISABLED")
    cxx11 = torch.compiled_with_cxx11_abi()
    chosen = choose(names, _release(torch.__version__), backend, cuda, here, limited_api, cxx11)
    if chosen is None:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else _backend(torch)[0]
        threads = "" if limited_api else ", free-threaded"
        platforms = {_parse(variant)[4] or here for variant in names if _parse(variant)}
        advice = (
            "install a Torch that one of them is for (torch-stable-abi210: Torch 2.10 or later; cu130: CUDA 13.0 or a "
            "later 13.x), or a newer wheel; or build one: kernel-builder build, then kernel-builder wheel"
        )
        if platforms and here not in platforms:
            advice = f"this wheel is for {', '.join(sorted(platforms))}: install the one for {here}"
        others = {_parse(variant)[2] for variant in names if _parse(variant)} - {backend}
        if others:
            advice += f"; or choose a variant of this wheel: KERNEL_BACKEND={' or '.join(sorted(others))}"
        raise ImportError(
            f"{name} has no variant for this environment.\n"
            f"  this wheel has: {', '.join(names)}\n"
            f"  installed: Torch {torch.__version__} for {built} on {here}, Python {platform.python_version()}{threads}\n"
            f"  {advice}",
            name=name,
        )
    about = json.loads((directory / chosen / "metadata.json").read_bytes())
    if backend == "cuda":
        _check_gpu(name, chosen, about["backend"].get("archs", []), torch)
    # Until the package takes this module's place, its `get_kernel_dep` is that of this module.
    sys.modules[name].loading = about["id"]
    # The package's own loader loads each module once, by whichever name it is imported first.
    spec = importlib.util.spec_from_file_location(name, directory / chosen / name / "__init__.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


_load(__name__, __file__)
