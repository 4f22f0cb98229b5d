"""A package index on the loopback interface, with small wheels like the real ones and with faults on demand."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import random
import re
import tarfile
import time
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.support.loopback import QuietHandler, served

NVCC = b"""#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
esac
"""


def noise(seed: str, size: int) -> bytes:
    """Return bytes that do not compress."""
    return random.Random(seed).randbytes(size)


def wheel(project: str, version: str, files: Mapping[str, bytes], metadata: str = "") -> bytes:
    """Return the bytes of a wheel, which depend on the arguments alone."""
    stem = f"{project.replace('-', '_')}-{version}.dist-info"
    everything = {**files, f"{stem}/METADATA": f"Metadata-Version: 2.1\nName: {project}\n{metadata}".encode()}
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in everything.items()
    )
    everything[f"{stem}/RECORD"] = f"{record}{stem}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in everything.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


# Project -> version and files of its wheels; each has a compiler's or a header's part of CUDA 13.0.
_NVCC_FILES = {
    "bin/nvcc": NVCC,
    "bin/nvcc.profile": b"TOP = $(_HERE_)/..\n",
    "bin/ptxas": b"\x7fELF" + noise("ptxas", 3_000_000),
}
_NVVM_FILES = {
    "lib/libnvvm.so.4": b"\x7fELF" + noise("libnvvm", 2_000_000),
    "nvvm/bin/cicc": b"\x7fELF" + noise("cicc", 1_000_000),
}
_CUBLAS_FILES = {"include/cublas_v2.h": b"// cublas\n", "lib/libcublas.so.13": noise("libcublas", 1_000_000)}
_CUDA_13: dict[str, tuple[str, dict[str, bytes]]] = {
    "nvidia-cuda-nvcc": ("13.0.88", _NVCC_FILES),
    "nvidia-nvvm": ("13.0.88", _NVVM_FILES),
    "nvidia-cuda-runtime": ("13.0.96", {"include/cuda_runtime.h": b"// runtime\n", "lib/libcudart.so.13": b"\x7fELF"}),
    "nvidia-cublas": ("13.1.1.3", _CUBLAS_FILES),
}


def _compilers(machine: str) -> dict[str, bytes]:
    """Return the wheels of CUDA for a machine."""
    parts = {
        (project, version): {f"nvidia/cu13/{name}": data for name, data in files.items()}
        for project, (version, files) in _CUDA_13.items()
    }
    # A newer compiler of the same release that no cuda-toolkit requires.
    parts["nvidia-cuda-nvcc", "13.0.99"] = {"nvidia/cu13/bin/nvcc": b""}
    for version in ("9.18.0.1", "9.19.0.56", "9.26.0.51"):
        parts["nvidia-cudnn-cu13", version] = {"nvidia/cudnn/include/cudnn.h": f"// {version}\n".encode()}
    tag = f"py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}"
    return {
        f"{project.replace('-', '_')}-{version}-{tag}.whl": wheel(project, version, files)
        for (project, version), files in parts.items()
    }


def _cuda_set(version: str, requirements: Mapping[str, str]) -> bytes:
    lines = [f"Requires-Dist: {project}=={spec}.*; extra == 'all'" for project, spec in requirements.items()]
    return wheel("cuda-toolkit", version, {}, "\n".join(["Version: " + version, *lines]) + "\n")


CUTLASS = {
    "include/cute/layout.hpp": b"// layout\n",
    "include/cutlass/cutlass.h": b"// cutlass\n",
    "tools/util/include/cutlass/util/host_tensor.h": b"// host tensor\n",
    "media/picture.png": noise("picture", 300_000),
}


def _header_libraries() -> dict[str, bytes]:
    """Return a wheel and two source distributions with the files of a header library, and others."""
    header = "include/cutlass/version.h"
    versions = {number: f"#define CUTLASS_MAJOR {number}\n".encode() for number in (3, 4)}
    tools = {name: data for name, data in CUTLASS.items() if name.startswith("tools/")} | {header: b"// other"}
    include = {name: data for name, data in CUTLASS.items() if name.startswith("include/")} | {header: versions[4]}
    everything = {f"headers/source/{name}": data for name, data in (CUTLASS | {header: versions[3]}).items()}
    return {
        "headers-3.8.0-py3-none-any.whl": wheel("headers", "3.8.0", everything),
        "other_kernels-1.0.tar.gz": sdist("other_kernels-1.0/3rdparty", tools),
        "kernels-2.0.tar.gz": sdist("kernels-2.0/deps", include),
    }


def sdist(prefix: str, files: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a source distribution, which depend on the arguments alone."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{prefix}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _torch_wheel(version: str, mark: str) -> bytes:
    files = {
        "torch/lib/libtorch_cpu.so": noise(f"{version}{mark}", 200_000),
        "torch/include/ATen/Config.h": b"// config\n",
        "torch/include/ATen/ATen.h": noise("ATen", 200_000),
        "torch/include/torch/csrc/api/include/torch/all.h": b"// all\n",
        "torch/include/torch/csrc/stable/library.h": f"// stable {version} {mark}\n".encode(),
        "torch/include/torch/headeronly/version.h": f"// {version} {mark}\n".encode(),
        "torch/version.py": noise("tail", 100_000),
    }
    required = "Requires-Dist: nvidia-cudnn-cu13==9.19.0.56; platform_system == 'Linux'\n"
    return wheel("torch", version, files, f"Version: {version}\n{required}")


def build_wheels() -> dict[str, bytes]:
    """Return file name -> bytes: CUDA 13.0, builds of Torch 2.10, header libraries."""
    parts_of_13 = {project: version for project, (version, _) in _CUDA_13.items()}
    sets = {
        "12.6.3": {"nvidia-cuda-nvcc-cu12": "12.6.85"},
        "13.0.1": parts_of_13 | {"nvidia-cuda-nvcc": "13.0.48"},
        "13.0.2": parts_of_13,
        "13.0.3rc1": parts_of_13 | {"nvidia-nvvm": "13.0.99"},
    }
    files = {
        f"cuda_toolkit-{version}-py2.py3-none-any.whl": _cuda_set(version, required)
        for version, required in sets.items()
    }
    files |= _header_libraries()
    for machine in ("x86_64", "aarch64"):
        files |= _compilers(machine)
        for version, build, python in [
            ("2.10.0", "", "cp310-cp310"),
            ("2.10.1", "", "cp310-cp310"),
            ("2.10.1", "-3", "cp310-cp310"),
            ("2.10.1", "-4", "cp311-cp311"),
            ("2.10.1", "-5", "cp310-cp310t"),
            ("2.10.2rc1", "", "cp310-cp310"),
        ]:
            name = f"torch-{version}{build}-{python}-manylinux_2_28_{machine}.whl"
            files[name] = _torch_wheel(version, f"{build}{python}{machine}")
    return files


@dataclass
class Fault:
    """How the server misbehaves for one file."""

    times: int = -1  # the number of requests that fail; negative for all
    status: int | None = None  # answer with this status and no body
    cut: int | None = None  # close the connection after this number of bytes of the body
    flip: int | None = None  # the position of a byte to alter
    no_ranges: bool = False  # answer range requests with the whole file
    rate: int | None = None  # bytes per second
    endless: bool = False  # send the whole file again and again


@dataclass
class ServedRequest:
    """A request for a file that was answered. `sent` is the number of bytes of the body."""

    file: str
    sent: int = 0
    authorization: str | None = None


@dataclass
class IndexServer:
    """A server of the index, as a context manager. `files` and `faults` may be changed at any time."""

    files: dict[str, bytes]
    faults: dict[str, Fault] = field(default_factory=dict)
    requests: list[ServedRequest] = field(default_factory=list)
    stated: dict[str, str] = field(default_factory=dict)
    password: tuple[str, str] | None = None
    file_server: IndexServer | None = None

    def __enter__(self) -> IndexServer:
        server = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server._answer(self)

        self._running = ExitStack()
        self._address = self._running.enter_context(served(Handler))
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the port."""
        self._running.close()

    @property
    def url(self) -> str:
        return f"{self._address}/simple/"

    @property
    def sent(self) -> int:
        """Bytes of files sent so far."""
        return sum(request.sent for request in self.requests)

    def _answer(self, handler: QuietHandler) -> None:
        if match := re.fullmatch(r"/simple/([^/]+)/", handler.path):
            self._page(handler, match[1])
        elif handler.path.removeprefix("/files/") in self.files:
            self._file(handler, handler.path.removeprefix("/files/"))
        else:
            handler.send(404)

    def _page(self, handler: QuietHandler, project: str) -> None:
        if self.password:
            expected = "Basic " + base64.b64encode(":".join(self.password).encode()).decode()
            if handler.headers["Authorization"] != expected:
                handler.send(401)
                return
        links = [
            f'<a href="{(self.file_server or self)._address}/files/{name}#sha256='
            f'{self.stated.get(name) or hashlib.sha256(data).hexdigest()}">{name}</a>'
            for name, data in self.files.items()
            if name.partition("-")[0].replace("_", "-") == project
        ]
        page = "<!DOCTYPE html><html><body>" + "<br/>".join(links) + "</body></html>"
        handler.send(200 if links else 404, page.encode(), Content_Type="text/html")

    def _file(self, handler: QuietHandler, name: str) -> None:
        fault = self.faults.get(name, Fault())
        if fault.times == 0:
            fault = Fault()
        fault.times -= 1
        if fault.status:
            handler.send(fault.status)
            return
        data = bytearray(self.files[name])
        if fault.flip is not None:
            data[fault.flip] ^= 0x01
        start, stop, status = 0, len(data), 200
        wanted = re.fullmatch(r"bytes=(\d*)-(\d+)", handler.headers["Range"] or "")
        if wanted and not fault.no_ranges and not fault.endless:
            status = 206
            if wanted[1]:
                start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            else:  # the last bytes of the file
                start = max(len(data) - int(wanted[2]), 0)
        if start >= stop:
            handler.send(416, Content_Range=f"bytes */{len(data)}")
            return
        request = ServedRequest(name, authorization=handler.headers["Authorization"])
        self.requests.append(request)
        handler.send_response(status)
        if not fault.endless:
            handler.send_header("Content-Length", str(stop - start))
        if status == 206:
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        handler.end_headers()
        end = stop if fault.cut is None else min(stop, start + fault.cut)
        step = 16_384
        for position in range(start, end, step):
            piece = data[position : min(position + step, end)]
            handler.wfile.write(piece)
            request.sent += len(piece)
            if fault.rate:
                time.sleep(step / fault.rate)
        while fault.endless:  # until the client closes the connection
            handler.wfile.write(data)
            request.sent += len(data)
        handler.close_connection = handler.close_connection or end < stop
