// Element types of the ops, and the type in which each of them is summed.
//
// Half types are summed in float. Integers are summed in the unsigned type of
// their width, where overflow wraps as it does in XLA instead of being undefined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/annotations.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace jax_overlap {

// bfloat16 and IEEE half as they lie in memory.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class To, class From>
JO_HD To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "BitCast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

JO_HD float ToFloat(BFloat16 x) { return BitCast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest even; a NaN keeps its sign and stays a (quiet) NaN.
JO_HD BFloat16 ToBFloat16(float x) {
  const uint32_t u = BitCast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<uint16_t>(is_nan ? nan : rounded)};
}

#if defined(__CUDACC__)
JO_HD float ToFloat(Float16 x) { return __half2float(__half(__half_raw{x.bits})); }
JO_HD Float16 ToFloat16(float x) { return Float16{__half_raw(__float2half_rn(x)).x}; }
#else
JO_HD float ToFloat(Float16 x) { return static_cast<float>(BitCast<_Float16>(x)); }
JO_HD Float16 ToFloat16(float x) { return BitCast<Float16>(static_cast<_Float16>(x)); }
#endif

// Numeric<T>: the accumulator of T, and the way in and out of it.
template <class T, class A>
struct WrappingInteger {
  using Acc = A;
  static JO_HD Acc Widen(T x) { return static_cast<Acc>(x); }
  static JO_HD T Narrow(Acc x) { return static_cast<T>(x); }
};

template <class T>
struct Numeric;

template <>
struct Numeric<float> {
  using Acc = float;
  static JO_HD Acc Widen(float x) { return x; }
  static JO_HD float Narrow(Acc x) { return x; }
};
template <>
struct Numeric<double> {
  using Acc = double;
  static JO_HD Acc Widen(double x) { return x; }
  static JO_HD double Narrow(Acc x) { return x; }
};
template <>
struct Numeric<BFloat16> {
  using Acc = float;
  static JO_HD Acc Widen(BFloat16 x) { return ToFloat(x); }
  static JO_HD BFloat16 Narrow(Acc x) { return ToBFloat16(x); }
};
template <>
struct Numeric<Float16> {
  using Acc = float;
  static JO_HD Acc Widen(Float16 x) { return ToFloat(x); }
  static JO_HD Float16 Narrow(Acc x) { return ToFloat16(x); }
};
template <>
struct Numeric<int32_t> : WrappingInteger<int32_t, uint32_t> {};
template <>
struct Numeric<int8_t> : WrappingInteger<int8_t, uint8_t> {};

template <class T>
using Acc = typename Numeric<T>::Acc;

// The cast matters for uint8_t, which C++ would otherwise promote to int.
template <class A>
JO_HD A Add(A a, A b) {
  return static_cast<A>(a + b);
}

}  // namespace jax_overlap
