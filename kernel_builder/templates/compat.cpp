// Definitions for what newer C++ headers ask of newer runtime libraries than glibc 2.28 and libstdc++ 3.4.24 have.
//
// Compiled once for a host compiler into an archive that the linker searches before libstdc++: a kernel gets only the
// members that it asks for, hidden. Each block names the release that introduced the symbol. Nothing here may keep
// state that must be shared with another library.

#if defined(KB_SINGLE_THREADED)  // glibc 2.32: shared_ptr asks whether it may skip its atomic operations; say no.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#elif defined(KB_ARRAY_NEW_LENGTH)  // GLIBCXX_3.4.29: what std::vector calls when asked for too much.
extern "C" [[noreturn]] void __cxa_throw_bad_array_new_length();
namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() {
  __cxa_throw_bad_array_new_length();
}
}  // namespace std

#elif defined(KB_STRING_STREAMS)  // GLIBCXX_3.4.26 default constructors, 3.4.29 str() const.
#include <sstream>
template class std::basic_stringbuf<char>;
template class std::basic_istringstream<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

#elif defined(KB_IOSTREAM_INIT)  // GLIBCXX_3.4.32: <iostream> asks the library to set up std::cout.
#include <ios>
namespace std {
__attribute__((visibility("hidden"))) void ios_base_library_init() {}
}  // namespace std
static std::ios_base::Init init;

#elif defined(KB_CALL_TERMINATE)  // CXXABI_1.3.15: an exception leaves a noexcept function.
#include <exception>
extern "C" void* __cxa_begin_catch(void*) noexcept;
extern "C" [[noreturn]] __attribute__((visibility("hidden"))) void __cxa_call_terminate(void* exception) noexcept {
  if (exception) __cxa_begin_catch(exception);
  std::terminate();
}

#elif defined(KB_ATEXIT)  // Not in libc.so.6: every library has its own, so that its handlers run when it is unloaded.
extern "C" {
int __cxa_atexit(void (*)(void*), void*, void*) noexcept;
extern __attribute__((visibility("hidden"))) void* __dso_handle;
__attribute__((visibility("hidden"))) int atexit(void (*function)()) noexcept {
  return __cxa_atexit(reinterpret_cast<void (*)(void*)>(function), nullptr, __dso_handle);
}
}

#elif defined(KB_ISOC23)  // GLIBC_2.38: <cstdlib> redirects strtol and its kin to their C23 versions.
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
