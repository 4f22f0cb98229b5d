#include <omp.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <exception>
#include <filesystem>
#include <iostream>
#include <locale>
#include <memory_resource>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "registration.h"
#if __has_include(<format>)
#include <format>
#endif

#define EXPECT(CONDITION) \
  if (!(CONDITION)) return __LINE__

namespace {

constexpr const char* kText = "a text that is too long for the small string buffer";
std::atomic<int> made{0}, freed{0};

struct Counted : std::runtime_error {
  explicit Counted(const char* text) : std::runtime_error(text) { ++made; }
  Counted(const Counted& other) : std::runtime_error(other) { ++made; }
  ~Counted() override { ++freed; }
};

bool rethrows(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Counted& caught) {
    return caught.what() == std::string(kText);
  }
}

// A source can name the older version of a symbol: that of x86_64 here.
__asm__(".symver powf,powf@GLIBC_2.2.5");
thread_local int calls = 0;  // by __tls_get_addr of the dynamic linker

// Uses parts of the C++ library that are newer than GLIBCXX_3.4.24. Returns 0, or the line of the first wrong result.
int64_t library() {
  volatile float two = 2;
  EXPECT(powf(two, expf(two - two)) == 2 && ++calls == 1);
  std::stringstream first(kText), second(std::move(first)), third;
  third.swap(second);
  EXPECT(third.view() == kText && std::move(third).str() == kText && third.view().empty());
  // The standard streams, the locale and its facets stay in libstdc++.so.6.
  std::cout << std::flush;
  const void* volatile facet = &std::ctype<char>::id;
  EXPECT(first.getloc() == std::locale() && facet != nullptr);
  std::stringbuf buffer(std::string(kText), std::ios_base::in);
  EXPECT(std::stringbuf(std::move(buffer), std::allocator<char>()).str() == kText);
  char text[64];
  double back = 0;
  const auto end = std::to_chars(text, text + sizeof(text), 0.1).ptr;
  EXPECT(std::from_chars(text, end, back).ptr == end && back == 0.1);
#ifdef __cpp_lib_format
  EXPECT(std::format("{:>6}|{:.2f}|{:x}", "right", 1.5, 255) == " right|1.50|ff");
#endif
  std::pmr::monotonic_buffer_resource arena;
  std::pmr::unsynchronized_pool_resource pool(&arena);
  std::pmr::vector<std::pmr::string> words(&pool);
  words.emplace_back(kText);
  EXPECT(words[0] == kText && words.get_allocator().resource()->is_equal(pool));
  try {
    static_cast<void>(std::filesystem::file_size(std::filesystem::path("/proc/self") / "lost"));
    return __LINE__;
  } catch (const std::filesystem::filesystem_error& error) {
    EXPECT(error.path1() == "/proc/self/lost");
  }
  return 0;
}

// Throws in one thread, and copies and rethrows the exception in others. Returns 0, or the line of a wrong result.
int64_t exceptions() {
  std::exception_ptr error;
  std::jthread([&] {
    try {
      throw Counted(kText);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  std::atomic<int> right{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, copy = error] {
        for (int times = 0; times < 1000; ++times) right += rethrows(copy);
      });
    }
  }
  EXPECT(right == 4000 && freed < made && rethrows(error));
  error = std::make_exception_ptr(Counted(kText));
  EXPECT(rethrows(error) && made == freed + 1);
  error = nullptr;
  EXPECT(made == freed);
  return 0;
}

// Runs a loop with OpenMP on `count` threads. Returns how many it ran on, or 0 if the sum is wrong.
int64_t threads(int64_t count) {
  std::vector<int> used(count);
  int64_t sum = 0;
#pragma omp parallel num_threads(count) reduction(+ : sum)
  {
    used[omp_get_thread_num()] = 1;
#pragma omp for schedule(dynamic, 7)
    for (int64_t i = 0; i < 1000; ++i) sum += i;
  }
  return sum == 499500 ? std::count(used.begin(), used.end(), 1) : 0;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("library() -> int");
  ops.def("exceptions() -> int");
  ops.def("threads(int count) -> int");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeImplicitAutograd, ops) {
  ops.impl("library", TORCH_BOX(&library));
  ops.impl("exceptions", TORCH_BOX(&exceptions));
  ops.impl("threads", TORCH_BOX(&threads));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
