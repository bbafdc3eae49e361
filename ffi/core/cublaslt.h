// cuBLASLt, of the library that JAX brings: loaded when it is first used, so that what needs
// no matmul needs no cuBLAS.
#pragma once

#include <cublasLt.h>

#include <string>

namespace jax_overlap {

// The functions used here, as cublasLt.h has them without the prefix.
struct CublasLt {
#define JO_CUBLASLT(name) decltype(&cublasLt##name) name
  JO_CUBLASLT(Create);
  JO_CUBLASLT(GetVersion);
  JO_CUBLASLT(Matmul);
  JO_CUBLASLT(MatmulAlgoCheck);
  JO_CUBLASLT(MatmulAlgoGetHeuristic);
  JO_CUBLASLT(MatmulDescCreate);
  JO_CUBLASLT(MatmulDescSetAttribute);
  JO_CUBLASLT(MatmulPreferenceCreate);
  JO_CUBLASLT(MatmulPreferenceDestroy);
  JO_CUBLASLT(MatmulPreferenceSetAttribute);
  JO_CUBLASLT(MatrixLayoutCreate);
  JO_CUBLASLT(MatrixLayoutSetAttribute);
#undef JO_CUBLASLT

  // Loads it once, from the path or by its name; null, with an error text, if that fails.
  static const CublasLt* Get(std::string* error);
  // Where it is, if the loader would not find it.
  static void SetPath(std::string path);
};

}  // namespace jax_overlap
