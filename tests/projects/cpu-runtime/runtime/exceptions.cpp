#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"

#define EXPECT(CONDITION) \
  if (!(CONDITION)) return __LINE__

namespace {

std::atomic<int> made{0}, freed{0};

struct Counted : std::runtime_error {
  explicit Counted(const std::string& text) : std::runtime_error(text) { ++made; }
  Counted(const Counted& other) : std::runtime_error(other) { ++made; }
  ~Counted() override { ++freed; }
};

bool rethrows(std::exception_ptr error, const std::string& text) {
  try {
    std::rethrow_exception(error);
  } catch (const Counted& caught) {
    return caught.what() == text;
  } catch (...) {
    return false;
  }
}

// Throws in one thread, and copies, assigns and rethrows the exception in this one and in others.
bool across_threads() {
  std::exception_ptr first;
  std::thread([&] {
    try {
      throw Counted("from another thread");
    } catch (...) {
      first = std::current_exception();
    }
  }).join();
  std::vector<std::exception_ptr> copies(5, first);
  std::exception_ptr moved = std::move(first);
  copies[0] = moved;
  copies[1] = nullptr;
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, error = copies[2]] {
      for (int times = 0; times < 1000; ++times) right += rethrows(error, "from another thread");
    });
  }
  for (auto& thread : threads) thread.join();
  copies.clear();
  return right == 4000 && freed < made && rethrows(moved, "from another thread");
}

}  // namespace

int64_t exceptions() {
  EXPECT(across_threads());
  EXPECT(made > 0 && made == freed);
  std::exception_ptr error = std::make_exception_ptr(Counted("made"));
  EXPECT(error && error != nullptr && rethrows(error, "made"));
  EXPECT(made == freed + 1);
  error = nullptr;
  EXPECT(made == freed);
  return 0;
}
