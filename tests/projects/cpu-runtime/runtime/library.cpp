#include <charconv>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <memory>
#include <memory_resource>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "runtime.h"
#if __has_include(<format>)
#include <format>
#endif

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#define EXPECT(CONDITION) \
  if (!(CONDITION)) return __LINE__

namespace {

constexpr const char* kText = "a text that is too long for the small string buffer";

int64_t streams() {
  std::stringstream first;
  first << "value " << std::setw(4) << std::setfill('0') << 42 << ' ' << std::hex << 255 << ' ' << 1.5f << ' ' << true;
  EXPECT(first.str() == "value 0042 ff 1.5 1");
  const std::string text = kText;
  std::stringstream second(text);
  EXPECT(second.view() == text);
  EXPECT(std::move(second).str() == text);
  EXPECT(second.view().empty());
  second.str(std::string(kText));
  std::stringstream third(std::move(second));
  first.swap(third);
  EXPECT(first.str() == text);
  using Allocator = std::allocator<char>;
  std::ostringstream fourth(std::ios_base::out, Allocator());
  std::istringstream fifth(text, std::ios_base::in, Allocator());
  EXPECT(fourth.view().empty() && fifth.str(Allocator()) == text);
  std::stringbuf buffer(std::string(kText), std::ios_base::in);
  std::stringbuf other(std::move(buffer), Allocator());
  EXPECT(std::move(other).str() == text);
  return 0;
}

int64_t numbers() {
  char text[64];
  for (double value : {0.1, 1e300, -2.5}) {
    const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
    double back = 0;
    EXPECT(std::from_chars(text, end, back).ptr == end && back == value);
    float single = 0;
    EXPECT(std::from_chars(text, end, single).ptr == end);
  }
  EXPECT(*std::to_chars(text, text + sizeof(text), 2.5f, std::chars_format::fixed, 1).ptr == text[3]);
  EXPECT(std::string_view(text, 3) == "2.5");
#ifdef __cpp_lib_format
  EXPECT(std::format("{:>6}|{:.2f}|{:x}", "right", 1.5, 255) == " right|1.50|ff");
#endif
  return 0;
}

int64_t others() {
  std::pmr::monotonic_buffer_resource arena;
  std::pmr::unsynchronized_pool_resource pool(&arena);
  std::pmr::vector<std::pmr::string> words(&pool);
  words.emplace_back(kText);
  EXPECT(words[0] == kText && words.get_allocator().resource()->is_equal(pool));

  const std::filesystem::path path = std::filesystem::path("/proc") / "self" / "maps";
  EXPECT(path.parent_path().string() == "/proc/self" && std::filesystem::exists(path));
  try {
    static_cast<void>(std::filesystem::file_size("/proc/self/lost"));
    return __LINE__;
  } catch (const std::filesystem::filesystem_error& error) {
    EXPECT(error.path1() == "/proc/self/lost");
  }
  auto shared = std::make_shared<std::string>(kText);
  std::shared_ptr<std::string> copy = std::atomic_load(&shared);
  EXPECT(copy.use_count() == 2);
  bool ran = false;
  std::jthread([&](std::stop_token stop) { ran = !stop.stop_requested(); }).join();
  EXPECT(ran);
  std::cout << std::flush;
  return 0;
}

}  // namespace

int64_t library() {
  for (auto part : {streams, numbers, others}) {
    if (int64_t line = part()) return line;
  }
  return 0;
}
