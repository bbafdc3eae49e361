#include "core/sum.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Several versions of each loop in one binary; the loader picks the best for the
// processor at hand. Sanitizers cannot run the resolvers, which are called before
// their run-time exists.
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__clang__) && __GNUC__ >= 12
#define JO_VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JO_VECTORISED
#endif

namespace jax_overlap {

#define JO_DEFINE_TILE_KERNELS(T)                                                                  \
  JO_VECTORISED void WidenTile(const T* __restrict row, size_t n, Acc<T>* __restrict acc) {        \
    for (size_t i = 0; i < n; ++i) acc[i] = Numeric<T>::Widen(row[i]);                             \
  }                                                                                                \
  JO_VECTORISED void AddTile(const T* __restrict row, size_t n, Acc<T>* __restrict acc) {          \
    for (size_t i = 0; i < n; ++i) acc[i] = Add(acc[i], Numeric<T>::Widen(row[i]));                \
  }                                                                                                \
  JO_VECTORISED void AddTile4(const T* __restrict a, const T* __restrict b, const T* __restrict c, \
                              const T* __restrict d, size_t n, Acc<T>* __restrict acc) {           \
    for (size_t i = 0; i < n; ++i) {                                                               \
      Acc<T> sum = Add(acc[i], Numeric<T>::Widen(a[i]));                                           \
      sum = Add(sum, Numeric<T>::Widen(b[i]));                                                     \
      sum = Add(sum, Numeric<T>::Widen(c[i]));                                                     \
      acc[i] = Add(sum, Numeric<T>::Widen(d[i]));                                                  \
    }                                                                                              \
  }                                                                                                \
  JO_VECTORISED void NarrowTile(const Acc<T>* __restrict acc, size_t n, T* __restrict out) {       \
    for (size_t i = 0; i < n; ++i) out[i] = Numeric<T>::Narrow(acc[i]);                            \
  }

JO_DEFINE_TILE_KERNELS(float)
JO_DEFINE_TILE_KERNELS(double)
JO_DEFINE_TILE_KERNELS(BFloat16)
JO_DEFINE_TILE_KERNELS(Float16)
JO_DEFINE_TILE_KERNELS(int32_t)
JO_DEFINE_TILE_KERNELS(int8_t)

#if defined(__SSE2__)
void StreamCopy(const void* from, size_t bytes, void* to) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  // Such stores want whole, aligned cache lines.
  const size_t head = Min(bytes, (64 - reinterpret_cast<uintptr_t>(target) % 64) % 64);
  const size_t lines = (bytes - head) / 64;
  std::memcpy(target, source, head);
  source += head;
  target += head;
  for (size_t i = 0; i < lines; ++i, source += 64, target += 64) {
    for (int part = 0; part < 64; part += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + part)));
    }
  }
  std::memcpy(target, source, bytes - head - lines * 64);
}
void StreamFence() { _mm_sfence(); }
#else
void StreamCopy(const void* from, size_t bytes, void* to) { std::memcpy(to, from, bytes); }
void StreamFence() {}
#endif

}  // namespace jax_overlap
