// From XLA's element types to those of the ops.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jax_overlap {

// Calls f with a value of the element type; false if ops do not take the dtype.
template <class F>
bool WithElementType(xla::ffi::DataType dtype, F f) {
  switch (dtype) {
    case xla::ffi::DataType::F32: f(float{}); return true;
    case xla::ffi::DataType::BF16: f(BFloat16{}); return true;
    case xla::ffi::DataType::F16: f(Float16{}); return true;
    case xla::ffi::DataType::F64: f(double{}); return true;
    case xla::ffi::DataType::S32: f(int32_t{}); return true;
    case xla::ffi::DataType::S8: f(int8_t{}); return true;
    default: return false;
  }
}

// f(a value) for each element type.
template <class F>
void ForElementTypes(F f) {
  using xla::ffi::DataType;
  for (const DataType dtype :
       {DataType::F32, DataType::BF16, DataType::F16, DataType::F64, DataType::S32, DataType::S8}) {
    WithElementType(dtype, f);
  }
}

// The element type that numpy calls so; INVALID if ops do not take it.
inline xla::ffi::DataType ElementTypeOf(std::string_view name) {
  using xla::ffi::DataType;
  constexpr struct {
    std::string_view name;
    DataType dtype;
  } kTypes[] = {{"float32", DataType::F32}, {"bfloat16", DataType::BF16},
                {"float16", DataType::F16}, {"float64", DataType::F64},
                {"int32", DataType::S32},   {"int8", DataType::S8}};
  for (const auto& type : kTypes) {
    if (type.name == name) return type.dtype;
  }
  return DataType::INVALID;
}

}  // namespace jax_overlap
