// Functions that newer C and C++ headers use, that glibc 2.28 and libstdc++ 3.4.24 (GLIBCXX) do not have, and that the
// compiler's static libstdc++ does not define in a way that suits an older shared library.
//
// These members and those of libstdc++ make an archive, once for each host compiler. A kernel links only the members
// that it uses, with hidden visibility. Each block names the release that introduced the symbol. No member may have
// state that other libraries must share.

#if defined(KB_SINGLE_THREADED)  // glibc 2.32: whether shared_ptr may skip atomic operations. Always no.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#elif defined(KB_IOSTREAM_INIT)  // GLIBCXX_3.4.32: initializes std::cout for <iostream>.
#include <ios>
namespace std {
__attribute__((visibility("hidden"))) void ios_base_library_init() {}
}  // namespace std
static std::ios_base::Init init;

#elif defined(KB_ATEXIT)  // Not in libc.so.6: each library has its own, so that its handlers run when it is unloaded.
extern "C" {
int __cxa_atexit(void (*)(void*), void*, void*) noexcept;
extern __attribute__((visibility("hidden"))) void* __dso_handle;
__attribute__((visibility("hidden"))) int atexit(void (*function)()) noexcept {
  return __cxa_atexit(reinterpret_cast<void (*)(void*)>(function), nullptr, __dso_handle);
}
}

#elif defined(KB_ISOC23)  // GLIBC_2.38: <cstdlib> redirects strtol, sscanf and others to C23 versions.
#include <cstdarg>
#include <cstddef>
#define FORWARD(RESULT, NAME)                                                                               \
  extern "C" RESULT kb_##NAME(const char*, char**, int) __asm__(#NAME);                                     \
  extern "C" __attribute__((visibility("hidden"))) RESULT __isoc23_##NAME(const char* s, char** e, int b) { \
    return kb_##NAME(s, e, b);                                                                              \
  }
FORWARD(long, strtol)
FORWARD(long long, strtoll)
FORWARD(unsigned long, strtoul)
FORWARD(unsigned long long, strtoull)
extern "C" int kb_vsscanf(const char*, const char*, va_list) __asm__("vsscanf");
extern "C" __attribute__((visibility("hidden"))) int __isoc23_sscanf(const char* s, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int read = kb_vsscanf(s, format, arguments);
  va_end(arguments);
  return read;
}

#elif defined(KB_STAT)  // GLIBC_2.33: std::filesystem calls them. They were inline functions that call these.
struct stat;
#ifdef __x86_64__
static constexpr int kStatVersion = 1;
#else
static constexpr int kStatVersion = 0;
#endif
#define FORWARD(NAME, OLD, TYPE)                                                                       \
  extern "C" int OLD(int, TYPE, struct stat*) noexcept;                                                \
  extern "C" __attribute__((visibility("hidden"))) int NAME(TYPE file, struct stat* result) noexcept { \
    return OLD(kStatVersion, file, result);                                                            \
  }
FORWARD(stat, __xstat, const char*)
FORWARD(stat64, __xstat64, const char*)
FORWARD(lstat, __lxstat, const char*)
FORWARD(lstat64, __lxstat64, const char*)
FORWARD(fstat, __fxstat, int)
FORWARD(fstat64, __fxstat64, int)
#endif
