// cuBLASLt, of the library that JAX brings: loaded when it is first used, so that what needs
// no matmul needs no cuBLAS.
#pragma once

#include <cublasLt.h>

#include <string>

namespace jax_overlap {

// The functions used here, as cublasLt.h has them without the prefix.
#define JO_CUBLASLT_FUNCTIONS(f)                                                           \
  f(Create) f(GetVersion) f(Matmul) f(MatmulAlgoCheck) f(MatmulAlgoGetHeuristic)           \
      f(MatmulDescCreate) f(MatmulDescSetAttribute) f(MatmulPreferenceCreate)              \
          f(MatmulPreferenceDestroy) f(MatmulPreferenceSetAttribute) f(MatrixLayoutCreate) \
              f(MatrixLayoutSetAttribute)

struct CublasLt {
#define JO_DECLARE(name) decltype(&cublasLt##name) name;
  JO_CUBLASLT_FUNCTIONS(JO_DECLARE)
#undef JO_DECLARE

  // Loads it once, from the path or by its name; null, with an error text, if that fails.
  static const CublasLt* Get(std::string* error);
  // Where it is, if the loader would not find it.
  static void SetPath(std::string path);
};

}  // namespace jax_overlap
