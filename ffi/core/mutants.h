// Deliberate faults, compiled into test builds only (JAX_OVERLAP_TESTING).
//
// A suite that cannot fail proves nothing: each mutant below breaks one promise
// of the library, and tests/mutation_test.py names the tests that must notice.
// JAX_OVERLAP_MUTANT=<name> switches one on; in every other build JO_MUTANT(x)
// is the constant false and leaves no code behind.
#pragma once

#if defined(JAX_OVERLAP_TESTING) && !defined(__CUDACC__)

#include <cstdlib>
#include <cstring>

namespace jax_overlap {

inline const char* ActiveMutant() {
  static const char* const name = [] {
    const char* value = std::getenv("JAX_OVERLAP_MUTANT");
    return value == nullptr ? "" : value;
  }();
  return name;
}

}  // namespace jax_overlap

#define JO_MUTANT(name)                                                               \
  ([]() -> bool {                                                                     \
    static const bool active = std::strcmp(::jax_overlap::ActiveMutant(), name) == 0; \
    return active;                                                                    \
  }())

#elif defined(__CUDACC__) && defined(JAX_OVERLAP_CUDA_MUTANT)

// A kernel cannot ask the environment: a CUDA test is built anew for each fault, with
// -DJAX_OVERLAP_CUDA_MUTANT='"name"'.
namespace jax_overlap {

__host__ __device__ constexpr bool SameName(const char* a, const char* b) {
  while (*a != 0 && *a == *b) {
    ++a;
    ++b;
  }
  return *a == *b;
}

}  // namespace jax_overlap

#define JO_MUTANT(name) (::jax_overlap::SameName(name, JAX_OVERLAP_CUDA_MUTANT))

#else

#define JO_MUTANT(name) false

#endif
