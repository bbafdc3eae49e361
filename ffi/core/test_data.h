// What the tests of algorithms, on the host and on a GPU, compute with.
#pragma once

#include <cstddef>

#include "core/dtype.h"

namespace jax_overlap {

// Small integers are exact in every type, so every order of the sum gives them.
template <class T>
T FromInt(int value) {
  return Numeric<T>::Narrow(static_cast<Acc<T>>(value));
}
inline int InputAt(int rank, size_t i, int call) {
  return static_cast<int>((i * 5 + i / 11 + rank * 3 + call * 2) % 7) - 3;
}

}  // namespace jax_overlap
