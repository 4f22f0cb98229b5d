// Launch tables: which calls a row is for, and the lookup of the row for a call.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// A table is a constexpr array of a kernel's own row type, which derives from LaunchKey and has a LAUNCH_FIELD, with
// the usual value as default, for each part of the configuration. A row names the differences:
//
//     struct SumLaunch : kit::LaunchKey<SumLaunch> {
//       LAUNCH_FIELD(int, threads, 256)  // of a block
//       LAUNCH_FIELD(int, loads, 1)      // of a thread
//     };
//     constexpr SumLaunch kSumLaunches[] = {
//         SumLaunch().for_dtypes(kit::kFloat32).for_widths(1, 512).with_loads(2),
//         SumLaunch(),
//     };
//
// The first row that serves a call is used, so rows for one GPU or dtype go before the general ones. A table holds no
// value that the device reports, such as its number of SMs.
//
// Not designated initializers: in C++17, nvcc (13.0, 13.2) sets the fields before a named one to zero.
#pragma once

#include <climits>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <type_traits>

#include "kit/rows.h"

namespace kit {

// Capabilities of compiled code, 90 for 9.0: from `first` up to, but not including, `end`.
struct Capabilities {
  int first = 0, end = INT_MAX;

  constexpr bool has(int capability) const { return capability >= first && capability < end; }
};
constexpr Capabilities kHopperAndBlackwell{90, 110};  // 9.0 and 10.x

// Sets of dtypes.
constexpr unsigned dtype_bit(Type type) { return 1u << static_cast<int>(type); }
constexpr unsigned kFloat32 = dtype_bit(Type::float32), kBfloat16 = dtype_bit(Type::bfloat16);
constexpr unsigned kFloat16 = dtype_bit(Type::float16), kTwoByteDtypes = kFloat16 | kBfloat16;
constexpr unsigned kEveryDtype = kFloat32 | kTwoByteDtypes;

// Sets of a kernel's other cases, such as passes and layouts: enumerators of its own enums, each of which is
// a bit that no other enumerator has.
struct Variants {
  unsigned bits = 0;

  constexpr Variants() = default;
  template <typename... Enums>
  constexpr Variants(Enums... enums) : bits((static_cast<unsigned>(enums) | ...)) {}

  constexpr bool are_in(unsigned others) const { return (bits & ~others) == 0; }
};
constexpr unsigned kEveryVariant = UINT_MAX;

constexpr int64_t kAnyWidth = INT64_MAX;
struct Widths {
  int64_t first = 0, last = kAnyWidth;
};

// The key of a look-up.
struct LaunchCall {
  int capability;  // of the compiled code
  Type type;
  Variants variants{};  // one of each of the kernel's enums
  int64_t width = 0;    // of a row, in the unit of the table
};

// The calls that a row of type Row_ is for. The defaults are all calls.
template <typename Row_>
struct LaunchKey {
  using Row = Row_;

  Capabilities capabilities{};
  unsigned dtypes = kEveryDtype;
  Variants variants{};  // that a call must have; of an enum that is not named, any
  Widths widths{};

  constexpr Row for_capabilities(Capabilities to) const { return with(&LaunchKey::capabilities, to); }
  constexpr Row for_dtypes(unsigned to) const { return with(&LaunchKey::dtypes, to); }
  template <typename... Enums>
  constexpr Row for_variants(Enums... to) const {
    return with(&LaunchKey::variants, Variants(to...));
  }
  constexpr Row for_widths(int64_t first, int64_t last) const { return with(&LaunchKey::widths, Widths{first, last}); }

  // Whether the row names one of these.
  constexpr bool is(Variants others) const { return (variants.bits & others.bits) != 0; }

  // Whether the row may serve calls of these dtypes that have no other than these variants.
  constexpr bool is_for(unsigned of_dtypes, unsigned of_variants) const {
    return (dtypes & of_dtypes) != 0 && variants.are_in(of_variants);
  }

  constexpr bool serves(const LaunchCall& call) const {
    return is_for(dtype_bit(call.type), call.variants.bits) && capabilities.has(call.capability) &&
           widths.first <= call.width && call.width <= widths.last;
  }

 protected:
  template <typename Class, typename Value>
  constexpr Row with(Value Class::* field, Value to) const {
    Row row = static_cast<const Row&>(*this);
    row.*field = to;
    return row;
  }
};

// A field of a row type, its default, and the function that sets it.
#define LAUNCH_FIELD(Type, name, value) \
  Type name = value;                    \
  constexpr Row with_##name(Type to) const { return with(&Row::name, to); }

constexpr auto kAcceptAll = [](const auto&) { return true; };

// Returns the index of the first row that serves the call and that `accepts` accepts, or -1.
template <typename Row, int kRows, typename Accepts = decltype(kAcceptAll)>
constexpr int find_row(const Row (&table)[kRows], const LaunchCall& call, const Accepts& accepts = kAcceptAll) {
  for (int row = 0; row < kRows; ++row) {
    if (table[row].serves(call) && accepts(table[row])) return row;
  }
  return -1;
}

// Calls `launch` with the index `row` as a std::integral_constant, and returns whether there is such a row. `launch` is
// instantiated for the rows that may serve calls of these dtypes and variants.
template <const auto& kTable, unsigned kDtypes = kEveryDtype, unsigned kVariants = kEveryVariant, int kRow = 0,
          typename Launch>
bool with_row([[maybe_unused]] int row, [[maybe_unused]] const Launch& launch) {
  if constexpr (kRow == static_cast<int>(std::size(kTable))) {
    return false;
  } else {
    if constexpr (kTable[kRow].is_for(kDtypes, kVariants)) {
      if (row == kRow) {
        launch(std::integral_constant<int, kRow>{});
        return true;
      }
    }
    return with_row<kTable, kDtypes, kVariants, kRow + 1>(row, launch);
  }
}

// Returns whether the rows that `accepts` accepts serve all calls that have these variants. They are in order of their
// widths.
template <typename Row, int kRows, typename Accepts = decltype(kAcceptAll)>
constexpr bool serves_all(const Row (&table)[kRows], Variants variants, const Accepts& accepts = kAcceptAll) {
  for (const Type type : {Type::float32, Type::float16, Type::bfloat16}) {
    int64_t width = 0;  // the smallest one that no row serves
    bool all = false;
    for (const Row& row : table) {
      const bool serves = row.serves({0, type, variants, width}) && row.serves({INT_MAX - 1, type, variants, width});
      if (all || !serves || !accepts(row)) continue;
      all = row.widths.last == kAnyWidth;
      width = all ? width : row.widths.last + 1;
    }
    if (!all) return false;
  }
  return true;
}

}  // namespace kit
