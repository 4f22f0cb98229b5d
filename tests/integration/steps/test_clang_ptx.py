"""The PTX of clang is corrected where ptxas would store an integer conversion in place of the low bytes of a float."""

from __future__ import annotations

import os
import subprocess
from importlib import resources
from pathlib import Path

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains

PTX = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p, .param .f32 q) {
.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b16 %rs<9>; .reg .pred %p<2>;
ld.param.b64 %rd1, [p];
ld.param.b32 %r1, [q];
add.rn.f32 %r2, %r1, %r1;
BODY
ret;
}
"""
# As clang writes it -> as ptxas gets it. None is unchanged.
STORES = {
    "\tst.shared.b8 \t[%rd1], %r2;": "{ .reg .b32 %low1; and.b32 %low1, %r2, 255; st.shared.b8 \t[%rd1], %low1; }",
    "st.global.b16 [%rd1+2], %r2;": "{ .reg .b32 %low1; and.b32 %low1, %r2, 65535; st.global.b16 [%rd1+2], %low1; }",
    "st.b8 [%rd1], %rs3;": "{ .reg .b16 %low1; and.b16 %low1, %rs3, 255; st.b8 [%rd1], %low1; }",
    "@%p1 st.u32 [%rd1], %rd2;": "{ .reg .b32 %low1; cvt.u32.u64 %low1, %rd2; @%p1 st.u32 [%rd1], %low1; }",
    "st.global.v2.b8 [%rd1], {%rs1, 7};": "{ .reg .b16 %low1; and.b16 %low1, %rs1, 255; "
    "st.global.v2.b8 [%rd1], {%low1, 7}; }",
    "add.s32 %r3, %r1, 1; st.b8 [%rd1], %r3;": "add.s32 %r3, %r1, 1; "
    "{ .reg .b32 %low1; and.b32 %low1, %r3, 255; st.b8 [%rd1], %low1; }",
    "st.global.b32 [%rd1], %r2;": None,
    "st.global.b16 [%rd1], %rs3;": None,
    "st.global.v4.b32 [%rd1+16], {%r1, %r2, %r3, %r4};": None,
    "st.global.b8 [%rd1], 1;": None,
    "ld.global.b8 %r3, [%rd1];": None,
}


def test_stores_of_low_bytes_get_an_integer(tmp_path: Path) -> None:
    """ptxas accepts the result."""
    script = tmp_path / "ptxas"
    script.write_text((resources.files("kernel_builder") / "templates/clang/ptxas").read_text())
    source = tmp_path / "kernel.s"
    source.write_text(PTX.replace("BODY", "\n".join(STORES)))
    ptxas = toolkits.toolkit(Toolchains(), Release(12, 6)).root / "bin/ptxas"
    command = ["sh", script, "-arch=sm_90", "--output-file", tmp_path / "kernel.o", source, "-O3"]
    done = subprocess.run(command, env={**os.environ, "PTXAS": str(ptxas)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    body = [line.strip() for line in source.read_text().splitlines()[8:-2]]
    assert body == [changed or line.strip() for line, changed in STORES.items()]
    assert (tmp_path / "kernel.o").stat().st_size > 0
