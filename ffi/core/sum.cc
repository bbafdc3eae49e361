#include "core/sum.h"

// Several versions of each loop in one binary; the loader picks the best for the
// processor at hand. Sanitizers cannot run the resolvers, which are called before
// their run-time exists.
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__) && (defined(__GNUC__) && !defined(__clang__))
#define JO_VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define JO_VECTORISED
#endif

namespace jax_overlap {

#define JO_DEFINE_TILE_KERNELS(T)                                                          \
  JO_VECTORISED void WidenTile(const T* __restrict row, size_t n, Acc<T>* __restrict acc) { \
    for (size_t i = 0; i < n; ++i) acc[i] = Numeric<T>::Widen(row[i]);                     \
  }                                                                                        \
  JO_VECTORISED void AddTile(const T* __restrict row, size_t n, Acc<T>* __restrict acc) {   \
    for (size_t i = 0; i < n; ++i) acc[i] = Add(acc[i], Numeric<T>::Widen(row[i]));        \
  }                                                                                        \
  JO_VECTORISED void NarrowTile(const Acc<T>* __restrict acc, size_t n, T* __restrict out) { \
    for (size_t i = 0; i < n; ++i) out[i] = Numeric<T>::Narrow(acc[i]);                    \
  }

JO_DEFINE_TILE_KERNELS(float)
JO_DEFINE_TILE_KERNELS(double)
JO_DEFINE_TILE_KERNELS(BFloat16)
JO_DEFINE_TILE_KERNELS(Float16)
JO_DEFINE_TILE_KERNELS(int32_t)
JO_DEFINE_TILE_KERNELS(int8_t)

}  // namespace jax_overlap
