// Symbols that newer C++ headers use and that glibc 2.28 and libstdc++ 3.4.24 (GLIBCXX) do not have.
//
// The archive of these members is compiled once for each host compiler, and the linker searches it before libstdc++. A
// kernel links only the members that it uses, with hidden visibility. Each block names the release that introduced the
// symbol. No member may have state that other libraries must share.

#if defined(KB_SINGLE_THREADED)  // glibc 2.32: whether shared_ptr may skip atomic operations. Always no.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#elif defined(KB_ARRAY_NEW_LENGTH)  // GLIBCXX_3.4.29: std::vector throws this for a too large size.
extern "C" [[noreturn]] void __cxa_throw_bad_array_new_length();
namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() {
  __cxa_throw_bad_array_new_length();
}
}  // namespace std

#elif defined(KB_STRING_STREAMS)  // GLIBCXX_3.4.26: default constructors; 3.4.29: str() const.
#include <sstream>
template class std::basic_stringbuf<char>;
template class std::basic_istringstream<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

#elif defined(KB_IOSTREAM_INIT)  // GLIBCXX_3.4.32: initializes std::cout for <iostream>.
#include <ios>
namespace std {
__attribute__((visibility("hidden"))) void ios_base_library_init() {}
}  // namespace std
static std::ios_base::Init init;

#elif defined(KB_CALL_TERMINATE)  // CXXABI_1.3.15: called if an exception leaves a noexcept function.
#include <exception>
extern "C" void* __cxa_begin_catch(void*) noexcept;
extern "C" [[noreturn]] __attribute__((visibility("hidden"))) void __cxa_call_terminate(void* exception) noexcept {
  if (exception) __cxa_begin_catch(exception);
  std::terminate();
}

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
#endif
