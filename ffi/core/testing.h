// Checks for the C++ tests: they hold in every build type and end the test.
#pragma once

#include <cstdio>
#include <cstdlib>

#define JO_CHECK(condition)                                                        \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (0)

// The same with a printf-style note on the case at hand.
#define JO_CHECK_IN(condition, ...)                                                \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s; ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                           \
      std::fprintf(stderr, "\n");                                                  \
      std::exit(1);                                                                \
    }                                                                              \
  } while (0)
