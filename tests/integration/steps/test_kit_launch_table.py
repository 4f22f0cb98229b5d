"""The lookup in launch tables, `kernels/kit/launch_table.h`, compiled by g++."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kernel_builder.toolchain import Toolchains
from tests.support.places import ROOT

SOURCE = """
#include "kit/launch_table.h"

using namespace kit;

enum class Pass : unsigned { forward = 1, backward = 2 };
enum class Layout : unsigned { aligned = 4, any = 8 };

struct Launch : LaunchKey<Launch> {
  LAUNCH_FIELD(int, threads, 256)
  LAUNCH_FIELD(int, loads, 1)
};

constexpr Launch kTable[] = {
    Launch().for_variants(Layout::aligned).for_capabilities(kHopperAndBlackwell).with_threads(512),
    Launch().for_variants(Pass::backward, Layout::aligned).for_dtypes(kFloat32).with_loads(2),
    Launch().for_variants(Layout::aligned).for_widths(0, 99),
    Launch().for_variants(Layout::aligned).for_widths(100, kAnyWidth),
    Launch().for_variants(Layout::any).for_widths(1, 8),
};

constexpr int find(int capability, Type type, Pass pass, Layout layout, int64_t width = 1) {
  return find_row(kTable, {capability, type, {pass, layout}, width});
}

// A row that names nothing of a field serves all of it, and the first row that serves a call is found.
static_assert(find(90, Type::float32, Pass::backward, Layout::aligned) == 0);
static_assert(find(109, Type::float16, Pass::forward, Layout::aligned) == 0);
static_assert(find(110, Type::float32, Pass::backward, Layout::aligned) == 1);
static_assert(find(80, Type::float32, Pass::forward, Layout::aligned) == 2);
static_assert(find(80, Type::bfloat16, Pass::backward, Layout::aligned, 99) == 2);
static_assert(find(80, Type::bfloat16, Pass::backward, Layout::aligned, 100) == 3);
static_assert(find(80, Type::float32, Pass::forward, Layout::any, 8) == 4);
static_assert(find(80, Type::float32, Pass::forward, Layout::any, 9) == -1);
static_assert(find_row(kTable, {80, Type::float32, {Pass::forward, Layout::aligned}},
                       [](const Launch& row) { return row.widths.first > 0; }) == -1);

// A row has the values that it names, and the defaults.
static_assert(kTable[0].threads == 512 && kTable[0].loads == 1 && kTable[1].threads == 256 && kTable[1].loads == 2);
static_assert(kTable[1].is(Pass::backward) && !kTable[1].is({Pass::forward, Layout::any}));

// Rows for some capabilities or dtypes only do not make a table complete.
static_assert(serves_all(kTable, {Pass::forward, Layout::aligned}));
static_assert(!serves_all(kTable, {Pass::forward, Layout::any}));

// Only rows that may serve the dtype and the variants are instantiated.
struct Seen {
  int* row;
  template <int kRow>
  void operator()(std::integral_constant<int, kRow>) const {
    static_assert(kRow == 0 || kRow == 2 || kRow == 3);
    *row = kRow;
  }
};

int main() {
  constexpr unsigned kVariants = Variants(Pass::forward, Layout::aligned).bits;
  int row = -1;
  const bool third = with_row<kTable, kBfloat16, kVariants>(3, Seen{&row});
  return third && row == 3 && !with_row<kTable, kBfloat16, kVariants>(1, Seen{&row}) && row == 3 ? 0 : 1;
}
"""


def test_the_first_row_that_serves_a_call_is_found(tmp_path: Path) -> None:
    source, program = tmp_path / "table.cpp", tmp_path / "table"
    source.write_text(SOURCE)
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    include = f"-I{ROOT / 'kernels'}"
    subprocess.run(
        [Toolchains().host().path, "-std=c++17", *warnings, include, source, "-o", program],
        check=True,
    )
    subprocess.run([program], check=True)
